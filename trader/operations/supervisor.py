"""The process to others: sd_notify, failed starts, and the file by which commands find the services of a folder.

Failed starts back off, and a crash loop is one alarm with an end.
"""

import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Final

import msgspec

from trader.core.clock import iso
from trader.core.files import SMALL_BYTES_MAX, decode_json, read_regular, replace_file
from trader.core.ownership import EMBEDDED_FOLDER, why_not_own

_FOLDER: Final = EMBEDDED_FOLDER.parent

log = logging.getLogger("trader")

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"


def end_signals() -> Sequence[signal.Signals]:
    """Return the signals that end a process in an orderly way: SIGTERM, and SIGHUP unless `nohup` ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Sends datagrams to the socket NOTIFY_SOCKET; without one, every call does nothing.

    `watchdog_s` is how often to send `ALIVE`, half of what the supervisor allows; None if it does not require it.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        is_asked = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        allowed_us = environ.get("WATCHDOG_USEC", "")
        asks = bool(self._address) and is_asked and allowed_us.isdecimal() and int(allowed_us) > 0
        self.watchdog_s = int(allowed_us) / 2_000_000 if asks else None
        self._has_failed = False

    def notify(self, state: str) -> None:
        """Send one state, without waiting for its receiver."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(state.encode(), self._address)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:  # logged once, not with every beat
                log.warning("the supervisor at NOTIFY_SOCKET does not accept %s: %s", state, error.strerror or error)
            self._has_failed = True


STEADY_S: Final = 60.0
"""How long a process must run for its failures to be over."""

PAUSES_S: Final = (0.0, 0.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""How long a start waits after this many failures in a row; after one that was killed it does not."""

_FORGOTTEN_S: Final = 600.0
_KILLED: Final = "it ended without an error, as if it was killed"


class FailedStarts(msgspec.Struct, frozen=True):
    """The failures in a row of processes with one port: `since` the first one, `text` says why the last one failed.

    `pid` is the process that runs, or that was killed.
    """

    count: int = 0
    since: datetime | None = None
    last: datetime | None = None
    text: str = ""
    pid: int | None = None

    @property
    def pause_s(self) -> float:
        return 0.0 if self.text == _KILLED else PAUSES_S[min(self.count, len(PAUSES_S) - 1)]

    @property
    def is_first_kill(self) -> bool:
        return self.count == 1 and self.text == _KILLED

    @property
    def summary(self) -> str:
        if self.since is None:
            return ""
        times = "once" if self.count == 1 else f"{self.count} times in a row"
        return f"; before, it failed {times} since {iso(self.since)}: {self.text}"

    def and_one(self, text: str, now: datetime) -> "FailedStarts":
        return FailedStarts(self.count + 1, self.since or now, now, text)


class Restarts:
    """Keeps the failures of the processes with one port in a file of the working folder."""

    def __init__(self, port: int) -> None:
        self._file = _FOLDER / f"failures-{port}.json"
        self.failures = FailedStarts()

    def begin(self, now: datetime) -> None:
        """Read the failures before this process, and count one that was killed."""
        known = FailedStarts()
        with suppress(OSError, msgspec.MsgspecError):
            known = decode_json(read_regular(self._file, SMALL_BYTES_MAX), FailedStarts)
        if known.last is not None and abs((now - known.last).total_seconds()) > _FORGOTTEN_S:
            known = FailedStarts(pid=known.pid)
        if known.pid is not None and (known.pid == os.getpid() or not _lives(known.pid)):
            known = known.and_one(_KILLED, now)
        self.failures = known

    def run(self) -> None:
        """Note that this process runs: it has found what it needs."""
        self._keep(msgspec.structs.replace(self.failures, pid=os.getpid()))

    def fail(self, text: str, now: datetime) -> None:
        """Count the failure of this process."""
        self._keep(self.failures.and_one(text, now))

    def end(self) -> None:
        """Forget everything: this process has run for long enough, or was asked to stop."""
        self.failures = FailedStarts()
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def steady(self) -> None:
        """Forget the failures before this process, which runs on."""
        self._keep(FailedStarts(pid=os.getpid()))

    def _keep(self, failures: FailedStarts) -> None:
        self.failures = failures
        try:
            self._file.parent.mkdir(exist_ok=True)
            replace_file(self._file, msgspec.json.encode(failures))
        except OSError as error:
            log.warning("%s cannot be written, so a crash loop is many alarms: %s", self._file, error.strerror)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


class ServiceAddress(msgspec.Struct, frozen=True):
    """An address at which a service may respond, and the token that it accepts there, if it needs one."""

    url: str
    token: str | None = None
    is_of_folder: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}


@contextmanager
def announced(port: int, service: ServiceAddress) -> Iterator[None]:
    """Keep the address of a service in the working folder, readable for its user alone, while it listens."""
    file = _FOLDER / f"service-{port}.json"
    try:
        _FOLDER.mkdir(exist_ok=True)
        replace_file(file, msgspec.json.encode(service), 0o600)
    except OSError as error:
        log.warning("%s cannot be written, so commands find this service by HOST and PORT: %s", file, error.strerror)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def announced_services() -> list[ServiceAddress]:
    """Return the services that announced themselves in the working folder; one that was killed no longer responds."""
    found = []
    for file in sorted(_FOLDER.glob("service-*.json")):
        with suppress(OSError, msgspec.MsgspecError):
            if why_not_own(_FOLDER) is None and why_not_own(file) is None:
                found.append(decode_json(read_regular(file, SMALL_BYTES_MAX), ServiceAddress))
    return found
