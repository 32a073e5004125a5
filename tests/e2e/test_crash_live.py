"""The crash of 3 February 2025, 01:45 to 02:10 UTC: ETH fell from 2,770 to 2,125, and long positions with it."""

import asyncio
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from support.candles import write_part
from support.process import ServiceProcess, serving
from support.scripted import make_settings
from support.venue import make_exchange
from support.waiting import becomes, turns

from trader.core.clock import LockstepClock, iso
from trader.database.pool import Database
from trader.exchange.domain.account import equity, maintenance
from trader.exchange.domain.orders import Order, OrderAnswer, OrderSide, OrderStatus
from trader.market.domain.markets import Tick
from trader.market.feed import MarketFeed
from trader.market.sources.replay import ReplaySource
from trader.portfolio.audit import audit

pytestmark = pytest.mark.processes

BEGIN = datetime(2025, 2, 3, 1, 30, tzinfo=UTC)
END = datetime(2025, 2, 3, 2, 20, tzinfo=UTC)
SMALL = Decimal(10_000)
LARGE = Decimal(8_000_000)
"""Ten times this is more than the books of many seconds hold: it cannot be closed before its equity is gone."""


class Crash:
    """The exchange on the recorded candles in lockstep. `worst` is the lowest equity seen of each account."""

    def __init__(self, database: Database, source: ReplaySource) -> None:
        clock = source.clock(None)
        assert isinstance(clock, LockstepClock)
        self.clock = clock
        self.source = source
        self.market = MarketFeed(source, clock)
        self.exchange = make_exchange(database, self.market, clock, make_settings(SIM_LATENCY_MS="200"))
        self.worst: dict[str, Decimal] = {}
        self.ended = asyncio.Event()

    async def on_tick(self, tick: Tick) -> None:
        await self.exchange.on_tick(tick)
        marks = self.exchange.marks()
        for account in self.exchange.accounts.values():
            worth = equity(account, marks)
            self.worst[account.id] = min(worth, self.worst.get(account.id, worth))
            if account.positions and worth <= maintenance(account, marks, self.source.markets):
                # Still under water: then this second's book was consumed completely.
                assert account.taken["ETH"], account.id
        if tick.at == self.source.ends_at:
            self.ended.set()

    async def buy_the_dip(self, account_id: str, capital: Decimal) -> list[OrderAnswer]:
        """Go long at 10× with almost all the capital, in as many orders as the books require."""
        answers: list[OrderAnswer] = []
        async with self.clock.busy():
            await self.clock.sleep_until(BEGIN + timedelta(seconds=5))
            await self.exchange.open_account(account_id, capital)
            left = (capital * Decimal("9.8") / 2790).quantize(Decimal("0.0001"))
            while left >= Decimal("0.1") and self.clock.now() < BEGIN + timedelta(minutes=10):
                order = Order(
                    account_id=account_id, symbol="ETH", side=OrderSide.BUY, quantity=left, leverage=Decimal(10)
                )
                answers += await self.exchange.place_orders(order)
                left -= answers[-1].total_quantity
                await self.clock.sleep_until(self.clock.now() + timedelta(seconds=1))
        return answers

    async def run(self, accounts: dict[str, Decimal]) -> list[list[OrderAnswer]]:
        await self.exchange.lead()
        traders = [asyncio.create_task(self.buy_the_dip(*account)) for account in accounts.items()]
        await turns(1)
        feed = asyncio.create_task(self.market.run(self.on_tick, BEGIN))
        ended = asyncio.create_task(self.ended.wait())
        async with asyncio.timeout(120):
            await asyncio.wait([feed, ended], return_when=asyncio.FIRST_COMPLETED)
        answers = await asyncio.gather(*traders)
        feed.cancel()
        ended.cancel()
        await asyncio.wait([feed, ended])
        await self.exchange.resign()
        return answers


@pytest.fixture(scope="module")
def half_a_day(tmp_path_factory: pytest.TempPathFactory, candles: Path) -> Path:
    """Candles of the crash, and of the twelve hours before it for typical ranges and volumes."""
    return write_part(tmp_path_factory.mktemp("half") / "day", candles, BEGIN - timedelta(hours=12), END)


@pytest.fixture
async def crash(database: Database, half_a_day: Path) -> Crash:
    source = ReplaySource(half_a_day, ("BTC", "ETH", "SOL"), speed=0, start=BEGIN, end=END)
    await source.open()
    return Crash(database, source)


async def test_longs_are_liquidated_at_book_prices_and_never_owe_money(crash: Crash, database: Database) -> None:
    answers = await crash.run({"small": SMALL, "large": LARGE})
    for given in answers:
        assert given[0].status in {OrderStatus.FILLED, OrderStatus.PARTIAL}
    accounts = crash.exchange.accounts
    async with database.connection() as conn:
        closed = await conn.fetch("SELECT * FROM orders WHERE status = 'CLOSED' ORDER BY account_id, closed_at")
        fills = await conn.fetch("SELECT * FROM fills WHERE cause = 'liquidation' ORDER BY account_id, sequence")
        insurance = await conn.fetch("SELECT account_id, sum(amount) FROM insurance_payments GROUP BY 1")
    assert {row["close_reason"] for row in closed} == {"liquidation"}
    for account in accounts.values():
        worth = equity(account, crash.exchange.marks())
        assert worth >= 0, account.id
        assert not account.positions or worth > maintenance(account, crash.exchange.marks(), crash.source.markets)

    # The small one is reduced step by step as the market falls, until nothing is left.
    small = [row for row in fills if row["account_id"] == "small"]
    assert BEGIN.replace(minute=50) < small[0]["created_at"] < BEGIN.replace(minute=56)
    assert 0 <= accounts["small"].cash < SMALL / 5
    assert sum(fill["quantity"] for fill in small[:3]) < SMALL / 1000, "less than a third at once"
    for number, fill in enumerate(small):
        # 1 % of the notional on top of the taker fee, at a price within the candle of its minute.
        notional = fill["quantity"] * fill["price"]
        assert fill["liquidation_fee"] == notional / 100 or (number and 0 <= fill["liquidation_fee"] < notional / 100)
        is_taken_over = fill is small[-1] and accounts["small"].cash == 0  # at the mark, without a taker fee
        assert fill["fee"] == (0 if is_taken_over else notional * Decimal("0.0005"))
        assert Decimal(2380) < fill["price"] < Decimal(2600)

    # The large one falls through: its unpaid loss is written off, to the last digit.
    (loss,) = [row for row in insurance if row["account_id"] == "large"]
    assert loss["sum"] > 0
    assert "ETH" not in accounts["large"].positions
    assert accounts["large"].cash == 0
    large = [row for row in fills if row["account_id"] == "large"]
    assert len({row["created_at"] for row in large}) > 3, "it was closed over several seconds"

    report = await audit(database)
    assert report.problems == []


async def test_a_position_opened_over_http_is_liquidated_in_the_running_service(
    tmp_path: Path, dsn: str, half_a_day: Path
) -> None:
    environ = {
        "DATABASE_URL": dsn,
        "MARKET_SOURCE": f"replay:{half_a_day}",
        "REPLAY_START": iso(BEGIN),
        "REPLAY_END": iso(END),
        "REPLAY_SPEED": "200",
    }
    async with serving(tmp_path, **environ) as service:
        order = {"accountId": "brave", "symbol": "ETH", "side": "long", "quantity": 34, "leverage": 10}
        placed = (await service.call("simulator.placeOrder", **order))["order"]
        assert placed["status"] == "filled", placed
        trades = await liquidated(service)
        account = (await service.call("simulator.getAccount", accountId="brave"))["account"]
        assert account["positions"] == []
        assert account["equity"] == account["cashBalance"] >= 0
        assert sum(trade["quantity"] for trade in trades) == pytest.approx(34)
        for trade in trades:
            assert trade["entryPrice"] == pytest.approx(placed["averagePrice"])
            assert trade["exitPrice"] < placed["averagePrice"] * 0.93
            # Both fees of every step, unless the fall consumed the funds that cap the liquidation fee.
            assert account["equity"] == 0 or trade["fees"] > trade["exitPrice"] * trade["quantity"] * 0.0105 * 0.9
            assert trade["leverage"] == 10
        again = await service.call("simulator.placeOrder", **{**order, "quantity": 0.01})
        assert again["order"]["status"] in {"filled", "rejected"}
        assert await service.stop() == 0
        assert not service.traceback()
    await is_clean(dsn)


async def liquidated(service: ServiceProcess) -> Any:
    # Thin books end positions ticks apart.
    await becomes(lambda: service.call("trading.getPositions", modelId="brave"), [], within_s=120)
    trades = (await service.call("trading.getTrades", modelId="brave"))["trades"]
    assert {trade["closeReason"] for trade in trades} == {"liquidation"}
    return trades


async def is_clean(dsn: str) -> None:
    """Run the audit as an operator does."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "trader", "audit", "--database-url", dsn, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert b"clean" in output
