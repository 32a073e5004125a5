"""Conversations with a provider: waits for cooldowns, timeouts, old views, and answers that decide nothing."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.chat_server import KEYS, FakeServer, Timer, answering, completion, held
from support.trading_floor import MIDS, Floor, calling, hang, hold, open_floor, opening, run_one

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.invocations import FinishedInvocation
from trader.agents.domain.models import ProviderDefinition
from trader.agents.providers.client import AttemptTiming, ProviderAccess, ProviderClient
from trader.core.errors import ProviderTimeout
from trader.database.pool import Database, Page
from trader.settings.forms import Secret

TIMEOUT = ProviderTimeout("fake did not answer within 120 s", unmetered_attempts=1)


RISEN = MIDS | {"BTC": "94500"}


def late(floor: Floor, seconds: float, answer: ModelAnswer | Exception) -> Callable[[Turn], Awaitable[ModelAnswer]]:
    """Give this answer after this many seconds."""

    async def think(_: Turn) -> ModelAnswer:
        await floor.clock.sleep_until(floor.clock.now() + timedelta(seconds=seconds))
        if isinstance(answer, Exception):
            raise answer
        return answer

    return think


async def run_as_time_passes(floor: Floor, *script: Any) -> FinishedInvocation:
    """Run one cycle of one model with this script, while the market moves on."""
    await floor.add("ada")
    floor.provider.scripts["ada"] = list(script)
    await floor.see()
    await floor.start_batch()
    while floor.agents.running():
        await floor.see(RISEN, after_s=10)
    return (await floor.invocations.finished(page=Page(1)))[0]


def in_order(*steps: Any) -> Callable[[Turn], Any]:
    """Take the next step each time that the provider is asked, whatever the number of the turn."""
    left = list(steps)

    def step(turn: Turn) -> Any:
        made = left.pop(0)
        if isinstance(made, Exception):
            raise made
        return made(turn) if callable(made) else made

    return step


# --- time ------------------------------------------------------------------------------------------------------------


async def test_after_a_timeout_the_model_is_asked_once_more_with_a_new_view(floor: Floor) -> None:
    record = await run_as_time_passes(floor, in_order(late(floor, 120, TIMEOUT), hold("well")))
    assert (record.invocation.status, record.invocation.response) == ("completed", "well")
    first, second = floor.provider.turns
    assert [turn.view.markets["BTC"].price for turn in (first, second)] == [94_000, 94_500]
    assert [message["role"] for message in second.messages] == ["system", "user"]
    assert second.messages[1] != first.messages[1], "the old view is not shown any more"
    assert record.invocation.unmetered_attempts == 1
    assert (record.invocation.input_tokens, record.invocation.step_count) == (100, 1)


async def test_a_second_timeout_fails(floor: Floor) -> None:
    record = await run_one(floor, TIMEOUT)
    assert (record.invocation.status, record.invocation.failure_reason) == ("failed", str(TIMEOUT))
    assert len(floor.provider.turns) == 2
    assert record.invocation.unmetered_attempts == 2, "what they cost is not known"


async def test_a_timeout_after_calls_keeps_them(floor: Floor) -> None:
    script = in_order(calling(("fetchIndicators", {"symbol": "ETH", "interval": "4h"})), TIMEOUT, hold())
    record = await run_one(floor, script, script)
    assert record.invocation.status == "completed"
    last = floor.provider.turns[-1].messages
    assert [message["role"] for message in last] == ["system", "user", "assistant", "tool"]
    assert "The view above is old." in last[-1]["content"]
    assert orjson.loads(last[-1]["content"].split("\n\n", 1)[0])["symbol"] == "ETH"


@pytest.mark.parametrize(("seconds", "status"), [(120, "ok"), (121, "rejected")])
async def test_a_decision_on_an_old_view_is_refused(floor: Floor, seconds: float, status: str) -> None:
    again = calling(opening())
    record = await run_as_time_passes(floor, late(floor, seconds, calling(opening())), again)
    first, second = record.tool_calls[:2]
    assert first.status == status
    if status == "rejected":
        assert first.metadata["results"] == [
            {
                "rule": "stale decision",
                "reason": "The decision came 121 s after the view that it was made from; the limit is 120 s.",
            }
        ]
        shown = floor.provider.turns[1]
        assert "The view above is old." in shown.messages[-1]["content"]
        assert shown.view.markets["BTC"].price == 94_500
    assert second.status == "ok", "on a new view it may decide again"


async def test_every_change_is_judged_by_the_age_of_its_view(floor: Floor) -> None:
    await run_one(floor, calling(opening()), hold("in"))
    changes = calling(("closePosition", {"symbol": "BTC"}), ("updateExitPlan", {"symbol": "BTC", "stop": 91_000}))
    record = await run_as_time_passes(floor, late(floor, 130, changes), hold())
    rules = [call.metadata["results"][0].get("rule") for call in record.tool_calls]
    assert rules == ["stale decision", "stale decision", None]
    assert "BTC" in floor.exchange.account("ada").positions


async def test_a_view_is_renewed_once(floor: Floor) -> None:
    script = late(floor, 121, calling(opening()))
    record = await run_as_time_passes(floor, script, script, script, hold())
    assert [call.status for call in record.tool_calls] == ["rejected", "rejected", "rejected", "ok"]
    notes = [turn.messages[-1]["content"].count("The view above is old.") for turn in floor.provider.turns]
    assert notes == [0, 1, 0, 0]


# --- answers that decide nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flawed", "flaw"),
    [
        (calling(), "the answer is empty: neither text nor a tool call"),
        (calling(text=" \n"), "the answer is empty: neither text nor a tool call"),
        (
            calling(text='<tool_call>{"name": "holding", "arguments": {"reason": "calm"}</tool_call>'),
            "the answer has a tool call written as text, which is not executed",
        ),
    ],
)
async def test_an_answer_that_decides_nothing_is_corrected_once(floor: Floor, flawed: ModelAnswer, flaw: str) -> None:
    record = await run_one(floor, flawed, hold("sorry"))
    assert (record.invocation.status, record.tool_calls[0].status) == ("completed", "ok")
    told = floor.provider.turns[1].messages
    assert [message["role"] for message in told] == ["system", "user"], "providers refuse an empty message"
    assert told[1]["content"].endswith(
        f"Your last answer could not be used: {flaw}. Call a tool; `holding` ends the cycle."
    )
    assert record.invocation.step_count == 2, "what it took is recorded"
    record = await run_one(floor, flawed)
    assert (record.invocation.status, record.invocation.failure_reason) == ("failed", f"{flaw}, for the second time")


@pytest.mark.parametrize(
    "answer",
    [
        msgspec.structs.replace(calling(text="No financial advice."), is_refusal=True),
        calling(text="I'm sorry, but I can't assist with that request."),
    ],
)
async def test_a_refusal_is_a_failure(floor: Floor, answer: ModelAnswer) -> None:
    record = await run_one(floor, answer)
    assert record.invocation.status == "failed"
    assert record.invocation.failure_reason == f"the model refused to answer: {answer.text}"
    assert record.invocation.step_count == 1


@pytest.mark.parametrize("order", [opening(), ("closePosition", {"symbol": "BTC"}), ("createPosition", "{")])
async def test_holding_in_the_same_answer_as_an_order_is_refused_with_a_hint(floor: Floor, order: Any) -> None:
    record = await run_one(floor, calling(("holding", {"reason": "done"}), order), hold("now it is done"))
    assert [(call.type, call.status) for call in record.tool_calls][::2] == [
        ("HOLDING", "rejected"),
        ("HOLDING", "ok"),
    ]
    assert (record.invocation.status, record.invocation.response) == ("completed", "now it is done")
    seen = orjson.loads(floor.provider.turns[1].messages[-2]["content"])
    assert seen["rule"] == "holding"
    assert "call `holding` alone" in seen["reason"]
    assert bool(floor.exchange.account("ada").positions) == (order == opening()), "the order remains valid"


async def test_the_model_learns_which_calls_were_not_executed(floor: Floor) -> None:
    many = calling(*[("fetchIndicators", {"symbol": "ETH", "interval": "4h"})] * 15, ("holding", {"reason": "x"}))
    record = await run_one(floor, msgspec.structs.replace(many, calls_left_out=4), hold("now it is"))
    assert record.invocation.status == "completed"
    assert len(record.tool_calls) == 17
    told = floor.provider.turns[1].messages[-1]["content"]
    assert told.endswith(
        "Of the 20 calls of this answer only the first 16 were executed. Repeat the others, or call `holding`."
    )


# --- cooldowns -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def real_client(database: Database) -> AsyncIterator[tuple[Floor, FakeServer, Timer]]:
    """A floor whose provider is the real client of a server of the protocol, with a clock that the waits advance."""
    server, timer = FakeServer(), Timer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    async with TestServer(app) as running:
        client = ProviderClient(
            ProviderDefinition(name="fake", base_url=str(running.make_url("/v1"))),
            ProviderAccess([Secret(KEYS[0])]),
            AttemptTiming(timer=timer, sleep=timer.sleep),
        )
        async with open_floor(database, provider=client, limit_s=600) as floor:
            yield floor, server, timer
        await client.close()


def placed() -> dict[str, Any]:
    name, arguments = opening()
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


async def run_ada(floor: Floor) -> FinishedInvocation:
    await floor.add("ada")
    (record,) = await floor.cycle()
    return record


async def test_a_short_rest_is_waited_out(database: Database) -> None:
    async with real_client(database) as (floor, server, timer):
        limited = answering(429, None, Retry_After="9")
        server.script = [limited, answering(200, completion(placed())), answering(200, completion(held()))]
        record = await run_ada(floor)
        assert record.invocation.status == "completed", record.invocation.failure_reason
        assert timer.now == pytest.approx(1009, abs=0.1)
        server.script = [limited, limited, limited, answering(200, completion(held()))]
        record = await run_ada(floor)
        assert record.invocation.failure_reason == (
            "fake cannot be asked for lab/ada now: key 1 is rate-limited (429) and is in cooldown for 9 s"
        )
        assert timer.now == pytest.approx(1027, abs=0.1), "twice 9 of at most 20 s"


async def test_a_run_that_has_traded_survives_an_overloaded_server(database: Database) -> None:
    async with real_client(database) as (floor, server, timer):
        busy = [answering(503, None, Retry_After="30")] * 7
        server.script = [answering(200, completion(placed())), *busy, answering(200, completion(held()))]
        record = await run_ada(floor)
        assert record.invocation.status == "completed", record.invocation.failure_reason
        assert timer.now == pytest.approx(1000 + 30 * 6 + 64, abs=5), "each rest, and longer steps at last"
        assert record.invocation.unmetered_attempts == 7


async def test_the_cost_of_a_cancelled_request_is_unknown(database: Database) -> None:
    async with open_floor(database, limit_s=0.2) as floor:
        record = await run_one(floor, hang)
        assert (record.invocation.status, record.invocation.unmetered_attempts) == ("timeout", 1)


@pytest.mark.parametrize("status", [429, 402, 503])
async def test_a_run_that_has_traded_waits_as_long_as_it_lasts(database: Database, status: int) -> None:
    async with real_client(database) as (floor, server, timer):
        refused = answering(status, None, Retry_After="300")
        server.script = [answering(200, completion(placed())), refused, answering(200, completion(held()))]
        record = await run_ada(floor)
        assert record.invocation.status == "completed", record.invocation.failure_reason
        waited_s = 60 if status == 402 else 300  # an account is asked again after a minute
        assert timer.now == pytest.approx(1000 + waited_s, abs=1)


async def test_a_run_that_has_not_traded_fails_with_the_true_reason(database: Database) -> None:
    async with real_client(database) as (floor, server, _):
        server.script = [answering(429, {"error": {"message": "no quota", "code": "insufficient_quota"}})]
        record = await run_ada(floor)
        assert record.invocation.failure_reason == (
            "fake cannot be asked for lab/ada now: key 1 is out of credit (429: no quota) and is in cooldown for 600 s"
        )


@pytest.mark.parametrize(("is_remote", "shown"), [(True, ["15m", "5m", "4h"]), (False, ["15m"])])
async def test_a_rule_agent_sees_only_its_decision_interval(
    database: Database, is_remote: bool, shown: list[str]
) -> None:
    async with open_floor(database) as floor:
        floor.provider.is_remote = is_remote
        await run_one(floor, hold())
        (turn,) = floor.provider.turns
        assert {symbol: [*market.indicators] for symbol, market in turn.view.markets.items()} == dict.fromkeys(
            MIDS, shown
        )
