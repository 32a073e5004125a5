"""Only what others publish is used: no underscore name of another object or module, be it a library's or the project's.

Nor is a class derived from a library's class that is not documented for that.
"""

import ast
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parents[1]
FOLDERS: Final = ("trader", "scripts", "tests")
OURS: Final = frozenset({"trader", "scripts", "tests", "support", "tools", "benchmarks"})

BASES: Final = frozenset(
    {
        "asyncio.Lock",
        "asyncio.Protocol",
        "backtesting.Strategy",
        "hypothesis.stateful.RuleBasedStateMachine",
        "msgspec.Struct",
        "nautilus_trader.trading.strategy.Strategy",
        "prometheus_client.registry.Collector",
    }
)
"""Documented classes of libraries that are made to be derived from."""

NOT_INSTALLED = frozenset({"nautilus_trader.trading.strategy.Strategy"})
"""Documented classes of libraries that only another interpreter has; their subclasses may use no private names."""

NAMED_TUPLE: Final = frozenset({"_asdict", "_fields", "_make", "_replace"})
"""The published names of `typing.NamedTuple` that begin with an underscore."""

DOCUMENTED: Final = frozenset({"os._exit"})
"""Names of the standard library that begin with an underscore and are published."""


LOOKED_AT: Final = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.ClassDef)


class Finding(NamedTuple):
    """An unpublished name in use, and where."""

    place: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.what}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_library(module: str) -> bool:
    """Whether a module is a third party's, or asyncio."""
    top = module.partition(".")[0]
    return top == "asyncio" or (top not in OURS and top not in sys.stdlib_module_names)


class Module:
    """One source file: the nodes of its syntax tree, and the qualified names that its imports bind."""

    def __init__(self, source: str, place: str) -> None:
        self.place = place
        self.nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, LOOKED_AT)]
        self.imported: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self.imported[bound] = alias.name if alias.asname else bound
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def origin(self, node: ast.expr) -> str | None:
        """The qualified name of an expression such as `web.Request`, when its root is imported."""
        if isinstance(node, ast.Subscript):  # a generic class with its arguments
            return self.origin(node.value)
        if isinstance(node, ast.Name):
            return self.imported.get(node.id)
        if isinstance(node, ast.Attribute) and (base := self.origin(node.value)):
            return f"{base}.{node.attr}"
        return None

    def imports(self) -> Iterator[Finding]:
        """Underscore modules and names that are imported from others."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if any(map(is_private, name.split("."))):
                    yield Finding(self.place, node.lineno, f"import of {name}")

    def attributes(self) -> Iterator[Finding]:
        """Underscore attributes of other objects, read, set, deleted or named in a string."""
        for node in self.nodes:
            if isinstance(node, ast.Attribute):
                name, base = node.attr, node.value
            elif isinstance(node, ast.Call) and (named := _named_attribute(node)):
                base, name = named
            else:
                continue
            if not is_private(name) or name in NAMED_TUPLE or _is_own(base):
                continue
            origin = self.origin(base)
            if f"{origin}.{name}" not in DOCUMENTED:
                yield Finding(self.place, node.lineno, f"{origin or ast.unparse(base)}.{name}")

    def subclasses(self) -> Iterator[Finding]:
        """Subclasses of undocumented classes of libraries, and overridden underscore methods of documented ones."""
        for node in self.nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            for base in map(self.origin, node.bases):
                if base is None or not is_library(base):
                    continue
                if base not in BASES:
                    yield Finding(self.place, node.lineno, f"class {node.name} derives from {base}")
                    continue
                inherited = () if base in NOT_INSTALLED else dir(_load(base))
                for name in _private_names(node):
                    if base in NOT_INSTALLED or name in inherited:
                        yield Finding(self.place, node.lineno, f"class {node.name} uses {base}.{name}")


def _is_own(base: ast.expr) -> bool:
    if isinstance(base, ast.Call):
        return isinstance(base.func, ast.Name) and base.func.id == "super"
    return isinstance(base, ast.Name) and base.id in {"self", "cls"}


def _named_attribute(call: ast.Call) -> tuple[ast.expr, str] | None:
    """The object and the attribute of `getattr(x, "name")`, `monkeypatch.setattr(x, "name", …)` and the like."""
    function = call.func
    verb = (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )
    if verb not in {"getattr", "setattr", "delattr", "hasattr"} or not call.args:
        return None
    texts = (argument.value for argument in call.args[:2] if isinstance(argument, ast.Constant))
    text = next((each for each in texts if isinstance(each, str)), None)
    if text is None:
        return None
    path, _, name = text.rpartition(".")
    return (ast.Name(path) if path else call.args[0]), name


def _private_names(node: ast.ClassDef) -> set[str]:
    named = {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    used = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and _is_own(each.value)}
    return set(filter(is_private, named | used))


def _load(qualified: str) -> object:
    module, _, name = qualified.rpartition(".")
    return getattr(importlib.import_module(module), name)


def findings(modules: Iterable[Module]) -> list[Finding]:
    return [
        finding for module in modules for finding in (*module.imports(), *module.attributes(), *module.subclasses())
    ]


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "node_modules" not in path.parts:
                yield path


@pytest.mark.slow
def test_only_published_interfaces_are_used() -> None:
    paths = list(sources())
    assert len(paths) > 300
    modules = (Module(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))) for path in paths)
    assert not [str(finding) for finding in findings(modules)]


SAMPLE: Final = """
import asyncio
import aiohttp._websocket
from aiohttp import web
from aiohttp.web_protocol import RequestHandler, _ErrInfo
from trader.ours import Ours, _helper

class Handler(RequestHandler):
    pass

class Server(web.Server):
    pass

class Wire(asyncio.Protocol):
    def eof_received(self):
        return self._ours

def use(request, loop):
    request._cancel()
    loop._ready.clear()
    getattr(asyncio, "_get_running_loop")()
    request.transport.abort()
    Ours._replace()
    Ours()._secret = 1

def test_ours(monkeypatch, ours):
    monkeypatch.setattr(ours, "_limit_s", 1)
    monkeypatch.setattr("trader.ours._limit_s", 1)
    assert ours._waiting is ours.waiting
"""


@pytest.mark.parametrize("place", ["trader/sample.py", "scripts/sample.py", "tests/sample.py"])
def test_a_private_name_of_another_is_found(place: str) -> None:
    reported = {finding.what for finding in findings([Module(SAMPLE, place)])}
    assert reported == {
        "import of aiohttp._websocket",
        "import of aiohttp.web_protocol._ErrInfo",
        "class Handler derives from aiohttp.web_protocol.RequestHandler",
        "class Server derives from aiohttp.web.Server",
        "request._cancel",
        "loop._ready",
        "asyncio._get_running_loop",
        "import of trader.ours._helper",
        "Ours()._secret",
        "ours._limit_s",
        "trader.ours._limit_s",
        "ours._waiting",
    }
