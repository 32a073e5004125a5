// The leaderboard: who leads, how sure that is, and what the models cost.
import { useAnswer } from './answers.js'
import { Choice, Declared, Failed, Interval, ModelName, Money, Panel, Table, VariantName, scaleOf } from './components.js'
import { number, percent, signedPercent, tone, whole } from './format.js'
import { html, useMemo } from './lib.js'
import { WINDOWS, useModels } from './models.js'

export function Board({ window, onWindow, variant = 'all', isCompact = false }) {
  const known = useModels()
  const board = useAnswer('analytics.getLeaderboard', { window, variant, details: true })
  const stats = useAnswer('analytics.getModelStats', { variant })
  const costs = useMemo(() => new Map((stats.data?.overall ?? []).map(one => [one.modelId, one])), [stats.data])
  const entries = board.data?.entries ?? []
  const [least, most] = useMemo(() => scaleOf(entries.flatMap(one => [one.pnlPercent, one.ci95?.low, one.ci95?.high])), [board.data])
  const columns = [
    { key: 'rank', title: '#', by: one => one.rank, cell: one => one.rank ?? html`<span title="not ranked: it decided under 95 % of its cycles">–</span>` },
    { key: 'model', title: 'Model', isText: true, by: one => one.modelName.toLowerCase(),
      cell: one => html`<${ModelName} id=${one.modelId} name=${one.modelName} color=${one.color ?? known.colorOf(one.modelId, one.variant)} /><${Declared} by=${one.details.declared} />${one.details.replicates && html` <span title="replicates of one configuration: the row is their mean">× ${one.details.replicates.modelIds.length}</span>`}` },
    !isCompact && { key: 'variant', title: 'Variant', isText: true, className: 'narrow-hide', by: one => one.variant, cell: one => html`<${VariantName} variant=${one.variant} />` },
    { key: 'return', title: 'Return', by: one => one.pnlPercent,
      cell: one => html`<span class=${tone(one.pnlPercent)} title=${one.pnlPercent}>${signedPercent(one.pnlPercent)}</span>` },
    { key: 'interval', title: '95 % interval', isText: true, by: one => one.ci95?.low,
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
    <p class="body lede">Ranked by the return of this window alone. How far a rank is more than luck is in the columns beside it and in Evidence, which ranks by the mean return of common hours and may name another first.</p>
    ${board.data && html`<${Table} label="Leaderboard" columns=${columns} rows=${entries} first=${isCompact ? 20 : 100}
      empty=${known.warning ?? 'No model has traded in this window yet.'} />`}
  </${Panel}>`
}

/** Whether a model is better than the one below it, in words; the title has the reason, and what could be shown. */
function Verdict({ found, known }) {
  if (!found) return html`<span class="soft">–</span>`
  const name = known.byId.get(found.modelId)?.name ?? found.modelId
  return html`<span class=${`badge ${found.verdict === 'better' ? 'gain' : ''}`} title=${`Against ${name}: ${found.reason ?? found.verdict}.`}>${found.verdict}</span>`
}

/** A figure of the statistics; those without a value are texts. */
export const figureOf = value => (typeof value === 'number' ? value : value === 'Infinity' ? Infinity : null)
