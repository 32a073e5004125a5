// @ts-check
// Conversations: everything a model saw, said and called, and every refusal with its reason, step by step and live.
import { useChosen } from './address.js'
import { call, useAnswer } from './answers.js'
import { lettersOf } from './charts.js'
import { Choice, DeclaredBadge, Moment, Pending, ModelName, Panel, Select, Time, useStages } from './components.js'
import { inkOn, onGround } from './colors.js'
import { merged } from './events.js'
import { number, percent, price, quantity, span, times, whole } from './format.js'
import { html, useEffect, useState } from './lib.js'
import { distinctName, useModels } from './models.js'
import { useLive, useRuns } from './store.js'

const NAMES = {
  CREATE_POSITION: 'open',
  CLOSE_POSITION: 'close',
  UPDATE_EXIT_PLAN: 'exit plan',
  HOLDING: 'hold',
  FETCH_INDICATORS: 'indicators',
  FETCH_ORDER_BOOK: 'book',
  NOTE: 'note',
  CANCEL_ORDER: 'cancel',
}
const ACTS = ['CREATE_POSITION', 'CLOSE_POSITION', 'UPDATE_EXIT_PLAN']
const KINDS = { rejected: 'loss', failed: 'warn' }
const PAGE = 100
const GROUPS = 10 // that come in one turn
const PAGES_MAX = 4 // that are read without being asked
const SHOW = [
  ['all', 'All'],
  ['acted', 'Acted'],
  ['refused', 'Refused'],
  ['failed', 'Failed'],
]
const MINUTE_MS = 60_000
const SENTENCE_MAX = 160

/**
 * What a model said of a market in a turn: the reason of its own call there, else the clause of its answer that names it.
 */
export function wordsOn(turn, symbol) {
  const decisions = turn.toolCalls.flatMap(each => (ACTS.includes(each.type) && each.metadata.decisions) || [])
  const own = decisions.find(each => each.symbol === symbol)?.reason
  const market = symbol.split(/[-/]/)[0]
  const clauses = String(own ?? turn.response ?? '').split(/[;\n]|\.\s/)
  const text = (clauses.find(each => each.includes(market)) ?? (own ? clauses[0] : '')).trim()
  return text.length > SENTENCE_MAX ? `${text.slice(0, SENTENCE_MAX)}…` : text
}

/**
 * The conversations of a model, a variant or all models; new ones from the stream are offered, not inserted. Holds are
 * folded before the list is limited, and more is read until it is full or `PAGES_MAX` were read. Beside a chart, each act is a bubble with the model's words. `at` in the
 * address is a time to begin at.
 */
export function Conversations({ modelId, variant, title = 'Conversations', groups: most = 50, isSide = false }) {
  const known = useModels()
  const state = useLive()
  const [chosenModel, setModel] = useChosen('model', '', true)
  const [chosenVariant, setVariant] = useChosen('variant', '', true)
  const [show, setShow] = useChosen('show', 'all', true)
  const [at, setAt] = useChosen('at', '', true)
  const [seen, setSeen] = useState(null)
  const [isLooking, setLooking] = useState(false)
  const isHeard = useRuns(isLooking)
  const chosen = {
    modelId: (modelId ?? chosenModel) || undefined,
    variant: (variant ?? chosenVariant) || undefined,
    outcome: show === 'all' ? undefined : show,
  }
  const isOfThese = (id, variantOfIt) =>
    (!chosen.modelId || id === chosen.modelId) && (!chosen.variant || variantOfIt === chosen.variant)
  const before = Date.parse(at) ? new Date(Date.parse(at) + MINUTE_MS).toISOString() : undefined
  const earlier = useEarlier({ limit: PAGE, before, ...chosen })
  const live = (before ? [] : (state.conversations ?? [])).filter(
    turn => isOfThese(turn.modelId, turn.modelVariant) && isShown(turn, show),
  )
  const turns = merged(live, earlier.turns)
  const isKnown = state.conversations !== null && earlier.entry.data !== null
  const see = () => setSeen(new Set(turns.map(turn => turn.id)))
  useEffect(() => {
    if (isKnown && seen === null && turns.length) see()
  })
  const read = new Set(earlier.turns.map(turn => turn.id))
  const newer = seen === null ? [] : turns.filter(turn => !seen.has(turn.id) && !read.has(turn.id))
  const shown = folded(turns.filter(turn => !newer.includes(turn)))
  const limit = most * (1 + earlier.presses)
  const isFull = shown.length >= limit || earlier.pages >= PAGES_MAX * (1 + earlier.presses) || !earlier.hasMore
  useEffect(() => {
    if (isKnown && !isFull) earlier.readMore()
  })
  const count = Math.min(limit, shown.length)
  const there = GROUPS * (1 + useStages(isKnown, Math.ceil(count / GROUPS) - 1))
  const running = [...state.running].filter(([id]) => isOfThese(id, known.byId.get(id)?.variant))
  const choose = set => value => {
    set(value)
    setSeen(null)
  }
  const tools = html`
    ${
      !modelId &&
      !isSide &&
      html`<div class="filters">
      <${Select} label="Model" value=${chosenModel} onChange=${choose(setModel)}
        options=${[['', 'All models'], ...known.models.map(model => [model.id, model.name])]} />
      ${
        !variant &&
        html`<${Select} label="Variant" value=${chosenVariant} onChange=${choose(setVariant)}
        options=${[['', 'All variants'], ...known.variants.map(each => [each.id, each.id])]} />`
      }</div>`
    }
    <${Choice} label="Which" value=${show} onChange=${choose(setShow)} options=${SHOW} />
    ${(!isSide || at) && html`<${Moment} label="At" value=${at} onChange=${choose(setAt)} />`}
    ${at && html`<button class="button" type="button" onClick=${() => choose(setAt)('')}>Latest</button>`}`
  const One = isSide ? Bubbles : Turn
  return html`<${Panel} title=${title} tools=${tools}>
    <details class="now" onToggle=${event => setLooking(event.target.open)}><summary>${
      running.length
        ? `Deciding: ${running.map(([, run]) => run.name).join(', ')}`
        : isHeard
          ? 'No model is deciding'
          : 'Who is deciding'
    }</summary>
      <ol class="turns">${running.map(
        ([id, run]) => html`<${Running} key=${run.id} id=${id} run=${run}
        known=${known} />`,
      )}</ol></details>
    <p class="newer"><button class="button" type="button" disabled=${!newer.length}
      onClick=${see}>${newer.length ? `Show ${newer.length} newer` : 'Nothing newer'}</button></p>
    <${Pending} entry=${earlier.entry} what="The conversations" isQuiet=${turns.length > 0} />
    <div class=${isSide ? 'feed' : ''}>
      <ol class="turns">${shown
        .slice(0, Math.min(count, there))
        .map(group =>
          group.length > 1
            ? html`<${Held} key=${group.at(-1).id} turns=${group} known=${known} />`
            : html`<${One} key=${group[0].id} turn=${group[0]} known=${known} isCut=${isSide} />`,
        )}</ol>
      ${
        isKnown &&
        !turns.length &&
        html`<p class="empty">${
          show === 'all'
            ? 'No model has been asked yet.'
            : `No decision ${{ acted: 'was to act', refused: 'was refused', failed: 'failed' }[show]} yet.`
        }</p>`
      }
      ${
        there >= count &&
        (isFull || earlier.presses > 0 || earlier.hasFailed) && // else it would move down while the list fills
        (shown.length > limit || earlier.hasMore) &&
        html`<p class="more"><button class="button" type="button"
        onClick=${earlier.press}>Older conversations</button></p>`
      }
    </div></${Panel}>`
}

/** Everything older than the stream, page by page. */
function useEarlier(input) {
  const entry = useAnswer('models.getInvocations', input, 0)
  const key = JSON.stringify(input)
  const none = { key, pages: [], presses: 0, isReading: false, hasFailed: false }
  const [older, setOlder] = useState(none)
  const { pages, presses, isReading, hasFailed } = older.key === key ? older : none
  const last = pages.at(-1) ?? entry.data
  async function readMore() {
    if (isReading || !last?.nextBefore) return
    setOlder({ ...none, pages, presses, isReading: true })
    const page = await call('models.getInvocations', { ...input, before: last.nextBefore, skip: last.nextSkip }).catch(
      () => null,
    )
    setOlder(now =>
      now.key === key
        ? { ...now, pages: page ? [...pages, page] : pages, isReading: page === null, hasFailed: page === null }
        : now,
    )
  }
  return {
    entry,
    readMore,
    presses,
    pages: pages.length,
    hasMore: Boolean(last?.nextBefore),
    hasFailed,
    turns: [entry.data, ...pages].flatMap(page => page?.conversations ?? []),
    press: () => setOlder({ ...none, pages, presses: presses + 1 }),
  }
}

/** The page of one decision. */
export function ConversationPage({ id }) {
  const known = useModels()
  const entry = useAnswer('models.getInvocations', { invocationId: id }, 0)
  const [turn] = entry.data?.conversations ?? []
  return html`<div class="title"><h1>Decision</h1><a href="#/conversations">All conversations</a></div>
    <${Pending} entry=${entry} what="The decision" />
    ${entry.data && !turn && html`<p class="notice">There is no finished decision ${id}.</p>`}
    ${
      turn &&
      html`<section class="panel" aria-label="Decision"><ol class="turns"><${Turn} turn=${turn}
      known=${known} /></ol></section>`
    }`
}

const isHold = turn =>
  turn.status === 'completed' && turn.toolCalls.length > 0 && turn.toolCalls.every(each => each.type === 'HOLDING')

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
    <summary title=${names}><span class="badge">hold × ${turns.length}</span> <bdi>${names}</bdi> <${Time}
      at=${turns[0].timestamp} /></summary>
    ${
      isOpen &&
      html`<ol class="turns">${turns.map(
        turn => html`<${Turn} key=${turn.id} turn=${turn} known=${known}
      isCut=${true} />`,
      )}</ol>`
    }
  </details></li>`
}

function isShown(one, show) {
  if (show === 'acted') return one.toolCalls.some(each => ACTS.includes(each.type))
  if (show === 'failed') return one.status !== 'completed' || one.toolCalls.some(each => each.status === 'failed')
  return show === 'all' || one.status !== 'completed' || one.toolCalls.some(each => each.status !== 'ok')
}

function Running({ id, run, known }) {
  return html`<li class="turn running">
    <header><i class="pulse" aria-hidden="true"></i><${ModelName} id=${id} name=${run.name}
      color=${known.colorOf(id)} /><span class="small soft">is deciding</span></header>
    <ol class="calls">${run.steps.map(step =>
      step.type === 'workflow:call'
        ? html`<${Call} one=${{ ...step, type: step.callType }} />`
        : html`<li class="call"><span
          class="badge">step ${step.step}</span><span>${step.text || step.toolNames.join(', ') || 'an answer without a call'}</span></li>`,
    )}</ol>
  </li>`
}

/** A bubble for each act of a turn, in the model's words on its market; without one, a bubble of its answer. */
function Bubbles({ turn, known }) {
  const acts = turn.toolCalls.filter(each => ACTS.includes(each.type) || each.status !== 'ok')
  const said = (turn.response ?? '').trim()
  const wordsOf = act =>
    [...new Set(act.metadata.decisions?.map(each => each.symbol && wordsOn(turn, each.symbol)))]
      .filter(Boolean)
      .join(' ') || (acts.length === 1 ? said : '')
  const bubbles = acts.length ? acts.map(act => ({ act, text: wordsOf(act) })) : [{ text: said || holdOf(turn) }]
  const color = onGround(known.colorOf(turn.modelId, turn.modelVariant))
  return bubbles.map(
    ({ act, text }, place) => html`<li class="turn bubble" key=${act?.id ?? place}>
      <span class="avatar" aria-hidden="true" style=${{ '--key': color, '--ink': inkOn(color) }}>${lettersOf(distinctName(turn.modelId, turn.modelName))}</span>
      <div><header><${ModelName} id=${turn.modelId} name=${turn.modelName} isPlain=${true} />
        <a href=${`#/conversations/${turn.id}`} title="This decision"><${Time} at=${turn.timestamp} /></a></header>
        ${turn.failureReason && html`<p class="said loss">${turn.failureReason}</p>`}
        ${text && html`<p class="said cut" title=${text}>${text}</p>`}
        ${act && html`<ol class="calls"><${Call} one=${{ ...act, ...act.metadata }} /></ol>`}</div></li>`,
  )
}

const holdOf = turn => turn.toolCalls.find(each => each.type === 'HOLDING')?.metadata.decisions?.[0]?.reason ?? ''

/** What a model did last, in its words. */
export function LastWords({ modelId }) {
  const known = useModels()
  const [turn] = useAnswer('models.getInvocations', { modelId, outcome: 'acted', limit: 1 }).data?.conversations ?? []
  return turn
    ? html`<ol class="turns"><${Bubbles} turn=${turn} known=${known} /></ol>`
    : html`<p class="soft">It has not acted yet.</p>`
}

export function Turn({ turn, known, isCut }) {
  const [isOpen, setOpen] = useState(!isCut)
  const reasonOf = each =>
    (each.type === 'HOLDING' && each.status === 'ok' && each.metadata.decisions?.[0]?.reason?.trim()) || ''
  const said = (turn.response ?? '').trim()
  // What a model says is often the reason of its hold once more: it is shown once, in its longer form.
  const repeated = turn.toolCalls.filter(
    each => reasonOf(each) && said && (said.includes(reasonOf(each)) || reasonOf(each).includes(said)),
  )
  const calls = turn.toolCalls.filter(each => !repeated.includes(each))
  const text = repeated
    .map(reasonOf)
    .concat(said)
    .reduce((one, other) => (other.length > one.length ? other : one))
  return html`<li class="turn">
    <header><${ModelName} id=${turn.modelId} name=${turn.modelName}
      color=${known.colorOf(turn.modelId, turn.modelVariant)} />
      ${turn.status !== 'completed' && html`<span class="badge loss">${turn.status}</span>`}
      ${repeated.length > 0 && !calls.length && html`<span class="badge">hold</span>`}<a
        href=${`#/conversations/${turn.id}`} title="This decision"><${Time} at=${turn.timestamp} /></a></header>
    ${turn.failureReason && html`<p class="said loss">${turn.failureReason}</p>`}
    ${text && html`<p class=${`said ${isOpen ? '' : 'cut'}`} onClick=${isCut && (() => setOpen(!isOpen))}>${text}</p>`}
    ${
      calls.length > 0 &&
      html`<ol class="calls">${calls.map(
        each => html`<${Call} key=${each.id}
      one=${{ ...each, ...each.metadata }} />`,
      )}</ol>`
    }
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
    <summary>${one.steps} ${one.steps === 1 ? 'step' : 'steps'}${one.endedBy ? `, ended by ${one.endedBy}` : ''} · ${span(one.durationMs)}${
      one.inputTokens + one.outputTokens > 0
        ? ` · ${whole(one.inputTokens)} tokens in, ${whole(one.outputTokens)} out`
        : ''
    }${one.costUsd != null ? ` · ${number(one.costUsd, 4)} USD` : ''}${
      one.declaredUsage &&
      html`${one.declaredUsage.model && ` · ${one.declaredUsage.model}`}${
        one.declaredUsage.steps != null && ` · ${whole(one.declaredUsage.steps)} model requests`
      }<${DeclaredBadge} />`
    } · what it saw</summary>
    ${
      isOpen &&
      (found === null
        ? html`<p class="soft small">Reading …</p>`
        : found.error
          ? html`<p class="soft small">Not shown: ${found.error}</p>`
          : html`${
              !found.messages.length &&
              html`<p
            class="soft small">No messages: either a rule agent, which decides on figures, or they are no longer kept.</p>`
            }
      ${found.messages.map(
        (each, place) => html`<div class="message" key=${place}><span
        class="badge">${each.role}</span>${
          each.reasoning && html`<details><summary>its reasoning</summary><pre>${each.reasoning}</pre></details>`
        }<pre>${each.text}</pre></div>`,
      )}`)
    }
    ${
      isOpen &&
      one.toolCalls.length > 0 &&
      html`<div class="message"><span class="badge">calls as JSON</span><pre tabindex="0">${JSON.stringify(
        one.toolCalls.map(each => ({ type: each.type, status: each.status, ...each.metadata })),
        null,
        2,
      )}</pre></div>`
    }
  </details>`
}

function Call({ one: { type, status, decisions, raw, results = [] } }) {
  const [result = {}] = results
  const filled = order =>
    status === 'ok' && order?.averagePrice
      ? html` <span
        class="soft">filled ${quantity(order.filledQuantity)} at ${price(order.averagePrice)}, fee ${number(order.fees)}</span> <a href=${`#/trades/${order.orderId}`}>trade</a>`
      : ''
  return html`<li class="call"><span class=${`badge ${KINDS[status] ?? ''}`}>${NAMES[type] ?? type}</span>
    ${raw?.form && html`<span class="badge" title="Its server left the call in the text">as text: ${raw.form}</span>`}
    ${(decisions?.length ? decisions : [{}]).map(
      (decision, place) => html`<span>${wordsOf(type, decision)}${filled(results[place])}</span>`, // two of a pair
    )}
    ${
      status !== 'ok' &&
      html`<p class=${status === 'failed' ? 'warn' : 'loss'}>${status === 'rejected' ? 'Refused' : 'Failed'}${
        result.rule ? ` (${result.rule})` : ''
      }: ${result.reason ?? result.error ?? 'no reason was recorded'}</p>`
    }
  </li>`
}

function wordsOf(type, decision) {
  const { stop, target, trailingDistance, targets } = decision.exitPlan ?? decision
  const plan = [
    ['stop', stop],
    ['following at', trailingDistance],
    ['target', target],
    ...(targets ?? []).map(each => [`limit for ${percent(100 * each.fraction, 0)}`, each.price]),
  ]
    .filter(([, value]) => value != null)
    .map(([name, value]) => `${name} ${price(value)}`)
  if (type === 'HOLDING') return decision.reason ?? ''
  if (type === 'NOTE') {
    return html`${decision.text ?? ''}${
      decision.parts &&
      html`<ol class="calls">${decision.parts.map(
        part => html`<li class="call">
      <span class="badge">${part.kind ?? 'rationale'}</span><span>${part.title && html`<b>${part.title}</b> `}${part.text}</span></li>`,
      )}</ol>`
    }`
  }
  if (type === 'FETCH_INDICATORS') return `${decision.symbol ?? ''} ${decision.interval ?? ''}`
  if (type === 'CREATE_POSITION') {
    return [
      `${decision.side ?? ''} ${quantity(decision.quantity)} ${decision.symbol ?? ''}${decision.leverage ? ` at ${times(decision.leverage)}` : ''}`,
      ...plan,
      decision.confidence != null ? `confidence ${quantity(decision.confidence)} %` : null,
    ]
      .filter(Boolean)
      .join(', ')
  }
  return [`${decision.quantity ? `${quantity(decision.quantity)} ` : ''}${decision.symbol ?? ''}`, ...plan].join(', ')
}
