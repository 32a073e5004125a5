"""Hostile bodies, foreign origins, the API token and limits at the running service."""

import asyncio
import io
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from support.contract import OUTPUTS
from support.process import ServiceProcess, serving
from support.shapes import assert_shape, text
from yarl import URL

from trader.api.registry import REGISTRY, load_procedures
from trader.api.requests import BODY_SIZE_MAX

pytestmark = pytest.mark.processes

ALLOWED = "https://desk.example"
FOREIGN = "https://evil.example"
TOKEN = "open-sesame-0123456789"

ERROR = {"error": text, "code": text, "issues?": [{"path": [lambda _: None], "message": text}]}

NO_OBJECTS: Sequence[bytes] = (
    b"{", b"[]", b"null", b"1", b'"x"', b"true", b"\xff\xfe", b"\x00", b'{"a":1}{', b"{'a': 1}", b"NaN",
    b'{"json":', b'{"a":NaN}', b'{"a":"\\u0000\xff"}',
    b'{"a":Infinity}', b"[" * 5000, b'{"a":' * 5000, b'{"\\ud800":1}', b"a=1&b=2", b"<x/>", b'{"a":1e999999}',
)  # fmt: skip
"""Bodies that are not JSON, or no object, or whose only field no procedure has."""

NO_INPUTS: Sequence[dict[str, Any]] = (
    {"unknown": 1}, {"": 1}, {"__proto__": {}}, {"x" * 10_000: 1}, {"\x00": 1}, {"json": None}, {"json": []},
    {"json": "x"}, {"json": {"unknown": 1}}, {"json": {}, "meta": {}}, {"json": {}, "meta": 1},
    {"meta": []}, {"input": {}},
)  # fmt: skip
"""Objects that no procedure accepts."""

BAD_VALUES: Sequence[Any] = (None, [], {}, "", "x" * 5000, "\x00", -1, 0.5, 10**400, True, ["a"] * 200, {"a": 1})

VALID: Mapping[str, dict[str, Any]] = {
    **{name: {} for name in OUTPUTS},
    "simulator.placeOrder": {"symbol": "BTC", "side": "buy", "quantity": 0.01},
    "simulator.cancelOrder": {"orderId": "00000000-0000-5000-8000-000000000000"},
    "models.getConversation": {"invocationId": "00000000-0000-5000-8000-000000000000"},
}
FIELDS: Mapping[str, Sequence[str]] = {
    "trading.getTrades": ("variant", "modelId", "limit", "before", "skip"),
    "trading.getPositions": ("variant", "modelId"),
    "trading.getCryptoPrices": ("symbols",),
    "trading.getPortfolioHistory": ("variant", "modelId", "startDate", "endDate", "maxPoints"),
    "trading.getEquityCurves": ("variant", "modelId", "startDate", "endDate", "points", "baselines"),
    "models.getInvocations": ("variant", "modelId", "limit", "before", "skip"),
    "models.getConversation": ("invocationId",),
    "simulator.placeOrder": (
        "accountId", "symbol", "side", "quantity", "type", "limitPrice", "leverage", "reduceOnly", "exitPlan",
        "confidence", "clientOrderId",
    ),
    "simulator.cancelOrder": ("accountId", "orderId"),
    "simulator.getAccount": ("accountId",),
    "simulator.resetAccount": ("accountId",),
    "simulator.getCompletedTradesFromDB": ("modelId", "limit", "before", "skip"),
    "analytics.getModelStats": ("mode", "variant"),
    "analytics.getLeaderboard": ("window", "sortBy", "variant", "details"),
    "analytics.getEvidence": ("window", "variant", "modelId"),
    "analytics.getBehaviour": ("modelId",),
    "analytics.getComparison": ("modelId", "against", "window"),
    "analytics.getFailures": ("limit", "variant", "before", "skip"),
    "variants.getVariantHistory": ("window",),
}  # fmt: skip
"""Every input field of every procedure."""

EVIL_TEXTS = (
    "'; DROP TABLE orders; --",
    "../../etc/passwd",
    "é😀",
    "\ud800".encode("utf-8", "replace").decode(),
    "%00",
)


def hostile_bodies(name: str) -> list[tuple[bytes, bool]]:
    """Bodies, and whether each must be refused; the others may also be answered."""
    bodies = [(body, True) for body in NO_OBJECTS] + [(orjson.dumps(body), True) for body in NO_INPUTS]
    bodies += [(b"\xef\xbb\xbf{}", False), (b'{"json":{},"more":1}', False), (b" ", False)]
    for field in FIELDS.get(name, ()):
        for value in BAD_VALUES:
            written = b"1" + b"0" * 400 if value == 10**400 else orjson.dumps(value)
            whole = {key: orjson.dumps(given) for key, given in VALID[name].items()} | {field: written}
            bodies.append(
                (b"{%b}" % b",".join(b'"%b":%b' % (key.encode(), given) for key, given in whole.items()), False)
            )
        bodies += [(orjson.dumps(VALID[name] | {field: evil}), False) for evil in EVIL_TEXTS]
    return bodies


async def test_no_body_causes_an_internal_error(tmp_path: Path, dsn: str) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service:
        results = await asyncio.gather(*(attack(service, name) for name in OUTPUTS))
        assert not [problem for problems in results for problem in problems]
        assert service.process.returncode is None
        for name in ("variants.getVariants", "simulator.getAccount"):
            assert_shape(await service.call(name), OUTPUTS[name])
        assert await service.stop() == 0
        assert not service.traceback()


async def attack(service: ServiceProcess, name: str) -> list[str]:
    """Return the problems of one procedure's answers, in both styles."""
    problems = []
    for style in (name, name.replace(".", "/")):
        for body, refused in hostile_bodies(name):
            async with service.http.post(f"{service.url}/api/rpc/{style}", data=body) as response:
                status, answer = response.status, await response.read()
            where = f"{style} {body[:120]!r}: {status} {answer[:200]!r}"
            if status == 200 and not refused:
                continue
            if status not in {400, 404} or response.headers["Content-Type"] != "application/json":
                problems.append(where)
            elif b"Traceback" in answer or b"trader/" in answer or not is_error(orjson.loads(answer)):
                problems.append(f"{where} is no proper error")
            elif status == 404 and name != "simulator.cancelOrder":
                problems.append(where)
    return problems


def is_error(answer: Any) -> bool:
    if set(answer) == {"json"}:
        inner = answer["json"]
        return (
            {"defined", "code", "status", "message"} <= set(inner) <= {"defined", "code", "status", "message", "data"}
        )
    return {"error", "code"} <= set(answer) <= {"error", "code", "issues"}


@pytest.mark.asyncio(loop_scope="session")
async def test_errors_name_the_field_and_paths_are_exact(service: ServiceProcess) -> None:
    status, body = await service.try_call("variants.getVariantHistory", window="90d", other=1)
    assert status == 400
    assert_shape(body, ERROR)
    assert body["code"] == "VALIDATION_ERROR"
    assert sorted(issue["path"] for issue in body["issues"]) == [["other"], ["window"]]
    for path in ("variants.nothing", "nothing", "", "variants%2EgetVariants", "variants%2FgetVariants", "a/b/c"):
        url = URL(f"{service.url}/api/rpc/{path}", encoded=True)
        async with service.http.post(url, data=b"{}") as response:
            assert (response.status, orjson.loads(await response.read())) == (404, {"error": "Not Found"}), path
    async with service.http.get(f"{service.url}/api/rpc/variants.getVariants") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert orjson.loads(await response.read())["code"] == "METHOD_NOT_SUPPORTED"
    for path in ("variants.getVariants/", "variants/getVariants/"):
        async with service.http.post(f"{service.url}/api/rpc/{path}", data=b"") as response:
            assert response.status == 200
    assert (await service.try_call("simulator.cancelOrder", orderId="x"))[0] == 404
    for path in ("/health", "/api/health", "/health/schedulers", "/api/health/schedulers"):
        assert (await service.get(path))[0] == 200


@pytest.mark.asyncio(loop_scope="session")
async def test_a_body_over_64_kib_is_refused(service: ServiceProcess) -> None:
    async def post(size: int, *, chunked: bool) -> tuple[int, Any]:
        body = b'{"modelId":"%b"}' % (b"x" * (size - 14))
        assert len(body) == size

        async def chunks() -> Any:
            for start in range(0, size, 65_536):
                yield body[start : start + 65_536]

        url = f"{service.url}/api/rpc/trading.getPositions"
        async with service.http.post(url, data=chunks() if chunked else io.BytesIO(body)) as response:
            return response.status, orjson.loads(await response.read())

    for chunked in (False, True):
        assert await post(BODY_SIZE_MAX, chunked=chunked) == (200, [])
        status, answer = await post(BODY_SIZE_MAX + 1, chunked=chunked)
        assert (status, answer["code"]) == (413, "PAYLOAD_TOO_LARGE")
        assert_shape(answer, ERROR)
    assert (await service.try_call("trading.getPositions"))[0] == 200


@pytest.mark.asyncio(loop_scope="session")
async def test_a_model_id_of_any_length_is_accepted_as_unknown(service: ServiceProcess) -> None:
    load_procedures()
    required = {"analytics.getTradeTotals": {"by": "day"}, "analytics.getComparison": {"against": "apex-rules"}}
    named = [
        (name, required.get(name, {}))
        for name, declared in REGISTRY.procedures.items()
        if any(field.encode_name == "modelId" for field in msgspec.structs.fields(declared.input_type))
    ]
    assert len(named) > 5
    changing: dict[str, Any] = {"times": [], "at": None, "until": None, "since": None}
    for name, others in named:
        long = await service.call(name, modelId="x" * 10_000, **others)
        unknown = await service.call(name, modelId="nobody", **others)
        if isinstance(long, dict):
            long, unknown = long | changing, unknown | changing
        assert long == unknown, name
    assert await service.call("trading.getPositions", modelId="x" * 129) == []


async def test_only_listed_origins_and_this_server_may_call(tmp_path: Path, dsn: str) -> None:
    environ = {"DATABASE_URL": dsn, "CORS_ORIGINS": ALLOWED, "SIM_LATENCY_MS": "0"}
    async with serving(tmp_path, **environ) as service:

        async def post(origin: str, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
            url = f"{service.url}/api/rpc/simulator.placeOrder"
            order = orjson.dumps({"symbol": "BTC", "side": "buy", "quantity": 0.01})
            async with service.http.post(url, data=order, headers={"Origin": origin, **headers}) as response:
                return response.status, orjson.loads(await response.read()), response.headers.copy()

        port = service.url.rpartition(":")[2]
        for origin in (ALLOWED, service.url, f"http://localhost:{port}"):
            status, _, headers = await post(origin)
            assert status == 200, origin
        status, _, headers = await post(ALLOWED)
        assert headers["Access-Control-Allow-Origin"] == ALLOWED
        before = (await service.call("simulator.getAccount"))["account"]["positions"][0]["quantity"]
        host = FOREIGN.removeprefix("https://")
        for origin in (
            FOREIGN,
            "null",
            ALLOWED + ".evil.example",
            ALLOWED.upper(),
            f"{ALLOWED}:8443",
            "http://localhost",
        ):
            status, body, headers = await post(origin)
            assert (status, body["code"]) == (403, "FORBIDDEN"), origin
            assert "Access-Control-Allow-Origin" not in headers
            assert (await post(origin, Host=host))[0] == 421
        async with service.http.get(service.url, headers={"Host": host}) as page:  # by DNS rebinding, say
            assert page.status == 421
        after = (await service.call("simulator.getAccount"))["account"]["positions"][0]["quantity"]
        assert before == after
        await check_preflights(service)


async def check_preflights(service: ServiceProcess) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-orpc-batch"}
    for path in ("/api/rpc/simulator.placeOrder", "/api/rpc/variants/getVariants", "/api/events/positions", "/health"):
        method = "POST" if "rpc" in path else "GET"
        headers = {**asked, "Access-Control-Request-Method": method, "Origin": ALLOWED}
        async with service.http.options(service.url + path, headers=headers) as response:
            assert response.status in {200, 204}, path
            assert response.headers["Access-Control-Allow-Origin"] == ALLOWED
            assert method in response.headers["Access-Control-Allow-Methods"]
            allowed = response.headers["Access-Control-Allow-Headers"].lower()
            assert "content-type" in allowed
            assert "x-orpc-batch" in allowed
        async with service.http.options(service.url + path, headers={**headers, "Origin": FOREIGN}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
            assert response.status < 500
    async with service.http.get(service.url + "/health", headers={"Origin": ALLOWED}) as response:
        assert response.headers["Access-Control-Allow-Origin"] == ALLOWED


async def test_the_token_protects_procedures_that_change_something(tmp_path: Path, dsn: str) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, API_TOKEN=TOKEN, SIM_LATENCY_MS="0") as service:

        async def post(name: str, body: bytes, authorization: str | None) -> tuple[int, Any]:
            headers = {} if authorization is None else {"Authorization": authorization}
            async with service.http.post(f"{service.url}/api/rpc/{name}", data=body, headers=headers) as response:
                return response.status, orjson.loads(await response.read())

        order = b'{"symbol":"BTC","side":"buy","quantity":0.01}'
        for wrong in (None, TOKEN, "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer é"):
            for name, body in (("simulator.placeOrder", order), ("simulator.resetAccount", b"{}")):
                status, answer = await post(name, body, wrong)
                assert (status, answer["code"]) == (401, "UNAUTHORIZED"), wrong
        assert (await post("simulator.placeOrder", order, f"Bearer {TOKEN}"))[0] == 200
        assert (await post("simulator.resetAccount", b"{}", f"Bearer {TOKEN}"))[0] == 200
        assert (await post("trading.getPositions", b"{}", None))[0] == 200
        assert await service.stop() == 0
        assert TOKEN.encode() not in b"".join(service.log)


async def test_simultaneous_connections_are_all_accepted(tmp_path: Path, dsn: str) -> None:
    """As after a restart: a caller that finds no room in the queue would retry after a second."""
    async with serving(tmp_path, DATABASE_URL=dsn) as service:
        url = URL(service.url)
        service.process.send_signal(signal.SIGSTOP)  # it accepts no connections meanwhile
        try:
            with ExitStack() as stack:
                callers = []
                for _ in range(500):
                    caller = socket.create_connection((str(url.host), url.port or 0), timeout=0.5)
                    callers.append(stack.enter_context(caller))
                service.process.send_signal(signal.SIGCONT)
                for caller in callers:
                    caller.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                for caller in callers:
                    caller.settimeout(10)
                    assert caller.recv(65536).startswith(b"HTTP/1.1 ")
        finally:
            service.process.send_signal(signal.SIGCONT)
