// A frontend on another origin than the service: what its browser lets it do. Told to the page's own server.
import { createORPCClient } from '@orpc/client'
import { RPCLink } from '@orpc/client/fetch'
import { BatchLinkPlugin } from '@orpc/client/plugins'

const service = new URLSearchParams(location.search).get('service')
const order = JSON.stringify({ accountId: location.hostname, symbol: 'BTC', side: 'buy', quantity: 0.01 })
const post = (name, init) => fetch(`${service}/api/rpc/${name}`, { method: 'POST', body: '{}', ...init })
const json = { 'content-type': 'application/json' }

const nested = createORPCClient(new RPCLink({ url: `${service}/api/rpc` }))
const batched = createORPCClient(new RPCLink({
  url: `${service}/api/rpc`,
  headers: { authorization: 'Bearer none' },
  plugins: [new BatchLinkPlugin({ groups: [{ condition: () => true, context: {} }] })],
}))

function firstMessage(stream, options) {
  return new Promise((resolve, reject) => {
    const events = new EventSource(`${service}/api/events/${stream}`, options)
    const settle = end => value => { events.close(); end(value) }
    events.onmessage = ({ data }) => settle(resolve)(JSON.parse(data).length)
    events.addEventListener('connected', ({ data }) => settle(resolve)(JSON.parse(data).type))
    events.onerror = () => settle(reject)(new Error(`the stream was refused (${events.readyState})`))
  })
}

const steps = {
  plain: async () => (await (await post('variants.getVariants', { headers: json })).json()).variants.length,
  requestId: async () => typeof (await post('variants.getVariants', { headers: json })).headers.get('x-request-id'),
  refusal: async () => (await (await post('variants.getVariantHistory', { headers: json, body: '{"x":1}' })).json()).code,
  unknown: async () => (await post('nothing.here', { headers: json })).status,
  orpc: async () => (await nested.variants.getVariants()).variants.length,
  orpcError: async () => nested.simulator.cancelOrder({ orderId: 'x' }).catch(error => error.code ?? Promise.reject(error)),
  batch: async () => (await Promise.all([batched.trading.getPositions(), batched.models.getModels()])).length,
  positions: () => firstMessage('positions'),
  positionsWithCredentials: () => firstMessage('positions', { withCredentials: true }),
  workflow: () => firstMessage('workflow'),
  health: async () => (await (await fetch(`${service}/health`)).json()).status,
  document: async () => (await (await fetch(`${service}/api/openapi.json`)).json()).openapi,
  order: async () => (await (await post('simulator.placeOrder', { headers: json, body: order })).json()).order.status,
  simpleOrder: async () => (await post('simulator.placeOrder', { headers: { 'content-type': 'text/plain' }, body: order })).status,
  blindOrder: async () => (await post('simulator.placeOrder', { mode: 'no-cors', body: order })).type,
}

const seen = {}
for (const [name, step] of Object.entries(steps)) {
  seen[name] = await Promise.race([
    step().catch(error => `${error.name}`),
    new Promise(resolve => setTimeout(resolve, 10_000, 'no answer')),
  ])
}
await fetch('/seen', { method: 'POST', body: JSON.stringify(seen) })
