"""The histories and statistics of a season, beside the plain SQL over its raw rows.

  python -m benchmarks.season     100 models, 90 days: 200,000 trades, 1 million invocations, 13 million snapshots
  python -m benchmarks.season --quick    100 models, 9 days, a tenth of it
  python -m benchmarks.season --folder DIR    keeps the season there, and measures the one that is there already
  python -m benchmarks.season --database-url URL        one that is there (scripts/seed_accounts.py --history makes it)

A call is what a request costs behind HTTP when its answer is not kept: decoding, the services, encoding, checking. A
long answer is in pieces that are kept, which go to the connection as they are: nobody makes one text of them.
`cold` is the first call after a start: each in a new process with new connections, which has made itself ready as the
service does before it listens (`app._make_ready`). `unready` is the first call of a process that has not, which no
caller of the service meets: it is told, not judged. `warm` is of `--calls` calls. Exit code 1: a bar is missed.
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

from benchmarks.season_writes import STATEMENT_S, end_of_season, measure_writes, timed
from benchmarks.uncached import Books

from trader.__main__ import loop_factory
from trader.api.context import Context
from trader.api.envelope import Style
from trader.api.rpc import REGISTRY, Dispatcher, Target, load_procedures, rehearse
from trader.api.schemas.common import whole
from trader.api.warm import warm
from trader.app import freeze_startup_objects
from trader.clock import SystemClock
from trader.embedded.server import EmbeddedPostgres
from trader.gateways.agents.providers import Providers
from trader.gateways.sources import make_source
from trader.services.agents.schedule import Agents
from trader.services.events import EventBus
from trader.services.exchange.audit import audit
from trader.services.market.feed import MarketFeed
from trader.services.portfolio.analytics import Analytics
from trader.services.portfolio.snapshots import WINDOWS, Portfolio, Window
from trader.services.portfolio.trades import TradingRecords
from trader.settings import Settings
from trader.store.database.pool import Database
from trader.store.database.schema import apply_schema
from trader.store.exchange.accounts import select_accounts, select_last_marks, select_processed_until

ROOT: Final = Path(__file__).resolve().parents[2]
RAW_CALLS: Final = 3
VARIANT_SPEEDUP_MIN: Final = 20.0

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
RAW_TRADES: Final = """
SELECT account_id, count(*), sum(net_pnl), avg(entry_notional), stddev_samp(net_pnl), corr(confidence, net_pnl)
FROM orders WHERE status = 'CLOSED' AND closed_at >= $1 GROUP BY account_id
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


class Case(NamedTuple):
    """A call, the bar of its p99, and the plain SQL over raw rows that a service without rollups would ask."""

    name: str
    procedure: str
    body: bytes
    bar_ms: float
    raw: str
    since: timedelta


_VARIANT_BARS_MS: Final[Mapping[Window, float]] = {"24h": 10, "7d": 15, "30d": 30}
_ALL: Final = timedelta(days=3650)
CASES: Final = (
    *(
        Case(f"variant history {window}", "variants.getVariantHistory", b'{"window":"%b"}' % window.encode(), bar,
             RAW_VARIANTS, WINDOWS[window])
        for window, bar in _VARIANT_BARS_MS.items()
    ),
    Case("portfolio history", "trading.getPortfolioHistory", b"{}", 50, RAW_HISTORY, timedelta(days=7)),
    Case("portfolio history, variant", "trading.getPortfolioHistory", b'{"variant":"Apex"}', 50, RAW_HISTORY,
         timedelta(days=7)),
    Case("leaderboard 7d", "analytics.getLeaderboard", b"{}", 50, RAW_BOARD, timedelta(days=7)),
    Case("leaderboard 30d", "analytics.getLeaderboard", b'{"window":"30d"}', 50, RAW_BOARD, timedelta(days=30)),
    Case("model stats", "analytics.getModelStats", b"{}", 50, RAW_TRADES, _ALL),
    Case("model stats, advanced", "analytics.getModelStats", b'{"mode":"advanced"}', 50, RAW_TRADES, _ALL),
    Case("trades", "trading.getTrades", b"{}", 50, RAW_LATEST, _ALL),
    Case("invocations", "models.getInvocations", b"{}", 50, RAW_INVOCATIONS, _ALL),
    Case("failures", "analytics.getFailures", b"{}", 50, RAW_COUNTS, _ALL),
    Case("variant stats", "variants.getVariantStats", b"{}", 50, RAW_TRADES, _ALL),
)  # fmt: skip


class SeasonClock(SystemClock):
    """Goes on from the end of a season, whenever that was."""

    def __init__(self, end: datetime) -> None:
        self._since_end = super().now() - end

    def now(self) -> datetime:
        return super().now() - self._since_end


async def make_dispatcher(dsn: str, stack: AsyncExitStack) -> tuple[Dispatcher, Context]:
    """New services over the season, and the endpoint's dispatcher."""
    settings, events = Settings.load({"SNAPSHOT_RETENTION_DAYS": "365"}, None, demo=True), EventBus()
    database = await Database.connect(dsn)
    stack.push_async_callback(database.close)
    async with database.connection() as conn:
        clock = SeasonClock(await end_of_season(conn))
        books: Any = Books(await select_accounts(conn), dict(await select_last_marks(conn)))
    market = MarketFeed(make_source(settings), clock)
    portfolio = Portfolio(database, books, clock, settings)
    context = Context(
        settings=settings,
        clock=clock,
        market=market,
        exchange=books,
        trading=TradingRecords(database, books),
        portfolio=portfolio,
        analytics=Analytics(database, books, clock),
        agents=Agents(database, books, market, clock, events, settings, Providers()),
    )
    return Dispatcher(REGISTRY, context), context


async def make_ready(context: Context) -> None:
    """What the service does before it listens."""
    await warm(context, context.clock.now())
    await rehearse(context)
    freeze_startup_objects()


async def call(dispatcher: Dispatcher, case: Case) -> int:
    """One call; the size of its answer."""
    answer = await dispatcher.call(Target(REGISTRY.procedures[case.procedure], Style.PLAIN), case.body, None, "1")
    assert answer.status == 200, whole(answer.body)[:300]
    return len(answer.body)


async def first_calls(dsn: str, names: Sequence[str], *, ready: bool) -> dict[str, float]:
    """The first call of each case by new services; `made ready` is how long that took."""
    async with AsyncExitStack() as stack:
        dispatcher, context = await make_dispatcher(dsn, stack)
        took = {}
        if ready:
            took["made ready"] = await timed(lambda: make_ready(context))
        for case in CASES:
            if case.name in names:
                took[case.name] = await timed(lambda case=case: call(dispatcher, case))  # type: ignore[misc]
        return took


def first_calls_apart(dsn: str, names: Sequence[str], ready: bool) -> dict[str, float]:
    """The same, in the process of a pool that has done nothing else."""
    load_procedures()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(first_calls(dsn, names, ready=ready))


async def in_new_processes(dsn: str, rounds: Sequence[Sequence[str]], *, ready: bool) -> dict[str, list[float]]:
    """First calls, each round in a process of its own, one after the other; milliseconds by name."""
    found: dict[str, list[float]] = {}
    loop, spawned = asyncio.get_running_loop(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawned, max_tasks_per_child=1) as pool:
        for names in rounds:
            for name, took in (await loop.run_in_executor(pool, first_calls_apart, dsn, names, ready)).items():
                found.setdefault(name, []).append(took)
    return found


def p99_of(took: Sequence[float]) -> float:
    """The 99th percentile; of fewer than a hundred values the largest."""
    return max(took) if len(took) < 100 else quantiles(took, n=100)[98]


async def measure(dsn: str, calls: int, starts: int) -> bool:
    """Measure every case. False when a bar is missed."""
    met, names = True, [case.name for case in CASES]
    unready = await in_new_processes(dsn, [[name] for name in names], ready=False)
    cold = await in_new_processes(dsn, [names] * starts, ready=True)
    ready = cold["made ready"]
    print(f"made ready before it listens in {median(ready):.0f} ms, at most {max(ready):.0f} ms")
    print(
        f"{'':26}{'unready':>8}{'cold p50':>9}{'p99':>8}{'warm p50':>9}{'p99':>8}{'bar':>5}{'bytes':>12}   raw SQL, ms"
    )
    async with AsyncExitStack() as stack:
        dispatcher, context = await make_dispatcher(dsn, stack)
        await make_ready(context)
        for case in CASES:
            size = await call(dispatcher, case)
            took = [await timed(lambda case=case: call(dispatcher, case)) for _ in range(calls)]  # type: ignore[misc]
            row = Row(case, size, median(unready[case.name]), cold[case.name], took, await raw_ms(dsn, case))
            met &= row.is_met
            print(row.text(), flush=True)
    return met


class Row(NamedTuple):
    """What was measured of a case, in milliseconds."""

    case: Case
    size: int
    unready: float
    cold: Sequence[float]
    warm: Sequence[float]
    raw: float

    @property
    def is_met(self) -> bool:
        bar, is_history = self.case.bar_ms, "variant history" in self.case.name
        is_fast = not is_history or self.raw >= VARIANT_SPEEDUP_MIN * max(median(self.warm), median(self.cold))
        return is_fast and p99_of(self.cold) < bar and p99_of(self.warm) < bar

    def text(self) -> str:
        return (
            f"{self.case.name:26}{self.unready:>8.1f}{median(self.cold):>9.2f}{p99_of(self.cold):>8.2f}"
            f"{median(self.warm):>9.2f}{p99_of(self.warm):>8.2f}{self.case.bar_ms:>5.0f}{self.size:>12,}"
            f"   {self.raw:.0f} ({self.raw / median(self.cold):.0f} x cold, {self.raw / median(self.warm):.0f} x warm)"
            f"{'' if self.is_met else ' MISSED'}"
        )


async def raw_ms(dsn: str, case: Case) -> float:
    """What the plain SQL takes, in the median of a few calls, its rows fetched."""
    database = await Database.connect(dsn, size=1, command_timeout_s=STATEMENT_S)
    async with database.connection() as conn:
        since = await end_of_season(conn) - case.since
        took = [await timed(lambda: conn.fetch(case.raw, since)) for _ in range(RAW_CALLS)]
    await database.close()
    return median(took)


async def forget_database(dsn: str, name: str) -> None:
    """Drop a database of the same server."""
    database = await Database.connect(dsn, size=1, command_timeout_s=STATEMENT_S)
    async with database.connection() as conn:
        await conn.execute(f"DROP DATABASE IF EXISTS {name}")
    await database.close()


async def check(dsn: str) -> bool:
    """Whether the books balance."""
    database = await Database.connect(dsn, size=1, command_timeout_s=STATEMENT_S)
    report = await audit(database)
    await database.close()
    words = "clean" if report.is_clean else f"NOT clean: {report.problems[:3]}"
    print(f"audit of {report.runs} runs, {report.orders} orders, {report.entries} ledger entries: {words}")
    return report.is_clean


async def is_seeded(dsn: str) -> bool:
    """Whether the database has a past."""
    database = await Database.connect(dsn, size=1)
    await apply_schema(database)
    async with database.connection() as conn:
        until = await select_processed_until(conn)
    await database.close()
    return until is not None


async def seed(dsn: str, days: int) -> None:
    """Let the script that operators use write the season."""
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "scripts" / "seed_accounts.py"), "--demo", "--language-models", "--models", "100",
        "--history", str(days), "--database-url", dsn,
        cwd=tempfile.gettempdir(), env={**os.environ, "SNAPSHOT_RETENTION_DAYS": "365"},
    )  # fmt: skip
    if await process.wait():
        raise SystemExit("the season could not be written")
    print(f"seeded in {time.monotonic() - began_s:.0f} s")


async def run(options: argparse.Namespace, folder: Path) -> bool:
    load_procedures()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedPostgres(folder / "postgres", durable=False))
        dsn = options.database_url
        if dsn is None:
            dsn = await server.ensure_database("quick" if options.quick else "season")
            if not await is_seeded(dsn):
                await seed(dsn, 9 if options.quick else 90)
        results = [await check(dsn), await measure(dsn, options.calls, options.starts)]
        if options.database_url is None:  # both databases must be of one server to be compared
            await forget_database(dsn, "empty")
            results.append(await measure_writes(dsn, await server.ensure_database("empty")))
    return all(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    parser.add_argument("--database-url", help="of a season that is there")
    parser.add_argument("--folder", type=Path, help="where the server and its season are kept, and found again")
    parser.add_argument("--calls", type=int, default=300, help="of each case, warm; default: 300")
    parser.add_argument("--starts", type=int, default=10, help="of new processes, for the cold calls; default: 10")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="trader-season-") as folder,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        Path(folder).chmod(0o755)  # as root the server runs as nobody, who must get in
        return 0 if runner.run(run(options, options.folder or Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
