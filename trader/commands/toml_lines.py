"""Values of a TOML file: their line numbers for error messages, and the secrets in them."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from trader.dotenv import read_dotenv
from trader.errors import Issue
from trader.provider_settings import KEY_NAME, OTHER_KEY_NAME
from trader.settings import SECRET_NAMES, merged_texts


def lines_of(text: str, paths: Sequence[Sequence[str | int]]) -> list[int]:
    """Return the line number, from 1, where each value begins; for a missing value that of its table.

    The parser reports no line numbers, but it parses every prefix of a file that ends between two statements: a value
    begins after the longest prefix that lacks it.
    """
    line_of: dict[tuple[str | int, ...], int] = {}
    wanted = {tuple(path[:length]) for path in paths for length in range(1, len(path) + 1)}
    lines = text.splitlines(keepends=True)
    complete = 0
    for count in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        for path in wanted - line_of.keys():
            if _has(document, path):
                line_of[path] = complete + 1
        complete = count
    return [next((line_of[key] for key in _prefixes(path) if key in line_of), 1) for path in paths]


def _prefixes(path: Sequence[str | int]) -> Iterator[tuple[str | int, ...]]:
    """Yield the path and the paths of its enclosing tables, the innermost first."""
    for length in range(len(path), 0, -1):
        yield tuple(path[:length])


def _has(value: Any, path: Sequence[str | int]) -> bool:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def find_secrets(value: Any, secrets: Mapping[str, str], *path: str | int) -> Iterator[Issue]:
    """Yield every text that holds a secret: what a models file says is stored, shown, and sent to providers."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from find_secrets(each, secrets, *path, name)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from find_secrets(each, secrets, *path, index)
    elif isinstance(value, str) and (held := {name for secret, name in secrets.items() if secret in value}):
        setting = ", ".join(sorted(held))
        yield Issue(path, f"it holds the value of {setting}, which must not be stored or sent to models")


SECRET_CHARACTERS_MIN: Final = 8
"""Shorter texts, such as the `none` that a local server takes for a key, are in ordinary texts by chance."""


def read_secrets(environ: Mapping[str, str], dotenv: Path | None) -> Mapping[str, str]:
    """Return the name of the variable of each secret that is set; of a database address its password counts, too."""
    names: dict[str, str] = {}
    for name, text in merged_texts(environ, read_dotenv(dotenv).values).items():
        if name in SECRET_NAMES or KEY_NAME.fullmatch(name) or OTHER_KEY_NAME.fullmatch(name):
            passwords = map(unquote, re.findall(r"://[^/@:]*:([^/@]+)@", text))
            names |= dict.fromkeys((text, *text.split(","), *passwords), name)
    return {secret: name for secret, name in names.items() if len(secret) >= SECRET_CHARACTERS_MIN}
