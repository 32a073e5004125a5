"""Webhooks of external agents: a real server that receives views and answers with decisions, and its faults."""

import asyncio
import base64
import hmac
import importlib.util
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_network
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Final

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.tasks import ended
from support.trading_floor import Floor

from trader.agents.domain.invocations import FinishedInvocation
from trader.agents.domain.models import EXTERNAL
from trader.agents.providers.webhook import ANSWER_MAX, WebhookClient, is_public, new_secret, signature
from trader.agents.sql.external import Webhook, upsert_webhook
from trader.agents.verification import verify
from trader.agents.webhooks import Webhooks, decisions_in
from trader.api.schemas.agents import ViewOutput
from trader.api.schemas.common import ENCODER
from trader.core.errors import Unavailable, WebhookError
from trader.exchange.domain.orders import Order, OrderAnswer

DOCUMENTS: Final = Path(__file__).parents[2] / "docs"
ORDER: Final = {"clientOrderId": "one", "symbol": "BTC", "side": "buy", "quantity": 0.01, "exitPlan": {"stop": 90000}}
BOUGHT: Final = {"name": "placeOrder", "arguments": ORDER}


class Agent:
    """A real HTTP server that answers with these bodies or statuses in turn, the last one again and again."""

    def __init__(self, answers: Sequence[object]) -> None:
        self._answers = [*answers]
        self.requests: list[tuple[dict[str, str], bytes]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, int):
            return web.Response(status=answer, headers={"Location": str(request.url.with_path("/other"))})
        return web.Response(body=answer if isinstance(answer, bytes) else json.dumps(answer))


@asynccontextmanager
async def called(floor: Floor, *answers: object, loopback: bool = True) -> AsyncIterator[tuple[Agent, Webhooks]]:
    """Yield an agent with a webhook, and its caller. The server ends hanging answers."""
    await floor.add("scout", provider=EXTERNAL)
    await floor.models.reload()
    agent, app = Agent(answers), web.Application()
    app.router.add_post("/{path:.*}", agent.handle)
    client = WebhookClient(loopback=loopback)
    calls = Webhooks(
        floor.database, floor.agents.external, client, floor.clock, lambda shown: ENCODER.encode(ViewOutput.of(shown))
    )
    async with TestServer(app) as server:
        async with floor.database.connection() as conn:
            await upsert_webhook(conn, "scout", Webhook(str(server.make_url("/decide")), new_secret()))
        yield agent, calls
        await calls.close()


async def decided(floor: Floor, calls: Webhooks) -> FinishedInvocation:
    """Have the agent called in a cycle. Return the record of its decision."""
    await calls.begin_cycle([floor.models.by_id["scout"]])
    await ended("webhook of")
    (record,) = await floor.invocations.finished("scout")
    return record


async def test_the_answer_of_a_webhook_is_the_decision(floor: Floor) -> None:
    note = {"name": "note", "arguments": {"text": "long"}}
    async with called(floor, {"decisions": [BOUGHT, note]}) as (agent, calls):
        record = await decided(floor, calls)
        ((headers, body),) = agent.requests
        async with floor.database.connection() as conn:
            secret = await conn.fetchval("SELECT secret FROM webhooks")
    opened = json.loads(body)
    assert set(opened) == {"viewId", "openedAt", "deadline", "prompt", "view"}
    assert headers["idempotency-key"] == headers["webhook-id"] == opened["viewId"] == str(record.invocation.id)
    signed = signature(secret, opened["viewId"], int(headers["webhook-timestamp"]), body)
    assert headers["webhook-signature"] == signed
    assert record.invocation.status == "completed"
    assert [(call.type, call.status) for call in record.tool_calls] == [("CREATE_POSITION", "ok"), ("NOTE", "ok")]
    assert [str(each.quantity) for each in floor.exchange.account("scout").positions.values()] == ["0.01"]
    assert not (await verify(floor.database, [])).findings


def test_requests_are_signed_according_to_standard_webhooks() -> None:
    signed = signature(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="  # of the package standardwebhooks, 1.1.0


Check = Callable[[Mapping[str, str], bytes, str, int], bool]
"""A recipient's check: whether it accepts the headers and the body, given its secret, at a Unix time."""


def check_of_the_page(headers: Mapping[str, str], body: bytes, secret: str, at: int) -> bool:
    """Run the lines of docs/agents.md that verify a request."""
    page = (DOCUMENTS / "agents.md").read_text()
    lines = re.search(r"^    signed = .*\n(?:    .*\n)+", page, re.MULTILINE)
    assert lines is not None
    names = {"headers": headers, "body": body, "secret": secret, "base64": base64, "hmac": hmac}
    try:
        exec(re.sub("^    ", "", lines[0], flags=re.MULTILINE), {**names, "time": SimpleNamespace(time=lambda: at)})
    except AssertionError:
        return False
    return True


def example(secret: str, at: int) -> ModuleType:
    """Load docs/examples/agent_webhook.py with a secret and a clock."""
    spec = importlib.util.spec_from_file_location("agent_webhook", DOCUMENTS / "examples" / "agent_webhook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRADER_SECRET", secret)
        spec.loader.exec_module(module)
    vars(module)["time"] = SimpleNamespace(time=lambda: at)
    return module


def check_of_the_example(headers: Mapping[str, str], body: bytes, secret: str, at: int) -> bool:
    return bool(example(secret, at).is_signed(headers, body))


@pytest.mark.parametrize("accepts", [check_of_the_page, check_of_the_example])
async def test_the_published_checks_refuse_a_replay_and_every_changed_part(floor: Floor, accepts: Check) -> None:
    async with called(floor, {"decisions": []}) as (agent, calls):
        await decided(floor, calls)
        ((headers, body),) = agent.requests
        async with floor.database.connection() as conn:
            secret = await conn.fetchval("SELECT secret FROM webhooks")
    at = int(headers["webhook-timestamp"])
    assert accepts(headers, body, secret, at)
    assert accepts(headers, body, secret, at + 299)
    assert not accepts(headers, body, secret, at + 300)
    assert not accepts(headers, body, secret, at - 300)
    for changed in ({"webhook-timestamp": str(at + 300)}, {"webhook-id": "another"}, {"webhook-signature": "v1,"}):
        assert not accepts({**headers, **changed}, body, secret, at + 300 * ("webhook-timestamp" in changed))
    assert not accepts(headers, body + b" ", secret, at)
    assert not accepts(headers, body, new_secret(), at)
    agent_of_the_example = example(secret, at)
    assert agent_of_the_example.answer_to(body) is agent_of_the_example.answer_to(bytes(bytearray(body)))


async def test_a_request_that_fails_at_once_is_retried_once(floor: Floor) -> None:
    async with called(floor, 503, {"decisions": []}) as (agent, calls):
        assert (await decided(floor, calls)).invocation.status == "completed"
        assert len({headers["idempotency-key"] for headers, _ in agent.requests}) == 1
        assert len(agent.requests) == 2


@pytest.mark.parametrize(
    ("answer", "requests", "reason"),
    [
        pytest.param(500, 2, "HTTP 500", id="an error"),
        pytest.param(307, 1, "HTTP 307", id="a redirect"),
        pytest.param(b"x" * (ANSWER_MAX + 1), 1, "more than 65536 bytes", id="too long"),
        pytest.param(b"buy!", 1, "JSON is malformed", id="no JSON"),
        pytest.param({"orders": []}, 1, "decisions", id="another object"),
        pytest.param({"decisions": [BOUGHT, {"name": "buy", "arguments": {}}]}, 1, "no tool 'buy'", id="no such tool"),
        pytest.param(
            {"decisions": [BOUGHT, BOUGHT | {"arguments": {**ORDER, "quantity": -1}}]}, 1, "quantity", id="bad"
        ),
        pytest.param(
            {"decisions": [{"name": "hold", "arguments": {"reason": "x"}}, BOUGHT]},
            1,
            "hold comes last",
            id="hold first",
        ),
        pytest.param(None, 1, "before the deadline", id="silence"),
    ],
)
async def test_a_failure_is_a_missed_decision_and_trades_nothing(
    floor: Floor, answer: object, requests: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with called(floor, answer) as (agent, calls):
        if answer is None:
            opened = await floor.agents.external.view(floor.models.by_id["scout"], None)
            monkeypatch.setattr(opened, "deadline", floor.clock.now() + timedelta(seconds=0.5))
        record = await decided(floor, calls)
        assert len(agent.requests) == requests
    assert record.invocation.status == "failed"
    assert reason in (record.invocation.failure_reason or "")
    async with floor.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests") == 0
        assert await conn.fetchval("SELECT sum(failed) FROM invocation_counts") == 1


async def test_a_decision_begun_before_a_restart_is_not_requested_again(floor: Floor) -> None:
    async with called(floor, {"decisions": [BOUGHT]}) as (agent, calls):
        external, model = floor.agents.external, floor.models.by_id["scout"]
        opened = await external.view(model, None)
        (order,) = decisions_in(json.dumps({"decisions": [BOUGHT]}).encode())
        await external.decide(model, opened.id, order)
        await calls.begin_cycle([floor.models.by_id["scout"]])
        await ended("webhook of")
        assert agent.requests == []


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_view_whose_order_has_no_known_answer_is_not_sent_again(
    floor: Floor, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    """Its order is in the books, and neither its answer nor its record is."""
    async with called(floor, {"decisions": [BOUGHT]}) as (agent, calls):
        external, model = floor.agents.external, floor.models.by_id["scout"]
        opened = await external.view(model, None)
        (order,) = decisions_in(json.dumps({"decisions": [BOUGHT]}).encode())
        place = floor.exchange.place_orders

        async def lose_answer(*orders: Order) -> Sequence[OrderAnswer]:
            await place(*orders)
            raise Unavailable("the connection was lost")

        monkeypatch.setattr(floor.exchange, "place_orders", lose_answer)
        with pytest.raises(Unavailable):
            await external.decide(model, opened.id, order)
        if is_restarted:
            external.close()
            await external.start(floor.models.by_id)
        await calls.begin_cycle([model])
        await ended("webhook of")
        assert agent.requests == []
        assert [str(each.quantity) for each in floor.exchange.account("scout").positions.values()] == ["0.01"]


async def test_only_public_addresses_are_called(floor: Floor) -> None:
    async with called(floor, {"decisions": []}, loopback=False) as (agent, calls):
        async with floor.database.connection() as conn:
            await conn.execute("UPDATE webhooks SET url = replace(url, 'http://', 'https://')")
        reason = (await decided(floor, calls)).invocation.failure_reason
        assert "127.0.0.1 is not a public address" in (reason or "")
        assert agent.requests == []


# The blocks of IANA's special-purpose address registries (RFC 6890) that are not globally reachable or deprecated, or
# that only protocols use; then the older ones that these have replaced, and multicast.
SPECIAL = [
    "0.0.0.0/8", "0.0.0.0/32", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.0.0/29", "192.0.0.8/32", "192.0.0.9/32", "192.0.0.10/32", "192.0.0.170/32",
    "192.0.0.171/32", "192.0.2.0/24", "192.88.99.0/24", "192.88.99.2/32", "192.168.0.0/16", "198.18.0.0/15",
    "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4", "255.255.255.255/32", "::1/128", "::/128",
    "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32", "2001:1::1/128", "2001:1::2/128",
    "2001:1::3/128", "2001:2::/48", "2001:3::/32", "2001:4:112::/48", "2001:10::/28", "2001:20::/28",
    "2001:30::/28", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10",
    "fec0::/10", "::/96", "224.0.0.0/4", "ff00::/8", "4000::/3", "8000::/3", "fe00::/9",
]  # fmt: skip
GLOBAL = [
    "192.31.196.0/24", "192.52.193.0/24", "192.175.48.0/24", "2620:4f:8000::/48", "1.1.1.0/24",
    "2606:4700::/32", "2a00::/16",
]  # fmt: skip
"""Blocks that are globally reachable, the first four of them in these registries."""


def edges(block: str) -> list[IPv4Address | IPv6Address]:
    """Return the first, a middle and the last address of a block."""
    network = ip_network(block)
    return [network[0], network[network.num_addresses // 2], network[-1]]


@pytest.mark.parametrize("block", SPECIAL)
def test_an_address_of_a_special_block_is_not_public(block: str) -> None:
    for address in edges(block):
        assert not is_public(str(address))
        if isinstance(address, IPv4Address):  # nor in any form of IPv6 that has it inside
            assert not is_public(f"::ffff:{address}")
            assert not is_public(str(IPv6Address(int(IPv6Address("64:ff9b::")) + int(address))))
            assert not is_public(f"::{address}")
            assert not is_public(f"::ffff:0:{address}")
            assert not is_public(str(IPv6Address((0x2002 << 112) + (int(address) << 80))))


@pytest.mark.parametrize("block", GLOBAL)
def test_an_address_of_a_global_block_is_public(block: str) -> None:
    for address in edges(block):
        assert is_public(str(address))
        if isinstance(address, IPv4Address):
            assert is_public(f"::ffff:{address}")
            assert is_public(str(IPv6Address(int(IPv6Address("64:ff9b::")) + int(address))))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.0.0.1", "::ffff:127.0.0.1", "fe80::1", "64:ff9b::7f00:1"])
async def test_a_resolver_that_points_inside_gets_no_connection(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name may have been a public one when the webhook was added: its address is checked at every connection."""
    connected = asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = (address, port, 0, 0) if family is socket.AF_INET6 else (address, port)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(family, socket.SOCK_STREAM, 6, "", found)])
    client = WebhookClient(loopback=False)
    async with server:
        with pytest.raises(WebhookError, match="is not a public address"):
            await client.call(f"https://agent.example:{port}/decide", new_secret(), "view", b"{}", 5)
    await client.close()
    assert not connected.is_set()


@pytest.mark.parametrize("is_slow", [True, False])
async def test_an_answer_that_never_ends_is_cut_off(*, is_slow: bool) -> None:
    left = asyncio.Event()

    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" if is_slow else b"x" * 4096)
                await asyncio.sleep(0.01 if is_slow else 0)  # a slow server
        finally:
            left.set()  # the caller has closed the connection

    app, client = web.Application(), WebhookClient(loopback=True)
    app.router.add_post("/decide", trickle)
    async with TestServer(app) as server:
        with pytest.raises(WebhookError, match="before the deadline" if is_slow else "more than 65536 bytes"):
            await client.call(str(server.make_url("/decide")), new_secret(), "view", b"{}", 0.5 if is_slow else 60)
        async with asyncio.timeout(30):
            await left.wait()
    await client.close()
