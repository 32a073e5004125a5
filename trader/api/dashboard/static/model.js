// @ts-check
// The page of one model: its figures, curve, positions, evidence, behavior, statistics, trades and conversations.
import { call, useAnswer, useReport } from './answers.js'
import { Declared, Facts, Pending, Key, Manual, Panel, Tile, VariantName } from './components.js'
import { Conversations, wordsOn } from './conversations.js'
import { Curves } from './curves.js'
import { ModelBehaviour, ModelEvidence } from './evidence.js'
import { figureOf, moment, number, percent, signed, signedPercent, tone, whole, wonOf } from './format.js'
import { html, useMemo } from './lib.js'
import { compareHref, serviceNow, useModels, useWindow } from './models.js'
import { Picture } from './share.js'
import { useLive } from './store.js'
import { Positions, TradeTotals, Trades, useTrades } from './trades.js'

const WORDS_MAX = 160
const BUDGET_STATES = { manage: 'budget spent: only reduces', pause: 'budget spent: paused' }

const budgetNote = budget =>
  `${budget.isEstimated ? 'estimated; ' : ''}${budget.usdPerDay == null ? 'within the budget of all models' : `of ${number(budget.usdPerDay)} a day`}`

/** @type {[string, string, (value: any) => string, string?][]} */
const FIGURES = [
  ['sharpeRatio', 'Sharpe', number, 'sharpeInterval'],
  ['sortinoRatio', 'Sortino', number],
  ['calmarRatio', 'Calmar', number],
  ['profitFactor', 'Profit factor', number, 'profitFactorInterval'],
  ['expectancy', 'Expectancy', signed],
  ['recoveryFactor', 'Recovery factor', number],
  ['avgTradeSize', 'Average size', number],
  ['avgHoldTimeMinutes', 'Average hold, min', whole],
  ['longPercent', 'Long trades', percent],
  ['avgConfidence', 'Average confidence', percent],
  ['avgRMultiple', 'Mean win / mean loss', number],
  ['longestWinStreak', 'Longest win streak', whole],
  ['longestLossStreak', 'Longest loss streak', whole],
  ['failureRate', 'Failed, or with a failed call', percent],
  ['inputTokens', 'Tokens in', whole],
  ['outputTokens', 'Tokens out', whole],
]

/** A figure with its 95 % interval; a figure without one is not shown. */
const sure = (value, bounds, write) =>
  bounds ? `${write(value)} (${write(bounds.low)} to ${write(bounds.high)})` : '–'

export function ModelPage({ route, id }) {
  const known = useModels()
  const model = known.byId.get(id)
  if (model) return html`<${Details} route=${route} known=${known} model=${model} />`
  if (known.entry.data) return html`<p class="notice">There is no model ${id}. <a href="#/models">All models</a></p>`
  return html`<${Pending} entry=${known.entry} what="The models" />`
}

function Details({ route, known, model }) {
  const { id, variant } = model
  const [window] = useWindow(route)
  const overall = useAnswer('analytics.getModelStats', { variant })
  const acted = useAnswer('models.getInvocations', { modelId: id, outcome: 'acted', limit: 100 })
  const { entry: closed, trades } = useTrades({ limit: 200, modelId: id })
  const isKnown = Boolean(useLive().positions && (acted.data || acted.error) && (closed.data || closed.error)) // else it would push the rest down
  const figures = overall.data?.overall?.find(one => one.modelId === id)
  return html`
    <div class="title"><${Key} color=${known.colorOf(id)} /><h1>${model.name}</h1><${VariantName} variant=${variant} />
      <span class="badge">${model.provider}</span><span
        class="soft">${!model.declared && model.routerModelName}</span><${Declared} by=${model.declared} />
      ${model.manualSince && html`<${Manual} />`}
      ${!model.active && html`<span class="badge warn">inactive</span>`}
      ${
        figures?.budget &&
        figures.budget.state !== 'open' &&
        html`<span
        class="badge warn">${BUDGET_STATES[figures.budget.state]}</span>`
      }<a class="inline" href=${compareHref(id, '', window)}>Compare</a><${Picture} /></div>
    ${model.warning && html`<p class="notice">${model.warning}</p>`}
    ${
      isKnown
        ? html`<p class="today">${todayOf(acted.data?.conversations ?? [], trades)}</p>
    <div class="pair"><${Positions} only=${one => one.modelId === id} title="Holdings" hasNames=${false} isCompact=${true} />
      <${Prompt} model=${model} known=${known} /></div>`
        : html`<p class="empty">Reading …</p>`
    }
    ${isKnown && html`<${Rest} route=${route} known=${known} model=${model} figures=${figures} overall=${overall} />`}`
}

/** What it did today (UTC), in three sentences made from its decisions and trades. */
function todayOf(turns, trades) {
  const day = new Date(serviceNow()).toISOString().slice(0, 10)
  const done = turns
    .filter(turn => turn.timestamp.startsWith(day))
    .flatMap(turn =>
      turn.toolCalls
        .filter(each => each.status === 'ok' && each.type === 'CREATE_POSITION')
        .map(each => each.metadata.decisions ?? []),
    )
  const counts = new Map()
  for (const { side, symbol } of done.flat()) {
    const key = `${String(side).toLowerCase()} ${symbol}`
    counts.set(key, (counts.get(key) ?? 0) + 1)
  }
  const opened = [...counts].map(([key, count]) => (count > 1 ? `${key} ${count} times` : key))
  const closed = trades.filter(trade => trade.closedAt.startsWith(day)).sort((one, other) => other.netPnl - one.netPnl)
  const [best, worst] = [closed[0], closed.at(-1)]
  const named = trade => `${trade.side.toLowerCase()} ${trade.symbol} ${signed(trade.netPnl)}`
  const [last] = turns
  const symbol = last?.toolCalls.flatMap(each => each.metadata.decisions ?? []).find(each => each.symbol)?.symbol
  const words = last && ((symbol && wordsOn(last, symbol)) || last.response?.trim().slice(0, WORDS_MAX))
  return [
    opened.length ? `Today it opened ${opened.join(', ')}.` : 'Today it opened nothing.',
    closed.length
      ? `${whole(closed.length)} of its trades closed for ${signed(closed.reduce((sum, trade) => sum + trade.netPnl, 0))}${
          closed.length > 1 ? `: best ${named(best)}, worst ${named(worst)}` : ` (${named(best)})`
        }.`
      : 'None of its trades closed.',
    words ? `It last acted at ${moment(last.timestamp)}: “${words}”` : 'It has not acted yet.',
  ].join(' ')
}

/** The prompt of its latest decision, where it is public, or what its rules are. */
function Prompt({ model, known }) {
  const isRule = model.provider === 'rules'
  const [turn] = useAnswer('models.getInvocations', { modelId: model.id, limit: 1 }, 0).data?.conversations ?? []
  return html`<${Panel} title="Prompt"><div class="body">
    <p>${known.byVariant.get(model.variant)?.description}.</p>
    ${isRule ? html`<p class="soft">A rule agent has no prompt: it decides on figures.</p>` : turn && html`<${PromptText} id=${turn.id} key=${turn.id} />`}
  </div></${Panel}>`
}

function PromptText({ id }) {
  const entry = useReport(`prompt ${id}`, 0, () => call('models.getConversation', { invocationId: id }))
  const text = entry.data?.messages.find(each => each.role === 'system')?.text
  if (entry.error) return html`<p class="soft">Not shown: ${entry.error}.</p>`
  return html`<pre class="prompt" tabindex="0">${text ?? (entry.data ? 'It is no longer kept.' : 'Reading …')}</pre>`
}

function Rest({ route, known, model, figures, overall }) {
  const id = model.id
  const { variant } = model
  const [window] = useWindow(route)
  const advanced = useAnswer('analytics.getModelStats', { mode: 'advanced', variant })
  const only = useMemo(
    () => one =>
      one.id === id ||
      (one.baseline ? !one.variant || one.variant === variant : known.isBaseline(one.id) && one.variant === variant),
    [id, known],
  )
  const more = advanced.data?.advanced?.find(one => one.modelId === id)
  return html`
    <${Pending} entry=${overall} what="The statistics" isQuiet=${true} />
    <section class="panel" aria-label="Figures"><div class="body tiles">
      <${Tile} label="Equity" value=${number(figureOf(figures?.accountValue))} note=${
        figures &&
        html`<span
        class=${tone(figureOf(figures.returnPercent))}>${signedPercent(figureOf(figures.returnPercent))}</span> since the start`
      } />
      <${Tile} label="Net after model cost" value=${signed(figureOf(figures?.netAfterCost))}
        kind=${tone(figureOf(figures?.netAfterCost))} note=${`cost ${number(figureOf(figures?.costUsd))} USD${
          figures?.costIsPartial ? ', not all of it known' : ''
        }${figures?.costIsDeclared ? ', declared by the agent' : ''}`} />
      ${
        figures?.budget &&
        html`<${Tile} label="Model cost today, USD" value=${number(figures.budget.spentTodayUsd)}
        note=${budgetNote(figures.budget)} />`
      }
      <${Tile} label="Completed trades" value=${whole(figures?.tradesCount)} note=${wonOf(figures)} />
      <${Tile} label="Largest drawdown" value=${percent(figureOf(figures?.maxDrawdown))}
        note=${`best ${signed(figureOf(figures?.biggestWin))}, worst ${signed(figureOf(figures?.biggestLoss))}`} />
      <${Tile} label="Invocations" value=${whole(more?.invocationCount)}
        note=${model.lastInvokedAt ? `last ${moment(model.lastInvokedAt)}` : ''} />
    </div></section>
    <div class="split"><div class="stack">
      <${Curves} window=${window} only=${only} main=${id} />
      <${ModelEvidence} id=${id} window=${window} />
      <${ModelBehaviour} id=${id} />
      <${Panel} title="Statistics"><${Facts} rows=${FIGURES.map(([key, label, write, bounds]) => [
        label,
        bounds ? sure(figureOf(more?.[key]), more?.[bounds], write) : write(figureOf(more?.[key])),
      ])} /></${Panel}>
      <${TradeTotals} modelId=${id} />
      <${Trades} modelId=${id} hasFilter=${false} />
    </div><div class="side"><${Conversations} modelId=${id} groups=${20} isSide=${true} /></div></div>`
}
