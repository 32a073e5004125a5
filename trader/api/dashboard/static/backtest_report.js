// @ts-check
// The report of a backtest: what every report draws, and the trades on the candles of each market.
import { CandleChart, HEIGHT_PX, levelsOf, marksOf } from './candles.js'
import { onGround } from './colors.js'
import { number, signed } from './format.js'
import { html, render, useMemo, useState } from './lib.js'
import './report.js'
import { PANEL_PX, SeriesValues, drawSeries } from './series.js'

const data = JSON.parse(document.getElementById('data').textContent)
const known = { byId: new Map(), colorOf: id => onGround(data.colors[id] ?? '#888888') }
const iso = seconds => new Date(seconds * 1000).toISOString()

function Market({ market }) {
  const [model, setModel] = useState('')
  const [picked, setPicked] = useState('')
  const [values, setValues] = useState(null)
  const { series } = market
  const candles = useMemo(() => ({ ...market, times: market.times.map(iso) }), [])
  const models = useMemo(() => new Map(market.trades.map(one => [one.modelId, one.modelName])), [])
  const trades = useMemo(() => market.trades.filter(one => !model || one.modelId === model), [model])
  const place = trades.findIndex(one => one.id === picked)
  const trade = trades[place]
  const markers = useMemo(() => marksOf(trade ? [trade] : trades, known, Boolean(trade)), [trades, trade])
  const levels = useMemo(() => (trade ? levelsOf(trade) : []), [trade])
  const time = useMemo(() => trade && { from: Date.parse(trade.openedAt), to: Date.parse(trade.closedAt) }, [trade])
  const step = (to, text) =>
    html`<button class="button" disabled=${!trades[to]} onClick=${() => setPicked(trades[to].id)}>${text}</button>`
  return html`<section class="panel card" aria-label=${`Trades in ${market.symbol}`}>
    <h3>${market.symbol}</h3>
    <div class="steps">
      ${
        models.size > 1 &&
        html`<select aria-label="Account" onChange=${event => setModel(event.target.value)}>
        <option value="">all accounts</option>${[...models].map(([id, name]) => html`<option value=${id}>${name}</option>`)}</select>`
      }
      ${step(place < 0 ? trades.length - 1 : place - 1, '← Previous trade')}
      ${step(place < 0 ? 0 : place + 1, 'Next trade →')}
      <button class="button" disabled=${!trade} onClick=${() => setPicked('')}>All trades</button>
      <span>${trade ? describe(trade, place, trades.length) : count(trades.length, market.omitted)}</span>
    </div>
    ${series.length > 0 && html`<${SeriesValues} series=${series} values=${values} />`}
    <${CandleChart} label=${`Candles of ${market.symbol} with trades`} candles=${candles} markers=${markers}
      levels=${levels} trade=${time} onPick=${setPicked} height=${HEIGHT_PX + PANEL_PX * series.filter(one => one.panel).length}
      onChart=${chart => drawSeries(chart, market.times, series, setValues)} />
  </section>`
}

const count = (shown, omitted) =>
  `${number(shown, 0)} completed trades${omitted ? `; ${number(omitted, 0)} earlier ones are only in the tables` : ''}`

const describe = (trade, place, all) =>
  `${place + 1} of ${all}: ${trade.modelName}, ${trade.side.toLowerCase()}, closed by ${trade.closeReason}, net ${signed(trade.netPnl)}`

render(
  data.markets.map(market => html`<${Market} key=${market.symbol} market=${market} />`),
  document.getElementById('markets'),
)
