// What a tab hears on the one stream, kept for the test to read.
import { openStream } from '/module/events.js'

const names = ['positions', 'workflow:step', 'reset']
const tab = globalThis.tab = { steps: [], resets: 0, positions: null, states: [], heard: 0 }
openStream(names, {
  message(name, data) {
    if (name === 'workflow:step') tab.steps.push(data.step)
    if (name === 'reset') tab.resets += 1
    if (name === 'positions') tab.positions = structuredClone(data)
  },
  heard() { tab.heard += 1 },
  state(state) { tab.states.push(state) },
}, { streams: ['positions', 'workflow'] })

/** How a browser itself reads the stream: an EventSource, and what its listeners saw. */
globalThis.plain = address => {
  const seen = { steps: [], resets: 0, opened: false }
  const source = new EventSource(address)
  source.addEventListener('workflow:step', event => seen.steps.push(JSON.parse(event.data).step))
  source.addEventListener('reset', () => { seen.resets += 1 })
  source.onopen = () => { seen.opened = true }
  return globalThis.seen = seen
}
