// @ts-check
// Equity curves: per model or per variant, a window, names at the ends of lines, and what isolates one.
import { setChoices, useChosen } from './address.js'
import { call, hasMany, knownReport, readAhead, shownMs, useReport } from './answers.js'
import { BEST, ENDS_MAX as FEW_LINES, WORST, averageOf, quantileOf, returnsOf, timeChart } from './charts.js'
import { Choice, Moment, Pending, Panel, useChart } from './components.js'
import { moment, number, signedPercent } from './format.js'
import { html, useEffect, useMemo, useRef, useState } from './lib.js'
import { WINDOWS, compareHref, distinctName, entrantName, useModels, windowOf } from './models.js'
import { useLive } from './store.js'
import { positionsOf, useTrades } from './trades.js'

const EQUITY_PX = 320
const NARROW_EQUITY_PX = 220
const LEAST_SPAN = 0.2
const TRADES = 200
export const SAME_S = 600 // two answers of one window are not of the same minute
const HOLD_NOTHING = 'baseline/hold-nothing'
const KEYS =
  'The arrow keys move the cursor, whose box has the values. A drag zooms, a double click shows the whole window.'

/** Which lines are chosen in the address, and how to choose one more or less. */
export function useAlone() {
  const [alone, setAlone] = useChosen('alone', '')
  const chosen = useMemo(() => new Set(alone ? alone.split(',') : []), [alone])
  const toggle = id => {
    const next = new Set(chosen)
    if (!next.delete(id)) next.add(id)
    setAlone([...next].join(','))
  }
  return { chosen, toggle, clear: () => setAlone('') }
}

/** The range of the address: a window of its own, or what is chosen within it. */
export const useRange = () => [useChosen('from', '', true), useChosen('to', '', true)]

/** The lines of a window and a range, extended to the live values: {entry, lines}. `entrants`, rows of the board, join the
accounts of each to one line. */
export function useLines(window, by = 'models', only = undefined, entrants = undefined) {
  const known = useModels()
  const [[from], [to]] = useRange()
  const entry = useCurves(window, from, to)
  const live = useLive()
  const portfolio = to ? null : live.portfolio
  const isReady = Boolean(entry.data && (known.entry.data || known.entry.error)) // a line has no color before the models are known
  const lines = useMemo(
    () => (isReady ? joined(linesOf(entry.data, portfolio, known, by, only), entrants) : null),
    [entry.data, isReady, portfolio, known, by, only, entrants],
  )
  return { entry, lines }
}

/** `only(model)` selects the models to show; `main` is drawn thicker, and is the one whose trades are marked. `notes` are
moments to mark: [{at in seconds, label}]. `isWhole`: the chart has the height of its panel. */
export function Curves({ title = 'Equity', window, only, main, notes, entrants, onDrawn, isWhole = false }) {
  const live = useLive()
  const [[from, setFrom], [to, setTo]] = useRange()
  const [isOpen, setOpen] = useState(Boolean(from || to))
  const [by, setBy] = useChosen('lines', 'models')
  const [unit, setUnit] = useChosen('unit', '%')
  const { chosen, toggle, clear } = useAlone()
  const [trades, setTrades] = useState([])
  const { entry, lines } = useLines(window, by, only, entrants)
  const isMoney = unit !== '%' && by === 'models'
  const marked = main ?? (chosen.size === 1 && by === 'models' ? [...chosen][0] : undefined)
  const held = JSON.stringify(positionsOf(live, one => one.modelId === marked).map(one => [one.id, one.openedAt]))
  const drawn = useMemo(
    () => lines && drawingOf(lines, chosen, isMoney, marked, [...trades, ...heldOf(held)]),
    [lines, chosen, isMoney, marked, trades, held, notes],
  )
  const axis = useRef(null) // of the latest render, since the chart is made once
  axis.current = { isMoney, notes, limits: drawn && !chosen.size && !main ? robust(drawn[2]) : null }
  const height = matchMedia('(max-width: 760px)').matches ? NARROW_EQUITY_PX : isWhole ? undefined : EQUITY_PX
  const [host, chart] = useChart((element, ...inputs) => {
    const made = timeChart(element, ...inputs, {
      height,
      show: (value, places) => (axis.current.isMoney ? number(value, places) : `${number(value, places)} %`),
      write: value => (axis.current.isMoney ? number(value) : signedPercent(value)),
      onZoom: zoom,
      ends: true,
      span: LEAST_SPAN,
      notes: () => axis.current.notes ?? [],
      limits: (low, high) => {
        const [least, most] = axis.current.limits ?? [low, high]
        return [Math.max(low, least), Math.min(high, most)]
      },
    })
    performance.mark('curves') // the benchmark waits for this
    onDrawn?.()
    return made
  }, drawn)
  useEffect(() => {
    const undo = event => event.key === 'Escape' && clear()
    addEventListener('keydown', undo)
    return () => removeEventListener('keydown', undo)
  }, [])
  const keys = event => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -12, PageDown: 12 }[event.key]
    if (!step) return
    event.preventDefault()
    chart.current?.move(step)
  }
  const choices = html`<div class="filters body choices">
    ${
      !main &&
      html`<${Choice} label="Lines" value=${by} onChange=${value => setChoices({ alone: '', lines: value === 'models' ? '' : value })}
        options=${[
          ['models', 'Models'],
          ['variants', 'Variants'],
        ]} />`
    }
    <${Moment} label="From" value=${from} onChange=${setFrom} /><${Moment} label="To" value=${to} onChange=${setTo} /></div>`
  const tools = html`${
    by === 'models' &&
    html`<${Choice} label="Unit" value=${unit} onChange=${setUnit} options=${[
      ['%', '%'],
      ['money', '$'],
    ]} />`
  }<${Choice} label="Window" value=${from || to ? null : window}
    onChange=${value => setChoices({ from: '', to: '', window: value }, true)} options=${WINDOWS} />
    <button class="button" type="button" aria-expanded=${isOpen ? 'true' : 'false'}
      aria-label="Options" onClick=${() => setOpen(!isOpen)}>${isWhole ? '⋯' : 'Options'}</button>`
  const isThin = lines?.every(line => line.values.filter(value => value != null).length < 2)
  const thin = !isThin
    ? ''
    : from || to
      ? 'This range has too few snapshots for a line. '
      : 'A line needs two moments; the first snapshots are being taken. '
  const meaning =
    by === 'variants' ? 'Average return of the models' : isMoney ? 'Equity' : 'Return since the start of the window'
  const pair = chosen.size === 2 && by === 'models' ? [...chosen] : null
  return html`<${Panel} title=${title} tools=${tools} className=${`curves ${isWhole ? 'whole' : ''}`}>${isOpen && choices}<div class="body">
    <${Pending} entry=${entry} what="The curves" isQuiet=${true} />
    ${marked && html`<${TradesOf} modelId=${marked} onTrades=${setTrades} key=${marked} />`}
    <div class="readout">${thin}${meaning}${chosen.size > 0 && html` · <button class="quiet" type="button" onClick=${clear}>Show all</button>`}${
      pair && html` · <a class="inline" href=${compareHref(pair[0], pair[1], window)}>Compare</a>`
    }</div>
    <div class="chart" ref=${host} style=${height && { minHeight: `${height}px` }} tabindex="0" role="group" onKeyDown=${keys}
      aria-label=${`${title} over time. ${KEYS}${marked ? ' The dots lead to trades.' : ''}`}></div>
  </div></${Panel}>`
}

/** Reads the completed trades of a model and draws nothing. */
function TradesOf({ modelId, onTrades }) {
  const { trades } = useTrades({ limit: TRADES, modelId })
  useEffect(() => onTrades(trades), [trades])
  useEffect(() => () => onTrades([]), [])
  return null
}

/** The limits of an axis of many lines, robust against a few outliers: the last values between the 5th and 95th
percentile, and half as much again. */
function robust(values) {
  if (values.length <= FEW_LINES) return null
  const last = values.map(line => line.findLast(value => value != null))
  const [low, high] = [quantileOf(last, 0.05), quantileOf(last, 0.95)]
  return low === null ? null : [low - (high - low) / 2, high + (high - low) / 2]
}

const keyOf = (...range) => `trading.getEquityCurves ${range}`

/** The curves of a window, or of a range within it. */
const useCurves = (window, from = '', to = '') =>
  useReport(keyOf(window, from, to), shownMs(), () => readCurves(window, from, to))

/** The curves of a window as last read, else null. */
export const knownCurves = window => knownReport(keyOf(window, '', ''))

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
  if (one.id === HOLD_NOTHING) return false // it is the zero
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
    const begun = answer.starts[one.id]
    const start = Date.parse(begun?.at) / 1000 < all.at(-1) ? begun : undefined // else the range is of an earlier run
    const startAt = Date.parse(start?.at) / 1000
    const values = one.values.slice(begin, end).map((value, place) => (all[begin + place] < startAt ? null : value)) // of an earlier run
    if (isLed) values.unshift(startAt <= since ? start.value : null)
    if (now) values.push(liveOf.get(one.id) ?? one.values[end] ?? null)
    const first = times[values.findIndex(value => value != null)]
    const isLate = one.baseline && first > times[0] + SAME_S // what it returned is of less than the window
    return {
      id: one.id,
      name: isLate ? `${one.name}, since ${moment(1000 * first)}` : distinctName(one.id, one.name),
      isLate,
      variant: one.variant,
      color: one.baseline ? (known.byVariant.get(one.variant)?.color ?? '') : known.colorOf(one.id, one.variant),
      isReference: one.baseline,
      isBaseline: one.baseline || known.isBaseline(one.id),
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

/** The lines with one for each entrant of several accounts: the mean of theirs, where all have a value. */
function joined(lines, entrants = []) {
  const byId = new Map(lines.map(line => [line.id, line]))
  for (const one of entrants) {
    const { modelId, modelIds } = one
    const those = modelIds.flatMap(id => byId.get(id) ?? [])
    if (modelIds.length < 2 || !those.length) continue
    const meanOf = key =>
      averageOf(those.map(line => line[key])).map((mean, place) =>
        those.some(line => line[key][place] == null) ? null : mean,
      )
    modelIds.forEach(id => byId.delete(id))
    byId.set(modelId, {
      ...those[0],
      id: modelId,
      name: entrantName(one),
      values: meanOf('values'),
      returns: meanOf('returns'),
    })
  }
  return Object.assign([...byId.values()], { times: lines.times })
}

/** What is drawn of lines: the chosen ones in front of the others, with `trades` marked on `marked`. */
function drawingOf(lines, chosen, isMoney, marked, trades) {
  const valuesOf = line => (isMoney ? line.values : line.returns)
  const rated = lines
    .filter(line => line.returns.at(-1) != null)
    .sort((line, other) => other.returns.at(-1) - line.returns.at(-1))
  const told = new Set(lines.length <= FEW_LINES ? lines : [...rated.slice(0, BEST), ...rated.slice(-WORST)])
  const series = lines.map(line => {
    const isChosen = line.id === marked || chosen.has(line.id)
    return {
      name: line.name,
      color: line.color,
      isMain: isChosen || (told.has(line) && !line.isBaseline && !chosen.size),
      isDimmed: (line.isBaseline || !told.has(line)) && !isChosen,
      isDashed: line.isBaseline,
      isFaint: chosen.size > 0 && !isChosen,
      marks: line.id === marked ? marksOn(lines.times, valuesOf(line), trades) : undefined,
    }
  })
  return [lines.times, series, lines.map(valuesOf)]
}

const heldOf = text => JSON.parse(text).map(([id, openedAt]) => ({ id, openedAt }))

/** The entries and exits of trades on a curve, each at the last value before it. */
function marksOn(times, values, trades) {
  const markOf = (text, kind, trade) => {
    const at = Date.parse(text) / 1000
    const place = times.findLastIndex(time => time <= at)
    return place < 0 || values[place] == null ? [] : [{ at, value: values[place], kind, href: `#/trades/${trade.id}` }]
  }
  return trades.flatMap(trade => [
    ...markOf(trade.openedAt, 'entry', trade),
    ...(trade.closedAt ? markOf(trade.closedAt, trade.netPnl > 0 ? 'gain' : 'loss', trade) : []),
  ])
}
