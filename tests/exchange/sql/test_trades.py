"""Completed trades of all runs: newest first, with or without their model."""

from datetime import datetime
from decimal import Decimal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.records import HOUR, START, add_model, add_run, add_trade, id_of, make_run, seen

from trader.core.variant_id import VariantId
from trader.database.pool import Database, Page
from trader.exchange.domain.orders import Side
from trader.exchange.sql import trades as store

ACCOUNTS = ("one", "two", "manual")

trade_times = st.lists(
    st.tuples(st.sampled_from(ACCOUNTS), st.integers(0, 6), st.integers(1, 2)), max_size=25, unique=True
)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(closed=trade_times, limit=st.integers(1, 12), chosen=st.sets(st.sampled_from(ACCOUNTS), min_size=1))
async def test_the_latest_trades_of_chosen_accounts_match_a_full_read(
    database: Database, closed: list[tuple[str, int, int]], limit: int, chosen: set[str]
) -> None:
    async with database.connection() as conn:
        rolled_back = conn.transaction()
        await rolled_back.start()
        try:
            await add_model(conn, "one")
            await add_model(conn, "two", VariantId.CONTRARIAN)
            await add_run(conn, "manual", make_run("manual"))
            for account_id in ACCOUNTS:
                await add_run(conn, account_id, make_run(account_id, 2, at=START + HOUR))
            for account_id, hour, number in closed:
                await add_trade(conn, account_id, START + hour * HOUR, number=number, label=number)
            everything = await store.select_trades(conn, Page(100))
            latest = await store.select_trades(conn, Page(limit))
            theirs = await store.select_account_trades(conn, list(chosen), Page(limit))
            since = [(name, id_of("run", name, 2), START + 3 * HOUR) for name in sorted(chosen)]
            of_runs = await store.select_run_trades(conn, since)
        finally:
            await rolled_back.rollback()
    expected = sorted(
        ((START + hour * HOUR, id_of("trade", name, START + hour * HOUR, number)) for name, hour, number in closed),
        key=lambda pair: (-pair[0].timestamp(), str(pair[1])),
    )
    assert [(trade.closed_at, trade.id) for trade in everything] == expected
    assert latest == everything[:limit]
    assert theirs == [trade for trade in everything if trade.account_id in chosen][:limit]
    ascending: list[tuple[str, datetime, int]] = sorted(
        (trade.account_id, trade.closed_at, trade.id.int)
        for trade in everything
        if trade.account_id in chosen and trade.run_id == id_of("run", trade.account_id, 2)
        if trade.closed_at >= START + 3 * HOUR
    )
    assert [(name, trade.closed_at, trade.id) for name, trade in of_runs] == ascending


async def test_a_trade_is_read_with_all_its_fills(database: Database) -> None:
    async with database.connection() as conn:
        await add_model(conn, "one", VariantId.CONTRARIAN)
        await add_run(conn, "manual", make_run("manual"))
        await add_trade(
            conn, "one", START + 2 * HOUR, gross="-30", fees="2", funding="0.5", notional="600", side="SHORT",
            leverage=3, confidence=70,
        )  # fmt: skip
        await add_trade(conn, "manual", START + HOUR)
        theirs, manual = await store.select_trades(conn, Page(2))
    assert theirs.model_name == "Model one"
    assert theirs.model_variant is VariantId.CONTRARIAN
    assert theirs.model_router_name == "rules/one"
    assert theirs.side is Side.SHORT
    assert seen(theirs.entry_price, theirs.exit_price) == (60_000, 63_000)
    assert theirs.given_leverage == 3
    assert seen(theirs.gross_pnl, theirs.fees, theirs.funding) == (-30, 2, Decimal("0.5"))
    assert theirs.net_pnl == Decimal("-31.5")
    assert seen(theirs.confidence, theirs.close_reason) == (70, "order")
    assert seen(theirs.opened_at, theirs.closed_at) == (START + HOUR, START + 2 * HOUR)
    assert manual.account_id == "manual"
    assert manual.model_name is manual.model_variant is manual.model_router_name is None
    assert manual.given_leverage is manual.confidence is None
