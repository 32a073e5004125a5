// Open positions, live: what they are worth, where they are liquidated, and how far their stop is.
import { Market, Money, ModelName, Panel, Table, TradeTime, VariantName } from './components.js'
import { number, percent, price, quantity, signedPercent, tone } from './format.js'
import { html } from './lib.js'
import { useModels } from './models.js'
import { useLive } from './store.js'

/** Every open position, from the positions stream. */
export function positionsOf(state, only) {
  return (state.positions ?? []).flatMap(one => one.positions).filter(one => !only || only(one))
}

/** How far the price may move against the position until its stop, in percent of the price. */
export function stopDistance(position) {
  const { stop } = position.exitPlan
  const mark = Number(position.currentPrice)
  if (stop == null || position.currentPrice == null) return null
  return (100 * (position.side === 'LONG' ? mark - stop : stop - mark)) / mark
}

const numeric = value => (value == null ? null : Number(value))
const share = one => (one.unrealizedPnl == null ? null : (100 * one.unrealizedPnl) / (one.quantity * one.entryPrice))

export function Positions({ only, title = 'Positions', hasNames = true, isCompact = false }) {
  const state = useLive()
  const known = useModels()
  const rows = positionsOf(state, only)
  const columns = [
    hasNames && { key: 'model', title: 'Model', isText: true, by: one => one.modelName.toLowerCase(), cell: one => html`<${ModelName} id=${one.modelId}
      name=${one.modelName} color=${known.colorOf(one.modelId, one.modelVariant)} isLinked=${known.byId.has(one.modelId)} />` },
    hasNames && !isCompact && { key: 'variant', title: 'Variant', isText: true, className: 'narrow-hide', by: one => one.modelVariant, cell: one => html`<${VariantName} variant=${one.modelVariant} />` },
    { key: 'symbol', title: 'Market', isText: true, by: one => one.symbol, cell: one => html`<${Market} trade=${one} />` },
    { key: 'pnl', title: 'Unrealized', by: one => numeric(one.unrealizedPnl), cell: one => html`<${Money} value=${one.unrealizedPnl} />
      <span class=${`sub ${tone(one.unrealizedPnl)}`}>${signedPercent(share(one))}</span>` },
    { key: 'notional', title: 'Notional', by: one => numeric(one.notional), cell: one => html`${number(one.notional)}<span class="sub">${quantity(one.quantity)} ${one.symbol}</span>` },
    { key: 'mark', title: 'Mark', by: one => numeric(one.currentPrice), cell: one => html`${price(one.currentPrice)}<span class="sub">entry ${price(one.entryPrice)}</span>` },
    { key: 'stop', title: 'Stop', by: stopDistance, cell: one => html`${price(one.exitPlan.stop)}
      <span class="sub">${stopDistance(one) == null ? 'no stop' : `${percent(stopDistance(one))} away`}</span>` },
    !isCompact && { key: 'liquidation', title: 'Liquidation', by: one => numeric(one.liquidationPrice), cell: one => price(one.liquidationPrice) },
    { key: 'target', title: 'Target', by: one => one.exitPlan.target, cell: one => price(one.exitPlan.target) },
    { key: 'opened', title: 'Opened', by: one => one.openedAt, cell: one => html`<${TradeTime} at=${one.openedAt} id=${one.id} />` },
  ].filter(Boolean)
  return html`<${Panel} title=${title} tools=${html`<span class="soft small">${rows.length || ''}</span>`}>
    ${state.positions === null ? html`<p class="empty">Waiting for the positions stream.</p>`
    : html`<${Table} label=${title} columns=${columns} rows=${rows} first=${isCompact ? 20 : 100} empty="No open positions." />`}
  </${Panel}>`
}

/** What each model has at risk: the notional of its positions, their margin, and both against its equity. */
export function Exposure() {
  const state = useLive()
  const known = useModels()
  const equity = new Map((state.portfolio?.snapshots ?? []).map(snapshot => [snapshot.modelId, snapshot.netPortfolio]))
  const rows = (state.positions ?? []).filter(entry => entry.positions.length).map(entry => {
    const of = side => entry.positions.reduce((sum, position) => sum + (position.side === side ? Number(position.notional) : 0), 0)
    const [long, short] = [of('LONG'), of('SHORT')]
    const margin = entry.positions.reduce((sum, position) => sum + position.quantity * position.entryPrice / (position.leverage ?? 1), 0)
    return { ...entry, long, short, net: long - short, margin, share: equity.has(entry.modelId) ? (long + short) / equity.get(entry.modelId) : null }
  })
  const columns = [
    { key: 'model', title: 'Model', isText: true, by: row => row.modelName.toLowerCase(), cell: row => html`<${ModelName} id=${row.modelId} name=${row.modelName}
      color=${known.colorOf(row.modelId, row.modelVariant)} isLinked=${known.byId.has(row.modelId)} />` },
    { key: 'long', title: 'Long', by: row => row.long, cell: row => number(row.long) },
    { key: 'short', title: 'Short', by: row => row.short, cell: row => number(row.short) },
    { key: 'net', title: 'Net exposure', by: row => row.net, cell: row => number(row.net) },
    { key: 'share', title: 'Gross to equity', by: row => row.share, cell: row => (row.share == null ? '–' : `${number(row.share)}×`) },
    { key: 'margin', title: 'Margin', by: row => row.margin, cell: row => number(row.margin) },
    { key: 'cash', title: 'Available cash', by: row => row.availableCash, cell: row => number(row.availableCash) },
  ]
  return html`<${Panel} title="Exposure and margin"><${Table} label="Exposure" columns=${columns} rows=${rows} first=${20} empty="Nobody holds a position." /></${Panel}>`
}
