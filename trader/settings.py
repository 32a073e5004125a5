"""The configuration: one frozen value, read once at start from the environment and the `.env` file.

`DEFINITIONS` and `PROVIDERS` are the only place that says which settings there are; loading, `--help`, `.env.example`
and the table in docs/configuration.md are made from them.
"""

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from trader import setting_forms as forms
from trader.dotenv import read_dotenv
from trader.errors import SettingsError
from trader.setting_forms import Form, Secret, Unfit


@dataclass(frozen=True, slots=True)
class ProviderSettings:
    """What is configured of one AI provider; without `base_url` its own public address is meant."""

    base_url: str | None
    keys: tuple[Secret, ...]


class Definition(NamedTuple):
    """One setting. An empty `default` means that there is none and the value is None."""

    name: str
    default: str
    form: Form[object]
    meaning: str
    secret: bool = False
    demo_default: str | None = None
    shown_default: str | None = None
    live_default: str | None = None

    @property
    def field(self) -> str:
        return self.name.removeprefix("SIM_").lower()

    @property
    def default_text(self) -> str:
        """The default as documents show it."""
        return self.shown_default or self.default or "none"


_BPS_DECIMALS_MAX: Final = 6


def _basis_points(text: str) -> Decimal:
    """A rate whose fees are exact in the books: with more decimals they would not fit the digits of `domain.money`."""
    return forms.decimal_number(
        f"a number from 0 to 1000 (hundredths of a percent) with at most {_BPS_DECIMALS_MAX} decimals",
        lambda bps: 0 <= bps <= 1000 and bps == round(bps, _BPS_DECIMALS_MAX),
    )(text)


def _capital(text: str) -> Decimal:
    return forms.decimal_number(
        "a number above 0 and at most 1000000000", lambda capital: 0 < capital <= 1_000_000_000
    )(text)


DEFINITIONS: Final = (
    Definition("PORT", "8081", forms.whole_number(0, 65535), "Listen port; 0 takes any free one."),
    Definition("HOST", "127.0.0.1", forms.listen_host, "Listen address (0.0.0.0 in the container)."),
    Definition(
        "SERVER_URL", "", forms.web_address, "Public address of the service, as the OpenAPI document names it.",
        shown_default="http://localhost:PORT",
    ),
    Definition(
        "DATABASE_URL", "", forms.database_address,
        "PostgreSQL 15 or later: postgresql://user:password@host:port/database. "
        "Without it an embedded PostgreSQL runs in the working folder.",
        secret=True, shown_default="embedded, in ./.trader/postgres",
    ),
    Definition(
        "CORS_ORIGINS", "http://localhost:3000,http://127.0.0.1:3000", forms.web_origins,
        "Frontend origins whose browsers may call, between commas; `none` for no origin.",
    ),
    Definition("TRADING_MODE", "simulated", forms.one_of("simulated", "live"), "`simulated` (paper) or `live`."),
    Definition(
        "MARKET_SOURCE", "venue", forms.market_source,
        "Where prices come from: `venue`, `synthetic`, or `replay:<folder or file>` of Binance kline CSV.",
        demo_default="synthetic", shown_default="venue; with --demo synthetic",
    ),
    Definition("MARKET_SYMBOLS", "BTC,ETH,SOL", forms.market_symbols, "Markets to follow and trade, between commas."),
    Definition("REPLAY_SPEED", "1", forms.speed, "Of a replay, times real time; 0 is as fast as it can."),
    Definition(
        "REPLAY_START", "", forms.moment, "Where a replay starts, ISO 8601 (UTC).", shown_default="start of the data"
    ),
    Definition("REPLAY_END", "", forms.moment, "Where a replay ends, ISO 8601 (UTC).", shown_default="end of the data"),
    Definition("SIM_INITIAL_CAPITAL", "10000", _capital, "Starting capital of a simulated account."),
    Definition("SIM_QUOTE_CURRENCY", "USDT", forms.currency, "Quote currency of simulated accounts."),
    Definition(
        "SIM_REFRESH_INTERVAL_MS", "10000", forms.whole_number(100, 3_600_000),
        "How often the next book is taken from a market source that does not push, in milliseconds.",
    ),
    Definition("SIM_TAKER_FEE_BPS", "5", _basis_points, "Fee of orders that take, in basis points."),
    Definition("SIM_MAKER_FEE_BPS", "2", _basis_points, "Fee of orders that rested, in basis points."),
    Definition(
        "SIM_LATENCY_MS", "200", forms.whole_number(0, 60_000),
        "How long an order takes to the simulated market, in milliseconds.",
    ),
    Definition("SIM_SEED", "0", forms.whole_number(0, 2**63 - 1), "Seed of everything random."),
    Definition("SIM_MAX_ACCOUNTS", "1000", forms.whole_number(1, 1_000_000), "How many accounts there may be."),
    Definition(
        "API_TOKEN", "", forms.secret,
        "When set, procedures that change something need `Authorization: Bearer <token>`.",
        secret=True,
    ),
    Definition("MAX_PARALLEL_MODELS", "8", forms.whole_number(1, 256), "How many models may think at the same time."),
    Definition(
        "RUN_TOKENS_MAX", "60000", forms.whole_number(1_000, 100_000_000),
        "Tokens that one run of a model may spend, questions and answers together.",
    ),
    Definition(
        "ANSWER_TOKENS_MAX", "8192", forms.whole_number(256, 1_000_000),
        "Tokens of one answer of a model, its reasoning included.",
    ),
    Definition(
        "MAX_DAILY_LOSS_PERCENT", "", forms.percent_or_off,
        "Loss of a UTC day, in percent of the day's first equity, at which an account is halted; or `off`.",
        live_default="10", shown_default="off; live 10",
    ),
    Definition(
        "MAX_DRAWDOWN_PERCENT", "", forms.percent_or_off,
        "Fall from the highest equity of its run, in percent, at which an account is halted; or `off`.",
        live_default="25", shown_default="off; live 25",
    ),
    Definition(
        "MAX_TOTAL_DAILY_LOSS_PERCENT", "", forms.percent_or_off,
        "The same loss of a day, of all accounts together, at which all are halted; or `off`.",
        live_default="10", shown_default="off; live 10",
    ),
    Definition(
        "MAX_TOTAL_DRAWDOWN_PERCENT", "", forms.percent_or_off,
        "The same fall, of all accounts together, at which all are halted; or `off`.",
        live_default="20", shown_default="off; live 20",
    ),
    Definition(
        "FLATTEN_ON_LIMIT", "off", forms.one_of("on", "off"),
        "Whether positions are closed, too, when one of these limits is hit.",
    ),
    Definition("VENUE", "lighter", forms.one_of("lighter"), "The trading venue."),
    Definition(
        "VENUE_URL", "", forms.web_address, "Its base address, for public market data too.",
        shown_default="the venue's own",
    ),
    Definition(
        "VENUE_API_KEY_INDEX", "2", forms.whole_number(0, 254),
        "Index of the API key at the venue, the same for every account there (live).",
    ),
    Definition(
        "VENUE_ACCOUNT_INDEX", "", forms.whole_number(0, 2**48 - 1),
        "Index of our account there: of every model whose row names no other (live).",
    ),
    Definition(
        "VENUE_API_KEY", "", forms.secret,
        "Private key of that API key; its public key is registered for every account that is traded (live).",
        secret=True,
    ),
    Definition(
        "LIVE_CONFIRM", "", forms.whole_number(0, 2**48 - 1),
        "VENUE_ACCOUNT_INDEX again: the word that real money is meant. Without it TRADING_MODE=live does not start.",
    ),
    Definition(
        "TAAPI_API_KEY", "", forms.secret, "Key of taapi.io, for supplementary indicators (optional).", secret=True
    ),
    Definition(
        "SNAPSHOT_RETENTION_DAYS", "35", forms.whole_number(1, 3650),
        "How long raw portfolio snapshots are kept, in days; hourly averages stay.",
    ),
    Definition(
        "HTTP_CONNECTIONS_MAX", "4096", forms.whole_number(16, 1_000_000),
        "How many connections may be open; beyond that the one that is idle longest is closed.",
    ),
    Definition(
        "HTTP_IDLE_TIMEOUT_S", "75", forms.whole_number(1, 86_400),
        "How long a connection may be silent between requests, in seconds.",
    ),
    Definition(
        "HTTP_HEAD_TIMEOUT_S", "10", forms.whole_number(1, 3600),
        "How long the head of a request may take to arrive, from its first byte, in seconds.",
    ),
    Definition(
        "HTTP_BODY_TIMEOUT_S", "30", forms.whole_number(1, 3600),
        "How long a caller may take to send its body, or to take its answer, in seconds.",
    ),
    Definition(
        "HTTP_HEADER_BYTES_MAX", "8190", forms.whole_number(1024, 1_048_576),
        "Size of the first line of a request, and of each of at most 128 headers, in bytes.",
    ),
    Definition(
        "METRICS", "on", forms.one_of("on", "off"), "Whether `GET /metrics` tells figures in the Prometheus format."
    ),
    Definition("LOG_LEVEL", "info", forms.one_of("debug", "info", "warning", "error"), "Least level that is logged."),
    Definition(
        "LOG_FORMAT", "", forms.one_of("console", "json"), "`console` or `json`.",
        shown_default="console on a terminal, else json",
    ),
)  # fmt: skip

PROVIDERS: Final = ("openrouter", "nim", "mistral", "openai")
_KEY_NAME = re.compile(rf"({'|'.join(PROVIDERS).upper()})_API_KEY(?:_?([0-9]{{1,3}}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting; see `DEFINITIONS` for their meaning. What holds a secret does not show it in `repr`."""

    port: int
    host: str
    server_url: str
    database_url: str | None = field(repr=False)
    cors_origins: tuple[str, ...]
    trading_mode: str
    market_source: str
    market_symbols: tuple[str, ...]
    replay_speed: float
    replay_start: datetime | None
    replay_end: datetime | None
    initial_capital: Decimal
    quote_currency: str
    refresh_interval_ms: int
    taker_fee_bps: Decimal
    maker_fee_bps: Decimal
    latency_ms: int
    seed: int
    max_accounts: int
    api_token: Secret | None
    max_parallel_models: int
    run_tokens_max: int
    answer_tokens_max: int
    max_daily_loss_percent: Decimal | None
    max_drawdown_percent: Decimal | None
    max_total_daily_loss_percent: Decimal | None
    max_total_drawdown_percent: Decimal | None
    flatten_on_limit: str
    venue: str
    venue_url: str | None
    venue_api_key_index: int
    venue_account_index: int | None
    venue_api_key: Secret | None
    live_confirm: int | None
    taapi_api_key: Secret | None
    snapshot_retention_days: int
    http_connections_max: int
    http_idle_timeout_s: int
    http_head_timeout_s: int
    http_body_timeout_s: int
    http_header_bytes_max: int
    metrics: str
    log_level: str
    log_format: str
    providers: Mapping[str, ProviderSettings]
    demo: bool

    @classmethod
    def load(cls, environ: Mapping[str, str], dotenv: Path | None, *, demo: bool) -> "Settings":
        """Read the settings: `environ` wins over the file, and an empty value is none.

        :raises SettingsError: with every mistake there is
        """
        file = read_dotenv(dotenv) if dotenv else None
        written = {**(file.values if file else {}), **{name: value for name, value in environ.items() if value.strip()}}
        texts = {name: value.strip() for name, value in written.items() if value.strip()}
        problems = [*file.problems, *_misspelled(file.values)] if file else []
        values: dict[str, Any] = {}
        is_live = texts.get("TRADING_MODE") == "live"
        for definition in DEFINITIONS:
            values[definition.field] = _read(definition, texts, problems, demo=demo, is_live=is_live)
        values["providers"] = _read_providers(texts, problems)
        problems += _contradictions(values, problems, demo=demo)
        if problems:
            raise SettingsError(problems)
        values["server_url"] = values["server_url"] or _own_address(values["host"], values["port"])
        values["log_format"] = values["log_format"] or ("console" if sys.stderr.isatty() else "json")
        return cls(**values, demo=demo)


def _read(
    definition: Definition, texts: Mapping[str, str], problems: list[str], *, demo: bool, is_live: bool
) -> object:
    default = definition.default
    if demo and definition.demo_default is not None:
        default = definition.demo_default
    elif is_live and definition.live_default is not None:
        default = definition.live_default
    text = texts.get(definition.name, default)
    return _parse(definition.name, definition.form, text, problems, secret=definition.secret) if text else None


def read_database_url(environ: Mapping[str, str], dotenv: Path | None) -> str | None:
    """DATABASE_URL alone: an operator who must stop a service is not held up by another setting that is wrong.

    :raises SettingsError: it is no address of a database
    """
    (definition,) = (one for one in DEFINITIONS if one.name == "DATABASE_URL")
    file = read_dotenv(dotenv).values if dotenv else {}
    text = environ.get(definition.name, "").strip() or file.get(definition.name, "").strip()
    problems: list[str] = []
    found = _parse(definition.name, definition.form, text, problems, secret=True) if text else None
    if problems:
        raise SettingsError(problems)
    return found if isinstance(found, str) else None


def _parse(name: str, form: Callable[[str], object], text: str, problems: list[str], *, secret: bool) -> object:
    try:
        return form(text)
    except Unfit as unfit:
        shown = "" if secret or "@" in text else f", got {text[:60]!r}"  # before an @ there may be a password
        problems.append(f"{name}: expected {unfit}{shown}")
        return None


def _read_providers(texts: Mapping[str, str], problems: list[str]) -> Mapping[str, ProviderSettings]:
    keys: dict[str, list[tuple[int, str, Secret]]] = {name: [] for name in PROVIDERS}
    for name, text in texts.items():
        if found := _KEY_NAME.fullmatch(name):
            key = _parse(name, forms.secret, text, problems, secret=True)
            if isinstance(key, Secret):
                keys[found.group(1).lower()].append((int(found.group(2) or 0), name, key))
    providers = {}
    for provider, numbered in keys.items():
        name = f"{provider.upper()}_BASE_URL"
        # An address may carry a key in its path, so a wrong one is not shown.
        url = _parse(name, forms.web_address, texts[name], problems, secret=True) if name in texts else None
        ordered = dict.fromkeys(key for _, _, key in sorted(numbered, key=lambda entry: entry[:2]))
        if ordered or isinstance(url, str):
            providers[provider] = ProviderSettings(url if isinstance(url, str) else None, tuple(ordered))
    return MappingProxyType(providers)


def _contradictions(values: Mapping[str, Any], problems: list[str], *, demo: bool) -> list[str]:
    """Mistakes of settings that are right each by itself."""
    found = []
    spoiled = any("_API_KEY" in problem or "_BASE_URL" in problem for problem in problems)
    if not demo and not values["providers"] and not spoiled:
        names = ", ".join(f"{provider.upper()}_API_KEY" for provider in PROVIDERS)
        urls = ", ".join(f"{provider.upper()}_BASE_URL" for provider in PROVIDERS)
        found.append(
            f"At least one AI provider is needed: set one of {names}, or for a server of your own one of {urls} "
            "(or start with --demo, which needs none)"
        )
    if values["trading_mode"] == "live":
        found += _live_contradictions(values, problems, demo=demo)
    start, end = values["replay_start"], values["replay_end"]
    if start and end and start >= end:
        found.append("REPLAY_END: expected a time after REPLAY_START")
    return found


def _live_contradictions(values: Mapping[str, Any], problems: list[str], *, demo: bool) -> list[str]:
    if demo:
        return ["TRADING_MODE: expected simulated with --demo, got 'live'"]
    found = [
        f"{name}: expected a value, which TRADING_MODE=live needs"
        for name in ("VENUE_ACCOUNT_INDEX", "VENUE_API_KEY")
        if values[name.lower()] is None and not any(problem.startswith(f"{name}:") for problem in problems)
    ]
    if values["market_source"] not in ("venue", None):
        found.append("MARKET_SOURCE: expected venue, which TRADING_MODE=live needs")
    return found


def _misspelled(names: Mapping[str, str]) -> list[str]:
    """Names in the file that are no setting but nearly one. Other names are left alone: the file may be shared."""
    known = {definition.name for definition in DEFINITIONS} | {f"{name.upper()}_BASE_URL" for name in PROVIDERS}
    keys = [f"{name.upper()}_API_KEY" for name in PROVIDERS]
    found = []
    for name in names:
        if name in known or _KEY_NAME.fullmatch(name):
            continue
        if close := difflib.get_close_matches(name.upper(), [*known, *keys], n=1, cutoff=0.9):
            found.append(f"{name}: expected the name of a setting; did you mean {close[0]}?")
    return found


def _own_address(host: str, port: int) -> str:
    """The address to use from this machine."""
    if host in ("127.0.0.1", "0.0.0.0", "::", "::1"):  # noqa: S104 - compared, not bound
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


assert {definition.field for definition in DEFINITIONS} == {entry.name for entry in fields(Settings)} - {
    "providers",
    "demo",
}, "every setting has its field"
