"""Evidence over real rows: entrants of the current runs, their baselines, and replicates."""

import math

import numpy as np
import pytest
from msgspec import UNSET, to_builtins
from msgspec.structs import replace
from support.evidence_bench import HOURS, Bench
from support.records import (
    HOUR,
    MINUTE,
    START,
    add_invocation,
    add_run,
    add_trade,
    id_of,
    make_model,
    make_run,
    make_snapshot,
)

from trader.agents.domain.entrants import Entrant
from trader.agents.domain.invocations import ToolCall
from trader.agents.domain.models import EXTERNAL, Declared, ModelConfiguration
from trader.agents.entrants import first_entrant
from trader.agents.sql.entrants import insert_entrant
from trader.agents.sql.invocations import insert_tool_call
from trader.agents.sql.models import upsert_model
from trader.api.schemas.evidence import EntrantRow
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.market.domain.markets import Candle
from trader.market.sql.candles import insert_minutes
from trader.portfolio.domain.baselines import BUY_AND_HOLD
from trader.portfolio.sql import snapshots as portfolio_store


@pytest.fixture
async def bench(database: Database) -> Bench:
    made = Bench(database)
    await made.model("good", 1, 0.02)
    await made.model("plain", 2, 0.0)
    await made.clock.advance(HOURS * HOUR + 10 * MINUTE)
    return made


async def test_entrants_are_distinguished_from_their_references(bench: Bench) -> None:
    await bench.baseline(BUY_AND_HOLD, np.random.default_rng(9).normal(0, 0.004, HOURS))
    report = await bench.report()
    good, plain = report["good#0"], report["plain#0"]
    words = {each.reference: each.verdict.word for each in good.comparisons}
    assert words["holdNothing"] == words["buyAndHold"] == "better"
    assert words["ruleAgent"] == "not distinguishable yet"
    assert {each.reference: each.verdict.word for each in plain.comparisons}["bestOther"] == "worse"
    assert (good.is_among_best, plain.is_among_best) == (True, False)
    assert good.statement.hours == HOURS
    assert good.return_percent == pytest.approx(
        100 * math.expm1(float(np.random.default_rng(1).normal(0.02, 0.004, HOURS).sum()))
    )
    assert good.statement.interval_percent is not None
    week = (await bench.report(window="7d"))["good#0"]
    assert (week.statement.hours, week.trades) == (168, 9)
    assert week.statement.reason == "9 completed trades; a statement about a model needs 10"
    (nothing,) = (each for each in week.comparisons if each.reference == "holdNothing")
    assert (nothing.window.hours, nothing.verdict.statement.hours) == (168, HOURS)


async def test_behavior_covers_the_current_entrant_and_observed_prices(bench: Bench) -> None:
    """Trades of 0.01 BTC at 100,000 with a gain of 10; prices during the first reached 102,000."""
    candle = Candle(START + 9 * HOUR + 30 * MINUTE, 100_000.0, 102_000.0, 99_000.0, 100_000.0, 0.0)
    hours = [
        candle._replace(open_time=START + hour * HOUR, high=100_000.0, low=100_000.0) for hour in range(-25, HOURS)
    ]
    async with bench.database.connection() as conn:
        await insert_minutes(conn, [("BTC", candle), *(("BTC", each) for each in hours)])
        invocation = await add_invocation(conn, "good", START + 9 * HOUR)
        decisions = [{"type": "UPDATE_EXIT_PLAN", "symbol": "BTC"}]
        await insert_tool_call(
            conn,
            ToolCall(
                id=id_of("call", "plan"), invocation_id=invocation, number=1, type="UPDATE_EXIT_PLAN", status="ok",
                metadata={"raw": None, "decisions": decisions, "results": [{}]}, created_at=START + 9.5 * HOUR,
            ),
        )  # fmt: skip
    described = await bench.evidence.behaviour("good")
    assert described is not None
    behaviour = described.behaviour
    assert (behaviour.positions, behaviour.flips, behaviour.plans_changed) == (12, 0, 1)
    assert behaviour.time_in_market_percent == pytest.approx(100 * 12 / (HOURS + 1 / 6))
    assert behaviour.captured_percent == pytest.approx(100 * 120 / (20 + 11 * 10))
    assert behaviour.leverage_by_volatility == pytest.approx([1.0] * 6)
    assert await bench.evidence.behaviour("nobody") is None


async def test_behavior_of_replicates_is_compared(bench: Bench) -> None:
    await bench.model("copy", 3, 0.0, trades=6)
    async with bench.database.connection() as conn:
        for model_id in ("good", "copy"):
            await insert_entrant(
                conn,
                Entrant(
                    model_id=model_id, number=1, fingerprint="1" * 64, configuration="{}", answered_by=None,
                    began_at=START,
                ),
            )  # fmt: skip
    described = await bench.evidence.behaviour("good")
    assert described is not None
    assert (described.replicates, described.behaviour.alike_percent) == (["copy"], 50)


async def test_a_configuration_change_starts_an_entrant_with_its_own_hours(bench: Bench) -> None:
    changed_at = START + 100 * HOUR + 20 * MINUTE
    async with bench.database.connection() as conn:
        for number, began_at in ((1, START), (2, changed_at)):
            await insert_entrant(
                conn,
                Entrant(
                    model_id="good", number=number, fingerprint=f"{number}" * 64, configuration="{}", answered_by=None,
                    began_at=began_at,
                ),
            )  # fmt: skip
    report = await bench.report(model_id="good")
    assert list(report) == ["good#2", "good#1"]
    first, second = report["good#1"], report["good#2"]
    assert (first.statement.hours, first.trades, first.ended_at) == (100, 10, changed_at)
    assert (second.statement.hours, second.trades, second.ended_at) == (99, 2, None)
    assert second.statement.reason == "2 completed trades; a statement about a model needs 10"


async def test_each_entrant_shows_the_agents_declaration_of_its_time(bench: Bench) -> None:
    model = replace(make_model("good"), provider=EXTERNAL, router_model_name="lab/one")
    async with bench.database.transaction() as conn:
        for number in (1, 2):
            said = replace(model, configuration=ModelConfiguration(declared=Declared(version=str(number))))
            await upsert_model(conn, said)
            entrant = first_entrant(said, bench.settings, "lab/one", START + number * HOUR)
            await insert_entrant(conn, replace(entrant, number=number))
    shown = {name: EntrantRow.of(each).declared for name, each in (await bench.report()).items()}
    said_by = {name: to_builtins(declared) for name, declared in shown.items() if declared is not UNSET}
    assert said_by == {f"good#{number}": {"model": "lab/one", "version": str(number)} for number in (1, 2)}


async def test_the_family_covers_the_whole_board_regardless_of_the_view(bench: Bench) -> None:
    alone, whole = (await bench.report(model_id="good"))["good#0"], (await bench.report())["good#0"]
    assert alone.comparisons == whole.comparisons
    assert await bench.report(model_id="nobody") == {}
    assert await bench.report(variant=VariantId.SOVEREIGN) == {}


async def test_replicates_are_compared_as_one_and_not_with_each_other(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        await conn.execute("UPDATE models SET configuration = '{\"replicate_of\": \"good\"}' WHERE id = 'good'")
        await conn.execute("UPDATE runs SET number = 3 WHERE account_id = 'plain'")
    await bench.model("good-2", 5, 0.02, trades=2)
    async with bench.database.connection() as conn:
        await conn.execute("UPDATE models SET configuration = '{\"replicate_of\": \"good\"}' WHERE id = 'good-2'")
        for name in ("good", "good-2"):
            entrant = Entrant(
                model_id=name, number=1, fingerprint="a" * 64, configuration="{}", answered_by=None, began_at=START
            )
            await insert_entrant(conn, entrant)
    report = await bench.report()
    assert list(report) == ["good#1", "plain#0"], "replicates are one row"
    first, plain = report["good#1"], report["plain#0"]
    two = (await bench.report(model_id="good-2"))["good-2#1"]
    assert two._replace(model=first.model, account=first.account) == first, "with the figures of all of them"
    references = {each.reference: each for each in first.comparisons}
    assert references["bestOther"].reference_key is None, "of 12 and 2 trades: 7 in the mean, so it is not judged yet"
    assert references["holdNothing"].window.reason == "7 completed trades; a statement about a model needs 10"
    assert first.replicates is not None
    assert first.replicates == two.replicates
    assert (plain.attempt, first.attempt) == (3, 1)
    (nothing,) = (each for each in plain.comparisons if each.reference == "holdNothing")
    assert nothing.verdict.statement.attempts == 3
    async with bench.database.connection() as conn:
        for number in range(12):
            await add_trade(conn, "good-2", START + (number + 1) * 9 * HOUR, label=100 + number)
    report = await bench.report()
    references = {each.reference: each for each in report["good#1"].comparisons}
    assert references["bestOther"].reference_key == "plain#0", "and not its own replicate"
    assert references["holdNothing"].verdict.word == "better"
    assert {each.reference: each.reference_key for each in report["plain#0"].comparisons}["bestOther"] == "good#1"


async def test_a_reset_hides_nothing_of_the_account(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        await add_run(conn, "plain", make_run("plain", 2, at=START + 150 * HOUR))
        await add_trade(conn, "plain", START + 149 * HOUR, gross="-5608", fees="100", notional="10000", label="loss")
        again = replace(make_snapshot("plain", START + 200 * HOUR + MINUTE, "12000"), run_id=make_run("plain", 2).id)
        await portfolio_store.insert_snapshots(conn, [again])
    account = (await bench.report())["plain#0"].account
    assert account is not None
    assert (account.runs, account.started_at) == (2, START)
    assert account.return_percent == pytest.approx(100 * 0.44 * 1.2 - 100)
