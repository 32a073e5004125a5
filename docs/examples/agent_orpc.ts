// An agent with the oRPC client and the types of the service:
//   npm install @orpc/client@1.16.1
//   curl -s http://localhost:8081/api/contract.d.ts -o trader.d.ts
//   TRADER_KEY=tra_… npx tsx agent_orpc.ts
import { createORPCClient } from '@orpc/client'
import { RPCLink } from '@orpc/client/fetch'
import type { TraderClient } from './trader'

declare const process: { env: Record<string, string | undefined> }

const url = process.env.TRADER_URL ?? 'http://localhost:8081'
const headers = { authorization: `Bearer ${process.env.TRADER_KEY}` }
const client: TraderClient = createORPCClient(new RPCLink({ url: `${url}/api/rpc`, headers }))

async function main() {
  const view = await client.agent.getView({})
  const order = await client.agent.placeOrder({
    viewId: view.viewId, clientOrderId: view.viewId, symbol: 'BTC', side: 'buy', quantity: 0.001, exitPlan: { stop: 1 },
  })
  console.log(order.result, order.reason ?? order.filledQuantity)
  await client.agent.hold({ viewId: view.viewId, reason: `bought: ${order.result}` })
  console.log('held', view.viewId)
}

void main()
