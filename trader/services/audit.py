"""The audit: every account recomputed from its ledger and compared with its rows, to the last digit."""

from collections.abc import Callable

import msgspec

from trader.domain.audit import compare, recompute
from trader.store import audit as store
from trader.store.pool import Database


class AuditReport(msgspec.Struct):
    """What was looked at, and every sentence that is wrong. `problems` is empty when the books are clean."""

    runs: int = 0
    orders: int = 0
    entries: int = 0
    problems: list[str] = []

    @property
    def is_clean(self) -> bool:
        return not self.problems


def _say_nothing(_: int, __: int) -> None:
    pass


async def audit(database: Database, progress: Callable[[int, int], None] = _say_nothing) -> AuditReport:
    """Audit a database as of one moment, while the service may go on. `progress` gets (runs done, runs in all)."""
    report = AuditReport()
    async with (
        database.connection() as conn,
        conn.transaction(isolation="repeatable_read", readonly=True),
    ):
        runs = await store.select_runs(conn)
        for number, (run_id, account_id, run_number) in enumerate(runs, start=1):
            rows = await store.select_figures(conn, run_id)
            entries = await store.select_entries(conn, run_id)
            report.runs += 1
            report.orders += len(rows)
            report.entries += len(entries)
            where = f"account {account_id}, run {run_number}"
            report.problems += [f"{where}: {mismatch}" for mismatch in compare(rows, recompute(entries))]
            progress(number, len(runs))
        report.problems += [str(difference) for difference in await store.select_differences(conn)]
        report.problems += [str(broken) for broken in await store.select_broken_promises(conn)]
    return report
