"""Runs of a sweep on a Dask cluster: a worker executes a whole run in a process, and returns its files.

The inputs of runs are transferred by content: their files are one value in the cluster, keyed by SHA-256, which workers
pass on to each other. When a worker dies, Dask reassigns its unfinished runs.
"""

import asyncio
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from trader import __version__
from trader.core.errors import StartError
from trader.portfolio.tables import extra

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_TIMEOUT_S: Final = 15
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

    async def run(self, arguments: Sequence[str], folder: Path) -> tuple[bytes, int]:
        """Run `trader` with these arguments, whose absolute paths are paths of this machine.

        Its files are written to `folder`. Return its output on standard error and its exit code; a run that could not
        be executed is reported the same way.
        """
        future = self._client.submit(
            carry_out, __version__, list(arguments), self._shared, str(folder), str(self._trials), pure=False
        )
        try:
            finished: Finished = await future
        except (OSError, RuntimeError, extra("distributed", "cluster").KilledWorker) as error:
            return str(error).encode(), 1
        await asyncio.to_thread(self._write, finished, folder)
        return finished.said, finished.code

    def _write(self, finished: Finished, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name in sorted(finished.files, key=lambda name: name == RESULT):  # last, since it marks the run as complete
            (folder / name).write_bytes(finished.files[name])
        with self._trials.open("ab", buffering=0) as file:
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


def carry_out(
    version: str, arguments: Sequence[str], shared: Sequence[tuple[str, Files]], folder: str, trials: str
) -> Finished:
    """Execute a run on a worker, in a temporary folder.

    Paths of the caller's machine in the arguments are replaced by paths of the worker, and in the result the reverse.

    :raises RuntimeError: the worker has another version of the program
    """
    if __version__ != version:
        raise RuntimeError(f"the worker has version {__version__}, and the sweep needs version {version}")
    with tempfile.TemporaryDirectory(
        prefix="trader-run-", dir=extra("distributed", "cluster").get_worker().local_directory
    ) as name:
        root = Path(name)
        here = {folder: str(root / "run"), trials: str(root / "trials" / Path(trials).name)}
        for number, (path, files) in enumerate(shared):
            place = here.setdefault(path, str(root / str(number) / Path(path).name))
            for file, content in files.items():
                target = Path(place).parent / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        ledger, run = Path(here[trials]), Path(here[folder])
        ledger.parent.mkdir(exist_ok=True)
        ledger.touch()
        known = ledger.stat().st_size
        process = subprocess.run(  # noqa: S603  # the arguments of a sweep, without a shell
            [sys.executable, "-m", "trader", *(_replaced(each, here) for each in arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=root, check=False,
        )  # fmt: skip
        written = {file.name: file.read_bytes() for file in run.iterdir()} if run.exists() else {}
        if RESULT in written:
            for path, place in here.items():
                written[RESULT] = written[RESULT].replace(place.encode(), path.encode())
        return Finished(written, process.stderr, process.returncode, ledger.read_bytes()[known:])


def _replaced(argument: str, paths: Mapping[str, str]) -> str:
    """Return an argument with its path replaced: the whole argument, or the part before a colon."""
    path, colon, rest = argument.partition(":")
    return f"{paths.get(path, path)}{colon}{rest}"
