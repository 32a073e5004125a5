"""Tokens of operators over HTTP: the permissions of their scopes, and changes by commands while the service runs."""

from typing import Any

from support.agent_desk import Command, Desk

from trader.api.context import ACCESS
from trader.database.pool import Database

ORDER: dict[str, Any] = {"accountId": "default", "symbol": "BTC", "side": "buy", "quantity": 0.01}


async def test_a_token_allows_what_its_scopes_allow(desk: Desk, command: Command) -> None:
    reader, trader, operator = [
        (await command("keys", "add", scopes, "--scopes", scopes))["token"] for scopes in ("read", "trade", "operate")
    ]
    assert await desk.call("simulator.placeOrder", reader, 403, **ORDER) == "MISSING_SCOPE"
    assert await desk.call("simulator.placeOrder", operator, 403, **ORDER) == "MISSING_SCOPE"
    assert (await desk.call("simulator.placeOrder", trader, **ORDER))["order"]["status"] == "filled"
    assert await desk.call("simulator.resetAccount", trader, 403, accountId="default") == "MISSING_SCOPE"
    await desk.call("simulator.resetAccount", operator, accountId="default")
    assert await desk.call("operations.resume", trader, 403) == "MISSING_SCOPE"
    assert await desk.call("operations.getActivity", reader, 403) == "MISSING_SCOPE"
    assert await desk.call("agent.whoami", reader, 403) == "FORBIDDEN", "a token belongs to no account"
    async with desk.floor.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests") == 1


async def test_closed_reading_is_open_to_tokens_that_may_read(desk: Desk, command: Command) -> None:
    desk.client.app[ACCESS].closes_reading = True
    reader, trader = [
        (await command("keys", "add", scopes, "--scopes", scopes))["token"] for scopes in ("read", "trade")
    ]
    assert await desk.call("models.getModels", None, 401) == "UNAUTHORIZED"
    assert await desk.call("models.getModels", trader, 403) == "MISSING_SCOPE"
    await desk.call("models.getModels", reader)
    for token, status in ((reader, 200), (trader, 403)):
        async with desk.client.get("/api/openapi.json", headers={"Authorization": f"Bearer {token}"}) as answer:
            assert answer.status == status


async def test_tokens_are_rotated_and_revoked_while_the_service_runs(
    desk: Desk, command: Command, database: Database
) -> None:
    first = (await command("keys", "add", "page", "--scopes", "trade,read"))["token"]
    assert first.startswith("tro_")
    assert "already" in await command("keys", "add", "page", "--scopes", "read", code=1)
    changed = await command("keys", "rotate", "page")
    second = changed["token"]
    assert changed["scopes"] == ["read", "trade"]
    assert await desk.call("simulator.placeOrder", first, 401, **ORDER) == "KEY_REVOKED"
    await desk.call("simulator.placeOrder", second, **ORDER)
    assert [(await command("keys", "revoke", "page"))["revoked"] for _ in range(2)] == [1, 0]
    assert await desk.call("simulator.placeOrder", second, 401, **ORDER) == "KEY_REVOKED"
    assert "no key 'nobody'. Existing keys: page." in await command("keys", "revoke", "nobody", code=1)
    (listed,) = (await command("keys", "list"))["tokens"]
    assert (listed["name"], listed["tokenPrefix"], listed["revokedAt"] is None) == ("page", second[:12], False)
    async with database.connection() as conn:
        kept = str(await conn.fetch("SELECT * FROM credentials"))
    assert first[12:] not in kept
    assert second[12:] not in kept


async def test_an_agent_and_a_token_may_have_one_name(desk: Desk, command: Command) -> None:
    key = (await command("agents", "add", "scout", "--variant", "Apex"))["key"]
    await command("keys", "add", "scout", "--scopes", "read")
    for verb in ("rotate", "revoke"):
        assert "An agent and an operator have the name 'scout': choose one with --of." in await command(
            "keys", verb, "scout", code=1
        )
    assert (await command("keys", "revoke", "scout", "--of", "operator"))["name"] == "scout"
    assert (await desk.call("agent.whoami", key))["agentId"] == "scout"
    (agent,) = (await command("agents", "list"))["agents"]
    assert agent["revokedAt"] is None


async def test_closed_reading_leaves_agents_their_own_procedures(desk: Desk, command: Command) -> None:
    key = (await command("agents", "add", "scout", "--variant", "Apex", "--scopes", "read,trade,operate"))["key"]
    await desk.call("simulator.getAccount", key, accountId="another")  # open to everybody
    desk.client.app[ACCESS].closes_reading = True
    for name in ("simulator.getAccount", "models.getModels", "trading.getPositions", "analytics.getLeaderboard"):
        assert await desk.call(name, key, 403) == "FORBIDDEN"
    assert (await desk.call("agent.whoami", key))["agentId"] == "scout"
    await desk.call("agent.getBoard", key)
    for path, status in (("/skill.md", 200), ("/api/contract.d.ts", 200), ("/api/docs", 403)):
        async with desk.client.get(path, headers={"Authorization": f"Bearer {key}"}) as answer:
            assert answer.status == status
    tools = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    for headers, status in (({"Authorization": f"Bearer {key}"}, 200), ({}, 401)):
        async with desk.client.post("/mcp", json=tools, headers=headers) as answer:
            assert answer.status == status
