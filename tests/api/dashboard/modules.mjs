// Modules of the page by themselves: what they make of patches, of silence and of a refusal. Prints it as JSON.
import { mock } from 'node:test'
import { readFileSync } from 'node:fs'

const PING_MS = 15_000
const { folder, patches } = JSON.parse(readFileSync(0, 'utf8'))
Object.assign(globalThis, {
  matchMedia: () => ({ matches: false, addEventListener() {} }),
  addEventListener() {},
  document: { documentElement: { dataset: {} }, body: { dataset: {} } },
})
const { listed, mergePatch, openStream } = await import(`${folder}/events.js`)
const { number, signedPercent } = await import(`${folder}/format.js`)
const { connect } = await import(`${folder}/store.js`)
const { troublesOf } = await import(`${folder}/system.js`)

const sources = []
globalThis.EventSource = class {
  static CLOSED = 2
  listeners = new Map()
  constructor(address) { sources.push(this); this.address = address }
  addEventListener(name, listener) { this.listeners.set(name, listener) }
  ping() { this.listeners.get('ping')({ lastEventId: '' }) }
  close() {}
}
Object.defineProperty(globalThis, 'navigator', { value: {}, configurable: true }) // without locks each tab has a connection of its own

mock.timers.enable({ apis: ['setTimeout', 'Date'] })
const states = []
const end = openStream(['positions'], { message() {}, state(state) { states.push([Date.now(), state]) } })
sources[0].onopen()
mock.timers.tick(PING_MS)
sources[0].ping()
for (let second = 0; second < 25; second += 1) mock.timers.tick(1_000)
sources[1].readyState = EventSource.CLOSED
sources[1].onerror()
mock.timers.tick(1)
end()
mock.timers.reset()
const connections = sources.length

const streamsOf = models => {
  document.body.dataset.models = models
  connect()
  return new URL(sources.at(-1).address, 'http://localhost').searchParams.get('streams').split(',')
}

const textOf = (connection, health) => troublesOf({ connection, dataAt: null }, health, {}, undefined).map(({ kind, text }) => `${kind}: ${text}`)
console.log(JSON.stringify({
  applied: patches.map(([state, patch]) => listed(mergePatch(state, patch))),
  states,
  connections,
  few: streamsOf('4'),
  many: streamsOf('100'),
  lost: textOf('lost', {}),
  full: textOf('refused', { data: { status: 'healthy' } }),
  figures: [-1.5, -0.001, 0.001, 2, null].flatMap(value => [number(value), signedPercent(value)]),
  down: textOf('refused', { error: 'it does not answer' }),
}))
