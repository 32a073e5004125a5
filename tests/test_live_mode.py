"""TRADING_MODE=live starts only when it is meant, with all that it needs."""

import importlib.util

import pytest

from trader.__main__ import main

SECRET = "5ec3e7" * 13 + "ab"
LIVE = {
    "TRADING_MODE": "live",
    "VENUE_ACCOUNT_INDEX": "7",
    "VENUE_API_KEY": SECRET,
    "VENUE_URL": "http://127.0.0.1:9",
    "OPENAI_BASE_URL": "http://127.0.0.1:9",
}


@pytest.mark.parametrize("confirmed", [{}, {"LIVE_CONFIRM": "8"}, {"LIVE_CONFIRM": "0"}])
@pytest.mark.parametrize("arguments", [[], ["--check"]])
def test_live_does_not_start_unless_the_account_is_confirmed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dsn: str,
    confirmed: dict[str, str],
    arguments: list[str],
) -> None:
    for name, value in {**LIVE, "DATABASE_URL": dsn, **confirmed}.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "TRADING_MODE=live trades real money" in shown
    assert "LIVE_CONFIRM=7" in shown
    assert SECRET not in shown


@pytest.mark.parametrize("missing", ["VENUE_ACCOUNT_INDEX", "VENUE_API_KEY"])
def test_live_needs_every_credential(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dsn: str, missing: str
) -> None:
    for name, value in {**LIVE, "DATABASE_URL": dsn, "LIVE_CONFIRM": "7"}.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    assert main([]) == 2
    assert f"{missing}: expected a value, which TRADING_MODE=live needs" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("lighter") is not None, reason="the extra `live` is installed")
def test_live_needs_the_venues_sdk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dsn: str
) -> None:
    for name, value in {**LIVE, "DATABASE_URL": dsn, "LIVE_CONFIRM": "7"}.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 1
    assert "TRADING_MODE=live needs the venue's SDK: pip install 'trader-service[live]'" in capsys.readouterr().err
