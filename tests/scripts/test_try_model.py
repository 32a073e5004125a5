"""One trial of one model, as started by an operator: everything is shown, and nothing is left behind."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "try_model.py"
KEY = "sk-try-model-secret-0001"


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"c{number}", "function": {"name": name, "arguments": orjson.dumps(arguments).decode()}}


def opening(**changes: Any) -> dict[str, Any]:
    fields = {
        "symbol": "SOL", "side": "LONG", "quantity": 0.5, "leverage": 2, "stop": 1, "target": None,
        "invalidation": "below 1", "invalidationPrice": None, "timeExit": None, "confidence": 60,
    }  # fmt: skip
    return {**fields, **changes}


FIRST = [
    call(1, "createPosition", **opening()),
    call(2, "createPosition", **opening(leverage=11)),
    call(3, "closePosition", symbol="SOL"),
]
LAST = [call(1, "holding", reason="enough seen")]


class FakeProvider:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(orjson.loads(await request.read()))
        if self.status != 200:
            return web.json_response({"error": {"message": f"no such model, {KEY}"}}, status=self.status)
        calls = FIRST if len(self.bodies) == 1 else LAST
        usage = {"prompt_tokens": 8_123, "completion_tokens": 77, "cost": 0.0042}
        message = {"content": "SOL looks cheap.", "tool_calls": calls}
        return web.json_response({"model": "lab/one-2026", "choices": [{"message": message}], "usage": usage})


@pytest.fixture
async def provider() -> AsyncIterator[FakeProvider]:
    fake = FakeProvider()
    app = web.Application(client_max_size=16 * 1024 * 1024)
    app.router.add_post("/v1/chat/completions", fake.answer)
    async with TestServer(app) as server:
        fake.url = str(server.make_url("/v1"))
        yield fake


async def run(folder: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *arguments, cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **environ},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, complained = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode is not None
    return process.returncode, said.decode(), complained.decode()


OPENAI = ("--provider", "openai", "--model", "lab/one", "--variant", "Apex", "--demo")


async def test_messages_calls_verdicts_tokens_and_cost_are_shown(tmp_path: Path, provider: FakeProvider) -> None:
    code, said, complained = await run(tmp_path, *OPENAI, OPENAI_BASE_URL=provider.url, OPENAI_API_KEY=KEY)
    assert code == 0, complained
    for part in (
        "=== system\n# Apex",
        '=== user\n{"markets":[["symbol","tick","lot",',
        "=== call 1: createPosition → ok",
        '"status":"filled"',
        '"filledQuantity":"0.5"',
        "=== call 2: createPosition → rejected",
        "Leverage 11 is above the 10 that your variant allows.",
        "=== call 3: closePosition → ok",
        "=== call 4: holding → ok",
        "=== completed",
        "step 1: lab/one-2026 with key 1, 8123 + 77 tokens, ",
        "cost 0.0042 USD",
        "total: 16,246 input tokens (not reported from the cache), 154 output tokens, cost 0.0084 USD",
        "enough seen",
    ):
        assert part in said, part
    assert KEY not in said + complained
    results = [orjson.loads(m["content"]) for m in provider.bodies[1]["messages"] if m["role"] == "tool"]
    assert results[0]["account"]["positions"] == [{"symbol": "SOL", "side": "LONG", "quantity": "0.5"}]
    assert results[2]["account"]["positions"] == [], "it sees how its orders would have turned out"
    assert float(results[2]["account"]["equity"]) < 10_000, "less fees and spread"
    assert list(tmp_path.iterdir()) == [], "nothing stays behind"


async def test_a_failing_provider_is_reported(tmp_path: Path, provider: FakeProvider) -> None:
    provider.status = 404
    code, said, complained = await run(tmp_path, *OPENAI, OPENAI_BASE_URL=provider.url, OPENAI_API_KEY=KEY)
    assert code == 1
    assert "=== failed: openai answered 404: " in said
    assert "no such model, ***" in said
    assert KEY not in said + complained


async def test_without_a_provider_it_says_what_is_missing(tmp_path: Path) -> None:
    code, said, complained = await run(tmp_path, *OPENAI[:-1])
    assert code == 2
    assert said == ""
    assert "OPENAI_API_KEY" in complained
    assert "Traceback" not in complained


async def test_a_rule_agent_needs_no_provider(tmp_path: Path) -> None:
    code, said, complained = await run(
        tmp_path, "--provider", "rules", "--model", "rules/sovereign", "--variant", "Sovereign"
    )
    assert code == 0, complained
    assert "holding → ok" in said
    assert "=== completed" in said
