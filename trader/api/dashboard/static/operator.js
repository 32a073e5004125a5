// @ts-check
// The operator's panel: halts by button, costs against budgets, failures, refusals, and halts and alarms on the curves.
import { useChosen } from './address.js'
import { call, invalidate, operatorToken, useAnswer } from './answers.js'
import { Pending, Panel, Select, Table, Time, modelColumn } from './components.js'
import { Curves } from './curves.js'
import { ZONE, day, isolated, moment, number, percent, whole } from './format.js'
import { html, useMemo, useState } from './lib.js'
import { useModels, useWindow } from './models.js'
import { HALTS } from './system.js'

const REASON = 'requested by an operator'
const DAY_MS = 86_400_000
const FLATTEN_WORD = 'flatten'

/** The page that takes a token, which the tab keeps until it is closed. */
export function OperatorPage() {
  const [text, setText] = useState('')
  const [said, setSaid] = useState('')
  const use = event => {
    event.preventDefault()
    operatorToken(text.trim())
    invalidate('operations.')
    call('operations.getActivity')
      .then(() => {
        location.hash = '#/system'
      })
      .catch(error => {
        operatorToken('')
        setSaid(error.message)
      })
  }
  return html`<${Panel} title="Stop trading: the operator's token"><form class="body filters" onSubmit=${use}>
    <input type="password" aria-label="Token with the scopes read and operate" placeholder="Token" autocomplete="off"
      value=${text} onInput=${event => setText(event.target.value)} />
    <button class="button" type="submit">Open the panel</button></form>
    <p class="body soft" role="status">${said || 'A token with the scopes read and operate, or API_TOKEN; it is checked before anything is shown, and kept by this tab until it is closed.'}</p></${Panel}>`
}

export function OperatorPanel({ route, report, halts }) {
  const known = useModels()
  const [window] = useWindow(route)
  const entry = useAnswer('operations.getActivity')
  const found = entry.data
  const notes = useMemo(() => found && notesOf(found), [found])
  return html`<${Pending} entry=${entry} what="The activity" />
    ${
      found &&
      html`<${Commands} halts=${halts} known=${known} />
      <${Curves} window=${window} title="Equity, with halts and alarms" notes=${notes} />
      <${Events} notes=${notes} />
      <${Costs} costs=${found.costs} since=${found.since} budgets=${report?.budgets ?? {}} known=${known} />
      <${Panel} title="Failures and latency, seven days"><${Table} label="Failures and latency" narrow=${['model', 'failed']} columns=${activityColumns(known)}
        rows=${named(found.models, known)} first=${20} empty="No invocation has finished." /></${Panel}>
      <${Panel} title="Refusals by rule, seven days"><${Table} label="Refusals by rule" columns=${REFUSALS}
        rows=${found.refusals} first=${20} empty="No call was refused." /></${Panel}>
      ${
        found.drift.length > 0 &&
        html`<${Panel} title="Paper against the venue, seven days, bp"><${Table} label="Drift" narrow=${['Market', 'p95']} columns=${DRIFT}
        rows=${found.drift.map(cells => ({ cells }))} first=${10} /></${Panel}>`
      }
      <${Approve} />`
    }`
}

const named = (rows, known) =>
  rows.map(one => ({ ...one, modelName: known.byId.get(one.modelId)?.name ?? one.modelId }))

const HALT = { procedure: 'operations.halt', verb: 'Halt' }
const FLATTEN = { procedure: 'operations.flatten', verb: 'Flatten' }
const RESUME = { procedure: 'operations.resume', verb: 'Resume' }
const STEP_DOWN = 'ladder'

/** What a person approves: the order that a link in an alarm names, or an entrant of the ladder. */
function Approve() {
  const [name, setName] = useChosen('approve', '')
  const [said, setSaid] = useState('')
  const act = event => {
    event.preventDefault()
    call('operations.approve', { name: name.trim(), by: 'an operator on the dashboard' })
      .then(answer => setSaid(answer.message))
      .catch(error => setSaid(`Not done: ${error.message}`))
      .finally(() => invalidate('/health', 'operations.'))
  }
  const [entrants, setEntrants] = useState(null)
  const show = () =>
    call('operations.getLadder')
      .then(answer => setEntrants(answer.entrants))
      .catch(error => setSaid(error.message))
  return html`<${Panel} title="Approve a step or an order"><form class="body filters" onSubmit=${act}>
    <input type="text" aria-label="Entrant or order to approve" placeholder="Entrant, or ID of an order" value=${name}
      onInput=${event => setName(event.target.value)} />
    <button class="button" type="submit" disabled=${!name.trim()}>Approve</button>
    <button class="button" type="button" onClick=${show}>Show the ladder</button></form>
    <p class="body" role="status">${said}</p>
    ${entrants && html`<${Table} label="The ladder" columns=${LADDER} rows=${entrants} first=${20} empty="There is no ladder." />`}</${Panel}>`
}

const LADDER = [
  { key: 'name', title: 'Entrant', isText: true, by: one => one.name, cell: one => one.name },
  { key: 'step', title: 'Step', isText: true, by: one => one.step, cell: one => one.step },
  { key: 'text', title: 'Shown', isText: true, className: 'wrap', by: one => one.text, cell: one => one.text },
]

const DRIFT = ['Of', 'Market', 'Side', 'Size', 'Latency', 'Fills', 'Mean', 'Median', 'p95', 'Worst'].map(
  (title, place) => ({
    key: title,
    title,
    isText: place < 5,
    by: ({ cells }) => (place < 5 ? cells[place] : Number(cells[place].replace(',', ''))),
    cell: ({ cells }) => cells[place],
  }),
)

/** Halt, flatten and resume, each after a confirmation that names its accounts; what closes positions is typed. */
function Commands({ halts, known }) {
  const [account, setAccount] = useState('')
  const [asked, setAsked] = useState(null)
  const [typed, setTyped] = useState('')
  const [said, setSaid] = useState('')
  const ask = (command, accountId) => {
    setTyped('')
    setAsked({ ...command, accountId })
  }
  const whom = id => (id ? isolated(known.nameOf(id)) : 'all accounts')
  const act = () => {
    setAsked(null)
    call(asked.procedure, {
      accountId: asked.accountId || undefined,
      reason: REASON,
      by: 'an operator on the dashboard',
    })
      .then(answer => setSaid(answer.message))
      .catch(error => setSaid(`Not done: ${error.message}`))
      .finally(() => invalidate('/health', 'operations.'))
  }
  const forget = () => {
    operatorToken('')
    location.hash = '#/'
  }
  const mustType = asked?.procedure === FLATTEN.procedure
  return html`<${Panel} title="Halt and resume" tools=${html`<button class="button" type="button" onClick=${forget}>Forget the token</button>`}>
    <div class="body filters">
      <${Select} label="Account to halt" value=${account} onChange=${setAccount}
        options=${[['', 'All accounts'], ...known.models.map(one => [one.id, known.nameOf(one.id)])]} />
      <button class="button" type="button" onClick=${() => ask(HALT, account)}>Halt</button>
      <button class="button" type="button" onClick=${() => ask(FLATTEN, account)}>Flatten</button>
      ${
        asked &&
        html`<span role="alertdialog" aria-label="Confirmation"><b>${asked.verb} ${whom(asked.accountId)}?</b>
        ${
          mustType &&
          html`<label class="moment">It closes every position at market. Type ${FLATTEN_WORD} to confirm
          <input type="search" value=${typed} onInput=${event => setTyped(event.target.value)} /></label>`
        }
        <button class="button" type="button" disabled=${mustType && typed !== FLATTEN_WORD}
          onClick=${act}>Yes, ${asked.verb.toLowerCase()}</button>
        <button class="button" type="button" onClick=${() => setAsked(null)}>No</button></span>`
      }
    </div>
    ${halts.map(
      one => html`<div class="body filters" key=${`${one.accountId} ${one.cause}`}><span>${`${whom(one.accountId)} since ${moment(one.since)} ${ZONE}, ${one.cause}: ${one.reason}`}</span>
      ${one.cause !== STEP_DOWN && html`<button class="button" type="button" onClick=${() => ask(RESUME, one.accountId)}>Resume</button>`}</div>`,
    )}
    <p class="body" role="status">${said || (halts.length ? '' : 'Nothing is halted.')}</p></${Panel}>`
}

/** Halts and alarms as moments of the curves, newest first: {at in seconds, since, label, text, until}. */
function notesOf({ halts, alarms }) {
  const of = (since, label, text, until) => ({ at: Date.parse(since) / 1000, since, label, text, until })
  const keyOf = one => `${one.cause} ${one.subject}`.trim()
  const endOf = one =>
    alarms.find(each => each.state === 'resolved' && each.since === one.since && keyOf(each) === keyOf(one))?.at
  return [
    ...halts.map(one =>
      of(one.haltedAt, 'halt', `${one.accountId ?? 'all accounts'}, ${one.cause}: ${one.reason}`, one.liftedAt),
    ),
    ...alarms
      .filter(one => one.state !== 'resolved' && !HALTS.includes(one.cause))
      .map(one => of(one.at, one.state === 'event' ? one.cause : 'alarm', `${keyOf(one)}: ${one.message}`, endOf(one))),
  ].sort((one, other) => other.at - one.at)
}

function Events({ notes }) {
  const columns = [
    {
      key: 'since',
      title: 'Since',
      isText: true,
      by: one => one.since,
      cell: one => html`<${Time} at=${one.since} />`,
    },
    { key: 'kind', title: 'Kind', isText: true, by: one => one.label, cell: one => one.label },
    { key: 'until', title: 'Until', isText: true, by: one => one.until, cell: one => moment(one.until) },
    { key: 'text', title: 'What', isText: true, className: 'wrap', by: one => one.text, cell: one => one.text },
  ]
  return html`<${Panel} title="Halts and alarms, seven days"><${Table} label="Halts and alarms" narrow=${['since', 'text']} columns=${columns} rows=${notes}
    first=${10} empty="Nothing was halted, and no alarm fired." /></${Panel}>`
}

/** What each model cost on each day, against its budget of a day; the last row has the sums. */
function Costs({ costs, since, budgets, known }) {
  const days = Array.from({ length: 7 }, (_, place) =>
    new Date(Date.parse(since) + place * DAY_MS).toISOString().slice(0, 10),
  ).reverse()
  const ids = [...new Set([...costs.map(one => one.modelId), ...Object.keys(budgets)])].sort()
  const rows = ids.map(modelId => ({
    modelId,
    budget: budgets[modelId]?.usdPerDay,
    state: budgets[modelId]?.state,
    usd: Object.fromEntries(costs.filter(one => one.modelId === modelId).map(one => [one.day, one.usd])),
    isPartial: costs.some(one => one.modelId === modelId && one.isPartial),
  }))
  const columns = [
    modelColumn(known),
    Object.keys(budgets).length > 0 && {
      key: 'budget',
      title: 'Budget a day',
      by: one => one.budget,
      cell: one =>
        html`${number(one.budget)}${one.state && one.state !== 'open' && html` <span class="badge warn">spent</span>`}`,
    },
    ...days.map((each, place) => ({
      key: each,
      title: place ? day(each) : 'Today',
      className: place > 2 ? 'wide' : '',
      by: one => one.usd[each],
      cell: one => html`<span class=${one.usd[each] > one.budget ? 'loss' : ''}>${number(one.usd[each])}</span>`,
    })),
  ].filter(Boolean)
  const total = sumOf(costs.filter(one => one.day === days[0]))
  return html`<${Panel} title="Cost by day (UTC), USD">
    <p class="body lede">${`${number(total)} today, ${number(sumOf(costs))} in seven days${
      costs.some(one => one.isPartial) ? '; part of it is unknown' : ''
    }.`}</p>
    <${Table} label="Cost by day" narrow=${['model', days[0]]} columns=${columns} rows=${named(rows, known)} first=${20}
      empty="No model has cost anything." /></${Panel}>`
}

const sumOf = costs => costs.reduce((sum, one) => sum + one.usd, 0)
const seconds = value => `${number(value, 1)} s`

const activityColumns = known => [
  modelColumn(known),
  { key: 'invocations', title: 'Invocations', by: one => one.invocations, cell: one => whole(one.invocations) },
  {
    key: 'failed',
    title: 'Failed',
    by: one => one.failed,
    cell: one =>
      html`${whole(one.failed)} <span class="sub">${percent((100 * one.failed) / one.invocations, 1)}</span>`,
  },
  { key: 'median', title: 'Median', by: one => one.medianSeconds, cell: one => seconds(one.medianSeconds) },
  { key: 'slow', title: '95 % within', by: one => one.slowSeconds, cell: one => seconds(one.slowSeconds) },
  {
    key: 'last',
    title: 'Last failure',
    isText: true,
    className: 'wrap',
    by: one => one.lastFailure,
    cell: one => one.lastFailure ?? 'none',
  },
]

const REFUSALS = [
  { key: 'rule', title: 'Rule', isText: true, by: one => one.rule, cell: one => one.rule },
  { key: 'calls', title: 'Calls', by: one => one.calls, cell: one => whole(one.calls) },
  { key: 'models', title: 'Models', by: one => one.models, cell: one => whole(one.models) },
]
