"""Event-time runner: advances the accounts of a backtest through the market.

A replay applies every second to every account. Here only the seconds that can change an account are applied to it; the
others are skipped by the same conservative test (`is_unaffected`) with which a service catches up. Accounts never
affect each other, so each advances by itself from one decision to the next. The rows are those of a replay in lockstep:

    at a second's tick   funding, resting orders, liquidation, exit plans; then the orders that waited for its book
    at a full minute     after the tick of that second the decisions, then the snapshot
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final, Generic, Protocol, TypeVar

from msgspec.structs import replace

from trader.clock import ceil_second, moment_of
from trader.domain.agents.guard import RiskContext
from trader.domain.agents.observation import observe_last_action, observe_positions
from trader.domain.agents.tools import Decision
from trader.domain.agents.view import View
from trader.domain.exchange.account import Account, Marks, last_boundary
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.exchange.tick_rules import Moment, PriceRanges, apply_tick, is_unaffected
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import STALE_AFTER, Interval, Market, Quote
from trader.domain.models import CYCLE
from trader.domain.portfolio.histories import Snapshot
from trader.services.backtest.accounts import FIRST_CYCLE, FIRST_SNAPSHOT, BacktestAccount, next_minute
from trader.services.backtest.market import BacktestMarket

_STRETCH_S: Final = 3600
"""Seconds of market time after which the runners report how far they have come."""

A = TypeVar("A", bound=BacktestAccount)


class Journal(Protocol):
    """Receives the postings and snapshots of a backtest, in order for each account."""

    def post(self, posting: Posting) -> None:
        """Receive a posting."""
        ...

    def snapshot(self, snapshot: Snapshot) -> None:
        """Receive the snapshot of a full minute."""
        ...


class EventTimeRunner(ABC, Generic[A]):
    """Base class that advances accounts through market time."""

    def __init__(
        self, market: BacktestMarket, rules: Rules, latency: timedelta, accounts: Sequence[A], journal: Journal
    ) -> None:
        self.market = market
        self.rules = rules
        self._latency = latency
        self.accounts = accounts
        self._journal = journal
        self.last = market.span.stop - 1
        """The second of the last tick."""

        self._leverage_max = {symbol: each.leverage_max for symbol, each in market.markets.items()}

    @abstractmethod
    def decide(self, followed: A, second: int, now: datetime) -> None:
        """Run the decision cycle of an account; `now` lies in that second."""

    @abstractmethod
    def release(self, followed: A, moment: Moment, second: int) -> None:
        """Execute the pending orders or decisions of an account on the first tick at or after their due time."""

    def begin(self) -> None:
        """Run the first decision cycle of the accounts that start with the market."""
        begin = self.market.span.start
        for followed in self.accounts:
            first = followed.source.next_after(begin - int(CYCLE.total_seconds()))
            if first is not None and first <= begin:
                self.decide(followed, begin, moment_of(begin) + FIRST_CYCLE)
            followed.decides_at = followed.source.next_after(begin)

    @property
    def next_decision(self) -> int | None:
        """The second of the next decision; None when there is no more."""
        return min((followed.decides_at for followed in self.accounts if followed.decides_at is not None), default=None)

    def go(self, until: int, *, is_end: bool) -> None:
        """Advance every account to a second, which is not after the next decision. At the end nothing is decided."""
        for followed in self.accounts:
            self._advance(followed, until)
            if followed.decides_at == until and not is_end:
                self.decide(followed, until, moment_of(until))
                followed.decides_at = followed.source.next_after(until)
            self._take_snapshots(followed, until if is_end else until + 1)

    # --- ticks --------------------------------------------------------------------------------------------------------

    def _advance(self, followed: A, until: int) -> None:
        """Apply every tick up to this second that may change an account."""
        until_tick = min(until, self.last)
        while (second := self._next_event(followed, until_tick)) is not None:
            self._apply(followed, second)
        followed.seen = max(followed.seen, until_tick)

    def _apply(self, followed: A, second: int) -> None:
        """Apply the tick of a second to an account, then execute what waited for it."""
        moment = self.market.moment(second)
        self.post(followed, apply_tick(followed.account, moment, self.rules, self.market.funding_rate), second)
        followed.seen = second
        if followed.waiting is not None and moment.at >= followed.waiting.due:
            self.release(followed, moment, second)

    def _next_event(self, followed: A, until: int) -> int | None:
        """Return the next second with a tick that may change the account or that its order waits for."""
        waiting = followed.waiting
        waited = None if waiting is None else self.market.next_tick(max(followed.seen + 1, ceil_second(waiting.due)))
        stop = until if waited is None else min(until, waited)
        touched = None if followed.account.is_idle else self._first_touch(followed, followed.seen + 1, stop)
        return touched if touched is not None or waited is None or waited > until else waited

    def _first_touch(self, followed: A, start: int, until: int) -> int | None:
        """Return the first second in [start, until] that may change the account."""
        while start <= until:
            if start <= followed.clear_until or self._clear_minutes(followed, start):
                start = followed.clear_until + 1
                continue
            end = min(until, start // 60 * 60 + 59)
            touched = self._first_touch_within(followed, start, end)
            if touched is not None:
                return touched
            followed.clear_until, start = end, end + 1
        return None

    def _clear_minutes(self, followed: A, start: int) -> bool:
        """Extend `clear_until` by whole minutes from that of `start` on. Return False when that one is not clear."""
        minute, count = start // 60, 1
        is_clear, symbols = False, _concerned(followed)
        # Beyond the next funding no stretch is clear.
        hours = min(self.rules.funding_hours(symbol) for symbol in symbols)
        boundary = last_boundary(moment_of(start), hours) + timedelta(hours=hours)
        last = min(int(boundary.timestamp()) // 60 - 1, self.last // 60)
        while minute <= last:
            stop = min(minute + count - 1, last)
            if not self._is_clear(followed, self.market.ranges_of_minutes(symbols, minute, stop)):
                break
            is_clear, followed.clear_until = True, stop * 60 + 59
            minute, count = stop + 1, 2 * count
        return is_clear

    def _first_touch_within(self, followed: A, start: int, end: int) -> int | None:
        """Return the first second in [start, end], of one minute, that may change the account."""
        symbols = _concerned(followed)
        if start % 60 == 0:  # known without drawing the minute, and where funding is due
            if not self._is_clear(followed, self.market.ranges_of_seconds(symbols, start, start)):
                return start if self.market.ticking(start) else self._first_touch_within(followed, start + 1, end)
            start += 1
        while start <= end:
            if self._is_clear(followed, self.market.ranges_of_seconds(symbols, start, end)):
                return None
            low, high = start, end
            while low < high:  # the first touch lies in [low, high]
                middle = (low + high) // 2
                if self._is_clear(followed, self.market.ranges_of_seconds(symbols, low, middle)):
                    low = middle + 1
                else:
                    high = middle
            if self.market.ticking(low):
                return low
            start = low + 1
        return None

    def _is_clear(self, followed: A, ranges: PriceRanges) -> bool:
        return is_unaffected(followed.account, ranges, self.rules)

    def post(self, followed: A, posting: Posting | None, second: int) -> None:
        """Apply a posting to an account, after taking the snapshots that precede this second."""
        if posting is None:
            return
        self._take_snapshots(followed, second)
        followed.apply(posting)
        followed.clear_until = second
        self._journal.post(posting)

    # --- what agents see ----------------------------------------------------------------------------------------------

    def ask(self, followed: A, second: int, now: datetime) -> Sequence[Decision]:
        """Return the decisions of an account's source; `now` lies in that second."""
        peek = _MarketPeek(self.market, followed.account, min(second, self.last), now)
        return followed.source.decide(peek, lambda: self._view(followed, second, now))

    def context(self, followed: A, moment: Moment, second: int, *, viewed_at: datetime | None = None) -> RiskContext:
        """Return the guard's risk context at a moment of that second."""
        self._take_snapshots(followed, second)
        history = followed.history(moment.at)
        return history.risk_context(
            followed.account,
            followed.equity.lowest_on(history.hour.date()),
            moment.at,
            marks=moment.marks,
            quoted_at=self.market.quoted_at(second),
            leverage_max=self._leverage_max,
            viewed_at=viewed_at,
        )

    def _view(self, followed: A, second: int, now: datetime) -> View:
        context = self.context(followed, Moment(now, *self.prices(second)), second)
        history, markets = followed.history(now), {}
        for symbol in self.market.markets:
            fill = history.actions.get(symbol)
            last_action = None if fill is None else observe_last_action(symbol, context, closed=fill.closed)
            observed = self.market.observe(
                symbol, followed.intervals, followed.candles_shown, min(second, self.last), now, last_action
            )
            if observed is not None:
                markets[symbol] = observed
        # Rule agents do not look at liquidation prices.
        positions = observe_positions(followed.account, context.marks, None)
        view = history.view(context, positions, markets, self.rules.taker_rate)
        return replace(view, every_minutes=followed.every_minutes)

    def prices(self, second: int) -> tuple[Mapping[str, Quote], Marks]:
        """Return the quotes and marks at a second, those of the last tick after the end."""
        moment = self.market.moment(min(second, self.last))
        return moment.quotes, moment.marks

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _take_snapshots(self, followed: A, before: int) -> None:
        """Take the snapshots of the minutes before this second; the account has not changed since then."""
        begin = self.market.span.start
        while followed.next_snapshot < before:
            second = followed.next_snapshot
            now = moment_of(second) + FIRST_SNAPSHOT if second == begin else moment_of(second)
            snapshot = followed.due_snapshot(self.market.marks(min(second, self.last)), now)
            if snapshot is not None:
                followed.note(snapshot)
                self._journal.snapshot(snapshot)
            followed.next_snapshot = next_minute(second)


class _MarketPeek:
    """The `Peek` at one second."""

    __slots__ = ("_market", "_second", "account", "now")

    def __init__(self, market: BacktestMarket, account: Account, second: int, now: datetime) -> None:
        self._market = market
        self._second = second
        self.account = account
        self.now = now

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._market.markets

    @property
    def symbols(self) -> Collection[str]:
        return self._market.seen(self._second)

    def indicators(self, symbol: str, interval: Interval) -> Indicators:
        return self._market.indicators(symbol, interval, self.now)

    def mark(self, symbol: str) -> Decimal:
        return self._market.moment(self._second).marks[symbol]


def run_together(market: BacktestMarket, runners: Sequence[EventTimeRunner[Any]]) -> Iterator[int]:
    """Advance all runners through the market, and yield the second reached about once per hour of market time.

    Accounts that do not decide end at the last tick.
    """
    for runner in runners:
        runner.begin()
    reached = market.span.start
    yield reached
    end = market.span.stop + int(STALE_AFTER.total_seconds())  # then the last prices are stale for every reader
    while reached < end:
        due = [second for runner in runners if (second := runner.next_decision) is not None]
        reached = min([*due, reached + _STRETCH_S, end])
        for runner in runners:
            runner.go(reached, is_end=reached == end)
        yield reached


def _concerned(followed: BacktestAccount) -> list[str]:
    return [*followed.account.positions, *(order.symbol for order in followed.account.resting)]
