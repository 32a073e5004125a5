"""Log records: one per line regardless of content, and complete for machines."""

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.core import logs
from trader.core.errors import DatabaseUnavailable
from trader.core.logs import ConsoleFormatter, DatabaseTroubleFilter, JsonFormatter, LogWriter, configure_logs


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("trader.test").makeRecord(
        "trader.test", logging.WARNING, __file__, 1, message, arguments, None, extra=extra
    )
    made.created = datetime(2025, 1, 2, 3, 4, 5, 678_000, UTC).timestamp()
    return made


def test_json_record_has_its_extra_fields() -> None:
    entry = json.loads(
        JsonFormatter().format(record("took %d ms", 5, request_id="abc", at=datetime(2025, 1, 1, tzinfo=UTC)))
    )
    assert entry == {
        "time": "2025-01-02T03:04:05.678Z", "level": "warning", "logger": "trader.test", "message": "took 5 ms",
        "request_id": "abc", "at": "2025-01-01 00:00:00+00:00",
    }  # fmt: skip


@given(st.text(), st.text())
def test_json_record_is_one_parsable_line(message: str, value: str) -> None:
    line = JsonFormatter().format(record("%s", message, value=value))
    assert "\n" not in line
    assert json.loads(line)["message"] == message
    assert json.loads(line)["value"] == value


def test_console_record_cannot_be_forged() -> None:
    line = ConsoleFormatter().format(record("user %s", "x\n03:04:05.678 info trader: all is well", request_id="a\nb"))
    assert line.startswith("03:04:05.678 warning trader.test: user x\\n03:04:05.678")
    assert "\n" not in line


@pytest.mark.parametrize("formatter", [JsonFormatter(), ConsoleFormatter()])
def test_the_record_includes_the_exception(formatter: logging.Formatter) -> None:
    made = record("failed")
    try:
        raise ValueError("the cause")
    except ValueError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    shown = formatter.format(made)
    assert "ValueError: the cause" in shown
    assert "test_logs.py" in shown


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, restored afterward."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers.clear()
    yield root
    configure_logs("warning", "json")
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
def test_records_below_the_level_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("warning", "json")
    logging.getLogger("trader.test").info("unimportant")
    logging.getLogger("trader.test").warning("important")
    output = capsys.readouterr()
    assert output.out == ""
    assert [json.loads(line)["message"] for line in output.err.splitlines()] == ["important"]


@pytest.mark.usefixtures("root_logger")
def test_debug_shows_records_that_other_levels_hide(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    logging.getLogger("aiohttp.access").info("GET /health")
    assert capsys.readouterr().err == ""
    configure_logs("debug", "json")
    logging.getLogger("aiohttp.access").info("GET /health")
    assert "GET /health" in capsys.readouterr().err


class SlowStream(io.StringIO):
    """A log whose reader blocks until released."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.let = threading.Event()

    def write(self, text: str) -> int:
        self.asked.set()
        self.let.wait(10)
        return super().write(text)


def test_a_stalled_reader_of_the_log_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LINES_MAX", 100)
    stream = SlowStream()
    writer = LogWriter(stream, JsonFormatter())
    writer.handle(record("first"))
    assert stream.asked.wait(10)
    for number in range(1000):
        writer.handle(record("line", number=number))
    stream.let.set()
    writer.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    numbers = [line["number"] for line in lines if "number" in line]
    assert numbers == list(range(100))
    assert lines[-1]["message"] == "900 lines are missing here: the log was read too slowly, or could not be written"


def test_a_log_without_a_reader_stops_nothing() -> None:
    stream = io.StringIO()
    writer = LogWriter(stream, ConsoleFormatter())
    stream.close()
    writer.handle(record("lost"))
    writer.close()
    assert writer.lost_total == 1


def test_a_full_disk_loses_lines_that_are_counted_and_a_pipe_that_is_gone_changes_no_exit_code() -> None:
    text = (
        "import logging; from trader.core.logs import configure_logs, lost_lines\n"
        "configure_logs('info', 'json', threaded=True)\n"
        "for _ in range(3): logging.getLogger('x').info('lost')\n"
        "logging.getLogger().handlers[0].close(); print(lost_lines())"
    )
    reader, writer = os.pipe()
    os.close(reader)
    for broken in (os.open("/dev/full", os.O_WRONLY), writer):
        done = subprocess.run([sys.executable, "-c", text], stderr=broken, stdout=subprocess.PIPE, check=False)
        os.close(broken)
        assert (done.returncode, done.stdout) == (0, b"3\n")


def test_an_unformattable_record_is_reported_and_the_log_continues(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    writer = LogWriter(stream, JsonFormatter())
    writer.handle(record("%d apples", "no"))
    writer.handle(record("next"))
    writer.close()
    assert json.loads(stream.getvalue())["message"] == "next"
    assert "TypeError" in capsys.readouterr().err


def test_an_unusable_database_is_logged_once_a_minute_per_cause_across_loggers() -> None:
    passes = DatabaseTroubleFilter().filter

    def record(at_s: float, text: str, *arguments: object, level: int = logging.WARNING) -> logging.LogRecord:
        entry = logging.LogRecord("trader.store", level, "", 0, text, arguments, None)
        entry.created = at_s
        return entry

    locked, full = DatabaseUnavailable("locked"), DatabaseUnavailable("the disk is full. Really")
    assert passes(record(0, "%s (%s)", locked, "canceling statement due to lock timeout"))
    assert not passes(record(1, "the heartbeat for the standbys was not written: %s", locked))
    assert not passes(record(59, "scheduler %s: run failed: %s", "tradeExecutor", locked, level=logging.ERROR))
    assert passes(record(59, "as standby: %s", full)), "another cause"
    assert passes(record(59, "a model wrote: %s", str(locked))), "a text is not the error that it quotes"
    assert passes(record(60, "as leader: %s", locked))
    assert not passes(record(61, "as standby: %s", locked))
