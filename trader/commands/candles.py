"""The commands candles make and candles download: a folder of 1-minute candles for backtests and replays."""

import argparse
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Final, get_args

import aiohttp

from trader.commands.command import (
    EXIT_DONE,
    EXIT_FAILED,
    Result,
    allowed,
    argument_of,
    command,
    count_argument,
    run_to_end,
    show,
)
from trader.commands.progress import Progress
from trader.core.errors import SettingsError, StartError
from trader.market.domain.markets import canonical_symbol
from trader.market.sources.downloads import BASE_URL, Downloader, DownloadOutcome, published_files
from trader.market.sources.published import write_candles
from trader.market.sources.rows import preset_rows
from trader.market.sources.synthetic import SyntheticSource
from trader.settings.forms import Form

_MARKETS: Final = ("BTC", "ETH", "SOL")


_day: Final = argument_of(
    Form(
        "a day from 2000 to 2099, such as 2025-01-01",
        r"20\d\d-\d\d-\d\d",
        lambda text: datetime.fromisoformat(text).replace(tzinfo=UTC),
    )
)
_month: Final = argument_of(Form("a month from 2000-01 to 2099-12, such as 2025-01", r"20\d\d-(0[1-9]|1[0-2])", str))
_symbol: Final = argument_of(
    Form(
        "a market of 1 to 20 letters and digits, such as BTC",
        ".+",
        canonical_symbol,
        lambda symbol: re.fullmatch("[A-Z0-9]{1,20}", symbol) is not None,
    )
)
_base_url: Final = argument_of(Form("an address that begins with https:// or http://", "https?://.+", str))


def _add_markets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--market",
        action="append",
        type=_symbol,
        metavar="SYMBOL",
        help=f"repeat it for more; default: {', '.join(_MARKETS)}",
    )


def _make_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="a new folder")
    add("--days", type=count_argument, default=14, metavar="N", help="default: 14")
    add("--from", dest="start", type=_day, default="2025-01-01", metavar="DAY", help="in UTC; default: 2025-01-01")
    _add_markets(parser)
    add("--markets-file", type=Path, metavar="FILE", help="file defining more markets")
    add("--seed", type=int, default=0, metavar="N", help="seed of the synthetic market; default: 0")


@command("candles make", example="trader lab candles make candles --days 30 --seed 7", arguments=_make_arguments)
def make(options: argparse.Namespace) -> Result:
    """Write candles of the synthetic market into a new folder, without network access.

    The files have the same names and columns as those that Binance publishes. The same days, market and seed give the
    same candles.
    """
    symbols = list(dict.fromkeys(options.market or _MARKETS))
    rows = preset_rows("default", options.markets_file)
    if unknown := [symbol for symbol in symbols if symbol not in rows]:
        raise SettingsError([f"--market: the figures of {', '.join(unknown)} are unknown; known are {allowed(rows)}"])
    folder: Path = options.folder
    if folder.exists():
        raise StartError(f"{folder} exists already; name a new folder.")
    source = SyntheticSource(options.seed, symbols, rows)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as place:
            unfinished = Path(place, folder.name)
            unfinished.mkdir()
            run_to_end(_write(unfinished, source, options.start, options.days))
            files = sorted(path.name for path in unfinished.iterdir())
            unfinished.rename(folder)
    except OSError as error:
        raise StartError(f"{folder} cannot be written: {error.strerror}.") from None
    value = {"folder": str(folder), "markets": symbols, "seed": options.seed, "files": files}
    period = f"{options.days} days from {options.start:%Y-%m-%d}"
    line = f"{folder}: 1-minute candles of {', '.join(symbols)}, {period}, seed {options.seed}"
    return Result(value, [line])


async def _write(folder: Path, source: SyntheticSource, start: datetime, days: int) -> None:
    progress = Progress(0, days * len(source.markets), "days of markets")
    try:
        async for written in write_candles(folder, source, start, days):
            progress.show(written)
    finally:
        progress.end()


def _download_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="a new folder, or one of an earlier download")
    add("--from", dest="first", type=_month, required=True, metavar="MONTH", help="the first month, such as 2025-01")
    add("--to", dest="last", type=_month, metavar="MONTH", help="the last month; default: --from")
    _add_markets(parser)
    add("--base-url", type=_base_url, default=BASE_URL, metavar="URL", help=f"address of a mirror; default: {BASE_URL}")


@command(
    "candles download",
    example="trader lab candles download candles --from 2025-01 --to 2025-03 --market BTC",
    arguments=_download_arguments,
)
def download(options: argparse.Namespace) -> Result:
    """Download the monthly candles and funding rates of USDT perpetuals that Binance publishes.

    The command verifies each file by its published SHA-256 before the file gets its name. Run it again to resume an
    interrupted download; it downloads no file twice. It names months that are not published yet, and exits with 1.
    """
    months = _months(options.first, options.last or options.first)
    if not months:
        raise SettingsError([f"--to is {options.last}, which is before --from, {options.first}"])
    symbols = list(dict.fromkeys(options.market or _MARKETS))
    files = published_files(symbols, months)
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        outcomes = run_to_end(_download(options.folder, options.base_url, files))
    except OSError as error:
        raise StartError(f"{error.filename or options.folder} cannot be written: {error.strerror}.") from None
    by_outcome = {
        each: [name for name, outcome in outcomes.items() if outcome == each] for each in get_args(DownloadOutcome)
    }
    value = {"folder": str(options.folder), **by_outcome}
    counts = ", ".join(f"{len(names)} {outcome}" for outcome, names in by_outcome.items() if names)
    lines = [f"{options.folder}: {counts}"]
    if missing := by_outcome["unpublished"]:
        lines += [
            f"not published at {options.base_url}: {', '.join(missing)}",
            "A month is published in the first days of the next one, and only for the markets that Binance lists.",
        ]
    return Result(value, lines, EXIT_FAILED if missing else EXIT_DONE)


def _months(first: str, last: str) -> list[str]:
    """Return the months from `first` to `last`; none if `last` is earlier."""
    every = (f"{year}-{month:02}" for year in range(int(first[:4]), int(last[:4]) + 1) for month in range(1, 13))
    return [month for month in every if first <= month <= last]


async def _download(folder: Path, base_url: str, files: Sequence[PurePosixPath]) -> dict[str, DownloadOutcome]:
    """Download files with a progress bar for each. Return each outcome by file name."""
    bars: dict[str, Progress] = {}

    def show_progress(name: str, received: int, whole: int) -> None:
        kilobytes = max(whole // 1000, 1)
        bars.setdefault(name, Progress(0, kilobytes, f"KB of {name}")).show(min(received // 1000, kilobytes))

    downloader = Downloader(folder, base_url, show_progress)
    outcomes: dict[str, DownloadOutcome] = {}
    async with aiohttp.ClientSession() as http:
        for file in files:
            try:
                outcomes[file.name] = await downloader.fetch(http, file)
            finally:
                for bar in bars.values():
                    bar.end()
                bars.clear()
            show(f"{file.name}: {outcomes[file.name]}", on_stderr=True)
    return outcomes
