// @ts-check
// Open positions, live, and completed trades: tables, sums and filters.
import { useChosen } from './address.js'
import { call, useAnswer } from './answers.js'
import {
  Choice,
  Pending,
  Market,
  Money,
  Panel,
  Select,
  Table,
  TradeTime,
  VariantName,
  figureColumn,
  modelColumn,
  moneyColumn,
  useStages,
} from './components.js'
import { merged } from './events.js'
import { number, percent, price, quantity, signedPercent, span, times, tone, whole } from './format.js'
import { html, useEffect, useMemo, useState } from './lib.js'
import { useModels } from './models.js'
import { useLive } from './store.js'
import { marginOf, percentOfNotional, stopDistance } from './trade_figures.js'

const PAGE = 200
const WIDE = { className: 'wide' }
const EXPORT_MAX = 50_000

/** Every open position, from the positions stream. */
export function positionsOf(state, only) {
  return (state.positions ?? []).flatMap(one => one.positions).filter(one => !only || only(one))
}

const numeric = value => (value == null ? null : Number(value))
const share = one => percentOfNotional(one, one.unrealizedPnl)

const VARIANT_COLUMN = {
  key: 'variant',
  title: 'Variant',
  isText: true,
  className: 'wide',
  by: one => one.modelVariant,
  cell: one => html`<${VariantName} variant=${one.modelVariant} />`,
}
const MARKET_COLUMN = {
  key: 'symbol',
  title: 'Market',
  isText: true,
  by: one => one.symbol,
  csv: one => ({ Market: one.symbol, Side: one.side, Leverage: one.leverage }),
  cell: one => html`<${Market} trade=${one} />`,
}

export function Positions({ only, title = 'Positions', hasNames = true, isCompact = false }) {
  const state = useLive()
  const known = useModels()
  const rows = positionsOf(state, only)
  const columns = [
    hasNames && modelColumn(known),
    hasNames && { ...VARIANT_COLUMN, isSaved: isCompact },
    MARKET_COLUMN,
    {
      key: 'pnl',
      title: 'Unrealized',
      isMain: true,
      csv: one => ({ Unrealized: numeric(one.unrealizedPnl), 'Unrealized, % of notional': share(one) }),
      by: one => numeric(one.unrealizedPnl),
      cell: one => html`<${Money} value=${one.unrealizedPnl} />
      <span class=${`sub ${tone(one.unrealizedPnl)}`}>${signedPercent(share(one))}</span>`,
    },
    {
      key: 'notional',
      title: 'Notional',
      by: one => numeric(one.notional),
      csv: one => ({ Notional: numeric(one.notional), Quantity: numeric(one.quantity) }),
      cell: one => html`${number(one.notional)}<span class="sub">${quantity(one.quantity)} ${one.symbol}</span>`,
    },
    {
      key: 'mark',
      title: 'Mark',
      by: one => numeric(one.currentPrice),
      csv: one => ({ Mark: numeric(one.currentPrice), Entry: numeric(one.entryPrice) }),
      cell: one => html`${price(one.currentPrice)}<span class="sub">entry ${price(one.entryPrice)}</span>`,
    },
    {
      key: 'stop',
      title: 'Stop',
      by: stopDistance,
      csv: one => ({ Stop: one.exitPlan.stop, 'To the stop, %': stopDistance(one) }),
      cell: one => html`${price(one.exitPlan.stop)}
      <span class="sub">${stopDistance(one) == null ? 'no stop' : `${percent(stopDistance(one))} away`}</span>`,
    },
    figureColumn('liquidation', 'Liquidation', one => numeric(one.liquidationPrice), price, {
      ...WIDE,
      isSaved: isCompact,
    }),
    figureColumn('target', 'Target', one => one.exitPlan.target, price),
    {
      key: 'opened',
      title: 'Opened',
      by: one => one.openedAt,
      cell: one => html`<${TradeTime} at=${one.openedAt} id=${one.id} />`,
    },
  ].filter(Boolean)
  return html`<${Panel} title=${title} tools=${html`<span class="soft small">${rows.length || ''}</span>`}>
    ${
      state.positions === null
        ? html`<p class="empty">Waiting for the positions stream.</p>`
        : html`<${Table} label=${title} columns=${columns} rows=${rows} first=${isCompact ? 20 : 50} narrow=${['model', 'symbol', 'pnl']}
          empty="No open positions." />`
    }
  </${Panel}>`
}

/** The page of all positions; shown at once when they are known, since later content above would push them down. */
export function PositionsPage() {
  const state = useLive()
  const isKnown = Boolean(state.positions && state.portfolio)
  const stage = useStages(isKnown, 1)
  if (!isKnown) return html`<p class="empty">Waiting for the positions stream.</p>`
  return html`<${Exposure} state=${state} />${stage > 0 && html`<${Positions} />`}`
}

/** Each model's exposure: the notional of its positions, their margin, and both relative to its equity. */
function Exposure({ state }) {
  const known = useModels()
  const equity = new Map((state.portfolio?.snapshots ?? []).map(snapshot => [snapshot.modelId, snapshot.netPortfolio]))
  const rows = (state.positions ?? [])
    .filter(entry => entry.positions.length)
    .map(entry => {
      const of = side =>
        entry.positions.reduce((sum, position) => sum + (position.side === side ? Number(position.notional) : 0), 0)
      const [long, short] = [of('LONG'), of('SHORT')]
      const margin = entry.positions.reduce((sum, position) => sum + marginOf(position), 0)
      return {
        ...entry,
        long,
        short,
        net: long - short,
        margin,
        share: equity.has(entry.modelId) ? (long + short) / equity.get(entry.modelId) : null,
      }
    })
  const columns = [
    modelColumn(known),
    figureColumn('long', 'Long', row => row.long),
    figureColumn('short', 'Short', row => row.short),
    figureColumn('net', 'Net exposure', row => row.net),
    figureColumn('share', 'Gross to equity', row => row.share, times),
    figureColumn('margin', 'Margin', row => row.margin),
    figureColumn('cash', 'Available cash', row => row.availableCash),
  ]
  return html`<${Panel} title="Exposure and margin"><${Table} label="Exposure" columns=${columns} rows=${rows} first=${20} narrow=${['model', 'net', 'share']}
    isEven=${true} empty="No account holds a position." /></${Panel}>`
}

/** Completed trades of an input of getTrades: one answer, extended by trades from the stream since. Returns {entry, trades}. */
export function useTrades(input) {
  const entry = useAnswer('trading.getTrades', input, 0)
  const { trades: latest } = useLive()
  const trades = useMemo(
    () =>
      merged(
        (latest ?? []).filter(trade => fits(trade, input)),
        entry.data?.trades ?? [],
      ),
    [entry.data, latest, JSON.stringify(input)],
  )
  return { entry, trades }
}

/** Whether a trade is one of those that an input of getTrades asks for. */
const fits = (trade, { modelId, variant, symbol, side, result, closeReason }) =>
  (!modelId || trade.modelId === modelId) &&
  (!variant || variant === 'all' || trade.modelVariant === variant) &&
  (!symbol || trade.symbol === symbol) &&
  (!side || trade.side === side) &&
  (!result || trade.netPnl > 0 === (result === 'won')) &&
  (!closeReason || trade.closeReason === closeReason)

const REASONS = 'order limit stop invalidation target time liquidation reset operator manual ended'.split(' ')

/**
 * The filter of trades in the address, for the table, its file and the sums: {input, tools}. What the page itself is
 * about, a model, a variant or a market, cannot be chosen.
 */
function useTradeFilter({ modelId, variant, symbol = undefined }) {
  const known = useModels()
  const prices = useAnswer('trading.getCryptoPrices', {}, 0)
  const choices = {
    modelId: useChosen('model', '', true),
    variant: useChosen('variant', '', true),
    symbol: useChosen('market', '', true),
    side: useChosen('side', '', true),
    result: useChosen('result', '', true),
    closeReason: useChosen('reason', '', true),
  }
  const fixed = { modelId, variant, symbol }
  const input = Object.fromEntries(
    Object.entries(choices).map(([name, [value]]) => [name, fixed[name] ?? (value || undefined)]),
  )
  const same = options => options.map(option => [option, option])
  /** @type {[string, string, string, string[][]][]} */
  const lists = [
    ['modelId', 'Model', 'All models', known.models.map(one => [one.id, one.name])],
    ['variant', 'Variant', 'All variants', same(known.variants.map(one => one.id))],
    ['symbol', 'Market', 'All markets', same((prices.data?.prices ?? []).map(row => row.symbol))],
    ['side', 'Side', 'Both sides', same(['LONG', 'SHORT'])],
    ['result', 'Result', 'Won and lost', same(['won', 'lost'])],
    ['closeReason', 'Closed by', 'Any close reason', same(REASONS)],
  ]
  const tools = html`<div class="filters">${lists
    .filter(([name]) => fixed[name] === undefined && !(name === 'variant' && modelId))
    .map(
      ([name, label, every, options]) => html`<${Select} key=${name} label=${label}
      value=${choices[name][0]} onChange=${choices[name][1]} options=${[['', every], ...options]} />`,
    )}</div>`
  return { input, tools, isFiltered: Object.values(choices).some(([value]) => value) }
}

const heldMs = trade => Date.parse(trade.closedAt) - Date.parse(trade.openedAt)

export function Trades({
  modelId,
  variant,
  symbol,
  title = 'Trades',
  limit = PAGE,
  hasFilter = true,
  isCompact = false,
}) {
  const known = useModels()
  const { input: filter, tools, isFiltered } = useTradeFilter({ modelId, variant, symbol })
  const input = { limit, ...filter }
  const { entry, trades } = useTrades(input)
  const [older, setOlder] = useState([])
  const key = JSON.stringify(input)
  useEffect(() => setOlder([]), [key])
  const rows = merged(
    trades,
    older.flatMap(page => page.trades),
  )
  const last = older.at(-1) ?? entry.data
  const next = (page, some) =>
    call('trading.getTrades', { ...input, ...some, before: page.nextBefore, skip: page.nextSkip })
  const readOlder = async () => setOlder([...older, await next(last)])
  /** Every trade that fits the filter, also those that were not read yet. */
  async function readAll() {
    const all = [...rows]
    for (let page = last; page?.nextBefore && all.length < EXPORT_MAX;) {
      page = await next(page, { limit: 500 })
      all.push(...page.trades)
    }
    return all
  }
  return html`<${Panel} title=${title} tools=${hasFilter && tools}>
    <${Pending} entry=${entry} what="The trades" />
    ${
      entry.data &&
      html`<${Table} label=${title}
        columns=${tradeColumns(known, { hasModel: !modelId, hasVariant: !modelId && !variant })} rows=${rows} first=${50} readAll=${readAll}
        narrow=${['closed', modelId ? 'symbol' : 'model', 'net']}
      empty=${isFiltered ? 'No trade fits these filters.' : 'No trade has been completed yet.'} />`
    }
    ${
      last?.nextBefore &&
      html`<p class="more"><button class="button" type="button"
      onClick=${readOlder}>Read older trades</button></p>`
    }
  </${Panel}>`
}

function tradeColumns(known, { hasModel = true, hasVariant = false }) {
  return [
    {
      key: 'closed',
      title: 'Closed',
      isText: true,
      by: one => one.closedAt,
      cell: one => html`<${TradeTime} at=${one.closedAt} id=${one.id} />`,
    },
    hasModel && modelColumn(known),
    { ...VARIANT_COLUMN, isSaved: !hasVariant },
    MARKET_COLUMN,
    { key: 'reason', title: 'Closed by', isText: true, by: one => one.closeReason, cell: one => one.closeReason },
    moneyColumn('net', 'Net', one => one.netPnl, { isMain: true }),
    moneyColumn('gross', 'Gross', one => one.grossPnl, WIDE),
    figureColumn('fees', 'Fees', one => one.fees),
    figureColumn('funding', 'Funding', one => one.funding, number, WIDE),
    figureColumn('quantity', 'Quantity', one => one.quantity, quantity, WIDE),
    figureColumn('entry', 'Entry', one => one.entryPrice, price),
    figureColumn('exit', 'Exit', one => one.exitPrice, price),
    {
      key: 'held',
      title: 'Held',
      by: heldMs,
      csv: one => ({ Opened: one.openedAt, 'Held, s': heldMs(one) / 1000 }),
      cell: one => span(heldMs(one)),
    },
  ].filter(Boolean)
}

const PARTS = [
  ['day', 'Day'],
  ['week', 'Week'],
  ['market', 'Market'],
  ['side', 'Side'],
  ['reason', 'Closed by'],
  ['model', 'Model'],
]

/**
 * The filter of this page, and the completed trades of the current runs that fit it, totaled by a common property;
 * `children` follow once they are read.
 */
export function TradeTotals({ modelId, variant, children }) {
  const [by, setBy] = useChosen('by', 'day')
  const { input, tools, isFiltered } = useTradeFilter({ modelId, variant })
  const entry = useAnswer('analytics.getTradeTotals', { by, ...input })
  const rows = entry.data?.rows ?? []
  const known = useModels()
  const nameOf = key => (by === 'model' ? known.nameOf(key) : key)
  const columns = [
    {
      key: 'key',
      title: PARTS.find(([key]) => key === by)[1],
      isText: true,
      isHead: true,
      by: row => nameOf(row.key),
      cell: row => nameOf(row.key),
    },
    figureColumn('trades', 'Trades', row => row.trades, whole),
    {
      key: 'won',
      title: 'Won',
      by: row => row.won / row.trades,
      csv: row => row.won,
      cell: row => html`${whole(row.won)}<span class="sub">${percent((100 * row.won) / row.trades, 0)}</span>`,
    },
    moneyColumn('net', 'Net', row => row.netPnl, { isMain: true }),
    moneyColumn('gross', 'Gross', row => row.grossPnl),
    figureColumn('fees', 'Fees', row => row.fees),
    figureColumn('funding', 'Funding', row => row.funding),
  ]
  const days = by === 'day' || by === 'week'
  return html`<${Panel} title="Trades summed up" tools=${html`${tools}<${Choice} label="By" value=${by} onChange=${setBy}
    options=${PARTS.filter(([key]) => key !== 'model' || !modelId)} />`}>
    <${Pending} entry=${entry} what="The sums" />
    ${
      entry.data &&
      html`<${Table} label="Trades summed up" columns=${columns} rows=${days ? [...rows].reverse() : rows} narrow=${['key', 'trades', 'net', 'fees']}
      first=${10} empty=${isFiltered ? 'No trade of this run fits these filters.' : 'No trade has been completed in this run yet.'} />`
    }
  </${Panel}>${(entry.data || entry.error) && children}`
}
