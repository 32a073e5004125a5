// @ts-check
// Charts of the dashboard and of the reports, drawn by uPlot: lines over time with a crosshair.
import { inkOn, inks, onGround, onScheme } from './colors.js'
import { clock, day } from './format.js'

const uPlot = globalThis.uPlot
const THIN = 1.25
export const THICK = 2
const DIMMED = '66'

const LIFT_PX = 24
const ENDS_FROM_PX = 700
const ENDS_PX = 164
const ENDS_MAX = 14
const NAME_PX = ENDS_PX - 16 // beside the badge
const MARK_PX = 10
const ZOOM_PX = 6
const FIRST_LABEL_PX = 20 // half of a time below the left edge

export function axes(show, width, height) {
  const { grid, text } = inks()
  const font = '11px "Inter Variable", system-ui, sans-serif'
  const shared = { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } }
  return [
    { ...shared, space: 84, size: 28, values: (_, marks) => timeMarks(marks) },
    {
      ...shared,
      side: 1,
      size: width < 480 ? 52 : 62,
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
 * Draw lines over time in `host`. `series` are {name, color, isMain, isDimmed, isHidden}, `values` one list for each.
 *
 * `options`:
 * - `show(value, places)` writes a value, on the axis with the places that its marks need
 * - `height`; `fill` fills below the line; `span` is the minimum extent of the axis; `limits(low, high)` bound the axis
 *   so that it does not follow outliers; `sync` is the key that charts with a common crosshair share
 * - `ends` writes badge, name and value at the end of each line (false leaves the room for them); a series with `marks`,
 *   [{at, value, kind, href}], has them drawn as links; `notes()` are moments to mark for all
 * - `onCursor(index or null)` hears where the crosshair is; `lifts` dims the others while the pointer is near a line;
 *   `onZoom(from, to, isLatest)` hears of a range that a drag chose, and without one of a double click
 *
 * Returns {update, move, destroy}.
 */
export function timeChart(host, times, series, values, options) {
  let data = [times, ...values]
  let shown = series
  let chart = null

  function build() {
    chart?.destroy()
    const width = Math.max(240, host.clientWidth)
    chart = new uPlot(
      {
        width,
        height: options.height,
        padding: [8, options.ends !== undefined && width > ENDS_FROM_PX ? ENDS_PX : 0, 0, FIRST_LABEL_PX],
        tzDate: seconds => uPlot.tzDate(new Date(seconds * 1000), 'UTC'),
        legend: { show: false },
        cursor: {
          sync: options.sync ? { key: options.sync, setSeries: false } : undefined,
          points: { size: 6, show: shown.length <= 12 },
          drag: { x: Boolean(options.onZoom), y: false, setScale: false },
          focus: { prox: options.lifts ? LIFT_PX : -1 },
          y: false,
        },
        focus: { alpha: 0.2 },
        scales: { y: { range: (_, low, high) => spread(low, high, options) } },
        axes: axes(options.show, width, options.height),
        series: [{}, ...shown.map(one => line(one, options))],
        bands: shown.flatMap((one, place) =>
          one.isBandTop ? [{ series: [place + 1, place + 2], fill: inks().grid }] : [],
        ),
        hooks: {
          setSelect: [self => options.onZoom && select(self)],
          setCursor: [
            () => options.onCursor?.(chart?.cursor.idx ?? null),
            self => self.over.classList.toggle('leads', Boolean(markAt(self, shown))),
          ],
          setSeries: [(_, place) => options.onLift?.(place == null ? null : shown[place - 1])],
          draw: [
            self => drawMarks(self, shown),
            self => options.notes && drawNotes(self, options.notes()),
            self => options.ends && width > ENDS_FROM_PX && drawEnds(self, shown, options),
          ],
        },
      },
      data,
      host,
    )
    chart.over.addEventListener('dblclick', () => options.onZoom?.())
    chart.over.addEventListener('click', () => {
      // uPlot keeps the click that ends a drag to itself
      const mark = markAt(chart, shown)
      if (mark) location.hash = mark.href
    })
  }

  /** Hear of a range that was chosen, unless it is too narrow to be meant. */
  function select(self) {
    const { left, width } = self.select
    if (width < ZOOM_PX || self.data[0].length < 2) return
    const [from, to] = [left, left + width].map(at => self.posToVal(at, 'x'))
    self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false)
    options.onZoom(from, to, to >= self.data[0].at(-1))
  }

  build()
  const stopScheme = onScheme(build)
  const resized = new ResizeObserver(() => {
    const width = Math.max(240, host.clientWidth)
    if (width !== chart.width) chart.setSize({ width, height: options.height })
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
    /** Move the crosshair by this many points, for keyboard users. */
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

const isAlike = (one, other) =>
  one.name === other.name &&
  one.color === other.color &&
  one.isMain === other.isMain &&
  one.isDimmed === other.isDimmed &&
  one.isHidden === other.isHidden &&
  one.isBandTop === other.isBandTop

const dpr = () => globalThis.devicePixelRatio ?? 1

/** Badge, name and value at the right end of each visible line, moved apart where they would overlap. */
function drawEnds(chart, series, options) {
  const { ctx } = chart
  const least = 13 * dpr()
  const ends = series
    .flatMap((one, place) => {
      const values = chart.data[place + 1]
      const last = values?.findLast(value => value != null)
      return one.isHidden || one.isUnnamed || last == null ? [] : [{ one, last, y: chart.valToPos(last, 'y', true) }]
    })
    .sort((upper, lower) => upper.y - lower.y)
  if (ends.length > ENDS_MAX) return
  const { top, height, left, width } = chart.bbox
  ends.forEach((end, place) => {
    end.y = Math.max(Math.max(top, end.y), place ? ends[place - 1].y + least : 0)
  })
  ends.forEach((_, place) => {
    const at = ends.length - 1 - place
    ends[at].y = Math.min(ends[at].y, (at + 1 < ends.length ? ends[at + 1].y : top + height + least) - least)
  })
  ctx.save()
  ctx.textBaseline = 'middle'
  for (const { one, last, y } of ends) {
    const x = left + width + 66 * dpr()
    drawBadge(ctx, one, x, y)
    ctx.fillStyle = onGround(one.color)
    ctx.font = `${11 * dpr()}px "Inter Variable", system-ui, sans-serif`
    ctx.fillText(`${fitted(ctx, one.name, ` ${options.show(last)}`)}`, x + 10 * dpr(), y)
  }
  ctx.restore()
}

/** The name with what follows it, cut where the room beside the chart ends. */
function fitted(ctx, name, rest) {
  const letters = [...name]
  const isTooWide = text => ctx.measureText(text).width > NAME_PX * dpr()
  if (!isTooWide(name + rest)) return name + rest
  while (letters.length > 1 && isTooWide(`${letters.join('')}…${rest}`)) letters.pop()
  return `${letters.join('')}…${rest}`
}

/** The letters of a name: the first of its first two words, else its first two. */
function lettersOf(name) {
  const [first = '', second] = name.match(/[\p{L}\p{N}]+/gu)?.map(word => [...word]) ?? []
  return (second ? first[0] + second[0] : [...first].slice(0, 2).join('')).toUpperCase()
}

/** The letters of a line on a disc in its color: a model's logo, since the page loads no images from elsewhere. */
function drawBadge(ctx, one, x, y) {
  const color = onGround(one.color)
  ctx.beginPath()
  ctx.arc(x, y, 6 * dpr(), 0, 2 * Math.PI)
  ctx.fillStyle = color
  ctx.fill()
  ctx.fillStyle = inkOn(color)
  ctx.font = `600 ${7 * dpr()}px "Inter Variable", system-ui, sans-serif`
  ctx.textAlign = 'center'
  ctx.fillText(lettersOf(one.name), x, y + 0.5 * dpr())
  ctx.textAlign = 'start'
}

/** The marked moments of a series: up is a gain, down a loss. */
function drawMarks(chart, series) {
  const { ctx } = chart
  for (const one of series) {
    for (const mark of one.isHidden ? [] : (one.marks ?? [])) {
      const [x, y] = [chart.valToPos(mark.at, 'x', true), chart.valToPos(mark.value, 'y', true)]
      if (x < chart.bbox.left || x > chart.bbox.left + chart.bbox.width) continue
      ctx.beginPath()
      ctx.arc(x, y, 3 * dpr(), 0, 2 * Math.PI)
      ctx.fillStyle = mark.kind === 'gain' ? inks().gain : inks().loss
      ctx.fill()
    }
  }
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

/** The mark nearest to the pointer, if any is near. */
function markAt(chart, series) {
  const { left, top } = chart.cursor
  const distanceOf = mark => Math.hypot(chart.valToPos(mark.at, 'x') - left, chart.valToPos(mark.value, 'y') - top)
  const marks = series
    .flatMap(one => (one.isHidden ? [] : (one.marks ?? [])))
    .map(mark => ({ ...mark, distance: distanceOf(mark) }))
  return marks.filter(mark => mark.distance < MARK_PX).sort((mark, other) => mark.distance - other.distance)[0]
}

function line(one, options) {
  const color = onGround(one.color) + (one.isDimmed ? DIMMED : '')
  return {
    label: one.name,
    show: !one.isHidden,
    stroke: color,
    width: one.isMain ? THICK : THIN,
    dash: one.isDimmed ? [4, 4] : undefined,
    fill: options.fill ? `${color.slice(0, 7)}14` : undefined,
    spanGaps: true,
    points: { show: false },
  }
}

function spread(low, high, options) {
  if (low == null || high == null) return [-1, 1]
  if (options.limits) [low, high] = options.limits(low, high)
  if (options.span && high - low < options.span)
    [low, high] = [(low + high - options.span) / 2, (low + high + options.span) / 2]
  const least = options.top === 0 ? 0 : Math.max(high - low, Math.abs(high) * 1e-4, 1e-6) * 0.06
  return [low - Math.max((high - low) * 0.06, 1e-6), options.top ?? high + least]
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
    let sum = 0
    let count = 0
    for (const values of lines)
      if (values[place] != null) {
        sum += values[place]
        count += 1
      }
    return count ? sum / count : null
  })
}
