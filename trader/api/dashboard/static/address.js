// The address: its page, and every choice that is made on it, so that a copied link shows the same.
import { useEffect, useState } from './lib.js'

export function routeOf() {
  const [path, query] = location.hash.replace(/^#\/?/, '').split('?')
  const [page = '', ...rest] = path.split('/')
  return { page, id: rest.length ? safely(rest.join('/')) : null, query: new URLSearchParams(query), set: setChoice }
}

function safely(text) {
  try { return decodeURIComponent(text) } catch { return text }
}

/** Write a choice into the address; without a value it is removed. */
export function setChoice(name, value) {
  const [path, query] = location.hash.split('?')
  const parameters = new URLSearchParams(query)
  if (value) parameters.set(name, value)
  else parameters.delete(name)
  const rest = parameters.toString()
  history.replaceState(history.state, '', `${path || '#/'}${rest ? `?${rest}` : ''}`)
  dispatchEvent(new HashChangeEvent('hashchange'))
}

/** A choice that the address keeps: its value, and how to change it. */
export function useChosen(name, initial) {
  const read = () => routeOf().query.get(name) ?? initial
  const [value, setValue] = useState(read)
  useEffect(() => {
    const change = () => setValue(read())
    change()
    addEventListener('hashchange', change)
    return () => removeEventListener('hashchange', change)
  }, [name])
  return [value, next => setChoice(name, next === initial ? null : next)]
}

const TRIES = 20
const TRY_MS = 50

/** Remember how far each page of the history was scrolled. Returns a function that goes there, or to the top of a new one. */
export function keepScroll() {
  history.scrollRestoration = 'manual'
  let timer = null
  addEventListener('scroll', () => {
    clearTimeout(timer)
    const scrolled = location.href // by the time it is written, the history may be at another page
    timer = setTimeout(() => { if (location.href === scrolled) history.replaceState({ scroll: scrollY }, '') }, TRY_MS)
  }, { passive: true })
  return () => {
    clearTimeout(timer)
    const wanted = history.state?.scroll ?? 0
    const go = left => {
      scrollTo(0, wanted)
      if (left && Math.abs(scrollY - wanted) > 1) setTimeout(go, TRY_MS, left - 1) // until what it shows is there again
    }
    go(TRIES)
  }
}
