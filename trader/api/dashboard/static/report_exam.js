// @ts-check
// The report of an exam: profiles of skills, verdicts on pairs, and examples of single states.
import { scaleOf } from './components.js'
import { isolated, number, percent, signed } from './format.js'
import { html } from './lib.js'
import { Section, Sheet, figure, interval, text } from './report.js'

const WORDS = `A share is the expected value of an entrant's decisions over that of a decision maker who knows the law of each
  state, costs included: 1 is all of it, 0 is what holding nothing earns, as the entrant "nothing" does. The exam measures whether a model finds structure
  that is there and pays nothing where there is none. It does not promise profit: no exam's scores have been shown to go
  with results in money, and these cover the laws of its worlds only. Intervals are at 95 % and hold at every look; where there
  are fewer than 20 states there is none, and a single edge then says little.`
const RECORDED = `Every entrant decided in the same moments of a recording, with the same account, which every second time held
  a position. The noise of the market is in these outcomes. They do not promise profit.`
const CHECK = `Whoever has the exam's folder can check it: trader lab exam check draws the states again from the secret, and executes
  every decision again.`
const SIZES = `A size of 1 is the whole risk budget: a deviation of 1 % of equity over four hours. Gains at more than that count
  as at 1, losses in full; "oversized" is the part of positions above 1.25. More than 2 is refused, and counts as the
  largest loss.`
const EDGES = {
  breakout: 'calm, then a move',
  overshoot: 'a run that accelerates',
  squeeze: 'long calm, then a push',
  news: 'a jump',
  lead_lag: 'a move of another market',
  carry: 'a high funding rate',
  drain: 'a move against what the account holds',
  all: 'everything, with the states where nothing pays',
}
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
    <p>${result.states} of ${result.planned} states. ${isRecorded ? RECORDED : WORDS} ${CHECK}</p>
    ${
      isRecorded
        ? html`<${Figures} title="Outcomes" words=${`${unit} and drift.`} entrants=${entrants} of="outcome" places=${3} />`
        : html`<p>${SIZES}</p>${entrants.map(one => html`<${Profile} key=${one.entrant} one=${one} bounds=${bounds} />`)}
          <${Figures} title="Burned where nothing pays" words="What decisions cost where no trade could earn: basis
            points of equity per state." entrants=${entrants}
            of="burntBp" places=${1} />`
    }
    <${Section} title="Pairs" words=${`A pair without a verdict may differ in either direction. Differences are those of
      the scores in a state, in units ${
        isRecorded
          ? 'of the volatility'
          : `of what the oracle usually earns, 1.05 % of equity, states where nothing pays
      included`
      }. The verdicts hold at every look: that of a registered pair by itself, all others as one family. The
      level is one over the largest wealth of a bet on the difference.`}><${Sheet} label="Pairs" rows=${pairs} columns=${[
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
      html`<${Section} title="Examples" words="Each entrant's best and worst decision. The line at
        the right shows what followed, as expected by the law or, in the second part, as it was drawn."><div class="cards">
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
  interval(`95 % (on ${bounds.map(bound => signed(bound, places)).join(' to ')})`, bounds, ({ value, interval }) => {
    const [low, high] = interval ?? []
    const told = interval && `${signed(low, places)} to ${signed(high, places)}`
    return { value, low, high, unit: '', places, told }
  })

/** One entrant: its share of the oracle in each edge, with intervals and sizes. */
function Profile({ one, bounds }) {
  const notes = Object.entries(one.refusals).map(
    ([rule, count]) => `refused ${count} times by the rule “${rule}”, such as: ${one.reasons[rule] ?? rule}`,
  )
  if (one.costUsdPerState != null)
    notes.push(`${number(one.costUsdPerState, 4)} USD and ${number(one.tokensPerState ?? 0, 0)} tokens per state`)
  if (one.agreement != null)
    notes.push(`passed all of ${one.samples} samples in ${number(100 * one.agreement, 0)} % of states`)
  return html`<${Section} title=${one.entrant} words=${notes.join('; ')}>
    <${Sheet} label=${one.entrant} rows=${sharesOf(one)} columns=${[
      text('edge', 'edge'),
      text('edge', 'what precedes it', row => EDGES[row.edge]),
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
function Example({ entrant, state, edge, symbol, until, closes, followed, decided, scoreBp, oracleBp, best, said }) {
  const [low, high] = [Math.min(...closes), Math.max(...closes)]
  const points = closes.map(
    (close, place) => `${(place / (closes.length - 1)) * WIDTH},${((high - close) / (high - low || 1)) * HEIGHT}`,
  )
  return html`<div class="card panel"><h3>${isolated(entrant)}, state ${state}: ${edge}</h3>
    <p>${symbol} from ${number(low)} to ${number(high)}: the twelve hours until ${until}, and ${followed / 60} hours after it</p>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} width="100%" height=${HEIGHT} preserveAspectRatio="none" role="img">
      <title>${low} to ${high}</title>${[points.slice(0, -followed), points.slice(-followed - 1)].map(
        (
          part,
          place,
        ) => html`<polyline key=${place} points=${part.join(' ')} fill="none" vector-effect="non-scaling-stroke"
        stroke=${place ? 'var(--gain)' : 'currentColor'} />`,
      )}</svg>
    <p>Decided: ${decided || 'nothing'}; scores ${signed(scoreBp, 1)} bp of equity; the oracle ${signed(oracleBp, 1)} bp.
      Oracle: ${best}.</p>
    ${said && html`<blockquote>${said}</blockquote>`}</div>`
}
