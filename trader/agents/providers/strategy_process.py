"""Strategy files as a provider: each model has its own process, which decides within a deadline.

The service writes a start line and then one view per cycle to the process, and reads one line of JSON for each. It ends
a process that fails or does not answer in time, with all that it started; the next cycle starts from the last saved
state. The process has limits, and sees few files if bubblewrap can run here (see `_confinement`); otherwise a strategy
can read what the service's user can.
"""

import asyncio
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from trader.agents.domain.conversation import ModelAnswer, ToolRequest, Turn
from trader.agents.domain.models import Model
from trader.agents.domain.strategy import HISTORY_MAX
from trader.agents.domain.tools import Decision, Holding, request_of
from trader.agents.domain.view import Shown, VariantLimits, View
from trader.agents.strategy_files import LoadedStrategy, load_strategy
from trader.agents.variants import VARIANTS
from trader.core.errors import ProviderError, SettingsError, StrategyError
from trader.core.files import is_secret_name

START_LIMIT_S: Final = 30.0
"""How long a process may take to load its strategy."""

GRACE_S: Final = 1.0
"""Extra time beyond a strategy's deadline, in which the process itself reports its position in the code."""

LINE_MAX: Final = 1 << 24
"""Maximum bytes of an answer, including its state."""

PASSED_ON: Final = ("HOME", "LANG", "LC_ALL", "PATH", "PYTHONPATH", "TZ", "VIRTUAL_ENV")
"""Variables passed to a strategy's process in addition to STRATEGY_*: none holds a secret of the service."""


LIMITS: Final[Mapping[int, int]] = {
    resource.RLIMIT_AS: 4 << 30,
    resource.RLIMIT_FSIZE: 64 << 20,
    resource.RLIMIT_CPU: 2 * 3600,
    resource.RLIMIT_NPROC: 512,
    resource.RLIMIT_CORE: 0,
}
"""Limits of a process: bytes of address space and of a file, seconds of processor time, and processes of its user."""

RENEWED_AFTER_S: Final = LIMITS[resource.RLIMIT_CPU] / 2
"""The processor time after which a process ends between two cycles, well before its limit ends it in one."""

VISIBLE: Final = (
    "/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ca-certificates", "/etc/hosts",
    "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/ssl",
)  # fmt: skip
"""What a confined process sees of the machine, in addition to Python, this package, and the strategy's own folder."""

log = logging.getLogger("trader.agents")


class StrategyStates(Protocol):
    """Stores the states of strategies."""

    async def load(self, model_id: str) -> Any:
        """Return the last saved state; None when there is none."""
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

    shown: Shown = Shown(())
    deadline_s: float = 0.0
    digest: str = ""
    error: str | None = None


class Decided(msgspec.Struct):
    """The answer to a view: its decisions as tool calls, and the resulting state."""

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
        """Write a line and return the line that answers it. Raise `ProviderError`."""
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

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def end(self) -> None:
        """End the process and all that it started."""
        _kill_group(self._process.pid)
        await self._process.wait()


class StrategyProvider:
    """Strategy files as a provider. The first answer has the decisions, the second ends the cycle."""

    name = "strategy"
    is_remote = False

    def __init__(self, states: StrategyStates | None = None) -> None:
        self._states = states
        self._processes: dict[str, _Process] = {}
        self._starting: dict[str, asyncio.Lock] = {}

    def left_out(self, model: Model) -> Collection[str]:
        return ()

    async def shown(self, model: Model) -> Shown:
        """Return what the strategy wants to see. Raise `ProviderError`."""
        return (await self._running(model)).begun.shown

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Return the decisions about a view. Raise `ProviderError`."""
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
            if process is None or process.has_ended:
                process = self._processes[model.id] = await self._start(model)
            return process

    async def _start(self, model: Model) -> _Process:
        """Start a model's process and load its strategy with its last state. Raise `ProviderError`."""
        state = None if self._states is None else await self._states.load(model.id)
        limits = VARIANTS[model.variant].limits
        begin = Begin(model.router_model_name, model.configuration.params, limits, state)
        process = _Process(
            await asyncio.create_subprocess_exec(
                *command(model.router_model_name),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=dict(_environ()),
                limit=LINE_MAX,
                start_new_session=True,  # Ctrl+C must reach only the service; the session's processes end together
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


def check_strategy(reference: str, params: Mapping[str, Any]) -> list[str]:
    """Load a strategy in a process of its own, as the service does. Return the problems."""
    begin = Begin(reference, params, next(iter(VARIANTS.values())).limits, None)
    words, pipe = command(reference), subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, env=dict(_environ()), start_new_session=True) as process:  # noqa: S603 - our own interpreter
        try:
            answer, _ = process.communicate(msgspec.json.encode(begin) + b"\n", timeout=START_LIMIT_S)
            error = msgspec.json.decode(answer, type=Begun).error
        except subprocess.TimeoutExpired:
            error = f"{reference} took longer than {START_LIMIT_S:g} s to load"
        except msgspec.MsgspecError:
            error = f"{reference} ended the process that loads it"
        finally:
            _kill_group(process.pid)
    return [] if error is None else error.split("\n")


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(pid, signal.SIGKILL)


def command(reference: str) -> list[str]:
    """Return the command that runs the strategy `file.py:Class`, confined if this machine can."""
    folder = Path(reference.rpartition(":")[0]).parent
    return [*(_confinement(folder) if can_confine() else ()), sys.executable, "-P", "-m", __name__]


@cache
def can_confine() -> bool:
    """Return whether bubblewrap is installed and may make namespaces here; in most containers it may not."""
    if shutil.which("bwrap") is not None:
        ended = subprocess.run([*_confinement(Path("/usr")), "true"], capture_output=True, check=False)  # noqa: S603 - fixed words
        if ended.returncode == 0:
            return True
    log.warning("strategies run unconfined and can read what this user can, since bubblewrap (bwrap) cannot run here")
    return False


def _confinement(folder: Path) -> Iterator[str]:
    """Yield the words of bubblewrap before a command that sees a strategy's folder and little else.

    Dotfiles and `*.env` of the folder are hidden. All is read-only except an empty /tmp; the data folder, `.env` and
    the sockets of servers are out of sight. The processes are in a namespace that ends with the first of them, and with
    the service. The network is the service's.
    """
    yield from ("bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL")
    yield from ("--proc", "/proc", "--dev", "/dev", "--size", str(LIMITS[resource.RLIMIT_FSIZE]), "--tmpfs", "/tmp")  # noqa: S108 - its own
    for place in VISIBLE:
        yield from ("--ro-bind-try", place, place)
    yield from ("--ro-bind", str(folder), str(folder))
    for path in sorted(folder.iterdir()):
        if is_secret_name(path.name):
            yield from ("--tmpfs", str(path)) if path.is_dir() else ("--ro-bind", os.devnull, str(path))
    for part in dict.fromkeys((sys.base_prefix, sys.prefix, str(Path(__file__).parents[2]))):
        yield from ("--ro-bind", part, part)
    yield from ("--chdir", str(folder), "--")


def _environ() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if name in PASSED_ON or name.startswith("STRATEGY_"):
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


def _end_all(*_: object) -> None:
    """End this process and all that the strategy started."""
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Load the strategy of the first line, then answer views until the input ends, as it does when the service dies."""
    for limit, most in LIMITS.items():
        hard = resource.getrlimit(limit)[1]
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (lowest, lowest))
    lines, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output that the strategy prints is not an answer
    begin = msgspec.json.decode(lines.readline(), type=Begin)
    signal.signal(signal.SIGALRM, _end_all)
    signal.alarm(round(START_LIMIT_S))  # while it loads, it does not see the end of the service
    try:
        strategy = _loaded(begin)
        strategy.limits = begin.limits
        if begin.state is not None:
            strategy.load(begin.state)
    except (SettingsError, StrategyError) as error:
        answers.write(msgspec.json.encode(Begun(error=str(error))) + b"\n")
        return
    signal.alarm(0)
    begun = Begun(strategy.shown, strategy.deadline_s, strategy.digest)
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
    finally:
        _end_all()
