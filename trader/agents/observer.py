"""Observer: builds an agent's view and the guard's risk context from the exchange, the market and past rows."""

import asyncio
import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from trader.agents.domain.call_inputs import CallInputs
from trader.agents.domain.guard import RiskContext
from trader.agents.domain.memory import remember
from trader.agents.domain.models import CYCLE, Model
from trader.agents.domain.observation import (
    RiskFigures,
    RunHistory,
    known_funding,
    opened_a_day_ago,
    opened_at,
)
from trader.agents.domain.view import HISTORY_CANDLES, Memory, ObservedMarket, Shown, VariantLimits, View
from trader.agents.sql.agent_view import (
    select_last_fills,
    select_lowest_equity,
    select_memory,
    select_run_past,
)
from trader.core.clock import floor_time
from trader.core.errors import MarketUnavailable
from trader.core.statistics import EquityPoint
from trader.database.pool import Database
from trader.exchange.domain.account import Account
from trader.exchange.protocol import Exchange
from trader.market.domain.indicators import Indicators, indicators
from trader.market.domain.markets import INTERVALS, Candle, Interval
from trader.market.feed import MarketFeed
from trader.settings.settings import Settings

if TYPE_CHECKING:  # a backtest has no supplier, and needs no client
    from trader.agents.providers.taapi import Taapi

SESSION_INTERVAL: Final[Interval] = "5m"
"""Interval of the candles from which the session VWAP is computed, whatever the interval of the indicators."""

LOOK_INTERVAL: Final[Interval] = "1m"
"""Interval of the candles that tell the price of the minute in which an agent last looked."""

TRADES_SHOWN: Final = 5

_log = logging.getLogger("trader.agents")


class Observer:
    """Builds views and risk contexts."""

    def __init__(
        self,
        database: Database,
        exchange: Exchange,
        market: MarketFeed,
        settings: Settings,
        supplier: "Taapi | None" = None,
    ) -> None:
        self._database = database
        self._exchange = exchange
        self._market = market
        self._supplier = supplier
        self._latency = timedelta(milliseconds=settings.latency_ms)
        self._histories: dict[str, RunHistory] = {}
        self._indicators: dict[
            tuple[str, Interval], tuple[tuple[datetime, datetime | None], tuple[Indicators, ...]]
        ] = {}
        """The indicators at the ends of the last intervals, ascending, with the times of the newest candles."""

        self._computing: defaultdict[tuple[str, Interval], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def view(self, model: Model, shown: Shown, now: datetime) -> View:
        """Return the view on which a model decides."""
        account_id = model.id
        history = await self._read_history(account_id, now)
        memory = await self._read_memory(account_id)
        context = await self.risk_context(account_id, now)
        looked_at = memory.looked_at if model.is_ai else None  # code has no use for the price at that time
        view = await self.view_of(context, history, shown, memory, model.configuration.cadence, looked_at)
        if not shown.fills:
            return view
        async with self._database.connection() as conn:
            fills = await select_last_fills(conn, account_id, history.run_id, shown.fills)
        # Later ones are of orders that the view does not show yet.
        return replace(view, fills=tuple(fill for fill in fills if fill.sequence <= context.account.sequence))

    async def view_of(
        self,
        context: RiskContext,
        history: RunHistory,
        shown: Shown,
        memory: Memory | None = None,
        cadence: timedelta = CYCLE,
        looked_at: datetime | None = None,
    ) -> View:
        """Return the view of the context's account, whose history need not be in the database."""
        markets = {}
        for symbol in self._exchange.markets:
            market = await self._market_view(symbol, shown, context.now, looked_at)
            if market is not None:
                markets[symbol] = market
        return history.view(
            context,
            markets,
            self._exchange.rules,
            stats=history.stats,
            memory=memory or Memory(),
            cadence=cadence,
            restriction=None,
        )

    async def wait_for_price(self, now: datetime) -> None:
        """Wait for the next price of the first market as long as an order would.

        :raises MarketUnavailable: none comes in time
        """
        await self._market.quote_after(next(iter(self._exchange.markets)), now)

    async def risk_context(self, account_id: str, now: datetime) -> RiskContext:
        """Return the guard's risk context at the current marks.

        :raises MarketUnavailable: a market in which the account has a position never had a price
        """
        history = await self._read_history(account_id, now)
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        async with self._database.connection() as conn:
            lowest = await select_lowest_equity(conn, account_id, history.run_id, midnight)
        # Await nothing from here on: the account, the marks and the quotes must be of one moment.
        return self.context_of(self._exchange.account(account_id), history, lowest, now)

    def context_of(self, account: Account, history: RunHistory, lowest: Decimal | None, now: datetime) -> RiskContext:
        """Return the risk context of an account at the current marks. `lowest` is its lowest equity of the day.

        :raises MarketUnavailable: a market in which the account has a position never had a price
        """
        marks, quotes = dict(self._exchange.marks()), self._market.quotes()
        if missing := account.positions.keys() - marks.keys():
            raise MarketUnavailable(f"no price yet of {', '.join(sorted(missing))}, where a position is open")
        return history.risk_context(
            account,
            lowest,
            now,
            marks=marks,
            quoted_at={symbol: quote.at for symbol, quote in quotes.items()},
            leverage_max={symbol: market.leverage_max for symbol, market in self._exchange.markets.items()},
        )

    def record_inputs(
        self, number: int, limits: VariantLimits, context: RiskContext
    ) -> tuple[CallInputs, Callable[[Collection[str], datetime], CallInputs]]:
        """Return the inputs of call `number`, which starts at this moment, and what returns them with the market until
        the exchange has answered it, about some markets at some time."""
        inputs = CallInputs.of(number, limits, self._exchange.rules, self._latency, context)
        quotes, last_update = dict(self._market.quotes()), next(reversed(self._market.recent()), None)

        def answered(symbols: Collection[str], at: datetime) -> CallInputs:
            latest = self._market.recent()
            first = next((n for n, tick in enumerate(latest, 1) if tick is last_update), 0)
            return inputs.answered(symbols, at, quotes, latest[first:], self._market.funding_rate)

        return inputs, answered

    async def indicators(self, symbol: str, interval: Interval, now: datetime) -> tuple[list[Candle], Indicators]:
        """Return the latest closed candles of a market, ascending, and their indicators. Both may be empty."""
        candles, (computed,) = await self._indicators_of(symbol, interval, 1, now)
        return candles, computed

    async def _indicators_of(
        self, symbol: str, interval: Interval, count: int, now: datetime
    ) -> tuple[list[Candle], tuple[Indicators, ...]]:
        """Return the latest closed candles, ascending, and the indicators at the end of the last `count` intervals.

        Concurrent calls compute them once.
        """
        async with self._computing[symbol, interval]:
            return await self._compute_indicators(symbol, interval, count, now)

    async def _compute_indicators(
        self, symbol: str, interval: Interval, count: int, now: datetime
    ) -> tuple[list[Candle], tuple[Indicators, ...]]:
        candles = await self._candles_to_last(symbol, interval, HISTORY_CANDLES + count - 1, now)
        if not candles:
            return [], (Indicators(),) * count
        span, session_span = INTERVALS[interval], INTERVALS[SESSION_INTERVAL]
        earliest = now if count == 1 else candles[-1].open_time + (2 - count) * span
        earlier = (floor_time(now, session_span) - floor_time(earliest, session_span)) // session_span
        session = await self._candles_to_last(symbol, SESSION_INTERVAL, HISTORY_CANDLES + earlier, now)
        newest = (candles[-1].open_time, session[-1].open_time if session else None)
        known = self._indicators.get((symbol, interval))
        computed = known[1] if known is not None and known[0] == newest else ()
        while len(computed) < count:
            until = candles[-1].open_time + (1 - len(computed)) * span
            window = _between(candles, until - HISTORY_CANDLES * span, until)
            # What had closed by then: a minute's candle may close before the session's candle around it.
            closed = (
                floor_time(until, session_span) if computed or not session else session[-1].open_time + session_span
            )
            day = _between(session, closed - HISTORY_CANDLES * session_span, closed)
            computed = (indicators(window, day), *computed)
            await asyncio.sleep(0)  # one set takes a millisecond, and the first model of a cycle needs many
        self._indicators[symbol, interval] = newest, computed
        return candles[-HISTORY_CANDLES:], computed[-count:]

    async def _candles_to_last(self, symbol: str, interval: Interval, count: int, now: datetime) -> list[Candle]:
        """Return the closed candles of the `count` intervals up to the last candle, ascending, so that a gap after it
        changes nothing; none if it is longer than `HISTORY_CANDLES`."""
        candles = await self._candles(symbol, interval, count)
        if not candles:
            return []
        span = INTERVALS[interval]
        missing = (floor_time(now, span) - candles[-1].open_time) // span - 1
        if missing >= HISTORY_CANDLES:
            return []
        return candles if missing <= 0 else await self._candles(symbol, interval, count + missing)

    async def _candles(self, symbol: str, interval: Interval, count: int) -> list[Candle]:
        try:
            return await self._market.candles(symbol, interval, count)
        except MarketUnavailable as error:
            _log.warning("no %s candles of %s: %s", interval, symbol, error)
            return []

    async def _read_history(self, account_id: str, now: datetime) -> RunHistory:
        """Return the history of the account's run, reloaded only after a booking or in a new hour."""
        account = self._exchange.account(account_id)
        hour = now.replace(minute=0, second=0, microsecond=0)
        history = self._histories.get(account_id)
        key = (account.run.id, account.sequence, hour)
        if history is not None and (history.run_id, history.sequence, history.hour) == key:
            return history
        run_id, midnight = account.run.id, hour.replace(hour=0)
        async with self._database.connection() as conn:
            curve, record = await select_run_past(conn, account_id, run_id, TRADES_SHOWN, list(self._exchange.markets))
        series = [EquityPoint(at, float(equity)) for at, equity in curve]
        history = RunHistory(
            run_id=run_id,
            sequence=account.sequence,
            hour=hour,
            trades=record.trades,
            stats=RiskFigures.of(account.run.initial_capital, series).beside(record.stats),
            actions=record.last_fills,
            peak=max((equity for _, equity in curve), default=None),
            day_opening=next((equity for at, equity in reversed(curve) if at < midnight), None),
        )
        self._histories[account_id] = history
        return history

    async def _read_memory(self, account_id: str) -> Memory:
        """Return what a model remembers of its account's run."""
        since = self._exchange.account(account_id).run.started_at
        async with self._database.connection() as conn:
            return remember(*await select_memory(conn, account_id, since))

    async def _market_view(
        self, symbol: str, shown: Shown, now: datetime, looked_at: datetime | None
    ) -> ObservedMarket | None:
        quote = self._market.quote(symbol)
        if quote is None or not self._exchange.markets[symbol].is_listed(now):
            return None
        candles: dict[Interval, tuple[Candle, ...]] = {}
        computed: dict[Interval, tuple[Indicators, ...]] = {}
        for interval in shown.intervals:
            closed, computed[interval] = await self._indicators_of(symbol, interval, shown.series, now)
            if shown.candles > HISTORY_CANDLES:
                closed = await self._candles_to_last(symbol, interval, shown.candles, now)
            candles[interval] = tuple(closed[-shown.candles :])
        session = await self._candles(symbol, SESSION_INTERVAL, HISTORY_CANDLES)
        opened = None
        if looked_at is not None:
            minutes = await self._candles(symbol, LOOK_INTERVAL, HISTORY_CANDLES)
            opened = opened_at([*minutes, *session], looked_at)
        hour = floor_time(now, timedelta(hours=1))
        known_rate = self._market.known_funding_rate(symbol, hour)
        return ObservedMarket.of(
            self._exchange.markets[symbol],
            quote,
            now,
            opened_a_day_ago=opened_a_day_ago(session, now),
            funding_rate=self._market.funding_rate(symbol, hour) if known_rate is None else known_rate,
            open_interest=self._market.open_interest(symbol),
            opened_at_look=opened,
            book_imbalance=quote.imbalance if shown.series > 1 else None,
            funding_history=known_funding(partial(self._market.known_funding_rate, symbol), now),
            candles=candles,
            indicators={interval: values[-1] for interval, values in computed.items()},
            indicator_history=computed,
            supplementary=None if self._supplier is None else self._supplier.latest(symbol),
        )


def _between(candles: Sequence[Candle], first: datetime, until: datetime) -> Sequence[Candle]:
    """Return the candles that opened within [first, until)."""
    begin, end = (bisect_left(candles, moment, key=attrgetter("open_time")) for moment in (first, until))
    return candles[begin:end]
