"""Appends results to the chain in batches: the ledger of each account, its runs, and the equity of its hours."""

from datetime import datetime, timedelta
from typing import Final

from msgspec import to_builtins

from trader.clock import floor_time
from trader.domain.agents.results import BEGIN, RESULTS, Span, utc_text
from trader.store.database.chain import insert_record, plain_rows
from trader.store.database.pool import Database
from trader.store.portfolio import results as store

SETTLED_AFTER: Final = timedelta(minutes=5)
"""How long after its end an hour is recorded: until then a clock that was set back may still write into it."""

ACCOUNTS_MAX: Final = 50
ROWS_MAX: Final = 200
"""Most accounts in one record, and most sequences and hours of each; the others are in the next ones."""


async def record_results(database: Database, term: int, now: datetime) -> None:
    """Append every result that is not in the chain yet, as the leader of this term.

    The first call also appends what the chain is not told when it happens, as it is then. Each record is a transaction
    of its own: after a crash the next call goes on with what is missing. No account is locked.

    :raises Unavailable: the database did not confirm a record
    """
    before = floor_time(now - SETTLED_AFTER, timedelta(hours=1))
    while await _record_batch(database, term, before):
        pass


async def _record_batch(database: Database, term: int, before: datetime) -> bool:
    """Append the next record. Return whether there may be more."""
    async with database.transaction() as conn:
        if await store.lock_marks(conn) != term:
            return False
        if not await store.select_has_begun(conn):
            content = {"before": await store.select_marks(conn), "rows": await store.select_states(conn)}
            await insert_record(conn, BEGIN, content)
        pending = await store.select_pending(conn, before, ACCOUNTS_MAX, ROWS_MAX)
        if not pending:
            return False
        spans = [_span(each) for each in pending]
        runs = await store.select_new_runs(conn, pending)
        baselines = await store.select_baselines_of(conn, [each.account_id for each in pending if each.hour_until])
        rows = {
            **await store.select_span_rows(conn, spans),
            **({"runs": plain_rows(runs)} if runs else {}),
            **({"baselines": plain_rows(baselines)} if baselines else {}),
        }
        numbers = {run["account_id"]: run["number"] for run in runs}
        marks = [
            store.ChainMark(
                each.account_id,
                each.sequence_until,
                numbers.get(each.account_id, each.run_after),
                each.hour_until or each.hour_after,
            )
            for each in pending
        ]
        await store.upsert_marks(conn, marks)
        await insert_record(conn, RESULTS, {"spans": to_builtins(spans), "rows": rows})
    return True


def _span(pending: store.PendingSpan) -> Span:
    hours = (None if hour is None else utc_text(hour) for hour in (pending.hour_after, pending.hour_until))
    hour_after, hour_until = hours
    return Span(
        account_id=pending.account_id,
        sequence_after=pending.sequence_after,
        sequence_until=pending.sequence_until,
        hour_after=hour_after,
        hour_until=hour_until,
    )
