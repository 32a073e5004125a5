"""The protocol of market data sources."""

from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from typing import Protocol, runtime_checkable

import msgspec

from trader.core.clock import Clock
from trader.market.domain.markets import Candle, Interval, Market, Tick


class MarketSource(Protocol):
    """Market data from a venue, a simulation or a recording.

    Call `open` first: until then only `name` is valid. It raises `MarketDataError` or `StartError` if the source can
    never work (a broken file, a market that it lacks), never because a venue is not responding.
    """

    @property
    def name(self) -> str:
        """`venue`, `synthetic` or `replay`."""
        ...

    @property
    def identity(self) -> str:
        """The price history that this source provides: a database never mixes two identities."""
        ...

    @property
    def markets(self) -> Mapping[str, Market]: ...

    @property
    def ends_at(self) -> datetime | None:
        """The time of the last tick; None if the source never ends."""
        ...

    def trouble(self, symbol: str) -> str | None:
        """Return why a market has no price to trade on although the source is up, or None."""
        ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def clock(self, resume_at: datetime | None) -> Clock:
        """Return the clock for this source. `resume_at` is where an earlier process left off."""
        ...

    def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        """Yield every tick after `after`, each at its time (`clock.advance_to`). Wait when there are no more.

        Raise `MarketDataError`, `OSError` or `TimeoutError` if the source fails; the caller then calls again.
        """
        ...

    def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        """Yield the known ticks of (after, until], to catch up after downtime.

        Simulations and recordings yield the same ticks as `ticks`; a venue only has its candles and yields their path.
        Raise like `ticks`.
        """
        ...

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        """Return the closed candles with `start <= open_time` and `open_time + interval <= end`, ascending.

        Raise like `ticks`, and `MarketUnavailable` for a market that the source does not have.
        """
        ...

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        """Return the rate per hour of the market's funding interval that is due at `boundary`, a whole hour.

        Longs pay a positive rate. Zero: nothing is due then.
        """
        ...

    def known_funding_rate(self, symbol: str, boundary: datetime) -> Decimal | None:
        """Return the hourly rate in force at `boundary`, as recorded by the source; None if it has none."""
        ...

    def open_interest(self, symbol: str) -> Decimal | None:
        """Return the notional of all open positions in a market, in quote currency; None if unknown."""
        ...


class QuietSource:
    """What a source answers that needs no opening and knows of no trouble, open interest or recorded funding."""

    async def open(self) -> None:
        """Do nothing: there is nothing to open."""

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def trouble(self, symbol: str) -> str | None:
        return None

    def known_funding_rate(self, symbol: str, boundary: datetime) -> Decimal | None:
        return None

    def open_interest(self, symbol: str) -> Decimal | None:
        return None


@runtime_checkable
class PolledSource(MarketSource, Protocol):
    """A source that does not always push; it is then polled for the next book at an interval."""

    @property
    def refresh_every(self) -> timedelta:
        """The current time between two polls; zero while the source pushes."""
        ...


class Seed(msgspec.Struct, frozen=True):
    """The seed of a simulated market. Together with the recording, it reveals future prices."""

    value: int
    is_secret: bool = False

    @property
    def digest(self) -> str:
        """The hexadecimal SHA-256 of the decimal number, which can be published before the seed."""
        return sha256(str(self.value).encode()).hexdigest()

    @property
    def name(self) -> str:
        """Public name of the seed: the number, or the digest if it is secret."""
        return f"sha256:{self.digest}" if self.is_secret else str(self.value)


@runtime_checkable
class SeededSource(MarketSource, Protocol):
    """A source that draws unknown prices at random from a seed.

    Its identity ends with the seed's name. Until it has a seed, only `open`, `identity` and `close` are valid.
    """

    @property
    def seed(self) -> Seed | None: ...

    def use_seed(self, seed: Seed) -> None:
        """Set the seed of all draws."""
        ...
