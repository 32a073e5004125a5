"""SQL of analytics: current runs, their failed invocations and positions, and what has changed in tables."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from operator import itemgetter
from types import SimpleNamespace
from typing import NamedTuple
from uuid import UUID

import msgspec

from trader.agents.domain.entrants import NO_RECORD, EntrantRecord
from trader.agents.domain.invocations import Invocation
from trader.agents.sql.invocations import INVOCATION_COLUMNS
from trader.agents.sql.models import FILLS_BY_HAND
from trader.core.statistics import grouped, percent
from trader.core.variant_id import VariantId
from trader.database.pool import Connection, Page, part_of_row, shown_rows
from trader.exchange.sql.trades import FITS_FILTER, TradeFilter
from trader.portfolio.domain.behaviour import PlanChange, PositionPart
from trader.record.sql.results import JOIN_EXTREMES


class InvocationTotals(msgspec.Struct, frozen=True):
    """Counts of invocations by outcome, and their cost (None: no provider reported one).

    `tool_failed` counts completed invocations in which a tool call failed, so `failures` counts each once.
    `unmetered_attempts` may have cost tokens beyond those counted, and `unpriced_steps` have a cost beyond that known.
    """

    finished: int = 0
    failed: int = 0
    tool_failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: Decimal | None = None
    unmetered_attempts: int = 0
    unpriced_steps: int = 0

    @property
    def failures(self) -> int:
        return self.failed + self.tool_failed

    @property
    def failure_percent(self) -> float | None:
        return percent(self.failures, self.finished)


class CurrentRun(msgspec.Struct, frozen=True):
    """A model's run with its invocations. `entrant` is the model's current one, with its part of the run.

    `number` counts the runs of the account: a reset begins the next one. In a season, everything is of the season: it
    starts with the season or later, with the account's equity then, and has no hours or trades from `until` on.
    `leverage` is the account's largest before.
    """

    model_id: str
    run_id: UUID
    initial_capital: Decimal
    started_at: datetime
    totals: InvocationTotals = InvocationTotals()
    entrant: EntrantRecord = NO_RECORD
    number: int = 1
    until: datetime | None = None
    leverage: float = 1.0


TOTALS = ", ".join(
    f"sum({name}) AS {name}" if name == "cost_usd" else f"coalesce(sum({name}), 0)::bigint AS {name}"
    for name in InvocationTotals.__struct_fields__
)
"""The columns of `InvocationTotals` over rows of `invocation_counts`."""

# Without a moment ($1) everything is current. Invocation counts cover the whole run, or the season ($2).
SELECT_CURRENT_RUNS = f"""
SELECT m.id AS model_id, r.id AS run_id, r.number, r.initial_capital, r.started_at, c.*
FROM models m
JOIN runs r ON r.account_id = m.id AND (r.ended_at IS NULL OR r.ended_at >= $1)
    AND r.started_at < coalesce($1::timestamptz, 'infinity')
CROSS JOIN LATERAL (
    SELECT {TOTALS}
    FROM invocation_counts WHERE model_id = m.id AND run_number = r.number AND season = coalesce($2, season)
) c
ORDER BY m.id
"""  # noqa: S608 - a constant of this package


async def select_current_runs(
    conn: Connection, at: datetime | None = None, season: int | None = None
) -> dict[str, CurrentRun]:
    """Return the run of every model whose account was open at a moment (None: now), without its entrant.

    Invocations cover a season or the whole run; everything else covers the whole run.
    """
    return {
        row["model_id"]: msgspec.convert({**row, "totals": part_of_row(row, InvocationTotals)}, CurrentRun)
        for row in await conn.fetch(SELECT_CURRENT_RUNS, at, season)
    }


class RunEntrant(msgspec.Struct, frozen=True):
    """An entrant that decided in its model's current run; `ended_at` is the next one's start, None for the last.

    `equity` is the account's value at its start, from the preceding snapshot; None if that is no longer retained, or if
    the entrant started with the run.
    """

    model_id: str
    record: EntrantRecord
    ended_at: datetime | None
    equity: Decimal | None
    totals: InvocationTotals


SELECT_RUN_ENTRANTS = f"""
SELECT m.id AS model_id, e.ended_at, s.net_portfolio AS equity, c.*,
       coalesce(e.number, 0) AS number, e.fingerprint, e.began_at, c.finished - c.failed AS cycles_decided,
       c.finished + c.missed AS cycles_due,
       (SELECT min(f.created_at) FROM {FILLS_BY_HAND}
        AND f.created_at < coalesce($1::timestamptz, 'infinity')) AS manual_since,
       CASE WHEN m.provider = 'external' THEN declared_in(e.configuration) END AS declared,
       (SELECT count(*) = 3 AND coalesce(bool_and(i.ended_by = 'calls'), false) FROM (
            SELECT ended_by FROM invocations
            WHERE model_id = m.id AND status <> 'running' AND ended_by IS DISTINCT FROM 'interruption'
              AND coalesce(entrant, 0) = coalesce(e.number, 0) AND started_at < coalesce($1, 'infinity')
            ORDER BY started_at DESC LIMIT 3
        ) i WHERE $2::integer IS NULL) AS is_in_vain  -- the rules of a season ($2) say what has a rank in it
FROM models m
JOIN runs r ON r.account_id = m.id AND (r.ended_at IS NULL OR r.ended_at >= $1)
    AND r.started_at < coalesce($1::timestamptz, 'infinity')
LEFT JOIN LATERAL (
    SELECT number, fingerprint, began_at, configuration, lead(began_at) OVER (ORDER BY number) AS ended_at
    FROM entrants WHERE model_id = m.id AND began_at < coalesce($1::timestamptz, 'infinity')
) e ON e.ended_at IS NULL OR e.ended_at > greatest(r.started_at, $3)
CROSS JOIN LATERAL (
    SELECT {TOTALS}, coalesce(sum(missed), 0)::bigint AS missed
    FROM invocation_counts
    WHERE model_id = m.id AND run_number = r.number AND entrant = coalesce(e.number, 0)
      AND season = coalesce($2, season)
) c
LEFT JOIN LATERAL (
    SELECT net_portfolio FROM portfolio_snapshots
    WHERE account_id = m.id AND created_at <= e.began_at AND created_at > e.began_at - interval '1 hour'
      AND run_id = r.id
    ORDER BY created_at DESC
    LIMIT 1
) s ON e.began_at > r.started_at
ORDER BY m.id, e.number
"""  # noqa: S608 - a constant of this package


async def select_run_entrants(
    conn: Connection, at: datetime | None = None, season: int | None = None, since: datetime | None = None
) -> list[RunEntrant]:
    """Return the entrants up to a moment (None: now) of every model's run at that time, each model's in order.

    In a season they are those that decided `since` its start, with its cycles and costs. A model that was never invoked
    has one unknown entrant.
    """
    entrants = []
    for row in await conn.fetch(SELECT_RUN_ENTRANTS, at, season, since):
        parts = {"totals": part_of_row(row, InvocationTotals), "record": part_of_row(row, EntrantRecord)}
        entrants.append(msgspec.convert({**row, **parts}, RunEntrant))
    return entrants


SELECT_TRADE_TOTALS = f"""
SELECT CASE $5::text
           WHEN 'day' THEN to_char(o.closed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')
           WHEN 'week' THEN to_char(date_trunc('week', o.closed_at AT TIME ZONE 'UTC'), 'YYYY-MM-DD')
           WHEN 'market' THEN o.symbol
           WHEN 'side' THEN o.side
           WHEN 'model' THEN m.id
           ELSE o.close_reason
       END AS key,
       count(*) AS trades, count(*) FILTER (WHERE o.net_pnl > 0) AS won, sum(o.gross_pnl) AS gross_pnl,
       sum(o.fees) AS fees, sum(o.funding) AS funding, sum(o.net_pnl) AS net_pnl
FROM models m
JOIN runs r ON r.account_id = m.id AND r.ended_at IS NULL
JOIN orders o ON o.run_id = r.id AND o.status = 'CLOSED'
WHERE ($6::text IS NULL OR m.id = $6) AND ($7::text IS NULL OR m.variant = $7) AND {FITS_FILTER}
GROUP BY key
ORDER BY key
"""  # noqa: S608 - a constant of this package


async def select_trade_totals(
    conn: Connection, by: str, model_id: str | None, variant: VariantId | None, chosen: TradeFilter
) -> list[SimpleNamespace]:
    """Return the totals of the chosen trades of current runs by `day`, `week`, `market`, `side`, `reason` or `model`.

    They ascend by that `key`.
    """
    return shown_rows(await conn.fetch(SELECT_TRADE_TOTALS, *chosen, by, model_id, variant))


SELECT_FAILURES = f"""
SELECT {INVOCATION_COLUMNS} FROM invocations
WHERE (status IN ('failed', 'timeout') OR (status = 'completed' AND failed_tool_calls > 0))
  AND started_at < coalesce($2::timestamptz, 'infinity')
ORDER BY started_at DESC, id
LIMIT $1 OFFSET $3
"""  # noqa: S608 - a constant of this package


async def select_failures(conn: Connection, page: Page) -> list[Invocation]:
    """Return the latest invocations that failed, or in which a tool call failed, newest first."""
    return [Invocation(**row) for row in await conn.fetch(SELECT_FAILURES, *page)]


SELECT_MODEL_FAILURES = f"""
SELECT i.*
FROM unnest($1::text[]) AS m (id)
CROSS JOIN LATERAL (
    SELECT {INVOCATION_COLUMNS} FROM invocations
    WHERE model_id = m.id
      AND (status IN ('failed', 'timeout') OR (status = 'completed' AND failed_tool_calls > 0))
      AND started_at < coalesce($3::timestamptz, 'infinity')
    ORDER BY started_at DESC, id
    LIMIT $2::bigint + $4::bigint
) i
ORDER BY i.started_at DESC, i.id
LIMIT $2 OFFSET $4
"""  # noqa: S608 - a constant of this package


async def select_model_failures(conn: Connection, model_ids: Sequence[str], page: Page) -> list[Invocation]:
    """Return the latest failures of these models, newest first."""
    return [Invocation(**row) for row in await conn.fetch(SELECT_MODEL_FAILURES, model_ids, *page)]


class AccountRun(msgspec.Struct, frozen=True):
    """A run of a model's account within a span of hours, and the account's value at its start and its end.

    `manual_since` is the time of the first manual trade in the run.
    """

    account_id: str
    started_at: datetime
    first: Decimal
    last: Decimal
    manual_since: datetime | None = None


# The next run overwrites the last hour of a reset run, but its positions are closed by then, so its books give its
# value.
SELECT_ACCOUNT_RUNS = f"""
SELECT r.account_id, greatest(r.started_at, $1) AS started_at, coalesce(b.last, r.initial_capital) AS first,
       coalesce(e.cash, h.last, r.initial_capital) AS last,
       (SELECT min(f.created_at) FROM {FILLS_BY_HAND}
        AND f.created_at < coalesce($2::timestamptz, 'infinity')) AS manual_since
FROM models m
JOIN runs r ON r.account_id = m.id
LEFT JOIN LATERAL (
    SELECT last FROM portfolio_hourly WHERE account_id = r.account_id AND run_id = r.id AND hour < $1
    ORDER BY hour DESC LIMIT 1
) b ON true
LEFT JOIN LATERAL (
    SELECT last FROM portfolio_hourly
    WHERE account_id = r.account_id AND run_id = r.id AND hour < coalesce($2::timestamptz, 'infinity')
    ORDER BY hour DESC LIMIT 1
) h ON true
LEFT JOIN LATERAL (
    SELECT r.initial_capital + coalesce(sum(gross_pnl - fees + funding + insurance), 0) AS cash
    FROM orders WHERE run_id = r.id
) e ON r.ended_at < coalesce($2::timestamptz, 'infinity')
WHERE r.started_at < coalesce($2::timestamptz, 'infinity')
  AND coalesce(r.ended_at, 'infinity') > coalesce($1, '-infinity')
ORDER BY r.account_id, r.number
"""  # noqa: S608 - a constant of this package


async def select_account_runs(
    conn: Connection, since: datetime | None = None, until: datetime | None = None
) -> list[AccountRun]:
    """Return every run, also ended ones, of the models' accounts in the hours from `since` to `until` (None: all)."""
    return [AccountRun(**row) for row in await conn.fetch(SELECT_ACCOUNT_RUNS, since, until)]


class Worth(NamedTuple):
    """An account's last hourly equity before a moment, and its largest leverage until then (None: unknown)."""

    last: Decimal
    leverage: float | None


SELECT_WORTHS = """
SELECT w.account_id, b.last, b.leverage
FROM unnest($1::text[], $2::uuid[]) AS w (account_id, run_id)
CROSS JOIN LATERAL (
    SELECT (array_agg(last ORDER BY hour DESC))[1] AS last, max(leverage) AS leverage
    FROM portfolio_hourly WHERE account_id = w.account_id AND run_id = w.run_id AND hour < $3
) b
WHERE b.last IS NOT NULL
ORDER BY w.account_id
"""


async def select_worths(conn: Connection, runs: Sequence[CurrentRun], before: datetime) -> dict[str, Worth]:
    """Return what the accounts of these runs were worth before a moment, by account; none without an hour before."""
    keys = [run.model_id for run in runs], [run.run_id for run in runs]
    return {row["account_id"]: part_of_row(row, Worth) for row in await conn.fetch(SELECT_WORTHS, *keys, before)}


SELECT_WORTHS_AT = """
SELECT w.account_id, s.net_portfolio
FROM unnest($1::text[], $2::uuid[]) AS w (account_id, run_id)
CROSS JOIN LATERAL (
    SELECT net_portfolio FROM portfolio_snapshots
    WHERE account_id = w.account_id AND run_id = w.run_id
      AND created_at > $3::timestamptz - interval '65 minutes' AND created_at <= $3
    ORDER BY created_at DESC
    LIMIT 1
) s
ORDER BY w.account_id
"""


async def select_worths_at(conn: Connection, runs: Sequence[CurrentRun], moment: datetime) -> dict[str, Decimal]:
    """Return the last equity of these runs at a moment, by account; none where its snapshots are not retained."""
    keys = [run.model_id for run in runs], [run.run_id for run in runs]
    return {row["account_id"]: row["net_portfolio"] for row in await conn.fetch(SELECT_WORTHS_AT, *keys, moment)}


class PastEntrant(msgspec.Struct, frozen=True):
    """An entrant in a run of its model's account; `ended_at` is None for the current one."""

    model_id: str
    run_number: int
    number: int
    fingerprint: str
    began_at: datetime
    ended_at: datetime | None


SELECT_PAST_ENTRANTS = """
SELECT r.account_id AS model_id, r.number AS run_number, e.number, e.fingerprint,
       greatest(r.started_at, e.began_at, $1) AS began_at,
       CASE
           WHEN least(r.ended_at, e.ended_at) < coalesce($2::timestamptz, 'infinity') THEN least(r.ended_at, e.ended_at)
       END AS ended_at
FROM models m
JOIN runs r ON r.account_id = m.id
JOIN LATERAL (
    SELECT number, fingerprint, began_at, lead(began_at) OVER (ORDER BY number) AS ended_at
    FROM entrants WHERE model_id = m.id
) e ON e.fingerprint IS NOT NULL
    AND e.began_at < least(r.ended_at, $2, 'infinity')
    AND coalesce(e.ended_at, 'infinity') > greatest(r.started_at, $1)
WHERE r.started_at < coalesce($2, 'infinity') AND coalesce(r.ended_at, 'infinity') > coalesce($1, '-infinity')
ORDER BY r.account_id, r.number, e.number
"""


async def select_past_entrants(
    conn: Connection, since: datetime | None = None, until: datetime | None = None
) -> list[PastEntrant]:
    """Return the entrants of the models in each of their runs in the hours from `since` to `until` (None: all)."""
    return [PastEntrant(**row) for row in await conn.fetch(SELECT_PAST_ENTRANTS, since, until)]


# Snapshots of a past hour no longer change.
SELECT_CHANGES = """
SELECT (SELECT (count(*), sum(sequence), max(changed_at))::text FROM accounts) AS postings,
       (SELECT coalesce(max(position), 0) FROM chain_links) AS invocations,
       (SELECT (max(hour), sum(count))::text FROM portfolio_hourly
        WHERE hour = (SELECT max(hour) FROM portfolio_hourly)) AS snapshots,
       (SELECT sum(hashtextextended(m::text, 0)) FROM models m) AS models
"""


class Changes(NamedTuple):
    """Change markers of tables: each value differs after every change to the table's rows."""

    postings: str
    invocations: int
    snapshots: str | None
    models: Decimal | None


async def select_changes(conn: Connection) -> Changes:
    """Return the change markers with which a standby reads only changes."""
    record = await conn.fetchrow(SELECT_CHANGES)
    assert record is not None
    return Changes(**record)


SELECT_POSITION_PARTS = f"""
SELECT o.run_id, o.symbol, o.side = 'LONG' AS is_long, o.quantity::float8, o.entry_notional::float8,
       o.exit_notional::float8, o.gross_pnl::float8 AS gross, o.fees::float8, o.net_pnl::float8 AS net,
       o.close_reason AS reason, o.stop::float8,
       coalesce(o.target, (o.targets::json->0->>'price')::numeric)::float8 AS target, o.opened_at, o.closed_at,
       coalesce(m.lowest, h.lowest) AS lowest, coalesce(m.highest, h.highest) AS highest
FROM orders o
{JOIN_EXTREMES}
WHERE o.run_id = ANY($1::uuid[])
ORDER BY o.run_id, o.opened_at, o.symbol, o.closed_at, o.id
"""  # noqa: S608 - a constant of this package


async def select_position_parts(conn: Connection, run_ids: Sequence[UUID]) -> dict[UUID, list[PositionPart]]:
    """Return the positions of runs and their closed parts, sorted by opening within each run.

    Only completed ones have extremes.
    """
    found = grouped(await conn.fetch(SELECT_POSITION_PARTS, run_ids), itemgetter("run_id"))
    return {run_id: [part_of_row(row, PositionPart) for row in rows] for run_id, rows in found.items()}


SELECT_PLAN_CHANGES = """
SELECT i.model_id, t.metadata->'decisions'->0->>'symbol' AS symbol, t.created_at AS at
FROM invocations i JOIN tool_calls t ON t.invocation_id = i.id
WHERE i.model_id = ANY($1::text[]) AND i.started_at >= $2 AND t.type = 'UPDATE_EXIT_PLAN' AND t.status = 'ok'
ORDER BY i.model_id, t.created_at, t.id
"""


async def select_plan_changes(
    conn: Connection, model_ids: Sequence[str], since: datetime
) -> dict[str, list[PlanChange]]:
    """Return the exit plan changes in the models' invocations since a time, ascending per model."""
    found = grouped(await conn.fetch(SELECT_PLAN_CHANGES, model_ids, since), itemgetter("model_id"))
    return {model_id: [part_of_row(row, PlanChange) for row in rows] for model_id, rows in found.items()}


SELECT_HOURLY_CLOSES = """
SELECT symbol, open_time, close FROM candles
WHERE minutes = 60 AND symbol = ANY($1::text[]) AND open_time >= $2 AND open_time < $3
ORDER BY symbol, open_time
"""


async def select_hourly_closes(
    conn: Connection, symbols: Sequence[str], start: datetime, end: datetime
) -> dict[str, dict[datetime, float]]:
    """Return the closes of the markets' hours that open within [start, end), by market and hour."""
    found = grouped(await conn.fetch(SELECT_HOURLY_CLOSES, symbols, start, end), itemgetter("symbol"))
    return {symbol: {row["open_time"]: row["close"] for row in rows} for symbol, rows in found.items()}
