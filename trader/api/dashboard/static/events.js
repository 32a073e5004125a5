// The live data of a page: one connection to `GET /api/events`, shared by all tabs of an origin.
//
// One tab holds a lock and the connection, and passes on what it hears; when it is closed, the next one goes on after
// the last message. Without Web Locks (plain http from another machine) each tab has a connection of its own.
const STATES = ['positions', 'trades', 'conversations', 'portfolio', 'candles']
const STREAMS = ['positions', 'trades', 'conversations', 'portfolio', 'workflow']
const UNNUMBERED = [...STATES, 'connected', 'reset', 'ping']
const SILENT_MS = 19_000 // a ping comes every 15 s
const AGAIN_MS = 2_000

/** Apply a patch of the service to a state. Return the new state; the old one is used up. */
export function applyPatch(state, patch) {
  if (!isObject(patch)) return patch
  const { '@': marks, '-': gone = [], '+': added = [], '=': tables = [], ...changes } = patch
  if (marks) state.forEach(entry => revalue(entry, marks))
  for (const key of gone) Array.isArray(state) ? state.splice(key, 1) : delete state[key]
  for (const [index, item] of added) state.splice(index, 0, item)
  for (const [paths, rows] of tables) for (const [index, ...values] of rows) changes[index] = patchOf(paths, values)
  for (const [key, change] of Object.entries(changes)) {
    const isPatch = isObject(change) && typeof state[key] === 'object' && state[key] !== null
    state[key] = isPatch ? applyPatch(state[key], change) : change
  }
  return state
}

// Decimals as whole numbers with so many digits behind the point, which no product of an amount and a price exceeds.
const PLACES = 60
const ONE = 10n ** BigInt(PLACES)

function decimal(text) {
  const [whole, part = ''] = `${text}`.split('.')
  return BigInt(whole + part.padEnd(PLACES, '0'))
}

function textOf(value) {
  const text = `${value < 0 ? -value : value}`.padStart(PLACES + 1, '0')
  return (value < 0 ? '-' : '') + `${text.slice(0, -PLACES)}.${text.slice(-PLACES)}`.replace(/\.?0*$/, '')
}

/** Value the positions of a model at new marks, exactly. */
function revalue(entry, marks) {
  let [gained, total] = [0n, 0n]
  for (const position of entry.positions) {
    const mark = marks[position.symbol]
    if (mark && position.currentPrice) {
      const amount = decimal(position.quantity)
      const gain = amount * (decimal(mark) - decimal(position.currentPrice)) / (position.side === 'LONG' ? ONE : -ONE)
      position.currentPrice = mark
      position.notional = textOf(amount * decimal(mark) / ONE)
      position.unrealizedPnl = textOf(decimal(position.unrealizedPnl) + gain)
      gained += gain
    }
    total += decimal(position.unrealizedPnl ?? 0)
  }
  const { totalUnrealizedPnl, availableCash: cash } = entry
  if (totalUnrealizedPnl != null) entry.totalUnrealizedPnl = Number(textOf(total))
  if (gained && cash >= 1 && cash < 1e15) entry.availableCash = Number(textOf(decimal(cash) + gained))
}

/** The patch that has each value at its path. */
function patchOf(paths, values) {
  const patch = {}
  paths.forEach((path, place) => {
    const last = path.slice(0, -1).reduce((part, key) => (part[key] ??= {}), patch)
    last[path.at(-1)] = values[place]
  })
  return patch
}

const isObject = value => typeof value === 'object' && value !== null && !Array.isArray(value)

/**
 * Listen to the named events. Return a function that ends it.
 *
 * `on` has message(name, data), heard() for every sign of life, and state('open' | 'lost' | 'refused'). A state stream always has
 * its whole state as `data`; a workflow event comes once, and after `reset` some were lost.
 */
export function openStream(names, on, { base = '', streams = STREAMS } = {}) {
  const key = `trader ${base}/api/events ${streams} ${names}`
  const states = new Map()
  let ending = null
  let lastId = ''
  let source = null
  let channel = null
  let watch = null
  let again = null

  function alive() {
    clearTimeout(watch)
    watch = setTimeout(lost, SILENT_MS, 'lost')
    on.heard?.()
  }

  function deliver({ name, data, id }) {
    const [sequence, number] = id.split('-')
    const [ours, last] = lastId.split('-')
    const isOld = sequence === ours && Number(number) <= Number(last)
    if (isOld && !UNNUMBERED.includes(name)) return // another tab has passed it on already
    if (id && !isOld) lastId = id
    if (STATES.includes(name)) states.set(name, data)
    if (names.includes(name)) on.message(name, data)
    alive()
  }

  function pass(message) {
    channel?.postMessage({ message })
    deliver(message)
  }

  function show(state) {
    channel?.postMessage({ state })
    on.state?.(state)
  }

  function lost(state = 'lost') {
    if (source === null) return on.state?.('lost')
    source.close()
    clearTimeout(watch)
    clearTimeout(again)
    again = setTimeout(connect, AGAIN_MS)
    show(state)
  }

  function connect() {
    const query = new URLSearchParams({ streams, patches: true, ...(lastId && { lastEventId: lastId }) })
    source = new EventSource(`${base}/api/events?${query}`)
    source.onopen = () => { show('open'); alive() }
    source.onerror = () => (source.readyState === EventSource.CLOSED ? lost('refused') : show('lost')) // no browser retries a 503
    for (const name of new Set([...names, ...STATES, 'connected', 'ping'])) {
      source.addEventListener(name, event => pass({ name, data: event.data && JSON.parse(event.data), id: event.lastEventId }))
    }
    for (const name of STATES) {
      source.addEventListener(`${name}:patch`, event => {
        pass({ name, data: applyPatch(states.get(name), JSON.parse(event.data)), id: event.lastEventId })
      })
    }
  }

  function listen({ data: { hello, welcome, message, state } }) {
    if (hello && source !== null) {
      const known = [...states].map(([name, data]) => ({ name, data, id: lastId }))
      channel.postMessage({ welcome: known, state: source.readyState === EventSource.OPEN ? 'open' : 'lost' })
    }
    if (welcome && states.size === 0) welcome.forEach(deliver)
    if (message) deliver(message)
    if (state) on.state?.(state)
  }

  function begin() {
    ending = new AbortController()
    if (!(globalThis.navigator?.locks && globalThis.BroadcastChannel)) return connect()
    const { signal } = ending
    channel = new BroadcastChannel(key)
    channel.onmessage = listen
    channel.postMessage({ hello: true })
    const held = () => { connect(); return new Promise(release => signal.addEventListener('abort', release)) }
    navigator.locks.request(key, { signal }, held).catch(() => {})
  }

  function end() {
    ending.abort()
    for (const timer of [watch, again]) clearTimeout(timer)
    source?.close()
    channel?.close()
    source = channel = null
  }

  // A browser may keep a page that one has left, with its lock and its connection, to show it again at once.
  const onShow = event => event.persisted && begin()
  globalThis.addEventListener?.('pagehide', end)
  globalThis.addEventListener?.('pageshow', onShow)
  begin()

  return () => {
    globalThis.removeEventListener?.('pagehide', end)
    globalThis.removeEventListener?.('pageshow', onShow)
    end()
  }
}
