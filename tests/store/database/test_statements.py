"""Every SQL statement of the store can be prepared on a database made from schema.sql."""

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import trader.store
from trader.store.database.pool import Database

STATEMENT = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")
FETCHED = re.compile(r"conn\.fetch\(([A-Z][A-Z_]+)\b")
RUNS_SQL = re.compile(r"conn\.(fetch|fetchrow|fetchval|execute)\(")

MODULES: dict[str, ModuleType] = {
    module.name.removeprefix("trader.store."): importlib.import_module(module.name)
    for module in pkgutil.walk_packages(trader.store.__path__, "trader.store.")
}
STATEMENTS = {
    f"{module_name}.{name}": value
    for module_name, module in MODULES.items()
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str) and STATEMENT.match(value)
}


@pytest.mark.parametrize("name", STATEMENTS)
async def test_statement_fits_the_schema(database: Database, name: str) -> None:
    async with database.connection() as conn:
        await conn.prepare(STATEMENTS[name])


UNORDERED = {
    "agents.entrants.INSERT_ENTRANT", "agents.entrants.UPDATE_ENTRANT_ANSWERED", "operations.halts.INSERT_HALT",
    "portfolio.seasons.INSERT_SEASON_RECORD",
    "agents.invocations.SELECT_PAYLOADS", "live.drift.SELECT_UNCOMPARED", "live.venue_orders.SELECT_FUNDED_HOURS",
    "database.leadership.HOLD_TERM",
    "live.venue_orders.SELECT_VENUE_INDEXES", "live.venue_orders.SELECT_VENUE_TRADES",
    "market.candles.SELECT_LAST_MINUTES",
}  # fmt: skip
"""Statements whose order cannot be seen: rows that become a set or are looked up by their key, and a single row."""


def _outermost(statement: str) -> str:
    """The statement without what stands in parentheses."""
    inner = re.compile(r"\([^()]*\)")
    while inner.search(statement):
        statement = inner.sub("", statement)
    return statement


def test_rows_have_an_order() -> None:
    """Two runs of a replay read the same rows in the same order, whatever plan the database chose."""
    fetched = {
        f"{name}.{constant}"
        for name, module in MODULES.items()
        for constant in FETCHED.findall(Path(str(module.__file__)).read_text("utf-8"))
    }
    assert len(fetched) > 30
    assert {name for name in fetched if "ORDER BY" not in _outermost(STATEMENTS[name])} == UNORDERED


def test_every_store_module_with_queries_is_covered() -> None:
    covered = {name.rpartition(".")[0] for name in STATEMENTS}
    querying = {
        name for name, module in MODULES.items() if RUNS_SQL.search(Path(str(module.__file__)).read_text("utf-8"))
    }
    assert len(querying) > 10
    assert querying <= covered, "these modules run SQL, but no UPPER constant of theirs was prepared"


def test_verbs_name_what_the_statements_do() -> None:
    for name, statement in STATEMENTS.items():
        verb = name.rpartition(".")[2].partition("_")[0]
        if verb in ("SELECT", "INSERT", "UPDATE", "DELETE"):
            assert verb in statement, f"{name} has no {verb}"
