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
RUNS_SQL = re.compile(r"conn\.(fetch|fetchrow|fetchval|execute)\(")

MODULES: dict[str, ModuleType] = {
    found.name.removeprefix("trader.store."): importlib.import_module(found.name)
    for found in pkgutil.walk_packages(trader.store.__path__, "trader.store.")
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
