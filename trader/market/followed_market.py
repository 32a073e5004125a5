"""Followed market: the prices that the leader sees, as a market source for read-only processes."""

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from types import MappingProxyType

import msgspec

from trader.core.clock import Clock, LockstepClock, SystemClock
from trader.database.relay import LeaderView, RelayedQuote, RelayReader
from trader.market.domain.markets import Book, Market, Quote, Tick
from trader.market.sources.source import MarketSource


class FollowedMarket:
    """The quotes, troubles and rules that the leader recorded; candles and funding come from the source itself.

    In a recording, time follows the leader second by second.
    """

    def __init__(self, source: MarketSource, relay: RelayReader) -> None:
        self._source = source
        self.history, self.candles, self.funding_rate = source.history, source.candles, source.funding_rate
        self.known_funding_rate, self.open_interest = source.known_funding_rate, source.open_interest
        self._relay = relay
        self.name = source.name
        self.identity = source.identity
        self._rules = dict(source.markets)
        self.markets: Mapping[str, Market] = MappingProxyType(self._rules)
        self._relayed_rules: str | None = None
        self._quotes: dict[str, tuple[RelayedQuote, Quote]] = {}

    @property
    def ends_at(self) -> datetime | None:
        return self._source.ends_at

    def trouble(self, symbol: str) -> str | None:
        """Return why the leader has no price to trade on in a market, or None."""
        view = self._relay.view
        return None if view is None else view.market_troubles.get(symbol)

    async def open(self) -> None:
        """Do nothing: the owner of the source opens and closes it."""

    async def close(self) -> None:
        """Do nothing, like `open`."""

    def clock(self, resume_at: datetime | None) -> Clock:
        clock = self._source.clock(resume_at)
        return clock if isinstance(clock, SystemClock) else LockstepClock(resume_at or clock.now())

    async def ticks(self, clock: Clock, after: datetime) -> AsyncIterator[Tick]:
        while True:
            view = await self._relay.next_view()
            self._take_rules(self._relay.markets)
            if isinstance(clock, LockstepClock):
                await clock.advance_to(view.now)
            quotes = self._changed(view)
            if view.updated_at is not None and quotes:
                yield Tick(view.updated_at, quotes)

    def _take_rules(self, relayed: str | None) -> None:
        if relayed is not None and relayed != self._relayed_rules:
            self._relayed_rules = relayed
            self._rules.update({market.symbol: market for market in msgspec.json.decode(relayed, type=list[Market])})

    def _changed(self, view: LeaderView) -> dict[str, Quote]:
        """Return the new quotes. An unchanged quote stays the same object, so that cached answers remain valid."""
        changed = {}
        for relayed in view.quotes:
            known = self._quotes.get(relayed.symbol)
            if known is None or known[0] != relayed:
                changed[relayed.symbol] = Quote(*relayed, _no_book)
                self._quotes[relayed.symbol] = relayed, changed[relayed.symbol]
        return changed


def _no_book() -> Book:
    raise NotImplementedError("a read-only process has no order books")
