// Charts of the dashboard and of the reports, drawn by uPlot: lines over time with a crosshair, and histograms.
import { isDark, onGround, onScheme } from './colors.js'
import { clock, day } from './format.js'

const uPlot = globalThis.uPlot
const THIN = 1.25
const THICK = 2
const DIMMED = '66'

const inks = () => (isDark() ? { grid: '#1d222a', text: '#98a1b0' } : { grid: '#eceff3', text: '#596170' })

function axes(show, width, height) {
  const { grid, text } = inks()
  const font = '11px "Inter Variable", system-ui, sans-serif'
  const shared = { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } }
  return [
    { ...shared, space: 84, size: 28, values: (_, marks) => timeMarks(marks) },
    { ...shared, side: 1, size: width < 480 ? 52 : 62, space: Math.min(34, height / 5), gap: 6, values: (_, marks) => marks.map(show) },
  ]
}

/** Days at midnight, else the time of day. */
function timeMarks(marks) {
  return marks.map(mark => (mark % 86400 === 0 ? day(mark * 1000) : clock(mark * 1000, false)))
}

/**
 * Draw lines over time in `host`. `series` are {name, color, isMain, isDimmed, isHidden}, `values` one list for each.
 *
 * `options`: `show` writes a value, `onCursor(index or null)` hears where the crosshair is, `sync` is the key that
 * charts with a common crosshair share, `height`, `fill` fills below the line. Returns {update, destroy}.
 */
export function timeChart(host, times, series, values, options) {
  let data = [times, ...values]
  let shown = series
  let chart = null

  function build() {
    chart?.destroy()
    const width = Math.max(240, host.clientWidth)
    chart = new uPlot({
      width,
      height: options.height,
      padding: [8, 0, 0, 0],
      tzDate: seconds => uPlot.tzDate(new Date(seconds * 1000), 'UTC'),
      legend: { show: false },
      cursor: {
        sync: options.sync ? { key: options.sync, setSeries: false } : undefined,
        points: { size: 6, show: shown.length <= 12 },
        drag: { x: false, y: false },
        y: false,
      },
      scales: { y: { range: (_, low, high) => spread(low, high, options) } },
      axes: axes(options.show, width, options.height),
      series: [{}, ...shown.map(one => line(one, options))],
      hooks: { setCursor: [() => options.onCursor?.(chart?.cursor.idx ?? null)] },
    }, data, host)
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
    /** Move the crosshair by so many points, for those who use the keyboard. */
    move(step) {
      const last = data[0].length - 1
      const place = Math.min(last, Math.max(0, (chart.cursor.idx ?? last) + step))
      chart.setCursor({ left: chart.valToPos(data[0][place], 'x'), top: 8 })
    },
    destroy() { stopScheme(); resized.disconnect(); chart.destroy() },
  }
}

const isAlike = (one, other) => one.name === other.name && one.color === other.color && one.isMain === other.isMain
  && one.isDimmed === other.isDimmed && one.isHidden === other.isHidden

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
  const least = options.top === 0 ? 0 : Math.max(high - low, Math.abs(high) * 1e-4, 1e-6) * 0.06
  return [low - Math.max((high - low) * 0.06, 1e-6), options.top ?? high + least]
}

/** Draw the shares of values in bins between `low` and `high`, one outline for each of `groups`: {name, color, values}. */
export function histogram(host, groups, low, high, bins, height) {
  const width = (high - low) / bins
  const places = Array.from({ length: bins }, (_, bin) => low + width * (bin + 0.5))
  const shares = groups.map(group => {
    const counts = new Array(bins).fill(0)
    for (const value of group.values) counts[Math.min(bins - 1, Math.max(0, Math.floor((value - low) / width)))] += 1
    return counts.map(count => (100 * count) / (group.values.length || 1))
  })
  const build = () => new uPlot({
    width: Math.max(240, host.clientWidth),
    height,
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, y: false },
    scales: { x: { time: false } },
    axes: axes(value => `${value.toFixed(0)} %`, host.clientWidth, height).map((axis, place) => (
      place ? axis : { ...axis, values: (_, marks) => marks.map(mark => `${mark} %`) })),
    series: [{}, ...groups.map(group => ({
      label: group.name, stroke: onGround(group.color), width: THICK, paths: uPlot.paths.stepped({ align: 0 }), points: { show: false },
    }))],
  }, [places, ...shares], host)
  let chart = build()
  onScheme(() => { chart.destroy(); chart = build() })
}

/** Percent above the first value of a line that has one. */
export function returnsOf(values) {
  const first = values.find(value => value != null && value > 0)
  return values.map(value => (value == null || first === undefined ? null : (100 * value) / first - 100))
}

/** Percent below the highest value so far. */
export function drawdownsOf(values) {
  let peak = -Infinity
  return values.map(value => {
    if (value == null) return null
    peak = Math.max(peak, value)
    return peak > 0 ? (100 * value) / peak - 100 : 0
  })
}

/** The average of several lines at each time, over those that have a value there. */
export function averageOf(lines) {
  return (lines[0] ?? []).map((_, place) => {
    let sum = 0
    let count = 0
    for (const values of lines) if (values[place] != null) { sum += values[place]; count += 1 }
    return count ? sum / count : null
  })
}
