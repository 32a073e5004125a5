"""The examples of the documents, run as they are, and the page for language models."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from support.agent_desk import Desk

from trader.api import openapi
from trader.api.registry import REGISTRY

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "expected"), [("agent_httpx.py", "ok: 0.00106 BTC"), ("agent_mcp.py", "'holding': True")]
)
async def test_an_example_trades(desk: Desk, key: str, name: str, expected: str) -> None:
    environment = {**os.environ, "TRADER_URL": str(desk.client.make_url("")), "TRADER_KEY": key, "CYCLES": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", EXAMPLES / name, env=environment, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert expected in out.decode()
    (record,) = (await desk.call("agent.getHistory", key))["conversations"]
    assert record["status"] == "completed"


async def test_the_page_for_language_models_names_every_tool(desk: Desk) -> None:
    async with desk.client.get("/skill.md") as response:
        assert (response.status, response.content_type) == (200, "text/markdown")
        text = await response.text()
    assert f"POST {openapi.make_document(REGISTRY, desk.floor.settings)['servers'][0]['url']}/api/rpc/agent." in text
    tools = [name.removeprefix("agent.") for name in REGISTRY.procedures if name.startswith("agent.")]
    assert [name for name in tools if f"`{name}" not in text] == []
