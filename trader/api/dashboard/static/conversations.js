// Conversations: what a model saw, said and called, what was refused and why, step by step as it happens.
import { call, useAnswer } from './answers.js'
import { Choice, Failed, ModelName, Panel, Select, Time } from './components.js'
import { number, price, quantity, span, whole } from './format.js'
import { html, useEffect, useState } from './lib.js'
import { useModels } from './models.js'
import { useLive } from './store.js'

const NAMES = { CREATE_POSITION: 'open', CLOSE_POSITION: 'close', UPDATE_EXIT_PLAN: 'exit plan', HOLDING: 'hold', FETCH_INDICATORS: 'indicators', FETCH_ORDER_BOOK: 'book', NOTE: 'note' }
const ACTS = ['CREATE_POSITION', 'CLOSE_POSITION', 'UPDATE_EXIT_PLAN']
const KINDS = { rejected: 'loss', failed: 'warn' }
const SHOW = [['all', 'All'], ['acted', 'Acted'], ['refused', 'Refused']]

export function Conversations({ modelId, variant, title = 'Conversations', isFeed = false, limit = 50 }) {
  const known = useModels()
  const state = useLive()
  const [filter, setFilter] = useState({ modelId: '', variant: '' })
  const [show, setShow] = useState('all')
  const chosen = { modelId: modelId ?? filter.modelId, variant: variant ?? filter.variant }
  const isChosen = Boolean(chosen.modelId || chosen.variant)
  const entry = useAnswer('models.getInvocations', { limit, modelId: chosen.modelId || undefined, variant: chosen.variant || 'all' }, isFeed && !isChosen ? 0 : 60_000)
  const rows = ((isChosen || !isFeed ? entry.data?.conversations : state.conversations) ?? entry.data?.conversations ?? []).filter(one => isShown(one, show)).slice(0, isFeed ? 25 : limit)
  const running = [...state.running].filter(([id]) => (!chosen.modelId || id === chosen.modelId)
    && (!chosen.variant || known.byId.get(id)?.variant === chosen.variant))
  const tools = html`
    ${!modelId && !isFeed && html`<div class="filters">
      <${Select} label="Model" value=${filter.modelId} onChange=${value => setFilter({ ...filter, modelId: value })}
        options=${[['', 'All models'], ...known.models.map(one => [one.id, one.name])]} />
      ${!variant && html`<${Select} label="Variant" value=${filter.variant} onChange=${value => setFilter({ ...filter, variant: value })}
        options=${[['', 'All variants'], ...known.variants.map(one => [one.id, one.id])]} />`}</div>`}
    <${Choice} label="Which" value=${show} onChange=${setShow} options=${SHOW} />`
  return html`<${Panel} title=${title} tools=${tools}><div class=${isFeed ? 'feed' : ''}>
    <${Failed} entry=${entry} what="The conversations" />
    <ol class="turns">
      ${running.map(([id, run]) => html`<${Running} key=${run.id} id=${id} run=${run} known=${known} />`)}
      ${rows.map(one => html`<${Turn} key=${one.id} turn=${one} known=${known} isCut=${isFeed} />`)}
    </ol>
    ${!rows.length && !running.length && (entry.data || state.conversations) && html`<p class="empty">${
      show === 'all' ? 'No model has been asked yet.' : 'Nothing of this kind among the latest.'}</p>`}
  </div></${Panel}>`
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

/** What else is known of a run: its messages are read when they are asked for. */
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
    : html`${!found.messages.length && html`<p class="soft small">A rule agent decides on figures; it is sent no messages. Or they are no longer kept.</p>`}
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
