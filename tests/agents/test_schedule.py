"""The schedule of invocations: start and end of the service, pending orders, many models, an unavailable database."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from uuid import NAMESPACE_URL, uuid5

import pytest
from support.records import make_model
from support.scripted import START
from support.trading_floor import (
    Floor,
    ScriptedProvider,
    calling,
    hang,
    hold,
    hold_after,
    open_floor,
    opening,
    results_seen,
    run_one,
)
from support.waiting import until

from trader.agents import record as invocation_record
from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.invocations import Invocation
from trader.agents.model_warnings import ConsecutiveFailures
from trader.agents.providers.provider import RuleProvider
from trader.agents.schedule import InvocationScheduler
from trader.agents.sql.linked_invocations import update_invocation_closed
from trader.agents.verification import verify
from trader.core.errors import OrderUndecided, ProviderError, Unavailable
from trader.core.events import ConversationsChanged
from trader.database.pool import Connection, Database, Page
from trader.exchange.domain.orders import Order, OrderAnswer, OrderSide
from trader.exchange.paper import PaperExchange
from trader.record.domain.chain import PayloadDigests

# --- starts and ends --------------------------------------------------------------------------------------------------


async def test_demo_has_a_rule_agent_per_variant(database: Database) -> None:
    async with open_floor(database, provider=RuleProvider()) as floor:
        await floor.agents.start()
        await floor.agents.start()
        assert list(floor.models.by_id) == ["apex-rules", "contrarian-rules", "sovereign-rules", "trendsurfer-rules"]
        assert sorted(floor.exchange.accounts) == sorted(floor.models.by_id)
        records = await floor.cycle()
        assert [record.invocation.status for record in records] == ["completed"] * 4
        assert records[0].model.name == "Apex Rules"
        for record in records:
            assert [call.type for call in record.tool_calls] == ["HOLDING"]
            assert record.invocation.response == record.tool_calls[0].metadata["decisions"][0]["reason"]
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT count(*) FROM invocation_payloads") == 0


async def test_shutdown_records_interrupted_invocations(database: Database) -> None:
    async with open_floor(database) as floor:
        await floor.add("ada")
        floor.provider.scripts["ada"] = [calling(opening()), hang]
        await floor.start_batch()
        await until(lambda: len(floor.provider.turns) == 2)
        assert list(floor.agents.running()) == ["ada"]
        began = asyncio.get_running_loop().time()
        await floor.agents.close()
        assert asyncio.get_running_loop().time() - began < 1
        (record,) = await floor.invocations.finished()
        assert (record.invocation.status, record.invocation.failure_reason) == ("failed", "interrupted")
        assert [call.status for call in record.tool_calls] == ["ok"]
        assert not floor.agents.running()


async def test_cancellation_while_recording_the_end_keeps_the_status(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = asyncio.Event()

    async def write_slowly(conn: Connection, invocation: Invocation, evidence: PayloadDigests, digest: bytes) -> bool:
        is_open = await update_invocation_closed(conn, invocation, evidence, digest)
        if not writing.is_set():
            writing.set()
            await asyncio.Event().wait()
        return is_open

    monkeypatch.setattr(invocation_record, "update_invocation_closed", write_slowly)
    async with open_floor(database) as floor:
        await floor.add("ada")
        floor.provider.scripts["ada"] = [calling(opening()), hold("in")]
        await floor.start_batch()
        await writing.wait()
        await floor.agents.close()
        await floor.agents.start()  # the next process
        (record,) = await floor.invocations.finished()
        assert (record.invocation.status, record.invocation.failure_reason) == ("completed", None)
        assert [call.type for call in record.tool_calls] == ["CREATE_POSITION", "HOLDING"]
        assert not floor.agents.running()


async def test_start_closes_invocations_that_a_crash_left_open(floor: Floor) -> None:
    await floor.add("ada")
    async with floor.database.connection() as conn:
        await conn.execute(
            "INSERT INTO invocations (id, model_id, status, started_at) VALUES ($1, 'ada', 'running', $2)",
            uuid5(NAMESPACE_URL, "crashed"),
            START,
        )
    assert await floor.invocations.finished() == [], "a running one is not shown"
    await floor.agents.start()
    (record,) = await floor.invocations.finished()
    assert (record.invocation.status, record.invocation.failure_reason) == ("failed", "interrupted")


# --- pending orders ---------------------------------------------------------------------------------------------------


class SlowAnswers(PaperExchange):
    """An exchange that commits orders but answers late."""

    committed: asyncio.Event

    async def place_orders(self, *orders: Order) -> Sequence[OrderAnswer]:
        answers = await super().place_orders(*orders)
        self.committed.set()
        await asyncio.Event().wait()
        return answers


async def test_cancellation_after_its_pair_was_committed(database: Database) -> None:
    provider = ScriptedProvider("strategy")
    async with open_floor(database, provider=provider, exchange_type=SlowAnswers) as floor:
        assert isinstance(floor.exchange, SlowAnswers)
        floor.exchange.committed = asyncio.Event()
        await floor.add("ada", provider="strategy")
        legs = {
            name: {"symbol": symbol, "side": "buy", "quantity": 0.01, "exitPlan": {"stop": 1}}
            for name, symbol in (("first", "BTC"), ("second", "ETH"))
        }
        provider.scripts["ada"] = [calling(("placePair", legs))]
        await floor.start_batch()
        await floor.exchange.committed.wait()
        await floor.agents.close()
        (record,) = await floor.invocations.finished()
        assert record.invocation.failure_reason == "interrupted"
        (call,) = record.tool_calls
        assert (call.status, [each["status"] for each in call.metadata["results"]]) == ("ok", ["filled", "filled"])
        assert set(floor.exchange.account("ada").positions) == {"BTC", "ETH"}
        assert not (await verify(floor.database, [])).findings


async def test_orders_without_an_id_of_their_own_belong_to_their_calls(database: Database) -> None:
    provider = ScriptedProvider("strategy")
    async with open_floor(database, provider=provider) as floor:
        await floor.add("ada", provider="strategy")
        order = {"symbol": "BTC", "side": "buy", "quantity": 0.01, "exitPlan": {"stop": 1}}
        pair = {"first": order, "second": {**order, "symbol": "ETH"}}
        provider.scripts["ada"] = [calling(("placeOrder", order), ("placePair", pair)), hold()]
        (record,) = await floor.cycle()
        assert [len(call.metadata["results"]) for call in record.tool_calls] == [1, 2, 1]
        assert not (await verify(database, [])).findings


class Undecided(PaperExchange):
    """An exchange that cannot determine the status of an order."""

    async def place_orders(self, *orders: Order) -> Sequence[OrderAnswer]:
        raise OrderUndecided("What became of this order at the venue is not known yet")


async def test_an_order_of_unknown_status_fails_its_call_and_not_the_invocation(database: Database) -> None:
    async with open_floor(database, exchange_type=Undecided) as floor:
        record = await run_one(floor, calling(opening()), hold("waiting"))
    assert record.invocation.status == "completed"
    assert [(call.type, call.status) for call in record.tool_calls] == [
        ("CREATE_POSITION", "failed"),
        ("HOLDING", "ok"),
    ]
    words = "What became of this order at the venue is not known yet"
    assert record.tool_calls[0].metadata["results"] == [{"error": words}]
    assert results_seen(floor.provider.turns[1])[0]["error"] == words


async def test_cancellation_before_its_order_was_placed(database: Database) -> None:
    async with open_floor(database, SIM_LATENCY_MS="200") as floor:
        await floor.add("ada")
        floor.provider.scripts["ada"] = [calling(opening())]
        await floor.start_batch()
        await until(lambda: floor.market.orders_waiting)
        await floor.agents.close()
        (record,) = await floor.invocations.finished()
        (call,) = record.tool_calls
        assert call.status == "failed"
        assert "before the order was placed" in call.metadata["results"][0]["error"]
        assert not floor.exchange.account("ada").positions


async def test_time_stands_still_for_an_invocation_until_its_order_waits(database: Database) -> None:
    async with open_floor(database, SIM_LATENCY_MS="200", MAX_PARALLEL_MODELS="1") as floor:
        await floor.add("ada", "bob", router_model="lab/one")
        for name in ("ada", "bob"):
            floor.provider.scripts[name] = [calling(opening()), hold("in")]
        await floor.start_batch()
        for price in ("94010", "94020", "94030"):
            await floor.see({"BTC": price})
        await floor.idle()
        fills = {
            name: floor.exchange.account(name).positions["BTC"].entry_price - Decimal("0.1") for name in ("ada", "bob")
        }
        # The second run starts when the first has ended, at the moment of its fill, and meets the next book.
        assert fills == {"ada": Decimal(94_010), "bob": Decimal(94_020)}


async def test_calls_are_recovered_from_orders_of_a_killed_process(floor: Floor) -> None:
    await floor.add("ada")
    run_id = uuid5(NAMESPACE_URL, "killed")
    async with floor.database.connection() as conn:
        await conn.execute(
            "INSERT INTO invocations (id, model_id, status, started_at) VALUES ($1, 'ada', 'running', $2)",
            run_id,
            START,
        )
    for number, side in ((2, OrderSide.BUY), (3, OrderSide.SELL)):
        await floor.exchange.place_orders(
            Order(
                account_id="ada", symbol="BTC", side=side, quantity=Decimal("0.1"), reduce_only=number == 3,
                client_order_id=f"{run_id}:{number}", invocation_id=run_id,
            )
        )  # fmt: skip
    hedge = [
        Order(
            account_id="ada", symbol=symbol, side=OrderSide.SELL, quantity=Decimal("0.01"), client_order_id=own,
            invocation_id=run_id,
        )
        for symbol, own in (("BTC", f"{run_id}:4"), ("ETH", f"{run_id}:4:2"))
    ]  # fmt: skip
    await floor.exchange.place_orders(*hedge)
    await floor.agents.start()
    await floor.agents.start()
    (record,) = await floor.invocations.finished()
    assert [(call.number, call.type, call.status) for call in record.tool_calls] == [
        (2, "CREATE_POSITION", "ok"),
        (3, "CLOSE_POSITION", "ok"),
        (4, "CREATE_POSITION", "ok"),
    ]
    result = record.tool_calls[0].metadata["results"][0]
    assert (result["recovered"], result["filledQuantity"]) == (True, "0.1")
    both = record.tool_calls[2].metadata["results"]
    assert [(each["recovered"], each["filledQuantity"]) for each in both] == [(True, "0.01")] * 2
    assert not (await verify(floor.database, [])).findings


# --- many runs --------------------------------------------------------------------------------------------------------


async def test_failures_in_a_row_outlast_a_restart(database: Database) -> None:
    async with open_floor(database) as floor:
        await floor.add("ada", "bob", "eve")
        floor.provider.scripts = {"ada": [ProviderError("no answer")], "bob": [ProviderError("no answer")]}
        for _ in range(3):
            await floor.cycle()
        floor.provider.scripts = {"ada": [ProviderError("nothing")]}
        await floor.cycle()
        assert floor.agents.failing() == {"ada": (4, "nothing")}
    async with open_floor(database) as later:
        await later.agents.start()
        assert later.agents.failing() == {"ada": (4, "nothing")}


def test_a_new_term_counts_the_failures_that_its_rows_have() -> None:
    model, counted = make_model("ada"), ConsecutiveFailures()
    for number in range(3):
        failed = uuid5(NAMESPACE_URL, str(number))
        counted.add(Invocation(id=failed, model_id="ada", status="failed", started_at=START, failure_reason="down"))
    assert counted.failing([model]).keys() == {"ada"}
    counted.load({})  # under another leader, it has succeeded
    assert counted.failing([model]) == {}


async def test_at_most_max_parallel_models_of_one_name_run_at_once(database: Database) -> None:
    release = asyncio.Event()

    async with open_floor(database, MAX_PARALLEL_MODELS="3") as floor:
        names = [f"m{n:02}" for n in range(8)]
        await floor.add(*names, router_model="lab/one")
        floor.provider.scripts = {name: [hold_after(release)] for name in names}
        await floor.start_batch()
        await until(lambda: floor.provider.active == 3)
        assert sorted(floor.agents.running()) == names[:3]
        await floor.start_batch()
        assert floor.agents.skipped == {"running": 3, "waiting": 5}
        assert sorted(floor.agents.waiting()) == names[3:]
        release.set()
        await floor.idle()
        assert floor.provider.active_max == 3
        records = await floor.invocations.finished(page=Page(200))
        assert sorted(record.model.id for record in records) == names
        batches = [event for event in floor.progress() if event.type == "batch:complete"]
        assert [batch.details for batch in batches] == [{"modelIds": names}]


async def test_models_that_waited_in_a_former_term_are_invoked_in_the_next(database: Database) -> None:
    async with open_floor(database, MAX_PARALLEL_MODELS="1") as floor:
        await floor.add("ada", "bob", router_model="lab/one")
        floor.provider.scripts = {"ada": [hang], "bob": [hold()]}
        await floor.start_batch()
        await until(lambda: floor.provider.active)
        assert list(floor.agents.waiting()) == ["bob"]
        await floor.agents.close()
        async with database.connection() as conn:
            await conn.execute("UPDATE models SET active = false WHERE id = 'ada'")
        await floor.agents.start()
        (record,) = await floor.cycle()
        assert record.model.id == "bob"


async def test_models_that_hang_delay_no_model_of_another_name(database: Database) -> None:
    release = asyncio.Event()

    other = ScriptedProvider("other")
    async with open_floor(database, also=[other], MAX_PARALLEL_MODELS="2") as floor:
        await floor.add("h1", "h2", "h3", router_model="lab/hanging")
        await floor.add("m1", "m2")
        await floor.add("o1", "o2", "o3", provider="other", router_model="lab/hanging")
        floor.provider.scripts = {name: [hold_after(release)] for name in ("h1", "h2", "h3")}
        await floor.start_batch()
        await until(lambda: floor.provider.active >= 2 and len(floor.agents.running()) <= 2)
        assert {turn.model.id for turn in other.turns} == {"o1", "o2", "o3"}
        assert {turn.model.id for turn in floor.provider.turns} == {"h1", "h2", "m1", "m2"}
        assert sorted(floor.agents.running()) == ["h1", "h2"]
        assert list(floor.agents.waiting()) == ["h3"]
        release.set()
        await floor.idle()
        assert not floor.agents.waiting()


async def test_inactive_models_are_not_invoked_and_new_ones_are(floor: Floor) -> None:
    await floor.add("ada")
    await floor.cycle()
    await floor.add("bob")
    async with floor.database.connection() as conn:
        await conn.execute("UPDATE models SET active = false WHERE id = 'ada'")
    assert [record.model.id for record in await floor.cycle()] == ["bob"]
    activity = {model.id: activity for model, activity in await floor.invocations.model_activity()}
    assert activity["ada"].invocation_count == 1
    assert activity["bob"].last_invoked_at == floor.clock.now()


async def test_a_queued_model_is_invoked_with_its_current_definition(database: Database) -> None:
    may_end = asyncio.Event()

    async with open_floor(database, MAX_PARALLEL_MODELS="1") as floor:
        await floor.add("ada", "bob", "eve", router_model="lab/one")
        floor.provider.scripts["ada"] = [hold_after(may_end)]
        await floor.start_batch()
        async with database.connection() as conn:
            await conn.execute("UPDATE models SET active = false WHERE id = 'bob'")
            await conn.execute("UPDATE models SET router_model_name = 'lab/new' WHERE id = 'eve'")
        await floor.start_batch()
        may_end.set()
        await floor.idle()
        assert [turn.model.router_model_name for turn in floor.provider.turns] == ["lab/one", "lab/new"]
        batches = [event.details for event in floor.progress() if event.type == "batch:complete"]
        assert batches == [{"modelIds": ["ada", "bob", "eve"]}]


# --- the database away ------------------------------------------------------------------------------------------------


class AwayDatabase(Database):
    """A database whose transactions fail while it is unavailable."""

    away = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        if self.away:
            raise Unavailable("The database is away")
        async with super().transaction() as conn:
            yield conn


@asynccontextmanager
async def unheard(dsn: str) -> AsyncIterator[tuple[AwayDatabase, Floor]]:
    """A floor whose database is away since the only model has held, so that the end of its invocation is unwritten."""
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
        yield away, floor
    await away.close()


async def test_an_unwritten_record_is_written_later(dsn: str) -> None:
    async with unheard(dsn) as (away, floor):
        assert await floor.invocations.finished() == []
        away.away = False
        floor.provider.scripts["ada"] = [hold("heard")]
        records = await floor.cycle()
        assert [record.invocation.response for record in records] == ["heard"]
        first = (await floor.invocations.finished())[-1]
        assert (first.invocation.status, first.invocation.response) == ("completed", "unheard")
        assert len(first.tool_calls) == 1


@pytest.mark.parametrize("ended_by", ["holding", "interruption"])
async def test_an_unwritten_record_outlasts_a_lost_lead_unless_another_leader_has_closed_it(
    dsn: str, ended_by: str
) -> None:
    async with unheard(dsn) as (away, floor):
        await floor.agents.close()
        away.away = False
        if ended_by == "interruption":
            await InvocationScheduler(floor.services).start()
        await floor.agents.start()
        assert (await floor.invocations.finished())[0].invocation.ended_by == ended_by
        floor.provider.scripts["ada"] = [hold("heard")]
        await floor.cycle()
        latest, first = await floor.invocations.finished()
        assert (latest.invocation.response, first.invocation.ended_by) == ("heard", ended_by)
        assert (await verify(away, ())).findings == []


async def test_an_invocation_that_another_leader_prevents_is_not_announced(floor: Floor) -> None:
    await floor.add("ada")
    async with floor.database.connection() as conn:
        await conn.execute("UPDATE service_state SET term = term + 1")
    for _ in range(2):  # the second batch writes what the first one could not
        await floor.start_batch()
        await floor.idle()
    async with floor.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM invocations") == 0
    assert not [event for event in floor.events if isinstance(event, ConversationsChanged)]


class DoubtfulDatabase(Database):
    """A database that writes one row and disconnects before it confirms."""

    breaks_off = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        async with super().connection() as conn:
            yield conn
            if self.breaks_off and await conn.fetchval("SELECT count(*) FROM invocations"):
                self.breaks_off = False
                raise Unavailable("The database did not answer in time")


async def test_an_unconfirmed_start_is_closed_in_the_next_cycle(dsn: str) -> None:
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
        latest, first = await floor.invocations.finished()
        assert latest.invocation.status == "completed"
        assert first.invocation.status == "failed"
        assert first.invocation.failure_reason == "it could not be started: The database did not answer in time"
        async with doubtful.connection() as conn:
            assert await conn.fetchval("SELECT count(*) FROM invocations WHERE status = 'running'") == 0
    await doubtful.close()


async def test_a_repeated_moment_of_a_replay_invokes_no_model_again(
    floor: Floor, caplog: pytest.LogCaptureFixture
) -> None:
    """A restarted replay continues from its last tick, at which the previous process may have invoked its models."""
    first = await run_one(floor, calling(opening()), hold("in"))
    assert floor.clock.now() == first.invocation.started_at
    await floor.start_batch()
    await floor.idle()
    assert [record.invocation.id for record in await floor.invocations.finished()] == [first.invocation.id]
    assert len(floor.provider.turns) == 2
    assert floor.exchange.account("ada").positions["BTC"].quantity == Decimal("0.1")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
