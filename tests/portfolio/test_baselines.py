"""Baselines: reference accounts that hold nothing or follow the market, and survive a restart."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from support.manual_clock import ManualClock
from support.records import START, add_model
from support.scripted import make_settings
from support.venue import make_exchange

from trader.agents.domain.tools import CreatePosition, Decision
from trader.agents.domain.view import View
from trader.agents.variants import VARIANTS
from trader.core.clock import epoch_second
from trader.core.errors import MarketUnavailable
from trader.core.variant_id import VariantId
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.exchange.domain.orders import Side
from trader.market.domain.markets import PLAIN_FUNDING_RATE, Tick
from trader.market.feed import MarketFeed
from trader.market.sources.recorder import Recorder
from trader.market.sources.synthetic import SyntheticSource
from trader.portfolio.baselines import Baselines
from trader.portfolio.domain.baselines import BUY_AND_HOLD, HOLD_NOTHING, rule_agent
from trader.portfolio.snapshots import PortfolioService
from trader.portfolio.sql import snapshots as store

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
ALL = set(VariantId)


class Bench:
    """Baselines on the synthetic market, whose time the test controls."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.settings = make_settings()
        self.source = SyntheticSource(7, ("BTC", "ETH", "SOL"))
        self.clock = ManualClock(START)
        self.market = MarketFeed(self.source, self.clock, recorder=Recorder(folder, self.source))
        self.exchange = make_exchange(database, self.market, self.clock, self.settings)
        self.baselines = self.make()

    def make(self) -> Baselines:
        return Baselines(self.database, self.exchange, self.market, self.clock, self.settings)

    async def tick(self, span: timedelta = SECOND) -> None:
        """Let time pass, with one tick at its end."""
        await self.clock.advance(span)
        tick = self.source.tick(epoch_second(self.clock.now()))
        await self.market.take(tick, self.baselines.on_tick)

    async def minutes(self, count: int, variants: set[VariantId] = ALL) -> None:
        """Let minutes pass as in the service: decisions, the next book, and a record."""
        for _ in range(count):
            await self.baselines.decide(self.clock.now(), variants)
            await self.tick()
            await self.baselines.record(self.clock.now())
            for second in (20, 20, 19):
                await self.tick(second * SECOND)

    async def states(self) -> dict[str, store.SavedBaseline]:
        async with self.database.connection() as conn:
            return {saved.baseline.id: saved for saved in await store.select_baseline_states(conn)}

    async def values(self, baseline_id: str) -> list[Decimal]:
        async with self.database.connection() as conn:
            rows = await conn.fetch(
                "SELECT net_portfolio FROM portfolio_snapshots WHERE account_id = $1 ORDER BY created_at", baseline_id
            )
        return [row[0] for row in rows]


@pytest.fixture
async def bench(database: Database, tmp_path: Path) -> Bench:
    made = Bench(database, tmp_path)
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
    await made.exchange.lead()
    await made.baselines.lead()
    await made.tick()
    return made


async def test_buy_and_hold_buys_equal_parts_with_fees_and_keeps_them(bench: Bench) -> None:
    await bench.minutes(3)
    account = (await bench.states())[BUY_AND_HOLD.id].state.account
    assert {symbol: position.margin for symbol, position in account.positions.items()} == pytest.approx(
        dict.fromkeys(("BTC", "ETH", "SOL"), Decimal(10_000) / 3), rel=Decimal("0.005")
    )
    assert account.fees == sum(position.entry_notional for position in account.positions.values()) * Decimal("0.0005")
    values = await bench.values(BUY_AND_HOLD.id)
    assert len(values) == 3
    assert len(set(values)) == 3, "it follows the market"
    assert await bench.values(HOLD_NOTHING.id) == [10_000], "what is idle is recorded once an hour"


async def test_only_variants_with_a_model_have_a_rule_agent(bench: Bench) -> None:
    await bench.minutes(1, {VariantId.APEX})
    assert set(await bench.states()) == {HOLD_NOTHING.id, BUY_AND_HOLD.id, rule_agent(VariantId.APEX).id}


@pytest.mark.slow
async def test_rule_agents_trade_by_the_guard_and_the_rules_of_the_exchange(bench: Bench) -> None:
    await bench.minutes(120)
    states = {key: saved.state for key, saved in (await bench.states()).items() if saved.baseline.variant is not None}
    assert len(states) == len(VariantId)
    assert sum(state.trade_count for state in states.values()) > 0
    for state in states.values():
        account = state.account
        assert all(position.exit_plan.stop is not None for position in account.positions.values())
        net = state.won - state.lost
        open_fees = sum((position.fees for position in account.positions.values()), Decimal(0))
        open_funding = sum((position.funding for position in account.positions.values()), Decimal(0))
        assert account.cash == account.run.initial_capital + net - open_fees + open_funding
        assert len(state.trades) == min(10, state.trade_count)
        assert state.stats.trade_count == state.trade_count


async def test_a_restart_resumes_baselines_at_their_last_record(bench: Bench) -> None:
    await bench.minutes(5)
    before = await bench.states()
    bench.baselines = again = bench.make()
    await again.lead()
    await bench.minutes(1)
    after = await bench.states()
    assert after.keys() == before.keys()
    for key, saved in after.items():
        assert saved.state.account.run == before[key].state.account.run
        assert saved.state.account.sequence >= before[key].state.account.sequence
        assert saved.seen_until > before[key].seen_until


async def test_the_latency_counts_from_the_decision(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cycle began earlier: the database and the candles took their time."""

    class Buyer:
        shown = VARIANTS[VariantId.APEX].agent().shown

        def decide(self, view: View) -> list[Decision]:
            return [
                CreatePosition(
                    symbol="BTC", side=Side.LONG, quantity=0.01, leverage=2, confidence=1, stop=80_000,
                    invalidation="it falls",
                )
            ]  # fmt: skip

    bench.settings = make_settings(SIM_LATENCY_MS="200")
    bench.baselines = bench.make()
    await bench.baselines.lead()
    buying = msgspec.structs.replace(VARIANTS[VariantId.APEX], agent=Buyer)
    monkeypatch.setattr("trader.portfolio.baselines.VARIANTS", {VariantId.APEX: buying})
    await bench.baselines.decide(bench.clock.now() - 5 * SECOND, {VariantId.APEX})
    decided_at = bench.clock.now()
    await bench.tick()
    await bench.tick()
    await bench.baselines.record(bench.clock.now())
    account = (await bench.states())[rule_agent(VariantId.APEX).id].state.account
    assert account.positions["BTC"].opened_at > decided_at


async def test_nothing_is_decided_after_the_end_of_a_term(bench: Bench) -> None:
    """The decisions were due during a tick, in the middle of which the term ended."""
    await bench.minutes(1)
    bench.source.history = nothing  # type: ignore[method-assign]
    await bench.clock.advance(timedelta(hours=1))
    now = bench.clock.now()
    paying = bench.market.take(bench.source.tick(epoch_second(now)), bench.baselines.on_tick)
    ends = [asyncio.create_task(work) for work in (paying, bench.baselines.decide(now, ALL))]
    await asyncio.sleep(0)
    await bench.baselines.resign()
    await asyncio.gather(*ends)
    assert not deciding()


@pytest.mark.slow
async def test_the_service_catches_up_on_missed_updates(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.minutes(2)
    seen_until = (await bench.states())[BUY_AND_HOLD.id].seen_until
    await bench.clock.advance(timedelta(hours=1))
    bench.baselines = again = bench.make()
    with monkeypatch.context() as source:
        source.setattr(bench.source, "history", away)
        await again.lead()
        await again.decide(bench.clock.now(), ALL)
        assert not deciding(), "ticks from before a decision are still to be applied"
        await bench.minutes(1)
        assert (await bench.states())[BUY_AND_HOLD.id].seen_until == seen_until, "as accounts wait for the source"
    assert {record.name for record in caplog.records} == {"trader.baselines"}, "no account of a model waits"
    await bench.minutes(2)
    state = (await bench.states())[BUY_AND_HOLD.id].state
    assert state.account.positions["BTC"].funding < 0, "the funding of an hour was paid"


async def test_the_missed_ticks_of_a_recording_are_those_of_the_exchange(bench: Bench, tmp_path: Path) -> None:
    await bench.minutes(1)
    await bench.clock.advance(MINUTE)
    bench.market.begin_recording()
    await bench.make().lead()
    bench.market.end_recording()
    (file,) = tmp_path.iterdir()
    assert len(gzip.decompress(file.read_bytes()).splitlines()) == 1, "only that it begins"


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_boundary_in_a_gap_is_paid_at_the_last_mark_before_it(bench: Bench, *, restarts: bool) -> None:
    """Like in the exchange: the price that ended the gap was not known yet."""
    bench.source.history = nothing  # type: ignore[method-assign]  # the source has lost what happened
    await bench.minutes(2)
    last = bench.market.marks["BTC"]
    await bench.clock.advance(timedelta(hours=1))
    if restarts:
        bench.baselines = bench.make()
        await bench.baselines.lead()
    await bench.tick()
    assert bench.market.marks["BTC"] != last
    await bench.baselines.record(bench.clock.now())
    position = (await bench.states())[BUY_AND_HOLD.id].state.account.positions["BTC"]
    assert position.funding == -position.quantity * last * PLAIN_FUNDING_RATE


def deciding() -> list[str]:
    """The names of the tasks that execute decisions."""
    return [name for task in asyncio.all_tasks() if (name := task.get_name()).startswith("decisions of")]


async def away(after: datetime, until: datetime) -> AsyncIterator[Tick]:
    """The history of a source that is away."""
    raise MarketUnavailable("away")
    yield


async def nothing(after: datetime, until: datetime) -> AsyncIterator[Tick]:
    """The empty history of a source."""
    ticks: list[Tick] = []
    for tick in ticks:
        yield tick


async def test_a_position_waits_for_a_market_that_comes_later_than_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill came before the first checkpoint with its mark."""

    def first(after: datetime) -> Tick:
        tick = bench.source.tick(epoch_second(after) + 1)
        return Tick(tick.at, {"BTC": tick.quotes["BTC"]})

    async def history(after: datetime, _until: datetime) -> AsyncIterator[Tick]:
        yield first(after)

    await bench.minutes(1)
    bench.market = MarketFeed(bench.source, bench.clock)
    bench.exchange = make_exchange(bench.database, bench.market, bench.clock, bench.settings)
    bench.baselines = bench.make()
    with monkeypatch.context() as source:
        source.setattr(bench.source, "history", history)
        await bench.exchange.lead()
        await bench.baselines.lead()
    late = first(bench.clock.now())
    await bench.clock.advance(SECOND)
    await bench.market.take(late, bench.baselines.on_tick)
    await bench.minutes(1)
    assert len(await bench.values(BUY_AND_HOLD.id)) == 2


async def test_baselines_are_neither_models_nor_accounts(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        await add_model(conn, "one")
        await bench.minutes(1)
        assert await conn.fetchval("SELECT count(*) FROM accounts WHERE id LIKE 'baseline%'") == 0
        assert await conn.fetchval("SELECT sum(count) FROM variant_hourly") is None
    assert not bench.exchange.accounts


async def test_equity_curves_include_baselines_on_request(bench: Bench) -> None:
    await bench.minutes(2)
    portfolio = PortfolioService(bench.database, bench.exchange, bench.clock, bench.settings)
    end = bench.clock.now()
    curves = await portfolio.equity_curves(start=end - 10 * MINUTE, end=end, points_max=50, baselines=True)
    assert [b'"baseline":true' in record for record in curves.records] == [True] * 6
    curves = await portfolio.equity_curves(
        start=end - 10 * MINUTE, end=end, points_max=50, baselines=True, variant=VariantId.APEX
    )
    assert len(curves.records) == 3
    assert not (await portfolio.equity_curves(start=end - 10 * MINUTE, end=end, points_max=50)).records
