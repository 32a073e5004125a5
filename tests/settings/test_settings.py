"""Settings: each form, every mistake at once, no secret shown, and documents that match the code."""

import ast
import copy
import importlib.util
import os
import pickle
import re
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.__main__ import main
from trader.core.errors import SettingsError
from trader.market.sources.rows import PRESET_MARKETS
from trader.settings.dotenv import parse_dotenv, quoted, read_dotenv
from trader.settings.forms import Secret
from trader.settings.providers import PROVIDERS
from trader.settings.settings import (
    PRESETS,
    VARIABLES,
    Settings,
    effective_texts,
    find_misspelled,
    find_risks,
    find_unset,
    read_database_url,
)

KEY = {"OPENAI_API_KEY": "sk-one"}
ROOT = Path(__file__).parents[2]


def load(values: Mapping[str, str] | None = None, *, demo: bool = False, dotenv: Path | None = None) -> Settings:
    return Settings.load({**KEY, **(values or {})}, dotenv, demo=demo)


def problems(values: Mapping[str, str], *, demo: bool = False, dotenv: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        Settings.load(values, dotenv, demo=demo)
    return caught.value.problems


def test_defaults_match_the_contract() -> None:
    settings = load()
    assert (settings.port, settings.host, settings.server_url) == (8081, "127.0.0.1", "http://localhost:8081")
    assert settings.database_url is None
    assert (settings.trading_mode, settings.market_source) == ("simulated", "venue")
    assert settings.markets == ("BTC", "ETH", "SOL")
    assert (settings.initial_capital, settings.quote_currency) == (Decimal(10000), "USDT")
    assert settings.refresh_interval_ms == 10000
    assert (settings.venue_preset, settings.taker_fee_bps, settings.maker_fee_bps) == (
        "lighter-standard",
        Decimal(0),
        Decimal(0),
    )
    assert (settings.latency_ms, settings.seed, settings.max_accounts) == (300, None, 1000)
    assert (settings.venue, settings.venue_url, settings.venue_api_key_index) == ("lighter", None, 4)
    assert (settings.snapshot_retention_days, settings.log_level) == (35, "info")
    assert settings.api_token is settings.venue_api_key is settings.taapi_api_key is None
    assert (settings.replay_speed, settings.replay_start, settings.replay_end) == (1, None, None)
    assert settings.max_parallel_models == 8
    assert not settings.demo


def test_a_preset_supplies_figures_that_no_setting_gives() -> None:
    synthetic = load({"MARKET_SOURCE": "synthetic"})
    assert (synthetic.venue_preset, synthetic.taker_fee_bps, synthetic.latency_ms) == ("default", Decimal(5), 200)
    assert (synthetic.liquidation_fee_bps, synthetic.funding_interval_h) == (Decimal(100), 1)
    binance = load({"VENUE_PRESET": "binance-usdm", "SIM_MAKER_FEE_BPS": "1"})
    assert (binance.taker_fee_bps, binance.maker_fee_bps, binance.funding_interval_h) == (Decimal(5), Decimal(1), 8)
    assert "VENUE_PRESET" in " ".join(problems({"VENUE_PRESET": "ftx"}, demo=True))
    assert "FUNDING_INTERVAL_H" in " ".join(problems({"FUNDING_INTERVAL_H": "5"}, demo=True))
    assert PRESETS.keys() == PRESET_MARKETS.keys()
    names = {variable.name for variable in VARIABLES.values()}
    assert all(figures.keys() <= names for figures in PRESETS.values())


def test_with_the_venues_prices_the_figures_are_the_venues() -> None:
    texts = effective_texts({"VENUE": "hyperliquid"}, {}, demo=False)
    assert texts["VENUE_PRESET"] == ("hyperliquid", "MARKET_SOURCE")
    assert texts["SIM_TAKER_FEE_BPS"] == ("4.5", "VENUE_PRESET=hyperliquid")
    assert effective_texts({"VENUE": "hyperliquid"}, {}, demo=True)["VENUE_PRESET"].text == "default"


def test_a_source_may_name_its_venue() -> None:
    settings = load({"MARKET_SOURCE": "venue:hyperliquid"})
    assert (settings.market_source, settings.venue, settings.venue_preset) == ("venue", "hyperliquid", "hyperliquid")
    assert load({"MARKET_SOURCE": "venue:hyperliquid", "VENUE": "hyperliquid"}) == settings
    (problem,) = problems({**KEY, "MARKET_SOURCE": "venue:hyperliquid", "VENUE": "lighter"})
    assert problem.startswith("MARKET_SOURCE: expected venue, venue:<VENUE>, ")
    (problem,) = problems({**KEY, "MARKET_SOURCE": "venue:binance"})
    assert problem.startswith("VENUE: expected one of lighter, hyperliquid")


def test_demo_needs_nothing() -> None:
    settings = Settings.load({}, None, demo=True)
    assert settings.demo
    assert settings.market_source == "synthetic"
    assert settings.providers == {}
    assert Settings.load({"MARKET_SOURCE": "replay:."}, None, demo=True).market_source == "replay:."


def test_settings_are_immutable() -> None:
    with pytest.raises(AttributeError):
        load().port = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        load().providers["openai"] = load().providers["openai"]  # type: ignore[index]


GOOD = [
    ("PORT", "0", "port", 0),
    ("PORT", " 65535 ", "port", 65535),
    ("HOST", "::1", "host", "::1"),
    ("HOST", "127.3.2.1", "host", "127.3.2.1"),
    ("SERVER_URL", "https://trader.example.org/", "server_url", "https://trader.example.org"),
    ("DATABASE_URL", "postgres://u:p%40@h:1/d?sslmode=require", "database_url", Secret("postgres://u:p%40@h:1/d?sslmode=require")),
    ("DATABASE_URL", "postgresql://u@/d?host=/run/pg", "database_url", Secret("postgresql://u@/d?host=/run/pg")),
    ("DATABASE_URL", "postgresql://u@[::1]:5/d", "database_url", Secret("postgresql://u@[::1]:5/d")),
    ("CORS_ORIGINS", "none", "cors_origins", ()),
    ("CORS_ORIGINS", "https://a.example/, http://[::1]:3000/,https://a.example", "cors_origins",
     ("https://a.example", "http://[::1]:3000")),
    ("CORS_ORIGINS", "https://A.example , http://[::1]:3000,https://a.example", "cors_origins",
     ("https://a.example", "http://[::1]:3000")),
    ("MARKET_SOURCE", "replay:../", "market_source", "replay:../"),
    ("MARKETS", "btc, ETH/USDT,btc", "markets", ("BTC", "ETH/USDT")),
    ("MARKET_SYMBOLS", "SOL", "markets", ("SOL",)),
    ("REPLAY_SPEED", "0", "replay_speed", 0.0),
    ("REPLAY_SPEED", "1.5", "replay_speed", 1.5),
    ("REPLAY_START", "2025-01-02", "replay_start", datetime(2025, 1, 2, tzinfo=UTC)),
    ("REPLAY_END", "2025-01-02T03:00:00+02:00", "replay_end", datetime(2025, 1, 2, 1, tzinfo=UTC)),
    ("SIM_INITIAL_CAPITAL", "1000000000", "initial_capital", Decimal(10**9)),
    ("SIM_INITIAL_CAPITAL", "0.01", "initial_capital", Decimal("0.01")),
    ("SIM_QUOTE_CURRENCY", "usdc", "quote_currency", "USDC"),
    ("SIM_TAKER_FEE_BPS", "0", "taker_fee_bps", Decimal(0)),
    ("SIM_MAKER_FEE_BPS", "2.5", "maker_fee_bps", Decimal("2.5")),
    ("SIM_TAKER_FEE_BPS", "0.1234560", "taker_fee_bps", Decimal("0.123456")),
    ("SIM_SEED", str(2**128 - 1), "seed", 2**128 - 1),
    ("LOG_FORMAT", "json", "log_format", "json"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "field", "value"), GOOD)
def test_valid_values_are_read(name: str, text: str, field: str, value: object) -> None:
    assert getattr(load({name: text}), field) == value


BAD = [
    ("PORT", "65536"), ("PORT", "-1"), ("PORT", "8081.0"), ("PORT", "8_081"), ("PORT", "٨٠٨١"), ("PORT", "eight"),
    ("HOST", "a b"), ("HOST", "http://x"), ("HOST", "256.1.1.1"), ("HOST", "-x"),
    ("SERVER_URL", "localhost:8081"), ("SERVER_URL", "ftp://x"), ("SERVER_URL", "https://x/?q=1"),
    ("SERVER_URL", "http://x:99999"), ("SERVER_URL", "http://x:0"), ("SERVER_URL", "http://"),
    ("DATABASE_URL", "mysql://h/d"), ("DATABASE_URL", "postgresql://h"), ("DATABASE_URL", "postgresql://h:x/d"),
    ("DATABASE_URL", "postgresql://u:p/w@h/d"), ("DATABASE_URL", "postgresql://u:p#w@h/d"),
    ("DATABASE_URL", "postgresql://u:p@w@h/d"), ("DATABASE_URL", "host=h dbname=d"),
    ("CORS_ORIGINS", "*"), ("CORS_ORIGINS", "null"), ("CORS_ORIGINS", "localhost:3000"),
    ("CORS_ORIGINS", "http://localhost:3000/x"), ("CORS_ORIGINS", "http://localhost:3000,"),
    ("CORS_ORIGINS", "http://localhost:3000//"), ("CORS_ORIGINS", "/"),
    ("CORS_ORIGINS", "https://*.example.org"), ("CORS_ORIGINS", "https://u@example.org"),
    ("CORS_ORIGINS", "https://example.org:443"), ("CORS_ORIGINS", "http://example.org:80"),
    ("CORS_ORIGINS", "http://example.org:"), ("CORS_ORIGINS", "ws://example.org"), ("CORS_ORIGINS", "http://a b"),
    ("TRADING_MODE", "paper"), ("TRADING_MODE", "Live"),
    ("MARKET_SOURCE", "replay:"), ("MARKET_SOURCE", "binance"), ("MARKET_SOURCE", "replay"),
    ("MARKETS", "BTC,,ETH"), ("MARKETS", "BTC;ETH"), ("MARKETS", "B/"),
    ("REPLAY_SPEED", "-1"), ("REPLAY_SPEED", "nan"), ("REPLAY_SPEED", "1e3"), ("REPLAY_START", "yesterday"),
    ("SIM_INITIAL_CAPITAL", "0"), ("SIM_INITIAL_CAPITAL", "-5"), ("SIM_INITIAL_CAPITAL", "1000000000.01"),
    ("SIM_INITIAL_CAPITAL", "NaN"), ("SIM_INITIAL_CAPITAL", "Infinity"), ("SIM_INITIAL_CAPITAL", "1e4"),
    ("SIM_QUOTE_CURRENCY", "US$"), ("SIM_REFRESH_INTERVAL_MS", "0"), ("SIM_TAKER_FEE_BPS", "-0.1"),
    ("SIM_MAKER_FEE_BPS", "1001"), ("SIM_TAKER_FEE_BPS", "1.2345678"), ("SIM_LATENCY_MS", "-1"),
    ("SIM_SEED", "-1"), ("SIM_SEED", "0x10"), ("SIM_SEED", str(2**128)), ("SIM_MAX_ACCOUNTS", "0"),
    ("API_TOKEN", "two words"), ("API_TOKEN", "schlüssel"),
    ("MAX_PARALLEL_MODELS", "0"), ("MAX_DRAWDOWN_PERCENT", "0"), ("MAX_DAILY_LOSS_PERCENT", "100.1"),
    ("MAX_TOTAL_DRAWDOWN_PERCENT", "none"), ("FLATTEN_ON_LIMIT", "yes"),
    ("VENUE", "binance"), ("VENUE_URL", "x"), ("VENUE_API_KEY_INDEX", "255"), ("VENUE_API_KEY_INDEX", "3"),
    ("VENUE_ACCOUNT_INDEX", "-1"), ("SNAPSHOT_RETENTION_DAYS", "0"), ("LOG_LEVEL", "loud"), ("LOG_FORMAT", "xml"),
    ("OPENAI_API_KEY_2", "a b"), ("NIM_BASE_URL", "localhost"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), BAD)
def test_the_problem_of_an_invalid_value_names_it_and_the_expected_form(name: str, text: str) -> None:
    (problem,) = problems({**KEY, name: text})
    assert problem.startswith(f"{name}: expected ")


def test_every_mistake_is_reported_together() -> None:
    reported = problems(dict(BAD))
    names = {problem.partition(":")[0] for problem in reported}
    assert {name for name, _ in BAD} <= names


def test_blank_values_count_as_unset() -> None:
    assert load({"PORT": "", "DATABASE_URL": "  ", "OPENAI_API_KEY_2": "", "NIM_API_KEY": " "}) == load()


# -- secrets ---------------------------------------------------------------------------------------------------------

SECRET = "s3cr3t-word"
VENUE_KEY = "0x" + "ab" * 40
SECRET_NAMES = [variable.name for variable in VARIABLES.values() if variable.form.is_secret]


def test_every_secret_is_marked() -> None:
    assert set(SECRET_NAMES) == {
        "DATABASE_URL", "API_TOKEN", "VENUE_API_KEY", "TAAPI_API_KEY", "ANCHOR_URL", "NOTIFY_URL", "HEARTBEAT_URL",
        "READ_TOKEN",
    }  # fmt: skip


def test_addresses_of_notifications() -> None:
    text = f"https://u:{SECRET}@h/x, ntfy+http://h/topic ,https://api.telegram.org/bot{SECRET}/sendMessage?chat_id=1"
    settings = load({"NOTIFY_URL": text})
    assert [url.reveal() for url in settings.notify_urls] == [part.strip() for part in text.split(",")]
    assert SECRET not in f"{settings!r}"
    assert load().notify_urls == ()
    bot = f"telegram+https://h/bot{SECRET}/sendMessage"
    for wrong in ("h", "ftp://h", "discord+https://h/x", "https://h,", bot, f"https://api.telegram.org/bot{SECRET}/x"):
        (problem,) = problems({**KEY, "NOTIFY_URL": wrong})
        assert problem.startswith("NOTIFY_URL: expected addresses separated by commas")
        assert SECRET not in problem


def test_no_secret_is_shown() -> None:
    settings = load({
        "DATABASE_URL": f"postgresql://u:{SECRET}@h/d", "API_TOKEN": SECRET, "VENUE_API_KEY": VENUE_KEY,
        "TAAPI_API_KEY": SECRET, "NIM_API_KEY1": SECRET, "NIM_BASE_URL": "http://localhost:1",
    })  # fmt: skip
    shown = f"{settings!r} {settings} {settings.providers} {settings.api_token} {settings.api_token!r}"
    assert SECRET not in shown
    assert VENUE_KEY not in shown
    assert settings.api_token is not None
    assert settings.api_token.reveal() == SECRET
    assert settings.database_url == Secret(f"postgresql://u:{SECRET}@h/d")
    assert settings.providers["nim"].keys == (Secret(SECRET),)
    assert settings.api_token != Secret("other")


def test_a_secret_cannot_be_pickled() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(Secret(SECRET))
    with pytest.raises(TypeError):
        copy.deepcopy(Secret(SECRET))


@pytest.mark.parametrize("name", [*SECRET_NAMES, "OPENAI_API_KEY", "OPENAI_API_KEY_7", "OPENAI_BASE_URL"])
def test_an_invalid_secret_is_not_shown(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load({name: f"{SECRET} {SECRET}"}, None, demo=True)
    assert name in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_the_password_in_an_invalid_address_is_not_shown() -> None:
    assert SECRET not in str(problems({**KEY, "SERVER_URL": f"https://u:{SECRET}@h"}))


# -- providers -------------------------------------------------------------------------------------------------------


def test_a_replay_needs_no_provider(tmp_path: Path) -> None:
    settings = Settings.load({"MARKET_SOURCE": f"replay:{tmp_path}"}, None, demo=False)
    assert settings.providers == {}


def test_a_missing_provider_is_named_along_with_other_mistakes_and_every_solution() -> None:
    _, problem = problems({"PORT": "x"})
    for provider in PROVIDERS:
        assert f"{provider.upper()}_API_KEY" in problem
        assert f"{provider.upper()}_BASE_URL" in problem
    assert "--demo" in problem
    assert not Settings.load({}, None, demo=False).providers, "a model of the database may have one"


def test_keys_are_ordered_by_number_and_unique() -> None:
    written = {f"NIM_API_KEY{suffix}": key for suffix, key in
               {"10": "ten", "_2": "two", "": "zero", "1": "one", "_9": "nine", "3": "two"}.items()}  # fmt: skip
    keys = Settings.load(written, None, demo=False).providers["nim"].keys
    assert [key.reveal() for key in keys] == ["zero", "one", "two", "nine", "ten"]


def test_one_local_server_is_a_provider() -> None:
    settings = Settings.load({"OPENAI_BASE_URL": "http://localhost:11434/v1/"}, None, demo=False)
    assert set(settings.providers) == {"openai"}
    assert settings.providers["openai"].base_url == "http://localhost:11434/v1"
    assert settings.providers["openai"].keys == ()


def test_a_wrong_key_alone_is_reported_once() -> None:
    assert len(problems({"MISTRAL_API_KEY": "a b"})) == 1


def test_an_invalid_venue_key_does_not_hide_the_missing_provider() -> None:
    assert len(problems({"VENUE_API_KEY": "a b"})) == 2


# -- contradictions --------------------------------------------------------------------------------------------------


LIVE = {
    "TRADING_MODE": "live", "VENUE_ACCOUNT_INDEX": "0", "LIVE_CONFIRM": "0", "VENUE_API_KEY": VENUE_KEY,
}  # fmt: skip


def test_live_needs_the_venues_credentials() -> None:
    reported = problems({**KEY, "TRADING_MODE": "live"})
    assert [problem.partition(":")[0] for problem in reported] == ["VENUE_ACCOUNT_INDEX", "VENUE_API_KEY"]
    assert load(LIVE).venue_account_index == "0"
    address = "0x" + "Ab" * 20
    assert (
        load({**LIVE, **dict.fromkeys(("VENUE_ACCOUNT_INDEX", "LIVE_CONFIRM"), address)}).live_confirm
        == address.lower()
    )
    assert len(problems({**KEY, **LIVE, "VENUE_ACCOUNT_INDEX": "0x12"})) == 1
    assert "MARKET_SOURCE" in problems({**KEY, **LIVE, "MARKET_SOURCE": "synthetic"})[0]
    assert "TRADING_MODE" in problems({**KEY, **LIVE}, demo=True)[0]


LIMITS = ("daily_loss", "drawdown", "total_daily_loss", "total_drawdown")


def limits(environ: dict[str, str]) -> list[Decimal | None]:
    settings = load({**KEY, **environ})
    return [getattr(settings, f"max_{name}_percent") for name in LIMITS]


def test_loss_limits_are_off_on_paper_and_have_defaults_live() -> None:
    assert limits({}) == [None] * 4
    assert limits({"MAX_DRAWDOWN_PERCENT": "12.5"}) == [None, Decimal("12.5"), None, None]
    assert limits(LIVE) == [10, 25, 10, 20]
    assert limits({**LIVE, "MAX_DAILY_LOSS_PERCENT": "off", "MAX_TOTAL_DRAWDOWN_PERCENT": "3"}) == [None, 25, 10, 3]


def test_the_database_address_can_be_read_alone(tmp_path: Path) -> None:
    """Another invalid setting must not block somebody who needs to stop a service."""
    file = tmp_path / ".env"
    assert read_database_url({}, file) is None
    file.write_text("PORT=nonsense\nDATABASE_URL=postgresql://file@h/d\n")
    assert read_database_url({}, file) == "postgresql://file@h/d"
    assert read_database_url({"DATABASE_URL": "postgresql://env@h/d"}, file) == "postgresql://env@h/d"
    with pytest.raises(SettingsError, match=r"^DATABASE_URL: expected postgresql://user") as caught:
        read_database_url({"DATABASE_URL": "mysql://s3cr3t@h/d"}, file)
    assert "s3cr3t" not in str(caught.value)


def test_replay_ends_after_its_start() -> None:
    assert "REPLAY_END" in problems({**KEY, "REPLAY_START": "2025-01-02", "REPLAY_END": "2025-01-02"})[0]
    settings = load({"REPLAY_START": "2025-01-02", "REPLAY_END": "2025-01-03"})
    assert settings.replay_start
    assert settings.replay_end == settings.replay_start + timedelta(days=1)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "http://localhost:8081"),
        ("192.0.2.1", "http://192.0.2.1:8081"),
        ("fe80::1", "http://[fe80::1]:8081"),
    ],
)
def test_server_url_follows_the_listen_address(host: str, address: str) -> None:
    assert load({"HOST": host, "UNSAFE_OPEN": "on"}).server_url == address


# -- .env ------------------------------------------------------------------------------------------------------------


def test_dotenv_forms() -> None:
    parsed = parse_dotenv(
        "# comment\n\nA=1\n export B = two words # comment\nC='as # it \\n is' # comment\n"
        'D="line\\nbreak \\"quoted\\" \\\\ #"\nE=\nF=x#y\r\nG=#only\nA=again\nH=""\n'
    )
    assert parsed.problems == ()
    assert parsed.values == {
        "A": "again", "B": "two words", "C": "as # it \\n is", "D": 'line\nbreak "quoted" \\ #', "E": "", "F": "x#y",
        "G": "", "H": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    "line", [f"{SECRET}", f"A B={SECRET}", f"A='{SECRET}", f'A="{SECRET}', f'A="{SECRET}" x', "=x", "1A=x"]
)
def test_malformed_lines_are_reported_by_number_without_their_text(line: str) -> None:
    parsed = parse_dotenv(f"GOOD=1\n{line}\n")
    (problem,) = parsed.problems
    assert problem.startswith(".env line 2: expected ")
    assert SECRET not in problem
    assert parsed.values == {"GOOD": "1"}


@given(st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs", "Cc", "Zl", "Zp"])))
def test_any_value_survives_double_quotes(value: str) -> None:
    assert parse_dotenv(f"A={quoted(value)}") == ({"A": value}, ())
    lines = f"{value}\n{value}"
    assert parse_dotenv(f"A={quoted(lines)}") == ({"A": lines}, ())


@given(st.text())
def test_parsing_never_fails(text: str) -> None:
    parsed = parse_dotenv(text)
    assert len(parsed.problems) <= text.count("\n") + 1


def test_the_environment_takes_precedence_over_the_file(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("PORT=1\nHOST=10.0.0.1\nUNSAFE_OPEN=on\nSIM_SEED=3\n")
    settings = load({"PORT": "2", "SIM_SEED": ""}, dotenv=dotenv)
    assert (settings.port, settings.host, settings.seed) == (2, "10.0.0.1", 3)


def test_mistakes_in_the_file_are_reported_with_the_others(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("PORT=x\nnonsense\nSIM_INITIAL_CAPTIAL=5\n")
    reported = problems(KEY, dotenv=dotenv)
    assert len(reported) == 3
    assert ".env line 2" in reported[0]
    assert "SIM_INITIAL_CAPTIAL: expected the name of a setting; did you mean SIM_INITIAL_CAPITAL?" in reported
    assert any(problem.startswith("PORT:") for problem in reported)


RESEMBLING = {
    "SIM_TAKER_FEES": "did you mean SIM_TAKER_FEE_BPS?",
    "VENUE_COLOR_OF_LOGO": "`trader check --settings` lists them",
    "DATABASE_URLS": "did you mean DATABASE_URL?",
    "DATABASE_URL_RO": "did you mean DATABASE_URL?",
    "BASE_URL": "did you mean NIM_BASE_URL?",
    "HOSTS": "did you mean HOST?",
    "OPENAI_API_BASE": "did you mean OPENAI_API_KEY?",
    "VENUE_BASE_URL": "did you mean VENUE_URL?",
    "TAAPI_KEY": "did you mean TAAPI_API_KEY?",
    "PORTT": "did you mean PORT?",
    "TRADE_MODE": "did you mean TRADING_MODE?",
    "ROLES": "did you mean ROLE?",
}


@pytest.mark.parametrize(("name", "hint"), RESEMBLING.items())
def test_a_name_similar_to_a_setting_is_a_warning_in_the_environment_and_a_mistake_in_the_file(
    name: str, hint: str, tmp_path: Path
) -> None:
    dotenv = tmp_path / ".env"
    load({name: "5"}, dotenv=dotenv)
    warning = f"{name} in the environment is not a setting and has no effect; {hint}"
    assert find_misspelled({**KEY, name: "5"}, dotenv) == (warning,)
    dotenv.write_text(f"{name}=5\n")
    assert problems({**KEY, name: "5"}, dotenv=dotenv) == (f"{name}: expected the name of a setting; {hint}",)
    assert find_misspelled({**KEY, name: "5"}, dotenv) == ()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MAX_DAILY_LOSS", "MAX_DAILY_LOSS_PERCENT"),
        ("MAX_DRAWDOWN", "MAX_DRAWDOWN_PERCENT"),
        ("DAILY_LOSS_LIMIT", "MAX_DAILY_LOSS_PERCENT"),
        ("max_drawdown_percent", "MAX_DRAWDOWN_PERCENT"),
        ("MAX_TOTAL_DRAWDWN_PERCENT", "MAX_TOTAL_DRAWDOWN_PERCENT"),
        ("FLATTEN_AT_LIMIT", "FLATTEN_ON_LIMIT"),
    ],
)
def test_a_misspelled_loss_limit_is_a_mistake_everywhere(name: str, meant: str, tmp_path: Path) -> None:
    expected = f"{name}: expected the name of a setting; did you mean {meant}?"
    assert problems({**KEY, name: "5"}) == (expected,)
    dotenv = tmp_path / ".env"
    dotenv.write_text(f"{name}=5\n")
    assert problems(KEY, dotenv=dotenv) == (expected,)


@pytest.mark.parametrize("name", ["max_daily_loss_percent", "flatten_on_limit", "max_total_drawdown_percent"])
def test_every_loss_limit_is_recognized_by_its_words(name: str) -> None:
    wrong = VARIABLES[name].name + "S"
    (problem,) = problems({**KEY, wrong: "5"})
    assert problem.startswith(f"{wrong}: expected the name of a setting")


def test_every_unknown_name_is_a_mistake_in_the_file_but_not_in_the_environment(
    tmp_path: Path,
) -> None:
    others = [
        "PATH", "HOME", "HOSTNAME", "HOSTTYPE", "LANG", "LOGNAME", "SHELL", "TERM", "USER", "PWD", "NOTIFY_SOCKET",
        "LISTEN_FDS", "INVOCATION_ID", "PGPORT", "PGHOST", "KUBERNETES_SERVICE_HOST", "KUBERNETES_PORT",
        "HTTPS_PROXY", "PYTHONPATH", "XDG_RUNTIME_DIR", "SSH_CONNECTION", "POSTGRES_PASSWORD", "HTTP_PROXY",
        "OPENAI_ORG_ID", "SIMULATION",
    ]  # fmt: skip
    load({**KEY, **dict.fromkeys(others, "x")})
    assert find_misspelled(dict.fromkeys(others, "x"), None) == ()
    dotenv = tmp_path / ".env"
    dotenv.write_text("UNRELATED_NAME=x\nGROQ_API_KEY=0123456789\n")
    assert problems(KEY, dotenv=dotenv) == (
        "UNRELATED_NAME: expected the name of a setting; `trader check --settings` lists them",
    )


@pytest.mark.parametrize("key", ["0x12", "g" * 80, "12 34"])
def test_a_venue_key_has_80_hexadecimal_digits_and_is_not_shown(key: str) -> None:
    (reported,) = problems({**KEY, "VENUE_API_KEY": key})
    assert (
        reported == "VENUE_API_KEY: expected the private key of an API key, 80 hexadecimal digits, or of a wallet, 64"
    )


def test_a_missing_recording_is_a_mistake(tmp_path: Path) -> None:
    (reported,) = problems({**KEY, "MARKET_SOURCE": f"replay:{tmp_path}/none"})
    assert reported == f"MARKET_SOURCE: expected an existing folder or file of candles, got '{tmp_path}/none'"
    load({**KEY, "MARKET_SOURCE": f"replay:{tmp_path}"})


def test_an_unreadable_file_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"A=\xff\n")
    assert "UTF-8" in read_dotenv(tmp_path / ".env").problems[0]
    assert "cannot be read" in read_dotenv(tmp_path).problems[0]
    assert read_dotenv(tmp_path / "missing") == ({}, ())


# -- the command and the documents -----------------------------------------------------------------------------------


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names = [*(variable.name for variable in VARIABLES.values()), *(f"{name.upper()}_API_KEY" for name in PROVIDERS)]
    for name in names:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("bare_environment")
def test_the_command_prints_every_mistake_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PORT", "x")
    monkeypatch.setenv("API_TOKEN", f"{SECRET} {SECRET}")
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "PORT: expected" in output.err
    assert "API_TOKEN: expected" in output.err
    assert "OPENROUTER_API_KEY" in output.err
    assert SECRET not in output.err


@pytest.mark.usefixtures("bare_environment")
def test_the_check_lists_every_setting_with_its_meaning_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--settings", "--demo"]) == 0
    shown = capsys.readouterr().out
    for variable in VARIABLES.values():
        assert re.search(rf"^{variable.name} ", shown, re.MULTILINE)
        assert " ".join(variable.default_text.split()) in " ".join(shown.split())
    assert main(["--no-such-thing"]) == 2


def _docs_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_config_docs", ROOT / "scripts" / "make_config_docs.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_match_the_definitions() -> None:
    docs = _docs_module()
    stale = [path.name for path, text in docs.documents().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run scripts/make_config_docs.py"


def test_the_example_file_is_valid_when_uncommented(tmp_path: Path) -> None:
    text = _docs_module().env_example()
    uncommented = re.sub(r"^# ([A-Z][A-Z0-9_]*=)", r"\1", text, flags=re.MULTILINE)
    assert parse_dotenv(uncommented).problems == ()
    (tmp_path / ".env").write_text(uncommented)
    names = set(parse_dotenv(uncommented).values)
    assert {variable.name for variable in VARIABLES.values()} <= names
    assert load(dotenv=tmp_path / ".env") == load()


RISKS = {"OPENAI_API_KEY": "k" * 30}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, []),
        ({"API_TOKEN": "secret"}, ["API_TOKEN is short"]),
        (
            {"HOST": "0.0.0.0", "UNSAFE_OPEN": "on"},
            ["HOST=0.0.0.0 without API_TOKEN"],
        ),
        ({"HOST": "0.0.0.0", "API_TOKEN": "x" * 16}, []),
        ({"HOST": "0.0.0.0", "PUBLIC": "on"}, []),
    ],
)
def test_settings_that_let_strangers_trade_are_named(
    tmp_path: Path, environ: dict[str, str], expected: list[str]
) -> None:
    risks = find_risks(load({**RISKS, **environ}), tmp_path / ".env")
    assert len(risks) == len(expected)
    assert all(risk.startswith(start) for risk, start in zip(risks, expected, strict=True))


def test_what_an_operator_would_miss_is_named_at_the_start() -> None:
    missed = [line.partition(" is not set: ")[0] for line in find_unset(load(RISKS))]
    assert missed == ["NOTIFY_URL", "ANCHOR_URL", "AI_BUDGET_USD_PER_DAY"]
    given = {"NOTIFY_URL": "https://x.example/n", "ANCHOR_URL": "https://x.example/a", "AI_BUDGET_USD_PER_DAY": "5"}
    assert find_unset(load({**RISKS, **given})) == []
    assert find_unset(Settings.load({}, None, demo=True)) == []


def test_secrets_that_every_user_of_the_machine_can_read_are_named(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("OPENAI_API_KEY_2=abc\n")
    dotenv.chmod(0o644)
    assert find_risks(load(RISKS), dotenv) == [
        f"{dotenv} holds secrets, and every user of this machine can read it: chmod 600 {dotenv}"
    ]
    dotenv.chmod(0o640)
    assert find_risks(load(RISKS), dotenv) == []
    dotenv.write_text("PORT=1\n")
    dotenv.chmod(0o644)
    assert find_risks(load(RISKS), dotenv) == []


def test_a_reader_needs_only_a_database() -> None:
    address = "postgresql://u@replica/trader"
    live = {"TRADING_MODE": "live", "VENUE_ACCOUNT_INDEX": "7"}
    for more in ({}, live):
        settings = Settings.load({"ROLE": "reader", "DATABASE_URL": address, **more}, None, demo=False)
        assert (settings.role, dict(settings.providers)) == ("reader", {})
    with pytest.raises(SettingsError) as caught:
        Settings.load({"ROLE": "reader"}, None, demo=False)
    assert caught.value.problems == (
        "DATABASE_URL: ROLE=reader needs the address of a leader's database or of a replica of it",
    )
    with pytest.raises(SettingsError):
        Settings.load({"ROLE": "replica", "DATABASE_URL": address}, None, demo=True)


def fields_read(module: str) -> set[str]:
    """The fields that a module reads: from anything called settings, or by name through `read_some`."""
    fields = set()
    for node in ast.walk(ast.parse(module)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=field, ctx=ast.Load()):
                fields |= {field} if owner.strip("_") == "settings" else set()
            case ast.Call(func=ast.Name(id="read_some"), args=[_, _, *names]):
                fields |= {str(name.value) for name in names if isinstance(name, ast.Constant)}
    return fields


@pytest.mark.slow
def test_every_setting_is_read_somewhere() -> None:
    definitions = {"settings.py", "setting_checks.py", "setting_forms.py"}
    modules = [path for path in (ROOT / "trader").rglob("*.py") if path.name not in definitions]
    read = set[str]().union(*(fields_read(path.read_text()) for path in modules))
    assert set(Settings.__struct_fields__) - read == {"live_confirm", "unsafe_open"}, "which are only checked at start"


def test_only_reads_of_the_settings_count() -> None:
    assert fields_read("port(context.settings.host, self._settings.port)") == {"host", "port"}
    assert fields_read("read_some(environ, file, 'role')\nother.seed\nsettings.seed = 1") == {"role"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_env_file_that_others_could_have_written_is_read_only_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(".env")
    file.write_text("PORT=9\n")
    file.chmod(0o664)  # by a group of its own, as many systems leave it
    assert main(["check", "--settings", "--demo"]) == 0
    changes: list[tuple[Callable[[], None], Callable[[], None], str]] = [
        (lambda: os.chown(file, 61_000, 0), lambda: os.chown(file, 0, 0), ".env belongs to another user (61000)"),
        (lambda: file.chmod(0o666), lambda: file.chmod(0o600), ".env can be changed by other users (chmod go-w .env)"),
        (lambda: tmp_path.chmod(0o777), lambda: tmp_path.chmod(0o700), f"{tmp_path} can be changed by other users"),
    ]
    for change, undo, reason in changes:
        change()
        for command in ("check --settings --demo", "status", "halt"):
            assert main(command.split()) == 2
            assert f".env is not read: {reason}" in capsys.readouterr().err
        assert main(["check", "--settings", "--demo", "--env-file", ".env"]) == 0
        undo()
    capsys.readouterr()
    assert main(["check", "--settings", "--demo"]) == 0
    assert "9" in capsys.readouterr().out
