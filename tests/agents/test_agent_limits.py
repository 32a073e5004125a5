"""The limits of conversations, clients of providers and strategies' processes at n and n + 1."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

import msgspec
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.chat_server import KEYS, OK, TURN, FakeServer, Reply, Timer, answering, completion, held, raw_answer
from support.feed import START
from support.limits import Accepts, outcomes, stop_loop
from support.manual_clock import ManualClock
from support.records import make_model
from support.waiting import turns

from trader.agents.conversation import Conversation, InvocationLimits
from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.models import ProviderDefinition
from trader.agents.domain.tools import Holding
from trader.agents.domain.view import Shown
from trader.agents.execute import InvocationEnvironment
from trader.agents.providers import strategy_process
from trader.agents.providers.client import DEFAULT_TIMING, AttemptTiming, ProviderAccess, ProviderClient
from trader.agents.providers.confinement import WATCHED_EVERY_S, kept
from trader.agents.providers.provider import Provider
from trader.agents.providers.strategy_process import (
    Begin,
    Begun,
    Decided,
    StrategyProcess,
    decided_by,
    start_strategy,
)
from trader.agents.providers.taapi import Taapi
from trader.agents.record import InvocationRecord
from trader.agents.variants import VARIANTS
from trader.core.errors import ContextExceeded, ProviderError
from trader.core.variant_id import VariantId
from trader.settings.forms import Secret
from trader.strategies import build_view

MS: Final = timedelta(milliseconds=1)
LIMITS_OF_VARIANT: Final = VARIANTS[VariantId.APEX].limits
VIEW: Final = build_view({"BTC": [1, 2]})


# --- conversations ----------------------------------------------------------------------------------------------------


class Asked:
    """A provider that refuses a given number of requests as too long, and then answers."""

    name, is_remote = "asked", True

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.turns: list[Turn] = []

    async def shown(self, _: object) -> Shown:
        return Shown(("15m",))

    async def answer(self, turn: Turn) -> ModelAnswer:
        self.turns.append(turn)
        if len(self.turns) <= self.refusals:
            raise ContextExceeded("too long", 20_000 - 1000 * len(self.turns))
        return ModelAnswer(text="", calls=(), message={}, model="m")


async def conversation_with(provider: Asked) -> Conversation:
    async def view(_: object) -> object:
        return VIEW

    environment = SimpleNamespace(view=view, limits=LIMITS_OF_VARIANT, now=lambda: START)
    conversation = Conversation(
        InvocationRecord(make_model("m"), START),
        cast("Provider", provider),
        cast("InvocationEnvironment", environment),
        InvocationLimits(200_000, 20_000, 120),
    )
    await conversation.open()
    return conversation


async def shortens(refusals: int, *_: object) -> bool:
    conversation = await conversation_with(Asked(refusals))
    with suppress(ContextExceeded):
        await conversation.ask(1, 20_000)
        return True
    return False


async def waits_for_keys(ms: int, *_: object) -> bool:
    provider = Asked()
    await (await conversation_with(provider)).ask(1, 20_000)
    return provider.turns[0].wait_max_s >= ms / 1000


async def waits_after_trade(ms: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    """Return whether an invocation that has traded still waits for keys after so long."""
    pass_ms, provider = stop_loop(patch), Asked()
    conversation = await conversation_with(provider)
    conversation.has_traded = True
    pass_ms(ms)
    await conversation.ask(1, 20_000)
    return provider.turns[0].wait_max_s > 0


# --- clients of providers ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def client_of(*script: Reply, timing: AttemptTiming | None = None) -> AsyncIterator[ProviderClient]:
    fake, app, timer = FakeServer(), web.Application(), Timer()
    fake.script = list(script)
    app.router.add_post("/v1/chat/completions", fake.handle)
    async with TestServer(app) as server:
        client = ProviderClient(
            ProviderDefinition(name="fake", base_url=str(server.make_url("/v1"))),
            ProviderAccess([Secret(KEYS[0])]),
            timing or AttemptTiming(5.0, 0.001, timer, timer.sleep),
        )
        try:
            yield client
        finally:
            await client.close()


async def retries(failures: int, *_: object) -> bool:
    async with client_of(*[answering(500)] * failures, OK) as client:
        with suppress(ProviderError):
            return bool((await client.answer(TURN)).calls)
    return False


async def keeps_unusable(size: int, *_: object) -> bool:
    async with client_of(raw_answer(b"x" * size, "text/html")) as client:
        with pytest.raises(ProviderError) as failed:
            await client.answer(TURN)
    return len(failed.value.raw) == size


async def says_refusal(size: int, *_: object) -> bool:
    words = "#" * (size - len("401: "))
    async with client_of(answering(401, {"error": {"message": words}})) as client:
        with pytest.raises(ProviderError):
            await client.answer(TURN)
        return words in str(client.outage())


def slow_reply(asked: asyncio.Event, let: asyncio.Event, body: object) -> Reply:
    async def reply(_: web.Request) -> web.StreamResponse:
        asked.set()
        await let.wait()
        return web.json_response(body)

    return reply


async def awaits_attempt(ms: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    pass_ms, asked, let = stop_loop(patch), asyncio.Event(), asyncio.Event()
    async with client_of(slow_reply(asked, let, completion(held())), timing=DEFAULT_TIMING) as client:
        answer = asyncio.create_task(client.answer(TURN))
        await asked.wait()
        pass_ms(ms)
        await turns(3)
        let.set()
        with suppress(ProviderError):
            return bool((await answer).calls)
    return False


INDICATORS: Final = {"data": [{"id": "supertrend", "indicator": "supertrend", "result": {"value": 1.0}, "errors": []}]}


@asynccontextmanager
async def taapi_of(reply: Reply) -> AsyncIterator[tuple[Taapi, ManualClock]]:
    app, clock = web.Application(), ManualClock(START)
    app.router.add_post("/bulk", reply)
    async with TestServer(app) as server:
        taapi = Taapi(Secret(KEYS[0]), clock, url=str(server.make_url("")))
        try:
            yield taapi, clock
        finally:
            await taapi.close()


async def reads_indicators(size: int, *_: object) -> bool:
    async with taapi_of(raw_answer(orjson.dumps(INDICATORS).ljust(size))) as (taapi, _clock):
        taapi.latest("BTC")
        await taapi.settled()
        return taapi.latest("BTC") is not None


async def rests_after_failures(ms: int, *_: object) -> bool:
    asked = 0

    async def fail(_: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.Response(status=500)

    async with taapi_of(fail) as (taapi, clock):
        for wait in (*[timedelta(minutes=10)] * 6, ms * MS, timedelta(0)):
            before = asked
            taapi.latest("BTC")
            await taapi.settled()
            await clock.advance(wait)
    return asked == before


async def awaits_indicators(ms: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    pass_ms, asked, let = stop_loop(patch), asyncio.Event(), asyncio.Event()
    async with taapi_of(slow_reply(asked, let, INDICATORS)) as (taapi, _clock):
        taapi.latest("BTC")
        await asked.wait()
        pass_ms(ms)
        await turns(3)
        let.set()
        await taapi.settled()
        return taapi.latest("BTC") is not None


# --- processes of strategies ------------------------------------------------------------------------------------------


class Piped:
    """A process whose output the test writes."""

    returncode = None

    def __init__(self) -> None:
        self.stdin = SimpleNamespace(write=lambda _: None, drain=self.wait, close=lambda: None)
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self.was_killed = False

    async def wait(self) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None:
        self.was_killed = True

    def end_output(self) -> None:
        self.stdout.feed_eof()
        self.stderr.feed_eof()


def piped() -> tuple[Piped, StrategyProcess]:
    pipes = Piped()
    process = StrategyProcess(cast("asyncio.subprocess.Process", pipes), "own", "")
    process.begun = Begun(deadline_s=1.0)
    return pipes, process


async def shows_error(size: int, *_: object) -> bool:
    pipes, process = piped()
    pipes.stdout.feed_data(msgspec.json.encode(Decided(error="x" * size)) + b"\n")
    with pytest.raises(ProviderError) as failed:
        await process.decide(VIEW)
    pipes.end_output()
    await process.end()
    return str(failed.value) == "x" * size


async def has_name(size: int, *_: object) -> bool:
    pipes, process = piped()
    pipes.stdout.feed_data(b'{"name":"%b"}\n' % (b"x" * size))
    try:
        return (await process.ask({}, 60.0, Begun)).name == "x" * size
    except ProviderError:
        return False
    finally:
        pipes.end_output()
        await process.end()


async def logs_output(size: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    logged: list[str] = []
    log = SimpleNamespace(info=lambda _text, _name, printed: logged.append(printed))
    patch.setattr(strategy_process, "log", log)
    pipes, process = piped()
    pipes.stderr.feed_data(b"x" * size)
    pipes.end_output()
    await process.end()
    return sum(map(len, logged)) == size


async def lets_end(ms: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    pass_ms, (pipes, process) = stop_loop(patch), piped()
    ending = asyncio.create_task(process.end())
    await turns(3)
    pass_ms(ms)
    await turns(3)
    pipes.end_output()
    await ending
    return not pipes.was_killed


STATEFUL: Final = """
from trader.strategies import Holding

class Own:
    def decide(self, view):
        return Holding(reason="held")
    def save(self):
        return "x" * {size}
"""


async def reads_line(size: int, patch: pytest.MonkeyPatch, folder: Path) -> bool:
    """Return whether an answer of this many bytes, its state included, is read from a real process."""
    patch.setattr(strategy_process, "LINE_MAX", 3000)
    patch.setattr(strategy_process, "can_confine", lambda: False)
    rest = len(msgspec.json.encode(decided_by([Holding(reason="held")], "")))
    (folder / "own.py").write_text(STATEFUL.format(size=size - rest))
    process = await start_strategy(Begin(f"{folder / 'own.py'}:Own", {}, LIMITS_OF_VARIANT, None))
    try:
        return len((await process.decide(VIEW)).state) == size - rest
    except ProviderError:
        return False
    finally:
        await process.end()


FORKING: Final = f"""
import os, time
for _ in range({{others}}):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
time.sleep({6 * WATCHED_EVERY_S})
"""


async def starts_processes(count: int, *_: object) -> bool:
    command = kept([sys.executable, "-c", FORKING.format(others=count - 1)])
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    said = await process.stdout.read()
    await process.wait()
    assert said in (b"", b'{"error":"the strategy has more than 16 processes"}\n')
    return not said


LIMITS: Final[dict[str, tuple[int, Accepts]]] = {
    "refusals after which a request is shortened": (5, shortens),
    "how long a conversation waits for keys": (20_000, waits_for_keys),
    "how long one that has traded waits": (594_999, waits_after_trade),
    "failures of an attempt that is repeated": (3, retries),
    "bytes of an unusable answer that are kept": (16 * 1024, keeps_unusable),
    "characters of a refusal that are shown": (150, says_refusal),
    "how long an attempt takes": (119_999, awaits_attempt),
    "bytes of indicators": (256 * 1024, reads_indicators),
    "how long the source of indicators rests": (599_999, rests_after_failures),
    "how long it is awaited": (9999, awaits_indicators),
    "characters of a strategy's error": (4000, shows_error),
    "characters of a strategy's name": (100, has_name),
    "bytes that a strategy prints": (1 << 16, logs_output),
    "how long its processes take to end": (9999, lets_end),
    "bytes of a strategy's answer": (3000, reads_line),
    "processes of a strategy": (16, starts_processes),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_a_limit_of_agents_accepts_as_much_as_it_says_and_no_more(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert await outcomes(*LIMITS[name], monkeypatch, tmp_path) == [True, False]
