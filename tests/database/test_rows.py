"""Rows are read by column name: an added or swapped column must not shift the others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trader

HOUSE = Path(trader.__file__).parent
FETCHES_ROWS = {"fetch", "fetchmany", "cursor"}
SAME_ROWS = {"list", "reversed", "sorted", "iter", "tuple"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Rows:
    """Which expressions in one function hold a database row, and which hold an iterable of rows."""

    def __init__(self, function: FUNCTIONS) -> None:
        self._nodes = list(ast.walk(function))
        self._kinds: dict[str, str] = {}
        for node in self._nodes:
            if isinstance(node, ast.arg) and node.annotation is not None:
                text = ast.unparse(node.annotation)
                if "Record" in text and "asyncpg" in text:
                    self._kinds[node.arg] = "row" if text == "asyncpg.Record" else "rows"
        known = -1
        while known < len(self._kinds):
            known = len(self._kinds)
            for target, kind in self._targets():
                if isinstance(target, ast.Name) and kind is not None:
                    self._kinds[target.id] = kind

    def _targets(self) -> Iterator[tuple[ast.expr, str | None]]:
        """Yield each assignment target with the kind of its value."""
        for node in self._nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    yield from ((target, self.kind(value)) for target in targets)
                case ast.NamedExpr(target=target, value=value):
                    yield target, self.kind(value)
                case ast.For() | ast.AsyncFor() | ast.comprehension():
                    yield node.target, "row" if self.kind(node.iter) == "rows" else None

    def kind(self, node: ast.expr) -> str | None:
        """Return `row`, `rows`, or None for anything else."""
        found: str | None = None
        match node:
            case ast.Name(id=name):
                found = self._kinds.get(name)
            case ast.Await(value=value):
                found = self.kind(value)
            case ast.BoolOp(values=values):
                found = next(filter(None, map(self.kind, values)), None)
            case ast.IfExp(body=body, orelse=orelse):
                found = self.kind(body) or self.kind(orelse)
            case ast.Subscript(value=value, slice=index) if self.kind(value) == "rows":
                found = "rows" if isinstance(index, ast.Slice) else "row"
            case ast.Subscript(value=value, slice=ast.Constant(value=str())) if self.kind(value) == "row":
                found = "rows"  # of an array of records, if it is one
            case ast.Call(func=ast.Attribute(attr="fetchrow")):
                found = "row"
            case ast.Call(func=ast.Attribute(attr=name)) if name in FETCHES_ROWS:
                found = "rows"
            case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in SAME_ROWS and self.kind(first) == "rows":
                found = "rows"
        return found

    def read_by_position(self) -> Iterator[ast.expr]:
        """Yield every place that depends on the order of a row's columns."""
        for target, kind in self._targets():
            if isinstance(target, ast.Tuple | ast.List) and kind == "row":
                yield target
        for node in self._nodes:
            match node:
                case ast.Starred(value=value) if self.kind(value) == "row":
                    yield node
                case ast.Subscript(value=value, slice=index) if self.kind(value) == "row":
                    if isinstance(index, ast.Slice | ast.UnaryOp) or isinstance(getattr(index, "value", None), int):
                        yield node
                case ast.Call(func=ast.Name(id="tuple" | "list"), args=[value]) if self.kind(value) == "row":
                    yield node
                case ast.Call(func=ast.Attribute(value=value, attr="values")) if self.kind(value) == "row":
                    yield node
                case ast.Call(func=ast.Name(id="dict"), args=[value]) if self.kind(value) == "rows":
                    yield node
                case ast.Call(func=ast.Name(id="map"), args=[ast.Name(id="tuple" | "list"), value]):
                    if self.kind(value) == "rows":
                        yield node


def positions_in(source: str) -> list[int]:
    """Return the lines of a module that read a row of the database by position."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTIONS)]
    return sorted({node.lineno for each in functions for node in Rows(each).read_by_position()})


def test_rows_are_read_by_name() -> None:
    found = [
        f"{path.relative_to(HOUSE.parent)}:{line}"
        for path in sorted(HOUSE.rglob("*.py"))
        if re.search(r"asyncpg\.Record|\.fetch|\.cursor", path.read_text())  # no other module has rows
        for line in positions_in(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "body",
    [
        "return [Totals(*row) for row in await conn.fetch(SQL)]",
        "rows = await conn.fetch(SQL)\n    return [Totals(row[0], row[1:]) for row in rows]",
        "row = await conn.fetchrow(SQL)\n    return None if row is None else Totals(*row)",
        "row = await conn.fetchrow(SQL)\n    return row[-1]",
        "*first, last = await conn.fetchrow(SQL)",
        "low, high = await conn.fetchrow(SQL) or (None, None)",
        "for symbol, *rest in await conn.fetch(SQL):\n        pass",
        "async for symbol, mark in conn.cursor(SQL):\n        pass",
        "rows = await conn.fetch(SQL)\n    return {symbol: mark for symbol, mark in reversed(rows)}",
        "return dict(await conn.fetch(SQL))",
        "return list(map(tuple, await conn.fetch(SQL)))",
        "rows = await conn.fetch(SQL)\n    return tuple(rows[0].values())",
        "row = await conn.fetchrow(SQL)\n    return [Point(*point) for point in row['curve']]",
    ],
)
def test_positional_reading_is_found(body: str) -> None:
    assert positions_in(f"async def select(conn):\n    {body}\n")


@pytest.mark.parametrize(
    "body",
    [
        "return [Totals(**row) for row in await conn.fetch(SQL, *page)]",
        "rows = await conn.fetch(SQL)\n    return {row['symbol']: row['mark'] for row in rows[1:]}",
        "row = await conn.fetchrow(SQL)\n    return msgspec.convert({**row}, Totals)",
    ],
)
def test_reading_by_name_is_allowed(body: str) -> None:
    assert positions_in(f"async def select(conn):\n    {body}\n") == []
