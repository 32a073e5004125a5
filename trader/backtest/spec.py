"""Specs: what a backtest runs on. The command, the function `run_backtest`, sweeps and exams make them."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from trader.agents.domain.guard import UNLIMITED
from trader.agents.domain.mask import MaskPart
from trader.agents.domain.models import ModelConfiguration
from trader.agents.domain.view import VariantLimits
from trader.core.clock import iso
from trader.core.errors import MarketDataError, SettingsError, StartError
from trader.core.variant_id import VariantId
from trader.market.sources.book_recording import BookRecording
from trader.market.sources.files import find_files
from trader.market.sources.own_data import OwnData
from trader.market.sources.recorder import find_recording, recorded_symbols
from trader.market.sources.replay import ReplaySource
from trader.market.sources.rows import preset_rows
from trader.portfolio.tables import Format
from trader.settings.forms import parse_setting
from trader.settings.settings import VARIABLES, Settings

_SETTINGS: Final[Mapping[str, str]] = {
    "capital": "initial_capital",
    "taker_fee": "taker_fee_bps",
    "maker_fee": "maker_fee_bps",
    "latency": "latency_ms",
    "preset": "venue_preset",
    "markets_file": "markets_file",
    "seed": "seed",
    "start": "replay_start",
    "end": "replay_end",
    "thinking": "replay_thinking",
}
"""The field of `Settings` behind a condition. The environment is ignored, so that the same spec has one result."""


CONDITION_VARIABLES: Final = frozenset(VARIABLES[field].name for field in _SETTINGS.values())
"""The variables of the settings that conditions give."""

RESULT: Final = "result.json"
DECISIONS: Final = "decisions.jsonl"

BacktestSource = ReplaySource | BookRecording
"""The markets of a backtest: candles, or a recording of books."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The market of a backtest and its rules, by the names of the command's options. None: the default.

    Fees are in basis points, the latency in milliseconds, and `funding_rate` is the rate of an hour. `guard` has the
    limits that differ from the variants' own. Without `data` there is no recording: the worlds of an exam.
    """

    data: Path | None
    market: tuple[str, ...] = ()
    start: datetime | None = None
    end: datetime | None = None
    capital: Decimal | None = None
    taker_fee: Decimal | None = None
    maker_fee: Decimal | None = None
    latency: int | None = None
    funding_rate: Decimal | None = None
    funding_folder: Path | None = None
    preset: str | None = None
    seed: int | None = None
    thinking: str | None = None
    guard: Mapping[str, int | bool] = {}
    markets_file: Path | None = None
    own_data: tuple[Path, ...] = ()

    @property
    def recording(self) -> Path:
        """The folder of the candles, which every backtest has."""
        assert self.data is not None, "a backtest has a recording"
        return self.data

    def placed(self, place: Callable[[Path], Path] = Path.absolute) -> "Conditions":
        """Return the same conditions with each path at its place: by default, its absolute path."""
        names = ("data", "funding_folder", "markets_file")
        placed = {name: place(path) for name in names if (path := getattr(self, name)) is not None}
        return replace(self, **placed, own_data=tuple(map(place, self.own_data)))


class Participants(msgspec.Struct, frozen=True, kw_only=True):
    """The participants that decide: rule agents, a strategy, AI models, or external agents.

    Without any of them, every rule agent decides. `strategy` is FILE:CLASS or a class, `every` the interval between
    decisions (None: a minute), `models` a models file whose AI models may cost up to `budget_usd`, and `models_from` a
    cassette or database with recorded decisions. `agents` are texts NAME:VARIANT[=URL] with `deadline_s` for a
    decision, served on `port`. `cassette` is the folder that keeps answers and, with `keeps_decisions`, the decisions
    of strategies. `confined` strategies decide in processes of their own, and AI models that are `is_batched` are asked
    through the batch interfaces of their providers. `mask` names what is hidden from a copy of
    each model. Keys of AI models come from the environment and `env_file`.
    """

    variants: tuple[VariantId, ...] = ()
    strategy: str | type[Any] | None = None
    params: Mapping[str, Any] = {}
    every: str | None = None
    models: Path | None = None
    models_from: str | None = None
    budget_usd: Decimal | None = None
    cassette: Path | None = None
    keeps_decisions: bool = False
    confined: bool = False
    is_batched: bool = False
    agents: tuple[str, ...] = ()
    deadline_s: int | None = None
    port: int | None = None
    mask: frozenset[MaskPart] = frozenset()
    env_file: Path | None = None
    send_keys_to: tuple[str, ...] = ()

    def placed(self, place: Callable[[Path], Path] = Path.absolute) -> "Participants":
        """Return the same entrants with the strategy's file at its place."""
        if not isinstance(self.strategy, str):
            return self
        file, colon, class_name = self.strategy.rpartition(":")
        return replace(self, strategy=f"{place(Path(file))}{colon}{class_name}") if file else self


class BacktestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A whole backtest: its conditions, who decides, and where its files go. `out` must not exist.

    `trials` is the ledger of trials that it is added to. Without evidence there are no baselines and no report, and
    without a format neither tables nor a report.
    """

    conditions: Conditions
    entrants: Participants
    out: Path
    trials: Path
    tables: Format | None = "csv"
    has_database: bool = True
    has_evidence: bool = True

    def check(self) -> None:
        """Check what excludes each other. Raises `SettingsError` with every mistake."""
        entrants, problems = self.entrants, []
        if self.conditions.guard and (entrants.models or entrants.models_from or entrants.agents):
            problems.append("--guard: not with AI models, whose prompts state the limits of their variant")
        if entrants.mask and self.has_database:
            problems.append(
                "--mask: only with --no-database, as a service would show prompts that contradict its books"
            )
        if entrants.mask and self.conditions.own_data:
            problems.append("--with: not with --mask, since own data may name markets, dates and prices")
        problems += ["--param: only with --strategy"] if entrants.params and entrants.strategy is None else []
        if entrants.models is None and entrants.budget_usd is not None:
            problems.append("--budget-usd: only with --models")
        if not entrants.agents:
            serving = {"--deadline": entrants.deadline_s, "--listen": entrants.port}
            problems += [f"{name}: only with --agent" for name, given in serving.items() if given is not None]
        if entrants.every is not None and entrants.every.endswith("s"):
            problems += self._problems_below_a_minute()
        if problems:
            raise SettingsError(problems)

    def _problems_below_a_minute(self) -> list[str]:
        entrants, given = self.entrants, f"--cadence is {self.entrants.every}, below a minute"
        problems = []
        if not find_recording(self.conditions.recording):
            problems.append(f"{given}: only on a recording of books (RECORD); prices within candles are drawn")
        if entrants.models or entrants.agents or (entrants.models_from and entrants.strategy is None):
            problems.append(f"{given}: only for --strategy and rule agents; models and agents decide by the minute")
        return problems


def conditions_of(data: Path | None, given: Mapping[str, Any], guard: Sequence[str] = ()) -> Conditions:
    """Return the conditions from values or their texts, by the names of the fields; None counts as not given.

    `funding` is the hourly rate, or a folder of funding files. `guard` has texts NAME=NUMBER, or none.

    :raises SettingsError: with every mistake
    """
    problems: list[str] = []
    values = {
        name: parse_setting(f"--{flag_of(name)}", VARIABLES[field].form, _text_of(value), problems)
        for name, field in _SETTINGS.items()
        if (value := given.get(name)) is not None
    }
    if problems:
        raise SettingsError(problems)
    rate, folder = _funding(given.get("funding"))
    return Conditions(
        data=data,
        market=tuple(given.get("market") or ()),
        funding_rate=rate,
        funding_folder=folder,
        guard=guard_of(guard),
        own_data=tuple(given.get("with") or ()),
        **values,
    )


def _text_of(value: Any) -> str:
    """Return the text of a setting's value; a time without a zone is UTC, as it is in texts."""
    if isinstance(value, datetime) and value == value:  # noqa: PLR0124 - the NaT of pandas is a datetime, too
        return iso(value.replace(tzinfo=UTC) if value.tzinfo is None else value)
    return str(value)


def environ_of(conditions: Conditions) -> dict[str, str]:
    """Return the conditions as environment variables of the settings. Raise `SettingsError` and `StartError`."""
    data = conditions.recording
    with _in_options():
        if find_recording(data):
            _check_recorded(conditions)
            symbols = conditions.market or recorded_symbols(data)
        else:
            markets = preset_rows(conditions.preset or "default", conditions.markets_file)
            symbols = conditions.market or [symbol for symbol in find_files(data) if symbol in markets]
    fixed = {"SIM_SEED": "0", "MARKET_SOURCE": f"replay:{data}", "MARKETS": ",".join(sorted(symbols))}
    return fixed | settings_given(conditions)


def _check_recorded(conditions: Conditions) -> None:
    """Check that nothing is given that a recording of books has itself. Raises `SettingsError`."""
    has = {
        "--funding": conditions.funding_rate is not None or conditions.funding_folder is not None,
        "--markets-file": conditions.markets_file is not None,
        "--seed, --seeds": bool(conditions.seed),
    }
    why = f"not with {conditions.data}, a recording of books, which has its own prices, rules and rates"
    if problems := [f"{name}: {why}" for name, given in has.items() if given]:
        raise SettingsError(problems)


def data_files(data: Path, markets: Collection[str]) -> Iterator[Path]:
    """Yield the files that a backtest of these markets reads: their candles, or a whole recording of books.

    :raises MarketDataError: there are none
    """
    if recording := find_recording(data):
        yield from chain.from_iterable(recording.values())
        return
    for symbol, files in sorted(find_files(data).items()):
        if symbol in markets:
            yield from files


def settings_given(conditions: Conditions) -> dict[str, str]:
    """Return the settings that conditions give, as environment variables."""
    given = {field: getattr(conditions, name) for name, field in _SETTINGS.items()}
    return {VARIABLES[field].name: _text_of(value) for field, value in given.items() if value is not None}


def settings_of(environ: Mapping[str, str]) -> Settings:
    """Return the settings of a backtest. Raise `SettingsError`, with the names of the command's options."""
    with _in_options():
        return Settings.load(environ, None, demo=True)


async def open_source(conditions: Conditions, environ: Mapping[str, str]) -> tuple[Settings, BacktestSource]:
    """Return the settings and the open market source of a backtest. Raise `SettingsError` or `StartError`."""
    settings = settings_of(environ)
    with _in_options():
        source = _make_source(conditions, settings)
        await source.open()
    return settings, source


def read_own_data(conditions: Conditions, span: range) -> OwnData:
    """Return the own columns for a run over these seconds since 1970. Raises `StartError`."""
    with _in_options():
        return OwnData.read(conditions.own_data, span)


def _make_source(conditions: Conditions, settings: Settings) -> BacktestSource:
    data, start, end = conditions.recording, settings.replay_start, settings.replay_end
    if find_recording(data):
        return BookRecording(data, settings.markets, start=start, end=end)
    return ReplaySource(
        data,
        settings.markets,
        rows=preset_rows(settings.venue_preset, settings.markets_file),
        seed=settings.seed,
        start=start,
        end=end,
        funding_place=conditions.funding_folder,
        plain_rate=conditions.funding_rate,
    )


def flag_of(name: str) -> str:
    """Return the name of the option of a condition."""
    return {"start": "from", "end": "to"}.get(name, name.replace("_", "-"))


_OPTIONS: Final[Mapping[str, str]] = {
    "MARKETS": "--market",
    "MARKET_SOURCE": "--data",
    **{VARIABLES[field].name: f"--{flag_of(name)}" for name, field in _SETTINGS.items()},
}
"""The options of the command by the variables of their settings."""


@contextmanager
def _in_options() -> Iterator[None]:
    """Raise errors with the names of options instead of settings, and wrong data as a `StartError`."""

    def named(problem: str) -> str:
        return re.sub(rf"\b({'|'.join(_OPTIONS)})\b", lambda found: _OPTIONS[found[0]], problem)

    try:
        yield
    except SettingsError as error:
        raise SettingsError([named(problem) for problem in error.problems]) from None
    except (StartError, MarketDataError) as error:
        raise StartError(named(str(error))) from error


def _funding(value: Any) -> tuple[Decimal | None, Path | None]:
    """Return the hourly funding rate, or the folder of funding files. Raise `SettingsError` for anything else."""
    if value is None:
        return None, None
    if Path(text := str(value)).is_dir():
        return None, Path(text)
    with suppress(ArithmeticError):  # not a number, or NaN
        if abs(rate := Decimal(text)) <= Decimal("0.1"):
            return rate, None
    raise SettingsError([f"--funding is {text!r}; it must be an hourly rate within ±0.1, or a folder that exists"])


def guard_of(texts: Sequence[str] | None) -> dict[str, int]:
    """Return the limits of the guard that texts replace, by field. Raise `SettingsError` for anything else."""
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
            form = "none, or NAME=NUMBER, a whole number, with one of the names"
            raise SettingsError([f"--guard is {text!r}; it must be {form} {known}"])
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
        raise SettingsError([f"--cadence is {cadence!r}; it must be like 10s, 5m or 1h, at most 24h"]) from None
