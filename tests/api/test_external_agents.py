"""Keys of external agents over HTTP: who may do what, how often, and what the commands change beside the service."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from pytest_aiohttp.plugin import AiohttpClient
from support.floor import Floor, open_floor
from support.manual_clock import ManualClock
from support.served import AppClient, make_app

from trader.__main__ import main
from trader.services.agents.schedule import Agents
from trader.services.exchange.paper import PaperExchange
from trader.services.market.feed import MarketFeed
from trader.services.operations import access
from trader.settings import Settings
from trader.store.database.pool import Database

Command = Callable[..., Awaitable[Any]]


class Desk:
    """A service on a trading floor, and callers with keys."""

    def __init__(self, floor: Floor, client: AppClient) -> None:
        self.floor = floor
        self.client = client
        self.retry_after: str | None = None

    async def call(self, name: str, key: str | None = None, status: int = 200, **fields: object) -> Any:
        headers: Mapping[str, str] = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.client.post(f"/api/rpc/{name}", json=fields, headers=headers) as response:
            answer = await response.json()
            assert response.status == status, answer
            self.retry_after = response.headers.get("Retry-After")
            return answer if status == 200 else answer["code"]


@dataclass
class AgentContext:
    """What the procedures of agents use of the context."""

    settings: Settings
    clock: ManualClock
    market: MarketFeed
    exchange: PaperExchange
    agents: Agents


@pytest.fixture
def command(dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command on the database of the test, and return its JSON."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setattr(access, "READ_EVERY_S", 0.0)  # a change counts at once

    async def run(*arguments: str, code: int = 0) -> Any:
        assert await asyncio.to_thread(main, [*arguments, "--json"]) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        return json.loads(out) if code == 0 else err

    return run


@pytest.fixture
async def floor(database: Database) -> AsyncIterator[Floor]:
    async with open_floor(database) as floor:
        yield floor


@pytest.fixture
async def desk(floor: Floor, aiohttp_client: AiohttpClient) -> Desk:
    await floor.agents.start()
    context = AgentContext(floor.settings, floor.clock, floor.market, floor.exchange, floor.agents)
    return Desk(floor, await aiohttp_client(make_app(context=context, database=floor.database)))


async def test_a_key_speaks_for_its_account_alone(desk: Desk, command: Command) -> None:
    scout = await command("agents", "add", "scout", "--variant", "Apex", "--owner", "alice", "--capital", "500")
    other = await command("agents", "add", "other", "--variant", "Contrarian")
    assert (scout["id"], scout["accountId"]) == ("scout", "scout")
    who = await desk.call("agent.whoami", scout["key"])
    assert (who["accountId"], who["variant"], who["owner"], who["scopes"]) == (
        "scout",
        "Apex",
        "alice",
        ["read", "trade"],
    )
    assert scout["key"].startswith(who["keyPrefix"])
    assert (await desk.call("agent.getAccount", scout["key"], accountId="scout"))["account"]["initialCapital"] == 500
    assert await desk.call("agent.getAccount", scout["key"], 403, accountId="other") == "FOREIGN_ACCOUNT"
    assert (await desk.call("agent.whoami", other["key"]))["accountId"] == "other"


async def test_an_account_of_an_agent_is_traded_by_its_key_alone(desk: Desk, command: Command) -> None:
    key = (await command("agents", "add", "scout", "--variant", "Apex"))["key"]
    await desk.call("agent.whoami", key)
    order: dict[str, Any] = {"symbol": "BTC", "side": "buy", "quantity": 0.01}
    assert await desk.call("simulator.placeOrder", None, 403, accountId="scout", **order) == "FOREIGN_ACCOUNT"
    assert await desk.call("simulator.resetAccount", None, 403, accountId="scout") == "FOREIGN_ACCOUNT"
    for account in ("scout", "default"):
        assert await desk.call("simulator.placeOrder", key, 403, accountId=account, **order) == "FORBIDDEN"
    assert (await desk.call("simulator.placeOrder", None, accountId="default", **order))["order"]["status"] == "filled"
    async with desk.floor.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests WHERE account_id = 'scout'") == 0


async def test_keys_are_rotated_and_revoked_beside_the_service(
    desk: Desk, command: Command, database: Database
) -> None:
    first = (await command("agents", "add", "scout", "--variant", "Apex"))["key"]
    assert await desk.call("agent.whoami", None, 401) == "UNAUTHORIZED"
    assert await desk.call("agent.whoami", first[:-1] + "x", 401) == "UNAUTHORIZED"
    assert await desk.call("agent.whoami", "tra_" + "x" * 43, 401) == "UNAUTHORIZED"
    second = (await command("agents", "rotate", "scout"))["key"]
    assert await desk.call("agent.whoami", first, 401) == "KEY_REVOKED"
    assert (await desk.call("agent.whoami", second))["agentId"] == "scout"
    assert (await command("agents", "revoke", "scout"))["revoked"] == 1
    assert await desk.call("agent.whoami", second, 401) == "KEY_REVOKED"
    assert "revoked" in await command("agents", "limits", "scout", "--requests", "5", code=1)
    assert "no external agent 'nobody'" in await command("agents", "rotate", "nobody", code=1)
    (listed,) = (await command("agents", "list"))["agents"]
    assert (listed["keyPrefix"], listed["revokedAt"] is None) == (second[:12], False)
    async with database.connection() as conn:
        kept = str(await conn.fetch("SELECT * FROM credentials"))
    assert first[12:] not in kept
    assert second[12:] not in kept


async def test_a_key_has_scopes_and_a_limit_of_requests(desk: Desk, command: Command) -> None:
    key = (await command("agents", "add", "scout", "--variant", "Apex", "--requests", "2", "--scopes", "trade"))["key"]
    assert await desk.call("agent.whoami", key, 403) == "MISSING_SCOPE"
    await command("agents", "limits", "scout", "--scopes", "read,trade")
    await desk.call("agent.whoami", key)
    assert await desk.call("agent.whoami", key, 429) == "TOO_MANY_REQUESTS"
    assert 25 <= int(desk.retry_after or 0) <= 30
    await desk.call("models.getModels")  # others are not limited
    assert await desk.call("models.getModels", key, 429) == "TOO_MANY_REQUESTS"
    await command("agents", "limits", "scout", "--requests", "600")
    await desk.call("agent.whoami", key)


async def test_the_name_of_a_model_is_taken(desk: Desk, command: Command) -> None:
    await desk.floor.add("ada")
    assert "already" in await command("agents", "add", "ada", "--variant", "Apex", code=1)
    await desk.call("simulator.placeOrder", None, accountId="taken", symbol="BTC", side="buy", quantity=0.01)
    assert "which others have traded" in await command("agents", "add", "taken", "--variant", "Apex", code=1)
