"""Strategies of files as a provider: each model has a process of its own, which decides within a deadline.

The service writes one line for the start and one view per cycle to the process, and reads one line of JSON for each. A
process that fails, or does not answer in time, is ended; the next cycle begins with the state that was saved last.
"""

import asyncio
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec

from trader.domain.agents.conversation import ModelAnswer, ToolRequest, Turn
from trader.domain.agents.tools import Decision, Holding, request_of
from trader.domain.agents.view import VariantLimits, View
from trader.domain.market.markets import Interval
from trader.domain.models import Model
from trader.errors import ProviderError, SettingsError, StrategyError
from trader.strategies import load_strategy
from trader.variants import VARIANTS

START_LIMIT_S: Final = 30.0
"""How long a process may take to load its strategy."""

GRACE_S: Final = 1.0
"""How much longer than its deadline a strategy may take: within it the process itself says where it was."""

LINE_MAX: Final = 1 << 24
"""Bytes of an answer, its state included."""

PASSED_ON: Final = ("HOME", "LANG", "LC_ALL", "PATH", "PYTHONPATH", "TZ", "VIRTUAL_ENV")
"""Variables that a strategy's process has beside those that begin with STRATEGY_: no secret of the service."""


class StrategyStates(Protocol):
    """Where the states of strategies are kept."""

    async def load(self, model_id: str) -> Any:
        """Return the state that was saved last; None when there is none."""
        ...

    async def save(self, model_id: str, state: Any, turn: Turn) -> None:
        """Save the state after the decisions of a turn, before they are executed."""
        ...


class Begin(msgspec.Struct):
    """The first line that a process reads."""

    reference: str
    params: Mapping[str, Any]
    limits: VariantLimits
    state: Any


class Begun(msgspec.Struct):
    """The first line that a process writes."""

    intervals: Sequence[Interval] = ()
    deadline_s: float = 0.0
    digest: str = ""
    error: str | None = None


class Decided(msgspec.Struct):
    """The answer to a view: its decisions as tool calls, and the state afterwards."""

    calls: list[ToolRequest] = []
    reason: str | None = None
    state: Any = None
    error: str | None = None


class _Process:
    """A running process with its loaded strategy."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self.begun = Begun()

    async def ask(self, content: bytes, limit_s: float) -> bytes:
        """Write a line and return the line that answers it. Raises `ProviderError`."""
        try:
            async with asyncio.timeout(limit_s):
                self._stdin.write(content + b"\n")
                await self._stdin.drain()
                line = await self._stdout.readline()
        except TimeoutError:
            raise ProviderError(f"the strategy's process did not answer within {limit_s:g} s") from None
        except (ConnectionError, ValueError) as error:  # it has ended, or its line is too long
            raise ProviderError(f"the strategy's process gave no answer: {error}") from None
        if not line.endswith(b"\n"):
            raise ProviderError("the strategy's process has ended")
        return line

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class StrategyProvider:
    """The strategies of files as a provider. Its first answer has the decisions, a second one ends the cycle."""

    name = "strategy"
    is_remote = False

    def __init__(self, states: StrategyStates | None = None) -> None:
        self._states = states
        self._processes: dict[str, _Process] = {}
        self._starting: dict[str, asyncio.Lock] = {}

    def left_out(self, model: Model) -> Collection[str]:
        return ()

    async def intervals(self, model: Model) -> Sequence[Interval]:
        """Return the intervals that the strategy states. Raises `ProviderError`."""
        return (await self._running(model)).begun.intervals

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Return the decisions about a view. Raises `ProviderError`."""
        process = await self._running(turn.model)
        name = f"{turn.model.router_model_name}@{process.begun.digest[:16]}"
        if turn.number > 1:
            return ModelAnswer(text=None, calls=(), message={}, model=name)
        try:
            line = await process.ask(msgspec.json.encode(turn.view), process.begun.deadline_s + GRACE_S)
            decided = msgspec.json.decode(line, type=Decided)
            if decided.error is not None:
                raise ProviderError(decided.error)
        except BaseException:
            await self._end(turn.model.id)
            raise
        if self._states is not None and decided.state is not None:
            await self._states.save(turn.model.id, decided.state, turn)
        return ModelAnswer(text=decided.reason, calls=tuple(decided.calls), message={}, model=name)

    async def _running(self, model: Model) -> _Process:
        async with self._starting.setdefault(model.id, asyncio.Lock()):
            process = self._processes.get(model.id)
            if process is None:
                process = self._processes[model.id] = await self._start(model)
            return process

    async def _start(self, model: Model) -> _Process:
        """Start the process of a model and load its strategy with its last state. Raises `ProviderError`."""
        state = None if self._states is None else await self._states.load(model.id)
        limits = VARIANTS[model.variant].limits
        begin = Begin(model.router_model_name, model.configuration.params, limits, state)
        process = _Process(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                __name__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=dict(_environ()),
                limit=LINE_MAX,
                start_new_session=True,  # Ctrl+C in a terminal is for the service, which ends it
            )
        )
        try:
            process.begun = msgspec.json.decode(
                await process.ask(msgspec.json.encode(begin), START_LIMIT_S), type=Begun
            )
            if process.begun.error is not None:
                raise ProviderError(process.begun.error)
        except BaseException:
            await process.end()
            raise
        return process

    async def _end(self, model_id: str) -> None:
        process = self._processes.pop(model_id, None)
        if process is not None:
            await process.end()

    async def close(self) -> None:
        """End the processes."""
        for model_id in list(self._processes):
            await self._end(model_id)


def _environ() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if name in PASSED_ON or name.startswith("STRATEGY_"):
            yield name, value


# --- the process ------------------------------------------------------------------------------------------------------


def decided_by(decisions: Sequence[Decision], state: Any) -> Decided:
    """Return decisions as tool calls. A `Holding` beside others only says why."""
    changes = [decision for decision in decisions if not isinstance(decision, Holding)]
    reasons = [decision.reason for decision in decisions if isinstance(decision, Holding)]
    calls = [request_of(number, decision) for number, decision in enumerate(changes, 1)]
    return Decided(calls, "; ".join(reasons) or None, state)


def main() -> None:
    """Load the strategy of the first line, then answer each view until the input ends, as when the service dies."""
    lines, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the strategy prints is no answer
    begin = msgspec.json.decode(lines.readline(), type=Begin)
    try:
        strategy = load_strategy(begin.reference, begin.params)
        strategy.limits = begin.limits
        if begin.state is not None:
            strategy.load(begin.state)
    except (SettingsError, StrategyError) as error:
        answers.write(msgspec.json.encode(Begun(error=str(error))) + b"\n")
        return
    begun = Begun(strategy.intervals, strategy.deadline_s, strategy.digest)
    answers.write(msgspec.json.encode(begun) + b"\n")
    views = msgspec.json.Decoder(View)
    while line := lines.readline():
        try:
            answer = decided_by(strategy.decide(views.decode(line)), strategy.save())
        except StrategyError as error:
            answer = Decided(error=str(error))
        answers.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
