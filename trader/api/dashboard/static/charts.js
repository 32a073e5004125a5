// @ts-check
// Charts of the dashboard and of the reports, drawn by uPlot: lines over time, their names at their ends, and a cursor.
import { inkOn, inks, onGround, onScheme } from './colors.js'
import { ZONE, clock, day } from './format.js'

const uPlot = globalThis.uPlot
const THIN = 1.25
export const THICK = 2
const DIMMED = '66'
const FAINT = '26'

const LIFT_PX = 24
export const ENDS_MAX = 14
export const BEST = 5
export const WORST = 3
const BADGE_PX = 16
const MARK_PX = 12
const NARROW_PX = 480
const CLUSTER_PX = 20
const ZOOM_PX = 6
const FIRST_LABEL_PX = 20 // half of a time below the left edge
const PADDING = 0.06

const axisRoom = width => (width < NARROW_PX ? 50 : 54)
const endsRoom = width => (width < NARROW_PX ? 116 : width < 560 ? 140 : 176)

export function axes(show, width, height) {
  const { grid, text } = inks()
  const font = '11px "Inter Variable", system-ui, sans-serif'
  const shared = { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } }
  return [
    { ...shared, space: 84, size: 28, values: (_, marks) => timeMarks(marks) },
    {
      ...shared,
      side: 1,
      size: axisRoom(width),
      space: Math.min(34, height / 5),
      gap: 6,
      values: (_, marks, axis, space, step) => marks.map(mark => show(mark, placesOf(step))),
    },
  ]
}

/** The decimal places that tell the marks of an axis apart. */
const placesOf = step => String(Number(step.toFixed(6))).split('.')[1]?.length ?? 0

/** The date at midnight, otherwise the time of day. */
function timeMarks(marks) {
  return marks.map(mark => (mark % 86400 === 0 ? day(mark * 1000) : clock(mark * 1000, false)))
}

/**
 * Draw lines over time in `host`. `series` are {name, color, isMain, isDimmed, isFaint, isUnnamed}, `values` one list for
 * each.
 *
 * `options`:
 * - `show(value, places)` writes a value on the axis, with the places that its marks need; `write(value)` in full
 * - `height`, by default that of the host; `span` is the minimum extent of the axis; `limits(low, high)` bound the axis so
 *   that it does not follow outliers; `top` is its end
 * - `ends` writes badge, name and value at the ends of lines; a series with `marks`, [{at, value, kind, href}], has them
 *   drawn as links; `notes()` are moments to mark for all; the first of two `isBand` series begins a band
 * - `onZoom(from, to, isLatest)` hears of a range that a drag or a cluster of marks chose, and without one of a double click
 *
 * Returns {update, move, destroy}.
 */
export function timeChart(host, times, series, values, options) {
  let data = [times, ...values]
  let shown = series
  let chart = null
  const write = options.write ?? options.show
  const sizeOf = () => ({
    width: Math.max(240, host.clientWidth),
    height: options.height ?? Math.max(140, host.clientHeight),
  })

  function build() {
    chart?.destroy()
    const { width, height } = sizeOf()
    chart = new uPlot(
      {
        width,
        height,
        padding: [8, options.ends ? endsRoom(width) : 0, 0, FIRST_LABEL_PX],
        tzDate: seconds => uPlot.tzDate(new Date(seconds * 1000), 'UTC'),
        legend: { show: false },
        cursor: {
          points: { size: 6, show: shown.length <= ENDS_MAX },
          drag: { x: Boolean(options.onZoom), y: false, setScale: false },
          focus: { prox: LIFT_PX },
          y: false,
        },
        focus: { alpha: 0.3 },
        scales: { y: { range: (_, low, high) => spread(low, high, options) } },
        axes: axes(options.show, width, height),
        series: [{}, ...shown.map(line)],
        bands: shown.flatMap((one, place) =>
          one.isBand && shown[place + 1]?.isBand ? [{ series: [place + 1, place + 2], fill: inks().grid }] : [],
        ),
        plugins: [cursor(() => shown, write, options.onZoom)],
        hooks: {
          draw: [
            self => drawMarks(self, shown),
            self => options.notes && drawNotes(self, options.notes()),
            self => options.ends && drawEnds(self, shown, write),
          ],
        },
      },
      data,
      host,
    )
  }

  build()
  const stopScheme = onScheme(build)
  const resized = new ResizeObserver(() => {
    const { width, height } = sizeOf()
    if (width === chart.width && height === chart.height) return
    if (endsRoom(width) === endsRoom(chart.width)) chart.setSize({ width, height })
    else build()
  })
  resized.observe(host)
  return {
    update(nextTimes, nextSeries, nextValues) {
      data = [nextTimes, ...nextValues]
      const isSame = nextSeries.length === shown.length && nextSeries.every((one, place) => isAlike(one, shown[place]))
      shown = nextSeries
      if (isSame) chart.setData(data)
      else build()
    },
    /** Move the cursor by this many points, for keyboard users. */
    move(step) {
      const last = data[0].length - 1
      const place = Math.min(last, Math.max(0, (chart.cursor.idx ?? last) + step))
      chart.setCursor({ left: chart.valToPos(data[0][place], 'x'), top: 8 })
    },
    destroy() {
      stopScheme()
      resized.disconnect()
      chart.destroy()
    },
  }
}

const DRAWN = ['name', 'color', 'isMain', 'isDimmed', 'isFaint', 'isBand']
const isAlike = (one, other) => DRAWN.every(key => one[key] === other[key])

const dpr = () => globalThis.devicePixelRatio ?? 1

/**
 * What the pointer does, as a plugin of uPlot: a box with the time and the values there, links on marks, and a range
 * chosen by a drag.
 */
function cursor(series, write, onZoom) {
  const box = document.createElement('div')
  box.className = 'hint values'
  let lifted = null

  function show(self) {
    const { idx, left } = self.cursor
    box.hidden = idx == null || left < 0
    if (box.hidden) return
    const rows = toldOf(series(), place => self.data[place + 1][idx], lifted)
    const head = Object.assign(document.createElement('b'), {
      textContent: `${day(self.data[0][idx] * 1000)}, ${clock(self.data[0][idx] * 1000, false)} ${ZONE}`,
    })
    box.replaceChildren(head, ...rows.map(row => rowOf(row, write, row.one === lifted)))
    const isLeft = left > self.over.clientWidth / 2
    box.style.left = isLeft ? '' : `${left + 12}px`
    box.style.right = isLeft ? `${self.over.clientWidth - left + 12}px` : ''
    self.over.classList.toggle('leads', Boolean(markAt(self, series())))
  }

  function select(self) {
    const { left, width } = self.select
    if (!onZoom || width < ZOOM_PX || self.data[0].length < 2) return // too narrow to be meant
    const [from, to] = [left, left + width].map(at => self.posToVal(at, 'x'))
    self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false)
    onZoom(from, to, to >= self.data[0].at(-1))
  }

  function init(self) {
    self.over.append(box)
    box.hidden = true
    self.over.addEventListener('dblclick', () => onZoom?.())
    self.over.addEventListener('click', () => {
      // uPlot keeps the click that ends a drag to itself
      const mark = markAt(self, series())
      if (mark?.marks.length === 1) location.hash = mark.marks[0].href
      else if (mark) onZoom?.(mark.marks[0].at - 60, mark.marks.at(-1).at + 60, false)
    })
  }

  return {
    hooks: {
      init,
      setCursor: show,
      setSelect: select,
      setSeries(self, place) {
        lifted = place == null ? null : series()[place - 1]
        show(self)
      },
    },
  }
}

function rowOf({ one, value }, write, isLifted) {
  const row = Object.assign(document.createElement('span'), { className: isLifted ? 'row lifted' : 'row' })
  const key = Object.assign(document.createElement('i'), { className: 'key' })
  key.style.setProperty('--key', onGround(one.color))
  const [name, figure] = ['bdi', 'span'].map(tag => document.createElement(tag))
  name.textContent = one.name
  figure.textContent = write(value)
  row.append(key, name, figure)
  return row
}

/** The named lines with a value, the best first; of many the best, the worst, the main ones and `lifted`. */
function toldOf(series, valueOf, lifted = null) {
  const rows = series
    .map((one, place) => ({ one, value: valueOf(place) }))
    .filter(({ one, value }) => !one.isUnnamed && value != null)
    .sort((row, other) => other.value - row.value)
  return rows.length <= ENDS_MAX
    ? rows
    : rows.filter(({ one }, place) => place < BEST || place >= rows.length - WORST || one === lifted || one.isMain)
}

/** Badge, name and value at the right ends of the lines, moved apart where they would overlap. */
function drawEnds(chart, series, write) {
  const { ctx } = chart
  const least = 13 * dpr()
  const { top, height, left, width } = chart.bbox
  const ends = toldOf(series, place => chart.data[place + 1]?.findLast(value => value != null)).map(end => ({
    ...end,
    y: Math.min(top + height, Math.max(top, chart.valToPos(end.value, 'y', true))),
  }))
  ends.forEach((end, place) => {
    end.y = Math.max(end.y, place ? ends[place - 1].y + least : 0)
  })
  ends.forEach((_, place) => {
    const at = ends.length - 1 - place
    ends[at].y = Math.min(ends[at].y, (at + 1 < ends.length ? ends[at + 1].y : top + height + least) - least)
  })
  const x = left + width + (axisRoom(chart.width) + 4) * dpr()
  const room = (endsRoom(chart.width) - BADGE_PX) * dpr()
  ctx.save()
  ctx.textBaseline = 'middle'
  for (const { one, value, y } of ends) {
    ctx.globalAlpha = one.isFaint ? 0.45 : 1
    drawBadge(ctx, one, x, y)
    ctx.fillStyle = onGround(one.color)
    ctx.font = `${one.isMain ? '600 ' : ''}${11 * dpr()}px "Inter Variable", system-ui, sans-serif`
    const [name, count] = one.name.split(/ \(mean of (\d+)\)$/)
    const told = chart.width < NARROW_PX ? '' : ` ${write(value)}` // a phone has room for the name, and the value below
    ctx.fillText(fitted(ctx, name, `${count ? ` ×${count}` : ''}${told}`, room), x + 10 * dpr(), y)
  }
  ctx.restore()
}

/** The name with what follows it, cut where the room ends. */
function fitted(ctx, name, rest, room) {
  const letters = [...name]
  const isTooWide = text => ctx.measureText(text).width > room
  if (!isTooWide(name + rest)) return name + rest
  while (letters.length > 1 && isTooWide(`${letters.join('')}…${rest}`)) letters.pop()
  return `${letters.join('')}…${rest}`
}

/** The letters of a name: the first of its first two words, else its first two. */
export function lettersOf(name) {
  const [first = '', second] = name.match(/[\p{L}\p{N}]+/gu)?.map(word => [...word]) ?? []
  return (second ? first[0] + second[0] : [...first].slice(0, 2).join('')).toUpperCase()
}

/** The letters of a line on a disc in its color: a model's logo, since the page loads no images from elsewhere. */
function drawBadge(ctx, one, x, y) {
  drawDisc(ctx, x, y, 6, onGround(one.color), lettersOf(one.name), 7)
}

function drawDisc(ctx, x, y, radius, color, text = '', size = 8) {
  ctx.beginPath()
  ctx.arc(x, y, radius * dpr(), 0, 2 * Math.PI)
  ctx.fillStyle = color
  ctx.fill()
  if (!text) return
  ctx.fillStyle = inkOn(color)
  ctx.font = `600 ${size * dpr()}px "Inter Variable", system-ui, sans-serif`
  ctx.textBaseline = 'middle'
  ctx.textAlign = 'center'
  ctx.fillText(text, x, y + 0.5 * dpr())
  ctx.textAlign = 'start'
}

/** The marks in view, those that would overlap as one: {x, y, marks}, in pixels of the plot. */
function clustersOf(chart, series) {
  const clusters = []
  const marks = series.flatMap(one => one.marks ?? []).sort((one, other) => one.at - other.at)
  for (const mark of marks) {
    const [x, y] = [chart.valToPos(mark.at, 'x'), chart.valToPos(mark.value, 'y')]
    if (x < 0 || x > chart.over.clientWidth) continue
    const last = clusters.at(-1)
    if (last && x - last.x < CLUSTER_PX) last.marks.push(mark)
    else clusters.push({ x, y, marks: [mark] })
  }
  return clusters
}

/** The marks: a ring where a position was opened, a disc where it was closed with a gain or a loss, or their number. */
function drawMarks(chart, series) {
  const { ctx, bbox } = chart
  const { gain, loss, ground, text } = inks()
  ctx.save()
  for (const { x, y, marks } of clustersOf(chart, series)) {
    const [left, top] = [bbox.left + x * dpr(), bbox.top + y * dpr()]
    const { kind } = marks[0]
    if (marks.length > 1) drawDisc(ctx, left, top, 7, text, String(marks.length))
    else drawDisc(ctx, left, top, kind === 'entry' ? 4 : 3, { gain, loss }[kind] ?? text)
    if (marks.length === 1 && kind === 'entry') drawDisc(ctx, left, top, 2.5, ground)
  }
  ctx.restore()
}

/** The mark or cluster nearest to the pointer, if any is near. */
function markAt(chart, series) {
  const { left, top } = chart.cursor
  const near = clustersOf(chart, series)
    .map(one => ({ ...one, distance: Math.hypot(one.x - left, one.y - top) }))
    .filter(one => one.distance < MARK_PX)
  return near.sort((one, other) => one.distance - other.distance)[0]
}

/** Moments that concern all lines: a vertical line each, with its label where there is room. */
function drawNotes(chart, notes) {
  const { ctx } = chart
  const { left, top, width, height } = chart.bbox
  let free = left
  ctx.save()
  ctx.fillStyle = inks().warn
  ctx.font = `${10 * dpr()}px "Inter Variable", system-ui, sans-serif`
  for (const { at, label } of [...notes].sort((one, other) => one.at - other.at)) {
    const x = chart.valToPos(at, 'x', true)
    if (x < left || x > left + width) continue
    ctx.fillRect(x, top, dpr(), height)
    if (x < free) continue
    ctx.fillText(label, x + 3 * dpr(), top + 8 * dpr())
    free = x + ctx.measureText(label).width + 8 * dpr()
  }
  ctx.restore()
}

function line(one) {
  return {
    label: one.name,
    stroke: onGround(one.color) + (one.isFaint ? FAINT : one.isDimmed ? DIMMED : ''),
    width: one.isMain ? THICK : THIN,
    dash: one.isDashed ? [4, 4] : undefined,
    spanGaps: true,
    points: { show: false },
  }
}

function spread(low, high, { limits, span, top }) {
  if (low == null || high == null) return [-1, 1]
  if (limits) [low, high] = limits(low, high)
  const missing = Math.max(0, (span ?? 0) - (high - low)) / 2
  const pad = Math.max((high - low + 2 * missing) * PADDING, Math.abs(high) * 1e-5, 1e-6)
  return [low - missing - pad, top ?? high + missing + pad]
}

/** Percent above a first value, or else above that of the line itself. */
export function returnsOf(values, first = values.find(value => value != null && value > 0)) {
  return values.map(value => (value == null || !(first > 0) ? null : (100 * value) / first - 100))
}

/** The quantile, between 0 and 1, of the existing values; null if there are none. */
export function quantileOf(values, share) {
  const sorted = values.filter(value => value != null).sort((one, other) => one - other)
  return sorted.length ? sorted[Math.round(share * (sorted.length - 1))] : null
}

/** The average of several lines at each time, over the lines with a value. */
export function averageOf(lines) {
  return (lines[0] ?? []).map((_, place) => {
    const known = lines.map(values => values[place]).filter(value => value != null)
    return known.length ? known.reduce((sum, value) => sum + value) / known.length : null
  })
}
