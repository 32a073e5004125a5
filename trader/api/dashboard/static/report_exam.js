// @ts-check
// The report of an exam: profiles of skills, verdicts on pairs, and examples of single states.
import { scaleOf } from './components.js'
import { isolated, number, percent, signed } from './format.js'
import { html } from './lib.js'
import { Section, Sheet, figure, interval, text } from './report.js'

const WORDS = `A share is the expected value of an entrant's decisions over that of a decision maker who knows the law of each
  state, costs included: 1 is all of it, 0 is what holding nothing earns. The exam measures whether a model finds structure
  that is there and pays nothing where there is none. It does not promise profit.`
const RECORDED = `Every entrant decided in the same moments of a recording, with the same account, which every second time held
  a position. The noise of the market is in these outcomes. They do not promise profit.`
const WIDTH = 640
const HEIGHT = 140

export function Report({ data }) {
  const { summary, result, examples, isRecorded } = data
  const { entrants, horizon } = result
  const unit = `In units of the volatility of ${horizon}, net of costs`
  const bounds = scaleOfRows(entrants.flatMap(sharesOf))
  const pairs = result.comparisons.map(one => ({ ...one, value: one.mean }))
  return html`<h1>Exam</h1>
    <p><strong>${summary}</strong></p>
    <p>${result.states} of ${result.planned} states. ${isRecorded ? RECORDED : WORDS}</p>
    ${
      isRecorded
        ? html`<${Figures} title="Outcomes" words=${`${unit} and drift.`} entrants=${entrants} of="outcome" places=${3} />
          <${Figures} title="Beyond the market" entrants=${entrants} of="selection" places=${3}
            words=${`${unit} and of beta times the move of BTC: what choosing markets earned.`} />`
        : html`${entrants.map(one => html`<${Profile} key=${one.entrant} one=${one} bounds=${bounds} />`)}
          <${Figures} title="Burned where nothing pays" words="Basis points of equity per state." entrants=${entrants}
            of="burntBp" places=${1} />`
    }
    <${Section} title="Pairs" words="The verdicts hold at every look: that of a registered pair by itself, all others as one
      family. The level is one over the largest wealth of a bet on the difference."><${Sheet} label="Pairs" rows=${pairs} columns=${[
        text('first', 'entrant'),
        text('second', 'other'),
        text('verdict', 'verdict'),
        figure('states', 'states'),
        figure('mean', 'mean difference', value => signed(value)),
        intervals(scaleOfRows(pairs), 2),
        {
          key: 'level',
          title: 'level',
          by: levelOf,
          cell: one => String(Number(levelOf(one).toPrecision(2))),
        },
      ]} /></${Section}>
    ${
      !isRecorded &&
      html`<${Section} title="Examples" words="Each entrant's best and worst decision."><div class="cards">
      ${examples.map((one, place) => html`<${Example} key=${place} ...${one} />`)}</div></${Section}>`
    }`
}

const levelOf = pair => Math.min(pair.betterLevel, pair.worseLevel)

/** The shares that an entrant has, by edge and in all, each with the sizes of its positions. */
const sharesOf = ({ shares, share, sizes }) =>
  Object.entries({ ...shares, ...(share && { all: share }) }).map(([edge, one]) => ({
    ...one,
    edge,
    value: one.share,
    size: sizes[edge]?.median,
    over: sizes[edge]?.median == null ? null : 100 * sizes[edge].over,
  }))

const scaleOfRows = rows =>
  scaleOf(
    rows.map(one => one.value),
    rows.flatMap(one => one.interval ?? []),
  )

/** The column of their intervals on a common scale, which its head tells. */
const intervals = (bounds, places) =>
  interval(bounds.map(bound => signed(bound, places)).join(' to '), bounds, ({ value, interval }) => {
    const [low, high] = interval ?? []
    return { value, low, high, unit: '', places }
  })

/** One entrant: its share of the oracle in each edge, with intervals and sizes. */
function Profile({ one, bounds }) {
  const notes = Object.entries(one.refusals).map(
    ([rule, count]) => `refused ${count} × ${rule} (${one.reasons[rule] ?? rule})`,
  )
  if (one.costUsdPerState != null)
    notes.push(`${number(one.costUsdPerState, 4)} USD and ${number(one.tokensPerState ?? 0, 0)} tokens per state`)
  if (one.agreement != null)
    notes.push(`passed all of ${one.samples} samples in ${number(100 * one.agreement, 0)} % of states`)
  return html`<${Section} title=${one.entrant} words=${notes.join('; ')}>
    <${Sheet} label=${one.entrant} rows=${sharesOf(one)} columns=${[
      text('edge', 'edge'),
      figure('share', 'share', value => signed(value)),
      intervals(bounds, 1),
      figure('states', 'states'),
      figure('size', 'size', value => number(value)),
      figure('over', 'oversized', value => percent(value, 0)),
    ]} /></${Section}>`
}

/** A figure of each entrant that has it. */
function Figures({ title, words, entrants, of, places }) {
  const rows = entrants.flatMap(one =>
    one[of] ? [{ entrant: one.entrant, value: one[of].mean, interval: one[of].interval }] : [],
  )
  return html`<${Section} title=${title} words=${words}><${Sheet} label=${title} rows=${rows} columns=${[
    text('entrant', 'entrant'),
    figure('value', 'mean', value => signed(value, places)),
    intervals(scaleOfRows(rows), places),
  ]} /></${Section}>`
}

/** What an entrant saw in a state, decided and said, and what the oracle would have decided. */
function Example({ entrant, state, edge, symbol, until, closes, decided, scoreBp, oracleBp, best, said }) {
  const [low, high] = [Math.min(...closes), Math.max(...closes)]
  const points = closes.map(
    (close, place) => `${(place / (closes.length - 1)) * WIDTH},${((high - close) / (high - low || 1)) * HEIGHT}`,
  )
  return html`<div class="card panel"><h3>${isolated(entrant)}, state ${state}: ${edge}</h3>
    <p>${symbol}, the twelve hours until ${until}</p>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} width="100%" height=${HEIGHT} preserveAspectRatio="none" role="img">
      <title>${low} to ${high}</title><polyline points=${points.join(' ')} fill="none" stroke="currentColor"
        vector-effect="non-scaling-stroke" /></svg>
    <p>Decided: ${decided || 'nothing'}; scores ${signed(scoreBp, 1)} bp of equity; the oracle ${signed(oracleBp, 1)} bp.
      Oracle: ${best}.</p>
    ${said && html`<blockquote>${said}</blockquote>`}</div>`
}
