"""The paper exchange on a real PostgreSQL: every answer is in the rows, and a restart rebuilds everything from them."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from decimal import Decimal
from operator import itemgetter
from typing import Any

import pytest
from support.manual_clock import ManualClock
from support.run_profile import is_nightly
from support.scripted import START, ScriptedSource
from support.venue import Venue, agree_with_rows, running, without_depth
from support.waiting import becomes

from trader.core.errors import Conflict, InvalidInput, NotFound, StartError, Unavailable
from trader.core.events import EventBus, PositionsChanged
from trader.core.money import format_decimal
from trader.database.pool import Connection, Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.account import Account, all_taken
from trader.exchange.domain.halts import HaltCause
from trader.exchange.domain.ledger import unopened_account
from trader.exchange.domain.orders import OrderSide, OrderStatus, OrderType
from trader.exchange.events import TradesChanged, log_trades
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.sql.accounts import DatabaseIdentity, Deletion, delete_account, insert_account, select_accounts

QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}


@pytest.fixture
async def venue(database: Database) -> AsyncIterator[Venue]:
    async with running(database) as venue:
        await venue.see(QUIET)
        yield venue
        await agree_with_rows(venue)


async def test_a_market_order_fills_from_the_book_and_is_stored(venue: Venue) -> None:
    answer = await venue.buy("1.5", leverage=Decimal(20), confidence=Decimal(70))
    assert answer.status is OrderStatus.FILLED
    assert [(fill.price, fill.quantity) for fill in answer.fills] == [
        (Decimal("94000.1"), Decimal(1)),
        (Decimal("94000.2"), Decimal("0.5")),
    ]
    assert answer.total_fees == (Decimal("94000.1") + Decimal("47000.1")) * Decimal("0.0005")
    position = venue.exchange.accounts["a"].positions["BTC"]
    assert position.entry_notional == Decimal("141000.2")
    assert any(isinstance(event, PositionsChanged) for event in venue.events)


async def test_latency_below_a_second_decides_which_book_an_order_meets(database: Database) -> None:
    clock = ManualClock(START)
    async with running(database, ScriptedSource(), clock, SIM_LATENCY_MS="250") as venue:
        await venue.see(QUIET)
        orders = []
        for arrival_ms in (750, 751):  # after the second of the last book
            await clock.advance(START + timedelta(milliseconds=1000 + arrival_ms) - clock.now())
            orders.append(asyncio.create_task(venue.buy("0.1", account_id=str(arrival_ms))))
            await becomes(lambda: venue.market.orders_waiting, len(orders))
        for order, mid in zip(orders, ("95000", "96000"), strict=True):
            assert not order.done()
            await venue.see({"BTC": mid}, after_s=1 - clock.now().microsecond / 1_000_000)
            assert [fill.price for fill in (await order).fills] == [Decimal(f"{mid}.1")]


async def test_more_accounts_trade_at_once_than_one_statement_posts(venue: Venue) -> None:
    """Each order is answered, without another one that would wake the ledger."""
    names = [str(number) for number in range(70)]
    await asyncio.gather(*map(venue.exchange.open_account, names))
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*(venue.buy("0.01", account_id=name) for name in names))
    assert {answer.status for answer in answers} == {OrderStatus.FILLED}


@pytest.mark.parametrize("seed", range(20 if is_nightly() else 2))
async def test_memory_versions_and_depth_equal_the_rows_after_any_history(database: Database, seed: int) -> None:
    """So do a follower's; and neither changes an account without a new version, by which others keep what they read."""
    chance, price = random.Random(seed), 94_000
    async with running(database, SHARED_DEPTH="on") as venue:
        await venue.see(QUIET)
        followed = Accounts(database, LedgerWriter(database), EventBus())
        known: dict[Accounts, tuple[int, Mapping[str, Account]]] = {}
        for _ in range(40):
            name = chance.choice("abcd")
            match chance.choice(
                ["order", "order", "limit", "tick", "tick", "reset", "remove", "open", "doubt", "term"]
            ):
                case "order":
                    await asyncio.gather(venue.buy("0.5", account_id=name), venue.sell("0.7", account_id="a"))
                case "limit":
                    await venue.buy("0.1", account_id=name, type=OrderType.LIMIT, limit_price=Decimal(price - 50))
                case "tick":
                    price += chance.randint(-100, 100)
                    await venue.see({"BTC": str(price)}, after_s=chance.choice([1, 5]))
                case "reset":
                    await venue.exchange.reset_account("a")
                case "open":
                    await venue.exchange.open_account(f"new-{name}")
                case "remove":
                    await venue.exchange.remove_account(f"new-{name}")
                case "doubt":  # its last commit was not confirmed
                    venue.accounts.mark_missed("a")
                    await venue.accounts.settle("a")
                case "term":
                    await venue.exchange.resign()
                    await venue.exchange.lead()
            await agree_with_rows(venue)
            await followed.follow(DatabaseIdentity(venue.market.identity, "simulated"))
            for accounts in (venue.accounts, followed):
                version, before = known.get(accounts, (-1, {}))
                assert accounts.version > version or dict(accounts.by_id) == before
                known[accounts] = accounts.version, dict(accounts.by_id)
            ours, theirs = (map(without_depth, each.by_id.values()) for each in (venue.accounts, followed))
            assert sorted(ours, key=itemgetter("id")) == sorted(theirs, key=itemgetter("id"))
            assert venue.accounts.taken("a") == all_taken(venue.accounts.by_id.values())


async def test_the_same_client_order_id_trades_once(venue: Venue) -> None:
    answers = await asyncio.gather(*(venue.buy("0.01", client_order_id="once") for _ in range(10)))
    assert len({answer.id for answer in answers}) == 1
    assert venue.exchange.accounts["a"].positions["BTC"].quantity == Decimal("0.01")
    limit: dict[str, Any] = {"client_order_id": "too-much", "type": OrderType.LIMIT, "limit_price": Decimal(90000)}
    refused = await venue.buy("1000", **limit)
    assert refused.status is OrderStatus.REJECTED
    assert await venue.buy("1000", **limit) == refused


@pytest.mark.parametrize("other", [{"quantity": "0.02"}, {"leverage": Decimal(3)}, {"symbol": "ETH"}])
async def test_a_client_order_id_with_different_contents_is_a_conflict(venue: Venue, other: dict[str, Any]) -> None:
    await venue.buy("0.01", client_order_id="once")
    with pytest.raises(Conflict, match=r"the clientOrderId 'once' was used for another order of a: buy 0\.01 BTC"):
        await venue.buy(**{"quantity": "0.01", "client_order_id": "once", **other})
    assert venue.exchange.accounts["a"].positions["BTC"].quantity == Decimal("0.01")


async def test_concurrent_orders_of_many_accounts_are_all_posted(venue: Venue) -> None:
    answers = await asyncio.gather(*(venue.buy("0.01", account_id=f"m{n % 20}") for n in range(100)))
    assert {answer.status for answer in answers} == {OrderStatus.FILLED}
    assert len({answer.id for answer in answers}) == 100
    for n in range(20):
        assert venue.exchange.accounts[f"m{n}"].positions["BTC"].quantity == Decimal("0.05")


async def test_a_resting_order_reserves_margin_fills_as_maker_and_can_be_canceled(venue: Venue) -> None:
    resting = await venue.buy("0.05", type=OrderType.LIMIT, limit_price=Decimal("93000.05"))
    other = await venue.buy("0.01", type=OrderType.LIMIT, limit_price=Decimal(90000))
    assert resting.status is OrderStatus.RESTING
    await venue.see({"BTC": "92990"})
    account = venue.exchange.accounts["a"]
    assert account.positions["BTC"].entry_notional == Decimal(93000) * Decimal("0.05")
    assert account.fees == Decimal(93000) * Decimal("0.05") * Decimal("0.0002")
    cancelled = await venue.exchange.cancel_order("a", str(other.id))
    assert cancelled.status is OrderStatus.CANCELLED
    assert (await venue.exchange.cancel_order("a", str(resting.id))).status is OrderStatus.FILLED
    with pytest.raises(NotFound):
        await venue.exchange.cancel_order("a", "no-such-order")
    with pytest.raises(NotFound):
        await venue.exchange.cancel_order("b", str(other.id))


async def test_the_answer_of_a_canceled_order_includes_its_realized_pnl(venue: Venue) -> None:
    await venue.buy("0.1")
    target = await venue.sell("0.1", type=OrderType.LIMIT, limit_price=Decimal(95000), reduce_only=True)
    await venue.see({"BTC": "95000.1"}, size="0.04")  # one level at or beyond the limit
    cancelled = await venue.exchange.cancel_order("a", str(target.id))
    account = venue.exchange.accounts["a"]
    assert (cancelled.status, cancelled.total_quantity) == (OrderStatus.CANCELLED, Decimal("0.04"))
    assert cancelled.realized_pnl == account.realized > 0
    flip = await venue.sell("0.1", type=OrderType.LIMIT, limit_price=Decimal(96000))
    await venue.see({"BTC": "96000.1"})
    filled = await venue.exchange.cancel_order("a", str(flip.id))
    assert filled.status is OrderStatus.FILLED
    assert filled.realized_pnl == venue.exchange.accounts["a"].realized - account.realized > 0


async def test_the_answer_of_a_closing_resting_order_includes_its_realized_pnl(venue: Venue) -> None:
    await venue.buy("0.05")
    entry = venue.exchange.accounts["a"].positions["BTC"].entry_price
    flip = await venue.sell("0.08", type=OrderType.LIMIT, limit_price=Decimal(95000))
    await venue.sell("0.01")  # another order closes part of the position
    by_others = venue.exchange.accounts["a"].realized
    await venue.see({"BTC": "95100"})
    answer = await venue.exchange.cancel_order("a", str(flip.id))
    assert (answer.status, answer.total_quantity) == (OrderStatus.FILLED, Decimal("0.08"))
    assert answer.realized_pnl == Decimal("0.04") * (95000 - entry)
    assert venue.exchange.accounts["a"].realized == by_others + answer.realized_pnl
    await venue.see({"BTC": "93000"})
    await venue.buy("0.04")
    assert await venue.exchange.cancel_order("a", str(flip.id)) == answer, "others closed the rest"


async def test_completed_trades_are_logged(venue: Venue, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trader.exchange")
    await venue.buy("2", leverage=Decimal(40))
    await venue.sell("0.1")
    await venue.see({"BTC": "80000"}, size="5")
    for event in venue.events:
        log_trades(event)
    records = [record for record in caplog.records if record.getMessage().startswith("closed by")]
    (event,) = [event for event in venue.events if isinstance(event, TradesChanged)][-1:]
    trade = event.trades[-1]
    net = trade.gross_pnl - trade.fees + trade.funding
    assert [record.levelno for record in records] == [logging.INFO, *[logging.WARNING] * (len(records) - 1)]
    assert records[0].getMessage().startswith("closed by order: a: LONG 0.1 BTC at ")
    assert records[-1].getMessage().startswith("closed by liquidation: a: LONG ")
    assert records[-1].getMessage().endswith(f", net {format_decimal(net)}")


async def test_invalid_orders_are_refused_with_a_named_field(venue: Venue) -> None:
    with pytest.raises(InvalidInput, match="doge"):
        await venue.buy("1", symbol="doge")
    with pytest.raises(InvalidInput, match="within 1 to 40"):
        await venue.buy("1", leverage=Decimal(41))
    with pytest.raises(InvalidInput, match="limit price"):
        await venue.buy("1", type=OrderType.LIMIT)
    assert (await venue.buy("0.01", symbol="btcusdt")).symbol == "BTC"


async def test_the_account_limit_holds_under_concurrency(database: Database) -> None:
    async with running(database, SIM_MAX_ACCOUNTS="3") as venue:
        await venue.see({"BTC": "94000"})
        tried = await asyncio.gather(
            *(venue.buy("0.01", account_id=f"m{n}") for n in range(6)),
            return_exceptions=True,
        )
        assert len(venue.exchange.accounts) == 3
        assert sum(isinstance(outcome, InvalidInput) for outcome in tried) == 3


async def test_an_order_without_a_fresh_price_is_refused(database: Database) -> None:
    async with running(database) as venue:
        assert (await venue.buy("0.01")).reason == "there is no price for BTC yet"
        await venue.see({"BTC": "94000"})
        await venue.clock.advance(timedelta(seconds=31))
        refused = await venue.buy("0.01")
        assert refused.status is OrderStatus.REJECTED
        assert refused.reason is not None
        assert "too old to trade on" in refused.reason


@pytest.mark.parametrize("shared", ["off", "on"])
async def test_depth_recovers_with_its_half_life_across_a_restart(database: Database, shared: str) -> None:
    """The books show a quantity of 10 on each side. If accounts share depth, what one took is missing for the other."""
    source, clock = ScriptedSource(), ManualClock(START)
    rich = {"SHARED_DEPTH": shared, "SIM_INITIAL_CAPITAL": "10000000"}
    async with running(database, source, clock, **rich) as before:
        await before.see(QUIET)
        assert (await before.buy("16")).total_quantity == 10
        other = await before.buy("10", account_id="b")
        assert (other.status is OrderStatus.REJECTED) is (shared == "on")
        await before.exchange.reset_account("b")
    async with running(database, source, clock, **rich) as after:
        await after.see(QUIET, after_s=5)
        assert (await after.buy("10")).total_quantity == 5
        await after.see(QUIET, after_s=5)
        other = await after.buy("10", account_id="b")
        assert other.total_quantity == (5 if shared == "on" else Decimal("7.5"))
        await agree_with_rows(after)


async def test_a_database_of_another_market_is_refused(database: Database) -> None:
    async with running(database):
        pass
    other = ScriptedSource()
    other.identity = "scripted:2"
    with pytest.raises(StartError, match="scripted:1"):
        async with running(database, other, ManualClock(START)):
            pass


async def test_a_position_in_a_market_that_is_no_longer_followed_stops_the_start(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=Decimal(5))
    with pytest.raises(StartError, match="in BTC, which MARKETS leaves out"):
        async with running(database, source, clock, MARKETS="ETH,SOL"):
            pass
    async with running(database, source, clock, MARKETS="BTC") as venue:
        assert venue.exchange.accounts["a"].positions["BTC"].quantity == Decimal("0.1")


async def test_an_unbalanced_ledger_stops_the_start(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see({"BTC": "94000"})
        await venue.buy("0.1", leverage=Decimal(5))
    async with database.connection() as conn:
        await conn.execute("UPDATE fills SET fee = fee + 0.0000000000000001")
    with pytest.raises(StartError, match="fees"):
        async with running(database, source, clock):
            pass


async def test_a_leader_whose_term_is_over_writes_no_posting(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as old:
        await old.see(QUIET)
        await old.buy("0.01")
        async with running(database, source, clock) as new:
            await new.see(QUIET, after_s=0)
            with pytest.raises(Unavailable):
                await old.buy("0.01")
            assert (await new.buy("0.01")).status is OrderStatus.FILLED
            assert new.exchange.accounts["a"].positions["BTC"].quantity == Decimal("0.02")
            await agree_with_rows(new)


async def test_a_leader_whose_term_is_over_records_no_checkpoint(database: Database) -> None:
    """Otherwise the next start would skip what the true leader's accounts have missed."""
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as old:
        await old.see(QUIET)
        await old.buy("0.01")
        async with running(database, source, clock):
            async with database.connection() as conn:
                before = await conn.fetch("SELECT processed_until, mark FROM service_state, last_marks ORDER BY symbol")
            for _ in range(13):
                await old.see({**QUIET, "BTC": "94001"}, after_s=10)
            async with database.connection() as conn:
                after = await conn.fetch("SELECT processed_until, mark FROM service_state, last_marks ORDER BY symbol")
            assert after == before


async def test_a_follower_shows_what_the_leader_does_and_changes_nothing(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as leader:
        follower = Venue(database, source, clock)
        await leader.see(QUIET)
        await leader.buy("0.01")
        await follower.exchange.follow()
        assert without_depth(follower.exchange.accounts["a"]) == without_depth(leader.exchange.accounts["a"])
        with pytest.raises(Unavailable, match="standby"):
            await follower.buy("0.01")
        await leader.sell("0.01")
        await follower.exchange.follow()
        assert not follower.exchange.accounts["a"].positions
        await leader.exchange.open_account("b")
        await follower.exchange.follow()
        assert set(follower.exchange.accounts) == {"a", "b"}
        assert await leader.exchange.remove_account("b")
        await leader.see(QUIET, after_s=1)
        await leader.exchange.open_account("c")
        await follower.exchange.follow()
        assert set(follower.exchange.accounts) == {"a", "c"}


async def test_an_account_that_another_process_opened_is_removed(venue: Venue) -> None:
    run = unopened_account("e", Decimal(100), "USDT", START).run
    async with venue.database.connection() as conn:
        await insert_account(conn, "e", run)
    for _ in range(2):
        assert await venue.exchange.remove_account("e")
        async with venue.database.connection() as conn:
            assert "e" not in await select_accounts(conn)


async def test_an_account_whose_removal_was_not_confirmed_is_gone_once_its_rows_are_read(
    venue: Venue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unconfirmed(_: Connection, account_id: str, term: int) -> Deletion:
        async with venue.database.transaction() as conn:
            await delete_account(conn, account_id, term)
        raise Unavailable("the connection is gone")

    await venue.exchange.open_account("d")
    with monkeypatch.context() as patch:
        patch.setattr("trader.exchange.sql.accounts.delete_account", unconfirmed)
        with pytest.raises(Unavailable):
            await venue.exchange.remove_account("d")
    await venue.see(QUIET)
    await venue.recovered()
    assert "d" not in venue.exchange.accounts
    assert (await venue.buy("0.1", account_id="d")).status is OrderStatus.FILLED


# --- pairs ------------------------------------------------------------------------------------------------------------

SHORT_ETH: dict[str, Any] = {"symbol": "ETH", "side": OrderSide.SELL, "quantity": Decimal("0.5")}


async def rows_of(venue: Venue) -> list[tuple[int, int]]:
    """Return how many rows there are, written in how many transactions: first of orders, then of fills."""
    async with venue.database.connection() as conn:
        counts = "SELECT count(*), count(DISTINCT xmin::text) FROM "
        rows = [row for table in ("order_requests", "fills") for row in await conn.fetch(counts + table)]
    return [(count, transactions) for count, transactions in rows]


async def test_a_pair_is_written_in_one_transaction_and_traded_once(venue: Venue) -> None:
    pair = {"client_order_id": "one"}, {**SHORT_ETH, "client_order_id": "two"}
    answers = await asyncio.gather(*(venue.pair(*pair) for _ in range(3)))
    assert [list(each) for each in answers] == [list(answers[0])] * 3
    assert [(answer.symbol, answer.status) for answer in answers[0]] == [("BTC", "filled"), ("ETH", "filled")]
    assert await rows_of(venue) == [(2, 1), (2, 1)]
    assert venue.accounts.tally.orders == {OrderStatus.FILLED: 2}
    with pytest.raises(Conflict, match="the clientOrderId 'two' was used for another order"):
        await venue.pair(pair[0], {**pair[1], "quantity": Decimal(1)})


async def test_a_pair_that_cannot_be_filled_trades_nothing(venue: Venue) -> None:
    await venue.pair({}, SHORT_ETH)
    before = venue.exchange.accounts["a"]
    answers = await venue.pair({}, {**SHORT_ETH, "quantity": Decimal(1_000)})
    assert {(answer.status, answer.total_quantity) for answer in answers} == {(OrderStatus.REJECTED, Decimal(0))}
    assert venue.exchange.accounts["a"].positions == before.positions
    assert await rows_of(venue) == [(4, 2), (2, 1)]
    new = await venue.pair({"account_id": "b"}, {**SHORT_ETH, "account_id": "b", "quantity": Decimal(1_000)})
    assert len({answer.id for answer in new}) == 2
    assert "b" not in venue.exchange.accounts, "an account opens with its first accepted order"


async def test_a_pair_meets_the_first_moment_at_which_both_markets_have_a_later_book(database: Database) -> None:
    async with running(database, SIM_LATENCY_MS="1500") as venue:
        await venue.see(QUIET)
        pair = asyncio.create_task(venue.pair(SHORT_ETH, {}))
        for mid in ("3300", "3310", "3320", "3330"):  # the latency ends at the second of them
            await becomes(lambda: venue.market.orders_waiting, 1)
            await venue.see({"ETH": mid})
        await becomes(lambda: venue.market.orders_waiting, 1)
        await venue.see({"BTC": "95000"})
        sold, bought = await pair
        assert (sold.at, bought.at) == (venue.clock.now(), venue.clock.now())
        assert [bought.average_price, sold.average_price] == [Decimal("95000.1"), Decimal("3329.99")]
        late = asyncio.create_task(venue.pair(SHORT_ETH, {}))
        for _ in range(7):
            await becomes(lambda: venue.market.orders_waiting, 1)
            await venue.see({"ETH": "3330"})
        assert [answer.reason for answer in await late] == ["No price of BTC came in time"] * 2


async def test_a_halted_account_opens_nothing_by_a_pair(venue: Venue) -> None:
    await venue.buy("0.01")
    await venue.halts.halt("a", HaltCause.OPERATOR, "maintenance", "someone")
    sell: dict[str, Any] = {"side": OrderSide.SELL}
    answers = await venue.pair(sell, sell)
    assert {answer.status for answer in answers} == {OrderStatus.REJECTED}
    assert all("trading is halted for account a" in str(answer.reason) for answer in answers)
    half = {**sell, "quantity": Decimal("0.005")}
    assert {answer.status for answer in await venue.pair(half, half)} == {OrderStatus.FILLED}


async def test_a_pair_with_an_unknown_market_or_an_old_book_is_refused(database: Database) -> None:
    async with running(database) as venue:
        await venue.see({"BTC": "94000"})
        with pytest.raises(InvalidInput, match="'DOGE' is not traded here; markets are BTC, ETH, SOL"):
            await venue.pair({}, {"symbol": "DOGE"})
        assert [answer.reason for answer in await venue.pair({}, SHORT_ETH)] == ["there is no price for ETH yet"] * 2
        await venue.clock.advance(timedelta(seconds=31))
        await venue.see({"ETH": "3300"})
        assert "the last BTC price is of" in str((await venue.pair(SHORT_ETH, {}))[0].reason)
