// @ts-check
// What all reports share: the page of a file's data, its sections, and the columns of its tables.
import { Interval, Money, Table } from './components.js'
import { number } from './format.js'
import { html, render } from './lib.js'

/** Show a file's data by a component. */
export const show = Report =>
  render(
    html`<${Report} data=${JSON.parse(document.getElementById('data').textContent)} />`,
    document.querySelector('main'),
  )

export const Section = ({ title, words, children }) =>
  html`<section aria-label=${title}><h2>${title}</h2>${words && html`<p>${words}</p>`}${children}</section>`

/** A table of a report, whose rows are all there. */
export const Sheet = ({ label, columns, rows }) => html`<div class="panel">
  <${Table} label=${label} columns=${columns.filter(Boolean)} rows=${rows} first=${rows.length} empty="None." /></div>`

export const numberOf = value => (value == null ? null : Number(value))

/** A column of names. */
export const text = (key, title, cell = row => row[key]) => ({ key, title, isText: true, by: row => row[key], cell })

/**
 * A column of figures, written by `cell(value, row)`.
 * @param {(value: any, row?: any) => any} [cell]
 */
export const figure = (key, title, cell = value => number(value, 0)) => ({
  key,
  title,
  by: row => numberOf(row[key]),
  cell: row => cell(row[key], row),
})

/** A column of gains and losses, with all their digits as a title. */
export const gain = (key, title, unit = '', places = 2) =>
  figure(key, title, value => html`<${Money} value=${value} places=${places} unit=${unit} />`)

/** A column of values and their intervals on the scale `bounds`: `of(row)` is {value, low, high} and how to show it. */
export const interval = (title, bounds, of) => ({
  key: 'interval',
  title,
  csv: row => ({ [`${title}, low`]: of(row).low, [`${title}, high`]: of(row).high }),
  cell: row => {
    const { told, ...shown } = of(row)
    return shown.value == null
      ? '–'
      : html`<${Interval} ...${shown} least=${bounds[0]} most=${bounds[1]} />${told && html`<span class="sub">${told}</span>`}`
  },
})
