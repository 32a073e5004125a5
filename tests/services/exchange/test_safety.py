"""Halting, resuming and flattening a running exchange, on a real PostgreSQL."""

import asyncio
import logging
from collections.abc import AsyncIterator
from decimal import Decimal

import pytest
from support.floor import calling, hold, open_floor, opening
from support.guarded import Guarded, guarding
from support.manual_clock import ManualClock
from support.proxy import FaultyProxy
from support.scripted import START, ScriptedSource
from support.venue import agree_with_rows

from trader.domain.exchange.halts import HaltCause, Outcome, Verb
from trader.domain.exchange.orders import Cause, ExitPlan, Order, OrderAnswer, OrderStatus, OrderType
from trader.errors import Unavailable
from trader.services.events import HaltsChanged
from trader.services.operations import operator_commands as operations
from trader.store.database.pool import Database
from trader.store.operations import halts as store

D = Decimal
QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once; how long they go on is a second."""
    monkeypatch.setattr(operations, "RETRY_S", 0.01)
    monkeypatch.setattr(operations, "FLATTEN_S", 1.0)


@pytest.fixture
async def guarded(database: Database) -> AsyncIterator[Guarded]:
    async with guarding(database, ScriptedSource(), ManualClock(START)) as guarded:
        await guarded.see(QUIET)
        yield guarded
        await agree_with_rows(guarded.venue)


# --- halts ------------------------------------------------------------------------------------------------------------


async def test_a_halt_stops_what_opens_and_adds_and_lets_the_rest_go_on(guarded: Guarded) -> None:
    venue = guarded.venue
    await venue.buy("0.2", leverage=D(5), exit_plan=ExitPlan(stop=D(90_000)))
    await guarded.do(Verb.HALT)
    for refused in (
        await venue.buy("0.01"),
        await venue.buy("0.01", symbol="ETH"),
        await venue.buy("0.01", account_id="new"),
        await venue.sell("0.3"),  # would flip
        await venue.buy("0.01", type=OrderType.LIMIT, limit_price=D(90_000)),
    ):
        assert refused.status is OrderStatus.REJECTED
        assert refused.reason == "trading is halted for all accounts (operator: looks wrong); only reducing is allowed"
        assert not refused.fills
    assert (await venue.sell("0.05")).status is OrderStatus.FILLED
    assert (await venue.sell("0.05", reduce_only=True)).status is OrderStatus.FILLED
    assert await venue.exchange.set_exit_plan("a", "BTC", ExitPlan(stop=D(93_000))) is None
    await guarded.see({"BTC": "92000"})
    assert not venue.exchange.accounts["a"].positions, "the stop has fired"


async def test_a_halt_of_one_account_leaves_the_others_trading(guarded: Guarded) -> None:
    await guarded.venue.buy("0.01")
    await guarded.do(Verb.HALT, "a")
    assert (await guarded.venue.buy("0.01")).status is OrderStatus.REJECTED
    assert (await guarded.venue.buy("0.01", account_id="b")).status is OrderStatus.FILLED
    await guarded.do(Verb.RESUME, "a")
    assert (await guarded.venue.buy("0.01")).status is OrderStatus.FILLED


async def test_an_order_on_its_way_to_the_book_is_stopped_too(database: Database) -> None:
    """It was let in before the halt, and meets its book after it."""
    async with guarding(database, ScriptedSource(), ManualClock(START), SIM_LATENCY_MS="500") as guarded:
        await guarded.see(QUIET)
        order = asyncio.create_task(guarded.venue.buy("0.01"))
        await asyncio.sleep(0.05)
        assert not order.done()
        await guarded.do(Verb.HALT)
        await guarded.see(QUIET)
        assert (await order).status is OrderStatus.REJECTED
        assert "a" not in guarded.venue.exchange.accounts


async def test_a_halt_cancels_what_rests_and_could_open(guarded: Guarded) -> None:
    venue = guarded.venue
    await venue.buy("0.1", leverage=D(5))
    await venue.buy("0.02", type=OrderType.LIMIT, limit_price=D(90_000))
    reducing = await venue.sell("0.1", type=OrderType.LIMIT, limit_price=D(99_000), reduce_only=True)
    outcome = await guarded.do(Verb.HALT)
    assert [(order.account_id, order.symbol, order.quantity, order.limit_price) for order in outcome.cancelled] == [
        ("a", "BTC", D("0.02"), D(90_000))
    ]
    assert (outcome.left, outcome.closed) == ((), ())
    assert [order.id for order in venue.exchange.accounts["a"].resting] == [reducing.id]


async def test_an_account_that_cannot_be_reached_keeps_no_other_from_being_halted(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    venue, cancel = guarded.venue, guarded.venue.exchange.cancel_order
    for account_id in ("a", "b"):
        await venue.buy("0.1", account_id=account_id, leverage=D(5))
        await venue.buy("0.02", account_id=account_id, type=OrderType.LIMIT, limit_price=D(90_000))

    async def cancel_of_b(account_id: str, order_id: str) -> OrderAnswer:
        if account_id == "a":
            raise Unavailable("what became of an order is not known yet")
        return await cancel(account_id, order_id)

    monkeypatch.setattr(venue.exchange, "cancel_order", cancel_of_b)
    for verb in (Verb.HALT, Verb.FLATTEN):
        command = await guarded.ask(verb)
        async with asyncio.timeout(10):
            while venue.exchange.accounts["b"].resting:
                await guarded.operations.poll()
                await asyncio.sleep(0.01)
            while verb is Verb.FLATTEN and any(
                venue.exchange.accounts[account_id].positions for account_id in ("a", "b")
            ):
                await guarded.operations.poll()
                await asyncio.sleep(0.01)
        assert venue.exchange.accounts["a"].resting
        async with venue.database.connection() as conn:
            state = await store.select_command_state(conn, command.id)
        assert state is not None
        assert state.outcome is None, "what is left is not forgotten"
    monkeypatch.undo()
    async with asyncio.timeout(10):
        while venue.exchange.accounts["a"].resting:
            await guarded.operations.poll()
            await asyncio.sleep(0.01)


async def test_a_flatten_that_is_begun_again_makes_new_tries(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    venue, place, tries = guarded.venue, guarded.venue.exchange.place_order, list[str | None]()
    await venue.buy("0.1", leverage=D(5))
    await venue.buy("0.02", type=OrderType.LIMIT, limit_price=D(90_000))

    async def refuse_to_cancel(account_id: str, order_id: str) -> OrderAnswer:
        raise Unavailable("what became of an order is not known yet")

    async def place_and_note(order: Order) -> OrderAnswer:
        tries.append(order.client_order_id)
        return await place(order)

    monkeypatch.setattr(operations, "FLATTEN_S", 0.05)
    monkeypatch.setattr(venue.exchange, "cancel_order", refuse_to_cancel)
    monkeypatch.setattr(venue.exchange, "place_order", place_and_note)
    venue.source.troubles["BTC"] = "its price is an outlier"
    await guarded.ask(Verb.FLATTEN)
    for interruptions in range(1, 4):
        await guarded.operations.poll()
        while caplog.text.count("flatten of all accounts is interrupted") < interruptions:
            await asyncio.sleep(0.005)
    assert len(tries) > 5
    assert len(set(tries)) == len(tries)
    venue.source.troubles.clear()
    monkeypatch.undo()
    async with asyncio.timeout(10):
        while venue.exchange.accounts["a"].positions or venue.exchange.accounts["a"].resting:
            await guarded.operations.poll()
            await asyncio.sleep(0.01)


async def test_a_halted_account_that_cannot_be_reached_keeps_no_other_from_being_swept(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    venue, cancel = guarded.venue, guarded.venue.exchange.cancel_order
    await guarded.do(Verb.HALT)
    monkeypatch.setattr(guarded.halts, "refusal_to_open", lambda _: None)
    for account_id in ("a", "b"):
        await venue.buy("0.02", account_id=account_id, type=OrderType.LIMIT, limit_price=D(90_000))
    monkeypatch.undo()

    async def cancel_of_b(account_id: str, order_id: str) -> OrderAnswer:
        if account_id == "a":
            raise Unavailable("what became of an order is not known yet")
        return await cancel(account_id, order_id)

    monkeypatch.setattr(venue.exchange, "cancel_order", cancel_of_b)
    with pytest.raises(Unavailable):
        await guarded.operations.poll()
    assert [bool(venue.exchange.accounts[account_id].resting) for account_id in ("a", "b")] == [True, False]


async def test_halts_are_published_and_logged(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await guarded.do(Verb.HALT)
        await guarded.do(Verb.HALT)
        await guarded.do(Verb.RESUME)
    told = [event for event in guarded.venue.events if isinstance(event, HaltsChanged)]
    assert [[(halt.account_id, halt.cause) for halt in event.halts] for event in told] == [
        [(None, HaltCause.OPERATOR)],
        [],
    ]
    assert "halted, nothing opens: all accounts: operator: looks wrong (by someone)" in caplog.text
    assert "no longer halted: all accounts" in caplog.text


async def test_a_standby_sees_halts_and_carries_nothing_out(database: Database, guarded: Guarded) -> None:
    venue = guarded.venue
    standby = Guarded(venue)
    command = await guarded.ask(Verb.HALT)
    venue.exchange.suspend()  # as it is while another process leads
    await standby.operations.poll()
    assert len(standby.halts.in_force) == 1
    async with database.connection() as conn:
        state = await store.select_command_state(conn, command.id)
    assert state is not None
    assert not state.taken


async def test_a_halt_survives_a_restart_and_cancels_what_was_left_resting(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with guarding(database, source, clock) as guarded:
        await guarded.see(QUIET)
        await guarded.venue.buy("0.02", type=OrderType.LIMIT, limit_price=D(90_000))
        await guarded.ask(Verb.HALT)  # the service ends before it has seen it
    async with guarding(database, source, clock) as guarded:
        assert (await guarded.venue.buy("0.01")).status is OrderStatus.REJECTED
        async with asyncio.timeout(10):
            while guarded.venue.exchange.accounts["a"].resting:
                await guarded.operations.poll()
                await asyncio.sleep(0.01)


async def test_what_rests_goes_even_when_the_command_was_finished_before(guarded: Guarded) -> None:
    """As after a halt without a service: its command is withdrawn, and the halt holds."""
    await guarded.venue.buy("0.02", type=OrderType.LIMIT, limit_price=D(90_000))
    command = await guarded.ask(Verb.HALT)
    async with guarded.venue.database.connection() as conn:
        assert await store.update_command_withdrawn(conn, command.id, Outcome(note="no service"))
    await guarded.operations.poll()
    assert not guarded.venue.exchange.accounts["a"].resting


async def test_a_leader_that_ends_begins_with_nothing_more(database: Database, guarded: Guarded) -> None:
    await guarded.operations.close()
    command = await guarded.ask(Verb.HALT)
    await guarded.operations.poll()
    async with database.connection() as conn:
        state = await store.select_command_state(conn, command.id)
    assert state is not None
    assert not state.taken
    assert guarded.halts.refusal_to_open("a") is not None


async def test_a_command_that_nobody_carried_out_in_time_is_not_carried_out_later(
    database: Database, guarded: Guarded
) -> None:
    await guarded.venue.buy("0.1")
    command = await guarded.ask(Verb.FLATTEN)
    async with database.connection() as conn:
        await conn.execute("UPDATE commands SET asked_at = now() - interval '11 minutes'")
    outcome = await guarded.outcome(command)
    assert outcome.note == "no service carried it out in time; give the command again"
    assert guarded.venue.exchange.accounts["a"].positions


async def test_while_the_database_is_away_a_halt_holds_and_is_written_later(dsn: str) -> None:
    proxy = FaultyProxy(dsn)
    database = await Database.connect(await proxy.start(), size=4, command_timeout_s=0.5)
    async with guarding(database, ScriptedSource(), ManualClock(START)) as guarded:
        await guarded.see(QUIET)
        proxy.stop()
        await guarded.halts.halt(None, HaltCause.DRAWDOWN, "it fell", "limit")
        assert guarded.halts.refusal_to_open("a") is not None
        with pytest.raises(Unavailable):
            await guarded.halts.load()
        assert guarded.halts.refusal_to_open("a") is not None
        proxy.pass_on()
        async with asyncio.timeout(20):
            while True:
                try:
                    await guarded.halts.load()
                    break
                except Unavailable:
                    await asyncio.sleep(0.01)
        async with database.connection() as conn:
            assert [(halt.cause, halt.reason) for halt in await store.select_halts(conn)] == [
                (HaltCause.DRAWDOWN, "it fell")
            ]
    await database.close()
    await proxy.close()


async def test_a_model_gets_the_reason_of_the_halt(database: Database) -> None:
    async with open_floor(database) as floor:
        await floor.add("m")
        floor.provider.scripts["m"] = [calling(opening()), hold()]
        await floor.agents.start()
        await floor.halts.halt(None, HaltCause.OPERATOR, "venue maintenance", "someone")
        (record,) = await floor.cycle()
        call, _ = record.tool_calls
        assert call.status == "rejected"
        told = floor.provider.turns[1].messages[-1]["content"]
        assert "trading is halted for all accounts (operator: venue maintenance); only reducing is allowed" in told
        assert not floor.exchange.accounts["m"].positions


# --- flattening -------------------------------------------------------------------------------------------------------


async def test_flatten_closes_everything_and_reports_it(database: Database, guarded: Guarded) -> None:
    venue = guarded.venue
    await venue.buy("0.1", leverage=D(5))
    await venue.sell("0.5", symbol="ETH", account_id="b", leverage=D(5))
    await venue.buy("0.02", type=OrderType.LIMIT, limit_price=D(90_000))
    await venue.sell("0.1", type=OrderType.LIMIT, limit_price=D(99_000), reduce_only=True)
    outcome = await guarded.do(Verb.FLATTEN)
    assert all(account.is_idle for account in venue.exchange.accounts.values())
    assert {(order.account_id, order.symbol, order.side, order.quantity) for order in outcome.closed} == {
        ("a", "BTC", "LONG", D("0.1")),
        ("b", "ETH", "SHORT", D("0.5")),
    }
    assert len(outcome.cancelled) == 2
    assert outcome.left == ()
    assert guarded.halts.refusal_to_open("a") is not None, "flattening halts"
    async with database.connection() as conn:
        rows = await conn.fetch("SELECT DISTINCT close_reason FROM orders WHERE status = 'CLOSED'")
        causes = await conn.fetch("SELECT cause, count(*) AS n FROM fills GROUP BY cause ORDER BY cause")
    assert [row["close_reason"] for row in rows] == [Cause.OPERATOR]
    assert [(row["cause"], row["n"]) for row in causes] == [("operator", 2), ("order", 2)]


async def test_flatten_of_one_account_touches_no_other(guarded: Guarded) -> None:
    await guarded.venue.buy("0.01")
    await guarded.venue.buy("0.01", account_id="b")
    await guarded.do(Verb.FLATTEN, "a")
    accounts = guarded.venue.exchange.accounts
    assert (accounts["a"].positions, list(accounts["b"].positions)) == ({}, ["BTC"])
    assert (await guarded.venue.buy("0.01", account_id="b")).status is OrderStatus.FILLED


async def test_what_a_thin_book_leaves_is_closed_with_the_next_ones(guarded: Guarded) -> None:
    venue = guarded.venue
    await venue.buy("2", leverage=D(40))
    await guarded.see(QUIET, size="0.05")  # ten levels: half a coin
    command = await guarded.ask(Verb.FLATTEN)
    flattening = asyncio.create_task(guarded.outcome(command))
    async with asyncio.timeout(10):
        while not flattening.done():
            await guarded.see(QUIET, size="0.05")
            await asyncio.sleep(0.02)
    outcome = await flattening
    assert outcome.left == ()
    assert sum(order.quantity for order in outcome.closed) == D(2)
    assert len(outcome.closed) >= 4


async def test_what_cannot_be_closed_is_left_with_the_reason(guarded: Guarded) -> None:
    await guarded.venue.buy("0.1")
    guarded.venue.source.troubles["BTC"] = "the feed is silent"
    outcome = await guarded.do(Verb.FLATTEN)
    (left,) = outcome.left
    assert (left.account_id, left.what) == ("a", "LONG 0.1 BTC")
    assert left.reason == "BTC is not traded on now: the feed is silent"
    assert "BTC" in guarded.venue.exchange.accounts["a"].positions


async def test_resuming_ends_a_flatten_that_goes_on(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "FLATTEN_S", 60.0)
    await guarded.venue.buy("0.1")
    guarded.venue.source.troubles["BTC"] = "the feed is silent"
    flatten = await guarded.ask(Verb.FLATTEN)
    await guarded.operations.poll()
    await guarded.do(Verb.RESUME)
    (left,) = (await guarded.outcome(flatten)).left
    assert left.reason == "trading was resumed meanwhile"


async def test_the_next_leader_goes_on_with_a_flatten(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with guarding(database, source, clock) as guarded:
        await guarded.see(QUIET)
        await guarded.venue.buy("0.01")
        await guarded.venue.buy("0.2", symbol="ETH")
        source.troubles["ETH"] = "the feed is silent"
        command = await guarded.ask(Verb.FLATTEN)
        await guarded.operations.poll()
        async with asyncio.timeout(10):
            while "BTC" in guarded.venue.exchange.accounts["a"].positions:
                await asyncio.sleep(0.01)
    source.troubles.clear()
    async with guarding(database, source, clock) as guarded:
        await guarded.see(QUIET)
        outcome = await guarded.outcome(command)
        assert (outcome.left, [order.symbol for order in outcome.closed]) == ((), ["ETH"])
        assert guarded.venue.exchange.accounts["a"].is_idle
        await agree_with_rows(guarded.venue)


async def test_the_database_going_away_in_between_doubles_nothing(dsn: str) -> None:
    proxy = FaultyProxy(dsn)
    database = await Database.connect(await proxy.start(), size=4, command_timeout_s=0.5)
    async with guarding(database, ScriptedSource(), ManualClock(START)) as guarded:
        await guarded.see(QUIET)
        for number in range(12):
            await guarded.venue.buy("0.01", account_id=f"a{number}")
        command = await guarded.ask(Verb.FLATTEN)
        await guarded.operations.poll()
        for _ in range(5):
            await asyncio.sleep(0.01)
            proxy.stop()
            await asyncio.sleep(0.05)
            proxy.pass_on()
        async with asyncio.timeout(60):
            while True:
                try:
                    outcome = await guarded.outcome(command)
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
        assert outcome.left == ()
        assert len(outcome.closed) == 12
        assert all(account.is_idle for account in guarded.venue.exchange.accounts.values())
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT count(*) FROM fills WHERE cause = 'operator'") == 12
        await agree_with_rows(guarded.venue)
    await database.close()
    await proxy.close()
