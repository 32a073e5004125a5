"""Audit: recomputes every account from its ledger and compares it with its rows, to the last digit.

In live trading the fills are compared with the venue's trades, on paper the recorded equity with the ledger and the
candles, and what agents were told with the fills.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from trader.domain.exchange.audit import compare, compare_with_venue, recompute
from trader.domain.exchange.orders import Fill
from trader.domain.portfolio.baselines import BUY_AND_HOLD, HOLD_NOTHING
from trader.domain.portfolio.equity_audit import compare_with_books, compare_with_marks
from trader.store.database.pool import Database
from trader.store.exchange import audit as store

LEVERAGE_UNSEEN: Final = 5.0
"""The leverage of a rule agent that no snapshot may have seen, since it held for less than a minute."""

_WITHOUT_AGENT: Final = frozenset({HOLD_NOTHING.id, BUY_AND_HOLD.id})


class AuditReport(msgspec.Struct):
    """What was looked at, and every sentence that is wrong. `problems` is empty when the books are clean.

    `trades` are those of a venue, `hours` the recorded hours of equity.
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


def _say_nothing(_: int, __: int) -> None:
    pass


async def audit(database: Database, progress: Callable[[int, int], None] = _say_nothing) -> AuditReport:
    """Audit a database as of one moment, while the service may go on. `progress` gets (runs done, runs in all)."""
    report = AuditReport()
    async with database.reading() as conn:
        runs, is_live = await store.select_runs(conn), await store.select_is_live(conn)
        candles = await store.select_hours(conn)
        for number, run in enumerate(runs, start=1):
            rows = await store.select_figures(conn, run.id)
            entries = await store.select_entries(conn, run.id)
            report.runs += 1
            report.orders += len(rows)
            report.entries += len(entries)
            problems: list[object] = list(compare(rows, recompute(entries)))
            trades = await store.select_trades_of_run(conn, run.id)
            if is_live or trades:  # a trade of the venue may be learned of after a snapshot that had it
                fills = [entry for entry in entries if isinstance(entry, Fill)]
                report.trades += len(trades)
                problems += compare_with_venue(fills, trades)
            else:
                hours = await store.select_equity(conn, run)
                report.hours += len(hours)
                problems += compare_with_books(run.initial_capital, entries, hours, candles.range_of)
            report.problems += [f"account {run.account_id}, run {run.number}: {problem}" for problem in problems]
            progress(number, len(runs))
        for run in await store.select_baseline_runs(conn):
            hours = await store.select_equity(conn, run)
            report.hours += len(hours)
            least = 0.0 if run.account_id in _WITHOUT_AGENT else LEVERAGE_UNSEEN
            problems = list(compare_with_marks(run.initial_capital, hours, least, candles.move_over))
            report.problems += [f"{run.account_id}: {problem}" for problem in problems]
        report.problems += [str(difference) for difference in await store.select_differences(conn)]
        report.problems += [str(mismatch) for mismatch in await store.select_wrongly_filled(conn)]
        report.problems += [str(broken) for broken in await store.select_broken_promises(conn)]
        report.problems += [str(mistold) for mistold in await store.select_mistold(conn)]
    return report
