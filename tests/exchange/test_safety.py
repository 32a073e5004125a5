"""Halting, resuming and flattening a running exchange, on a real PostgreSQL."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from decimal import Decimal
from functools import partial

import pytest
from support.manual_clock import ManualClock
from support.operated_exchange import OperatedExchange, operating
from support.proxy import behind_proxy
from support.scripted import START, ScriptedSource
from support.trading_floor import calling, hold, open_floor, opening
from support.venue import Venue, agree_with_rows
from support.waiting import becomes, retried, until

from trader.core.errors import Unavailable
from trader.database.pool import Database
from trader.exchange.domain import halts as halt_rules
from trader.exchange.domain.halts import CommandOutcome, HaltCause, Verb
from trader.exchange.domain.orders import Cause, ExitPlan, Order, OrderAnswer, OrderStatus, OrderType
from trader.exchange.events import HaltsChanged
from trader.exchange.sql import halts as store
from trader.operations import operator_commands as operations

D = Decimal
QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once, for one second in total."""
    monkeypatch.setattr(operations, "RETRY_S", 0.01)
    monkeypatch.setattr(operations, "FLATTEN_S", 1.0)


@pytest.fixture
async def operated(database: Database) -> AsyncIterator[OperatedExchange]:
    async with operating(database) as operated:
        await operated.see(QUIET)
        yield operated
        await agree_with_rows(operated.venue)


# --- halts ------------------------------------------------------------------------------------------------------------


async def test_a_halt_stops_opening_and_adding_and_allows_the_rest(operated: OperatedExchange) -> None:
    venue = operated.venue
    await venue.buy("0.2", leverage=D(5), exit_plan=ExitPlan(stop=D(90_000)))
    await operated.do(Verb.HALT)
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
    await operated.see({"BTC": "92000"})
    assert not venue.exchange.accounts["a"].positions, "the stop has fired"


async def test_a_halt_of_one_account_leaves_the_others_trading(operated: OperatedExchange) -> None:
    await operated.venue.buy("0.01")
    await operated.do(Verb.HALT, "a")
    assert (await operated.venue.buy("0.01")).status is OrderStatus.REJECTED
    assert (await operated.venue.buy("0.01", account_id="b")).status is OrderStatus.FILLED
    await operated.do(Verb.RESUME, "a")
    assert (await operated.venue.buy("0.01")).status is OrderStatus.FILLED


async def test_an_order_in_flight_is_halted_too(database: Database) -> None:
    """It was accepted before the halt, and meets its book after it."""
    async with operating(database, SIM_LATENCY_MS="500") as operated:
        await operated.see(QUIET)
        order = asyncio.create_task(operated.venue.buy("0.01"))
        await until(lambda: operated.venue.market.orders_waiting)
        await operated.do(Verb.HALT)
        await operated.see(QUIET)
        assert (await order).status is OrderStatus.REJECTED
        assert "a" not in operated.venue.exchange.accounts


async def test_a_halt_cancels_resting_orders_that_could_open(operated: OperatedExchange) -> None:
    venue = operated.venue
    await venue.buy("0.1", leverage=D(5))
    await venue.buy("0.02", type=OrderType.LIMIT, limit_price=D(90_000))
    reducing = await venue.sell("0.1", type=OrderType.LIMIT, limit_price=D(99_000), reduce_only=True)
    outcome = await operated.do(Verb.HALT)
    assert [(order.account_id, order.symbol, order.quantity, order.limit_price) for order in outcome.cancelled] == [
        ("a", "BTC", D("0.02"), D(90_000))
    ]
    assert (outcome.left, outcome.closed) == ((), ())
    assert [order.id for order in venue.exchange.accounts["a"].resting] == [reducing.id]


def make_unreachable(venue: Venue, unreachable: str, patch: pytest.MonkeyPatch) -> None:
    """Let no order of this account be canceled."""
    cancel = venue.exchange.cancel_order

    async def cancel_others(account_id: str, order_id: str) -> OrderAnswer:
        if account_id == unreachable:
            raise Unavailable("what became of an order is not known yet")
        return await cancel(account_id, order_id)

    patch.setattr(venue.exchange, "cancel_order", cancel_others)


async def test_an_unreachable_account_does_not_keep_others_from_being_halted(
    operated: OperatedExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    venue = operated.venue
    for account_id in ("a", "b"):
        await venue.buy("0.1", account_id=account_id, leverage=D(5))
        await venue.buy("0.02", account_id=account_id, type=OrderType.LIMIT, limit_price=D(90_000))

    make_unreachable(venue, "a", monkeypatch)
    for verb in (Verb.HALT, Verb.FLATTEN):
        command = await operated.ask(verb)
        await operated.polled_until(lambda: not venue.exchange.accounts["b"].resting)
        if verb is Verb.FLATTEN:
            await operated.polled_until(lambda: not any(venue.exchange.accounts[name].positions for name in ("a", "b")))
        assert venue.exchange.accounts["a"].resting
        assert (await operated.state(command)).outcome is None, "the remaining work is not forgotten"
    monkeypatch.undo()
    await operated.polled_until(lambda: not venue.exchange.accounts["a"].resting)


async def test_a_restarted_flatten_makes_new_attempts(
    operated: OperatedExchange, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    venue, place, tries = operated.venue, operated.venue.exchange.place_orders, list[str | None]()
    await venue.buy("0.1", leverage=D(5))
    await venue.buy("0.02", type=OrderType.LIMIT, limit_price=D(90_000))

    async def refuse_to_cancel(account_id: str, order_id: str) -> OrderAnswer:
        raise Unavailable("what became of an order is not known yet")

    async def place_and_note(*orders: Order) -> Sequence[OrderAnswer]:
        tries.extend(order.client_order_id for order in orders)
        return await place(*orders)

    monkeypatch.setattr(operations, "FLATTEN_S", 0.05)
    monkeypatch.setattr(venue.exchange, "cancel_order", refuse_to_cancel)
    monkeypatch.setattr(venue.exchange, "place_orders", place_and_note)
    venue.source.troubles["BTC"] = "its price is an outlier"
    await operated.ask(Verb.FLATTEN)

    def interruptions() -> int:
        return caplog.text.count("flatten of all accounts is interrupted")

    count = 0
    while count < 3 or len(tries) < 6:  # a busy machine makes few attempts before each interruption
        count += 1
        await operated.operations.poll()
        await becomes(interruptions, count)
    assert len(set(tries)) == len(tries)
    venue.source.troubles.clear()
    monkeypatch.undo()
    await operated.polled_until(lambda: venue.exchange.accounts["a"].is_idle)


async def test_an_unreachable_halted_account_does_not_keep_others_from_being_swept(
    operated: OperatedExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    venue = operated.venue
    await operated.do(Verb.HALT)
    monkeypatch.setattr(halt_rules, "refusal_to_open", lambda *_: None)
    for account_id in ("a", "b"):
        await venue.buy("0.02", account_id=account_id, type=OrderType.LIMIT, limit_price=D(90_000))
    monkeypatch.undo()

    make_unreachable(venue, "a", monkeypatch)
    with pytest.raises(Unavailable):
        await operated.operations.poll()
    assert [bool(venue.exchange.accounts[account_id].resting) for account_id in ("a", "b")] == [True, False]


async def test_halts_are_published_and_logged(operated: OperatedExchange, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await operated.do(Verb.HALT)
        await operated.do(Verb.HALT)
        await operated.do(Verb.RESUME)
    told = [event for event in operated.venue.events if isinstance(event, HaltsChanged)]
    assert [[(halt.account_id, halt.cause) for halt in event.halts] for event in told] == [
        [(None, HaltCause.OPERATOR)],
        [],
    ]
    assert "halted, no position may be opened: all accounts: operator: looks wrong (by someone)" in caplog.text
    assert "no longer halted: all accounts" in caplog.text


async def test_a_standby_sees_halts_but_executes_nothing(database: Database, operated: OperatedExchange) -> None:
    venue = operated.venue
    standby = OperatedExchange(venue)
    command = await operated.ask(Verb.HALT)
    venue.exchange.suspend()  # as while another process leads
    await standby.operations.poll()
    assert len(standby.halts.in_force) == 1
    assert not (await operated.state(command)).taken


async def test_a_halt_survives_a_restart_and_cancels_leftover_resting_orders(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with operating(database, source, clock) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.02", type=OrderType.LIMIT, limit_price=D(90_000))
        await operated.ask(Verb.HALT)  # the service ends before it has seen this
    async with operating(database, source, clock) as operated:
        assert (await operated.venue.buy("0.01")).status is OrderStatus.REJECTED
        await operated.polled_until(lambda: not operated.venue.exchange.accounts["a"].resting)


async def test_resting_orders_are_canceled_even_if_the_command_has_already_finished(
    operated: OperatedExchange,
) -> None:
    """As after a halt without a service: its command is withdrawn, but the halt holds."""
    await operated.venue.buy("0.02", type=OrderType.LIMIT, limit_price=D(90_000))
    command = await operated.ask(Verb.HALT)
    async with operated.venue.database.connection() as conn:
        assert await store.update_command_withdrawn(conn, command.id, CommandOutcome(note="no service"))
    await operated.operations.poll()
    assert not operated.venue.exchange.accounts["a"].resting


async def test_a_leader_that_resigns_starts_nothing_more(database: Database, operated: OperatedExchange) -> None:
    await operated.operations.close()
    command = await operated.ask(Verb.HALT)
    await operated.operations.poll()
    assert not (await operated.state(command)).taken
    assert operated.halts.refusal_to_open("a") is not None


async def test_a_command_not_executed_in_time_is_not_executed_later(
    database: Database, operated: OperatedExchange
) -> None:
    await operated.venue.buy("0.1")
    command = await operated.ask(Verb.FLATTEN)
    async with database.connection() as conn:
        await conn.execute("UPDATE commands SET asked_at = now() - interval '11 minutes'")
    outcome = await operated.outcome(command)
    assert outcome.note == "no service carried it out in time; give the command again"
    assert operated.venue.exchange.accounts["a"].positions


async def test_a_halt_holds_without_the_database_and_is_written_later(dsn: str) -> None:
    async with behind_proxy(dsn) as (proxy, database), operating(database) as operated:
        await operated.see(QUIET)
        proxy.stop()
        await operated.halts.halt(None, HaltCause.DRAWDOWN, "it fell", "limit")
        assert operated.halts.refusal_to_open("a") is not None
        with pytest.raises(Unavailable):
            await operated.halts.load()
        assert operated.halts.refusal_to_open("a") is not None
        proxy.pass_on()
        await retried(operated.halts.load, Unavailable)
        async with database.connection() as conn:
            assert [(halt.cause, halt.reason) for halt in await store.select_halts(conn)] == [
                (HaltCause.DRAWDOWN, "it fell")
            ]


async def test_a_rule_that_lifts_its_unwritten_halt_lifts_it_for_good(dsn: str) -> None:
    async with behind_proxy(dsn) as (proxy, database), operating(database) as operated:
        term = operated.venue.exchange.term
        assert term is not None
        proxy.stop()
        await operated.halts.halt(None, HaltCause.HOURLY_BOUND, "it fell", "limit", term=term)
        proxy.pass_on()
        await retried(partial(operated.halts.lift, HaltCause.HOURLY_BOUND, "limit", term=term), Unavailable)
        assert operated.halts.refusal_to_open("a") is None
        await operated.halts.load()
        assert operated.halts.refusal_to_open("a") is None


async def test_a_model_receives_the_reason_for_the_halt(database: Database) -> None:
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


async def test_flatten_closes_everything_and_reports_it(database: Database, operated: OperatedExchange) -> None:
    venue = operated.venue
    await venue.buy("0.1", leverage=D(5))
    await venue.sell("0.5", symbol="ETH", account_id="b", leverage=D(5))
    await venue.buy("0.02", type=OrderType.LIMIT, limit_price=D(90_000))
    await venue.sell("0.1", type=OrderType.LIMIT, limit_price=D(99_000), reduce_only=True)
    outcome = await operated.do(Verb.FLATTEN)
    assert all(account.is_idle for account in venue.exchange.accounts.values())
    assert {(order.account_id, order.symbol, order.side, order.quantity) for order in outcome.closed} == {
        ("a", "BTC", "LONG", D("0.1")),
        ("b", "ETH", "SHORT", D("0.5")),
    }
    assert len(outcome.cancelled) == 2
    assert outcome.left == ()
    assert operated.halts.refusal_to_open("a") is not None, "flattening halts"
    async with database.connection() as conn:
        rows = await conn.fetch("SELECT DISTINCT close_reason FROM orders WHERE status = 'CLOSED'")
        causes = await conn.fetch("SELECT cause, count(*) AS n FROM fills GROUP BY cause ORDER BY cause")
    assert [row["close_reason"] for row in rows] == [Cause.OPERATOR]
    assert [(row["cause"], row["n"]) for row in causes] == [("operator", 2), ("order", 2)]


async def test_flatten_of_one_account_touches_no_other(operated: OperatedExchange) -> None:
    await operated.venue.buy("0.01")
    await operated.venue.buy("0.01", account_id="b")
    await operated.do(Verb.FLATTEN, "a")
    accounts = operated.venue.exchange.accounts
    assert (accounts["a"].positions, list(accounts["b"].positions)) == ({}, ["BTC"])
    assert (await operated.venue.buy("0.01", account_id="b")).status is OrderStatus.FILLED


async def test_positions_left_open_by_a_thin_book_are_closed_in_later_books(operated: OperatedExchange) -> None:
    venue = operated.venue
    await venue.buy("2", leverage=D(40))
    await operated.see(QUIET, size="0.05")  # ten levels: half a coin
    command = await operated.ask(Verb.FLATTEN)
    flattening = asyncio.create_task(operated.outcome(command))
    async with asyncio.timeout(60):
        while not flattening.done():
            await operated.see(QUIET, size="0.05")
            await asyncio.sleep(0.02)  # fifty books a second: a flatten gives up after a while
    outcome = await flattening
    assert outcome.left == ()
    assert sum(order.quantity for order in outcome.closed) == D(2)
    assert len(outcome.closed) >= 4


async def test_positions_that_cannot_be_closed_are_reported_with_the_reason(operated: OperatedExchange) -> None:
    await operated.venue.buy("0.1")
    operated.venue.source.troubles["BTC"] = "the feed is silent"
    outcome = await operated.do(Verb.FLATTEN)
    (left,) = outcome.left
    assert (left.account_id, left.what) == ("a", "LONG 0.1 BTC")
    assert left.reason == "BTC cannot be traded now: the feed is silent"
    assert "BTC" in operated.venue.exchange.accounts["a"].positions


async def test_resuming_ends_a_flatten_in_progress(operated: OperatedExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "FLATTEN_S", 60.0)
    await operated.venue.buy("0.1")
    operated.venue.source.troubles["BTC"] = "the feed is silent"
    flatten = await operated.ask(Verb.FLATTEN)
    await operated.operations.poll()
    await operated.do(Verb.RESUME)
    (left,) = (await operated.outcome(flatten)).left
    assert left.reason == "trading was resumed in the meantime"


async def test_the_next_leader_continues_a_flatten(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with operating(database, source, clock) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.01")
        await operated.venue.buy("0.2", symbol="ETH")
        source.troubles["ETH"] = "the feed is silent"
        command = await operated.ask(Verb.FLATTEN)
        await operated.operations.poll()
        await until(lambda: "BTC" not in operated.venue.exchange.accounts["a"].positions)
    source.troubles.clear()
    async with operating(database, source, clock) as operated:
        await operated.see(QUIET)
        outcome = await operated.outcome(command)
        assert (outcome.left, [order.symbol for order in outcome.closed]) == ((), ["ETH"])
        assert operated.venue.exchange.accounts["a"].is_idle
        await agree_with_rows(operated.venue)


async def test_losing_the_database_in_the_middle_duplicates_nothing(dsn: str) -> None:
    async with behind_proxy(dsn) as (proxy, database), operating(database) as operated:
        await operated.see(QUIET)
        for number in range(12):
            await operated.venue.buy("0.01", account_id=f"a{number}")
        command = await operated.ask(Verb.FLATTEN)
        await operated.operations.poll()
        for _ in range(5):  # the flatten continues meanwhile: each cut comes at another point of it
            await asyncio.sleep(0.01)
            proxy.stop()
            await asyncio.sleep(0.05)  # long enough for some statements to fail
            proxy.pass_on()
        outcome = await retried(lambda: operated.outcome(command), Unavailable)
        assert outcome.left == ()
        assert len(outcome.closed) == 12
        assert all(account.is_idle for account in operated.venue.exchange.accounts.values())
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT count(*) FROM fills WHERE cause = 'operator'") == 12
        await agree_with_rows(operated.venue)
