"""TRADING_MODE=live: never paper fills that pass for real ones."""

import pytest

from trader.__main__ import main


def test_live_refuses_to_start_as_long_as_nothing_sends_orders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dsn: str
) -> None:
    for name, value in {
        "TRADING_MODE": "live",
        "VENUE_ACCOUNT_INDEX": "7",
        "VENUE_API_KEY": "0xs3cr3t",
        "OPENAI_BASE_URL": "http://127.0.0.1:9",
        "DATABASE_URL": dsn,
    }.items():
        monkeypatch.setenv(name, value)
    for arguments in ([], ["--check"]):
        assert main(arguments) == 1
        shown = capsys.readouterr().err
        assert "TRADING_MODE=live: this build sends no orders to a venue" in shown
        assert "s3cr3t" not in shown
