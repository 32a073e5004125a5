"""An agent that speaks MCP: pip install mcp; then TRADER_KEY=tra_… python agent_mcp.py

It shows what a language model would be given: the tools, the view, and the result of a decision.
"""

import asyncio
import os

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

URL = os.environ.get("TRADER_URL", "http://localhost:8081")


async def main() -> None:
    headers = {"Authorization": f"Bearer {os.environ['TRADER_KEY']}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(f"{URL}/mcp", http_client=http)) as client,
    ):
        print("tools:", ", ".join(tool.name for tool in (await client.list_tools()).tools))
        while (shown := await client.call_tool("getView", {})).is_error:  # a key may decide once a minute
            print(shown.structured_content)
            await asyncio.sleep(10)
        view = shown.structured_content
        print(view["prompt"].splitlines()[0])
        decision = {"viewId": view["viewId"], "reason": "only looking"}
        print((await client.call_tool("hold", decision)).structured_content)


asyncio.run(main())
