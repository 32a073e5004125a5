"""Accounts of a backtest, the base class of their decision sources, and the ticks that can change an account."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import reduce
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from trader.agents.domain.conversation import ModelAnswer
from trader.agents.domain.invocations import ToolCallStatus
from trader.agents.domain.messages import EXCHANGE, HELD, Outcome
from trader.agents.domain.models import CYCLE, Model
from trader.agents.domain.observation import RiskFigures, RunHistory, observe_fill
from trader.agents.domain.strategy import Strategy
from trader.agents.domain.tools import TOOL_NAMES, Change, Decision, Holding, request_of
from trader.agents.domain.view import ObservedFill, ObservedStats, Shown, VariantLimits
from trader.agents.observer import TRADES_SHOWN
from trader.agents.record import InvocationRecord
from trader.agents.variants import VARIANTS, limits_of
from trader.backtest.market import BacktestMarket
from trader.backtest.values import AccountValues, time_of_ms
from trader.core.clock import ceil_second, epoch_second, moment_of
from trader.core.money import ZERO
from trader.exchange.domain.account import Account, Trade, last_boundary
from trader.exchange.domain.halts import Halt
from trader.exchange.domain.ledger import ExchangeRules, Posting, unopened_account
from trader.exchange.domain.orders import AnswerFill, OrderAnswer
from trader.exchange.domain.tick_rules import PriceRanges, is_unaffected
from trader.market.domain.markets import canonical_symbol
from trader.portfolio.baselines import FollowedAccount
from trader.portfolio.domain.baselines import BaselineState
from trader.portfolio.domain.histories import HourlyValue, hourly_points
from trader.portfolio.sql.snapshots import LastSnapshot
from trader.settings.settings import Settings

_MINUTE_S = 60
_HOUR = timedelta(hours=1)
_HOUR_MS = 3_600_000


class DecisionSource(ABC):
    """Base class of the sources of an account's decisions.

    `runs_ahead`: its sessions take market time, so the engine runs them once all accounts have reached that time, and
    advances only this account. `is_asking`: they also wait in real time, while other sessions continue.
    """

    runs_ahead = False
    is_asking = False

    records_inputs = False
    """Whether its invocations are recorded with the inputs of their calls, so that they can be reproduced."""

    keeps_orders = False
    """Whether its account keeps the answers of all its orders up to date, which its agent may ask for."""

    is_counted_by_rows = False
    """Whether each of its decision cycles has the row of an invocation, by which the database counts them."""

    strategy: Strategy | None = None
    """The code that decides; None: an AI model decides, or its recorded decisions are replayed."""

    @abstractmethod
    def next_after(self, second: int) -> int | None:
        """Return the second of the first decision after this second, a full minute; None if there is none."""

    @abstractmethod
    async def run(self, session: Any) -> None:
        """Make decisions, and execute them in a session of the account, the engine's `AccountSession`."""


class Idle(DecisionSource):
    """Decides nothing: only the market changes the account."""

    is_counted_by_rows = True

    def next_after(self, second: int) -> None:
        return None

    async def run(self, session: Any) -> None:
        raise AssertionError("nothing is ever due")


class Waiting:
    """A wait until every market of `missing` has had a tick at or after `due`.

    After the wait, `ended_at` is the time of its end; if no book came, `refusal` says why.
    """

    def __init__(self, symbols: Sequence[str], due: datetime) -> None:
        self.missing = symbols
        self.due = due
        self.ended_at = due
        self.refusal: str | None = None


class DecisionOutcome(NamedTuple):
    """The outcome of a decision. `rule` and `reason` say why it was rejected or failed."""

    at: datetime
    tool: str
    symbol: str
    status: ToolCallStatus
    rule: str | None
    reason: str | None


class DecisionCycle:
    """The decisions of an account at one time, while they are executed, with the record that a service would have.

    The record contains neither the view nor the inputs of calls. `answered_by` is the name of what decided.
    """

    def __init__(self, model: Model, answered_by: str, started_at: datetime, decisions: Sequence[Decision]) -> None:
        self.record = InvocationRecord(model, started_at)
        self.started_at = started_at
        self._answered_by = answered_by
        self._holding = [decision for decision in decisions if isinstance(decision, Holding)]
        self._add_step([decision for decision in decisions if not isinstance(decision, Holding)], started_at)

    def _add_step(self, decisions: Sequence[Decision], at: datetime) -> None:
        calls = tuple(request_of(number, decision) for number, decision in enumerate(decisions, 1))
        answer = ModelAnswer(text=None, calls=calls, message={}, model=self._answered_by)
        self.record.add_step(self.record.model.provider, answer, at)

    def add(self, number: int, decision: Decision, outcome: Outcome, at: datetime) -> None:
        """Record a finished call."""
        self.record.add_call(number, request_of(number, decision), decision, *outcome, at)

    def close(self, at: datetime) -> None:
        """Record the end as a second answer, in which a rule agent holds and the strategy of a file makes no calls."""
        held = self._holding if self.record.model.provider == "rules" else []
        self._add_step(held, at)
        for number, decision in enumerate(held, len(self.record.calls) + 1):
            self.add(number, decision, HELD, at)
        reasons = "; ".join(decision.reason for decision in self._holding)
        self.record.close("completed", "holding", None, reasons or None, at)


class BacktestAccount(FollowedAccount):
    """An account that moves through the market of a backtest. `seen` is the last second whose tick it has processed."""

    cadence = CYCLE
    """The time between two decisions, as the agent's view states it."""

    is_booked = True
    """Whether its postings belong to the ledger."""

    def __init__(self, source: DecisionSource, shown: Shown, limits: VariantLimits, account: Account) -> None:
        super().__init__(BaselineState(account=account))
        seen = epoch_second(account.run.started_at)
        self.source = source
        self.shown = shown
        """What its view shows of each market."""

        self.limits = limits
        """The limits of the guard."""

        self.hours: list[HourlyValue] = []
        """The last equity recorded in each hour."""

        self.decides_at: int | None = seen
        self.seen = seen
        self.clear_until = seen
        """No tick up to this second can change the account in its current state."""

        self.next_snapshot = seen
        self.running: Coroutine[Any, Any, None] | None = None
        """The session that is suspended until the book it waits for arrives."""

        self.waiting: Waiting | None = None
        self.invocation: DecisionCycle | None = None
        self.decisions = 0
        """Number of decision cycles in which it was asked for decisions."""

        self.missed = 0
        """Number of decision cycles skipped because the previous decisions were still being executed."""

        self.answers: dict[str, OrderAnswer] = {}
        """The answers to orders whose client order ids its agent chose."""

        self.orders: dict[UUID, OrderAnswer] | None = {} if source.keeps_orders else None
        """The current answers of its orders, if they are kept."""

        self.tags: dict[UUID | None, str | None] = {}
        """The tags that its agent gave its orders, by their ids."""

        self.fills: tuple[ObservedFill, ...] = ()
        """Its last fills, oldest first, as many as its view shows."""

        self.halts: list[Halt] = []
        """The halt that its agent asked for, if any, which nobody lifts."""

        self.outcomes: list[DecisionOutcome] = []
        self.ends: Counter[str] = Counter()
        """What ended the invocations of an agent that the workflow asks, with their number."""

        self.finished: list[InvocationRecord] | None = None
        """The records of invocations that have ended since the last collection; None if they are not collected."""

    def resume(self, hours: list[HourlyValue], seen: datetime) -> None:
        """Go on with an account that has these hours and has seen every tick until a time."""
        self.hours = hours
        self.seen = self.clear_until = ceil_second(seen)
        self.next_snapshot = next_minute(self.seen)
        if hours:
            self.last_snapshot = LastSnapshot(self.account.run.id, hours[-1].last_at)

    def apply(self, posting: Posting) -> None:
        super().apply(posting)
        if self.orders is not None:
            _note_orders(self.orders, posting)
        if self.shown.fills and posting.fills:
            self.fills = (*self.fills, *map(observe_fill, posting.fills))[-self.shown.fills :]

    def note_values(self, values: AccountValues) -> None:
        """Record the snapshots of full minutes, which must be later than all earlier ones."""
        times_ms, stop = values.times_ms, 0
        while stop < len(times_ms):
            begin, hour_ms = stop, times_ms[stop] // _HOUR_MS * _HOUR_MS
            stop = bisect_left(times_ms, hour_ms + _HOUR_MS, begin)
            lowest, last, leverage = values.summary(begin, stop)
            hour, last_at = time_of_ms(hour_ms), time_of_ms(times_ms[stop - 1])
            self.equity = self.equity.noted(last_at, lowest).noted(last_at, last)
            if self.hours and self.hours[-1].hour == hour:
                leverage = max(leverage, self.hours.pop().leverage or 0.0)
            self.hours.append(HourlyValue(self.account.id, hour, last, last_at, leverage))
        self.last_snapshot = LastSnapshot(self.account.run.id, last_at)

    def end_invocation(self, at: datetime) -> None:
        """End the current invocation; keep its record if it made any calls, other than to hold."""
        invocation, self.invocation = self.invocation, None
        assert invocation is not None
        has_acted = bool(invocation.record.calls)  # holds are added by `close`
        invocation.close(at)
        if self.finished is not None and has_acted:
            self.finished.append(invocation.record)

    def report(self, at: datetime, number: int, decision: Change, outcome: Outcome) -> None:
        """Record the outcome of the decision with this number in the invocation."""
        if self.invocation is not None:
            self.invocation.add(number, decision, outcome, at)
        status, result = outcome
        rule = result.get("rule") or (EXCHANGE if status == "rejected" else None)
        reason = result.get("reason") or result.get("error")
        self.outcomes.append(
            DecisionOutcome(at, TOOL_NAMES[type(decision)], canonical_symbol(decision.symbol), status, rule, reason)
        )

    def knows_history(self, now: datetime) -> bool:
        """Whether `history` would return the same history as the last time."""
        return False

    def stats(self, history: RunHistory) -> ObservedStats:
        """Return the statistics that its agent sees beside the history last read."""
        return history.stats


def _note_orders(orders: dict[UUID, OrderAnswer], posting: Posting) -> None:
    """Add the orders that a posting answers, and bring the resting orders that it changes up to date."""
    placed = {answer.id: answer for answer in posting.answers}
    orders |= placed
    for change in posting.resting:
        order_id = change.order.id
        if order_id in placed:
            continue
        fills = [fill for fill in posting.fills if fill.request_id == order_id]
        rows, answer = {fill.order_id for fill in fills}, orders[order_id]
        made = (*answer.fills, *(AnswerFill(f.quantity, f.price, f.fee, f.maker, f.at) for f in fills))
        realized = answer.realized_pnl + sum((t.gross_pnl for t in posting.trades if t.id in rows), ZERO)
        orders[order_id] = answer.so_far(change.status, change.cancel_reason, made, realized)


class ModelAccount(BacktestAccount):
    trades_shown = TRADES_SHOWN

    def __init__(
        self, model: Model, source: DecisionSource, account: Account, limits: VariantLimits | None = None
    ) -> None:
        """`limits`: what the guard allows; None: what the variant or the strategy does."""
        self.model = model
        variant, strategy = VARIANTS[model.variant], source.strategy
        shown = Shown(variant.intervals) if strategy is None else strategy.shown
        super().__init__(source, shown, limits or (strategy or variant).limits, account)
        self.cadence = model.configuration.cadence
        self._history: RunHistory | None = None
        self._stats: ObservedStats | None = None
        """The statistics beside the history last read, once they have been asked for."""

        self._risk = RiskFigures.of(account.run.initial_capital)
        self._complete_hours = self._hours_read = 0
        self._last_hour_read: list[HourlyValue] = []
        """How many hours `_risk` includes, how many were recorded when the history was last read, and the last of
        these, which may go on."""

        self.trades: list[Trade] = []
        """Its completed trades, in order of closing."""

        self._requests: dict[UUID, tuple[UUID | None, UUID | None]] = {}
        """The ids of the orders behind the first and the last fill of each position."""

        self.fees = self.liquidation_fees = ZERO
        self.largest: dict[str, Decimal] = {}
        """The notional of its largest execution in each market."""

    def tags_of(self, trade: Trade) -> tuple[str | None, str | None]:
        """Return the tags of the orders that opened and that closed a completed trade, if they have one."""
        opened_by, _ = self._requests[trade.parent_id or trade.id]
        _, closed_by = self._requests[trade.id]
        return self.tags.get(opened_by), self.tags.get(closed_by)

    def apply(self, posting: Posting) -> None:
        super().apply(posting)
        self.trades += posting.trades
        executed: defaultdict[str, Decimal] = defaultdict(Decimal)
        for fill in posting.fills:
            self.fees += fill.fee
            self.liquidation_fees += fill.liquidation_fee
            opened_by, _ = self._requests.get(fill.order_id, (fill.request_id, None))
            self._requests[fill.order_id] = opened_by, fill.request_id
            executed[fill.symbol] += fill.quantity * fill.price
        for symbol, notional in executed.items():
            self.largest[symbol] = max(notional, self.largest.get(symbol, ZERO))

    def history(self, now: datetime) -> RunHistory:
        """Return the history that the agent sees, refreshed after each posting and each hour, as in a service."""
        if self._history is None or not self.knows_history(now):
            self._history = super().history(now)
            self._stats = None
            self._hours_read, self._last_hour_read = len(self.hours), self.hours[-1:]
        return self._history

    def knows_history(self, now: datetime) -> bool:
        known = self._history
        if known is None or known.sequence != self.account.sequence:
            return False
        return known.hour <= now < known.hour + _HOUR

    def stats(self, history: RunHistory) -> ObservedStats:
        """Return the statistics with risk-adjusted figures, from the hours recorded when the history was read."""
        if self._stats is None:
            complete = max(self._complete_hours, self._hours_read - 1)
            self._risk = reduce(
                RiskFigures.after, hourly_points(self.hours[self._complete_hours : complete]), self._risk
            )
            self._complete_hours = complete
            self._stats = reduce(RiskFigures.after, hourly_points(self._last_hour_read), self._risk).beside(
                history.stats
            )
        return self._stats

    def refusals(self) -> list[tuple[str, int, str | None]]:
        """Return each rule that refused decisions, with their number and the last reason, the most frequent first.

        Rejections by the exchange count as `exchange`, and failed decisions as `failed`.
        """
        refused = [(each.rule or each.status, each.reason) for each in self.outcomes if each.status != "ok"]
        reasons, counts = dict(refused), Counter(rule for rule, _ in refused)
        return [(rule, count, reasons[rule]) for rule, count in counts.most_common()]


def open_model_account(model: Model, source: DecisionSource, settings: Settings, at: datetime) -> ModelAccount:
    """Return a model's new account in its first run, with the sequence number of the first row in a service."""
    account = unopened_account(model.id, settings.initial_capital, settings.quote_currency, at)
    return model_account(model, source, settings, msgspec.structs.replace(account, sequence=1))


def model_account(model: Model, source: DecisionSource, settings: Settings, account: Account) -> ModelAccount:
    """Return a model's account, with the limits of a service for decisions that take time."""
    limits = limits_of(model, settings.attempt_timeout_s) if source.runs_ahead else None
    return ModelAccount(model, source, account, limits)


def next_minute(second: int) -> int:
    """Return the first full minute after a second."""
    return (second // _MINUTE_S + 1) * _MINUTE_S


FIRST_CYCLE = timedelta(milliseconds=1)
FIRST_SNAPSHOT_MS = 2
"""The delay between the start of a service and its first decisions and snapshots."""


class TouchFinder:
    """Finds the next touch of an account in a market."""

    def __init__(self, market: BacktestMarket, rules: ExchangeRules) -> None:
        self._market = market
        self._rules = rules
        self._last = market.span.stop - 1

    def first(self, followed: BacktestAccount, start: int, until: int) -> int | None:
        """Return the first second in [start, until] with a tick that may change the account; None if there is none."""
        if followed.account.is_idle:
            return None
        while start <= until:
            if start <= followed.clear_until or self._clear_minutes(followed, start):
                start = followed.clear_until + 1
                continue
            end = min(until, start // 60 * 60 + 59)
            touched = self._first_within(followed, start, end)
            if touched is not None:
                return touched
            followed.clear_until, start = end, end + 1
        return None

    def _clear_minutes(self, followed: BacktestAccount, start: int) -> bool:
        """Extend `clear_until` by whole minutes from the minute of `start` on.

        Return False if that minute is not clear.
        """
        minute, count = start // 60, 1
        is_clear, symbols = False, _concerned(followed)
        # Nothing beyond the next funding is clear.
        hours = min(self._rules.funding_hours(symbol) for symbol in symbols)
        boundary = last_boundary(moment_of(start), hours) + timedelta(hours=hours)
        last = min(int(boundary.timestamp()) // 60 - 1, self._last // 60)
        while minute <= last:
            stop = min(minute + count - 1, last)
            if not self._is_clear(followed, self._market.ranges(symbols, minute * 60, stop * 60 + 59)):
                break
            is_clear, followed.clear_until = True, stop * 60 + 59
            minute, count = stop + 1, 2 * count
        return is_clear

    def _first_within(self, followed: BacktestAccount, start: int, end: int) -> int | None:
        """Return the first second in [start, end], of one minute, that may change the account."""
        market, symbols = self._market, _concerned(followed)
        if start % 60 == 0:  # known without computing the minute's path, and due for funding
            if not self._is_clear(followed, market.ranges(symbols, start, start)):
                return start if market.ticking(start) else self._first_within(followed, start + 1, end)
            start += 1
        while start <= end:
            if self._is_clear(followed, market.ranges(symbols, start, end)):
                return None
            low, high = start, end
            while low < high:  # the first touch lies in [low, high]
                middle = (low + high) // 2
                if self._is_clear(followed, market.ranges(symbols, low, middle)):
                    low = middle + 1
                else:
                    high = middle
            if market.ticking(low):
                return low
            start = low + 1
        return None

    def _is_clear(self, followed: BacktestAccount, ranges: PriceRanges) -> bool:
        return is_unaffected(followed.account, ranges, self._rules)


def _concerned(followed: BacktestAccount) -> Sequence[str]:
    return [*followed.account.positions, *(order.symbol for order in followed.account.resting)]
