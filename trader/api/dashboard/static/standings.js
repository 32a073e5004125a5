// @ts-check
// The standings of a window: who leads and why, and a row for each entrant and for buy and hold, which isolate lines.
import { useAnswer } from './answers.js'
import { ByHand, nameIn, offBoardOf } from './board.js'
import { EntrantName, Key, Panel, Pending } from './components.js'
import { wordsOn } from './conversations.js'
import { SAME_S, useAlone, useLines, useRange } from './curves.js'
import { day, isolated, moment, number, signed, signedPercent, tone } from './format.js'
import { html, useMemo } from './lib.js'
import { entrantName, useModels } from './models.js'
import { useLive } from './store.js'
import { positionsOf } from './trades.js'

const BUY_AND_HOLD = 'baseline/buy-and-hold'
const DAY_S = 86_400
const SPARK_POINTS = 40
const [SPARK_W, SPARK_H] = [48, 18]

/**
 * The rows of the board, the best first and those without a rank last, with the lines of their accounts: {one, line,
 * return_, moved}. A row returns what its lines in the chart do; in a season, what the board of the season says.
 */
export function useStandings(window) {
  const board = useAnswer('analytics.getLeaderboard', { window, variant: 'all', details: true })
  const { lines } = useLines(window, 'models', undefined, board.data?.entries)
  const rows = useMemo(() => {
    if (!board.data || !lines) return null
    const byId = new Map(lines.map(line => [line.id, line]))
    const all = board.data.entries.map(one => {
      const line = byId.get(one.modelId)
      return { one, line, return_: (board.data.season ? null : line?.returns.at(-1)) ?? one.pnlPercent }
    })
    const order = (of, some) =>
      some
        .filter(row => of(row) != null)
        .sort((row, other) => Number(!row.one.rank) - Number(!other.one.rank) || of(other) - of(row))
    const before = lines.times.findLastIndex(time => time <= lines.times.at(-1) - DAY_S)
    const places = order(row => row.line?.returns[before], before > 0 ? all : [])
    const ranked = order(row => row.return_, all)
    return [...ranked, ...all.filter(row => row.return_ == null)].map((row, place) => ({
      ...row,
      moved: places.includes(row) ? places.indexOf(row) - place : null,
    }))
  }, [board.data, lines])
  return { board, rows, hold: lines?.find(line => line.id === BUY_AND_HOLD), times: lines?.times }
}

export function Leader({ standings: { board, rows, hold, times } }) {
  const known = useModels()
  const [first] = rows ?? []
  return html`<section class="panel leader" aria-label="Who leads">
    <${Pending} entry=${board} what="The leaderboard" isQuiet=${true} />
    ${
      first?.return_ != null
        ? html`<p class="lead"><${EntrantName} one=${first.one} color=${known.colorOf(first.one.modelIds[0])} />
          <b class=${`figure ${tone(first.return_)}`}>${signedPercent(first.return_)}</b>
          <${Certainty} first=${first.one} entries=${board.data.entries} /></p>
        <p class="why"><${Why} row=${first} lead=${leadOf(first, hold, times)} board=${board.data} /></p>`
        : html`<p class="soft why">${board.data ? (known.warning ?? 'No model has traded in this window yet.') : !board.error && 'Reading …'}</p>`
    }
  </section>`
}

/** The place of a line's last value. */
const lastOf = line => line?.values.findLastIndex(value => value != null) ?? -1

/** How far the leader is from buy and hold, in words. */
function leadOf({ one, line, return_ }, hold, times) {
  const first = hold?.values.findIndex(value => value != null) ?? -1
  const last = lastOf(hold)
  const own = last === times.length - 1 ? return_ : line?.returns[last] // a baseline's newest value may come a little later
  if (first < 0 || own == null) return 'Buy and hold has no value to compare with yet'
  const since = Math.max(times[0], Date.parse(one.since) / 1000)
  if (times[first] > since + SAME_S)
    return `Buy and hold is only known since ${moment(1000 * times[first])}, so it is not compared over this window`
  // A younger entrant is compared from its own start on.
  const place = times.findLastIndex(time => time <= since)
  const held = place > first ? (100 * hold.values[last]) / hold.values[place] - 100 : hold.returns[last]
  return `${number(Math.abs(own - held))} points ${own >= held ? 'ahead of' : 'behind'} buy and hold (${signedPercent(held)})`
}

/** How sure its place is, in a word; the title has the reason. */
function Certainty({ first, entries }) {
  const verdict = first.details.verdict?.below
  if (!first.rank) return html`<span class="badge warn" title=${offBoardOf(first)}>not ranked</span>`
  if (!verdict) return null
  const name = nameIn(entries, verdict.modelId)
  if (entries.some(one => one.modelId === verdict.modelId && one.pnlPercent === first.pnlPercent))
    return html`<span class="badge">tied with ${name}</span>`
  return verdict.verdict === 'better'
    ? html`<span class="badge gain" title=${`against ${name}`}>more than luck</span>`
    : html`<span class="badge" title=${`Its lead over ${name} may be luck${verdict.reason ? `: ${verdict.reason}` : ''}.`}>may be luck</span>`
}

/** One sentence: the lead, and the closed trade or open position that made the most of it, with the model's own words. */
function Why({ row: { one, return_ }, lead, board: { entries, bestTradeId } }) {
  const [[from], [to]] = useRange()
  const isOfBoard = !from && !to && one.modelId === entries[0]?.modelId // whose best trade it names
  const bestId = isOfBoard ? bestTradeId : undefined
  const [largest] = positionsOf(useLive(), each => one.modelIds.includes(each.modelId) && each.unrealizedPnl > 0).sort(
    (each, other) => other.unrealizedPnl - each.unrealizedPnl,
  )
  const open = to ? undefined : largest // what is open now is not of an earlier range
  const more = entries.find(each => !each.rank && one.rank && each.pnlPercent > return_)
  const rest =
    more &&
    html` ${isolated(entrantName(more))} returned more (${signedPercent(more.pnlPercent)}) but has no rank: ${offBoardOf(more)}.`
  return bestId || open
    ? html`${lead}<span class="rest">; <${Largest} closedId=${bestId} open=${open} key=${bestId} />${rest}</span>`
    : html`${lead}.${isOfBoard && ' It has won no trade in this window, and has no gain open.'}${rest}`
}

function Largest({ closedId, open }) {
  const closed = useAnswer('trading.getTrade', { id: closedId ?? open.id }, 0).data?.trade
  if (!closed) return html`reading what made the most of it …`
  const isOpen = open && (!closedId || open.unrealizedPnl > closed.netPnl)
  const [one, gain] = isOpen ? [open, Number(open.unrealizedPnl)] : [closed, closed.netPnl]
  return html`${isOpen ? 'most of it is open: ' : 'its best trade: '}<a class="inline"
    href=${`#/trades/${one.id}`}>${one.side.toLowerCase()} ${one.symbol}, ${
      isOpen ? `since ${moment(one.openedAt)}` : day(one.closedAt)
    }</a>, <b class=${`figure ${tone(gain)}`}>${signed(gain)}</b>. <${Opening} id=${one.id} key=${one.id} />`
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
  const text = turn && wordsOn(turn, symbol)
  return text && html`<q class="soft" title=${text}><bdi>${text}</bdi></q>`
}

export function Standings({ window, standings: { board, rows, hold } }) {
  const known = useModels()
  const { chosen, toggle } = useAlone()
  const [[from], [to]] = useRange()
  const list = (rows ?? []).map(
    (row, rank) => html`<${Row} key=${row.one.modelId} row=${row} place=${row.one.rank ? rank + 1 : '–'} known=${known}
    isChosen=${chosen.has(row.one.modelId)} onChoose=${() => toggle(row.one.modelId)} />`,
  )
  if (hold && rows) {
    const last = hold.returns[lastOf(hold)]
    const place = hold.isLate ? -1 : rows.findIndex(row => !row.one.rank || (row.return_ ?? -Infinity) < last)
    const held = html`<li class="held" key="hold"><span class="place"></span><span class="moved"></span>
      <span class="name"><${Key} color="" /><span>${hold.name}</span></span>
      <${Isolate} name="Buy and hold" line=${hold} return_=${last} isChosen=${chosen.has(BUY_AND_HOLD)} onChoose=${() => toggle(BUY_AND_HOLD)} /></li>`
    list.splice(place < 0 ? list.length : place, 0, held)
  }
  return html`<${Panel} title="Standings" className="standings" tools=${html`<a class="small" href=${`#/models?window=${window}`}>All figures</a>`}>
    <ol class="rows">${list}</ol>
    ${board.data && rows && !rows.length && html`<p class="empty">No model has traded in this window yet.</p>`}
    ${(from || to) && html`<p class="note">Of the range that the chart shows.</p>`}
    <${ByHand} className="note" />
  </${Panel}>`
}

const ARROWS = { 1: '▲', 0: '', '-1': '▼' }

function Row({ row: { one, line, return_, moved }, place, known, isChosen, onChoose }) {
  const sign = Math.sign(moved ?? 0)
  const title =
    moved == null
      ? 'its place a day ago is not known'
      : `${moved > 0 ? 'up' : moved < 0 ? 'down' : 'unchanged'} since yesterday`
  const name = entrantName(one)
  return html`<li><span class="place" title=${one.rank ? '' : `not ranked: ${offBoardOf(one)}`}>${place}</span>
    <span class=${`moved ${sign > 0 ? 'gain' : sign < 0 ? 'loss' : ''}`} title=${title}>${ARROWS[sign]}${sign ? Math.abs(moved) : ''}</span>
    <span class="named" title=${name}><${EntrantName} one=${one} name=${one.replicates > 1 ? name.split(' (mean of ')[0] : name}
      color=${known.colorOf(one.modelIds[0], one.variant)} />${one.replicates > 1 && html`<span class="soft small">×${one.replicates}</span>`}</span>
    <${Isolate} name=${name} line=${line} return_=${return_} isChosen=${isChosen} onChoose=${onChoose} /></li>`
}

/** A button with a sparkline and the return, which brings the line out in the chart. */
const Isolate = ({
  name,
  line,
  return_,
  isChosen,
  onChoose,
}) => html`<button type="button" aria-pressed=${isChosen ? 'true' : 'false'}
    title=${`Bring out ${name} in the chart`} onClick=${onChoose}><${Spark} values=${line?.returns ?? []} />
  <b class=${`figure ${tone(return_)}`}>${signedPercent(return_)}</b></button>`

/** A small line of values, gray, on a scale of its own. */
export function Spark({ values }) {
  const known = values.filter(value => value != null)
  const step = Math.max(1, (known.length - 1) / SPARK_POINTS)
  const shown = Array.from(
    { length: Math.floor((known.length - 1) / step) + 1 },
    (_, place) => known[Math.round(place * step)],
  )
  const [low, high] = [Math.min(...shown), Math.max(...shown)]
  const points = shown.map(
    (value, place) =>
      `${((place * SPARK_W) / Math.max(1, shown.length - 1)).toFixed(1)},${(1 + ((high - value) * (SPARK_H - 2)) / (high - low || 1)).toFixed(1)}`,
  )
  return html`<svg class="spark" viewBox=${`0 0 ${SPARK_W} ${SPARK_H}`} width=${SPARK_W} height=${SPARK_H} aria-hidden="true">
    ${shown.length > 1 && html`<polyline points=${points.join(' ')} />`}</svg>`
}
