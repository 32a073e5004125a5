// A frontend's use of the contract. It must compile unchanged.
import { createORPCClient, ORPCError, safe } from '@orpc/client'
import type { Client, InferClientInputs, InferClientOutputs, NestedClient } from '@orpc/client'
import { RPCLink } from '@orpc/client/fetch'
import { BatchLinkPlugin } from '@orpc/client/plugins'
import type { ContractProcedure, ContractRouterClient, Schema } from '@orpc/contract'
import { createTanstackQueryUtils } from '@orpc/tanstack-query'
import { QueryClient } from '@tanstack/query-core'
import type {
  ErrorCode, HealthReport, InputOf, OutputOf, Position, ProcedureName, TraderClient, TraderError, TraderFlatClient, TraderStreams,
} from './trader'

type Same<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false
type Assert<T extends true> = T

const link = new RPCLink({
  url: 'http://localhost:8081/api/rpc',
  plugins: [new BatchLinkPlugin({ groups: [{ condition: () => true, context: {} }] })],
})
const client: TraderClient = createORPCClient(link)
const flat: TraderFlatClient = createORPCClient(link)
const anyClient: NestedClient<Record<never, never>> = client

// The same types as those of a client inferred from a contract router.
type AsContract<TRouter> = {
  [K in keyof TRouter]: TRouter[K] extends Client<infer _, infer TInput, infer TOutput, infer __>
    ? ContractProcedure<Schema<TInput, TInput>, Schema<TOutput, TOutput>, Record<never, never>, Record<never, never>>
    : AsContract<TRouter[K]>
}
export const inferred: ContractRouterClient<AsContract<TraderClient>> = client
export const back: TraderClient = inferred

export async function main(): Promise<void> {
  const { variants } = await client.variants.getVariants()
  const colours: string[] = variants.map(variant => variant.color)
  const temperature: number = variants[0]!.temperature
  const history = await client.variants.getVariantHistory({ window: '24h' })
  const value: number = history.aggregate[0]!.value
  await flat['variants.getVariantHistory']()
  await flat['variants.getVariantHistory']({})
  await client.variants.getVariants({})
  await client.variants.getVariants(undefined, { signal: new AbortController().signal })

  const positions: Position[] = await client.trading.getPositions({ modelId: undefined, variant: 'all' })
  for (const position of positions) {
    const quantity: string = position.quantity
    const price: string | null = position.currentPrice
    const leverage: string | undefined = position.leverage
    const stop: number | null = position.exitPlan.stop
    console.log(quantity, price, leverage, stop, colours, temperature, value)
  }

  const { order } = await client.simulator.placeOrder({
    symbol: 'BTC', side: 'long', quantity: 0.01, type: 'limit', limitPrice: 60_000, exitPlan: { stop: null, target: 90_000 },
  })
  if (order.status === 'rejected') console.log(order.reason ?? 'no reason', order.averagePrice?.toFixed(2))

  const stats = await client.analytics.getModelStats({ mode: 'advanced' })
  for (const one of stats.advanced ?? []) {
    const sharpe: number | undefined = typeof one.sharpeRatio === 'number' ? one.sharpeRatio : undefined
    console.log(sharpe)
  }

  const [error, data] = await safe(client.models.getModels())
  if (error instanceof ORPCError) {
    const told = error as TraderError
    if (told.code === 'VALIDATION_ERROR') console.log(told.data.issues[0]?.path, told.data.issues[0]?.message)
    const code: ErrorCode = told.code
    console.log(code)
  } else if (!error) console.log(data.models[0]?.name, data.warning)

  const orpc = createTanstackQueryUtils(client)
  const queries = new QueryClient()
  const page = await queries.fetchQuery(orpc.trading.getTrades.queryOptions({ input: { limit: 10 }, staleTime: 15_000 }))
  const net: number | undefined = page.trades[0]?.netPnl
  await queries.invalidateQueries({ queryKey: orpc.trading.key() })
  const mutation = orpc.simulator.resetAccount.mutationOptions()
  console.log(net, mutation.mutationKey)

  const events = new EventSource('http://localhost:8081/api/events/positions')
  events.onmessage = ({ data }) => {
    const entries = JSON.parse(data as string) as TraderStreams['positions']
    queries.setQueryData(orpc.trading.getPositions.queryKey(), entries.flatMap(entry => entry.positions))
  }
  const workflow = (message: TraderStreams['workflow']): string => {
    switch (message.type) {
      case 'workflow:failed': return message.failureReason
      case 'batch:complete': return message.modelIds.join()
      case 'connected': return message.timestamp
      default: return message.type
    }
  }
  console.log(workflow, anyClient)
}

export type Checks = [
  Assert<Same<InferClientInputs<TraderClient>['simulator']['cancelOrder'], InputOf<'simulator.cancelOrder'>>>,
  Assert<Same<InferClientOutputs<TraderClient>['models']['getModels'], OutputOf<'models.getModels'>>>,
  Assert<Same<InputOf<'variants.getVariantHistory'>, { window?: '24h' | '30d' | '7d' | null | undefined } | undefined>>,
  Assert<Same<OutputOf<'trading.getPositions'>, Position[]>>,
  Assert<Same<Parameters<TraderClient['simulator']['placeOrder']>[0], InputOf<'simulator.placeOrder'>>>,
  Assert<Same<'trading.getTrades' extends ProcedureName ? true : false, true>>,
  Assert<Same<HealthReport['status'], 'healthy' | 'unhealthy'>>,
]
