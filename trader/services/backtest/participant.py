"""Accounts in a backtest: who decides for each, and what is known of its own past."""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import NamedTuple, Protocol
from uuid import UUID

import msgspec

from trader.clock import epoch_second
from trader.domain.agents.invocations import invocation_id
from trader.domain.agents.rules.common import Held
from trader.domain.agents.tools import Decision
from trader.domain.agents.view import ObservedStats, View
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import unopened_account
from trader.domain.exchange.orders import Order
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import Interval, Market
from trader.domain.models import CYCLE, Model, VariantId
from trader.domain.money import ZERO
from trader.domain.portfolio.baselines import BaselineState
from trader.domain.portfolio.snapshots import Snapshot
from trader.services.agents.observer import TRADES_SHOWN
from trader.store.portfolio.snapshots import HourlyValue, LastSnapshot
from trader.variants import VARIANTS

_MINUTE_S = 60


class DecisionSource(Protocol):
    """Who decides for a participant."""

    def next_after(self, second: int) -> int | None:
        """Return the second of the first decision after this one, a full minute; None when there is no more."""
        ...

    def decide(self, glance: "Glance", look: Callable[[], View]) -> Sequence[Decision]:
        """Return the decisions of this moment. `look` makes the whole view, which takes time."""
        ...


class Glance(Protocol):
    """What is known of a moment without making a view: the account, and indicators and marks that are asked for."""

    @property
    def now(self) -> datetime: ...

    @property
    def account(self) -> Account: ...

    @property
    def markets(self) -> Mapping[str, Market]: ...

    @property
    def symbols(self) -> Collection[str]:
        """The markets that have a price."""
        ...

    def indicators(self, symbol: str, interval: Interval) -> Indicators: ...

    def mark(self, symbol: str) -> Decimal: ...


class RuleAgentSource:
    """The rule agent of a variant, which decides `every` so often."""

    def __init__(self, variant: VariantId, every: timedelta = CYCLE) -> None:
        self._variant = VARIANTS[variant]
        self._every_s = int(every.total_seconds())

    def next_after(self, second: int) -> int:
        return (second // self._every_s + 1) * self._every_s

    def decide(self, glance: Glance, look: Callable[[], View]) -> Sequence[Decision]:
        return self._variant.agent(look(), self._variant.limits) if self._may_act(glance) else ()

    def _may_act(self, glance: Glance) -> bool:
        """Return whether the agent may decide anything. Most of the time indicators alone say that it does not."""
        variant, interval, positions = self._variant, self._variant.intervals[0], glance.account.positions
        for symbol in glance.symbols:
            position, indicators, mark = positions.get(symbol), glance.indicators(symbol, interval), glance.mark(symbol)
            if position is not None:
                if variant.may_review(Held(position, indicators, mark, glance.markets[symbol].tick, glance.now)):
                    return True
            elif variant.may_enter(indicators, float(mark)):
                return True
        return False


class Waiting(Protocol):
    """What waits for the first tick at or after a time."""

    @property
    def due(self) -> datetime: ...


class WaitingOrder(NamedTuple):
    """An order that waits for the first book at or after `due`."""

    order: Order
    due: datetime


class Invocation:
    """One pass of a participant through its decisions. The id is made when it is first needed."""

    def __init__(self, model: Model, started_at: datetime, decisions: Sequence[Decision]) -> None:
        self._model = model
        self.started_at = started_at
        self.left = deque(enumerate(decisions, start=1))

    @cached_property
    def id(self) -> UUID:
        return invocation_id(self._model, self.started_at)


class EquityCurve:
    """The equity recorded of one run: the last value of each hour, the peak, and the lowest of the day."""

    def __init__(self) -> None:
        self.hours: list[HourlyValue] = []
        self.last: LastSnapshot | None = None
        self._peak_before: Decimal | None = None  # of the hours before the last one
        self._day: datetime | None = None
        self._lowest = ZERO

    def note(self, snapshot: Snapshot) -> None:
        """Take over a snapshot, later than all before it."""
        at, equity = snapshot.created_at, snapshot.net_portfolio
        hour = at.replace(minute=0, second=0, microsecond=0)
        if self.hours and self.hours[-1].hour == hour:
            self.hours.pop()
        elif self.hours:
            before = self.hours[-1].last
            self._peak_before = before if self._peak_before is None else max(self._peak_before, before)
        self.hours.append(HourlyValue(snapshot.account_id, hour, equity, at))
        day = hour.replace(hour=0)
        self._lowest = min(self._lowest, equity) if self._day == day else equity
        self._day = day
        self.last = LastSnapshot(snapshot.run_id, at)

    @property
    def peak(self) -> Decimal | None:
        """The highest of the hours' last values; None before the first."""
        if not self.hours:
            return None
        last = self.hours[-1].last
        return last if self._peak_before is None else max(self._peak_before, last)

    def lowest_since(self, midnight: datetime) -> Decimal | None:
        """Return the lowest equity recorded since a midnight; None when nothing was."""
        return self._lowest if self._day == midnight else None

    def last_before(self, moment: datetime) -> Decimal | None:
        """Return the last value of the hours before a full hour; None when there is none."""
        return next((value.last for value in reversed(self.hours) if value.hour < moment), None)


class KnownPast(NamedTuple):
    """What an agent has read of its past: read again after a change of its account, and in every new hour."""

    sequence: int
    hour: datetime
    peak: Decimal | None
    day_opening: Decimal | None


class Follower:
    """An account that goes through the market. `seen` is the last second whose tick it went through."""

    trades_shown = TRADES_SHOWN
    every_minutes = 1
    """How often it decides, as its agent is told."""

    def __init__(self, source: DecisionSource, intervals: Sequence[Interval], account: Account) -> None:
        seen = epoch_second(account.run.started_at)
        self.source = source
        self.intervals = intervals
        self.state = BaselineState(account=account)
        self.curve = EquityCurve()
        self.waiting: Waiting | None = None
        self.decides_at: int | None = seen
        self.seen = seen
        self.clear_until = seen
        """No tick up to this second can change the account as it is now."""

        self.next_snapshot = seen
        self._stats_of, self._stats = self.state, self.state.stats

    @property
    def account(self) -> Account:
        return self.state.account

    @property
    def stats(self) -> ObservedStats:
        """The record of its trades."""
        if self._stats_of is not self.state:
            self._stats_of, self._stats = self.state, self.state.stats
        return self._stats

    def past(self, now: datetime) -> KnownPast:
        """Return what its agent knows of its past."""
        hour = now.replace(minute=0, second=0, microsecond=0)
        return KnownPast(self.account.sequence, hour, self.curve.peak, self.curve.last_before(hour.replace(hour=0)))


class Participant(Follower):
    """The account of a model."""

    waiting: WaitingOrder | None

    def __init__(self, model: Model, source: DecisionSource, account: Account) -> None:
        self.model = model
        self.variant = VARIANTS[model.variant]
        self.limits = self.variant.limits
        """What the guard allows."""

        super().__init__(source, self.variant.intervals, account)
        self.every_minutes = model.configuration.cadence // CYCLE
        self.invocation: Invocation | None = None
        self.decisions = 0
        """How often it was asked to decide."""

        self.missed = 0
        """How often its last decisions were not executed yet when the next were due."""

        self._past: KnownPast | None = None

    def past(self, now: datetime) -> KnownPast:
        """Return what its agent knows of its past, as a service has read it: after a change, and in every hour."""
        hour = now.replace(minute=0, second=0, microsecond=0)
        known = self._past
        if known is None or known.sequence != self.account.sequence or known.hour != hour:
            known = self._past = super().past(now)
        return known


def open_participant(
    model: Model, source: DecisionSource, capital: Decimal, quote_currency: str, at: datetime
) -> Participant:
    """Return a participant whose account has just opened with its first run, as the rows of a service begin."""
    account = unopened_account(model.id, capital, quote_currency, at)
    return Participant(model, source, msgspec.structs.replace(account, sequence=1))


def next_minute(second: int) -> int:
    """Return the first full minute after a second."""
    return (second // _MINUTE_S + 1) * _MINUTE_S


FIRST_CYCLE = timedelta(milliseconds=1)
FIRST_SNAPSHOT = timedelta(milliseconds=2)
"""How long after its start a service decides and values its accounts for the first time."""

LATE = timedelta(seconds=5)
"""How much longer than its latency an order waits for a book."""
