"""The trading workflow on a real database and exchange: the actions of an invocation, its end, and its record."""

import asyncio
import zlib
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, cast

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manual_clock import ManualClock
from support.prompts import data_of
from support.scripted import START, make_settings
from support.trading_floor import MIDS, Floor, calling, hang, hold, open_floor, opening, results_seen, run_one

from trader.agents.domain.invocations import invocation_id
from trader.agents.domain.prompt import INDICATORS_SHOWN, QUESTION
from trader.agents.observer import Observer
from trader.agents.sql.invocations import select_payloads, select_steps
from trader.agents.variants import VARIANTS
from trader.core.clock import iso
from trader.core.errors import ProviderError
from trader.core.events import ConversationsChanged
from trader.core.variant_id import VariantId
from trader.database.pool import Database, Page
from trader.exchange.domain.orders import Side
from trader.market.domain.markets import Interval, Quote
from trader.market.feed import MarketFeed
from trader.market.sources.synthetic import SyntheticSource
from trader.portfolio.sql.analytics import select_run_entrants

# --- actions of a run -------------------------------------------------------------------------------------------------


async def test_holding_is_recorded_and_published(floor: Floor) -> None:
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
        "workflow:started", "workflow:step", "workflow:call", "workflow:complete", "batch:complete",
    ]  # fmt: skip
    assert progress[2].details["decisions"] == [{"reason": "BTC is quiet"}]
    assert progress[1].details["invocationId"] == str(invocation.id)
    assert progress[1].details["toolNames"] == ["holding"]
    assert progress[3].details["endedBy"] == "holding"
    assert progress[-1].details == {"modelIds": ["ada"]}
    changes = [event for event in floor.events if isinstance(event, ConversationsChanged)]
    assert [change.model_id for change in changes] == ["ada"]


async def test_a_turn_contains_variant_and_market(floor: Floor) -> None:
    await run_one(floor)
    (turn,) = floor.provider.turns
    apex = VARIANTS[VariantId.APEX]
    assert turn.temperature == apex.temperature
    system, user = turn.messages
    assert system["content"].startswith(apex.prompt.strip())
    assert "at most 10" in system["content"]
    shown = data_of(user["content"])
    assert shown["account"]["equity"] == 10_000
    assert {symbol: market["price"] for symbol, market in shown["now"].items()} == {
        "BTC": 94_000, "ETH": 3_300, "SOL": 200,
    }  # fmt: skip
    names, *rows = shown["15m"]["indicators"]
    assert [row[names.index("momentum")] for row in rows] == [None] * 3 * INDICATORS_SHOWN, "absent, not 0"
    assert user["content"].endswith(QUESTION)


async def test_position_is_opened_through_the_exchange(floor: Floor) -> None:
    record = await run_one(floor, calling(opening(), text="breakout"), hold("done"))
    position = floor.exchange.account("ada").positions["BTC"]
    assert (position.side, position.quantity) == (Side.LONG, Decimal("0.1"))
    assert (position.exit_plan.stop, position.exit_plan.invalidation) == (Decimal(90_000), "under 90 000")
    assert (position.confidence, position.invocation_id) == (Decimal(70), record.invocation.id)
    assert [(call.type, call.status) for call in record.tool_calls] == [("CREATE_POSITION", "ok"), ("HOLDING", "ok")]
    result = record.tool_calls[0].metadata["results"][0]
    assert (result["status"], result["averagePrice"]) == ("filled", "94000.1")
    seen = results_seen(floor.provider.turns[1])[0]
    assert seen["result"] == "ok"
    assert seen["account"]["positions"] == [{"symbol": "BTC", "side": "LONG", "quantity": "0.1"}]
    assert record.invocation.response == "breakout\n\ndone"
    async with floor.database.connection() as conn:
        assert await conn.fetchval("SELECT client_order_id FROM order_requests") == f"{record.invocation.id}:1"


async def test_a_model_rests_an_order_that_counts_as_filled_and_takes_it_back(floor: Floor) -> None:
    plan = {"stop": 90_000, "trailingDistance": 4_000, "targets": [{"price": 96_000, "fraction": 0.5}]}
    order = {
        "symbol": "BTC", "side": "BUY", "quantity": 0.3, "type": "limit", "limitPrice": 93_000, "leverage": 10,
        "postOnly": True, "exitPlan": plan, "confidence": 60,
    }  # fmt: skip
    taking = calling(("placeOrder", {**order, "limitPrice": 95_000}))
    beyond = opening(quantity=0.3)
    record = await run_one(floor, taking, calling(("placeOrder", order)), calling(beyond), hold())
    assert [(call.type, call.status) for call in record.tool_calls] == [
        ("CREATE_POSITION", "rejected"), ("CREATE_POSITION", "ok"), ("CREATE_POSITION", "rejected"), ("HOLDING", "ok"),
    ]  # fmt: skip
    refusals = [call.metadata["results"][0]["reason"] for call in record.tool_calls[:3:2]]
    assert refusals[0] == "post-only: a buy at 95000 would take from the book, whose best ask is 94000.1"
    assert refusals[1].startswith("The BTC position would be worth 56100.00, 5.61 × the equity")
    await floor.see(after_s=60)
    (resting,) = floor.exchange.account("ada").resting
    cancel = ("cancelOrder", {"symbol": "BTC", "orderId": str(resting.id)})
    record = await run_one(floor, calling(cancel), hold())
    (shown,) = data_of(floor.provider.turns[-1].messages[1]["content"])["orders"]
    assert (shown["id"], shown["limitPrice"], shown["remaining"]) == (str(resting.id), 93_000, 0.3)
    assert (record.tool_calls[0].type, record.tool_calls[0].status) == ("CANCEL_ORDER", "ok")
    assert not floor.exchange.account("ada").resting


async def test_next_invocation_sees_position_and_last_action(floor: Floor) -> None:
    await run_one(floor, calling(opening()), hold("in"))
    await floor.see(after_s=60)
    record = await run_one(floor, calling(("closePosition", {"symbol": "btcusdt", "fraction": 0.5})), hold())
    view = floor.provider.turns[2].view
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


@pytest.mark.parametrize(
    ("close_reason", "plan", "btc"),
    [
        ("stop", {"stop": 93_000}, "92000"),
        ("invalidation", {"invalidationPrice": 93_000}, "92000"),
        ("target", {"target": 95_000}, "96000"),
        ("time", {"timeExit": iso(START + timedelta(minutes=1))}, "94000"),
        ("liquidation", {"stop": 50_000, "quantity": 0.5, "leverage": 10}, "74000"),
    ],
)
async def test_no_reversal_soon_after_an_exit_by_the_exchange(
    floor: Floor, close_reason: str, plan: dict[str, Any], btc: str
) -> None:
    await run_one(floor, calling(opening(**plan)), hold("in"))
    mids = MIDS | {"BTC": btc}
    await floor.see(mids, after_s=60)
    async with asyncio.timeout(10):
        while floor.exchange.account("ada").positions:  # the rest follows if not everything closes at once
            await floor.see(mids)
    short = calling(opening(side="SHORT", quantity=0.01, stop=99_000, target=None))
    record = await run_one(floor, short, hold("x"))
    view = floor.provider.turns[-1].view
    assert view.trades[0].close_reason == close_reason
    last = view.markets["BTC"].last_action
    assert last is not None
    assert (last.action, last.side, last.cycles_ago) == ("closePosition", Side.LONG, 0)
    call = record.tool_calls[0]
    rule = "day loss" if close_reason == "liquidation" else "reversal"
    assert (call.status, call.metadata["results"][0]["rule"]) == ("rejected", rule)
    await floor.see(after_s=240)
    record = await run_one(floor, short, hold("x"))
    assert record.tool_calls[0].status == ("rejected" if close_reason == "liquidation" else "ok")


async def test_the_exit_plan_is_changed(floor: Floor) -> None:
    await run_one(floor, calling(opening()), hold("in"))
    record = await run_one(
        floor, calling(("updateExitPlan", {"symbol": "BTC", "stop": 93_000}), ("holding", {"reason": "x"}))
    )
    assert [call.status for call in record.tool_calls] == ["ok", "ok"]
    plan = floor.exchange.account("ada").positions["BTC"].exit_plan
    assert (plan.stop, plan.target) == (Decimal(93_000), Decimal(99_000))


async def test_no_time_from_a_model_makes_its_account_unreadable(floor: Floor) -> None:
    """PostgreSQL stores years that Python cannot represent: such a row would be unreadable at the next start."""
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
    assert results_seen(floor.provider.turns[1])[0]["reason"] == "Leverage 11 is above the 10 that your variant allows."
    async with floor.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests") == 0


async def test_a_refusal_by_the_exchange_is_recorded_as_rejected(floor: Floor) -> None:
    record = await run_one(floor, calling(opening(quantity=0.00001)), hold())
    call = record.tool_calls[0]
    assert call.status == "rejected"
    assert call.metadata["results"][0]["status"] == "rejected"
    assert call.metadata["results"][0]["reason"]


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("createPosition", '{"symbol": "BTC"', "not JSON"),
        ("createPosition", {"symbol": "BTC"}, "side: required: expected one of LONG, SHORT; quantity: required"),
        ("createPosition", opening(quantity="0,1")[1], 'quantity: expected a number above 0 up to 1e+12, got "0,1"'),
        ("closePosition", {"symbol": "BTC", "all": True}, "all: unknown field; known are symbol, fraction"),
        ("closePosition", {"symbol": "DOGE"}, "There is no market 'DOGE'; the markets are BTC, ETH, SOL."),
        ("withdraw", {}, "There is no tool 'withdraw'"),
        ("holding", {"reason": ""}, "reason: expected why, in words and with the figures"),
    ],
)
async def test_bad_calls_are_explained_and_counted(floor: Floor, name: str, arguments: Any, error: str) -> None:
    record = await run_one(floor, calling((name, arguments)), hold("sorry"))
    assert record.invocation.status == "completed"
    assert [call.status for call in record.tool_calls] == ["failed", "ok"]
    assert error in results_seen(floor.provider.turns[1])[0]["error"]
    async with floor.database.connection() as conn:
        assert await conn.fetchval("SELECT failed_tool_calls FROM invocations") == 1


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


async def test_the_settings_bound_the_tokens(database: Database) -> None:
    step = calling(("fetchIndicators", {"symbol": "ETH", "interval": "4h"}), tokens=3_000)
    async with open_floor(database, RUN_TOKENS_MAX="15000", ANSWER_TOKENS_MAX="600") as floor:
        record = await run_one(floor, step)
        assert [turn.answer_tokens_max for turn in floor.provider.turns] == [600, 600]
        assert record.invocation.step_count == 2
        assert floor.progress()[-2].details["endedBy"] == "tokens"


async def test_ends_at_an_answer_without_calls(floor: Floor) -> None:
    look = calling(("fetchIndicators", {"symbol": "ETH", "interval": "4h"}))
    record = await run_one(floor, look, calling(text="I only talk."))
    assert (record.invocation.status, record.invocation.response) == ("completed", "I only talk.")
    assert record.invocation.ended_by == floor.progress()[-2].details["endedBy"] == "answer"


async def test_a_model_that_only_talks_fails_has_a_warning_and_no_decided_cycle(floor: Floor) -> None:
    for _ in range(3):
        record = await run_one(floor, calling(text="I would hold."))
        invocation = record.invocation
        assert (invocation.status, invocation.ended_by, invocation.step_count) == ("failed", "calls", 2)
        assert invocation.failure_reason == "the answer has no tool call, for the second time"
        assert "Call a tool; `holding` ends the cycle." in floor.provider.turns[-1].messages[-1]["content"]
    assert "ada failed 3 times in a row: the answer has no tool call" in (floor.agents.warnings().summary or "")
    async with floor.database.connection() as conn:
        assert await conn.fetchval("SELECT (finished, failed) FROM invocation_counts") == (3, 3)
        await conn.execute("UPDATE invocation_counts SET finished = 300")
        assert [each.record.is_ranked for each in await select_run_entrants(conn)] == [False], "whatever its coverage"
    await run_one(floor, hold())
    async with floor.database.connection() as conn:
        assert [each.record.is_ranked for each in await select_run_entrants(conn)] == [True]


async def test_three_answers_with_the_same_bad_call_end_the_invocation(floor: Floor) -> None:
    record = await run_one(floor, calling(("closePosition", {"all": True}), ("closePosition", {"all": True})))
    assert (record.invocation.status, record.invocation.ended_by, record.invocation.step_count) == (
        "failed",
        "calls",
        3,
    )
    assert "calls of 3 answers failed for the same reason: Bad arguments" in (record.invocation.failure_reason or "")


async def test_ten_different_bad_calls_are_no_decision(floor: Floor) -> None:
    record = await run_one(floor, *[calling((f"withdraw{number}", {})) for number in range(10)])
    assert (record.invocation.status, record.invocation.ended_by) == ("failed", "calls")
    assert record.invocation.failure_reason == "the invocation ended without a valid tool call (steps)"


async def test_calls_left_in_the_text_are_executed_and_recorded_as_such(floor: Floor) -> None:
    name, arguments = opening(quantity="0.1", confidence=0.7)
    left = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    calls = (name, arguments), ("updateExitPlan", {"symbol": "BTC", "stop": 91_000, "target": 0})
    text = "".join(left.format(tool, orjson.dumps(given).decode()) for tool, given in calls)
    record = await run_one(floor, calling(text=f"<think><tool_call></think>Up.{text}"), hold("in"))
    assert [call.status for call in record.tool_calls] == ["ok", "ok", "ok"]
    raw = record.tool_calls[0].metadata["raw"]
    assert (raw["form"], orjson.loads(raw["sent"])["confidence"]) == ("Kimi", 0.7)
    position = floor.exchange.account("ada").positions["BTC"]
    assert (position.quantity, position.confidence) == (Decimal("0.1"), Decimal(70))
    told = floor.provider.turns[1].messages
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[-1]["content"].count("Result of ") == 2
    assert told[-1]["content"].count("`confidence` is in percent") == 1


@pytest.mark.parametrize(
    ("cut_by", "cause"),
    [("length", "at its limit of 8192 tokens (ANSWER_TOKENS_MAX)"), ("content_filter", "by a filter of the provider")],
)
async def test_an_answer_cut_off_before_any_call_is_a_failure(
    floor: Floor, cut_by: Literal["length", "content_filter"], cause: str
) -> None:
    thinking = msgspec.structs.replace(calling(text="Let me think"), cut_by=cut_by)
    record = await run_one(floor, thinking)
    invocation = record.invocation
    assert (invocation.status, invocation.response) == ("failed", "Let me think")
    assert invocation.failure_reason == f"the answer was cut off {cause}, before any tool call"
    assert (invocation.step_count, invocation.input_tokens) == (1, 100), "what it took is recorded"


async def test_an_answer_cut_off_by_the_token_budget_ends_the_invocation(floor: Floor) -> None:
    record = await run_one(floor, msgspec.structs.replace(calling(tokens=30_000), cut_by="length"))
    assert (record.invocation.status, record.invocation.ended_by) == ("failed", "calls")
    assert record.invocation.failure_reason == "the invocation ended without a valid tool call (tokens)"


async def test_provider_failure_affects_only_its_invocation(floor: Floor) -> None:
    await floor.add("bob")
    await run_one_of_many(floor, calling(opening()), ProviderError("every key of fake rests"))
    others = await floor.invocations.finished(model_id="bob")
    assert [other.invocation.status for other in others] == ["completed"]
    records = {record.model.id: record for record in await floor.invocations.finished()}
    failed = records["ada"].invocation
    assert (failed.status, failed.failure_reason, failed.step_count) == ("failed", "every key of fake rests", 1)
    assert [call.status for call in records["ada"].tool_calls] == ["ok"], "what it did before is recorded"
    assert "BTC" in floor.exchange.account("ada").positions


async def test_the_first_cycle_waits_for_the_first_price(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    floor, asked = Floor(database), asyncio.Event()
    quote_after = floor.market.quote_after

    async def noted(symbol: str, moment: datetime) -> Quote:
        asked.set()
        return await quote_after(symbol, moment)

    monkeypatch.setattr(floor.market, "quote_after", noted)
    await floor.add("ada")
    await floor.exchange.lead()
    try:
        await floor.start_batch()
        async with asyncio.timeout(10):
            await asked.wait()
        assert floor.provider.turns == []
        await floor.see()
        await floor.idle()
        (record,) = await floor.invocations.finished()
    finally:
        await floor.agents.close()
        await floor.exchange.resign()
    assert record.invocation.status == "completed"
    assert set(floor.provider.turns[0].view.markets) == set(MIDS)


async def test_unconfigured_provider(floor: Floor) -> None:
    await floor.add("eve", provider="mistral")
    (record,) = await floor.cycle()
    assert record.invocation.failure_reason == "the provider 'mistral' is not configured; configured: fake"
    assert floor.agents.warnings().summary == "1 active model(s) name a provider that is not configured: eve (mistral)"
    floor.provider.refused_fields = {"ada": ["top_p", "temperature"]}
    await floor.add("ada")
    await floor.cycle()
    assert floor.agents.warnings().summary == (
        "1 active model(s) name a provider that is not configured: eve (mistral); "
        "ada is asked without temperature, top_p, which its provider refused"
    )


async def test_an_invocation_that_takes_too_long_is_a_timeout(database: Database) -> None:
    async with open_floor(database, limit_s=0.3) as floor:
        record = await run_one(floor, calling(opening()), hang)
        assert (record.invocation.status, record.invocation.step_count) == ("timeout", 1)
        assert record.invocation.failure_reason == "the invocation took longer than 0.3 s"
        assert floor.progress()[-2].type == "workflow:failed"
        assert [call.status for call in record.tool_calls] == ["ok"]


async def test_a_bug_is_recorded_and_does_not_stop_other_models(floor: Floor, caplog: pytest.LogCaptureFixture) -> None:
    await floor.add("bob")
    await run_one_of_many(floor, ZeroDivisionError("secret detail"))
    records = {record.model.id: record.invocation for record in await floor.invocations.finished()}
    assert records["ada"].failure_reason == "internal error (ZeroDivisionError)"
    assert records["bob"].status == "completed"
    assert "invocation of ada ended by a bug" in caplog.text
    assert floor.progress()[-1].details == {"modelIds": ["ada", "bob"]}


async def run_one_of_many(floor: Floor, *script: Any) -> None:
    await floor.add("ada")
    floor.provider.scripts["ada"] = list(script)
    await floor.cycle()


# --- payloads, rule agents, determinism -------------------------------------------------------------------------------


async def test_messages_and_raw_answers_are_kept(floor: Floor) -> None:
    record = await run_one(floor, calling(opening(leverage=11), text="a\x00b"), hold())
    async with floor.database.connection() as conn:
        (packed,) = (await select_payloads(conn, [record.invocation])).values()
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


@pytest.mark.parametrize(("thinking", "answered_s", "price"), [("on", 22, "94200.1"), ("off", 2, "94000.1")])
async def test_in_a_replay_an_order_meets_the_book_after_the_thinking_time(
    database: Database, thinking: str, answered_s: int, price: str
) -> None:
    async with open_floor(database, REPLAY_THINKING=thinking) as floor:
        await floor.add("ada")
        await floor.agents.start()
        answer = msgspec.structs.replace(calling(opening()), duration_ms=20_000)
        floor.provider.scripts["ada"] = [answer, hold("done")]
        await floor.see()
        await floor.start_batch()
        for _ in range(21):  # a frozen clock does not need them
            await floor.see(MIDS | {"BTC": "94200"})
        await floor.idle()
        (record,) = await floor.invocations.finished(page=Page(1))
        (call, _) = record.tool_calls
        assert call.created_at == START + timedelta(seconds=answered_s)
        assert call.metadata["results"][0]["averagePrice"] == price


async def test_no_model_thinks_beyond_the_end_of_a_recording(database: Database) -> None:
    async with open_floor(database, ends_at=START + timedelta(seconds=4), REPLAY_THINKING="on") as floor:
        await floor.add("ada")
        await floor.agents.start()
        floor.provider.scripts["ada"] = [msgspec.structs.replace(calling(opening()), duration_ms=60_000), hold()]
        await floor.see()
        await floor.start_batch()
        for _ in range(2):
            await floor.see()
        await floor.clock.advance(timedelta(seconds=31))
        await asyncio.wait_for(floor.idle(), 5)
        (record,) = await floor.invocations.finished(page=Page(1))
        assert "30 s old" in record.tool_calls[0].metadata["results"][0]["reason"]


SOURCE = SyntheticSource(3, ("BTC",))


@given(st.lists(st.tuples(st.sampled_from([0, 59, 301, 2000]), st.sampled_from(["5m", "1h"])), min_size=4, max_size=6))
@settings(max_examples=8)
def test_kept_indicators_equal_a_fresh_computation(steps: list[tuple[int, Interval]]) -> None:
    async def check() -> None:
        clock, unused = ManualClock(START), cast("Any", None)
        market = MarketFeed(SOURCE, clock)
        kept = Observer(unused, unused, market, make_settings())
        for passed_s, interval in steps:
            clock.set_by(timedelta(seconds=passed_s))
            fresh = Observer(unused, unused, market, make_settings())
            known = await kept.indicators("BTC", interval, clock.now())
            assert known == await fresh.indicators("BTC", interval, clock.now())

    asyncio.run(check())


async def test_a_kept_history_equals_a_fresh_one_in_the_next_hour(database: Database) -> None:
    async with open_floor(database) as floor:
        await floor.see()
        model = (await run_one(floor, hold())).model
        kept = Observer(database, floor.exchange, floor.market, floor.settings)
        shown = await floor.provider.shown(model)
        for hour in range(3):
            async with database.connection() as conn:
                await conn.execute(
                    """INSERT INTO portfolio_hourly (account_id, hour, run_id, total, count, last, last_at)
                       VALUES ($1, date_trunc('hour', $2::timestamptz), $3, 10, 1, $4, $2)""",
                    model.id, floor.clock.now(), floor.exchange.account(model.id).run.id, Decimal(10_000 + 500 * hour),
                )  # fmt: skip
            await floor.see(after_s=3600)
            fresh = Observer(database, floor.exchange, floor.market, floor.settings)
            now = floor.clock.now()
            assert await kept.view(model, shown, now) == await fresh.view(model, shown, now)
