"""Every SQL statement of the store is understood by a database made from schema.sql."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trader.store
from trader.store.database.pool import Database

STATEMENT = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")


def _constants() -> Iterator[tuple[str, str]]:
    for module in pkgutil.iter_modules(trader.store.__path__):
        loaded = importlib.import_module(f"trader.store.{module.name}")
        for name, value in vars(loaded).items():
            if name.isupper() and isinstance(value, str) and STATEMENT.match(value):
                yield f"{module.name}.{name}", value


STATEMENTS = dict(_constants())


@pytest.mark.parametrize("name", STATEMENTS)
async def test_statement_fits_the_schema(database: Database, name: str) -> None:
    async with database.connection() as conn:
        await conn.prepare(STATEMENTS[name])


def test_every_store_module_with_queries_is_covered() -> None:
    covered = {name.partition(".")[0] for name in STATEMENTS} | {"embedded"}  # it makes databases, before any schema
    for path in Path(trader.store.__path__[0]).glob("*.py"):
        if re.search(r"conn\.(fetch|fetchrow|fetchval|execute)\(", path.read_text(encoding="utf-8")):
            assert path.stem in covered, f"{path.name} runs SQL, but no UPPER constant of it was prepared"


def test_verbs_name_what_the_statements_do() -> None:
    for name, statement in STATEMENTS.items():
        verb = name.partition(".")[2].partition("_")[0]
        if verb in ("SELECT", "INSERT", "UPDATE", "DELETE"):
            assert verb in statement, f"{name} has no {verb}"
