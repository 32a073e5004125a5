// @ts-check
// Who leads and why: the leader, its lead over buy and hold, the trade that made it, and how certain that is.
import { useAnswer } from './answers.js'
import { offBoardOf } from './board.js'
import { Pending, ModelName, Panel } from './components.js'
import { useCurves } from './curves.js'
import { day, isolated, number, signed, signedPercent, tone } from './format.js'
import { html } from './lib.js'
import { distinctName, useModels } from './models.js'

const BUY_AND_HOLD = 'baseline/buy-and-hold'
const ROWS = 5
const SENTENCE_MAX = 160

export function Leader({ window }) {
  const known = useModels()
  const board = useAnswer('analytics.getLeaderboard', { window, variant: 'all', details: true })
  const curves = useCurves(window)
  const { entries = [], bestTradeId } = board.data ?? {}
  const rows = entries.filter(one => one.pnlPercent != null).slice(0, ROWS)
  const [first] = rows
  const held = curves.data?.models.find(one => one.id === BUY_AND_HOLD)
  return html`<${Panel} title="Who leads" className="leader">
    <${Pending} entry=${board} what="The leaderboard" isQuiet=${true} />
    <div class="body">
      ${
        first
          ? html`<div class="stack">
          <p class="lead"><${ModelName} id=${first.modelId} name=${first.modelName} color=${known.colorOf(first.modelId)} />
            ${
              first.details.replicates &&
              html`<span class="soft"
              title="replicates of one configuration: their mean">× ${first.details.replicates.modelIds.length}</span>`
            }
            <b class=${`figure ${tone(first.pnlPercent)}`}>${signedPercent(first.pnlPercent)}</b></p>
          <p>${leadOf(first, held)} ${certaintyOf(first, entries, known)} ${unrankedOf(entries, first)}</p>
          ${
            bestTradeId
              ? html`<${BestTrade} id=${bestTradeId} key=${bestTradeId} />`
              : html`<p class="soft">It has won no trade in this window.</p>`
          }
        </div>
        <ol class="ranks">${rows.map(
          one => html`<li key=${one.modelId}>
          <${ModelName} id=${one.modelId} name=${one.modelName} color=${known.colorOf(one.modelId)} />
          <span class=${`figure ${tone(one.pnlPercent)}`}>${signedPercent(one.pnlPercent)}</span></li>`,
        )}</ol>`
          : html`<p class="soft">${
              board.data ? (known.warning ?? 'No model has traded in this window yet.') : !board.error && 'Reading …'
            }</p>`
      }
    </div>
  </${Panel}>`
}

/** How far the leader is from buy and hold, in words. */
function leadOf(first, held) {
  const values = held?.values.filter(value => value != null && value > 0) ?? []
  if (values.length < 2) return 'Buy and hold has no value to compare with yet.'
  const return_ = (100 * values.at(-1)) / values[0] - 100
  const lead = first.pnlPercent - return_
  return `It is ${number(Math.abs(lead))} points ${lead >= 0 ? 'ahead of' : 'behind'} buy and hold (${signedPercent(return_)}).`
}

/** How sure its place is, in words. */
function certaintyOf(first, entries, known) {
  const verdict = first.details.verdict?.below
  if (!verdict) return 'There is no other model to be compared with.'
  const name = isolated(known.nameOf(verdict.modelId))
  if (entries.some(one => one.modelId === verdict.modelId && one.pnlPercent === first.pnlPercent))
    return `${name} has returned the same.`
  if (verdict.verdict === 'better') return `Its lead over ${name} is more than luck.`
  const reason = verdict.reason?.split('; ').slice(0, 2).join('; ') // the rest is for the evidence
  return html`<span title=${verdict.reason}>Its lead over ${name} may be luck${reason ? `: ${reason}` : ''}.</span>`
}

/** Who returned more without a rank, in words, since the leader is the first of those with one. */
function unrankedOf(entries, first) {
  if (!first.rank) return `It has no rank: ${offBoardOf(first)}.`
  const [more] = entries
    .filter(one => !one.rank && one.pnlPercent > first.pnlPercent)
    .sort((one, other) => other.pnlPercent - one.pnlPercent)
  if (!more) return ''
  const name = isolated(distinctName(more.modelId, more.modelName))
  return `${name} returned more (${signedPercent(more.pnlPercent)}) but has no rank: ${offBoardOf(more)}.`
}

/** The trade that made the most of a model's result, with the sentence by which it was opened. */
function BestTrade({ id }) {
  const trade = useAnswer('trading.getTrade', { id }, 0).data?.trade
  if (!trade) return html`<p class="soft">Reading its best trade …</p>`
  return html`<p>Its best trade: <a class="inline"
    href=${`#/trades/${id}`}>${trade.side.toLowerCase()} ${trade.symbol}, ${day(trade.closedAt)}</a>, <b
      class=${`figure ${tone(trade.netPnl)}`}>${signed(trade.netPnl)}</b>. ${
        trade.invocationId && html`<${Said} id=${trade.invocationId} />`
      }</p>`
}

function Said({ id }) {
  const [turn] = useAnswer('models.getInvocations', { invocationId: id }, 0).data?.conversations ?? []
  const opening = turn?.toolCalls.find(each => each.type === 'CREATE_POSITION')?.metadata.decisions?.[0]?.reason
  const text = String(opening ?? turn?.response ?? '').split('\n')[0]
  return (
    text &&
    html`<q class="soft"><bdi>${text.length > SENTENCE_MAX ? `${text.slice(0, SENTENCE_MAX)}…` : text}</bdi></q>`
  )
}
