// @ts-check
// Series of a strategy in a chart of candles: lines over the candles, or each in a panel of its own below them.
import { SERIES, onGround, onScheme } from './colors.js'
import { number, price } from './format.js'
import { html } from './lib.js'
import { LineSeries } from './vendor/lightweight-charts.js'

export const PANEL_PX = 110
const QUIET = { lineWidth: 2, lastValueVisible: false, priceLineVisible: false, crosshairMarkerVisible: false }

const colorOf = place => onGround(SERIES[place % SERIES.length])

/** Draw series {name, panel, values} at these times, in seconds; `onValues` hears their values under the pointer. */
export function drawSeries(chart, times, series, onValues) {
  let panels = 0
  const main = chart.panes()[0]
  const height = main.getHeight()
  const lines = series.map((one, place) => {
    const added = chart.addSeries(LineSeries, { ...QUIET, color: colorOf(place) }, one.panel ? (panels += 1) : 0)
    added.setData(times.map((time, bar) => ({ time, value: one.values[bar] ?? undefined })))
    return added
  })
  onScheme(() => lines.forEach((line, place) => line.applyOptions({ color: colorOf(place) })))
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
