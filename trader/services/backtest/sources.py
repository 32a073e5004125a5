"""Sources of decisions that take time: AI models, and decisions that were recorded with their times."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from trader.clock import epoch_second, moment_of
from trader.domain.agents.conversation import ToolRequest
from trader.domain.agents.guard import STALE_DECISION, Approved, Refusal
from trader.domain.agents.invocations import Invocation as InvocationRow
from trader.domain.agents.invocations import Step, ToolCall
from trader.domain.agents.mask import Mask
from trader.domain.agents.memory import CYCLES_REMEMBERED, PastCall, PastCycle, note_of, remember
from trader.domain.agents.messages import decision_json, failed, order_outcome, plan_outcome, refused
from trader.domain.agents.strategy import Peek, Strategy
from trader.domain.agents.tools import TOOL_NAMES, TOOLS, BadCall, Change, Decision, decode
from trader.domain.agents.view import View
from trader.domain.exchange.orders import ExitPlan
from trader.domain.market.markets import STALE_AFTER, canonical_symbol
from trader.domain.models import Model
from trader.domain.money import ZERO
from trader.errors import InvalidInput, StrategyError
from trader.services.agents.record import InvocationRecord
from trader.services.agents.workflow import InvocationLimits, Workflow
from trader.services.backtest.accounts import Invocation, ModelAccount, StrategySource
from trader.services.backtest.answers import KeptAnswers
from trader.services.backtest.invocations import AccountSession, InvokedSource
from trader.services.backtest.ledger import Lines
from trader.services.backtest.masking import MaskedPeek, MaskedSession
from trader.services.events import EventBus
from trader.settings import Settings
from trader.strategies import LoadedStrategy


class RecordedCall(msgspec.Struct, frozen=True):
    """A tool call. `number` counts the calls of its invocation from 1."""

    number: int
    tool: str
    arguments: dict[str, Any]

    @classmethod
    def of(cls, number: int, decision: Decision) -> "RecordedCall":
        return cls(number, TOOL_NAMES[type(decision)], decision_json(decision))

    @property
    def decision(self) -> Decision:
        return msgspec.convert(self.arguments, TOOLS[self.tool])


class RecordedStep(msgspec.Struct, frozen=True, rename="camel"):
    """The calls of one answer, and when their execution began. `viewed_at` is the time of the view they are about."""

    at: datetime
    viewed_at: datetime
    calls: list[RecordedCall]


class RecordedInvocation(msgspec.Struct, frozen=True, rename="camel"):
    """The decisions of one invocation of a model."""

    model_id: str
    started_at: datetime
    steps: list[RecordedStep]


def answered_by(model: Model, strategy: Strategy) -> str:
    """Return the name of what answers for a model: a file's is followed by its digest, since it may change."""
    name = model.router_model_name
    return f"{name}@{strategy.digest[:16]}" if isinstance(strategy, LoadedStrategy) else name


class AiSource(InvokedSource):
    """Decision source of an AI model, which is asked by the service's workflow at its cadence.

    With a mask its workflow runs in the masked market; what it records for the result is of the real one.
    """

    is_asking = True

    def __init__(
        self, model: Model, provider: KeptAnswers, settings: Settings, ends_at: datetime, mask: Mask | None = None
    ) -> None:
        self._model = model
        self._mask = mask
        self._inverse = None if mask is None else mask.inverse()
        self.provider = provider
        self._every_s = int(model.configuration.cadence.total_seconds())
        self._limits = InvocationLimits(
            settings.run_tokens_max,
            settings.answer_tokens_max,
            settings.attempt_timeout_s,
            math.inf,  # of real time, which does not pass here
            self._seen(ends_at + STALE_AFTER + timedelta(milliseconds=1)) if settings.replay_thinking == "on" else None,
        )
        self._kept_note: str | None = None
        self._cycles: deque[PastCycle] = deque(maxlen=CYCLES_REMEMBERED)
        self.cost_usd: Decimal = ZERO
        self.answered_by: str | None = None
        """The name of the model that the provider says answered last."""

        self.recorded: list[RecordedInvocation] = []

    def _seen(self, moment: datetime) -> datetime:
        return moment if self._mask is None else self._mask.apply(moment)

    def next_after(self, second: int) -> int:
        return (second // self._every_s + 1) * self._every_s

    async def invoke(self, session: AccountSession) -> None:
        """Run an invocation, unless the previous one is still running.

        :raises AskingEnded: it failed since no model is asked any more
        """
        followed, now = session.followed, session.now()
        if followed.seen > epoch_second(now):
            followed.missed += 1
            return
        session.memory = remember(self._kept_note, self._cycles)
        record = InvocationRecord(self._model, self._seen(now))
        providers = {self.provider.name: self.provider}
        world: AccountSession | MaskedSession = session if self._mask is None else MaskedSession(session, self._mask)
        try:
            await Workflow(record, providers, world, world, world, EventBus(), self._limits).execute()
        finally:
            self._note(record, followed)
        if not record.is_completed and self.provider.ended is not None:
            raise self.provider.ended

    def _note(self, record: InvocationRecord, followed: ModelAccount) -> None:
        """Record the outcome of an invocation, also of one that was aborted."""
        done = record.invocation
        followed.decisions += record.is_completed
        followed.missed += not record.is_completed
        if done.step_count:
            calls = [each for call in record.calls if (each := PastCall.of(call)).is_remembered]
            self._cycles.appendleft(PastCycle(done.started_at, done.response, calls))
        self._kept_note = next(filter(None, map(note_of, reversed(record.calls))), self._kept_note)
        self.cost_usd += done.cost_usd or ZERO
        self.answered_by = record.answered_by or self.answered_by
        self.recorded.append(recorded_invocation(done, record.steps, record.calls, self._inverse))
        for call in record.calls:
            decision = _decision_of(call, self._inverse)
            if isinstance(decision, Change) and call.metadata["results"]:
                at = call.created_at if self._inverse is None else self._inverse.apply(call.created_at)
                followed.report(at, call.number, decision, (call.status, call.metadata["results"][0]))
        if followed.finished is not None:
            followed.finished.append(record)


class NotedSource(StrategySource):
    """Decision source of a model's strategy that records its decisions. After a failure it decides nothing more."""

    def __init__(self, model: Model, strategy: Strategy, mask: Mask | None = None) -> None:
        super().__init__(strategy, model.configuration.cadence)
        self._model = model
        self._mask = mask
        self.recorded: list[RecordedInvocation] = []
        self.failure: StrategyError | None = None
        self.answered_by = answered_by(model, strategy)

    def next_after(self, second: int) -> int | None:
        return super().next_after(second) if self.failure is None else None

    def decide(self, peek: Peek, look: Callable[[], View]) -> Sequence[Decision]:
        try:
            decisions = super().decide(peek, look) if self._mask is None else self._masked(self._mask, peek, look)
        except StrategyError as error:
            self.failure = error
            return ()
        if decisions:
            calls = [RecordedCall.of(number, decision) for number, decision in enumerate(decisions, 1)]
            step = RecordedStep(peek.now, peek.now, calls)
            self.recorded.append(RecordedInvocation(self._model.id, peek.now, [step]))
        return decisions

    def _masked(self, mask: Mask, peek: Peek, look: Callable[[], View]) -> Sequence[Decision]:
        """Return the decisions of the masked market, for the real one."""
        decisions = super().decide(MaskedPeek(peek, mask), lambda: mask.apply(look()))
        return [mask.inverse().apply(decision) for decision in decisions]


class RepeatedSource(InvokedSource):
    """Decision source that executes recorded decisions at their recorded times."""

    def __init__(self, model: Model, recordings: Sequence[RecordedInvocation]) -> None:
        self._model = model
        self.recorded: list[RecordedInvocation] = []
        self._seconds = [epoch_second(invocation.started_at) for invocation in recordings]
        self._by_second = dict(zip(self._seconds, recordings, strict=True))

    def next_after(self, second: int) -> int | None:
        place = bisect_right(self._seconds, second)
        return self._seconds[place] if place < len(self._seconds) else None

    async def invoke(self, session: AccountSession) -> None:
        """Execute the recorded decisions of this moment's invocation."""
        followed = session.followed
        invocation = self._by_second[epoch_second(session.now())]
        session.advance_to(max(invocation.started_at, moment_of(followed.seen)))
        followed.decisions += 1
        self.recorded.append(invocation)
        decisions = [call.decision for step in invocation.steps for call in step.calls]
        followed.invocation = Invocation(self._model, invocation.started_at, decisions)
        for step in invocation.steps:
            session.advance_to(step.at)
            for call in step.calls:
                decision = call.decision
                if isinstance(decision, Change):
                    self._execute(session, followed.invocation, step.viewed_at, call.number, decision)
        followed.end_invocation(session.now())

    def _execute(
        self, session: AccountSession, invocation: Invocation, viewed_at: datetime, number: int, decision: Change
    ) -> None:
        symbol = canonical_symbol(decision.symbol)
        if symbol not in session.markets:
            return
        followed = session.followed
        match session.verdict(decision, symbol, viewed_at):
            case ExitPlan() as plan:
                outcome = plan_outcome(plan, session.set_plan(symbol, plan))
            case Approved() as approved:
                try:
                    outcome = order_outcome(session.place(approved.order(followed.account.id, invocation.id, number)))
                except InvalidInput as error:  # as it was when it was recorded
                    outcome = failed(str(error))
            case Refusal() as refusal:
                outcome = refused(refusal)
        followed.report(session.now(), number, decision, outcome)


class DecisionLines(Lines):
    """One JSON line per invocation with decisions, in order of time for each model."""

    def take(self, accounts: Iterable[ModelAccount]) -> None:
        """Add the invocations since the last call."""
        for followed in accounts:
            if isinstance(followed.source, AiSource | NotedSource | RepeatedSource):
                for recorded in followed.source.recorded:
                    self.add(msgspec.json.encode(recorded))
                followed.source.recorded.clear()


def read_decisions(file: Path) -> dict[str, list[RecordedInvocation]]:
    """Read the invocations with decisions, by model. Raises `OSError` and `MsgspecError`."""
    invocations: dict[str, list[RecordedInvocation]] = {}
    with file.open("rb") as lines:
        for line in lines:
            recorded = msgspec.json.decode(line, type=RecordedInvocation)
            invocations.setdefault(recorded.model_id, []).append(recorded)
    return invocations


def recorded_invocation(
    done: InvocationRow, steps: Sequence[Step], calls: Sequence[ToolCall], inverse: Mask | None = None
) -> RecordedInvocation:
    """Return the decisions of an invocation from its record; `inverse` takes off the mask of a masked one."""
    recorded_steps, viewed_at, left = [], done.started_at, deque(calls)
    for step in steps:
        own = [left.popleft() for _ in step.tool_names[: len(left)]]
        decided = [
            RecordedCall.of(call.number, made) for call in own if (made := _decision_of(call, inverse)) is not None
        ]
        if decided:
            recorded_steps.append(RecordedStep(step.created_at, viewed_at, decided))
        if any(_is_stale(call) for call in own):  # then the model was shown a new view
            viewed_at = own[-1].created_at
    recorded = RecordedInvocation(done.model_id, done.started_at, recorded_steps)
    return recorded if inverse is None else inverse.apply(recorded)


def _decision_of(call: ToolCall, inverse: Mask | None) -> Decision | None:
    raw = call.metadata.get("raw")
    if raw is None:
        return None
    decision = decode(ToolRequest(id="", name=raw["name"], arguments=raw["arguments"]))
    if isinstance(decision, BadCall):
        return None
    return decision if inverse is None else inverse.apply(decision)


def _is_stale(call: ToolCall) -> bool:
    return any(isinstance(each, Mapping) and each.get("rule") == STALE_DECISION for each in call.metadata["results"])
