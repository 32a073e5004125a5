"""Recordings: replaying a recorded live session leaves the same ledger, byte for byte."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from support.kills import SIZES, Act, Timed, repeat, rows
from support.records import START
from support.run_profile import is_nightly

from trader.database.pool import Database
from trader.market.domain.markets import MARKETS, Market, Tick
from trader.market.sources.recorded import RecordedSource
from trader.market.sources.recorder import Recorder, find_recording, read_lines
from trader.market.sources.source import MarketSource
from trader.market.sources.synthetic import SyntheticSource
from trader.portfolio.audit import audit

MINUTE = timedelta(minutes=1)
SPAN = timedelta(minutes=60 if is_nightly() else 4)
BEGIN = START.replace(minute=57, second=30)
"""Shortly before a full hour: funding is paid along the way, and a second file starts."""


class Market13(SyntheticSource):
    """A synthetic market whose rules, rates and activity change, as at a venue."""

    def __init__(self) -> None:
        super().__init__(13, tuple(SIZES))
        self.markets: dict[str, Market] = dict(self.markets)

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        async for tick in super().history(after, until):
            if tick.at > BEGIN + 3 * MINUTE:
                self.markets["ETH"] = replace(MARKETS["ETH"], lot=Decimal("0.01"), maintenance_rate=Decimal("0.03"))
            yield Tick(tick.at, {s: quote for s, quote in tick.quotes.items() if s != "SOL" or tick.at.second % 7})

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        return Decimal(boundary.hour - len(symbol)) / 100_000


def drawn_acts(source: SyntheticSource, seed: int) -> list[Timed]:
    """Orders of three accounts, from tiny ones to ones that walk through most of a book, and some that rest."""
    rng, acts = Random(seed), []
    for number in range(int(SPAN / timedelta(seconds=2))):
        at = BEGIN + timedelta(seconds=2 * number + 1, milliseconds=rng.randrange(1000))
        symbol, side = rng.choice(list(SIZES)), rng.choice(["buy", "sell"])
        price = float(source.tick(int(at.timestamp())).quotes[symbol].mark)
        order: dict[str, object] = {
            "symbol": symbol, "side": side, "quantity": SIZES[symbol] * rng.choice([0.2, 1, 3, 40]), "leverage": 10,
        }  # fmt: skip
        if rng.random() < 0.5:
            sign = 1 if side == "buy" else -1
            order |= {"type": "limit", "limitPrice": price * (1 - sign * rng.uniform(-0.0001, 0.0005))}
        acts.append(Timed(at, Act(rng.choice(["one", "two", "three"]), number, order)))
    return acts


async def relive(source: MarketSource, database: Database, acts: list[Timed]) -> dict[str, list[str]]:
    """Live through the same time with the same orders in an empty ledger."""
    async with database.connection() as conn:
        await conn.execute("TRUNCATE accounts, order_requests, service_state, last_marks CASCADE")
    await repeat(source, database, acts, BEGIN, BEGIN + SPAN, SIM_INITIAL_CAPITAL="1000000")
    return await rows(database)


@pytest.mark.slow
async def test_replaying_a_recording_leaves_the_ledger_of_the_live_session(tmp_path: Path, database: Database) -> None:
    live = Market13()
    acts, recorder = drawn_acts(live, seed=5), Recorder(tmp_path, live)
    await repeat(live, database, acts, BEGIN, BEGIN + SPAN, recorder=recorder, SIM_INITIAL_CAPITAL="1000000")
    expected = await rows(database)
    assert (await audit(database)).problems == []
    recorded = RecordedSource(tmp_path, list(SIZES))
    await recorded.open()
    assert (recorded.ends_at, recorded.markets["ETH"]) == (BEGIN + SPAN, MARKETS["ETH"])
    relived = await relive(recorded, database, acts)
    for table, each in expected.items():  # printed first: pytest shows it if they differ
        print(table, *sorted(set(relived[table]) ^ set(each))[:6], sep="\n  ")
    assert relived == expected
    assert recorded.markets["ETH"].lot == Decimal("0.01")
    assert len(expected["fills"]) > 100
    assert expected["funding_payments"]
    lines = [line for paths in find_recording(tmp_path).values() for path in paths for line in read_lines(path)]
    assert any(line.deeper for line in lines)
