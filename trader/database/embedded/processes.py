"""Process control for the embedded PostgreSQL: parent-death signals, readiness, shutdown and logs."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trader.core.errors import StartError

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
        return pid if "postgres" in _program_of(pid) else None
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


def _program_of(pid: int) -> str:
    listing = subprocess.run(["ps", "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607 - a number, and the system's own program
    return listing.stdout


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
