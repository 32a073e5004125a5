"""How log records look: lines for people on a terminal, JSON objects for machines."""

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Final

from trader.clock import iso

PLAIN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class RequestRecord(logging.LogRecord):
    """The record of a request that has ended. There is one for each, so it is made without the search for its caller.

    :param duration_ms: milliseconds
    """

    def __init__(self, request_id: str, procedure: str, status: int, duration_ms: float) -> None:
        self.__dict__ = {
            **_REQUEST_FIELDS,
            "created": time.time(),
            "args": (procedure, status, duration_ms, request_id),
            "request_id": request_id,
            "procedure": procedure,
            "status": status,
            "duration_ms": round(duration_ms, 3),
        }


_REQUEST_FIELDS: Final = vars(
    logging.makeLogRecord(
        {
            "name": "trader.request",
            "levelno": logging.INFO,
            "levelname": "INFO",
            "msg": "%s %d %.1f ms (request %s)",
        }
    )
)


class JsonFormatter(logging.Formatter):
    """One JSON object per record; what was passed as `extra` becomes fields of it."""

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
    """One line per record, with what was passed as `extra` behind it."""

    def format(self, record: logging.LogRecord) -> str:
        time = iso(datetime.fromtimestamp(record.created, UTC))[11:-1]
        extra = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in PLAIN_FIELDS)
        line = f"{time} {record.levelname.lower():7} {record.name}: {record.getMessage()}{' ' + extra if extra else ''}"
        # A record is one line whatever it holds: text from outside must not look like another record.
        line = line.replace("\r", "\\r").replace("\n", "\\n")
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def configure_logs(level: str, form: str) -> None:
    """Send every record from `level` up to standard error, in the form `console` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("aiohttp.access", "asyncio"):  # one line per request is for debugging only
        logging.getLogger(name).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
