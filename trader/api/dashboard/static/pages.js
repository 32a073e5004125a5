// The pages of the dashboard: overview, one model, one variant, all models, with the leaderboard.
import { useAnswer } from './answers.js'
import { Choice, Declared, Failed, Interval, Key, Manual, ModelName, Money, Panel, SeasonLine, Table, Tile, VariantName, scaleOf, useStages } from './components.js'
import { Conversations } from './conversations.js'
import { Curves } from './curves.js'
import { EvidenceTable, ModelBehaviour, ModelEvidence } from './evidence.js'
import { moment, number, percent, signed, signedPercent, tone, whole } from './format.js'
import { html, useMemo, useState } from './lib.js'
import { WINDOWS, useModels, useWindow } from './models.js'
import { useLive } from './store.js'
import { Positions, TradeTotals, Trades, positionsOf, useTrades } from './trades.js'

const BUDGET_STATES = { manage: 'budget spent: only reduces', pause: 'budget spent: paused' }

const budgetNote = budget => `${budget.isEstimated ? 'estimated; ' : ''}${budget.usdPerDay == null ? 'within the budget of all models' : `of ${number(budget.usdPerDay)} a day`}`

export function Overview({ route }) {
  const [window, setWindow] = useWindow(route)
  const [isDrawn, setDrawn] = useState(false)
  const stage = useStages(isDrawn, 5)
  return html`
    ${stage > 0 ? html`<${Summary} />` : html`<section class="panel summary"></section>`}
    <div class="split">
      <div class="stack">
        <${Curves} window=${window} onWindow=${setWindow} onDrawn=${() => setDrawn(true)} />
        ${stage > 1 && html`<${Board} window=${window} onWindow=${setWindow} isCompact=${true} />`}
        ${stage > 3 && html`<${Positions} isCompact=${true} />`}
        ${stage > 4 && html`<${Trades} hasFilters=${false} limit=${20} title="Latest trades" />`}
      </div>
      <div class="side">${stage > 2 && html`<${Conversations} isFeed=${true} title="Conversations" />`}</div>
    </div>`
}

/** All accounts of models together, from the live streams: the first four add up to the equity. */
function Summary() {
  const state = useLive()
  const stats = useAnswer('analytics.getModelStats', { variant: 'all' }) // the same input as the leaderboard
  const run = useAnswer('analytics.getRunInfo')
  const snapshots = state.portfolio?.snapshots ?? []
  const ids = new Set(snapshots.map(snapshot => snapshot.modelId))
  const overall = (stats.data?.overall ?? []).filter(row => ids.has(row.modelId))
  const held = positionsOf(state, position => ids.has(position.modelId))
  const equity = sum(snapshots, snapshot => snapshot.netPortfolio)
  const unrealized = sum(snapshots, snapshot => snapshot.unrealizedPnl)
  const realized = sum(overall, row => figureOf(row.totalPnl))
  const cost = sum(overall, row => figureOf(row.costUsd))
  const capital = sum(overall, row => capitalOf(row))
  const known = overall.length > 0 && overall.length === ids.size
  const paid = equity - capital - realized - unrealized
  const show = (value, write = number) => (known ? write(value) : '–')
  return html`<section class="panel summary" aria-label="All accounts together"><div class="body tiles">
    <${Tile} label="Start" value=${show(capital)} note=${run.data ? `since ${moment(run.data.runStartTime)}` : ''} />
    <${Tile} label="+ Realized, net" value=${show(realized, signed)} kind=${tone(realized)} note=${run.data ? `${whole(run.data.trades)} completed trades` : ''} />
    <${Tile} label="+ Unrealized" value=${show(unrealized, signed)} kind=${tone(unrealized)} note=${`${whole(held.length)} open positions`} />
    <${Tile} label="+ Paid for open positions" value=${show(paid, signed)} kind=${tone(paid)} note="fees and funding so far" />
    <${Tile} label=${`= Equity of ${whole(snapshots.length)} models`} value=${show(equity)}
      note=${known && html`<span class=${tone(equity - capital)}>${signedPercent((100 * equity) / capital - 100)}</span> since the start`} />
    <${Tile} label="Model cost, USD" value=${stats.data ? number(cost) : '–'} note=${run.data ? `${whole(run.data.invocations)} invocations; not in the equity` : ''} />
  </div></section>`
}

const sum = (list, of) => list.reduce((total, item) => total + (of(item) ?? 0), 0)

/** The initial capital of a model, from its value and return. */
function capitalOf(row) {
  const [value, gain] = [figureOf(row.accountValue), figureOf(row.returnPercent)]
  return value === null || gain === null ? null : value / (1 + gain / 100)
}

const FIGURES = [
  ['sharpeRatio', 'Sharpe', number, 'sharpeInterval'], ['sortinoRatio', 'Sortino', number], ['calmarRatio', 'Calmar', number],
  ['profitFactor', 'Profit factor', number, 'profitFactorInterval'], ['expectancy', 'Expectancy', signed], ['recoveryFactor', 'Recovery factor', number],
  ['avgTradeSize', 'Average size', number], ['avgHoldTimeMinutes', 'Average hold, min', whole], ['longPercent', 'Long trades', percent],
  ['avgConfidence', 'Average confidence', percent], ['avgRMultiple', 'Average R', number], ['longestWinStreak', 'Longest win streak', whole],
  ['longestLossStreak', 'Longest loss streak', whole], ['failureRate', 'Failed invocations', percent],
  ['inputTokens', 'Tokens in', whole], ['outputTokens', 'Tokens out', whole],
]

/** A figure with its 95 % interval; a figure without one is not shown. */
const sure = (value, bounds, write) => (bounds ? `${write(value)} (${write(bounds.low)} to ${write(bounds.high)})` : '–')

/** The share of wins with its 95 % interval, for at least ten trades. */
const wonOf = figures => (figures?.winRateInterval
  ? `won ${percent(figureOf(figures.winRate), 0)} (${percent(figures.winRateInterval.low, 0)} to ${percent(figures.winRateInterval.high, 0)})` : '')

export function ModelPage({ route, id }) {
  const [window, setWindow] = useWindow(route)
  const known = useModels()
  const model = known.byId.get(id)
  const overall = useAnswer('analytics.getModelStats', { variant: model?.variant ?? 'all' })
  const advanced = useAnswer('analytics.getModelStats', { mode: 'advanced', variant: model?.variant ?? 'all' })
  const only = useMemo(() => one => one.id === id || (one.baseline ? !one.variant || one.variant === model?.variant
    : known.isBaseline(one.id) && one.variant === model?.variant), [id, known])
  const { trades } = useTrades({ limit: 200, modelId: id }) // the same input as the table below
  const figures = overall.data?.overall?.find(one => one.modelId === id)
  const more = advanced.data?.advanced?.find(one => one.modelId === id)
  if (known.entry.data && !model) return html`<p class="notice">There is no model ${id}. <a href="#/models">All models</a></p>`
  if (!model) return html`<${Failed} entry=${known.entry} what="The models" />`
  return html`
    <div class="title"><${Key} color=${known.colorOf(id)} /><h1>${model.name}</h1><${VariantName} variant=${model.variant} />
      <span class="badge">${model.provider}</span><span class="soft">${!model.declared && model.routerModelName}</span><${Declared} by=${model.declared} />
      ${model.manualSince && html`<${Manual} />`}
      ${!model.active && html`<span class="badge warn">inactive</span>`}
      ${figures?.budget && figures.budget.state !== 'open' && html`<span class="badge warn">${BUDGET_STATES[figures.budget.state]}</span>`}</div>
    ${model.warning && html`<p class="notice">${model.warning}</p>`}
    <${Failed} entry=${overall} what="The statistics" />
    <section class="panel" aria-label="Figures"><div class="body tiles">
      <${Tile} label="Equity" value=${number(figureOf(figures?.accountValue))} note=${figures && html`<span class=${tone(figureOf(figures.returnPercent))}>${signedPercent(figureOf(figures.returnPercent))}</span> since the start`} />
      <${Tile} label="Net after model cost" value=${signed(figureOf(figures?.netAfterCost))} kind=${tone(figureOf(figures?.netAfterCost))} note=${`cost ${number(figureOf(figures?.costUsd))} USD${figures?.costIsPartial ? ', not all of it known' : ''}`} />
      ${figures?.budget && html`<${Tile} label="Model cost today, USD" value=${number(figures.budget.spentTodayUsd)} note=${budgetNote(figures.budget)} />`}
      <${Tile} label="Completed trades" value=${whole(figures?.tradesCount)} note=${wonOf(figures)} />
      <${Tile} label="Largest drawdown" value=${percent(figureOf(figures?.maxDrawdown))} note=${`best ${signed(figureOf(figures?.biggestWin))}, worst ${signed(figureOf(figures?.biggestLoss))}`} />
      <${Tile} label="Invocations" value=${whole(model.invocationCount)} note=${model.lastInvokedAt ? `last ${moment(model.lastInvokedAt)}` : ''} />
    </div></section>
    <div class="split"><div class="stack">
      <${Curves} window=${window} onWindow=${setWindow} only=${only} main=${id} trades=${trades} />
      <${Positions} only=${one => one.modelId === id} hasNames=${false} />
      <${ModelEvidence} id=${id} window=${window} />
      <${ModelBehaviour} id=${id} />
      <${Panel} title="Statistics"><dl class="facts body">${FIGURES.map(([key, label, write, bounds]) => html`<div key=${key}><dt>${label}</dt><dd>${!bounds ? write(figureOf(more?.[key])) : sure(figureOf(more?.[key]), more?.[bounds], write)}</dd></div>`)}</dl></${Panel}>
      <${TradeTotals} modelId=${id} />
      <${Trades} modelId=${id} />
    </div><div class="side"><${Conversations} modelId=${id} isFeed=${true} /></div></div>`
}

export function VariantPage({ route, id }) {
  const [window, setWindow] = useWindow(route)
  const known = useModels()
  const stats = useAnswer('variants.getVariantStats')
  const variant = known.byVariant.get(id)
  const figures = stats.data?.stats.find(one => one.variantId === id)
  const only = useMemo(() => one => one.variant === id || Boolean(one.baseline && !one.variant), [id])
  if (known.variants.length && !variant) return html`<p class="notice">There is no variant ${id}. <a href="#/models">All models and variants</a></p>`
  if (!variant) return html`<div class="empty">Reading …</div>`
  return html`
    <div class="title"><${Key} color=${variant.color} /><h1>${variant.label}</h1><span class="badge">temperature ${variant.temperature}</span></div>
    <p class="lede">${variant.description}</p>
    <section class="panel" aria-label="Figures"><div class="body tiles">
      <${Tile} label="Models" value=${whole(figures?.modelCount)} />
      <${Tile} label="Realized, net" value=${signed(figures?.totalPnl)} kind=${tone(figures?.totalPnl)} />
      <${Tile} label="Completed trades" value=${whole(figures?.totalTrades)} note=${wonOf(figures)} />
      <${Tile} label="Average per trade" value=${signed(figures?.avgPnl)} kind=${tone(figures?.avgPnl)} />
    </div></section>
    <div class="split"><div class="stack">
      <${Curves} window=${window} onWindow=${setWindow} only=${only} />
      <${Board} window=${window} onWindow=${setWindow} variant=${id} isCompact=${true} />
      <${Positions} only=${one => one.modelVariant === id} isCompact=${true} />
      <${TradeTotals} variant=${id} />
      <${Trades} variant=${id} />
    </div><div class="side"><${Conversations} variant=${id} isFeed=${true} /></div></div>`
}

export function ModelsPage({ route }) {
  const [window, setWindow] = useWindow(route)
  const known = useModels()
  const stats = useAnswer('variants.getVariantStats')
  const [least, most] = scaleOf((stats.data?.stats ?? []).map(one => one.totalPnl))
  const columns = [
    { key: 'variant', title: 'Variant', isText: true, by: one => one.label, cell: one => html`<a class="name" href=${`#/variants/${one.variantId}`}><${Key} color=${one.color} /><span>${one.label}</span></a>` },
    { key: 'models', title: 'Models', by: one => one.modelCount, cell: one => whole(one.modelCount) },
    { key: 'trades', title: 'Trades', by: one => one.totalTrades, cell: one => whole(one.totalTrades) },
    { key: 'won', title: 'Won', by: one => one.winRate, cell: one => html`<span title="of the completed trades, with its 95 % interval">${one.winRateInterval ? wonOf(one).slice(4) : '–'}</span>` },
    { key: 'net', title: 'Realized, net', by: one => one.totalPnl, cell: one => html`<span class=${tone(one.totalPnl)}>${signed(one.totalPnl)}</span>` },
    { key: 'scale', title: 'Compared', isText: true, className: 'narrow-hide', cell: one => html`<${Interval} value=${one.totalPnl} least=${least} most=${most} color=${one.color} />` },
    { key: 'average', title: 'Per trade', by: one => one.avgPnl, cell: one => signed(one.avgPnl) },
  ]
  const quiet = known.models.filter(one => !one.active)
  return html`
    <${Board} window=${window} onWindow=${setWindow}><${EvidenceTable} window=${window}><${Panel} title="Variants"><${Failed} entry=${stats} what="The variants" />
      ${stats.data && html`<${Table} label="Variants" columns=${columns} rows=${stats.data.stats} empty="" />`}</${Panel}>
      ${quiet.length > 0 && html`<${Panel} title="Inactive models"><div class="body legend">${quiet.map(one => html`<${ModelName} key=${one.id} id=${one.id} name=${one.name} color=${known.colorOf(one.id)} />`)}</div></${Panel}>`}</${EvidenceTable}></${Board}>`
}

/** The leaderboard. `children` follow once it is read, since it would push them down before. */
function Board({ window, onWindow, variant = 'all', isCompact = false, children }) {
  const known = useModels()
  const board = useAnswer('analytics.getLeaderboard', { window, variant, details: true })
  const stats = useAnswer('analytics.getModelStats', { variant })
  const costs = useMemo(() => new Map((stats.data?.overall ?? []).map(one => [one.modelId, one])), [stats.data])
  const entries = board.data?.entries ?? []
  const [least, most] = useMemo(() => scaleOf(entries.flatMap(one => [one.pnlPercent, one.ci95?.low, one.ci95?.high])), [board.data])
  const columns = [
    { key: 'rank', title: 'Board', by: one => one.rank, cell: one => (one.rank ? '' : html`<span title=${`not ranked: ${one.details.offBoard ?? 'it decided under 95 % of its cycles'}`}>off</span>`) },
    { key: 'model', title: 'Model', isText: true, by: one => one.modelName.toLowerCase(),
      cell: one => html`<${ModelName} id=${one.modelId} name=${one.modelName} color=${one.color ?? known.colorOf(one.modelId, one.variant)} /><${Declared} by=${one.details.declared} />${one.details.replicates && html` <span title="replicates of one configuration: the row is their mean">× ${one.details.replicates.modelIds.length}</span>`}` },
    !isCompact && { key: 'variant', title: 'Variant', isText: true, className: 'narrow-hide', by: one => one.variant, cell: one => html`<${VariantName} variant=${one.variant} />` },
    { key: 'return', title: 'Return', by: one => one.pnlPercent,
      cell: one => html`<span class=${tone(one.pnlPercent)} title=${one.pnlPercent}>${signedPercent(one.pnlPercent)}</span>` },
    { key: 'interval', title: '95 % interval, one look', isText: true, by: one => one.ci95?.low,
      cell: one => html`<${Interval} low=${one.ci95?.low} high=${one.ci95?.high} value=${one.pnlPercent} least=${least} most=${most}
        reason=${one.details.ci95Reason} color=${one.color ?? known.colorOf(one.modelId, one.variant)} />` },
    { key: 'verdict', title: 'Against the next', isText: true, by: one => one.details.verdict?.below?.verdict, cell: one => html`<${Verdict} found=${one.details.verdict?.below} known=${known} />` },
    { key: 'drawdown', title: 'Drawdown', by: one => one.maxDrawdown, cell: one => percent(one.maxDrawdown) },
    { key: 'coverage', title: 'Coverage', className: 'narrow-hide', by: one => one.details.coverage, cell: one => percent(one.details.coverage) },
    { key: 'trades', title: 'Trades', by: one => one.tradesCount, cell: one => whole(one.tradesCount) },
    !isCompact && { key: 'cost', title: 'Model cost', className: 'narrow-hide', by: one => figureOf(costs.get(one.modelId)?.costUsd),
      cell: one => number(figureOf(costs.get(one.modelId)?.costUsd)) },
    { key: 'net', title: 'Net after cost', by: one => figureOf(costs.get(one.modelId)?.netAfterCost),
      cell: one => html`<${Money} value=${figureOf(costs.get(one.modelId)?.netAfterCost)} />` },
    !isCompact && { key: 'equity', title: 'Equity', by: one => one.endValue, cell: one => number(one.endValue) },
  ].filter(Boolean)
  const tools = onWindow && html`<${Choice} label="Window of the leaderboard" value=${window} onChange=${onWindow} options=${WINDOWS} />`
  return html`<${Panel} title="Leaderboard" tools=${tools}>
    <${Failed} entry=${board} what="The leaderboard" />
    <${SeasonLine} season=${board.data?.season} />
    <p class="body lede">Ordered by the return of this window alone, which is no rank: Evidence has the possible places of each entrant, by what each pair has in common, so its order may differ.</p>
    ${board.data && html`<${Table} label="Leaderboard" columns=${columns} rows=${entries} first=${isCompact ? 20 : 100}
      empty=${known.warning ?? 'No model has traded in this window yet.'} />`}
  </${Panel}>${(board.data || board.error) && children}`
}

/** Whether a model is better than the next one, in words; the title has the reason and the detectable difference. */
function Verdict({ found, known }) {
  if (!found) return html`<span class="soft">–</span>`
  const name = known.byId.get(found.modelId)?.name ?? found.modelId
  return html`<span class=${`badge ${found.verdict === 'better' ? 'gain' : ''}`} title=${`Against ${name}: ${found.reason ?? found.verdict}.`}>${found.verdict}</span>`
}

/** A figure of the statistics; those without a value are texts. */
const figureOf = value => (typeof value === 'number' ? value : value === 'Infinity' ? Infinity : null)
