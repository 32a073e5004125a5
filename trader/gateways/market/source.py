"""What a source of market data is."""

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from trader.clock import Clock
from trader.domain.market.markets import Candle, Interval, Market, Tick


class MarketSource(Protocol):
    """A venue, a simulation of one, or a recording of one.

    `open` comes first: until then only `name` means anything. It raises `MarketDataError` or `StartError` when the
    source can never work (a broken file, a market it does not have), never because a venue does not answer now.
    """

    @property
    def name(self) -> str:
        """`venue`, `synthetic` or `replay`."""
        ...

    @property
    def identity(self) -> str:
        """What a database filled from this source holds; two sources of one identity tell the same story."""
        ...

    @property
    def markets(self) -> Mapping[str, Market]: ...

    @property
    def ends_at(self) -> datetime | None:
        """The moment of the last tick there will ever be; None for a source without an end."""
        ...

    def trouble(self, symbol: str) -> str | None:
        """Why a market has no price to trade on now, though the source is up; None when it has one."""
        ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def clock(self, resume_at: datetime | None) -> Clock:
        """The clock this source is followed by. `resume_at` is where an earlier process left off."""
        ...

    def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        """Every tick later than `after`, each when its time has come (`clock.lead`). Waits when there are no more.

        Raises `MarketDataError`, `OSError` or `TimeoutError` when the source fails; the caller asks again.
        """
        ...

    def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        """The ticks of (after, until], as far as they are known: for what was missed.

        A source of its own making gives the very ticks that it would have pushed; a venue knows only its candles, and
        gives their path. Raises as `ticks` does.
        """
        ...

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        """The closed candles with `start <= open_time` and `open_time + interval <= end`, ascending.

        Raises as `ticks` does, and `MarketUnavailable` for a market that the source does not have.
        """
        ...

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        """The hourly rate due at `boundary`, a whole hour; longs pay a positive one."""
        ...
