"""Accounts of a backtest, and what decides for each."""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import NamedTuple, Protocol
from uuid import UUID

import msgspec

from trader.clock import epoch_second
from trader.domain.agents.conversation import ModelAnswer
from trader.domain.agents.invocations import ToolCallStatus
from trader.domain.agents.messages import EXCHANGE, HELD, Outcome
from trader.domain.agents.observation import RunHistory
from trader.domain.agents.strategy import Peek, Strategy
from trader.domain.agents.tools import TOOL_NAMES, Change, Decision, Holding, request_of
from trader.domain.agents.view import View
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import unopened_account
from trader.domain.exchange.orders import Order
from trader.domain.market.markets import Interval, canonical_symbol
from trader.domain.models import CYCLE, Model
from trader.domain.portfolio.baselines import BaselineState
from trader.domain.portfolio.histories import Snapshot
from trader.services.agents.observer import HISTORY_CANDLES, SHOWN_CANDLES, TRADES_SHOWN
from trader.services.agents.record import InvocationRecord
from trader.services.portfolio.followed_account import FollowedAccount
from trader.store.portfolio.snapshots import HourlyValue
from trader.variants import VARIANTS, Variant

_MINUTE_S = 60


class DecisionSource(Protocol):
    """Protocol of what decides for an account."""

    def next_after(self, second: int) -> int | None:
        """Return the second of the first decision after this one, a full minute; None when there is no more."""
        ...

    def decide(self, peek: Peek, look: Callable[[], View]) -> Sequence[Decision]:
        """Return the decisions of this moment. `look` makes the whole view, which takes time."""
        ...


class StrategySource:
    """Decision source of a strategy, which decides once per `every`."""

    def __init__(self, strategy: Strategy, every: timedelta = CYCLE) -> None:
        self.strategy = strategy
        self._every_s = int(every.total_seconds())

    def next_after(self, second: int) -> int | None:
        return (second // self._every_s + 1) * self._every_s

    def decide(self, peek: Peek, look: Callable[[], View]) -> Sequence[Decision]:
        return list(self.strategy.decide(look()) or ()) if self.strategy.may_act(peek) else ()


class WaitingOrder(NamedTuple):
    """An order that waits for the first book at or after `due`."""

    order: Order
    due: datetime


class DecisionOutcome(NamedTuple):
    """What became of a decision. `rule` and `reason` say why it was rejected or failed."""

    at: datetime
    tool: str
    symbol: str
    status: ToolCallStatus
    rule: str | None
    reason: str | None


class Invocation:
    """The decisions of an account at one time, while they are executed, and the record that a service has of them.

    The record has neither the view nor the inputs of calls.
    """

    def __init__(self, model: Model, started_at: datetime, decisions: Sequence[Decision]) -> None:
        self.record = InvocationRecord(model, started_at)
        self.started_at = started_at
        self.left = deque(enumerate(decisions, start=1))
        self._holding = [decision for decision in decisions if isinstance(decision, Holding)]
        self._add_step([decision for decision in decisions if not isinstance(decision, Holding)], started_at)

    @property
    def id(self) -> UUID:
        return self.record.id

    def _add_step(self, decisions: Sequence[Decision], at: datetime) -> None:
        calls = tuple(request_of(number, decision) for number, decision in enumerate(decisions, 1))
        model = self.record.model
        answer = ModelAnswer(text=None, calls=calls, message={}, model=model.router_model_name)
        self.record.add_step(model.provider, answer, at)

    def add(self, number: int, decision: Decision, outcome: Outcome, at: datetime) -> None:
        """Record a call that has ended."""
        self.record.add_call(number, request_of(number, decision), decision, *outcome, at)

    def close(self, at: datetime) -> None:
        """Record the end: a second answer, in which a rule agent holds and the strategy of a file calls nothing."""
        held = self._holding if self.record.model.provider == "rules" else []
        self._add_step(held, at)
        for number, decision in enumerate(held, self.record.calls[-1].number + 1):
            self.add(number, decision, HELD, at)
        reasons = "; ".join(decision.reason for decision in self._holding)
        self.record.close("completed", None, reasons or None, at)


class BacktestAccount(FollowedAccount):
    """An account that goes through the market of a backtest. `seen` is the last second whose tick it went through."""

    every_minutes = 1
    """Minutes between two decisions, as the agent's view states them."""

    candles_shown = SHOWN_CANDLES
    """How many closed candles of each interval its view has."""

    def __init__(self, source: DecisionSource, intervals: Sequence[Interval], account: Account) -> None:
        super().__init__(BaselineState(account=account))
        seen = epoch_second(account.run.started_at)
        self.source = source
        self.intervals = intervals
        self.hours: list[HourlyValue] = []
        """The last equity recorded in each hour."""

        self.decides_at: int | None = seen
        self.seen = seen
        self.clear_until = seen
        """No tick up to this second can change the account as it is now."""

        self.next_snapshot = seen

    def note(self, snapshot: Snapshot) -> None:
        super().note(snapshot)
        hour = snapshot.created_at.replace(minute=0, second=0, microsecond=0)
        leverage = snapshot.leverage or 0.0
        if self.hours and self.hours[-1].hour == hour:
            leverage = max(leverage, self.hours.pop().leverage or 0.0)
        self.hours.append(HourlyValue(snapshot.account_id, hour, snapshot.net_portfolio, snapshot.created_at, leverage))


class ModelAccount(BacktestAccount):
    trades_shown = TRADES_SHOWN
    waiting: WaitingOrder | None

    def __init__(self, model: Model, source: DecisionSource, account: Account) -> None:
        self.model = model
        decider: Variant | Strategy = VARIANTS[model.variant]
        if isinstance(source, StrategySource):
            decider, self.candles_shown = source.strategy, HISTORY_CANDLES
        self.limits = decider.limits
        """What the guard allows."""

        super().__init__(source, decider.intervals, account)
        self.every_minutes = model.configuration.cadence // CYCLE
        self.invocation: Invocation | None = None
        self.decisions = 0
        """Number of decision cycles in which it was asked."""

        self.missed = 0
        """Number of decision cycles skipped because the previous decisions were not executed yet."""

        self.outcomes: list[DecisionOutcome] = []
        self.ordered: tuple[int, Change] | None = None
        """The decision whose order has no answer yet, with its number."""

        self.finished: list[InvocationRecord] | None = None
        """The records of invocations that have ended since they were taken; None when nobody takes them."""

        self._history: RunHistory | None = None

    def end_invocation(self, at: datetime) -> None:
        """End the invocation under way; its record is kept when it called anything."""
        invocation, self.invocation = self.invocation, None
        assert invocation is not None
        if self.finished is not None and invocation.record.calls:
            invocation.close(at)
            self.finished.append(invocation.record)

    def report(self, at: datetime, number: int, decision: Change, outcome: Outcome) -> None:
        """Record the outcome of a decision, which has this number in its invocation."""
        if self.invocation is not None:
            self.invocation.add(number, decision, outcome, at)
        status, result = outcome
        rule = result.get("rule") or (EXCHANGE if status == "rejected" else None)
        reason = result.get("reason") or result.get("error")
        self.outcomes.append(
            DecisionOutcome(at, TOOL_NAMES[type(decision)], canonical_symbol(decision.symbol), status, rule, reason)
        )

    def history(self, now: datetime) -> RunHistory:
        """Return the history that the agent sees, refreshed after each posting and each hour, as in a service."""
        hour = now.replace(minute=0, second=0, microsecond=0)
        known = self._history
        if known is None or known.sequence != self.account.sequence or known.hour != hour:
            known = self._history = super().history(now)
        return known


def open_model_account(
    model: Model, source: DecisionSource, capital: Decimal, quote_currency: str, at: datetime
) -> ModelAccount:
    """Return a model's new account in its first run, with the sequence number of a service's first row."""
    account = unopened_account(model.id, capital, quote_currency, at)
    return ModelAccount(model, source, msgspec.structs.replace(account, sequence=1))


def next_minute(second: int) -> int:
    """Return the first full minute after a second."""
    return (second // _MINUTE_S + 1) * _MINUTE_S


FIRST_CYCLE = timedelta(milliseconds=1)
FIRST_SNAPSHOT = timedelta(milliseconds=2)
"""How long after its start a service decides and values its accounts for the first time."""

LATE = timedelta(seconds=5)
"""How much longer than its latency an order waits for a book."""
