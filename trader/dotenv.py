"""The `.env` file: lines of `NAME=value`, read strictly, so that a slip of the pen is reported and not guessed at."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)", re.DOTALL)
SINGLE_QUOTED = re.compile(r"'([^']*)'\s*(?:#.*)?")
DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
COMMENT = re.compile(r"(?:^|\s+)#.*")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class DotEnv(NamedTuple):
    """What the file says, and one sentence per line that says nothing usable."""

    values: Mapping[str, str]
    problems: tuple[str, ...]


def read_dotenv(path: Path) -> DotEnv:
    """Read the file. One that does not exist says nothing; one that cannot be read is a mistake."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return DotEnv({}, ())
    except UnicodeDecodeError as error:
        return DotEnv({}, (f"{path.name}: expected UTF-8 text, found another byte at position {error.start}",))
    except OSError as error:
        return DotEnv({}, (f"{path.name}: cannot be read ({error.strerror})",))
    return parse_dotenv(text, path.name)


def parse_dotenv(text: str, name: str = ".env") -> DotEnv:
    """Parse `[export ]NAME=value`: bare up to ` #`, 'as it is', or "with \\n \\t \\" \\\\ escapes"; the last one wins.

    No problem quotes its line: it may hold a secret.
    """
    values: dict[str, str] = {}
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        assignment = ASSIGNMENT.fullmatch(content)
        if assignment is None:
            problems.append(f"{name} line {number}: expected NAME=value")
            continue
        value = _value(assignment.group(2))
        if value is None:
            problems.append(f"{name} line {number}: expected {assignment.group(1)} to have one quoted value, closed")
        else:
            values[assignment.group(1)] = value
    return DotEnv(values, tuple(problems))


def _value(written: str) -> str | None:
    match written[:1]:
        case "'":
            quoted = SINGLE_QUOTED.fullmatch(written)
            return quoted.group(1) if quoted else None
        case '"':
            quoted = DOUBLE_QUOTED.fullmatch(written)
            return re.sub(r"\\(.)", _escaped, quoted.group(1)) if quoted else None
        case _:
            return COMMENT.sub("", written, count=1).strip()


def _escaped(found: re.Match[str]) -> str:
    return ESCAPES.get(found.group(1), found.group(1))
