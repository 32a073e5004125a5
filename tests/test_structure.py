"""Structure of the source: what every module of trader must keep, read from its syntax tree."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

from support.trees import modules

TESTS: Final = Path(__file__).parent

ARGUMENTS_MAX: Final = 6
"""Maximum arguments of a constructor besides `self`. Arguments passed together are one frozen struct."""

LONG_CONSTRUCTORS: Final = {
    "ReplaySource": "a folder and its markets; the others are independent options with defaults",
}
"""Classes with longer constructors, and why."""


def definitions(tree: ast.Module) -> Iterator[str]:
    """Yield the public names of a module's classes and type aliases."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) if re.fullmatch(r"[A-Z]+[a-z]\w*", name):
                yield name


def constructors(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each class with its own constructor, and the number of its arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    arguments = each.args
                    yield node.name, len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1


def test_constructors_take_few_arguments() -> None:
    found = {name: count for tree in modules().values() for name, count in constructors(tree) if count > ARGUMENTS_MAX}
    assert found.keys() == LONG_CONSTRUCTORS.keys(), found.keys() ^ LONG_CONSTRUCTORS.keys()


def test_every_class_and_type_alias_has_a_unique_name() -> None:
    """Except private ones, which nobody uses outside their module."""
    places = defaultdict(list)
    for module, tree in modules().items():
        for name in definitions(tree):
            if not name.startswith("_"):
                places[name].append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1}


VERBS: Final = re.compile("(select|insert|update|delete|upsert|lock)_")


def test_functions_that_run_sql_are_named_for_their_verb() -> None:
    found = {
        node.name
        for module, tree in modules().items()
        if "/sql/" in module
        for node in tree.body
        if isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("_") and not VERBS.match(node.name)
    }
    assert found == {"write_postings", "analyze"}


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a module imports, or imports names from."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases):
                yield from (f"{module}.{alias.name}" for alias in aliases)


def test_a_domain_imports_only_domains_and_the_core() -> None:
    allowed = re.compile(r"trader\.(core|[a-z_]+\.domain)\.|(?!trader\.)")
    assert {
        (module, name)
        for module, tree in modules().items()
        if "/domain/" in module
        for name in imported(tree)
        if allowed.match(name) is None
    } == set()


BEGINS: Final = {"create_task", "ensure_future", "Thread", "spawn", "run_coroutine_threadsafe"}
AWAITED: Final = {
    "app.py": "the service waits for all of them, and ends with their errors",
    "api/state_broadcast.py": "a load, whose error is read",
    "backtest/execution.py": "awaited at once",
    "core/logs.py": "the log's own thread, which no failure of its stream ends",
    "core/tasks.py": "the owner of all others",
    "database/embedded/dumps.py": "awaited with the process",
    "exam/run.py": "awaited together",
    "exchange/accounts.py": "awaited by the caller, or logged without one",
    "live/source.py": "its error is read",
    "record/anchors.py": "a thread whose outcome is awaited",
}
"""The modules that start tasks and threads themselves, and how they notice their ends."""


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types alone count too. A package's `__init__` names what it publishes, and is no part of it."""
    names = {f"trader.{path.removesuffix('.py').replace('/', '.')}": tree for path, tree in modules().items()}
    imports: dict[str, set[str]] = {}
    for name, tree in names.items():
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        whole = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        own = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
        imports[name] = names.keys() & (whole | own | {str(node.module) for node in found})
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle


def test_every_task_and_thread_has_an_owner_that_notices_its_end() -> None:
    """`core/tasks.py`, a task group, or what the table above says."""
    found, groups = set(), {"group", "tasks"}
    for module, tree in modules().items():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if name in BEGINS:
                    found |= set() if owner in groups else {module}
                case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in BEGINS:
                    found.add(module)
    assert found == AWAITED.keys()


def targets(tree: ast.AST) -> Iterator[str]:
    """Yield what a module assigns outside itself: the names of attributes of modules of trader, at its top level."""
    imports = {alias.asname or alias.name.split(".")[0]: node for node in ast.walk(tree) for alias in names_of(node)}
    for node in ast.iter_child_nodes(tree):
        for part in ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ():
            match part:
                case ast.Attribute(value=ast.Name(id=owner), attr=name, ctx=ast.Store()) if owner in imports:
                    yield f"{owner}.{name}"
                case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=owner), *_]) if owner in imports:
                    yield f"setattr({owner})"


def names_of(node: ast.AST) -> Sequence[ast.alias]:
    match node:
        case ast.Import(names=names) if names[0].name.startswith("trader"):
            return names
        case ast.ImportFrom(module=str(module), names=names) if module.startswith("trader"):
            return names
    return ()


def switches(tree: ast.AST) -> Iterator[str]:
    """Yield what a module does otherwise in tests: a switch, a look for tests, or an assertion that does not narrow."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="__debug__") | ast.Attribute(value=ast.Name(id="sys"), attr="flags"):
                yield f"line {node.lineno}: __debug__ or the like"
            case ast.Constant(value=str(text)) if re.search(r"pytest|PYTEST|TRADER_TEST|\bTESTING\b|unittest", text):
                yield f"line {node.lineno}: {text}"
            case ast.Assert(test=test) if any(isinstance(each, ast.Await | ast.NamedExpr) for each in ast.walk(test)):
                yield f"line {node.lineno}: an assertion that does something, which python -O leaves out"
    for node in getattr(tree, "body", ()):
        match node:
            case ast.Assign(value=ast.Constant(value=bool())) | ast.AnnAssign(value=ast.Constant(value=bool())):
                yield f"line {node.lineno}: a switch"
            case ast.Assert():
                yield f"line {node.lineno}: a check at import, which python -O leaves out"


def test_what_runs_in_production_is_what_runs_in_tests() -> None:
    assert not {module: found for module, tree in modules().items() if (found := [*switches(tree)])}
    files = [*TESTS.rglob("conftest.py"), *(TESTS / "support").glob("*.py")]
    trees = {str(file.relative_to(TESTS)): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    assert not {file: found for file, tree in trees.items() if (found := [*targets(tree)])}
