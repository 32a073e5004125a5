// Candles: a live chart of one market with its trades, and the pages of a market and of a trade.
import { call, useAnswer } from './answers.js'
import { inks, onGround, onScheme } from './colors.js'
import { Choice, Failed, Key, Money, Panel, Select, Side, Table, Tile, Time, useStages } from './components.js'
import { Turn } from './conversations.js'
import { openStream } from './events.js'
import { clock, day, moment, number, percent, price, quantity, signed, signedPercent, span, tone } from './format.js'
import { html, useEffect, useMemo, useRef, useState } from './lib.js'
import { serviceNow, useModels } from './models.js'
import { useLive } from './store.js'
import { Positions, Trades, positionsOf, useTrades } from './trades.js'

const SPANS_MS = { '1m': 60_000, '5m': 300_000, '15m': 900_000, '1h': 3_600_000, '4h': 14_400_000, '1d': 86_400_000 }
const INTERVALS = Object.keys(SPANS_MS).map(interval => [interval, interval])
const HEIGHT_PX = 380
const WORDS_MAX = 16
const LEVELS_MAX = 3
const BARS = 120
const TRADES = 500
const AROUND = 0.4
const AROUND_BARS = 20
export const PRICES_MS = 10_000
const CANDLES_MS = 300_000 // the stream delivers the events of the meantime

/** Draw in `host` with lightweight-charts. */
function draw(library, host, label, pick) {
  const places = value => price(value).split('.')[1]?.length ?? 0
  const chart = library.createChart(host, {
    autoSize: true,
    layout: { attributionLogo: false, fontFamily: '"Inter Variable", system-ui, sans-serif', fontSize: 11 },
    rightPriceScale: { borderVisible: false, scaleMargins: { top: 0.08, bottom: 0.22 } },
    timeScale: { borderVisible: false, timeVisible: true, rightOffset: 4,
      tickMarkFormatter: (seconds, kind) => (kind < 3 ? day(seconds * 1000) : clock(seconds * 1000, false)) },
    localization: { timeFormatter: seconds => moment(seconds * 1000), priceFormatter: price },
  })
  const candles = chart.addSeries(library.CandlestickSeries, { borderVisible: false })
  const volumes = chart.addSeries(library.HistogramSeries, { priceScaleId: '', lastValueVisible: false, priceLineVisible: false, priceFormat: { type: 'volume' } })
  volumes.priceScale().applyOptions({ scaleMargins: { top: 0.85, bottom: 0 } })
  const marks = library.createSeriesMarkers(candles, [])
  let bars = []
  let span = 0
  let lines = []
  const paint = () => {
    const ink = inks()
    chart.applyOptions({ layout: { background: { color: ink.ground }, textColor: ink.text }, grid: { vertLines: { color: ink.grid }, horzLines: { color: ink.grid } } })
    candles.applyOptions({ upColor: ink.gain, downColor: ink.loss, wickUpColor: ink.gain, wickDownColor: ink.loss })
    volumes.applyOptions({ color: ink.volume })
  }
  paint()
  const stopScheme = onScheme(paint)
  chart.subscribeClick(({ hoveredObjectId }) => { if (hoveredObjectId) pick(hoveredObjectId) })
  host.querySelector('table')?.setAttribute('role', 'presentation')
  host.querySelectorAll('canvas').forEach(canvas => canvas.setAttribute('aria-hidden', 'true'))
  return {
    setCandles(answer) {
      const isOther = span !== SPANS_MS[answer.interval]
      span = SPANS_MS[answer.interval]
      bars = answer.times.map((time, place) => ({ time: Date.parse(time) / 1000, open: answer.open[place], high: answer.high[place], low: answer.low[place], close: answer.close[place] }))
      const precision = places(bars.at(-1)?.close ?? 0)
      candles.applyOptions({ priceFormat: { type: 'price', precision, minMove: 10 ** -precision } })
      candles.setData(bars)
      volumes.setData(answer.times.flatMap((time, place) => (answer.volume[place] == null ? [] : [{ time: Date.parse(time) / 1000, value: answer.volume[place] }])))
      if (isOther) chart.timeScale().setVisibleLogicalRange({ from: Math.max(0, bars.length - host.clientWidth / 8), to: bars.length + 4 })
      performance.mark('candles') // what the tests wait for
    },
    /** Add the running candle of a minute to the last bar, or begin the next one with it. */
    extend(running) {
      const time = Math.floor(Date.parse(running.time) / span) * span / 1000
      const last = bars.at(-1)
      if (!last || time < last.time) return
      const bar = time > last.time ? { ...running, time } : { time, open: last.open, high: Math.max(last.high, running.high), low: Math.min(last.low, running.low), close: running.close }
      if (time > last.time) bars.push(bar)
      else bars[bars.length - 1] = bar
      candles.update(bar)
    },
    setMarkers(list) {
      const first = bars[0]?.time ?? Infinity
      const placed = list.map(mark => ({ ...mark, time: Math.floor(mark.at / span) * span / 1000, color: onGround(mark.color) }))
        .filter(mark => mark.time >= first).sort((earlier, later) => earlier.time - later.time)
      marks.setMarkers(placed.length > WORDS_MAX ? placed.map(({ text, ...mark }) => mark) : placed)
    },
    setLevels(levels) {
      lines.forEach(line => candles.removePriceLine(line))
      const ink = inks()
      lines = levels.filter(level => level.price != null).map(level => candles.createPriceLine({
        price: Number(level.price), title: level.title, color: ink[level.kind] ?? ink.text, lineWidth: 1, lineStyle: level.kind ? 2 : 1, axisLabelVisible: true }))
    },
    destroy() { stopScheme(); chart.remove() },
  }
}

/**
 * A chart of `candles`, an answer of getCandles. `markers` are {id, at, price, color, shape, position, text}; selecting
 * one calls `onPick(id)`. `levels` are {price, title, kind: 'gain' | 'loss'}; `running` is a candle of the stream.
 */
export function CandleChart({ label, candles, markers, levels, running, onPick }) {
  const host = useRef(null)
  const [chart, setChart] = useState(null)
  const [error, setError] = useState(null)
  useEffect(() => {
    let made = null
    let isGone = false
    import('./vendor/lightweight-charts.js').then(library => {
      if (isGone) return
      made = draw(library, host.current, label, id => onPick?.(id))
      setChart(made)
    }).catch(failure => setError(failure.message))
    return () => { isGone = true; made?.destroy() }
  }, [])
  useEffect(() => { if (candles) chart?.setCandles(candles) }, [chart, candles])
  useEffect(() => { if (candles) chart?.setMarkers(markers) }, [chart, candles, markers])
  useEffect(() => chart?.setLevels(levels), [chart, levels])
  useEffect(() => { if (running && candles) chart?.extend(running) }, [chart, candles, running])
  return html`<div class="chart candles" role="img" aria-label=${label} ref=${host} style=${{ height: `${HEIGHT_PX}px` }}></div>
    ${error && html`<p class="notice bad">The chart cannot be drawn: ${error}.</p>`}
    <p class="soft small">Candles show the prices that models see; marks are at the prices of fills. Chart: <a href="https://www.tradingview.com/" rel="noreferrer">TradingView Lightweight Charts™</a>, © 2026 TradingView, Inc.</p>`
}

const readers = new Set()
let running = []
let end = null

/** The running candles of all markets, from a stream that is open while a part of the page shows one. */
function useRunning(symbol) {
  const [, render] = useState({})
  useEffect(() => {
    readers.add(render)
    end ??= openStream(['candles'], { message(_, data) { running = data.map(candle => ({ ...candle })); for (const reader of readers) reader({}) } }, { streams: ['candles'] })
    return () => {
      readers.delete(render)
      if (!readers.size) { end(); end = null }
    }
  }, [])
  return running.find(candle => candle.symbol === symbol)
}

/** The marks of trades or positions: each entry and exit. */
function marksOf(trades, known, isNamed = true) {
  return trades.flatMap(trade => {
    const color = known.colorOf(trade.modelId, trade.modelVariant)
    const name = isNamed ? trade.modelName.slice(0, 16) : ''
    const isLong = trade.side === 'LONG'
    const entry = { id: trade.id, at: Date.parse(trade.openedAt), price: Number(trade.entryPrice), color, text: name,
      shape: isLong ? 'arrowUp' : 'arrowDown', position: isLong ? 'atPriceBottom' : 'atPriceTop' }
    if (!trade.closedAt) return [entry]
    const isLiquidation = trade.closeReason === 'liquidation'
    return [entry, { id: trade.id, at: Date.parse(trade.closedAt), price: trade.exitPrice, color, text: `${name} ${trade.closeReason}`.trim(),
      shape: isLiquidation ? 'square' : 'circle', position: 'atPriceMiddle', size: isLiquidation ? 2 : 1 }]
  })
}

/** The trigger prices of a position. */
const levelsOf = (position, name = '') => [
  { price: position.entryPrice, title: `${name} entry`.trim() },
  { price: position.exitPlan.stop, title: `${name} stop`.trim(), kind: 'loss' },
  { price: position.exitPlan.target, title: `${name} target`.trim(), kind: 'gain' },
  { price: position.liquidationPrice, title: `${name} liquidation`.trim(), kind: 'loss' },
]

const openTrade = id => { location.hash = `#/trades/${id}` }

export function MarketPage({ route, id: symbol }) {
  const known = useModels()
  const state = useLive()
  const latest = useRunning(symbol)
  const interval = route.query.get('interval') ?? '15m'
  const modelId = route.query.get('model') ?? ''
  const prices = useAnswer('trading.getCryptoPrices', {}, PRICES_MS)
  const entry = useAnswer('trading.getCandles', { symbol, interval }, CANDLES_MS)
  const { trades } = useTrades({ symbol, limit: TRADES, modelId }) // the same input as the table below
  const [older, setOlder] = useState({ key: '', pages: [] })
  const key = `${symbol} ${interval}`
  const pages = older.key === key ? older.pages : []
  const candles = useMemo(() => entry.data && joined([...pages, entry.data]), [entry.data, older, key])
  const positions = positionsOf(state, position => position.symbol === symbol && (!modelId || position.modelId === modelId))
  const shown = JSON.stringify(positions.map(({ id, exitPlan, entryPrice }) => [id, exitPlan, entryPrice]))
  const markers = useMemo(() => marksOf([...trades, ...positions], known, !modelId), [trades, shown, known, modelId])
  const levels = useMemo(() => (positions.length <= LEVELS_MAX ? positions.flatMap(position => levelsOf(position, modelId ? '' : position.modelName.slice(0, 12))) : []), [shown])
  const stage = useStages(Boolean(candles && state.positions), 2)
  const before = candles?.nextBefore
  const readOlder = async () => setOlder({ key, pages: [await call('trading.getCandles', { symbol, interval, before }), ...pages] })
  const now = prices.data?.prices.find(row => row.symbol === symbol)
  const tools = html`
    <${Select} label="Model" value=${modelId} onChange=${value => route.set('model', value)} options=${[['', 'All models'], ...known.models.map(model => [model.id, model.name])]} />
    <${Choice} label="Interval" value=${interval} onChange=${value => route.set('interval', value)} options=${INTERVALS} />`
  const last = latest?.close ?? candles?.close.at(-1)
  return html`
    <div class="title"><h1>${symbol}</h1><b class="figure">${price(last)}</b>
      ${now?.change24hPercent != null && html`<span class=${tone(now.change24hPercent)}>${signedPercent(now.change24hPercent)} in 24 h</span>`}
      <nav class="choice" aria-label="Markets">${(prices.data?.prices ?? []).map(row => html`<a key=${row.symbol} href=${`#/markets/${row.symbol}`} aria-current=${row.symbol === symbol ? 'page' : undefined}>${row.symbol}</a>`)}</nav></div>
    <${Panel} title=${`${symbol}, candles and trades`} tools=${tools}><div class="body">
      <${Failed} entry=${entry} what="The candles" />
      ${candles?.times.length === 0 && html`<p class="empty">There are no candles of this length yet.</p>`}
      <${CandleChart} label=${`Candles of ${symbol}, ${interval}, with ${markers.length} entries and exits; they are listed below`} candles=${candles} markers=${markers}
        levels=${levels} running=${latest} onPick=${openTrade} />
      ${before && html`<p class="more"><button class="button" type="button" onClick=${readOlder}>Earlier candles</button></p>`}
      <p class="soft small">${positions.length > LEVELS_MAX ? `Stops, targets and liquidation prices are drawn for ${LEVELS_MAX} positions at most: choose a model.` : '\u00a0'}</p>
    </div></${Panel}>
    ${stage > 0 && html`<${Positions} only=${position => position.symbol === symbol && (!modelId || position.modelId === modelId)} title=${`Positions in ${symbol}`} />`}
    ${stage > 1 && state.positions && html`<${Trades} symbol=${symbol} limit=${TRADES} modelId=${modelId || undefined} title=${`Trades in ${symbol}`} />`}`
}

const COLUMNS = ['times', 'open', 'high', 'low', 'close', 'volume']

/** Pages of candles, the earliest first, as one answer. */
const joined = pages => ({ ...pages[0], interval: pages.at(-1).interval,
  ...Object.fromEntries(COLUMNS.map(column => [column, pages.flatMap(page => page[column])])) })

/** The candles around a trade: an interval that gives it about a hundred candles, and their start and end. */
function sliceOf(trade) {
  const [begin, end] = [Date.parse(trade.openedAt), trade.closedAt ? Date.parse(trade.closedAt) : serviceNow()]
  const interval = Object.keys(SPANS_MS).find(key => (end - begin) / SPANS_MS[key] <= BARS) ?? '1d'
  const around = Math.max(AROUND * (end - begin), AROUND_BARS * SPANS_MS[interval])
  const floor = at => new Date(Math.floor(at / SPANS_MS[interval]) * SPANS_MS[interval]).toISOString()
  return { symbol: trade.symbol, interval, from: floor(begin - around), to: trade.closedAt ? floor(end + around) : undefined }
}

export function TradePage({ id }) {
  const entry = useAnswer('trading.getTrade', { id }, 30_000)
  const trade = entry.data?.trade
  if (!trade) return entry.error ? html`<p class="notice">There is no such trade: ${entry.error}. <a href="#/trades">All trades</a></p>` : html`<p class="empty">Reading …</p>`
  return html`<${Details} entry=${entry} trade=${trade} />`
}

function Details({ entry, trade }) {
  const known = useModels()
  const isOpen = trade.status === 'OPEN'
  const latest = useRunning(trade.symbol)
  const slice = useMemo(() => sliceOf(trade), [trade.id, trade.closedAt])
  const candles = useAnswer('trading.getCandles', slice)
  const markers = useMemo(() => marksOf([trade], known, false), [trade, known])
  const levels = useMemo(() => levelsOf(trade), [trade])
  const color = known.colorOf(trade.modelId, trade.modelVariant)
  const held = (trade.closedAt ? Date.parse(trade.closedAt) : serviceNow()) - Date.parse(trade.openedAt)
  const gain = isOpen ? null : (100 * trade.netPnl) / (trade.quantity * trade.entryPrice)
  return html`
    <div class="title"><${Key} color=${color} /><h1><a href=${`#/models/${encodeURIComponent(trade.modelId)}`}><bdi>${trade.modelName}</bdi></a>: <a href=${`#/markets/${trade.symbol}`}>${trade.symbol}</a></h1>
      <${Side} side=${trade.side} />${trade.leverage && html`<span class="soft">${quantity(trade.leverage)}×</span>`}
      <span class="badge">${isOpen ? 'open' : `closed by ${trade.closeReason}`}</span></div>
    <${Failed} entry=${entry} what="The trade" />
    <section class="panel" aria-label="Figures"><div class="body tiles">
      ${!isOpen && html`<${Tile} label="Net" value=${signed(trade.netPnl)} kind=${tone(trade.netPnl)} note=${`${signedPercent(gain)} of the notional`} />
        <${Tile} label="Price profit" value=${signed(trade.grossPnl)} note=${`− fees ${number(trade.fees)} ${signed(trade.funding)} funding`} />`}
      ${isOpen && html`<${Tile} label="Fees so far" value=${number(trade.fees)} note=${`funding ${signed(trade.funding)}`} />`}
      <${Tile} label="Quantity" value=${quantity(trade.quantity)} note=${`notional ${number(trade.quantity * trade.entryPrice)}, margin ${number(trade.margin)}`} />
      <${Tile} label="Largest unrealized gain (MFE)" value=${percent(trade.excursion.favourablePercent)} note=${`at ${price(trade.side === 'LONG' ? trade.excursion.highest : trade.excursion.lowest)}`} />
      <${Tile} label="Largest unrealized loss (MAE)" value=${percent(trade.excursion.adversePercent)} note=${`at ${price(trade.side === 'LONG' ? trade.excursion.lowest : trade.excursion.highest)}`} />
      <${Tile} label="Held" value=${span(held)} note=${`since ${moment(trade.openedAt)}`} />
    </div></section>
    <${Panel} title="Price while it was open"><div class="body">
      <${Failed} entry=${candles} what="The candles" />
      ${candles.data?.times.length === 0 && html`<p class="empty">The candles of this time are no longer kept.</p>`}
      <${CandleChart} label=${`Candles of ${trade.symbol} around this trade, with its entry, exit, stop and target`} candles=${candles.data} markers=${markers} levels=${levels} running=${isOpen ? latest : undefined} />
      <p class="soft small">${trade.excursion.interval ? `Gain and loss are from the ${trade.excursion.interval} candles entirely within the trade, and from its own fills.` : 'It was shorter than a candle, so gain and loss are from its own fills.'}</p>
    </div></${Panel}>
    <div class="pair"><${Plan} trade=${trade} /><${Fills} trade=${trade} /></div>
    <${Said} trade=${trade} at=${trade.openedAt} isOpening=${true} title="Why it was opened" />
    ${!isOpen && html`<${Said} trade=${trade} at=${trade.closedAt} title="Why it was closed" />`}`
}

/** The last exit plan compared with the outcome; R is the profit in multiples of the loss at the stop. */
function Plan({ trade }) {
  const { stop, target, invalidation, invalidationPrice, timeExit } = trade.exitPlan
  const sign = trade.side === 'LONG' ? 1 : -1
  const away = level => (level == null ? 'not set' : `${price(level)} (${signedPercent(100 * sign * (level / trade.entryPrice - 1))})`)
  const risk = stop == null ? null : sign * (trade.entryPrice - stop)
  const rows = [
    ['Entry', price(trade.entryPrice)], ['Stop', away(stop)], ['Target', away(target)],
    ['Invalidation', invalidationPrice == null ? invalidation ?? 'not set' : `${away(invalidationPrice)}${invalidation ? `: ${invalidation}` : ''}`],
    ['Time limit', timeExit ? moment(timeExit) : 'not set'], ['Confidence', trade.confidence == null ? '–' : percent(trade.confidence, 0)],
    ['Outcome', trade.exitPrice == null ? 'still open' : `${away(trade.exitPrice)} by ${trade.closeReason}`],
    ['R', risk > 0 && trade.exitPrice != null ? number(sign * (trade.exitPrice - trade.entryPrice) / risk) : '–'],
  ]
  return html`<${Panel} title="Plan and outcome"><dl class="facts body">${rows.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></${Panel}>`
}

function Fills({ trade }) {
  const columns = [
    { key: 'time', title: 'Time', isText: true, by: fill => fill.timestamp, cell: fill => html`<${Time} at=${fill.timestamp} />` },
    { key: 'side', title: 'Side', isText: true, by: fill => fill.side, cell: fill => html`<${Side} side=${fill.side} />` },
    { key: 'quantity', title: 'Quantity', by: fill => Number(fill.quantity), cell: fill => quantity(fill.quantity) },
    { key: 'price', title: 'Price', by: fill => Number(fill.price), cell: fill => price(fill.price) },
    { key: 'fee', title: 'Fee', by: fill => Number(fill.fee), cell: fill => html`<${Money} value=${-fill.fee} places=${4} />` },
    { key: 'cause', title: 'By', isText: true, by: fill => fill.cause, cell: fill => `${fill.cause}${fill.maker ? ', maker' : ''}` },
  ]
  return html`<${Panel} title="Fills"><${Table} label="Fills" columns=${columns} rows=${trade.fills} empty="No fills of this trade are recorded." /></${Panel}>`
}

/** The conversation in which a trade was opened or closed: the last one begun by then. */
function Said({ trade, at, title, isOpening = false }) {
  const known = useModels()
  const before = new Date(Date.parse(at) + 1).toISOString()
  const entry = useAnswer('models.getInvocations', { modelId: trade.modelId, before, limit: 1 }, 0)
  const turn = entry.data?.conversations[0]
  const isOfIt = turn && (isOpening ? turn.id === trade.invocationId : trade.closeReason === 'order' && turn.id !== trade.invocationId)
  if (!isOpening && !isOfIt) return null
  return html`<${Panel} title=${title}>
    <${Failed} entry=${entry} what="The conversation" />
    ${entry.data && !isOfIt && html`<p class="empty">${trade.invocationId ? 'Its conversation is no longer kept.' : 'It was opened manually.'}</p>`}
    ${isOfIt && html`<ol class="turns"><${Turn} turn=${turn} known=${known} /></ol>`}
  </${Panel}>`
}
