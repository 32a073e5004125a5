"""TOML files: their values, the lines of mistakes, repeated tables, and secrets."""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import msgspec
import orjson

from trader.core.errors import Issue, SettingsError
from trader.core.files import SMALL_BYTES_MAX, read_regular
from trader.core.inputs import find_issues
from trader.settings.dotenv import read_dotenv
from trader.settings.providers import KEY_NAME, OTHER_KEY_NAME, PROVIDERS
from trader.settings.settings import SECRET_NAMES, merged_texts

ROOT_NAMES: Final = {"models": "model", "owners": "owner", "providers": "provider"}
"""The top-level lists of tables in a file, and the name of each table in messages."""


DEPTH_MAX: Final = 50
_TOKEN: Final = re.compile(
    r'''"""(?:[^\\]|\\.)*?"{3,5}|\'{3}.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|\#[^\n]*|[][{}\n]''', re.DOTALL
)
_DEEP_KEY: Final = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEPTH_MAX}}}""")
"""A key of so many parts would take the parser minutes."""


def read_toml(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a file and its values.

    :raises SettingsError: the file cannot be read or is not TOML
    """
    try:
        content = read_regular(file, SMALL_BYTES_MAX)
        return content.decode(), decode_toml(content)
    except OSError as error:
        raise SettingsError([f"{file}: {error.strerror}"]) from None
    except ValueError as error:
        raise SettingsError([f"{file}: {error}"]) from None


def decode_toml(content: bytes) -> dict[str, Any]:
    """Return the values of a TOML text. Raise `ValueError` if it is none, or has too many tables within each other."""
    text = content.decode().replace("\r\n", "\n")
    try:
        values = None if _DEEP_KEY.search(text) else tomllib.loads(text)
    except RecursionError:
        values = None
    if values is None or not _is_flat(values, DEPTH_MAX):
        raise ValueError(f"more than {DEPTH_MAX} tables or lists within each other")
    return values


def _is_flat(value: Any, depth: int) -> bool:
    """Return whether at most `depth` tables and lists are within each other."""
    if not isinstance(value, dict | list):
        return True
    return depth > 0 and all(
        _is_flat(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value)
    )


def located(file: Path, text: str, issues: Sequence[Issue]) -> SettingsError:
    """Return the error that reports these mistakes in a file, each with its line number, in order of lines."""
    lines = lines_of(text, [issue.path for issue in issues])
    ordered = sorted(zip(lines, issues, strict=True), key=lambda pair: pair[0])
    return SettingsError([f"{file}, line {line}: {name_of(path)}: {message}" for line, (path, message) in ordered])


def struct_issues(struct: type[msgspec.Struct], values: Any) -> Iterator[Issue]:
    """Yield an issue for every value that does not fit the struct."""
    try:
        msgspec.convert(values, struct)
    except msgspec.ValidationError as error:
        for path, message in find_issues(struct, msgspec.json.encode(_with_names(values)), error):
            yield Issue(path, message.replace(" or null", ""))  # TOML has no null: a field is left out instead


def _with_names(value: Any) -> Any:
    """Return the value with infinite numbers and NaN, which JSON cannot express, as text."""
    if isinstance(value, dict):
        return {name: _with_names(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def lines_of(text: str, paths: Sequence[Sequence[str | int]]) -> list[int]:
    """Return the line number, from 1, at which each value begins; for a missing value, the line of its table.

    The parser reports no line numbers, but it parses each statement on its own.
    """
    line_of: dict[tuple[str | int, ...], int] = {}
    tables: dict[tuple[str | int, ...], int] = {}
    table: tuple[str | int, ...] = ()
    line = 1
    for start, end in pairwise([0, *_statement_ends(text)]):
        statement = text[start:end]
        values = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            table = _table_of(values, tables)
            for key in _prefixes(table):
                line_of.setdefault(key, line)
        else:
            for key in _paths_in(values, table):
                line_of.setdefault(key, line)
        line += statement.count("\n")
    return [next((line_of[key] for key in _prefixes(path) if key in line_of), 1) for path in paths]


def _statement_ends(text: str) -> Iterator[int]:
    """Yield where statements end: at line breaks outside of strings, comments and brackets, and at the end."""
    depth = 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "[" | "{":
                depth += 1
            case "]" | "}":
                depth -= 1
            case "\n" if depth == 0:
                yield token.end()
    yield len(text)


def _table_of(head: Any, tables: dict[tuple[str | int, ...], int]) -> tuple[str | int, ...]:
    """Return the path of the table that a parsed `[head]` or `[[head]]` begins; `tables` counts those of each list."""
    path: tuple[str | int, ...] = ()
    while head:
        [(name, head)] = head.items()
        path += (name,)
        if isinstance(head, list):
            [head] = head
            tables[path] = tables.get(path, -1) + 1
        if path in tables:
            path += (tables[path],)
    return path


def _paths_in(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all values within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*path, name)
        yield from _paths_in(each, (*path, name))


def _prefixes(path: Sequence[str | int]) -> Iterator[tuple[str | int, ...]]:
    """Yield the path and the paths of its enclosing tables, innermost first."""
    for length in range(len(path), 0, -1):
        yield tuple(path[:length])


def name_of(path: Sequence[str | int]) -> str:
    """Format the path of a value for messages, counting the tables of a list from 1."""
    if len(path) > 1 and path[0] in ROOT_NAMES and isinstance(path[1], int):
        path = (f"{ROOT_NAMES[str(path[0])]} {path[1] + 1}", *path[2:])
    return ".".join(str(part) for part in path) or "the file"


def repeated(root: str, field: str, tables: Sequence[Any]) -> Iterator[Issue]:
    """Yield an issue for every table whose ID or name repeats an earlier one."""
    seen: set[Any] = set()
    for index, values in enumerate(tables):
        name = values.get(field) if isinstance(values, Mapping) else None
        if isinstance(name, str):
            if name in seen:
                each = f"every {ROOT_NAMES[root]} needs its own {'id' if field == 'id' else 'name'}"
                yield Issue((root, index, field), f"{name!r} is given twice; {each}")
            seen.add(name)


def is_json(value: Any) -> bool:
    """Return whether JSON can express the value; TOML also has times, infinite numbers and integers of any length."""
    try:
        return bool(orjson.loads(orjson.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def find_secrets(value: Any, secrets: Mapping[str, str], *path: str | int) -> Iterator[Issue]:
    """Yield an issue for every text that holds a secret: the models file is stored, shown, and sent to providers."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from find_secrets(each, secrets, *path, name)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from find_secrets(each, secrets, *path, index)
    elif isinstance(value, str) and (held := {name for secret, name in secrets.items() if secret in value}):
        setting = ", ".join(sorted(held))
        yield Issue(path, f"holds the value of {setting}, which must not be stored or sent to models")


SECRET_CHARACTERS_MIN: Final = 8
"""Shorter texts, such as the `none` that a local server accepts as a key, appear in ordinary text by chance."""


def read_addresses(environ: Mapping[str, str], dotenv: Path | None) -> Mapping[str, str]:
    """Return the addresses that the settings give to the providers that ship with the service, by name."""
    texts = merged_texts(environ, read_dotenv(dotenv).values)
    return {name: text for name in PROVIDERS if (text := texts.get(f"{name.upper()}_BASE_URL"))}


def read_secrets(environ: Mapping[str, str], dotenv: Path | None) -> Mapping[str, str]:
    """Return the variable name of each secret that is set, including the passwords in database addresses."""
    names: dict[str, str] = {}
    for name, text in merged_texts(environ, read_dotenv(dotenv).values).items():
        if name in SECRET_NAMES or KEY_NAME.fullmatch(name) or OTHER_KEY_NAME.fullmatch(name):
            passwords = map(unquote, re.findall(r"://[^/@:]*:([^/@]+)@", text))
            names |= dict.fromkeys((text, *text.split(","), *passwords), name)
    return {secret: name for secret, name in names.items() if len(secret) >= SECRET_CHARACTERS_MIN}
