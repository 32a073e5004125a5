"""Log records: one per line whatever they hold, complete for machines."""

import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader import logs
from trader.logs import REQUEST_MESSAGE, ConsoleFormatter, JsonFormatter, LogWriter, RequestEntry, configure_logs


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
def test_json_record_is_one_line_that_can_be_read(message: str, value: str) -> None:
    line = JsonFormatter().format(record("%s", message, value=value))
    assert "\n" not in line
    assert json.loads(line)["message"] == message
    assert json.loads(line)["value"] == value


def test_console_record_cannot_be_forged() -> None:
    line = ConsoleFormatter().format(record("user %s", "x\n03:04:05.678 info trader: all is well", request_id="a\nb"))
    assert line.startswith("03:04:05.678 warning trader.test: user x\\n03:04:05.678")
    assert "\n" not in line


@pytest.mark.parametrize("formatter", [JsonFormatter(), ConsoleFormatter()])
def test_exception_is_in_the_record(formatter: logging.Formatter) -> None:
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
    """The root logger, put back afterwards as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers.clear()
    yield root
    configure_logs("warning", "json")  # forgets the writer of requests
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
def test_debug_shows_what_other_levels_leave_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    logging.getLogger("aiohttp.access").info("GET /health")
    assert capsys.readouterr().err == ""
    configure_logs("debug", "json")
    logging.getLogger("aiohttp.access").info("GET /health")
    assert "GET /health" in capsys.readouterr().err


def request_record(entry: RequestEntry, *, has_fields: bool) -> logging.LogRecord:
    """The record that `logging` makes of a request."""
    at_ms, request_id, procedure, status, duration_ms = entry
    fields = {
        "request_id": request_id, "procedure": procedure, "status": status, "duration_ms": round(duration_ms, 3)
    }  # fmt: skip
    made = logging.getLogger("trader.request").makeRecord(
        "trader.request", logging.INFO, "", 0, REQUEST_MESSAGE, (procedure, status, duration_ms, request_id), None,
        extra=fields if has_fields else None,
    )  # fmt: skip
    made.created = at_ms / 1000
    return made


@given(st.lists(st.tuples(st.integers(0, 4 * 10**12), st.integers(100, 599), st.floats(0, 1e6))))
def test_lines_of_requests_are_those_of_their_records(ended: list[tuple[int, int, float]]) -> None:
    entries = [(at, f"ab-{number:x}", "trading.getTrades", status, ms) for number, (at, status, ms) in enumerate(ended)]
    for formatter, has_fields in ((JsonFormatter(), True), (ConsoleFormatter(), False)):
        expected = [formatter.format(request_record(entry, has_fields=has_fields)) + "\n" for entry in entries]
        assert list(formatter.format_requests(entries)) == expected


class SlowStream(io.StringIO):
    """A log whose reader takes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()

    def write(self, text: str) -> int:
        self.let.wait(10)
        return super().write(text)


def test_a_stalled_reader_of_the_log_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LINES_MAX", 100)
    stream = SlowStream()
    writer = LogWriter(stream, JsonFormatter())
    started_s = time.perf_counter()
    for number in range(1000):
        writer.note_request(f"id-{number}", "trading.getTrades", 200, 1.5)
    writer.handle(record("between"))
    assert time.perf_counter() - started_s < 1
    stream.let.set()
    writer.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    requests = [line["request_id"] for line in lines if "request_id" in line]
    lost = int(next(line["message"] for line in lines if "missing here" in line["message"]).split()[0])
    assert requests == [f"id-{number}" for number in range(len(requests))]
    assert len(requests) + lost == 1000
    assert [line["message"] for line in lines if line["logger"] == "trader.test"] == ["between"]


def test_a_log_that_nobody_reads_any_more_stops_nothing() -> None:
    stream = io.StringIO()
    writer = LogWriter(stream, ConsoleFormatter())
    stream.close()
    writer.handle(record("lost"))
    writer.note_request("id", "health", 200, 1)
    writer.close()


def test_a_bug_in_the_writing_is_told_and_the_log_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A record that cannot be formatted harms neither who wrote it nor the thread that writes."""
    stream = io.StringIO()
    writer = LogWriter(stream, JsonFormatter())
    writer.handle(record("%d apples", "no"))
    writer.note_request("id-1", "trading.getTrades", 200, 1.5)
    writer._waiting.append(("id-2",))  # type: ignore[arg-type]
    deadline_s = time.monotonic() + 10
    while writer._waiting and time.monotonic() < deadline_s:
        time.sleep(0.01)
    writer.note_request("id-3", "trading.getTrades", 200, 1.5)
    writer.close()
    assert "id-3" in stream.getvalue()
    assert "TypeError" in capsys.readouterr().err
    told = next(line for line in map(json.loads, stream.getvalue().splitlines()) if "exception" in line)
    assert told["message"] == "lines are missing here: a bug ended their writing"
    assert "_drain" in told["exception"]
