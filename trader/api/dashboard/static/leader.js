// @ts-check
// Who leads and why: the leader, its lead over buy and hold, the trade that made it, and how certain that is.
import { useAnswer } from './answers.js'
import { nameIn, offBoardOf } from './board.js'
import { Pending, ModelName, Panel } from './components.js'
import { useCurves } from './curves.js'
import { day, isolated, moment, number, signed, signedPercent, tone } from './format.js'
import { html } from './lib.js'
import { distinctName, useModels } from './models.js'
import { useLive } from './store.js'
import { positionsOf } from './trades.js'

const BUY_AND_HOLD = 'baseline/buy-and-hold'
const ROWS = 5
const SENTENCE_MAX = 160
const SAME_MS = 10 * 60_000 // two answers of one window are not of the same minute

export function Leader({ window }) {
  const known = useModels()
  const board = useAnswer('analytics.getLeaderboard', { window, variant: 'all', details: true })
  const curves = useCurves(window)
  const { entries = [], bestTradeId } = board.data ?? {}
  const rows = entries.filter(one => one.pnlPercent != null).slice(0, ROWS)
  const [first] = rows
  const open = positionsOf(useLive(), each => first?.modelIds.includes(each.modelId) && each.unrealizedPnl > 0).sort(
    (one, other) => other.unrealizedPnl - one.unrealizedPnl,
  )[0]
  return html`<${Panel} title="Who leads" className="leader">
    <${Pending} entry=${board} what="The leaderboard" isQuiet=${true} />
    <div class="body">
      ${
        first
          ? html`<div class="stack">
          <p class="lead"><${ModelName} id=${first.modelId} name=${first.modelName}
            color=${known.colorOf(first.modelIds[0])} isLinked=${first.replicates === 1} />
            <b class=${`figure ${tone(first.pnlPercent)}`}>${signedPercent(first.pnlPercent)}</b></p>
          <p>${leadOf(first, curves.data)} ${certaintyOf(first, entries)} ${unrankedOf(entries, first)}</p>
          ${
            bestTradeId || open
              ? html`<${Largest} closedId=${bestTradeId} open=${open} key=${bestTradeId} />`
              : html`<p class="soft">It has won no trade in this window, and has no gain open.</p>`
          }
        </div>
        <ol class="ranks">${rows.map(
          one => html`<li key=${one.modelId}>
          <${ModelName} id=${one.modelId} name=${one.modelName} color=${known.colorOf(one.modelIds[0])}
            isLinked=${one.replicates === 1} />
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
function leadOf(first, answer) {
  const values = answer?.models.find(one => one.id === BUY_AND_HOLD)?.values
  const last = values?.findLast(value => value != null)
  const start = answer?.starts?.[BUY_AND_HOLD]
  if (!start || last == null) return 'Buy and hold has no value to compare with yet.'
  if (Date.parse(start.at) > Date.parse(first.since) + SAME_MS)
    return `Buy and hold is only known since ${moment(start.at)}, so it is not compared over this window.`
  // A younger entrant is compared from its own start on.
  const place = answer.times.findLastIndex(time => time <= first.since)
  const return_ = (100 * last) / (values[place] ?? start.value) - 100
  const lead = first.pnlPercent - return_
  return `It is ${number(Math.abs(lead))} points ${lead >= 0 ? 'ahead of' : 'behind'} buy and hold (${signedPercent(return_)}).`
}

/** How sure its place is, in words. */
function certaintyOf(first, entries) {
  const verdict = first.details.verdict?.below
  if (!verdict) return 'There is no other model to be compared with.'
  const name = nameIn(entries, verdict.modelId)
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

/** The closed trade or open position that made the most of a model's result, with the sentence by which it was opened. */
function Largest({ closedId, open }) {
  const closed = useAnswer('trading.getTrade', { id: closedId ?? open.id }, 0).data?.trade
  if (!closed) return html`<p class="soft">Reading what made the most of it …</p>`
  const isOpen = open && (!closedId || open.unrealizedPnl > closed.netPnl)
  const [one, gain] = isOpen ? [open, Number(open.unrealizedPnl)] : [closed, closed.netPnl]
  return html`<p>${isOpen ? 'Most of it is open: ' : 'Its best trade: '}<a class="inline"
    href=${`#/trades/${one.id}`}>${one.side.toLowerCase()} ${one.symbol}, ${
      isOpen ? `since ${moment(one.openedAt)}` : day(one.closedAt)
    }</a>, <b class=${`figure ${tone(gain)}`}>${signed(gain)}</b>. <${Opening} id=${one.id} key=${one.id} /></p>`
}

/** What a model said of this market when it opened a trade. */
function Opening({ id }) {
  const trade = useAnswer('trading.getTrade', { id }, 0).data?.trade
  return (
    trade?.invocationId && html`<${Said} id=${trade.invocationId} symbol=${trade.symbol} key=${trade.invocationId} />`
  )
}

function Said({ id, symbol }) {
  const [turn] = useAnswer('models.getInvocations', { invocationId: id }, 0).data?.conversations ?? []
  const decisions = turn?.toolCalls.flatMap(each => (each.type === 'CREATE_POSITION' && each.metadata.decisions) || [])
  const own = decisions?.find(each => each.symbol === symbol)?.reason
  const market = symbol.split(/[-/]/)[0]
  const clauses = String(own ?? turn?.response ?? '').split(/[;\n]|\.\s/)
  const text = clauses.find(each => each.includes(market)) ?? (own ? clauses[0] : '')
  return (
    text &&
    html`<q class="soft"><bdi>${text.length > SENTENCE_MAX ? `${text.slice(0, SENTENCE_MAX)}…` : text.trim()}</bdi></q>`
  )
}
