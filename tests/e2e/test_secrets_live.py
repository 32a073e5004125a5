"""No secret leaves the service: all output of a failing service is searched for each of them.

The models of this service use a provider that repeats its key wherever it can, and fails in every way.
"""

import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.process import ServiceProcess, serving
from support.waiting import until

from trader.agents.domain.models import Model
from trader.agents.sql.models import upsert_model
from trader.core.clock import SystemClock
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.settings.settings import Settings

pytestmark = pytest.mark.processes

KEYS = tuple(f"sk-e2e-secret-{number}-0f9e8d7c6b5a" for number in range(4))
SECRETS = {
    **{f"OPENAI_API_KEY_{number}": key for number, key in enumerate(KEYS, 1)},
    "NIM_API_KEY": "nvapi-e2e-secret-1a2b3c4d",
    "TAAPI_API_KEY": "taapi-e2e-secret-5e6f7a8b",
    "VENUE_API_KEY": "0xe2e5ec7e" + "ab" * 36,
    "API_TOKEN": "token-e2e-secret-9c0d1e2f",
    "NOTIFY_URL": "http://127.0.0.1:9/hook-e2e-secret-77aa",
    "HEARTBEAT_URL": "http://127.0.0.1:9/ping-e2e-secret-88bb",
}
READS = (
    "models.getModels", "models.getInvocations", "analytics.getFailures", "analytics.getModelStats",
    "analytics.getRunInfo", "trading.getTrades", "trading.getPositions", "variants.getVariants",
)  # fmt: skip
STREAMS = ("conversations", "workflow", "positions")


def _escaped(text: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" for letter in text)


def _said(message: dict[str, Any]) -> web.Response:
    return web.json_response({"model": "m", "choices": [{"message": message}]})


def _repeating(key: str) -> web.Response:
    arguments = f'{{"reason": "called with {key}", "{key}": "{_escaped(key)}"}}'
    call = {"id": key, "function": {"name": "holding", "arguments": arguments}}
    odd = {"id": key, "function": {"name": key, "arguments": key}}
    return _said({"content": f"I was called with {key}", "reasoning": key, "tool_calls": [call, odd]})


def _escaping(key: str) -> web.Response:
    body = f'{{"model": "{_escaped(key)}", "choices": [{{"message": {{"content": "{_escaped(key)}"}}}}]}}'
    return web.Response(text=body, content_type="application/json")


ANSWERS: Mapping[str, Callable[[str], web.Response]] = {
    "refuses": lambda key: web.json_response({"error": {"message": f"Incorrect API key provided: {key}"}}, status=401),
    "wrong": lambda key: web.json_response({"error": {"message": f"bad request of {key}"}}, status=400),
    "html": lambda key: web.Response(text=f"<html>{key}</html>", content_type="text/html"),
    "malformed": lambda key: web.Response(text=f'{{"choices": ["{key}"', content_type="application/json"),
    "redirects": lambda key: web.Response(status=302, headers={"Location": f"http://{key}.example/?k={key}"}, text=key),
    "fails": lambda key: web.Response(status=500, text=f"Traceback: key={key}", reason=f"because-{key}"),
    "escapes": _escaping,
    "repeats": _repeating,
}
"""How a call with a key fails, by the name of the model."""


@pytest.fixture
async def provider() -> AsyncIterator[str]:
    refused: set[str] = set()

    async def answer(request: web.Request) -> web.Response:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        model = orjson.loads(await request.read())["model"]
        if model == "refuses" and refused:  # one unusable key is enough
            return _said({"content": "in"})
        refused.update([key] if model == "refuses" else [])
        return ANSWERS[model](key)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/v1"))


async def _produced_by_http(service: ServiceProcess) -> list[str]:
    result = []
    paths = ["/health", "/health/schedulers", "/api/health", "/api/openapi.json", "/api/docs", "/metrics", "/nothing"]
    for path in paths:
        async with service.http.get(service.url + path) as response:
            result.append(str(response.headers) + await response.text())
    for name in READS:
        for url, body in ((name, {}), (name.replace(".", "/"), {"json": {}}), (name, {"unknown": list(ANSWERS)})):
            async with service.http.post(f"{service.url}/api/rpc/{url}", data=orjson.dumps(body)) as response:
                result.append(str(response.headers) + await response.text())
    for token in ("Bearer wrong", ""):
        order = {"symbol": "BTC", "side": "buy", "quantity": 1}
        url, headers = f"{service.url}/api/rpc/simulator.placeOrder", {"Authorization": token}
        async with service.http.post(url, data=orjson.dumps(order), headers=headers) as response:
            assert response.status == 401
            result.append(str(response.headers) + await response.text())
    for stream in STREAMS:
        async with service.http.get(f"{service.url}/api/events/{stream}") as response:
            result.append(str(response.headers) + (await response.content.readuntil(b"\n\n")).decode())
    return result


async def _rows(database: Database) -> list[str]:
    """Every row of every table as text, payloads unpacked."""
    result = []
    async with database.connection() as conn:
        tables = await conn.fetch(
            "SELECT c.relname FROM pg_class c WHERE c.relkind IN ('r', 'p') AND c.relnamespace = 'public'::regnamespace"
        )
        for (table,) in tables:
            for row in await conn.fetch(f'SELECT * FROM "{table}"'):
                values = dict(row)
                if "payload" in values:
                    values["payload"] = zlib.decompress(values["payload"]).decode()
                result.append(f"{table}: {values}")
    return result


async def test_no_output_contains_a_secret(tmp_path: Path, database: Database, dsn: str, provider: str) -> None:
    now = SystemClock().now()
    async with database.connection() as conn:
        for number, kind in enumerate(ANSWERS):
            model = Model(
                id=kind, name=kind, variant=list(VariantId)[number % 4], provider="openai", router_model_name=kind,
                created_at=now,
            )  # fmt: skip
            await upsert_model(conn, model)
    environ = {**SECRETS, "OPENAI_BASE_URL": provider, "DATABASE_URL": dsn, "LOG_LEVEL": "debug", "METRICS": "on"}
    async with serving(tmp_path, **environ) as service:

        async def all_ended() -> Any:
            runs = (await service.call("models.getInvocations"))["conversations"]
            return {each["modelId"] for each in runs} == set(ANSWERS) and runs

        ended = await until(all_ended, within_s=120)
        by_model = {each["modelId"]: each for each in ended}
        http = await _produced_by_http(service)
        assert await service.stop() == 0
        log = b"".join(service.log).decode()
    assert by_model["repeats"]["response"].startswith("I was called with ***")
    assert {by_model[kind]["status"] for kind in ("wrong", "html", "malformed", "redirects", "fails")} == {"failed"}
    assert by_model["escapes"]["response"] == "***"
    rows = await _rows(database)
    settings = Settings.load(environ, None, demo=True)
    produced = {"log": [log], "rows": rows, "http": http, "settings": [repr(settings), str(settings.providers)]}
    assert "was refused (401" in log
    assert "bad request of ***" in "".join(rows) + "".join(http)
    password = urlsplit(dsn).password
    for name, secret in {**SECRETS, **({"password": password} if password else {})}.items():
        hidden = secret.rpartition("/")[2]  # the part of an address that would be one
        for where, texts in produced.items():
            leaks = [text[max(0, at - 80) : at + 80] for text in texts if (at := text.find(hidden)) >= 0]
            assert not leaks, f"{name} in {where}: {leaks[0]}"
