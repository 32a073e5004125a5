"""Settings of the service: one frozen struct, read at start from the environment and the `.env` file.

Each field of `Settings` carries its `Variable`: name, default, form of the text, and meaning. Loading, `--help`,
`.env.example` and the table of settings in the documentation are derived from these fields.
"""

import stat
import sys
import tomllib
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from trader.core.errors import SettingsError
from trader.settings import forms
from trader.settings.checks import (
    PROVIDER_NEEDED,
    find_contradictions,
    find_unknown,
    is_loopback,
    lacks_provider,
    local_address,
)
from trader.settings.dotenv import read_dotenv
from trader.settings.forms import EffectiveText, Secret, Variable, parse_setting
from trader.settings.providers import KEY_NAME, ProviderSettings, read_providers


class PresetVenue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A venue with known figures.

    `markets` have the fields of a `Market`. `presets` maps each VENUE_PRESET to the texts of the settings whose default
    it changes; a venue with several fee tiers has several presets, and `MARKET_SOURCE=venue` uses VENUE's first one.
    `liquidation` has the rules of liquidation that differ from the default's. `sources` say where the figures come
    from.
    """

    markets: list[dict[str, Any]]
    presets: Annotated[dict[str, dict[str, str]], Meta(min_length=1)]
    sources: Annotated[dict[str, str], Meta(min_length=1)]
    liquidation: dict[str, Any] = {}


PRESET_VENUES: Final = msgspec.convert(
    tomllib.loads(files("trader").joinpath("market", "presets.toml").read_text(encoding="utf-8")),
    dict[str, PresetVenue],
)
PRESETS: Final[Mapping[str, Mapping[str, str]]] = {
    "default": {},
    **{preset: texts for venue in PRESET_VENUES.values() for preset, texts in venue.presets.items()},
}
"""The settings whose defaults each VENUE_PRESET changes."""

_BY_PRESET: Final = "from VENUE_PRESET"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a process. `providers` comes from the variables of AI providers.

    `demo` and `demo_history` come from the command line. `cors_credentials`: whether browsers may send passwords and
    certificates from CORS_ORIGINS, which they may not from the origins that `--demo` allows by default.
    """

    # fmt: off
    port: Annotated[int, Variable(
        "PORT", "8081", forms.whole_number(0, 65535), "Port to listen on; 0 takes any free one.")]
    host: Annotated[str, Variable(
        "HOST", "127.0.0.1", forms.LISTEN_HOST, "Address to listen on (0.0.0.0 in the container).")]
    server_url: Annotated[str, Variable(
        "SERVER_URL", "", forms.WEB_ADDRESS, "Public address of the service, as the OpenAPI document names it.",
        shown_default="http://localhost:PORT")]
    database_url: Annotated[Secret | None, Variable(
        "DATABASE_URL", "", forms.DATABASE_ADDRESS,
        "PostgreSQL 15 or later: postgresql://user:password@host:port/database. "
        "Without it an embedded PostgreSQL runs in the working folder.",
        shown_default="embedded, in ./.trader/postgres")]
    role: Annotated[str, Variable(
        "ROLE", "auto", forms.one_of("auto", "reader"),
        "`auto`: this process leads if no other process on its database does, and stands by until then; on a streaming "
        "replica, until it is promoted. `reader`: it only reads, and needs no provider and no key.")]
    leader_url: Annotated[str | None, Variable(
        "LEADER_URL", "", forms.WEB_ADDRESS,
        "Address of the leader, which readers and standbys give to callers who want to make changes.")]
    cors_origins: Annotated[tuple[str, ...], Variable(
        "CORS_ORIGINS", "none", forms.WEB_ORIGINS,
        "Origins of frontends whose browsers may call the API, separated by commas; `none` allows no other origin than "
        "the service's own.", demo_default="http://localhost:3000,http://127.0.0.1:3000",
        shown_default="none; with --demo port 3000 of this machine, without credentials")]
    allowed_hosts: Annotated[tuple[str, ...], Variable(
        "ALLOWED_HOSTS", "", forms.HOST_NAMES,
        "Further host names by which callers may reach the service, separated by commas, in addition to localhost, the "
        "listen address and the host of SERVER_URL.")]
    trading_mode: Annotated[str, Variable(
        "TRADING_MODE", "simulated", forms.one_of("simulated", "live"), "`simulated` (paper) or `live`.")]
    market_source: Annotated[str, Variable(
        "MARKET_SOURCE", "venue", forms.MARKET_SOURCE,
        "Where prices come from: `venue` or its name (`venue:hyperliquid`, which sets VENUE), `synthetic`, or "
        "`replay:<folder or file>` of Binance kline CSV or of RECORD.",
        demo_default="synthetic", shown_default="venue; with --demo synthetic")]
    markets: Annotated[tuple[str, ...], Variable(
        "MARKETS", "BTC,ETH,SOL", forms.MARKETS,
        "Markets to follow and trade, separated by commas: BTC, ETH, SOL, BNB, XRP, DOGE, and any that the venue lists "
        "if it is the source. MARKET_SYMBOLS is the earlier name of this setting.")]
    markets_file: Annotated[Path | None, Variable(
        "MARKETS_FILE", "", forms.FOLDER, "TOML file that defines additional markets, one table each.",
        shown_default="none")]
    replay_speed: Annotated[float, Variable(
        "REPLAY_SPEED", "1", forms.SPEED, "Replay speed as a multiple of real time; 0 is as fast as possible.")]
    replay_start: Annotated[datetime | None, Variable(
        "REPLAY_START", "", forms.MOMENT, "Time at which a replay starts, ISO 8601 (UTC).",
        shown_default="start of the data")]
    replay_end: Annotated[datetime | None, Variable(
        "REPLAY_END", "", forms.MOMENT, "Time at which a replay ends, ISO 8601 (UTC).",
        shown_default="end of the data")]
    replay_thinking: Annotated[str, Variable(
        "REPLAY_THINKING", "on", forms.one_of("on", "off"),
        "Whether the clock of a replay advances while a model thinks, by the time that it takes.")]
    record: Annotated[Path | None, Variable(
        "RECORD", "", forms.FOLDER,
        "Folder in which to record what the exchange sees of the markets, as hourly files; the source "
        "`replay:<folder>` plays them back.", shown_default="off")]
    initial_capital: Annotated[Decimal, Variable(
        "SIM_INITIAL_CAPITAL", "10000", forms.CAPITAL, "Starting capital of a simulated account.")]
    quote_currency: Annotated[str, Variable(
        "SIM_QUOTE_CURRENCY", "USDT", forms.CURRENCY, "Quote currency of simulated accounts.")]
    refresh_interval_ms: Annotated[int, Variable(
        "SIM_REFRESH_INTERVAL_MS", "10000", forms.whole_number(100, 3_600_000),
        "How often the simulator reads the order books of a market source that does not push, such as the venue while "
        "its WebSocket cannot be opened, in milliseconds. Prices older than 30,000 are stale and not traded on.")]
    venue_preset: Annotated[str, Variable(
        "VENUE_PRESET", "", forms.one_of(*PRESETS),
        "Venue whose figures the simulator uses: fees, latency, funding interval, margin tiers, tick, lot and minimum. "
        "A figure's own setting overrides it.",
        shown_default="default; with MARKET_SOURCE=venue the first of VENUE")]
    taker_fee_bps: Annotated[Decimal, Variable(
        "SIM_TAKER_FEE_BPS", "5", forms.BASIS_POINTS, "Fee of taker fills, in basis points.",
        shown_default=_BY_PRESET)]
    maker_fee_bps: Annotated[Decimal, Variable(
        "SIM_MAKER_FEE_BPS", "2", forms.BASIS_POINTS, "Fee of maker fills, in basis points.",
        shown_default=_BY_PRESET)]
    funding_interval_h: Annotated[int, Variable(
        "FUNDING_INTERVAL_H", "1", forms.FUNDING_INTERVAL, "Hours between funding payments, counted from 00:00 UTC.",
        shown_default=_BY_PRESET)]
    liquidation_fee_bps: Annotated[Decimal, Variable(
        "LIQUIDATION_FEE_BPS", "100", forms.BASIS_POINTS,
        "Fee of each liquidation fill on top of the taker fee, in basis points.",
        shown_default=_BY_PRESET)]
    shared_depth: Annotated[str, Variable(
        "SHARED_DEPTH", "off", forms.one_of("on", "off"),
        "Whether depth that one account takes from a simulated book is also missing for the others.")]
    limit_fills: Annotated[str, Variable(
        "LIMIT_FILLS", "through", forms.one_of("touch", "through", "queue"),
        "When a resting order fills. `touch`: in full, once the mark reaches its limit; `through`: once the best "
        "opposite price does, up to the quantity shown there; `queue`: like `through`, after the orders ahead of it.")]
    latency_ms: Annotated[int, Variable(
        "SIM_LATENCY_MS", "200", forms.whole_number(0, 60_000),
        "How long an order takes to reach the simulated market, in milliseconds.",
        shown_default=_BY_PRESET)]
    seed: Annotated[int | None, Variable(
        "SIM_SEED", "", forms.SEED,
        "Seed of the random draws of `synthetic` and `replay`. A given seed counts as public; without one, the service "
        "draws a secret seed for a new database and keeps it there.", shown_default="a secret one for each database")]
    max_accounts: Annotated[int, Variable(
        "SIM_MAX_ACCOUNTS", "1000", forms.whole_number(1, 1_000_000), "Maximum number of accounts that callers "
        "may open by placing orders; models have a separate limit of the same size.")]
    api_token: Annotated[Secret | None, Variable(
        "API_TOKEN", "", forms.SECRET,
        "When set, procedures that change something need `Authorization: Bearer <token>`.")]
    read_token: Annotated[Secret | None, Variable(
        "READ_TOKEN", "", forms.SECRET,
        "When set, everything except /health and /health/live needs this token, API_TOKEN or a key with the scope "
        "`read`: as `Authorization: Bearer <token>`, or as the password when a browser prompts for one.")]
    unsafe_open: Annotated[str, Variable(
        "UNSAFE_OPEN", "off", forms.one_of("on", "off"),
        "`on`: start without API_TOKEN even if other machines can reach HOST, because a proxy guards the port.")]
    max_parallel_models: Annotated[int, Variable(
        "MAX_PARALLEL_MODELS", "8", forms.whole_number(1, 256),
        "How many models with the same name at the same provider may be invoked at the same time.")]
    run_tokens_max: Annotated[int, Variable(
        "RUN_TOKENS_MAX", "60000", forms.whole_number(1_000, 100_000_000),
        "Tokens that one invocation of a model may spend, prompts and answers combined.")]
    answer_tokens_max: Annotated[int, Variable(
        "ANSWER_TOKENS_MAX", "8192", forms.whole_number(256, 1_000_000),
        "Tokens that one answer of a model may have, including its reasoning.")]
    attempt_timeout_s: Annotated[int, Variable(
        "AI_ATTEMPT_TIMEOUT_S", "120", forms.whole_number(5, 600),
        "How long one request to an AI provider may take, in seconds; a model may have its own limit.")]
    ai_budget_usd_per_day: Annotated[Decimal | None, Variable(
        "AI_BUDGET_USD_PER_DAY", "", forms.USD_OR_OFF,
        "What all AI models together may cost per UTC day, in USD, or `off`. Beyond it they only manage their "
        "positions, or pause, as the models file says.", shown_default="off")]
    max_daily_loss_percent: Annotated[Decimal | None, Variable(
        "MAX_DAILY_LOSS_PERCENT", "", forms.PERCENT_OR_OFF,
        "Loss within a UTC day that halts an account, in percent of the day's opening equity, or `off`.",
        live_default="10", shown_default="off; live 10")]
    max_drawdown_percent: Annotated[Decimal | None, Variable(
        "MAX_DRAWDOWN_PERCENT", "", forms.PERCENT_OR_OFF,
        "Drawdown from the peak equity of its run that halts an account, in percent, or `off`.",
        live_default="25", shown_default="off; live 25")]
    max_total_daily_loss_percent: Annotated[Decimal | None, Variable(
        "MAX_TOTAL_DAILY_LOSS_PERCENT", "", forms.PERCENT_OR_OFF,
        "Loss of all accounts together within a UTC day that halts all of them, in percent, or `off`.",
        live_default="10", shown_default="off; live 10")]
    max_total_drawdown_percent: Annotated[Decimal | None, Variable(
        "MAX_TOTAL_DRAWDOWN_PERCENT", "", forms.PERCENT_OR_OFF,
        "Drawdown of all accounts together from their peak equity that halts all of them, in percent, or `off`.",
        live_default="20", shown_default="off; live 20")]
    flatten_on_limit: Annotated[str, Variable(
        "FLATTEN_ON_LIMIT", "off", forms.one_of("on", "off"),
        "Whether a halt by one of these limits also closes positions.")]
    venue: Annotated[str, Variable(
        "VENUE", "lighter", forms.one_of("lighter", "hyperliquid"), "The trading venue.")]
    venue_url: Annotated[str | None, Variable(
        "VENUE_URL", "", forms.WEB_ADDRESS, "Base address of the venue, also for public market data.",
        shown_default="the venue's own")]
    venue_api_key_index: Annotated[int, Variable(
        "VENUE_API_KEY_INDEX", "4", forms.whole_number(4, 254),
        "Index of the API key at the venue, the same for every account there (live). The indexes 0 to 3 "
        "belong to the venue's own apps.")]
    venue_account_index: Annotated[str | None, Variable(
        "VENUE_ACCOUNT_INDEX", "", forms.VENUE_ACCOUNT,
        "Venue account of every model whose row names no other account (live): its index, or its address where the "
        "venue has addresses.")]
    venue_api_key: Annotated[Secret | None, Variable(
        "VENUE_API_KEY", "", forms.VENUE_KEY,
        "Private key of that API key, or of an agent wallet where the venue has those. It must be registered for every "
        "account that is traded and whose model names no key of its own (live).")]
    live_confirm: Annotated[str | None, Variable(
        "LIVE_CONFIRM", "", forms.VENUE_ACCOUNT,
        "Repeats VENUE_ACCOUNT_INDEX to confirm trading with real money; TRADING_MODE=live does not start without it.")]
    live_rehearsal: Annotated[str, Variable(
        "LIVE_REHEARSAL", "rehearsal/rehearsal.json", forms.REHEARSAL,
        "Report of `trader rehearse`, without which TRADING_MODE=live does not start: a file, or `override:NAME` with "
        "the name of who decides to start without one.")]
    ladder_file: Annotated[Path | None, Variable(
        "LADDER_FILE", "", forms.FOLDER,
        "TOML file with the rules and caps by which entrants climb from paper to live; `certificates` is beside it.",
        shown_default="none: no ladder and no caps")]
    taapi_api_key: Annotated[Secret | None, Variable(
        "TAAPI_API_KEY", "", forms.SECRET, "Key of taapi.io, for supplementary indicators (optional).")]
    anchor_url: Annotated[Secret | None, Variable(
        "ANCHOR_URL", "", forms.ANCHOR_ADDRESS,
        "Where to send the head of the chain of decisions once an hour: a webhook (`https://…`) or an append-only file "
        "(`file:///…`), out of reach of anyone who could change the database.")]
    notify_urls: Annotated[tuple[Secret, ...], Variable(
        "NOTIFY_URL", "", forms.NOTIFY_ADDRESSES,
        "Where to send alarms, separated by commas: a webhook that accepts JSON (`https://…`), an ntfy topic "
        "(`ntfy+https://…`), or a webhook that accepts Slack's format (`slack+https://…`) or Telegram's "
        "(`telegram+https://…?chat_id=…`). ntfy.sh, hooks.slack.com and api.telegram.org need no prefix.")]
    heartbeat_url: Annotated[Secret | None, Variable(
        "HEARTBEAT_URL", "", forms.WEB_SECRET,
        "Address of a dead man's switch service, requested (GET) once a minute while the service is healthy.")]
    disk_alarm_mb: Annotated[int, Variable(
        "DISK_ALARM_MB", "1024", forms.whole_number(0, 1_000_000_000),
        "Send an alarm when the disk of the working folder has less free space than this, in MB; 0 turns it off.")]
    snapshot_retention_days: Annotated[int, Variable(
        "SNAPSHOT_RETENTION_DAYS", "35", forms.whole_number(1, 3650),
        "How long raw portfolio snapshots are kept, in days; hourly averages are kept for good.")]
    candle_retention_days: Annotated[int, Variable(
        "CANDLE_RETENTION_DAYS", "90", forms.whole_number(1, 3650),
        "How long one-minute candles are kept for charts, in days; hourly candles are kept for good.")]
    http_connections_max: Annotated[int, Variable(
        "HTTP_CONNECTIONS_MAX", "4096", forms.whole_number(16, 1_000_000),
        "How many connections may be open; beyond that, the connection that has been idle longest is closed.")]
    dashboard: Annotated[str, Variable(
        "DASHBOARD", "on", forms.one_of("on", "off"),
        "Whether `GET /` is the dashboard; `off`: it is a short JSON list of the service's addresses.")]
    public: Annotated[str, Variable(
        "PUBLIC", "off", forms.one_of("on", "off"),
        "`on`: the service is read-only for callers without API_TOKEN, and prompts of models are hidden from them.")]
    manual_orders: Annotated[str, Variable(
        "MANUAL_ORDERS", "on", forms.one_of("on", "off"),
        "Whether `simulator.placeOrder` may trade the accounts of models. Such an order is marked `manual` and takes "
        "the model off every board until its account is reset.")]
    webhook_loopback: Annotated[str, Variable(
        "WEBHOOK_LOOPBACK", "off", forms.one_of("on", "off"),
        "Whether webhooks of external agents may run on this machine, without TLS if they do. All others are called "
        "over HTTPS at public addresses only.")]
    metrics: Annotated[str, Variable(
        "METRICS", "on", forms.one_of("on", "off"), "Whether `GET /metrics` serves figures in the Prometheus format.")]
    log_level: Annotated[str, Variable(
        "LOG_LEVEL", "info", forms.one_of("debug", "info", "warning", "error"), "Lowest level to log.")]
    log_format: Annotated[str, Variable(
        "LOG_FORMAT", "", forms.one_of("console", "json"), "`console` or `json`.",
        shown_default="console on a terminal, else json")]
    # fmt: on
    providers: Mapping[str, ProviderSettings]
    demo: bool
    demo_history: bool = False
    cors_credentials: bool = True

    @classmethod
    def load(
        cls, environ: Mapping[str, str], dotenv: Path | None, *, demo: bool, demo_history: bool = False
    ) -> "Settings":
        """Read the settings; `environ` takes precedence over the file, and a blank value counts as unset.

        :raises SettingsError: with all mistakes at once
        """
        file = read_dotenv(dotenv)
        texts = merged_texts(environ, file.values)
        problems = [*file.problems, *find_unknown(file.values, environ, NAMES)[0]]
        effective = effective_texts(environ, file.values, demo=demo)
        values: dict[str, Any] = {
            field: parse_setting(variable.name, variable.form, effective[variable.name].text, problems)
            for field, variable in VARIABLES.items()
        }
        values["providers"] = read_providers(texts, problems)
        problems += find_contradictions(values, texts, demo=demo)
        if problems:
            problems += [PROVIDER_NEEDED] if lacks_provider(values, texts, demo=demo) else []
            raise SettingsError(problems)
        values["cors_credentials"] = effective["CORS_ORIGINS"].source != "--demo"
        values["server_url"] = values["server_url"] or local_address(values["host"], values["port"])
        values["allowed_hosts"] = values["allowed_hosts"] or ()
        values["notify_urls"] = values["notify_urls"] or ()
        values["log_format"] = values["log_format"] or ("console" if sys.stderr.isatty() else "json")
        return cls(**values, demo=demo, demo_history=demo_history)


def require_provider(settings: Settings) -> None:
    """Check that settings that need an AI provider name one.

    :raises SettingsError: they name no provider
    """
    if lacks_provider(msgspec.structs.asdict(settings), demo=settings.demo):
        raise SettingsError([PROVIDER_NEEDED])


VARIABLES: Final[Mapping[str, Variable]] = {
    field: hint.__metadata__[0]
    for field, hint in get_type_hints(Settings, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""The variable of each field of `Settings`."""

EARLIER_NAMES: Final = {"MARKET_SYMBOLS": "MARKETS"}
"""Earlier names of variables, still read; the present name takes precedence."""

NAMES: Final = (*(variable.name for variable in VARIABLES.values()), *EARLIER_NAMES)
"""The names of all settings except the AI providers'."""


def effective_texts(environ: Mapping[str, str], file: Mapping[str, str], *, demo: bool) -> dict[str, EffectiveText]:
    """Return the text of every setting by name: from the environment, from the file, or the default."""
    given = merged_texts(environ, file)
    is_live = given.get("TRADING_MODE") == "live"
    follows_venue = given.get("MARKET_SOURCE", "synthetic" if demo else "venue") == "venue"
    venue = PRESET_VENUES.get(given.get("VENUE", VARIABLES["venue"].default)) if follows_venue else None
    preset = given.get("VENUE_PRESET", "default" if venue is None else next(iter(venue.presets)))
    texts = {}
    for variable in VARIABLES.values():
        name, special = variable.name, variable.demo_default if demo else variable.live_default if is_live else None
        if name in given:
            texts[name] = EffectiveText(given[name], "environment" if name in merged_texts(environ, {}) else "file")
        elif special:
            texts[name] = EffectiveText(special, "--demo" if demo else "TRADING_MODE=live")
        elif name == "VENUE_PRESET":
            texts[name] = EffectiveText(preset, "MARKET_SOURCE")
        elif name in PRESETS.get(preset, {}):
            texts[name] = EffectiveText(PRESETS[preset][name], f"VENUE_PRESET={preset}")
        else:
            texts[name] = EffectiveText(variable.default, "default")
    return texts


SECRET_NAMES: Final = {variable.name for variable in VARIABLES.values() if variable.form.is_secret}

TOKEN_CHARACTERS: Final = 16
"""An API_TOKEN shorter than this can be guessed."""


def find_misspelled(environ: Mapping[str, str], dotenv: Path | None) -> tuple[str, ...]:
    """Return warnings about environment variables that resemble a setting but are not one."""
    return tuple(find_unknown(read_dotenv(dotenv).values, environ, NAMES)[1])


def find_risks(settings: Settings, dotenv: Path) -> list[str]:
    """Return security warnings about valid settings: who else could trade or read secrets."""
    risks = []
    token = settings.api_token
    if token is not None and len(token.reveal()) < TOKEN_CHARACTERS:
        risks.append(f"API_TOKEN is short: use at least {TOKEN_CHARACTERS} random characters")
    if not is_loopback(settings.host) and token is None and settings.public == "off":
        risks.append(f"HOST={settings.host} without API_TOKEN: anyone who reaches port {settings.port} can trade")
    in_file = read_dotenv(dotenv).values
    has_secrets = any(name in SECRET_NAMES or KEY_NAME.fullmatch(name) for name in in_file)
    if has_secrets and dotenv.stat().st_mode & stat.S_IROTH:
        risks.append(f"{dotenv} holds secrets, and every user of this machine can read it: chmod 600 {dotenv}")
    return risks


def find_unset(settings: Settings) -> list[str]:
    """Return warnings about what an operator of a service would miss; a demo needs none of it."""
    missed = {
        "NOTIFY_URL": (settings.notify_urls, "nobody is told of alarms"),
        "ANCHOR_URL": (settings.anchor_url, "nothing outside of this database proves where its record ends"),
        "AI_BUDGET_USD_PER_DAY": (settings.ai_budget_usd_per_day, "only the budgets of rows limit what models cost"),
    }
    return [f"{name} is not set: {text}" for name, (value, text) in missed.items() if not value and not settings.demo]


def read_some(environ: Mapping[str, str], dotenv: Path | None, *fields: str) -> list[Any]:
    """Read only these fields of `Settings`, so that a mistake in another field does not block an operator's command.

    :raises SettingsError: the text of one of these fields does not match its form
    """
    texts, problems = merged_texts(environ, read_dotenv(dotenv).values), list[str]()
    variables = [VARIABLES[field] for field in fields]
    values = [
        parse_setting(variable.name, variable.form, texts.get(variable.name, variable.default), problems)
        for variable in variables
    ]
    if problems:
        raise SettingsError(problems)
    return values


def read_database_url(environ: Mapping[str, str], dotenv: Path | None) -> str | None:
    """Read only DATABASE_URL; None if it is not set.

    :raises SettingsError: the text is not a database address
    """
    (url,) = read_some(environ, dotenv, "database_url")
    return None if url is None else str(url.reveal())


def merged_texts(environ: Mapping[str, str], file: Mapping[str, str]) -> dict[str, str]:
    """Return the texts that are set; a blank text in the environment does not hide one in the file."""
    texts = {name: text.strip() for name, text in (*file.items(), *environ.items()) if text.strip()}
    kind, _, venue = texts.get("MARKET_SOURCE", "").partition(":")
    if kind == "venue" and venue == texts.get("VENUE", venue) != "":  # with another VENUE, its form refuses it
        texts |= {"MARKET_SOURCE": kind, "VENUE": venue}
    return {EARLIER_NAMES[name]: texts[name] for name in EARLIER_NAMES.keys() & texts.keys()} | texts
