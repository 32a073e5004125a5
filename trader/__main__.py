"""Command line: selects the command, and reports errors in one line and an exit code."""

import io
import sys
from collections.abc import Sequence

from trader.commands.command import (
    EXIT_INTERRUPTED,
    EXIT_WRONG_SETTINGS,
    exit_after_error,
    load,
    make_parser,
    print_error,
    show,
    unknown_command,
)
from trader.commands.serve import program_version, settings_help
from trader.core.errors import ArgumentsError, SettingsError, TraderError

DESCRIPTION = (
    "AI models trade crypto perpetuals on behalf of named strategy variants, on paper or live.\n"
    "Without a command, the service runs, as with `serve`: trader [--demo[=fresh]] [--check] [--env-file FILE]."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")  # names and texts may contain any character, whatever the locale
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "serve")
    load(words[0])
    as_json = "--json" in words
    if (problem := unknown_command(words)) is not None:
        print_error(problem, as_json=as_json, prefix="trader: ")
        return EXIT_WRONG_SETTINGS
    parser = make_parser(DESCRIPTION, settings_help())
    parser.add_argument("--version", action="version", version=program_version())
    try:
        options = parser.parse_args(words)
        code: int = options.run(options)
    except ArgumentsError as error:
        show(error.usage.rstrip(), on_stderr=True)
        print_error(str(error), as_json=as_json, prefix="trader: ")
        return EXIT_WRONG_SETTINGS
    except SettingsError as error:
        print_error("The settings are wrong:", error.problems, as_json=as_json)
        return EXIT_WRONG_SETTINGS
    except TraderError as error:
        print_error(str(error), as_json=as_json, prefix="trader: ")
        return exit_after_error(options.run)
    except KeyboardInterrupt:
        show("\ninterrupted", on_stderr=True)
        return EXIT_INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
