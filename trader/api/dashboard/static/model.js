// @ts-check
// The page of one model: its figures, curve, positions, evidence, behavior, statistics, trades and conversations.
import { useAnswer } from './answers.js'
import { Declared, Facts, Pending, Key, Manual, Panel, Tile, VariantName } from './components.js'
import { compareHref } from './compare.js'
import { Conversations } from './conversations.js'
import { Curves } from './curves.js'
import { ModelBehaviour, ModelEvidence } from './evidence.js'
import { figureOf, moment, number, percent, signed, signedPercent, tone, whole, wonOf } from './format.js'
import { html, useMemo } from './lib.js'
import { useModels, useWindow } from './models.js'
import { Positions, TradeTotals, Trades } from './trades.js'

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
  const advanced = useAnswer('analytics.getModelStats', { mode: 'advanced', variant })
  const only = useMemo(
    () => one =>
      one.id === id ||
      (one.baseline ? !one.variant || one.variant === variant : known.isBaseline(one.id) && one.variant === variant),
    [id, known],
  )
  const figures = overall.data?.overall?.find(one => one.modelId === id)
  const more = advanced.data?.advanced?.find(one => one.modelId === id)
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
      }<a class="inline" href=${compareHref(id, '', window)}>Compare</a></div>
    ${model.warning && html`<p class="notice">${model.warning}</p>`}
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
      <${Tile} label="Invocations" value=${whole(model.invocationCount)}
        note=${model.lastInvokedAt ? `last ${moment(model.lastInvokedAt)}` : ''} />
    </div></section>
    <div class="split"><div class="stack">
      <${Curves} window=${window} only=${only} main=${id} />
      <${Positions} only=${one => one.modelId === id} hasNames=${false} />
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
