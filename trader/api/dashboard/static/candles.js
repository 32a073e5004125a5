// @ts-check
// A chart of candles with trades: marks at the prices of fills, an OHLC legend, and what is under the pointer.
import { inks, onGround, onScheme } from './colors.js'
import { useChart } from './components.js'
import { clock, day, moment, number, price, tone } from './format.js'
import { html, useEffect, useMemo, useRef, useState } from './lib.js'
import { inTurn } from './turns.js'

export const SPANS_MS = {
  '1m': 60_000,
  '5m': 300_000,
  '15m': 900_000,
  '1h': 3_600_000,
  '4h': 14_400_000,
  '1d': 86_400_000,
}
export const HEIGHT_PX = 380
const WORDS_MAX = 16
const WORDS_PX = 480 // below, words at an edge would be cut, and the levels say the same
const BAR_PX = 8
const MARGIN = 0.15
const MARGIN_BARS = 3
const HINTS_MAX = 6
const LABEL_PX = 40 // of a time
const SCALE_PX = 80 // with most prices; a scale that grows draws the chart twice
const ZOOM = 0.002

const colorOf = name => inks()[name] ?? onGround(name)

/** Draw in `host` with lightweight-charts. */
function draw(library, host, on) {
  const places = value => price(value).split('.')[1]?.length ?? 0
  const chart = library.createChart(host, {
    autoSize: true,
    layout: { attributionLogo: false, fontFamily: '"Inter Variable", system-ui, sans-serif', fontSize: 11 },
    rightPriceScale: {
      borderVisible: false,
      entireTextOnly: true,
      scaleMargins: { top: 0.08, bottom: 0.22 },
      minimumWidth: SCALE_PX,
    },
    timeScale: {
      borderVisible: false,
      timeVisible: true,
      rightOffset: 4,
    },
    handleScale: { mouseWheel: false }, // a page that scrolls is not to stop here
    handleScroll: { mouseWheel: false, vertTouchDrag: false },
    localization: { timeFormatter: seconds => moment(seconds * 1000), priceFormatter: price },
  })
  const times = chart.timeScale()
  let bars = []
  let span = 0
  let lines = []
  /** @type {any} */
  let now = { markers: [], levels: [] }
  let drawn = now // of these, what the chart has
  let isGone = false
  let byBar = new Map()
  let shaded = null
  const candles = chart.addSeries(library.CandlestickSeries, {
    borderVisible: false,
    autoscaleInfoProvider: original => withPlan(original(), now.levels),
  })
  const volumes = chart.addSeries(library.HistogramSeries, {
    priceScaleId: '',
    lastValueVisible: false,
    priceLineVisible: false,
    priceFormat: { type: 'volume' },
  })
  volumes.priceScale().applyOptions({ scaleMargins: { top: 0.85, bottom: 0 } })
  const marks = library.createSeriesMarkers(candles, [])
  candles.attachPrimitive(shade(times, () => shaded))

  const barOf = at => (Math.floor(at / span) * span) / 1000
  const paintMarks = () => {
    if (isGone) return
    byBar = new Map()
    for (const mark of now.markers) {
      const time = barOf(mark.at)
      if (time < (bars[0]?.time ?? Infinity)) continue
      if (!byBar.has(time)) byBar.set(time, [])
      byBar.get(time).push(mark)
    }
    const hasWords = byBar.size <= WORDS_MAX && host.clientWidth >= WORDS_PX
    marks.setMarkers(
      [...byBar]
        .sort(([one], [other]) => one - other)
        .map(([time, all]) => {
          if (all.length > 1)
            return {
              time,
              position: 'aboveBar',
              shape: 'circle',
              color: inks().text,
              text: String(all.length),
              size: 0.6,
            }
          const [{ text, hint, at, ...mark }] = all
          return { ...mark, time, color: colorOf(mark.color), text: hasWords ? text : '' }
        }),
    )
    if (bars.length) performance.mark('candles') // what the tests wait for
  }
  function paintLevels() {
    lines.forEach(line => candles.removePriceLine(line))
    lines = now.levels.map(level =>
      candles.createPriceLine({
        price: Number(level.price),
        title: level.title,
        color: inks()[level.kind ?? 'text'],
        lineWidth: 1,
        lineStyle: level.kind ? 2 : 1,
        axisLabelVisible: true,
      }),
    )
  }
  function paint() {
    const ink = inks()
    chart.applyOptions({
      layout: { background: { color: ink.ground }, textColor: ink.text },
      grid: { vertLines: { color: ink.grid }, horzLines: { color: ink.grid } },
    })
    candles.applyOptions({ upColor: ink.gain, downColor: ink.loss, wickUpColor: ink.gain, wickDownColor: ink.loss })
    volumes.applyOptions({ color: ink.volume })
    paintLevels()
    paintMarks()
  }
  paint()
  const stopScheme = onScheme(paint)
  chart.subscribeClick(({ time }) => {
    const [mark, ...others] = byBar.get(time) ?? []
    if (mark && !others.length) on.pick(mark.id)
  })
  chart.subscribeCrosshairMove(({ time, point, seriesData }) =>
    on.hover(
      time === undefined
        ? null
        : {
            bar: seriesData.get(candles),
            volume: seriesData.get(volumes)?.value,
            marks: byBar.get(time) ?? [],
            x: point?.x ?? 0,
            y: point?.y ?? 0,
          },
    ),
  )
  /** The label of a time, unless it would be cut at an edge. */
  const label = (seconds, kind) => {
    const x = times.timeToCoordinate(seconds) ?? 0
    if (x < LABEL_PX / 2 || x > times.width() - LABEL_PX / 2) return ''
    return kind < 3 ? day(seconds * 1000) : clock(seconds * 1000, false)
  }
  times.subscribeVisibleLogicalRangeChange(() => times.applyOptions({ tickMarkFormatter: label })) // which forgets the labels of other ranges
  const zoom = event => {
    if (!event.ctrlKey && !event.metaKey) return
    event.preventDefault()
    const range = times.getVisibleLogicalRange()
    const anchor = times.coordinateToLogical(event.clientX - host.getBoundingClientRect().left)
    const scale = Math.exp(event.deltaY * ZOOM)
    if (range && anchor !== null)
      times.setVisibleLogicalRange({
        from: anchor - (anchor - range.from) * scale,
        to: anchor + (range.to - anchor) * scale,
      })
  }
  host.addEventListener('wheel', zoom, { passive: false })
  host.querySelector('table')?.setAttribute('role', 'presentation')
  host.querySelectorAll('canvas').forEach(canvas => canvas.setAttribute('aria-hidden', 'true'))

  /** Show the candles of a trade, from its entry to its exit with a margin, or else the latest. */
  function setCandles({ candles: answer, trade }) {
    const isOther = span !== SPANS_MS[answer.interval]
    span = SPANS_MS[answer.interval]
    bars = answer.times.map((time, place) => ({
      time: Date.parse(time) / 1000,
      open: answer.open[place],
      high: answer.high[place],
      low: answer.low[place],
      close: answer.close[place],
    }))
    const precision = places(bars.at(-1)?.close ?? 0)
    candles.applyOptions({ priceFormat: { type: 'price', precision, minMove: 10 ** -precision } })
    candles.setData(bars)
    volumes.setData(
      answer.times.flatMap((time, place) =>
        answer.volume[place] == null ? [] : [{ time: Date.parse(time) / 1000, value: answer.volume[place] }],
      ),
    )
    shaded = trade && { from: barOf(trade.from), to: trade.to && barOf(trade.to) }
    if (trade) {
      const [first, last] = [barOf(trade.from), trade.to ? barOf(trade.to) : Infinity].map(at =>
        Math.max(
          0,
          bars.findLastIndex(bar => bar.time <= at),
        ),
      )
      const margin = Math.max(MARGIN_BARS, MARGIN * (last - first))
      times.setVisibleLogicalRange({ from: first - margin, to: last + margin })
    } else if (isOther) {
      times.setVisibleLogicalRange({
        from: Math.max(0, bars.length - host.clientWidth / BAR_PX),
        to: bars.length + 4,
      })
    }
    on.hover(null)
  }
  /** Add the running candle of a minute to the last bar, or begin the next one with it. */
  function extend(running) {
    const time = barOf(Date.parse(running.time))
    const last = bars.at(-1)
    if (!last || time < last.time) return
    const bar =
      time > last.time
        ? { ...running, time }
        : {
            time,
            open: last.open,
            high: Math.max(last.high, running.high),
            low: Math.min(last.low, running.low),
            close: running.close,
          }
    if (time > last.time) bars.push(bar)
    else bars[bars.length - 1] = bar
    candles.update(bar)
  }

  /** Draw what is new: candles and their levels in this turn, marks in the next. */
  const paintNew = () => {
    if (isGone) return
    const before = drawn
    drawn = now
    if (now.levels !== before.levels) paintLevels()
    const isOther = now.candles !== before.candles || now.trade !== before.trade
    if (isOther) setCandles(now)
    if (now.running && (isOther || now.running !== before.running)) extend(now.running)
    if (isOther || now.markers !== before.markers) inTurn(paintMarks)
  }

  return {
    update(next) {
      now = next
      inTurn(paintNew)
    },
    chart,
    lastBar: () => bars.at(-1),
    destroy() {
      isGone = true
      stopScheme()
      host.removeEventListener('wheel', zoom)
      chart.remove()
    },
  }
}

/** A scale that holds the levels of a plan, not only the prices. */
function withPlan(found, levels) {
  const prices = levels.filter(level => level.isPlan).map(level => Number(level.price))
  if (!found?.priceRange || !prices.length) return found
  const { minValue, maxValue } = found.priceRange
  return { ...found, priceRange: { minValue: Math.min(minValue, ...prices), maxValue: Math.max(maxValue, ...prices) } }
}

/** A part of the chart that shades from one bar to another; without the other, to the end. */
function shade(times, rangeOf) {
  const renderer = {
    draw(target) {
      target.useBitmapCoordinateSpace(({ context, bitmapSize, horizontalPixelRatio }) => {
        const range = rangeOf()
        const from = range && times.timeToCoordinate(range.from)
        if (from == null) return
        const to = range.to ? times.timeToCoordinate(range.to) : null
        const left = from * horizontalPixelRatio
        context.fillStyle = `${inks().accent}1f`
        context.fillRect(
          left,
          0,
          Math.max(1, (to === null ? bitmapSize.width : to * horizontalPixelRatio) - left),
          bitmapSize.height,
        )
      })
    },
  }
  return { paneViews: () => [{ zOrder: () => 'bottom', renderer: () => renderer }] }
}

/**
 * A chart of `candles`, an answer of getCandles. `markers` are {id, at, price, color, shape, position, text, hint}, with
 * `hint` {name, side, text, profit} for the pointer; selecting a single one calls `onPick(id)`, and `onHover(ids)` hears
 * whose marks are under the pointer. `levels` are {price, title, kind: 'gain' | 'loss', isPlan}; `running` is a candle of
 * the stream. `trade`, {from, to} in milliseconds, is shaded and fitted. `onChart` gets the library's chart, to add to it.
 */
export function CandleChart(props) {
  const { label, candles, markers, levels, running, trade, onPick, onHover, onChart, height = HEIGHT_PX } = props
  const [library, setLibrary] = useState(null)
  const [error, setError] = useState(null)
  const [hovered, setHovered] = useState(undefined) // null when the candles are drawn
  const on = useRef({})
  on.current = {
    pick: id => onPick?.(id),
    hover: next => {
      setHovered(next)
      onHover?.(next?.marks.map(mark => mark.id) ?? [])
    },
  }
  useEffect(() => {
    import('./vendor/lightweight-charts.js').then(setLibrary, failure => setError(failure.message))
  }, [])
  const inputs = useMemo(
    () => library && candles && [{ candles, markers, levels, running, trade }],
    [library, candles, markers, levels, running, trade],
  )
  const [host, chart] = useChart((element, drawn) => {
    const made = draw(library, element, { pick: id => on.current.pick(id), hover: next => on.current.hover(next) })
    onChart?.(made.chart)
    made.update(drawn)
    return made
  }, inputs)
  return html`<${Ohlc} bar=${hovered?.bar ?? chart.current?.lastBar()} volume=${hovered?.volume} />
    <div class="pointed">
      <div class="chart candles" role="img" aria-label=${label} ref=${host} style=${{ height: `${height}px` }}></div>
      ${hovered?.marks.length > 0 && html`<${Hint} of=${hovered} width=${host.current.clientWidth} />`}
    </div>
    ${error && html`<p class="notice bad">The chart cannot be drawn: ${error}.</p>`}
    <p class="soft small">Candles show the prices that models see; marks are at the prices of fills. Drag to move, Ctrl or
      ⌘ and the wheel to zoom. Chart: <a href="https://www.tradingview.com/"
        rel="noreferrer">TradingView Lightweight Charts™</a>, © 2026 TradingView, Inc.</p>`
}

/** Open, high, low and close of the bar under the pointer, else of the last one. */
function Ohlc({ bar, volume }) {
  const figures = bar
    ? [
        ['O', bar.open],
        ['H', bar.high],
        ['L', bar.low],
        ['C', bar.close],
      ]
    : []
  return html`<p class="ohlc readout">${figures.map(
    ([name, value]) => html`<span key=${name}>${name} <b
    class=${tone(bar.close - bar.open, 8)}>${price(value)}</b></span>`,
  )}${volume != null && html`<span>Volume <b>${number(volume, volume >= 1000 ? 0 : 2)}</b></span>`}\u00a0</p>`
}

/** The trades whose marks are on the bar under the pointer. */
function Hint({ of, width }) {
  const side = of.x > width / 2 ? { right: `${width - of.x + 12}px` } : { left: `${of.x + 12}px` }
  return html`<ul class="hint" style=${{ ...side, top: '8px' }}>${of.marks.slice(0, HINTS_MAX).map(
    (mark, place) => html`<li key=${place}>
      <b><bdi>${mark.hint.name}</bdi></b> ${mark.hint.side} ${mark.hint.text} ${
        mark.hint.profit != null &&
        html`<span
        class=${tone(mark.hint.profit)}>${number(mark.hint.profit, 2, 'exceptZero')}</span>`
      }</li>`,
  )}
    ${
      of.marks.length > HINTS_MAX &&
      html`<li
      class="soft">and ${of.marks.length - HINTS_MAX} more of ${of.marks.length}</li>`
    }</ul>`
}

/**
 * The marks of trades or positions: each entry and exit. On the page of one trade they need no name and no color of a
 * model.
 */
export function marksOf(trades, known, isAlone = false) {
  return trades.flatMap(trade => {
    const name = isAlone ? '' : trade.modelName.slice(0, 16)
    const color = isAlone ? 'accent' : known.colorOf(trade.modelId, trade.modelVariant)
    const isLong = trade.side === 'LONG'
    const side = trade.side.toLowerCase()
    const entry = {
      id: trade.id,
      at: Date.parse(trade.openedAt),
      price: Number(trade.entryPrice),
      color,
      text: isAlone ? `entry, ${side}` : name,
      shape: isLong ? 'arrowUp' : 'arrowDown',
      position: isLong ? 'atPriceBottom' : 'atPriceTop',
      hint: { name: trade.modelName, side, text: `entered at ${price(trade.entryPrice)}` },
    }
    if (!trade.closedAt) return [entry]
    const isLiquidation = trade.closeReason === 'liquidation'
    return [
      entry,
      {
        id: trade.id,
        at: Date.parse(trade.closedAt),
        price: Number(trade.exitPrice),
        color: isAlone ? (trade.netPnl > 0 ? 'gain' : 'loss') : color,
        text: `${isAlone ? 'exit,' : name} ${trade.closeReason}`.trim(),
        shape: isLiquidation ? 'square' : 'circle',
        position: 'atPriceMiddle',
        size: isLiquidation ? 2 : 1,
        hint: {
          name: trade.modelName,
          side,
          text: `closed at ${price(trade.exitPrice)} by ${trade.closeReason}`,
          profit: trade.netPnl,
        },
      },
    ]
  })
}

/** The prices of a trade: entry and exit, and the plan of one whose plan is known. */
export const levelsOf = trade =>
  [
    { price: trade.entryPrice, title: 'entry', isPlan: true },
    { price: trade.exitPrice, title: 'exit', isPlan: true },
    { price: trade.exitPlan?.stop, title: 'stop', kind: 'loss', isPlan: true },
    { price: trade.exitPlan?.target, title: 'target', kind: 'gain', isPlan: true },
    { price: trade.liquidationPrice, title: 'liquidation', kind: 'loss' },
  ].filter(level => level.price != null)
