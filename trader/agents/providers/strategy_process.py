"""Strategy files as a provider: each model has its own process, which decides within a deadline.

The service writes a start line and then one view per cycle to the process, and reads one line of JSON for each. It ends
a process that fails or does not answer in time, with all that it started; the next cycle starts from the last saved
state. `confinement.py` says what the process sees, reaches and uses. What it writes is a stranger's: it is validated
like a caller's input.
"""

import asyncio
import logging
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec

from trader.agents.domain.conversation import ModelAnswer, ToolRequest, Turn, storable
from trader.agents.domain.models import Model
from trader.agents.domain.strategy import FILLS_MAX, HISTORY_MAX, Strategy, StrategyState
from trader.agents.domain.tools import RECORDED_TOOLS, BadCall, Decision, Holding, decode, request_of
from trader.agents.domain.view import SERIES_SHOWN, Shown, VariantLimits, View
from trader.agents.providers.confinement import PACKAGE, bubblewrap, can_confine, kept, restrict
from trader.agents.strategy_files import DEADLINE_MAX_S, DECISIONS_MAX, LoadedStrategy, load_strategy
from trader.agents.variants import VARIANTS
from trader.core import tasks
from trader.core.errors import ProviderError, SettingsError, StrategyError
from trader.core.files import file_digest, is_secret_name
from trader.core.variant_id import VariantId
from trader.market.domain.markets import INTERVALS

START_LIMIT_S: Final = 30.0
"""How long a process may take to load its strategy."""

GRACE_S: Final = 1.0
"""Extra time beyond a strategy's deadline, in which the process itself reports its position in the code."""

END_LIMIT_S: Final = 10.0

LINE_MAX: Final = 1 << 22
"""Maximum bytes of an answer, including its state."""

ERROR_MAX: Final = 4000
"""Maximum characters of a strategy's error."""

NAME_MAX: Final = 100
"""Maximum characters of a strategy's name; an account's id has fewer."""

OUTPUT_MAX: Final = 1 << 16
"""How many bytes of what a strategy prints are logged for each answer; more is read and dropped."""

FILES_MAX: Final = 500
"""Maximum files in a strategy's folder that it can import."""

PASSED_ON: Final = ("HOME", "LANG", "LC_ALL", "PATH", "TZ", "VIRTUAL_ENV")
"""Variables passed to a strategy's process in addition to PYTHONPATH and STRATEGY_*; none holds a secret of ours."""

RENEWED_AFTER_S: Final = 3600.0
"""The processor time after which a process ends between two cycles, well before its limit ends it in one."""

T = TypeVar("T")

log = logging.getLogger("trader.agents")


class StrategyStates(Protocol):
    """Stores the states of strategies."""

    async def load(self, model_id: str) -> StrategyState | None:
        """Return the last saved state; None when there is none."""
        ...

    async def save(self, state: Any, turn: Turn, replaced: datetime | None) -> datetime | None:
        """Save the state after the decisions of a turn, before they are executed, in place of the one it came from.

        Return its version; None, and save nothing, if the stored state is not of the version `replaced`.
        """
        ...


class Begin(msgspec.Struct):
    """The first line that a process reads."""

    reference: str
    params: Mapping[str, Any]
    limits: VariantLimits
    state: Any


class Begun(msgspec.Struct):
    """The first line that a process writes."""

    shown: Shown = Shown(())
    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=DEADLINE_MAX_S)] = 0.0
    error: str | None = None
    name: Annotated[str, msgspec.Meta(max_length=NAME_MAX)] = ""
    variant: VariantId = VariantId.APEX

    def __post_init__(self) -> None:
        """Refuse a view that a loaded strategy cannot ask for, which the service might be busy with for minutes."""
        intervals, candles, series, fills, _ = self.shown
        is_small = len(intervals) <= len(INTERVALS) and series == SERIES_SHOWN and 0 <= fills <= FILLS_MAX
        if not is_small or not 1 <= candles <= HISTORY_MAX:
            raise ValueError(f"it asks for {self.shown!s:.200}")


class Decided(msgspec.Struct):
    """The answer to a view: its decisions as tool calls, and the resulting state."""

    calls: Annotated[list[ToolRequest], msgspec.Meta(max_length=DECISIONS_MAX)] = []
    reason: str | None = None
    state: Any = None
    error: str | None = None


class StrategyProcess:
    """A confined process with its loaded strategy; `start_strategy` makes one."""

    begun: Begun
    version: datetime | None = None
    """The version of the stored state, which the strategy has in its memory; None if none is stored."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, digest: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.name, self.digest = name, digest
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._output_left = OUTPUT_MAX
        self._printing = tasks.start(self._log_output(process.stderr), f"output of {name}")

    async def ask(self, question: object, limit_s: float, answer: type[T]) -> T:
        """Write a line and return the line that answers it. Raise `ProviderError`."""
        self._output_left = OUTPUT_MAX
        try:
            async with asyncio.timeout(limit_s):
                self._stdin.write(msgspec.json.encode(question, enc_hook=dict) + b"\n")
                await self._stdin.drain()
                line = await self._stdout.readline()
        except TimeoutError:
            raise ProviderError(f"the strategy's process did not answer within {limit_s:g} s") from None
        except ConnectionError as error:
            raise ProviderError(f"the strategy's process gave no answer: {error}") from None
        except ValueError:
            raise ProviderError(f"the strategy's answer, with its state, is longer than {LINE_MAX} bytes") from None
        if not line.endswith(b"\n"):
            raise ProviderError("the strategy's process has ended")
        return await asyncio.to_thread(_answer_in, line, answer)

    async def decide(self, view: View) -> Decided:
        """Return the decisions about a view. Raise `ProviderError`; the process is then to be ended."""
        decided = await self.ask(view, self.begun.deadline_s + GRACE_S, Decided)
        if decided.error is not None:
            raise ProviderError(decided.error[:ERROR_MAX])
        return decided

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def end(self) -> None:
        """End the process and all that it started, and wait until they are gone."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        self._stdin.close()
        try:
            async with asyncio.timeout(END_LIMIT_S):
                while await self._stdout.read(OUTPUT_MAX):  # ends with the last of them
                    pass
                await asyncio.gather(self._printing, self._process.wait())
        except TimeoutError:
            log.warning("%s left processes that could not be ended", self.name)
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _log_output(self, stderr: asyncio.StreamReader) -> None:
        """Log what the strategy prints, slowly enough that a flood does not occupy the service."""
        while printed := await stderr.read(OUTPUT_MAX):
            if kept := printed[: self._output_left]:
                log.info("%s printed: %s", self.name, kept.decode(errors="replace").rstrip())
            self._output_left -= len(kept)
            if len(printed) > 4096:
                await asyncio.sleep(0.01)


async def start_strategy(begin: Begin, *, network: bool = False) -> StrategyProcess:
    """Start the confined process of a strategy, and load it there with its state. Raise `ProviderError`."""
    try:
        digest, words = await asyncio.to_thread(_prepared, begin.reference, network=network)
        started = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,  # never the service's own, which may be a terminal
            env=dict(_environ()),
            limit=LINE_MAX,
            start_new_session=True,  # Ctrl+C must reach only the service
        )
    except SettingsError as error:
        raise ProviderError(str(error)) from None
    except (OSError, ValueError) as error:
        raise ProviderError(f"the strategy {begin.reference} cannot be started: {error}") from None
    process = StrategyProcess(started, begin.reference, digest)
    try:
        process.begun = await process.ask(begin, START_LIMIT_S, Begun)
        if process.begun.error is not None:
            raise ProviderError(process.begun.error[:ERROR_MAX])
    except BaseException:
        await process.end()
        raise
    return process


def _prepared(reference: str, *, network: bool) -> tuple[str, list[str]]:
    """Return the SHA-256 of a strategy's file and the command that runs it. Raise `SettingsError`, `OSError`."""
    return file_digest(_file_of(reference).resolve()), command(reference, network=network)


def _file_of(reference: str) -> Path:
    return Path(reference.rpartition(":")[0]).absolute()


def _answer_in(line: bytes, answer: type[T]) -> T:
    """Return the answer that a line holds, with texts as a database holds them. Raise `ProviderError`."""
    try:
        return msgspec.convert(storable(msgspec.json.decode(line)), answer)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProviderError(f"the strategy's process gave an invalid answer: {error}") from None


class StrategyProvider:
    """Strategy files as a provider. The first answer has the decisions, the second ends the cycle."""

    name = "strategy"
    is_remote = False

    def __init__(self, states: StrategyStates | None = None) -> None:
        self._states = states
        self._processes: dict[str, StrategyProcess] = {}
        self._starting: dict[str, asyncio.Lock] = {}

    def left_out(self, model: Model) -> Collection[str]:
        return ()

    async def shown(self, model: Model) -> Shown:
        """Return what the strategy wants to see. Raise `ProviderError`.

        A process whose state is no longer the stored one ends first, as after a failed save or another leader's.
        """
        process = self._processes.get(model.id)
        stored = None if self._states is None else await self._states.load(model.id)
        if process is not None and process.version != (None if stored is None else stored.decided_at):
            await self._end(model.id)
        return (await self._running(model)).begun.shown

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Return the decisions about a view. Raise `ProviderError`."""
        process = await self._running(turn.model)
        name = f"{turn.model.router_model_name}@{process.digest[:16]}"
        if turn.number > 1:
            return ModelAnswer(text=None, calls=(), message={}, model=name)
        try:
            decided = await process.decide(turn.view)
            if self._states is not None and (decided.state is not None or process.version is not None):
                process.version = await self._states.save(decided.state, turn, process.version)
                if process.version is None:
                    raise ProviderError("another process has changed the stored state of the strategy")
        except BaseException:  # its memory is ahead of the stored state
            await self._end(turn.model.id)
            raise
        return ModelAnswer(text=decided.reason, calls=tuple(decided.calls), message={}, model=name)

    async def _running(self, model: Model) -> StrategyProcess:
        async with self._starting.setdefault(model.id, asyncio.Lock()):
            process = self._processes.get(model.id)
            if process is not None and process.has_ended:
                await self._end(model.id)
                process = None
            if process is None:
                stored = None if self._states is None else await self._states.load(model.id)
                configuration, limits = model.configuration, VARIANTS[model.variant].limits
                begin = Begin(model.router_model_name, configuration.params, limits, stored and stored.state)
                process = await start_strategy(begin, network=configuration.network)
                process.version = stored and stored.decided_at
                self._processes[model.id] = process
            return process

    async def _end(self, model_id: str) -> None:
        process = self._processes.pop(model_id, None)
        if process is not None:
            await process.end()

    async def close(self) -> None:
        """End the processes."""
        for model_id in list(self._processes):
            await self._end(model_id)


class ConfinedStrategy(Strategy):
    """A strategy file as a strategy: each decision is made in a confined process of its own, without network.

    It remembers nothing, and finds nothing of the process that asks it, nor of its other decisions. Raise
    `SettingsError`.
    """

    def __init__(self, reference: str, params: Mapping[str, Any]) -> None:
        self.file, self.class_name = _file_of(reference), reference.rpartition(":")[2]
        self._begin = Begin(f"{self.file}:{self.class_name}", params, self.limits, None)
        self.digest = ""
        try:
            begun, self.digest, _ = _in_own_process(self._begin)
        except ProviderError as error:
            raise SettingsError(str(error).split("\n")) from None
        self.name, self.variant, self._shown = begun.name, begun.variant, begun.shown
        self.intervals = begun.shown.intervals

    @property
    def shown(self) -> Shown:
        return self._shown

    def decide(self, view: View) -> list[Decision]:
        """Return the decisions of a new process about a view. Raise `StrategyError`."""
        begin = msgspec.structs.replace(self._begin, limits=self.limits)
        try:
            _, digest, decided = _in_own_process(begin, view)
        except ProviderError as error:
            raise StrategyError(str(error)) from None
        if digest != self.digest:
            raise StrategyError(f"{self.file} has changed since the first decision; its SHA-256 was {self.digest}")
        calls = [*decided.calls, *([request_of(0, Holding(reason=decided.reason))] if decided.reason else ())]
        decisions = [decode(call, RECORDED_TOOLS) for call in calls]
        if bad := [each.error for each in decisions if isinstance(each, BadCall)]:
            raise StrategyError(f"{self.file}: {bad[0]}")
        return [each for each in decisions if not isinstance(each, BadCall)]


def _in_own_process(begin: Begin, view: View | None = None, *, network: bool = False) -> tuple[Begun, str, Decided]:
    """Start a strategy, let it decide about a view, if there is one, and end it; return what it answered and the
    SHA-256 of its file. Raise `ProviderError`.
    """

    async def decide() -> tuple[Begun, str, Decided]:
        process = await start_strategy(begin, network=network)
        try:
            return process.begun, process.digest, Decided() if view is None else await process.decide(view)
        finally:
            await process.end()

    with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
        return thread.submit(asyncio.run, decide()).result()


def check_strategy(reference: str, params: Mapping[str, Any], *, network: bool = False) -> list[str]:
    """Load a strategy in a process of its own, as the service does. Return the problems."""
    try:
        _in_own_process(Begin(reference, params, next(iter(VARIANTS.values())).limits, None), network=network)
    except ProviderError as error:
        return str(error).split("\n")
    return []


def command(reference: str, *, network: bool = False) -> list[str]:
    """Return the command that runs the strategy `file.py:Class`, confined if this machine can.

    :raises SettingsError: its folder has too many files
    :raises OSError: its folder cannot be read
    """
    file = _file_of(reference)
    files = list(dict.fromkeys((file, *_modules(file.parent))))
    if len(files) > FILES_MAX:
        raise SettingsError([f"{file.parent} has more than {FILES_MAX} Python files; give the strategy its own folder"])
    words = bubblewrap(files, file.parent, network=network) if can_confine() else ()
    return kept([*words, sys.executable, "-P", "-m", __name__])


def _modules(folder: Path) -> Iterator[Path]:
    """Yield what a strategy may import from its folder: Python files and those of packages, but no links to others."""
    for path in sorted(folder.iterdir()):
        if is_secret_name(path.name) or path.is_symlink() or path == PACKAGE:
            continue
        if path.is_dir():
            if (path / "__init__.py").is_file():
                yield from _modules(path)
        elif path.suffix == ".py" and path.is_file() and path.stat().st_nlink == 1:
            yield path


def _environ() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if name == "PYTHONPATH":  # a relative path would be in the strategy's folder
            yield name, os.pathsep.join(str(Path(part).absolute()) for part in value.split(os.pathsep) if part)
        elif name in PASSED_ON or name.startswith("STRATEGY_"):
            yield name, value


# --- the process ------------------------------------------------------------------------------------------------------


def decided_by(decisions: Sequence[Decision], state: Any) -> Decided:
    """Return decisions as tool calls. A `Holding` next to other decisions only gives the reason."""
    changes = [decision for decision in decisions if not isinstance(decision, Holding)]
    reasons = [decision.reason for decision in decisions if isinstance(decision, Holding)]
    calls = [request_of(number, decision) for number, decision in enumerate(changes, 1)]
    return Decided(calls, "; ".join(reasons) or None, state)


def _loaded(begin: Begin) -> LoadedStrategy:
    """Return the strategy. Raise `SettingsError`, also if a service cannot show its history."""
    strategy = load_strategy(begin.reference, begin.params)
    if strategy.history > HISTORY_MAX:
        named = f"{strategy.file}: {strategy.class_name}.history is {strategy.history}"
        raise SettingsError([f"{named}; a service shows at most {HISTORY_MAX} closed candles of each interval"])
    return strategy


def main() -> None:
    """Load the strategy of the first line, then answer views until the input ends, as it does when the service dies."""
    restrict()
    lines, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.register_at_fork(after_in_child=answers.close)  # only this process answers
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output that the strategy prints is not an answer
    sys.stdout = os.fdopen(sys.stderr.fileno(), "w", buffering=1, closefd=False)
    begin = msgspec.json.decode(lines.readline(), type=Begin)
    try:
        strategy = _loaded(begin)
        strategy.limits = begin.limits
        if begin.state is not None:
            strategy.load(begin.state)
    except (SettingsError, StrategyError) as error:
        answers.write(msgspec.json.encode(Begun(error=str(error))) + b"\n")
        return
    begun = Begun(strategy.shown, strategy.deadline_s, name=str(strategy.name)[:NAME_MAX], variant=strategy.variant)
    answers.write(msgspec.json.encode(begun) + b"\n")
    views = msgspec.json.Decoder(View)
    while time.process_time() < RENEWED_AFTER_S and (line := lines.readline()):
        try:
            answer = decided_by(strategy.decide(views.decode(line)), strategy.save())
        except StrategyError as error:
            answer = Decided(error=str(error))
        answers.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - shown, and the process ends
        traceback.print_exc()
    finally:
        os._exit(0)  # without waiting for threads of the strategy
