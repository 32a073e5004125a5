"""The command venue-close: the stop outside the service."""

import argparse
from pathlib import Path

from trader.commands.command import EXIT_DONE, EXIT_FAILED, command, count_argument, run_to_end, show
from trader.core.errors import MarketDataError, StartError
from trader.core.files import SMALL_BYTES_MAX, read_regular
from trader.core.logs import configure_logs
from trader.live.emptying import PAUSE_S, empty, watch
from trader.live.venues import VENUES
from trader.settings.forms import VENUE_KEY


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("account", type=int, help="index of the account at the venue")
    parser.add_argument("--key-file", type=Path, required=True, help="file with the private part of an API key")
    parser.add_argument("--key-index", type=int, required=True, help="index of that key, not the service's")
    parser.add_argument("--venue", choices=sorted(VENUES), default="lighter", help="default: lighter")
    parser.add_argument("--url", help="base address of the venue; default: the venue's own")
    parser.add_argument("--within", type=count_argument, default=600, metavar="S", help="give up after; default: 600 s")
    parser.add_argument("--watch", metavar="URL", help="only when the service's /health there has stopped answering")
    parser.add_argument("--silent", type=count_argument, default=60, metavar="S", help="for so long; default: 60 s")


@command("venue-close", example="trader venue-close 12345 --key-file close.key --key-index 5", arguments=_arguments)
def venue_close(options: argparse.Namespace) -> int:
    """Cancel all orders of an account at the venue and close all its positions, without service and database.

    Positions are the venue's own. With --watch the command runs until it is interrupted, and does so whenever the
    service has been silent; run it on another machine. It opens nothing, and repeats until nothing is left.
    """
    return run_to_end(_close(options))


async def _close(options: argparse.Namespace) -> int:
    configure_logs("info", "text")
    try:
        key = VENUE_KEY.parse(read_regular(options.key_file, SMALL_BYTES_MAX).decode().strip())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"expected {VENUE_KEY.expected}"
        raise StartError(f"{options.key_file}: {why}") from None
    closer = VENUES[options.venue].make_closer(options.url, options.account, options.key_index, key)
    try:
        try:
            await closer.prove()
        except MarketDataError as error:
            if options.watch:
                raise StartError(f"The key cannot be proven: {error}") from error
            show(f"the key is not proven: {error}", on_stderr=True)
        if options.watch:
            await watch(closer, options.watch, options.silent)
        is_empty = await empty(closer, looks=max(1, int(options.within / PAUSE_S)))
    finally:
        await closer.close()
    show("The account is empty." if is_empty else "The account is NOT empty: try again, or close it at the venue.")
    return EXIT_DONE if is_empty else EXIT_FAILED
