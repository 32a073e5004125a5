"""SQL of analytics: the current runs of the models, their failed invocations, and their comparisons with luck."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

from trader.domain.agents.entrants import NO_RECORD, EntrantRecord
from trader.domain.agents.invocations import Invocation
from trader.domain.models import VariantId
from trader.domain.portfolio.luck import Luck
from trader.store.agents.models import ORDERS_BY_HAND
from trader.store.database.pool import Connection, Page


class InvocationTotals(NamedTuple):
    """Counts of invocations by outcome, and their cost (None: no provider reported one).

    `tool_failed` counts completed invocations in which a tool call failed, so `failed + tool_failed` counts each once.
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


class CurrentRun(NamedTuple):
    """A model's run with its invocations. `entrant` is the model's present one, with its part of the run.

    `number` counts the runs of the account: a reset begins the next one.
    """

    model_id: str
    run_id: UUID
    initial_capital: Decimal
    started_at: datetime
    totals: InvocationTotals = InvocationTotals()
    entrant: EntrantRecord = NO_RECORD
    number: int = 1


# Without a moment ($1) all of it is as it is now. Counts of invocations are those of the whole run: they have no hours.
SELECT_CURRENT_RUNS = f"""
SELECT m.id, r.id, r.initial_capital, r.started_at, c.finished, c.failed, c.tool_failed, c.input_tokens,
       c.output_tokens, c.cost_usd, c.unmetered_attempts, c.unpriced_steps, coalesce(e.number, 0), e.fingerprint,
       e.began_at, coalesce(o.finished - o.failed, 0), coalesce(o.finished + o.missed, 0),
       (SELECT min(q.created_at) FROM {ORDERS_BY_HAND} AND q.created_at < coalesce($1::timestamptz, 'infinity')),
       CASE WHEN m.provider = 'external' THEN declared_in(e.configuration) END, r.number
FROM models m
JOIN runs r ON r.account_id = m.id AND (r.ended_at IS NULL OR r.ended_at >= $1)
    AND r.started_at < coalesce($1::timestamptz, 'infinity')
CROSS JOIN LATERAL (
    SELECT coalesce(sum(finished), 0)::bigint AS finished, coalesce(sum(failed), 0)::bigint AS failed,
           coalesce(sum(tool_failed), 0)::bigint AS tool_failed,
           coalesce(sum(input_tokens), 0)::bigint AS input_tokens,
           coalesce(sum(output_tokens), 0)::bigint AS output_tokens, sum(cost_usd) AS cost_usd,
           coalesce(sum(unmetered_attempts), 0)::bigint AS unmetered_attempts,
           coalesce(sum(unpriced_steps), 0)::bigint AS unpriced_steps
    FROM invocation_counts WHERE model_id = m.id AND run_number = r.number
) c
LEFT JOIN LATERAL (
    SELECT number, fingerprint, began_at, configuration
    FROM entrants WHERE model_id = m.id AND began_at < coalesce($1::timestamptz, 'infinity')
    ORDER BY number DESC LIMIT 1
) e ON true
LEFT JOIN invocation_counts o
    ON o.model_id = m.id AND o.run_number = r.number AND o.entrant = coalesce(e.number, 0)
ORDER BY m.id
"""  # noqa: S608 - a constant of this package


async def select_current_runs(conn: Connection, at: datetime | None = None) -> dict[str, CurrentRun]:
    """Return the run of every model whose account was open at a moment (None: now)."""
    rows = await conn.fetch(SELECT_CURRENT_RUNS, at)
    return {
        model_id: CurrentRun(
            model_id, run_id, capital, at, InvocationTotals(*rest[:8]), EntrantRecord(*rest[8:15]), rest[15]
        )
        for model_id, run_id, capital, at, *rest in rows
    }


class RunEntrant(NamedTuple):
    """An entrant that decided in its model's current run; `ended_at` is when the next one began, None of the last.

    `equity` is what the account was worth when it began, from the snapshot before; None when that is not kept any
    more, and of one that began with the run.
    """

    model_id: str
    record: EntrantRecord
    ended_at: datetime | None
    equity: Decimal | None
    totals: InvocationTotals


SELECT_RUN_ENTRANTS = f"""
SELECT m.id, e.ended_at, s.net_portfolio, coalesce(c.finished, 0), coalesce(c.failed, 0), coalesce(c.tool_failed, 0),
       coalesce(c.input_tokens, 0), coalesce(c.output_tokens, 0), c.cost_usd, coalesce(c.unmetered_attempts, 0),
       coalesce(c.unpriced_steps, 0), coalesce(e.number, 0), e.fingerprint, e.began_at,
       coalesce(c.finished - c.failed, 0), coalesce(c.finished + c.missed, 0),
       (SELECT min(q.created_at) FROM {ORDERS_BY_HAND} AND q.created_at < coalesce($1::timestamptz, 'infinity')),
       CASE WHEN m.provider = 'external' THEN declared_in(e.configuration) END
FROM models m
JOIN runs r ON r.account_id = m.id AND (r.ended_at IS NULL OR r.ended_at >= $1)
    AND r.started_at < coalesce($1::timestamptz, 'infinity')
LEFT JOIN LATERAL (
    SELECT number, fingerprint, began_at, configuration, lead(began_at) OVER (ORDER BY number) AS ended_at
    FROM entrants WHERE model_id = m.id AND began_at < coalesce($1::timestamptz, 'infinity')
) e ON e.ended_at IS NULL OR e.ended_at > r.started_at
LEFT JOIN invocation_counts c
    ON c.model_id = m.id AND c.run_number = r.number AND c.entrant = coalesce(e.number, 0)
LEFT JOIN LATERAL (
    SELECT net_portfolio FROM portfolio_snapshots
    WHERE account_id = m.id AND created_at <= e.began_at AND created_at > e.began_at - interval '1 hour'
      AND run_id = r.id
    ORDER BY created_at DESC
    LIMIT 1
) s ON e.began_at > r.started_at
ORDER BY m.id, e.number
"""  # noqa: S608 - a constant of this package


async def select_run_entrants(conn: Connection, at: datetime | None = None) -> list[RunEntrant]:
    """Return the entrants until a moment (None: now) of every model's run of then, each model's in order.

    Of a model that was never invoked it is an unknown one.
    """
    rows = await conn.fetch(SELECT_RUN_ENTRANTS, at)
    return [
        RunEntrant(row[0], EntrantRecord(*row[11:18]), row[1], row[2], InvocationTotals(*row[3:11])) for row in rows
    ]


class TradeTotals(NamedTuple):
    """Completed trades that have something in common, named by `key`: how many, how many won, and their sums."""

    key: str
    trades: int
    won: int
    gross_pnl: Decimal
    fees: Decimal
    funding: Decimal
    net_pnl: Decimal


SELECT_TRADE_TOTALS = """
SELECT CASE $1::text
           WHEN 'day' THEN to_char(o.closed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')
           WHEN 'week' THEN to_char(date_trunc('week', o.closed_at AT TIME ZONE 'UTC'), 'YYYY-MM-DD')
           WHEN 'market' THEN o.symbol
           WHEN 'side' THEN o.side
           ELSE o.close_reason
       END AS key,
       count(*), count(*) FILTER (WHERE o.net_pnl > 0), sum(o.gross_pnl), sum(o.fees), sum(o.funding), sum(o.net_pnl)
FROM models m
JOIN runs r ON r.account_id = m.id AND r.ended_at IS NULL
JOIN orders o ON o.run_id = r.id AND o.status = 'CLOSED'
WHERE ($2::text IS NULL OR m.id = $2) AND ($3::text IS NULL OR m.variant::text = $3)
GROUP BY key
ORDER BY key
"""


async def select_trade_totals(
    conn: Connection, by: str, model_id: str | None, variant: VariantId | None
) -> list[TradeTotals]:
    """Return the completed trades of current runs by `day`, `week`, `market`, `side` or `reason`, ascending."""
    return [TradeTotals(*row) for row in await conn.fetch(SELECT_TRADE_TOTALS, by, model_id, variant)]


SELECT_FAILURES = """
SELECT id, model_id, status, failure_reason, response, step_count, input_tokens, output_tokens, cost_usd, started_at,
       finished_at, entrant, unmetered_attempts, unpriced_steps
FROM invocations
WHERE (status IN ('failed', 'timeout') OR (status = 'completed' AND failed_tool_calls > 0))
  AND started_at < coalesce($2::timestamptz, 'infinity')
ORDER BY started_at DESC, id
LIMIT $1 OFFSET $3
"""


async def select_failures(conn: Connection, page: Page) -> list[Invocation]:
    """Return the latest invocations that failed, or in which a tool call failed, the newest first."""
    return [Invocation(**row) for row in await conn.fetch(SELECT_FAILURES, *page)]


SELECT_MODEL_FAILURES = """
SELECT i.id, i.model_id, i.status, i.failure_reason, i.response, i.step_count, i.input_tokens, i.output_tokens,
       i.cost_usd, i.started_at, i.finished_at, i.entrant, i.unmetered_attempts, i.unpriced_steps
FROM unnest($1::text[]) AS m (id)
CROSS JOIN LATERAL (
    SELECT * FROM invocations
    WHERE model_id = m.id
      AND (status IN ('failed', 'timeout') OR (status = 'completed' AND failed_tool_calls > 0))
      AND started_at < coalesce($3::timestamptz, 'infinity')
    ORDER BY started_at DESC, id
    LIMIT $2::bigint + $4::bigint
) i
ORDER BY i.started_at DESC, i.id
LIMIT $2 OFFSET $4
"""


async def select_model_failures(conn: Connection, model_ids: Sequence[str], page: Page) -> list[Invocation]:
    """Return the latest failures of these models, the newest first."""
    return [Invocation(**row) for row in await conn.fetch(SELECT_MODEL_FAILURES, model_ids, *page)]


class AccountRun(NamedTuple):
    """A run of a model's account within a span of hours, and what the account was worth at its beginning and its end.

    `manual_since` is when a hand first traded it in the run.
    """

    account_id: str
    started_at: datetime
    first: Decimal
    last: Decimal
    manual_since: datetime | None = None


# The last hour of a run that was reset is overwritten by that of the next run, but its positions are closed by then: it
# was worth what its books say.
SELECT_ACCOUNT_RUNS = f"""
SELECT r.account_id, greatest(r.started_at, $1), coalesce(b.last, r.initial_capital),
       coalesce(e.cash, h.last, r.initial_capital),
       (SELECT min(q.created_at) FROM {ORDERS_BY_HAND} AND q.created_at < coalesce($2::timestamptz, 'infinity'))
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
    """Return every run of the models' accounts in the hours from `since` to `until` (None: all), ended ones too."""
    return [AccountRun(*row) for row in await conn.fetch(SELECT_ACCOUNT_RUNS, since, until)]


class PastEntrant(NamedTuple):
    """An entrant in a run of its model's account; `ended_at` is None of the present one."""

    model_id: str
    run_number: int
    number: int
    fingerprint: str
    began_at: datetime
    ended_at: datetime | None


SELECT_PAST_ENTRANTS = """
SELECT r.account_id, r.number, e.number, e.fingerprint, greatest(r.started_at, e.began_at, $1),
       CASE
           WHEN least(r.ended_at, e.ended_at) < coalesce($2::timestamptz, 'infinity') THEN least(r.ended_at, e.ended_at)
       END
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
    return [PastEntrant(*row) for row in await conn.fetch(SELECT_PAST_ENTRANTS, since, until)]


class StoredLuck(NamedTuple):
    """The comparison of an entrant in a run, of its last look."""

    run_id: UUID
    entrant: int
    luck: Luck


SELECT_LUCK = """
SELECT l.run_id, l.entrant, l.hours, l.looks, l.traders, l.trades, l.return_percent, l.quantile_percent, l.p_value,
       l.low_percent, l.median_percent, l.high_percent
FROM luck l JOIN runs r ON r.id = l.run_id AND r.ended_at IS NULL
ORDER BY l.run_id, l.entrant
"""


async def select_luck(conn: Connection) -> list[StoredLuck]:
    """Return the comparisons of the current runs."""
    return [StoredLuck(row[0], row[1], Luck(*row[2:])) for row in await conn.fetch(SELECT_LUCK)]


UPSERT_LUCK = """
INSERT INTO luck (run_id, entrant, hours, looks, traders, trades, return_percent, quantile_percent, p_value,
                  low_percent, median_percent, high_percent)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
ON CONFLICT (run_id, entrant) DO UPDATE
SET hours = excluded.hours, looks = excluded.looks, traders = excluded.traders, trades = excluded.trades,
    return_percent = excluded.return_percent,
    quantile_percent = excluded.quantile_percent, p_value = excluded.p_value, low_percent = excluded.low_percent,
    median_percent = excluded.median_percent, high_percent = excluded.high_percent
"""


async def upsert_luck(conn: Connection, comparison: StoredLuck) -> None:
    """Save a comparison in place of the entrant's last one."""
    await conn.execute(UPSERT_LUCK, *comparison[:2], *comparison.luck)
