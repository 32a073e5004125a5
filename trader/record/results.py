"""Appends results to the chain in batches: each account's ledger, runs and hourly equity, and the markets' hours."""

from datetime import datetime, timedelta
from typing import Final

from msgspec import to_builtins

from trader.core.clock import floor_time
from trader.database.pool import Database
from trader.record.domain.results import BEGIN, CANDLES, RESULTS, Span, utc_text
from trader.record.sql import results as store
from trader.record.sql.chain import insert_record, lock_chain, plain_rows

SETTLED_AFTER: Final = timedelta(minutes=5)
"""How long after its end an hour is recorded: until then, a clock that was set back may still write to it."""

ACCOUNTS_MAX: Final = 50
ROWS_MAX: Final = 200
"""The most accounts in one record, and the most sequences and hours of each; the rest go into the next records."""


async def record_results(database: Database, term: int, now: datetime) -> None:
    """Append every result that is not in the chain yet, as the leader of this term.

    The first call also appends, in its current state, everything that is otherwise recorded when it happens. Each
    record is a separate transaction: after a crash, the next call continues with the missing records. No account is
    locked.

    :raises Unavailable: the database did not confirm a record
    """
    before = floor_time(now - SETTLED_AFTER, timedelta(hours=1))
    while await _record_batch(database, term, before):
        pass
    while await _record_candles(database, term):
        pass


async def _record_batch(database: Database, term: int, before: datetime) -> bool:
    """Append the next record. Return whether there may be more."""
    async with database.transaction() as conn:
        if await store.lock_marks(conn) != term:
            return False
        if not await store.select_has_begun(conn):
            await lock_chain(conn)  # a state that changed after it was read would enter the chain before this record
            await insert_record(conn, BEGIN, {"rows": await store.select_states(conn)})
        pending = await store.select_pending(conn, before, ACCOUNTS_MAX, ROWS_MAX)
        if not pending:
            return False
        spans = [
            Span(
                account_id=each["account_id"],
                sequence_after=each["sequence_after"],
                sequence_until=each["sequence_until"],
                hour_after=each["hour_after"] and utc_text(each["hour_after"]),
                hour_until=each["hour_until"] and utc_text(each["hour_until"]),
            )
            for each in pending
        ]
        numbers = {each["account_id"]: each["run_after"] for each in pending}
        runs = await store.select_new_runs(conn, numbers)
        baselines = await store.select_baselines_of(conn, [span.account_id for span in spans if span.hour_until])
        extremes = await store.select_span_extremes(conn, spans)
        rows = {
            **await store.select_span_rows(conn, spans),
            **({"price_extremes": plain_rows(extremes)} if extremes else {}),
            **({"runs": plain_rows(runs)} if runs else {}),
            **({"baselines": plain_rows(baselines)} if baselines else {}),
        }
        numbers |= {run["account_id"]: run["number"] for run in runs}
        marks = [
            (
                name := each["account_id"],
                each["sequence_until"],
                numbers[name],
                each["hour_until"] or each["hour_after"],
            )
            for each in pending
        ]
        await store.upsert_marks(conn, marks)
        await insert_record(conn, RESULTS, {"spans": to_builtins(spans), "rows": rows})
    return True


async def _record_candles(database: Database, term: int) -> bool:
    """Append the next complete hours of the markets. Return whether there may be more."""
    async with database.transaction() as conn:
        if await store.lock_marks(conn) != term:
            return False
        candles = await store.select_pending_candles(conn, ROWS_MAX)
        last = {f"candles/{candle['symbol']}": candle["open_time"] for candle in candles}  # in ascending order
        if candles:
            await store.upsert_marks(conn, [(name, 0, 0, hour) for name, hour in last.items()])
            await insert_record(conn, CANDLES, {"rows": {CANDLES: plain_rows(candles)}})
        return bool(candles)
