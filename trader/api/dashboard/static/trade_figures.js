// @ts-check
// Figures of trades and positions, as the service computes them; its tests compare both.
const sign = trade => (trade.side === 'LONG' ? 1 : -1)

export const entryNotionalOf = trade => trade.quantity * trade.entryPrice

export const marginOf = position => entryNotionalOf(position) / (position.leverage ?? 1)

export const percentOfNotional = (trade, profit) => (profit == null ? null : (100 * profit) / entryNotionalOf(trade))

/** How far a price is on the winning side of the entry, in percent. */
export const gainPercentAt = (trade, level) => 100 * sign(trade) * (level / trade.entryPrice - 1)

/** The distance to the stop, in percent of the price. */
export const stopDistance = ({ side, currentPrice, exitPlan: { stop } }) =>
  stop == null || currentPrice == null ? null : (100 * sign({ side }) * (currentPrice - stop)) / currentPrice

/** The profit of a closed trade in multiples of the loss at the stop. */
export function multipleOfRisk(trade) {
  const { stop } = trade.exitPlan
  const risk = stop == null ? null : gainPercentAt(trade, stop)
  return risk < 0 && trade.exitPrice != null ? -gainPercentAt(trade, trade.exitPrice) / risk : null
}
