"""A chat-completions provider in a separate thread, for commands that run their own event loop."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import orjson
from aiohttp import web
from support.prompts import data_of

COST_USD = 0.002


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    return {"id": f"call_{number}", "type": "function", "function": function}


def opening(symbol: str, quantity: float) -> dict[str, Any]:
    return {
        "symbol": symbol, "side": "LONG", "quantity": quantity, "leverage": 2, "stop": 1, "target": None,
        "invalidation": "never", "invalidationPrice": None, "timeExit": None, "confidence": 50,
    }  # fmt: skip


class TradingProvider:
    """Opens, changes and closes positions by the minute of the view, and holds in a cycle's second step."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.usage: dict[str, Any] = {"prompt_tokens": 5_000, "completion_tokens": 100, "cost": COST_USD}
        self.delays_s: dict[str, float] = {}
        """How long each model thinks."""

        self.always: list[dict[str, Any]] | None = None
        """The calls of every first step, whatever the minute."""

        self.status = 200
        self.interrupt_at = -1
        """The request at which this process is interrupted, and which is not answered."""

    @property
    def requests(self) -> int:
        return len(self.asked)

    async def answer(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        self.asked.append(asked)
        self.keys.add(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if self.requests == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        await asyncio.sleep(self.delays_s.get(asked["model"], 0))  # the model thinks
        message = {"role": "assistant", "content": None, "tool_calls": self.calls(asked["messages"])}
        return web.json_response(
            {"model": "lab/one-2025", "choices": [{"message": message}], "usage": self.usage}, status=self.status
        )

    def calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if any(message["role"] == "tool" for message in messages):
            return [call(1, "holding", reason="done")]
        if self.always is not None:
            return self.always
        shown = datetime.fromisoformat(data_of(messages[1]["content"])["at"])
        match int(shown.timestamp()) // 300 % 3:
            case 0:
                two = call(2, "createPosition", **opening("ETH", 0.5))
                return [call(1, "createPosition", **opening("BTC", 0.02)), two]
            case 1:
                return [
                    call(1, "updateExitPlan", symbol="BTC", stop=2),
                    call(2, "fetchIndicators", symbol="ETH", interval="1h"),
                ]
            case _:
                return [call(1, "closePosition", symbol="BTC"), call(2, "closePosition", symbol="DOGE")]


@contextmanager
def trading_provider() -> Iterator[TradingProvider]:
    """Serve it for the duration of the block."""
    provider, loop, started = TradingProvider(), asyncio.new_event_loop(), threading.Event()
    app = web.Application(client_max_size=16 * 1024 * 1024)
    app.router.add_post("/v1/chat/completions", provider.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        provider.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    def run() -> None:
        loop.run_until_complete(start())
        loop.call_soon(started.set)  # a stop before `run_forever` would be lost
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        yield provider
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
