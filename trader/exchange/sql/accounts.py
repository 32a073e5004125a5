"""SQL for accounts, recorded answers to orders, and the state of the service."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from operator import itemgetter
from typing import NamedTuple
from uuid import UUID

import asyncpg
import msgspec

from trader.core.statistics import grouped
from trader.database.pool import Connection, part_of_row
from trader.exchange.domain.account import (
    TAKEN_KEPT,
    Account,
    AppliedTick,
    Position,
    RestingOrder,
    Run,
    Take,
    Taken,
)
from trader.exchange.domain.orders import AnswerFill, OrderAnswer, OrderSide
from trader.exchange.domain.tick_order import DateSpan, DateSpans
from trader.exchange.sql.trades import plan_of_row, trade_of_row
from trader.record.domain.results import REMOVED
from trader.record.sql.chain import insert_record

INSERT_ACCOUNT = """
WITH opened AS (
    INSERT INTO accounts (id, sequence, created_at, changed_at) VALUES ($1, 1, $2, $2)
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO runs (id, account_id, number, initial_capital, quote_currency, started_at)
SELECT $3, id, 1, $4, $5, $2 FROM opened
"""


async def insert_account(conn: Connection, account_id: str, run: Run) -> None:
    """Insert an account with its first run in one statement; does nothing if it exists."""
    await conn.execute(INSERT_ACCOUNT, account_id, run.started_at, run.id, run.initial_capital, run.quote_currency)


# The sum of all accounts, against which total losses are measured, drops by its capital in the same statement.
DELETE_ACCOUNT = """
WITH account AS (
    DELETE FROM accounts
    WHERE id = $1 AND ($2::bigint IS NULL OR (SELECT term FROM service_state) = $2)
        AND id NOT IN (SELECT id FROM models)
        AND NOT EXISTS (SELECT FROM fills WHERE account_id = $1)
    RETURNING id
), its_limit_orders AS (
    DELETE FROM limit_orders WHERE account_id IN (SELECT id FROM account)
), its_requests AS (
    DELETE FROM order_requests WHERE account_id IN (SELECT id FROM account)
), its_runs AS (
    DELETE FROM runs WHERE account_id IN (SELECT id FROM account)
), its_snapshots AS (
    DELETE FROM portfolio_snapshots WHERE account_id IN (SELECT id FROM account)
), its_hours AS (
    DELETE FROM portfolio_hourly WHERE account_id IN (SELECT id FROM account)
), its_mark AS (
    DELETE FROM chain_marks WHERE account_id IN (SELECT id FROM account)
), its_baseline AS (
    DELETE FROM equity_marks WHERE account_id IN (SELECT id FROM account) RETURNING last
), total_baseline AS (
    UPDATE equity_marks t SET day_start = t.day_start - b.last, peak = t.peak - b.last, last = t.last - b.last
    FROM its_baseline b WHERE t.account_id IS NULL
)
SELECT $2 IS NULL OR (SELECT term FROM service_state) = $2 AS is_leading,
       EXISTS (SELECT FROM accounts WHERE id = $1) AND NOT EXISTS (SELECT FROM account) AS is_kept,
       EXISTS (SELECT FROM account) AS is_deleted
"""


class Deletion(NamedTuple):
    """Whether the term continues, and whether the account stays (it has traded, or a model has it) or was deleted."""

    is_leading: bool
    is_kept: bool
    is_deleted: bool


async def delete_account(conn: Connection, account_id: str, term: int | None) -> Deletion:
    """Delete an account that has never traded and belongs to no model, with its rows, in this term.

    Without a term the caller holds the leader's lock. The connection must be in a transaction: the removal is recorded
    in the chain.
    """
    record = await conn.fetchrow(DELETE_ACCOUNT, account_id, term)
    assert record is not None
    deletion = Deletion(**record)
    if deletion.is_deleted:
        await insert_record(conn, REMOVED, {"account_id": account_id})
    return deletion


SELECT_COUNT_WITHOUT_MODEL = "SELECT count(*) FROM accounts WHERE id NOT IN (SELECT id FROM models)"


async def select_count_without_model(conn: Connection) -> int:
    """Return how many accounts belong to no model."""
    return int(await conn.fetchval(SELECT_COUNT_WITHOUT_MODEL))


SELECT_FILL_COUNT = "SELECT count(*) FROM fills WHERE account_id = $1"


async def select_fill_count(conn: Connection, account_id: str) -> int:
    """Return how many fills the account has had in all its runs."""
    return int(await conn.fetchval(SELECT_FILL_COUNT, account_id))


UPDATE_ACCOUNT_FENCED = """
WITH fenced AS (
    UPDATE accounts SET sequence = sequence + 1 WHERE id = $1 AND (SELECT term FROM service_state) = $2
)
SELECT term = $2 FROM service_state
"""


async def update_account_fenced(conn: Connection, account_id: str, term: int) -> bool:
    """Fence an account, if it exists: every uncommitted posting decided on its current state will be refused.

    An abandoned statement may still be running on the server: this statement waits for it or precedes it. Return False
    if the term is over.
    """
    return bool(await conn.fetchval(UPDATE_ACCOUNT_FENCED, account_id, term))


# Cash comes from sums over `orders` alone; `trader audit` compares them with the ledger.
SELECT_ACCOUNTS = """
SELECT a.id, a.sequence, a.changed_at, a.last_order_at, a.liquidating, a.partly_liquidated_at, a.seen_tick,
       a.seen_until,
       r.id AS run_id, r.number, r.initial_capital, r.quote_currency, r.started_at,
       coalesce(s.realized, 0) AS realized, coalesce(s.fees, 0) AS fees,
       coalesce(s.funding, 0) AS funding, coalesce(s.insurance, 0) AS insurance
FROM accounts a
JOIN runs r ON r.account_id = a.id AND r.ended_at IS NULL
LEFT JOIN LATERAL (
    SELECT sum(o.gross_pnl) AS realized, sum(o.fees) AS fees, sum(o.funding) AS funding, sum(o.insurance) AS insurance
    FROM orders o WHERE o.run_id = r.id
) s ON true
WHERE $1::text IS NULL OR a.id = $1
ORDER BY a.created_at, a.id
"""

SELECT_POSITIONS = """
SELECT o.*, coalesce((SELECT sum(p.gross_pnl) FROM orders p WHERE p.parent_id = o.id), 0) AS realized
FROM orders o
WHERE o.status = 'OPEN' AND ($1::text IS NULL OR o.account_id = $1)
ORDER BY o.opened_at, o.id
"""

SELECT_RESTING = """
SELECT l.*, q.client_order_id
FROM limit_orders l JOIN order_requests q ON q.id = l.id
WHERE l.status = 'RESTING' AND ($1::text IS NULL OR l.account_id = $1)
ORDER BY l.account_id, l.sequence
"""


# A reset closes at the mark, without a book.
SELECT_TAKEN = """
SELECT f.account_id, f.symbol, f.side, f.created_at, sum(f.quantity) AS quantity
FROM accounts a JOIN fills f ON f.account_id = a.id AND f.created_at > a.changed_at - $2::interval
WHERE f.cause NOT IN ('reset', 'ended') AND ($1::text IS NULL OR a.id = $1)
GROUP BY f.account_id, f.symbol, f.side, f.created_at
ORDER BY f.account_id, f.symbol, f.side, f.created_at
"""


async def select_accounts(conn: Connection, account_id: str | None = None) -> dict[str, Account]:
    """Return every account, or the named one, in its current run, rebuilt from the rows alone.

    The statements must share a snapshot: call it in `Database.reading`, or with the accounts locked.
    """
    owner, market = itemgetter("account_id"), itemgetter("symbol")
    positions = grouped(await conn.fetch(SELECT_POSITIONS, account_id), owner)
    resting = grouped(await conn.fetch(SELECT_RESTING, account_id), owner)
    taken = grouped(await conn.fetch(SELECT_TAKEN, account_id, TAKEN_KEPT), owner)
    accounts = {}
    for record in await conn.fetch(SELECT_ACCOUNTS, account_id):
        key = record["id"]
        takes = grouped(taken.get(key, ()), market)
        parts = {
            "run": msgspec.convert({**record, "id": record["run_id"]}, Run),
            "positions": {row["symbol"]: trade_of_row(row, Position) for row in positions.get(key, ())},
            "resting": tuple(map(_resting, resting.get(key, ()))),
            "taken": {symbol: Taken.of_all(map(_take, rows)) for symbol, rows in takes.items()},
        }
        accounts[key] = msgspec.convert({**record, **parts}, Account)
    return accounts


def _resting(record: asyncpg.Record) -> RestingOrder:
    plan = plan_of_row(record) if record["has_exit_plan"] else None
    return msgspec.convert({**record, "exit_plan": plan}, RestingOrder)


def _take(record: asyncpg.Record) -> tuple[OrderSide, Take]:
    return OrderSide(record["side"]), Take(record["created_at"], record["quantity"])


SELECT_ANSWER_OF_CLIENT = "SELECT answer FROM order_requests WHERE account_id = $1 AND client_order_id = $2"


async def select_answer_of_client(conn: Connection, account_id: str, client_order_id: str) -> OrderAnswer | None:
    """Return the answer recorded for this client order id, or None."""
    answer = await conn.fetchval(SELECT_ANSWER_OF_CLIENT, account_id, client_order_id)
    return None if answer is None else msgspec.convert(answer, OrderAnswer)


SELECT_ANSWER = "SELECT answer FROM order_requests WHERE account_id = $1 AND id = $2"


async def select_answer(conn: Connection, account_id: str, order_id: UUID) -> OrderAnswer | None:
    """Return the answer recorded for this order, or None."""
    answer = await conn.fetchval(SELECT_ANSWER, account_id, order_id)
    return None if answer is None else msgspec.convert(answer, OrderAnswer)


# A trade is closed by the fills of one order; the fills on its closing side name the trade.
SELECT_RESTED = """
SELECT status, cancel_reason AS reason, (
    SELECT coalesce(sum(o.gross_pnl), 0)
    FROM (SELECT DISTINCT order_id, side FROM fills WHERE request_id = $2) f
    JOIN orders o ON o.id = f.order_id AND o.status = 'CLOSED'
        AND f.side = CASE o.side WHEN 'LONG' THEN 'sell' ELSE 'buy' END
) AS realized_pnl
FROM limit_orders WHERE account_id = $1 AND id = $2
"""


async def select_rested(conn: Connection, account_id: str, order_id: UUID) -> asyncpg.Record | None:
    """Return the status of an order that has rested, why it was canceled, and its fills' gross profit; or None."""
    return await conn.fetchrow(SELECT_RESTED, account_id, order_id)


SELECT_FILLS_OF_REQUEST = """
SELECT quantity, price, fee, maker, created_at AS at FROM fills WHERE request_id = $1 ORDER BY sequence
"""


async def select_fills_of_request(conn: Connection, order_id: UUID) -> list[AnswerFill]:
    """Return the fills of a placed order by time."""
    return [AnswerFill(**row) for row in await conn.fetch(SELECT_FILLS_OF_REQUEST, order_id)]


# --- the service itself -----------------------------------------------------------------------------------------------


class DatabaseIdentity(msgspec.Struct, frozen=True):
    """Identity of a database: its market and trading mode and, in live trading, the venue and account."""

    market_identity: str
    trading_mode: str
    venue_url: str | None = None
    venue_account_index: str | None = None


class ServiceState(msgspec.Struct, frozen=True):
    """The identity of the database, and the tick up to which every account has been processed.

    `spans` are the dates of applied ticks; `origin` and its date `origin_at` are those of the clock of that tick, and
    `elapsed` is how long ago it was by the database's clock.
    """

    identity: DatabaseIdentity
    processed: AppliedTick | None
    spans: DateSpans
    origin: str | None
    origin_at: datetime | None
    elapsed: timedelta | None


UPSERT_SERVICE_STATE = """
INSERT INTO service_state (market_identity, trading_mode, venue_url, venue_account_index) VALUES ($1, $2, $3, $4)
ON CONFLICT (only_row) DO UPDATE SET only_row = true
RETURNING market_identity, trading_mode, venue_url, venue_account_index, processed_tick, processed_until,
          applied_spans, origin, origin_at, now() - processed_at AS elapsed
"""


async def upsert_service_state(conn: Connection, identity: DatabaseIdentity) -> ServiceState:
    """Return the state of the database; a new database takes on this identity."""
    record = await conn.fetchrow(UPSERT_SERVICE_STATE, *msgspec.structs.astuple(identity))
    assert record is not None
    until = record["processed_until"]
    processed = None if until is None else AppliedTick(record["processed_tick"], until)
    ends = iter(record["applied_spans"])
    spans = tuple(map(DateSpan, ends, ends))
    clock = record["origin"], record["origin_at"], record["elapsed"]
    return ServiceState(part_of_row(record, DatabaseIdentity), processed, spans, *clock)


SELECT_IDENTITY = "SELECT market_identity, trading_mode, venue_url, venue_account_index FROM service_state"


async def select_identity(conn: Connection) -> DatabaseIdentity | None:
    """Return the identity of the database; None for a new one."""
    record = await conn.fetchrow(SELECT_IDENTITY)
    return None if record is None else DatabaseIdentity(**record)


# A database already in use, by an earlier version or another market, keeps what it has.
INSERT_SEED = """
INSERT INTO market_seed (seed) SELECT $1 WHERE NOT EXISTS (SELECT FROM service_state) ON CONFLICT DO NOTHING
"""


async def insert_seed(conn: Connection, seed: int) -> None:
    """Store this seed in a new database; does nothing if the database has a seed or is in use."""
    await conn.execute(INSERT_SEED, str(seed))


SELECT_SEED = "SELECT seed FROM market_seed"


async def select_seed(conn: Connection) -> int | None:
    """Return the seed that was drawn for this database, or None."""
    text: str | None = await conn.fetchval(SELECT_SEED)
    return None if text is None else int(text)


SELECT_PROCESSED_UNTIL = "SELECT processed_until FROM service_state"


async def select_processed_until(conn: Connection) -> datetime | None:
    """Return the tick up to which every account has been processed; None for a new database."""
    moment: datetime | None = await conn.fetchval(SELECT_PROCESSED_UNTIL)
    return moment


# Only the latest thousand invocations: none that started earlier can still end.
SELECT_LIVED_UNTIL = """
SELECT greatest(
    processed_until, lived_until,
    (SELECT max(greatest(changed_at, last_order_at)) FROM accounts),
    (SELECT max(greatest(started_at, finished_at))
     FROM (SELECT started_at, finished_at FROM invocations ORDER BY started_at DESC LIMIT 1000) latest),
    (SELECT max(last_at) FROM portfolio_hourly WHERE hour = (SELECT max(hour) FROM portfolio_hourly))
)
FROM service_state
"""


async def select_lived_until(conn: Connection) -> datetime | None:
    """Return the latest market time that may have been processed; None for a new database."""
    moment: datetime | None = await conn.fetchval(SELECT_LIVED_UNTIL)
    return moment


UPDATE_LIVED_UNTIL = "UPDATE service_state SET lived_until = greatest(lived_until, $1)"


async def update_lived_until(conn: Connection, moment: datetime) -> None:
    """Record that market time may pass up to `moment`."""
    await conn.execute(UPDATE_LIVED_UNTIL, moment)


UPDATE_PROCESSED_UNTIL = """
WITH marked AS (
    INSERT INTO last_marks (symbol, mark, marked_at)
    SELECT symbol, mark, $1 FROM unnest($2::text[], $3::numeric[]) AS m (symbol, mark)
    WHERE EXISTS (SELECT FROM service_state WHERE term = $4 AND processed_tick <= $5)
    ON CONFLICT (symbol) DO UPDATE SET mark = excluded.mark, marked_at = excluded.marked_at
)
UPDATE service_state
SET processed_until = $1, processed_tick = $5, applied_spans = $6, origin = $7, origin_at = $8,
    processed_at = now() - $9::interval
WHERE term = $4 AND processed_tick <= $5
"""


async def update_processed_until(
    conn: Connection,
    term: int,
    tick: AppliedTick,
    marks: Mapping[str, Decimal],
    spans: DateSpans = (),
    clock: tuple[str, datetime, timedelta] | None = None,
) -> None:
    """Record that every account has been processed up to a tick, with the marks of its time; only in this term.

    Ticks are compared by their order, since the time of a later one is earlier if the clock was set back.
    `spans`: the dates of applied ticks. `clock`: its origin, the date of its origin, and how long ago the tick was.
    A process that has lost its lock without knowing it sees accounts that another process has changed: its record would
    make a later leader skip ticks that those accounts have missed.
    """
    ends = [end for span in spans for end in span]
    values = tick.at, list(marks), list(marks.values()), term, tick.number, ends, *(clock or (None, None, None))
    await conn.execute(UPDATE_PROCESSED_UNTIL, *values)


UPDATE_TIMES_SEEN = """
WITH jump AS (
    SELECT coalesce($1, $2 - origin_at) AS span FROM service_state WHERE $1 IS NOT NULL OR (term = $3 AND origin = $4)
), accounts_seen AS (
    UPDATE accounts SET seen_until = seen_until + span FROM jump WHERE seen_until IS NOT NULL AND $1 IS NOT NULL
), baselines_seen AS (
    UPDATE baselines SET seen_until = seen_until + span FROM jump
)
UPDATE service_state SET processed_until = processed_until + span, origin_at = origin_at + span FROM jump
"""


async def update_times_seen(
    conn: Connection,
    jump: timedelta | None,
    term: int | None = None,
    origin: tuple[str | None, datetime | None] = (None, None),
) -> None:
    """Date all processed ticks anew: by a `jump` or, in this term, by the present date of the clock's `origin`.

    Safe to repeat with an origin; the checkpoint that follows then covers what the accounts have seen.
    """
    await conn.execute(UPDATE_TIMES_SEEN, jump, origin[1], term, origin[0])


UPDATE_BASELINES_AHEAD = "UPDATE baselines SET seen_until = $1 WHERE seen_until > $2"


async def update_baselines_ahead(conn: Connection, at: datetime, now: datetime) -> None:
    """Let baselines that have seen a tick of the future continue from `at`."""
    await conn.execute(UPDATE_BASELINES_AHEAD, at, now)


# A market with fills but no recorded mark uses the price of its last fill.
SELECT_LAST_MARKS = """
SELECT symbol, mark FROM last_marks
UNION ALL
(SELECT DISTINCT ON (f.symbol) f.symbol, f.price
 FROM orders o JOIN fills f ON f.account_id = o.account_id AND f.order_id = o.id
 WHERE o.status = 'OPEN' AND o.symbol NOT IN (SELECT symbol FROM last_marks)
 ORDER BY f.symbol, f.created_at DESC, f.account_id, f.sequence DESC)
ORDER BY symbol
"""


async def select_last_marks(conn: Connection) -> dict[str, Decimal]:
    """Return the last recorded mark of each market."""
    return {record["symbol"]: record["mark"] for record in await conn.fetch(SELECT_LAST_MARKS)}


LOCK_ACCOUNTS = "LOCK TABLE accounts IN SHARE ROW EXCLUSIVE MODE"


async def lock_accounts(conn: Connection) -> None:
    """Wait for postings in progress, and block others until the transaction ends.

    Every posting updates its account first. A posting that waits here sees the new leader's term and is refused.
    """
    await conn.execute(LOCK_ACCOUNTS)


SELECT_VERSIONS = "SELECT id, sequence, changed_at, seen_until FROM accounts ORDER BY id"


async def select_account_versions(conn: Connection) -> dict[str, tuple[int, datetime, datetime | None]]:
    """Return the sequence number and times of every account, which differ after every change.

    An account that was removed and opened again may have the same sequence number.
    """
    return {
        row["id"]: (row["sequence"], row["changed_at"], row["seen_until"]) for row in await conn.fetch(SELECT_VERSIONS)
    }
