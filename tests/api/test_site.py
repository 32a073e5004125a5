"""The site: which handler a path has, and what runs and ends with its server."""

import asyncio

import pytest
from aiohttp import web
from support.served import served

from trader.api.connections import ConnectionLimits, HttpServer, bind
from trader.api.requests import Handler
from trader.api.site import Site


def says(text: str) -> Handler:
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(text=text)

    return answer


@pytest.fixture
def site() -> Site:
    site = Site()
    site.add("/files/list", "list", says("the list"))
    site.add_pattern("/files/(.*/)?last", "last", says("the last"))
    site.add_pattern("/files/.*", "any", says("any file"))
    return site


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/files/list", "the list"),
        ("/files/list?x=1", "the list"),
        ("/files/%6cist", "the list"),
        ("/files/last", "the last"),
        ("/files/a/b/last", "the last"),
        ("/files/a/b", "any file"),
        ("/files/", "any file"),
        ("/files%2Flist", '{"error":"Not Found"}'),
        ("/files", '{"error":"Not Found"}'),
        ("/all/files/last", '{"error":"Not Found"}'),
    ],
)
async def test_a_path_has_one_handler(site: Site, path: str, text: str) -> None:
    async with served(site) as client:
        reader, writer = await asyncio.open_connection(client.host, client.port)  # no client that escapes the path
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
    assert answer.partition(b"\r\n\r\n")[2].decode() == text


async def test_requests_are_counted_by_the_name_of_their_handler(site: Site) -> None:
    async with served(site) as client:
        for path in ("/files/list", "/files/list", "/files/x/last", "/nothing"):
            async with client.get(path):
                pass
    counts = {name: sum(latencies.counts) for name, latencies in site.requests.latencies.items()}
    assert counts == {("list", 200): 2, ("last", 200): 1, ("unknown", 404): 1}


async def test_tasks_run_while_the_site_is_served_and_endless_answers_are_ended_by_its_end(site: Site) -> None:
    steps: list[str] = []
    asked, ended = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        steps.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("ended")

    async def end() -> None:
        steps.append("answers ended")
        ended.set()

    async def endless(_: web.BaseRequest) -> web.Response:
        asked.set()
        await ended.wait()
        return web.Response(text="an end")

    site.tasks["beside"] = run
    site.endings.append(end)
    site.add("/endless", "endless", endless)
    server, sockets = HttpServer(site, ConnectionLimits()), bind("127.0.0.1", 0)
    await server.start(sockets)
    reader, writer = await asyncio.open_connection(*sockets[0].getsockname())
    writer.write(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asked.wait()
    assert steps == ["began"]
    await server.stop()
    assert (await reader.read()).endswith(b"an end")
    assert steps == ["began", "answers ended", "ended"]
    writer.close()
    await writer.wait_closed()
