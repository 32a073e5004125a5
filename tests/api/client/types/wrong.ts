// Wrong uses of the contract: each line that ends in `// wrong` must be an error, and no other.
import { createORPCClient } from '@orpc/client'
import { RPCLink } from '@orpc/client/fetch'
import type { TraderClient, TraderFlatClient, TraderStreams } from './trader'

const client: TraderClient = createORPCClient(new RPCLink({ url: 'http://localhost:8081/api/rpc' }))
const flat: TraderFlatClient = createORPCClient(new RPCLink({ url: 'http://localhost:8081/api/rpc' }))

export async function main(): Promise<unknown> {
  await client.variants.getVariantHistory({ window: '90d' }) // wrong
  await client.variants.getVariants({ window: '7d' }) // wrong
  await client.variants.getEverything() // wrong
  await client.simulator.placeOrder() // wrong
  await client.simulator.placeOrder({ symbol: 'BTC', side: 'buy' }) // wrong
  await client.simulator.placeOrder({ symbol: 'BTC', side: 'up', quantity: 1 }) // wrong
  await client.simulator.placeOrder({ symbol: 'BTC', side: 'buy', quantity: '1' }) // wrong
  await client.simulator.placeOrder({ symbol: 'BTC', side: 'buy', quantity: null }) // wrong
  await client.simulator.placeOrder({ symbol: 'BTC', side: 'buy', quantity: 1, size: 2 }) // wrong
  await client.trading.getTrades({ limit: '10' }) // wrong
  await flat['variants.getVariant']() // wrong
  await flat['simulator.cancelOrder']({}) // wrong
  const positions = await client.trading.getPositions()
  const quantity: number = positions[0]!.quantity // wrong
  const price: string = positions[0]!.currentPrice // wrong
  const leverage: string = positions[0]!.leverage // wrong
  const board = await client.analytics.getLeaderboard()
  const percent: number = board.entries[0]!.pnlPercent // wrong
  const { overall } = await client.analytics.getModelStats()
  const ratio: number = overall![0]!.sharpeRatio // wrong
  const first: string = overall[0]!.modelId // wrong
  const message: TraderStreams['workflow'] = { type: 'workflow:finished', timestamp: '' } // wrong
  return [quantity, price, leverage, percent, ratio, first, message]
}
