"""The board of a season over stored rows: the manipulations that it prevents, and the rules of its verdicts."""

from datetime import datetime
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.evidence_bench import HOURS, Bench
from support.records import HOUR, MINUTE, START, FakeExchange, add_model, add_run, add_trade, make_run
from support.seasons import RULES, add_season

from trader.api.schemas.evidence import GetEvidenceOutput, PrimaryResult, Rank
from trader.core.intervals import e_bh
from trader.core.variant_id import VariantId
from trader.database.pool import Connection, Database
from trader.exchange.paper import PaperExchange
from trader.portfolio.analytics import Analytics
from trader.portfolio.domain.baselines import BUY_AND_HOLD
from trader.portfolio.domain.board import PrimaryComparison, RankInterval
from trader.portfolio.domain.seasons import SeasonRecord
from trader.portfolio.evidence import Evidence
from trader.portfolio.leaderboard import LeaderboardEntry
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.sql.seasons import insert_season_record

END = START + 300 * HOUR


async def _trade_by_hand(conn: Connection, account_id: str, at: datetime) -> None:
    await conn.execute(
        """WITH placed AS (
               INSERT INTO order_requests (id, account_id, run_id, client_order_id, created_at, answer)
               SELECT gen_random_uuid(), $1, id, 'x', $2, '{"manual": true, "status": "filled"}'
               FROM runs WHERE account_id = $1
               RETURNING id, run_id
           ), held AS (SELECT id FROM orders WHERE account_id = $1 LIMIT 1)
           INSERT INTO fills (account_id, sequence, run_id, order_id, request_id, symbol, side, quantity, price, fee,
                              liquidation_fee, maker, cause, created_at)
           SELECT $1, 1, run_id, held.id, placed.id, 'BTC', 'buy', 1, 1, 0, 0, false, 'order', $2 FROM placed, held""",
        account_id,
        at,
    )


async def _shown(bench: Bench) -> list[tuple[Any, ...]]:
    """What the two boards say about each entrant."""
    evidence, board = await bench.evidence.report("run"), await _leaderboard(bench)
    return [
        *(
            (each.model.id, each.record, each.return_percent, each.trades, each.rank, each.off_board, each.account)
            for each in evidence.entrants
        ),
        *((verdict.reference, verdict.verdict) for each in evidence.entrants for verdict in each.comparisons),
        *((each.model.id, each.end_value, each.max_drawdown, each.trades, each.rank, each.off_board) for each in board),
    ]


async def _leaderboard(bench: Bench) -> list[LeaderboardEntry]:
    exchange: PaperExchange = FakeExchange()  # type: ignore[assignment]
    return await Analytics(bench.database, exchange, bench.clock, bench.runs).leaderboard("run", "pnlPercent")


@pytest.fixture
async def bench(database: Database) -> Bench:
    """More than a week of a season that began with the rows, in which `good` earns and `plain` does not."""
    made = Bench(database)
    await made.model("good", 1, 0.02)
    await made.model("plain", 2, 0.0)
    async with database.connection() as conn:
        await add_season(conn, start=START, end=END)
    await made.clock.advance(HOURS * HOUR + 10 * MINUTE)
    return made


async def test_a_lucky_beginner_has_no_rank_and_is_never_the_best(bench: Bench) -> None:
    begun = START + 170 * HOUR
    async with bench.database.connection() as conn:
        await add_model(conn, "young")
        await conn.execute("UPDATE runs SET started_at = $1 WHERE account_id = 'young'", begun)
        for number in range(12):
            await add_trade(conn, "young", begun + (number + 1) * HOUR, label=number)
    gain = np.full(30, np.log(1.197) / 30) + np.random.default_rng(3).normal(0, 0.001, 30)
    await bench.curve("young", gain, since=begun)
    await bench.model("sunk", 5, np.log(0.41) / HOURS)
    report = await bench.report()
    young = report["young#0"]
    assert (young.rank, young.is_among_best, young.age_hours) == (None, True, 30)
    assert young.off_board is not None
    assert young.off_board.startswith("it began at 2026-03-11T02:00:00.000Z; entry was until")
    assert (await bench.evidence.report("run")).best == "good"
    assert report["good#0"].rank == RankInterval(1, 1, 3)
    sunk = report["sunk#0"]
    assert {each.reference: each.verdict.word for each in sunk.comparisons}["bestOther"] == "worse"
    assert not sunk.is_among_best
    assert sunk.account.return_percent == pytest.approx(-59, abs=4)


async def test_a_new_prompt_keeps_the_accounts_past_losses(bench: Bench) -> None:
    changed = START + 150 * HOUR
    await bench.configure("plain", "a")
    await bench.configure("plain", "b", 2, changed)
    lost = np.concatenate([np.full(150, np.log(0.44) / 150), np.full(50, 0.0074 / 50)])
    async with bench.database.connection() as conn:
        await conn.execute("DELETE FROM portfolio_hourly WHERE account_id = 'plain'")
        await conn.execute("DELETE FROM portfolio_snapshots WHERE account_id = 'plain'")
    await bench.curve("plain", lost)
    row = (await bench.report())["plain#2"]
    assert row.return_percent == pytest.approx(0.74, abs=0.1)
    assert row.account.return_percent == pytest.approx(100 * (0.44 * np.exp(0.0074) - 1), abs=0.01)
    assert row.rank is None
    assert (row.age_hours, row.account.runs) == (50, 1)
    assert [(each.number, each.fingerprint, each.ended_at) for each in row.account.entrants] == [
        (1, "a" * 64, changed),
        (2, "b" * 64, None),
    ]


async def test_a_reset_removes_no_loss_from_the_board(bench: Bench) -> None:
    reset = START + 150 * HOUR + 30 * MINUTE
    async with bench.database.connection() as conn:
        await add_trade(conn, "plain", reset, gross="-5608", fees="100", notional="10000", label="loss")
        await add_run(conn, "plain", make_run("plain", 2, at=reset))
        await conn.execute("DELETE FROM portfolio_hourly WHERE account_id = 'plain' AND hour >= $1", reset)
        await conn.execute("DELETE FROM portfolio_snapshots WHERE account_id = 'plain' AND created_at >= $1", reset)
    await bench.curve("plain", np.full(49, 0.5 / 49), since=START + 151 * HOUR, number=2)
    row = (await bench.report())["plain#0"]
    assert row.rank is None
    assert row.account.runs == 2
    assert row.account.return_percent == pytest.approx(100 * (0.44 * np.exp(0.5) - 1), abs=0.1), "to the last minute"
    assert (await bench.evidence.report("run")).best == "good"


async def test_replicates_share_one_rank_and_a_manual_order_excludes_an_account(bench: Bench) -> None:
    twins = [f"twin-{number}" for number in range(5)]
    for number, name in enumerate(twins):
        await bench.model(name, 10 + number, 0.001)
        await bench.configure(name, "c")
    report = await bench.report()
    assert set(report) == {"good#0", "plain#0", "twin-0#1"}
    row = report["twin-0#1"]
    assert row.rank is not None
    assert row.rank.among == 3
    assert row.replicates is not None
    assert row.replicates.model_ids == twins
    (nothing,) = (each for each in row.comparisons if each.reference == "holdNothing")
    assert row.statement.estimate == nothing.window.estimate, "its own return covers the compared window"
    async with bench.database.connection() as conn:
        await _trade_by_hand(conn, "good", START + HOUR)
    why = "the account was traded by hand at 2026-03-04T01:00:00.000Z"
    good = (await bench.report())["good#0"]
    assert (good.off_board, good.rank) == (why, None), "listed with the reason in the run that a hand traded"
    assert {each.model.id: each.off_board for each in await _leaderboard(bench)}["good"] == why
    async with bench.database.connection() as conn:
        await add_run(conn, "good", make_run("good", 2, at=START + 199 * HOUR))
    assert (await bench.report())["good#0"].off_board == why, "and after a reset"


async def test_verdicts_follow_the_season_and_its_family(bench: Bench) -> None:
    report = await bench.report()
    verdicts = [each.verdict for entrant in report.values() for each in entrant.comparisons]
    assert {(each.family, each.level) for each in verdicts} == {(3, 0.05)}, "one pair, and nothing held"
    assert {each.reference for each in report["plain#0"].comparisons} == {"holdNothing", "bestOther"}
    assert {each.verdict.statement.hours for each in report["plain#0"].comparisons} == {HOURS}


async def _amend(database: Database, number: int = 1, **changed: Any) -> None:
    rules = replace(RULES, start=START, end=END, **changed)
    async with database.connection() as conn:
        record = SeasonRecord(step="amended", season=1, number=number, at=START, rules=rules, reason="before the start")
        await insert_season_record(conn, record)


@pytest.mark.parametrize("against", ["plain", "holdNothing", "buyAndHold"])
async def test_the_primary_comparison_has_its_own_level_and_all_others_are_exploratory(
    bench: Bench, against: str
) -> None:
    await bench.baseline(BUY_AND_HOLD, np.random.default_rng(8).normal(0, 0.004, HOURS))
    await _amend(bench.database, primary=PrimaryComparison(entrant="good", against=against, alpha=0.02))
    report = await bench.evidence.report("run")
    assert report.primary is not None
    assert (report.primary.word, report.primary.family, report.primary.level) == ("better", 1, 0.02)
    shown = GetEvidenceOutput.of("run", report)
    assert isinstance(shown.primary, PrimaryResult)
    assert (shown.primary.entrant, shown.primary.against, shown.primary.alpha) == ("good", against, 0.02)
    assert shown.primary.hours == HOURS
    assert (await bench.evidence.report("run", VariantId.APEX)).primary is None, "a board of some"
    verdicts = [each.verdict for entrant in report.entrants for each in entrant.comparisons]
    rates = e_bh([each.statement.e_value for each in verdicts[:-1]], 3)  # the best one's pair is there twice
    assert {each.p_value for each in verdicts} == set(rates)
    assert report.entrants[0].rank == RankInterval(1, 1, 2), "by Holm's method"


async def test_no_primary_verdict_on_an_entrant_that_is_off_the_board(bench: Bench) -> None:
    await _amend(bench.database, primary=PrimaryComparison(entrant="plain", against="good", alpha=0.05))
    async with bench.database.connection() as conn:
        await _trade_by_hand(conn, "good", START + HOUR)
    primary = (await bench.evidence.report("run")).primary
    assert primary is not None
    assert primary.word == "not distinguishable yet"
    assert primary.why == "good: the account was traded by hand at 2026-03-04T01:00:00.000Z"


async def test_a_verdict_rests_on_the_bounds_of_the_season_and_not_on_seen_leverage(bench: Bench) -> None:
    """`good` gains 2 % an hour; at a leverage of 5 an hour might lose everything."""
    async with bench.database.connection() as conn:
        await conn.execute("UPDATE portfolio_hourly SET leverage = 5")
    await _amend(bench.database, hour_loss_max_percent=4.0)
    bench.evidence = Evidence(bench.database, CurrentRuns(bench.database), bench.clock)
    verdict = (await bench.report())["good#0"].comparisons[0].verdict
    assert (verdict.statement.bound, verdict.word) == (0.04, "better")
    await _amend(bench.database, 2, hour_loss_max_percent=0.5, hour_gain_max_percent=0.5)
    verdict = (await bench.report())["plain#0"].comparisons[0].verdict
    assert verdict.word == "not distinguishable yet"
    assert verdict.why is not None
    assert verdict.why.startswith("withdrawn: an hour had a ")


async def test_boards_are_unaffected_before_and_after_a_season(database: Database) -> None:
    bench = Bench(database)
    await bench.model("good", 1, 0.02)
    await bench.clock.advance(HOURS * HOUR + 10 * MINUTE)
    async with database.connection() as conn:
        await add_season(conn, start=START + 250 * HOUR, end=END)
    announced = await bench.evidence.report("run")
    assert announced.season is None
    assert len(announced.entrants[0].comparisons) == 4


async def test_a_season_ends_while_the_service_continues(database: Database) -> None:
    bench = Bench(database)
    await bench.model("good", 1, 0.02, trades=18)
    async with database.connection() as conn:
        rules = await add_season(conn, start=START + 10 * HOUR, end=START + 110 * HOUR, entry_until=START + 20 * HOUR)
    await bench.clock.advance(HOURS * HOUR + 10 * MINUTE)
    report = await bench.evidence.report("run")
    assert report.until == rules.end
    (row,) = report.entrants
    assert (row.age_hours, row.trades) == (100, 10), "of 18 trades, one every ten hours"
    growth = np.random.default_rng(1).normal(0.02, 0.004, HOURS)[10:110].sum()
    assert row.account.return_percent == pytest.approx(100 * np.expm1(growth))


async def test_actions_after_the_end_change_no_board(database: Database) -> None:
    """A reset, a new prompt and a manual order, each followed by hours, before the season is closed."""
    bench = Bench(database)
    for seed, name in enumerate(("good", "plain", "tried"), start=1):
        await bench.model(name, seed, 0.01 / seed, trades=19)
        await bench.configure(name, "abc"[seed - 1])
    async with database.connection() as conn:
        await add_season(conn, start=START, end=START + 180 * HOUR, disqualify=["reset", "change"])
    await bench.clock.advance(HOURS * HOUR + 10 * MINUTE)
    shown = await _shown(bench)
    assert [row[0] for row in shown if len(row) == 6] == ["good", "plain", "tried"]
    after = START + 185 * HOUR
    async with database.connection() as conn:
        await add_trade(conn, "good", after, gross="-9000", fees="0", notional="10000", label="loss")
        await add_run(conn, "good", make_run("good", 2, at=after))
        await _trade_by_hand(conn, "tried", after)
        await add_model(conn, "late")
        await conn.execute("UPDATE runs SET started_at = $1 WHERE account_id = 'late'", after)
    await bench.configure("plain", "d", 2, after)
    await bench.curve("good", np.full(14, 0.1), since=after + HOUR, number=2)
    for runs in (bench.runs, CurrentRuns(database)):  # already loaded, and as read by a new process
        bench.evidence = Evidence(database, runs, bench.clock)
        assert await _shown(bench) == shown


async def test_a_rule_loosened_after_the_start_shows_both_verdicts(bench: Bench) -> None:
    loose = replace(RULES, start=START, end=END, alpha=0.5)
    strict = replace(loose, alpha=1e-12)
    amended = [
        SeasonRecord(step="amended", season=1, number=1, at=START, rules=strict, reason="too many errors"),
        SeasonRecord(step="amended", season=1, number=2, at=START, rules=loose, reason="no error", after_start=True),
    ]
    async with bench.database.connection() as conn:
        for record in amended:
            await insert_season_record(conn, record)
    shown = GetEvidenceOutput.of("run", await bench.evidence.report("run"))
    (good,) = (each for each in shown.entrants if each.model_id == "good")
    (nothing,) = (each for each in good.differences if each.reference == "holdNothing")
    assert (nothing.verdict, nothing.verdict_before) == ("better", "not distinguishable yet")
    assert nothing.p_value == nothing.p_value_before
    assert good.rank_before == Rank(first=1, last=2, among=2)
    assert shown.best == "good"


async def test_the_board_says_what_it_cannot_separate_and_names_a_best_only_alone(bench: Bench) -> None:
    shown = GetEvidenceOutput.of("run", await bench.evidence.report("run"))
    assert shown.best == "good"
    assert shown.resolution.now is not None
    assert shown.resolution.at_end is not None
    assert shown.resolution.now > shown.resolution.at_end > 0
    (plain,) = (each for each in shown.entrants if each.model_id == "plain")
    (nothing,) = (each for each in plain.differences if each.reference == "holdNothing")
    assert nothing.days_needed is None
    assert nothing.reason is not None
    assert nothing.reason.startswith("cannot tell yet; not within this season for a true difference as large as")
    await bench.model("equal", 7, 0.02)
    assert GetEvidenceOutput.of("run", await bench.evidence.report("run")).best is None
