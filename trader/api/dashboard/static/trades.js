// Completed trades, with filters; older ones are read page by page.
import { useChosen } from './address.js'
import { call, useAnswer } from './answers.js'
import { Choice, Failed, Market, ModelName, Money, Panel, Select, Table, TradeTime, VariantName } from './components.js'
import { number, percent, price, quantity, whole } from './format.js'
import { html, useEffect, useState } from './lib.js'
import { useModels } from './models.js'

const PAGE = 200
const FILTERS = ['model', 'variant', 'market', 'side', 'result', 'reason']

export function Trades({ modelId, variant, symbol, title = 'Trades', hasFilters = true, limit = PAGE }) {
  const known = useModels()
  const chosen = FILTERS.map(name => useChosen(name, ''))
  const filter = Object.fromEntries(FILTERS.map((name, place) => [name, chosen[place][0]]))
  const input = { limit, variant: variant ?? (filter.variant || 'all'), modelId: modelId ?? (filter.model || undefined), symbol }
  const entry = useAnswer('trading.getTrades', input)
  const [older, setOlder] = useState({ rows: [], before: undefined })
  const key = JSON.stringify(input)
  useEffect(() => setOlder({ rows: [], before: undefined }), [key])
  const first = entry.data?.trades ?? []
  const known_ = new Set(first.map(one => one.id))
  const all = [...first, ...older.rows.filter(one => !known_.has(one.id))]
  const rows = all.filter(one => (!filter.market || one.symbol === filter.market) && (!filter.side || one.side === filter.side)
    && (!filter.result || (one.netPnl > 0) === (filter.result === 'won')) && (!filter.reason || one.closeReason === filter.reason))
  const before = older.rows.length ? older.before : entry.data?.nextBefore
  const readOlder = async () => {
    const answer = await call('trading.getTrades', { ...input, before })
    setOlder({ rows: [...older.rows, ...answer.trades], before: answer.nextBefore })
  }
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
    <${Select} label="Closed by" value=${filter.reason} onChange=${set('reason')} options=${[['', 'Closed by anything'], ...valuesOf('closeReason')]} />
  </div>`
  const columns = [
    { key: 'closed', title: 'Closed', isText: true, by: one => one.closedAt, cell: one => html`<${TradeTime} at=${one.closedAt} id=${one.id} />` },
    !modelId && { key: 'model', title: 'Model', isText: true, by: one => one.modelName.toLowerCase(), cell: one => html`<${ModelName} id=${one.modelId}
      name=${one.modelName} color=${known.colorOf(one.modelId, one.modelVariant)} isLinked=${known.byId.has(one.modelId)} />` },
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
    ${entry.data && html`<${Table} label=${title} columns=${columns} rows=${rows}
      empty=${all.length ? 'No trade fits these filters.' : 'No trade was completed yet.'} />`}
    ${hasFilters && before && html`<p class="more"><button class="button" type="button" onClick=${readOlder}>Read older trades</button></p>`}
  </${Panel}>`
}

const PARTS = [['day', 'Day'], ['week', 'Week'], ['market', 'Market'], ['side', 'Side'], ['reason', 'Closed by']]

/** Completed trades of the current runs, summed up by what they have in common. */
export function TradeTotals({ modelId, variant = 'all' }) {
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
    ${entry.data && html`<${Table} label="Trades summed up" columns=${columns} rows=${days ? [...rows].reverse() : rows} first=${10} empty="No trade was completed in this run yet." />`}
  </${Panel}>`
}
