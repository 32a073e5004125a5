"""The bounds of a season on an entrant's hour: enforced with every tick, recorded, and lifted when the hour is over."""

from datetime import timedelta
from decimal import Decimal

import pytest
from support.manual_clock import ManualClock
from support.operated_exchange import OperatedExchange, operating
from support.records import make_model
from support.scripted import START, ScriptedSource
from support.seasons import DAY, add_season

from trader.agents.sql.models import upsert_model
from trader.database.pool import Database
from trader.exchange.domain.halts import HaltCause
from trader.exchange.domain.orders import OrderStatus, OrderType
from trader.operations import operator_commands as operations

QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}
TEN = Decimal(10)
HELD = [("a", HaltCause.HOURLY_BOUND)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "RETRY_S", 0.01)


@pytest.fixture
async def season(database: Database) -> Database:
    """A season whose only entrant `a` may lose 4 % and gain 8 % within an hour."""
    begun = START.replace(minute=0, second=0)
    async with database.connection() as conn:
        await upsert_model(conn, make_model("a"))
        await add_season(conn, start=begun, end=begun + DAY, hour_loss_max_percent=4.0, hour_gain_max_percent=8.0)
    return database


def in_force(operated: OperatedExchange) -> list[tuple[str | None, HaltCause]]:
    return [(halt.account_id, halt.cause) for halt in operated.halts.in_force]


async def flat(operated: OperatedExchange) -> None:
    await operated.polled_until(lambda: not operated.venue.exchange.accounts["a"].positions)


async def test_a_jump_of_the_clock_forgets_no_loss_of_the_hour(season: Database) -> None:
    async with operating(season) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.5", leverage=TEN)
        await operated.see({"BTC": "93500"})
        for span in (DAY / 24, -DAY / 24):
            operated.venue.clock.set_by(span)
            await operated.see({"BTC": "93500"})
        assert in_force(operated) == []
        await operated.see({"BTC": "93400"})
        assert in_force(operated) == HELD


async def test_a_jump_of_the_clock_before_a_term_prolongs_no_halt(season: Database) -> None:
    async with operating(season) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.5", leverage=TEN)
        await operated.see({"BTC": "93400"})
        assert in_force(operated) == HELD
        operated.bounds.stop()
        operated.venue.clock.set_by(timedelta(minutes=57))
        await operated.bounds.load(operated.venue.clock.now())
        await operated.see({"BTC": "93400"}, after_s=120)
        assert in_force(operated) == [], "its hour is over"


async def test_an_hour_cannot_lose_more_than_its_bound(season: Database) -> None:
    async with operating(season) as operated:
        venue = operated.venue
        await operated.see(QUIET)
        await venue.buy("0.5", leverage=TEN)
        await venue.buy("0.5", leverage=TEN, account_id="b")
        await operated.see({"BTC": "93500"})  # 250 and fees of 24
        assert in_force(operated) == []
        await operated.see({"BTC": "93400"})
        assert in_force(operated) == HELD, "three quarters of 4 %, and only the entrant"
        await flat(operated)
        refused = await venue.buy("0.01", leverage=TEN)
        assert refused.status is OrderStatus.REJECTED
        assert refused.reason is not None
        assert "is 3.24 % below 10000.00 at the start of the hour; the bound of season 1 (Winter)" in refused.reason
        assert "on an hour's loss is 4 %, and its positions are closed from 3 % on" in refused.reason
        account = venue.exchange.accounts["a"]
        assert 10_000 - 400 < account.cash < 10_000 - 300, "at 3 %, with the fees and the spread of the close"
        await operated.see({"BTC": "93400"}, after_s=58 * 60 + 15)
        assert in_force(operated) == HELD
        await operated.see({"BTC": "93400"}, after_s=45)
        assert in_force(operated) == [], "the hour of the last snapshot, at 12:59, is over"
        assert (await venue.buy("0.01", leverage=TEN)).status is OrderStatus.FILLED
        async with season.connection() as conn:
            row = await conn.fetchrow("SELECT account_id, cause, halted_by, lifted_by FROM halts")
            recorded = await conn.fetchval("SELECT count(*) FROM chain_links WHERE kind = 'halts'")
        assert row is not None
        assert tuple(row) == ("a", "hourly bound", "season", "season")
        assert recorded == 2


async def test_an_hour_cannot_gain_more_than_its_bound(season: Database) -> None:
    async with operating(season) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.5", leverage=TEN)
        await operated.see({"BTC": "95200"})
        assert in_force(operated) == []
        await operated.see({"BTC": "95300"})
        assert in_force(operated) == HELD, "six percent"
        await flat(operated)
        assert 10_600 < operated.venue.exchange.accounts["a"].cash < 10_800


async def test_a_restart_within_the_hour_forgets_no_loss(season: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with operating(season, source, clock) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.5", leverage=TEN)
        run = operated.venue.exchange.accounts["a"].run.id
    async with season.connection() as conn:
        await conn.execute(
            """INSERT INTO portfolio_hourly (account_id, hour, run_id, total, count, last, last_at)
               VALUES ('a', $1, $2, 10000, 1, 10000, $3)""",
            START.replace(minute=0, second=0) - timedelta(hours=1),
            run,
            START - timedelta(minutes=1, seconds=30),
        )
    async with operating(season, source, clock) as operated:
        await operated.see({"BTC": "93400"})
        assert in_force(operated) == HELD


async def test_after_the_end_nothing_is_bounded(season: Database) -> None:
    async with operating(season) as operated:
        await operated.see(QUIET, after_s=DAY.total_seconds())
        await operated.venue.buy("0.5", leverage=TEN)
        await operated.see({"BTC": "90000"})
        assert in_force(operated) == []


@pytest.mark.parametrize(
    ("start", "is_held"), [("10240", True), ("10239.99", False), ("9765.625", True), ("9765.63", False)]
)
async def test_exactly_three_quarters_of_a_bound_hold_an_account(database: Database, start: str, is_held: bool) -> None:
    source, clock, begun = ScriptedSource(), ManualClock(START), START.replace(minute=0, second=0)
    async with database.connection() as conn:
        await upsert_model(conn, make_model("a"))
        await add_season(conn, start=begun, end=begun + DAY, hour_loss_max_percent=3.125, hour_gain_max_percent=3.2)
    async with operating(database, source, clock) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", type=OrderType.LIMIT, limit_price=Decimal(80_000))
        run = operated.venue.exchange.accounts["a"].run.id
    async with database.connection() as conn:
        await conn.execute(
            """INSERT INTO portfolio_hourly (account_id, hour, run_id, total, count, last, last_at)
               VALUES ('a', $1, $2, $3, 1, $3, $4)""",
            *(begun - timedelta(hours=1), run, Decimal(start), begun - timedelta(minutes=1)),
        )
    async with operating(database, source, clock) as operated:
        await operated.see(QUIET)
        assert (in_force(operated) == HELD) is is_held
