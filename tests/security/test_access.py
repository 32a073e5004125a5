"""Access: tokens that restrict reading, wrong tokens that block an address, and ports not left open by mistake."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web
from pytest_aiohttp.plugin import AiohttpClient
from support.calls import Call
from support.chromium import open_tab
from support.composed import composed
from support.raw_socket_service import CALL, Context, Service, registry
from support.served import AppClient, Client, make_app, make_stream_app, served

from trader.api.broadcast import CAPACITY
from trader.api.context import ACCESS
from trader.api.dashboard.reports import report_page
from trader.api.routes import Documented, Route
from trader.api.schemas.common import Refusal
from trader.api.stream_table import STREAMS
from trader.api.streams import Broadcasters
from trader.core.clock import SystemClock
from trader.core.errors import SettingsError
from trader.core.events import EventBus
from trader.database.pool import Database
from trader.operations.access import READ_EVERY_S, WRONG_MAX, Access, issue
from trader.operations.domain.credentials import OPERATOR_MARK
from trader.settings.forms import Secret
from trader.settings.settings import Settings

READ, TRADE = "read-0123456789abcdef", "trade-0123456789abcdef"
ISSUED, ISSUED_TOKEN = issue(OPERATOR_MARK, "page", datetime(2026, 1, 1, tzinfo=UTC), ("read",))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(f"anybody:{password}".encode()).decode()}


@pytest.fixture
async def access() -> Access:
    """Access with the two tokens of the settings, which needs no database."""
    return Access(None, Secret(TRADE), Secret(READ), [ISSUED_TOKEN])


@pytest.fixture
async def client(access: Access, aiohttp_client: AiohttpClient) -> AppClient:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    paths = ("/", "/health", "/health/live", "/health/schedulers", "/metrics", "/api/events/positions")
    said = {200: Documented("An object.", Refusal)}
    routes = [definition for path in paths for definition in Route(path, responses=said).get(answer)]
    settings = Settings.load({"PORT": "0", "API_TOKEN": TRADE, "READ_TOKEN": READ}, None, demo=True)
    app = make_app(routes, context=Context(settings), registry=registry, settings=settings)
    app[ACCESS] = access
    return await aiohttp_client(app)


@pytest.mark.parametrize("path", ["/", "/metrics", "/health/schedulers", "/api/events/positions"])
async def test_read_token_restricts_reading(client: AppClient, path: str) -> None:
    async with client.get(path) as refused:
        assert refused.status == 401
        challenges = refused.headers.getall("WWW-Authenticate")  # no browser understands both in one line
        assert challenges == ['Basic realm="trader", charset="UTF-8"', "Bearer"]
    for headers in (bearer(READ), bearer(TRADE), basic(READ)):
        async with client.get(path, headers=headers) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/"])
async def test_supervisors_need_no_token(client: AppClient, path: str) -> None:
    async with client.get(path) as answer:
        assert answer.status == 200


async def test_reading_procedures_and_batches_are_restricted_too(client: AppClient) -> None:
    batch = [{"url": "http://x/api/rpc/demo/wait", "body": {"json": {}}}]
    for headers, status in (({}, 401), (bearer("wrong"), 401), (bearer(READ), 200)):
        async with client.post("/api/rpc/demo.wait", data="{}", headers=headers) as answer:
            assert answer.status == status
            assert answer.headers["Cache-Control"] == "no-store"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        async with client.post(
            "/api/rpc/__batch__", json=batch, headers={"x-orpc-batch": "buffered", **headers}
        ) as many:
            assert [reply["status"] for reply in await many.json()] == [status]


async def test_wrong_tokens_block_their_address_but_not_authenticated_callers(
    client: AppClient, access: Access
) -> None:
    async with client.get("/metrics", headers=bearer(READ)) as answer:
        assert answer.status == 200
    assert not list(access.alarms())
    for number in range(WRONG_MAX):
        async with client.get("/metrics", headers=bearer(f"guess-{number}")) as answer:
            assert answer.status == 401
    async with client.get("/metrics", headers=bearer(ISSUED)) as answer:
        assert answer.status == 200, (
            "nobody guesses an issued token, so strangers behind the same proxy cannot block it"
        )
    for token in ("guess", TRADE, ISSUED[:-1]):  # a correct guess is not detected while the address is blocked
        async with client.get("/metrics", headers=bearer(token)) as answer:
            assert answer.status == 429
            assert 0 < int(answer.headers["Retry-After"]) <= 60
    async with client.get("/metrics", headers=bearer(READ)) as answer:
        assert answer.status == 200
    assert (await access.identify(f"Bearer {TRADE}", "203.0.113.9")).credential is not None, "other addresses go on"
    (alarm,) = access.alarms()
    assert alarm.text == "10 wrong keys or tokens were received within a minute, most of them from 127.0.0.1"


async def test_wrong_tokens_in_a_batch_count_like_any_other(access: Access, client: AppClient) -> None:
    items = [
        {"url": "http://x/api/rpc/demo/wait", "headers": bearer(f"guess-{n}"), "body": {"json": {}}} for n in range(10)
    ]
    async with client.post("/api/rpc/__batch__", json=items, headers={"x-orpc-batch": "buffered"}) as answer:
        assert {reply["status"] for reply in await answer.json()} == {401}
    async with client.get("/metrics", headers=bearer("guess")) as answer:
        assert answer.status == 429


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "trader.example"])
def test_a_port_for_other_machines_is_not_opened_by_mistake(host: str) -> None:
    with pytest.raises(SettingsError, match="is reachable from other machines, so anyone"):
        Settings.load({"HOST": host}, None, demo=True)
    for guard in ({"API_TOKEN": TRADE}, {"UNSAFE_OPEN": "on"}, {"PUBLIC": "on"}):
        assert Settings.load({"HOST": host, **guard}, None, demo=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_this_machine_needs_no_token(host: str) -> None:
    assert Settings.load({"HOST": host}, None, demo=True).host == host


async def test_http_1_0_with_a_transfer_encoding_ends_the_connection(service: Service) -> None:
    head = CALL.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = await service.send(head + b"2\r\n{}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.count(b"X-Request-Id: ") == 1, "the rest is not a second request"
    assert b" 400 " in answer.partition(b"\r\n")[0]


def test_a_report_runs_only_its_own_scripts() -> None:
    page = report_page("season", "A report", {"name": "</script><script>"})
    policy = page.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert page.count(f'<script nonce="{nonce}"') == 3
    assert page.count("<script") == page.count("</script>") == 4, "the scripts, and the data"
    assert nonce not in report_page("season", "A report", {"name": "another text"})


@pytest.mark.processes
async def test_a_browser_logs_in_with_the_token_as_a_password(dsn: str, tmp_path: Path) -> None:
    async with composed(dsn, MARKET_SOURCE="synthetic", READ_TOKEN=READ, API_TOKEN=TRADE) as (_, client):
        for number, (login, status) in enumerate(
            (("", 401), ("me:wrong-0123456789abcdef@", 401), (f"me:{READ}@", 200))
        ):
            address = f"http://{login}127.0.0.1:{client.port}/"
            async with open_tab(tmp_path / str(number), address) as tab:
                seen = await tab.evaluate("performance.getEntriesByType('navigation')[0].responseStatus")
                assert seen == status, login
                if status == 200:  # as after the login dialog: the page's calls and its stream carry the login
                    await tab.command("Page.navigate", url=str(client.make_url("/")))
                    await tab.until("document.body?.innerText.includes('BTC')")
                    assert not [each for each in tab.problems if "401" in str(each)]


@pytest.fixture
async def stream(database: Database) -> AsyncIterator[Client]:
    """A service with the stream `trades`, whose tokens are in the database."""

    async def load() -> bytes:
        return b"[]"

    app = make_stream_app(Broadcasters({stream.name: load for stream in STREAMS}, EventBus(), SystemClock()))
    app[ACCESS] = Access(database, None)
    async with served(app) as client:
        yield client


async def test_anonymous_streams_make_room_for_valid_tokens_only(stream: Client, call: Call) -> None:
    added = [await call(*["keys", "add", name, "--scopes", "read", "--json"]) for name in ("page", "revoked")]
    valid, revoked = (json.loads(said.out)["token"] for said in added)
    assert (await call(*["keys", "revoke", "revoked"])).code == 0
    async with AsyncExitStack() as opened:

        async def status_of(**headers: str) -> int:
            answer = await opened.enter_async_context(stream.get("/api/events/trades", headers=headers))
            return answer.status

        assert [await status_of() for _ in range(CAPACITY)] == [200] * CAPACITY
        assert [await status_of(), await status_of(**bearer(revoked)), await status_of(**bearer(valid))] == [
            503,
            503,
            200,
        ]
        assert await status_of() == 503


@pytest.mark.parametrize("is_rotated", [False, True], ids=["revoked", "rotated"])
async def test_a_stream_ends_within_a_second_of_its_token(stream: Client, call: Call, *, is_rotated: bool) -> None:
    token = json.loads((await call(*["keys", "add", "page", "--scopes", "read", "--json"])).out)["token"]
    async with stream.get("/api/events/workflow", headers=bearer(token)) as answer:
        assert answer.status == 200
        await answer.content.readany()
        with pytest.raises(TimeoutError):  # it stays open as long as its token is valid
            async with asyncio.timeout(2 * READ_EVERY_S):
                await answer.content.read()
        said = await call(*f"keys {'rotate' if is_rotated else 'revoke'} page".split())
        assert said.code == 0
        ended_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(30):
            rest = await answer.content.read()
        assert asyncio.get_running_loop().time() - ended_s < 5, "one second, and what a loaded machine takes"
        assert rest.replace(b"event: ping\ndata:\n\n", b"") == b""
