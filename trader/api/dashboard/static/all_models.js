// @ts-check
// The page of all models: the leaderboard, the evidence, and the variants.
import { useAnswer } from './answers.js'
import { Board } from './board.js'
import { Pending, Interval, Key, ModelName, Panel, Table, scaleOf } from './components.js'
import { EvidenceTable } from './evidence.js'
import { signed, tone, whole, wonOf } from './format.js'
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
    { key: 'models', title: 'Models', by: one => one.modelCount, cell: one => whole(one.modelCount) },
    { key: 'trades', title: 'Trades', by: one => one.totalTrades, cell: one => whole(one.totalTrades) },
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
    {
      key: 'net',
      title: 'Realized, net',
      by: one => one.totalPnl,
      cell: one => html`<span class=${tone(one.totalPnl)}>${signed(one.totalPnl)}</span>`,
    },
    {
      key: 'scale',
      title: 'Compared',
      isText: true,
      cell: one =>
        html`<${Interval} value=${one.totalPnl} least=${least} most=${most}
          color=${known.byVariant.get(one.variantId)?.color ?? one.color} />`,
    },
    { key: 'average', title: 'Per trade', by: one => one.avgPnl, cell: one => signed(one.avgPnl) },
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
