// @ts-check
// The strip above the overview: the run or the season with its day and what is left of it, and the prices.
import { useAnswer } from './answers.js'
import { price, signedPercent, span, tone } from './format.js'
import { html, useRef } from './lib.js'
import { serviceNow, useModels } from './models.js'
import { Spark } from './standings.js'

export const PRICES_MS = 10_000
const DAY_MS = 86_400_000
const HOUR_MS = 3_600_000
const SPARK_MS = 600_000

export function Strip() {
  const season = useAnswer('analytics.getSeason').data?.season
  const run = useAnswer('analytics.getRunInfo').data
  const now = serviceNow()
  const { ends } = document.body.dataset
  const isSeason = season && now < Date.parse(season.rules.end)
  const [start, end] = isSeason ? [season.rules.start, season.rules.end] : [run?.runStartTime, ends]
  const left = Date.parse(end) - now
  return html`<section class="strip" aria-label="Run and prices">
    <p><b>${isSeason ? season.rules.name : 'Run'}</b>${start && ` · ${dayOf(start, end, now)}`}${left > 0 && ` · ${span(left)} left`}</p>
    <${Demo} />
    <${Prices} hasLines=${true} />
  </section>`
}

function dayOf(start, end, now) {
  const began = Date.parse(start)
  if (now < began) return `begins in ${span(began - now)}`
  const of = end ? ` of ${Math.ceil((Date.parse(end) - began) / DAY_MS)}` : ''
  return `day ${Math.floor((now - began) / DAY_MS) + 1}${of}`
}

/** What is traded in a demo, in words. */
export function Demo() {
  const { models } = useModels()
  const { demo, market, public: isPublic } = document.body.dataset
  const who = models.every(model => model.provider === 'rules') ? 'rule agents' : 'models'
  const where = {
    synthetic: 'a synthetic market; no price here is real, and no money',
    replay: 'recorded prices, on paper',
  }
  return html`${demo !== 'off' && html`<p class="soft small">Demo: ${who} trade ${where[market] ?? 'on paper'}.</p>`}
    ${isPublic === 'on' && html`<p class="soft small">Public view: nothing can be changed from here, and the prompts are not shown.</p>`}`
}

const SHOWN = 4

/** The prices of the first markets; `hasLines`: those of all, with their last day. */
export function Prices({ hasLines }) {
  const prices = useAnswer('trading.getCryptoPrices', {}, PRICES_MS).data?.prices ?? []
  return html`<div class="prices" aria-label="Prices" role="group">${prices
    .slice(0, hasLines ? undefined : SHOWN)
    .map(row => html`<${Price} key=${row.symbol} row=${row} hasLine=${hasLines} />`)}</div>`
}

function LastDay({ symbol, now }) {
  const from = new Date(Math.floor(serviceNow() / HOUR_MS) * HOUR_MS - DAY_MS).toISOString()
  const candles = useAnswer('trading.getCandles', { symbol, interval: '1h', from }, SPARK_MS).data
  return html`<${Spark} values=${candles ? [...candles.close, now] : []} />`
}

/** A price, which flashes in the color of a change. */
function Price({ row, hasLine }) {
  const last = useRef({ price: row.price, kind: '' })
  if (row.price !== last.current.price)
    last.current = { price: row.price, kind: row.price > last.current.price ? 'rose' : 'fell' }
  return html`<a href=${`#/markets/${row.symbol}`} title=${row.message ?? ''} class=${row.message ? 'warn' : ''}><b>${row.symbol}</b>
    ${hasLine && html`<${LastDay} symbol=${row.symbol} now=${row.price} />`}
    <span class=${`figure ${last.current.kind}`} key=${row.price}>${price(row.price)}</span>${
      row.change24hPercent != null &&
      html` <span class=${`small ${tone(row.change24hPercent)}`}>${signedPercent(row.change24hPercent)}</span>`
    }</a>`
}
