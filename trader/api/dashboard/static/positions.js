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
    : html`<${Table} label=${title} columns=${columns} rows=${rows} keyOf=${one => one.id} first=${isCompact ? 20 : 100} empty="No open positions." />`}
  </${Panel}>`
}
