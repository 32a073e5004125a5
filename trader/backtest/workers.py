"""Workers: what executes the runs of a sweep, processes of this machine or the workers of a Dask cluster.

A worker process executes specs from its standard input; on failure a run says why on standard error. Without arguments
it executes one spec. With `serve` it executes one after another until its input ends: it opens their market once and
forks a process for each run, so that no run sees what another one changed, and none ends another. Specs and answers are
pickles, each after its length.

On a cluster a worker executes a whole run in such a process, and returns its files. The inputs of runs are transferred
by content: their files are one value in the cluster, keyed by SHA-256, which workers pass on to each other. When a
worker dies, Dask reassigns its unfinished runs.
"""

import asyncio
import gc
import hashlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Self

from msgspec.structs import replace

from trader import __version__
from trader.backtest.execution import BacktestListener, Interrupts, MarketOpener, execute
from trader.backtest.spec import RESULT, BacktestSpec
from trader.core.errors import StartError, TraderError
from trader.core.files import append_lines
from trader.portfolio.tables import extra

if TYPE_CHECKING:
    from distributed import Client, Future


class Workers:
    """A number of processes, each started when a run needs it, and again after it died."""

    def __init__(self, count: int) -> None:
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._all = [_Worker() for _ in range(count)]
        for worker in self._all:
            self._idle.put_nowait(worker)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(worker.end() for worker in self._all))

    async def run(self, spec: BacktestSpec) -> tuple[bytes, int]:
        """Execute a run once a process is free. Return its output on standard error, and its exit code."""
        worker = await self._idle.get()
        try:
            return await worker.run(spec)
        finally:
            self._idle.put_nowait(worker)


class _Worker:
    """A process that executes one run after another, on a market that it opens once."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, spec: BacktestSpec) -> tuple[bytes, int]:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *WORKER, "serve", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        specs, answers = self._process.stdin, self._process.stdout
        assert specs is not None
        assert answers is not None
        content = pickle.dumps(spec)
        try:
            specs.write(LENGTH.pack(len(content)) + content)
            answer = await answers.readexactly(*LENGTH.unpack(await answers.readexactly(LENGTH.size)))
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            self._process = None
            return b"", code
        ended: tuple[bytes, int] = pickle.loads(answer)  # noqa: S301  # written by our own process
        return ended

    async def end(self) -> None:
        """End the process, and the run that it executes."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


CONNECT_TIMEOUT_S: Final = 15
WORKER: Final = (sys.executable, "-m", "trader.backtest.workers")
"""The program that executes the spec on its standard input."""


Files = Mapping[str, bytes]
"""The content of each file, by its path within a folder."""


class Inputs(NamedTuple):
    """A file or folder that runs read: its absolute path, and its files by relative path."""

    path: Path
    files: Files

    @classmethod
    def of(cls, path: Path, files: Iterable[Path]) -> "Inputs":
        """Read the `files`, which are in the folder `path`, or are `path` itself. Raises `OSError`."""
        place = path.absolute()
        return cls(place, {str(file.absolute().relative_to(place.parent)): file.read_bytes() for file in files})

    @property
    def digest(self) -> str:
        """The SHA-256 over names and contents, in hexadecimal."""
        whole = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            whole.update(f"{name}\0".encode() + hashlib.sha256(content).digest())
        return whole.hexdigest()


class Finished(NamedTuple):
    """A finished run: its files, its standard error, its exit code, and its lines for the trial ledger."""

    files: Files
    said: bytes
    code: int
    trials: bytes


class Cluster:
    """Runs backtests on the workers of a Dask cluster. `trials` is the trial ledger that they append to."""

    def __init__(self, client: "Client", inputs: Sequence[Inputs], trials: Path) -> None:
        self._client = client
        self._trials = trials
        known = [Inputs.of(trials, [trials])] if trials.exists() else []
        self._shared = [(str(each.path), self._share(each)) for each in (*inputs, *known)]

    def _share(self, inputs: Inputs) -> "Future[Files]":
        # A task instead of scattered data, which is lost with its worker: a lost task runs again.
        return self._client.submit(dict, inputs.files, key=f"trader-files-{inputs.digest}")

    async def run(self, spec: BacktestSpec) -> tuple[bytes, int]:
        """Execute a backtest, whose absolute paths are paths of this machine, and write its files here.

        Return its output on standard error and its exit code; a run that could not be executed is reported the same
        way.
        """
        future = self._client.submit(carry_out, __version__, spec, self._shared, pure=False)
        try:
            finished: Finished = await future
        except (OSError, RuntimeError, extra("distributed", "cluster").KilledWorker) as error:
            return str(error).encode(), 1
        await asyncio.to_thread(self._write, finished, spec.out)
        return finished.said, finished.code

    def _write(self, finished: Finished, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name in sorted(finished.files, key=lambda name: name == RESULT):  # last, since it marks the run as complete
            (folder / name).write_bytes(finished.files[name])
        append_lines(self._trials, finished.trials)


@asynccontextmanager
async def client_of(address: str) -> "AsyncIterator[Client]":
    """Yield a client of the Dask scheduler at this address.

    :raises SettingsError: distributed is not installed
    :raises StartError: no scheduler answers there, or it has no worker
    """
    client = extra("distributed", "cluster").Client(address, asynchronous=True, timeout=CONNECT_TIMEOUT_S)
    try:
        try:
            await client
            await client.wait_for_workers(1, timeout=CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            raise StartError(f"--cluster {address}: no scheduler with a worker answers there: {error}") from error
        yield client
    finally:
        await client.close()


def carry_out(version: str, spec: BacktestSpec, shared: Sequence[tuple[str, Files]]) -> Finished:
    """Execute a run on a worker, in a temporary folder.

    Paths of the caller's machine in the spec are replaced by paths of the worker, and in the result the reverse.

    :raises RuntimeError: the worker has another version of the program
    """
    if __version__ != version:
        raise RuntimeError(f"the worker has version {__version__}, and the sweep needs version {version}")
    with tempfile.TemporaryDirectory(
        prefix="trader-run-", dir=extra("distributed", "cluster").get_worker().local_directory
    ) as name:
        root = Path(name)
        here = {str(spec.out): str(root / "run"), str(spec.trials): str(root / "trials" / spec.trials.name)}
        for number, (path, files) in enumerate(shared):
            place = here.setdefault(path, str(root / str(number) / Path(path).name))
            for file, content in files.items():
                target = Path(place).parent / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)

        def moved(path: Path) -> Path:
            return Path(here.get(str(path), path))

        conditions, entrants = spec.conditions.placed(moved), spec.entrants.placed(moved)
        run = replace(spec, conditions=conditions, entrants=entrants, out=moved(spec.out), trials=moved(spec.trials))
        run.trials.parent.mkdir(exist_ok=True)
        run.trials.touch()
        known = run.trials.stat().st_size
        process = subprocess.run(  # noqa: S603  # a constant, without a shell
            WORKER, input=pickle.dumps(run),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=root, check=False,
        )  # fmt: skip
        written = {file.name: file.read_bytes() for file in run.out.iterdir()} if run.out.exists() else {}
        if RESULT in written:
            for path, place in here.items():
                written[RESULT] = written[RESULT].replace(place.encode(), path.encode())
        return Finished(written, process.stderr, process.returncode, run.trials.read_bytes()[known:])


LENGTH: Final = struct.Struct(">I")
"""The length of a spec or an answer."""

_SAID_MAX: Final = 65_536


def main() -> int:
    """Execute the spec, and return the exit code."""
    return _execute(pickle.load(sys.stdin.buffer), MarketOpener())  # noqa: S301  # written by the parent process


def _execute(spec: BacktestSpec, opener: MarketOpener) -> int:
    try:
        finished = asyncio.run(execute(spec, BacktestListener(), Interrupts(), opener))
    except TraderError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if finished.value["complete"] else 1


class _Server:
    """Executes each spec in a forked process, and answers with its standard error and its exit code."""

    def __init__(self) -> None:
        self._opener = MarketOpener()
        self._child: int | None = None
        self._is_ending = False

    def serve(self) -> None:
        """Execute specs until there are no more, or until SIGTERM, which also ends the present one."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the forked process, too
        signal.signal(signal.SIGTERM, self._end)
        # What a strategy prints belongs to neither of them.
        specs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        while not self._is_ending and (head := specs.read(LENGTH.size)):
            spec = pickle.loads(specs.read(*LENGTH.unpack(head)))  # noqa: S301  # written by the parent process
            answer = pickle.dumps(self._run(spec))
            answers.write(LENGTH.pack(len(answer)) + answer)
            answers.flush()

    def _run(self, spec: BacktestSpec) -> tuple[bytes, int]:
        with suppress(TraderError, OSError):  # the run says why
            asyncio.run(self._opener.prepare(spec))
        gc.collect()
        gc.freeze()  # otherwise the first full collection of each run would copy all that it shares
        with tempfile.TemporaryFile() as said:
            self._child = os.fork()
            if self._child == 0:
                _run_forked(spec, self._opener, said)
            _, status = os.waitpid(self._child, 0)
            self._child = None
            said.seek(max(0, said.seek(0, os.SEEK_END) - _SAID_MAX))
            return said.read(), os.waitstatus_to_exitcode(status)

    def _end(self, *_: Any) -> None:
        self._is_ending = True
        if not self._child:  # None, or 0 in a process just forked
            sys.exit(0)
        os.kill(self._child, signal.SIGTERM)


def _run_forked(spec: BacktestSpec, opener: MarketOpener, said: BinaryIO) -> None:
    """Execute a spec, and end this process without what the server would do at its end."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(said.fileno(), 2)
        code = _execute(spec, opener)
    except BaseException:  # noqa: BLE001  # reported by the parent process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        _Server().serve()
    else:
        sys.exit(main())
