"""The service on the venue's market data: an outage at the start, trades, a lost connection, an outlier, a restart."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.fake_venue import FakeVenue, fake_venue
from support.process import ServiceProcess
from support.waiting import becomes

from trader.core.clock import iso
from trader.database.pool import Database
from trader.portfolio.audit import audit

pytestmark = pytest.mark.processes


@pytest.fixture
async def venue() -> AsyncIterator[FakeVenue]:
    async with fake_venue() as venue:
        yield venue


def settings(venue: FakeVenue, dsn: str) -> dict[str, str]:
    return {
        "DATABASE_URL": dsn,
        "VENUE_URL": venue.url,
        "MARKETS": "BTC,ETH",
        "OPENAI_BASE_URL": "http://127.0.0.1:9",
        "SIM_TAKER_FEE_BPS": "0",
        "RECORD": "recording",
    }


async def prices(service: ServiceProcess) -> dict[str, float]:
    answer = await service.call("trading.getCryptoPrices")
    return {price["symbol"]: price["price"] for price in answer["prices"] if "message" not in price}


async def buy(service: ServiceProcess, **more: Any) -> dict[str, Any]:
    order = {"symbol": "BTC", "side": "buy", "quantity": 0.1, "leverage": 5, **more}
    answer: dict[str, Any] = (await service.call("simulator.placeOrder", **order))["order"]
    return answer


async def held(service: ServiceProcess) -> list[tuple[str, str]]:
    return [(entry["symbol"], entry["quantity"]) for entry in await service.call("trading.getPositions")]


async def orders_rejected(service: ServiceProcess) -> str:
    answer = await buy(service)
    assert answer["status"] == "rejected"
    return str(answer["reason"])


@asynccontextmanager
async def trading(folder: Path, venue: FakeVenue, dsn: str) -> AsyncIterator[ServiceProcess]:
    """The service as started without `--demo`, on the venue's market."""
    async with aiohttp.ClientSession() as http:
        service = await ServiceProcess.start(
            folder, http, "trader", command=(sys.executable, "-P", "-m"), **settings(venue, dsn)
        )
        try:
            yield service
        finally:
            if service.process.returncode is None:
                await service.kill()


async def test_the_service_waits_for_the_venue_and_does_not_trade_on_an_outlier(
    tmp_path: Path, dsn: str, venue: FakeVenue
) -> None:
    await venue.stop()
    async with trading(tmp_path, venue, dsn) as service:
        _, report = await service.get("/health/schedulers")
        assert report["market"]["stale"]
        assert "cannot be reached" in report["market"]["trouble"]
        assert "cannot be reached" in await orders_rejected(service)
        await venue.start()
        await becomes(lambda: prices(service), {"BTC": 94000.0, "ETH": 3300.0})
        filled = await buy(service)
        assert (filled["status"], filled["averagePrice"]) == ("filled", 94000.1)
        _, report = await service.get("/health/schedulers")
        assert "trouble" not in report["market"]
        await venue.cut()
        await venue.move("BTC", "94010.0")
        await becomes(lambda: prices(service), {"BTC": 94010.0, "ETH": 3300.0})
        market = venue.markets["BTC"]
        market.index = market.mark = Decimal(94000)
        await venue.summarize("BTC")
        await venue.move("BTC", "99000.0")
        await becomes(lambda: prices(service), {"ETH": 3300.0})
        assert "is an outlier: 5.3% from the last and 5.3% from the index" in await orders_rejected(service)
        assert await service.stop() == 0
        assert service.traceback() == ""


async def test_downtime_is_caught_up_from_the_venues_candles(
    tmp_path: Path, dsn: str, database: Database, venue: FakeVenue
) -> None:
    async with trading(tmp_path, venue, dsn) as service:
        await becomes(lambda: prices(service), {"BTC": 94000.0, "ETH": 3300.0})
        await buy(service, exitPlan={"stop": 93000})
        assert await held(service) == [("BTC", "0.1")]
        assert await service.stop() == 0
    await pass_time(database, "10 minutes")
    dip = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=5)
    prices_of_dip = {"o": 94000.0, "h": 94050.0, "l": 92500.0, "c": 94010.0, "v": 3.5}
    venue.candle_rows[1] = [{"t": int(dip.timestamp() * 1000), **prices_of_dip}]
    async with trading(tmp_path, venue, dsn) as service:
        assert await held(service) == []
        (trade,) = (await service.call("trading.getTrades"))["trades"]
        assert (trade["closeReason"], trade["closedAt"]) == ("stop", iso(dip + timedelta(seconds=41)))
        assert 92500 < trade["exitPrice"] < 92600, "a second after the low, on the way to the close"
        assert await service.stop() == 0
        assert service.traceback() == ""
    assert (await audit(database)).problems == []


async def pass_time(database: Database, span: str) -> None:
    """Move all stored rows into the past."""
    columns = {
        "accounts": ("created_at", "changed_at", "last_order_at"),
        "runs": ("started_at",),
        "orders": ("opened_at",),
        "fills": ("created_at",),
        "order_requests": ("created_at",),
        "service_state": ("processed_until",),
    }
    async with database.connection() as conn:
        for table, moments in columns.items():
            changes = ", ".join(f"{moment} = {moment} - interval '{span}'" for moment in moments)
            await conn.execute(f"UPDATE {table} SET {changes}")
