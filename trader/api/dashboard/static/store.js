// @ts-check
// Live state: the last state of each stream of the service, and its time.
import { hasMany, invalidate, SHOWN_MS } from './answers.js'
import { openStream } from './events.js'
import { useEffect, useState } from './lib.js'

const QUIET_MS = 200
const SETTLE_MS = 2_000

/** `running` has the runs in progress by model; `heardAt` is the time of the service's last message, `dataAt` the
service's own time. */
export const live = {
  positions: null,
  trades: null,
  conversations: null,
  portfolio: null,
  candles: [],
  running: new Map(),
  connection: 'connecting',
  heardAt: null,
  dataAt: null,
}

const readers = new Set()
let timer = null
let renderedAt = 0

/** Show a change: immediately if the page has been quiet, and at most five times a second. */
function changed() {
  if (timer !== null) return
  timer = setTimeout(
    () => {
      timer = null
      renderedAt = performance.now()
      for (const reader of readers) reader({})
    },
    Math.max(0, QUIET_MS - (performance.now() - renderedAt)),
  )
}

/** Render the component whenever the live state changes. */
export function useLive() {
  const [, render] = useState({})
  useEffect(() => {
    readers.add(render)
    return () => readers.delete(render)
  }, [])
  return live
}

let settling = null
let readAgainAt = -Infinity
/** Completed trades change boards and statistics, which are refreshed soon, but not too often. */
function readAgainSoon() {
  settling ??= setTimeout(
    () => {
      settling = null
      readAgainAt = performance.now()
      invalidate('analytics.', 'variants.getVariantStats', 'models.getModels')
    },
    Math.max(SETTLE_MS, readAgainAt + SHOWN_MS - performance.now()),
  )
}

const heard = {
  positions(data) {
    live.positions = data
  },
  trades(data) {
    if (live.trades && !hasMany()) readAgainSoon() // the first page is read anyway; among many models, some trade always closes
    live.trades = data
  },
  conversations(data) {
    live.conversations = data
    for (const turn of data) if (live.running.get(turn.modelId)?.id === turn.id) live.running.delete(turn.modelId)
  },
  portfolio(data) {
    live.portfolio = data
    live.dataAt = data.lastUpdatedAt
  },
  'workflow:started'(data) {
    live.running.set(data.modelId, { id: data.invocationId, name: data.modelName, since: data.timestamp, steps: [] })
  },
  'workflow:step'(data) {
    stepsOf(data)?.push(data)
  },
  'workflow:call'(data) {
    stepsOf(data)?.push(data)
  },
  'workflow:complete'(data) {
    live.running.delete(data.modelId)
  },
  'workflow:failed'(data) {
    live.running.delete(data.modelId)
  },
  'halts:changed'() {
    invalidate('/health')
  },
  reset() {
    live.running.clear()
    invalidate('')
  },
}

function stepsOf(data) {
  const run = live.running.get(data.modelId)
  return run?.id === data.invocationId ? run.steps : undefined
}

let hearsRuns = true

/**
 * Hear of runs as they go on, and return whether that is so. A hundred models send more of that than of all else: of many
 * it is heard only while `isLooking`.
 */
export function useRuns(isLooking) {
  useEffect(() => {
    if (!isLooking || hearsRuns) return undefined
    const stop = openStream(
      Object.keys(heard),
      {
        message(name, data) {
          heard[name](data)
          changed()
        },
      },
      { streams: ['workflow'] },
    )
    return () => {
      stop()
      live.running.clear()
    }
  }, [isLooking])
  return isLooking || hearsRuns
}

const candles = { readers: 0, end: null }

/** The running candle of a market, from a stream that is open while a part of the page shows one. */
export function useRunning(symbol) {
  const state = useLive()
  useEffect(() => {
    candles.readers += 1
    candles.end ??= openStream(
      ['candles'],
      {
        message(_, data) {
          live.candles = data
          changed()
        },
      },
      { streams: ['candles'] },
    )
    return () => {
      candles.readers -= 1
      if (candles.readers) return
      candles.end()
      candles.end = null
    }
  }, [])
  return state.candles.find(one => one.symbol === symbol)
}

const STREAMS = ['positions', 'trades', 'conversations', 'portfolio']
let end = null

/** Listen to the streams. A page kept for the browser's back button must not keep a connection. */
export function connect() {
  addEventListener('pagehide', () => end?.())
  addEventListener('pageshow', event => {
    if (event.persisted) listen()
  })
  listen()
}

function listen() {
  hearsRuns = !hasMany()
  end = openStream(
    Object.keys(heard),
    {
      message(name, data) {
        heard[name](data)
      },
      heard() {
        live.heardAt = Date.now()
        changed()
      },
      state(state) {
        if (state === 'open' && (live.connection === 'lost' || live.connection === 'refused')) {
          live.running.clear()
          invalidate('')
        }
        if (state === 'refused') invalidate('/health')
        live.connection = state
        changed()
      },
    },
    { streams: hearsRuns ? [...STREAMS, 'workflow'] : STREAMS },
  )
}
