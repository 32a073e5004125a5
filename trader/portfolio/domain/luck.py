"""Luck: the results of random traders with the same number, sides, sizes and holding times of trades as a model.

The model's own result is its equity, including open positions: closed trades alone reward traders who never close a
loser. A random trader makes the model's trades of each market in random order at random times of the same period,
without overlap, each with the model's size relative to equity. Random traders enter and exit at the opens of the
candles that the exchange saw, and pay its fees, half of the spread and funding. The positions of all markets share one
margin: each counts in the equity from which the next is sized, an entry is capped at the free margin, and an account
whose equity falls to its maintenance margin loses all positions at once.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.core.intervals import LEVEL, TRADES_MIN, percent
from trader.core.statistics import Floats
from trader.market.domain.markets import Candle

TRADERS: Final = 1_999
"""Minimum number of random traders: 2,000 with the model itself, so that a quantile is a multiple of 0.05 %."""

TRADERS_MAX: Final = 31_999

LOOKS: Final[Sequence[timedelta]] = tuple(timedelta(days=days) for days in (3, 7, 14, 30, 60, 90, 180, 365))
"""Ages at which an entrant is compared with luck: few, because a p value is valid for one look, and each counts."""

HALF_SPREAD: Final = 0.00003
"""Half of the spread as a fraction of the price: 0.3 basis points, the middle of the markets' calm medians."""

_CHUNK: Final = 1_000_000
"""Number of trades computed at once, to keep their tables small."""

_RUIN: Final = 1e-12
"""The remaining equity of an account that lost everything, so that it has a logarithm."""

Integers = NDArray[np.int64]


class OwnTrade(NamedTuple):
    """A position of a model; if still open, it counts as held until the end.

    `size` is its entry notional as a fraction of the equity before it.
    """

    symbol: str
    is_long: bool
    size: float
    held: timedelta


class Costs(NamedTuple):
    """The exchange's terms of one market: fees and maintenance margin per notional, and maximum leverage."""

    taker_rate: float
    maintenance_rate: float
    liquidation_rate: float
    leverage_max: float


class MarketPrices:
    """The candles of one market, without gaps, starting at a whole hour; and the funding rate of each hour."""

    def __init__(self, candles: Sequence[Candle], step: timedelta, funding: Sequence[float]) -> None:
        self.open = np.array([candle.open for candle in candles])
        self.low = np.array([candle.low for candle in candles])
        self.high = np.array([candle.high for candle in candles])
        self.count = len(candles)
        hours = np.arange(self.count) // max(1, timedelta(hours=1) // step)
        self.funded = np.concatenate([[0.0], np.cumsum(funding)])[np.minimum(hours, len(funding))]
        """The sum of the hourly rates that were due up to each candle."""


class Luck(NamedTuple):
    """The returns of the random traders and of the model's equity over `hours`, in percent.

    `quantile_percent` is the share of traders with a lower return (ties count half); `p_value` the probability that a
    guesser does at least as well as the model, at one of `looks`.
    """

    hours: int
    looks: int
    traders: int
    trades: int
    return_percent: float
    quantile_percent: float
    p_value: float
    low_percent: float
    median_percent: float
    high_percent: float

    def corrected_p(self, models: int) -> float:
        """Return the p value corrected for its looks and for the number of models, to control their joint level."""
        return min(1.0, self.p_value * self.looks * max(1, models))


def traders_for(models: int) -> int:
    """Return how many random traders let the best of the models reach half of the level after the correction."""
    return min(TRADERS_MAX, max(TRADERS, math.ceil(2 * len(LOOKS) * models / LEVEL)))


class ComparedPeriod(NamedTuple):
    """The period compared with luck: final over initial equity, after `hours`, at one of `looks`."""

    growth: float
    hours: int
    looks: int = 1


def try_luck(
    trades: Sequence[OwnTrade],
    period: ComparedPeriod,
    prices: Mapping[str, MarketPrices],
    costs: Mapping[str, Costs],
    step: timedelta,
    seed: int,
    traders: int = TRADERS,
) -> Luck | str:
    """Compare a model with random traders, or return why not. All markets have the same number of candles."""
    known = [trade for trade in trades if trade.symbol in prices and prices[trade.symbol].count > 1]
    if len(known) < TRADES_MIN:
        return f"{len(known)} positions; a comparison with luck needs {TRADES_MIN}"
    symbols = sorted({trade.symbol for trade in known})
    own = [[trade for trade in known if trade.symbol == symbol] for symbol in symbols]
    markets = MarketArrays([prices[symbol] for symbol in symbols], [costs[symbol] for symbol in symbols])
    rng = np.random.default_rng(seed)
    parts = []
    for start in range(0, traders, chunk := max(1, _CHUNK // len(known))):
        count = min(chunk, traders - start)
        parts.append(final_equities(own, [draw(each, markets.count, step, count, rng) for each in own], markets))
    totals = np.log(np.maximum(np.concatenate(parts), _RUIN))
    model = math.log(max(period.growth, _RUIN))
    low, middle, high = (percent(float(value)) for value in np.quantile(totals, [0.025, 0.5, 0.975]))
    below, same = int(np.sum(totals < model)), int(np.sum(totals == model))
    return Luck(
        hours=period.hours,
        looks=period.looks,
        traders=traders,
        trades=len(known),
        return_percent=percent(model),
        quantile_percent=100 * (below + same / 2) / traders,
        p_value=(traders - below + 1) / (traders + 1),
        low_percent=low,
        median_percent=middle,
        high_percent=high,
    )


class Drawn(NamedTuple):
    """Random traders: the order in which each makes the model's trades, and its entry and exit candles."""

    order: Integers
    entries: Integers
    exits: Integers


def draw(trades: Sequence[OwnTrade], candles: int, step: timedelta, traders: int, rng: np.random.Generator) -> Drawn:
    """Place the trades of one market in random order at random times, without overlap within a trader."""
    lengths = np.array([max(1, round(trade.held / step)) for trade in trades])
    room = candles - 1  # the last exit is at the open of the last candle
    if lengths.sum() > room:  # rounded up to whole candles they do not fit: shorten each a little
        lengths = np.maximum(1, lengths * room // lengths.sum())
    order = np.argsort(rng.random((traders, len(trades))), axis=1)
    drawn = lengths[order]
    before = np.cumsum(drawn, axis=1) - drawn
    free = max(0, room - int(lengths.sum()))
    entries = np.sort(rng.integers(0, free + 1, (traders, len(trades))), axis=1) + before
    entries = np.minimum(entries, room - 1)
    return Drawn(order, entries, np.minimum(entries + drawn, room))


# Accounts


class MarketArrays:
    """The candles and terms of several markets side by side: markets × candles."""

    def __init__(self, prices: Sequence[MarketPrices], costs: Sequence[Costs]) -> None:
        self.count = min(market.count for market in prices)
        self.open = np.stack([market.open[: self.count] for market in prices])
        self.low = np.stack([market.low[: self.count] for market in prices])
        self.high = np.stack([market.high[: self.count] for market in prices])
        self.funded = np.stack([market.funded[: self.count] for market in prices])
        self.taker = np.array([cost.taker_rate for cost in costs])
        self.maintenance = np.array([cost.maintenance_rate for cost in costs])
        self.liquidation = np.array([cost.taker_rate + cost.liquidation_rate for cost in costs])
        self.leverage = np.array([cost.leverage_max for cost in costs])
        self._swings = self._largest_swings()

    def _largest_swings(self) -> Floats:
        """Return how far any price moved from an open within 1, 2, 4, 8, … candles, as a fraction of the open."""
        low, high, swings = self.low, self.high, []
        while True:
            opens = self.open[:, : low.shape[1]]
            swings.append(float(max((high / opens).max() - 1, 1 - (low / opens).min())))
            width = 2 ** (len(swings) - 1)
            if low.shape[1] <= width:
                return np.array([*swings, np.inf])
            low, high = np.minimum(low[:, :-width], low[:, width:]), np.maximum(high[:, :-width], high[:, width:])

    def swing_within(self, candles: Integers) -> Floats:
        """Return a bound on any price move from an open within a number of candles, as a fraction of the open."""
        levels = np.ceil(np.log2(np.maximum(candles, 1))).astype(np.int64)
        limits: Floats = self._swings[np.minimum(levels, len(self._swings) - 1)]
        return limits


def final_equities(own: Sequence[Sequence[OwnTrade]], drawn: Sequence[Drawn], markets: MarketArrays) -> Floats:
    """Return the final value of each trader's account, as a multiple of its initial value."""
    sizes = [np.array([trade.size if trade.is_long else -trade.size for trade in trades]) for trades in own]
    moments = np.hstack([part for each in drawn for part in (2 * each.exits, 2 * each.entries + 1)])  # exits come first
    wanted = np.hstack(
        [
            part
            for each, size in zip(drawn, sizes, strict=True)
            for part in (np.zeros(each.exits.shape), size[each.order])
        ]
    )
    places = np.repeat(np.arange(len(own)), [2 * len(trades) for trades in own])
    order = np.argsort(moments, axis=1)
    moments, wanted = np.take_along_axis(moments, order, axis=1), np.take_along_axis(wanted, order, axis=1)
    accounts = _Accounts(len(order), markets)
    for number in range(order.shape[1]):
        accounts.move(moments[:, number] // 2)
        accounts.trade(places[order[:, number]], wanted[:, number])
    return accounts.equity


class _Accounts:
    """Accounts that start with a value of 1, each at its own candle: traders × markets."""

    def __init__(self, count: int, markets: MarketArrays) -> None:
        self._markets = markets
        self._rows = np.arange(count)
        self._at = np.zeros(count, dtype=np.int64)
        self._marks, self._funded = markets.open[:, self._at].T, markets.funded[:, self._at].T
        self._quantities = np.zeros((count, len(markets.open)))
        self._notionals = np.zeros_like(self._quantities)
        """The quantities of the entries, negative for short positions."""

        self.equity = np.ones(count)

    def move(self, at: Integers) -> None:
        """Advance every account to a candle, with its profit, its funding, and its liquidation on the way."""
        self._liquidate(at)
        marks, funded = self._markets.open[:, at].T, self._markets.funded[:, at].T
        self.equity += (self._quantities * (marks - self._marks)).sum(axis=1)
        self.equity -= (self._notionals * (funded - self._funded)).sum(axis=1)
        self._at, self._marks, self._funded = at, marks, funded

    def trade(self, places: Integers, sizes: Floats) -> None:
        """Exit the position of one market (size 0), or enter one of this size relative to equity."""
        markets, rows = self._markets, self._rows
        mark, held, sides = self._marks[rows, places], self._quantities[rows, places], np.sign(sizes)
        price = mark * (1 - np.sign(held) * HALF_SPREAD)
        change = held * (price - mark) - markets.taker[places] * np.abs(held) * price
        free = self.equity - (np.abs(self._notionals) / markets.leverage).sum(axis=1)
        notional = np.minimum(np.abs(sizes) * self.equity, free * markets.leverage[places])
        notional = sides * np.maximum(notional, 0)
        price = mark * (1 + sides * HALF_SPREAD)
        is_exit = sizes == 0
        quantity = np.where(is_exit, 0.0, notional / price)
        change = np.where(is_exit, change, quantity * (mark - price) - markets.taker[places] * np.abs(notional))
        self.equity = np.maximum(self.equity + change, 0)
        self._quantities[rows, places], self._notionals[rows, places] = quantity, notional

    def _liquidate(self, at: Integers) -> None:
        """Close all positions of the accounts whose equity falls to the maintenance margin before a candle."""
        markets = self._markets
        exposure = (np.abs(self._quantities) * self._marks).sum(axis=1)
        swing = markets.swing_within(at - self._at)
        needed = swing + markets.maintenance.max() * (1 + swing)  # infinite for more candles than the table covers
        lost = np.multiply(exposure, needed, out=np.zeros_like(exposure), where=exposure > 0)
        for row in np.flatnonzero((lost >= self.equity) & (exposure > 0) & (at > self._at)):
            left = self._left_of(int(row), slice(int(self._at[row]), int(at[row])))
            if left is not None:
                self.equity[row] = left
                self._quantities[row] = self._notionals[row] = 0

    def _left_of(self, row: int, candles: slice) -> float | None:
        """Return the equity after a liquidation within these candles; None without one.

        Prices of different markets mostly move together, so check all of them at their lows, and all at their highs;
        from the open of a candle to these, prices move in a straight line.
        """
        markets, quantities = self._markets, self._quantities[row]
        needed = markets.maintenance * np.abs(quantities)
        margin = quantities - needed  # how the distance between equity and maintenance margin changes with the prices
        base = float(self.equity[row] - quantities @ self._marks[row])
        opens = markets.open[:, candles]
        first, prices = opens.shape[1], None
        for extremes in (markets.low[:, candles], markets.high[:, candles]):
            distance = base + margin @ extremes
            if (distance <= 0).any() and (place := int(np.argmax(distance <= 0))) < first:
                before = max(0.0, float(base + margin @ opens[:, place]))
                part = before / (before - float(distance[place])) if before else 0.0
                first, prices = place, opens[:, place] + part * (extremes[:, place] - opens[:, place])
        if prices is None:
            return None
        fees = float(markets.liquidation * np.abs(quantities) @ prices)
        return max(0.0, base + float(quantities @ prices) - fees)
