// Modules of the page by themselves: what they make of new records, of silence and of a refusal. Prints it as JSON.
import { mock } from 'node:test'
import { readFileSync } from 'node:fs'

const PING_MS = 15_000
const { folder, lists, positions, trades } = JSON.parse(readFileSync(0, 'utf8'))
Object.assign(globalThis, {
  matchMedia: () => ({ matches: false, addEventListener() {} }),
  addEventListener() {},
  document: { documentElement: { dataset: {} }, body: { dataset: {} } },
})
const { openStream } = await import(`${folder}/events.js`)
const { number, signedPercent } = await import(`${folder}/format.js`)
const { sentenceOf, summaryOf } = await import(`${folder}/evidence.js`)
const { leadsOf } = await import(`${folder}/feed.js`)
const { compare } = await import(`${folder}/order.js`)
const { csvOf } = await import(`${folder}/csv.js`)
const { connect } = await import(`${folder}/store.js`)
const { statusOf } = await import(`${folder}/system.js`)
const { scaleOf } = await import(`${folder}/components.js`)
const { entryNotionalOf, gainPercentAt, marginOf, multipleOfRisk, percentOfNotional, stopDistance } = await import(
  `${folder}/trade_figures.js`
)

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

/** The list that the page has after the first list and the new records. */
const mergedOf = ([first, added]) => {
  let last = null
  const stop = openStream(['trades'], { message(_, data) { last = data } })
  const heard = (name, data) => sources.at(-1).listeners.get(name)({ data: JSON.stringify(data), lastEventId: '' })
  heard('trades', first)
  heard('trades:new', added)
  stop()
  return last.map(one => one.id)
}

const streamsOf = models => {
  document.body.dataset.models = models
  connect()
  return new URL(sources.at(-1).address, 'http://localhost').searchParams.get('streams').split(',')
}

const textOf = (connection, health, system = {}, warning = undefined) => {
  const { kind, word, troubles } = statusOf({ connection, dataAt: null }, health, system, warning)
  return [`${kind} ${word}`, ...troubles.map(one => `${one.kind}: ${one.text}`)]
}
const healthy = { data: { status: 'healthy' } }
const stale = { data: { market: { source: 'venue', stale: true, lastUpdateAt: null } } }
console.log(JSON.stringify({
  sentences: [true, false].map(isCorrected => sentenceOf({ verdict: 'better', reason: null, pValue: 0.012 }, isCorrected)),
  summaries: [1, 2].map(among => summaryOf({ best: 'a', season: null, resolution: { now: null, atEnd: null }, entrants: [
    { modelId: 'a', modelIds: ['a'], modelName: 'A', endedAt: null, rank: { first: 1, last: 1, among }, amongBest: false, differences: [] },
  ] }, { byId: new Map() })),
  merged: lists.map(mergedOf),
  states,
  connections,
  few: streamsOf('4'),
  many: streamsOf('100'),
  lost: textOf('lost', {}),
  full: textOf('refused', healthy),
  stale: textOf('open', healthy, stale),
  worst: textOf('open', { data: { status: 'unhealthy', schedulers: {}, reasons: ['no price', 'It is locked.'], halts: [] } }, stale),
  warned: textOf('open', healthy, {}, 'No model is active'),
  fine: textOf('open', healthy),
  starting: textOf('connecting', {}),
  scales: [scaleOf([2, -4], [-6, 5, -3, 900]), scaleOf([0.1], [-5, 6]), scaleOf([null])],
  names: ['Model 10', 'model 2', null, 'Ada'].sort(compare),
  leads: leadsOf(Object.assign([
    { id: 'a', name: 'A', returns: [0, 5, 10, 0, 20, 21] },
    { id: 'b', name: 'B', returns: [null, null, 0, 2, 40, 42] },
    { id: 'c', name: 'Hold', isReference: true, returns: [0, 80, 80, 80, 80, 80] }], { times: [1, 2, 3, 4, 5, 6] }),
  ).map(({ at, of, text }) => [at, of.modelId, text]),
  csv: csvOf(
    [{ key: 'a', title: 'Name', by: row => row.name }, { key: 'b', title: 'Picture', cell: () => 'bar' },
      { key: 'c', title: 'Interval', by: row => row.low, csv: row => ({ Low: row.low, High: row.high }) }],
    [{ name: 'GPT-5 "mini"', low: -1.25, high: 0.5 }, { name: '=1+1', low: '-3.5', high: '-3.5+cmd' }, { name: '＝1', low: '+1e-7', high: -Infinity }]),
  figures: [-1.5, -0.001, 0.001, 2, null].flatMap(value => [number(value), signedPercent(value)]),
  positions: positions.map(one => [
    entryNotionalOf(one), marginOf(one), percentOfNotional(one, one.unrealizedPnl), stopDistance(one),
  ]),
  trades: trades.map(one => [
    entryNotionalOf(one), percentOfNotional(one, one.netPnl), gainPercentAt(one, one.exitPrice), multipleOfRisk(one),
  ]),
  down: textOf('refused', { error: 'it does not answer' }),
}))
