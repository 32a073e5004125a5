"""The commands serve, check and completion."""

import argparse
import asyncio
import logging
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from trader.commands.command import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Result,
    command,
    load,
    make_parser,
    print_error,
    print_result,
    table,
)
from trader.core.errors import SettingsError, TraderError
from trader.core.logs import configure_logs
from trader.settings.dotenv import add_env_file_option, read_dotenv
from trader.settings.providers import BASE_URL_NAMES, KEY_NAME, KEY_NAMES, OTHER_KEY_NAME
from trader.settings.settings import (
    SECRET_NAMES,
    VARIABLES,
    Settings,
    effective_texts,
    find_misspelled,
    find_risks,
    find_unset,
    merged_texts,
)

log = logging.getLogger("trader")


class ShownSetting(NamedTuple):
    """A setting as shown to operators, without secrets; `value` is None if it has none."""

    name: str
    value: str | None
    source: str
    meaning: str = ""


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--demo",
        nargs="?",
        const="history",
        choices=["history", "fresh"],
        help="run rule agents on a synthetic market; needs no API key and no database. An empty database starts with "
        "three days of trading; --demo=fresh omits them",
    )
    add_env_file_option(parser)


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    _demo_arguments(parser)
    settings = "only list every setting with its meaning, value and source; secrets are hidden"
    parser.add_argument("--settings", action="store_true", help=settings)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    _demo_arguments(parser)
    parser.add_argument("--check", action="store_true", help="the same as the command check")


@command("serve", example="trader serve --demo", arguments=_serve_arguments, has_json=False)
def serve(options: argparse.Namespace) -> int:
    """Run the service; the default: `trader --demo` is `trader serve --demo`."""
    return _start(options, is_check=options.check)


@command("check", example="trader check --env-file /etc/trader.env", arguments=_check_arguments)
def check(options: argparse.Namespace) -> int:
    """Check the settings, the market and the database, and exit without changes.

    --settings lists the settings in force, even wrong ones, from the environment, the file or a default; then fails
    with 2 if the service could not start with them.
    """
    if not options.settings:
        return _start(options, is_check=True, as_json=options.json)
    is_demo = options.demo is not None
    shown = list(_shown_settings(os.environ, options.env_file, demo=is_demo))
    code = print_result(Result({"settings": shown}, _lines_of(shown)), as_json=options.json)
    Settings.load(os.environ, options.env_file, demo=is_demo)
    return code


def _lines_of(shown: Sequence[ShownSetting]) -> Iterator[str]:
    rows = [(each.name, each.value or "none", each.source) for each in shown]
    head, *lines = table(("setting", "value", "source"), rows, text_columns=3)
    yield head
    for each, line in zip(shown, lines, strict=True):
        yield line
        yield from textwrap.wrap(each.meaning, 100, initial_indent="    ", subsequent_indent="    ")
    keys, addresses = ", ".join(KEY_NAMES), ", ".join(BASE_URL_NAMES)
    yield f"At least one AI provider, except with --demo: {keys};"
    yield "more keys of one provider as ..._API_KEY1, ..._API_KEY_2 and so on."
    yield f"Other servers of the same protocol: {addresses}."


def _shown_settings(environ: Mapping[str, str], dotenv: Path, *, demo: bool) -> Iterator[ShownSetting]:
    """Yield every setting in force, right or wrong, and the keys and addresses of AI providers."""
    file = read_dotenv(dotenv).values
    texts = effective_texts(environ, file, demo=demo)
    for variable in VARIABLES.values():
        name, (text, source) = variable.name, texts[variable.name]
        is_secret = name in SECRET_NAMES or "@" in text  # a password may precede an @
        meaning = f"{variable.meaning} Default: {variable.default_text}."
        yield ShownSetting(name, ("(secret)" if is_secret else text) if text else None, source, meaning)
    for name in merged_texts(environ, file):
        if name in BASE_URL_NAMES or KEY_NAME.fullmatch(name) or (OTHER_KEY_NAME.fullmatch(name) and name in file):
            yield ShownSetting(name, "(secret)", "environment" if environ.get(name, "").strip() else "file")


def _completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh"], help="the shell that the script is for")


@command("completion", example="trader completion bash", arguments=_completion_arguments, has_json=False)
def completion(options: argparse.Namespace) -> int:
    """Print the script that completes commands and options in a shell."""
    import shtab  # noqa: PLC0415 - only this command needs it

    load("every command")
    sys.stdout.write(shtab.complete(make_parser(), options.shell) + "\n")
    return EXIT_DONE


def _start(options: argparse.Namespace, *, is_check: bool, as_json: bool = False) -> int:
    settings = Settings.load(
        os.environ, options.env_file, demo=options.demo is not None, demo_history=options.demo == "history"
    )
    configure_logs(settings.log_level, settings.log_format, threaded=not is_check)
    risks = [*find_risks(settings, options.env_file), *find_unset(settings)]
    for warning in (*find_misspelled(os.environ, options.env_file), *risks):
        log.warning(warning)
    from trader import app  # noqa: PLC0415 - so that --help and wrong settings respond at once
    from trader.operations.supervisor import Supervisor  # noqa: PLC0415 - as above

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if is_check:
                lines = runner.run(app.check(settings))
                return print_result(Result({"checks": lines}, lines), as_json=as_json)
            runner.run(app.serve(settings, Supervisor(os.environ)))
    except SettingsError:
        raise
    except TraderError as error:
        print_error(f"trader cannot start: {error}", as_json=as_json)
        return EXIT_FAILED
    except KeyboardInterrupt:  # before the service handles its signals itself
        return EXIT_INTERRUPTED
    return EXIT_DONE
