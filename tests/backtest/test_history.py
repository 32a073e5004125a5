"""Histories: the rule agents on past days of the synthetic market, in the database of a service."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import product
from typing import Any

import pytest

from trader.agents.domain.models import rule_model
from trader.agents.domain.view import RecordedCandles, Shown
from trader.agents.reproduction import reproduce_invocation
from trader.backtest.advance import Journal
from trader.backtest.baselines import open_baselines
from trader.backtest.history import PastAgent, open_models, past_of, write_history
from trader.backtest.market import BacktestMarket
from trader.backtest.run import Backtest, rule_models
from trader.backtest.values import AccountValues
from trader.core.clock import epoch_second, moment_of
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.exchange.domain.ledger import Posting
from trader.market.domain.markets import Interval
from trader.market.sources.synthetic import SyntheticPast, SyntheticSource
from trader.portfolio.audit import audit
from trader.portfolio.domain.baselines import BUY_AND_HOLD
from trader.portfolio.sql.snapshots import select_baseline_states
from trader.settings.settings import Settings

START = datetime(2025, 3, 4, 20, tzinfo=UTC)
MIDDLE, END = START + timedelta(hours=6), START + timedelta(hours=12)
CYCLE = timedelta(minutes=15)

Fill = tuple[str, int, datetime, str, Decimal, Decimal]


class Recorded(Journal):
    """A journal of fills and snapshots."""

    def __init__(self) -> None:
        self.fills: list[Fill] = []
        self.values: list[tuple[str, datetime, Decimal]] = []

    def post(self, posting: Posting) -> None:
        self.fills += [
            (posting.account.id, fill.sequence, fill.at, fill.symbol, fill.quantity, fill.price)
            for fill in posting.fills
        ]

    def snapshots(self, values: AccountValues) -> None:
        self.values += [(each.account_id, each.created_at, each.net_portfolio) for each in values.snapshots()]


@pytest.fixture
def settings() -> Settings:
    return Settings.load({"SIM_SEED": "7"}, None, demo=True)


def past(settings: Settings, start: datetime, end: datetime) -> SyntheticPast:
    return past_of(SyntheticSource(settings.seed, settings.markets), settings, start, end)


async def traded_at_once(settings: Settings) -> tuple[Recorded, dict[str, Any]]:
    """The results of the same agents in one backtest of the whole time, and the baselines' accounts after it."""
    source = past(settings, START, END)
    market = await BacktestMarket.open(source, ("15m", "1h"))
    models = [rule_model(variant, START) for variant in VariantId]
    agents = [(model, PastAgent(model, settings, END, CYCLE)) for model in models]
    recorded = Recorded()
    run = Backtest.fresh(market, settings, agents, [recorded], has_baselines=False)
    run = Backtest(market, run.rules, run.accounts, open_baselines(market, settings, ()), [recorded])
    for _ in run.run():
        if run.engine.is_due:
            await run.engine.invoke()
    return recorded, {followed.baseline.id: followed.state.saved().account for followed in run.baselines}


@pytest.mark.parametrize("runs_ahead", [False, True])
async def test_whoever_reads_between_hours_finds_every_snapshot(settings: Settings, runs_ahead: bool) -> None:
    end = START + timedelta(hours=2)
    market = await BacktestMarket.open(past(settings, START, end), ("15m", "1h"))
    models = rule_models(list(VariantId), "15m", START, {})
    if runs_ahead:
        models[:1] = [(models[0][0], PastAgent(models[0][0], settings, end, CYCLE))]
    run = Backtest.fresh(market, settings, models, [])
    times = []
    for reached in run.run():
        times.append(reached)
        if run.engine.is_due:
            await run.engine.invoke()
        if not runs_ahead:
            run.engine.complete()
        if reached > START:  # the snapshot in the minute of a session is taken after its view
            assert all(each.next_snapshot > epoch_second(reached) for each in run.accounts[runs_ahead:])
    assert {reached.minute for reached in times} >= {0, 15, 30, 45}


async def test_what_agents_are_shown_equals_a_fresh_market_in_any_order_of_looks(settings: Settings) -> None:
    settings = Settings.load({"SIM_SEED": "7", "MARKETS": "BTC"}, None, demo=True)
    source = past(settings, START, START + timedelta(hours=3))
    intervals: tuple[Interval, ...] = ("15m", "1h")
    kinds = [Shown(intervals, candles, series) for candles, series in ((3, 1), (3, 4), (300, 1))]
    kept = await BacktestMarket.open(source, intervals)
    first = source.span.start
    for second, shown in product((first + 9_000, first + 60, first + 9_900), kinds):
        fresh = await BacktestMarket.open(source, intervals)
        looks = [market.observe("BTC", shown, second, moment_of(second)) for market in (kept, fresh)]
        assert len({repr(look) for look in looks}) == 1
        columns = [
            [repr(each.columns) for each in look.candles.values() if isinstance(each, RecordedCandles)]
            for look in looks
            if look is not None
        ]
        assert columns[0] == columns[1] != []


@pytest.mark.slow
async def test_a_history_continued_has_the_rows_of_one_without_a_break(database: Database, settings: Settings) -> None:
    async with database.transaction() as conn:
        await open_models(conn, [rule_model(variant, START) for variant in VariantId], settings, START)
    for start, end in ((START, MIDDLE), (MIDDLE, END)):
        await write_history(database, settings, past(settings, start, end), CYCLE, lambda _: None)
        assert (await audit(database)).is_clean
    whole, baselines = await traded_at_once(settings)
    async with database.connection() as conn:
        fills = await conn.fetch(
            "SELECT account_id, sequence, created_at, symbol, quantity, price FROM fills ORDER BY account_id, sequence"
        )
        snapshots = await conn.fetch("SELECT account_id, created_at, net_portfolio FROM portfolio_snapshots")
        held = await conn.fetchval(
            "SELECT count(*) FROM orders WHERE opened_at < $1 AND (closed_at IS NULL OR closed_at > $1)", MIDDLE
        )
        saved = {each.baseline.id: each.state.account for each in await select_baseline_states(conn)}
    assert held, "a position is open at the break"
    assert len(fills) > 10
    assert [tuple(row) for row in fills] == sorted(whole.fills)
    assert {tuple(row) for row in snapshots} ^ set(whole.values) == set()
    assert saved == baselines
    assert saved[BUY_AND_HOLD.id].positions


@pytest.mark.slow
async def test_the_calls_of_a_history_are_reproduced_to_the_last_digit(database: Database, settings: Settings) -> None:
    async with database.transaction() as conn:
        await open_models(conn, [rule_model(variant, START) for variant in VariantId], settings, START)
    await write_history(database, settings, past(settings, START, MIDDLE), CYCLE, lambda _: None)
    async with database.connection() as conn:
        acted = await conn.fetch("SELECT DISTINCT invocation_id FROM tool_calls WHERE type <> 'HOLDING'")
    assert len(acted) > 5
    for row in acted:
        reproduced = await reproduce_invocation(database, row["invocation_id"])
        assert reproduced.is_same, [finding.detail for _, finding in reproduced.calls]


async def test_every_decision_of_a_history_has_its_rows(database: Database, settings: Settings) -> None:
    async with database.transaction() as conn:
        await open_models(conn, [rule_model(VariantId.APEX, START)], settings, START)
    await write_history(database, settings, past(settings, START, START + timedelta(hours=2)), CYCLE, lambda _: None)
    async with database.connection() as conn:
        statuses = await conn.fetch("SELECT status, step_count > 0 AS has_steps FROM invocations ORDER BY started_at")
        counted = await conn.fetchval("SELECT sum(finished) FROM invocation_counts")
        holding = await conn.fetchval("SELECT count(*) FROM tool_calls WHERE type = 'HOLDING'")
    assert [tuple(row) for row in statuses] == [("completed", True)] * 8
    assert (counted, holding) == (8, 8)
