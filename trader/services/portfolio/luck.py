"""Luck: compares models with random traders, one model after the other in a thread, and keeps the results."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Final, NamedTuple

from trader.clock import ceil_time, floor_time
from trader.domain.market.markets import INTERVALS, Candle, Interval
from trader.domain.portfolio.intervals import TRADES_MIN
from trader.domain.portfolio.luck import Costs, Luck, OwnTrade, Prices, try_luck
from trader.errors import MarketUnavailable
from trader.logs import log_bug
from trader.services.exchange.protocol import rules_of
from trader.services.market.feed import MarketFeed
from trader.services.portfolio.run_statistics import RunStatistics
from trader.settings import Settings
from trader.store.exchange.trades import RunTrade

NEW_TRADES_SHARE: Final = 0.05
"""Share of new trades from which a result is made again: of two thousand a few change nothing."""

COMPUTING: Final = "the random traders are being computed; ask again in a while"

_STEPS: Final[Sequence[tuple[timedelta, Interval]]] = ((timedelta(days=4), "1m"), (timedelta(days=20), "5m"))
_LONG_STEP: Final[Interval] = "15m"
"""The candles of a period: of a long one coarser, so that a venue can deliver them."""

_HOUR: Final = timedelta(hours=1)


class LuckRequest(NamedTuple):
    """The trades of an entrant, in order of closing, within [start, end), and what its account was worth at `start`."""

    run: RunStatistics
    trades: Sequence[RunTrade]
    start: datetime
    end: datetime
    start_value: Decimal


class LuckTable:
    """The results by entrant. A missing one is computed after it was first asked for."""

    def __init__(self, market: MarketFeed, settings: Settings) -> None:
        self._market = market
        self._seed = settings.seed
        self._rules = rules_of(settings, market.markets)
        self._results: dict[str, tuple[int, Luck | str]] = {}
        self._waiting: dict[str, LuckRequest] = {}
        self._prices: dict[tuple[str, Interval, datetime, datetime], Prices] = {}
        self._task: asyncio.Task[None] | None = None

    def result(self, key: str, request: LuckRequest) -> Luck | str:
        """Return the comparison of an entrant with luck, or why there is none (yet)."""
        count = len(request.trades)
        if count < TRADES_MIN:
            return f"{count} completed trades; a comparison with luck needs {TRADES_MIN}"
        known = self._results.get(key)
        if known is None or not known[0] <= count < max(known[0] + 1, (1 + NEW_TRADES_SHARE) * known[0]):
            self._waiting[key] = request
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._work(), name="comparison with luck")
                self._task.add_done_callback(log_bug)
        return COMPUTING if known is None else known[1]

    async def settle(self) -> None:
        """Wait until all that was asked for is computed."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Stop computing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _work(self) -> None:
        while self._waiting:
            key = next(iter(self._waiting))
            request = self._waiting.pop(key)
            began_s = time.monotonic()
            try:
                found = await self._compute(key, request)
            except MarketUnavailable as error:
                found = f"the candles of the period are not available now: {error}"
            self._results[key] = len(request.trades), found
            await asyncio.sleep(time.monotonic() - began_s)  # half of the time is left to what cannot wait
        self._prices.clear()

    async def _compute(self, key: str, request: LuckRequest) -> Luck | str:
        start, end = floor_time(request.start, _HOUR), floor_time(request.end, _HOUR)
        interval = next((name for span, name in _STEPS if end - start <= span), _LONG_STEP)
        prices = {
            symbol: await self._load(symbol, interval, start, end)
            for symbol in sorted({trade.symbol for trade in request.trades} & self._rules.markets.keys())
        }
        costs = {
            symbol: Costs(
                float(self._rules.taker_rate),
                float(self._rules.markets[symbol].maintenance_rate),
                float(self._rules.liquidation_rate),
                float(self._rules.markets[symbol].leverage_max),
            )
            for symbol in prices
        }
        digest = blake2b(f"{self._seed}:{key}:{len(request.trades)}".encode(), digest_size=8).digest()
        seed, step = int.from_bytes(digest), INTERVALS[interval]
        return await asyncio.to_thread(lambda: try_luck(own_trades(request), prices, costs, step, seed))

    async def _load(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> Prices:
        key = (symbol, interval, start, end)
        if key not in self._prices:
            candles = await self._market.past_candles(symbol, interval, start, end)
            hours = (end - start) // _HOUR
            funding = [float(self._market.funding_rate(symbol, start + n * _HOUR)) for n in range(1, hours + 1)]
            self._prices[key] = Prices(filled(candles, start, end, INTERVALS[interval]), INTERVALS[interval], funding)
        return self._prices[key]


def own_trades(request: LuckRequest) -> list[OwnTrade]:
    """Return the trades in parts of the equity; those of one position are one, held as long on average."""
    parts: dict[tuple[str, datetime, bool], list[RunTrade]] = {}
    for trade in request.trades:
        parts.setdefault((trade.symbol, trade.opened_at, trade.is_long), []).append(trade)
    found = []
    for (symbol, opened_at, is_long), group in parts.items():
        equity = request.run.start_value(opened_at)
        notional = sum((trade.entry_notional for trade in group), Decimal(0))
        if equity <= 0 or opened_at < request.start:
            continue
        weighted = sum(
            ((trade.closed_at - opened_at) * float(trade.entry_notional / notional) for trade in group), timedelta(0)
        )
        gain = sum((trade.net_pnl for trade in group), Decimal(0))
        found.append(OwnTrade(symbol, is_long, float(notional / equity), float(gain / request.start_value), weighted))
    return found


def filled(candles: Sequence[Candle], start: datetime, end: datetime, step: timedelta) -> list[Candle]:
    """Return one candle for each step of [start, end); a missing one stays at the last close. None without any."""
    known: Mapping[datetime, Candle] = {candle.open_time: candle for candle in candles}
    found: list[Candle] = []
    for number in range((end - ceil_time(start, step)) // step):
        at = start + number * step
        candle = known.get(at)
        if candle is None:
            price = found[-1].close if found else candles[0].open if candles else 0.0
            candle = Candle(at, price, price, price, price, 0.0)
        found.append(candle)
    return found if candles else []
