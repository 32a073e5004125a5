"""Luck: compares models with random traders, one at a time in a thread, and stores the results."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Final, NamedTuple
from uuid import UUID

from trader.core import tasks
from trader.core.clock import ceil_time, floor_time
from trader.core.errors import MarketUnavailable, Unavailable
from trader.database.pool import Database
from trader.exchange.protocol import rules_of
from trader.market.domain.markets import INTERVALS, Candle, Interval
from trader.market.feed import MarketFeed
from trader.portfolio.domain.luck import (
    LOOKS,
    TRADERS,
    ComparedPeriod,
    Costs,
    Luck,
    MarketPrices,
    OwnTrade,
    traders_for,
    try_luck,
)
from trader.portfolio.run_statistics import RunStatistics
from trader.portfolio.sql.analytics import StoredLuck, select_luck, upsert_luck
from trader.settings.settings import Settings

log = logging.getLogger("trader.portfolio")

PRICES_MAX: Final = 32
"""Number of markets whose candles are cached for the next entrant: 90 days take 0.3 MB each."""

COMPUTING: Final = "the random traders are being computed; ask again in a while"

_STEPS: Final[Sequence[tuple[timedelta, Interval]]] = ((timedelta(days=4), "1m"), (timedelta(days=20), "5m"))
_LONG_STEP: Final[Interval] = "15m"
"""The candle intervals by length of the period: coarser for long ones, so that a venue can deliver them."""

_HOUR: Final = timedelta(hours=1)


LuckKey = tuple[UUID, int, int]
"""A run, an entrant, and the season (0: none)."""


class LuckRequest(NamedTuple):
    """An entrant within [start, end), and its account's value at `start`; `end` is a whole hour."""

    run: RunStatistics
    entrant: int
    start: datetime
    end: datetime
    start_value: Decimal
    looks: int = 1

    @property
    def key(self) -> LuckKey:
        return self.run.run.run_id, self.entrant, self.run.run.season

    @property
    def period(self) -> ComparedPeriod:
        growth = self.run.worth_at(self.end) / self.start_value if self.start_value > 0 else 0
        return ComparedPeriod(float(growth), (self.end - self.start) // _HOUR, self.looks)

    def at_last_look(self) -> "LuckRequest | None":
        """Return the request at the latest comparison age reached; None before the first."""
        looks = [floor_time(self.start + age, _HOUR) for age in LOOKS]
        passed = [look for look in looks if look <= self.end]
        return self._replace(end=passed[-1], looks=len(looks)) if passed else None


class LuckTable:
    """The results by run and entrant, stored in the database. A missing one is computed after its first request."""

    def __init__(self, database: Database, market: MarketFeed, settings: Settings) -> None:
        self._database = database
        self._traders = RandomTraders(market, settings)
        self._is_saving = settings.role != "reader"
        self._results: dict[LuckKey, tuple[int, Luck | str]] = {}
        self._is_read = False
        self._waiting: dict[LuckKey, LuckRequest] = {}
        self._task: asyncio.Task[None] | None = None
        self._count = TRADERS

    async def results(self, requests: Sequence[LuckRequest], models: int) -> list[Luck | str]:
        """Return the comparison of each entrant with luck at its last look, or why there is none (yet).

        The p values are corrected for `models`, the number of entrants of all boards.

        :raises Unavailable: the database cannot answer now
        """
        if not self._is_read:
            await self._read()
        self._count = traders_for(models)
        results = [self._result(request) for request in requests]
        if self._waiting and (self._task is None or self._task.done()):
            self._task = tasks.start(self._work(), "comparison with luck")
        return results

    async def close(self) -> None:
        """Stop computing."""
        await tasks.end(self._task)

    def _result(self, request: LuckRequest) -> Luck | str:
        look = request.at_last_look()
        if look is None:
            return f"{(request.end - request.start) // _HOUR} hours; a comparison with luck needs {LOOKS[0] // _HOUR}"
        if not self._is_current(look):
            self._waiting[look.key] = look
        known = self._results.get(look.key)
        return COMPUTING if known is None else known[1]

    def _is_current(self, look: LuckRequest) -> bool:
        """Return whether the entrant has the result of this look."""
        return look.key in self._results and self._results[look.key][0] == look.period.hours

    async def _read(self) -> None:
        """Read the stored results that are newer than those in memory."""
        async with self._database.connection() as conn:
            for stored in await select_luck(conn):
                key = stored.run_id, stored.entrant, stored.season
                if key not in self._results or self._results[key][0] < stored.luck.hours:
                    self._results[key] = stored.luck.hours, stored.luck
        self._is_read = True

    async def _work(self) -> None:
        try:
            await self._read()  # results of another process
        except Unavailable as error:
            log.warning("Comparisons with luck wait until they are requested again: %s", error)
            return
        while self._waiting:
            request = self._waiting.pop(next(iter(self._waiting)))
            if not self._is_current(request):
                began_s = time.monotonic()
                await self._keep(request, await self._traders.compare(request, self._count))
                await asyncio.sleep(time.monotonic() - began_s)  # leaves half of the time to urgent work

    async def _keep(self, request: LuckRequest, result: Luck | str) -> None:
        self._results[request.key] = request.period.hours, result
        if not self._is_saving or isinstance(result, str):
            return
        try:
            async with self._database.writing() as conn:
                await upsert_luck(conn, StoredLuck(*request.key, result))
        except Unavailable as error:
            log.warning("The comparison of %s with luck is kept in memory only: %s", request.run.run.model_id, error)


class NoLuck:
    """Null object for the comparison with random traders, which needs the candles of the service's market."""

    async def results(self, requests: Sequence[LuckRequest], _models: int) -> list[str]:
        return ["a report has no candles to compare with luck"] * len(requests)


class RandomTraders:
    """Compares entrants with random traders, on the candles of the market."""

    def __init__(self, market: MarketFeed, settings: Settings) -> None:
        self._market = market
        self._seed = settings.seed or 0
        self._rules = rules_of(settings, market.markets)
        self._prices: dict[tuple[str, Interval, datetime, datetime], MarketPrices] = {}

    async def compare(self, request: LuckRequest, traders: int) -> Luck | str:
        """Return the comparison of an entrant with luck, or why there is none."""
        start, end = floor_time(request.start, _HOUR), floor_time(request.end, _HOUR)
        interval = next((name for span, name in _STEPS if end - start <= span), _LONG_STEP)
        own = own_trades(request)
        symbols = sorted({trade.symbol for trade in own} & self._rules.markets.keys())
        try:
            prices = {symbol: await self._load(symbol, interval, start, end) for symbol in symbols}
        except MarketUnavailable as error:
            return f"the candles of the period are not available now: {error}"
        costs = {
            symbol: Costs(
                float(self._rules.fee_rate(symbol, maker=False)),
                float(self._rules.markets[symbol].maintenance_rate),
                float(self._rules.liquidation_rate),
                float(self._rules.markets[symbol].leverage_max),
            )
            for symbol in prices
        }
        key = f"{self._seed}:{request.run.run.model_id}#{request.entrant}:{request.period.hours}"
        seed, step = int.from_bytes(blake2b(key.encode(), digest_size=8).digest()), INTERVALS[interval]
        return await asyncio.to_thread(lambda: try_luck(own, request.period, prices, costs, step, seed, traders))

    async def _load(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> MarketPrices:
        """Return the prices of a period; most entrants in an hour share them."""
        key = (symbol, interval, start, end)
        if key not in self._prices:
            candles = await self._market.past_candles(symbol, interval, start, end)
            hours, step = (end - start) // _HOUR, INTERVALS[interval]
            funding = [float(self._market.funding_rate(symbol, start + n * _HOUR)) for n in range(1, hours + 1)]
            made = await asyncio.to_thread(lambda: MarketPrices(filled(candles, start, end, step), step, funding))
            while len(self._prices) >= PRICES_MAX:
                del self._prices[next(iter(self._prices))]
            self._prices[key] = made
        return self._prices[key]


def own_trades(request: LuckRequest) -> list[OwnTrade]:
    """Return the positions with sizes relative to equity; partial closes are merged, with their mean holding time.

    Inherited positions count from the entrant's start, and open ones until the end.
    """
    parts: dict[tuple[str, datetime, bool], list[tuple[Decimal, datetime]]] = {}
    for trade in request.run.trades:
        if trade.closed_at > request.start and trade.opened_at < request.end:
            key = (trade.symbol, max(trade.opened_at, request.start), trade.is_long)
            parts.setdefault(key, []).append((trade.entry_notional, min(trade.closed_at, request.end)))
    for held in request.run.open:
        if held.opened_at < request.end:
            key = (held.symbol, max(held.opened_at, request.start), held.is_long)
            parts.setdefault(key, []).append((held.entry_notional, request.end))
    own_trades = []
    for (symbol, opened_at, is_long), group in parts.items():
        equity = request.start_value if opened_at == request.start else request.run.worth_at(opened_at)
        notional = sum((part for part, _ in group), Decimal(0))
        if equity <= 0 or notional <= 0:
            continue
        weighted = sum(((until - opened_at) * float(part / notional) for part, until in group), timedelta(0))
        own_trades.append(OwnTrade(symbol, is_long, float(notional / equity), weighted))
    return own_trades


def filled(candles: Sequence[Candle], start: datetime, end: datetime, step: timedelta) -> list[Candle]:
    """Return one candle for each step of [start, end); a missing one repeats the last close. Empty without any."""
    known: Mapping[datetime, Candle] = {candle.open_time: candle for candle in candles}
    filled: list[Candle] = []
    for number in range((end - ceil_time(start, step)) // step):
        at = start + number * step
        candle = known.get(at)
        if candle is None:
            price = filled[-1].close if filled else candles[0].open if candles else 0.0
            candle = Candle(at, price, price, price, price, 0.0)
        filled.append(candle)
    return filled if candles else []
