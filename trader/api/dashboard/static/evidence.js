// @ts-check
// Evidence: the result of a model against its references, with intervals and in words.
import { useAnswer } from './answers.js'
import {
  Declared,
  EntrantName,
  Facts,
  Pending,
  Interval,
  ModelName,
  Panel,
  SeasonLine,
  Table,
  scaleOf,
} from './components.js'
import { isolated, moment, number, percent, signed, signedPercent, tone, whole } from './format.js'
import { html } from './lib.js'
import { entrantName, useModels } from './models.js'
import { compare } from './order.js'

const REFERENCES = {
  ruleAgent: 'its rule agent',
  holdNothing: 'holding nothing',
  buyAndHold: 'buying and holding',
  bestOther: 'the best other',
}
const CONTAMINATION = {
  'after cut-off': ['gain', 'after training', 'all of it is after the end of its training data'],
  'before cut-off': ['warn', 'may be trained on', 'it begins before the end of its training data'],
  unknown: ['', 'unknown', 'the models file gives no training cut-off'],
}

const UNDECIDED = 'not distinguishable yet'
const capital = text => text[0].toUpperCase() + text.slice(1)
export const kindOf = word => (word === 'better' ? 'gain' : word === 'worse' ? 'loss' : '')
const pOf = value => (value == null ? '' : value < 0.001 ? 'p under 0.001' : `p ${number(value, 3)}`)

export const commonHours = one => `${whole(one.hours)} common ${one.hours === 1 ? 'hour' : 'hours'}`
export const boundsOf = ({ low, high }) => `${signed(low, 1)} to ${signed(high, 1)} %`

/**
 * A verdict as a sentence: why the two are indistinguishable, or how certain their difference is. Only the primary
 * comparison of a season is not corrected for the others.
 */
export const sentenceOf = (one, isCorrected = true) =>
  `${capital(one.verdict)}${one.reason ? `: ${one.reason}` : `, ${pOf(one.pValue)}${isCorrected ? ' after correction' : ''}`}.${
    one.verdictBefore ? ` By the rules before the amendment: ${one.verdictBefore}.` : ''
  }`

/** What a verdict against holding nothing is of, in words. */
const pathOf = (one, market) =>
  one.reference === 'holdNothing' && one.verdict !== UNDECIDED
    ? ` on one market path${market == null ? '' : market > 0 ? ', in a rising market' : ', in a falling market'}`
    : ''

const boundsIn = rows => rows.flatMap(one => [one.interval?.low, one.interval?.high])
const scaleOfDifferences = differences =>
  scaleOf(
    differences.map(one => one.differencePercent),
    boundsIn(differences),
  )

/** The evidence for one model: a row per reference, and the facts that qualify it. */
export function ModelEvidence({ id, window }) {
  const known = useModels()
  const entry = useAnswer('analytics.getEvidence', { window, modelId: id })
  const found = entry.data?.entrants ?? []
  const one = found.find(each => each.endedAt === null) ?? found[0]
  return html`<${Panel} title="Evidence" tools=${
    one &&
    html`<span class=${`badge ${one.amongBest ? 'gain' : ''}`}>${
      one.amongBest ? 'not distinguishable from the best' : 'behind the best'
    }</span>`
  }>
    <${Pending} entry=${entry} what="The evidence" />
    ${entry.data && !one && html`<p class="empty">There is no entrant of this model in the current run yet.</p>`}
    ${
      one &&
      html`<${Differences} one=${one} known=${known} market=${entry.data.marketReturn} /><${Qualities} one=${one}
      entry=${entry} />`
    }
  </${Panel}>`
}

function Differences({ one, known, market }) {
  const [least, most] = scaleOfDifferences(one.differences)
  const color = known.colorOf(one.modelIds[0], one.variant)
  const nameOf = each =>
    each.reference === 'bestOther' && each.referenceId
      ? html`the best other: <${ModelName} id=${each.referenceId}
        name=${known.byId.get(each.referenceId)?.name ?? each.referenceId} color=${known.colorOf(each.referenceId)} />`
      : REFERENCES[each.reference]
  return html`<ul class="differences">${one.differences.map(
    each => html`<li key=${each.reference}>
    <span>against ${nameOf(each)}</span>
    <span class="figure"><b class=${tone(each.differencePercent)}
      title=${each.differencePercent}>${signedPercent(each.differencePercent)}</b>
      <small class="sub">${each.hours ? commonHours(each) : ''}</small></span>
    <span class="figure">${
      each.differencePercent != null &&
      html`<${Interval} low=${each.interval?.low} high=${each.interval?.high}
      value=${each.differencePercent} least=${least} most=${most} reason=${each.reason} color=${color} />
      <small class="sub">${each.interval ? `95 %, one look: ${boundsOf(each.interval)}` : 'no interval yet'}</small>`
    }</span>
    <span class=${kindOf(each.verdict)}>${sentenceOf(each)}${
      pathOf(each, market) &&
      html` <small
      class="sub">${pathOf(each, market)}</small>`
    }</span></li>`,
  )}</ul>`
}

function Qualities({ one, entry }) {
  const [kind, label, title] = CONTAMINATION[one.contamination]
  const facts = [
    [
      one.replicates ? `Return, mean of ${one.replicates.modelIds.length} replicates` : 'Return',
      signedPercent(one.returnPercent),
    ],
    ['95 % interval, one look', one.interval ? boundsOf(one.interval) : '–'],
    ['Trades, losing', `${whole(one.tradesCount)}, ${whole(one.losingTradesCount)}`],
    [
      'Coverage',
      html`<span class=${one.ranked ? '' : 'warn'}
        title=${one.ranked ? 'share of its due cycles in which it decided' : 'under 95 %, so it is not ranked'}>${percent(one.coverage, 1)}</span>`,
    ],
    [
      'Trained on the period',
      html`<span class=${`badge ${kind}`} title=${title}>${label}</span>${
        one.trainingCutoff
          ? html` <span
        class="soft">${one.trainingCutoff}</span>`
          : ''
      }`,
    ],
    [
      'Entrant',
      html`<span title=${one.fingerprint ?? 'not recorded'}>${one.entrant}${one.fingerprint ? ` · ${one.fingerprint.slice(0, 8)}` : ''}</span>`,
    ],
    ...(one.replicates
      ? [
          ['Replicates', `${one.replicates.modelIds.length}, spread ${percent(one.replicates.spreadPercent)}`],
          ['Own noise', percent(one.replicates.noisePercent, 0)],
        ]
      : []),
  ]
  return html`<${Facts} rows=${facts} />
    ${one.reason && html`<p class="soft small foot">No interval yet: ${one.reason}.</p>`}`
}

const shareOf = (count, all) => (all ? `${whole(count)} (${percent((100 * count) / all, 0)})` : '–')
const endsOf = plan =>
  `planned ${whole(plan.planned)}; by stop ${shareOf(plan.byStop, plan.planned)}, ` +
  `by target ${shareOf(plan.byTarget, plan.planned)}, by decision ${shareOf(plan.byDecision, plan.planned)}`

/** How a model's present entrant trades, regardless of its result. */
export function ModelBehaviour({ id }) {
  const entry = useAnswer('analytics.getBehaviour', { modelId: id })
  const one = entry.data?.behaviour
  return html`<${Panel} title="Behavior">
    <${Pending} entry=${entry} what="The behavior" />
    ${entry.data && !one && html`<p class="empty">There is no entrant of this model in the current run yet.</p>`}
    ${one && html`<${Facts} rows=${behaviourOf(one)} />`}
  </${Panel}>`
}

function behaviourOf(one) {
  const held = one.holdingTimes
  return [
    [
      'Positions, flips',
      `${whole(one.positions)}, ${whole(one.flips)}`,
      'a flip enters the other side of a market within an hour of closing',
    ],
    ['Time in the market', percent(one.timeInMarket, 1), 'share of time with a position'],
    [
      'Held',
      held ? `${whole(held.median)} min (${whole(held.low)} to ${whole(held.high)})` : '–',
      'median, and the 10 and 90 % quantiles',
    ],
    [
      'Held under a minute',
      whole(one.withinMinute),
      'completed positions; in a replay of candles their results depend on drawn prices',
    ],
    [
      'Leverage by volatility',
      one.leverageByVolatility ? one.leverageByVolatility.map(each => number(each, 2)).join(' · ') : '–',
      'mean leverage in six equal groups of hours by the volatility of the day before, the calmest first; from 60 hours on',
    ],
    [
      'Turnover',
      one.turnover == null ? '–' : `${number(one.turnover, 1)} × equity`,
      'entries and exits relative to the initial equity',
    ],
    [
      'Fees of gross gains',
      percent(one.fees, 1),
      'fees of completed positions in percent of the gross gains of winning positions',
    ],
    [
      'Of the most it was ahead',
      percent(one.captured, 1),
      'gross profit of completed positions in percent of their favorable excursions (MFE)',
    ],
    ['Stops', endsOf(one.stops), 'how completed positions with a stop ended'],
    ['Targets', endsOf(one.targets), 'how completed positions with a target ended'],
    ['Plans changed', whole(one.plansChanged), 'positions whose stop or target was changed while they were held'],
    ...(one.replicates.length
      ? [
          [
            'Alike over replicates',
            percent(one.alike, 1),
            `share of the time with a position in which it and ${one.replicates.join(', ')} held the same side of the same market`,
          ],
        ]
      : []),
  ]
}

/**
 * All entrants against their references, the best result first; `children` follow once they are read.
 * @param {any} choices
 */
export function EvidenceTable({ window, variant = 'all', children }) {
  const known = useModels()
  const entry = useAnswer('analytics.getEvidence', { window, variant })
  const until = entry.data && html`<span class="soft small">of whole hours, up to ${moment(entry.data.until)}</span>`
  return html`<${Panel} title="Evidence" tools=${until}>
    <${Pending} entry=${entry} what="The evidence" />
    ${entry.data && html`<${EvidenceBoard} answer=${entry.data} known=${known} />`}
  </${Panel}>${(entry.data || entry.error) && children}`
}

/** The entrants of an answer of getEvidence, on the dashboard or in a report, whose models have no pages to link to. */
export function EvidenceBoard({ answer, known, isLinked = true }) {
  const entrants = [...answer.entrants].sort(
    (one, other) =>
      Number(one.endedAt !== null) - Number(other.endedAt !== null) || compare(other.returnPercent, one.returnPercent),
  )
  const of = (one, reference) => one.differences.find(each => each.reference === reference)
  const [least, most] = scaleOf(
    entrants.map(one => one.returnPercent),
    boundsIn(entrants),
  )
  const against = (reference, title) => ({
    key: reference,
    title,
    isOptional: true,
    by: one => of(one, reference)?.differencePercent,
    csv: one => ({
      [`${title}, %`]: of(one, reference)?.differencePercent,
      [`${title}, 95 % low, %`]: of(one, reference)?.interval?.low,
      [`${title}, 95 % high, %`]: of(one, reference)?.interval?.high,
      [`${title}, verdict`]: of(one, reference)?.verdict,
    }),
    cell: one => html`<${Against} found=${of(one, reference)} market=${answer.marketReturn} />`,
  })
  const isSplit = new Set(entrants.map(one => one.amongBest)).size > 1
  const columns = [
    {
      key: 'model',
      title: 'Entrant',
      isText: true,
      isHead: true,
      by: one => one.modelName,
      csv: one => ({ Entrant: one.modelName, 'Model id': one.modelId, Number: one.entrant }),
      cell: one => html`<${EntrantName} one=${one} color=${known.colorOf(one.modelIds[0], one.variant)} isLinked=${isLinked} /><${Declared}
        by=${one.declared} />${
          one.endedAt &&
          html` <span class="badge"
          title=${`ended at ${one.endedAt}`}>earlier, ${one.entrant}</span>`
        }`,
    },
    {
      key: 'rank',
      title: 'Rank',
      isOptional: true,
      by: one => one.rank?.first,
      csv: one => ({ 'Rank, best': one.rank?.first, 'Rank, worst': one.rank?.last }),
      cell: one =>
        html`<span title=${rankOf(one)}>${one.rank ? (one.rank.first === one.rank.last ? one.rank.first : `${one.rank.first}–${one.rank.last}`) : '–'}${
          one.rankBefore ? ` (before: ${one.rankBefore.first}–${one.rankBefore.last})` : ''
        }</span>`,
    },
    {
      key: 'account',
      title: 'Account',
      className: 'wide',
      isOptional: true,
      by: pastOf,
      csv: one => ({ 'Account, %': pastOf(one) }),
      cell: one =>
        html`<span class=${tone(pastOf(one))} title=${accountOf(one)}>${signedPercent(pastOf(one), 1)}</span>`,
    },
    {
      key: 'best',
      title: 'Best?',
      isText: true,
      isOptional: true,
      by: one => (isSplit ? Number(one.amongBest) : null),
      cell: one => html`<span class=${one.amongBest ? '' : 'soft'}>${one.amongBest ? 'possible' : 'no'}</span>`,
    },
    {
      key: 'return',
      title: 'Return',
      isMain: true,
      isOptional: true,
      by: one => one.returnPercent,
      csv: one => ({ 'Return, %': one.returnPercent }),
      cell: one => html`<span class=${tone(one.returnPercent)}>${signedPercent(one.returnPercent)}</span>`,
    },
    {
      key: 'interval',
      title: '95 % interval, one look',
      isText: true,
      by: one => one.interval?.low,
      csv: one => ({ '95 % low, %': one.interval?.low, '95 % high, %': one.interval?.high }),
      cell: one => html`<${Interval} low=${one.interval?.low} high=${one.interval?.high}
      value=${one.returnPercent} least=${least} most=${most} reason=${one.reason} color=${known.colorOf(one.modelIds[0], one.variant)} />`,
    },
    against('ruleAgent', 'Rule agent'),
    against('holdNothing', 'Nothing held'),
    against('buyAndHold', 'Buy and hold'),
    against('bestOther', 'Best other'),
    {
      key: 'smallest',
      title: 'Detectable from',
      isOptional: true,
      by: one => of(one, 'holdNothing')?.smallestDifference,
      csv: one => ({ 'Detectable from, %': of(one, 'holdNothing')?.smallestDifference }),
      cell: one =>
        html`<span title=${visibleOf(of(one, 'holdNothing'))}>${capped(of(one, 'holdNothing')?.smallestDifference)}</span>`,
    },
    {
      key: 'coverage',
      title: 'Coverage',
      className: 'wide',
      by: one => one.coverage,
      csv: one => ({ 'Coverage, %': one.coverage }),
      cell: one => html`<span class=${one.ranked ? '' : 'warn'}>${percent(one.coverage, 0)}</span>`,
    },
    entrants.some(one => one.replicates) && {
      key: 'spread',
      title: 'Spread',
      by: one => one.replicates?.spreadPercent,
      cell: one =>
        html`<span title="standard deviation of the returns of the replicates">${percent(one.replicates?.spreadPercent, 1)}</span>`,
    },
    {
      key: 'period',
      title: 'Trained on?',
      isText: true,
      isOptional: true,
      className: 'wide',
      by: one => (one.contamination === 'unknown' ? null : one.contamination),
      csv: one => one.contamination,
      cell: one =>
        html`<span class=${`badge ${CONTAMINATION[one.contamination][0]}`}
          title=${CONTAMINATION[one.contamination][2]}>${CONTAMINATION[one.contamination][1]}</span>`,
    },
  ].filter(column => column && !(column.isOptional && entrants.every(one => column.by(one) == null)))
  return html`<${SeasonLine} season=${answer.season} /><p class="body lede">${
    answer.primary && `Primary comparison: ${sentenceOf(answer.primary, false)} `
  }${summaryOf(answer, known)}</p>
    <${Table} label="Evidence of all" narrow=${['model', 'rank', 'return']} columns=${columns} rows=${entrants} first=${20} empty="No entrant has traded yet." />`
}

const CAP_PERCENT = 100
const CAP_SHARPE = 10

/** A difference that must be seen to be detected; beyond a doubling, it is told as just that. */
const capped = value => (value > CAP_PERCENT ? `over ${CAP_PERCENT}\u00a0%` : percent(value, 1))

/** The places that an entrant may have, in words. */
const rankOf = ({ rank, offBoard }) =>
  rank
    ? `of ${whole(rank.among)} ranked, ${whole(rank.first - 1)} are better and ${whole(rank.among - rank.last)} worse; ` +
      'the others are indistinguishable from it'
    : `not ranked: ${offBoard}`

/** What an account returned over all its runs: it is no mean, and says no more than the return of a first run. */
const pastOf = one => (one.modelIds.length > 1 || !(one.account?.runs > 1) ? null : one.account.returnPercent)

/** The history of an account over all its runs, in words. */
const accountOf = one =>
  one.modelIds.length > 1
    ? 'a mean of several accounts'
    : `the account since ${one.account.startedAt.slice(0, 10)}: ` +
      `${whole(one.account.runs)} ${one.account.runs === 1 ? 'run' : 'runs'}, configuration ${whole(one.entrant)}, ` +
      `${whole(one.ageHours)} hours old${one.owner ? `, owner ${one.owner}` : ''}`

/** The smallest detectable difference from a reference, and when the observed one would be detectable, in words. */
const visibleOf = found =>
  found?.smallestDifference == null
    ? 'no difference can be seen yet'
    : `four of five seasons with a true difference of ${capped(found.smallestDifference)} over these ` +
      `${whole(found.hours)} hours are detected; a difference as large as the observed one ` +
      (found.daysNeeded == null ? 'cannot be seen in time' : `needs about ${whole(found.daysNeeded)} days`)

function Against({ found, market }) {
  if (found?.differencePercent == null) return html`<span class="soft" title=${found?.reason ?? ''}>–</span>`
  return html`<span class=${kindOf(found.verdict)}
    title=${sentenceOf(found)}>${signedPercent(found.differencePercent, 1)}</span>
    ${
      (found.verdict !== UNDECIDED || found.verdictBefore) &&
      html`<span class="sub">${found.verdict}${pathOf(found, market)}${
        found.verdictBefore ? `; before the amendment: ${found.verdictBefore}` : ''
      }</span>`
    }`
}

/** Which entrants a board cannot separate, in words. */
const resolutionOf = ({ now, atEnd }, season, entrants) => {
  const text = value =>
    value == null || value > CAP_SHARPE
      ? 'any two entrants'
      : `entrants whose Sharpe ratios differ by less than ${number(value, 1)}`
  return `This board cannot separate ${text(now)} now${season ? `, and ${text(atEnd)} at the season's end` : ''}. ${decidedOf(entrants)}`
}

/** How many of the differences are more than noise, once and in words instead of in each row. */
function decidedOf(entrants) {
  const all = entrants.flatMap(one => one.differences).filter(each => each.differencePercent != null)
  const decided = all.filter(each => each.verdict !== UNDECIDED).length
  if (!all.length) return 'There is nothing to compare yet.'
  return decided
    ? `${whole(decided)} of the ${whole(all.length)} differences below ${decided === 1 ? 'is' : 'are'} more than noise so far.`
    : 'None of the differences below can be told from noise yet.'
}

export function summaryOf({ best, entrants, season, resolution }, known) {
  const first = entrants.find(one => one.modelId === best && one.endedAt === null)
  const share = `${number(100 * (season?.rules.alpha ?? 0.05), 0)} %`
  const errors = season?.rules.primary
    ? `At most ${share} of the exploratory verdicts should be false`
    : `All verdicts together are wrong in at most ${share} of cases, however often you look`
  const bounds = season
    ? `Positions close before an hour loses ${season.rules.hourLossMaxPercent} % or gains ${season.rules.hourGainMaxPercent} %`
    : 'They hold up to a price move of 20 % in an hour'
  const caution =
    `${errors}. ${bounds}; a larger move withdraws a verdict. ` +
    'They are of the past: a drift that turned every 30 days was called in 11 % of simulated years.'
  const separable = resolutionOf(resolution, season, entrants)
  if (!first) return `${separable} No entrant can be called the best. ${caution}`
  const name = isolated(entrantName(first))
  if (first.rank?.among === 1)
    return `${separable} Only ${name} has a rank, so it has no other to be compared with. ${caution}`
  const others = entrants.filter(one => one.amongBest && one !== first).length
  const seen = first.differences.find(one => one.reference === 'bestOther')?.smallestDifference
  const told =
    others === 0
      ? 'It is distinguishable from every other.'
      : `${others} of the other ${entrants.length - 1} ${others === 1 ? 'is' : 'are'} not distinguishable from it yet` +
        (seen == null ? '.' : `: four of five such seasons would show a difference of ${capped(seen)}.`)
  return `${separable} ${name} is the best. ${told} ${caution}`
}
