"""Run of an exam: the entrants decide in every state that has no decision yet, here or in processes."""

import asyncio
import multiprocessing
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, aclosing, closing
from decimal import Decimal
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from trader.backtest.answers import AskingEnded
from trader.backtest.sources import AiSource
from trader.core.clock import SystemClock
from trader.core.errors import SettingsError, SinkUnavailable, StartError
from trader.core.money import ZERO
from trader.exam.domain.scores import UNDECIDED
from trader.exam.folder import ExamPlan, ExamState, Sheet, begin, is_begun, judged, read_plan, register, register_anchor
from trader.exam.opening import Examined, ExamSpec, exam_environ, examining, new_plan, sit
from trader.exam.sitting import Sitting
from trader.record.anchors import AnchorSink

_CHUNK: Final = 25
"""States that a process decides at once."""


class Listener:
    """Receives what people see of a run, and ignores it."""

    def say(self, line: str) -> None:
        """Receive a line, such as where external agents call."""

    def show(self, done: int, count: int, spent_usd: Decimal) -> None:
        """Receive the number of finished states, the total, and what answers have cost so far."""


class ExamEnd(NamedTuple):
    """The end of a run: its plan and decisions, what was spent, and why it ended early (None: it did not)."""

    plan: ExamPlan
    sittings: list[Sitting]
    spent_usd: Decimal
    cause: Literal["verdict", "budget", "provider", "missing"] | None = None
    reason: str = ""


async def run(spec: ExamSpec, listener: Listener, sink: AnchorSink | None = None) -> ExamEnd:
    """Let the entrants decide in the states that have no decision yet, until the plan ends or has its verdict.

    Without a plan in the folder, one is made. Before the first question `sink` receives the digest of the register.

    :raises StartError: the sink does not answer
    :raises StrategyError: a strategy failed
    :raises SettingsError: entrants or settings differ from the plan, or the folder holds other files
    """
    spec.check()
    spent, sample, ended = ZERO, 0, None
    if is_begun(spec.out):
        spec = _as_planned(spec, *read_plan(spec.out))
    while ended is None or (ended.cause is None and sample < ended.plan.samples):
        own = _of_sample(spec, sample, spent)
        async with examining(own) as examined:
            for line in examined.chosen.agent_lines:
                listener.say(line)
            if not is_begun(spec.out):
                plan, secret = new_plan(own, examined)
                begin(spec.out, register(spec.out, plan, secret), secret)
            ended = await _sample(own, examined, listener, sink)
        spent += ended.spent_usd
        sample += 1
    return ended


async def _anchor(sink: AnchorSink, folder: Path) -> None:
    try:
        await sink.send(register_anchor(folder, SystemClock().now()))
    except SinkUnavailable as error:
        raise StartError(f"ANCHOR_URL: {error}. No question was asked; repeat the command to go on.") from None


def _as_planned(spec: ExamSpec, plan: ExamPlan, secret: str) -> ExamSpec:
    """Return the spec with what the plan of a resumed exam says.

    :raises SettingsError: the spec asks for another comparison, or gives another secret
    """
    if spec.secret not in (None, secret):
        raise SettingsError([f"--secret: {spec.out} was created with a different secret"])
    if spec.compare not in (None, plan.compared):
        pair = ",".join(plan.compared) if plan.compared else "no pair"
        raise SettingsError([f"--compare: {spec.out} compares {pair}, which was fixed before it began"])
    return replace(spec, states=len(plan.states), horizon=plan.horizon, samples=plan.samples, managed=plan.managed)


def _of_sample(spec: ExamSpec, sample: int, spent: Decimal) -> ExamSpec:
    """Return the spec of one sample: its answers are kept apart, and it may spend what the ones before have left."""
    entrants = spec.entrants
    if sample and entrants.cassette is not None:
        budget = entrants.budget_usd and entrants.budget_usd - spent
        place = entrants.cassette.with_name(f"{entrants.cassette.name}-{sample}")
        entrants = replace(entrants, cassette=place, budget_usd=budget)
    return replace(spec, entrants=entrants, sample=sample)


async def _sample(spec: ExamSpec, examined: Examined, listener: Listener, sink: AnchorSink | None) -> ExamEnd:
    """Let the entrants decide once in every state that has no decision of this sample yet."""
    plan, secret = read_plan(spec.out)
    if problems := list(_unlike(plan, examined, exam_environ(spec.conditions))):
        raise SettingsError([f"{spec.out} is {problem}" for problem in problems])
    spending, sheet = examined.chosen.spending, Sheet(spec.out, plan)
    async with AsyncExitStack() as stack:
        stack.enter_context(closing(sheet))
        if sink is not None and not sheet.sittings:
            await _anchor(sink, spec.out)
        examined.chosen.open_cassette(stack)
        spent_before = sum((each.answer.cost_usd or ZERO for each in sheet.sittings), ZERO)
        sat = {sitting.state for sitting in sheet.sittings if sitting.sample == spec.sample}
        left = [state for state in plan.states if state.number not in sat]
        is_code = not any(isinstance(source, AiSource) for _, source in examined.chosen.models)
        decide = _by_processes if is_code and spec.workers > 1 else _in_this_process
        decided = await stack.enter_async_context(aclosing(decide(spec, examined, plan.seed(secret), left)))
        try:
            async for sittings in decided:
                sheet.add([replace(each, sample=spec.sample) for each in sittings])
                done = len({(each.state, each.sample) for each in sheet.sittings})
                spent_usd = spent_before + spending.spent_usd
                listener.show(done, len(plan.states) * plan.samples, spent_usd)
                verdict = judged(plan, sheet.sittings)
                if verdict is not None and verdict.verdict != UNDECIDED:
                    first, second = plan.compared or ("", "")
                    reason = f"{first} is {verdict.verdict} than {second}."
                    return ExamEnd(plan, sheet.sittings, spending.spent_usd, "verdict", reason)
        except AskingEnded as ended:
            return ExamEnd(plan, sheet.sittings, spending.spent_usd, ended.cause, str(ended))
    return ExamEnd(plan, sheet.sittings, spending.spent_usd)


def _unlike(plan: ExamPlan, examined: Examined, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield how entrants, settings and recording differ from the plan."""
    if [each.model.id for each in examined.entrants] != plan.entrants:
        yield f"an exam of {', '.join(plan.entrants)}"
    elif [each.model for each in examined.entrants] != plan.models or examined.strategies != plan.strategies:
        yield f"an exam of {', '.join(plan.entrants)} with another configuration or other code"
    if environ != plan.settings:
        yield "an exam with " + " ".join(f"{name}={text}" for name, text in sorted(plan.settings.items()))
    if examined.recording != plan.recording:
        yield "an exam on another recording, or with other funding rates"


async def _in_this_process(
    spec: ExamSpec, examined: Examined, secret: str, states: Sequence[ExamState]
) -> AsyncGenerator[list[Sitting]]:
    """Yield the decisions of each state, in order, made in `concurrency` states at a time.

    :raises AskingEnded: the first state that cannot be decided; later ones that were begun keep their answers in the
        cassette, and are decided when the exam is resumed
    """
    count = 1 if spec.entrants.agents else spec.concurrency  # an agent decides in one state at a time
    left, begun = deque(states), deque[asyncio.Task[list[Sitting]]]()
    try:
        while left or begun:
            while left and len(begun) < count:
                begun.append(asyncio.create_task(sit(examined.room, secret, left.popleft(), examined.entrants)))
            try:
                yield await begun.popleft()
            except AskingEnded:
                await asyncio.gather(*begun, return_exceptions=True)
                raise
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


def _chunks(states: Sequence[ExamState], workers: int) -> list[Sequence[ExamState]]:
    """Return parts of states that a worker decides at once: small ones, so that progress is seen and kept."""
    size = max(1, min(_CHUNK, len(states) // workers))
    return [states[first : first + size] for first in range(0, len(states), size)]


async def _by_processes(
    spec: ExamSpec, examined: Examined, secret: str, states: Sequence[ExamState]
) -> AsyncGenerator[list[Sitting]]:
    """Yield the decisions of chunks of states, in order, made in `workers` processes."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(spec.workers, multiprocessing.get_context("spawn")) as pool:
        futures = [loop.run_in_executor(pool, sit_alone, spec, secret, part) for part in _chunks(states, spec.workers)]
        try:
            for future in futures:
                yield msgspec.json.decode(await future, type=list[Sitting])
        finally:
            for future in futures:
                future.cancel()


def sit_alone(spec: ExamSpec, secret: str, states: Sequence[ExamState]) -> bytes:
    """Decide in states in a process of its own, and return the decisions as JSON."""
    return asyncio.run(_sit_alone(spec, secret, states))


async def _sit_alone(spec: ExamSpec, secret: str, states: Sequence[ExamState]) -> bytes:
    async with examining(spec) as examined:
        decided = [each async for each in _in_this_process(spec, examined, secret, states)]
    return msgspec.json.encode([sitting for each in decided for sitting in each])
