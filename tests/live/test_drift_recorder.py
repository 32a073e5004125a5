"""The drift of booked fills on a real PostgreSQL: recorded once, and later if the database was unavailable."""

from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from support.proxy import FaultyProxy
from support.venue import Venue, running

from trader.agents.sql.invocations import select_fills
from trader.database.pool import Database
from trader.exchange.domain.orders import Fill
from trader.live.drift import DriftRecorder
from trader.market.domain.markets import Quote

D = Decimal


@pytest.fixture
async def venue(database: Database) -> AsyncIterator[Venue]:
    async with running(database) as venue:
        await venue.see({"BTC": "94000", "ETH": "3300", "SOL": "200"})
        yield venue


async def booked(venue: Venue, quantity: str, dearer: str = "0") -> tuple[list[Fill], Quote]:
    """Return booked fills as if the venue had filled them at prices this much worse, and the quote that they met."""
    quote = venue.market.quote("BTC")
    assert quote is not None
    before = venue.exchange.account("a").sequence
    await venue.buy(quantity, leverage=D(20))
    async with venue.database.connection() as conn:
        fills = await select_fills(conn, "a", range(before, venue.exchange.account("a").sequence + 1))
    return [msgspec.structs.replace(fill, price=fill.price + D(dearer)) for fill in fills], quote


async def rows(database: Database) -> list[tuple[Any, ...]]:
    async with database.connection() as conn:
        records = await conn.fetch(
            "SELECT quantity, venue_price, paper_price, drift_bps FROM fill_drift ORDER BY sequence"
        )
    return [tuple(row) for row in records]


async def test_fills_are_recorded_once_with_their_error(database: Database, venue: Venue) -> None:
    recorder = DriftRecorder(database)
    fills, quote = await booked(venue, "1.5", dearer="9.4")
    for _ in range(2):
        await recorder.record("a", fills, quote)
    assert await rows(database) == [
        (D(1), D("94009.5"), D("94000.1"), D("1.0000")),
        (D("0.5"), D("94009.6"), D("94000.2"), D("1.0000")),
    ]


async def test_a_fill_that_is_not_in_the_books_is_not_recorded(database: Database, venue: Venue) -> None:
    fills, quote = await booked(venue, "0.1")
    await DriftRecorder(database).record("nobody", fills, quote)
    assert await rows(database) == []


async def test_fills_missed_by_the_database_are_recorded_with_the_next_ones(
    dsn: str, database: Database, venue: Venue
) -> None:
    proxy = FaultyProxy(dsn)
    faulty = await Database.connect(await proxy.start(), size=1, command_timeout_s=0.5)
    recorder = DriftRecorder(faulty)
    first, quote = await booked(venue, "0.1")
    proxy.stop()
    await recorder.record("a", first, quote)
    assert await rows(database) == []
    proxy.pass_on()
    second, quote = await booked(venue, "0.2")
    for _ in range(20):
        await recorder.record("a", second, quote)
        if len(await rows(database)) == 2:
            break
    assert [row[0] for row in await rows(database)] == [D("0.1"), D("0.2")]
    await faulty.close()
    await proxy.close()
