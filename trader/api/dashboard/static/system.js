// @ts-check
// The state of the service: health, market, schedulers, streams and halts, and the banners about them.
import { operatorToken, useReport } from './answers.js'
import { Facts, Later, Pending, Panel, Table } from './components.js'
import { ZONE, clock, moment, number, span, whole } from './format.js'
import { html } from './lib.js'
import { useModels } from './models.js'
import { useLive } from './store.js'

/** Alarms of these causes tell of a halt, which is listed by itself. */
export const HALTS = ['halt', 'loss limit']
const PANEL = () => import('./operator.js')
const HEALTH_MS = 15_000 // halts are read as soon as the stream reports one
const SYSTEM_MS = 30_000
export const useHealth = () => useReport('/health', HEALTH_MS)
const useRecord = () => useReport(`/api/record?after=${Number.MAX_SAFE_INTEGER}`, 2 * SYSTEM_MS) // only the head
const useSystem = (everyMs = SYSTEM_MS) => useReport('/health/schedulers', everyMs)

/** The end of the service's replay; null while it continues, and for other markets. */
export function endOf(health) {
  const { ends } = document.body.dataset
  return ends && Date.parse(health.data?.timestamp) > Date.parse(ends) ? ends : null
}

/**
 * The state of the service and of this page's connection, told in the dot, the banners and the title: {kind, word,
 * troubles}, with the problems, {kind, word, text}, the worst first.
 */
export function statusOf(state, health, system, warning) {
  const troubles = troublesOf(state, health, system, warning).sort(
    (one, other) => Number(other.kind === 'bad') - Number(one.kind === 'bad'),
  )
  const [worst] = troubles
  if (worst) return { kind: worst.kind === 'bad' ? 'bad' : 'warn', word: worst.word ?? 'live', troubles }
  return state.connection === 'open'
    ? { kind: '', word: 'live', troubles }
    : { kind: 'warn', word: 'connecting', troubles }
}

export const useStatus = () => statusOf(useLive(), useHealth(), useSystem(), useModels().warning)

function troublesOf(state, health, system, warning) {
  const found = []
  const since = state.dataAt ? `What you see is as of ${clock(state.dataAt)} ${ZONE}` : 'Nothing was received yet'
  const lost = {
    kind: 'bad',
    word: 'disconnected',
    text: `The connection to the service is lost. ${since}; it is tried again every 2 seconds.`,
  }
  if (state.connection === 'lost') found.push(lost)
  const report = health.data
  if (state.connection === 'refused')
    found.push(
      health.error
        ? lost
        : {
            kind: 'warn',
            word: 'no stream',
            text: `The service answers but accepts no more live streams: all their slots are taken. ${since}; it is tried again every 2 seconds.`,
          },
    )
  if (health.error && state.connection === 'open')
    found.push({ kind: 'bad', word: 'no answer', text: `The service does not answer: ${health.error}. ${since}.` })
  const ended = endOf(health)
  if (ended)
    found.push({
      kind: '',
      word: 'ended',
      text: `The replay ended at ${moment(ended)} ${ZONE}: no more decisions or trades are made.`,
    })
  if (report?.status === 'unhealthy' && !ended) {
    const stopped = Object.entries(report.schedulers)
      .filter(([, runs]) => !runs)
      .map(([name]) => name)
    const reasons = report.reasons ?? [
      ...(stopped.length ? [`not running: ${stopped.join(', ')}`] : []),
      ...Object.entries(report.reconciliation ?? {}).map(([account, why]) => `${account}: ${why}`),
    ]
    found.push({
      kind: 'bad',
      word: 'unhealthy',
      text: `The service is unhealthy${reasons.length ? `: ${reasons.map(withoutPeriod).join('; ')}` : ''}.`,
    })
  }
  for (const halt of report?.halts ?? []) {
    found.push({
      kind: 'warn',
      word: 'halted',
      text:
        `${halt.accountId ?? 'All trading'} is halted since ${moment(halt.since)} ${ZONE} ` +
        `(${halt.cause}): ${withoutPeriod(halt.reason)}. Positions are only reduced.`,
    })
  }
  const market = system.data?.market
  if ((market?.stale || market?.trouble) && !ended) {
    found.push({
      kind: 'warn',
      word: 'stale prices',
      text: `Prices are stale: the last update of the market ${market.source} was ${
        market.lastUpdateAt ? `at ${moment(market.lastUpdateAt)} ${ZONE}` : 'never'
      }${market.trouble ? ` (${market.trouble})` : ''}.`,
    })
  }
  if (warning) found.push({ kind: 'warn', text: warning })
  for (const alarm of report?.alarms ?? []) {
    const isShown =
      HALTS.includes(alarm.cause) ||
      report.reasons?.includes(alarm.message) ||
      (warning && WARNED.includes(alarm.cause)) ||
      (ended && alarm.cause === 'market')
    if (!isShown) found.push({ kind: 'warn', text: `${nameOf(alarm)}: ${alarm.message}` })
  }
  return found
}

const withoutPeriod = text => text.replace(/\.$/, '')
const WARNED = ['model', 'provider', 'price'] // which the warning about the models contains
const nameOf = alarm => `Alarm ${alarm.cause} ${alarm.subject}`.trim()

export function SystemPage({ route }) {
  const health = useHealth()
  const system = useSystem(HEALTH_MS)
  const head = useRecord().data?.head
  const state = useLive()
  const known = useModels()
  const report = system.data
  const schedulers = Object.entries(report?.schedulers ?? {})
  const columns = [
    { key: 'name', title: 'Scheduler', isText: true, by: ([name]) => name, cell: ([name]) => name },
    {
      key: 'running',
      title: 'State',
      isText: true,
      by: ([, one]) => String(one.running),
      cell: ([, one]) =>
        one.running
          ? html`<span class="badge gain">running</span>`
          : report.role === 'standby'
            ? html`<span class="badge">on the leader</span>`
            : html`<span class="badge loss">not running</span>`,
    },
    {
      key: 'interval',
      title: 'Every',
      by: ([, one]) => one.intervalMs,
      csv: ([, one]) => ({ 'Every, ms': one.intervalMs }),
      cell: ([, one]) => span(one.intervalMs),
    },
    { key: 'runs', title: 'Runs', by: ([, one]) => one.runs, cell: ([, one]) => whole(one.runs) },
    { key: 'failures', title: 'Failures', by: ([, one]) => one.failures, cell: ([, one]) => whole(one.failures) },
    { key: 'last', title: 'Last', by: ([, one]) => one.lastFinishedAt, cell: ([, one]) => moment(one.lastFinishedAt) },
    {
      key: 'took',
      title: 'Took',
      by: ([, one]) => one.lastDurationMs,
      csv: ([, one]) => ({ 'Took, ms': one.lastDurationMs }),
      cell: ([, one]) => (one.lastDurationMs == null ? '–' : `${whole(one.lastDurationMs)} ms`),
    },
    {
      key: 'error',
      title: 'Last error',
      isText: true,
      className: 'wrap',
      by: ([, one]) => one.lastError,
      cell: ([, one]) => one.lastError ?? 'none',
    },
  ]
  const alarms = report?.alarms ?? []
  const facts = report && [
    ['Status', health.data?.status],
    ['Alarms', alarms.length ? whole(alarms.length) : 'none'],
    ['Trading', report.tradingMode],
    ['Role', report.role],
    ['Up for', span(report.uptimeSeconds * 1000)],
    ['Market', report.market.source],
    ['Last price', moment(report.market.lastUpdateAt)],
    ['Database', report.database.ok ? `${number(report.database.latencyMs, 1)} ms` : 'does not answer'],
    ['Last heard', state.heardAt ? clock(state.heardAt) : 'never'],
    ['Connection', state.connection],
    ...Object.entries(report.streams).map(([name, one]) => [`Stream ${name}`, `${one.subscribers} of ${one.capacity}`]),
  ]
  return html`
    <${Pending} entry=${system} what="The state of the service" />
    ${facts && html`<${Panel} title="Service"><${Facts} rows=${facts} /></${Panel}>`}
    ${
      alarms.length > 0 &&
      html`<${Panel} title="Alarms"><${Facts} rows=${alarms.map(one => [
        `${nameOf(one)}, ${one.state} since ${moment(one.since)}`,
        one.message,
      ])} /></${Panel}>`
    }
    ${operatorToken() && html`<${Later} load=${PANEL} name="OperatorPanel" route=${route} report=${report} halts=${health.data?.halts ?? []} />`}
    ${
      report &&
      html`<${Panel} title="Schedulers"><${Table} label="Schedulers" narrow=${['name', 'running', 'last']} columns=${columns} rows=${schedulers}
      empty="" /></${Panel}>`
    }
    ${
      head &&
      html`<${Panel} title="Record"><${Facts} rows=${[
        ['Links', whole(head.position)],
        ['Head', html`<code>${head.digest}</code>`],
      ]} /></${Panel}>`
    }
    ${
      report?.modelsRunning.length > 0 &&
      html`<${Panel} title="Deciding now"><${Facts} rows=${report.modelsRunning.map(one => [
        known.byId.get(one.modelId)?.name ?? one.modelId,
        span(one.runningForSeconds * 1000),
      ])} /></${Panel}>`
    }`
}
