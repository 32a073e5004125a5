"""The procedures on a season, compared with the plain SQL over raw rows that a service without rollups would run.

  scripts/benchmark season    100 models, 90 days: 200,000 trades, 1 million invocations, 13 million snapshots
  scripts/benchmark season --quick    100 models, 9 days, a tenth of it
  scripts/benchmark season --folder DIR    keeps the season there, and measures the one that is there already
  scripts/benchmark season --database-url URL    one that is there

A call is the part of a request behind HTTP: dispatch, services, SQL, encoding, validation. `warm` are calls while
nothing changes; `changed` is the first call after a minute, or an hour, has passed and every active account has a
snapshot; `hold` is the longest time for which the process computed without yielding to other tasks, the very first call
included. `start` is the data that the service reads once before it listens, and the time to freeze its objects. Exit
code 1: a floor is missed.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

import uvloop
from benchmarks.bulk import language_models, seed_season
from support.books import DEFAULT_MARKETS
from support.service_context import make_context

from trader.agents.providers.providers import Providers
from trader.agents.services import AgentServices, KnownModels
from trader.api.context import Context
from trader.api.envelope import BodyStyle
from trader.api.registry import REGISTRY, load_procedures
from trader.api.rpc import Dispatcher, Target
from trader.app import freeze_startup_objects
from trader.composition.external import make_source
from trader.core.clock import SystemClock, ceil_time
from trader.core.errors import NotFound
from trader.core.events import EventBus
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Connection, Database
from trader.database.schema import apply_schema
from trader.exchange.domain.account import Account
from trader.exchange.sql.accounts import select_accounts, select_last_marks, select_processed_until
from trader.market.feed import MarketFeed
from trader.operations.access import ANYBODY
from trader.portfolio.audit import audit
from trader.portfolio.domain.histories import WINDOWS
from trader.settings.settings import Settings

ROOT: Final = Path(__file__).resolve().parents[2]
RAW_CALLS: Final = 3
WARM_MS: Final = 50.0
CHANGED_MS: Final = 300.0
THREADED_CHANGED_MS: Final = {"trading.getPortfolioHistory": 1500.0, "analytics.getEvidence": 500.0}
"""The floors of what is computed beside the event loop, so that only its own callers wait."""

HOLD_MS: Final = 50.0
TICK_S: Final = 0.001
STATEMENT_S: Final = 600.0

INSERT_BASELINES: Final = """
WITH chosen AS (
    SELECT m.id, b.id AS baseline, b.variant
    FROM (SELECT id, row_number() OVER (ORDER BY id) AS place FROM models) m
    JOIN (
        VALUES (1, 'baseline/buy-and-hold', NULL), (2, 'baseline/apex-rules', 'Apex'),
               (3, 'baseline/trendsurfer-rules', 'Trendsurfer'), (4, 'baseline/contrarian-rules', 'Contrarian'),
               (5, 'baseline/sovereign-rules', 'Sovereign')
    ) b (place, id, variant) USING (place)
), baselines AS (
    INSERT INTO baselines (id, name, variant, run_id, initial_capital, started_at, state, seen_until)
    SELECT c.baseline, c.baseline, c.variant, r.id, r.initial_capital, r.started_at, '{}', now()
    FROM chosen c JOIN runs r ON r.account_id = c.id AND r.ended_at IS NULL
    ON CONFLICT DO NOTHING
)
INSERT INTO portfolio_hourly (account_id, hour, run_id, total, count, last, last_at)
SELECT c.baseline, h.hour, h.run_id, h.total, h.count, h.last, h.last_at
FROM chosen c JOIN portfolio_hourly h ON h.account_id = c.id
ON CONFLICT DO NOTHING
"""
"""A season is written without baselines, so the benchmark's baselines use the hours of models."""

RAW_VARIANTS: Final = """
SELECT m.variant, date_trunc('hour', s.created_at, 'UTC') AS hour, avg(s.net_portfolio)
FROM portfolio_snapshots s JOIN models m ON m.id = s.account_id
WHERE s.created_at >= $1 GROUP BY 1, 2 ORDER BY 2
"""
RAW_HISTORY: Final = """
SELECT DISTINCT ON (account_id, date_bin('15 minutes', created_at, '2000-01-01Z')) account_id, net_portfolio, created_at
FROM portfolio_snapshots WHERE created_at >= $1
ORDER BY account_id, date_bin('15 minutes', created_at, '2000-01-01Z'), created_at DESC
"""
RAW_BOARD: Final = """
SELECT account_id, (array_agg(net_portfolio ORDER BY created_at))[1],
       (array_agg(net_portfolio ORDER BY created_at DESC))[1]
FROM portfolio_snapshots WHERE created_at >= $1 GROUP BY account_id
"""
RAW_STATISTICS: Final = """
SELECT t.*, h.percent, h.money
FROM (
    SELECT account_id, count(*), sum(net_pnl), avg(entry_notional), stddev_samp(net_pnl), corr(confidence, net_pnl),
           percentile_cont(0.5) WITHIN GROUP (ORDER BY entry_notional::float8),
           percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM closed_at - opened_at)),
           percentile_cont(0.5) WITHIN GROUP (ORDER BY confidence::float8)
    FROM orders WHERE status = 'CLOSED' AND closed_at >= $1 GROUP BY account_id
) t
JOIN (
    SELECT account_id, max((peak - last) / peak) AS percent, max(peak - last) AS money
    FROM (
        SELECT account_id, last, max(last) OVER (PARTITION BY account_id ORDER BY hour) AS peak FROM portfolio_hourly
    ) p
    GROUP BY account_id
) h USING (account_id)
"""
RAW_COUNTS: Final = """
SELECT i.model_id, count(*), count(*) FILTER (WHERE i.status <> 'completed')
FROM invocations i WHERE i.started_at >= $1 GROUP BY i.model_id
"""
RAW_LATEST: Final = "SELECT * FROM orders WHERE status = 'CLOSED' AND closed_at >= $1 ORDER BY closed_at DESC LIMIT 100"
RAW_INVOCATIONS: Final = """
SELECT * FROM invocations i JOIN tool_calls c ON c.invocation_id = i.id
WHERE i.started_at >= $1 ORDER BY i.started_at DESC LIMIT 50
"""


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Milliseconds."""
    began_s = time.perf_counter()
    await work()
    return (time.perf_counter() - began_s) * 1000


async def end_of_season(conn: Connection) -> datetime:
    """Return the time up to which the models traded."""
    end = await select_processed_until(conn)
    if end is None:
        raise SystemExit("there is no season in this database")
    return end


DELETE_WRITTEN: Final = (
    "DELETE FROM portfolio_snapshots WHERE created_at >= $1",
    "DELETE FROM portfolio_hourly WHERE hour >= $1",
    "DELETE FROM variant_hourly WHERE hour >= $1",
)


class Case(NamedTuple):
    """A call, and the plain SQL over raw rows of the same data."""

    name: str
    procedure: str
    body: bytes
    raw: str = ""
    since: timedelta = timedelta(days=3650)

    @property
    def changed_ms(self) -> float:
        """How long its first call after a change may take."""
        return THREADED_CHANGED_MS.get(self.procedure, CHANGED_MS)


_WEEK: Final = timedelta(days=7)
CASES: Final = (
    *(
        Case(f"variant history {window}", "variants.getVariantHistory", b'{"window":"%b"}' % window.encode(),
             RAW_VARIANTS, span)
        for window, span in WINDOWS.items()
    ),
    Case("portfolio history", "trading.getPortfolioHistory", b"{}", RAW_HISTORY, _WEEK),
    Case("portfolio history, variant", "trading.getPortfolioHistory", b'{"variant":"Apex"}', RAW_HISTORY, _WEEK),
    *(
        Case(f"leaderboard {window}", "analytics.getLeaderboard", b'{"window":"%b"}' % window.encode(), RAW_BOARD, span)
        for window, span in WINDOWS.items()
    ),
    *(
        Case(f"evidence {window}", "analytics.getEvidence", b'{"window":"%b"}' % window.encode())
        for window in ("7d", "run")
    ),
    Case("model stats", "analytics.getModelStats", b"{}", RAW_STATISTICS),
    Case("model stats, advanced", "analytics.getModelStats", b'{"mode":"advanced"}', RAW_STATISTICS),
    Case("variant stats", "variants.getVariantStats", b"{}", RAW_STATISTICS),
    Case("run info", "analytics.getRunInfo", b"{}", RAW_COUNTS),
    Case("trades", "trading.getTrades", b"{}", RAW_LATEST),
    Case("completed trades", "simulator.getCompletedTradesFromDB", b"{}", RAW_LATEST),
    Case("invocations", "models.getInvocations", b"{}", RAW_INVOCATIONS),
    Case("failures", "analytics.getFailures", b"{}", RAW_COUNTS),
    Case("models", "models.getModels", b"{}", RAW_COUNTS),
    Case("positions", "trading.getPositions", b"{}"),
    Case("prices", "trading.getCryptoPrices", b"{}"),
    Case("account", "simulator.getAccount", b"{}"),
    Case("variants", "variants.getVariants", b"{}"),
)  # fmt: skip


class Books:
    """The part of the exchange that readers use, with accounts as of the end of the season."""

    def __init__(self, accounts: dict[str, Account], marks: dict[str, Decimal]) -> None:
        self.accounts = accounts
        self.markets = DEFAULT_MARKETS
        self.term = 1
        self.version = 0
        self._marks = marks

    def account(self, account_id: str) -> Account:
        if account_id == "default":
            return next(iter(self.accounts.values()))
        if account_id not in self.accounts:
            raise NotFound(f"there is no account {account_id}")
        return self.accounts[account_id]

    def marks(self) -> dict[str, Decimal]:
        return self._marks

    async def settle(self, account_id: str) -> None:
        """Return at once, as nothing is ever in progress."""


class SeasonClock(SystemClock):
    """Stands still at the end of a season, except for the minutes that pass between calls."""

    def __init__(self, end: datetime) -> None:
        self.at = end

    def now(self) -> datetime:
        return self.at


class Holds:
    """Measures how long the process computes without yielding to other tasks, with a probe every millisecond."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._last_s = time.process_time()
        self._tick()

    def _tick(self) -> None:
        now_s = time.process_time()
        self.longest_ms = max(self.longest_ms, 1000 * (now_s - self._last_s))
        self._last_s = now_s
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    async def take(self) -> float:
        """Return the longest hold since the last call, including the current one."""
        await asyncio.sleep(2 * TICK_S)
        longest, self.longest_ms = self.longest_ms, 0.0
        return longest


class Season:
    """New services over a season, and the endpoint's dispatcher."""

    def __init__(self, dispatcher: Dispatcher, context: Context, clock: SeasonClock, books: Books) -> None:
        self.dispatcher = dispatcher
        self.context = context
        self.clock = clock
        self.books = books
        self._targets = {case.procedure: Target(REGISTRY.procedures[case.procedure], BodyStyle.PLAIN) for case in CASES}

    @classmethod
    async def open(cls, dsn: str, stack: AsyncExitStack) -> "Season":
        settings, events = (
            Settings.load({"SIM_SEED": "0", "SNAPSHOT_RETENTION_DAYS": "365"}, None, demo=True),
            EventBus(),
        )
        database = await Database.connect(dsn)
        stack.push_async_callback(database.close)
        async with database.connection() as conn:
            await conn.execute(INSERT_BASELINES, timeout=STATEMENT_S)
            clock = SeasonClock(ceil_time(await end_of_season(conn), timedelta(hours=1)))
            books = Books(await select_accounts(conn), dict(await select_last_marks(conn)))
        exchange: Any = books
        market = MarketFeed(make_source(settings), clock)
        shared = database, exchange, market, clock, events, settings, Providers()
        context = make_context(AgentServices(*shared, KnownModels(database)))
        await context.agents.follow()
        stack.push_async_callback(cls._delete_written, database, clock.now())
        return cls(Dispatcher(REGISTRY, context), context, clock, books)

    @staticmethod
    async def _delete_written(database: Database, start: datetime) -> None:
        async with database.transaction() as conn:
            for statement in DELETE_WRITTEN:
                await conn.execute(statement, start)

    async def start(self) -> None:
        """Read the data that the service reads before it listens, while its models trade."""
        await self.context.analytics.model_stats()

    async def change(self) -> None:
        """Let a minute pass, or every other time an hour, and do the service's work for it."""
        self.clock.at += timedelta(minutes=61 if self.books.version % 2 else 1)
        await self.context.portfolio.take_snapshots(self.clock.at)
        self.books.version += 1

    async def call(self, case: Case) -> int:
        """Make a call as for a request. Return the size of its answer."""
        answer = await self.dispatcher.cached_or_call(self._targets[case.procedure], case.body, ANYBODY, "1")
        assert answer.status == 200, answer.body[:300]
        return len(answer.body)


def p99_of(took: Sequence[float]) -> float:
    """Return the 99th percentile, or the maximum of fewer than a hundred values."""
    return max(took) if len(took) < 100 else quantiles(took, n=100)[98]


async def measure(dsn: str, calls: int, changes: int) -> bool:
    """Measure every case. Return False if a floor is missed."""
    async with AsyncExitStack() as stack:
        season = await Season.open(dsn, stack)
        freeze_startup_objects()
        holds = Holds()
        print(f"start {await timed(season.start):.0f} ms, hold {await holds.take():.0f} ms", end="")
        freeze_startup_objects()
        print(f", then frozen in {await holds.take():.0f} ms")
        print(f"{'':26}{'warm p50':>9}{'p99':>8}{'changed p50':>12}{'most':>8}{'hold':>7}{'bytes':>12}   raw SQL, ms")
        met = True
        for case in CASES:
            await holds.take()
            size, changed = await season.call(case), []
            hold = await holds.take()
            for _ in range(changes):
                await season.change()
                await holds.take()
                changed.append(await timed(lambda case=case: season.call(case)))  # type: ignore[misc]
                hold = max(hold, await holds.take())
            took = []
            for _ in range(calls):
                took.append(await timed(lambda case=case: season.call(case)))  # type: ignore[misc]
                await asyncio.sleep(0)  # as between requests: an answer from memory does not yield
            hold = max(hold, await holds.take())
            row = Row(case, size, took, changed, hold, await raw_ms(dsn, case) if case.raw else None)
            met &= row.is_met
            print(row.text(), flush=True)
    return met


class Row(NamedTuple):
    """The measurements of a case, in milliseconds."""

    case: Case
    size: int
    warm: Sequence[float]
    changed: Sequence[float]
    hold: float
    raw: float | None

    @property
    def is_met(self) -> bool:
        return p99_of(self.warm) <= WARM_MS and max(self.changed) <= self.case.changed_ms and self.hold <= HOLD_MS

    def text(self) -> str:
        raw = "" if self.raw is None else f"{self.raw:.0f} ({self.raw / median(self.changed):.0f} x)"
        return (
            f"{self.case.name:26}{median(self.warm):>9.3f}{p99_of(self.warm):>8.3f}{median(self.changed):>12.1f}"
            f"{max(self.changed):>8.1f}{self.hold:>7.1f}{self.size:>12,}   {raw}{'' if self.is_met else ' MISSED'}"
        )


async def raw_ms(dsn: str, case: Case) -> float:
    """Return the median duration of the plain SQL over a few calls, including fetching its rows."""
    database = await Database.connect(dsn, size=1, command_timeout_s=STATEMENT_S)
    async with database.connection() as conn:
        since = await end_of_season(conn) - case.since
        took = [await timed(lambda: conn.fetch(case.raw, since)) for _ in range(RAW_CALLS)]
    await database.close()
    return median(took)


async def check(dsn: str) -> bool:
    """Print and return whether the books balance."""
    database = await Database.connect(dsn, size=1, command_timeout_s=STATEMENT_S)
    report = await audit(database)
    await database.close()
    words = "clean" if report.is_clean else f"NOT clean: {report.problems[:3]}"
    print(f"audit of {report.runs} runs, {report.orders} orders, {report.entries} ledger entries: {words}")
    return report.is_clean


async def seeded(server: EmbeddedPostgres, *, quick: bool) -> str:
    """Return the address of a season on the server, which is written if it does not exist."""
    dsn = await server.ensure_database("quick" if quick else "season")
    if not await is_seeded(dsn):
        began_s = time.monotonic()
        await seed_season(dsn, 9 if quick else 90, language_models(100))
        print(f"seeded in {time.monotonic() - began_s:.0f} s")
    return dsn


async def is_seeded(dsn: str) -> bool:
    """Return whether the database has a history."""
    database = await Database.connect(dsn, size=1)
    await apply_schema(database)
    async with database.connection() as conn:
        until = await select_processed_until(conn)
    await database.close()
    return until is not None


async def run(options: argparse.Namespace, folder: Path) -> bool:
    load_procedures()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedPostgres(folder / "postgres", durable=False))
        dsn = options.database_url
        if dsn is None:
            dsn = await seeded(server, quick=options.quick)
        results = [await check(dsn), await measure(dsn, options.calls, options.changes)]
    return all(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    parser.add_argument("--database-url", help="of a season that is there")
    parser.add_argument("--folder", type=Path, help="where the server and its season are kept, and found again")
    parser.add_argument("--calls", type=int, default=300, help="of each case, warm; default: 300")
    parser.add_argument("--changes", type=int, default=10, help="before a first call of each case; default: 10")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="trader-season-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        Path(folder).chmod(0o755)  # as root, the server runs as `nobody`, which must have access
        return 0 if runner.run(run(options, options.folder or Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
