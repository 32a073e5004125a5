"""What Lighter's stream has told of one market, and whether that makes a price to trade on. No I/O.

A price is held back, and `trouble` says why, while the book is missing, incomplete or silent, and while the mid or the
mark is an outlier: more than 5 % from both its last good value and the venue's index.
"""

import logging
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, TypeVar

import msgspec

from trader.clock import EPOCH, floor_time
from trader.domain.market.markets import STALE_AFTER, Quote, untimely
from trader.errors import MarketDataError
from trader.gateways.lighter.book import BookChange, StreamedBook

logger = logging.getLogger(__name__)

OUTLIER: Final = Decimal("0.05")
SILENCE_MAX: Final = timedelta(seconds=10)
"""A book of which nothing is heard for so long is asked for anew: it may be quiet, or cut off."""

_ASK_AGAIN_AFTER: Final = timedelta(seconds=1)
"""A book that broke is asked for anew at most this often."""

_REPEAT_AFTER: Final = timedelta(seconds=1)
"""A price that has not changed is told again this often while the stream lives."""

_HOUR: Final = timedelta(hours=1)
_RATES_MAX: Final = 20_000
_MILLISECOND: Final = timedelta(milliseconds=1)

T = TypeVar("T")


class MarketStats(msgspec.Struct):
    """The venue's summary of a market. Funding rates are percent of the notional for an hour; longs pay if positive."""

    mark_price: Decimal
    index_price: Decimal
    current_funding_rate: Decimal | None = None
    funding_rate: Decimal | None = None
    funding_timestamp: int = 0


class LighterMarket:
    """One market as the stream tells of it."""

    def __init__(self, symbol: str, market_id: int) -> None:
        self.symbol = symbol
        self.market_id = market_id
        self.trouble: str | None = None
        self.rates: dict[datetime, Decimal] = {}
        self.coming_rate: Decimal | None = None
        self._book = StreamedBook()
        self._book_at: datetime | None = None
        self._book_lag = timedelta(0)
        self._book_fault = "its order book has not come yet"
        self._stats: MarketStats | None = None
        self._stats_at: datetime | None = None
        self._asked_at: datetime | None = None
        self._is_broken = False
        self._is_news = False
        self._last: Quote | None = None

    # What is heard

    def cut(self) -> None:
        """The stream has ended: whatever comes next begins with a snapshot."""
        self._book.clear()
        self._book_at = self._asked_at = None
        self._is_broken = False
        self._book_fault = "its order book has not come yet"

    def hear_book(self, body: bytes, now: datetime, sent_at: datetime | None, *, is_snapshot: bool) -> None:
        """Take a message about the book. Raises `MarketDataError` when the book is broken and asked for anew."""
        try:
            change = _decode(body, _BOOK)
            if is_snapshot:
                self._book.replace(change)
            else:
                self._book.change(change)
        except MarketDataError as error:
            self._book.clear()
            self._book_at, self._book_fault, self._is_broken = None, f"its order book is asked for anew: {error}", True
            raise
        if is_snapshot:
            self._is_broken = False
        self._book_lag = now - sent_at if sent_at is not None else timedelta(0)
        self._book_at = now if self._book_lag <= STALE_AFTER else sent_at
        self._is_news = True

    def hear_stats(self, body: bytes, now: datetime) -> None:
        """Take a summary. Raises `MarketDataError` for one that makes no sense; the last one stays."""
        stats = _decode(body, _STATS)
        if not all(price.is_finite() and price > 0 for price in (stats.mark_price, stats.index_price)):
            raise MarketDataError(f"mark {stats.mark_price} and index {stats.index_price} cannot be")
        self._stats, self._stats_at, self._is_news = stats, now, True
        if stats.current_funding_rate is not None and stats.current_funding_rate.is_finite():
            self.coming_rate = stats.current_funding_rate / 100
        if stats.funding_timestamp and stats.funding_rate is not None and stats.funding_rate.is_finite():
            self.know_rate(EPOCH + stats.funding_timestamp * _MILLISECOND, stats.funding_rate / 100)

    def know_rate(self, at: datetime, rate: Decimal) -> None:
        """Note the hourly rate that was due at the whole hour of `at`."""
        self.rates[floor_time(at, _HOUR)] = rate
        if len(self.rates) > _RATES_MAX:
            del self.rates[min(self.rates)]

    # What follows from it

    def is_to_be_asked_for(self, now: datetime) -> bool:
        """Whether the book is due to be subscribed to, for the first time or again. Then counts as asked for."""
        patience = _ASK_AGAIN_AFTER if self._is_broken else SILENCE_MAX
        if self._asked_at is not None and now - self._asked_at < patience:
            return False
        if self._book.is_whole and self._book_at is not None and now - self._book_at < SILENCE_MAX:
            return False
        self._asked_at = now
        return True

    def quote(self, now: datetime) -> Quote | None:
        """The price of this moment, when there is one to trade on and it is new or was not told for a second."""
        best = self._book.best
        mark = self._judged(now, best)
        self._tell(mark if isinstance(mark, str) else None)
        if best is None or isinstance(mark, str):
            return None
        if not self._is_news and self._last is not None and now - self._last.at < _REPEAT_AFTER:
            return None
        self._is_news = False
        self._last = self._book.quote(self.symbol, now, best, mark)
        return self._last

    def _judged(self, now: datetime, best: tuple[Decimal, Decimal] | None) -> Decimal | str:
        """The mark to go with the best prices, or why they are held back."""
        if best is None or self._book_at is None:
            return "a side of its order book is empty" if self._book.is_whole else self._book_fault
        if self._book_lag > STALE_AFTER:
            late_s = self._book_lag.total_seconds()
            return f"its prices are {late_s:.0f} s old when they come, or the clock of this machine is off"
        if now - self._book_at > SILENCE_MAX:
            return f"nothing was heard of its order book for {SILENCE_MAX.total_seconds():.0f} s"
        mid = (best[0] + best[1]) / 2
        is_fresh = self._stats_at is not None and untimely(self._stats_at, now) is None
        stats = self._stats if is_fresh else None
        mark, index = (mid, None) if stats is None else (stats.mark_price, stats.index_price)
        last = self._last if self._last is not None and not self._last.is_stale(now) else None
        before = (None, None) if last is None else ((last.bid + last.ask) / 2, last.mark)
        for name, price, earlier in (("price", mid, before[0]), ("mark", mark, before[1])):
            if (finding := outlier(price, earlier, index)) is not None:
                return f"its {name} {price} is an outlier: {finding}"
        return mark

    def _tell(self, trouble: str | None) -> None:
        if trouble is not None and self.trouble is None:
            logger.warning("%s is not priced: %s", self.symbol, trouble)
        elif trouble is None and self.trouble is not None:
            logger.info("%s is priced again", self.symbol)
        self.trouble = trouble


def outlier(price: Decimal, before: Decimal | None, index: Decimal | None) -> str | None:
    """Why a price is not to be believed: it is more than 5 % from each thing it can be compared with."""
    known = {"from the last": before, "from the index": index}
    away = {name: abs(price / other - 1) for name, other in known.items() if other is not None}
    if not away or any(distance <= OUTLIER for distance in away.values()):
        return None
    return " and ".join(f"{distance:.1%} {name}" for name, distance in away.items())


def _decode(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise MarketDataError(f"not understood: {error}") from error


_BOOK: Final = msgspec.json.Decoder(BookChange)
_STATS: Final = msgspec.json.Decoder(MarketStats)
