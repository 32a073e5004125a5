// @ts-check
// The report of a backtest: that of a season with the figures and months of each account, and its trades on candles.
import { CandleChart, HEIGHT_PX, levelsOf, marksOf } from './candles.js'
import { onGround } from './colors.js'
import { Facts, Table } from './components.js'
import { percent, number, price, signed, whole } from './format.js'
import { html, useMemo, useState } from './lib.js'
import { Section, Sheet, figure, gain, text } from './report.js'
import { Report as SeasonReport } from './report_season.js'
import { PANEL_PX, SeriesValues, drawSeries } from './series.js'

const FIGURES = `Sharpe, Sortino and Calmar ratios are annual, from daily closes, and need ten days. In the market: the share
  of the time with a position. Drawdowns are of the last equity of each hour; within hours they may have been larger.
  Refused: decisions that the guard or the exchange refused; the decisions table has the reasons.`
const MONTHS = `The return of each calendar month in UTC, from the equity at its end; the first and the last may be partial.`
const CANDLES = `Entries and exits at the prices of their fills. Select a mark, or step through the trades, to see one.`
const DRAWN = ` Lines and panels are the strategy's own series, each with its last value within a candle.`

const TRADES = `The completed trades of every account; a column sorts them.`
const GROUPS = `Completed trades by market, and by the weekday and the hour, in UTC, of their entry.`
const weekday = new Intl.DateTimeFormat('en-GB', { weekday: 'long', timeZone: 'UTC' })
const TRADES_SHOWN = 100
const tags = [text('entryTag', 'entry tag'), text('exitTag', 'exit tag')]

/** What the run was made with. */
const factsOf = ({ seed, preset, capital, takerFeeBps, makerFeeBps, latencyMs, cadence, strategy, ...made }) => [
  ['Seed', String(seed)],
  ['Preset', preset],
  ['Capital', number(capital)],
  ['Taker fee, bp', number(takerFeeBps)],
  ['Maker fee, bp', number(makerFeeBps)],
  ['Latency, ms', whole(latencyMs)],
  ['Decides every', cadence],
  ...(strategy
    ? [['Strategy', strategy.class], ['Its file', digest(strategy.sha256)], ...Object.entries(strategy.params)]
    : []),
  ...Object.entries(made.capacity ?? {}).map(([symbol, one]) => [
    `Surcharge of ${symbol}, bp`,
    number(one.surchargeBps),
  ]),
  ...Object.entries(made.files ?? {}).map(([name, sha256]) => [name, digest(sha256)]),
  ...(made.ledgerSha256 ? [['Ledger', digest(made.ledgerSha256)]] : []),
]

const digest = sha256 => html`<code title=${sha256}>${sha256.slice(0, 12)}</code>`

/** The trades with one name each, in the order of these names. */
function grouped(trades, nameOf) {
  const found = new Map()
  for (const one of trades) found.set(nameOf(one), [...(found.get(nameOf(one)) ?? []), one.netPnl])
  return [...found].sort().map(([name, nets]) => ({
    name,
    trades: nets.length,
    net: nets.reduce((sum, net) => sum + net, 0),
    won: (100 * nets.filter(net => net > 0).length) / nets.length,
  }))
}

const iso = seconds => new Date(seconds * 1000).toISOString()
const ratio = (key, title) => figure(key, title, value => number(value))
const share = (key, title, places = 1) => figure(key, title, value => percent(value, places))

export function Report({ data }) {
  const { figures, listings, markets, months, monthly } = data
  const trades = useMemo(() => markets.flatMap(({ symbol, trades }) => trades.map(one => ({ ...one, symbol }))), [])
  const groups = useMemo(
    () => [
      ...grouped(trades, one => one.symbol),
      ...grouped(trades, one => `${(new Date(one.openedAt).getUTCDay() + 6) % 7}`).map(one => ({
        ...one,
        name: weekday.format(new Date(Date.UTC(2024, 0, 1 + Number(one.name)))),
      })),
      ...grouped(trades, one => `${one.openedAt.slice(11, 13)}:00`),
    ],
    [],
  )
  const known = { byId: new Map(), colorOf: id => onGround(data.colors[id] ?? '#888888') }
  return html`<${SeasonReport} data=${data}>
    ${data.conditions && html`<${Section} title="Conditions"><div class="panel"><${Facts} rows=${factsOf(data.conditions)} /></div></${Section}>`}
    <${Section} title="Figures" words=${FIGURES}><${Sheet} label="Figures" rows=${figures} columns=${[
      text('name', 'account'),
      gain('returnPercent', 'return', '\u00a0%'),
      share('drawdown', 'max drawdown', 2),
      ratio('sharpe', 'Sharpe'),
      ratio('sortino', 'Sortino'),
      ratio('calmar', 'Calmar'),
      share('inMarket', 'in the market'),
      figure('trades', 'trades'),
      share('won', 'won'),
      ratio('profitFactor', 'profit factor'),
      gain('meanTrade', 'mean trade'),
      gain('fees', 'fees'),
      figure('refused', 'refused'),
    ]} /></${Section}>
    <${Section} title="Months" words=${MONTHS}><${Sheet} label="Months" rows=${monthly}
      columns=${[text('name', 'account'), ...months.map(month => gain(month, month, '\u00a0%'))]} /></${Section}>
    <${Section} title="Trades on the market" words=${[CANDLES + (markets.some(one => one.series.length) ? DRAWN : ''), ...listings].join(' ')}>
      <div id="markets">${markets.map(one => html`<${Market} key=${one.symbol} market=${one} known=${known} />`)}</div></${Section}>
    <${Section} title="Trades by time and market" words=${GROUPS}><${Sheet} label="Groups" rows=${groups} columns=${[
      text('name', 'of'),
      figure('trades', 'trades'),
      gain('net', 'net'),
      share('won', 'won'),
    ]} /></${Section}>
    <${Section} title="List of trades" words=${TRADES}><div class="panel"><${Table} label="List of trades" rows=${trades}
      first=${TRADES_SHOWN} empty="None." columns=${[
        text('openedAt', 'opened'),
        text('closedAt', 'closed'),
        text('modelName', 'account'),
        text('symbol', 'market'),
        text('side', 'side'),
        figure('entryPrice', 'entry', price),
        figure('exitPrice', 'exit', price),
        text('closeReason', 'closed by'),
        ...tags.filter(({ key }) => trades.some(one => one[key])),
        gain('netPnl', 'net'),
      ]} /></div></${Section}>
  </${SeasonReport}>`
}

function Market({ market, known }) {
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
  `${whole(shown)} completed trades${omitted ? `; ${whole(omitted)} earlier ones are only in the tables` : ''}`

const describe = (trade, place, all) =>
  `${place + 1} of ${all}: ${trade.modelName}, ${trade.side.toLowerCase()}, closed by ${trade.closeReason}, net ${signed(trade.netPnl)}`
