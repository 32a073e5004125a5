"""The examples of the documents, executed unchanged, and the page for language models."""

import asyncio
import os
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import pytest
from support.agent_desk import Command, Desk
from support.orpc import installed_packages
from support.tasks import ended

from trader.agents.providers.webhook import WebhookClient
from trader.agents.webhooks import Webhooks
from trader.api import openapi
from trader.api.registry import REGISTRY
from trader.api.schemas.agents import ViewOutput
from trader.api.schemas.common import ENCODER

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


async def run_example(desk: Desk, key: str, *command: str) -> str:
    """Return the output of an agent that decides once."""
    environment = {**os.environ, "TRADER_URL": str(desk.client.make_url("")), "TRADER_KEY": key, "CYCLES": "1"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, out
    return out.decode()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "expected"), [("agent_httpx.py", "ok: 0.00106 BTC"), ("agent_mcp.py", "'holding': True")]
)
async def test_an_example_trades(desk: Desk, key: str, name: str, expected: str) -> None:
    assert expected in await run_example(desk, key, sys.executable, "-P", str(EXAMPLES / name))
    (record,) = (await desk.call("agent.getHistory", key))["conversations"]
    assert record["status"] == "completed"


@pytest.mark.processes
async def test_the_example_in_typescript_trades(desk: Desk, key: str, tmp_path: Path) -> None:
    packages = installed_packages()
    (tmp_path / "node_modules").symlink_to(packages)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    options = "--noCheck", "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"
    compiling = packages / ".bin" / "tsc", *options, "--outDir", tmp_path, EXAMPLES / "agent_orpc.ts"
    done = await asyncio.to_thread(subprocess.run, compiling, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "ok 0.001\nheld" in await run_example(desk, key, "node", str(tmp_path / "agent_orpc.js"))


@pytest.mark.processes
async def test_the_example_of_a_webhook_is_called_and_trades(
    desk: Desk, command: Command, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}/decide"
    adding = ("agents", "add", "called", "--variant", "Apex", "--webhook", url)
    assert "WEBHOOK_LOOPBACK=on" in await command(*adding, code=1)
    monkeypatch.setenv("WEBHOOK_LOOPBACK", "on")
    added = await command(*adding)
    webhooks = Webhooks(
        desk.floor.database,
        desk.floor.agents.external,
        WebhookClient(loopback=True),
        desk.floor.clock,
        lambda shown: ENCODER.encode(ViewOutput.of(shown)),
    )
    environment = {**os.environ, "TRADER_SECRET": added["webhookSecret"], "PORT": str(unused_tcp_port)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", EXAMPLES / "agent_webhook.py", env=environment, stdout=PIPE, stderr=DEVNULL
    )
    try:
        assert process.stdout is not None
        assert url.startswith((await process.stdout.readline()).decode().split()[-1])
        await desk.floor.models.reload()
        await webhooks.begin_cycle([desk.floor.models.by_id["called"]])
        await ended("webhook of called")
        (record,) = (await desk.call("agent.getHistory", added["key"]))["conversations"]
        assert (record["status"], record["toolCalls"][0]["status"]) == ("completed", "ok")
        again = await command("agents", "webhook", "called", url)
        assert again["webhookSecret"] != added["webhookSecret"]
        await desk.floor.see()
        await webhooks.begin_cycle([desk.floor.models.by_id["called"]])
        await ended("webhook of called")
        latest = (await desk.call("agent.getHistory", added["key"]))["conversations"][0]
        assert (latest["status"], latest["failureReason"]) == ("failed", "the webhook answered with HTTP 401")
        await command("agents", "webhook", "called", "--off")
        (listed,) = (await command("agents", "list"))["agents"]
        assert listed["webhook"] is None
    finally:
        process.kill()
        await process.wait()
        await webhooks.close()


async def test_the_page_for_language_models_names_every_tool(desk: Desk) -> None:
    async with desk.client.get("/skill.md") as response:
        assert (response.status, response.content_type) == (200, "text/markdown")
        text = await response.text()
    assert f"POST {openapi.make_document(REGISTRY, desk.floor.settings)['servers'][0]['url']}/api/rpc/agent." in text
    tools = [name.removeprefix("agent.") for name in REGISTRY.procedures if name.startswith("agent.")]
    assert [name for name in tools if f"`{name}" not in text] == []
