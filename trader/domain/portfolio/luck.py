"""Luck: what random traders would have made who traded as often, on the same sides, as large and as long as a model.

A random trader makes the model's trades of each market in random order at random moments of the same period, one after
the other, each with the size that the model gave it in parts of its equity. They enter and leave at the opens of the
candles that the exchange saw, pay its fees, half of the spread and funding, and are liquidated by its margin rule.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.domain.market.markets import Candle
from trader.domain.portfolio.intervals import TRADES_MIN, percent

TRADERS: Final = 1_999
"""Random traders: with the model itself 2,000, so that a quantile is a whole multiple of 0.05 %."""

HALF_SPREAD: Final = 0.00003
"""Half of the spread in parts of the price: 0.3 basis points, the middle of the calm medians of the markets."""

_CHUNK: Final = 200_000
"""Trades that are computed at once, so that no step takes long."""

_RUIN: Final = 1e-12
"""What is left of an account that lost everything, so that it has a logarithm."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class OwnTrade(NamedTuple):
    """A completed trade of a model. `size` is its entry notional, and `gain` its net profit, in parts of the equity."""

    symbol: str
    is_long: bool
    size: float
    gain: float
    held: timedelta


class Costs(NamedTuple):
    """The exchange's costs of one market: taker fee, maintenance and liquidation fee in parts of the notional."""

    taker_rate: float
    maintenance_rate: float
    liquidation_rate: float


class Prices:
    """The candles of one market, without gaps, from a whole hour on; and the funding rate of each hour."""

    def __init__(self, candles: Sequence[Candle], step: timedelta, funding: Sequence[float]) -> None:
        self.open = np.array([candle.open for candle in candles])
        self.count = len(candles)
        self._per_hour = max(1, timedelta(hours=1) // step)
        self._funding = np.concatenate([[0.0], np.cumsum(funding)])
        self._lows = _tables(np.array([candle.low for candle in candles]), np.minimum)
        self._highs = _tables(np.array([candle.high for candle in candles]), np.maximum)

    def funding(self, entries: Integers, exits: Integers) -> Floats:
        """Return the sum of the hourly rates due after each entry up to its exit."""
        last = len(self._funding) - 1
        found: Floats = (
            self._funding[np.minimum(exits // self._per_hour, last)]
            - self._funding[np.minimum(entries // self._per_hour, last)]
        )
        return found

    def worst_ratios(self, length: int) -> tuple[float, float]:
        """Return the deepest fall and the highest rise from an open within so many candles, as price ratios."""
        first = np.arange(self.count - 1)
        last = np.minimum(first + length, self.count)
        falls, rises = self.lowest(first, last) / self.open[first], self.highest(first, last) / self.open[first]
        return float(falls.min()), float(rises.max())

    def lowest(self, entries: Integers, exits: Integers) -> Floats:
        """Return the lowest price in the candles [entry, exit)."""
        return _extreme(self._lows, entries, exits, np.minimum)

    def highest(self, entries: Integers, exits: Integers) -> Floats:
        """Return the highest price in the candles [entry, exit)."""
        return _extreme(self._highs, entries, exits, np.maximum)


def _tables(values: Floats, choose: Any) -> list[Floats]:
    """Return the extremes of every stretch of 1, 2, 4, 8, … candles, by its first candle."""
    tables = [values]
    while 2 ** len(tables) <= len(values):
        width = 2 ** (len(tables) - 1)
        tables.append(choose(tables[-1][:-width], tables[-1][width:]))
    return tables


def _extreme(tables: Sequence[Floats], entries: Integers, exits: Integers, choose: Any) -> Floats:
    """Return the extreme of each stretch, which two of the known ones cover."""
    found = np.empty(entries.shape)
    levels = np.log2(exits - entries).astype(np.int64)
    for level in np.unique(levels):
        chosen = levels == level
        table = tables[level]
        found[chosen] = choose(table[entries[chosen]], table[exits[chosen] - 2**level])
    return found


class Luck(NamedTuple):
    """The returns of the random traders, and the model's return by its completed trades, in percent.

    `quantile_percent` is the part of them that made less (ties count half); `p_value` the chance that one who only
    guesses makes as much as the model.
    """

    trades: int
    return_percent: float
    quantile_percent: float
    p_value: float
    low_percent: float
    median_percent: float
    high_percent: float


def try_luck(
    trades: Sequence[OwnTrade], prices: Mapping[str, Prices], costs: Mapping[str, Costs], step: timedelta, seed: int
) -> Luck | str:
    """Return what luck makes of the same trades, or why it cannot be said."""
    known = [trade for trade in trades if trade.symbol in prices and prices[trade.symbol].count > 1]
    if len(known) < TRADES_MIN:
        return f"{len(known)} completed trades; a comparison with luck needs {TRADES_MIN}"
    rng = np.random.default_rng(seed)
    totals = np.zeros(TRADERS)
    for symbol in sorted({trade.symbol for trade in known}):
        own = [trade for trade in known if trade.symbol == symbol]
        for start in range(0, TRADERS, chunk := max(1, _CHUNK // len(own))):
            drawn = draw(own, prices[symbol].count, step, min(chunk, TRADERS - start), rng)
            gains = gains_of(own, drawn, prices[symbol], costs[symbol])
            totals[start : start + chunk] += np.log(np.maximum(1 + gains, _RUIN)).sum(axis=1)
    model = sum(float(np.log(max(1 + trade.gain, _RUIN))) for trade in known)
    low, middle, high = (percent(float(value)) for value in np.quantile(totals, [0.025, 0.5, 0.975]))
    below, same = int(np.sum(totals < model)), int(np.sum(totals == model))
    return Luck(
        trades=len(known),
        return_percent=percent(model),
        quantile_percent=100 * (below + same / 2) / TRADERS,
        p_value=(TRADERS - below + 1) / (TRADERS + 1),
        low_percent=low,
        median_percent=middle,
        high_percent=high,
    )


class Drawn(NamedTuple):
    """Random traders: which of the model's trades each makes in which order, and its entry and exit candles."""

    order: Integers
    entries: Integers
    exits: Integers


def draw(trades: Sequence[OwnTrade], candles: int, step: timedelta, traders: int, rng: np.random.Generator) -> Drawn:
    """Place the trades of one market in random order at random moments, so that no two of a trader overlap."""
    lengths = np.array([max(1, round(trade.held / step)) for trade in trades])
    room = candles - 1  # the last exit is at the open of the last candle
    if lengths.sum() > room:  # rounded up to whole candles they do not fit: every one is a little shorter
        lengths = np.maximum(1, lengths * room // lengths.sum())
    order = np.argsort(rng.random((traders, len(trades))), axis=1)
    drawn = lengths[order]
    before = np.cumsum(drawn, axis=1) - drawn
    free = max(0, room - int(lengths.sum()))
    entries = np.sort(rng.integers(0, free + 1, (traders, len(trades))), axis=1) + before
    entries = np.minimum(entries, room - 1)
    return Drawn(order, entries, np.minimum(entries + drawn, room))


def gains_of(trades: Sequence[OwnTrade], drawn: Drawn, prices: Prices, costs: Costs) -> Floats:
    """Return what each trade of each trader made, in parts of its equity before the trade."""
    sides = np.array([1.0 if trade.is_long else -1.0 for trade in trades])[drawn.order]
    sizes = np.array([trade.size for trade in trades])[drawn.order]
    entry = prices.open[drawn.entries] * (1 + sides * HALF_SPREAD)
    ratio = prices.open[drawn.exits] * (1 - sides * HALF_SPREAD) / entry
    fees = costs.taker_rate * (1 + ratio)
    gains: Floats = sizes * (sides * (ratio - 1 - prices.funding(drawn.entries, drawn.exits)) - fees)
    _liquidate(gains, sides, sizes, entry, drawn, prices, costs)
    return gains


def _liquidate(
    gains: Floats, sides: Floats, sizes: Floats, entry: Floats, drawn: Drawn, prices: Prices, costs: Costs
) -> None:
    """Replace the gains of the trades whose equity met the maintenance margin on the way.

    With size s in parts of equity, side d and price ratio x the account is liquidated at
    1 + s·d·(x − 1) − fee = m·s·x; it leaves there, and pays the liquidation fee as far as its equity reaches.
    """
    maintenance = costs.maintenance_rate
    threshold = (1 - costs.taker_rate * sizes - sides * sizes) / (sizes * (maintenance - sides))
    fall, rise = prices.worst_ratios(int((drawn.exits - drawn.entries).max()))
    slack = 1 + HALF_SPREAD
    at_risk = np.where(sides > 0, threshold >= fall / slack, threshold <= rise * slack)
    for side, reached in ((1.0, prices.lowest), (-1.0, prices.highest)):
        rows = np.flatnonzero(at_risk & (sides == side))
        if not len(rows):
            continue
        ratio = reached(drawn.entries.ravel()[rows], drawn.exits.ravel()[rows]) / entry.ravel()[rows]
        left = threshold.ravel()[rows]
        is_hit = ratio <= left if side > 0 else ratio >= left
        rows, left = rows[is_hit], left[is_hit]
        size = sizes.ravel()[rows]
        equity = maintenance * size * left
        fees = (costs.taker_rate + costs.liquidation_rate) * size * left
        gains.ravel()[rows] = np.maximum(equity - fees, 0) - 1
