// @ts-check
// Answers of procedures, cached by input, and refreshed while a part of the page shows them.
import { useEffect, useState } from './lib.js'

const kept = new Map()
export const SHOWN_MS = 60_000
const MANY_SHOWN_MS = 300_000
const MANY = 20
const FRESH_MS = 2_000

/** The token of the tab for the operator's procedures; a text sets it, and an empty one forgets it. */
export function operatorToken(next = undefined) {
  try {
    if (next !== undefined) sessionStorage.setItem('operator', next)
    return sessionStorage.getItem('operator') ?? ''
  } catch {
    return ''
  }
}

/**
 * @template {import('./contract').ProcedureName} T
 * @param {T} procedure
 * @param {import('./contract').InputOf<T>} [input]
 * @returns {Promise<import('./contract').OutputOf<T>>}
 */
export async function call(procedure, input) {
  const token = procedure.startsWith('operations.') && operatorToken()
  const response = await fetch(`/api/rpc/${procedure}`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', ...(token && { authorization: `Bearer ${token}` }) },
    body: JSON.stringify(input ?? {}),
  })
  return bodyOf(response)
}

export async function get(path) {
  const response = await fetch(path)
  // The health endpoints report with 503 as well.
  return path.startsWith('/health') && response.status === 503 ? response.json() : bodyOf(response)
}

async function bodyOf(response) {
  const body = await response.json().catch(() => ({ error: `it answered ${response.status}` }))
  if (!response.ok) throw new Error(body.error ?? `it answered ${response.status}`)
  return body
}

function entryOf(key, load) {
  if (!kept.has(key))
    kept.set(key, { key, data: null, error: null, loading: null, again: false, readAt: -Infinity, readers: new Set() })
  const entry = kept.get(key)
  entry.load = load
  return entry
}

function refresh(entry) {
  if (entry.loading) {
    entry.again = true
    return entry.loading
  }
  entry.loading = entry
    .load()
    .then(data => {
      entry.data = data
      entry.error = null
      entry.readAt = performance.now()
    })
    .catch(error => {
      entry.error = error.message?.replace(/\.$/, '') || 'it does not answer'
    })
    .finally(() => {
      entry.loading = null
      for (const reader of entry.readers) reader({})
      if (entry.again) {
        entry.again = false
        refresh(entry)
      }
    })
  return entry.loading
}

/** Refresh the shown answers of procedures whose name begins with one of `prefixes`. */
export function invalidate(...prefixes) {
  for (const entry of kept.values()) {
    if (entry.readers.size && prefixes.some(prefix => entry.key.startsWith(prefix))) refresh(entry)
  }
}

function useKept(key, load, everyMs) {
  const [, render] = useState({})
  const entry = entryOf(key, load)
  useEffect(() => {
    entry.readers.add(render)
    // Several parts of a page begin with the same answer, so they share one recent request.
    if (!entry.loading && performance.now() - entry.readAt > FRESH_MS) refresh(entry)
    const isDue = () => !document.hidden && !entry.loading && performance.now() - entry.readAt > everyMs / 2
    const timer =
      everyMs &&
      setInterval(() => {
        if (isDue()) refresh(entry)
      }, everyMs) // once for all parts of the page
    return () => {
      entry.readers.delete(render)
      clearInterval(timer)
    }
  }, [key])
  return entry
}

/** The number of models, as last read or else as served with the page. Answers about many models are long, and
refreshed less often. */
export const modelCount = () => knownAnswer('models.getModels')?.models.length ?? Number(document.body.dataset.models)
export const hasMany = () => modelCount() > MANY
export const shownMs = () => (hasMany() ? MANY_SHOWN_MS : SHOWN_MS)

/**
 * The answer of a procedure; `data` is null until the first one and stays through later errors.
 * @template {import('./contract').ProcedureName} T
 * @param {T} procedure
 * @param {import('./contract').InputOf<T>} [input]
 * @param {number} [everyMs]
 * @returns {{ data: import('./contract').OutputOf<T> | null, error: string | null }}
 */
export const useAnswer = (procedure, input, everyMs = shownMs()) =>
  useKept(`${procedure} ${JSON.stringify(input ?? {})}`, () => call(procedure, input), everyMs)

/** The same for anything else: `load` returns a promise. */
export const useReport = (key, everyMs, load = () => get(key)) => useKept(key, load, everyMs)

/** Read an answer before a part of the page shows it; the parts that need it show a failure. */
export function readAhead(key, load) {
  const entry = entryOf(key, load)
  if (entry.data === null && !entry.loading) refresh(entry)
}

/** @param {import('./contract').ProcedureName} procedure */
export const readAnswerAhead = (procedure, input = undefined) =>
  readAhead(`${procedure} ${JSON.stringify(input ?? {})}`, () => call(procedure, input))

/** The cached entry of a key, else null; and the cached answer of a procedure without an input. */
export const knownReport = key => kept.get(key)?.data ?? null
export const knownAnswer = procedure => knownReport(`${procedure} {}`)
