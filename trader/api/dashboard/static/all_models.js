// @ts-check
// The page of all models: the leaderboard, the evidence, and the variants.
import { useAnswer } from './answers.js'
import { Board } from './board.js'
import { Pending, Interval, Key, ModelName, Panel, Table, Tile, scaleOf } from './components.js'
import { EvidenceTable } from './evidence.js'
import { figureOf, moment, number, signed, signedPercent, tone, whole, wonOf } from './format.js'
import { html } from './lib.js'
import { useModels, useWindow } from './models.js'
import { useLive } from './store.js'
import { positionsOf } from './trades.js'

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
    { key: 'models', title: 'Models', className: 'mid', by: one => one.modelCount, cell: one => whole(one.modelCount) },
    {
      key: 'trades',
      title: 'Trades',
      className: 'mid',
      by: one => one.totalTrades,
      cell: one => whole(one.totalTrades),
    },
    {
      key: 'won',
      title: 'Won',
      className: 'mid',
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
      className: 'mid',
      cell: one =>
        html`<${Interval} value=${one.totalPnl} least=${least} most=${most}
          color=${known.byVariant.get(one.variantId)?.color ?? one.color} />`,
    },
    { key: 'average', title: 'Per trade', by: one => one.avgPnl, cell: one => signed(one.avgPnl) },
  ]
  const quiet = known.models.filter(one => !one.active)
  return html`<${Summary} />
    <${Board} window=${window} onWindow=${setWindow}><${EvidenceTable} window=${window}><${Panel}
      title="Variants, whole run"><${Pending} entry=${stats} what="The variants" />
      ${stats.data && html`<${Table} label="Variants" columns=${columns} rows=${stats.data.stats} empty="" />`}</${Panel}>
      ${
        quiet.length > 0 &&
        html`<${Panel} title="Inactive models"><div
        class="body legend">${quiet.map(
          one => html`<${ModelName} key=${one.id} id=${one.id} name=${one.name}
          color=${known.colorOf(one.id)} />`,
        )}</div></${Panel}>`
      }</${EvidenceTable}></${Board}>`
}

/** All accounts of models together, from the live streams: the first four add up to the equity. */
function Summary() {
  const state = useLive()
  const stats = useAnswer('analytics.getModelStats', { variant: 'all' }) // the same input as the leaderboard
  const run = useAnswer('analytics.getRunInfo')
  const snapshots = state.portfolio?.snapshots ?? []
  const ids = new Set(snapshots.map(snapshot => snapshot.modelId))
  const overall = (stats.data?.overall ?? []).filter(row => ids.has(row.modelId))
  const held = positionsOf(state, position => ids.has(position.modelId))
  const equity = sum(snapshots, snapshot => snapshot.netPortfolio)
  const unrealized = sum(snapshots, snapshot => snapshot.unrealizedPnl)
  const realized = sum(overall, row => figureOf(row.totalPnl))
  const cost = sum(
    overall.filter(row => !row.costIsDeclared),
    row => figureOf(row.costUsd),
  )
  const capital = sum(overall, row => row.startValue)
  const known = overall.length > 0 && overall.length === ids.size
  const equityOf = state.portfolio ? `= Equity of ${whole(snapshots.length)} models` : '= Equity'
  const paid = equity - capital - realized - unrealized
  const show = (value, write = number) => (known ? write(value) : '–')
  return html`<section class="panel summary" aria-label="All accounts together"><div class="body tiles">
    <${Tile} label="Start" value=${show(capital)} note=${run.data ? `since ${moment(run.data.runStartTime)}` : ''} />
    <${Tile} label="+ Realized, net" value=${show(realized, signed)} kind=${tone(realized)}
      note=${run.data ? `${whole(run.data.trades)} completed trades` : ''} />
    <${Tile} label="+ Unrealized" value=${show(unrealized, signed)} kind=${tone(unrealized)}
      note=${state.positions ? `${whole(held.length)} open positions` : ''} />
    <${Tile} label="+ Paid for open positions" value=${show(paid, signed)} kind=${tone(paid)}
      note="fees and funding so far" />
    <${Tile} label=${equityOf} value=${show(equity)}
      note=${
        known &&
        html`<span
        class=${tone(equity - capital)}>${signedPercent(capital > 0 ? (100 * equity) / capital - 100 : null)}</span> since the start`
      } />
    <${Tile} label="Model cost, USD" value=${stats.data ? number(cost) : '–'}
      note=${run.data ? `${whole(run.data.invocations)} invocations; not in the equity` : ''} />
  </div></section>`
}

const sum = (list, of) => list.reduce((total, item) => total + (of(item) ?? 0), 0)
