"""The chat-completions client against a server that speaks the protocol, well and badly, over real sockets."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from trader.domain.agents.conversation import ModelAnswer, Turn
from trader.domain.agents.tools import BadCall, Holding, decode
from trader.domain.agents.view import ObservedAccount, ObservedStats, View
from trader.domain.models import Model, VariantId
from trader.errors import ProviderError
from trader.gateways.agents.chat import ANSWER_BYTES_MAX, ChatClient, ProviderRow
from trader.gateways.agents.replies import decode_reply
from trader.setting_forms import Secret

NOW = datetime(2025, 1, 2, 12, tzinfo=UTC)
KEYS = ("sk-alpha-000000000001", "sk-beta-0000000000002", "sk-gamma-000000000003")
MODEL = Model(
    id="m", name="M", variant=VariantId.APEX, provider="fake", router_model_name="lab/one", created_at=NOW
)  # fmt: skip
ZERO = Decimal(0)
VIEW = View(
    at=NOW,
    account=ObservedAccount(
        initial_capital=ZERO, equity=ZERO, cash=ZERO, available_cash=ZERO, margin=ZERO, exposure=ZERO,
        day_opening_equity=ZERO, peak_equity=ZERO, drawdown_percent=ZERO, day_loss_percent=ZERO, taker_fee_rate=ZERO,
    ),
    positions=(), trades=(), stats=ObservedStats(), markets={},
)  # fmt: skip
TURN = Turn(
    model=MODEL,
    temperature=0.7,
    number=1,
    view=VIEW,
    messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    answer_tokens_max=1000,
)

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def said(message: dict[str, Any], **more: Any) -> dict[str, Any]:
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


OK = answering(200, said(held()))


class FakeServer:
    """Gives the scripted replies in their order, the last one for ever; remembers the keys and bodies that came."""

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
    """Seconds in a test's hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServer, str]]:
    server = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    async with TestServer(app) as running:
        yield server, str(running.make_url("/v1"))


MakeClient = Callable[..., ChatClient]


@pytest.fixture
async def client_of(fake: tuple[FakeServer, str]) -> AsyncIterator[MakeClient]:
    made: list[ChatClient] = []

    def make(*keys: str, timer: Callable[[], float] | None = None, limit_s: float = 5.0) -> ChatClient:
        client = ChatClient(
            ProviderRow("fake", fake[1]),
            [Secret(key) for key in keys],
            timer=timer or Timer(),
            attempt_limit_s=limit_s,
            backoff_s=0.001,
        )
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


async def test_request_and_answer(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    server, _ = fake
    server.script = [answering(200, said({**held(), "reasoning": "thought"}, usage={
        "prompt_tokens": 7, "completion_tokens": 3, "cost": 0.00125,
    }))]  # fmt: skip
    answer = await client_of(KEYS[0]).answer(TURN)
    body = server.bodies[0]
    assert body["model"] == "lab/one"
    assert body["temperature"] == 0.7
    assert body["messages"] == TURN.messages
    assert body["max_tokens"] == 1000
    assert [tool["function"]["name"] for tool in body["tools"]] == [
        "createPosition", "closePosition", "updateExitPlan", "fetchIndicators", "holding",
    ]  # fmt: skip
    assert all(tool["function"]["strict"] for tool in body["tools"])
    assert (answer.input_tokens, answer.output_tokens, answer.tokens_spent) == (7, 3, 10)
    assert answer.cost_usd == Decimal("0.00125")
    assert (answer.model, answer.key_number) == ("lab/one-2025", 1)
    assert answer.message["reasoning"] == "thought"
    assert decode(answer.calls[0]) == Holding(reason="calm")


async def test_the_duration_is_real_time_with_all_attempts(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return await OK(request)

    fake[0].script = [answering(500), slow]
    answer = await client_of(KEYS[0]).answer(TURN)
    assert answer.duration_ms is not None
    assert 50 <= answer.duration_ms < 5_000


async def test_keys_are_used_in_turn(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    client = client_of(*KEYS)
    numbers = [(await client.answer(TURN)).key_number for _ in range(4)]
    assert numbers == [1, 2, 3, 1]
    assert fake[0].keys == [KEYS[0], KEYS[1], KEYS[2], KEYS[0]]


async def test_no_key_sends_no_credentials(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    answer = await client_of().answer(TURN)
    assert answer.key_number is None
    assert fake[0].keys == [""]


async def test_rate_limit_rests_a_key_for_its_retry_after(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    server, timer = fake[0], Timer()
    server.by_key[KEYS[0]] = answering(429, {"error": {"message": "slow"}}, Retry_After="120")
    client = client_of(KEYS[0], KEYS[1], timer=timer)
    assert [(await client.answer(TURN)).key_number for _ in range(3)] == [2, 2, 2]
    assert server.keys == [KEYS[0], KEYS[1], KEYS[1], KEYS[1]]
    timer.now += 119
    assert (await client.answer(TURN)).key_number == 2
    assert server.keys.count(KEYS[0]) == 1
    timer.now += 1
    del server.by_key[KEYS[0]]
    assert (await client.answer(TURN)).key_number == 1


async def test_rest_doubles_without_retry_after(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    server, timer = fake[0], Timer()
    server.script = [answering(429)]
    client = client_of(KEYS[0], timer=timer)
    for rest_s in (30, 60, 120, 240, 480, 600, 600):
        with pytest.raises(ProviderError, match=rf"every key of fake rests .* free in {rest_s} s"):
            await client.answer(TURN)
        calls = len(server.keys)
        timer.now += rest_s - 1
        with pytest.raises(ProviderError, match="rests"):
            await client.answer(TURN)
        assert len(server.keys) == calls, "a resting key is not used"
        timer.now += 1
    server.script = [OK]
    await client.answer(TURN)
    server.script = [answering(429)]
    with pytest.raises(ProviderError, match="free in 30 s"):
        await client.answer(TURN)


@pytest.mark.parametrize(
    ("headers", "rest_s"),
    [
        ({"Retry_After": "86400"}, 600),
        ({"Retry_After": "Thu, 02 Jan 2025 12:01:30 GMT", "Date": "Thu, 02 Jan 2025 12:00:00 GMT"}, 90),
        ({"Retry_After": "soon"}, 30),
        ({"Retry_After": "-5"}, 30),
        ({"Retry_After": "nan"}, 30),
    ],
)
async def test_retry_after_forms(
    fake: tuple[FakeServer, str], client_of: MakeClient, headers: dict[str, str], rest_s: int
) -> None:
    fake[0].script = [answering(429, **headers)]
    with pytest.raises(ProviderError, match=f"free in {rest_s} s"):
        await client_of(KEYS[0]).answer(TURN)


async def test_a_rest_of_no_time_is_not_used_up_at_once(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    server = fake[0]
    server.script = [answering(429, Retry_After="0")]
    client = client_of(KEYS[0], KEYS[1])
    for calls in (2, 4):
        async with asyncio.timeout(5):
            with pytest.raises(ProviderError, match="every key of fake rests"):
                await client.answer(TURN)
        assert len(server.keys) == calls, "each key is asked once for an answer"


async def test_refused_keys_are_out_until_restart(
    fake: tuple[FakeServer, str], client_of: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    server, timer = fake[0], Timer()
    server.by_key[KEYS[0]] = answering(401, {"error": {"message": f"Incorrect API key provided: {KEYS[0]}"}})
    server.by_key[KEYS[1]] = answering(403)
    client = client_of(KEYS[0], KEYS[1], timer=timer)
    with caplog.at_level(logging.DEBUG), pytest.raises(ProviderError) as caught:
        await client.answer(TURN)
    assert "refused every key (2)" in str(caught.value)
    assert "key 1 was refused with status 401" in caplog.text
    timer.now += 10_000
    with pytest.raises(ProviderError):
        await client.answer(TURN)
    assert len(server.keys) == 2
    produced = caplog.text + str(caught.value) + repr(client)
    assert not any(key in produced for key in KEYS)


@pytest.mark.parametrize("status", [500, 502, 503, 529, 408])
async def test_server_failures_are_tried_on_another_key(
    fake: tuple[FakeServer, str], client_of: MakeClient, status: int
) -> None:
    server = fake[0]
    server.script = [answering(status), answering(status), answering(status), OK]
    answer = await client_of(*KEYS).answer(TURN)
    assert answer.key_number == 1
    assert server.keys == [KEYS[0], KEYS[1], KEYS[2], KEYS[0]]


async def test_another_key_is_tried_whatever_others_ask_meanwhile(
    fake: tuple[FakeServer, str], client_of: MakeClient
) -> None:
    fake[0].by_key[KEYS[0]] = answering(500)
    client = client_of(KEYS[0], KEYS[1])
    answers = await asyncio.gather(client.answer(TURN), client.answer(TURN))
    assert [answer.key_number for answer in answers] == [2, 2]
    assert fake[0].keys.count(KEYS[0]) == 1, "it is not asked again while there is another"


async def test_gives_up_after_three_retries(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    fake[0].script = [answering(500)]
    with pytest.raises(ProviderError, match="fake answered 500; gave up after 4 attempts"):
        await client_of(KEYS[0]).answer(TURN)
    assert len(fake[0].keys) == 4


async def test_slow_answers_time_out_and_are_tried_again(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for _ in range(100):  # never idle, never done
            await response.write(b" ")
            await asyncio.sleep(0.02)
        return response

    fake[0].script = [drip, OK]
    assert (await client_of(KEYS[0], limit_s=0.2).answer(TURN)).calls
    assert len(fake[0].keys) == 2


async def test_cut_answers_are_tried_again(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "5000"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        assert request.transport is not None
        request.transport.close()
        return response

    fake[0].script = [cut, OK]
    assert (await client_of(KEYS[0]).answer(TURN)).calls
    assert len(fake[0].keys) == 2


def raw_answer(body: bytes, content_type: str = "application/json") -> Reply:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type)

    return reply


def broken_off(code: int) -> dict[str, Any]:
    """A choice that ended in an error while the model spoke, as gateways tell it."""
    message = {"role": "assistant", "content": "BTC looks"}
    return {"finish_reason": "error", "message": message, "error": {"code": code, "message": "upstream"}}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (raw_answer(b"<html>Login</html>", "text/html"), "text/html instead of JSON"),
        (raw_answer(b'{"choices": ['), "unusable JSON"),
        (raw_answer(b"[" * 100_000), "unusable JSON"),
        (raw_answer(b'{"choices": [], "a": "\xff\xfe"}'), "(unusable JSON|without choices)"),
        (raw_answer(b""), "unusable JSON"),
        (answering(200, {}), "without choices"),
        (answering(200, {"choices": None, "error": None}), "without choices"),
        (answering(200, {"choices": [], "error": {}}), "without choices"),
        (answering(200, {"choices": "none"}), "unusable JSON"),
        (raw_answer(b'{"choices": [{"message": {"reasoning": %s}}]}' % (b"[" * 700 + b"]" * 700)), "unusable JSON"),
        (answering(200, {"choices": [{"message": None}]}), "unusable JSON"),
        (answering(200, {"choices": [{"message": {"tool_calls": [{"id": "x"}]}}]}), "unusable JSON"),
        (answering(200, {"error": {"code": 502, "message": "upstream"}}), "answered 502"),
        (answering(200, {"error": "bad"}), "answered 502"),
        (answering(200, {"choices": [broken_off(503)]}), "answered 503"),
        (answering(200, {"choices": [broken_off(503) | {"error": None}]}), "answered 502"),
    ],
)
async def test_unusable_answers_with_status_200(
    fake: tuple[FakeServer, str], client_of: MakeClient, reply: Reply, reason: str
) -> None:
    fake[0].script = [reply]
    with pytest.raises(ProviderError, match=reason):
        await client_of(KEYS[0]).answer(TURN)
    assert len(fake[0].keys) == 4
    fake[0].script = [reply, OK]
    assert (await client_of(KEYS[0]).answer(TURN)).calls


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"code": 429, "message": "slow"}},
        {"error": {"code": 429, "message": "slow"}, "choices": None},
        {"choices": [broken_off(429)]},
    ],
)
async def test_rate_limit_inside_a_200_rests_the_key(
    fake: tuple[FakeServer, str], client_of: MakeClient, body: dict[str, Any]
) -> None:
    fake[0].by_key[KEYS[0]] = answering(200, body)
    client = client_of(KEYS[0], KEYS[1])
    assert [(await client.answer(TURN)).key_number for _ in range(2)] == [2, 2]
    assert fake[0].keys.count(KEYS[0]) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (
            answering(403, {"error": {"code": 403, "message": "flagged", "metadata": {"reasons": ["x"]}}}),
            "answered 403: .*flagged",
        ),
        (
            answering(401, {"error": {"code": 401, "message": "no", "metadata": {"provider_name": "Lab"}}}),
            "answered 401: .*Lab",
        ),
        (answering(200, {"choices": [broken_off(403)]}), "answered 403: .*upstream"),
    ],
)
async def test_what_is_refused_and_is_not_the_key_leaves_the_key_in_use(
    fake: tuple[FakeServer, str], client_of: MakeClient, reply: Reply, reason: str
) -> None:
    client = client_of(*KEYS)
    fake[0].script = [reply, OK]
    with pytest.raises(ProviderError, match=reason):
        await client.answer(TURN)
    assert client.usage.keys_out == 0
    assert len({(await client.answer(TURN)).key_number for _ in KEYS}) == len(KEYS)


async def test_client_errors_are_told_without_the_key(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    fake[0].script = [answering(400, {"error": {"message": f"bad model, key {KEYS[0]}"}})]
    with pytest.raises(ProviderError, match=r"fake answered 400: .*bad model") as caught:
        await client_of(KEYS[0]).answer(TURN)
    assert KEYS[0] not in str(caught.value)
    assert len(fake[0].keys) == 1, "a request that is wrong stays wrong"


def refusing(field: str) -> Reply:
    error = {"message": f"'{field}' is not supported with this model.", "code": "unsupported_value", "param": field}

    async def reply(request: web.Request) -> web.StreamResponse:
        if field in orjson.loads(await request.read()):
            return web.json_response({"error": error}, status=400)
        return await OK(request)

    return reply


async def test_a_model_is_asked_without_the_field_it_does_not_take(
    fake: tuple[FakeServer, str], client_of: MakeClient
) -> None:
    server, client = fake[0], client_of(KEYS[0])
    server.script = [refusing("temperature")]
    assert (await client.answer(TURN)).calls
    assert ["temperature" in body for body in server.bodies] == [True, False]
    await client.answer(TURN)
    assert "temperature" not in server.bodies[2], "it is remembered"
    server.script = [refusing("max_tokens")]
    assert (await client.answer(TURN)).calls
    assert (server.bodies[-1].get("max_completion_tokens"), "max_tokens" in server.bodies[-1]) == (1000, False)
    other = msgspec.structs.replace(TURN, model=msgspec.structs.replace(MODEL, router_model_name="lab/two"))
    server.script = [OK]
    await client.answer(other)
    assert {"temperature", "max_tokens"} <= server.bodies[-1].keys(), "another model takes them"


async def test_models_of_one_name_that_are_asked_at_once_are_all_asked_again(
    fake: tuple[FakeServer, str], client_of: MakeClient
) -> None:
    fake[0].script = [refusing("temperature")]
    client = client_of(KEYS[0])
    answers = await asyncio.gather(*(client.answer(TURN) for _ in range(4)))
    assert all(answer.calls for answer in answers)
    assert len(fake[0].bodies) == 8, "each was told, and asked again without it"


async def test_a_field_that_must_be_or_that_was_left_out_already_fails(
    fake: tuple[FakeServer, str], client_of: MakeClient
) -> None:
    for field, asked in (("messages", 1), ("temperature", 2)):
        fake[0].keys.clear()
        error = {"message": "no", "code": "unsupported_parameter", "param": field}
        fake[0].script = [answering(400, {"error": error})]
        with pytest.raises(ProviderError, match="fake answered 400"):
            await client_of(KEYS[0]).answer(TURN)
        assert len(fake[0].keys) == asked


async def test_what_could_not_be_used_is_told_without_the_key(
    fake: tuple[FakeServer, str], client_of: MakeClient
) -> None:
    html = f"<html>{KEYS[0]}{'x' * 20_000}".encode()
    for reply, said in (
        (raw_answer(html, "text/html"), "<html>***" + "x" * 16_375),
        (answering(429, {"error": "slow"}), '{"error": "slow"}'),
        (answering(400, {"error": f"no {KEYS[0]}"}), '{"error": "no ***"}'),
    ):
        fake[0].script = [reply]
        with pytest.raises(ProviderError) as caught:
            await client_of(KEYS[0]).answer(TURN)
        assert caught.value.said == said


async def test_redirects_are_not_followed(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    fake[0].script = [answering(302, None, Location="http://127.0.0.1:1/")]
    with pytest.raises(ProviderError, match="answered 302"):
        await client_of(KEYS[0]).answer(TURN)


async def test_huge_answers_are_bounded(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    fake[0].script = [raw_answer(b" " * (ANSWER_BYTES_MAX + 1))]
    with pytest.raises(ProviderError, match="more than 4 MiB"):
        await client_of(KEYS[0]).answer(TURN)
    assert len(fake[0].keys) == 1


async def test_unreachable_server() -> None:
    client = ChatClient(ProviderRow("fake", "http://127.0.0.1:1/v1"), [Secret(KEYS[0])], backoff_s=0.001)
    with pytest.raises(ProviderError, match="could not be reached"):
        await client.answer(TURN)
    await client.close()


async def read(fake: tuple[FakeServer, str], client: ChatClient, message: dict[str, Any], **more: Any) -> ModelAnswer:
    fake[0].script = [answering(200, said(message, **more))]
    return await client.answer(TURN)


async def test_several_calls_and_odd_ones(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "fetchIndicators", "arguments": '{"symbol": "BTC"'}},
        {"function": {"name": "holding", "arguments": {"reason": "as an object"}}},
        {"id": "c", "function": {"name": "sellEverything", "arguments": None}},
    ]
    answer = await read(fake, client_of(KEYS[0]), {"content": "text", "tool_calls": calls})
    assert [call.id for call in answer.calls] == ["a", "call_1_2", "c"]
    assert isinstance(decode(answer.calls[0]), BadCall)
    assert decode(answer.calls[1]) == Holding(reason="as an object")
    unknown = decode(answer.calls[2])
    assert isinstance(unknown, BadCall)
    assert "no tool 'sellEverything'" in unknown.error
    echoed = [call["function"]["arguments"] for call in answer.message["tool_calls"]]
    assert echoed[0] == "{}", "text that is no JSON would make the provider refuse its own call"


async def test_calls_go_back_as_the_protocol_allows(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    names = ("holding", "multi_tool_use.parallel", "", "x" * 300)
    calls: list[dict[str, Any]] = [{"id": "same", "function": {"name": name, "arguments": "{}"}} for name in names]
    calls += [{"id": 7, "function": {"name": "holding", "arguments": "{}"}}, {"function": {"name": None}}]
    answer = await read(fake, client_of(KEYS[0]), {"tool_calls": calls}, model=7)
    ids = [call.id for call in answer.calls]
    assert ids == ["same", "call_1_2", "call_1_3", "call_1_4", "call_1_5", "call_1_6"], "each result is told apart"
    assert [call.name for call in answer.calls] == [*names, "holding", ""], "as they came, for the record"
    assert [call["id"] for call in answer.message["tool_calls"]] == ids
    echoed = [call["function"]["name"] for call in answer.message["tool_calls"]]
    assert echoed == ["holding", "multi_tool_use_parallel", "_", "x" * 64, "holding", "_"]
    assert answer.model == "lab/one", "what is no name is none"


async def test_an_answer_that_is_cut_or_refuses_says_so(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    client = client_of(KEYS[0])
    for reason, cut_by in (
        ("length", "length"), ("content_filter", "content_filter"), ("stop", None), (None, None), (["odd"], None),
    ):  # fmt: skip
        choice = {"finish_reason": reason, "message": {"content": None, "refusal": "I cannot help with that."}}
        fake[0].script = [answering(200, {"choices": [choice]})]
        answer = await client.answer(TURN)
        assert (answer.cut_by, answer.text) == (cut_by, "I cannot help with that.")


async def test_a_long_answer_is_read_beside_the_loop(
    fake: tuple[FakeServer, str], client_of: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[bool] = []

    def noting(content: bytes) -> object:
        readers.append(threading.current_thread() is threading.main_thread())
        return decode_reply(content)

    monkeypatch.setattr("trader.gateways.agents.chat.decode_reply", noting)
    client = client_of(KEYS[0])
    for size in (10, 200_000):
        answer = await read(fake, client, {"content": "x" * size})
        assert answer.text == "x" * size
    assert readers == [True, False]


async def test_what_is_odd_goes_back_as_it_came(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    client, huge, deep = client_of(KEYS[0]), 10**40, "[" * 300 + "]" * 300
    details = [{"index": huge}, msgspec.json.decode(deep)]
    call = {"function": {"name": "holding", "arguments": {"reason": huge}}}
    answer = await read(fake, client, {"content": "", "reasoning_details": details, "tool_calls": [call]})
    assert isinstance(decode(answer.calls[0]), BadCall)
    fake[0].script = [OK]
    turn = msgspec.structs.replace(TURN, number=2, messages=[*TURN.messages, answer.message])
    assert (await client.answer(turn)).calls
    assert fake[0].bodies[-1]["messages"][-1]["reasoning_details"] == details


async def test_missing_and_odd_usage(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    client = client_of(KEYS[0])
    for usage in (None, {}, "many", {"prompt_tokens": -1, "completion_tokens": 1.5, "cost": -2}):
        answer = await read(fake, client, held(), usage=usage)
        assert (answer.input_tokens, answer.output_tokens, answer.cost_usd) == (0, 0, None)
        assert answer.tokens_spent > 0, "the budget still counts"


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        ({"cost": 0.00014}, "0.00014"),
        ({"cost": 1e-7}, "0.0000001"),
        ({"cost": 0.95, "is_byok": True, "cost_details": {"upstream_inference_cost": 19}}, "19.95"),
        ({"is_byok": True, "cost_details": {"upstream_inference_cost": 0.3}}, "0.3"),
        ({"cost": 0.95, "is_byok": True, "cost_details": {"upstream_inference_cost": None}}, "0.95"),
        ({"cost": 0.95, "is_byok": False, "cost_details": {"upstream_inference_cost": 0.95}}, "0.95"),
        ({"cost": 0.95, "is_byok": True, "cost_details": []}, "0.95"),
    ],
)
async def test_the_cost_is_what_was_paid_for_the_answer(
    fake: tuple[FakeServer, str], client_of: MakeClient, usage: dict[str, Any], cost: str
) -> None:
    answer = await read(fake, client_of(KEYS[0]), held(), usage=usage)
    assert answer.cost_usd == Decimal(cost)


async def test_text_in_parts_and_nul_characters(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "a\x00b"}, {"type": "text", "text": "c"}]
    answer = await read(fake, client_of(KEYS[0]), {"content": parts, "reasoning_content": "x\x00"})
    assert answer.text == "abc"
    assert answer.message["reasoning_content"] == "x"
    assert answer.calls == ()


async def test_cancellation_passes_through(fake: tuple[FakeServer, str], client_of: MakeClient) -> None:
    asked = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.sleep(30)
        raise AssertionError

    fake[0].script = [hang]
    task = asyncio.create_task(client_of(KEYS[0]).answer(TURN))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
