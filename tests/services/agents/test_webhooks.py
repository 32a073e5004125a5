"""Webhooks of external agents: a real server that is called with views and answers with decisions, and its faults."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.floor import Floor
from support.scripted import START
from support.tasks import ended

from trader.api.schemas.agents import ViewOutput
from trader.api.schemas.common import ENCODER
from trader.domain.models import EXTERNAL, ModelConfiguration
from trader.errors import WebhookError
from trader.gateways.agents.webhook import ANSWER_MAX, WebhookClient, check_address, is_public, new_secret, signature
from trader.services.agents.chain import verify
from trader.services.agents.invocations import FinishedInvocation
from trader.services.agents.webhooks import Webhooks, decisions_in
from trader.store.agents.external import Webhook, upsert_webhook

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
            await asyncio.sleep(3600)
        if isinstance(answer, int):
            return web.Response(status=answer, headers={"Location": str(request.url.with_path("/other"))})
        return web.Response(body=answer if isinstance(answer, bytes) else json.dumps(answer))


@asynccontextmanager
async def called(floor: Floor, *answers: object, loopback: bool = True) -> AsyncIterator[tuple[Agent, Webhooks]]:
    """Yield an agent with a webhook and what calls it. Its server ends the answers that hang."""
    await floor.add("scout", provider=EXTERNAL)
    await floor.agents.reload_models()
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
    await calls.begin_cycle([floor.agents.models["scout"]])
    await ended("webhook of")
    (record,) = await floor.agents.invocations("scout")
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


def test_a_request_is_signed_as_standard_webhooks_are() -> None:
    signed = signature(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="  # of the package standardwebhooks, 1.1.0


async def test_a_request_that_failed_at_once_is_made_once_more(floor: Floor) -> None:
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
async def test_what_fails_is_a_missed_decision_and_trades_nothing(
    floor: Floor, answer: object, requests: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with called(floor, answer) as (agent, calls):
        if answer is None:
            opened = await floor.agents.external.view(floor.agents.models["scout"], None)
            monkeypatch.setattr(opened.record, "deadline", floor.clock.now() + timedelta(seconds=0.5))
        record = await decided(floor, calls)
        assert len(agent.requests) == requests
    assert record.invocation.status == "failed"
    assert reason in (record.invocation.failure_reason or "")
    async with floor.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests") == 0
        assert await conn.fetchval("SELECT sum(failed) FROM invocation_counts") == 1


async def test_a_decision_that_was_begun_before_a_restart_is_not_asked_for_again(floor: Floor) -> None:
    async with called(floor, {"decisions": [BOUGHT]}) as (agent, calls):
        external, model = floor.agents.external, floor.agents.models["scout"]
        opened = await external.view(model, None)
        (order,) = decisions_in(json.dumps({"decisions": [BOUGHT]}).encode())
        await external.decide(model, opened.id, order)
        await calls.begin_cycle([floor.agents.models["scout"]])
        await ended("webhook of")
        assert agent.requests == []


async def test_only_public_addresses_are_called(floor: Floor) -> None:
    async with called(floor, {"decisions": []}, loopback=False) as (agent, calls):
        async with floor.database.connection() as conn:
            await conn.execute("UPDATE webhooks SET url = replace(url, 'http://', 'https://')")
        reason = (await decided(floor, calls)).invocation.failure_reason
        assert "127.0.0.1 is no public address" in (reason or "")
        assert agent.requests == []


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::",
     "64:ff9b::7f00:1", "64:ff9b:1::1", "ff02::1"],
)  # fmt: skip
def test_an_address_of_a_network_of_its_own_is_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses_are_public() -> None:
    assert all(map(is_public, ("1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:1.1.1.1")))


@pytest.mark.parametrize(
    ("url", "loopback", "is_allowed"),
    [
        ("https://example.org/decide", False, True),
        ("http://example.org/decide", True, False),
        ("http://127.0.0.1:9000", False, False),
        ("http://127.0.0.1:9000", True, True),
        ("http://[::1]:9000/", True, True),
        ("http://localhost:9000/", True, True),
        ("http://localhost.example.org/", True, False),
        ("https://example.org:99999/", False, False),
    ],
)
def test_addresses_are_https_or_of_this_machine(url: str, loopback: bool, is_allowed: bool) -> None:
    if is_allowed:
        check_address(url, loopback=loopback)
    else:
        with pytest.raises(WebhookError, match="https://"):
            check_address(url, loopback=loopback)


async def test_an_agent_is_due_at_its_cadence_however_late_the_cycle_begins(floor: Floor) -> None:
    every_5_min = ModelConfiguration(every="5m")
    await floor.add("scout", provider=EXTERNAL, configuration=every_5_min)
    cycles = [START.replace(minute=minute, second=0) + timedelta(milliseconds=3) for minute in range(14, 22)]
    due = [cycle.minute for cycle in cycles if await floor.agents.start_batch(cycle)]
    assert due == [15, 20]
