"""A service for external agents on a fresh database, its commands, and the key of one agent."""

import asyncio
import json
from typing import Any

import pytest
from pytest_aiohttp.plugin import AiohttpClient
from support.agent_desk import AgentContext, Command, Desk
from support.served import make_app
from support.trading_floor import Floor

from trader.__main__ import main
from trader.api import openapi
from trader.operations import access
from trader.portfolio.analytics import Analytics
from trader.portfolio.run_statistics import CurrentRuns


@pytest.fixture
def command(dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command on the database of the test, and return its JSON."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setattr(access, "READ_EVERY_S", 0.0)  # a change takes effect at once

    async def run(*arguments: str, code: int = 0) -> Any:
        assert await asyncio.to_thread(main, [*arguments, "--json"]) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        return json.loads(out) if code == 0 else err

    return run


@pytest.fixture
async def desk(floor: Floor, aiohttp_client: AiohttpClient) -> Desk:
    await floor.agents.start()
    analytics = Analytics(floor.database, floor.exchange, floor.clock, CurrentRuns(floor.database))
    floor_parts = floor.settings, floor.clock, floor.market, floor.exchange
    agents = floor.agents, floor.agents.external
    context: Any = AgentContext(*floor_parts, floor.models, floor.invocations, *agents, analytics)
    pages = openapi.routes(floor.settings)
    return Desk(floor, await aiohttp_client(make_app(pages, context=context, database=floor.database)))


@pytest.fixture
async def key(desk: Desk, command: Command) -> str:
    added = await command("agents", "add", "scout", "--variant", "Apex", "--decisions", "9", "--requests", "6000")
    return str(added["key"])
