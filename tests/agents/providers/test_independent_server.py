"""Invocations against an independent chat-completions server: `@copilotkit/aimock` from npm."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from support.chat_server import Timer
from support.orpc import installed_packages
from support.run_profile import is_nightly
from support.trading_floor import Floor, open_floor

from trader.agents.domain.invocations import FinishedInvocation
from trader.agents.providers.client import AttemptTiming, ProviderAccess, ProviderClient
from trader.agents.providers.provider import PROVIDERS
from trader.agents.sql.invocations import select_steps
from trader.agents.variants import VARIANTS
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.settings.forms import Secret

pytestmark = pytest.mark.processes

FORMS = {"openai": "/v1", "openrouter": "/api/v1", "mistral": "/v1"}
"""The providers whose formats the server speaks, and their paths."""

FOLDER = Path(__file__).parent / "mock_server"
GOOD, REFUSED = "sk-independent-good-0001", "sk-independent-refused-0002"


class Server:
    """The running server and its control interface."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self.url = url
        self.timer = Timer()

    async def received(self) -> list[dict[str, Any]]:
        """The bodies of all requests so far."""
        async with self._http.get(f"{self.url}/__aimock/journal") as response:
            return [entry["body"] for entry in orjson.loads(await response.read()) if "completions" in entry["path"]]

    async def suffer(self, **rates: float) -> None:
        """Fail at these rates from now on."""
        async with self._http.post(f"{self.url}/__aimock/chaos", json=rates) as response:
            assert response.status == 200, await response.text()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    program = installed_packages(FOLDER) / ".bin" / "llmock"
    process = await asyncio.create_subprocess_exec(
        "node", str(program), "-p", "0", "-f", str(FOLDER / "answers.json"), "--strict", "--validate-on-load",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={"PATH": os.environ["PATH"], "AIMOCK_API_KEYS": GOOD},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = b""
        while not (match := re.search(rb"listening on (http://\S+)", line)):
            line = await asyncio.wait_for(process.stdout.readline(), 30)
            assert line, "the server ended"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {GOOD}"}) as http:
            yield Server(http, match.group(1).decode())
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def floor_on(database: Database, server: Server, *keys: str, form: str = "openai") -> AsyncIterator[Floor]:
    client = ProviderClient(
        PROVIDERS[form],
        ProviderAccess([Secret(key) for key in keys], f"{server.url}{FORMS[form]}"),
        AttemptTiming(backoff_s=0.001, timer=server.timer, sleep=server.timer.sleep),
    )
    async with open_floor(database, provider=client) as floor:
        await floor.add("ada", variant=VariantId.CONTRARIAN, provider=form)
        yield floor
    await client.close()


async def run(floor: Floor, model: str) -> FinishedInvocation:
    async with floor.database.connection() as conn:
        await conn.execute("UPDATE models SET router_model_name = $1", model)
    (record,) = await floor.cycle()
    return record


@pytest.mark.parametrize("form", FORMS)
async def test_an_invocation_of_two_steps_with_a_refused_key_first(
    database: Database, server: Server, form: str
) -> None:
    async with floor_on(database, server, REFUSED, GOOD, form=form) as floor:
        record = await run(floor, "lab/trader")
        async with database.connection() as conn:
            steps = (await select_steps(conn, [record.invocation.id]))[record.invocation.id]
    assert record.invocation.status == "completed", record.invocation.failure_reason
    assert record.invocation.response == "Looking at ETH.\n\nthe server says so"
    assert [(call.type, call.status) for call in record.tool_calls] == [
        ("FETCH_INDICATORS", "ok"), ("CREATE_POSITION", "failed"), ("HOLDING", "ok"),
    ]  # fmt: skip
    assert [(step.key_number, step.model) for step in steps] == [(2, "lab/trader")] * 2
    assert (record.invocation.input_tokens, record.invocation.output_tokens) == (2100, 50)
    assert record.invocation.cost_usd == (Decimal("0.005") if form == "openrouter" else None)
    first, second = await server.received()
    assert (PROVIDERS[form].limit_field or "max_tokens") in first
    assert ("usage" in first) == (form == "openrouter")
    assert ("reasoning" in second["messages"][2]) == (form == "openrouter"), "a null field goes back too"
    assert first["temperature"] == VARIANTS[VariantId.CONTRARIAN].temperature
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    asked = [call["id"] for call in second["messages"][2]["tool_calls"]]
    assert [message["tool_call_id"] for message in second["messages"][3:]] == asked, "its own ids come back"


@pytest.mark.parametrize("form", FORMS if is_nightly() else ["openrouter"])
async def test_every_invocation_ends_with_a_truthful_reason(database: Database, server: Server, form: str) -> None:
    async with floor_on(database, server, GOOD, form=form) as floor:
        await server.suffer(dropRate=0.25, malformedRate=0.15, disconnectRate=0.15, rateLimitRate=0.15)
        for _ in range(8):
            invocation = (await run(floor, "lab/trader")).invocation
            reason = invocation.failure_reason or ""
            assert invocation.status in ("completed", "failed"), reason
            assert (invocation.status == "completed") == (reason == "")
            assert not reason or reason.startswith((f"{form} answered", f"{form} could not", f"{form} cannot be asked"))
        await server.suffer()
        server.timer.now += 600
        assert (await run(floor, "lab/trader")).invocation.status == "completed"
