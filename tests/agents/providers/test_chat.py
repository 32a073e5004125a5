"""The chat-completions client against a server that speaks the protocol, correctly or not, over real sockets."""

import asyncio
import logging
from decimal import Decimal
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web
from support.chat_server import (
    KEYS,
    MODEL,
    OK,
    TURN,
    FakeServer,
    MakeClient,
    Reply,
    Timer,
    answering,
    completion,
    held,
    raw_answer,
)

from trader.agents.domain.models import ModelConfiguration, ProviderDefinition
from trader.agents.domain.tools import Holding, decode
from trader.agents.providers.attempts import ANSWER_BYTES_MAX
from trader.agents.providers.client import FAILED_TURNS_MAX, AttemptTiming, ProviderAccess, ProviderClient
from trader.agents.providers.protocols import thinking_budget
from trader.core.errors import ProviderError, ProviderTimeout
from trader.settings.forms import Secret


async def test_request_and_answer(server: FakeServer, client_of: MakeClient) -> None:
    server.script = [answering(200, completion({**held(), "reasoning": "thought"}, usage={
        "prompt_tokens": 7, "completion_tokens": 3, "cost": 0.00125,
    }))]  # fmt: skip
    answer = await client_of(KEYS[0]).answer(TURN)
    body = server.bodies[0]
    assert body["model"] == "lab/one"
    assert body["temperature"] == 0.7
    assert body["messages"] == TURN.messages
    assert body["max_tokens"] == 1000
    assert [tool["function"]["name"] for tool in body["tools"]] == [
        "createPosition", "closePosition", "updateExitPlan", "placeOrder", "cancelOrder", "fetchIndicators",
        "fetchOrderBook", "note",
        "holding",
    ]  # fmt: skip
    assert all(tool["function"]["strict"] for tool in body["tools"])
    assert (answer.input_tokens, answer.output_tokens, answer.tokens_spent) == (7, 3, 10)
    assert answer.cost_usd == Decimal("0.00125")
    assert (answer.model, answer.key_number) == ("lab/one-2025", 1)
    assert answer.message["reasoning"] == "thought"
    assert decode(answer.calls[0]) == Holding(reason="calm")


async def test_the_duration_is_real_time_with_all_attempts(server: FakeServer, client_of: MakeClient) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)  # part of the duration that is measured
        return await OK(request)

    server.script = [answering(500), slow]
    answer = await client_of(KEYS[0]).answer(TURN)
    assert answer.duration_ms is not None
    assert 50 <= answer.duration_ms < 5_000


async def test_keys_are_used_in_turn(server: FakeServer, client_of: MakeClient) -> None:
    client = client_of(*KEYS)
    numbers = [(await client.answer(TURN)).key_number for _ in range(4)]
    assert numbers == [1, 2, 3, 1]
    assert server.keys == [KEYS[0], KEYS[1], KEYS[2], KEYS[0]]


async def test_no_key_sends_no_credentials(server: FakeServer, client_of: MakeClient) -> None:
    answer = await client_of().answer(TURN)
    assert answer.key_number is None
    assert server.keys == [""]


async def test_cooldowns_double_without_retry_after(server: FakeServer, timer: Timer, client_of: MakeClient) -> None:
    server.script = [answering(429)]
    client = client_of(KEYS[0])
    for rest_s in (30, 60, 120, 240, 480, 600, 600):
        with pytest.raises(ProviderError, match=rf"key 1 is rate-limited \(429\) and is in cooldown for {rest_s} s"):
            await client.answer(TURN)
        calls = len(server.keys)
        timer.now += rest_s - 1
        with pytest.raises(ProviderError, match="cooldown"):
            await client.answer(TURN)
        assert len(server.keys) == calls, "a key in cooldown is not used"
        timer.now += 1
    server.script = [OK]
    await client.answer(TURN)
    server.script = [answering(429)]
    with pytest.raises(ProviderError, match="cooldown for 30 s"):
        await client.answer(TURN)


@pytest.mark.parametrize(
    ("headers", "rest_s"),
    [
        ({"Retry_After": "86400"}, 600),
        ({"Retry_After": "Thu, 02 Jan 2025 12:01:30 GMT", "Date": "Thu, 02 Jan 2025 12:00:00 GMT"}, 90),
        ({"Retry_After": "soon"}, 30),
        ({"Retry_After": "-5"}, 30),
        ({"Retry_After": "nan"}, 30),
        ({"retry_after_ms": "45500", "Retry_After": "60"}, 46),
        ({"x_ratelimit_reset_tokens": "1m40s"}, 100),
        (
            {
                "x_ratelimit_reset_requests": "17h0m0s",
                "x_ratelimit_remaining_requests": "9",
                "x_ratelimit_reset_tokens": "42.4s",
                "x_ratelimit_remaining_tokens": "0",
            },
            42,
        ),
        ({"X_RateLimit_Reset": "1735819290000", "Date": "Thu, 02 Jan 2025 12:00:00 GMT"}, 90),
    ],
)
async def test_retry_after_forms(
    server: FakeServer, client_of: MakeClient, headers: dict[str, str], rest_s: int
) -> None:
    server.script = [answering(429, **headers)]
    with pytest.raises(ProviderError, match=f"cooldown for {rest_s} s"):
        await client_of(KEYS[0]).answer(TURN)


async def test_zero_second_cooldowns_do_not_exhaust_the_retries(server: FakeServer, client_of: MakeClient) -> None:
    server.script = [answering(429, Retry_After="0")]
    client = client_of(KEYS[0], KEYS[1])
    for calls in (2, 4):
        async with asyncio.timeout(5):
            with pytest.raises(ProviderError, match=r"key 1 is rate-limited .*; key 2 is rate-limited"):
                await client.answer(TURN)
        assert len(server.keys) == calls, "each key is asked once for an answer"


async def test_refused_keys_are_used_again_after_ten_minutes(
    server: FakeServer, timer: Timer, client_of: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.by_key[KEYS[0]] = answering(401, {"error": {"message": f"Incorrect API key provided: {KEYS[0]}"}})
    server.by_key[KEYS[1]] = answering(403, {"error": {"message": "This API key has been disabled"}})
    client = client_of(KEYS[0], KEYS[1])
    with caplog.at_level(logging.DEBUG), pytest.raises(ProviderError) as caught:
        await client.answer(TURN)
    assert str(caught.value) == (
        "fake cannot be asked for lab/one now: key 1 was refused (401: Incorrect API key provided: ***) and is in "
        "cooldown for 600 s; key 2 was refused (403: This API key has been disabled) and is in cooldown for 600 s"
    )
    assert "key 1, asked for lab/one, was refused (401" in caplog.text
    timer.now += 599
    with pytest.raises(ProviderError):
        await client.answer(TURN)
    assert len(server.keys) == 2, "nobody asks with a refused key before its rest is over"
    timer.now += 1
    del server.by_key[KEYS[0]]
    assert (await client.answer(TWO)).key_number == 1, "a transient 401 needs no restart"
    produced = caplog.text + str(caught.value) + repr(client)
    assert not any(key in produced for key in KEYS)


@pytest.mark.parametrize("status", [500, 502, 503, 529, 408])
async def test_server_failures_are_tried_on_another_key(server: FakeServer, client_of: MakeClient, status: int) -> None:
    server.script = [answering(status), answering(status), answering(status), OK]
    answer = await client_of(*KEYS).answer(TURN)
    assert answer.key_number == 1
    assert server.keys == [KEYS[0], KEYS[1], KEYS[2], KEYS[0]]


async def test_another_key_is_tried_despite_concurrent_requests(server: FakeServer, client_of: MakeClient) -> None:
    server.by_key[KEYS[0]] = answering(500)
    client = client_of(KEYS[0], KEYS[1])
    answers = await asyncio.gather(client.answer(TURN), client.answer(TURN))
    assert [answer.key_number for answer in answers] == [2, 2]
    assert server.keys.count(KEYS[0]) == 1, "it is not asked again while there is another"


async def test_a_slow_answer_is_not_retried(server: FakeServer, client_of: MakeClient) -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for _ in range(100):  # never idle, never done
            await response.write(b" ")
            await asyncio.sleep(0.02)  # a provider that is never silent for long
        return response

    server.script = [drip, OK]
    client = client_of(KEYS[0], limit_s=0.2)
    with pytest.raises(ProviderTimeout, match=r"fake did not answer within 0\.2 s") as caught:
        await client.answer(TURN)
    assert len(server.keys) == 1, "with the same view it would be older still"
    assert caught.value.unmetered_attempts == client.usage.unmetered_attempts == 1
    assert client.usage.attempts == {"timed_out": 1}


def broken_off(code: int) -> dict[str, Any]:
    """A choice that an error ended, in the form of gateways."""
    message = {"role": "assistant", "content": "BTC looks"}
    return {"finish_reason": "error", "message": message, "error": {"code": code, "message": "upstream"}}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (raw_answer(b"[" * 100_000), "unusable JSON"),
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
    server: FakeServer, client_of: MakeClient, reply: Reply, reason: str
) -> None:
    server.script = [reply]
    with pytest.raises(ProviderError, match=reason):
        await client_of(KEYS[0]).answer(TURN)
    assert len(server.keys) == 4
    server.script = [reply, OK]
    assert (await client_of(KEYS[0]).answer(TURN)).calls


async def test_client_errors_are_reported_without_the_key(server: FakeServer, client_of: MakeClient) -> None:
    server.script = [answering(400, {"error": {"message": f"bad model, key {KEYS[0]}"}})]
    with pytest.raises(ProviderError, match=r"fake answered 400: .*bad model") as caught:
        await client_of(KEYS[0]).answer(TURN)
    assert KEYS[0] not in str(caught.value)
    assert len(server.keys) == 1, "a request that is wrong stays wrong"


def refusing(field: str) -> Reply:
    error = {"message": f"'{field}' is not supported with this model.", "code": "unsupported_value", "param": field}

    async def reply(request: web.Request) -> web.StreamResponse:
        if field in orjson.loads(await request.read()):
            return web.json_response({"error": error}, status=400)
        return await OK(request)

    return reply


# --- the scope of a refusal ------------------------------------------------------------------------------------------

TWO = msgspec.structs.replace(TURN, model=msgspec.structs.replace(MODEL, id="n", router_model_name="lab/two"))


def by_model(**replies: Reply) -> Reply:
    """Answer each model of the lab in its own way."""

    async def reply(request: web.Request) -> web.StreamResponse:
        model = orjson.loads(await request.read())["model"]
        return await replies[model.removeprefix("lab/")](request)

    return reply


async def test_a_key_out_of_credit_is_reported_and_probed(
    server: FakeServer, client_of: MakeClient, timer: Timer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script = [answering(402, {"error": {"message": "Insufficient Balance"}}, Retry_After="1")]
    client = client_of(KEYS[0])
    for turn in (TURN, TWO):
        with pytest.raises(ProviderError, match=r"key 1 is out of credit \(402: .*\) and is in cooldown for 600 s"):
            await client.answer(turn)
    assert len(server.keys) == 2, "each model is refused once"
    assert "fake: key 1, asked for lab/one, is out of credit (402" in caplog.text
    assert (client.usage.attempts, client.usage.cooldowns) == ({"out_of_credit": 2}, {"out_of_credit": 2})
    assert client.outage() is not None
    timer.now += 60
    server.script = [OK]
    assert (await client.answer(TWO)).calls, "it is tried once a minute, and no restart is needed"


async def test_failing_models_are_no_outage_while_another_gets_answers(
    server: FakeServer, timer: Timer, client_of: MakeClient
) -> None:
    server.script = [by_model(one=answering(400), two=OK)]
    client = client_of(KEYS[0])
    await client.answer(TWO)
    for number in range(FAILED_TURNS_MAX):
        other = msgspec.structs.replace(MODEL, id=f"failing-{number}")
        with pytest.raises(ProviderError):
            await client.answer(msgspec.structs.replace(TURN, model=other))
        assert client.outage() is None
    timer.now += 601
    assert client.outage() is not None, "nothing was answered for ten minutes"


async def test_an_outage_is_reported_until_the_provider_answers(
    server: FakeServer, timer: Timer, client_of: MakeClient
) -> None:
    client = client_of(KEYS[0], KEYS[1])
    server.by_key[KEYS[0]] = answering(402)
    await client.answer(TURN)
    assert client.outage() is None, "the other key is accepted"
    server.by_key[KEYS[1]] = answering(401)
    with pytest.raises(ProviderError):
        await client.answer(TURN)
    assert client.outage() == "key 1 is out of credit (402); key 2 was refused (401)"
    timer.now += 601
    server.by_key[KEYS[0]] = OK
    await client.answer(TURN)
    assert client.outage() is None
    server.by_key[KEYS[0]] = answering(400)
    for _ in range(FAILED_TURNS_MAX):
        assert client.outage() is None
        with pytest.raises(ProviderError):
            await client.answer(TURN)
    assert str(client.outage()).startswith(f"the last {FAILED_TURNS_MAX} turns failed: fake answered 400")
    server.by_key[KEYS[0]] = OK
    await client.answer(TURN)
    assert client.outage() is None


async def test_zero_second_cooldowns_are_waited_out_a_few_times(
    server: FakeServer, timer: Timer, client_of: MakeClient
) -> None:
    server.script = [answering(429, None, Retry_After="0")]
    began = timer.now
    with pytest.raises(ProviderError, match="cooldown for 0 s"):
        await client_of(KEYS[0]).answer(msgspec.structs.replace(TURN, wait_max_s=20.0))
    assert timer.now == began + 20
    assert len(server.keys) == 6, "at once, and after 1, 2, 4, 8 and the last 5 seconds"


async def test_attempts_with_unreported_tokens_are_counted(server: FakeServer, client_of: MakeClient) -> None:
    client = client_of(KEYS[0])
    server.script = [answering(502), answering(200, {}), answering(429, None, Retry_After="0"), OK]
    answer = await client.answer(msgspec.structs.replace(TURN, wait_max_s=20.0))
    assert (answer.input_tokens, answer.unmetered_attempts) == (100, 2), "a rate limit costs nothing"
    server.script = [answering(200, completion(held(), usage=None))]
    answer = await client.answer(TURN)
    assert (answer.input_tokens, answer.output_tokens, answer.unmetered_attempts) == (None, None, 1)
    server.script = [answering(500)]
    with pytest.raises(ProviderError) as caught:
        await client.answer(TURN)
    assert caught.value.unmetered_attempts == 4
    assert client.usage.unmetered_attempts == 7


# --- fields of requests ----------------------------------------------------------------------------------------------


async def test_a_models_own_fields_are_merged_into_every_request(server: FakeServer, client_of: MakeClient) -> None:
    own = {
        "reasoning_effort": "none", "provider": {"order": ["a"], "allow_fallbacks": False}, "temperature": None,
        "max_completion_tokens": 500,
    }  # fmt: skip
    model = msgspec.structs.replace(MODEL, configuration=ModelConfiguration(request=own))
    client = client_of(KEYS[0])
    await client.answer(msgspec.structs.replace(TURN, model=model))
    body = server.bodies[0]
    assert (body["reasoning_effort"], body["provider"]) == ("none", own["provider"])
    assert body["tool_choice"] == "auto"
    assert not {"temperature", "max_tokens"} & body.keys(), "null drops a default, and one limit is enough"
    assert body["max_completion_tokens"] == TURN.answer_tokens_max, "its value is the turn's limit, where it is 500"
    await client.answer(TURN)
    assert server.bodies[1].keys() >= {"temperature", "max_tokens"}, "they are this model's only"


async def test_a_field_that_a_model_refuses_is_omitted(server: FakeServer, client_of: MakeClient) -> None:
    client = client_of(KEYS[0])
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


async def test_a_field_that_was_refused_is_sent_again_after_an_hour(
    server: FakeServer, timer: Timer, client_of: MakeClient
) -> None:
    client = client_of(KEYS[0])
    server.script = [refusing("temperature")]
    for wait_s, sent in ((0, [True, False]), (3599, [False]), (1, [True, False]), (3599, [False])):
        timer.now += wait_s
        server.bodies.clear()
        await client.answer(TURN)
        assert ["temperature" in body for body in server.bodies] == sent
        assert client.left_out(MODEL) == {"temperature"}
    timer.now += 1
    server.script = [OK]
    await client.answer(TURN)
    assert ("temperature" in server.bodies[-1], client.left_out(MODEL)) == (True, set())


async def test_the_limit_of_an_answer_is_never_left_out(server: FakeServer, client_of: MakeClient) -> None:
    said = {"message": "'max_tokens' or 'max_completion_tokens' must not be below the budget of 'reasoning'."}
    server.script = [answering(400, {"error": said})]
    with pytest.raises(ProviderError, match="fake answered 400"):
        await client_of(KEYS[0]).answer(TURN)
    assert all(body.keys() & {"max_tokens", "max_completion_tokens"} for body in server.bodies)


@pytest.mark.parametrize(
    "own",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        {"reasoning": {"max_tokens": 2000}},
        {"generationConfig": {"thinkingConfig": {"thinkingBudget": 2000}}},
    ],
)
async def test_a_thinking_budget_leaves_room_for_the_answer(
    server: FakeServer, client_of: MakeClient, own: dict[str, Any]
) -> None:
    model, client = msgspec.structs.replace(MODEL, configuration=ModelConfiguration(request=own)), client_of(KEYS[0])
    for limit in (3000, 2256, 1800):
        await client.answer(msgspec.structs.replace(TURN, model=model, answer_tokens_max=limit))
    assert [thinking_budget(body) for body in server.bodies] == [2000, 2000, 1544]


async def test_concurrent_requests_are_all_retried_without_a_refused_field(
    server: FakeServer, client_of: MakeClient
) -> None:
    server.script = [refusing("temperature")]
    client = client_of(KEYS[0])
    answers = await asyncio.gather(*(client.answer(TURN) for _ in range(4)))
    assert all(answer.calls for answer in answers)
    assert len(server.bodies) == 8, "each was told, and asked again without it"


async def test_a_refused_mandatory_or_omitted_field_is_an_error(server: FakeServer, client_of: MakeClient) -> None:
    for field, asked in (("messages", 1), ("temperature", 2)):
        server.keys.clear()
        error = {"message": "no", "code": "unsupported_parameter", "param": field}
        server.script = [answering(400, {"error": error})]
        with pytest.raises(ProviderError, match="fake answered 400"):
            await client_of(KEYS[0]).answer(TURN)
        assert len(server.keys) == asked


async def test_unusable_answers_are_kept_without_the_key(server: FakeServer, client_of: MakeClient) -> None:
    html = f"<html>{KEYS[0]}{'x' * 20_000}".encode()
    for reply, said in (
        (raw_answer(html, "text/html"), "<html>***" + "x" * 16_375),
        (answering(429, {"error": "slow"}), '{"error": "slow"}'),
        (answering(400, {"error": f"no {KEYS[0]}"}), '{"error": "no ***"}'),
    ):
        server.script = [reply]
        with pytest.raises(ProviderError) as caught:
            await client_of(KEYS[0]).answer(TURN)
        assert caught.value.raw == said


async def test_redirects_are_not_followed(server: FakeServer, client_of: MakeClient) -> None:
    server.script = [answering(302, None, Location="http://127.0.0.1:1/")]
    with pytest.raises(ProviderError, match="answered 302"):
        await client_of(KEYS[0]).answer(TURN)


async def test_huge_answers_are_bounded(server: FakeServer, client_of: MakeClient) -> None:
    server.script = [raw_answer(b" " * (ANSWER_BYTES_MAX + 1))]
    with pytest.raises(ProviderError, match="more than 4 MiB"):
        await client_of(KEYS[0]).answer(TURN)
    assert len(server.keys) == 1


async def test_unreachable_server() -> None:
    client = ProviderClient(
        ProviderDefinition(name="fake", base_url="http://127.0.0.1:1/v1"),
        ProviderAccess([Secret(KEYS[0])]),
        AttemptTiming(backoff_s=0.001),
    )
    with pytest.raises(ProviderError, match="could not be reached") as caught:
        await client.answer(TURN)
    assert caught.value.unmetered_attempts == 0, "nothing was sent"
    await client.close()


async def test_cancellation_passes_through(server: FakeServer, client_of: MakeClient) -> None:
    asked = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    server.script = [hang]
    task = asyncio.create_task(client_of(KEYS[0]).answer(TURN))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
