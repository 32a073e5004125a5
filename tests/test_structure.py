"""Structure of the source: what every module of trader must keep, read from its syntax tree."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

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


@cache
def modules() -> list[tuple[str, ast.Module]]:
    paths = sorted((ROOT / "trader").rglob("*.py"))
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def constructors(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each class with its own constructor, and the number of its arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    arguments = each.args
                    yield node.name, len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1


def test_constructors_take_few_arguments() -> None:
    found = {name: count for _, tree in modules() for name, count in constructors(tree) if count > ARGUMENTS_MAX}
    assert found.keys() == LONG_CONSTRUCTORS.keys(), found.keys() ^ LONG_CONSTRUCTORS.keys()


def test_every_class_and_type_alias_has_a_unique_name() -> None:
    """Except private ones, which nobody uses outside their module."""
    places = defaultdict(list)
    for module, tree in modules():
        for name in definitions(tree):
            if not name.startswith("_"):
                places[name].append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1}


VERBS: Final = re.compile("(select|insert|update|delete|upsert|lock)_")


def test_functions_that_run_sql_are_named_for_their_verb() -> None:
    found = {
        node.name
        for module, tree in modules()
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
        for module, tree in modules()
        if "/domain/" in module
        for name in imported(tree)
        if allowed.match(name) is None
    } == set()
