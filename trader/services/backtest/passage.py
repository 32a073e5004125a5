"""Passage of accounts through the market of a backtest, in event time.

A replay applies every second to every account. Here an account is only touched by the seconds that can change it: those
between are passed by, by the same conservative test (`is_unaffected`) with which a service catches up. Accounts never
affect each other, so each goes its own way from one decision to the next. The rows are those of a replay in lockstep:

    at a second's tick   funding, resting orders, liquidation, exit plans; then the orders that waited for its book
    at a full minute     after the tick of that second the decisions, then the snapshot
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final, Generic, Protocol, TypeVar

from trader.clock import moment_of
from trader.domain.agents.guard import LastTrade, RiskContext
from trader.domain.agents.observation import (
    observe_account,
    observe_last_action,
    observe_orders,
    observe_positions,
)
from trader.domain.agents.tools import Decision
from trader.domain.agents.view import View
from trader.domain.exchange.account import Account, Marks, last_boundary
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.exchange.tick_rules import Moment, PriceRanges, apply_tick, is_unaffected
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import STALE_AFTER, Interval, Market, Quote
from trader.domain.models import CYCLE
from trader.domain.portfolio.snapshots import Snapshot, value_account
from trader.services.backtest.market import BacktestMarket, second_of
from trader.services.backtest.participant import FIRST_CYCLE, FIRST_SNAPSHOT, Follower, next_minute
from trader.services.portfolio.snapshots import is_due

_STRETCH_S: Final = 3600
"""Seconds after which a passage reports how far it has come."""

F = TypeVar("F", bound=Follower)


class Journal(Protocol):
    """Takes what happens in a backtest, in order for each account."""

    def post(self, posting: Posting) -> None:
        """Take a change of an account."""
        ...

    def snapshot(self, snapshot: Snapshot) -> None:
        """Take what an account is worth at a full minute."""
        ...


class Passage(ABC, Generic[F]):
    """Takes accounts of one kind through the market. Their decisions and what comes of them are of the kind."""

    def __init__(self, market: BacktestMarket, rules: Rules, followers: Sequence[F], journal: Journal) -> None:
        self.market = market
        self.rules = rules
        self.followers = followers
        self._journal = journal
        self.last = market.span.stop - 1
        """The second of the last tick."""

        self._leverage_max = {symbol: one.leverage_max for symbol, one in market.markets.items()}

    @abstractmethod
    def decide(self, one: F, second: int, now: datetime) -> None:
        """Let an account decide; now is in that second."""

    @abstractmethod
    def release(self, one: F, moment: Moment, second: int) -> None:
        """Do what waited for a tick, the first at or after the time for which it waited."""

    def begin(self) -> None:
        """Take the decisions of the first cycle of those that begin with the market."""
        begin = self.market.span.start
        for one in self.followers:
            first = one.source.next_after(begin - int(CYCLE.total_seconds()))
            if first is not None and first <= begin:
                self.decide(one, begin, moment_of(begin) + FIRST_CYCLE)
            one.decides_at = one.source.next_after(begin)

    @property
    def next_decision(self) -> int | None:
        """The second of the next decision; None when there is no more."""
        return min((one.decides_at for one in self.followers if one.decides_at is not None), default=None)

    def go(self, until: int, *, is_end: bool) -> None:
        """Take every account up to a second; the next decision is not before it. At the end nothing is decided."""
        for one in self.followers:
            self._advance(one, until)
            if one.decides_at == until and not is_end:
                self.decide(one, until, moment_of(until))
                one.decides_at = one.source.next_after(until)
            self._take_snapshots(one, until if is_end else until + 1)

    # --- ticks --------------------------------------------------------------------------------------------------------

    def _advance(self, one: F, until: int) -> None:
        """Take an account through every tick up to this second that can matter to it."""
        until_tick = min(until, self.last)
        while (second := self._next_event(one, until_tick)) is not None:
            self._apply(one, second)
        one.seen = max(one.seen, until_tick)

    def _apply(self, one: F, second: int) -> None:
        """Apply the tick of a second to an account, then do what waited for it."""
        moment = self.market.moment(second)
        self.post(one, apply_tick(one.account, moment, self.rules, self.market.funding_rate), second)
        one.seen = second
        if one.waiting is not None and moment.at >= one.waiting.due:
            self.release(one, moment, second)

    def _next_event(self, one: F, until: int) -> int | None:
        """Return the next second with a tick that may change the account or that its order waits for."""
        waited = None if one.waiting is None else self.market.next_tick(max(one.seen + 1, second_of(one.waiting.due)))
        stop = until if waited is None else min(until, waited)
        touched = None if one.account.is_idle else self._first_touch(one, one.seen + 1, stop)
        return touched if touched is not None or waited is None or waited > until else waited

    def _first_touch(self, one: F, start: int, until: int) -> int | None:
        """Return the first second in [start, until] that may change the account."""
        while start <= until:
            if start <= one.clear_until or self._clear_minutes(one, start):
                start = one.clear_until + 1
                continue
            end = min(until, start // 60 * 60 + 59)
            touched = self._first_touch_within(one, start, end)
            if touched is not None:
                return touched
            one.clear_until, start = end, end + 1
        return None

    def _clear_minutes(self, one: F, start: int) -> bool:
        """Extend `clear_until` by whole minutes from that of `start` on. Return False when that one is not clear."""
        minute, count = start // 60, 1
        # Beyond the next funding no stretch is clear.
        hours = self.rules.funding_interval_h
        boundary = last_boundary(moment_of(start), hours) + timedelta(hours=hours)
        last = min(int(boundary.timestamp()) // 60 - 1, self.last // 60)
        is_clear = False
        symbols = _concerned(one)
        while minute <= last:
            stop = min(minute + count - 1, last)
            if not self._is_clear(one, self.market.ranges_of_minutes(symbols, minute, stop)):
                break
            is_clear, one.clear_until = True, stop * 60 + 59
            minute, count = stop + 1, 2 * count
        return is_clear

    def _first_touch_within(self, one: F, start: int, end: int) -> int | None:
        """Return the first second in [start, end], of one minute, that may change the account."""
        symbols = _concerned(one)
        if start % 60 == 0:  # known without drawing the minute, and where funding is due
            if not self._is_clear(one, self.market.ranges_of_seconds(symbols, start, start)):
                return start if self.market.ticking(start) else self._first_touch_within(one, start + 1, end)
            start += 1
        while start <= end:
            if self._is_clear(one, self.market.ranges_of_seconds(symbols, start, end)):
                return None
            low, high = start, end
            while low < high:  # the first touch lies in [low, high]
                middle = (low + high) // 2
                if self._is_clear(one, self.market.ranges_of_seconds(symbols, low, middle)):
                    low = middle + 1
                else:
                    high = middle
            if self.market.ticking(low):
                return low
            start = low + 1
        return None

    def _is_clear(self, one: F, ranges: PriceRanges) -> bool:
        return is_unaffected(one.account, ranges, self.rules)

    def post(self, one: F, posting: Posting | None, second: int) -> None:
        """Take over a change of an account, once its snapshots before this second are taken."""
        if posting is None:
            return
        self._take_snapshots(one, second)
        one.state = one.state.after(posting)
        one.clear_until = second
        self._journal.post(posting)

    # --- what agents see ----------------------------------------------------------------------------------------------

    def ask(self, one: F, second: int, now: datetime) -> Sequence[Decision]:
        """Return what an account's source decides; now is in that second."""
        glance = _Glance(self.market, one.account, min(second, self.last), now)
        return one.source.decide(glance, lambda: self._view(one, second, now))

    def context(self, one: F, moment: Moment, second: int, *, viewed_at: datetime | None = None) -> RiskContext:
        """Return what the guard judges by at a moment of that second."""
        self._take_snapshots(one, second)
        past, now = one.past(moment.at), moment.at
        return RiskContext(
            now=now,
            account=one.account,
            marks=moment.marks,
            quoted_at=self.market.quoted_at(second),
            leverage_max=self._leverage_max,
            day_opening_equity=one.account.run.initial_capital if past.day_opening is None else past.day_opening,
            day_lowest_equity=one.curve.lowest_since(past.hour.replace(hour=0)),
            last_trades={symbol: LastTrade(fill.side, fill.at) for symbol, fill in one.state.last_fills.items()},
            viewed_at=viewed_at,
        )

    def _view(self, one: F, second: int, now: datetime) -> View:
        context = self.context(one, Moment(now, *self.prices(second)), second)
        past, markets = one.past(now), {}
        for symbol in self.market.markets:
            fill = one.state.last_fills.get(symbol)
            last_action = None if fill is None else observe_last_action(symbol, context, closed=fill.closed)
            observed = self.market.observe(symbol, one.intervals, min(second, self.last), now, last_action)
            if observed is not None:
                markets[symbol] = observed
        return View(
            at=now,
            account=observe_account(context, past.peak, self.rules.taker_rate),
            # Rule agents do not look at liquidation prices.
            positions=observe_positions(one.account, context.marks, None),
            trades=one.state.trades[: one.trades_shown],
            stats=one.stats,
            markets=markets,
            orders=observe_orders(one.account),
            every_minutes=one.every_minutes,
        )

    def prices(self, second: int) -> tuple[Mapping[str, Quote], Marks]:
        """Return the quotes and marks at a second, those of the last tick after the end."""
        moment = self.market.moment(min(second, self.last))
        return moment.quotes, moment.marks

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _take_snapshots(self, one: F, before: int) -> None:
        """Take the snapshots of the minutes before this second, with the account as it is: it was the same then."""
        begin = self.market.span.start
        while one.next_snapshot < before:
            second = one.next_snapshot
            now = moment_of(second) + FIRST_SNAPSHOT if second == begin else moment_of(second)
            if is_due(one.account, one.curve.last, now):
                snapshot = value_account(one.account, self.market.marks(min(second, self.last)), now)
                if snapshot is not None:
                    one.curve.note(snapshot)
                    self._journal.snapshot(snapshot)
            one.next_snapshot = next_minute(second)


class _Glance:
    """What a participant may ask before it has a view made."""

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


def run_together(market: BacktestMarket, passages: Sequence["Passage[Any]"]) -> Iterator[int]:
    """Go through the market, and yield the second reached about once an hour of its time.

    Accounts that do not decide end at the last tick.
    """
    for passage in passages:
        passage.begin()
    reached = market.span.start
    yield reached
    end = market.span.stop + int(STALE_AFTER.total_seconds())  # then the last prices are stale for every reader
    while reached < end:
        due = [second for passage in passages if (second := passage.next_decision) is not None]
        reached = min([*due, reached + _STRETCH_S, end])
        for passage in passages:
            passage.go(reached, is_end=reached == end)
        yield reached


def _concerned(one: Follower) -> list[str]:
    return [*one.account.positions, *(order.symbol for order in one.account.resting)]
