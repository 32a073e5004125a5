"""The trading workflow on a real database and exchange: what a run does, and that its record is always true."""

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from typing import Any, Literal
from uuid import NAMESPACE_URL, uuid5

import msgspec
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.floor import Floor, calling, hold, open_floor, opening
from support.scripted import START

from trader.domain.agents.conversation import ModelAnswer, Turn
from trader.domain.agents.invocations import Invocation, invocation_id
from trader.domain.exchange.orders import Order, OrderAnswer, OrderSide, Side
from trader.domain.models import VariantId
from trader.errors import OrderUndecided, ProviderError, Unavailable
from trader.gateways.agents.chat import ChatClient
from trader.gateways.agents.providers import PROVIDERS, RuleProvider
from trader.services.agents import recorder
from trader.services.agents.schedule import FinishedInvocation
from trader.services.events import ConversationsChanged
from trader.services.exchange.paper import PaperExchange
from trader.setting_forms import Secret
from trader.store.agents.invocations import select_payload, select_steps, update_invocation
from trader.store.database.pool import Connection, Database
from trader.variants import VARIANTS


@pytest.fixture
async def floor(database: Database) -> AsyncIterator[Floor]:
    async with open_floor(database) as floor:
        yield floor


async def run_one(floor: Floor, *script: Any) -> FinishedInvocation:
    """One cycle of one model with this script."""
    await floor.add("ada")
    floor.provider.scripts["ada"] = list(script)
    (record,) = await floor.cycle()
    return record


def told(turn: Turn) -> list[dict[str, Any]]:
    """The results of calls that the model sees."""
    return [orjson.loads(message["content"]) for message in turn.messages if message["role"] == "tool"]


# --- what a run does --------------------------------------------------------------------------------------------------


async def test_holding_is_recorded_and_told(floor: Floor) -> None:
    record = await run_one(floor, hold("BTC is quiet"))
    invocation = record.invocation
    assert invocation.id == invocation_id(record.model, invocation.started_at)
    assert (invocation.status, invocation.failure_reason, invocation.response) == ("completed", None, "BTC is quiet")
    assert (invocation.step_count, invocation.input_tokens, invocation.output_tokens) == (1, 100, 100)
    (call,) = record.tool_calls
    assert (call.type, call.status, call.number) == ("HOLDING", "ok", 1)
    assert call.metadata == {
        "raw": {"name": "holding", "arguments": '{"reason":"BTC is quiet"}'},
        "decisions": [{"reason": "BTC is quiet"}],
        "results": [{"holding": True}],
    }
    progress = floor.progress()
    assert [event.type for event in progress] == [
        "workflow:started", "workflow:step", "workflow:complete", "batch:complete",
    ]  # fmt: skip
    assert progress[1].details["invocationId"] == str(invocation.id)
    assert progress[1].details["toolNames"] == ["holding"]
    assert progress[2].details["endedBy"] == "holding"
    assert progress[-1].details == {"modelIds": ["ada"]}
    changes = [event for event in floor.events if isinstance(event, ConversationsChanged)]
    assert [change.model_id for change in changes] == ["ada"]


async def test_turn_carries_variant_and_market(floor: Floor) -> None:
    await run_one(floor)
    (turn,) = floor.provider.turns
    apex = VARIANTS[VariantId.APEX]
    assert turn.temperature == apex.temperature
    system, user = turn.messages
    assert system["content"].startswith(apex.prompt.strip())
    assert "at most 10" in system["content"]
    shown = orjson.loads(user["content"].split("\n\n", 1)[1])
    assert shown["account"]["equity"] == 10_000
    assert {market["symbol"]: market["price"] for market in shown["markets"]} == {
        "BTC": 94_000, "ETH": 3_300, "SOL": 200,
    }  # fmt: skip
    assert shown["markets"][0]["indicators"]["15m"]["rsi"] is None, "absent, not 0"


async def test_position_is_opened_through_the_exchange(floor: Floor) -> None:
    record = await run_one(floor, calling(opening(), text="breakout"), hold("done"))
    position = floor.exchange.account("ada").positions["BTC"]
    assert (position.side, position.quantity) == (Side.LONG, Decimal("0.1"))
    assert (position.exit_plan.stop, position.exit_plan.invalidation) == (Decimal(90_000), "under 90 000")
    assert (position.confidence, position.invocation_id) == (Decimal(70), record.invocation.id)
    assert [(call.type, call.status) for call in record.tool_calls] == [("CREATE_POSITION", "ok"), ("HOLDING", "ok")]
    result = record.tool_calls[0].metadata["results"][0]
    assert (result["status"], result["averagePrice"]) == ("filled", "94000.1")
    seen = told(floor.provider.turns[1])[0]
    assert seen["result"] == "ok"
    assert seen["account"]["positions"] == [{"symbol": "BTC", "side": "LONG", "quantity": "0.1"}]
    assert record.invocation.response == "breakout\n\ndone"
    async with floor.database.connection() as conn:
        assert await conn.fetchval("SELECT client_order_id FROM order_requests") == f"{record.invocation.id}:1"


async def test_next_run_sees_position_action_and_closes(floor: Floor) -> None:
    await run_one(floor, calling(opening(), ("holding", {"reason": "in"})))
    await floor.see(after_s=60)
    record = await run_one(floor, calling(("closePosition", {"symbol": "btcusdt", "fraction": 0.5})), hold())
    view = floor.provider.turns[1].view
    assert [(held.symbol, held.quantity, held.entry_price) for held in view.positions] == [
        ("BTC", Decimal("0.1"), Decimal("94000.1"))
    ]
    assert view.positions[0].risk == Decimal("0.1") * Decimal("4000.1")
    last = view.markets["BTC"].last_action
    assert last is not None
    assert (last.action, last.side, last.cycles_ago) == ("createPosition", Side.LONG, 1)
    assert view.account.exposure == Decimal(9_400)
    assert record.tool_calls[0].status == "ok"
    assert floor.exchange.account("ada").positions["BTC"].quantity == Decimal("0.05")
    await run_one(floor)
    last = floor.provider.turns[-1].view.markets["BTC"].last_action
    assert last is not None
    assert last.action == "closePosition"
    assert floor.provider.turns[-1].view.stats.trade_count == 1
    assert floor.provider.turns[-1].view.trades[0].close_reason == "order"


async def test_exit_plan_is_moved(floor: Floor) -> None:
    await run_one(floor, calling(opening(), ("holding", {"reason": "in"})))
    record = await run_one(
        floor, calling(("updateExitPlan", {"symbol": "BTC", "stop": 93_000}), ("holding", {"reason": "x"}))
    )
    assert [call.status for call in record.tool_calls] == ["ok", "ok"]
    plan = floor.exchange.account("ada").positions["BTC"].exit_plan
    assert (plan.stop, plan.target) == (Decimal(93_000), Decimal(99_000))


async def test_no_time_of_a_model_makes_its_account_unreadable(floor: Floor) -> None:
    """PostgreSQL holds years that Python does not: such a row could not be read at the next start."""
    record = await run_one(floor, calling(opening(timeExit="9999-12-31T23:59:59-14:00")), hold("well"))
    assert [call.status for call in record.tool_calls] == ["failed", "ok"]
    assert record.invocation.status == "completed"
    await floor.exchange.resign()
    await floor.exchange.lead()
    assert not floor.exchange.account("ada").positions


async def test_guard_refuses_and_the_model_sees_why(floor: Floor) -> None:
    record = await run_one(floor, calling(opening(leverage=11)), hold("well"))
    assert not floor.exchange.account("ada").positions
    call = record.tool_calls[0]
    assert (call.type, call.status) == ("CREATE_POSITION", "rejected")
    assert call.metadata["results"] == [
        {"rule": "leverage", "reason": "Leverage 11 is above the 10 that your variant allows."}
    ]
    assert told(floor.provider.turns[1])[0]["reason"] == "Leverage 11 is above the 10 that your variant allows."
    async with floor.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests") == 0


async def test_reversal_soon_after_is_refused_across_runs(floor: Floor) -> None:
    await run_one(floor, calling(opening(), ("holding", {"reason": "in"})))
    short = opening(side="SHORT", stop=99_000, target=90_000)
    record = await run_one(floor, calling(("closePosition", {"symbol": "BTC"}), short, ("holding", {"reason": "x"})))
    assert [call.status for call in record.tool_calls] == ["ok", "rejected", "ok"]
    assert record.tool_calls[1].metadata["results"][0]["rule"] == "reversal"


async def test_refusal_of_the_exchange_is_rejected(floor: Floor) -> None:
    record = await run_one(floor, calling(opening(quantity=0.00001)), hold())
    call = record.tool_calls[0]
    assert call.status == "rejected"
    assert call.metadata["results"][0]["status"] == "rejected"
    assert call.metadata["results"][0]["reason"]


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("createPosition", '{"symbol": "BTC"', "not JSON"),
        ("createPosition", {"symbol": "BTC"}, "missing required field"),
        ("createPosition", opening(quantity="0.1")[1], "Expected `float`, got `str`"),
        ("closePosition", {"symbol": "BTC", "all": True}, "unknown field `all`"),
        ("closePosition", {"symbol": "DOGE"}, "There is no market 'DOGE'; the markets are BTC, ETH, SOL."),
        ("withdraw", {}, "There is no tool 'withdraw'"),
        ("holding", {"reason": ""}, "length >= 1"),
    ],
)
async def test_bad_calls_are_told_and_counted(floor: Floor, name: str, arguments: Any, error: str) -> None:
    record = await run_one(floor, calling((name, arguments)), hold("sorry"))
    assert record.invocation.status == "completed"
    assert [call.status for call in record.tool_calls] == ["failed", "ok"]
    assert error in told(floor.provider.turns[1])[0]["error"]
    async with floor.database.connection() as conn:
        assert await conn.fetchval("SELECT failed_tool_calls FROM invocations") == 1


async def test_indicators_are_fetched(floor: Floor) -> None:
    await run_one(floor, calling(("fetchIndicators", {"symbol": "ETH", "interval": "4h"})), hold())
    seen = told(floor.provider.turns[1])[0]
    assert (seen["symbol"], seen["interval"], seen["candles"]) == ("ETH", "4h", [])
    assert seen["indicators"]["atr"] is None


# --- how a run ends ---------------------------------------------------------------------------------------------------


async def test_ends_after_ten_steps(floor: Floor) -> None:
    record = await run_one(floor, calling(("fetchIndicators", {"symbol": "ETH", "interval": "4h"})))
    assert (record.invocation.status, record.invocation.step_count) == ("completed", 10)
    async with floor.database.connection() as conn:
        steps = (await select_steps(conn, [record.invocation.id]))[record.invocation.id]
    assert [step.number for step in steps] == list(range(1, 11))
    assert steps[0].tool_names == ["fetchIndicators"]
    assert (steps[0].provider, steps[0].model, steps[0].key_number) == ("fake", "fake/one", 1)
    assert floor.progress()[-2].details["endedBy"] == "steps"


async def test_ends_when_the_tokens_are_spent(floor: Floor) -> None:
    step = calling(("fetchIndicators", {"symbol": "ETH", "interval": "4h"}), tokens=14_999)
    record = await run_one(floor, step)
    assert record.invocation.step_count == 3, "2 × 29,998 leaves 4 of 60,000"
    assert floor.provider.turns[-1].answer_tokens_max == 4
    assert floor.progress()[-2].details["endedBy"] == "tokens"


async def test_the_settings_bound_the_tokens(database: Database) -> None:
    step = calling(("fetchIndicators", {"symbol": "ETH", "interval": "4h"}), tokens=500)
    async with open_floor(database, RUN_TOKENS_MAX="1900", ANSWER_TOKENS_MAX="600") as floor:
        record = await run_one(floor, step)
        assert [turn.answer_tokens_max for turn in floor.provider.turns] == [600, 600]
        assert record.invocation.step_count == 2
        assert floor.progress()[-2].details["endedBy"] == "tokens"


async def test_ends_at_an_answer_without_calls(floor: Floor) -> None:
    record = await run_one(floor, calling(text="I only talk."))
    assert (record.invocation.status, record.invocation.response) == ("completed", "I only talk.")
    assert floor.progress()[-2].details["endedBy"] == "answer"
    assert record.tool_calls == ()


@pytest.mark.parametrize(
    ("cut_by", "told"),
    [("length", "at its limit of 8192 tokens (ANSWER_TOKENS_MAX)"), ("content_filter", "by a filter of the provider")],
)
async def test_an_answer_cut_off_before_any_call_is_a_failure(
    floor: Floor, cut_by: Literal["length", "content_filter"], told: str
) -> None:
    thinking = msgspec.structs.replace(calling(text="Let me think"), cut_by=cut_by)
    record = await run_one(floor, thinking)
    invocation = record.invocation
    assert (invocation.status, invocation.response) == ("failed", "Let me think")
    assert invocation.failure_reason == f"the answer was cut off {told}, before any tool call"
    assert (invocation.step_count, invocation.input_tokens) == (1, 100), "what it took is recorded"


async def test_an_answer_cut_off_by_the_budget_of_the_run_ends_it_so(floor: Floor) -> None:
    record = await run_one(floor, msgspec.structs.replace(calling(tokens=30_000), cut_by="length"))
    assert record.invocation.status == "completed"
    assert floor.progress()[-2].details["endedBy"] == "tokens"


async def test_provider_failure_is_the_runs_own(floor: Floor) -> None:
    await floor.add("bob")
    await run_one_of_many(floor, calling(opening()), ProviderError("every key of fake rests"))
    others = await floor.agents.invocations(model_id="bob")
    assert [other.invocation.status for other in others] == ["completed"]
    records = {record.model.id: record for record in await floor.agents.invocations()}
    failed = records["ada"].invocation
    assert (failed.status, failed.failure_reason, failed.step_count) == ("failed", "every key of fake rests", 1)
    assert [call.status for call in records["ada"].tool_calls] == ["ok"], "what it did before is recorded"
    assert "BTC" in floor.exchange.account("ada").positions


async def test_unconfigured_provider(floor: Floor) -> None:
    await floor.add("eve", provider="mistral")
    (record,) = await floor.cycle()
    assert record.invocation.failure_reason == "the provider 'mistral' is not configured; configured are: fake"
    assert floor.agents.warning() == "1 active model(s) name a provider that is not configured: eve (mistral)"


async def test_too_long_is_a_timeout(database: Database) -> None:
    async def think(_: Turn) -> ModelAnswer:
        await asyncio.sleep(30)
        raise AssertionError

    async with open_floor(database, limit_s=0.3) as floor:
        record = await run_one(floor, calling(opening()), think)
        assert (record.invocation.status, record.invocation.step_count) == ("timeout", 1)
        assert record.invocation.failure_reason == "the invocation took longer than 0.3 s"
        assert floor.progress()[-2].type == "workflow:failed"
        assert [call.status for call in record.tool_calls] == ["ok"]


async def test_a_bug_is_recorded_logged_and_stops_nobody(floor: Floor, caplog: pytest.LogCaptureFixture) -> None:
    await floor.add("bob")
    await run_one_of_many(floor, ZeroDivisionError("secret detail"))
    records = {record.model.id: record.invocation for record in await floor.agents.invocations()}
    assert records["ada"].failure_reason == "internal error (ZeroDivisionError)"
    assert records["bob"].status == "completed"
    assert "invocation of ada ended by a bug" in caplog.text
    assert floor.progress()[-1].details == {"modelIds": ["ada", "bob"]}


async def run_one_of_many(floor: Floor, *script: Any) -> None:
    await floor.add("ada")
    floor.provider.scripts["ada"] = list(script)
    await floor.cycle()


async def test_shutdown_records_interrupted_runs(database: Database) -> None:
    asked = asyncio.Event()

    async def think(_: Turn) -> ModelAnswer:
        asked.set()
        await asyncio.sleep(30)
        raise AssertionError

    async with open_floor(database) as floor:
        await floor.add("ada")
        floor.provider.scripts["ada"] = [calling(opening()), think]
        await floor.start_batch()
        await asked.wait()
        assert list(floor.agents.running()) == ["ada"]
        began = asyncio.get_running_loop().time()
        await floor.agents.close()
        assert asyncio.get_running_loop().time() - began < 1
        (record,) = await floor.agents.invocations()
        assert (record.invocation.status, record.invocation.failure_reason) == ("failed", "interrupted")
        assert [call.status for call in record.tool_calls] == ["ok"]
        assert not floor.agents.running()


async def test_a_run_that_is_cancelled_while_it_records_its_end_ended_as_it_says(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = asyncio.Event()

    async def write_slowly(conn: Connection, invocation: Invocation) -> None:
        await update_invocation(conn, invocation)
        if invocation.status != "running" and not writing.is_set():
            writing.set()
            await asyncio.sleep(30)

    monkeypatch.setattr(recorder, "update_invocation", write_slowly)
    async with open_floor(database) as floor:
        await floor.add("ada")
        floor.provider.scripts["ada"] = [calling(opening()), hold("in")]
        await floor.start_batch()
        await writing.wait()
        await floor.agents.close()
        await floor.agents.start()  # the next process
        (record,) = await floor.agents.invocations()
        assert (record.invocation.status, record.invocation.failure_reason) == ("completed", None)
        assert [call.type for call in record.tool_calls] == ["CREATE_POSITION", "HOLDING"]
        assert not floor.agents.running()


async def test_start_closes_what_a_crash_left_open(floor: Floor) -> None:
    await floor.add("ada")
    async with floor.database.connection() as conn:
        await conn.execute(
            "INSERT INTO invocations (id, model_id, status, started_at) VALUES ($1, 'ada', 'running', $2)",
            uuid5(NAMESPACE_URL, "crashed"),
            START,
        )
    assert await floor.agents.invocations() == [], "a running one is not shown"
    await floor.agents.start()
    (record,) = await floor.agents.invocations()
    assert (record.invocation.status, record.invocation.failure_reason) == ("failed", "interrupted")


# --- orders that were under way ---------------------------------------------------------------------------------------


class SlowAnswers(PaperExchange):
    """Commits orders and then keeps their answers for itself."""

    committed: asyncio.Event

    async def place_order(self, order: Order) -> OrderAnswer:
        answer = await super().place_order(order)
        self.committed.set()
        await asyncio.sleep(30)
        return answer


async def test_cancelled_with_its_order_committed(database: Database) -> None:
    async with open_floor(database, exchange_type=SlowAnswers) as floor:
        assert isinstance(floor.exchange, SlowAnswers)
        floor.exchange.committed = asyncio.Event()
        await floor.add("ada")
        floor.provider.scripts["ada"] = [calling(opening())]
        await floor.start_batch()
        await floor.exchange.committed.wait()
        await floor.agents.close()
        (record,) = await floor.agents.invocations()
        assert record.invocation.failure_reason == "interrupted"
        (call,) = record.tool_calls
        assert (call.status, call.metadata["results"][0]["status"]) == ("ok", "filled")
        assert "BTC" in floor.exchange.account("ada").positions


class Undecided(PaperExchange):
    """A venue that does not tell what became of an order."""

    async def place_order(self, order: Order) -> OrderAnswer:
        raise OrderUndecided("What became of this order at the venue is not known yet")


async def test_an_order_that_nobody_knows_of_fails_its_call_and_not_the_run(database: Database) -> None:
    async with open_floor(database, exchange_type=Undecided) as floor:
        record = await run_one(floor, calling(opening()), hold("waiting"))
    assert record.invocation.status == "completed"
    assert [(call.type, call.status) for call in record.tool_calls] == [
        ("CREATE_POSITION", "failed"),
        ("HOLDING", "ok"),
    ]
    words = "What became of this order at the venue is not known yet"
    assert record.tool_calls[0].metadata["results"] == [{"error": words}]
    assert told(floor.provider.turns[1])[0]["error"] == words


async def test_cancelled_before_its_order_was_placed(database: Database) -> None:
    async with open_floor(database, SIM_LATENCY_MS="200") as floor:
        await floor.add("ada")
        floor.provider.scripts["ada"] = [calling(opening())]
        await floor.start_batch()
        while not floor.market._waiters:
            await asyncio.sleep(0)
        await floor.agents.close()
        (record,) = await floor.agents.invocations()
        (call,) = record.tool_calls
        assert call.status == "failed"
        assert "before the order was placed" in call.metadata["results"][0]["error"]
        assert not floor.exchange.account("ada").positions


async def test_time_stands_still_for_a_run_until_its_order_waits(database: Database) -> None:
    async with open_floor(database, SIM_LATENCY_MS="200", MAX_PARALLEL_MODELS="1") as floor:
        await floor.add("ada", "bob")
        for name in ("ada", "bob"):
            floor.provider.scripts[name] = [calling(opening(), ("holding", {"reason": "in"}))]
        await floor.start_batch()
        for price in ("94010", "94020", "94030"):
            await floor.see({"BTC": price})
        await floor.idle()
        fills = {
            name: floor.exchange.account(name).positions["BTC"].entry_price - Decimal("0.1") for name in ("ada", "bob")
        }
        # The second run starts when the first has ended, at the moment of its fill, and meets the book after it.
        assert fills == {"ada": Decimal(94_010), "bob": Decimal(94_020)}


async def test_orders_of_a_killed_process_get_their_calls(floor: Floor) -> None:
    await floor.add("ada")
    run_id = uuid5(NAMESPACE_URL, "killed")
    async with floor.database.connection() as conn:
        await conn.execute(
            "INSERT INTO invocations (id, model_id, status, started_at) VALUES ($1, 'ada', 'running', $2)",
            run_id,
            START,
        )
    for number, side in ((2, OrderSide.BUY), (3, OrderSide.SELL)):
        await floor.exchange.place_order(
            Order(
                account_id="ada", symbol="BTC", side=side, quantity=Decimal("0.1"), reduce_only=number == 3,
                client_order_id=f"{run_id}:{number}", invocation_id=run_id,
            )
        )  # fmt: skip
    await floor.agents.start()
    await floor.agents.start()
    (record,) = await floor.agents.invocations()
    assert [(call.number, call.type, call.status) for call in record.tool_calls] == [
        (2, "CREATE_POSITION", "ok"),
        (3, "CLOSE_POSITION", "ok"),
    ]
    result = record.tool_calls[0].metadata["results"][0]
    assert (result["recovered"], result["filledQuantity"]) == (True, "0.1")


# --- many runs --------------------------------------------------------------------------------------------------------


async def test_at_most_so_many_at_once(database: Database) -> None:
    release = asyncio.Event()

    async def wait(_: Turn) -> ModelAnswer:
        await release.wait()
        return hold()

    async with open_floor(database, MAX_PARALLEL_MODELS="3") as floor:
        names = [f"m{n:02}" for n in range(8)]
        await floor.add(*names)
        floor.provider.scripts = {name: [wait] for name in names}
        await floor.start_batch()
        while floor.provider.active < 3:
            await asyncio.sleep(0)
        assert sorted(floor.agents.running()) == names[:3]
        await floor.start_batch()
        assert floor.agents.skipped == 8, "running and queued models are skipped"
        release.set()
        await floor.idle()
        assert floor.provider.active_max == 3
        records = await floor.agents.invocations(limit=200)
        assert sorted(record.model.id for record in records) == names
        batches = [event for event in floor.progress() if event.type == "batch:complete"]
        assert [batch.details for batch in batches] == [{"modelIds": names}]


async def test_inactive_models_do_not_run_and_new_ones_do(floor: Floor) -> None:
    await floor.add("ada")
    await floor.cycle()
    await floor.add("bob")
    async with floor.database.connection() as conn:
        await conn.execute("UPDATE models SET active = false WHERE id = 'ada'")
    assert [record.model.id for record in await floor.cycle()] == ["bob"]
    summaries = {one.model.id: one for one in await floor.agents.model_summaries()}
    assert summaries["ada"].invocation_count == 1
    assert summaries["bob"].last_invoked_at == floor.clock.now()


async def test_a_model_waits_for_its_turn_as_it_is_then(database: Database) -> None:
    may_end = asyncio.Event()

    async def think(_: Turn) -> ModelAnswer:
        await may_end.wait()
        return hold()

    async with open_floor(database, MAX_PARALLEL_MODELS="1") as floor:
        await floor.add("ada", "bob", "eve")
        floor.provider.scripts["ada"] = [think]
        await floor.start_batch()
        async with database.connection() as conn:
            await conn.execute("UPDATE models SET active = false WHERE id = 'bob'")
            await conn.execute("UPDATE models SET router_model_name = 'lab/new' WHERE id = 'eve'")
        await floor.start_batch()
        may_end.set()
        await floor.idle()
        assert [turn.model.router_model_name for turn in floor.provider.turns] == ["lab/ada", "lab/new"]
        batches = [event.details for event in floor.progress() if event.type == "batch:complete"]
        assert batches == [{"modelIds": ["ada", "bob", "eve"]}]


# --- the database away ------------------------------------------------------------------------------------------------


class AwayDatabase(Database):
    """A database whose transactions fail while it is away."""

    away = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        if self.away:
            raise Unavailable("The database is away")
        async with super().transaction() as conn:
            yield conn


async def test_a_record_that_could_not_be_written_is_written_later(dsn: str, database: Database) -> None:
    away = await AwayDatabase.connect(dsn, size=4)
    assert isinstance(away, AwayDatabase)

    def break_off(_: Turn) -> ModelAnswer:
        away.away = True
        return hold("unheard")

    async with open_floor(away) as floor:
        await floor.add("ada")
        floor.provider.scripts["ada"] = [break_off]
        await floor.start_batch()
        await floor.idle()
        assert await floor.agents.invocations() == []
        away.away = False
        floor.provider.scripts["ada"] = [hold("heard")]
        records = await floor.cycle()
        assert [record.invocation.response for record in records] == ["heard"]
        first = (await floor.agents.invocations())[-1]
        assert (first.invocation.status, first.invocation.response) == ("completed", "unheard")
        assert len(first.tool_calls) == 1
    await away.close()


class DoubtfulDatabase(Database):
    """Takes one row, and breaks off before it says so."""

    breaks_off = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        async with super().connection() as conn:
            yield conn
            if self.breaks_off and await conn.fetchval("SELECT count(*) FROM invocations"):
                self.breaks_off = False
                raise Unavailable("The database did not answer in time")


async def test_a_beginning_that_was_not_confirmed_is_closed_in_the_next_cycle(dsn: str) -> None:
    doubtful = await DoubtfulDatabase.connect(dsn, size=4)
    assert isinstance(doubtful, DoubtfulDatabase)
    async with open_floor(doubtful) as floor:
        await floor.add("ada")
        doubtful.breaks_off = True
        await floor.start_batch()
        await floor.idle()
        assert not doubtful.breaks_off
        assert not floor.provider.turns, "nothing was begun"
        await floor.cycle()
        latest, first = await floor.agents.invocations()
        assert latest.invocation.status == "completed"
        assert first.invocation.status == "failed"
        assert first.invocation.failure_reason == "it was not begun: The database did not answer in time"
        async with doubtful.connection() as conn:
            assert await conn.fetchval("SELECT count(*) FROM invocations WHERE status = 'running'") == 0
    await doubtful.close()


async def test_a_moment_of_a_replay_that_comes_again_is_not_run_again(
    floor: Floor, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay that is started again goes on from its last tick, where the last process may have run its models."""
    first = await run_one(floor, calling(opening(), ("holding", {"reason": "in"})))
    assert floor.clock.now() == first.invocation.started_at
    await floor.start_batch()
    await floor.idle()
    assert [record.invocation.id for record in await floor.agents.invocations()] == [first.invocation.id]
    assert len(floor.provider.turns) == 1
    assert floor.exchange.account("ada").positions["BTC"].quantity == Decimal("0.1")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# --- payloads, rule agents, sameness ----------------------------------------------------------------------------------


async def test_messages_and_raw_answers_are_kept(floor: Floor) -> None:
    record = await run_one(floor, calling(opening(leverage=11), text="a\x00b"), hold())
    async with floor.database.connection() as conn:
        packed = await select_payload(conn, record.invocation.id)
    assert packed is not None
    kept = orjson.loads(zlib.decompress(packed))
    assert [message["role"] for message in kept["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert kept["answers"] == ['{"said": 1}', '{"said": 1}']


async def test_demo_has_a_rule_agent_per_variant(database: Database) -> None:
    async with open_floor(database, provider=RuleProvider()) as floor:
        await floor.agents.start()
        await floor.agents.start()
        assert list(floor.agents.models) == ["apex-rules", "contrarian-rules", "sovereign-rules", "trendsurfer-rules"]
        assert sorted(floor.exchange.accounts) == sorted(floor.agents.models)
        records = await floor.cycle()
        assert [record.invocation.status for record in records] == ["completed"] * 4
        assert records[0].model.name == "Apex Rules"
        for record in records:
            assert [call.type for call in record.tool_calls] == ["HOLDING"]
            assert record.invocation.response == record.tool_calls[0].metadata["decisions"][0]["reason"]
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT count(*) FROM invocation_payloads") == 0


async def test_the_same_script_gives_the_same_rows(dsn: str, database: Database) -> None:
    tables = ("invocations", "invocation_steps", "tool_calls", "orders", "fills")
    seen = []
    for _ in range(2):
        async with open_floor(database) as floor:
            await floor.add("ada", "bob")
            for name in ("ada", "bob"):
                floor.provider.scripts[name] = [calling(opening(), text="in"), hold("so")]
            await floor.cycle()
        async with database.connection() as conn:
            seen.append(
                [[dict(row) for row in await conn.fetch(f"SELECT * FROM {t} ORDER BY 1, 2, 3")] for t in tables]
            )
            await conn.execute("TRUNCATE models, accounts, service_state, last_marks CASCADE")
    assert seen[0] == seen[1]
    assert all(seen[0])


async def test_no_key_in_anything_a_failing_run_produces(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-very-secret-0123456789"
    replies = iter(
        [
            web.json_response({"error": f"bad gateway for {key}"}, status=502),
            web.json_response({"choices": [{"message": {"content": f"I was called with {key}", "tool_calls": [
                {"id": key, "function": {"name": "holdin", "arguments": f'{{"reason": "{key}"}}'}}
            ]}}]}),
            web.json_response({"error": {"message": f"Incorrect API key provided: {key}"}}, status=400),
        ]
    )  # fmt: skip

    async def reply(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {key}"
        return next(replies)

    app = web.Application()
    app.router.add_post("/chat/completions", reply)
    caplog.set_level(logging.DEBUG)
    async with TestServer(app) as server, AsyncExitStack() as stack:
        row = PROVIDERS["openai"]._replace(base_url=str(server.make_url("/")))
        client = ChatClient(row, [Secret(key)], backoff_s=0)
        floor = await stack.enter_async_context(open_floor(database, provider=client, OPENAI_API_KEY=key))
        await floor.add("ada", provider="openai")
        (record,) = await floor.cycle()
        await client.close()
        async with database.connection() as conn:
            rows = [
                str(dict(row))
                for table in ("invocations", "invocation_steps", "tool_calls", "models")
                for row in await conn.fetch(f"SELECT * FROM {table}")
            ]
            packed = await select_payload(conn, record.invocation.id)
    assert packed is not None
    produced = [
        caplog.text,
        *rows,
        repr(floor.events),
        repr(client),
        repr(floor.settings),
        str(zlib.decompress(packed)),
    ]
    assert "I was called with ***" in "".join(rows), "the answer did come through"
    assert record.invocation.status == "failed"
    assert not [text for text in produced if key in text]
