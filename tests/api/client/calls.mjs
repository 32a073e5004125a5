// Makes calls with the real oRPC client and prints what the caller gets.
//
// stdin: {"url", "groups": [{"link": "single" | "buffered" | "streaming", "flat": bool, "headers": {}, "calls": [{"path": [...], "input"?}]}]}
// stdout: for each group a list of {"output"} or {"error": {...}}, in the order of the calls
import { createORPCClient, ORPCError } from '@orpc/client'
import { RPCLink } from '@orpc/client/fetch'
import { BatchLinkPlugin } from '@orpc/client/plugins'

function makeClient(url, { link, headers }, seen) {
  const plugins = link === 'single' ? [] : [new BatchLinkPlugin({ mode: link, groups: [{ condition: () => true, context: {} }] })]
  const observedFetch = (request, init) => {
    seen.push(new URL(request.url).pathname)
    return fetch(request, init)
  }
  return createORPCClient(new RPCLink({ url, headers: () => headers ?? {}, plugins, fetch: observedFetch }))
}

function call(client, flat, { path, input }) {
  const names = flat ? [path.join('.')] : path
  return names.reduce((node, name) => node[name], client)(input)
}

function shown(settled) {
  if (settled.status === 'fulfilled') return { output: settled.value === undefined ? '(undefined)' : settled.value }
  const error = settled.reason
  if (!(error instanceof ORPCError)) return { error: { kind: error.name, message: error.message } }
  const { defined, code, status, message, data } = error
  return { error: { kind: 'ORPCError', defined, code, status, message, data } }
}

async function readStdin() {
  let text = ''
  for await (const chunk of process.stdin) text += chunk
  return JSON.parse(text)
}

const { url, groups } = await readStdin()
const results = []
for (const group of groups) {
  const seen = []
  const client = makeClient(url, group, seen)
  const settled = await Promise.allSettled(group.calls.map(one => call(client, group.flat ?? false, one)))
  results.push({ answers: settled.map(shown), requests: seen })
}
console.log(JSON.stringify(results))
