"""Every SQL statement can be prepared on a database created from schema.sql, and health probes the tables they use."""

import importlib
import pkgutil
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import asyncpg
import pytest
import pytest_asyncio

import trader
from trader.core.errors import DatabaseUnavailable
from trader.database.pool import Database
from trader.database.schema import used_tables

STATEMENT = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")
FETCHED = re.compile(r"conn\.fetch\(\s*([A-Z][A-Z_]+)\b")
RUNS_SQL = re.compile(r"conn\.(fetch|fetchrow|fetchval|execute)\(")

MODULES: dict[str, ModuleType] = {
    name.removeprefix("trader.").replace(".sql.", "."): importlib.import_module(name)
    for _, name, is_package in pkgutil.walk_packages(trader.__path__, "trader.")
    if not is_package and (".sql." in name or name.startswith("trader.database.")) and ".embedded." not in name
}
STATEMENTS = {
    f"{module_name}.{name}": statement
    for module_name, module in MODULES.items()
    for constant, value in vars(module).items()
    for name, statement in (
        ((f"{constant}[{key}]", each) for key, each in value.items())
        if isinstance(value, dict)
        else ((constant, value),)
    )
    if constant.isupper() and isinstance(statement, str) and STATEMENT.match(statement)
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def preparing(shared_dsn: str) -> AsyncIterator[Database]:
    """A pool for statements that are only prepared, which changes nothing in the database."""
    database = await Database.connect(shared_dsn, size=1)
    yield database
    await database.close()


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", STATEMENTS)
async def test_statement_fits_the_schema(preparing: Database, name: str) -> None:
    async with preparing.connection() as conn:
        await conn.prepare(STATEMENTS[name])


UNORDERED = {
    "agents.entrants.INSERT_ENTRANT", "agents.entrants.UPDATE_ENTRANT_ANSWERED", "exchange.halts.INSERT_HALT",
    "portfolio.seasons.INSERT_SEASON_RECORD",
    "agents.invocations.SELECT_COSTS_BETWEEN", "exchange.trades.SELECT_NEXT_TRADES",
    "agents.invocations.SELECT_PAYLOADS", "live.drift.SELECT_UNCOMPARED", "live.venue_orders.SELECT_FUNDED_HOURS",
    "database.leadership.HOLD_TERM",
    "agents.models.SELECT_RECORDED_MODEL", "agents.models.UPDATE_MODEL_CONFIGURATION", "agents.models.UPSERT_MODEL",
    "live.ladder.SELECT_SHOWN", "live.ladder.UPDATE_WAITING_ORDER_APPROVED",
    "live.venue_orders.SELECT_VENUE_INDEXES", "live.venue_orders.SELECT_VENUE_TRADES",
    "market.candles.SELECT_LAST_MINUTES",
}  # fmt: skip
"""Statements whose order is invisible: rows that become a set or are looked up by key, and single rows."""


def _outermost(statement: str) -> str:
    """Return the statement without its parenthesized parts."""
    inner = re.compile(r"\([^()]*\)")
    while inner.search(statement):
        statement = inner.sub("", statement)
    return statement


def test_rows_are_ordered() -> None:
    """Two runs of a replay read the same rows in the same order, whatever plan the database chooses."""
    fetched = {
        f"{name}.{constant}"
        for name, module in MODULES.items()
        for constant in FETCHED.findall(Path(str(module.__file__)).read_text("utf-8"))
    }
    assert len(fetched) > 30
    assert {name for name in fetched if "ORDER BY" not in _outermost(STATEMENTS[name])} == UNORDERED


def test_every_module_with_queries_is_covered() -> None:
    covered = {name.rpartition(".")[0] for name in STATEMENTS}
    querying = {
        name for name, module in MODULES.items() if RUNS_SQL.search(Path(str(module.__file__)).read_text("utf-8"))
    }
    assert len(querying) > 10
    assert querying <= covered, "these modules run SQL, but none of their UPPER constants was prepared"


def test_verbs_match_their_statements() -> None:
    for name, statement in STATEMENTS.items():
        verb = name.rpartition(".")[2].partition("_")[0]
        if verb in ("SELECT", "INSERT", "UPDATE", "DELETE"):
            assert verb in statement, f"{name} has no {verb}"


SELECT_TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
"""


@pytest.mark.slow
async def test_the_probe_notices_a_lock_on_every_table_that_a_statement_uses(dsn: str) -> None:
    database, other = await Database.connect(dsn, command_timeout_s=0.1), await asyncpg.connect(dsn)
    tables = [row["relname"] for row in await other.fetch(SELECT_TABLES)]
    texts = [text for name, text in STATEMENTS.items() if not name.startswith("database.schema.")]
    used = [table for table in tables if any(re.search(rf"\b{table}\b", text) for text in texts)]
    unnoticed = []
    try:
        for table in used:
            async with other.transaction():
                await other.execute(f"LOCK TABLE {table}")
                with suppress(DatabaseUnavailable):
                    await database.probe(used_tables(), writes=False)
                    unnoticed.append(table)
        assert (unnoticed, len(used) > 35) == (["schema_version"], True), "only a start reads the version"
        await other.execute("CREATE TABLE of_somebody_else ()")
        async with other.transaction():
            await other.execute("LOCK TABLE of_somebody_else")
            await database.probe(used_tables(), writes=False)
    finally:
        await other.close()
        await database.close()
