"""Provider faults: every row of the table in docs/models.md, in the providers' words and in every protocol."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace
from support.chat_server import KEYS, OK, TURN, Reply, Timer, answering, completion, held, raw_answer

from trader.agents.domain.models import ProviderDefinition
from trader.agents.providers.client import PROTOCOLS, AttemptTiming, ProviderAccess, ProviderClient
from trader.core.errors import ProviderError
from trader.settings.forms import Secret

HOLD = {"name": "holding", "arguments": '{"reason": "calm"}'}
GOOD: dict[str, Any] = {
    "chat": completion(held()),
    "responses": {"output": [{"type": "function_call", "call_id": "a", **HOLD}]},
    "messages": {"content": [{"type": "tool_use", "id": "a", "name": "holding", "input": {"reason": "calm"}}]},
    "gemini": {"candidates": [{"content": {"parts": [{"functionCall": {"name": "holding", "args": {}}}]}}]},
}


def refused(status: int, message: str = "no", /, **more: Any) -> Reply:
    return answering(status, {"error": {"message": message, **more}})


async def broken(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


UPSTREAM = {"metadata": {"provider_name": "Lab"}}
FAULTS: dict[str, dict[str, Reply]] = {
    "429": {
        "rate limit": refused(429, "Rate limit reached on tokens per min"),
        "with Retry-After": answering(429, {"error": {"message": "slow down"}}, Retry_After="20"),
        "exhausted": refused(429, "You exceeded your quota", status="RESOURCE_EXHAUSTED"),
    },
    "403, such as `model_not_found`": {
        "no access": refused(403, "Project has no access to the model", code="model_not_found"),
        "without words": answering(403),
    },
    "a server error with `Retry-After`": {"overloaded": answering(529, {"error": {}}, Retry_After="20")},
    "402 that names `max_tokens`, or the provider behind a gateway": {
        "too large": refused(402, "This request requires more credits, or fewer max_tokens."),
        "of upstream": refused(402, code=402, **UPSTREAM),
    },
    'another 402, `insufficient_quota`, "Key limit exceeded" and the like': {
        "no credit": refused(402, "Insufficient credits. Add more to continue."),
        "no quota": refused(429, "You exceeded your current quota", code="insufficient_quota"),
        "key limit": refused(403, "Key limit exceeded (daily limit)"),
        "balance": refused(400, "Your credit balance is too low to access the API"),
    },
    "401, or another status whose error reports an invalid API key": {
        "unknown key": refused(401, "No auth credentials found"),
        "wrong key": refused(403, "Incorrect API key provided", code="invalid_api_key"),
        "wrong argument": refused(400, status="INVALID_ARGUMENT", details=[{"reason": "API_KEY_INVALID"}]),
    },
    "200 with a body that is not JSON": {"page": raw_answer(b"<html>", "text/html"), "cut": raw_answer(b'{"model"')},
    "401 or 403 of a moderation, or of a provider behind a gateway": {
        "flagged": refused(403, "flagged", metadata={"reasons": ["violence"]}),
        "of upstream": refused(401, **UPSTREAM),
    },
    "another server error, a broken connection or an unusable answer": {
        "500": answering(500, {}),
        "broken off": broken,
        "empty": answering(200, {}),
    },
    "400 or 422 that refuses a field such as `temperature` by name": {
        "parameter": refused(400, code="unsupported_value", param="temperature"),
        "words": refused(422, "`temperature` is deprecated for this model."),
    },
}
"""Answers by the row of the table that they belong to."""

SUBJECTS = dict(
    re.findall(
        r"^\| (.+?) \| (key and model|this model's requests|account|key|request|attempt|model) \| .+ \|$",
        (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)
"""What each row of the table says that the fault is about."""

SILENCED = {
    "key and model": {"same row", "same name"},
    "this model's requests": {"same row"},
    "account": {"same row"},
    "key": {"same row"},
    "request": set[str](),
}
"""The caller that is not retried, by the subject of a fault; all other faults are retried within the same request."""

CASES = [(row, name, protocol) for row in FAULTS for name in FAULTS[row] for protocol in PROTOCOLS]


def test_every_row_of_the_table_has_its_faults() -> None:
    assert SUBJECTS.keys() == FAULTS.keys()
    assert len(CASES) >= 70


HEALTHY = [replace(TURN.model, id=f"healthy-{n}", router_model_name=f"lab/healthy-{n}") for n in range(3)]

Serve = Callable[[str, list[Reply]], Awaitable[tuple[ProviderClient, list[str]]]]


@pytest.fixture
def timer() -> Timer:
    return Timer()


@pytest.fixture
async def serve(timer: Timer) -> AsyncIterator[Serve]:
    """Start a server and a client with one key.

    The server follows the script, or answers correctly when it is over; healthy models are always answered correctly.
    """
    opened: list[Any] = []

    async def start(protocol: str, script: list[Reply]) -> tuple[ProviderClient, list[str]]:
        asked: list[str] = []

        async def handle(request: web.Request) -> web.StreamResponse:
            asked.append(request.path)
            good = OK if protocol == "chat" else answering(200, GOOD[protocol])
            is_healthy = "healthy" in request.path or b"lab/healthy" in await request.read()
            return await (script.pop(0) if script and not is_healthy else good)(request)

        app = web.Application()
        app.router.add_post("/{path:.*}", handle)
        server = TestServer(app)
        await server.start_server()
        definition = ProviderDefinition(name="lab", base_url=str(server.make_url("/v1")), protocol=protocol)
        client = ProviderClient(
            definition,
            ProviderAccess([Secret(KEYS[0])]),
            AttemptTiming(backoff_s=0.001, timer=timer, sleep=timer.sleep),
        )
        opened.extend((client, server))
        return client, asked

    yield start
    for each in opened:
        await each.close()


@pytest.mark.parametrize(("row", "name", "protocol"), CASES)
async def test_no_fault_of_a_model_costs_its_neighbors_a_cycle(
    serve: Serve, timer: Timer, row: str, name: str, protocol: str
) -> None:
    for faults in (1, 40):
        client, _ = await serve(protocol, [FAULTS[row][name]] * faults)
        for _ in range(4):
            with suppress(ProviderError):
                await client.answer(TURN)
            turns = [replace(TURN, model=model, wait_max_s=500.0) for model in HEALTHY]
            answers = await asyncio.gather(*(client.answer(turn) for turn in turns))
            assert [each.waited_s for each in answers] == [0.0] * len(HEALTHY)
            assert (client.outage(), client.keys_in_cooldown()) == (None, {})
            timer.now += 60


@pytest.mark.parametrize(("row", "name", "protocol"), CASES)
async def test_each_fault_affects_only_its_subject(serve: Serve, row: str, name: str, protocol: str) -> None:
    client, asked = await serve(protocol, [FAULTS[row][name]])
    about = SUBJECTS[row]
    if (about, protocol) == ("model", "gemini"):  # its optional fields are nested in a mandatory one
        about = "request"
    if about in ("attempt", "model"):
        assert (await client.answer(TURN)).calls[0].name == "holding"
        assert len(asked) == 2
        assert client.left_out(TURN.model) == ({"temperature"} if about == "model" else set())
        return
    with pytest.raises(ProviderError):
        await client.answer(TURN)
    models = {
        "same row": TURN.model,
        "same name": replace(TURN.model, id="n"),
        "other": replace(TURN.model, id="o", router_model_name="lab/two"),
    }
    silenced = set()
    for who, model in models.items():
        before = len(asked)
        try:
            await client.answer(replace(TURN, model=model))
        except ProviderError:
            assert len(asked) == before, "it is not asked at all"
            silenced.add(who)
    assert silenced == SILENCED[about]
    assert len(asked) == 1 + len(models) - len(silenced)
