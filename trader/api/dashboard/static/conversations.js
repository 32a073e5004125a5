// Conversations: everything a model saw, said and called, and every refusal with its reason, step by step and live.
import { useChosen } from './address.js'
import { call, useAnswer } from './answers.js'
import { Choice, Failed, ModelName, Panel, Select, Time } from './components.js'
import { number, price, quantity, span, whole } from './format.js'
import { html, useEffect, useState } from './lib.js'
import { useModels } from './models.js'
import { merged, useLive, useRuns } from './store.js'

const NAMES = { CREATE_POSITION: 'open', CLOSE_POSITION: 'close', UPDATE_EXIT_PLAN: 'exit plan', HOLDING: 'hold', FETCH_INDICATORS: 'indicators', FETCH_ORDER_BOOK: 'book', NOTE: 'note' }
const ACTS = ['CREATE_POSITION', 'CLOSE_POSITION', 'UPDATE_EXIT_PLAN']
const KINDS = { rejected: 'loss', failed: 'warn' }
const FEED = 25
const SHOW = [['all', 'All'], ['acted', 'Acted'], ['refused', 'Refused']]

/** The conversations of a model, a variant or all models; new ones from the stream are offered, not inserted. */
export function Conversations({ modelId, variant, title = 'Conversations', isFeed = false, limit = 50 }) {
  const known = useModels()
  const state = useLive()
  const [chosenModel, setModel] = useChosen('model', '')
  const [chosenVariant, setVariant] = useChosen('variant', '')
  const filter = isFeed ? { modelId: '', variant: '' } : { modelId: chosenModel, variant: chosenVariant }
  const [show, setShow] = useChosen('show', 'all')
  const [seen, setSeen] = useState(null)
  const [isLooking, setLooking] = useState(false)
  const isHeard = useRuns(isLooking)
  const chosen = { modelId: modelId ?? filter.modelId, variant: variant ?? filter.variant }
  const isChosen = Boolean(chosen.modelId || chosen.variant)
  const isOfThese = (id, variantOfIt) => (!chosen.modelId || id === chosen.modelId) && (!chosen.variant || variantOfIt === chosen.variant)
  const [read, setRead] = useState(null)
  const live = (state.conversations ?? []).filter(turn => isOfThese(turn.modelId, turn.modelVariant))
  const turns = merged(live, read?.data?.conversations ?? []).filter(turn => isShown(turn, show)).slice(0, isFeed ? FEED : limit)
  const isKnown = state.conversations !== null && (isFeed && !isChosen || read?.data)
  const see = () => setSeen(new Set(turns.map(turn => turn.id)))
  useEffect(() => { if (isKnown && seen === null && turns.length) see() })
  const newer = seen === null ? [] : turns.filter(turn => !seen.has(turn.id))
  const running = [...state.running].filter(([id]) => isOfThese(id, known.byId.get(id)?.variant))
  const choose = set => value => { set(value); setSeen(null) }
  const tools = html`
    ${!modelId && !isFeed && html`<div class="filters">
      <${Select} label="Model" value=${filter.modelId} onChange=${choose(setModel)}
        options=${[['', 'All models'], ...known.models.map(model => [model.id, model.name])]} />
      ${!variant && html`<${Select} label="Variant" value=${filter.variant} onChange=${choose(setVariant)}
        options=${[['', 'All variants'], ...known.variants.map(each => [each.id, each.id])]} />`}</div>`}
    <${Choice} label="Which" value=${show} onChange=${choose(setShow)} options=${SHOW} />`
  return html`<${Panel} title=${title} tools=${tools}>
    ${(!isFeed || isChosen) && html`<${Earlier} key=${JSON.stringify([chosen, limit])} chosen=${chosen} limit=${limit} onRead=${setRead} />`}
    <details class="now" onToggle=${event => setLooking(event.target.open)}><summary>${running.length ? `Deciding: ${running.map(([, run]) => run.name).join(', ')}`
      : isHeard ? 'No model is deciding' : 'Who is deciding'}</summary>
      <ol class="turns">${running.map(([id, run]) => html`<${Running} key=${run.id} id=${id} run=${run} known=${known} />`)}</ol></details>
    <p class="newer"><button class="button" type="button" disabled=${!newer.length} onClick=${see}>${newer.length ? `Show ${newer.length} newer` : 'Nothing newer'}</button></p>
    <div class=${isFeed ? 'feed' : ''}>
      <ol class="turns">${folded(turns.filter(turn => !newer.includes(turn))).map(group => (group.length > 1
        ? html`<${Held} key=${group.at(-1).id} turns=${group} known=${known} />`
        : html`<${Turn} key=${group[0].id} turn=${group[0]} known=${known} isCut=${isFeed} />`))}</ol>
      ${isKnown && !turns.length && html`<p class="empty">${
        show === 'all' ? 'No model has been asked yet.' : 'Nothing of this kind among the latest.'}</p>`}
    </div></${Panel}>`
}

/** Read everything older than the stream once; the stream delivers the rest. */
function Earlier({ chosen, limit, onRead }) {
  const entry = useAnswer('models.getInvocations', { limit, modelId: chosen.modelId || undefined, variant: chosen.variant || 'all' }, 0)
  useEffect(() => onRead({ data: entry.data }), [entry.data])
  return html`<${Failed} entry=${entry} what="The conversations" />`
}

const isHold = turn => turn.status === 'completed' && turn.toolCalls.length > 0 && turn.toolCalls.every(each => each.type === 'HOLDING')

/** Adjacent turns that only held as one group; every other turn alone. */
function folded(turns) {
  const groups = []
  for (const turn of turns) {
    if (isHold(turn) && groups.length && isHold(groups.at(-1)[0])) groups.at(-1).push(turn)
    else groups.push([turn])
  }
  return groups
}

function Held({ turns, known }) {
  const [isOpen, setOpen] = useState(false)
  const counts = new Map()
  for (const turn of turns) counts.set(turn.modelName, (counts.get(turn.modelName) ?? 0) + 1)
  const names = [...counts].map(([name, count]) => (count > 1 ? `${name} × ${count}` : name)).join(', ')
  return html`<li class="turn held"><details onToggle=${event => setOpen(event.target.open)}>
    <summary title=${names}><span class="badge">hold × ${turns.length}</span> <bdi>${names}</bdi> <${Time} at=${turns[0].timestamp} /></summary>
    ${isOpen && html`<ol class="turns">${turns.map(turn => html`<${Turn} key=${turn.id} turn=${turn} known=${known} isCut=${true} />`)}</ol>`}
  </details></li>`
}

function isShown(one, show) {
  if (show === 'acted') return one.toolCalls.some(each => ACTS.includes(each.type))
  return show === 'all' || one.status !== 'completed' || one.toolCalls.some(each => each.status !== 'ok')
}

function Running({ id, run, known }) {
  return html`<li class="turn running">
    <header><i class="pulse" aria-hidden="true"></i><${ModelName} id=${id} name=${run.name} color=${known.colorOf(id)} /><span class="small soft">is deciding</span></header>
    <ol class="calls">${run.steps.map(step => (step.type === 'workflow:call'
      ? html`<${Call} one=${{ ...step, type: step.callType }} />`
      : html`<li class="call"><span class="badge">step ${step.step}</span><span>${step.text || step.toolNames.join(', ') || 'an answer without a call'}</span></li>`))}</ol>
  </li>`
}

export function Turn({ turn, known, isCut }) {
  const [isOpen, setOpen] = useState(!isCut)
  const holding = turn.toolCalls.length === 1 && turn.toolCalls[0].type === 'HOLDING' && turn.toolCalls[0].metadata.decisions?.[0]?.reason
  const calls = holding && holding === turn.response ? [] : turn.toolCalls
  return html`<li class="turn">
    <header><${ModelName} id=${turn.modelId} name=${turn.modelName} color=${known.colorOf(turn.modelId, turn.modelVariant)} />
      ${turn.status !== 'completed' && html`<span class="badge loss">${turn.status}</span>`}
      ${holding && html`<span class="badge">hold</span>`}<${Time} at=${turn.timestamp} /></header>
    ${turn.failureReason && html`<p class="said loss">${turn.failureReason}</p>`}
    ${turn.response && html`<p class=${`said ${isOpen ? '' : 'cut'}`} onClick=${isCut && (() => setOpen(!isOpen))}>${turn.response}</p>`}
    ${calls.length > 0 && html`<ol class="calls">${calls.map(each => html`<${Call} key=${each.id} one=${{ ...each, ...each.metadata }} />`)}</ol>`}
    <${Details} one=${turn} />
  </li>`
}

/** Further details of a run; its messages are read on demand. */
function Details({ one }) {
  const [isOpen, setOpen] = useState(false)
  const [found, setFound] = useState(null)
  useEffect(() => {
    if (!isOpen || found) return
    call('models.getConversation', { invocationId: one.id }).then(setFound, error => setFound({ error: error.message }))
  }, [isOpen])
  return html`<details onToggle=${event => setOpen(event.target.open)}>
    <summary>${one.steps} ${one.steps === 1 ? 'step' : 'steps'} · ${span(one.durationMs)}${
      one.inputTokens + one.outputTokens > 0 ? ` · ${whole(one.inputTokens)} tokens in, ${whole(one.outputTokens)} out` : ''}${
      one.costUsd != null ? ` · ${number(one.costUsd, 4)} USD` : ''} · what it saw</summary>
    ${isOpen && (found === null ? html`<p class="soft small">Reading …</p>`
    : found.error ? html`<p class="soft small">Not shown: ${found.error}</p>`
    : html`${!found.messages.length && html`<p class="soft small">No messages: either a rule agent, which decides on figures, or they are no longer kept.</p>`}
      ${found.messages.map((each, place) => html`<div class="message" key=${place}><span class="badge">${each.role}</span><pre>${each.text}</pre></div>`)}`)}
    ${isOpen && one.toolCalls.length > 0 && html`<div class="message"><span class="badge">calls as JSON</span><pre tabindex="0">${
      JSON.stringify(one.toolCalls.map(each => ({ type: each.type, status: each.status, ...each.metadata })), null, 2)}</pre></div>`}
  </details>`
}

function Call({ one }) {
  const decision = one.decisions?.[0] ?? {}
  const result = one.results?.[0] ?? {}
  const refusal = result.reason ?? result.error
  return html`<li class="call"><span class=${`badge ${KINDS[one.status] ?? ''}`}>${NAMES[one.type] ?? one.type}</span>
    <span>${wordsOf(one.type, decision)}${one.status === 'ok' && result.averagePrice
      ? html` <span class="soft">filled ${quantity(result.filledQuantity)} at ${price(result.averagePrice)}, fee ${number(result.fees)}</span> <a href=${`#/trades/${result.orderId}`}>trade</a>` : ''}</span>
    ${one.status !== 'ok' && html`<p class=${one.status === 'failed' ? 'warn' : 'loss'}>${one.status === 'rejected' ? 'Refused' : 'Failed'}${
      result.rule ? ` (${result.rule})` : ''}: ${refusal ?? 'no reason was recorded'}</p>`}
  </li>`
}

function wordsOf(type, decision) {
  const plan = [['stop', decision.stop], ['target', decision.target]].filter(([, value]) => value != null).map(([name, value]) => `${name} ${price(value)}`)
  if (type === 'HOLDING' || type === 'NOTE') return decision.reason ?? decision.text ?? ''
  if (type === 'FETCH_INDICATORS') return `${decision.symbol ?? ''} ${decision.interval ?? ''}`
  if (type === 'CREATE_POSITION') {
    return [`${decision.side ?? ''} ${quantity(decision.quantity)} ${decision.symbol ?? ''}${decision.leverage ? ` at ${quantity(decision.leverage)}×` : ''}`,
      ...plan, decision.confidence != null ? `confidence ${quantity(decision.confidence)} %` : null].filter(Boolean).join(', ')
  }
  return [`${decision.quantity ? `${quantity(decision.quantity)} ` : ''}${decision.symbol ?? ''}`, ...plan].join(', ')
}
