"""A slow provider of the chat-completions protocol, as a separate process: `slow_provider SECONDS`.

In the first step of a run it reads indicators and opens a position, in the second it holds.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

OPENING = {
    "symbol": "SOL", "side": "LONG", "quantity": 0.5, "leverage": 2, "stop": 1, "target": None,
    "invalidation": "never", "invalidationPrice": None, "timeExit": None, "confidence": 50,
}  # fmt: skip


def _call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    return {"id": f"call_{number}", "type": "function", "function": function}


FIRST = [
    _call(1, "fetchIndicators", {"symbol": "BTC", "interval": "1m"}),
    _call(2, "createPosition", OPENING),
]
LAST = [_call(1, "holding", {"reason": "slow and steady"})]


def _app(step_s: float) -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        await asyncio.sleep(step_s)  # the model thinks
        calls = LAST if any(message["role"] == "tool" for message in asked["messages"]) else FIRST
        message = {"role": "assistant", "content": "x" * 2_000, "tool_calls": calls}
        usage = {"prompt_tokens": 9_000, "completion_tokens": 600, "cost": 0.002}
        return web.json_response({"model": "slow/one", "choices": [{"message": message}], "usage": usage})

    app = web.Application(client_max_size=16 * 1024 * 1024)
    app.router.add_post("/v1/chat/completions", answer)
    return app


async def _serve(step_s: float) -> None:
    runner = web.AppRunner(_app(step_s), shutdown_timeout=0.1)  # the client is gone
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it or ends
    await runner.cleanup()


@asynccontextmanager
async def slow_provider(step_s: float) -> AsyncIterator[str]:
    """Start the provider and return its base address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__)),
        str(step_s),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", "")},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = int(await asyncio.wait_for(process.stdout.readline(), 30))
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 5)
        except TimeoutError:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1])))
