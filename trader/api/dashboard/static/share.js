// @ts-check
// A link to exactly what is seen, whose range ends now, and a picture of a model or a trade.
import { useChosen } from './address.js'
import { inks } from './colors.js'
import { save } from './csv.js'
import { knownCurves } from './curves.js'
import { html, useState } from './lib.js'
import { serviceNow, windowOf } from './models.js'

const SAID_MS = 2_000
const [WIDTH, HEIGHT, EDGE, TOP] = [1200, 630, 48, 150] // in the proportions of link previews
const FONT = '"Inter Variable", system-ui, sans-serif'
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
    await navigator.clipboard?.writeText(`${location.origin}/${path || '#/'}?${parameters}`)
    setCopied(true)
    setTimeout(setCopied, SAID_MS, false)
  }
  return html`<button class="button" type="button" onClick=${share}>${isCopied ? 'Link copied' : 'Share'}</button>`
}

export const Picture = () => html`<button class="button" type="button" onClick=${savePicture}>Save as picture</button>`

/** Save the chart of the page below its title and its first figure. */
function savePicture() {
  const host = document.querySelector('main .chart')
  const { left, top, width, height } = host.getBoundingClientRect()
  const canvas = Object.assign(document.createElement('canvas'), { width: WIDTH, height: HEIGHT })
  const context = canvas.getContext('2d')
  const { ground } = inks()
  const texts = (selector, between) =>
    [...document.querySelectorAll(selector)].map(one => one.textContent).join(between)
  const title = texts('main .title > :is(h1, .badge)', ' · ')
  const figure = `${texts('main .tile:first-child > *', '  ')}   ${minute(serviceNow()).replace('T', ' ')}`
  context.fillStyle = ground
  context.fillRect(0, 0, WIDTH, HEIGHT)
  context.fillStyle = getComputedStyle(document.body).color
  context.font = `600 44px ${FONT}`
  context.fillText(title, EDGE, 74, WIDTH - 2 * EDGE)
  context.font = `26px ${FONT}`
  context.fillText(figure, EDGE, 118, WIDTH - 2 * EDGE)
  const room = HEIGHT - TOP - EDGE / 2
  const scale = Math.min((WIDTH - 2 * EDGE) / width, room / height)
  for (const part of host.querySelectorAll('canvas')) {
    const at = part.getBoundingClientRect()
    context.drawImage(
      part,
      EDGE + (at.left - left) * scale,
      TOP + (room - height * scale) / 2 + (at.top - top) * scale,
      at.width * scale,
      at.height * scale,
    )
  }
  canvas.toBlob(blob => save(`${title.toLowerCase().replaceAll(/[^a-z0-9]+/g, '-')}.png`, blob))
}
