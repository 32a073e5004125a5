// @ts-check
// The report of a season or of the current runs, and what that of a backtest shares with it.
import { THICK, averageOf, axes, timeChart } from './charts.js'
import { inks, onGround, onScheme } from './colors.js'
import { Key, Tile, scaleOf, useChart } from './components.js'
import { EvidenceBoard, boundsOf } from './evidence.js'
import { number, percent, signed, signedPercent, tone, whole } from './format.js'
import { html, useMemo } from './lib.js'
import { Section, Sheet, figure, gain, interval, text } from './report.js'

const HEIGHT = 260
const BINS = 48
const TRADE_PERCENT = 2
const DAY_MS = 86_400_000
const PARTS = [
  ['gross', 'gross, completed'],
  ['unrealized', 'gross, still open'],
  ['fees', 'trading fees'],
  ['funding', 'funding'],
  ['liquidationFees', 'liquidation fees'],
  ['insurance', 'insurance'],
  ['change', 'change'],
]

const date = new Intl.DateTimeFormat('en-GB', { dateStyle: 'long', timeStyle: 'short', timeZone: 'UTC' })
const dateOf = at => date.format(new Date(at))

/** The data with what its texts depend on: in a backtest, accounts trade, and a variant with one is named as it is. */
function contentOf(data) {
  const isBacktest = data.kind === 'Backtest'
  const models = data.models.map(({ account, ...one }) => ({ ...account, ...one }))
  const variants = data.variants
    .map(one => ({ ...one, models: models.filter(model => model.variant === one.id) }))
    .map(one => ({ ...one, label: isBacktest && one.models.length === 1 ? one.models[0].name : one.label }))
  return {
    ...data,
    models,
    isBacktest,
    entrant: isBacktest ? 'account' : 'model',
    hasCosts: !isBacktest || models.some(one => one.modelCost != null),
    variants: variants.filter(one => one.models.length),
    variantOf: id => variants.find(one => one.id === id),
  }
}

/** @param {any} props `children` follow the equity. */
export function Report({ data, children }) {
  const content = useMemo(() => contentOf(data), [])
  const { entrant, variants, models, references, variantOf } = content
  const equity =
    models.length > 1
      ? `The equity of each variant in percent of the starting capital; of several ${entrant}s,
    their average.`
      : 'The equity in percent of the starting capital.'
  const groups = data.trades.map(({ variant, values }) => ({ ...variantOf(variant), values }))
  const dashed = references.length ? ` Dashed: ${references.map(one => one.name).join(', ')}.` : ''
  return html`<${Head} ...${content} />
    <${Section} title="Equity" words=${equity + dashed}><${Curves} content=${content} valuesOf=${values => values} /></${Section}>
    ${children}
    <${Section} title="Drawdowns" words="How far each equity above is below its peak so far.">
      <${Curves} content=${content} valuesOf=${fallen} top=${0} /></${Section}>
    <${Section} title="Trades" words="Net profit of completed trades in percent of their entry notional.">
      <div class="panel card"><${Legend} variants=${variants} /><${Drawn}
        make=${host => histogram(host, groups, -TRADE_PERCENT, TRADE_PERCENT, BINS, HEIGHT)} /></div>
      <${Trades} ...${content} /></${Section}>
    <${Section} title="Where the money went" words=${`From the capital at the start to the equity at the end, each part
      summed from the books.${content.hasCosts ? ' The cost of the language models is paid outside the accounts and listed separately.' : ''}`}>
      <${Costs} ...${content} /></${Section}>
    <${Section} title="Leaderboard" words=${`Best return first. The bar is the 95 % interval of the return
      in all whole hours of the account's run; a board of the service has that of its window, so the two differ. The verdict compares
      each ${entrant} with the next one, hour by hour; all verdicts together are wrong in at most 5 % of cases, however often
      one looks. In a replay of candles, trades held under a minute are on drawn prices.`}><${Board} ...${content} /></${Section}>
    ${
      data.evidence &&
      html`<${Section} title="Evidence" words="Each entrant, a model in one configuration, compared with its references on
      the same hours: its rule agent, holding nothing, buy and hold, and the best other entrant. Intervals are 95 %, for one
      look."><div class="panel" id="evidence"><${EvidenceBoard} answer=${data.evidence} isLinked=${false}
        known=${{ byId: new Map(), colorOf: id => data.colors[id] }} /></div></${Section}>`
    }`
}

function Head({ kind, name, start, end, entrant, isBacktest, models, trades }) {
  const changePercent = (100 * sumOf(models, 'change')) / sumOf(models, 'initialCapital')
  return html`<h1>${kind}</h1><p><bdi>${name}</bdi>: ${dateOf(start)} to ${dateOf(end)} UTC</p>
    <div class="panel card tiles">
      <${Tile} label=${`${entrant}s`} value=${whole(models.length)} />
      <${Tile} label="days" value=${number((Date.parse(end) - Date.parse(start)) / DAY_MS, 1)} />
      <${Tile} label="completed trades" value=${whole(trades.reduce((sum, one) => sum + one.values.length, 0))} />
      <${Tile} label=${isBacktest ? 'decisions' : 'invocations'}
        value=${whole(sumOf(models, 'invocations'))} />
      <${Tile} label="return of all accounts" value=${signedPercent(changePercent)}
        kind=${tone(changePercent)} /></div>`
}

const Legend = ({ variants }) =>
  html`<div class="keys">${variants.map(one => html`<span key=${one.id}><${Key} color=${one.color} />${one.label}</span>`)}</div>`

/** A chart of all variants, then one of each that has several models. */
function Curves({ content, valuesOf, top }) {
  const { variants, entrant } = content
  const several = variants.filter(one => one.models.length > 1)
  return html`<div class="panel card"><${Legend} variants=${variants} />
      <${Chart} content=${content} valuesOf=${valuesOf} top=${top} /></div>
    ${
      several.length > 0 &&
      html`<div class="cards">${several.map(
        one => html`<div key=${one.id} class="panel card">
        <h3>${one.label}, ${one.models.length} ${entrant}s</h3>
        <${Chart} content=${content} variant=${one} valuesOf=${valuesOf} top=${top} /></div>`,
      )}</div>`
    }`
}

/** A chart that `make` draws once in its place. */
function Drawn({ make }) {
  const [host] = useChart(
    make,
    useMemo(() => [], []),
  )
  return html`<div class="chart" ref=${host} style=${{ minHeight: `${HEIGHT}px` }}></div>`
}

/** @param {any} props Without a variant, the chart is of all of them. */
function Chart({ content, variant, valuesOf, top }) {
  const { times } = content
  const lines = useMemo(() => linesOf(content, variant), [])
  const values = useMemo(() => lines.map(one => valuesOf(one.values)), [])
  if (times.length < 2) return html`<div class="chart">A line needs two hours; there is one so far.</div>`
  const options = {
    height: HEIGHT,
    show: (value, places) => `${number(value, places)} %`,
    write: signedPercent,
    ends: true,
    top,
  }
  return html`<${Drawn} make=${host => timeChart(host, times, lines, values, options)} />`
}

/** The lines of a chart: the variants and the references or, for one variant, its average and its models as thin lines. */
function linesOf({ variants, references }, variant) {
  const lines = (variant ? [variant] : variants).flatMap(({ color, label, models }) => {
    if (models.length < 2) return models.map(one => ({ ...one, color, isMain: true }))
    const average = { name: `${label}, average`, color, isMain: true, values: averageOf(models.map(one => one.values)) }
    return variant ? [...models.map(one => ({ ...one, color, isDimmed: true })), average] : [average]
  })
  const dashed = references.map(one => ({ ...one, color: inks().text, isMain: true, isDashed: true }))
  return variant ? lines : [...lines, ...dashed]
}

const fallen = values => drawdownsOf(values.map(value => (value == null ? null : 100 + value)))

function Trades({ isBacktest, trades, variantOf }) {
  const rows = trades.map(one => ({
    ...one,
    ...one.closed,
    name: variantOf(one.variant).label,
    count: one.values.length,
  }))
  const share = (key, title = key) => figure(key, title, value => percent(value, 1))
  const groups = Object.keys(trades[0]?.closed ?? {})
  return html`<${Sheet} label="Trades" rows=${rows} columns=${[
    text('name', isBacktest ? 'account' : 'variant'),
    figure('count', 'trades'),
    share('won'),
    gain('median', 'median net', '\u00a0%', 3),
    figure('held', 'median held', value => `${whole(value)} min`),
    share('brief', 'under 1 min'),
    ...groups
      .filter(group => group !== 'by operator' || !isBacktest || rows.some(row => row[group]))
      .map(each => share(each)),
  ]} />`
}

const modelCost = figure('modelCost', 'model cost, USD', value => number(value))

const COSTS = ['liquidationFees', 'fees']

/** The sum of a figure; costs are negative. What is unknown of all has none. */
function sumOf(models, key) {
  const known = models.flatMap(one => one[key] ?? []).map(Number)
  const sum = known.reduce((sum, value) => sum + value, 0)
  return known.length ? Number((COSTS.includes(key) ? -sum : sum).toFixed(8)) : null
}

const sumsOf = models => Object.fromEntries([...PARTS, ['modelCost']].map(([key]) => [key, sumOf(models, key)]))

function Costs({ models, variants, hasCosts, isBacktest, isSeason, unexplained }) {
  const all = { name: 'all', ...sumsOf(models) }
  const rows = [...variants.map(one => ({ name: one.label, ...sumsOf(one.models) })), all]
  const sums = PARTS.map(([key, name]) => ({ name, amount: all[key] }))
  const least = Math.min(0, ...sums.map(one => one.amount))
  const most = Math.max(0, ...sums.map(one => one.amount))
  return html`${
    !isSeason && // the prices at its ends have no rows: their effect is the remainder
    html`<p class=${unexplained.length ? 'seal bad' : 'seal'}>${
      unexplained.length
        ? `The books do not explain the equity of ${unexplained.length} accounts: ${unexplained.slice(0, 10).join(', ')}.`
        : 'The parts of every account add up to the change of its equity, to the last digit.'
    }</p>`
  }<${Sheet} label="Parts of the change" rows=${sums} columns=${[
    text('name', 'part'),
    {
      key: 'bar',
      title: '',
      isText: true,
      cell: row => html`<${Bar} value=${row.amount} least=${least} most=${most} />`,
    },
    figure('amount', 'amount', value => signed(value, 0)),
  ]} />
  <${Sheet} label="Where the money went" rows=${rows} columns=${[
    text('name', isBacktest ? 'account' : 'variant'),
    ...PARTS.map(([key, name]) => gain(key, name)),
    hasCosts && modelCost,
  ]} />`
}

/** A bar from zero to the value on the scale from `least` to `most`, which contains both. */
function Bar({ value, least, most }) {
  const [from, to] = [0, value].map(one => (one - least) / (most - least || 1)).sort((one, other) => one - other)
  return html`<span class=${`bar ${value >= 0 ? 'gain' : 'loss'}`} style=${{ '--from': from, '--to': to }}><i></i></span>`
}

function Board({ entrant, hasCosts, models, unvalued, variantOf }) {
  const bounds = scaleOf(
    models.map(one => one.returnPercent),
    models.flatMap(one => one.interval ?? []),
  )
  return html`<${Sheet} label="Leaderboard" rows=${[...models, ...unvalued]} columns=${[
    text('name', entrant, row =>
      row.returnPercent == null
        ? html`${row.name}<span class="sub">no snapshot yet since it began on ${dateOf(row.startedAt)} UTC with ${number(row.initialCapital)}</span>`
        : row.name,
    ),
    text('variant', 'variant', row => html`<${Key} color=${variantOf(row.variant).color} /> ${row.variant}`),
    gain('returnPercent', 'return', '\u00a0%'),
    interval('95 % interval, for one look', bounds, row => {
      const [low, high] = row.interval ?? []
      const told = row.interval && boundsOf({ low, high })
      return { value: row.returnPercent, low, high, told, reason: row.reason, color: variantOf(row.variant).color }
    }),
    text('verdict', 'against the next', row =>
      row.verdict
        ? html`<span class=${row.verdict[1] ? 'soft' : ''} title=${row.verdict[1]}>${row.verdict[0]}</span>`
        : '–',
    ),
    figure('drawdown', 'drawdown', value => percent(value, 1)),
    figure('withinMinute', 'trades under 1 min', (value, row) =>
      value == null ? '–' : `${whole(value)} of ${whole(row.trades)}`,
    ),
    gain('change', 'change'),
    figure('equity', 'equity', value => number(value)),
    hasCosts && modelCost,
  ]} />`
}

/** Draw the shares of values in bins between `low` and `high`, one outline for each of `groups`: {name, color, values}. */
function histogram(host, groups, low, high, bins, height) {
  const width = (high - low) / bins
  const places = Array.from({ length: bins }, (_, bin) => low + width * (bin + 0.5))
  const shares = groups.map(group => {
    const counts = new Array(bins).fill(0)
    for (const value of group.values) counts[Math.min(bins - 1, Math.max(0, Math.floor((value - low) / width)))] += 1
    return counts.map(count => (100 * count) / (group.values.length || 1))
  })
  const build = () =>
    new globalThis.uPlot(
      {
        width: Math.max(240, host.clientWidth),
        height,
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, y: false },
        scales: { x: { time: false } },
        axes: axes((value, places) => `${value.toFixed(places)} %`, host.clientWidth, height).map((axis, place) =>
          place ? axis : { ...axis, values: (_, marks) => marks.map(mark => `${mark} %`) },
        ),
        series: [
          {},
          ...groups.map(group => ({
            label: group.name,
            stroke: onGround(group.color),
            width: THICK,
            paths: globalThis.uPlot.paths.stepped({ align: 0 }),
            points: { show: false },
          })),
        ],
      },
      [places, ...shares],
      host,
    )
  let chart = build()
  onScheme(() => {
    chart.destroy()
    chart = build()
  })
}

/** Percent below the highest value so far, at most 100. */
function drawdownsOf(values) {
  let peak = -Infinity
  return values.map(value => {
    if (value == null) return null
    peak = Math.max(peak, value)
    return peak > 0 ? (100 * Math.max(0, value)) / peak - 100 : 0
  })
}
