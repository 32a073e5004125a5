// What a dashboard does: the oRPC client with batches behind TanStack Query.
//
// argv: the RPC address; stdout: what was seen
import { createORPCClient } from '@orpc/client'
import { RPCLink } from '@orpc/client/fetch'
import { BatchLinkPlugin } from '@orpc/client/plugins'
import { createTanstackQueryUtils } from '@orpc/tanstack-query'
import { MutationObserver, QueryClient, QueryObserver } from '@tanstack/query-core'

const requests = []
const link = new RPCLink({
  url: process.argv[2],
  plugins: [new BatchLinkPlugin({ mode: 'buffered', groups: [{ condition: () => true, context: {} }] })],
  fetch: (request, init) => {
    requests.push(new URL(request.url).pathname)
    return fetch(request, init)
  },
})
const orpc = createTanstackQueryUtils(createORPCClient(link))
const queries = new QueryClient({ defaultOptions: { queries: { retry: false } } })

const polled = [
  orpc.variants.getVariants.queryOptions({ staleTime: Infinity }),
  orpc.trading.getPositions.queryOptions({ input: {} }),
  orpc.analytics.getLeaderboard.queryOptions({ input: { window: '24h' } }),
]
const [variants, before, leaderboard] = await Promise.all(polled.map(options => queries.fetchQuery(options)))
const together = requests.splice(0)

const again = await queries.fetchQuery(polled[0])
const cached = requests.splice(0)

const watched = new QueryObserver(queries, orpc.trading.getPositions.queryOptions({ input: {} }))
const seen = new Promise(resolve => watched.subscribe(({ data }) => {
  if (data?.some(({ modelId }) => modelId === 'default')) resolve(data)
}))
const place = new MutationObserver(queries, orpc.simulator.placeOrder.mutationOptions({
  onSuccess: () => queries.invalidateQueries({ queryKey: orpc.trading.key() }),
}))
const placed = await place.mutate({ symbol: 'BTC', side: 'buy', quantity: 0.01 })
const after = await seen

const failed = await queries
  .fetchQuery(orpc.variants.getVariantHistory.queryOptions({ input: { window: '90d' } }))
  .catch(({ code, status, data }) => ({ code, status, issues: data.issues }))

const keys = queries.getQueryCache().getAll().map(query => query.queryKey)
console.log(JSON.stringify({
  variants: variants.variants.map(({ id }) => id), again: again === variants, before, leaderboard: leaderboard.window,
  together, cached, placed: placed.order.status, after, failed, keys,
}))
queries.clear()
process.exit(0)
