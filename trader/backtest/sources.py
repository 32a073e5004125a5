"""Sources of decisions: strategies, AI models, and recorded decisions."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec.structs import replace

from trader.agents.conversation import InvocationLimits
from trader.agents.domain.conversation import ToolRequest
from trader.agents.domain.guard import STALE_DECISION
from trader.agents.domain.invocations import Invocation, Step, ToolCall
from trader.agents.domain.mask import Mask
from trader.agents.domain.memory import CYCLES_REMEMBERED, PastCall, PastCycle, note_of, remember
from trader.agents.domain.models import EXTERNAL, Model
from trader.agents.domain.strategy import Peek, Strategy
from trader.agents.domain.tools import RECORDED_TOOLS, TOOL_NAMES, BadCall, Change, Decision, Holding, decode
from trader.agents.domain.view import Memory, View
from trader.agents.providers.provider import Provider
from trader.agents.record import InvocationRecord
from trader.agents.workflow import Workflow
from trader.backtest.accounts import BacktestAccount, DecisionCycle, DecisionOutcome, DecisionSource
from trader.backtest.answers import KeptAnswers, KeptDecisions
from trader.backtest.masking import MaskedPeek, MaskedSession
from trader.backtest.session import AccountSession
from trader.backtest.spec import DECISIONS, RESULT, Conditions
from trader.core.clock import epoch_second, moment_of
from trader.core.errors import SettingsError, StrategyError
from trader.core.events import EventBus
from trader.core.files import decode_json, read_lines, read_regular
from trader.core.money import ZERO
from trader.market.domain.markets import STALE_AFTER
from trader.portfolio.tables import Table
from trader.settings.settings import Settings

_AGENT_TOKENS: Final = 1_000_000_000
"""More tokens than any decision of an external agent has, which pays for them itself."""


_LASTS_MAX: Final = timedelta(days=1)
"""How long an invocation can last at most."""


class RecordedCall(msgspec.Struct, frozen=True):
    """A tool call. `number` counts the calls of its invocation from 1."""

    number: int
    tool: str
    arguments: dict[str, Any]

    @classmethod
    def of(cls, number: int, decision: Decision) -> "RecordedCall":
        return cls(number, TOOL_NAMES[type(decision)], msgspec.to_builtins(decision))

    @property
    def decision(self) -> Decision:
        """The decision. Raises `ValidationError`."""
        if self.tool not in RECORDED_TOOLS:
            raise msgspec.ValidationError(f"there is no tool {self.tool[:100]!r}")
        return msgspec.convert(self.arguments, RECORDED_TOOLS[self.tool])


class RecordedStep(msgspec.Struct, frozen=True, rename="camel"):
    """The calls of one answer, and the time their execution began.

    `viewed_at` is the time of the view they are based on.
    """

    at: Annotated[datetime, msgspec.Meta(tz=True)]
    viewed_at: Annotated[datetime, msgspec.Meta(tz=True)]
    calls: list[RecordedCall]


class RecordedInvocation(msgspec.Struct, frozen=True, rename="camel"):
    """The decisions of one invocation of a model."""

    model_id: str
    started_at: Annotated[datetime, msgspec.Meta(tz=True)]
    steps: list[RecordedStep]

    def check(self) -> None:
        """Check that its decisions are valid and were made within a day. Raises `ValidationError`."""
        for step in self.steps:
            if not all(abs(moment - self.started_at) <= _LASTS_MAX for moment in (step.at, step.viewed_at)):
                raise msgspec.ValidationError(f"a step at {step.at} of an invocation that began at {self.started_at}")
            for call in step.calls:
                _ = call.decision


def answered_by(model: Model, strategy: Strategy) -> str:
    """Return the name of a model's source of answers; for a file, followed by its digest, since it may change."""
    name = model.router_model_name
    return f"{name}@{strategy.digest[:16]}" if strategy.digest else name


class WorkflowSource(DecisionSource):
    """Decision source of a model that the service's workflow asks at its cadence.

    With a mask, its workflow runs in the masked market, but the recorded decisions are for the real one.
    """

    runs_ahead = records_inputs = True

    def __init__(
        self, model: Model, provider: Provider, settings: Settings, ends_at: datetime, mask: Mask | None = None
    ) -> None:
        self._model = model
        self.mask = mask
        self._inverse = None if mask is None else mask.inverse()
        self.provider = provider
        self._every_s = int(model.configuration.cadence.total_seconds())
        self._limits = InvocationLimits(
            _AGENT_TOKENS if model.is_external else settings.run_tokens_max,
            settings.answer_tokens_max,
            settings.attempt_timeout_s,
            math.inf,  # in real time, which does not pass here
            self._seen(ends_at + STALE_AFTER + timedelta(milliseconds=1)) if settings.replay_thinking == "on" else None,
        )
        self._kept_note: str | None = None
        self._cycles = _no_cycles()
        self._last_at: datetime | None = None
        self._looked_at: datetime | None = None
        self.cost_usd: Decimal = ZERO
        self.answered_by: str | None = None
        """The name of the model that answered last, as reported by the provider."""

        self.recorded: list[RecordedInvocation] = []

    def _seen(self, moment: datetime) -> datetime:
        return moment if self.mask is None else self.mask.apply(moment)

    def next_after(self, second: int) -> int | None:
        return (second // self._every_s + 1) * self._every_s

    async def run(self, session: AccountSession) -> None:
        """Run an invocation, unless the previous one is still running."""
        followed, now = session.followed, session.now()
        if followed.seen > epoch_second(now):
            followed.missed += 1
            return
        session.remember = partial(remember, self._kept_note, self._cycles, self._last_at)
        session.looked_at = self._looked_at if self._model.is_ai else None
        record = InvocationRecord(self._model, self._seen(now))
        session.record = record
        environment = self._environment(session)
        try:
            await Workflow(record, {self.provider.name: self.provider}, environment, EventBus(), self._limits).execute()
        finally:
            self._note(record, followed, now)

    def _environment(self, session: AccountSession) -> AccountSession | MaskedSession:
        return session if self.mask is None else MaskedSession(session, self.mask)

    def _note(self, record: InvocationRecord, followed: BacktestAccount, began_at: datetime) -> None:
        """Record the outcome of an invocation, even if it was aborted."""
        done = record.invocation
        followed.decisions += record.is_completed
        followed.missed += not record.is_completed
        followed.ends[done.ended_by or "error"] += 1
        self._last_at = done.started_at
        if done.step_count:
            self._looked_at = began_at
            self._cycles.appendleft(past_cycle(record))
        self._kept_note = next(filter(None, map(note_of, reversed(record.calls))), self._kept_note)
        self.cost_usd += done.cost_usd or ZERO
        self.answered_by = record.answered_by or self.answered_by
        self.recorded.append(recorded_invocation(done, record.steps, record.calls, self._inverse))
        for call in record.calls:
            decision = _decision_of(call, self._inverse)
            if isinstance(decision, Change) and call.metadata["results"]:
                at = call.created_at if self._inverse is None else self._inverse.apply(call.created_at)
                followed.report(at, call.number, decision, (call.status, call.metadata["results"][0]))
            elif call.status == "failed":  # refused before it was decoded, or no decision about the books
                tool, error = call.metadata["raw"]["name"], call.metadata["results"][0].get("error")
                followed.outcomes.append(DecisionOutcome(call.created_at, tool, "", call.status, None, error))
        if followed.finished is not None:
            followed.finished.append(record)


class AiSource(WorkflowSource):
    """Decision source of an AI model whose answers are stored."""

    is_asking = True
    provider: KeptAnswers

    async def run(self, session: AccountSession) -> None:
        """Run an invocation, unless the previous one is still running.

        :raises AskingEnded: it failed because requests to models have ended
        """
        decided = session.followed.decisions
        await super().run(session)
        if session.followed.decisions == decided and self.provider.ended is not None:
            raise self.provider.ended

    def renewed(self, model: Model, settings: Settings, ends_at: datetime, mask: Mask | None) -> "AiSource":
        """Return a source that asks the same provider for a model, and remembers nothing."""
        return AiSource(model, self.provider, settings, ends_at, mask)


class RecordingStrategySource(DecisionSource):
    """Decision source of a model's strategy; records its decisions. After a failure it makes no more decisions."""

    strategy: Strategy

    def __init__(self, model: Model, strategy: Strategy, mask: Mask | None = None) -> None:
        self._model = model
        self.strategy = strategy
        self._every_s = int(model.configuration.cadence.total_seconds())
        self.mask = mask
        self.recorded: list[RecordedInvocation] = []
        self.failure: StrategyError | None = None
        self.answered_by = answered_by(model, strategy)
        self.kept: KeptDecisions | None = None
        """The store of its decisions; None: it decides again in each run."""

        self.draws = True
        """Whether to collect the strategy's own series, which only a report shows."""

        self.series = Table("series")
        """The values of its own series; empty for a masked copy and for a strategy whose decisions are kept."""

        self._cycles = _no_cycles()

    def next_after(self, second: int) -> int | None:
        return None if self.failure is not None else (second // self._every_s + 1) * self._every_s

    async def run(self, session: AccountSession) -> None:
        followed = session.followed
        followed.decisions += 1
        session.remember = self._remembered
        session.read_history()  # as a service does for each view, also where `may_act` spares the strategy the view
        decisions = self.decide(session.peek, session.look)
        if not decisions:
            self._cycles.appendleft(PastCycle(session.now(), None, ()))
            return
        invocation = followed.invocation = DecisionCycle(self._model, self.answered_by, session.now(), decisions)
        session.record = invocation.record
        for number, decision in enumerate(decisions, 1):
            await session.execute(number, decision)
        followed.end_invocation(session.now())
        self._cycles.appendleft(past_cycle(invocation.record))

    def _remembered(self) -> Memory:
        """Return the strategy's memory; behind a mask without the names and figures of the real markets."""
        memory = remember(None, self._cycles, self._cycles[0].at if self._cycles else None)
        if self.mask is None:
            return memory
        decisions = tuple(replace(each, text=self.mask.text(each.text)) for each in memory.decisions)
        return Memory(decisions=decisions, refused=tuple(map(self.mask.text, memory.refused)))

    def decide(self, peek: Peek, look: Callable[[], View]) -> Sequence[Decision]:
        """Return the decisions at this moment, and record them. `look` builds the full view, which is expensive."""
        try:
            decisions = self._decided(peek, look)
        except StrategyError as error:
            self.failure = error
            return ()
        if decisions:  # a service numbers only the changes, and takes the reason of a hold as the text of the answer
            decisions = sorted(decisions, key=lambda decision: isinstance(decision, Holding))
            calls = [RecordedCall.of(number, decision) for number, decision in enumerate(decisions, 1)]
            step = RecordedStep(peek.now, peek.now, calls)
            self.recorded.append(RecordedInvocation(self._model.id, peek.now, [step]))
        return decisions

    def _decided(self, peek: Peek, look: Callable[[], View]) -> Sequence[Decision]:
        """Return the decisions for the real market, with the mask of a masked strategy removed."""
        mask = self.mask
        if self.kept is None and not self.strategy.may_act(peek if mask is None else MaskedPeek(peek, mask)):
            return ()
        if mask is None:
            view = look()
            decisions = self._asked(view)
            if self.draws and self.kept is None:
                for value in self.strategy.series(view) or ():
                    self.series.add(view.at, *value)
            return decisions
        return [mask.inverse().apply(decision) for decision in self._asked(mask.apply(look()))]

    def _asked(self, view: View) -> list[Decision]:
        if self.kept is None:
            return list(self.strategy.decide(view) or ())
        return self.kept.decide(self._model, self.answered_by, self.strategy, view)


def _no_cycles() -> deque[PastCycle]:
    return deque(maxlen=CYCLES_REMEMBERED)


def past_cycle(record: InvocationRecord) -> PastCycle:
    """Return a finished invocation as its agent remembers it."""
    done = record.invocation
    calls = [each for call in record.calls if (each := PastCall.of(call)).is_remembered]
    return PastCycle(done.started_at, done.response, calls)


class ReplayedDecisions(DecisionSource):
    """Decision source that executes recorded decisions at their recorded times."""

    runs_ahead = True

    def __init__(self, model: Model, recordings: Sequence[RecordedInvocation]) -> None:
        self._model = model
        self.recorded: list[RecordedInvocation] = []
        self._seconds = [epoch_second(invocation.started_at) for invocation in recordings]
        self._by_second = dict(zip(self._seconds, recordings, strict=True))

    def next_after(self, second: int) -> int | None:
        place = bisect_right(self._seconds, second)
        return self._seconds[place] if place < len(self._seconds) else None

    async def run(self, session: AccountSession) -> None:
        """Execute the recorded decisions of this moment's invocation."""
        followed = session.followed
        recorded = self._by_second[epoch_second(session.now())]
        session.advance_to(max(recorded.started_at, moment_of(followed.seen)))
        followed.decisions += 1
        self.recorded.append(recorded)
        decisions = [call.decision for step in recorded.steps for call in step.calls]
        invocation = followed.invocation = DecisionCycle(
            self._model, self._model.router_model_name, recorded.started_at, decisions
        )
        session.record = invocation.record
        for step in recorded.steps:
            session.advance_to(step.at)
            session.viewed_at = step.viewed_at
            for call in step.calls:
                await session.execute(call.number, call.decision)
        followed.end_invocation(session.now())


def read_decisions(file: Path) -> dict[str, list[RecordedInvocation]]:
    """Read the invocations with decisions in order of time, by model. Raises `OSError` and `MsgspecError`."""
    invocations: dict[str, list[RecordedInvocation]] = {}
    for line in read_lines(file):
        recorded = decode_json(line, RecordedInvocation)
        recorded.check()
        invocations.setdefault(recorded.model_id, []).append(recorded)
    return {model_id: sorted(each, key=lambda made: made.started_at) for model_id, each in invocations.items()}


class RecordedAccount(msgspec.Struct):
    id: str
    equity: Decimal


class RecordedRun(msgspec.Struct, rename="camel"):
    """The parts of a result that are needed to execute its decisions again."""

    program: str
    from_: str = msgspec.field(name="from")
    to: str
    complete: bool
    options: Conditions
    models: list[Model]
    accounts: list[RecordedAccount]


def read_recorded_run(folder: Path, option: str) -> tuple[RecordedRun, dict[str, list[RecordedInvocation]]]:
    """Read a backtest's folder, which an option names, as data: its models, and their decisions in order of time.

    :raises SettingsError: it is not the folder of a backtest
    """
    try:
        recorded = decode_json(read_regular(folder / RESULT), RecordedRun, lambda kind, text: kind(text))
        decisions = read_decisions(folder / DECISIONS)
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(
            [f"{option} is {str(folder)!r}; it must be the folder of a backtest ({RESULT}, {DECISIONS}): {error}"]
        ) from None
    return recorded, decisions


def recorded_invocation(
    done: Invocation, steps: Sequence[Step], calls: Sequence[ToolCall], inverse: Mask | None = None
) -> RecordedInvocation:
    """Return the decisions of an invocation from its record; `inverse` removes the mask, if any."""
    recorded_steps, viewed_at, left = [], done.started_at, deque(calls)
    for step in steps:
        own = [left.popleft() for _ in step.tool_names[: len(left)]]
        decided = [
            RecordedCall.of(call.number, made) for call in own if (made := _decision_of(call, inverse)) is not None
        ]
        if decided:
            recorded_steps.append(RecordedStep(step.created_at, viewed_at, decided))
        if step.provider != EXTERNAL and any(map(_is_stale, own)):  # at that point the model saw a new view
            viewed_at = own[-1].created_at
    recorded = RecordedInvocation(done.model_id, done.started_at, recorded_steps)
    return recorded if inverse is None else inverse.apply(recorded)


def _decision_of(call: ToolCall, inverse: Mask | None) -> Decision | None:
    raw = call.metadata.get("raw")
    if raw is None:
        return None
    decision = decode(ToolRequest(id="", name=raw["name"], arguments=raw["arguments"]), RECORDED_TOOLS)
    if isinstance(decision, BadCall):
        return None
    return decision if inverse is None else inverse.apply(decision)


def _is_stale(call: ToolCall) -> bool:
    return any(isinstance(each, Mapping) and each.get("rule") == STALE_DECISION for each in call.metadata["results"])
