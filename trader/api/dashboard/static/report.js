// @ts-check
// Charts and evidence of a report, drawn from the data in its file.
import { averageOf, drawdownsOf, histogram, timeChart } from './charts.js'
import { inks } from './colors.js'
import { EvidenceBoard } from './evidence.js'
import { clock, day, number, signedPercent } from './format.js'
import { html, render } from './lib.js'

const HEIGHT = 260
const BINS = 48
const TRADE_PERCENT = 2

const data = JSON.parse(document.getElementById('data').textContent)
const show = (value, places) => `${number(value, places)} %`

/** The lines of a chart: the variants and the references or, for one variant, its average and its models as thin lines. */
function linesOf(variantId) {
  const lines = data.variants
    .filter(one => !variantId || one.id === variantId)
    .flatMap(variant => {
      const models = data.models.filter(one => one.variant === variant.id)
      if (models.length < 2) return models.map(one => ({ ...one, color: variant.color, isMain: true }))
      const average = {
        name: `${variant.label}, average`,
        color: variant.color,
        isMain: true,
        values: averageOf(models.map(one => one.values)),
      }
      return variantId ? [...models.map(one => ({ ...one, color: variant.color, isDimmed: true })), average] : [average]
    })
  const references = data.references.map(one => ({ ...one, color: inks().text, isMain: true, isDimmed: true }))
  return variantId ? lines : [...lines, ...references]
}

const fallen = values => drawdownsOf(values.map(value => (value == null ? null : 100 + value)))

function draw(host) {
  const { chart, variant } = host.dataset
  if (chart === 'trades') {
    histogram(host, data.trades, -TRADE_PERCENT, TRADE_PERCENT, BINS, HEIGHT)
    return
  }
  if (data.times.length < 2) {
    host.textContent = 'A line needs two hours; there is one so far.'
    return
  }
  const lines = linesOf(variant)
  const values = lines.map(one => (chart === 'drawdown' ? fallen(one.values) : one.values))
  const readout = document.createElement('p')
  readout.className = 'small figure'
  const tell = at => {
    const place = at ?? data.times.length - 1
    const parts = lines.flatMap((one, number_) =>
      one.isMain ? [`${one.name} ${signedPercent(values[number_][place])}`] : [],
    )
    readout.textContent = `${day(data.times[place] * 1000)}, ${clock(data.times[place] * 1000, false)}: ${parts.join(' · ')}`
  }
  timeChart(host, data.times, lines, values, {
    height: HEIGHT,
    show,
    onCursor: tell,
    top: chart === 'drawdown' ? 0 : undefined,
  })
  tell(null)
  host.after(readout)
}

document.querySelectorAll('[data-chart]').forEach(draw)

if (data.evidence) {
  const known = { byId: new Map(), colorOf: id => data.colors[id] }
  render(
    html`<${EvidenceBoard} answer=${data.evidence} known=${known} isLinked=${false} />`,
    document.getElementById('evidence'),
  )
}
