"""Seasons for tests: their rules, and an open one."""

from datetime import timedelta
from typing import Any

from msgspec.structs import replace
from support.records import START

from trader.database.pool import Connection
from trader.portfolio.domain.seasons import SeasonRecord, SeasonRules
from trader.portfolio.sql.seasons import insert_season_record

DAY = timedelta(days=1)
RULES = SeasonRules(
    name="Winter",
    start=START + DAY,
    end=START + 31 * DAY,
    markets=["BTC", "ETH"],
    capital=10_000,
    taker_fee_bps=5,
    maker_fee_bps=2,
    latency_ms=200,
    replicates=1,
    compare=["holdNothing", "bestOther"],
    alpha=0.05,
    stopping="end",
    disqualify=[],
)


async def add_season(conn: Connection, **changes: Any) -> SeasonRules:
    """Open a season with these rules at any time."""
    rules = replace(RULES, **changes)
    await insert_season_record(conn, SeasonRecord(step="opened", season=1, number=0, at=START, rules=rules))
    return rules
