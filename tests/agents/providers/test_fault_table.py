"""Provider faults: every row of the table in docs/models.md, in the providers' words, in every protocol, also streamed.

The server of each protocol refuses what its document does not allow (`support.provider_documents`). Each fault happens
to one model, alone and beside healthy ones.
"""

import asyncio
import copy
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace
from support.chat_server import KEYS, TURN, Reply, Timer, answering, raw_answer
from support.provider_documents import REQUESTS
from support.trading_floor import open_floor, opening

from trader.agents.domain.models import ProviderDefinition
from trader.agents.providers.attempts import retry_after_of
from trader.agents.providers.client import COOLDOWN_REFUSALS, AttemptTiming, ProviderAccess, ProviderClient
from trader.agents.providers.protocols import StreamedProtocol, events_of
from trader.agents.providers.provider import PROTOCOLS
from trader.agents.providers.refusals import refused_field, status_of, subject_of, words_of
from trader.agents.providers.replies import ChatCompletion, answer_of, decode_reply
from trader.core.errors import ProviderError
from trader.database.pool import Database
from trader.settings.forms import Secret


class Way(NamedTuple):
    """A protocol, with its answers in one piece or as a stream of events."""

    protocol: str
    is_streamed: bool = False

    def __str__(self) -> str:
        return f"{self.protocol} {'streamed' if self.is_streamed else 'whole'}"


WAYS = [Way(name, is_streamed) for name in PROTOCOLS for is_streamed in (False, True)]
WAYS = [way for way in WAYS if not way.is_streamed or isinstance(PROTOCOLS[way.protocol], StreamedProtocol)]
HOLD = {"name": "holding", "arguments": '{"reason": "calm"}'}
GOOD: dict[str, Any] = {
    "chat": {
        "model": "lab/one",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "So",
                    "tool_calls": [{"index": 0, "id": "a", "type": "function", "function": HOLD}],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 60}},
    },
    "responses": {
        "model": "lab/one",
        "status": "completed",
        "output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
            {"type": "function_call", "call_id": "a", **HOLD},
        ],
        "usage": {"input_tokens": 100, "output_tokens": 20, "input_tokens_details": {"cached_tokens": 60}},
    },
    "messages": {
        "model": "lab/one",
        "content": [
            {"type": "text", "text": "So"},
            {"type": "tool_use", "id": "a", "name": "holding", "input": {"reason": "calm"}},
        ],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 40, "cache_read_input_tokens": 60, "output_tokens": 20, "cache_creation": {}},
    },
    "gemini": {
        "modelVersion": "lab/one",
        "candidates": [
            {
                "content": {"parts": [{"text": "So"}, {"functionCall": {"name": "holding", "args": {"reason": "c"}}}]},
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {"promptTokenCount": 100, "candidatesTokenCount": 20, "cachedContentTokenCount": 60},
    },
}
"""An answer of each protocol that holds, of 100 tokens of input and 20 of output."""

USAGE = {"gemini": "usageMetadata"}
"""The field of an answer's usage where it has another name than `usage`."""


def body_of(way: Way, answer: Any) -> bytes:
    """The body of a response with this answer, or with an error in place of one."""
    if not way.is_streamed:
        return msgspec.json.encode(answer)
    if way.protocol == "responses":
        answer = answer if "type" in answer else {"type": "response.completed", "response": answer}
        return b'data: {"type": "response.created", "response": {}}\n\ndata: ' + msgspec.json.encode(answer) + b"\n\n"
    events, choices = [answer], answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict) and "message" in choices[0]:
        choice = {name: value for name, value in choices[0].items() if name not in ("message", "finish_reason")}
        end: dict[str, Any] = {"delta": {}, "finish_reason": choices[0].get("finish_reason")}
        events = [
            {"model": "lab/one", "choices": [{**choice, "delta": choices[0]["message"], "finish_reason": None}]},
            {"choices": [{**choice, **end}]},
            {**answer, "choices": []},
        ]
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def sent(way: Way, answer: Any) -> Reply:
    return raw_answer(body_of(way, answer), "text/event-stream" if way.is_streamed else "application/json")


def good(way: Way) -> Reply:
    return sent(way, GOOD[way.protocol])


Fault = Callable[[Way], Reply]


def always(reply: Reply) -> Fault:
    """A fault that is the same in every protocol."""
    return lambda _: reply


def refused(status: int, message: str = "no", /, **more: Any) -> Fault:
    return always(answering(status, {"error": {"message": message, **more}}))


def waiting(status: int, **headers: str) -> Fault:
    return always(answering(status, {"error": {"message": "slow down"}}, **headers))


def inside(**error: Any) -> Fault:
    """An error inside a 200."""

    def reply(way: Way) -> Reply:
        if way.protocol != "responses":
            return sent(way, {"error": error})
        failed = {"status": "failed", "error": error}
        return sent(way, {"type": "response.failed", "response": failed} if way.is_streamed else failed)

    return reply


def cut_off(way: Way) -> Reply:
    """A stream that ends in the middle of the answer; other answers break off with the connection."""
    if not way.is_streamed:
        return broken
    body = body_of(way, GOOD[way.protocol])
    return raw_answer(body[: body.index(b"holding")], "text/event-stream")


async def broken(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


UPSTREAM = {"metadata": {"provider_name": "Lab"}}
RESET_OF_OPENROUTER = {"headers": {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "20"}}
FAULTS: dict[str, dict[str, Fault]] = {
    "429": {
        "rate limit": refused(429, "Rate limit reached on tokens per min"),
        "with Retry-After": waiting(429, Retry_After="20"),
        "with retry-after-ms": waiting(429, retry_after_ms="20000"),
        "with a spent limit": waiting(429, x_ratelimit_reset_tokens="20s", x_ratelimit_remaining_tokens="0"),
        "with RetryInfo": refused(
            429, details=[{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "20s"}]
        ),
        "with OpenRouter's reset": refused(429, metadata=RESET_OF_OPENROUTER),
        "exhausted": refused(429, "You exceeded your quota", status="RESOURCE_EXHAUSTED"),
        "inside a 200": inside(code=429, message="Rate limit reached"),
        "inside a 200 by code": inside(code="rate_limit_exceeded", message="Rate limit reached"),
        "inside a 200 by type": inside(type="rate_limit_error", code=None),
        "inside a 200 by status": inside(status="RESOURCE_EXHAUSTED", message="slow"),
    },
    "403, such as `model_not_found`": {
        "no access": refused(403, "Project has no access to the model", code="model_not_found"),
        "without words": always(answering(403)),
    },
    "a server error with `Retry-After`": {"overloaded": waiting(529, Retry_After="20")},
    "402 that names `max_tokens`, or the provider behind a gateway": {
        "too large": refused(402, "This request requires more credits, or fewer max_tokens."),
        "of upstream": refused(402, code=402, **UPSTREAM),
    },
    'another 402, `insufficient_quota`, "Key limit exceeded" and the like': {
        "no credit": refused(402, "Insufficient credits. Add more to continue."),
        "no quota": refused(429, "You exceeded your current quota", code="insufficient_quota"),
        "key limit": refused(403, "Key limit exceeded (daily limit)"),
        "balance": refused(400, "Your credit balance is too low to access the API"),
        "inside a 200": inside(code=402, message="Insufficient credits"),
    },
    "401, or another status whose error reports an invalid API key": {
        "unknown key": refused(401, "No auth credentials found"),
        "wrong key": refused(403, "Incorrect API key provided", code="invalid_api_key"),
        "wrong argument": refused(400, status="INVALID_ARGUMENT", details=[{"reason": "API_KEY_INVALID"}]),
    },
    "200 with a body that is not JSON": {
        "page": always(raw_answer(b"<html>", "text/html")),
        "cut": always(raw_answer(b'{"model"')),
        "no text": always(raw_answer(b"\xff\xfe{")),
        "nothing": always(raw_answer(b"")),
    },
    "401 or 403 of a moderation, or of a provider behind a gateway": {
        "flagged": refused(403, "flagged", metadata={"reasons": ["violence"]}),
        "of upstream": refused(401, **UPSTREAM),
    },
    "another server error, a broken connection or an unusable answer": {
        "500": always(answering(500, {})),
        "broken off": always(broken),
        "cut off": cut_off,
        "empty": lambda way: sent(way, {}),
        "inside a 200": inside(message="upstream broke"),
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
"""The subject of the fault, according to each row of the table."""

SILENCED = {
    "key and model": {"same row", "same name"},
    "this model's requests": {"same row"},
    "account": {"same row"},
    "key": {"same row"},
    "request": set[str](),
}
"""The caller that is not retried, by the subject of a fault; all other faults are retried within the same request."""

CASES = [pytest.param(row, way, id=f"{way}: {row}") for row in FAULTS for way in WAYS]


def test_every_row_of_the_table_has_its_faults() -> None:
    assert SUBJECTS.keys() == FAULTS.keys()
    assert {way.protocol for way in WAYS} == PROTOCOLS.keys() == REQUESTS.keys()
    assert sum(len(FAULTS[row]) for row in FAULTS) * len(WAYS) >= 150


HEALTHY = [replace(TURN.model, id=f"healthy-{n}", router_model_name=f"lab/healthy-{n}") for n in range(3)]

Serve = Callable[[Way, list[Reply]], Awaitable[tuple[ProviderClient, list[str]]]]


@pytest.fixture
async def serve(timer: Timer) -> AsyncIterator[Serve]:
    """Start a server and a client with one key.

    The server follows the script, or answers correctly when it is over; healthy models are always answered correctly.
    """
    opened: list[Any] = []
    violations: list[str] = []

    async def start(way: Way, script: list[Reply]) -> tuple[ProviderClient, list[str]]:
        asked: list[str] = []

        async def handle(request: web.Request) -> web.StreamResponse:
            asked.append(request.path)
            content = await request.read()
            body = orjson.loads(content)
            if way.protocol == "responses":
                body.pop("temperature", None)  # which models that reason refuse, and others take
            try:
                msgspec.convert(body, REQUESTS[way.protocol])
            except msgspec.ValidationError as error:
                violations.append(f"{way}: {error}")
            is_healthy = "healthy" in request.path or b"lab/healthy" in content
            return await (script.pop(0) if script and not is_healthy else good(way))(request)

        app = web.Application()
        app.router.add_post("/{path:.*}", handle)
        server = TestServer(app)
        await server.start_server()
        definition = ProviderDefinition(
            name="lab", base_url=str(server.make_url("/v1")), protocol=way.protocol, stream=way.is_streamed
        )
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
    assert not violations


@pytest.mark.parametrize(("row", "way"), CASES)
async def test_no_fault_of_a_model_costs_its_neighbors_a_cycle(serve: Serve, timer: Timer, row: str, way: Way) -> None:
    client, script = None, list[Reply]()
    for name, fault in FAULTS[row].items():
        for faults in (1, 40):
            script = [fault(way)] * faults
            client, _ = await serve(way, script)
            for _ in range(2):
                with suppress(ProviderError):
                    await client.answer(TURN)
                turns = [replace(TURN, model=model, wait_max_s=500.0) for model in HEALTHY]
                answers = await asyncio.gather(*(client.answer(turn) for turn in turns))
                assert [each.waited_s for each in answers] == [0.0] * len(HEALTHY), name
                assert (client.outage(), client.keys_in_cooldown()) == (None, {}), name
                timer.now += 60


@pytest.mark.parametrize(("row", "way"), CASES)
async def test_each_fault_affects_only_its_subject(serve: Serve, row: str, way: Way) -> None:
    for name, fault in FAULTS[row].items():
        await check_subject(serve, row, way, name, fault)


async def check_subject(serve: Serve, row: str, way: Way, name: str, fault: Fault) -> None:
    client, asked = await serve(way, [fault(way)])
    about = SUBJECTS[row]
    if (about, way.protocol) == ("model", "gemini"):  # its optional fields are nested in a mandatory one
        about = "request"
    if about in ("attempt", "model"):
        assert (await client.answer(TURN)).calls[0].name == "holding", name
        assert len(asked) == 2, name
        assert client.left_out(TURN.model) == ({"temperature"} if about == "model" else set()), name
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
    assert silenced == SILENCED[about], name
    assert len(asked) == 1 + len(models) - len(silenced), name


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_a_stated_wait_is_heeded(serve: Serve, timer: Timer, way: Way) -> None:
    for name in (
        "with Retry-After",
        "with retry-after-ms",
        "with a spent limit",
        "with RetryInfo",
        "with OpenRouter's reset",
    ):
        client, _ = await serve(way, [FAULTS["429"][name](way)])
        answer = await client.answer(replace(TURN, wait_max_s=100.0))
        assert 20 <= answer.waited_s < 21, name


# --- odd answers ------------------------------------------------------------------------------------------------------


def read(way: Way, body: bytes) -> ChatCompletion:
    """Read the body of a response as the client does."""
    wire = PROTOCOLS[way.protocol]
    if way.is_streamed:
        assert isinstance(wire, StreamedProtocol)
        body = wire.joined(events_of(body))
    return decode_reply(wire.completion(body))


DEEP: Any = []
for _ in range(600):
    DEEP = [DEEP]
ODD: list[Any] = [None, True, -1, 1.5, 10**40, "", "x\x00", "1", [], {}, [None], {"a": 1}, [[]], DEEP]
"""Values that a field does not have, unless by mistake."""


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_in(item, (*path, key))


def changed(answer: Any, path: tuple[Any, ...], value: Any) -> Any:
    whole = {"root": copy.deepcopy(answer)}
    part: Any = whole
    for key in ("root", *path)[:-1]:
        part = part[key]
    part[("root", *path)[-1]] = value
    return whole["root"]


def without(answer: Any, path: tuple[Any, ...]) -> Any:
    whole = copy.deepcopy(answer)
    part = whole
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return whole


def mutants(answer: Any) -> Iterator[Any]:
    for path in paths_in(answer):
        for value in ODD:
            if path or isinstance(value, dict):
                yield changed(answer, path, value)
        if path:
            yield without(answer, path)


ERROR = {
    "code": 429, "type": "rate_limit_error", "status": "RESOURCE_EXHAUSTED", "message": "`temperature`: not supported",
    "param": "temperature", "details": [{"retryDelay": "20s"}],
    "metadata": {"provider_name": "Lab", "reasons": ["a"], "headers": {"X-RateLimit-Reset": "20"}},
}  # fmt: skip


def test_an_odd_value_anywhere_in_an_error_causes_at_most_a_refusal() -> None:
    for mutant in mutants({"error": ERROR, "choices": []}):
        content = msgspec.json.encode(mutant)
        for status in (400, 401, 402, 403, 422, 429):
            assert subject_of(status, content) in (*COOLDOWN_REFUSALS, "request")
            assert (retry_after_of(status, {"Date": "Thu, 02 Jan 2025 12:00:00 GMT"}, content) or 0) >= 0
        assert refused_field(content, {"temperature", "top_p"}) in ("temperature", None)
        assert len(words_of(content)) <= 300


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_odd_value_anywhere_in_an_answer_causes_at_most_a_failure(way: Way) -> None:
    wire, read_ones = PROTOCOLS[way.protocol], 0
    failed = {"status": "failed", "error": ERROR, "type": "error"}
    for mutant in [*mutants(GOOD[way.protocol]), *mutants(failed)]:
        body = body_of(way, mutant)
        try:
            reply = read(way, body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue  # which the client takes for an unusable answer
        if reply.failure:
            said = msgspec.json.encode({"error": reply.failure})
            status = status_of(reply.failure)
            subject_of(status, said), words_of(said), retry_after_of(status, {}, said)
            continue
        if not reply.choices:
            continue
        answer = answer_of(reply, TURN, 1, 300)
        counts = (answer.input_tokens, answer.output_tokens, answer.cached_tokens, answer.cache_write_tokens)
        assert all(count is None or count >= 0 for count in counts)
        assert answer.tokens_spent > 0
        results = [{"role": "tool", "tool_call_id": call.id, "content": "{}"} for call in answer.calls]
        messages = [*TURN.messages, answer.message, *results]
        turn = replace(TURN, messages=messages)
        msgspec.json.encode(wire.request(turn, wire.limit_fields[0], stream=way.is_streamed))
        read_ones += 1
    assert read_ones > 50


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_odd_usage_spoils_no_answer(way: Way) -> None:
    answer, field = GOOD[way.protocol], USAGE.get(way.protocol, "usage")
    inner = [path for path in paths_in(answer) if path[:1] == (field,)]
    odd = [changed(answer, path, value) for path in inner for value in ODD if value is not DEEP]
    for mutant in [*odd, *(without(answer, path) for path in inner)]:
        reply = read(way, body_of(way, mutant))
        (call,) = answer_of(reply, TURN, 1, 300).calls
        assert call.name == "holding", mutant.get(field)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_unknown_finish_reason_is_a_complete_answer(way: Way) -> None:
    path = {
        "chat": ("choices", 0, "finish_reason"), "responses": ("status",), "messages": ("stop_reason",),
        "gemini": ("candidates", 0, "finishReason"),
    }[way.protocol]  # fmt: skip
    answer = answer_of(read(way, body_of(way, changed(GOOD[way.protocol], path, "of_tomorrow"))), TURN, 1, 300)
    assert ([call.name for call in answer.calls], answer.cut_by) == (["holding"], None)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_part_of_an_answer_is_one(way: Way) -> None:
    """Cut at any byte, an answer with calls is none: the books have all of a decision, or nothing."""
    body = body_of(way, GOOD[way.protocol])
    whole, complete_at = answer_of(read(way, body), TURN, 1, 300), len(body)
    for length in range(len(body)):
        with suppress(msgspec.MsgspecError, ValueError):
            assert answer_of(read(way, body[:length]), TURN, 1, 300).calls == whole.calls, f"cut at {length}"
            complete_at = min(complete_at, length)
    assert complete_at >= (body.rindex(b"finish_reason") if b"[DONE]" in body else len(body.rstrip()) - 1)


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_chunks_of_any_size_are_one_answer(serve: Serve, way: Way) -> None:
    body = body_of(way, GOOD[way.protocol])

    async def trickle(request: web.Request) -> web.StreamResponse:
        kind = "text/event-stream" if way.is_streamed else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for byte in body:
            await response.write(bytes([byte]))
        return response

    client, asked = await serve(way, [trickle])
    answer = await client.answer(TURN)
    assert ([call.name for call in answer.calls], answer.input_tokens, answer.output_tokens) == (["holding"], 100, 20)
    assert (answer.text, len(asked)) == ("So", 1)


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_an_empty_answer_beside_others_is_charged_what_it_reports(serve: Serve, way: Way) -> None:
    field = USAGE.get(way.protocol, "usage")
    client, asked = await serve(way, [sent(way, {field: GOOD[way.protocol][field]})])
    turns = [replace(TURN, model=model) for model in (TURN.model, *HEALTHY)]
    empty, *others = await asyncio.gather(*(client.answer(turn) for turn in turns))
    assert (empty.calls, empty.input_tokens, empty.output_tokens, empty.unmetered_attempts) == ((), 100, 20, 0)
    assert all(each.calls for each in others)
    assert len(asked) == len(turns)


async def test_the_books_have_all_of_a_cut_decision_or_nothing(database: Database, serve: Serve) -> None:
    """Two orders in one streamed answer, cut at places all over it: none is placed until both are complete."""
    orders = [opening(quantity=0.01), opening(symbol="ETH", quantity=0.1, stop=3_000, target=3_600)]
    calls = [
        {
            "index": n,
            "id": f"c{n}",
            "type": "function",
            "function": {"name": name, "arguments": orjson.dumps(given).decode()},
        }
        for n, (name, given) in enumerate(orders)
    ]
    way, answer = Way("chat", is_streamed=True), copy.deepcopy(GOOD["chat"])
    answer["choices"][0]["message"]["tool_calls"] = calls
    body = body_of(way, answer)
    finished = body.rindex(b"finish_reason")
    cuts = [finished * part // 8 for part in range(1, 9)]
    script: list[Reply] = []
    client, _ = await serve(way, script)
    async with open_floor(database, provider=client) as floor:
        await floor.add("ada", provider="lab")
        for cut in cuts:
            script[:] = [raw_answer(body[:cut], "text/event-stream")] * 4
            (record,) = await floor.cycle()
            assert record.invocation.status == "failed"
            assert not record.tool_calls
            assert not floor.exchange.account("ada").positions
        script[:] = [raw_answer(body, "text/event-stream")]
        (record,) = await floor.cycle()
        assert [call.status for call in record.tool_calls] == ["ok", "ok", "ok"]
        assert set(floor.exchange.account("ada").positions) == {"BTC", "ETH"}
