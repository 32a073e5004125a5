"""Command line of the service: reads arguments and settings, configures logs, and runs until it is stopped.

Exit codes: 0 stopped as requested, 1 could not start, 2 wrong arguments or settings.
"""

import argparse
import asyncio
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from trader.dotenv import add_env_file_option
from trader.errors import SettingsError, TraderError
from trader.logs import configure_logs
from trader.settings import BASE_URL_NAMES, KEY_NAMES, VARIABLES, Settings, find_risks

EXIT_NO_START = 1
EXIT_WRONG_SETTINGS = 2
log = logging.getLogger("trader")

VERBS = ("halt", "resume", "flatten", "verify")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in VERBS:
        return _operate(arguments)
    options = _parser().parse_args(arguments)
    try:
        settings = Settings.load(
            os.environ,
            options.env_file,
            demo=options.demo is not None,
            demo_history=options.demo == "history",
        )
    except SettingsError as error:
        print("The settings are wrong:", *(f"  {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return EXIT_WRONG_SETTINGS
    configure_logs(settings.log_level, settings.log_format, threaded=not options.check)
    for risk in find_risks(settings, options.env_file):
        log.warning(risk)
    from trader import app  # noqa: PLC0415 - so that --help and wrong settings are answered at once

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            if options.check:
                print(*runner.run(app.check(settings)), sep="\n")
            else:
                runner.run(app.serve(settings))
    except TraderError as error:
        print(f"trader cannot start: {error}", file=sys.stderr)
        return EXIT_NO_START
    except KeyboardInterrupt:  # before the service handles its signals itself
        return 128 + 2
    return 0


def _operate(arguments: Sequence[str]) -> int:
    """Run an operator command, which needs no setting but DATABASE_URL."""
    from trader.console import main as operate  # noqa: PLC0415 - as above

    try:
        return operate(arguments)
    except SettingsError as error:
        print(f"The settings are wrong: {error}", file=sys.stderr)
        return EXIT_WRONG_SETTINGS
    except TraderError as error:
        print(f"trader: {error}", file=sys.stderr)
        return EXIT_NO_START


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory, where it is installed."""
    try:
        import uvloop  # noqa: PLC0415 - not available on Windows
    except ImportError:
        return None
    return uvloop.new_event_loop


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trader",
        description="AI models trade crypto perpetuals on behalf of named strategy variants, on paper or live.\n"
        "halt, resume and flatten stop and resume the trading of a running service, or close its positions; verify "
        "checks the chain of its decisions.",
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--demo",
        nargs="?",
        const="history",
        choices=["history", "fresh"],
        help="run rule agents on a synthetic market; needs no API key and no database. In an empty database they have "
        "traded for three days already; --demo=fresh leaves that out",
    )
    add_env_file_option(parser)
    parser.usage = (
        "trader [--demo[=fresh]] [--check] [--env-file FILE] [--version] [--help]\n"
        "       trader halt|resume|flatten|verify [--help]"
    )
    parser.add_argument(
        "--check", action="store_true", help="check the settings, connect to the database, apply its schema, and exit"
    )
    parser.add_argument("--version", action="version", version=_version())
    return parser


def _version() -> str:
    try:
        return f"trader {version('trader')}"
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "trader"


def settings_help() -> str:
    """Return the settings as `--help` shows them."""
    lines = ["settings, read from the environment and from .env in the working folder (the environment wins):", ""]
    for variable in VARIABLES.values():
        lines += _entry(variable.name, f"{variable.meaning} Default: {variable.default_text}.")
    providers = (
        f"At least one AI provider, except with --demo: {', '.join(KEY_NAMES)}; more keys of one provider as "
        f"..._API_KEY1, ..._API_KEY_2 and so on. Other servers of the same protocol: {', '.join(BASE_URL_NAMES)}."
    )
    lines += ["", *textwrap.wrap(providers, width=100, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(lines)


def _entry(name: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text.replace("`", ""), width=72)
    return [f"  {name:28}  {wrapped[0]}", *(f"{'':32}{line}" for line in wrapped[1:])]


if __name__ == "__main__":
    sys.exit(main())
