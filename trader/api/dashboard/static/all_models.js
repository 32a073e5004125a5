// @ts-check
// The page of all models: the leaderboard, the evidence, and the variants.
import { useAnswer } from './answers.js'
import { Board } from './board.js'
import { Pending, Interval, Key, ModelName, Panel, Table, figureColumn, moneyColumn, scaleOf } from './components.js'
import { EvidenceTable } from './evidence.js'
import { signed, whole, wonOf } from './format.js'
import { html } from './lib.js'
import { useModels, useWindow } from './models.js'

export function ModelsPage({ route }) {
  const [window, setWindow] = useWindow(route)
  const known = useModels()
  const stats = useAnswer('variants.getVariantStats')
  const [least, most] = scaleOf((stats.data?.stats ?? []).map(one => one.totalPnl))
  const columns = [
    {
      key: 'variant',
      title: 'Variant',
      isText: true,
      isHead: true,
      by: one => one.label,
      cell: one =>
        html`<a class="name" href=${`#/variants/${one.variantId}`}><${Key}
          color=${known.byVariant.get(one.variantId)?.color ?? one.color} /><span>${one.label}</span></a>`,
    },
    figureColumn('models', 'Models', one => one.modelCount, whole),
    figureColumn('trades', 'Trades', one => one.totalTrades, whole),
    {
      key: 'won',
      title: 'Won',
      by: one => one.winRate,
      csv: one => ({
        'Won, %': one.winRate,
        'Won, 95 % low, %': one.winRateInterval?.low,
        'Won, 95 % high, %': one.winRateInterval?.high,
      }),
      cell: one =>
        html`<span title="of the completed trades, with its 95 % interval">${one.winRateInterval ? wonOf(one).slice(4) : '–'}</span>`,
    },
    moneyColumn('net', 'Realized, net', one => one.totalPnl),
    {
      key: 'scale',
      title: 'Compared',
      isText: true,
      cell: one =>
        html`<${Interval} value=${one.totalPnl} least=${least} most=${most}
          color=${known.byVariant.get(one.variantId)?.color ?? one.color} />`,
    },
    figureColumn('average', 'Per trade', one => one.avgPnl, signed),
  ]
  const quiet = known.models.filter(one => !one.active)
  return html`<${Board} window=${window} onWindow=${setWindow}><${EvidenceTable} window=${window}><${Panel}
      title="Variants, whole run"><${Pending} entry=${stats} what="The variants" />
      ${stats.data && html`<${Table} label="Variants" narrow=${['variant', 'net', 'average']} columns=${columns} rows=${stats.data.stats} empty="" />`}</${Panel}>
      ${
        quiet.length > 0 &&
        html`<${Panel} title="Inactive models"><div
        class="body filters">${quiet.map(
          one => html`<${ModelName} key=${one.id} id=${one.id} name=${one.name}
          color=${known.colorOf(one.id)} />`,
        )}</div></${Panel}>`
      }</${EvidenceTable}></${Board}>`
}
