"""FailedStarts of one process after another: starts back off, and a crash loop is one alarm with a count and an end."""

import logging
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from trader.core.clock import iso
from trader.core.files import SMALL_BYTES_MAX, decode_json, read_regular, replace_file
from trader.core.ownership import EMBEDDED_FOLDER

STEADY_S: Final = 60.0
"""How long a process must run for its failures to be over."""

PAUSES_S: Final = (0.0, 0.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""How long a start waits after this many failures in a row; after one that was killed it does not."""

_FORGOTTEN_S: Final = 600.0
_KILLED: Final = "it ended without an error, as if it was killed"

log = logging.getLogger("trader")


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
        self._file = Path(EMBEDDED_FOLDER.parent) / f"failures-{port}.json"
        self.failures = FailedStarts()

    def begin(self, now: datetime) -> None:
        """Read the failures before this process, count one that was killed, and begin."""
        known = FailedStarts()
        with suppress(OSError, msgspec.MsgspecError):
            known = decode_json(read_regular(self._file, SMALL_BYTES_MAX), FailedStarts)
        if known.last is not None and abs((now - known.last).total_seconds()) > _FORGOTTEN_S:
            known = FailedStarts(pid=known.pid)
        if known.pid is not None and (known.pid == os.getpid() or not _lives(known.pid)):
            known = known.and_one(_KILLED, now)
        self._keep(msgspec.structs.replace(known, pid=os.getpid()))

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
