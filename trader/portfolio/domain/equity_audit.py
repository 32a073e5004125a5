"""Audit of equity: compares the recorded hours with the ledger and with the market's prices."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, NamedTuple

from trader.core.clock import floor_time, iso
from trader.core.money import ZERO, format_decimal
from trader.exchange.domain.audit import LedgerEntry
from trader.exchange.domain.orders import Fill
from trader.portfolio.domain.histories import HourlyValue

_HOUR: Final = timedelta(hours=1)

PRICE_TOLERANCE: Final = Decimal("0.01")
"""How far a mark may lie outside the candles of its hour and the previous one, as a fraction."""


class CandleExtremes(NamedTuple):
    """The lowest and the highest price of a market around a moment."""

    low: Decimal
    high: Decimal


RangeOf = Callable[[str, datetime], CandleExtremes | None]
"""Return the range of a market around a moment; None without a candle."""


MoveOver = Callable[[datetime, datetime], Decimal | None]
"""Return the largest move of any market between two moments, as a fraction; None without a candle."""


class EquityMismatch(NamedTuple):
    """An equity outside of what ledger and market allow; `low` and `high` are equal without a position."""

    at: datetime
    equity: Decimal
    low: Decimal
    high: Decimal

    def __str__(self) -> str:
        limits = format_decimal(self.low) if self.low == self.high else f"{self.low:.2f} to {self.high:.2f}"
        return f"equity at {iso(self.at)} is {format_decimal(self.equity)}, and {limits} by the ledger and the market"


class _Books(NamedTuple):
    """The state of a ledger at a moment: the account's value without its positions, and its signed positions."""

    base: Decimal
    held: Mapping[str, Decimal]

    def worth(self, at: datetime, range_of: RangeOf) -> CandleExtremes | None:
        """Return the lowest and the highest possible value of the account; None if a price is unknown."""
        low = high = self.base
        for symbol, quantity in self.held.items():
            prices = range_of(symbol, at)
            if prices is None:
                return None
            least, most = prices.low * (1 - PRICE_TOLERANCE), prices.high * (1 + PRICE_TOLERANCE)
            ends = sorted((quantity * least, quantity * most))
            low, high = low + ends[0], high + ends[1]
        return CandleExtremes(low, high)


def compare_with_books(
    capital: Decimal, entries: Iterable[LedgerEntry], hours: Iterable[HourlyValue], range_of: RangeOf
) -> Iterator[EquityMismatch]:
    """Yield the hours of a run whose equity contradicts the ledger up to its sequence, by which entries are ordered.

    Without positions equity must match exactly; with positions it must lie in the range that the candles allow.
    """
    sequences, states = zip(*_states(capital, entries), strict=True)
    for hour in hours:
        worth = states[bisect_right(sequences, hour.sequence) - 1].worth(hour.last_at, range_of)
        if worth is not None and not worth.low <= hour.last <= worth.high:
            yield EquityMismatch(hour.last_at, hour.last, *worth)


def _states(capital: Decimal, entries: Iterable[LedgerEntry]) -> Iterator[tuple[int, _Books]]:
    """Yield the state of the ledger before all entries and after each of them."""
    base, held = capital, defaultdict[str, Decimal](lambda: ZERO)
    yield 0, _Books(base, {})
    for entry in entries:
        if isinstance(entry, Fill):
            signed = entry.side.direction * entry.quantity
            base -= signed * entry.price + entry.fee + entry.liquidation_fee
            held[entry.symbol] += signed
        else:
            base += entry.amount
        yield entry.sequence, _Books(base, {symbol: quantity for symbol, quantity in held.items() if quantity})


def compare_with_marks(
    capital: Decimal, hours: Iterable[HourlyValue], least_leverage: float, move_over: MoveOver
) -> Iterator[str]:
    """Yield the hours of a baseline, which has no ledger, that contradict the market.

    Starting from `capital`, its equity may move from hour to hour by at most its leverage times the largest move of any
    market. `least_leverage` allows for a rule agent's positions of less than a minute, which no snapshot shows.
    """
    before: HourlyValue | None = None
    for hour in hours:
        equity = capital if before is None else before.last
        move = move_over(hour.last_at if before is None else before.last_at, hour.last_at)
        leverages = [each.leverage for each in (before, hour) if each is not None]
        known = [leverage for leverage in leverages if leverage is not None]
        if move is not None and len(known) == len(leverages) and equity > 0:
            largest = Decimal(max(least_leverage, *known)) * (move + PRICE_TOLERANCE)
            change = hour.last / equity - 1
            if abs(change) > largest:
                yield (
                    f"equity at {iso(hour.last_at)} is {format_decimal(hour.last)}, {100 * change:+.2f} % from "
                    f"{format_decimal(equity)}; the market and its leverage allow {100 * largest:.2f} %"
                )
        before = hour


class HourlyCandles:
    """The lowest and the highest prices of each market and hour.

    A service records the minutes of all markets in order, and after a start it first records those that it missed.
    Until then the latest hours are incomplete, so a moment at or after `known_until` has no range.
    """

    def __init__(self, candles: Iterable[tuple[str, datetime, float, float]], known_until: datetime) -> None:
        """Take (symbol, hour, low, high) tuples."""
        self._hours: defaultdict[str, dict[datetime, CandleExtremes]] = defaultdict(dict)
        self._known_until = known_until
        for symbol, hour, low, high in candles:
            self._hours[symbol][hour] = CandleExtremes(Decimal(low), Decimal(high))

    def range_of(self, symbol: str, at: datetime) -> CandleExtremes | None:
        """Return the range of a market in the hour of a moment and the previous one, as marks may be that old."""
        return self._range(symbol, at - _HOUR, at)

    def move_over(self, start: datetime, end: datetime) -> Decimal | None:
        """Return the largest move of any market between the hours of two moments, as a fraction."""
        ranges = [self._range(symbol, start - _HOUR, end) for symbol in self._hours]
        return max((each.high / each.low - 1 for each in ranges if each is not None), default=None)

    def _range(self, symbol: str, start: datetime, end: datetime) -> CandleExtremes | None:
        if end >= self._known_until:
            return None
        hours, first = self._hours[symbol], floor_time(start, _HOUR)
        asked = (first + number * _HOUR for number in range((end - first) // _HOUR + 1))
        known = [hours[hour] for hour in asked if hour in hours]
        return CandleExtremes(min(each.low for each in known), max(each.high for each in known)) if known else None
