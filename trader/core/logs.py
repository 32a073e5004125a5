"""Logs: records as lines for people or as JSON objects for machines, and the thread that writes them."""

import json
import logging
import os
import re
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Final, TextIO

from trader.core.clock import iso
from trader.core.errors import DatabaseUnavailable

PLAIN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

LINES_MAX: Final = 100_000
"""How many lines may wait to be written; further lines are dropped and counted."""

SAME_CAUSE_S: Final = 60.0
"""The shortest time between two lines about the same cause of an unusable database."""

CLOSE_WAIT_S: Final = 2.0
"""How long the process waits at exit for a stalled reader of its log."""


STEERING: Final = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Characters that control a terminal or reorder text, as part of a regular expression's set: C0 and C1 controls,
Unicode's bidirectional controls, its line and paragraph separators, and surrogates, which UTF-8 cannot encode."""

_STEERING: Final = re.compile(f"[{STEERING}]")
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def printable(text: str) -> str:
    r"""Return the text on one line, with every character of `STEERING` escaped, such as `\u001b` or `\n`.

    All text from callers, providers, files or the database is printed through this. JSON keeps its meaning.
    """
    return _STEERING.sub(lambda match: _SHORT.get(match[0]) or f"\\u{ord(match[0]):04x}", text)


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per record, with the `extra` values as fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": iso(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in PLAIN_FIELDS}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)  # ASCII: external text may contain surrogates


class ConsoleFormatter(logging.Formatter):
    """Writes one line per record, with the `extra` values at its end."""

    def format(self, record: logging.LogRecord) -> str:
        time = iso(datetime.fromtimestamp(record.created, UTC))[11:-1]
        extra = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in PLAIN_FIELDS)
        line = f"{time} {record.levelname.lower():7} {record.name}: {record.getMessage()}{' ' + extra if extra else ''}"
        # A record is always one line: external text must not look like another record.
        trace = self.formatException(record.exc_info).split("\n") if record.exc_info else []
        return "\n".join(map(printable, [line, *trace]))


class DatabaseTroubleFilter(logging.Filter):
    """Passes one record a minute for each cause among the `DatabaseUnavailable` arguments of all loggers."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the record; one with a traceback is always written."""
        errors = record.args if isinstance(record.args, tuple) else ()
        cause = next((error.cause for error in errors if isinstance(error, DatabaseUnavailable)), None)
        if cause is None or record.exc_info or record.levelno < logging.WARNING:
            return True
        if record.created - self._passed_at_s.get(cause, -SAME_CAUSE_S) < SAME_CAUSE_S:
            return False
        self._passed_at_s[cause] = record.created
        return True


class LogWriter(logging.Handler):
    """Writes records to a stream in a separate thread, so that the service never waits for the reader of its log."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._stream = stream
        self._waiting: SimpleQueue[str | None] = SimpleQueue()
        self._lost = 0
        self.lost_total = 0
        """Lines that were never written: the reader of the log was too slow, or its disk was full."""

        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= LINES_MAX:
            self._lose()
            return
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - logging must not fail because a record cannot be formatted
            self.handleError(record)
            return
        self._report_lost()
        self._waiting.put(line + "\n")

    def _lose(self) -> None:
        self._lost += 1
        self.lost_total += 1

    def _report_lost(self) -> None:
        if self._lost:
            fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "args": (self._lost,)}
            record = logging.makeLogRecord(
                fields | {"msg": "%d lines are missing here: the log was read too slowly, or could not be written"}
            )
            self._waiting.put(self.format(record) + "\n")
            self._lost = 0

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._stream.write(line)
                if self._waiting.empty():
                    self._stream.flush()
            except Exception:  # noqa: BLE001 - the disk is full or the reader gone; the service and its log continue
                self._lose()

    def close(self) -> None:
        """Write the waiting lines. `logging` also calls this when the process ends."""
        self.acquire()
        self._report_lost()
        self.release()
        self._waiting.put(None)
        self._thread.join(CLOSE_WAIT_S)
        try:
            self._stream.flush()
        except (OSError, ValueError):  # else Python would fail at its exit, and change the exit code
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        super().close()


def lost_lines() -> int:
    """Return how many lines of this process's log were never written."""
    return sum(handler.lost_total for handler in logging.getLogger().handlers if isinstance(handler, LogWriter))


def configure_logs(level: str, form: str, *, threaded: bool = False) -> None:
    """Write records of `level` and above to standard error as `console` or `json`; a service sets `threaded`."""
    formatter = JsonFormatter() if form == "json" else ConsoleFormatter()
    handler = LogWriter(sys.stderr, formatter) if threaded else logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(DatabaseTroubleFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("aiohttp.access", "asyncio"):  # one line per request is for debugging only
        logging.getLogger(name).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
