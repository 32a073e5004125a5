"""Commands on a database of their own, called in this process."""

import asyncio
from pathlib import Path

import pytest
from support.calls import Call, Said

from trader.__main__ import main


@pytest.fixture
def call(dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setenv("PORT", "0")  # so that no service of this machine is asked

    async def run(*arguments: str) -> Said:
        code = await asyncio.to_thread(main, arguments)  # the test has an event loop already
        return Said(code, *capsys.readouterr())

    return run
