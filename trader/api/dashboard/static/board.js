// @ts-check
// The leaderboard: every figure of a row is of the row, which is the mean of the replicates of one configuration.
import { modelCount, useAnswer } from './answers.js'
import {
  Choice,
  Declared,
  EntrantName,
  Pending,
  Interval,
  ModelName,
  Panel,
  SeasonLine,
  Table,
  VariantName,
  figureColumn,
  moneyColumn,
  scaleOf,
} from './components.js'
import { isolated, number, percent, signedPercent, tone, whole } from './format.js'
import { html, useMemo } from './lib.js'
import { WINDOWS, compareHref, entrantName, serviceNow, useModels } from './models.js'

const [HOUR_MS, DAY_MS] = [3_600_000, 86_400_000]
const UNDECIDED = 'not distinguishable yet'

/** Why an entry has no rank. */
export const offBoardOf = one => one.details.offBoard ?? 'it decided under 95 % of its cycles'

/**
 * The leaderboard. `children` follow once it is read, since it would push them down before.
 * @param {any} choices
 */
export function Board({ window, onWindow, variant = 'all', children }) {
  const known = useModels()
  const board = useAnswer('analytics.getLeaderboard', { window, variant, details: true })
  const entries = board.data?.entries ?? []
  const [least, most] = useMemo(
    () =>
      scaleOf(
        entries.map(one => one.pnlPercent),
        entries.flatMap(one => [one.ci95?.low, one.ci95?.high]),
      ),
    [board.data],
  )
  const isDecided = entries.some(one => (one.details.verdict?.below?.verdict ?? UNDECIDED) !== UNDECIDED)
  const isMarked = one => document.body.dataset.market === 'replay' && one.details.withinMinute > 0
  const hasUnranked = entries.some(one => !one.rank)
  const columns = [
    hasUnranked && {
      key: 'rank',
      title: 'Board',
      by: one => one.rank,
      cell: one => (one.rank ? '' : html`<span title=${`not ranked: ${offBoardOf(one)}`}>off</span>`),
    },
    {
      key: 'model',
      title: 'Model',
      isText: true,
      isHead: true,
      by: one => one.modelName,
      csv: one => ({
        Model: one.modelName,
        'Model id': one.modelId,
        Replicates: one.replicates,
        'Account ids': one.modelIds.join(' '),
        Since: one.since,
        'Trades under a minute': one.details.withinMinute,
      }),
      cell: one =>
        html`<${EntrantName} one=${one} color=${known.colorOf(one.modelIds[0], one.variant)} /><${Declared}
            by=${one.details.declared} />${one.replicates > 1 && html` <span class="mid"><${Accounts} ids=${one.modelIds} /></span>`}${
              isMarked(one) &&
              html` <span class="badge warn" title=${`${one.details.withinMinute} of its ${one.tradesCount} trades were held for less than a minute`}>under 1 min</span>`
            }`,
    },
    variant === 'all' && {
      key: 'variant',
      title: 'Variant',
      isText: true,
      className: 'wide',
      by: one => one.variant,
      cell: one => html`<${VariantName} variant=${one.variant} />`,
    },
    {
      key: 'return',
      title: 'Return',
      isMain: true,
      by: one => one.pnlPercent,
      csv: one => ({ 'Return, %': one.pnlPercent }),
      cell: one =>
        html`<span class=${tone(one.pnlPercent)} title=${one.pnlPercent}>${signedPercent(one.pnlPercent)}</span>`,
    },
    {
      key: 'interval',
      title: '95 % interval, one look',
      isText: true,
      by: one => one.ci95?.low,
      csv: one => ({ '95 % low, %': one.ci95?.low, '95 % high, %': one.ci95?.high }),
      cell: one => html`<${Interval} low=${one.ci95?.low} high=${one.ci95?.high} value=${one.pnlPercent} least=${least}
        most=${most}
        reason=${one.details.ci95Reason} color=${known.colorOf(one.modelIds[0], one.variant)} />`,
    },
    isDecided && {
      key: 'verdict',
      title: 'Against the next',
      isText: true,
      by: one => one.details.verdict?.below?.verdict,
      cell: one => html`<${Verdict} found=${one.details.verdict?.below} entries=${entries} />`,
    },
    figureColumn('drawdown', 'Drawdown', one => one.maxDrawdown, percent, {
      csv: one => ({ 'Drawdown, %': one.maxDrawdown }),
    }),
    figureColumn('coverage', 'Coverage', one => one.details.coverage, percent, {
      className: 'wide',
      csv: one => ({ 'Coverage, %': one.details.coverage }),
    }),
    {
      key: 'trades',
      title: 'Trades',
      by: one => one.tradesCount,
      cell: one =>
        html`<span title=${`${whole(one.tradesCount)} of all replicates`}>${number(one.tradesCount / one.replicates, Number.isInteger(one.tradesCount / one.replicates) ? 0 : 1)}</span>`,
    },
    {
      key: 'fees',
      title: 'Fees',
      by: one => one.details.fees,
      cell: one => html`<span title="of the trades completed in this window">${number(one.details.fees)}</span>`,
    },
    {
      key: 'cost',
      title: 'Model cost',
      by: one => one.details.costUsd,
      csv: one => ({ 'Model cost, USD': one.details.costUsd }),
      cell: one => html`<span title=${costOf(one.details)}>${number(one.details.costUsd)}</span>`,
    },
    figureColumn('daily', 'Cost a day', costADay, number, { className: 'wide' }),
    moneyColumn('net', 'Net after cost', one => one.details.netAfterCost),
    figureColumn('equity', 'Equity', one => one.endValue, number, { className: 'wide' }),
  ].filter(Boolean)
  const tools =
    onWindow &&
    html`${
      (board.data ? entries.length : modelCount()) > 1 &&
      html`<a class="button" href=${compareHref(entries[0]?.modelIds[0] ?? '', entries[1]?.modelIds[0], window)}>Compare</a>`
    }<${Choice} label="Window of the leaderboard" value=${window} onChange=${onWindow} options=${WINDOWS} />`
  return html`<${Panel} title="Leaderboard" tools=${tools}>
    <p class="body lede">Ordered by the return of this window alone, which is no rank: Evidence has the possible places of
      each entrant, by what each pair has in common, so its order may differ.${
        hasUnranked ? ' Rows without a rank come last.' : ''
      }${!isDecided && entries.length > 1 ? ' No row can be told from the next one yet.' : ''}${
        entries.some(isMarked)
          ? ' “Under 1 min”: it held trades for less than a minute, where this replay draws the prices between recorded ones.'
          : ''
      }</p>
    <${ByHand} className="body lede" variant=${variant} />
    <${SeasonLine} season=${board.data?.season} />
    <${Pending} entry=${board} what="The leaderboard" />
    ${
      board.data &&
      html`<${Table} label="Leaderboard" columns=${columns} rows=${entries} narrow=${['rank', 'model', 'return', 'fees']}
      empty=${known.warning ?? 'No model has traded in this window yet.'} />`
    }
  </${Panel}>${(board.data || board.error) && children}`
}

/** The models that are on no board, because they were traded by hand. */
export function ByHand({ className, variant = 'all' }) {
  const models = useModels().models.filter(one => one.manualSince && (variant === 'all' || one.variant === variant))
  const names = models.map(
    one => html`<${ModelName} key=${one.id} id=${one.id} name=${one.name} color=${one.color} /> `,
  )
  return models.length > 0 && html`<p class=${className}>Not on the board, because it was traded by hand: ${names}</p>`
}

/** The name of a row of a board. */
export const nameIn = (entries, id) =>
  isolated(entrantName(entries.find(one => one.modelId === id) ?? { modelIds: [id], modelName: id }))

/** Links to the accounts of a row that is their mean. */
export const Accounts = ({ ids }) =>
  ids.map(
    (id, place) =>
      html` <a class="soft" href=${`#/models/${encodeURIComponent(id)}`} title=${id} key=${id}>${place + 1}</a>`,
  )

/** Whether a model is better than the next one, in words; the title has the reason and the detectable difference. */
function Verdict({ found, entries }) {
  if (!found) return html`<span class="soft">–</span>`
  const name = nameIn(entries, found.modelId)
  return html`<span class=${`badge ${found.verdict === 'better' ? 'gain' : ''}`}
    title=${`Against ${name}: ${found.reason ?? found.verdict}.`}>${found.verdict === UNDECIDED ? 'cannot tell yet' : found.verdict}</span>`
}

/** What the models of a row cost a day, in USD; null if it is unknown. */
const costADay = ({ since, details: { costUsd } }) =>
  costUsd == null || !since ? null : costUsd / Math.max(HOUR_MS / DAY_MS, (serviceNow() - Date.parse(since)) / DAY_MS)

/** What the models of a row cost, in words. */
const costOf = ({ costUsd, replicates }) =>
  costUsd == null
    ? 'no provider reported a cost'
    : replicates
      ? `mean of the replicates; ${number(replicates.costUsd)} USD together`
      : `${costUsd} USD in this window`
