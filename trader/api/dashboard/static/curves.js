// @ts-check
// Equity curves: per model or per variant, a window, a legend that isolates, and a crosshair.
import { setChoices, useChosen } from './address.js'
import { call, hasMany, modelCount, readAhead, shownMs, useReport } from './answers.js'
import { averageOf, quantileOf, returnsOf, timeChart } from './charts.js'
import { neutral } from './colors.js'
import { Choice, Pending, Key, Panel, useChart } from './components.js'
import { ZONE, day, clock, isolated, minuteOf, number, signedPercent, timeOf } from './format.js'
import { html, useEffect, useMemo, useRef, useState } from './lib.js'
import { WINDOWS, distinctName, useModels, windowOf } from './models.js'
import { useLive } from './store.js'

const EQUITY_PX = 320
const NARROW_EQUITY_PX = 240
const FEW_LINES = 12
const MANY = 14
const ENDS = 5
const LEAST_SPAN = 0.2
const KEYS =
  'The arrow keys move the crosshair, whose values are in the legend. ' +
  'A drag zooms, a double click shows the whole window.'

/** `only(model)` selects the models to show, and `variant` the models of the query; `main` is drawn thicker, with the
ends of its `trades`. `notes` are moments to mark: [{at in seconds, label}]. */
export function Curves({ title = 'Equity', window, only, main, trades, notes, onDrawn }) {
  const known = useModels()
  const [from, setFrom] = useChosen('from', '', true)
  const [to, setTo] = useChosen('to', '', true)
  const entry = useCurves(window, from, to)
  const [isOpen, setOpen] = useState(Boolean(from || to))
  const state = useLive()
  const [by, setBy] = useChosen('lines', 'models')
  const [unit, setUnit] = useChosen('unit', '%')
  const [alone, setAlone] = useChosen('alone', '')
  const [range, setRange] = useChosen('curves', 'ends')
  const chosen = useMemo(() => new Set(alone ? alone.split(',') : []), [alone])
  const [at, setAt] = useState(null)
  const [lifted, setLifted] = useState(null)

  const expected = known.models.length ? known.models.filter(model => !only || only(model)).length : modelCount()
  const isReady = Boolean(entry.data && (known.entry.data || known.entry.error)) // a line has no color before the models are known
  const lines = useMemo(
    () => (isReady ? linesOf(entry.data, to ? null : state.portfolio, known, by, only) : null),
    [entry.data, isReady, to, state.portfolio, known, by, only],
  )
  const isMoney = unit !== '%' && by === 'models'
  const isMany = (lines?.length ?? expected) > MANY && chosen.size === 0 && !main
  const drawn = useMemo(
    () => lines && drawingOf(lines, chosen, isMoney, main, isMany && range === 'ends', trades),
    [lines, chosen, isMoney, main, isMany, range, trades, notes],
  )
  const show = (value, places) =>
    isMoney
      ? number(value, places ?? (Math.abs(value) >= 1000 ? 0 : 2))
      : `${number(value, places ?? (Math.abs(value) < 10 ? 1 : 0))} %`
  const limits = drawn && isMany && range !== 'ends' ? robust(drawn.equity[2]) : null
  const axis = useRef(null) // of the latest render, since the chart is made once
  axis.current = { show, limits, notes }
  const height = matchMedia('(max-width: 760px)').matches ? NARROW_EQUITY_PX : EQUITY_PX
  const [equity, equityChart] = useChart((host, ...inputs) => {
    const chart = timeChart(host, ...inputs, {
      height,
      show: (value, places) => axis.current.show(value, places),
      sync: 'equity',
      onCursor: setAt,
      onLift: setLifted,
      lifts: true,
      onZoom: zoom,
      ends: true,
      span: LEAST_SPAN,
      notes: () => axis.current.notes ?? [],
      limits: (low, high) => axis.current.limits ?? [low, high],
    })
    performance.mark('curves') // the benchmark waits for this
    onDrawn?.()
    return chart
  }, drawn?.equity)
  useEffect(() => {
    const undo = event => {
      if (event.key === 'Escape') setAlone('')
    }
    addEventListener('keydown', undo)
    return () => removeEventListener('keydown', undo)
  }, [])

  const toggle = id => {
    const next = new Set(chosen)
    if (!next.delete(id)) next.add(id)
    setAlone([...next].join(','))
  }
  const keys = event => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -12, PageDown: 12 }[event.key]
    if (step) {
      event.preventDefault()
      equityChart.current?.move(step)
    }
  }
  const choices = html`<div class="filters body choices">
    ${
      isMany &&
      html`<${Choice} label="Curves" value=${range} onChange=${setRange} options=${[
        ['ends', 'Best and worst'],
        ['all', 'All'],
      ]} />`
    }
    ${
      !main &&
      html`<${Choice} label="Lines" value=${by} onChange=${value => {
        setAlone('')
        setBy(value)
      }} options=${[
        ['models', 'Models'],
        ['variants', 'Variants'],
      ]} />`
    }
    ${
      by === 'models' &&
      html`<${Choice} label="Unit" value=${unit} onChange=${setUnit} options=${[
        ['%', '%'],
        ['money', document.body.dataset.currency],
      ]} />`
    }
    <${Moment} label="From" value=${from} onChange=${setFrom} /><${Moment} label="To" value=${to} onChange=${setTo} /></div>`
  const tools = html`<${Choice} label="Window" value=${from || to ? null : window}
    onChange=${value => setChoices({ from: '', to: '', window: value }, true)} options=${WINDOWS} />
    <button class="button" type="button" aria-expanded=${isOpen ? 'true' : 'false'}
      onClick=${() => setOpen(!isOpen)}>Options</button>`
  const place = at ?? (lines?.times.length ?? 0) - 1
  const outside = limits
    ? lines.filter(line => {
        const value = (isMoney ? line.values : line.returns).findLast(each => each != null)
        return value > limits[1] || value < limits[0]
      })
    : []
  const isThin = lines?.every(line => line.values.filter(value => value != null).length < 2)
  const thin = !isThin
    ? ''
    : from || to
      ? 'This range has too few snapshots for a line. '
      : 'A line needs two moments; the first snapshots are being taken. '
  const meaning =
    by === 'variants' ? 'Average return of the models' : isMoney ? 'Equity' : 'Return since the start of the window'
  const pair = lines?.filter(line => chosen.has(line.id)) ?? []
  return html`<${Panel} title=${title} tools=${tools} className="curves">${isOpen && choices}<div class="body">
    <${Pending} entry=${entry} what="The curves" isQuiet=${true} />
    <div class="readout">${thin}${meaning}${
      lines?.times.length
        ? ` · ${day(lines.times[place] * 1000)}, ${clock(lines.times[place] * 1000, false)} ${ZONE}`
        : ''
    }${lifted ? html` · <b><bdi>${lifted.name}</bdi></b>` : ''}${
      pair.length === 2
        ? ` · ${isolated(pair[0].name)} less ${isolated(pair[1].name)}: ${signedPercent(pair[0].returns[place] - pair[1].returns[place])}`
        : ''
    }${
      lines && isMany && range === 'ends'
        ? ` · best and worst ${ENDS}, and the band of the middle half of ${lines.length}`
        : ''
    }</div>
    <div class="chart" ref=${equity} style=${{ minHeight: `${height}px` }} tabindex="0" role="group" onKeyDown=${keys}
      aria-label=${`${title} over time. ${KEYS}${trades ? ' The dots lead to trades, which are listed below.' : ''}`}></div>
    ${
      outside.length > 0 &&
      html`<p
      class="soft small">Beyond the axis: ${outside
        .map(line => `${isolated(line.name)} ${signedPercent(line.returns.findLast(value => value != null))}`)
        .join(', ')}.</p>`
    }
    ${lines && html`<${Legend} lines=${lines} place=${place} chosen=${chosen} toggle=${toggle} isMoney=${isMoney} />`}
  </div></${Panel}>`
}

/** The limits of an axis, robust against a few outliers: the last values between the 5th and 95th percentile, and half
as much again. */
function robust(values) {
  const last = values.map(line => line.findLast(value => value != null))
  const [low, high] = [quantileOf(last, 0.05), quantileOf(last, 0.95)]
  return low === null ? null : [low - (high - low) / 2, high + (high - low) / 2]
}

const keyOf = (...range) => `trading.getEquityCurves ${range}`

/** The curves of a window, or of a range within it. */
export const useCurves = (window, from = '', to = '') =>
  useReport(keyOf(window, from, to), shownMs(), () => readCurves(window, from, to))

/** Read the curves of an address before showing them. */
export function readCurvesAhead(query) {
  const range = [windowOf(query), query.get('from') ?? '', query.get('to') ?? '']
  readAhead(keyOf(...range), () => readCurves(...range))
}

/**
 * Read the curves of a window, or of a custom range; many models are read with less
 * detail.
 */
const readCurves = (window, from, to) =>
  call('trading.getEquityCurves', {
    ...(from || to ? { startDate: from || undefined, endDate: to || undefined } : { window }),
    points: hasMany() ? 200 : 750,
    baselines: true,
  })

const Moment = ({ label, value, onChange }) => html`<label class="moment">${label}
  <input type="datetime-local" value=${minuteOf(value)} title=${ZONE}
    onChange=${event => onChange(timeOf(event.target.value))} /></label>`

function Legend({ lines, place, chosen, toggle, isMoney }) {
  const [text, setText] = useState('')
  const last = lines.times.length - 1
  const sorted = useMemo(
    () => [...lines].sort((line, other) => (other.returns[last] ?? -Infinity) - (line.returns[last] ?? -Infinity)),
    [lines],
  )
  const shown = sorted.filter(line => chosen.has(line.id) || line.name.toLowerCase().includes(text.toLowerCase()))
  return html`${
    lines.length > MANY &&
    html`<input type="search" aria-label="Search lines"
    placeholder=${`Search ${lines.length} lines`} value=${text} onInput=${event => setText(event.target.value)} />`
  }
  <div class=${`legend ${chosen.size ? 'isolating' : ''}`} role="group"
    aria-label="Lines; select one to show only that line">
    ${shown.map(
      (line, number_) => html`<button type="button" key=${number_} class=${line.isBaseline ? 'baseline' : ''}
      aria-pressed=${chosen.has(line.id) ? 'true' : 'false'} onClick=${() => toggle(line.id)}
      title=${line.name}>
      <${Key} color=${line.color} /><span><bdi>${line.name}</bdi></span>
      <span class="soft figure">${isMoney ? number(line.values[place]) : signedPercent(line.returns[place])}</span>
    </button>`,
    )}
  </div>`
}

/** Show a range of times, to the minute, as the range of the address; without one, the whole window. */
function zoom(from, to, isLatest) {
  const minute = seconds => `${new Date(seconds * 1000).toISOString().slice(0, 16)}Z`
  setChoices(
    from === undefined ? { from: '', to: '' } : { from: minute(from), to: isLatest ? '' : minute(to + 60) },
    true,
  )
}

/** A baseline has a line once it has two values; a rule agent's baseline only if no model is that rule agent. */
function isWorthALine(one, known) {
  const isDouble =
    one.variant && known.models.some(model => model.provider === 'rules' && model.variant === one.variant)
  return !isDouble && one.values.filter(value => value != null).length > 1
}

/** The lines of an answer, extended to the live values: {id, name, color, values, returns}, and `times`. */
function linesOf(answer, portfolio, known, by, only) {
  const members = answer.models.filter(one => (!only || only(one)) && (!one.baseline || isWorthALine(one, known)))
  const now = Date.parse(portfolio?.lastUpdatedAt) / 1000
  const liveOf = new Map((portfolio?.snapshots ?? []).map(one => [one.modelId, one.netPortfolio]))
  const all = answer.times.map(time => Date.parse(time) / 1000)
  const begin = Math.max(
    0,
    all.findIndex((_, place) => members.some(one => one.values[place] != null)),
  )
  let end = all.length
  while (end > begin && all[end - 1] >= now) end -= 1 // the current bucket ends with the live value
  const times = all.slice(begin, end)
  const since = Date.parse(answer.start) / 1000
  const isLed = since < times[0] && members.some(one => Date.parse(answer.starts[one.id]?.at) / 1000 <= since)
  if (isLed) times.unshift(since)
  if (now) times.push(now)
  const models = members.map(one => {
    const start = answer.starts?.[one.id]
    const startAt = Date.parse(start?.at) / 1000
    const values = one.values.slice(begin, end).map((value, place) => (all[begin + place] < startAt ? null : value)) // of an earlier run
    if (isLed) values.unshift(startAt <= since ? start.value : null)
    if (now) values.push(liveOf.get(one.id) ?? one.values[end] ?? null)
    return {
      id: one.id,
      name: distinctName(one.id, one.name),
      variant: one.variant,
      color: one.baseline
        ? neutral(one.color ?? known.byVariant.get(one.variant)?.color ?? '')
        : known.colorOf(one.id, one.variant),
      isBaseline: Boolean(one.baseline) || known.isBaseline(one.id),
      values,
      returns: returnsOf(values, start?.value),
    }
  })
  const baselines = new Set(members.filter(one => one.baseline).map(one => one.id))
  const lines =
    by === 'models'
      ? models
      : known.variants.flatMap(variant => {
          const those = models.filter(one => one.variant === variant.id && !baselines.has(one.id))
          if (!those.length) return []
          const returns = averageOf(those.map(one => one.returns))
          return [
            {
              id: variant.id,
              name: variant.label,
              color: variant.color,
              isBaseline: false,
              values: returns,
              returns,
            },
          ]
        })
  return Object.assign(lines, { times })
}

/** The drawn lines: all of them or, if there are many, the best and worst with the band of the middle half. `trades`
are marked on `main`. */
function drawingOf(lines, chosen, isMoney, main, isEnds, trades) {
  const valuesOf = line => (isMoney ? line.values : line.returns)
  const rated = lines
    .filter(line => !line.isBaseline && line.returns.at(-1) != null)
    .sort((line, other) => other.returns.at(-1) - line.returns.at(-1))
  const ends = new Set([...rated.slice(0, ENDS), ...rated.slice(-ENDS)])
  const shown = isEnds ? lines.filter(line => ends.has(line) || line.isBaseline) : lines
  const series = shown.map(line => ({
    name: line.name,
    color: line.color,
    isMain: line.id === main || chosen.has(line.id) || (shown.length <= FEW_LINES && !line.isBaseline),
    isDimmed: line.isBaseline && line.id !== main && !chosen.has(line.id),
    isHidden: chosen.size > 0 && !chosen.has(line.id),
    marks: line.id === main ? marksOn(lines.times, valuesOf(line), trades) : undefined,
  }))
  const quantiles = share =>
    lines.times.map((_, place) =>
      quantileOf(
        rated.map(line => valuesOf(line)[place]),
        share,
      ),
    )
  const band = isEnds ? [0.75, 0.25].map(quantiles) : []
  const bandSeries = band.map((_, place) => ({
    name: place ? 'lower quarter' : 'upper quarter',
    isUnnamed: true,
    isDimmed: true,
    isBandTop: place === 0,
  }))
  return {
    equity: [lines.times, [...bandSeries, ...series], [...band, ...shown.map(valuesOf)]],
  }
}

/** The closes of trades on a curve, each at the last value before it. */
function marksOn(times, values, trades = []) {
  return trades.flatMap(trade => {
    const at = Date.parse(trade.closedAt) / 1000
    const place = times.findLastIndex(time => time <= at)
    return place < 0 || values[place] == null
      ? []
      : [{ at, value: values[place], kind: trade.netPnl > 0 ? 'gain' : 'loss', href: `#/trades/${trade.id}` }]
  })
}
