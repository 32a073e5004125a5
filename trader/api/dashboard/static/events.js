// @ts-check
// The live data of a page: one connection to `GET /api/events`, shared by all tabs of an origin.
//
// One tab holds a lock and the connection, and forwards its messages; when it is closed, the next one continues after
// the last message. Without Web Locks (plain http from another machine) each tab has its own connection.
const STATES = ['positions', 'trades', 'conversations', 'portfolio', 'candles']
const STREAMS = ['positions', 'trades', 'conversations', 'portfolio', 'workflow']
const UNNUMBERED = [...STATES, 'connected', 'reset', 'ping']
const SILENT_MS = 19_000 // a ping comes every 15 s
const AGAIN_MS = 2_000
const ENTRIES_MAX = 100

/** The newer and the older entries of a list, without duplicates, newest first. */
export function merged(newer, older) {
  const ids = new Set(newer.map(each => each.id))
  return [...newer, ...older.filter(each => !ids.has(each.id))].sort((one, other) =>
    one.timestamp < other.timestamp ? 1 : one.timestamp > other.timestamp ? -1 : 0,
  )
}

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
    if (isOld && !UNNUMBERED.includes(name)) return // another tab has already forwarded it
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
    const query = new URLSearchParams({
      streams: streams.join(),
      ...(lastId && { lastEventId: lastId }),
    })
    source = new EventSource(`${base}/api/events?${query}`)
    source.onopen = () => {
      show('open')
      alive()
    }
    source.onerror = () => (source.readyState === EventSource.CLOSED ? lost('refused') : show('lost')) // no browser retries a 503
    for (const name of new Set([...names.filter(name => !STATES.includes(name)), 'connected', 'ping'])) {
      source.addEventListener(name, event =>
        pass({ name, data: event.data && JSON.parse(event.data), id: event.lastEventId }),
      )
    }
    for (const name of STATES) {
      const hear = whole => event => pass({ name, data: whole(JSON.parse(event.data)), id: event.lastEventId })
      source.addEventListener(
        name,
        hear(state => state),
      )
      source.addEventListener(
        `${name}:new`,
        hear(entries => merged(entries, states.get(name) ?? []).slice(0, ENTRIES_MAX)),
      )
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
    const held = () => {
      connect()
      return new Promise(release => signal.addEventListener('abort', release))
    }
    navigator.locks.request(key, { signal }, held).catch(() => {})
  }

  function end() {
    ending.abort()
    for (const timer of [watch, again]) clearTimeout(timer)
    source?.close()
    channel?.close()
    source = channel = null
  }

  // A browser may keep a page after the user leaves it, with its lock and connection, to show it again instantly.
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
