"""The leaderboard ranks entrants with decisions, each from the start of its configuration, and merges replicates."""

import math
from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace
from support.manual_clock import ManualClock
from support.records import (
    HOUR,
    MINUTE,
    START,
    FakeExchange,
    add_invocation,
    add_model,
    add_trade,
    make_account,
    make_model,
    make_snapshot,
    seen,
)

from trader.agents.domain.entrants import Entrant, fingerprint
from trader.agents.domain.models import ModelConfiguration
from trader.agents.sql.entrants import insert_entrant
from trader.agents.sql.models import upsert_model
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.portfolio.analytics import Analytics
from trader.portfolio.domain.histories import RunWindow
from trader.portfolio.leaderboard import LeaderboardEntry
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.sql.snapshots import insert_snapshots

HOURS = 30


def _entrant(model_id: str, number: int, hour: int, configuration: str) -> Entrant:
    return Entrant(
        model_id=model_id,
        number=number,
        fingerprint=fingerprint(f'{{"prompt": "{configuration}"}}', None),
        configuration="{}",
        answered_by=None,
        began_at=START + hour * HOUR,
    )


async def _add(
    conn: Connection, model_id: str, values: list[float], *, group: str | None = None, provider: str = "rules"
) -> None:
    """A model with an hourly equity, ten trades, and its first entrant."""
    await add_model(conn, model_id)
    model = make_model(model_id)
    await upsert_model(conn, replace(model, provider=provider, configuration=ModelConfiguration(replicate_of=group)))
    await ensure_partitions(conn, START)
    await insert_snapshots(
        conn,
        [make_snapshot(model_id, START + n * HOUR + 59 * MINUTE, str(round(v, 2))) for n, v in enumerate(values)],
    )
    for hour in range(10):
        await add_trade(conn, model_id, START + hour * HOUR + MINUTE, label=hour)
    await insert_entrant(conn, _entrant(model_id, 1, 0, group or model_id))


async def _invoke(conn: Connection, model_id: str, entrant: int, hour: int, completed: int, failed: int) -> None:
    for number in range(completed + failed):
        status: Any = "completed" if number < completed else "failed"
        invocation_id = await add_invocation(conn, model_id, START + hour * HOUR + number * MINUTE, status)
        await conn.execute("UPDATE invocations SET entrant = $2 WHERE id = $1", invocation_id, entrant)


async def _board(database: Database, *equities: tuple[str, float], window: RunWindow = "7d") -> list[LeaderboardEntry]:
    exchange: Any = FakeExchange(
        *(make_account(name, realized=Decimal(str(round(value - 10_000, 2)))) for name, value in equities)
    )
    clock = ManualClock(START)
    await clock.advance(HOURS * HOUR)
    return await Analytics(database, exchange, clock, CurrentRuns(database)).leaderboard(window, "pnlPercent")


def _wave(slope: float, phase: float = 0) -> list[float]:
    return [10_000 + slope * hour + 20 * math.sin(hour + phase) for hour in range(HOURS)]


async def test_entrants_with_low_coverage_are_listed_last_without_a_rank(database: Database) -> None:
    async with database.connection() as conn:
        for name, completed, failed in (("best", 18, 2), ("good", 19, 1), ("poor", 20, 0)):
            await _add(conn, name, _wave(1))
            await _invoke(conn, name, 1, 0, completed, failed)
    board = await _board(database, ("best", 10_300), ("good", 10_200), ("poor", 10_100))
    assert [(entry.model.id, entry.rank, entry.record.coverage_percent) for entry in board] == [
        ("good", 1, 95),
        ("poor", 2, 100),
        ("best", None, 90),
    ]


async def test_a_new_entrant_counts_from_its_start(database: Database) -> None:
    async with database.connection() as conn:
        await _add(conn, "one", [10_000 + 100 * hour for hour in range(HOURS)])
        await _invoke(conn, "one", 1, 0, 0, 5)
        await insert_entrant(conn, _entrant("one", 2, 20, "b"))
        await _invoke(conn, "one", 2, 20, 5, 0)
        await add_trade(conn, "one", START + 5 * HOUR, gross="90", label="of the earlier entrant")
        best = await add_trade(conn, "one", START + 21 * HOUR, gross="30")
        for gross in ("20", "-40"):
            await add_trade(conn, "one", START + 22 * HOUR, gross=gross, label=gross)
    (entry,) = await _board(database, ("one", 13_000))
    assert seen(entry.start_value, entry.pnl_absolute, entry.trades_count) == (11_900, 1_100, 3)
    assert entry.best_trade is not None
    assert entry.best_trade.id == best.int
    assert (entry.rank, entry.record.number, entry.record.coverage_percent) == (1, 2, 100)
    assert entry.evidence.hours == 10


async def test_replicates_are_one_row_with_their_spread(database: Database) -> None:
    async with database.connection() as conn:
        for number, phase in enumerate((0, 1, 2), 1):
            await _add(conn, f"ada-{number}", _wave(5, phase), group="ada")
            await _invoke(conn, f"ada-{number}", 1, 0, 20, number - 1)
        await _add(conn, "bob", _wave(5))
        await _invoke(conn, "bob", 1, 0, 1, 0)
    equities = [("ada-1", 10_100.0), ("ada-2", 10_200.0), ("ada-3", 10_600.0), ("bob", 10_150.0)]
    board = await _board(database, *equities)
    assert [(entry.model.id, entry.rank) for entry in board] == [("ada-1", 1), ("bob", 2)]
    ada, bob = board
    assert seen(ada.pnl_percent, ada.pnl_absolute, ada.end_value, ada.trades_count) == (
        pytest.approx(3),
        300,
        10_300,
        30,
    )
    assert ada.record.coverage_percent == pytest.approx(100 * 60 / 63)
    assert bob.replicates is None
    assert ada.replicates is not None
    assert [model.id for model in ada.replicates.models] == ["ada-1", "ada-2", "ada-3"]
    assert seen(ada.replicates.lowest_percent, ada.replicates.highest_percent) == (pytest.approx(1), pytest.approx(6))
    assert ada.replicates.noise is not None
    assert 50 < (ada.replicates.noise.noise_percent or 0) < 100, "the waves are the noise, and they differ"
    assert ada.evidence.hours == HOURS


async def test_the_cost_of_a_row_is_of_its_window_and_of_all_replicates(database: Database) -> None:
    async with database.connection() as conn:
        for number in (1, 2):
            await _add(conn, f"ada-{number}", _wave(5), group="ada", provider="lab")
            for hour in (1, 20):
                await _invoke(conn, f"ada-{number}", 1, hour, 1, 0)
        await conn.execute("UPDATE invocations SET cost_usd = 1 WHERE model_id = 'ada-1'")
        await conn.execute("UPDATE invocations SET cost_usd = 4 WHERE model_id = 'ada-2'")
        await _add(conn, "bob", _wave(5), provider="lab")
        await _invoke(conn, "bob", 1, 20, 1, 0)
        await _add(conn, "rules", _wave(5))
    equities = (("ada-1", 10_100.0), ("ada-2", 10_200.0), ("bob", 10_050.0), ("rules", 10_010.0))
    windows: tuple[tuple[RunWindow, float], ...] = (("run", 10), ("7d", 10), ("24h", 5))
    for window, together in windows:
        ada, bob, rules = await _board(database, *equities, window=window)
        assert ada.replicates is not None
        assert seen(ada.replicates.cost_usd, ada.cost_usd) == (together, together / 2)
        assert ada.net_after_cost == ada.pnl_absolute - Decimal(together) / 2
        assert seen(bob.cost_usd, bob.net_after_cost) == (None, None), "no provider reported a cost"
        assert seen(rules.cost_usd, rules.net_after_cost) == (0, rules.pnl_absolute)


async def test_a_replicate_that_became_another_entrant_has_its_own_row(database: Database) -> None:
    async with database.connection() as conn:
        for number in (1, 2, 3):
            await _add(conn, f"ada-{number}", _wave(5), group="ada")
            await _invoke(conn, f"ada-{number}", 1, 0, 1, 0)
        await insert_entrant(conn, _entrant("ada-2", 2, 20, "b"))
        await _invoke(conn, "ada-2", 2, 20, 1, 0)
    board = await _board(database, *((f"ada-{number}", 10_000 + number) for number in (1, 2, 3)))
    assert board[0].rank == 1
    assert {entry.model.id: entry.replicates and len(entry.replicates.models) for entry in board} == {
        "ada-1": 2,
        "ada-2": None,
    }


async def test_accounts_of_one_configuration_are_replicates_declared_or_not(database: Database) -> None:
    async with database.connection() as conn:
        for name in ("ada", "bob"):
            await _add(conn, name, _wave(5))
        await conn.execute(
            "UPDATE entrants SET fingerprint = (SELECT fingerprint FROM entrants WHERE model_id = 'ada')"
        )
    (entry,) = await _board(database, ("ada", 10_100), ("bob", 10_300))
    assert entry.replicates is not None
    assert [model.id for model in entry.replicates.models] == ["ada", "bob"]
    assert seen(entry.pnl_percent) == (pytest.approx(2),)


async def test_a_window_starts_at_its_minute_in_every_answer(database: Database) -> None:
    values = [10_000.0 + hour for hour in range(HOURS)]
    since = START + (HOURS - 24) * HOUR + 45 * MINUTE
    async with database.connection() as conn:
        for name in ("ada-1", "ada-2"):
            await _add(conn, name, values, group="ada")
        await insert_snapshots(
            conn, [make_snapshot("ada-1", since, "8000"), make_snapshot("ada-1", since + MINUTE, "1")]
        )
    exchange: Any = FakeExchange(*(make_account(name, realized=Decimal(0)) for name in ("ada-1", "ada-2")))
    clock = ManualClock(START)
    await clock.advance(HOURS * HOUR + 45 * MINUTE)
    analytics = Analytics(database, exchange, clock, CurrentRuns(database))
    ada, other = await analytics.leaderboard("24h", "pnlPercent", is_merged=False)
    hour_before = Decimal(values[HOURS - 25])
    assert [(each.id, each.since, each.start_value) for each in (ada, other)] == [
        ("ada-1", since, Decimal(8000)),
        ("ada-2", since, hour_before),
    ]
    start, end, starts = await analytics.window("24h")
    assert (start, end) == (since, clock.now())
    assert {key: each.value for key, each in starts.items()} == {"ada-1": Decimal(8000), "ada-2": hour_before}
    (merged,) = await analytics.leaderboard("24h", "pnlPercent")
    assert merged.id not in {"ada-1", "ada-2"}, "no account has the mean of two"
    assert (merged.start_value, len(merged.models)) == ((8000 + hour_before) / 2, 2)
