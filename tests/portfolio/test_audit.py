"""The audit finds every error: each test corrupts a clean ledger in one place."""

from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal

import pytest
from support.live import Bench, trading
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource
from support.venue import running

from trader.core.errors import OrderUndecided
from trader.database.pool import Database
from trader.exchange.domain.orders import ExitPlan, OrderStatus, OrderType
from trader.portfolio.audit import AuditReport, audit
from trader.portfolio.snapshots import PortfolioService

D = Decimal


@pytest.fixture
async def traded(database: Database) -> AsyncIterator[Bench]:
    """A live database with every kind of fill: market, flip, maker, stop, exit by the service, liquidation, manual."""
    async with trading(database) as bench:
        await bench.buy("0.25", leverage=D(5), exit_plan=ExitPlan(stop=D(90000)))
        await bench.sell("0.4", leverage=D(5))
        await bench.buy("0.1", type=OrderType.LIMIT, limit_price=D(93000))
        await bench.move({"BTC": "92990.0"})
        await bench.buy("1", symbol="ETH", leverage=D(5), exit_plan=ExitPlan(stop=D(3000)))
        await bench.move({"ETH": "2990.00"})
        assert "ETH" not in bench.account().positions
        await bench.buy("1", symbol="ETH", leverage=D(5), exit_plan=ExitPlan(invalidation_price=D(2950)))
        await bench.move({"ETH": "2940.00"})
        assert "ETH" not in bench.account().positions
        bench.venue.trade_by_hand("BTC", "0.01")
        await bench.synchronize()
        bench.venue.liquidate("BTC", "0.04")
        await bench.see({}, after_s=13)  # the venue shows it by then
        await bench.synchronize()
        report = await audit(database)
        assert (report.problems, report.trades) == ([], len(await _all(bench, "venue_trades")))
        causes = {row["cause"] for row in await _all(bench, "fills")}
        assert causes == {"order", "limit", "stop", "invalidation", "liquidation", "manual"}
        yield bench


async def _all(bench: Bench, table: str) -> list[dict[str, object]]:
    async with bench.database.connection() as conn:
        return [dict(row) for row in await conn.fetch(f"SELECT * FROM {table}")]


async def after(database: Database, *statements: str) -> AuditReport:
    """Return the audit after rows were changed."""
    async with database.connection() as conn:
        for statement in statements:
            done = await conn.execute(statement)
            assert not done.endswith(" 0"), statement
    return await audit(database)


FLIP = (
    "(SELECT request_id FROM fills GROUP BY request_id HAVING count(DISTINCT order_id) > 1 AND request_id IS NOT NULL)"
)


WRONG_ROWS = {
    "UPDATE venue_trades SET quantity = quantity * 2 WHERE kind <> 'trade'": "for liquidation: quantity is 0.08",
    "UPDATE venue_trades SET price = price + 1 WHERE maker": "buy of BTC at 93001 as maker of order",
    "UPDATE venue_trades SET fee_rate = fee_rate + 0.0001 WHERE side = 'sell'": "fee is ",
    "UPDATE venue_trades SET fee_rate = 0 WHERE maker": "maker of order",
    "UPDATE venue_trades SET cause = 'manual' WHERE cause = 'liquidation'": "for liquidation: quantity is 0 by",
    "UPDATE venue_trades SET side = 'buy' WHERE symbol = 'ETH' AND side = 'sell'": "for stop: quantity is 0 by",
    "UPDATE venue_trades SET client_index = NULL WHERE maker": "as maker for manual: quantity is 0.",
    "DELETE FROM venue_trades WHERE kind <> 'trade'": "for liquidation: quantity is 0 by the venue's trades",
    "DELETE FROM venue_trades": "for invalidation: quantity is 0 by the venue's trades and 1",
    "UPDATE venue_orders SET filled = 0 WHERE cause = 'stop'": "at the venue: filled quantity is 1",
}
"""Changes of what the venue has said, and what the audit says of each."""

KEEP = "CREATE TABLE kept_orders AS TABLE venue_orders; CREATE TABLE kept_trades AS TABLE venue_trades"
RESTORE = """
DELETE FROM venue_trades; DELETE FROM venue_orders;
INSERT INTO venue_orders TABLE kept_orders; INSERT INTO venue_trades TABLE kept_trades
"""


async def test_a_trade_of_the_venue_that_differs_from_its_fills_is_reported(traded: Bench) -> None:
    async with traded.database.connection() as conn:
        await conn.execute(KEEP)
        for statement, said in WRONG_ROWS.items():
            report = await after(traded.database, statement)
            assert any(said in problem for problem in report.problems), (statement, report.problems)
            await conn.execute(RESTORE)
    assert (await audit(traded.database)).problems == []


async def test_a_fill_that_is_missing_or_recorded_twice_is_reported(traded: Bench) -> None:
    report = await after(
        traded.database,
        "DELETE FROM fill_drift",
        f"DELETE FROM fills WHERE request_id = {FLIP} AND order_id = (SELECT min(order_id::text)::uuid FROM fills "
        f"WHERE request_id = {FLIP})",
    )
    assert any(": quantity is 0.4" in problem and "sell of BTC" in problem for problem in report.problems)
    report = await after(
        traded.database,
        "INSERT INTO fills SELECT account_id, sequence + 100000, run_id, order_id, request_id, symbol, side, quantity, "
        "price, fee, liquidation_fee, maker, cause, created_at FROM fills WHERE cause = 'liquidation'",
    )
    assert any("for liquidation: quantity is 0.04" in p and "and 0.08" in p for p in report.problems), report.problems


async def test_a_resting_order_may_fill_before_its_response_is_known(database: Database) -> None:
    async with trading(database) as bench:
        bench.venue.excuse("event_lag_s")  # the fill is shown before the order is
        bench.venue.send_faults = ["lose_after"]
        bench.venue.read_faults = ["ok", *["500"] * 5000]
        with pytest.raises(OrderUndecided):
            await bench.buy("0.1", type=OrderType.LIMIT, limit_price=D(93000), leverage=D(5), client_order_id="lost")
        await bench.see({"BTC": "92990.0"})
        bench.venue.read_faults.clear()
        await bench.synchronize()
        answer = await bench.buy(
            "0.1", type=OrderType.LIMIT, limit_price=D(93000), leverage=D(5), client_order_id="lost"
        )
        assert (answer.status, [fill.maker for fill in answer.fills]) == (OrderStatus.FILLED, [True, True])
        await bench.agree()
        report = await after(database, "DELETE FROM fill_drift", "UPDATE fills SET quantity = quantity / 2 WHERE maker")
        assert any("acknowledged quantity" in problem for problem in report.problems)


async def test_a_ledger_with_holes_is_reported_and_does_not_end_the_audit(database: Database) -> None:
    async with running(database) as venue:
        await venue.see({"BTC": "94000"})
        await venue.buy("2", leverage=D(40))
        await venue.see({"BTC": "94000"}, after_s=3600)
        while venue.exchange.accounts["a"].positions:
            await venue.see({"BTC": "80000"}, size="5")
        assert venue.exchange.accounts["a"].insurance > 0
        assert (await audit(database)).is_clean
    report = await after(database, "DELETE FROM fills")
    assert any("existence is True in the row and False by the ledger" in problem for problem in report.problems)
    assert any("funding is" in problem for problem in report.problems) is False, "one sentence says it"


@pytest.mark.parametrize("back", [timedelta(minutes=2), timedelta(minutes=10), timedelta(hours=2)])
async def test_equity_follows_its_ledger_however_the_clock_is_set_back(database: Database, back: timedelta) -> None:
    clock = ManualClock(START + timedelta(minutes=50))
    async with running(database, ScriptedSource(), clock, SIM_LATENCY_MS="0") as venue:
        portfolio = PortfolioService(database, venue.exchange, clock, venue.settings)
        for span in (timedelta(0), -back, back, -back):
            clock.set_by(span)
            await venue.see({"BTC": "94000"}, after_s=10)
            await portfolio.take_snapshots(clock.now())
            await venue.buy("0.1")
            await venue.sell("0.1")
            await portfolio.take_snapshots(clock.now())
        report = await audit(database)
    assert (report.problems, report.hours > 0) == ([], True)
