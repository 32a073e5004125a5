"""Logs: records as lines for people or as JSON objects for machines, and the thread that writes them.

Every request is a line of the log. A thread formats and writes them, many at once, so that the service waits neither
for them nor for a slow reader of its log.
"""

import asyncio
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from trader.clock import iso

PLAIN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

LINES_MAX: Final = 100_000
"""How many lines of requests may wait to be written; those beyond are dropped and counted."""

FLUSH_EVERY_S: Final = 0.2

_requests = logging.getLogger("trader.request")


REQUEST_MESSAGE: Final = "%s %d %.1f ms (request %s)"

RequestEntry = tuple[int, str, str, int, float]
"""A request: its end in milliseconds since the epoch, its id, procedure and status, and its duration in ms."""


def log_bug(task: asyncio.Task[Any]) -> None:
    """Log the error that ended a task; a done callback for tasks whose result nobody awaits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logging.getLogger("trader").error("%s ended by a bug", task.get_name(), exc_info=error)


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per record, with the `extra` values as fields."""

    def format_requests(self, entries: Iterable[RequestEntry]) -> Iterator[str]:
        """Yield the lines of requests, like `format` but in a fraction of the time: most lines are requests."""
        for time_text, (_, request_id, name, status, duration_ms) in _with_times(entries):
            yield (
                f'{{"time": "{time_text}", "level": "info", "logger": "trader.request", '
                f'"message": "{name} {status} {duration_ms:.1f} ms (request {request_id})", '
                f'"request_id": "{request_id}", "procedure": "{name}", "status": {status}, '
                f'"duration_ms": {round(duration_ms, 3)}}}\n'
            )

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
        return json.dumps(entry, default=str, ensure_ascii=False)


class ConsoleFormatter(logging.Formatter):
    """Writes one line per record, with the `extra` values at its end."""

    def format_requests(self, entries: Iterable[RequestEntry]) -> Iterator[str]:
        """Yield the lines of requests, without their fields, which the message has already."""
        for time_text, (_, request_id, name, status, duration_ms) in _with_times(entries):
            yield (
                f"{time_text[11:-1]} info    trader.request: {name} {status} {duration_ms:.1f} ms "
                f"(request {request_id})\n"
            )

    def format(self, record: logging.LogRecord) -> str:
        time = iso(datetime.fromtimestamp(record.created, UTC))[11:-1]
        extra = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in PLAIN_FIELDS)
        line = f"{time} {record.levelname.lower():7} {record.name}: {record.getMessage()}{' ' + extra if extra else ''}"
        # A record is one line whatever it contains: text from outside must not look like another record.
        line = line.replace("\r", "\\r").replace("\n", "\\n")
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def _with_times(entries: Iterable[RequestEntry]) -> Iterator[tuple[str, RequestEntry]]:
    """Yield the entries with their times as text; the text of a second is made once."""
    second, prefix = -1, ""
    for entry in entries:
        whole, ms = divmod(entry[0], 1000)
        if whole != second:
            second, prefix = whole, iso(datetime.fromtimestamp(whole, UTC))[:-4]
        yield f"{prefix}{ms:03d}Z", entry


class LogWriter(logging.Handler):
    """Writes records to a stream: directly at first, and from the first request on in a thread of its own."""

    def __init__(self, stream: TextIO, formatter: JsonFormatter | ConsoleFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._format_requests = formatter.format_requests
        self._stream = stream
        self._waiting: deque[str | RequestEntry] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:  # noqa: BLE001 - logging must not fail because a record cannot be formatted
            self.handleError(record)
            return
        if self._thread is None:
            self._write(line)
        else:
            self._waiting.append(line)
            self._wake.set()

    def note_request(self, request_id: str, procedure: str, status: int, duration_ms: float) -> None:
        """Queue the line of a request."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="log", daemon=True)
            self._thread.start()
        if len(self._waiting) >= LINES_MAX:
            self.lost += 1
        else:
            self._waiting.append((time.time_ns() // 1_000_000, request_id, procedure, status, duration_ms))

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(FLUSH_EVERY_S)
            self._wake.clear()
            try:
                self._drain()
            except Exception as bug:  # noqa: BLE001 - without this thread nothing would be written
                self._write(self._own_line("lines are missing here: a bug ended their writing", bug))

    def _drain(self) -> None:
        lines: list[str] = []
        requests: list[RequestEntry] = []
        for _ in range(len(self._waiting)):
            entry = self._waiting.popleft()
            if isinstance(entry, tuple):
                requests.append(entry)
            else:
                lines += self._format_requests(requests)
                lines.append(entry)
                requests.clear()
        lines += self._format_requests(requests)
        if self.lost:
            lost, self.lost = self.lost, 0
            lines.append(self._own_line(f"{lost} requests are missing here: the log was read too slowly"))
        if lines:
            self._write("".join(lines))

    def _own_line(self, message: str, bug: Exception | None = None) -> str:
        record = logging.makeLogRecord({"name": _requests.name, "levelno": logging.WARNING, "levelname": "WARNING"})
        record.msg = message
        record.exc_info = None if bug is None else (type(bug), bug, bug.__traceback__)
        return self.format(record) + "\n"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # the reader of the log has gone; the service goes on

    def close(self) -> None:
        """Write the waiting lines. `logging` also calls this at the end of the process."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wake.set()
            thread.join(timeout=2)
            self._drain()
        super().close()


_writer: LogWriter | None = None
"""Writer of the request lines; None before `configure_logs`, and when the level leaves them out."""


def note_request(request_id: str, procedure: str, status: int, duration_ms: float) -> None:
    """Log a request that has ended. Cheap: the line is formatted later."""
    if _writer is not None:
        _writer.note_request(request_id, procedure, int(status), duration_ms)
    else:
        fields = {"request_id": request_id, "procedure": procedure, "status": int(status)}
        _requests.info(REQUEST_MESSAGE, procedure, int(status), duration_ms, request_id, extra=fields)


def configure_logs(level: str, form: str) -> None:
    """Write all records from `level` up to standard error, in the form `console` or `json`."""
    global _writer  # noqa: PLW0603 - one for the process, like the root logger
    handler = LogWriter(sys.stderr, JsonFormatter() if form == "json" else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    _writer = handler if _requests.isEnabledFor(logging.INFO) else None
    for name in ("aiohttp.access", "asyncio"):  # one line per request is for debugging only
        logging.getLogger(name).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
