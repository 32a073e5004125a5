"""Audit: recomputes every account from its ledger and compares it with its rows, to the last digit.

In live trading it compares the fills with the venue's trades; on paper it compares the recorded equity with the ledger
and the candles, and the results of tool calls with the fills.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from trader.core.clock import EPOCH
from trader.database.pool import Database
from trader.exchange.domain.audit import compare, compare_with_venue, recompute
from trader.exchange.domain.orders import Fill
from trader.exchange.sql import audit as store
from trader.portfolio.domain.baselines import BUY_AND_HOLD, HOLD_NOTHING
from trader.portfolio.domain.equity_audit import compare_with_books, compare_with_marks
from trader.portfolio.sql.snapshots import select_baseline_runs, select_hours, select_run_hours

LEVERAGE_UNSEEN: Final = 5.0
"""Leverage allowed for a rule agent's positions of less than a minute, which no snapshot may show."""

_WITHOUT_AGENT: Final = frozenset({HOLD_NOTHING.id, BUY_AND_HOLD.id})


class AuditReport(msgspec.Struct):
    """Counts of the checked rows, and every problem. `problems` is empty if the books are clean.

    `trades` counts a venue's trades, `hours` the recorded hours of equity.
    """

    runs: int = 0
    orders: int = 0
    entries: int = 0
    trades: int = 0
    hours: int = 0
    problems: list[str] = []

    @property
    def is_clean(self) -> bool:
        return not self.problems


async def audit(database: Database, progress: Callable[[int, int], None] = lambda _done, _of: None) -> AuditReport:
    """Audit a consistent snapshot of a database; the service may be running. `progress` gets (runs done, total)."""
    report = AuditReport()
    async with database.reading() as conn:
        runs, is_live = await store.select_runs(conn), await store.select_is_live(conn)
        candles = await select_hours(conn)
        for number, run in enumerate(runs, start=1):
            rows = await store.select_figures(conn, run.id)
            entries = await store.select_entries(conn, run.id)
            report.runs += 1
            report.orders += len(rows)
            report.entries += len(entries)
            problems: list[object] = list(compare(rows, recompute(entries)))
            trades = await store.select_trades_of_run(conn, run.id)
            if is_live or trades:  # the venue may report a trade after a snapshot that includes it
                fills = [entry for entry in entries if isinstance(entry, Fill)]
                report.trades += len(trades)
                problems += compare_with_venue(fills, trades)
            else:
                hours = await select_run_hours(conn, [(run.account_id, run.id, EPOCH)])
                report.hours += len(hours)
                problems += compare_with_books(run.initial_capital, entries, hours, candles.range_of)
            report.problems += [f"account {run.account_id}, run {run.number}: {problem}" for problem in problems]
            progress(number, len(runs))
        for run in await select_baseline_runs(conn):
            hours = await select_run_hours(conn, [(run.account_id, run.id, EPOCH)])
            report.hours += len(hours)
            least = 0.0 if run.account_id in _WITHOUT_AGENT else LEVERAGE_UNSEEN
            problems = list(compare_with_marks(run.initial_capital, hours, least, candles.move_over))
            report.problems += [f"{run.account_id}: {problem}" for problem in problems]
        report.problems += [str(difference) for difference in await store.select_differences(conn)]
        report.problems += [str(mismatch) for mismatch in await store.select_wrongly_filled(conn)]
        report.problems += [str(broken) for broken in await store.select_broken_promises(conn)]
        report.problems += [str(mistold) for mistold in await store.select_mistold(conn)]
    return report
