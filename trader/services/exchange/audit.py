"""Audit: recomputes every account from its ledger and compares it with its rows, to the last digit.

In live trading the fills are compared with the venue's trades, too.
"""

from collections.abc import Callable

import msgspec

from trader.domain.exchange.audit import compare, compare_with_venue, recompute
from trader.domain.exchange.orders import Fill
from trader.store.database.pool import Database
from trader.store.exchange import audit as store


class AuditReport(msgspec.Struct):
    """What was looked at, and every sentence that is wrong. `problems` is empty when the books are clean.

    `trades` are those of a venue.
    """

    runs: int = 0
    orders: int = 0
    entries: int = 0
    trades: int = 0
    problems: list[str] = []

    @property
    def is_clean(self) -> bool:
        return not self.problems


def _say_nothing(_: int, __: int) -> None:
    pass


async def audit(database: Database, progress: Callable[[int, int], None] = _say_nothing) -> AuditReport:
    """Audit a database as of one moment, while the service may go on. `progress` gets (runs done, runs in all)."""
    report = AuditReport()
    async with database.reading() as conn:
        runs, is_live = await store.select_runs(conn), await store.select_is_live(conn)
        for number, (run_id, account_id, run_number) in enumerate(runs, start=1):
            rows = await store.select_figures(conn, run_id)
            entries = await store.select_entries(conn, run_id)
            report.runs += 1
            report.orders += len(rows)
            report.entries += len(entries)
            where = f"account {account_id}, run {run_number}"
            report.problems += [f"{where}: {mismatch}" for mismatch in compare(rows, recompute(entries))]
            trades = await store.select_trades_of_run(conn, run_id)
            if is_live or trades:
                fills = [entry for entry in entries if isinstance(entry, Fill)]
                report.trades += len(trades)
                report.problems += [f"{where}: {mismatch}" for mismatch in compare_with_venue(fills, trades)]
            progress(number, len(runs))
        report.problems += [str(difference) for difference in await store.select_differences(conn)]
        report.problems += [str(mismatch) for mismatch in await store.select_wrongly_filled(conn)]
        report.problems += [str(broken) for broken in await store.select_broken_promises(conn)]
    return report
