"""The edge of the application: the answers to paths and methods, and the names under which they are counted."""

import pytest
from aiohttp import web
from pytest_aiohttp.plugin import AiohttpClient
from support.served import AppClient, counted, make_app

from trader.api.routes import Documented, Route
from trader.settings.settings import Settings

LISTED = "https://app.example"


@pytest.fixture
async def client(aiohttp_client: AiohttpClient) -> AppClient:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="a file")

    routes = [*Route("/api/files", head=True).get(answer), *Route("/page").get(answer)]
    routes += Route("/api/said", responses={200: Documented("A text.", str)}).get(answer)
    return await aiohttp_client(make_app(routes, settings=Settings.load({"CORS_ORIGINS": LISTED}, None, demo=True)))


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed", "name"),
    [
        ("GET", "/api/files", 200, None, "files"),
        ("HEAD", "/api/files?x=1", 200, None, "files"),
        ("GET", "/api/%66iles", 200, None, "files"),
        ("POST", "/api/files", 405, "GET, HEAD", "files"),
        ("PROPFIND", "/api/files", 405, "GET, HEAD", "files"),
        ("HEAD", "/page", 405, "GET", "page"),
        ("GET", "/api/said/", 200, None, "said"),
        ("POST", "/api/said/", 405, "GET", "said"),
        ("OPTIONS", "/page", 405, "GET", "page"),
        ("GET", "/api/files/", 404, None, "unknown"),
        ("GET", "/files", 404, None, "unknown"),
        ("PROPFIND", "/api/none", 404, None, "unknown"),
        ("OPTIONS", "/none", 404, None, "unknown"),
    ],
)
async def test_every_request_is_answered_and_counted_by_the_name_of_its_path(
    client: AppClient, method: str, path: str, status: int, allowed: str | None, name: str
) -> None:
    async with client.request(method, path) as response:
        assert (response.status, response.headers.get("Allow")) == (status, allowed)
        assert response.headers["X-Request-Id"]
        assert response.headers["Server"] == "trader"
        if status != 200 and method != "HEAD":
            assert set(await response.json()) == {"error"}
    assert counted(client.app) == {(name, str(status)): 1}


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/api/files", 405), ("GET", "/api/none", 404)])
async def test_listed_origins_may_read_refusals_too(client: AppClient, method: str, path: str, status: int) -> None:
    async with client.request(method, path, headers={"Origin": LISTED}) as response:
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (status, LISTED)


async def test_an_expectation_that_no_route_takes_is_refused(client: AppClient) -> None:
    async with client.post("/none", headers={"Expect": "miracles"}) as response:
        assert response.status == 417
        assert "miracles" in (await response.json())["error"]
