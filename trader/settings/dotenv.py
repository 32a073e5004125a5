"""Strict parser for the settings file (`.env`): lines of `NAME=value`; reports every malformed line."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from trader.core.errors import SettingsError
from trader.core.files import SMALL_BYTES_MAX, read_regular
from trader.core.ownership import EMBEDDED_FOLDER, why_not_made_here, why_not_own

ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)", re.DOTALL)
SINGLE_QUOTED = re.compile(r"'([^']*)'\s*(?:#.*)?")
DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
COMMENT = re.compile(r"(?:^|\s+)#.*")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


DEFAULT_FILE: Final = Path(".env")


def add_env_file_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the settings file; a file that the user names must exist."""
    meaning = "settings file with NAME=value on each line; default: .env in the working folder, if it exists"
    parser.add_argument("--env-file", metavar="FILE", type=_existing_file, default=DEFAULT_FILE, help=meaning)


def _existing_file(text: str) -> Path:
    try:
        is_file = Path(text).is_file()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read ({error.strerror})") from None
    if not is_file:
        raise argparse.ArgumentTypeError(f"expected a file, got {text!r}")
    path = Path(text)
    return path.absolute() if path == DEFAULT_FILE else path  # named, and so read whoever wrote it


class DotEnv(NamedTuple):
    """The values of the file, and one sentence for each malformed line."""

    values: Mapping[str, str]
    problems: tuple[str, ...]


def read_dotenv(path: Path | None) -> DotEnv:
    """Read the file. A missing file counts as empty; an unreadable file is a problem.

    :raises SettingsError: it is the default file, and others could have written it
    """
    try:
        if path == DEFAULT_FILE and (reason := _why_not_trusted(path)) is not None:
            raise SettingsError([f"{path} is not read: {reason}; --env-file {path} reads it all the same"])
        text = "" if path is None else read_regular(path.resolve(), SMALL_BYTES_MAX).decode("utf-8-sig")
    except FileNotFoundError:
        return DotEnv({}, ())
    except UnicodeDecodeError as error:
        return DotEnv({}, (f"{path}: expected UTF-8 text, found an invalid byte at position {error.start}",))
    except OSError as error:
        return DotEnv({}, (f"{path}: cannot be read ({error.strerror})",))
    return parse_dotenv(text, str(path))


def _why_not_trusted(file: Path) -> str | None:
    """Return how somebody else could have written a file in the working folder that nobody named. Raises `OSError`."""
    for path in (file, file.absolute().parent):
        if (reason := why_not_own(path)) is not None:
            return f"{path} {reason}"
    beside = file.absolute().with_name(EMBEDDED_FOLDER.parts[0]).joinpath(*EMBEDDED_FOLDER.parts[1:])
    reason = why_not_made_here(beside) if beside.exists() else None
    return None if reason is None else f"{EMBEDDED_FOLDER} beside it {reason}"


def parse_dotenv(text: str, name: str = ".env") -> DotEnv:
    """Parse `[export ]NAME=value`: bare up to ` #`, 'literal', or "with \\n \\t \\" \\\\ escapes"; the last value wins.

    Problems never quote a line, since it may hold a secret.
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
        elif (value := _value(assignment.group(2))) is None:
            problems.append(f"{name} line {number}: expected one value in closed quotes for {assignment.group(1)}")
        else:
            values[assignment.group(1)] = value
    return DotEnv(values, tuple(problems))


def quoted(value: str) -> str:
    """Return a value as written in the file, so that parsing it gives the same text."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _value(text: str) -> str | None:
    """Return the value of the text after the equals sign; None if its quotes are not closed."""
    match text[:1]:
        case "'":
            quoted = SINGLE_QUOTED.fullmatch(text)
            return quoted.group(1) if quoted else None
        case '"':
            quoted = DOUBLE_QUOTED.fullmatch(text)
            return (
                re.sub(r"\\(.)", lambda escape: ESCAPES.get(escape[1], escape[1]), quoted.group(1)) if quoted else None
            )
        case _:
            return COMMENT.sub("", text, count=1).strip()
