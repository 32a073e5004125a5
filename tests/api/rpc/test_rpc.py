import asyncio
import gzip
import io
import json
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from support.served import AppClient, Client
from support.waiting import until
from yarl import URL

from trader.api.registry import REGISTRY, Registry, load_procedures
from trader.api.schemas.common import Empty

ServiceFactory = Callable[..., Awaitable[AppClient]]

PLAIN = "/api/rpc/demo.echo"
ORPC = "/api/rpc/demo/echo"


async def send(
    client: AppClient,
    path: str,
    body: bytes | str = b"",
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, object]:
    """Send to the raw path; the answer must be JSON with a request id."""
    data = io.BytesIO(body.encode() if isinstance(body, str) else body)
    async with client.request(method, URL(path, encoded=True), data=data, headers=headers) as response:
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["X-Request-Id"]
        return response.status, json.loads(await response.read())


def plain_issue_paths(answer: object) -> list[list[str | int]]:
    assert isinstance(answer, dict)
    assert answer["code"] == "VALIDATION_ERROR"
    assert answer.keys() == {"error", "code", "issues"}
    return [issue["path"] for issue in answer["issues"]]


async def test_a_call_is_answered_in_its_own_style(client: AppClient) -> None:
    bare: dict[str, object] = {"window": "7d", "text": None, "items": [], "maxValue": 1.5}
    assert await send(client, PLAIN) == (200, bare)
    assert await send(client, PLAIN, "{}") == (200, bare)
    assert await send(client, ORPC) == (200, {"json": bare})
    assert await send(client, ORPC, "{}") == (200, {"json": bare})
    assert await send(client, ORPC, '{"json":{"window":"24h"}}') == (200, {"json": bare | {"window": "24h"}})
    assert await send(client, PLAIN, '{"json":{"text":"x"},"meta":[]}') == (200, {"json": bare | {"text": "x"}})
    assert await send(client, ORPC, '{"text":"é"}') == (200, bare | {"text": "é"})


async def test_an_output_may_be_a_list(client: AppClient) -> None:
    assert await send(client, "/api/rpc/demo.list") == (200, [{"value": 1.5}])
    assert await send(client, "/api/rpc/demo/list") == (200, {"json": [{"value": 1.5}]})


@pytest.mark.parametrize("length", [0, 100, 60_000])
async def test_a_long_answer_arrives_complete(client: AppClient, length: int) -> None:
    text = "x" * length
    _, plain = await send(client, PLAIN, json.dumps({"text": text}))
    _, enveloped = await send(client, ORPC, json.dumps({"json": {"text": text}}))
    assert plain == {"window": "7d", "text": text, "items": [], "maxValue": 1.5}
    assert enveloped == {"json": plain}


@pytest.mark.parametrize("figures", [0, 1, 100, 101, 100_000])
async def test_a_long_list_arrives_complete(client: AppClient, figures: int) -> None:
    wanted = {"figures": [{"value": value} for value in range(figures)], "text": "x"}
    request = {"text": str(figures)}
    assert await send(client, "/api/rpc/demo.long", json.dumps(request)) == (200, wanted)
    assert await send(client, "/api/rpc/demo/long", json.dumps({"json": request})) == (200, {"json": wanted})
    items = [{"url": "http://x/api/rpc/demo/long", "body": {"json": {"text": "1"}}}]
    async with client.post("/api/rpc/__batch__", json=items, headers={"x-orpc-batch": "buffered"}) as response:
        (reply,) = await response.json()
    assert reply["body"] == {"json": {"figures": [{"value": 0}], "text": "x"}}


@pytest.mark.parametrize("wrong", ["{}", '{"value":"1"}', '{"value":null}', "1", '{"value":1}]', '{"value":1},'])
async def test_a_long_list_with_one_wrong_record_is_a_failure(client: AppClient, wrong: str) -> None:
    for records in (0, 100, 250):
        body = json.dumps({"text": str(records), "items": [wrong]})
        status, answer = await send(client, "/api/rpc/demo.long", body)
        assert (status, answer) == (500, {"error": "Internal server error", "code": "INTERNAL_SERVER_ERROR"})


async def test_a_response_is_recomputed_when_its_token_changes(client: AppClient, context: Any) -> None:
    for made in (1, 1, 2, 2):
        if made > context.version + 1:
            context.version += 1
        assert (await send(client, "/api/rpc/demo.long", '{"text":"3"}'))[0] == 200
        assert context.calls == ["demo.long"] * made


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; x=", ""]
)
async def test_the_content_type_of_the_request_does_not_matter(client: AppClient, content_type: str) -> None:
    status, _ = await send(client, PLAIN, '{"window":"24h"}', headers={"Content-Type": content_type})
    assert status == 200


@pytest.mark.parametrize("path", [f"{PLAIN}/", f"{ORPC}/", f"{PLAIN}?a=b", f"{ORPC}?data=%7B%7D"])
async def test_a_trailing_slash_and_a_query_are_harmless(client: AppClient, path: str) -> None:
    status, _ = await send(client, path, "{}")
    assert status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/api/rpc/",
        "/api/rpc",
        "/api/rpc/demo",
        "/api/rpc/demo.echo//",
        "/api/rpc//demo.echo",
        "/api/rpc/demo%2Eecho",
        "/api/rpc/demo%2Fecho",
        "/api/rpc/demo%2fecho",
        "/api/rpc/%64emo.echo",
        "/api/rp%63/demo.echo",
        "/api/rpc/demo.Echo",
        "/api/rpc/demo.echo.x",
        "/api/rpc/demo/echo/x",
        "/api/rpc/demo.echo;x",
        "/api/rpc/demo/echo/__batch__",
        "/api/rpc/__batch__",
        "/api/rpc/%00",
        "/api/rpc/%ff",
    ],
)
@pytest.mark.parametrize("body", ["{}", '{"json":{}}', "["])
async def test_an_unknown_path_gets_the_same_response_in_both_styles(client: AppClient, path: str, body: str) -> None:
    assert await send(client, path, body) == (404, {"error": "Not Found"})


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "TRACE"])
async def test_other_methods_are_refused_by_name(client: AppClient, method: str) -> None:
    async with client.request(method, PLAIN) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert await response.json() == {
            "error": f"{method} is not supported here; use POST",
            "code": "METHOD_NOT_SUPPORTED",
        }
    async with client.request(method, ORPC) as response:
        assert response.status == 405
        inner = (await response.json())["json"]
        assert (inner["code"], inner["status"], inner["defined"]) == ("METHOD_NOT_SUPPORTED", 405, False)


async def test_a_head_request_gets_no_body(client: AppClient) -> None:
    async with client.head(PLAIN) as response:
        assert response.status == 405
        assert await response.read() == b""


async def test_paths_elsewhere_answer_json_too(client: AppClient) -> None:
    assert await send(client, "/nothing/here") == (404, {"error": "Not Found"})
    assert await send(client, "/elsewhere") == (405, {"error": "Method Not Allowed"})


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ("[", [[]]),
        ("[]", [[]]),
        ('"x"', [[]]),
        ('{"window":"90d"}', [["window"]]),
        ('{"unknown":null}', [["unknown"]]),
        ('{"window":null,"number":0}', [["number"]]),
        ('{"number":"1"}', [["number"]]),
        ('{"number":1.5}', [["number"]]),
        ('{"number":11.0}', [["number"]]),
        ('{"number":1e16}', [["number"]]),
        ('{"number":1.0,"window":"x"}', [["window"]]),
        ('{"number":0}', [["number"]]),
        ('{"number":true}', [["number"]]),
        ('{"number":1e400}', [["number"]]),
        ('{"number":' + "9" * 5000 + "}", [["number"]]),
        ('{"number":NaN}', [[]]),
        ('{"inner":{"stop":1e400}}', [["inner", "stop"]]),
        ('{"inner":{"stop":"1"}}', [["inner", "stop"]]),
        ('{"inner":{"maxLoss":1}}', [["inner", "maxLoss"]]),
        ('{"inner":[]}', [["inner"]]),
        ('{"items":["a",1]}', [["items", 1]]),
        ('{"items":{}}', [["items"]]),
        ('{"foo":1}', [["foo"]]),
        ('{"a`b - at `$.x":1}', [["a`b - at `$.x"]]),
        ('{"window":"x","number":99,"foo":1}', [["foo"], ["window"], ["number"]]),
        ('{"text":"a","text":"b"}', [["text"]]),
        ('{"text":"\\u0000"}', [[]]),
        ('{"text":"\\ud800"}', [[]]),
        (b'{"text":"\xff"}', [[]]),
        ('{"inner":' * 3000 + "1" + "}" * 3000, [[]]),
    ],
)
async def test_an_invalid_input_reports_its_path(client: AppClient, body: bytes | str, paths: list[list[str]]) -> None:
    status, answer = await send(client, PLAIN, body)
    assert status == 400
    assert plain_issue_paths(answer) == paths
    status, answer = await send(client, ORPC, b'{"json":' + (body.encode() if isinstance(body, str) else body) + b"}")
    assert status == 400
    assert isinstance(answer, dict)
    inner = answer["json"]
    assert inner.keys() == {"defined", "code", "status", "message", "data"}
    assert (inner["code"], inner["status"], inner["defined"]) == ("VALIDATION_ERROR", 400, False)


@pytest.mark.parametrize("number", ["3.0", "30e-1", "1e1", "3"])
async def test_a_whole_number_may_be_written_with_a_fraction_of_zero(client: AppClient, number: str) -> None:
    status, answer = await send(client, PLAIN, f'{{"number":{number},"inner":{{"stop":1.5}},"text":"3.0"}}')
    assert (status, answer) == (200, {"window": "7d", "text": "3.0", "items": [], "maxValue": 1.5})


async def test_messages_say_what_was_given_and_what_is_allowed(client: AppClient) -> None:
    _, answer = await send(client, PLAIN, '{"window":"90d"}')
    assert answer == {
        "error": 'window: expected one of 24h, 7d, got "90d"',
        "code": "VALIDATION_ERROR",
        "issues": [{"path": ["window"], "message": 'expected one of 24h, 7d, got "90d"'}],
    }


async def test_a_thousand_errors_give_a_short_response(client: AppClient) -> None:
    body = json.dumps({f"field{number}": "x" * 40 for number in range(1000)})
    status, answer = await send(client, PLAIN, body)
    assert status == 400
    assert len(json.dumps(answer)) < 8000


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        ("input", 400, "VALIDATION_ERROR"),
        ("not found", 404, "NOT_FOUND"),
        ("precondition", 412, "PRECONDITION_FAILED"),
        ("unavailable", 503, "SERVICE_UNAVAILABLE"),
        ("market", 503, "SERVICE_UNAVAILABLE"),
        ("undecided", 503, "SERVICE_UNAVAILABLE"),
        ("provider", 500, "INTERNAL_SERVER_ERROR"),
        ("books", 500, "INTERNAL_SERVER_ERROR"),
        ("start", 500, "INTERNAL_SERVER_ERROR"),
        ("bug", 500, "INTERNAL_SERVER_ERROR"),
        ("recursion", 500, "INTERNAL_SERVER_ERROR"),
    ],
)
async def test_each_error_has_its_status(client: AppClient, error: str, status: int, code: str) -> None:
    given, answer = await send(client, "/api/rpc/demo.raise", json.dumps({"error": error}))
    assert isinstance(answer, dict)
    assert (given, answer["code"]) == (status, code)
    assert "secret" not in json.dumps(answer)
    given, answer = await send(client, "/api/rpc/demo/raise", json.dumps({"json": {"error": error}}))
    assert isinstance(answer, dict)
    inner = answer["json"]
    assert (given, inner["status"], inner["code"], inner["defined"]) == (status, status, code, False)
    assert "secret" not in json.dumps(answer)


async def test_an_unavailable_response_says_when_to_retry(client: AppClient) -> None:
    async with client.post("/api/rpc/demo.raise", json={"error": "unavailable"}) as response:
        assert response.headers["Retry-After"] == "7"


@pytest.mark.parametrize("name", ["wrong", "notANumber"])
async def test_an_invalid_output_is_a_failure_and_its_log_has_the_request(
    client: AppClient, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The first output of a procedure and every other."""
    assert await send(client, f"/api/rpc/demo.{name}") == (200, {"value": 1.5})
    async with client.post(f"/api/rpc/demo.{name}") as response:
        assert response.status == 500
        assert await response.json() == {"error": "Internal server error", "code": "INTERNAL_SERVER_ERROR"}
        request_id = response.headers["X-Request-Id"]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert request_id in record.getMessage()
    assert record.exc_info is not None


async def test_every_output_of_a_procedure_is_checked(client: AppClient) -> None:
    wrong = json.dumps({"items": ['{"value":"1"}']})
    assert [await status_of(client, body) for body in (wrong, wrong, '{"text":"3"}', wrong)] == [500, 500, 200, 500]


async def status_of(client: AppClient, body: str) -> int:
    status, _ = await send(client, "/api/rpc/demo.long", body)
    return status


async def test_each_request_is_one_line_in_the_log(client: AppClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "trader.request")
    async with client.post(PLAIN, json={}) as response:
        first = response.headers["X-Request-Id"]
    async with client.post(ORPC, json={"json": 1}) as response:
        second = response.headers["X-Request-Id"]
    lines = [record for record in caplog.records if record.name == "trader.request"]
    assert first != second
    assert [(line.__dict__["request_id"], line.__dict__["status"], line.__dict__["procedure"]) for line in lines] == [
        (first, 200, "demo.echo"),
        (second, 400, "demo.echo"),
    ]
    assert lines[0].__dict__["duration_ms"] > 0
    assert [line.levelno for line in lines] == [logging.DEBUG, logging.INFO]


@pytest.mark.parametrize("path", [PLAIN, "/api/rpc/no.such", "/figures", "/nowhere"])
@pytest.mark.parametrize(("method", "headers"), [("OPTIONS", {}), ("POST", {"Expect": "miracles"}), ("PATCH", {})])
async def test_the_log_has_the_id_of_every_answer(
    client: AppClient, caplog: pytest.LogCaptureFixture, path: str, method: str, headers: dict[str, str]
) -> None:
    caplog.set_level(logging.DEBUG, "trader.request")
    async with client.request(method, path, headers=headers) as response:
        answered = [(response.headers["X-Request-Id"], response.status)]
    lines = [record.__dict__ for record in caplog.records if record.name == "trader.request"]
    assert [(line["request_id"], line["status"]) for line in lines] == answered


async def test_an_output_with_a_constant_token_is_computed_once_per_style(client: AppClient, context: Any) -> None:
    for path in ("/api/rpc/demo.static", "/api/rpc/demo/static"):
        for _ in range(2):
            status, answer = await send(client, path, "{}")
            assert (status, answer) == (200, {"value": 1} if "." in path else {"json": {"value": 1}})
    assert context.calls == ["demo.static"] * 2
    status, _ = await send(client, "/api/rpc/demo.static", '{"a":1}')
    assert status == 400


async def test_a_body_over_64_kib_is_too_large(client: AppClient) -> None:
    fitting = json.dumps({"text": "x" * (2**16 - 12)}).encode()
    assert len(fitting) == 2**16
    status, _ = await send(client, PLAIN, fitting)
    assert status == 200
    status, answer = await send(client, PLAIN, fitting + b" ")
    assert (status, answer) == (413, {"error": "the body is over 65536 bytes", "code": "PAYLOAD_TOO_LARGE"})
    status, answer = await send(client, ORPC, fitting + b" ")
    assert isinstance(answer, dict)
    assert (status, answer["json"]["code"]) == (413, "PAYLOAD_TOO_LARGE")


async def test_a_body_of_unknown_length_is_bounded_too(client: AppClient) -> None:
    async def chunks() -> object:
        for _ in range(40):
            yield b" " * 2**16

    async with client.post(PLAIN, data=chunks()) as response:
        assert response.status == 413


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_compressed_body_is_read_and_bounded(client: AppClient, encoding: str) -> None:
    compress = gzip.compress if encoding == "gzip" else zlib.compress
    headers = {"Content-Encoding": encoding}
    status, answer = await send(client, PLAIN, compress(b'{"window":"24h"}'), headers=headers)
    assert status == 200
    assert isinstance(answer, dict)
    assert answer["window"] == "24h"
    status, _ = await send(client, PLAIN, compress(b" " * 40_000_000), headers=headers)
    assert status == 413


@pytest.mark.parametrize("body", [b"not gzip", gzip.compress(b"{}" * 99, mtime=0)[:-12] + b"x" * 12])
async def test_broken_compression_is_a_bad_request(client: AppClient, body: bytes) -> None:
    async with client.post(PLAIN, data=body, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 400
        answer = await response.json()
        assert answer["error"].startswith("the body cannot be read: ")
        assert "\n" not in answer["error"]
    status, _ = await send(client, PLAIN, "{}")
    assert status == 200


@pytest.mark.parametrize("path", [PLAIN, "/api/rpc/demo/echo", "/api/rpc/no.such", "/figures", "/nowhere"])
async def test_an_expectation_is_met_or_refused_as_json(client: AppClient, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\nExpect: ".encode()
    answer = await exchange_bytes(client, head + b"miracles\r\n\r\n{}", close=False)
    assert answer.startswith(b"HTTP/1.1 417 ")
    assert b"Content-Type: application/json\r\n" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"].startswith("Expect: miracles is not supported")
    answer = await exchange_bytes(client, head + b"100-Continue\r\n\r\n", b"{}", close=False)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 ")
    answer = await exchange_bytes(client, head.replace(b"/1.1", b"/1.0") + b"miracles\r\n\r\n{}", close=False)
    assert not answer.startswith((b"HTTP/1.0 417 ", b"HTTP/1.1 100 "))


async def exchange_bytes(client: AppClient, *parts: bytes, close: bool = True) -> bytes:
    """Write raw bytes, and read until the server closes."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if close:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_missing_body_times_out(client: AppClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.api.requests.BODY_WAIT_S", 1)
    head = b"POST /api/rpc/demo.echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\nConnection: close\r\n\r\n{"
    answer = await exchange_bytes(client, head, close=False)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"TIMEOUT"' in answer


async def test_a_disconnect_within_the_body_is_not_an_error(
    client: AppClient, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /api/rpc/demo.echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"
    assert await exchange_bytes(client, head) == b""
    status, _ = await send(client, PLAIN)
    assert status == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_call_ends_as_usual_after_its_client_has_disconnected(limited_client: Client, context: Any) -> None:
    _, writer = await asyncio.open_connection(limited_client.host, limited_client.port)
    writer.write(b"POST /api/rpc/demo.wait HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
    await until(lambda: context.waiting)
    writer.transport.abort()
    async with limited_client.post("/api/rpc/demo.echo", json={}) as answer:  # the server reads the end before this
        assert answer.status == 200
    context.gate.set()
    await until(lambda: context.calls == ["demo.echo", "demo.wait"])


async def test_changes_need_the_token(make_service: ServiceFactory) -> None:
    client = await make_service(API_TOKEN="open-sesame-0123456789")
    path = "/api/rpc/demo.change"
    for authorization in (None, "", "Bearer", "Bearer wrong", "Basic open-sesame-0123456789", "Bearer \u00e9"):
        headers = {} if authorization is None else {"Authorization": authorization}
        async with client.post(path, headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await response.json())["code"] == "UNAUTHORIZED"
    for authorization in ("Bearer open-sesame-0123456789", "bearer  open-sesame-0123456789"):
        status, _ = await send(client, path, headers={"Authorization": authorization})
        assert status == 200
    assert (await send(client, PLAIN))[0] == 200


async def test_without_a_token_in_the_settings_callers_need_none(client: AppClient) -> None:
    assert (await send(client, "/api/rpc/demo.change"))[0] == 200


def test_a_name_is_declared_once() -> None:
    registry = Registry()

    async def handler(context: object, request: Empty) -> Empty:
        return request

    registry.procedure("a.b")(handler)
    with pytest.raises(ValueError, match=r"a\.b is declared twice"):
        registry.procedure("a.b")(handler)
    with pytest.raises(ValueError, match=r"a\.c is guarded"):
        registry.procedure("a.c", changes=True, token=lambda _: ())(handler)


def test_live_trading_refuses_only_the_simulator_and_external_agents() -> None:
    load_procedures()
    assert {name for name, declared in REGISTRY.procedures.items() if declared.paper_only} == {
        name for name in REGISTRY.procedures if name.startswith(("simulator.", "agent."))
    }
