"""Parser of the `.env` file: lines of `NAME=value`, read strictly, so that a slip is reported instead of guessed at."""

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
    """The values of the file, and one sentence for each line that is malformed."""

    values: Mapping[str, str]
    problems: tuple[str, ...]


def read_dotenv(path: Path | None) -> DotEnv:
    """Read the file. A missing file is empty; one that cannot be read is a problem."""
    try:
        text = "" if path is None else path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return DotEnv({}, ())
    except UnicodeDecodeError as error:
        return DotEnv({}, (f".env: expected UTF-8 text, found another byte at position {error.start}",))
    except OSError as error:
        return DotEnv({}, (f".env: cannot be read ({error.strerror})",))
    return parse_dotenv(text)


def parse_dotenv(text: str) -> DotEnv:
    """Parse `[export ]NAME=value`: bare up to ` #`, 'literal', or "with \\n \\t \\" \\\\ escapes"; the last one wins.

    No problem quotes its line, which may hold a secret.
    """
    values: dict[str, str] = {}
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        assignment = ASSIGNMENT.fullmatch(content)
        if assignment is None:
            problems.append(f".env line {number}: expected NAME=value")
        elif (value := _value(assignment.group(2))) is None:
            problems.append(f".env line {number}: expected one value in closed quotes for {assignment.group(1)}")
        else:
            values[assignment.group(1)] = value
    return DotEnv(values, tuple(problems))


def _value(text: str) -> str | None:
    """Return the value of the text behind the equals sign; None when its quotes are not closed."""
    match text[:1]:
        case "'":
            quoted = SINGLE_QUOTED.fullmatch(text)
            return quoted.group(1) if quoted else None
        case '"':
            quoted = DOUBLE_QUOTED.fullmatch(text)
            return re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[1]), quoted.group(1)) if quoted else None
        case _:
            return COMMENT.sub("", text, count=1).strip()
