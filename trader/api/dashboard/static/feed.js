// @ts-check
// What happened: positions opened and closed, refusals, changes of the lead and halts, the latest first.
import { useAnswer } from './answers.js'
import { Pending, ModelName, Panel, Side, Time } from './components.js'
import { useLines } from './curves.js'
import { merged } from './events.js'
import { isolated, number, price, quantity, signed, tone } from './format.js'
import { html, useMemo } from './lib.js'
import { useModels } from './models.js'
import { useLive } from './store.js'
import { useHealth } from './system.js'

const EVENTS = 40
const ACTED = 100

export function Feed({ window, entrants }) {
  const known = useModels()
  const state = useLive()
  const acted = useAnswer('models.getInvocations', { limit: ACTED, outcome: 'acted' }, 0)
  const closed = useAnswer('trading.getTrades', { limit: EVENTS }, 0)
  const { entry: curves, lines } = useLines(window, 'models', undefined, entrants)
  const halts = useHealth().data?.halts ?? []
  const leads = useMemo(() => leadsOf(lines), [lines])
  const turns = merged(state.conversations ?? [], acted.data?.conversations ?? [])
  const trades = merged(state.trades ?? [], closed.data?.trades ?? [])
  const events = [
    ...turns.flatMap(turn => turn.toolCalls.flatMap(each => callEvents(turn, each))),
    ...trades.map(trade => ({
      at: trade.closedAt,
      key: `closed ${trade.id}`,
      of: trade,
      kind: 'closed',
      text: closedText(trade),
    })),
    ...leads,
    ...halts.map(halt => ({
      at: halt.since,
      key: `halt ${halt.since}`,
      kind: 'halt',
      text: `${halt.accountId ? isolated(known.nameOf(halt.accountId)) : 'all trading'}: ${halt.reason}`,
    })),
  ]
    .sort((one, other) => (one.at < other.at ? 1 : -1))
    .slice(0, EVENTS)
  // All kinds of events at once, since a late one would move those that are shown.
  const sources = [acted, closed, curves]
  const isKnown = sources.every(entry => entry.data || entry.error)
  const entry = sources.find(one => one.error || !one.data) ?? acted
  return html`<${Panel} title="Events" tools=${html`<a class="small" href="#/conversations">Conversations</a>`}>
    <${Pending} entry=${entry} what="The events" />
    <ol class="events feed">${(isKnown ? events : []).map(
      event => html`<li key=${event.key}>
      <header><span class=${`badge ${KINDS[event.kind]}`}>${event.kind}</span>${
        event.of &&
        html`<${ModelName}
        id=${event.of.modelId} name=${event.of.modelName} color=${known.colorOf(event.of.modelId, event.of.modelVariant)}
        isLinked=${known.byId.has(event.of.modelId)} />`
      }<${Time} at=${event.at} /></header>
      <p>${event.text}</p></li>`,
    )}</ol>
    ${isKnown && !entry.error && !events.length && html`<p class="empty">Nothing has happened yet: no model has traded.</p>`}
  </${Panel}>`
}

const KINDS = { opened: '', closed: '', refused: 'loss', lead: 'accent', halt: 'warn' }

/** The events of a tool call: positions opened (two for a pair), or a refusal. Closes come from the trades. */
function callEvents(turn, { id, type, status, metadata }) {
  const { decisions = [], results = [] } = metadata
  const event = { at: turn.timestamp, key: id, of: turn }
  if (status === 'rejected') {
    const [result = {}] = results
    return {
      ...event,
      kind: 'refused',
      text: html`<a
        href=${`#/conversations/${turn.id}`}>${decisions[0]?.symbol ?? type}</a>: ${result.reason ?? result.error ?? 'no reason was recorded'}`,
    }
  }
  if (type !== 'CREATE_POSITION') return []
  return results.flatMap((result, place) => {
    const decision = decisions[place] ?? {}
    if (!result.averagePrice) return []
    return {
      ...event,
      key: `${id} ${place}`,
      kind: 'opened',
      text: html`<${Side} side=${decision.side} /> <a
        href=${`#/trades/${result.orderId}`}>${quantity(result.filledQuantity)} ${decision.symbol}</a> at ${price(result.averagePrice)}${
          decision.confidence == null ? '' : `, ${number(decision.confidence, 0)} % sure`
        }`,
    }
  })
}

const closedText = trade =>
  html`<${Side} side=${trade.side} /> <a href=${`#/trades/${trade.id}`}>${trade.symbol}</a> by ${trade.closeReason}: <b
    class=${`figure ${tone(trade.netPnl)}`}>${signed(trade.netPnl)}</b>`

/** The changes of the lead: another entrant is first, and still is at the next moment, so that a touch is none. */
export function leadsOf(lines) {
  const entrants = (lines ?? []).filter(one => !one.isReference)
  const firstAt = place =>
    entrants.reduce(
      (best, one) => ((one.returns[place] ?? -Infinity) > (best?.returns[place] ?? -Infinity) ? one : best),
      null,
    )
  const changes = []
  let leader = null
  for (let place = 0; entrants.length > 1 && place + 1 < lines.times.length; place += 1) {
    const first = firstAt(place)
    if (!first || first === leader || first !== firstAt(place + 1)) continue
    const at = new Date(1000 * lines.times[place]).toISOString()
    if (leader)
      changes.push({
        at,
        key: `lead ${at}`,
        kind: 'lead',
        of: { modelId: first.id, modelName: first.name, modelVariant: first.variant },
        text: `takes the lead from ${isolated(leader.name)}`,
      })
    leader = first
  }
  return changes
}
