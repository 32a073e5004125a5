// @ts-check
// The page of a market: its candles with every entry and exit, the positions and the trades in it.
import { call, useAnswer } from './answers.js'
import { CandleChart, SPANS_MS, levelsOf, marksOf } from './candles.js'
import { Choice, Pending, Panel, Select, useStages } from './components.js'
import { price, signedPercent, tone } from './format.js'
import { html, useMemo, useState } from './lib.js'
import { useModels } from './models.js'
import { useLive, useRunning } from './store.js'
import { PRICES_MS } from './strip.js'
import { Positions, Trades, positionsOf, useTrades } from './trades.js'

const INTERVALS = Object.keys(SPANS_MS).map(interval => [interval, interval])
const TRADES = 500
const CANDLES_MS = 300_000 // the stream delivers the events of the meantime
const COLUMNS = ['times', 'open', 'high', 'low', 'close', 'volume']

/** Pages of candles, the earliest first, as one answer. */
const joined = pages => ({
  ...pages[0],
  interval: pages.at(-1).interval,
  ...Object.fromEntries(COLUMNS.map(column => [column, pages.flatMap(page => page[column])])),
})

export function MarketPage({ route, id: symbol }) {
  const known = useModels()
  const state = useLive()
  const latest = useRunning(symbol)
  const interval = route.query.get('interval') ?? '15m'
  const modelId = route.query.get('model') ?? ''
  const prices = useAnswer('trading.getCryptoPrices', {}, PRICES_MS)
  const entry = useAnswer('trading.getCandles', { symbol, interval }, CANDLES_MS)
  const { trades } = useTrades({ limit: TRADES, modelId: modelId || undefined, symbol }) // the same input as the table below
  const [older, setOlder] = useState({ key: '', pages: [] })
  const [hovered, setHovered] = useState('')
  const key = `${symbol} ${interval}`
  const pages = older.key === key ? older.pages : []
  const candles = useMemo(() => entry.data && joined([...pages, entry.data]), [entry.data, older, key])
  const isHere = position => position.symbol === symbol && (!modelId || position.modelId === modelId)
  const positions = positionsOf(state, isHere)
  const shown = JSON.stringify(positions.map(({ id, exitPlan, entryPrice }) => [id, exitPlan, entryPrice]))
  const drawn = useMemo(() => [...trades, ...positions], [trades, shown])
  const markers = useMemo(() => marksOf(drawn, known), [drawn, known])
  const levels = useMemo(() => levelsOf(drawn.find(trade => trade.id === hovered) ?? {}), [drawn, hovered])
  const stage = useStages(Boolean(candles && state.positions), 2)
  const before = candles?.nextBefore
  const readOlder = async () =>
    setOlder({ key, pages: [await call('trading.getCandles', { symbol, interval, before }), ...pages] })
  const now = prices.data?.prices.find(row => row.symbol === symbol)
  const tools = html`
    <${Select} label="Model" value=${modelId}
      onChange=${value => route.set('model', value)} options=${[['', 'All models'], ...known.models.map(model => [model.id, model.name])]} />
    <${Choice} label="Interval" value=${interval} onChange=${value => route.set('interval', value)} options=${INTERVALS} />`
  const last = latest?.close ?? candles?.close.at(-1)
  return html`
    <div class="title"><h1>${symbol}</h1><b class="figure">${price(last)}</b>
      ${
        now?.change24hPercent != null &&
        html`<span
        class=${tone(now.change24hPercent)}>${signedPercent(now.change24hPercent)} in 24 h</span>`
      }
      <nav class="choice" aria-label="Markets">${(prices.data?.prices ?? []).map(
        row => html`<a key=${row.symbol}
        href=${`#/markets/${row.symbol}`} aria-current=${row.symbol === symbol ? 'page' : undefined}>${row.symbol}</a>`,
      )}</nav></div>
    <${Panel} title=${`${symbol}, candles and trades`} tools=${tools}><div class="body">
      <${Pending} entry=${entry} what="The candles" isQuiet=${true} />
      ${candles?.times.length === 0 && html`<p class="empty">There are no candles of this length yet.</p>`}
      <${CandleChart}
        label=${`Candles of ${symbol}, ${interval}, with ${markers.length} entries and exits; they are listed below`} candles=${candles} markers=${markers}
        levels=${levels} running=${latest} onPick=${id => {
          location.hash = `#/trades/${id}`
        }} onHover=${ids => setHovered(new Set(ids).size === 1 ? ids[0] : '')} />
      ${
        before &&
        html`<p class="more"><button class="button" type="button"
        onClick=${readOlder}>Earlier candles</button></p>`
      }
    </div></${Panel}>
    ${stage > 0 && html`<${Positions} only=${isHere} title=${`Positions in ${symbol}`} />`}
    ${
      stage > 1 &&
      state.positions &&
      html`<${Trades} symbol=${symbol} limit=${TRADES} modelId=${modelId || undefined}
      title=${`Trades in ${symbol}`} />`
    }`
}
