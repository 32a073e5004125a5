"""A scripted server of the chat-completions protocol, and fixtures for its clients."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import orjson
from aiohttp import web
from support.waiting import turns

from trader.agents.built_view import build_view
from trader.agents.domain.conversation import Turn
from trader.agents.domain.models import Model
from trader.agents.providers.client import ProviderClient
from trader.core.variant_id import VariantId

NOW = datetime(2025, 1, 2, 12, tzinfo=UTC)
KEYS = ("sk-alpha-000000000001", "sk-beta-0000000000002", "sk-gamma-000000000003")
MODEL = Model(
    id="m", name="M", variant=VariantId.APEX, provider="fake", router_model_name="lab/one", created_at=NOW
)  # fmt: skip
TURN = Turn(
    model=MODEL,
    temperature=0.7,
    number=1,
    view=build_view({}, at=NOW),
    messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    answer_tokens_max=1000,
)

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def completion(message: dict[str, Any], **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return {"model": "lab/one-2025", "choices": [{"index": 0, "message": message}], "usage": usage, **more}


def held(reason: str = "calm") -> dict[str, Any]:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "holding", "arguments": orjson.dumps({"reason": reason}).decode()},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def answering(status: int, body: Any = None, **headers: str) -> Reply:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return reply


def raw_answer(body: bytes, content_type: str = "application/json") -> Reply:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type)

    return reply


OK = answering(200, completion(held()))


class FakeServer:
    """Sends the scripted replies in order, the last one repeatedly; records the keys and bodies of requests."""

    url: str

    def __init__(self) -> None:
        self.script: list[Reply] = [OK]
        self.by_key: dict[str, Reply] = {}
        self.keys: list[str] = []
        self.bodies: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.keys.append(key)
        self.bodies.append(msgspec.json.decode(await request.read()))  # numbers of any size
        if key in self.by_key:
            return await self.by_key[key](request)
        reply = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return await reply(request)


class Timer:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await turns(1)


MakeClient = Callable[..., ProviderClient]
