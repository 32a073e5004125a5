"""Runs of a sweep on a Dask cluster: a worker executes a whole run in a process, and returns its files.

The inputs of runs are transferred by content: their files are one value in the cluster, keyed by SHA-256, which workers
pass on to each other. When a worker dies, Dask reassigns its unfinished runs.
"""

import asyncio
import hashlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from trader import __version__
from trader.backtest.spec import BacktestSpec
from trader.core.errors import StartError
from trader.core.files import open_appending
from trader.portfolio.tables import extra

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_TIMEOUT_S: Final = 15
WORKER: Final = (sys.executable, "-m", "trader.backtest.worker")
"""The program that executes the spec on its standard input."""

RESULT: Final = "result.json"

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
        with open_appending(self._trials) as file:
            file.write(finished.trials)


@asynccontextmanager
async def connected(address: str, inputs: Sequence[Inputs], trials: Path) -> AsyncIterator[Cluster]:
    """Yield the cluster with this scheduler address; its runs read these inputs. Raise like `client_of`."""
    async with client_of(address) as client:
        yield Cluster(client, inputs, trials)


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
        run = _relocated(spec, here)
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


def _relocated(spec: BacktestSpec, paths: Mapping[str, str]) -> BacktestSpec:
    """Return a spec with its paths replaced."""

    def place(path: Path | None) -> Path | None:
        return None if path is None else Path(paths.get(str(path), path))

    conditions, strategy = spec.conditions, spec.entrants.strategy
    names = ("data", "funding_folder", "markets_file")
    if isinstance(strategy, str):
        file, colon, class_name = strategy.rpartition(":")
        strategy = f"{paths.get(file, file)}{colon}{class_name}"
    return replace(
        spec,
        conditions=replace(conditions, **{name: place(getattr(conditions, name)) for name in names}),
        entrants=replace(spec.entrants, strategy=strategy),
        out=place(spec.out),
        trials=place(spec.trials),
    )
