"""The protocol of market data sources."""

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from decimal import Decimal
from hashlib import sha256
from typing import Protocol, runtime_checkable

import msgspec

from trader.clock import Clock
from trader.domain.market.markets import Candle, Interval, Market, Tick


class MarketSource(Protocol):
    """Market data of a venue, of a simulation, or of a recording.

    `open` comes first: until then only `name` is valid. It raises `MarketDataError` or `StartError` when the
    source can never work (a broken file, a market it does not have), never because a venue does not respond now.
    """

    @property
    def name(self) -> str:
        """`venue`, `synthetic` or `replay`."""
        ...

    @property
    def identity(self) -> str:
        """Names the price history of this source: a database never mixes two identities."""
        ...

    @property
    def markets(self) -> Mapping[str, Market]: ...

    @property
    def ends_at(self) -> datetime | None:
        """The time of the last tick; None for a source without an end."""
        ...

    def trouble(self, symbol: str) -> str | None:
        """Return why a market has no price to trade on though the source is up; None when it has one."""
        ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def clock(self, resume_at: datetime | None) -> Clock:
        """Return the clock for this source. `resume_at` is where an earlier process left off."""
        ...

    def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        """Yield every tick later than `after`, each at its time (`clock.lead`). Waits when there are no more.

        Raises `MarketDataError`, `OSError` or `TimeoutError` when the source fails; the caller calls again.
        """
        ...

    def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        """Yield the known ticks of (after, until], to catch up after a downtime.

        Simulations and recordings yield the ticks that `ticks` yields; a venue has only its candles
        and yields their path. Raises as `ticks` does.
        """
        ...

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        """Return the closed candles with `start <= open_time` and `open_time + interval <= end`, ascending.

        Raises as `ticks` does, and `MarketUnavailable` for a market that the source does not have.
        """
        ...

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        """Return the hourly rate due at `boundary`, a whole hour; longs pay a positive one."""
        ...

    def open_interest(self, symbol: str) -> Decimal | None:
        """Return the notional of all open positions in a market, in quote currency; None when it is not known."""
        ...


class Seed(msgspec.Struct, frozen=True):
    """The seed of a simulated market. Together with the recording it reveals future prices."""

    value: int
    is_secret: bool = False

    @property
    def digest(self) -> str:
        """The hexadecimal SHA-256 of the decimal number, which can be published before the seed."""
        return sha256(str(self.value).encode()).hexdigest()

    @property
    def name(self) -> str:
        """Public name of the seed: the number, or the digest of a secret one."""
        return f"sha256:{self.digest}" if self.is_secret else str(self.value)


@runtime_checkable
class SeededSource(MarketSource, Protocol):
    """A source that draws unknown prices at random from a seed.

    Its identity ends with the name of the seed. Until it has one, only `open`, `identity` and `close` are valid.
    """

    @property
    def seed(self) -> Seed | None: ...

    def use_seed(self, seed: Seed) -> None:
        """Set the seed of all draws."""
        ...
