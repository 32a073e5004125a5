// Open positions, live, and completed trades: tables, sums and filters.
import { useChosen } from './address.js'
import { call, useAnswer } from './answers.js'
import { Choice, Failed, Market, Money, Panel, Select, Table, TradeTime, VariantName, modelColumn } from './components.js'
import { number, percent, price, quantity, signedPercent, tone, whole } from './format.js'
import { html, useEffect, useMemo, useState } from './lib.js'
import { useModels } from './models.js'
import { merged, useLive } from './store.js'

const PAGE = 200
const FILTERS = ['model', 'variant', 'market', 'side', 'result', 'reason']

/** Every open position, from the positions stream. */
export function positionsOf(state, only) {
  return (state.positions ?? []).flatMap(one => one.positions).filter(one => !only || only(one))
}

/** The distance to the stop, in percent of the price. */
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
    hasNames && modelColumn(known),
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
    : html`<${Table} label=${title} columns=${columns} rows=${rows} first=${isCompact ? 20 : 50} empty="No open positions." />`}
  </${Panel}>`
}

/** The page of all positions; shown at once when they are known, since later content above would push them down. */
export function PositionsPage() {
  const state = useLive()
  if (!state.positions || !state.portfolio) return html`<p class="empty">Waiting for the positions stream.</p>`
  return html`<${Exposure} state=${state} /><${Positions} />`
}

/** Each model's exposure: the notional of its positions, their margin, and both relative to its equity. */
function Exposure({ state }) {
  const known = useModels()
  const equity = new Map((state.portfolio?.snapshots ?? []).map(snapshot => [snapshot.modelId, snapshot.netPortfolio]))
  const rows = (state.positions ?? []).filter(entry => entry.positions.length).map(entry => {
    const of = side => entry.positions.reduce((sum, position) => sum + (position.side === side ? Number(position.notional) : 0), 0)
    const [long, short] = [of('LONG'), of('SHORT')]
    const margin = entry.positions.reduce((sum, position) => sum + position.quantity * position.entryPrice / (position.leverage ?? 1), 0)
    return { ...entry, long, short, net: long - short, margin, share: equity.has(entry.modelId) ? (long + short) / equity.get(entry.modelId) : null }
  })
  const columns = [
    modelColumn(known),
    { key: 'long', title: 'Long', by: row => row.long, cell: row => number(row.long) },
    { key: 'short', title: 'Short', by: row => row.short, cell: row => number(row.short) },
    { key: 'net', title: 'Net exposure', by: row => row.net, cell: row => number(row.net) },
    { key: 'share', title: 'Gross to equity', by: row => row.share, cell: row => (row.share == null ? '–' : `${number(row.share)}×`) },
    { key: 'margin', title: 'Margin', by: row => row.margin, cell: row => number(row.margin) },
    { key: 'cash', title: 'Available cash', by: row => row.availableCash, cell: row => number(row.availableCash) },
  ]
  return html`<${Panel} title="Exposure and margin"><${Table} label="Exposure" columns=${columns} rows=${rows} first=${20} isEven=${true} empty="No account holds a position." /></${Panel}>`
}

/** Completed trades: one answer, extended by trades from the stream since. Returns {entry, trades}. */
export function useTrades({ limit, modelId, variant = 'all', symbol }) {
  const entry = useAnswer('trading.getTrades', { limit, variant, modelId: modelId || undefined, symbol }, 0)
  const { trades: latest } = useLive()
  const trades = useMemo(() => {
    const isOfThese = trade => (!modelId || trade.modelId === modelId) && (variant === 'all' || trade.modelVariant === variant) && (!symbol || trade.symbol === symbol)
    return merged((latest ?? []).filter(isOfThese), entry.data?.trades ?? [])
  }, [entry.data, latest, modelId, variant, symbol])
  return { entry, trades }
}

export function Trades({ modelId, variant, symbol, title = 'Trades', hasFilters = true, limit = PAGE }) {
  const known = useModels()
  const chosen = FILTERS.map(name => useChosen(name, ''))
  const filter = Object.fromEntries(FILTERS.map((name, place) => [name, chosen[place][0]]))
  const input = { limit, variant: variant ?? (filter.variant || 'all'), modelId: modelId ?? (filter.model || undefined), symbol }
  const { entry, trades } = useTrades(input)
  const [older, setOlder] = useState([])
  const key = JSON.stringify(input)
  useEffect(() => setOlder([]), [key])
  const all = hasFilters ? merged(trades, older.flatMap(page => page.trades)) : trades.slice(0, limit)
  const rows = all.filter(one => (!filter.market || one.symbol === filter.market) && (!filter.side || one.side === filter.side)
    && (!filter.result || (one.netPnl > 0) === (filter.result === 'won')) && (!filter.reason || one.closeReason === filter.reason))
  const last = older.at(-1) ?? entry.data
  const readOlder = async () => setOlder([...older, await call('trading.getTrades', { ...input, before: last.nextBefore, skip: last.nextSkip })])
  const set = name => chosen[FILTERS.indexOf(name)][1]
  const valuesOf = name => [...new Set(all.map(one => one[name]))].sort().map(value => [value, value])
  const tools = hasFilters && html`<div class="filters">
    ${!modelId && html`<${Select} label="Model" value=${filter.model} onChange=${set('model')}
      options=${[['', 'All models'], ...known.models.map(one => [one.id, one.name])]} />`}
    ${!modelId && !variant && html`<${Select} label="Variant" value=${filter.variant} onChange=${set('variant')}
      options=${[['', 'All variants'], ...known.variants.map(one => [one.id, one.id])]} />`}
    ${!symbol && html`<${Select} label="Market" value=${filter.market} onChange=${set('market')} options=${[['', 'All markets'], ...valuesOf('symbol')]} />`}
    <${Select} label="Side" value=${filter.side} onChange=${set('side')} options=${[['', 'Both sides'], ['LONG', 'Long'], ['SHORT', 'Short']]} />
    <${Select} label="Result" value=${filter.result} onChange=${set('result')} options=${[['', 'Won and lost'], ['won', 'Won'], ['lost', 'Lost']]} />
    <${Select} label="Closed by" value=${filter.reason} onChange=${set('reason')} options=${[['', 'Any close reason'], ...valuesOf('closeReason')]} />
  </div>`
  const columns = [
    { key: 'closed', title: 'Closed', isText: true, by: one => one.closedAt, cell: one => html`<${TradeTime} at=${one.closedAt} id=${one.id} />` },
    !modelId && modelColumn(known),
    !modelId && !variant && hasFilters && { key: 'variant', title: 'Variant', isText: true, className: 'narrow-hide', by: one => one.modelVariant, cell: one => html`<${VariantName} variant=${one.modelVariant} />` },
    { key: 'symbol', title: 'Market', isText: true, by: one => one.symbol, cell: one => html`<${Market} trade=${one} />` },
    { key: 'reason', title: 'Closed by', isText: true, by: one => one.closeReason, cell: one => one.closeReason },
    { key: 'net', title: 'Net', by: one => one.netPnl, cell: one => html`<${Money} value=${one.netPnl} />` },
    hasFilters && { key: 'gross', title: 'Gross', className: 'narrow-hide', by: one => one.grossPnl, cell: one => html`<${Money} value=${one.grossPnl} />` },
    { key: 'fees', title: 'Fees', by: one => one.fees, cell: one => number(one.fees) },
    hasFilters && { key: 'funding', title: 'Funding', className: 'narrow-hide', by: one => one.funding, cell: one => number(one.funding) },
    hasFilters && { key: 'quantity', title: 'Quantity', by: one => one.quantity, cell: one => quantity(one.quantity) },
    { key: 'entry', title: 'Entry', by: one => one.entryPrice, cell: one => price(one.entryPrice) },
    { key: 'exit', title: 'Exit', by: one => one.exitPrice, cell: one => price(one.exitPrice) },
    { key: 'held', title: 'Held', by: one => Date.parse(one.closedAt) - Date.parse(one.openedAt), cell: one => one.holdingTime },
  ].filter(Boolean)
  return html`<${Panel} title=${title} tools=${tools}>
    <${Failed} entry=${entry} what="The trades" />
    ${entry.data && html`<${Table} label=${title} columns=${columns} rows=${rows} first=${50}
      empty=${all.length ? 'No trade fits these filters.' : 'No trade has been completed yet.'} />`}
    ${hasFilters && last?.nextBefore && html`<p class="more"><button class="button" type="button" onClick=${readOlder}>Read older trades</button></p>`}
  </${Panel}>`
}

const PARTS = [['day', 'Day'], ['week', 'Week'], ['market', 'Market'], ['side', 'Side'], ['reason', 'Closed by']]

/** Completed trades of the current runs, totaled by a common property; `children` follow once they are read. */
export function TradeTotals({ modelId, variant = 'all', children }) {
  const [by, setBy] = useChosen('by', 'day')
  const entry = useAnswer('analytics.getTradeTotals', { by, modelId, variant })
  const rows = entry.data?.rows ?? []
  const columns = [
    { key: 'key', title: PARTS.find(([key]) => key === by)[1], isText: true, by: row => row.key, cell: row => row.key },
    { key: 'trades', title: 'Trades', by: row => row.trades, cell: row => whole(row.trades) },
    { key: 'won', title: 'Won', by: row => row.won / row.trades, cell: row => html`${whole(row.won)}<span class="sub">${percent((100 * row.won) / row.trades, 0)}</span>` },
    { key: 'net', title: 'Net', by: row => row.netPnl, cell: row => html`<${Money} value=${row.netPnl} />` },
    { key: 'gross', title: 'Gross', by: row => row.grossPnl, cell: row => html`<${Money} value=${row.grossPnl} />` },
    { key: 'fees', title: 'Fees', by: row => row.fees, cell: row => number(row.fees) },
    { key: 'funding', title: 'Funding', by: row => row.funding, cell: row => number(row.funding) },
  ]
  const days = by === 'day' || by === 'week'
  return html`<${Panel} title="Trades summed up" tools=${html`<${Choice} label="By" value=${by} onChange=${setBy} options=${PARTS} />`}>
    <${Failed} entry=${entry} what="The sums" />
    ${entry.data && html`<${Table} label="Trades summed up" columns=${columns} rows=${days ? [...rows].reverse() : rows} first=${10} empty="No trade has been completed in this run yet." />`}
  </${Panel}>${(entry.data || entry.error) && children}`
}
