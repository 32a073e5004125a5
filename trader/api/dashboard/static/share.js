// @ts-check
// A link to exactly what is seen: the range ends now, and a model or a trade has its own picture.
import { useChosen } from './address.js'
import { knownCurves } from './curves.js'
import { html, useState } from './lib.js'
import { serviceNow, windowOf } from './models.js'

const SAID_MS = 2_000
const minute = at => `${new Date(at).toISOString().slice(0, 16)}Z`

export function Share({ route }) {
  const [isCopied, setCopied] = useState(false)
  const [from] = useChosen('from', '')
  const share = async () => {
    const [path, query] = location.hash.split('?')
    const parameters = new URLSearchParams(query)
    const curves = knownCurves(windowOf(route.query))
    if (!from && curves) {
      parameters.set('from', minute(Date.parse(curves.start)))
      parameters.set('to', minute(serviceNow()))
    }
    const pictured = { models: 'model', trades: 'trade' }[route.page]
    const of = route.id && pictured ? `?${new URLSearchParams({ [pictured]: route.id })}` : ''
    await navigator.clipboard?.writeText(`${location.origin}/${of}${path || '#/'}?${parameters}`)
    setCopied(true)
    setTimeout(setCopied, SAID_MS, false)
  }
  return html`<button class="button" type="button" onClick=${share}>${isCopied ? 'Link copied' : 'Share'}</button>`
}
