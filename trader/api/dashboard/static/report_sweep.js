// @ts-check
// The page of a sweep: its parameters, a heat map of each pair of them, and the probability of overfitting.
import { number, signedPercent } from './format.js'
import { html } from './lib.js'
import { compare } from './order.js'
import { Section, Sheet, figure, numberOf, text } from './report.js'

const MAPS_MAX = 6
const SHADE_MAX = 45 // the accent's share of the best cell's color, in percent; text stays readable on it

export function Report({ data }) {
  const { name, best, by, lines, parameters, runs } = data
  const names = Object.keys(parameters[0]?.params ?? {})
  const varied = names.filter(each => new Set(parameters.map(row => row.params[each])).size > 1)
  const pairs = varied.flatMap((down, place) => varied.slice(place + 1).map(across => [down, across]))
  const paramOf = each => ({ ...text(each, each, row => row.params[each]), by: row => row.params[each] })
  return html`<h1>Sweep</h1><p><bdi>${name}</bdi>: ${runs} runs, parameters by ${by}.</p>
    ${
      best &&
      html`<p>Best run: <a href=${`runs/${encodeURIComponent(best.name)}/report.html`}>${best.name}</a>,
      with ${Object.entries(best.params)
        .map(([key, value]) => `${key} ${value}`)
        .join(', ')}, seed ${best.seed}, returned ${signedPercent(best.returnPercent)}.</p>`
    }
    ${lines.map(line => html`<p key=${line}>${line}</p>`)}
    ${pairs.slice(0, MAPS_MAX).map(
      ([down, across]) => html`<${Section} key=${`${down} ${across}`} title=${`${down} and ${across}`}
      words=${`The mean ${by}: the stronger the color, the higher.${varied.length > 2 ? ' Each cell is the mean over the other parameters.' : ''}`}>
      <${HeatMap} down=${down} across=${across} rows=${parameters} /></${Section}>`,
    )}
    <${Section} title="Parameters"><${Sheet} label="Parameters" rows=${parameters} columns=${[
      ...names.map(paramOf),
      figure('runs', 'runs'),
      by !== 'return' && figure('metric', by, shown),
      figure('meanReturnPercent', 'mean return, %', shown),
      figure('deviation', 'deviation', shown),
      figure('worst', 'worst, %', shown),
      figure('best', 'best, %', shown),
    ]} /></${Section}>`
}

/** With four digits at most. */
function shown(value) {
  const places = String(Number(Number(value).toPrecision(4))).split('.')[1]?.length ?? 0
  return value == null ? '' : number(value, places, 'exceptZero')
}

const inOrder = values => [...new Set(values)].sort((one, other) => Number(one) - Number(other) || compare(one, other))

function HeatMap({ down, across, rows }) {
  const found = rows.filter(row => row.metric != null)
  const meanOf = (line, column) => {
    const own = found.filter(row => row.params[down] === line && row.params[across] === column)
    return own.length ? own.reduce((sum, row) => sum + numberOf(row.metric), 0) / own.length : null
  }
  const [lines, columns] = [down, across].map(each => inOrder(found.map(row => row.params[each])))
  const cells = lines.map(line => columns.map(column => meanOf(line, column)))
  const finite = cells.flat().filter(value => value !== null && Number.isFinite(value))
  const least = Math.min(...finite)
  const span = Math.max(...finite) - least || 1
  const cell = value => {
    if (value === null) return html`<td></td>`
    const share = SHADE_MAX * Math.min(1, (value - least) / span)
    const background = `color-mix(in srgb, var(--accent) ${Math.round(share)}%, var(--panel))`
    return html`<td style=${{ background }} title=${value}>${shown(value)}</td>`
  }
  return html`<div class="panel"><div class="scroll"><table>
    <thead><tr><th class="text">${down} ↓ ${across} →</th>${columns.map(
      column => html`<th key=${column} scope="col">${column}</th>`,
    )}</tr></thead>
    <tbody>${lines.map(
      (line, place) => html`<tr key=${line}><th scope="row" class="text">${line}</th>${cells[place].map(cell)}</tr>`,
    )}</tbody></table></div></div>`
}
