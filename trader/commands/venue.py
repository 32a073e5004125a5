"""The commands venue-close and rehearse, which work at a venue without a service."""

import argparse
import sys
from pathlib import Path

from trader.commands.command import EXIT_DONE, EXIT_FAILED, command, count_argument, show
from trader.core.clock import SystemClock
from trader.core.errors import MarketDataError, StartError
from trader.core.files import SMALL_BYTES_MAX, read_regular
from trader.core.logs import configure_logs
from trader.live.emptying import PAUSE_S, empty, watch
from trader.live.rehearsals import rehearse as run_rehearsal
from trader.live.venues import VENUES
from trader.settings.forms import VENUE_KEY, Secret


def _key_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("account", help="the account at the venue: its index or address")
    parser.add_argument("--key-file", type=Path, required=True, help="file with the private part of an API key")
    parser.add_argument(
        "--key-index", type=int, default=0, help="index of that key, not the service's, where the venue has indexes"
    )
    parser.add_argument("--venue", choices=sorted(VENUES), default="lighter", help="default: lighter")


def _read_key(file: Path) -> Secret:
    configure_logs("info", "text")
    try:
        return VENUE_KEY.parse(read_regular(file, SMALL_BYTES_MAX).decode().strip())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"expected {VENUE_KEY.expected}"
        raise StartError(f"{file}: {why}") from None


def _close_arguments(parser: argparse.ArgumentParser) -> None:
    _key_arguments(parser)
    parser.add_argument("--url", help="base address of the venue; default: the venue's own")
    parser.add_argument("--within", type=count_argument, default=600, metavar="S", help="give up after; default: 600 s")
    parser.add_argument("--watch", metavar="URL", help="only when the service's /health there has stopped answering")
    parser.add_argument("--silent", type=count_argument, default=60, metavar="S", help="for so long; default: 60 s")


@command("venue-close", example="trader venue-close 123 --key-file close.key --key-index 5", arguments=_close_arguments)
async def venue_close(options: argparse.Namespace) -> int:
    """Cancel all orders and close all positions of an account at the venue.

    Needs neither service nor database: positions are the venue's own. With --watch the command runs until it is
    interrupted, and does so whenever the service has been silent; run it on another machine. It opens nothing, and
    repeats until nothing is left.
    """
    key, package = _read_key(options.key_file), VENUES[options.venue]
    closer = package.make_closer(options.url or package.ADDRESS, options.account, options.key_index, key)
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


def _rehearse_arguments(parser: argparse.ArgumentParser) -> None:
    _key_arguments(parser)
    parser.add_argument("--url", help="base address of the venue; default: its test network")
    parser.add_argument("--market", default="BTC", help="default: BTC")
    parser.add_argument("--folder", type=Path, default=Path("rehearsal"), help="for report and payloads")
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)


@command("rehearse", example="trader rehearse 12345 --key-file test.key --key-index 5", arguments=_rehearse_arguments)
async def rehearse(options: argparse.Namespace) -> int:
    """Rehearse live trading at the venue's test network with an empty account.

    A fixed list of steps opens, adds, closes a part, places a stop and a target, has a change refused, cancels, cuts
    the stream, and kills a process in the middle of an order. The report has what the venue answered to what its
    documents leave open, and a digest. TRADING_MODE=live needs one of this version from the last 30 days.
    """
    key, package = _read_key(options.key_file), VENUES[options.venue]
    url = options.url or package.TESTNET
    closer = package.make_closer(url, options.account, options.key_index, key)
    try:
        if options.send is not None:
            await closer.send_and_wait(options.market, options.send)
        steps = closer.steps(options.market, ["-m", "trader", *sys.argv[1:], "--send"], PAUSE_S)
        report = await run_rehearsal(options.venue, url, closer, steps, options.folder, SystemClock().now())
    finally:
        await closer.close()
    for step in report.steps:
        show(f"{'passed' if step.passed else 'FAILED'}  {step.name}: {step.detail}")
    for question, answer in report.answers.items():
        show(f"{question}: {answer}")
    show(f"{options.folder / 'rehearsal.json'}: {report.digest}")
    return EXIT_DONE if report.passed else EXIT_FAILED
