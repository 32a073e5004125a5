"""Command line: chooses the command, and reports what went wrong in one line and an exit code."""

import sys
from collections.abc import Sequence

from trader.commands.command import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_WRONG_SETTINGS, load, make_parser, show
from trader.commands.serve import program_version, settings_help
from trader.errors import SettingsError, TraderError

DESCRIPTION = (
    "AI models trade crypto perpetuals on behalf of named strategy variants, on paper or live.\n"
    "Without a command the service is run, as with `serve`: trader [--demo[=fresh]] [--check] [--env-file FILE]."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "serve")
    load(words[0])
    parser = make_parser(DESCRIPTION, settings_help())
    parser.add_argument("--version", action="version", version=program_version())
    options = parser.parse_args(words)
    try:
        code: int = options.run(options)
    except SettingsError as error:
        show("\n".join(["The settings are wrong:", *(f"  {problem}" for problem in error.problems)]), on_stderr=True)
        return EXIT_WRONG_SETTINGS
    except TraderError as error:
        show(f"trader: {error}", on_stderr=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        show("\ninterrupted", on_stderr=True)
        return EXIT_INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
