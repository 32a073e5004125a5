"""Declaration of commands, their parser, types of arguments that several share, and the printing of results.

Exit codes of every command: 0 success; 1 the command could not finish, found a problem, or cannot tell; 2 wrong
arguments or settings; 130 interrupted.
"""

import argparse
import asyncio
import difflib
import getpass
import importlib
import inspect
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from trader.core.errors import ArgumentsError, SettingsError
from trader.core.logs import printable
from trader.core.wire import encode, to_wire
from trader.operations.supervisor import ServiceAddress, announced_services, end_signals
from trader.settings.checks import local_address
from trader.settings.forms import Form, whole_number
from trader.settings.settings import read_some

T = TypeVar("T")

GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "the service": {
        "serve": "serve",
        "check": "serve",
        "status": "status",
        "halt": "operate",
        "resume": "operate",
        "flatten": "operate",
        "ladder": "ladder",
        "approve": "ladder",
        "venue-close": "venue",
        "rehearse": "venue",
        "models": "models",
        "keys": "keys",
        "accounts": "accounts",
        "show": "show",
        "export": "show",
        "completion": "serve",
    },
    "its database": {
        "audit": "audit",
        "backup": "backup",
        "restore": "backup",
        "upgrade": "backup",
        "season": "season",
    },
}
"""The module of each command or group of commands by its first word, as `trader --help` groups them."""

LAB: Final[Mapping[str, str]] = {
    "candles": "candles",
    "backtest": "backtest",
    "compare": "compare",
    "exam": "exam",
    "season-plan": "season_plan",
    "report": "reports",
    "drift": "reports",
    "reproduce": "audit",
}
"""The modules of the commands of `trader lab`, which `lab` may precede or not."""

MODULES: Final = {first: module for group in (*GROUPS.values(), LAB) for first, module in group.items()}

ALIASES: Final[Mapping[str, Sequence[str]]] = {"agents": ("keys",), "verify": ("audit", "chain")}
"""Other words for a command."""

CALLED_AS: Final = os.environ.get("TRADER_CALLED_AS", "trader")
"""The program as its caller typed it, which scripts/run says."""

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_WRONG_SETTINGS: Final = 2
EXIT_UNCOMPARED: Final = 2
EXIT_INTERRUPTED: Final = 130


class Result(NamedTuple):
    """Result of a command: `value` for JSON output, `lines` for text output, and the exit code."""

    value: Mapping[str, Any]
    lines: Iterable[str]
    code: int = EXIT_DONE


class Command(NamedTuple):
    """A declared command; `name` is one word or, in a group, two.

    One that `compares` exits with 1 only if something differs, and with 2 if it cannot compare.
    """

    name: str
    run: Callable[[argparse.Namespace], int]
    meaning: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    compares: bool


REGISTRY: Final[dict[str, Command]] = {}
"""The commands of the loaded modules."""

CommandFunction = Callable[[argparse.Namespace], "int | Result | Coroutine[Any, Any, int | Result]"]


def no_arguments(_: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def command(
    name: str,
    *,
    example: str,
    arguments: Callable[[argparse.ArgumentParser], None] = no_arguments,
    compares: bool = False,
    has_json: bool = True,
) -> Callable[[CommandFunction], CommandFunction]:
    """Declare a function as a command; its docstring is its help, `example` a sample call.

    The command prints the result, with `--json` as one JSON object; a function that has printed returns the exit code.
    """

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        arguments(parser)
        if has_json:
            parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")

    def declare(run: CommandFunction) -> CommandFunction:
        def call(options: argparse.Namespace) -> int:
            result = run(options)
            if isinstance(result, Coroutine):
                result = run_to_end(result)
            return print_result(result, as_json=options.json) if isinstance(result, Result) else result

        REGISTRY[name] = Command(name, call, inspect.getdoc(run) or "", example, add_arguments, compares)
        return run

    return declare


def exit_after_error(run: CommandFunction) -> int:
    """Return the exit code of a command that could not finish."""
    return EXIT_UNCOMPARED if any(each.compares for each in REGISTRY.values() if each.run is run) else EXIT_FAILED


def load(first: str) -> None:
    """Import the module of a command, or every module if there is no such command (as for `--help`)."""
    for module in [MODULES[first]] if first in MODULES else dict.fromkeys(MODULES.values()):
        importlib.import_module(f"trader.commands.{module}")


def as_called(text: str) -> str:
    """Return a text whose hints name the program as its caller typed it."""
    return text.replace("`trader ", f"`{CALLED_AS} ")


def _unknown_command(words: Sequence[str]) -> str | None:
    """Return an error message with the closest match for an unknown command; None if the command exists."""
    in_lab, (first, second) = words[0] == "lab", [*words[words[0] == "lab" :], "", ""][:2]
    if first.startswith("-") or (in_lab and not first):
        return None
    group = [name for name in REGISTRY if name.startswith(f"{first} ")]
    known = list(LAB if in_lab else MODULES)
    if first not in known:
        wrong, allowed = first, known
    elif group and second and not second.startswith("-") and f"{first} {second}" not in REGISTRY:
        wrong, allowed = f"{first} {second}", group
    else:
        return None
    near = difflib.get_close_matches(wrong, allowed, n=1)
    hint = f"did you mean `trader {' '.join(_path(near[0]))}`?" if near else f"there are: {', '.join(allowed)}."
    return f"there is no command {wrong!r}; {hint}"


def _path(name: str) -> list[str]:
    """Return the words of a command as its usage shows them."""
    words = name.split()
    return ["lab", *words] if words[0] in LAB else words


class CommandParser(argparse.ArgumentParser):
    """Parser that raises `ArgumentsError` instead of printing the error and ending the process."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here: the parser of the program would show its own help, rather than the command's."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(message, self.format_help().rstrip())


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the loaded commands; it raises `ArgumentsError`."""
    parser = CommandParser(prog=CALLED_AS)
    groups: dict[str, Any] = {"": parser.add_subparsers(metavar="COMMAND", required=True)}
    for entry in REGISTRY.values():
        inner, (*path, last) = groups[""], _path(entry.name)
        for group in path:
            if group not in groups:
                names = _meaning_of(group)
                outer = inner.add_parser(group, help=names, description=f"Commands of {group}: {names}.")
                groups[group] = outer.add_subparsers(title="commands", metavar="COMMAND", required=True)
            inner = groups[group]
        sub = inner.add_parser(
            last,
            help=entry.meaning.partition("\n")[0],
            description=as_called(entry.meaning),
            epilog=f"example: {CALLED_AS}{entry.example.removeprefix('trader')}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        entry.arguments(sub)
        sub.set_defaults(run=entry.run)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Load a command and return its options.

    :raises ArgumentsError: there is no such command, or its options are wrong
    """
    load([*words, ""][words[0] == "lab"])
    if (problem := _unknown_command(words)) is not None:
        raise ArgumentsError(problem)
    return make_parser().parse_args(["lab", *words] if words[0] in LAB else words)


def _meaning_of(first: str) -> str:
    """Return the meaning of a loaded command in a line, or the commands of a group."""
    if first in REGISTRY:
        return REGISTRY[first].meaning.partition("\n")[0]
    if first == "lab":
        return ", ".join(LAB)
    return ", ".join(name.rpartition(" ")[2] for name in REGISTRY if name.startswith(f"{first} "))


def overview() -> str:
    """Return the text of `trader --help`."""
    load("every command")
    lines = [
        f"usage: {CALLED_AS} [--help] [--version] [COMMAND ...]",
        "",
        "AI models trade crypto perpetuals on behalf of named strategy variants, on paper or live.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {first:10}  {_meaning_of(first)}" for first in group)]
    lines += ["", "the laboratory:", f"  {'lab':10}  {_meaning_of('lab')}"]
    hint = "`trader COMMAND --help` shows a command's options, `trader check --settings` the settings."
    return as_called("\n".join([*lines, "", hint]))


def service_addresses(options: argparse.Namespace) -> list[ServiceAddress]:
    """Return the addresses at which the service may respond: those of the settings, then those of this folder.

    :raises SettingsError: there is no address, or a setting is wrong
    """
    host, port, server_url, token = read_some(os.environ, options.env_file, "host", "port", "server_url", "api_token")
    secret = None if token is None else token.reveal()
    urls = [url for url in (local_address(host, port) if port else None, server_url) if url]
    found = {url: ServiceAddress(url, secret) for url in urls} | {each.url: each for each in announced_services()}
    if not found:
        raise SettingsError(["PORT=0 is any free port, and SERVER_URL is not set"])
    return list(found.values())


def operator() -> str:
    """Return the user and machine that issue the command, for the audit trail."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user has no name
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> Iterator[str]:
    """Yield the lines of a table, with the first `text_columns` columns left-aligned and the others right-aligned."""
    cells = [tuple(heads), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [
            cell.ljust(width) if place < text_columns else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(padded).rstrip()


def listing(items: Iterable[Any], columns: Mapping[str, str], *, text_columns: int = 1) -> Iterator[str]:
    """Yield a table of values for JSON: by heading, the path of a field as a program sees it (`exitPlan.stop`)."""
    rows = [[_cell(item, path) for path in columns.values()] for item in map(to_wire, items)]
    return table(list(columns), rows, text_columns=text_columns)


def _cell(value: Any, path: str) -> str:
    for name in path.split("."):
        value = value.get(name, "") if isinstance(value, Mapping) else value
    if isinstance(value, bool):
        return name if value else ""
    if isinstance(value, float | Decimal):
        is_result = "pnl" in path.lower()
        return f"{value:{'+' * is_result},.2f}" if is_result or isinstance(value, float) else _number(value)
    if isinstance(value, datetime) or (value and path.endswith("At")):
        return moment(datetime.fromisoformat(str(value)))
    return "-" if value is None else str(len(value)) if isinstance(value, list) else str(value)


def _number(amount: Decimal) -> str:
    """Format an amount with at least two decimals, and at least six significant digits as far as it has them."""
    digits = max(2, 5 - amount.adjusted())
    whole, _, decimals = f"{amount:,.{digits}f}".partition(".")
    return f"{whole}.{decimals[:2]}{decimals[2:].rstrip('0')}"


def moment(at: datetime | None) -> str:
    """Format a time in UTC to the second; `never` for None."""
    return "never" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def money(amount: Decimal | None) -> str:
    """Format an amount with two decimals; `unknown` for None."""
    return "unknown" if amount is None else f"{amount:,.2f}"


def first(lines: Sequence[str], most: int = 200, where: str = "") -> list[str]:
    """Return at most so many lines, and how many more there are."""
    more = [f"  and {len(lines) - most} more{where}"] if len(lines) > most else []
    return [*lines[:most], *more]


def allowed(names: Iterable[str]) -> str:
    """Format the allowed names for an error message; at most 20 of them."""
    listed = list(names)
    more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
    return f"{', '.join(listed[:20])}{more}" if listed else "none"


def argument_of(form: Form[T]) -> Callable[[str], T]:
    """Return a parser of arguments with the form of a setting."""

    def parse(text: str) -> T:
        try:
            return form.parse(text)
        except ValueError:
            got = "" if form.is_secret else f", got {text!r}"
            raise argparse.ArgumentTypeError(f"expected {form.expected}{got}") from None

    return parse


count_argument: Final = argument_of(whole_number(1, 10_000))
deadline_argument: Final = argument_of(whole_number(5, 600)._replace(expected="whole seconds from 5 to 600"))


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a command; SIGTERM and SIGHUP interrupt it like Ctrl+C: it ends its processes and removes its files.

    :raises KeyboardInterrupt: the command was interrupted
    """
    try:
        return asyncio.run(_cancellable(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _cancellable(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a command, unless it was canceled: an await that has just ended may lose the cancellation.

    This does not rely on SIGINT, which shells make background programs ignore, nor on an exception from a signal
    handler, which is lost while Python runs its own hooks, such as after a fork.
    """
    task = asyncio.current_task()
    assert task is not None
    if threading.current_thread() is threading.main_thread():  # tests run several commands in one process
        for number in end_signals():
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await work
    finally:
        if task.cancelling():
            raise asyncio.CancelledError


def show(text: str, *, on_stderr: bool = False) -> None:
    """Print one or more lines of text, with control and direction characters escaped."""
    file = sys.stderr if on_stderr else sys.stdout
    try:
        print(*map(printable, text.split("\n")), sep="\n", file=file, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; discard the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def print_error(text: str, problems: Sequence[str] = (), *, as_json: bool, prefix: str = "") -> None:
    """Print why a command failed on standard error and, with `as_json`, as one JSON object on standard output."""
    text, problems = as_called(text), [as_called(problem) for problem in problems]
    show("\n".join([f"{prefix}{text:.2000}", *(f"  {problem:.2000}" for problem in problems)]), on_stderr=True)
    if as_json:
        error = {"error": {"message": text, "problems": problems}}
        show(encode(error).decode())


def print_result(result: Result, *, as_json: bool) -> int:
    """Print a result, as one JSON object in one line or as text, and return its exit code."""
    if as_json:
        show(encode(result.value).decode())
    else:
        for line in result.lines:
            show(as_called(line))
    return result.code
