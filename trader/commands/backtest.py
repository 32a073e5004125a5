"""The command backtest: the rule agents trade recorded candles, by the rules of the service, in event time."""

import argparse
import asyncio
import gc
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from trader.clock import iso, moment_of
from trader.commands.command import EXIT_DONE, EXIT_INTERRUPTED, Result, command, print_result, table, to_wire
from trader.commands.reports import make_standings
from trader.commands.serve import program_version
from trader.domain.market.markets import PLAIN_FUNDING_RATE
from trader.domain.market.presets import PRESET_MARKETS
from trader.domain.models import ModelConfiguration, VariantId
from trader.dotenv import DEFAULT_FILE, quoted
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres, database_name
from trader.errors import SettingsError, StartError
from trader.gateways.market.files import find_files
from trader.gateways.market.replay import ReplaySource
from trader.reports.season_page import Season, Standing, page
from trader.services.backtest.database import DatabaseJournal
from trader.services.backtest.ledger import LedgerLines
from trader.services.backtest.market import BacktestMarket
from trader.services.backtest.run import Backtest, rule_models
from trader.settings import PRESETS, Settings
from trader.store.database.pool import Database
from trader.store.database.schema import apply_schema
from trader.variants import VARIANTS

LEDGER, RESULT, REPORT = "ledger.jsonl", "result.json", "report.html"
"""The files of a backtest, in its folder."""

_OPTIONS: Mapping[str, str] = {
    "capital": "SIM_INITIAL_CAPITAL",
    "taker_fee": "SIM_TAKER_FEE_BPS",
    "maker_fee": "SIM_MAKER_FEE_BPS",
    "latency": "SIM_LATENCY_MS",
    "preset": "VENUE_PRESET",
    "seed": "SIM_SEED",
    "start": "REPLAY_START",
    "end": "REPLAY_END",
}
"""The setting that each option gives. Nothing else of the environment counts, so that the same call has one result."""

_ENCODER = msgspec.json.Encoder(decimal_format="number")
_STATEMENT_TIMEOUT_S = 120.0
_CLEAR_LINE = "\r\x1b[2K"


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER", help="1-minute candles as Binance publishes them")
    add("--variant", action="append", choices=list(VariantId), help="a rule agent; repeat it for more; default: all")
    add("--market", action="append", metavar="SYMBOL", help="repeat it for more; default: all that the folder has")
    add("--from", dest="start", metavar="TIME", help="ISO 8601 in UTC; default: a day after the first candle")
    add("--to", dest="end", metavar="TIME", help="default: the last candle")
    add("--capital", help="of each account; default: 10000")
    add("--taker-fee", metavar="BPS", help="default: that of the preset")
    add("--maker-fee", metavar="BPS", help="default: that of the preset")
    add("--latency", metavar="MS", help="until an order meets a book; default: that of the preset")
    add("--funding", metavar="RATE|FOLDER", help="hourly rate, or a folder of funding files; default: files in --data")
    add("--preset", choices=list(PRESETS), help="the venue whose rules and fees hold")
    add("--cadence", metavar="EVERY", help="how often agents decide, such as 5m or 1h; default: every minute")
    add("--seed", help="of what is drawn within a minute; default: 0")
    add("--out", type=Path, default=Path("backtest"), metavar="FOLDER", help="default: backtest")
    add("--no-database", action="store_true", help="write only the ledger as JSON lines, the result and the report")
    add("--json", action="store_true", help="print one JSON object")


@command("backtest", example="trader backtest --data candles --variant Apex --out run", arguments=_arguments)
def backtest(options: argparse.Namespace) -> int:
    """Let rule agents trade recorded candles, by the rules of the service and with the ledger of a lockstep replay.

    Writes a database, the ledger as JSON lines, the result and a report into a new folder, where `trader serve --demo`
    shows it. Ctrl+C ends it early; what it has until then is written, and the result says so.
    """
    if options.out.exists():
        raise StartError(f"{options.out} exists already; --out names a new folder.")
    return asyncio.run(_backtest(options))


async def _backtest(options: argparse.Namespace) -> int:
    environ = _environ(options)
    settings, source = _source(options, environ)
    every = _every(options.cadence)
    await source.open()
    variants = [VariantId(one) for one in options.variant or VariantId]
    models = rule_models(variants, every, moment_of(source.span.start))
    intervals = {VARIANTS[model.variant].intervals[0] for model, _ in models}
    market = await BacktestMarket.open(source, intervals)
    try:
        options.out.mkdir(parents=True, exist_ok=False)
        async with AsyncExitStack() as stack:
            file = stack.enter_context((options.out / LEDGER).open("xb"))
            ledger, books = LedgerLines(file), None
            if not options.no_database:
                books = DatabaseJournal(await _open_database(options.out, source, stack), settings)
            run = Backtest(market, settings, models, [ledger] if books is None else [ledger, books])
            if books is not None:
                await books.begin(source.identity, run.starts_at, run.ends_at, run.baselines)
            reached = await _go(run, books)
            digest = ledger.digest()
        if books is not None:
            _write_settings(options, environ, run.starts_at, reached)
        standings = make_standings(run.reports(), run.equity_hours())
        value = _value(options, settings, source, run, reached, digest, standings)
        (options.out / RESULT).write_bytes(msgspec.json.format(_ENCODER.encode(to_wire(value))) + b"\n")
        season = Season(f"Backtest of {options.data.name}", standings, [], run.outcomes())
        (options.out / REPORT).write_text(page(season), encoding="utf-8")
    except OSError as error:
        raise StartError(f"{error.filename or options.out} cannot be written: {error.strerror}.") from error
    code = EXIT_DONE if value["complete"] else EXIT_INTERRUPTED
    return print_result(Result(value, _lines(value, standings, options), code), as_json=options.json)


async def _open_database(out: Path, source: ReplaySource, stack: AsyncExitStack) -> Database:
    """Return the database that a service in the folder would use for this market, with its tables."""
    server = await stack.enter_async_context(EmbeddedPostgres(out / EMBEDDED_FOLDER))
    dsn = await server.ensure_database(database_name(source.identity))
    database = await Database.connect(dsn, size=2, command_timeout_s=_STATEMENT_TIMEOUT_S)
    stack.push_async_callback(database.close)
    await apply_schema(database)
    return database


def _write_settings(
    options: argparse.Namespace, environ: Mapping[str, str], starts_at: datetime, reached: datetime
) -> None:
    """Write the settings with which a service in the folder shows the result, at the time reached."""
    data = options.data.absolute()
    shown = {
        **environ,
        "MARKET_SOURCE": f"replay:{data}",
        "REPLAY_START": iso(starts_at),
        "REPLAY_END": iso(reached),
        "REPLAY_SPEED": "0",
    }
    lines = ["# The settings of this backtest, with which `trader serve --demo` in this folder shows its result."]
    lines += [f"{name}={quoted(value)}" for name, value in shown.items()]
    (options.out / DEFAULT_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _environ(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings that the options ask for."""
    environ = {name: str(value) for option, name in _OPTIONS.items() if (value := getattr(options, option)) is not None}
    markets = PRESET_MARKETS[options.preset or "default"]
    symbols = options.market or [symbol for symbol in find_files(options.data) if symbol in markets]
    return environ | {"MARKET_SOURCE": f"replay:{options.data}", "MARKET_SYMBOLS": ",".join(symbols)}


def _source(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Settings, ReplaySource]:
    """Return the settings and the source that the options ask for. Raise `SettingsError` or `StartError`."""
    try:
        settings = Settings.load(environ, None, demo=True)
    except SettingsError as error:
        named = {name: f"--{_flag(option)}" for option, name in _OPTIONS.items()}
        raise SettingsError([_renamed(problem, named) for problem in error.problems]) from None
    rate, folder = _funding(options.funding)
    source = ReplaySource(
        options.data,
        settings.market_symbols,
        markets=PRESET_MARKETS[options.preset or "default"],
        seed=settings.seed,
        start=settings.replay_start,
        end=settings.replay_end,
        funding_place=folder,
        plain_rate=PLAIN_FUNDING_RATE if rate is None else rate,
    )
    return settings, source


def _flag(option: str) -> str:
    return {"start": "from", "end": "to"}.get(option, option.replace("_", "-"))


def _renamed(problem: str, named: Mapping[str, str]) -> str:
    for name, flag in named.items():
        problem = problem.replace(name, flag)
    return problem


def _funding(text: str | None) -> tuple[Decimal | None, Path | None]:
    """Return the hourly rate, or the folder of the files. Raise `SettingsError` for what is neither."""
    if text is None:
        return None, None
    if Path(text).is_dir():
        return None, Path(text)
    try:
        rate = Decimal(text)
    except ArithmeticError:
        rate = Decimal("NaN")
    if not abs(rate) <= Decimal("0.1"):
        raise SettingsError([f"--funding is {text!r}; it must be an hourly rate within ±0.1, or a folder that exists"])
    return rate, None


def _every(cadence: str | None) -> str | None:
    """Return the cadence. Raise `SettingsError` for one that no model could have."""
    try:
        return msgspec.convert({"every": cadence}, ModelConfiguration).every
    except msgspec.ValidationError:
        raise SettingsError([f"--cadence is {cadence!r}; it must be like 5m or 1h, at most 24h"]) from None


async def _go(run: Backtest, books: DatabaseJournal | None) -> datetime:
    """Run to the end, or until Ctrl+C, with a progress bar on a terminal. Return the time reached."""
    gc.collect()
    gc.freeze()  # candles and indicators would be walked again by every full collection
    reached, began_s, shown_s = run.starts_at, time.monotonic(), 0.0
    with _noticing_interrupts() as interrupted:
        for reached in run.run():
            if books is not None and books.is_full:
                await books.write(reached, run.marks())
            if interrupted:
                break
            now_s = time.monotonic()
            if sys.stderr.isatty() and now_s - shown_s >= 0.2:
                shown_s = now_s
                part = (reached - run.starts_at) / (run.ends_at - run.starts_at)
                print(_CLEAR_LINE + _bar(part, now_s - began_s, reached), end="", file=sys.stderr, flush=True)
        if books is not None:
            await books.write(reached, run.marks())
    if sys.stderr.isatty():
        print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
    return reached


def _bar(part: float, seconds: float, reached: datetime) -> str:
    left = f"{timedelta(seconds=round(seconds / part - seconds))} left" if part > 0 else "begins"
    return f"{'█' * round(30 * part):·<30} {100 * part:3.0f} %  {reached:%Y-%m-%d %H:%M}  {left}"


@contextmanager
def _noticing_interrupts() -> Iterator[list[int]]:
    """Note Ctrl+C instead of raising it anywhere: the ledger must not end within a change."""
    noticed: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        noticed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGINT, before)


def _value(
    options: argparse.Namespace,
    settings: Settings,
    source: ReplaySource,
    run: Backtest,
    reached: datetime,
    digest: str,
    standings: Sequence[Standing],
) -> dict[str, Any]:
    """Return the result as it is written and printed."""
    by_files = sorted(source.funded_by_files)
    plain = sorted(set(source.markets) - set(by_files))
    return {
        "program": program_version(),
        "data": str(options.data),
        "markets": list(source.markets),
        "from": iso(run.starts_at),
        "to": iso(reached),
        "complete": reached == run.ends_at,
        "seed": settings.seed,
        "preset": settings.venue_preset,
        "capital": settings.initial_capital,
        "takerFeeBps": settings.taker_fee_bps,
        "makerFeeBps": settings.maker_fee_bps,
        "latencyMs": settings.latency_ms,
        "cadence": options.cadence or "1m",
        "funding": {"fromFiles": by_files, "constant": plain, "hourlyRate": source.plain_rate if plain else None},
        "ledgerSha256": digest,
        "accounts": [
            {
                "id": one.account.model_id,
                "variant": one.account.variant,
                "equity": one.account.equity,
                "returnPercent": one.return_percent,
                "maxDrawdownPercent": one.drawdown,
                "trades": one.account.trades,
                "decisions": one.account.invocations,
                "gross": one.account.gross,
                "fees": one.account.fees + one.account.liquidation_fees,
                "funding": one.account.funding,
            }
            for one in standings
        ],
    }


def _lines(value: Mapping[str, Any], standings: Sequence[Standing], options: argparse.Namespace) -> Iterator[str]:
    heads = ("account", "equity", "return", "drawdown", "trades", "fees", "funding")
    yield from table(
        heads,
        (
            (
                one.account.model_id,
                f"{one.account.equity:,.2f}",
                f"{one.return_percent:+.2f} %",
                f"{one.drawdown:.2f} %",
                f"{one.account.trades}",
                f"{one.account.fees + one.account.liquidation_fees:,.2f}",
                f"{one.account.funding:,.2f}",
            )
            for one in standings
        ),
    )
    funding = value["funding"]
    named = [f"{', '.join(funding['fromFiles'])} from files"] if funding["fromFiles"] else []
    named += [f"{', '.join(funding['constant'])} {funding['hourlyRate']} an hour"] if funding["constant"] else []
    yield f"{', '.join(value['markets'])}, {value['from']} to {value['to']}; funding: {'; '.join(named)}"
    if not value["complete"]:
        yield "Interrupted: this is a part of the period that was asked for."
    yield f"ledger SHA-256 {value['ledgerSha256']}"
    yield f"{options.out}: {LEDGER}, {RESULT}, {REPORT}"
    if not options.no_database:
        yield f"The page on it: cd {shlex.quote(str(options.out))} && trader serve --demo"
