// @ts-check
// The address: its page and every choice made on it, so that a copied link shows the same.
import { useEffect, useState } from './lib.js'

export function routeOf() {
  const [path, query] = location.hash.replace(/^#\/?/, '').split('?')
  const [page = '', ...rest] = path.split('/')
  return {
    page,
    id: rest.length ? safely(rest.join('/')) : null,
    query: new URLSearchParams(query),
    set: (name, value) => setChoices({ [name]: value }, true),
  }
}

function safely(text) {
  try {
    return decodeURIComponent(text)
  } catch {
    return text
  }
}

/**
 * Write choices to the address, by their names; one without a value is removed. Those that change what is listed are a
 * step of the history, which Back undoes.
 */
export function setChoices(choices, isStep = false) {
  const [path, query] = location.hash.split('?')
  const parameters = new URLSearchParams(query)
  for (const [name, value] of Object.entries(choices)) {
    if (value) parameters.set(name, value)
    else parameters.delete(name)
  }
  const rest = parameters.toString()
  const address = `${path || '#/'}${rest ? `?${rest}` : ''}`
  if (address === location.hash) return
  if (isStep) history.pushState({ scroll: scrollY }, '', address)
  else history.replaceState(history.state, '', address)
  dispatchEvent(new HashChangeEvent('hashchange'))
}

/** A choice kept in the address: its value and its setter. `isStep`: Back undoes it. */
export function useChosen(name, initial, isStep = false) {
  const read = () => routeOf().query.get(name) ?? initial
  const [value, setValue] = useState(read)
  useEffect(() => {
    const change = () => setValue(read())
    change()
    addEventListener('hashchange', change)
    return () => removeEventListener('hashchange', change)
  }, [name])
  return [value, next => setChoices({ [name]: next === initial ? null : next }, isStep)]
}

const TRY_MS = 50
const STAYS_MS = 1_000
const RESTORE_MS = 30_000

/**
 * Remember how far each page of the history was scrolled. Returns a function that goes there, or to the top of a new one,
 * until the page stays so, unless its reader goes elsewhere: its parts come one after the other.
 */
export function keepScroll() {
  history.scrollRestoration = 'manual'
  let saving = null
  let restoring = null
  const stop = () => {
    clearTimeout(restoring)
    restoring = null
  }
  addEventListener(
    'scroll',
    () => {
      // written later, when the history may already be at another page
      clearTimeout(saving)
      const scrolled = location.href
      saving = setTimeout(() => {
        if (restoring === null && location.href === scrolled) history.replaceState({ scroll: scrollY }, '')
      }, TRY_MS)
    },
    { passive: true },
  )
  for (const type of ['wheel', 'touchmove', 'pointerdown', 'keydown']) addEventListener(type, stop, { passive: true })
  return () => {
    clearTimeout(saving)
    stop()
    const wanted = history.state?.scroll ?? 0
    const began = performance.now()
    let since = began
    const go = () => {
      const now = performance.now()
      if (Math.abs(scrollY - wanted) > 1) since = now
      scrollTo(0, wanted)
      restoring = now < Math.min(began + RESTORE_MS, since + STAYS_MS) ? setTimeout(go, TRY_MS) : null
    }
    go()
  }
}
