"""The paper exchange while the database is away: nothing half-written, nothing lost, and recovery on its own."""

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal
from random import Random
from typing import Any

import pytest
from support.proxy import FaultyProxy
from support.venue import Venue, agree_with_rows, break_ledger_writer, running
from support.waiting import retried, turns, until

from trader.core.errors import InternalError, LedgerViolated, Unavailable
from trader.core.events import Event, PositionsChanged
from trader.database import pool
from trader.database.pool import Database
from trader.exchange import accounts as books
from trader.exchange import tick_processor
from trader.exchange.domain.account import Account
from trader.exchange.domain.halts import HaltCause
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import ExitPlan, OrderAnswer, OrderSide, OrderStatus, OrderType
from trader.exchange.domain.tick_rules import apply_tick
from trader.exchange.events import HaltsChanged, TradesChanged
from trader.exchange.ledger_writer import LedgerWriter

QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[FaultyProxy]:
    proxy = FaultyProxy(dsn)
    yield proxy
    await proxy.close()


@pytest.fixture
async def venue(proxy: FaultyProxy) -> AsyncIterator[Venue]:
    """An exchange that reaches its database through the proxy, and whose statements time out after half a second."""
    database = await Database.connect(await proxy.start(), size=4, command_timeout_s=0.5)
    async with running(database) as venue:
        await venue.see(QUIET)
        yield venue
        proxy.pass_on()
        await agree_with_rows(venue)
    await database.close()


async def persist(venue: Venue, side: str, quantity: str, **more: object) -> OrderAnswer:
    """Retry with one client order id until there is an answer, as a careful client does."""
    act = venue.buy if side == "buy" else venue.sell
    answer: OrderAnswer = await retried(lambda: act(quantity, **more), Unavailable)
    return answer


async def test_a_posting_that_waits_when_the_writer_closes_is_unavailable(database: Database) -> None:
    writer = LedgerWriter(database)
    posting: Any = None
    waiting = asyncio.create_task(writer.write(posting))
    await asyncio.sleep(0)
    await writer.close()
    await turns()
    assert waiting.done()
    with pytest.raises(Unavailable, match="stopping"):
        await waiting


async def test_without_the_database_orders_are_unavailable_and_later_post_once(
    venue: Venue, proxy: FaultyProxy
) -> None:
    proxy.stop()
    with pytest.raises(Unavailable):
        await venue.buy("0.01", client_order_id="first")
    proxy.pass_on()
    assert (await persist(venue, "buy", "0.01", client_order_id="first")).status is OrderStatus.FILLED
    assert venue.exchange.accounts["a"].positions["BTC"].quantity == Decimal("0.01")


async def test_statements_time_out_on_a_stalled_database_and_its_commits_still_count(
    venue: Venue, proxy: FaultyProxy
) -> None:
    await venue.buy("0.01", client_order_id="warm")
    proxy.stall()
    with pytest.raises(Unavailable):
        await venue.buy("0.02", client_order_id="stalled")
    proxy.pass_on()
    assert (await persist(venue, "buy", "0.02", client_order_id="stalled")).status is OrderStatus.FILLED
    assert venue.exchange.accounts["a"].positions["BTC"].quantity == Decimal("0.03")


async def test_a_hanging_server_stops_neither_the_ledger_writer_nor_the_checkpoint(
    venue: Venue, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    await venue.buy("0.01", client_order_id="warm")
    with monkeypatch.context() as patch:
        patch.setattr(pool, "CANCEL_TIMEOUT_S", 0.1)  # shorter than a statement may take, as in the service
        proxy.stall()
        with pytest.raises(Unavailable):
            await venue.buy("0.02", client_order_id="stalled")
        await venue.exchange.resign()
    proxy.pass_on()
    await venue.exchange.lead()
    assert (await persist(venue, "buy", "0.02", client_order_id="stalled")).status is OrderStatus.FILLED


@pytest.mark.parametrize("error", [KeyError("no such thing"), LedgerViolated("cash is negative")])
async def test_a_posting_that_cannot_be_written_fails_alone(
    venue: Venue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Postings of the same statement still commit, and so do later ones."""
    for account_id in ("a", "b"):
        await venue.exchange.open_account(account_id)

    with monkeypatch.context() as patch:
        statements = break_ledger_writer(patch, "a", error)
        async with asyncio.timeout(10):
            ours, theirs = await asyncio.gather(
                venue.buy("0.01"), venue.buy("0.01", account_id="b"), return_exceptions=True
            )
    assert statements == [["a", "b"], ["a"], ["b"]]
    assert isinstance(theirs, OrderAnswer)
    if isinstance(error, LedgerViolated):
        assert ours is error
    else:
        assert isinstance(ours, InternalError), "never an invitation to retry"
        assert "internal error (KeyError)" in str(ours)
        assert "in broken" in caplog.text, "with its trace"
    assert (await persist(venue, "buy", "0.01")).status is OrderStatus.FILLED


async def test_a_bug_in_writing_one_account_does_not_keep_others_from_following_the_market(
    venue: Venue, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ExitPlan(stop=Decimal(93000))
    for account_id in ("a", "b"):
        await venue.buy("0.1", leverage=Decimal(5), exit_plan=plan, account_id=account_id)

    with monkeypatch.context() as patch:
        break_ledger_writer(patch, "a")
        await venue.see({"BTC": "92500"})
        assert [bool(venue.exchange.accounts[account_id].positions) for account_id in ("a", "b")] == [True, False]
    fired_at = venue.clock.now()
    await venue.see({"BTC": "96000"})
    await venue.recovered()
    async with venue.database.connection() as conn:
        closed = await conn.fetch("SELECT account_id, close_reason, closed_at FROM orders ORDER BY account_id")
    assert [tuple(row) for row in closed] == [("a", "stop", fired_at), ("b", "stop", fired_at)]


async def test_ticks_missed_without_the_database_are_applied_at_their_own_time(
    venue: Venue, proxy: FaultyProxy
) -> None:
    await venue.buy("0.1", leverage=Decimal(5), exit_plan=ExitPlan(stop=Decimal(93000)))
    proxy.stop()
    await venue.see({"BTC": "92500"})
    fired_at = venue.clock.now()
    await venue.see({"BTC": "96000"})
    assert venue.exchange.accounts["a"].positions, "nothing can have been posted"
    proxy.pass_on()

    async def has_fired() -> bool:
        await venue.see({"BTC": "96000"})
        return not venue.exchange.accounts["a"].positions

    await until(has_fired)
    async with venue.database.connection() as conn:
        row = await conn.fetchrow("SELECT close_reason, exit_notional, closed_at FROM orders")
    assert row is not None
    assert tuple(row) == ("stop", Decimal("9249.99"), fired_at)


async def test_an_order_storm_over_randomly_cut_connections_posts_each_order_once(
    venue: Venue, proxy: FaultyProxy
) -> None:
    rng = Random(7)
    answers: dict[str, OrderAnswer] = {}

    async def trade(account_id: str, n: int) -> None:
        side = rng.choice(["buy", "sell"])
        limit = {"type": OrderType.LIMIT, "limit_price": Decimal(rng.choice([93000, 95000]))} if n % 3 == 0 else {}
        client_order_id = f"{account_id}-{n}"
        answers[client_order_id] = await persist(
            venue, side, "0.01", account_id=account_id, leverage=Decimal(3), client_order_id=client_order_id, **limit
        )

    async def client(account_id: str) -> None:
        n = 0
        while n < 12 or not sabotage.done():
            await trade(account_id, n)
            n += 1

    async def saboteur() -> None:
        for _ in range(40):  # bounded: on a slow machine nothing might ever get through between cuts
            proxy.cut_after(rng.randrange(1, 20_000))
            await asyncio.sleep(rng.random() * 0.1)  # the moments of the cuts are random
            if rng.random() < 0.2:
                proxy.cut()
        proxy.pass_on()

    sabotage = asyncio.create_task(saboteur())
    try:
        async with asyncio.timeout(90):
            await asyncio.gather(*(client(f"m{n}") for n in range(8)))
    finally:
        sabotage.cancel()
    proxy.pass_on()
    for n in range(8):  # rereads every account in doubt from its rows
        await persist(venue, "buy", "0.01", account_id=f"m{n}", client_order_id="last")
    async with venue.database.connection() as conn:
        rows = await conn.fetch("SELECT id, client_order_id FROM order_requests WHERE client_order_id <> 'last'")
    assert {row["client_order_id"]: row["id"] for row in rows} == {name: answer.id for name, answer in answers.items()}
    assert len(rows) == len(answers) >= 96
    assert proxy.connections > 8, "the storm must have met cut connections: the pool alone makes no more than 4"


async def test_an_order_waiting_for_its_book_when_the_term_ends_is_unavailable(database: Database) -> None:
    async with running(database, SIM_LATENCY_MS="200") as venue:
        await venue.see(QUIET)
        waiting = asyncio.create_task(venue.buy("0.01", client_order_id="waits"))
        await until(lambda: venue.market.orders_waiting)
        venue.exchange.suspend()
        await venue.exchange.resign()
        await venue.see(QUIET)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(waiting, 5)
        await venue.exchange.lead()
        assert "a" not in venue.exchange.accounts
        await agree_with_rows(venue)


async def test_an_order_that_cannot_finish_when_the_term_ends_is_unavailable(
    venue: Venue, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "FINISH_S", 0.05)
    await venue.buy("0.01", client_order_id="warm")
    proxy.stall()
    orders = [asyncio.create_task(venue.buy("0.02")) for _ in range(2)]
    await asyncio.sleep(0.1)  # both wait for the stalled database; no event shows it
    venue.exchange.suspend()
    await venue.exchange.resign()
    ended = await asyncio.wait_for(asyncio.gather(*orders, return_exceptions=True), 5)
    assert [type(outcome) for outcome in ended] == [Unavailable] * 2
    proxy.pass_on()
    await venue.exchange.lead()


async def test_shared_depth_returns_if_the_commit_that_took_it_fails(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(database, SHARED_DEPTH="on") as venue:
        await venue.see(QUIET)
        for account_id in ("a", "b"):
            await venue.exchange.open_account(account_id)
        with monkeypatch.context() as patch:
            break_ledger_writer(patch, "a")
            with pytest.raises(InternalError):
                await venue.buy("10", leverage=Decimal(40))
        answer = await venue.buy("1", account_id="b", leverage=Decimal(40))
        assert answer.average_price == Decimal("94000.1"), "the best level is whole again"
        await persist(venue, "buy", "0.01", account_id="a")
        await agree_with_rows(venue)


async def test_a_bug_at_one_accounts_tick_stops_no_other_and_the_account_catches_up(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(account: Account, *more: Any) -> Posting | None:
        if account.id == "a":
            raise ZeroDivisionError
        return apply_tick(account, *more)

    async with running(database) as venue:
        await venue.see(QUIET)
        for account_id in ("a", "b"):
            await venue.buy("0.1", account_id=account_id, leverage=Decimal(5), exit_plan=ExitPlan(stop=Decimal(93000)))
        with monkeypatch.context() as patch:
            patch.setattr(tick_processor, "apply_tick", broken)
            await venue.see({"BTC": "92500"})
            assert [bool(venue.exchange.accounts[account_id].positions) for account_id in ("a", "b")] == [True, False]
            with pytest.raises(InternalError):
                await venue.buy("0.01")
        fired_at = venue.clock.now()
        await venue.see(QUIET)
        await venue.recovered()
        async with database.connection() as conn:
            closed = await conn.fetch("SELECT account_id, closed_at FROM orders ORDER BY account_id")
        assert [tuple(row) for row in closed] == [("a", fired_at), ("b", fired_at)]
        assert "a bug in applying the tick" in caplog.text
        await agree_with_rows(venue)


async def test_a_pair_whose_write_fails_leaves_nothing_and_can_be_placed_again(
    venue: Venue, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = {"client_order_id": "1"}, {"symbol": "ETH", "side": OrderSide.SELL, "client_order_id": "2"}
    with monkeypatch.context() as patch:
        break_ledger_writer(patch)
        with pytest.raises(InternalError):
            await venue.pair(*pair)
    async with venue.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests") == 0
    assert [answer.status for answer in await venue.pair(*pair)] == [OrderStatus.FILLED] * 2
    assert {*venue.exchange.accounts["a"].positions} == {"BTC", "ETH"}


async def test_a_bug_in_a_listener_changes_no_answer_and_reaches_no_other_listener(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(event: Event) -> None:
        raise KeyError(type(event).__name__)

    async with running(database) as venue:
        seen: list[Event] = []
        venue.bus.subscribe(failing)
        venue.bus.subscribe(seen.append)
        await venue.see({"BTC": "100000"})
        answers = [await venue.buy("0.01"), await venue.sell("0.01"), await venue.buy("0.01", client_order_id="again")]
        assert {answer.status for answer in answers} == {OrderStatus.FILLED}
        await venue.halts.halt("a", HaltCause.OPERATOR, "a test", "a test")
        await venue.exchange.reset_account("a")
        assert seen == venue.events
        assert {type(event) for event in seen} == {PositionsChanged, TradesChanged, HaltsChanged}
    failures = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(failures) == len(seen)
    assert all(record.exc_info is not None for record in failures)


async def test_orders_that_a_trigger_of_the_database_refuses_are_failing_in_its_words(venue: Venue) -> None:
    level = venue.accounts.service_level.outcomes
    async with venue.database.connection() as conn:
        await conn.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no fills'; END $$"
        )
        await conn.execute("CREATE TRIGGER refuse BEFORE INSERT ON fills FOR EACH ROW EXECUTE FUNCTION refuse()")
    for _ in range(3):
        with pytest.raises(InternalError):
            await venue.buy("0.1")
    assert [each.text for each in level.failing()] == ["3 of the last 3 orders failed: RaiseError: no fills"]
    async with venue.database.connection() as conn:
        await conn.execute("DROP TRIGGER refuse ON fills")
    for _ in range(3):
        await venue.buy("0.1")
    assert list(level.failing()) == []
