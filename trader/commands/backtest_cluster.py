"""Runs of a sweep on a Dask cluster: a worker carries out a whole run in a process, and its files come back.

What runs read travels by its content: files are one value of the cluster under their SHA-256, which workers hand on to
each other. Dask gives what a worker had not finished when it died to another one.
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

from trader.commands.serve import program_version
from trader.errors import StartError
from trader.results import extra

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_TIMEOUT_S: Final = 15
RESULT: Final = "result.json"

Files = Mapping[str, bytes]
"""The content of each file by its path within a folder."""


class Inputs(NamedTuple):
    """A file or folder that runs read: its absolute path, and the files, by their paths beside it."""

    path: Path
    files: Files

    @classmethod
    def of(cls, path: Path, files: Iterable[Path]) -> "Inputs":
        """Read the `files`, which lie in the folder `path` or are `path` itself. Raises `OSError`."""
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
    """A run as it ended: its files, what it printed on standard error, its exit code, and its lines for the trials."""

    files: Files
    said: bytes
    code: int
    trials: bytes


class Cluster:
    """Carries out backtests on the workers of a Dask cluster. `trials` is the trial ledger that they add to."""

    def __init__(self, client: "Client", inputs: Sequence[Inputs], trials: Path) -> None:
        self._client = client
        self._trials = trials
        known = [Inputs.of(trials, [trials])] if trials.exists() else []
        self._shared = [(str(each.path), self._share(each)) for each in (*inputs, *known)]

    def _share(self, inputs: Inputs) -> "Future[Files]":
        # Not scattered: what was scattered is gone with the worker that had it, a task is carried out again.
        return self._client.submit(dict, inputs.files, key=f"trader-files-{inputs.digest}")

    async def run(self, arguments: Sequence[str], folder: Path) -> tuple[bytes, int]:
        """Carry out `trader` with these arguments, of which absolute paths are those of this machine.

        Its files are written into the folder. Return what it printed on standard error, and its exit code; why it could
        not be carried out is told in the same way.
        """
        future = self._client.submit(
            carry_out, program_version(), list(arguments), self._shared, str(folder), str(self._trials), pure=False
        )
        try:
            finished: Finished = await future
        except (OSError, RuntimeError, extra("distributed", "cluster").KilledWorker) as error:
            return str(error).encode(), 1
        await asyncio.to_thread(self._write, finished, folder)
        return finished.said, finished.code

    def _write(self, finished: Finished, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name in sorted(finished.files, key=lambda name: name == RESULT):  # last, since it says that a run is whole
            (folder / name).write_bytes(finished.files[name])
        with self._trials.open("ab", buffering=0) as file:
            file.write(finished.trials)


@asynccontextmanager
async def connected(address: str, inputs: Sequence[Inputs], trials: Path) -> AsyncIterator[Cluster]:
    """Yield the cluster whose scheduler has this address; its runs read these inputs.

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
        yield Cluster(client, inputs, trials)
    finally:
        await client.close()


def carry_out(
    version: str, arguments: Sequence[str], shared: Sequence[tuple[str, Files]], folder: str, trials: str
) -> Finished:
    """Carry out a run on a worker, in a folder of its own that is removed afterwards.

    Paths of the caller's machine in the arguments are replaced by those of the worker, and back in the result.

    :raises RuntimeError: the worker has another version of the program
    """
    if program_version() != version:
        raise RuntimeError(f"the worker has {program_version()}, and the sweep is of {version}")
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
    """Return an argument with a path in it replaced: all of it, or what stands before a colon."""
    path, colon, rest = argument.partition(":")
    return f"{paths.get(path, path)}{colon}{rest}"
