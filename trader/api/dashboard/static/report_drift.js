// @ts-check
// The drift between paper and venue: a row for each market, side and size, with the middle 90 % and the median.
import { number, signed } from './format.js'
import { html } from './lib.js'
import { Section, Sheet, figure, interval, text } from './report.js'

const errors = key => figure(key, key, value => signed(value))

export const Report = ({ data }) => html`<h1>Paper versus venue</h1>
  <p><bdi>${data.name}</bdi>. Errors are in basis points of the paper price; right of zero the venue is more expensive. The line
    spans the middle 90 % of the errors, the dot is their median; p95 refers to absolute errors.</p>
  ${data.sections.map(one => html`<${Comparison} key=${one.title} ...${one} sizes=${data.sizes} latencies=${data.latencies} />`)}`

function Comparison({ title, compared, unit, figures, notes, sizes, latencies }) {
  const least = Math.min(...figures.map(one => one.low))
  const most = Math.max(...figures.map(one => one.high))
  return html`<${Section} title=${title} words=${compared}><${Sheet} label=${title} rows=${figures} columns=${[
    text('symbol', 'market', one => one.symbol ?? 'all'),
    text('side', 'side'),
    text('size', 'size', one => sizes[one.size]),
    text('latency', 'latency', one => latencies[one.latency]),
    figure('fills', unit),
    errors('mean'),
    errors('median'),
    figure('p95', 'p95', value => number(value)),
    errors('worst'),
    interval(`${signed(least, 1)} to ${signed(most, 1)}`, [least, most], one => ({
      ...one,
      value: one.median,
      unit: ' bp',
    })),
  ]} /><p>${notes.join('. ')}</p></${Section}>`
}
