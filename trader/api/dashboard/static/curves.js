// Equity curves with drawdowns: per model or per variant, a window, a legend that isolates, and a crosshair.
import { call, readAhead, useReport } from './answers.js'
import { averageOf, drawdownsOf, returnsOf, timeChart } from './charts.js'
import { Choice, Failed, Key, Panel, useChart } from './components.js'
import { day, clock, number, signedPercent, percent } from './format.js'
import { html, useEffect, useMemo, useState } from './lib.js'
import { WINDOWS, modelCount, startOf, useModels } from './models.js'
import { useLive } from './store.js'

const EQUITY_PX = 320
const NARROW_EQUITY_PX = 240
const DRAWDOWN_PX = 92
const FEW = 20
const AFTER_EQUITY_MS = 30

/** `only(model)` chooses the models that are shown, and `variant` those of the query; `main` is drawn thicker. */
export function Curves({ title = 'Equity', window, onWindow, only, main, onDrawn }) {
  const known = useModels()
  const entry = useReport(keyOf(window), 60_000, () => readCurves(window))
  const state = useLive()
  const [by, setBy] = useState('models')
  const [unit, setUnit] = useState('%')
  const [chosen, setChosen] = useState(() => new Set())
  const [at, setAt] = useState(null)

  const isReady = Boolean(entry.data && (known.entry.data || known.entry.error)) // without the models a line has no color
  const lines = useMemo(() => (isReady ? linesOf(entry.data, state.portfolio, known, by, only) : null), [entry.data, isReady, state.portfolio, known, by, only])
  const isMoney = unit !== '%' && by === 'models'
  const drawn = useMemo(() => lines && drawingOf(lines, chosen, isMoney, main), [lines, chosen, isMoney, main])
  const show = value => (isMoney ? number(value, Math.abs(value) >= 1000 ? 0 : 2) : `${number(value, Math.abs(value) < 10 ? 1 : 0)} %`)
  const height = matchMedia('(max-width: 760px)').matches ? NARROW_EQUITY_PX : EQUITY_PX
  const [equity, equityChart] = useChart(
    (host, ...inputs) => {
      const chart = timeChart(host, ...inputs, { height, show: value => showNow(value), sync: 'equity', onCursor: setAt })
      performance.mark('curves') // what the benchmark waits for
      onDrawn?.()
      return chart
    }, drawn?.equity)
  const [drawdown] = useChart(
    (host, ...inputs) => timeChart(host, ...inputs, {
      height: DRAWDOWN_PX, show: value => `${number(value, Math.abs(value) < 10 ? 1 : 0)} %`, sync: 'equity', top: 0, fill: lines?.length === 1,
    }),
    drawn?.drawdown, AFTER_EQUITY_MS)
  useEffect(() => { showNow = show })

  const toggle = id => setChosen(before => {
    const next = new Set(before)
    if (!next.delete(id)) next.add(id)
    return next
  })
  const keys = event => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -12, PageDown: 12 }[event.key]
    if (step) { event.preventDefault(); equityChart.current?.move(step) }
    if (event.key === 'Escape') setChosen(new Set())
  }
  const tools = html`
    ${!main && html`<${Choice} label="Lines" value=${by} onChange=${value => { setBy(value); setChosen(new Set()) }} options=${[['models', 'Models'], ['variants', 'Variants']]} />`}
    ${by === 'models' && html`<${Choice} label="Unit" value=${unit} onChange=${setUnit} options=${[['%', '%'], ['money', document.body.dataset.currency]]} />`}
    <${Choice} label="Window" value=${window} onChange=${onWindow} options=${WINDOWS} />`
  const place = at ?? (lines?.times.length ?? 0) - 1
  return html`<${Panel} title=${title} tools=${tools} className="curves"><div class="body">
    <${Failed} entry=${entry} what="The curves" />
    ${lines && lines.times.length < 2 && html`<p class="empty">A line needs two moments; the first snapshots are being taken.</p>`}
    <div class="readout">${by === 'variants' ? 'Average return of the models' : isMoney ? 'Equity' : 'Return since the start of the window'}${
      lines?.times.length ? ` · ${day(lines.times[place] * 1000)}, ${clock(lines.times[place] * 1000, false)} UTC` : ''}</div>
    <div class="chart" ref=${equity} style=${{ minHeight: `${height}px` }} tabindex="0" role="group" onKeyDown=${keys}
      aria-label=${`${title} over time. The arrow keys move the crosshair, whose values are in the legend.`}></div>
    <div class="axis-title">Drawdown</div>
    <div class="chart" ref=${drawdown} style=${{ minHeight: `${DRAWDOWN_PX}px` }} role="img" aria-label="Drawdown over time"></div>
    ${lines && html`<${Legend} lines=${lines} place=${place} chosen=${chosen} toggle=${toggle} isMoney=${isMoney} />`}
  </div></${Panel}>`
}

let showNow = number

const keyOf = window => `trading.getEquityCurves ${window}`

/** Read the curves of a window before they are shown. */
export const readCurvesAhead = window => readAhead(keyOf(window), () => readCurves(window))

/** Read the curves of a window: of few models with the finest detail of a week or a month, of many with less. */
const readCurves = window => call('trading.getEquityCurves', {
  startDate: startOf(window), points: modelCount() > FEW ? 200 : 750, baselines: true })

function Legend({ lines, place, chosen, toggle, isMoney }) {
  const last = lines.times.length - 1
  const sorted = useMemo(() => [...lines].sort((one, other) => (other.returns[last] ?? -Infinity) - (one.returns[last] ?? -Infinity)), [lines])
  return html`<div class=${`legend ${chosen.size ? 'isolating' : ''}`} role="group" aria-label="Lines; press one to show it alone">
    ${sorted.map(one => html`<button type="button" key=${one.id} class=${one.isBaseline ? 'baseline' : ''}
      aria-pressed=${chosen.has(one.id) ? 'true' : 'false'} onClick=${() => toggle(one.id)}
      title=${`${one.name}: drawdown ${percent(one.drawdowns[place])}`}>
      <${Key} color=${one.color} /><span>${one.name}</span>
      <span class="soft figure">${isMoney ? number(one.values[place]) : signedPercent(one.returns[place])}</span>
    </button>`)}
  </div>`
}

/** A baseline has a line once it has two values; that of a rule agent only where no model is that agent itself. */
function isWorthALine(one, known) {
  const isDouble = one.variant && known.models.some(model => model.provider === 'rules' && model.variant === one.variant)
  return !isDouble && one.values.filter(value => value != null).length > 1
}

/** The lines of an answer, to the live values at their end: {id, name, color, values, returns, drawdowns}, and `times`. */
function linesOf(answer, portfolio, known, by, only) {
  const members = answer.models.filter(one => (!only || only(one)) && (!one.baseline || isWorthALine(one, known)))
  const now = Date.parse(portfolio?.lastUpdatedAt) / 1000
  const liveOf = new Map((portfolio?.snapshots ?? []).map(one => [one.modelId, one.netPortfolio]))
  const all = answer.times.map(time => Date.parse(time) / 1000)
  const begin = Math.max(0, all.findIndex((_, place) => members.some(one => one.values[place] != null)))
  let end = all.length
  while (end > begin && all[end - 1] >= now) end -= 1 // the bucket that is still running ends with the live value
  const times = all.slice(begin, end)
  if (now) times.push(now)
  const models = members.map(one => {
    const values = one.values.slice(begin, end)
    if (now) values.push(liveOf.get(one.id) ?? one.values[end] ?? null)
    return { id: one.id, name: one.name, variant: one.variant, color: one.color ?? known.colorOf(one.id, one.variant),
      isBaseline: Boolean(one.baseline) || known.isBaseline(one.id), values, returns: returnsOf(values), drawdowns: drawdownsOf(values) }
  })
  const baselines = new Set(members.filter(one => one.baseline).map(one => one.id))
  const lines = by === 'models' ? models : known.variants.flatMap(variant => {
    const those = models.filter(one => one.variant === variant.id && !baselines.has(one.id))
    if (!those.length) return []
    const returns = averageOf(those.map(one => one.returns))
    const drawdowns = drawdownsOf(returns.map(value => (value == null ? null : 100 + value)))
    return [{ id: variant.id, name: variant.label, color: variant.color, isBaseline: false, values: returns, returns, drawdowns }]
  })
  return Object.assign(lines, { times })
}

function drawingOf(lines, chosen, isMoney, main) {
  const series = lines.map(one => ({
    name: one.name, color: one.color, isMain: one.id === main || chosen.has(one.id) || lines.length <= 12 && !one.isBaseline,
    isDimmed: one.isBaseline && one.id !== main && !chosen.has(one.id), isHidden: chosen.size > 0 && !chosen.has(one.id),
  }))
  return {
    equity: [lines.times, series, lines.map(one => (isMoney ? one.values : one.returns))],
    drawdown: [lines.times, series, lines.map(one => one.drawdowns)],
  }
}
