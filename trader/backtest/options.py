"""Options of the `backtest` command, and the settings and market source that they select."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import get_args

import msgspec

from trader.agents.domain.guard import UNLIMITED
from trader.agents.domain.mask import MaskPart
from trader.agents.domain.models import ModelConfiguration
from trader.agents.domain.view import VariantLimits
from trader.agents.models_file import add_keys_argument, variant_argument
from trader.core.errors import SettingsError, StartError
from trader.market.sources.files import find_files
from trader.market.sources.recorder import find_recording
from trader.market.sources.replay import ReplaySource
from trader.market.sources.rows import preset_rows
from trader.settings.dotenv import add_env_file_option
from trader.settings.presets import PRESETS
from trader.settings.settings import Settings

_OPTIONS: Mapping[str, str] = {
    "capital": "SIM_INITIAL_CAPITAL",
    "taker_fee": "SIM_TAKER_FEE_BPS",
    "maker_fee": "SIM_MAKER_FEE_BPS",
    "latency": "SIM_LATENCY_MS",
    "preset": "VENUE_PRESET",
    "markets_file": "MARKETS_FILE",
    "seed": "SIM_SEED",
    "start": "REPLAY_START",
    "end": "REPLAY_END",
    "thinking": "REPLAY_THINKING",
}
"""The setting behind each option. The rest of the environment is ignored, so that the same call has one result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="1-minute candles as Binance publishes them")
    add("--variant", action="append", type=variant_argument, help="a rule agent; may be repeated; default: all")
    add("--strategy", metavar="FILE:CLASS", help="a strategy of a Python file, such as sma.py:SmaCross")
    add(
        "--param",
        action="append",
        metavar="NAME=VALUE",
        help="a parameter of the strategy, or a range such as window=10..50:10; may be repeated",
    )
    add("--market", action="append", metavar="SYMBOL", help="may be repeated; default: every market in the folder")
    add("--from", dest="start", metavar="TIME", help="ISO 8601 in UTC; default: a day after the first candle")
    add("--to", dest="end", metavar="TIME", help="default: the last candle")
    add("--markets-file", type=lambda text: Path(text).absolute(), metavar="FILE", help="figures of more markets")
    add("--capital", help="capital of each account; default: 10000")
    add("--taker-fee", metavar="BPS", help="default: the preset's")
    add("--maker-fee", metavar="BPS", help="default: the preset's")
    add("--latency", metavar="MS", help="delay of an order in milliseconds; default: the preset's")
    add("--funding", metavar="RATE|FOLDER", help="hourly rate, or a folder of funding files; default: files in --data")
    add("--preset", choices=list(PRESETS), help="the venue whose rules and fees apply")
    add("--cadence", metavar="EVERY", help="how often agents decide, such as 5m or 1h; default: every minute")
    _add_models(add)
    add_keys_argument(parser)
    add("--guard", action="append", metavar="NAME=NUMBER|none", help="another limit of the guard; none: no guard")
    add("--seed", help="seed of the price paths within minutes; default: 0")
    _add_sweep(add)
    add("--trials", metavar="FILE", help="the trial ledger; default: trials.jsonl next to --out")
    add("--out", type=Path, default=Path("backtest"), metavar="FOLDER", help="default: backtest")
    add(
        "--tables",
        choices=["csv", "parquet"],
        default="csv",
        help="file format of trades, fills, equity and decisions",
    )
    add("--no-database", action="store_true", help="write only the ledger as JSON lines, the result and the report")
    add_env_file_option(parser)
    add("--json", action="store_true", help="print one JSON object")


def _add_models(add: Callable[..., argparse.Action]) -> None:
    """Add the options of AI models, and of decisions that are known."""
    add("--models", type=Path, metavar="FILE", help="a models file: asks AI models, within --budget-usd")
    add("--budget-usd", metavar="USD", help="maximum cost of asking; without it the command prints an estimate")
    add(
        "--cassette",
        type=Path,
        metavar="FOLDER",
        help="where answers, and decisions of --strategy, are kept; default: in --out",
    )
    add("--thinking", choices=["on", "off"], help="whether time passes while an AI model thinks; default: on")
    add(
        "--agent",
        action="append",
        metavar="NAME:VARIANT[=URL]",
        help="an agent of your own, which calls agent.* or is called at URL; may be repeated",
    )
    add("--deadline", type=deadline_argument, metavar="SECONDS", help="time for a decision of --agent; default: 120")
    add("--listen", type=port_argument, metavar="PORT", help="where --agent finds agent.* and /mcp; default: 8081")
    add("--models-from", metavar="PLACE", help="a cassette or database with models and decisions; no model is asked")
    add(
        "--run",
        dest="folder",
        type=Path,
        metavar="RUN",
        help="folder of a backtest whose decisions are executed again",
    )
    add(
        "--mask",
        type=mask_argument,
        metavar="PARTS",
        help="symbols,dates,scale: adds a copy of each model from which these are hidden",
    )


def _add_sweep(add: Callable[..., argparse.Action]) -> None:
    """Add the options of many runs at once."""
    add("--seeds", type=count_argument, metavar="N", help="a sweep: repeats each run with N seeds, from --seed on")
    add(
        "--walk-forward",
        metavar="CHOOSE/TRY",
        help="a sweep: 7d/1d chooses parameters on 7 days and tries them on the next day",
    )
    add("--workers", type=count_argument, metavar="N", help="concurrent runs of a sweep; default: the number of cores")
    add("--cluster", metavar="ADDRESS", help="address of a Dask scheduler whose workers execute the runs of a sweep")


def mask_argument(text: str) -> frozenset[MaskPart]:
    """Return the parts of a market that a mask hides."""
    try:
        return msgspec.convert(text.split(","), frozenset[MaskPart])
    except msgspec.ValidationError:
        allowed = ", ".join(get_args(MaskPart))
        raise argparse.ArgumentTypeError(f"expected some of {allowed}, separated by commas, got {text!r}") from None


def port_argument(text: str) -> int:
    """Return a TCP port; 0 takes any free one."""
    if not text.isdecimal() or not int(text) < 65_536:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def deadline_argument(text: str) -> int:
    """Return the seconds that a decision of an external agent may take."""
    if not text.isdecimal() or not 5 <= int(text) <= 600:
        raise argparse.ArgumentTypeError(f"expected whole seconds from 5 to 600, got {text!r}")
    return int(text)


def count_argument(text: str) -> int:
    """Return a number from 1 to 10,000."""
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 10000, got {text!r}")
    return int(text)


def environ_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the options as environment variables of the settings."""
    if find_recording(options.data):
        raise SettingsError(
            [
                f"--data: {options.data} is a recording of a market, with its books at each update; a backtest draws "
                f"books within 1-minute candles. A service replays it, as fast as it goes: MARKET_SOURCE=replay:"
                f"{options.data} REPLAY_SPEED=0 trader serve --demo"
            ]
        )
    markets = preset_rows(options.preset or "default", options.markets_file)
    symbols = options.market or [symbol for symbol in find_files(options.data) if symbol in markets]
    fixed = {"SIM_SEED": "0", "MARKET_SOURCE": f"replay:{options.data}", "MARKETS": ",".join(sorted(symbols))}
    return fixed | settings_given(options)


def settings_given(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings that options give, as environment variables."""
    given = {name: getattr(options, option, None) for option, name in _OPTIONS.items()}
    return {name: str(value) for name, value in given.items() if value is not None}


def settings_of(environ: Mapping[str, str]) -> Settings:
    """Return the settings that the options select. Raise `SettingsError`, with the names of the options."""
    try:
        return Settings.load(environ, None, demo=True)
    except SettingsError as error:
        raise SettingsError([_in_options(problem) for problem in error.problems]) from None


async def open_source(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Settings, ReplaySource]:
    """Return the settings and the open market source that the options select. Raise `SettingsError` or `StartError`."""
    settings = settings_of(environ)
    rate, folder = _funding(options.funding)
    source = ReplaySource(
        options.data,
        settings.markets,
        rows=preset_rows(settings.venue_preset, settings.markets_file),
        seed=settings.seed,
        start=settings.replay_start,
        end=settings.replay_end,
        funding_place=folder,
        plain_rate=rate,
    )
    try:
        await source.open()
    except StartError as error:
        raise StartError(_in_options(str(error))) from error
    return settings, source


def _flag(option: str) -> str:
    return {"start": "from", "end": "to"}.get(option, option.replace("_", "-"))


def _in_options(problem: str) -> str:
    """Return an error with the names of options instead of settings."""
    for option, name in _OPTIONS.items():
        problem = problem.replace(name, f"--{_flag(option)}")
    return problem


def _funding(text: str | None) -> tuple[Decimal | None, Path | None]:
    """Return the hourly funding rate, or the folder of funding files. Raise `SettingsError` for anything else."""
    if text is None:
        return None, None
    if Path(text).is_dir():
        return None, Path(text)
    try:
        rate = Decimal(text)
        is_rate = abs(rate) <= Decimal("0.1")
    except ArithmeticError:  # not a number, or NaN
        rate, is_rate = Decimal(0), False
    if not is_rate:
        raise SettingsError([f"--funding is {text!r}; it must be an hourly rate within ±0.1, or a folder that exists"])
    return rate, None


def guard_of(texts: Sequence[str] | None) -> dict[str, int]:
    """Return the limits of the guard that the options replace, by field. Raise `SettingsError` for anything else."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(VariantLimits)}
    limits: dict[str, int] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if text == "none":
            limits |= msgspec.structs.asdict(UNLIMITED)
        elif value.isdecimal() and kinds.get(field := name.replace("-", "_")) is int:
            limits[field] = int(value)
        elif value in ("0", "1") and kinds.get(field) is bool:
            limits[field] = value == "1"
        else:
            known = ", ".join(name.replace("_", "-") for name in kinds)
            raise SettingsError([f"--guard is {text!r}; it must be none, or NAME=NUMBER with one of the names {known}"])
    return limits


def params_of(texts: Sequence[str] | None) -> dict[str, str]:
    """Return the parameters of a strategy by name. Raise `SettingsError` for a text without a name."""
    params = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise SettingsError([f"--param is {text!r}; it must be NAME=VALUE, such as window=20"])
        params[name] = value
    return params


def every_of(cadence: str | None) -> str | None:
    """Return the decision interval. Raise `SettingsError` for one that the configuration does not allow."""
    try:
        return msgspec.convert({"every": cadence}, ModelConfiguration).every
    except msgspec.ValidationError:
        raise SettingsError([f"--cadence is {cadence!r}; it must be like 5m or 1h, at most 24h"]) from None
