// @ts-check
// Parts that several pages use: names, figures, tables, choices, intervals.
import { useChosen } from './address.js'
import { csvOf, save } from './csv.js'
import { html, useEffect, useRef, useState } from './lib.js'
import { onGround } from './colors.js'
import { ZONE, minuteOf, moment, number, signed, timeOf, times, tone } from './format.js'
import { distinctName, entrantName } from './models.js'
import { compare } from './order.js'
import { useLive } from './store.js'
import { inTurn } from './turns.js'

export const Panel = ({ title, tools, children, className = '' }) => html`
  <section class="panel ${className}" aria-label=${title}>
    <header><h2>${title}</h2>${tools}</header>
    ${children}
  </section>`

export const Tile = ({ label, value, note, kind = '' }) => html`
  <div class="tile"><span>${label}</span><b class=${kind}>${value}</b>${note && html`<small>${note}</small>`}</div>`

/** Names with their values: rows of [name, value, title]. */
export const Facts = ({ rows }) =>
  html`<dl class="facts body">${rows.map(
    ([name, value, title]) => html`<div key=${name}><dt title=${title}>${name}</dt><dd>${value}</dd></div>`,
  )}</dl>`

/** A dot in the color of a model or a variant. Scripts set colors, since the page's policy allows no inline styles. */
export const Key = ({ color }) => html`<i class="key" aria-hidden="true" style=${{ '--key': onGround(color) }}></i>`

/** @param {any} props `isPlain`: without the dot in the model's color. */
export function ModelName({ id, name, color, isLinked = true, isPlain = false }) {
  const whole = distinctName(id, name)
  const content = html`${!isPlain && html`<${Key} color=${color} />`}<span><bdi>${whole}</bdi></span>`
  return isLinked
    ? html`<a class="name" href=${`#/models/${encodeURIComponent(id)}`} title=${whole}>${content}</a>`
    : html`<span class="name" title=${whole}>${content}</span>`
}

/** The name of a row of a board; a mean has no page. */
export const EntrantName = ({ one, name = entrantName(one), color, isLinked = true }) =>
  html`<${ModelName} id=${one.modelId} name=${name} color=${color} isLinked=${isLinked && one.modelIds.length === 1} />`

/** A column of a table that shows and sorts by a figure of its rows; `more` is what else it has. */
export const figureColumn = (key, title, of, write = number, more = {}) => ({
  key,
  title,
  by: of,
  cell: row => write(of(row)),
  ...more,
})

export const moneyColumn = (key, title, of, more = {}) =>
  figureColumn(key, title, of, value => html`<${Money} value=${value} />`, more)

/** The column of a table whose rows belong to models. */
export const modelColumn = known => ({
  key: 'model',
  title: 'Model',
  isText: true,
  isHead: true,
  by: row => row.modelName,
  csv: row => ({ Model: row.modelName, 'Model id': row.modelId }),
  cell: row => html`<${ModelName} id=${row.modelId}
  name=${row.modelName} color=${known.colorOf(row.modelId, row.modelVariant)} isLinked=${known.byId.has(row.modelId)} />`,
})

export const VariantName = ({ variant }) =>
  variant
    ? html`<a class="soft" href=${`#/variants/${variant}`}>${variant}</a>`
    : html`<span class="soft">manual</span>`

export const Money = ({ value, places = 2, unit = '' }) =>
  html`<span class=${tone(value, places)} title=${value}>${signed(value, places, unit)}</span>`

export const Time = ({ at }) => html`<time datetime=${at} title=${at}>${moment(at)}</time>`

export const Side = ({ side }) =>
  html`<span class=${`badge ${side === 'LONG' || side === 'buy' ? 'gain' : 'loss'}`}>${side}</span>`

/** An external agent's declaration about itself. */
export const Declared = ({ by }) =>
  by && html` <span class="soft">${by.model} ${by.version}</span><${DeclaredBadge} promptDigest=${by.promptDigest} />`

export const DeclaredBadge = ({ promptDigest }) => html` <span class="badge"
    title=${`declared by the agent itself, not verified${promptDigest ? `; its prompt has the digest ${promptDigest}` : ''}`}>declared</span>`

/** The badge of manual trades on a model's account. */
export const Manual = () => html`<span class="badge warn" title="traded manually, not by the model">manual</span>`

/** The market of a position or a trade, with its side, its leverage, and a badge if it was opened manually. */
export const Market = ({ trade }) =>
  html`<a class="inline" href=${`#/markets/${trade.symbol}`}>${trade.symbol}</a> <${Side} side=${trade.side} /> ${
    trade.leverage && html`<span class="soft">${times(trade.leverage)}</span>`
  } ${trade.manual && html`<${Manual} />`}`

/** A time that links to the page of its trade. */
export const TradeTime = ({ at, id }) => html`<a href=${`#/trades/${id}`}><${Time} at=${at} /></a>`

/** Buttons of which one is pressed: a single stop of the Tab key, within which the arrow keys move. */
export function Choice({ label, options, value, onChange }) {
  const stop = options.some(([key]) => key === value) ? value : options[0][0]
  const move = event => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key]
    if (!step) return
    event.preventDefault()
    const buttons = [...event.currentTarget.children]
    buttons.at((buttons.indexOf(document.activeElement) + step) % buttons.length).focus()
  }
  return html`<div class="choice" role="toolbar" aria-label=${label} onKeyDown=${move}>
    ${options.map(
      ([key, text]) => html`<button type="button" key=${key} aria-pressed=${key === value ? 'true' : 'false'}
      tabindex=${key === stop ? 0 : -1} onClick=${() => onChange(key)}>${text}</button>`,
    )}
  </div>`
}

/** A field of a moment, to the minute. */
export const Moment = ({ label, value, onChange }) => html`<label class="moment">${label}
  <input type="datetime-local" value=${minuteOf(value)} title=${ZONE}
    onChange=${event => onChange(timeOf(event.target.value))} /></label>`

export function Select({ label, options, value, onChange }) {
  return html`<select aria-label=${label} value=${value} onChange=${event => onChange(event.target.value)}>
    ${options.map(([key, text]) => html`<option key=${key} value=${key} selected=${key === value}>${text}</option>`)}
  </select>`
}

/**
 * A value and its interval on the scale [least, most].
 * @param {any} props
 */
export function Interval({ low, high, value, least, most, color, reason, unit = ' %', places = 0 }) {
  const at = figure => Math.min(1, Math.max(0, (figure - least) / (most - least || 1)))
  const style = {
    '--zero': at(0),
    '--at': at(value),
    '--low': at(low ?? value),
    '--high': at(high ?? value),
    '--key': onGround(color),
  }
  const words =
    low == null
      ? `no interval${reason ? `: ${reason}` : ' yet'}`
      : `95 % interval from ${number(low)} to ${number(high)}${unit}`
  const isCut = low != null && (low < least || high > most)
  return html`<span class="interval" role="img" aria-label=${words} title=${words} style=${style}>
    <i class="zero"></i>${low != null && html`<i class="range"></i>`}<i class="value"></i></span>${
      low == null && reason
        ? html`<span class="sub">${reason}</span>`
        : isCut
          ? html`<span class="sub">${signed(low, places)} to ${signed(high, places)}${unit}, cut</span>`
          : ''
    }`
}

const WIDE = 3

/**
 * The scale on which values and intervals of several rows can be compared, with 0. It holds all values, but no bound that
 * is much wider than the usual one: such an interval would leave nothing of the others, and is cut.
 */
export function scaleOf(values, bounds = []) {
  const [shown, ends] = [values, bounds].map(some => some.filter(figure => figure != null))
  const sizes = ends.map(Math.abs).sort((one, other) => one - other)
  const most = Math.max(WIDE * (sizes[Math.floor(sizes.length / 2)] ?? 0), ...shown.map(Math.abs))
  return [Math.max(-most, Math.min(0, ...shown, ...ends)), Math.min(most, Math.max(0, ...shown, ...ends))]
}

const STEP = 100
const STAGE_MS = 400
const ROWS = 10
const ROW_PX = 34.5
const NARROW_ROW_PX = 44
const isNarrow = matchMedia('(max-width: 760px)')

/**
 * Return how many of the rows of a table are there, more with each turn, and the height to reserve for the others. The
 * box that has it stays when it is empty, since without it the browser would lay out the whole table again.
 */
function useRows(count) {
  const shown = ROWS * (1 + useStages(true, Math.ceil(count / ROWS) - 1))
  return [shown, Math.max(0, count - shown) * (isNarrow.matches ? NARROW_ROW_PX : ROW_PX)]
}

/** The order of a table, kept in the address: what sorts its rows, and its heads, which change it. */
function useOrder(label, columns, kindOf) {
  const [order, setOrder] = useChosen(`sort-${slugOf(label)}`, '') // the key of a column, after a minus when descending
  const column = columns.find(one => one.by && (order === one.key || order === `-${one.key}`))
  const sign = order.startsWith('-') ? -1 : 1
  const sort = rows =>
    column ? [...rows].sort((one, other) => sign * compare(column.by(one), column.by(other))) : rows
  const press = key => setOrder(order === `-${key}` ? key : order === key ? '' : `-${key}`)
  const sortOf = key => ({ [key]: 'ascending', [`-${key}`]: 'descending' })[order]
  const head = one => html`<th key=${one.key} scope="col" class=${kindOf(one)} aria-sort=${sortOf(one.key)}>
    ${one.by ? html`<button type="button" onClick=${() => press(one.key)}>${one.title}</button>` : one.title}</th>`
  return [sort, head]
}

/**
 * A table that sorts by its heads. `columns` are {key, title, cell(row), by(row) to sort by, csv(row), isText,
 * className}; a narrow table has only those with a key of `narrow`, a less wide one none of the class `wide`, and none has
 * those with `isSaved`, which only its file has. `readAll` reads the rows that a saved file has beyond these, `isEven`
 * gives all columns the same width. A row of the page shows whatever comes to its place: none is moved, so that the page
 * does not jump under a reader.
 */
export function Table({ label, columns, rows, empty, first = STEP, isEven = false, readAll, narrow }) {
  const [limit, setLimit] = useState(first)
  const kindOf = one =>
    `${one.isText ? 'text ' : ''}${one.isMain ? 'main ' : ''}${one.isHead ? 'head ' : ''}${one.className ?? ''}${
      narrow && !narrow.includes(one.key) ? ' mid' : ''
    }`
  const [sort, head] = useOrder(label, columns, kindOf)
  const [shown, later] = useRows(Math.min(limit, rows.length))
  if (!rows.length) return html`<p class="empty">${empty}</p>`
  const seen = columns.filter(one => !one.isSaved)
  const file = async () =>
    save(
      `${slugOf(label)}.csv`,
      new Blob([csvOf(columns, sort(readAll ? await readAll() : rows))], { type: 'text/csv' }),
    )
  return html`<div class="scroll" role="group" tabindex="0" aria-label=${`${label}, table`}><table
    class=${isEven ? 'even' : ''}>
    <thead><tr>${seen.map(head)}</tr></thead>
    <tbody>${sort(rows)
      .slice(0, Math.min(limit, shown))
      .map(
        (row, place) => html`<tr key=${place}>
      ${seen.map(one => html`<td key=${one.key} class=${kindOf(one)} data-label=${one.title}>${one.cell(row)}</td>`)}</tr>`,
      )}</tbody>
  </table><div style=${{ height: `${later}px` }}></div></div>
  <p class="more">${
    rows.length > limit &&
    html`<button class="button" type="button" onClick=${() => setLimit(limit + STEP)}>
    Show ${Math.min(STEP, rows.length - limit)} more of ${rows.length}</button> `
  }<button class="quiet csv" type="button" aria-label=${`Save ${label} as CSV`} title="Save as CSV, with every column" onClick=${file}>
      <svg viewBox="0 0 16 16" aria-hidden="true"><path d="M8 2v8m-3-3 3 3 3-3M3 13h10" /></svg></button></p>`
}

const loaded = new Map()

/** A component by its name, whose module is read when it is first shown. */
export function Later({ load, name, ...props }) {
  const [, setRead] = useState(null)
  useEffect(() => {
    if (!loaded.has(load))
      load().then(
        module => setRead(loaded.set(load, module)),
        error => setRead(loaded.set(load, { error })),
      )
  }, [load])
  const module = loaded.get(load)
  if (!module) return html`<p class="empty">Reading …</p>`
  return module.error
    ? html`<p class="notice bad">This part cannot be read: ${module.error.message}</p>`
    : html`<${module[name]} ...${props} />`
}

const slugOf = label => label.toLowerCase().replaceAll(/[^a-z0-9]+/g, '-')

/**
 * Return how many parts of a page may be there: the first, then one more in each turn, once the page is ready, so that
 * what is seen first is not held up by what is further down.
 */
export function useStages(isReady, count) {
  const [stage, setStage] = useState(0)
  useEffect(() => {
    if (stage >= count) return undefined
    const step = () => setStage(stage + 1)
    if (isReady) return inTurn(step)
    const timer = setTimeout(step, STAGE_MS)
    return () => clearTimeout(timer)
  }, [isReady, stage, count])
  return stage
}

/**
 * Make a chart in the element of the returned reference, and update it when `inputs` is another list; in turn, since
 * drawing a hundred lines takes a while.
 */
export function useChart(make, inputs) {
  const host = useRef(null)
  const chart = useRef(null)
  const latest = useRef(null)
  if (inputs) latest.current = { make, inputs }
  const [draw] = useState(() => () => {
    const now = latest.current
    if (!host.current) return // it is gone
    if (chart.current) chart.current.update(...now.inputs)
    else chart.current = now.make(host.current, ...now.inputs)
  })
  useEffect(() => {
    if (inputs) inTurn(draw)
  }, [inputs])
  useEffect(() => () => chart.current?.destroy(), [])
  return [host, chart]
}

/** The season of a board, with its amendments. */
export const SeasonLine = ({ season: one }) =>
  one &&
  html`<p class="body lede"><b
    title=${`SHA-256 ${one.digest}`}>${one.rules.name}</b>, ${one.digest.slice(0, 12)}: ${one.rules.start} to ${one.rules.end}. ${one.amendments.map(
      each => `Amended ${each.at}: ${each.reason}. `,
    )}${one.rules.primary && primaryOf(one.rules.primary)}</p>`

const primaryOf = ({ entrant, against, alpha }) =>
  `Primary comparison: ${entrant} against ${against}, α ${alpha}; all else is exploratory.`

/** What stands in place of an answer: that it is being read, unless `isQuiet`, or why it cannot be. */
export const Pending = ({ entry, what, isQuiet = false }) =>
  entry.error
    ? html`<${Unread} entry=${entry} what=${what} />`
    : !entry.data && !isQuiet && html`<p class="empty">Reading …</p>`

/** Why an answer cannot be read; while the service is away, its banner says it once for the whole page. */
function Unread({ entry, what }) {
  if (useLive().connection === 'lost') return !entry.data && html`<p class="empty">Waiting for the service …</p>`
  return html`<p class="notice bad">${what} cannot be read: ${entry.error}.${
    entry.data ? ' What is shown is from before.' : ''
  }</p>`
}
