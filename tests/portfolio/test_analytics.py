"""Statistics of the current runs: the documented figures, over exactly the rows of those runs."""

import json
import math
import random
import zlib
from datetime import datetime, timedelta
from decimal import Decimal

import msgspec
import numpy
import pytest
from support.manual_clock import ManualClock
from support.records import (
    HOUR,
    MINUTE,
    START,
    FakeExchange,
    add_invocation,
    add_model,
    add_run,
    add_tool_call,
    add_trade,
    id_of,
    make_account,
    make_model,
    make_position,
    make_run,
    make_snapshot,
    seen,
)
from support.run_profile import is_nightly

from trader.agents.domain.entrants import Entrant
from trader.agents.sql import invocations as agents_store
from trader.agents.sql.entrants import insert_entrant
from trader.agents.sql.models import upsert_model
from trader.core.clock import floor_time
from trader.core.intervals import estimate, percent_interval
from trader.core.statistics import Drawdown
from trader.core.variant_id import VariantId
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database, Page
from trader.exchange.paper import PaperExchange
from trader.portfolio.analytics import ANSWERS_BYTES_MAX, RUN_ANSWERS_BYTES_MAX, Analytics
from trader.portfolio.leaderboard import LeaderboardEntry
from trader.portfolio.run_statistics import NO_SCOPE, CurrentRuns, RunScope, RunStatistics
from trader.portfolio.sql import snapshots as portfolio_store

DAY = timedelta(days=1)


class Bench:
    """The analytics over rows and accounts that the test controls."""

    def __init__(self, database: Database, exchange: FakeExchange) -> None:
        self.database = database
        self.exchange = exchange
        self.clock = ManualClock(START)
        served: PaperExchange = exchange  # type: ignore[assignment]
        self.analytics = Analytics(database, served, self.clock, CurrentRuns(database))

    async def hours(self, account_id: str, *values: str, number: int = 1, first: int = 0) -> None:
        """Write the last value of each hour from `first` on."""
        rows = [
            make_snapshot(account_id, START + (first + hour) * HOUR + 59 * MINUTE, value, number=number)
            for hour, value in enumerate(values)
        ]
        async with self.database.connection() as conn:
            await ensure_partitions(conn, START, rows[-1].created_at)
            await portfolio_store.insert_snapshots(conn, rows)

    async def board(self, window: str = "7d", sort_by: str = "pnlPercent") -> list[LeaderboardEntry]:
        return await self.analytics.leaderboard(window, sort_by)  # type: ignore[arg-type]


@pytest.fixture
async def bench(database: Database) -> Bench:
    return Bench(database, FakeExchange())


async def test_statistics_start_at_the_current_run(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        await add_model(conn, "one")
        await add_trade(conn, "one", START + HOUR, gross="-500")
        await add_invocation(conn, "one", START + MINUTE, "failed")
        await bench.hours("one", "9000", "8000")
        await add_run(conn, "one", make_run("one", 2, capital="2000", at=START + 2 * HOUR))
        await add_trade(conn, "one", START + 3 * HOUR, gross="60", fees="10", number=2)
        await add_invocation(conn, "one", START + 3 * HOUR, "completed")
        await bench.hours("one", "2000", "2040", number=2, first=2)
    bench.exchange.put(make_account("one", run=make_run("one", 2, capital="2000", at=START + 2 * HOUR), realized=50))
    (stats,) = await bench.analytics.model_stats()
    figures = stats.figures.trades
    assert seen(stats.account_value, stats.return_percent) == (2050, 2.5)
    assert seen(figures.trades, figures.total_net, figures.win_rate) == (1, 50, 100.0)
    assert seen(figures.biggest_win, figures.biggest_loss) == (50, None)
    assert stats.figures.equity.drawdown == Drawdown(0, 0)
    assert seen(stats.totals.finished, stats.totals.failures) == (1, 0)
    info = await bench.analytics.run_info()
    assert seen(*info[:4]) == (START + 2 * HOUR, 1, 1, 1)


async def test_a_fall_below_the_capital_in_the_first_hour_is_a_drawdown_everywhere(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        await add_model(conn, "one")
        await add_trade(conn, "one", START + 30 * MINUTE, gross="-2500", fees="0", notional="9000")
        await bench.hours("one", "7500", "9000", "8100")
    bench.exchange.put(make_account("one", realized=-1900))
    await bench.clock.advance(3 * HOUR)
    (stats,) = await bench.analytics.model_stats()
    (entry,) = await bench.board("24h")
    assert stats.figures.equity.drawdown == Drawdown(25, 2500)
    assert entry.max_drawdown == 25
    assert stats.figures.recovery_factor == -1


async def test_figures_of_trades(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        await add_model(conn, "one")
        for number, (gross, side, confidence, held) in enumerate(
            [("11", "LONG", 50, 1), ("-19", "LONG", None, 2), ("21", "SHORT", 80, 4), ("31", "SHORT", 90, 1)]
        ):
            await add_trade(
                conn, "one", START + (number + 5) * HOUR, gross=gross, side=side, confidence=confidence,
                held=held * HOUR, notional=str(1000 * (number + 1)),
            )  # fmt: skip
    (stats,) = await bench.analytics.model_stats()
    figures = stats.figures.trades
    assert seen(figures.trades, figures.wins, figures.total_net, figures.win_rate) == (4, 3, 40, 75.0)
    assert seen(figures.biggest_win, figures.biggest_loss) == (30, -20)
    assert seen(*figures.sizes) == (2500, 2500, 4000)
    assert seen(*figures.holds) == (120, 90, 240)
    assert seen(*figures.confidences) == (pytest.approx(73.33333333), 80, 90)
    assert seen(figures.long_percent, figures.expectancy, figures.profit_factor) == (50, 10, 3)
    assert figures.average_r_multiple == 1
    assert figures.decision_quality == pytest.approx(0.960768922830523)
    assert seen(*figures.streaks) == (2, 1, 2, "win")
    assert seen(figures.average_win_minutes, figures.average_loss_minutes) == (120, 120)
    assert figures.signal_to_noise == pytest.approx(10 / math.sqrt((0 + 900 + 100 + 400) / 3))


def everything(run: RunStatistics, now: datetime) -> list[object]:
    """Return every statistic of a run and of its entrants."""
    hour, day = floor_time(now, HOUR), now - DAY
    trades = [sorted(each.id for each in trades) for trades in (run.trades, run.closed_after(day), run.later.values())]
    told: list[object] = [run.run, trades, run.hours, run.values, run.losing, run.brief, sorted(run.open), run.figures]
    told += [run.entrant_since, run.entrant_cost_usd, run.worth_at(day), run.brief_after(day), run.returns(hour)]
    told += [run.window_drawdown(day, Decimal(9000), Decimal(9100)), run.as_account_run()]
    for each in run.periods:
        told += [each.entrant, each.figures, each.start_value, each.end_value, each.points(now), each.count_after(day)]
    return told


INSERT_POSITION = """
INSERT INTO orders (id, account_id, run_id, symbol, side, status, quantity, entry_notional, margin, leveraged, fees,
                    funding, opened_at, funded_until)
VALUES ($1, $2, $3, 'ETH', 'LONG', 'OPEN', 1, $4, $4, false, 0, 0, $5, $5)
"""


class History:
    """Random changes of the rows of two models, as time passes."""

    def __init__(self, conn: Connection, seed: int) -> None:
        self.conn = conn
        self.chance = random.Random(seed)
        self.now = START
        self.runs = {"one": 1, "two": 1}
        self.steps = 0

    async def act(self) -> None:
        self.steps += 1
        if (passed := self.chance.choice([timedelta(0), 20 * MINUTE, HOUR])) == HOUR:
            for name in self.runs:
                await self.snapshot(name)
        self.now += passed
        name = self.chance.choice(list(self.runs))
        often = self.trade, self.trade, self.snapshot, self.snapshot, self.open, self.decide, self.change
        await (self.reset if self.steps % 15 == 0 else self.chance.choice(often))(name)

    async def posted(self, name: str) -> None:
        await self.conn.execute("UPDATE accounts SET sequence = sequence + 1 WHERE id = $1", name)

    async def trade(self, name: str) -> None:
        gross, held = str(self.chance.randint(-30, 30)), self.chance.choice([MINUTE / 2, HOUR, 5 * HOUR])
        number = self.runs[name]
        await add_trade(self.conn, name, self.now, gross=gross, held=held, number=number, label=self.steps)

    async def snapshot(self, name: str) -> None:
        value = make_snapshot(name, self.now, str(10_000 + self.chance.randint(-500, 500)), number=self.runs[name])
        leverage = self.chance.choice([0.5, 1.0, 3.0])
        await portfolio_store.insert_snapshots(self.conn, [msgspec.structs.replace(value, leverage=leverage)])

    async def open(self, name: str) -> None:
        closed = await self.conn.fetchval(
            "DELETE FROM orders WHERE account_id = $1 AND status = 'OPEN' RETURNING 1", name
        )
        if not closed:
            run_id, notional = id_of("run", name, self.runs[name]), Decimal(self.chance.randint(100, 90_000))
            await self.conn.execute(INSERT_POSITION, id_of(self.steps), name, run_id, notional, self.now)
        await self.posted(name)

    async def decide(self, name: str) -> None:
        entrant = await self.conn.fetchval("SELECT max(number) FROM entrants WHERE model_id = $1", name)
        ended = await add_invocation(self.conn, name, self.now + timedelta(milliseconds=self.steps))
        set_entrant = "UPDATE invocations SET entrant = $2, cost_usd = 0.25 WHERE id = $1"
        await self.conn.execute(set_entrant, ended, entrant)
        await self.conn.execute(
            "INSERT INTO chain_links (invocation_id, record_digest) VALUES ($1, sha256('x'))", ended
        )

    async def change(self, name: str) -> None:
        entrant = Entrant(
            model_id=name, number=self.steps, fingerprint=f"{self.steps % 10}" * 64, configuration="{}",
            answered_by=None, began_at=self.now,
        )  # fmt: skip
        async with self.conn.transaction():
            await insert_entrant(self.conn, entrant)
        await self.posted(name)

    async def reset(self, name: str) -> None:
        await self.conn.execute("DELETE FROM orders WHERE account_id = $1 AND status = 'OPEN'", name)
        self.runs[name] += 1
        await add_run(self.conn, name, make_run(name, self.runs[name], capital="9000", at=self.now))


@pytest.mark.parametrize("seed", range(20) if is_nightly() else (5, 9))
async def test_what_is_kept_of_runs_equals_a_fresh_read_after_any_history(database: Database, seed: int) -> None:
    """Continuing from the last read gives the same result as reading everything at once, also within a season."""
    kept, season = {NO_SCOPE: CurrentRuns(database)}, RunScope(start=START + 9 * HOUR)
    async with database.connection() as conn:
        await add_model(conn, "one")
        await add_model(conn, "two", VariantId.SOVEREIGN)
        await ensure_partitions(conn, START, START + 30 * DAY)
        history = History(conn, seed)
        for _ in range(45):
            await history.act()
            if history.now >= START + 9 * HOUR:
                kept.setdefault(season, CurrentRuns(database, season))
            for scope, runs in kept.items():
                read, fresh = await runs.refresh(), await CurrentRuns(database, scope).refresh()
                for name in ("one", "two"):
                    was, now = everything(read[name], history.now), everything(fresh[name], history.now)
                    assert repr(was) == repr(now), (history.steps, name)


async def test_figures_include_each_day_once_it_closes(bench: Bench) -> None:
    records = CurrentRuns(bench.database)
    async with bench.database.connection() as conn:
        await add_model(conn, "one")
        await ensure_partitions(conn, START, START + 15 * DAY)
    for step in range(40):
        await portfolio_store_insert(bench, "one", START + step * 9 * HOUR, str(10_000 + 100 * math.sin(step)))
        read = (await records.refresh())["one"]
        assert read.equity_figures == (await CurrentRuns(bench.database).refresh())["one"].equity_figures
    assert read.equity_figures.sharpe is not None


async def test_losing_trades_are_counted_within_an_entrant(bench: Bench) -> None:
    records = CurrentRuns(bench.database)
    async with bench.database.connection() as conn:
        await add_model(conn, "one")
        for hour, gross in enumerate(("5", "-5", "-1", "7", "-2")):
            await add_trade(conn, "one", START + hour * HOUR, gross=gross, fees="0", label=hour)
            (period,) = (await records.refresh())["one"].periods
    assert period.count_after(START) == (5, 3)
    assert period.count_after(START + 2 * HOUR) == (3, 2)
    assert period.trades_count == 5


async def portfolio_store_insert(bench: Bench, account_id: str, at: object, value: str) -> None:
    async with bench.database.connection() as conn:
        await ensure_partitions(conn, START)
        await portfolio_store.insert_snapshots(conn, [make_snapshot(account_id, at, value)])  # type: ignore[arg-type]


async def test_a_reset_excludes_the_previous_run(bench: Bench) -> None:
    records = CurrentRuns(bench.database)
    async with bench.database.connection() as conn:
        await add_model(conn, "one")
        await add_trade(conn, "one", START + HOUR)
        assert len((await records.refresh())["one"].trades) == 1
        await add_run(conn, "one", make_run("one", 2, at=START + 2 * HOUR))
        assert (await records.refresh())["one"].trades == []


async def test_the_leaderboard_measures_the_window(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        for name, variant in (("up", VariantId.APEX), ("down", VariantId.SOVEREIGN), ("new", VariantId.APEX)):
            await add_model(conn, name, variant)
        await add_trade(conn, "up", START + HOUR)
        await add_trade(conn, "up", START + 25 * HOUR + MINUTE, held=timedelta(seconds=59))
    # The window of 24 h begins at 02:00; its initial value is from 01:59.
    await bench.hours("up", "10000", "11000", "12000", "9000", "13000")
    await bench.hours("down", "10000", "8000", "8000", "6000")
    await bench.clock.advance(26 * HOUR)
    bench.exchange.put(make_account("up", "10000", realized=Decimal(4300)))
    bench.exchange.put(make_account("down", "10000", positions={"BTC": make_position(quantity="1", entry="50000")}))
    bench.exchange.known_marks["BTC"] = Decimal(47_000)
    up, new, down = await bench.board("24h")
    assert seen(up.model.id, up.start_value, up.end_value, up.pnl_absolute) == ("up", 11_000, 14_300, 3_300)
    assert seen(up.pnl_percent, up.max_drawdown, up.trades_count) == (pytest.approx(30), 25, 1)
    assert (up.within_minute, new.within_minute) == (1, 0)
    assert up.evidence.reason == "3 whole hours; an interval needs 24"
    assert seen(new.model.id, new.start_value, new.end_value, new.pnl_percent) == ("new", 10_000, 10_000, 0)
    assert seen(down.start_value, down.end_value, down.pnl_percent) == (8_000, 7_000, -12.5)
    assert down.max_drawdown == 25
    assert [entry.model.id for entry in await bench.board("24h", "maxDrawdown")] == ["new", "up", "down"]
    assert [entry.model.id for entry in await bench.board("24h", "pnlAbsolute")] == ["up", "new", "down"]
    (week, *_) = await bench.board("7d")
    assert seen(week.start_value, week.pnl_absolute, week.trades_count) == (10_000, 4_300, 2)
    assert week.within_minute == 1, "the other one was held for an hour"
    only = await bench.analytics.leaderboard("7d", "pnlPercent", VariantId.SOVEREIGN)
    assert [entry.model.id for entry in only] == ["down"]
    await bench.clock.advance(40 * DAY)
    assert seen(
        *[(entry.start_value, entry.trades_count) for entry in await bench.board("30d") if entry.model.id == "up"]
    ) == ((13_000, 0),)
    assert seen(
        *[(entry.start_value, entry.trades_count) for entry in await bench.board("run") if entry.model.id == "up"]
    ) == ((10_000, 2),)
    bench.exchange.known_marks.clear()
    assert [entry.model.id for entry in await bench.board()] == ["up", "new"], "down has no value without a price"


async def add_trades(bench: Bench, model_id: str, *hours: int) -> None:
    async with bench.database.connection() as conn:
        for hour in hours:
            await add_trade(conn, model_id, START + hour * HOUR + MINUTE, label=hour)


async def test_the_interval_covers_the_whole_hours_of_the_window(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        for name in ("long", "short", "idle"):
            await add_model(conn, name)
    values = [10_000 + 50 * math.sin(hour) + 3 * hour for hour in range(60)]
    for name, count in (("long", 60), ("short", 23), ("idle", 60)):
        await bench.hours(name, *map(str, values[:count]))
        await add_trades(bench, name, *range(0, 60, 6 if name != "idle" else 20))
    await bench.clock.advance(59 * HOUR + 30 * MINUTE)
    entries = {entry.model.id: entry for entry in await bench.board("7d")}
    returns = numpy.diff(numpy.log([10_000, *values[:59]]))
    expected = percent_interval(estimate(returns).interval, 59)
    interval = entries["long"].evidence.interval_percent
    assert interval is not None
    assert interval.low < 100 * (values[58] / 10_000 - 1) < interval.high
    assert interval == pytest.approx(expected)
    assert entries["short"].evidence.reason == "23 whole hours; an interval needs 24"
    assert entries["idle"].evidence.reason == "3 completed trades; a statement about a model needs 10"
    day = {entry.model.id: entry.evidence for entry in await bench.board("24h")}
    assert day["long"].hours == 24
    assert day["long"].reason == "4 completed trades; a statement about a model needs 10", "the window's trades count"


async def test_adjacent_models_get_a_verdict_or_the_smallest_visible_difference(bench: Bench) -> None:
    slopes = {"good": 60, "fair": 2, "same": 2, "poor": -60}
    async with bench.database.connection() as conn:
        for name in (*slopes, "young"):
            await add_model(conn, name)
    for name, slope in slopes.items():
        growth = 1.05 if name == "good" else 1.0
        await bench.hours(
            name, *(str(10_000 * growth**hour + 20 * math.sin(hour) + slope * hour) for hour in range(100))
        )
        await add_trades(bench, name, *range(10))
        bench.exchange.put(make_account(name, realized=Decimal(99 * slope)))
    bench.exchange.put(make_account("young", realized=Decimal(1)))
    await bench.clock.advance(100 * HOUR + MINUTE)
    for order in ("pnlPercent", "pnlAbsolute"):
        board = await bench.board("7d", order)
        words = [
            tuple(side and (side.neighbour.id, side.verdict.word) for side in (entry.above, entry.below))
            for entry in board
        ]
        assert [(entry.model.id, entry.tie) for entry in board] == [
            ("good", False), ("fair", True), ("same", True), ("young", False), ("poor", False),
        ]  # fmt: skip
        assert words == [
            (None, ("fair", "better")),
            (("good", "worse"), ("same", "not distinguishable yet")),
            (("fair", "not distinguishable yet"), ("young", "not distinguishable yet")),
            (("same", "not distinguishable yet"), ("poor", "not distinguishable yet")),
            (("young", "not distinguishable yet"), None),
        ]
        good, fair, *_ = board
        assert good.below is not None
        assert fair.below is not None
        assert good.below.verdict.why is None
        assert fair.below.verdict.why == "no hour differs from another"
        assert 0 < (good.below.verdict.days_needed or 0) < 30
    board = await bench.board("7d", "maxDrawdown")
    assert {(entry.above, entry.below) for entry in board} == {(None, None)}


async def test_failures_are_failed_runs_and_runs_with_failed_calls(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        await add_model(conn, "one")
        await add_model(conn, "two", VariantId.SOVEREIGN)
        failed = await add_invocation(conn, "one", START, "failed", calls=("failed", "ok"))
        await add_invocation(conn, "one", START + MINUTE, "completed", calls=("rejected", "ok"))
        by_call = await add_invocation(conn, "two", START + 2 * MINUTE, "completed", calls=("failed", "failed"))
        await add_invocation(conn, "two", START + 3 * MINUTE, "running", calls=("failed",))
        late = await add_invocation(conn, "two", START + 4 * MINUTE, "timeout")
        await add_tool_call(conn, late, 1, "ok", START)
        await ensure_partitions(conn, START)
        kept = {"messages": [], "answers": [{"id": "x"}]}
        await agents_store.insert_payload(conn, failed, zlib.compress(json.dumps(kept).encode()), START)
    failures = await bench.analytics.failures(Page(10))
    assert [invocation.id for invocation in failures.invocations] == [late, by_call, failed]
    assert [call.number for call in failures.tool_calls[failed]] == [1, 2]
    assert {key: bytes(answers) for key, answers in failures.answers.items()} == {failed: b'[{"id": "x"}]'}
    counts = {model.id: totals for model, totals in failures.counts}
    assert seen(counts["one"].failed, counts["one"].tool_failed, counts["one"].finished) == (1, 0, 2)
    assert seen(counts["two"].failed, counts["two"].tool_failed, counts["two"].finished) == (1, 1, 2)
    assert seen(counts["one"].failure_percent, counts["two"].failure_percent) == (50, 100)
    only = await bench.analytics.failures(Page(10), VariantId.SOVEREIGN)
    assert [invocation.id for invocation in only.invocations] == [late, by_call]
    assert [model.id for model, _ in only.counts] == ["two"]
    assert [invocation.id for invocation in (await bench.analytics.failures(Page(1))).invocations] == [late]


async def test_answers_of_failures_are_shown_up_to_their_bounds(bench: Bench) -> None:
    fitting = [RUN_ANSWERS_BYTES_MAX] * (ANSWERS_BYTES_MAX // RUN_ANSWERS_BYTES_MAX)
    sizes = [RUN_ANSWERS_BYTES_MAX + 1, *fitting, 5]  # the newest first
    async with bench.database.connection() as conn:
        await add_model(conn, "one")
        await ensure_partitions(conn, START)
        ids = []
        for number, size in enumerate(sizes):
            at = START + (len(sizes) - number) * MINUTE
            ids.append(await add_invocation(conn, "one", at, "failed"))
            kept = b'{"messages":[],"answers":["%b"]}' % (b"x" * (size - len('[""]')))
            await agents_store.insert_payload(conn, ids[-1], zlib.compress(kept), at)
    failures = await bench.analytics.failures(Page(len(sizes)))
    assert [each.id for each in failures.invocations] == ids
    assert list(failures.answers) == ids[1:-1]


async def test_variant_statistics_show_every_variant(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        await add_model(conn, "a1")
        await add_model(conn, "a2")
        await add_model(conn, "s1", VariantId.SOVEREIGN)
        await add_run(conn, "manual", make_run("manual"))
        await add_trade(conn, "a1", START + HOUR, gross="11")
        await add_trade(conn, "a2", START + HOUR, gross="-4")
        await add_trade(conn, "a2", START + 2 * HOUR, gross="4")
        await add_trade(conn, "manual", START + HOUR, gross="1000000")
    stats = await bench.analytics.variant_stats()
    assert [seen(*each) for each in stats] == [
        (VariantId.APEX, 2, 3, pytest.approx(100 * 2 / 3), None, 8, Decimal("2.6666666666666667")),
        (VariantId.TRENDSURFER, 0, 0, None, None, 0, None),
        (VariantId.CONTRARIAN, 0, 0, None, None, 0, None),
        (VariantId.SOVEREIGN, 1, 0, None, None, 0, None),
    ]


async def test_a_model_without_an_account_shows_its_initial_state(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        await upsert_model(conn, make_model("fresh"))
    (stats,) = await bench.analytics.model_stats()
    assert seen(stats.account_value, stats.return_percent, stats.figures.trades.trades) == (10_000, 0, 0)
    (entry,) = await bench.board()
    assert seen(entry.pnl_percent, entry.start_value) == (0, 10_000)
    assert entry.evidence.reason == "there are no whole hours yet"
    assert seen(*(await bench.analytics.run_info())[:4]) == (None, 1, 0, 0)


async def test_statistics_are_per_entrant_within_the_run_and_the_old_ones_stay(bench: Bench) -> None:
    changed_at = START + 2 * HOUR + 30 * MINUTE
    async with bench.database.connection() as conn:
        await add_model(conn, "one")
        await bench.hours("one", "9000", "12000", "11000", "15000")
        await ensure_partitions(conn, START)
        await portfolio_store.insert_snapshots(conn, [make_snapshot("one", changed_at - MINUTE, "10000")])
        for number, began_at in ((1, START), (2, changed_at)):
            entrant = Entrant(
                model_id="one", number=number, fingerprint=f"{number}" * 64, configuration="{}", answered_by=None,
                began_at=began_at,
            )  # fmt: skip
            await insert_entrant(conn, entrant)
        for number, (hours, gross) in enumerate([(1, "-10"), (2, "20"), (3, "30")]):
            await add_trade(conn, "one", START + hours * HOUR, gross=gross, fees="0", label=number)
        failed = await add_invocation(conn, "one", START + HOUR, "failed")
        done = await add_invocation(conn, "one", START + 3 * HOUR, "completed")
        for number, invocation_id in ((1, failed), (2, done)):
            await conn.execute("UPDATE invocations SET entrant = $2 WHERE id = $1", invocation_id, number)
    bench.exchange.put(make_account("one", realized=5000))
    await bench.clock.advance(4 * HOUR)
    (run,) = await bench.analytics.model_stats()
    first, second = run.entrants
    periods = [each.period for each in run.entrants if each.period is not None]
    assert seen(periods[0].started_at, periods[0].ended_at, periods[1].ended_at) == (START, changed_at, None)
    assert seen(first.start_value, first.account_value, first.return_percent) == (10_000, 10_000, 0)
    assert seen(second.start_value, second.account_value) == (10_000, 15_000), "as of the change's minute"
    assert second.return_percent == 50
    assert first.figures.equity.drawdown == Drawdown(10, 1000)
    assert second.figures.equity.drawdown == Drawdown(0, 0), "the fall before the change was the first one's"
    trades = [part.figures.trades for part in (first, second)]
    assert [(trade.trades, float(trade.total_net), trade.win_rate) for trade in trades] == [(2, 10, 50), (1, 30, 100)]
    failures = [(part.totals.failures, part.totals.finished) for part in (first, second)]
    assert failures == [(1, 1), (0, 1)]
    assert run.figures.trades.trades == 3
    (entry,) = await bench.board("24h")
    assert seen(entry.start_value, entry.pnl_percent, entry.trades_count) == (10_000, 50, 1)
    assert first.figures is (await bench.analytics.model_stats())[0].entrants[0].figures, "it is kept"
