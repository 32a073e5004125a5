// @ts-check
// The page of a trade: its candles with entry and exit, plan and outcome, fills, and what the model said.
import { useAnswer } from './answers.js'
import { CandleChart, SPANS_MS, levelsOf, marksOf } from './candles.js'
import { Facts, Pending, Key, Money, Panel, Side, Table, Tile, Time } from './components.js'
import { Turn } from './conversations.js'
import { moment, number, percent, price, quantity, signed, signedPercent, span, times, tone } from './format.js'
import { html, useMemo } from './lib.js'
import { serviceNow, useModels } from './models.js'
import { Picture } from './share.js'
import { useRunning } from './store.js'
import { entryNotionalOf, gainPercentAt, multipleOfRisk, percentOfNotional } from './trade_figures.js'

const AROUND = 0.4
const AROUND_BARS = 20
const BARS = 120
const NARROW_BARS = 48
const isNarrow = matchMedia('(max-width: 760px)')

/** The candles around a trade: an interval that gives it as many candles as there is room for, and their start and end. */
function sliceOf(trade) {
  const [begin, end] = [Date.parse(trade.openedAt), trade.closedAt ? Date.parse(trade.closedAt) : serviceNow()]
  const interval =
    Object.keys(SPANS_MS).find(key => (end - begin) / SPANS_MS[key] <= (isNarrow.matches ? NARROW_BARS : BARS)) ?? '1d'
  const around = Math.max(AROUND * (end - begin), AROUND_BARS * SPANS_MS[interval])
  const floor = at => new Date(Math.floor(at / SPANS_MS[interval]) * SPANS_MS[interval]).toISOString()
  return {
    symbol: trade.symbol,
    interval,
    from: floor(begin - around),
    to: trade.closedAt ? floor(end + around) : undefined,
  }
}

export function TradePage({ id }) {
  const entry = useAnswer('trading.getTrade', { id }, 30_000)
  const trade = entry.data?.trade
  if (!trade)
    return entry.error
      ? html`<p class="notice">There is no such trade: ${entry.error}. <a href="#/trades">All trades</a></p>`
      : html`<p class="empty">Reading …</p>`
  return html`<${Details} entry=${entry} trade=${trade} />`
}

const step = (id, text) =>
  id ? html`<a href=${`#/trades/${id}`}>${text}</a>` : html`<span class="soft">${text}</span>`

function Details({ entry, trade }) {
  const known = useModels()
  const isOpen = trade.status === 'OPEN'
  const latest = useRunning(trade.symbol)
  const slice = useMemo(() => sliceOf(trade), [trade.id, trade.closedAt])
  const candles = useAnswer('trading.getCandles', slice)
  const markers = useMemo(() => marksOf([trade], known, true), [trade])
  const levels = useMemo(() => levelsOf(trade), [trade])
  const time = useMemo(
    () => ({ from: Date.parse(trade.openedAt), to: trade.closedAt && Date.parse(trade.closedAt) }),
    [trade.id, trade.closedAt],
  )
  const color = known.colorOf(trade.modelId, trade.modelVariant)
  const held = (trade.closedAt ? Date.parse(trade.closedAt) : serviceNow()) - Date.parse(trade.openedAt)
  const gain = percentOfNotional(trade, trade.netPnl)
  return html`
    <div class="title"><${Key} color=${color} /><h1><a
      href=${`#/models/${encodeURIComponent(trade.modelId)}`}><bdi>${trade.modelName}</bdi></a>: <a
        href=${`#/markets/${trade.symbol}`}>${trade.symbol}</a></h1>
      <${Side} side=${trade.side} />${trade.leverage && html`<span class="soft">${times(trade.leverage)}</span>`}
      <span class="badge">${isOpen ? 'open' : `closed by ${trade.closeReason}`}</span><${Picture} />
      <nav class="steps"
        aria-label="Trades of this model">${step(trade.previousId, '← Previous trade')}${step(trade.nextId, 'Next trade →')}</nav></div>
    <${Pending} entry=${entry} what="The trade" />
    <section class="panel" aria-label="Figures"><div class="body tiles">
      ${
        !isOpen &&
        html`<${Tile} label="Net" value=${signed(trade.netPnl)} kind=${tone(trade.netPnl)}
          note=${`${signedPercent(gain)} of the notional`} />
        <${Tile} label="Price profit" value=${signed(trade.grossPnl)}
          note=${`fees ${signed(-trade.fees)}, funding ${signed(trade.funding)}`} />`
      }
      ${
        isOpen &&
        html`<${Tile} label="Fees so far" value=${number(trade.fees)}
        note=${`funding ${signed(trade.funding)}`} />`
      }
      <${Tile} label="Quantity" value=${quantity(trade.quantity)}
        note=${`notional ${number(entryNotionalOf(trade))}, margin ${number(trade.margin)}`} />
      <${Tile} label="Largest unrealized gain (MFE)" value=${percent(trade.excursion.favourablePercent)}
        note=${`at ${price(trade.side === 'LONG' ? trade.excursion.highest : trade.excursion.lowest)}`} />
      <${Tile} label="Largest unrealized loss (MAE)" value=${percent(trade.excursion.adversePercent)}
        note=${`at ${price(trade.side === 'LONG' ? trade.excursion.lowest : trade.excursion.highest)}`} />
      <${Tile} label="Held" value=${span(held)} note=${`since ${moment(trade.openedAt)}`} />
    </div></section>
    <${Panel} title="Price while it was open"><div class="body">
      <${Pending} entry=${candles} what="The candles" isQuiet=${true} />
      ${candles.data?.times.length === 0 && html`<p class="empty">The candles of this time are no longer kept.</p>`}
      <${CandleChart} label=${`Candles of ${trade.symbol} around this trade, with its entry, exit, stop and target`}
        candles=${candles.data} markers=${markers} levels=${levels} running=${isOpen ? latest : undefined} trade=${time} />
      <p class="soft small">${
        trade.excursion.interval
          ? `Gain and loss are from the ${trade.excursion.interval} candles entirely within the trade, and from its own fills.`
          : 'It was shorter than a candle, so gain and loss are from its own fills.'
      }</p>
    </div></${Panel}>
    <div class="pair"><${Plan} trade=${trade} /><${Fills} trade=${trade} /></div>
    <${Said} trade=${trade} at=${trade.openedAt} isOpening=${true} title="Why it was opened" />
    ${!isOpen && html`<${Said} trade=${trade} at=${trade.closedAt} title="Why it was closed" />`}`
}

/** The last exit plan compared with the outcome; R is the profit in multiples of the loss at the stop. */
function Plan({ trade }) {
  const { stop, target, invalidation, invalidationPrice, timeExit, trailingDistance, targets = [] } = trade.exitPlan
  const away = level => (level == null ? 'not set' : `${price(level)} (${signedPercent(gainPercentAt(trade, level))})`)
  const rows = [
    ['Entry', price(trade.entryPrice)],
    ['Stop', `${away(stop)}${trailingDistance ? `, ${price(trailingDistance)} behind the best mark` : ''}`],
    ['Target', away(target)],
    ...targets.map(each => [`Limit for ${percent(100 * each.fraction, 0)}`, away(each.price)]),
    [
      'Invalidation',
      invalidationPrice == null
        ? (invalidation ?? 'not set')
        : `${away(invalidationPrice)}${invalidation ? `: ${invalidation}` : ''}`,
    ],
    ['Time limit', timeExit ? moment(timeExit) : 'not set'],
    ['Confidence', trade.confidence == null ? '–' : percent(trade.confidence, 0)],
    ['Outcome', trade.exitPrice == null ? 'still open' : `${away(trade.exitPrice)} by ${trade.closeReason}`],
    ['R', number(multipleOfRisk(trade))],
  ]
  return html`<${Panel} title="Plan and outcome"><${Facts} rows=${rows} /></${Panel}>`
}

function Fills({ trade }) {
  const columns = [
    {
      key: 'time',
      title: 'Time',
      isText: true,
      by: fill => fill.timestamp,
      cell: fill => html`<${Time} at=${fill.timestamp} />`,
    },
    {
      key: 'side',
      title: 'Side',
      isText: true,
      by: fill => fill.side,
      cell: fill => html`<${Side} side=${fill.side} />`,
    },
    { key: 'quantity', title: 'Quantity', by: fill => Number(fill.quantity), cell: fill => quantity(fill.quantity) },
    { key: 'price', title: 'Price', by: fill => Number(fill.price), cell: fill => price(fill.price) },
    {
      key: 'fee',
      title: 'Fee',
      by: fill => Number(fill.fee),
      cell: fill => html`<${Money} value=${-fill.fee} places=${4} />`,
    },
    {
      key: 'cause',
      title: 'By',
      isText: true,
      by: fill => fill.cause,
      cell: fill => `${fill.cause}${fill.maker ? ', maker' : ''}`,
    },
  ]
  return html`<${Panel} title="Fills"><${Table} label="Fills" narrow=${['time', 'price', 'fee']} columns=${columns} rows=${trade.fills}
    empty="No fills of this trade are recorded." /></${Panel}>`
}

/** The conversation in which a trade was opened or closed: the last one begun by then. */
function Said({ trade, at, title, isOpening = false }) {
  const known = useModels()
  const before = new Date(Date.parse(at) + 1).toISOString()
  const entry = useAnswer('models.getInvocations', { modelId: trade.modelId, before, limit: 1 }, 0)
  const turn = entry.data?.conversations[0]
  const isOfIt =
    turn &&
    (isOpening ? turn.id === trade.invocationId : trade.closeReason === 'order' && turn.id !== trade.invocationId)
  if (!isOpening && !isOfIt) return null
  return html`<${Panel} title=${title}>
    <${Pending} entry=${entry} what="The conversation" />
    ${
      entry.data &&
      !isOfIt &&
      html`<p
      class="empty">${trade.invocationId ? 'Its conversation is no longer kept.' : 'It was opened manually.'}</p>`
    }
    ${isOfIt && html`<ol class="turns"><${Turn} turn=${turn} known=${known} /></ol>`}
  </${Panel}>`
}
