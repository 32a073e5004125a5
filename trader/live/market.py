"""State of one market from a venue's stream: book, summary, funding rates, and whether its price is tradable. No I/O.

A price is held back, and `trouble` says why, while the book is missing, incomplete or silent, and while the mid or the
mark is an outlier: more than 5 % from both its last good value and the venue's index.
"""

import logging
from datetime import datetime, timedelta
from decimal import Decimal
from math import isfinite
from typing import Final, NamedTuple

import msgspec

from trader.core.clock import floor_time
from trader.core.errors import MarketDataError
from trader.live.book import BookChange, StreamedBook
from trader.market.domain.markets import STALE_AFTER, Candle, Market, Quote, untimely

logger = logging.getLogger(__name__)

OUTLIER: Final = Decimal("0.05")
SILENCE_MAX: Final = timedelta(seconds=10)
"""Resubscribe to a book that is silent this long: the market may be quiet, or the stream cut off."""

_RESUBSCRIBE_AFTER: Final = timedelta(seconds=1)
"""Minimum interval between resubscriptions to a broken book."""

_REPEAT_AFTER: Final = timedelta(seconds=1)
"""Republish an unchanged price this often while the stream is alive."""

_HOUR: Final = timedelta(hours=1)
_RATES_MAX: Final = 20_000


class Listing(msgspec.Struct, frozen=True):
    """A market as the venue lists it, by its number there."""

    market_id: int
    market: Market
    is_active: bool


def candle_of(at: datetime, opened: float, high: float, low: float, close: float, volume: float) -> Candle | None:
    """Return a candle; None for one without trades or with impossible values."""
    prices = (opened, high, low, close)
    if not all(isfinite(number) for number in (*prices, volume)) or min(prices) <= 0 or volume < 0:
        return None
    if not low <= min(opened, close) <= max(opened, close) <= high:
        return None
    return Candle(at, *prices, volume)


class MarketSummary(NamedTuple):
    """A venue's summary of a market. `next_rate` is the estimate of the next hourly funding rate, a fraction of the
    notional that longs pay if it is positive; `open_interest` is in quote currency.
    """

    mark: Decimal
    oracle: Decimal
    next_rate: Decimal | None = None
    open_interest: Decimal | None = None


class VenueMarket:
    """One market as the stream reports it. `trouble` says why there is no price to trade on."""

    def __init__(self, symbol: str, market_id: int) -> None:
        self.symbol = symbol
        self.market_id = market_id
        self.trouble: str | None = None
        self.rates: dict[datetime, Decimal] = {}
        self.next_rate: Decimal | None = None
        self._book = StreamedBook()
        self._book_at: datetime | None = None
        self._book_lag = timedelta(0)
        self._book_fault = "its order book has not arrived yet"
        self._stats: MarketSummary | None = None
        self._stats_at: datetime | None = None
        self._subscribed_at: datetime | None = None
        self._is_broken = False
        self._has_changed = False
        self._last: Quote | None = None

    @property
    def open_interest(self) -> Decimal | None:
        """The notional of all open positions, from the last summary."""
        notional = None if self._stats is None else self._stats.open_interest
        return notional if notional is not None and notional.is_finite() and notional >= 0 else None

    # Messages

    def disconnect(self) -> None:
        """Empty the book: the stream has ended, and the next one starts with a snapshot."""
        self._book.clear()
        self._book_at = self._subscribed_at = None
        self._is_broken = False
        self._book_fault = "its order book has not arrived yet"

    def on_book(self, change: BookChange, now: datetime, sent_at: datetime | None, *, is_snapshot: bool) -> None:
        """Apply a book message. Raise `MarketDataError` when the book is broken; it is then requested again."""
        try:
            if is_snapshot:
                self._book.replace(change)
            else:
                self._book.change(change)
        except MarketDataError as error:
            self.lose_book(error)
            raise
        if is_snapshot:
            self._is_broken = False
        self._book_lag = now - sent_at if sent_at is not None else timedelta(0)
        self._book_at = now if self._book_lag <= STALE_AFTER else sent_at
        self._has_changed = True

    def lose_book(self, error: MarketDataError) -> None:
        """Empty the book after a message that cannot be applied."""
        self._book.clear()
        self._book_at, self._book_fault, self._is_broken = None, f"its order book is requested again: {error}", True

    def on_whole_book(self, book: BookChange, now: datetime) -> None:
        """Apply a polled book. Discard an impossible one and raise `MarketDataError`."""
        self._book.replace(book)
        self._book_at, self._book_lag, self._has_changed = now, timedelta(0), True

    def on_summary(self, summary: MarketSummary, now: datetime) -> None:
        """Apply a summary. Keep the last one and raise `MarketDataError` if it is impossible."""
        if not all(price.is_finite() and price > 0 for price in summary[:2]):
            raise MarketDataError(f"mark {summary.mark} and index {summary.oracle} are impossible")
        self._stats, self._stats_at, self._has_changed = summary, now, True
        if summary.next_rate is not None and summary.next_rate.is_finite():
            self.next_rate = summary.next_rate

    def record_rate(self, at: datetime, rate: Decimal) -> None:
        """Record the hourly rate that was due at the whole hour of `at`."""
        self.rates[floor_time(at, _HOUR)] = rate
        if len(self.rates) > _RATES_MAX:
            del self.rates[min(self.rates)]

    # Prices

    def claim_subscription(self, now: datetime) -> bool:
        """Return whether the book's subscription or resubscription is due, and mark it as done."""
        patience = _RESUBSCRIBE_AFTER if self._is_broken else SILENCE_MAX
        if self._subscribed_at is not None and now - self._subscribed_at < patience:
            return False
        if self._book.is_whole and self._book_at is not None and now - self._book_at < SILENCE_MAX:
            return False
        self._subscribed_at = now
        return True

    def quote(self, now: datetime) -> Quote | None:
        """Return the current price if it is tradable, and is new or was not published for a second."""
        best = self._book.best
        mark = self._mark_or_trouble(now, best)
        self._set_trouble(mark if isinstance(mark, str) else None)
        if best is None or isinstance(mark, str):
            return None
        if not self._has_changed and self._last is not None and now - self._last.at < _REPEAT_AFTER:
            return None
        self._has_changed = False
        self._last = self._book.quote(self.symbol, now, best, mark)
        return self._last

    def _mark_or_trouble(self, now: datetime, best: tuple[Decimal, Decimal] | None) -> Decimal | str:
        """Return the mark for the best prices, or why they are held back."""
        if best is None or self._book_at is None:
            return "a side of its order book is empty" if self._book.is_whole else self._book_fault
        if self._book_lag > STALE_AFTER:
            late_s = self._book_lag.total_seconds()
            return f"its prices are {late_s:.0f} s old when they arrive, or the clock of this machine is wrong"
        if now - self._book_at > SILENCE_MAX:
            return f"its order book was silent for {SILENCE_MAX.total_seconds():.0f} s"
        mid = (best[0] + best[1]) / 2
        is_fresh = self._stats_at is not None and untimely(self._stats_at, now) is None
        stats = self._stats if is_fresh else None
        mark, index = (mid, None) if stats is None else stats[:2]
        last = self._last if self._last is not None and not self._last.is_stale(now) else None
        before = (None, None) if last is None else ((last.bid + last.ask) / 2, last.mark)
        for name, price, earlier in (("price", mid, before[0]), ("mark", mark, before[1])):
            if (finding := outlier(price, earlier, index)) is not None:
                return f"its {name} {price} is an outlier: {finding}"
        return mark

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble is not None and self.trouble is None:
            logger.warning("%s is not priced: %s", self.symbol, trouble)
        elif trouble is None and self.trouble is not None:
            logger.info("%s is priced again", self.symbol)
        self.trouble = trouble


def outlier(price: Decimal, before: Decimal | None, index: Decimal | None) -> str | None:
    """Return why a price is an outlier: more than 5 % from both its last value and the index, where known."""
    known = {"from the last": before, "from the index": index}
    away = {name: abs(price / other - 1) for name, other in known.items() if other is not None}
    if not away or any(distance <= OUTLIER for distance in away.values()):
        return None
    return " and ".join(f"{distance:.1%} {name}" for name, distance in away.items())
