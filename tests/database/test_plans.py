"""The hot queries find their rows through an index, however many there are."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from support.records import HOUR, START, id_of, make_snapshot

from trader.agents.sql import invocations as agents
from trader.agents.sql.models import SELECT_MODEL_ACTIVITY
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.exchange.sql import trades
from trader.portfolio.sql import analytics
from trader.portfolio.sql import snapshots as portfolio

NOW = START + 40 * 24 * HOUR
MODELS = [f"m{number}" for number in range(20)]
RUNS = [id_of("run", model, 1) for model in MODELS]

FILL = """
INSERT INTO models SELECT m, m, 'Apex', 'rules', 'r', null, true, $2 FROM unnest($1::text[]) m
"""
FILL_ACCOUNTS = "INSERT INTO accounts (id, created_at, changed_at) SELECT m, $2, $2 FROM unnest($1::text[]) m"
FILL_RUNS = """
INSERT INTO runs (id, account_id, number, initial_capital, quote_currency, started_at)
SELECT r, m, 1, 10000, 'USDT', $3 FROM unnest($1::text[], $2::uuid[]) AS t (m, r)
"""
FILL_TRADES = """
INSERT INTO orders (id, account_id, run_id, symbol, side, status, quantity, entry_notional, margin, leveraged,
                    exit_notional, gross_pnl, fees, funding, net_pnl, close_reason, opened_at, funded_until, closed_at)
SELECT gen_random_uuid(), m, r, 'BTC', 'LONG', 'CLOSED', 1, 100, 100, false, 101, 1, 0, 0, 1, 'order', t, t, t
FROM unnest($1::text[], $2::uuid[]) AS a (m, r), generate_series($3::timestamptz, $4, interval '1 hour') t
"""
FILL_INVOCATIONS = """
INSERT INTO invocations (id, model_id, status, failure_reason, started_at, finished_at)
SELECT gen_random_uuid(), m, CASE WHEN extract(hour FROM t) = 3 THEN 'failed' ELSE 'completed' END,
       CASE WHEN extract(hour FROM t) = 3 THEN 'no' END, t, t
FROM unnest($1::text[]) m, generate_series($2::timestamptz, $3, interval '1 hour') t
"""
FILL_CALLS = """
INSERT INTO tool_calls (invocation_id, number, id, type, status, metadata, created_at)
SELECT id, 1, gen_random_uuid(), 'HOLDING', 'ok', '{}', started_at FROM invocations
"""
FILL_STEPS = """
INSERT INTO invocation_steps (invocation_id, number, provider, model, tool_names, input_tokens, output_tokens,
                              duration_ms, created_at)
SELECT id, 1, 'rules', 'r', '{holding}', 0, 0, 1, started_at FROM invocations
"""
FILL_PAYLOADS = """
INSERT INTO invocation_payloads SELECT id, decode(repeat('00', 800), 'hex'), started_at FROM invocations
"""
FILL_SNAPSHOTS = """
INSERT INTO portfolio_snapshots
SELECT m, r, 1, 1, 0, t
FROM unnest($1::text[], $2::uuid[]) AS a (m, r), generate_series($3::timestamptz, $4, interval '10 minutes') t
"""
FILL_HOURS = """
INSERT INTO portfolio_hourly
SELECT m, t, r, 60, 60, 1, t
FROM unnest($1::text[], $2::uuid[]) AS a (m, r), generate_series($3::timestamptz, $4, interval '1 hour') t
"""
FILL_VARIANT_HOURS = """
INSERT INTO variant_hourly
SELECT t, id, 60, 60
FROM variants, generate_series($1::timestamptz, $2, interval '1 hour') t
"""

DAY = timedelta(days=1)
QUARTER = timedelta(minutes=15)
RECENT = [NOW - HOUR] * len(MODELS)

# The query, its arguments, and the index that it must use (for partitions, the prefix of their names).
QUERIES: dict[str, tuple[str, tuple[object, ...], str]] = {
    "trades": (trades.SELECT_TRADES, (*trades.ALL_TRADES, 100, None, 0), "orders_closed_by_time"),
    "trades of accounts": (
        trades.SELECT_ACCOUNT_TRADES, (*trades.ALL_TRADES, MODELS[:5], 100, None, 0), "orders_closed_by_account",
    ),
    "new trades of runs": (trades.SELECT_RUN_TRADES, (MODELS, RUNS, RECENT), "orders_closed_by_account"),
    "new hours of runs": (portfolio.SELECT_RUN_HOURS, (MODELS, RUNS, RECENT), "portfolio_hourly_pkey"),
    "variant history": (portfolio.SELECT_VARIANT_HOURS, (NOW - DAY, NOW - DAY), "variant_hourly_pkey"),
    "the hour that cuts it": (
        portfolio.SELECT_VARIANT_HOURS, (NOW - DAY - HOUR / 2, NOW - DAY), "portfolio_snapshots_",
    ),
    "last snapshots": (portfolio.SELECT_LAST_SNAPSHOTS, (), "portfolio_hourly_pkey"),
    "raw history": (
        portfolio.SELECT_HISTORY, ("m5", None, NOW - DAY, NOW, QUARTER, 8 * QUARTER), "portfolio_snapshots_",
    ),
    "hourly history": (
        portfolio.SELECT_HISTORY, ("m5", None, NOW - 30 * DAY, NOW, HOUR, 8 * HOUR), "portfolio_hourly_pkey",
    ),
    "raw curves": (
        portfolio.SELECT_EQUITY_CURVES, ("m5", None, NOW - DAY, NOW, QUARTER, NOW, 4 * QUARTER, False),
        "portfolio_snapshots_",
    ),
    "hourly curves": (
        portfolio.SELECT_EQUITY_CURVES, ("m5", None, NOW - 30 * DAY, NOW, HOUR, NOW, HOUR, False),
        "portfolio_hourly_pkey",
    ),
    "history of all": (
        portfolio.SELECT_HISTORY, (None, None, NOW - HOUR / 3, NOW, QUARTER, 8 * QUARTER), "portfolio_snapshots_",
    ),
    "invocations": (agents.SELECT_INVOCATIONS, (None, 50, None, 0), "invocations_by_time"),
    "invocations of a model": (
        agents.SELECT_CHOSEN_INVOCATIONS, (None, "m5", None, 50, None, 0), "invocations_by_model",
    ),
    "invocations of a variant": (
        agents.SELECT_CHOSEN_INVOCATIONS, (None, None, "Apex", 50, None, 0), "invocations_by_model",
    ),
    "refused invocations": (agents.SELECT_INVOCATIONS, ("refused", 50, None, 0), "invocations_by_time"),
    "cost in a window": (agents.SELECT_COSTS_BETWEEN, (MODELS[:5], NOW - DAY, NOW), "invocations_by_model"),
    "activity of models": (SELECT_MODEL_ACTIVITY, (), "invocations_by_model"),
    "tool calls": (agents.SELECT_TOOL_CALLS, (RUNS,), "tool_calls_pkey"),
    "steps": (agents.SELECT_STEPS, (RUNS,), "invocation_steps_pkey"),
    "payloads": (agents.SELECT_PAYLOADS, (RUNS, RECENT), "invocation_payloads_"),
    "failures": (analytics.SELECT_FAILURES, (50, NOW, 0), "invocations_failed"),
    "failures of models": (analytics.SELECT_MODEL_FAILURES, (MODELS[:5], 50, NOW, 0), "invocations_failed_by_model"),
}  # fmt: skip


# Without its arguments, a plan assumes that it reads a third of these tables, which have four rows an hour.
SMALL = {"variant history"}


async def _fill(conn: Connection) -> None:
    await ensure_partitions(conn, START, NOW)
    await conn.execute(FILL, MODELS, START)
    await conn.execute(FILL_ACCOUNTS, MODELS, START)
    await conn.execute(FILL_RUNS, MODELS, RUNS, START)
    await conn.execute(FILL_TRADES, MODELS, RUNS, START, NOW)
    await conn.execute(FILL_INVOCATIONS, MODELS, START, NOW)
    await conn.execute(FILL_CALLS)
    await conn.execute(FILL_STEPS)
    await conn.execute(FILL_PAYLOADS)
    await conn.execute(FILL_SNAPSHOTS, MODELS, RUNS, START, NOW)
    await conn.execute(FILL_HOURS, MODELS, RUNS, START, NOW)
    await conn.execute(FILL_VARIANT_HOURS, START, NOW)
    await conn.execute("ANALYZE")


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


async def _indexes(conn: Connection, name: str) -> set[str]:
    query, arguments, _ = QUERIES[name]
    return _used(await conn.fetchval(f"EXPLAIN (FORMAT JSON) {query}", *arguments))


async def _generic_indexes(conn: Connection, name: str) -> set[str]:
    """The indexes of the generic plan of a prepared statement: one plan for all arguments."""
    query, arguments, _ = QUERIES[name]
    await conn.execute("SET LOCAL plan_cache_mode = force_generic_plan")
    await conn.execute(f"PREPARE guarded AS {query}")
    written = [
        await conn.fetchval(f"SELECT quote_nullable($1::{asked.name}::text) || '::{asked.name}'", value)
        for asked, value in zip((await conn.prepare(query)).get_parameters(), arguments, strict=True)
    ]
    given = f"({', '.join(written)})" if written else ""
    plan = await conn.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE guarded{given}")
    await conn.execute("DEALLOCATE guarded")
    return _used(plan)


def _used(plan: str) -> set[str]:
    return {node["Index Name"] for node in _nodes(json.loads(plan)[0]["Plan"]) if "Index Name" in node}


SELECT_PLANS = """
SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE statement = $1
"""


async def test_hot_queries_use_their_index_and_a_snapshot_is_not_replanned(database: Database) -> None:
    """As with every statement, the first five plans are made for specific values and compared with a generic one."""
    async with database.connection() as conn:
        await _fill(conn)
        for name, (_, _, wanted) in QUERIES.items():
            used = await _indexes(conn, name)
            assert any(index.startswith(wanted) for index in used), f"{name} uses {used or 'none'}, not {wanted}"
            if name in SMALL:
                continue
            async with conn.transaction():
                used = await _generic_indexes(conn, name)
            assert any(index.startswith(wanted) for index in used), f"{name}, prepared, uses {used or 'none'}"
        for minute in range(20):
            at = NOW + 2 * HOUR + minute * HOUR / 60
            await portfolio.insert_snapshots(conn, [make_snapshot(model, at, "100") for model in MODELS])
        assert tuple(await conn.fetchrow(SELECT_PLANS, portfolio.INSERT_SNAPSHOTS) or ()) == (15, 5)
        await conn.execute("DROP INDEX orders_closed_by_time, invocations_failed_by_model")
        assert "orders_closed_by_time" not in await _indexes(conn, "trades")
        assert "invocations_failed_by_model" not in await _indexes(conn, "failures of models")
