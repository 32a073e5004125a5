// The stream of the page: `GET /api/events`, reconnected whatever ended it.
const STREAMS = 'positions,trades,conversations,portfolio,workflow'
const SILENT_MS = 40_000
const AGAIN_MS = 2_000

/** Listen to the named events. `on` has message(name, data), heard() for every sign of life, and state(state). */
export function openStream(names, on) {
  let source = null
  let watch = null
  let again = null

  const alive = () => {
    clearTimeout(watch)
    watch = setTimeout(lost, SILENT_MS)
    on.heard()
  }

  function lost() {
    on.state('lost')
    source?.close()
    clearTimeout(watch)
    clearTimeout(again)
    again = setTimeout(open, AGAIN_MS)
  }

  function open() {
    source?.close()
    source = new EventSource(`/api/events?streams=${STREAMS}`)
    source.onopen = () => { on.state('open'); alive() }
    source.onerror = () => (source.readyState === EventSource.CLOSED ? lost() : on.state('lost'))
    source.addEventListener('ping', alive)
    for (const name of names) {
      source.addEventListener(name, event => { on.message(name, JSON.parse(event.data)); alive() })
    }
  }
  open()
}
