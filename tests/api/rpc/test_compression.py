"""Compression of answers: for callers that accept it, once per cached answer, and never long on the event loop."""

import asyncio
import gzip
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pytest_aiohttp.plugin import AiohttpClient
from support.served import make_app

from trader.api import compression
from trader.api.compression import BYTES_MIN, THREAD_BYTES_MIN
from trader.api.registry import Registry
from trader.api.routes import Route
from trader.api.schemas.common import Empty, Wire
from trader.settings.settings import Settings

LONG = "x" * THREAD_BYTES_MIN

registry = Registry()


class Text(Wire):
    text: str


class Context:
    settings = Settings.load({}, None, demo=True)


@registry.procedure("demo.kept", token=lambda _: "always")
async def kept(_: Any, __: Empty) -> Text:
    return Text(text=LONG)


@registry.procedure("demo.short")
async def short(_: Any, __: Empty) -> Text:
    return Text(text="short")


@pytest.fixture
async def address(aiohttp_client: AiohttpClient) -> str:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text=LONG)

    client = await aiohttp_client(make_app(Route("/page").get(page), context=Context(), registry=registry))
    return str(client.make_url("/")).rstrip("/")


async def fetch(url: str, accepted: str | None, **options: Any) -> tuple[aiohttp.ClientResponse, bytes]:
    headers = {} if accepted is None else {"Accept-Encoding": accepted}
    skipped = ["Accept-Encoding"] if accepted is None else []
    async with (
        aiohttp.ClientSession(auto_decompress=False, skip_auto_headers=skipped) as http,
        http.request(options.pop("method", "POST"), url, headers=headers, **options) as response,
    ):
        return response, await response.read()


@pytest.mark.parametrize("accepted", ["gzip", "br, GZIP;q=0.5", "*", "identity;q=0.5, gzip"])
@pytest.mark.parametrize("path", ["/api/rpc/demo.kept", "/page"])
async def test_a_long_response_is_compressed_for_callers_that_accept_it(address: str, accepted: str, path: str) -> None:
    response, body = await fetch(address + path, accepted, method="GET" if path == "/page" else "POST")
    assert response.headers["Content-Encoding"] == "gzip"
    assert int(response.headers["Content-Length"]) == len(body) < BYTES_MIN
    assert "Accept-Encoding" in response.headers["Vary"]
    assert LONG in gzip.decompress(body).decode()


@pytest.mark.parametrize("accepted", [None, "", "identity", "br", "gzip;q=0", "*;q=0.0", "gzip;q=0, *"])
async def test_responses_to_other_callers_are_not_compressed(address: str, accepted: str | None) -> None:
    response, body = await fetch(f"{address}/api/rpc/demo.kept", accepted)
    assert "Content-Encoding" not in response.headers
    assert "Accept-Encoding" in response.headers["Vary"]
    assert LONG in body.decode()


async def test_short_answers_and_errors_are_not_compressed(address: str) -> None:
    for name, status in (("demo.short", 200), ("demo.none", 404)):
        response, _ = await fetch(f"{address}/api/rpc/{name}", "gzip")
        assert response.status == status
        assert "Content-Encoding" not in response.headers


async def test_a_cached_answer_is_compressed_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    compressed = compression.compressed

    async def counted(body: bytes) -> bytes:
        made.append(len(body))
        return await compressed(body)

    monkeypatch.setattr("trader.api.response_cache.compressed", counted)
    answers = await asyncio.gather(*(fetch(f"{address}/api/rpc/demo.kept", "gzip") for _ in range(5)))
    assert len({body for _, body in answers}) == 1
    assert len(made) == 1


@pytest.mark.parametrize("mode", ["buffered", "streaming"])
async def test_batches_are_compressed_too(address: str, mode: str) -> None:
    async with (
        aiohttp.ClientSession(auto_decompress=False) as http,
        http.post(
            f"{address}/api/rpc/__batch__",
            headers={"Accept-Encoding": "gzip", "x-orpc-batch": mode},
            json=[{"url": f"{address}/api/rpc/demo/kept"}, {"url": f"{address}/api/rpc/demo/short"}],
        ) as response,
    ):
        assert (response.status, response.headers["Content-Encoding"]) == (207, "gzip")
        text = gzip.decompress(await response.read()).decode()
    assert LONG in text
    assert "short" in text
