"""Text from outside controls neither a terminal nor a log."""

import json
import logging
import re
from logging import LogRecord

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.raw_socket_service import CALL, Service

from trader.commands.command import Result, print_result
from trader.core.logs import STEERING, ConsoleFormatter, JsonFormatter, printable

HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202egnp\u2066 \u2028 \r\n2025 error trader: halted \ud800"
SHOWN = r"\u001b[2J\u001b]0;owned\u0007 \u009b31m \u202egnp\u2066 \u2028 \r\n2025 error trader: halted \ud800"


def record(text: str) -> LogRecord:
    try:
        raise ValueError(text)
    except ValueError as error:
        trace = (type(error), error, error.__traceback__)
        return logging.LogRecord("trader", logging.ERROR, __file__, 1, "refused %s", (text,), trace)


@given(st.text())
def test_printable_text_is_one_line_of_utf_8_without_control_characters(text: str) -> None:
    shown = printable(text)
    assert not re.search(f"[{STEERING}]", shown)
    assert len(shown.encode().splitlines()) <= 1
    assert printable(shown) == shown


def test_escapes_show_the_original_characters() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("深度求索 — Ж é ✓") == "深度求索 — Ж é ✓"


def test_a_console_log_record_is_one_line_regardless_of_content() -> None:
    lines = ConsoleFormatter().format(record(HOSTILE)).split("\n")
    assert lines[0].endswith(f"trader: refused {SHOWN}")
    assert lines[1] == "Traceback (most recent call last):"
    assert not [line for line in lines if re.search(f"[{STEERING}]", line)]


def test_a_line_of_the_json_log_survives_surrogates() -> None:
    line = JsonFormatter().format(record(HOSTILE))
    assert line.isascii()
    assert json.loads(line)["message"] == f"refused {HOSTILE}"


def test_commands_escape_text_from_the_database(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(Result({"name": "\x9bJ\u202e é"}, ["model \x1b[2J\u202e", "second"]), as_json=False)
    assert capsys.readouterr().out == "model \\u001b[2J\\u202e\nsecond\n"
    print_result(Result({"name": "\x9bJ\u202e é"}, []), as_json=True)
    line = capsys.readouterr().out
    assert line == '{"name":"\\u009bJ\\u202e é"}\n'
    assert json.loads(line) == {"name": "\x9bJ\u202e é"}


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /\x1b[2J\xff HTTP/1.1\r\nHost: localhost\r\n", (400, 404)),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: \xff\xfe\r\n", (417,)),
        (b"GET /health HTTP/1.1\r\nHost: \xff\xfe\r\n", (400, 421)),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: http://\xff\r\n", (403,)),
        (CALL + b"Origin: http://\xff\xe2\x80\xae\r\nContent-Length: 0\r\n", (403,)),
        (CALL + b'Content-Length: 12\r\n\r\n{"a":"\\ud800"}', (400,)),
        (CALL + b"X-Orpc-Batch: \xff\r\nContent-Length: 0\r\n", (400,)),
        (b"GET /broken?\xc2\x9b\xe2\x80\xae%1b[2J HTTP/1.1\r\nHost: localhost\r\n", (400, 500)),
    ],
)
async def test_callers_bytes_are_neither_an_error_of_the_service_nor_raw_in_its_log(
    service: Service, request_head: bytes, status: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    answer = await service.send(
        request_head.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nConnection: close\r\n", 1) + b"\r\n"
    )
    assert int(answer.split(b" ")[1]) in status
    for formatter in (ConsoleFormatter(), JsonFormatter()):
        lines = [formatter.format(each) for each in caplog.records]
        assert not [line for line in lines if re.search(f"[{STEERING}]", line.replace("\n", ""))]
    bugs = [each for each in caplog.records if each.exc_info]
    assert len(bugs) == (b"/broken" in request_head and b" 500 " in answer[:20])
