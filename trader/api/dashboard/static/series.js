// @ts-check
// Series of a strategy in a chart of candles: lines over the candles, or each in a panel of its own below them.
import { SERIES, onGround } from './colors.js'
import { number, price } from './format.js'
import { html } from './lib.js'

export const PANEL_PX = 110
const LINE_PX = 1.5
const QUIET = { lastValueVisible: false, priceLineVisible: false }

const colorOf = place => onGround(SERIES[place % SERIES.length])

/**
 * A line as a custom series of lightweight-charts: rows of {time, bar, value}, or without a value. The chart computes x
 * for visible rows only, so the rows that lead the line out of the picture are placed by their bar.
 */
function line(place, axis) {
  let shown = null
  const renderer = {
    draw(target, heightOf) {
      target.useBitmapCoordinateSpace(({ context, horizontalPixelRatio, verticalPixelRatio }) => {
        if (!shown?.visibleRange) return
        const { from, to } = shown.visibleRange
        context.beginPath()
        for (const { originalData } of shown.bars.slice(Math.max(0, from - 1), to + 1)) {
          const x = axis.logicalToCoordinate(originalData.bar)
          context.lineTo(x * horizontalPixelRatio, heightOf(originalData.value) * verticalPixelRatio)
        }
        context.strokeStyle = colorOf(place)
        context.lineWidth = LINE_PX * verticalPixelRatio
        context.lineJoin = 'round'
        context.stroke()
      })
    },
  }
  return {
    renderer: () => renderer,
    update: data => {
      shown = data
    },
    priceValueBuilder: row => [row.value],
    isWhitespace: row => row.value == null,
    defaultOptions: () => ({}),
  }
}

/** Draw series {name, panel, values} at these times, in seconds; `onValues` hears their values under the pointer. */
export function drawSeries(chart, times, series, onValues) {
  let panels = 0
  const main = chart.panes()[0]
  const height = main.getHeight()
  const lines = series.map((one, place) => {
    const added = chart.addCustomSeries(line(place, chart.timeScale()), QUIET, one.panel ? (panels += 1) : 0)
    added.setData(times.map((time, bar) => ({ time, bar, value: one.values[bar] ?? undefined })))
    return added
  })
  main.setStretchFactor(height - panels * PANEL_PX)
  chart
    .panes()
    .slice(1)
    .forEach(pane => pane.setStretchFactor(PANEL_PX))
  chart.subscribeCrosshairMove(({ time, seriesData }) =>
    onValues(time === undefined ? null : lines.map(each => seriesData.get(each)?.value)),
  )
}

/** The names of series in their colors, with these values, else their last ones. */
export function SeriesValues({ series, values }) {
  return html`<p class="ohlc readout series">${series.map((one, place) => {
    const value = values ? values[place] : one.values.findLast(each => each != null)
    const shown = value == null ? '–' : one.panel ? number(value, 4) : price(value)
    return html`<span key=${one.name}><i class="key" style=${{ '--key': colorOf(place) }}></i> ${one.name} <b>${shown}</b></span>`
  })}</p>`
}
