"""Command line: selects the command, and reports errors in one line and an exit code."""

import io
import platform
import sys
from collections.abc import Sequence

from trader import __version__
from trader.commands.command import (
    ALIASES,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_WRONG_SETTINGS,
    exit_after_error,
    overview,
    parse,
    print_error,
    show,
)
from trader.core.errors import ArgumentsError, SettingsError, TraderError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")  # names and texts may contain any character, whatever the locale
    words = list(sys.argv[1:] if arguments is None else arguments)
    words[:1] = ALIASES.get(words[0], words[:1]) if words else []
    if words and words[0] in ("-h", "--help", "--version"):
        is_version = words[0] == "--version"
        show(f"trader {__version__} (Python {platform.python_version()})" if is_version else overview())
        return EXIT_DONE
    if not words or words[0].startswith("-"):
        words.insert(0, "serve")
    as_json = "--json" in words
    try:
        options = parse(words)
        code: int = options.run(options)
    except ArgumentsError as error:
        if error.help_text:
            show(error.help_text, on_stderr=True)
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
