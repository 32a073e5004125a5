"""The Model Context Protocol: the official client drives every tool in both revisions, and the wire refuses misuse."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import httpx2
import pytest
from aiohttp import ClientSession
from support.agent_desk import Desk, order_of
from support.orpc import installed_packages

from trader.agents.domain.tools import AGENT_TOOLS, TOOL_NAMES, AgentNote, tool_schemas

MODERN: Final = "2026-07-28"
META: Final = "io.modelcontextprotocol/"
TOOLS: Final = {
    "whoami", "getView", "getCandles", "getOrderBook", "getAccount", "placeOrder", "cancelOrder", "closePosition",
    "setExitPlan", "hold", "note", "getHistory", "getBoard", "declare", "halt", "flatten",
}  # fmt: skip


@pytest.mark.parametrize("mode", ["legacy", "auto", MODERN])
async def test_the_official_client_drives_every_tool(desk: Desk, key: str, mode: Literal["legacy", "auto"]) -> None:
    from mcp import Client as McpClient  # noqa: PLC0415 - half a second, in every worker
    from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415 - as above

    url = str(desk.client.make_url("/mcp"))
    async with (
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as http,
        McpClient(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        listed = (await client.list_tools()).tools
        assert {tool.name for tool in listed} == TOOLS
        assert all(tool.output_schema and tool.output_schema["type"] == "object" for tool in listed)

        async def call(name: str, **arguments: Any) -> Any:
            result = await client.call_tool(name, arguments)
            assert not result.is_error, result
            return result.structured_content

        assert (await call("whoami"))["accountId"] == "scout"
        assert (await call("declare", model="lab/one", version="2"))["declared"] == {"model": "lab/one", "version": "2"}
        view = await call("getView")
        placed = await call("placeOrder", **order_of(view))
        assert (placed["result"], placed["status"]) == ("ok", "filled")
        resting = await call("placeOrder", **order_of(view, "two", type="limit", limitPrice=93000))
        assert (await call("cancelOrder", orderId=resting["orderId"]))["order"]["status"] == "cancelled"
        assert (await call("getAccount"))["account"]["positions"][0]["symbol"] == "BTC"
        assert (await call("setExitPlan", viewId=view["viewId"], symbol="BTC", stop=91000))["result"] == "ok"
        assert (await call("getCandles", symbol="BTC", interval="1h"))["symbol"] == "BTC"
        assert (await call("getOrderBook", symbol="BTC"))["bids"]
        assert (await call("closePosition", viewId=view["viewId"], symbol="BTC"))["result"] == "ok"
        assert (await call("note", viewId=view["viewId"], text="flat again"))["noted"]
        assert (await call("hold", viewId=view["viewId"], reason="done"))["holding"]
        assert (await call("getBoard"))["window"] == "7d"
        assert (await call("getHistory"))["conversations"][0]["response"] == "done"
        for refused, code in (
            (("hold", {"viewId": view["viewId"], "reason": "again"}), "VIEW_DECIDED"),
            (("placeOrder", {"symbol": "BTC"}), "VALIDATION_ERROR"),
            (("getAccount", {"accountId": "other"}), "FOREIGN_ACCOUNT"),
        ):
            result = await client.call_tool(*refused)
            assert (result.is_error, result.structured_content["code"]) == (True, code)
        await desk.floor.clock.advance(timedelta(milliseconds=1))
        again = await call("getView")
        result = await client.call_tool("placeOrder", order_of(again, "three", leverage=11))
        assert (result.is_error, result.structured_content["rule"]) == (True, "leverage")


async def test_the_wire_enforces_the_revisions_rules(desk: Desk, key: str) -> None:
    url, own = desk.client.make_url("/mcp"), {"Authorization": f"Bearer {key}"}

    async def post(body: Any, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with ClientSession() as session, session.post(url, json=body, headers=own | named) as response:
            return response.status, await response.json() if response.content_type == "application/json" else None

    def modern(method: str, version: str = MODERN, **params: Any) -> dict[str, Any]:
        meta = {f"{META}protocolVersion": version, f"{META}clientCapabilities": {}}
        return {"jsonrpc": "2.0", "id": 7, "method": method, "params": {**params, "_meta": meta}}

    async def failed(body: Any, **headers: str) -> tuple[int, int]:
        status, answer = await post(body, **headers)
        return status, answer["error"]["code"]

    said = {"MCP_Protocol_Version": MODERN}
    status, answer = await post(modern("server/discover"), **said, Mcp_Method="server/discover")
    assert (status, answer["result"]["supportedVersions"]) == (200, [MODERN])
    assert await failed(modern("ping"), **said, Mcp_Method="ping") == (404, -32601)
    assert await failed(modern("tools/list"), **said, Mcp_Method="tools/call") == (400, -32020)
    assert await failed(modern("tools/list"), Mcp_Method="tools/list") == (400, -32020)
    other = {"MCP_Protocol_Version": "2030-01-01", "Mcp_Method": "tools/list"}
    assert await failed(modern("tools/list", "2030-01-01"), **other) == (400, -32022)
    assert await failed({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, **said) == (400, -32602)
    wrong_name = {**said, "Mcp_Method": "tools/call", "Mcp_Name": "hold"}
    assert await failed(modern("tools/call", name="whoami"), **wrong_name) == (400, -32020)
    assert await failed(modern("tools/call", name="x"), **{**wrong_name, "Mcp_Name": "x"}) == (400, -32602)
    assert await failed([modern("ping")]) == (400, -32600)
    assert (await post({"jsonrpc": "2.0", "method": "notifications/initialized"}))[0] == 202
    assert await failed({"jsonrpc": "2.0", "id": 1, "method": "resources/list"}) == (200, -32601)
    initialize = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}}
    assert "sent no key" not in (await post(initialize))[1]["result"]["instructions"]
    async with ClientSession() as session, session.post(url, json=initialize) as response:
        assert "sent no key" in (await response.json())["result"]["instructions"]
    whoami = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "whoami"}}
    assert (await post(whoami, Authorization="Bearer tra_wrong"))[0] == 401
    async with ClientSession(headers=own) as session:
        for method in ("GET", "DELETE"):
            async with session.request(method, url) as response:
                assert (response.status, response.headers["Allow"]) == (405, "POST")
        async with session.post(url, data=b"{") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, -32700)


@pytest.mark.processes
@pytest.mark.parametrize("scenario", ["server-initialize", "ping", "tools-list", "dns-rebinding-protection"])
async def test_the_conformance_suite_passes(desk: Desk, scenario: str) -> None:
    """The scenarios of the official suite that every server of tools must pass; the others require special tools."""
    program = installed_packages(Path(__file__).parent / "conformance") / ".bin" / "conformance"
    url = f"http://localhost:{desk.client.port}/mcp"
    process = await asyncio.create_subprocess_exec(
        program, "server", "--url", url, "--scenario", scenario, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, out.decode()
    assert b"0 failed, 0 warnings" in out


async def test_only_pages_of_allowed_origins_may_call(desk: Desk, key: str) -> None:
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,mcp-method,mcp-name,mcp-protocol-version",
    }
    ours, foreign = {"Origin": "http://localhost:3000"}, {"Origin": "https://evil.example"}
    async with desk.client.options("/mcp", headers={**ours, **asked}) as response:
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (200, ours["Origin"])
    async with desk.client.options("/mcp", headers={**foreign, **asked}) as response:
        assert (response.status, "Access-Control-Allow-Origin" in response.headers) == (403, False)
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    for path, origin, status in (("/mcp", ours, 200), ("/mcp/", ours, 200), ("/mcp", foreign, 403)):
        headers = {**origin, "Authorization": f"Bearer {key}"}
        async with desk.client.post(path, json=ping, headers=headers) as response:
            assert (response.status, "Access-Control-Allow-Origin" in response.headers) == (status, status == 200)


async def test_tools_are_described_as_models_have_them(desk: Desk) -> None:
    async with desk.client.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"}) as response:
        described = {tool["name"]: tool["description"] for tool in (await response.json())["result"]["tools"]}
    of_models = {tool["function"]["name"]: tool["function"]["description"] for tool in tool_schemas(("BTC",))}
    for name, tool in AGENT_TOOLS.items():
        if tool is AgentNote:  # it has parts, which models have not
            continue
        expected = of_models.get(TOOL_NAMES.get(tool, ""), " ".join((tool.__doc__ or "").split()))
        assert described[name] == expected
