"""Supplementary indicators from a server that imitates taapi.io, correctly or not, over real sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.manual_clock import ManualClock
from support.prompts import data_of
from support.scripted import START, make_settings
from support.trading_floor import hold, open_floor
from support.waiting import until

from trader.agents.domain.view import Supplementary
from trader.agents.providers.taapi import Taapi, make_supplier
from trader.database.pool import Database
from trader.settings.forms import Secret
from trader.settings.settings import Settings

KEY = "eyJ-taapi-secret-000000000001"

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def item(name: str, **result: Any) -> dict[str, Any]:
    return {"id": name, "indicator": name, "result": result, "errors": []}


GOOD = {
    "data": [
        item("macd", valueMACD=120.5, valueMACDSignal=100, valueMACDHist=20.5),
        item("stochrsi", valueFastK=81.2, valueFastD=77.0),
        item("supertrend", value=93_200.4, valueAdvice="long"),
        item("mfi", value=None),
        {"id": "cmf", "indicator": "cmf", "result": {"error": "not enough candles"}, "errors": ["x"]},
    ]
}


class FakeTaapi:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.reply: Reply = self.json(GOOD)
        self.url = ""

    @staticmethod
    def json(body: Any, status: int = 200) -> Reply:
        async def reply(_: web.Request) -> web.StreamResponse:
            return web.json_response(body, status=status)

        return reply

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.path_qs == "/bulk", "no key in an address"
        self.bodies.append(orjson.loads(await request.read()))
        return await self.reply(request)


@pytest.fixture
async def server() -> AsyncIterator[FakeTaapi]:
    fake = FakeTaapi()
    app = web.Application()
    app.router.add_post("/bulk", fake.handle)
    async with TestServer(app) as running:
        fake.url = str(running.make_url(""))
        yield fake


class ShiftedClock(ManualClock):
    """A manual clock that an operator sets back."""

    shift = timedelta(0)

    def now(self) -> datetime:
        return super().now() + self.shift


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock(START)


@pytest.fixture
async def taapi(server: FakeTaapi, clock: ShiftedClock) -> AsyncIterator[Taapi]:
    client = Taapi(Secret(KEY), clock, url=server.url, attempt_limit_s=0.5)
    yield client
    await client.close()


async def fetched(taapi: Taapi, symbol: str = "BTC") -> Supplementary | None:
    taapi.latest(symbol)
    await taapi.settled()
    return taapi.latest(symbol)


async def test_values_are_fetched_in_the_background(server: FakeTaapi, taapi: Taapi) -> None:
    assert taapi.latest("BTC") is None, "nobody waits"
    await taapi.settled()
    assert taapi.latest("BTC") == Supplementary(
        source="taapi.io", venue="binance", interval="1h", fetched_at=START, macd=120.5, macd_signal=100,
        macd_histogram=20.5, stoch_rsi_k=81.2, stoch_rsi_d=77.0, supertrend=93_200.4,
    )  # fmt: skip
    (body,) = server.bodies
    assert body["secret"] == KEY
    assert (body["construct"]["symbol"], body["construct"]["interval"]) == ("BTC/USDT", "1h")
    assert {indicator["indicator"] for indicator in body["construct"]["indicators"]} == {
        "macd", "stochrsi", "supertrend", "mfi", "cmf",
    }  # fmt: skip
    assert all(indicator["backtrack"] == 1 for indicator in body["construct"]["indicators"]), "of the closed candle"


async def test_requests_are_15_seconds_apart_and_values_are_fetched_every_5_minutes(
    server: FakeTaapi, taapi: Taapi, clock: ShiftedClock
) -> None:
    for second in range(360):
        for symbol in ("BTC", "ETH", "SOL"):
            taapi.latest(symbol)
        await taapi.settled()
        if second in (0, 14, 15, 29, 30, 299, 300):
            asked = [body["construct"]["symbol"][:3] for body in server.bodies]
            wanted = ["BTC"] * 1 + ["ETH"] * (second >= 15) + ["SOL"] * (second >= 30) + ["BTC"] * (second >= 300)
            assert asked == wanted, second
        await clock.advance(timedelta(seconds=1))


async def test_an_unknown_market_does_not_block_others(server: FakeTaapi, taapi: Taapi, clock: ShiftedClock) -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        is_known = orjson.loads(await request.read())["construct"]["symbol"] != "HYPE/USDT"
        return web.json_response(GOOD if is_known else {"error": "no such symbol"}, status=200 if is_known else 400)

    server.reply = reply
    missing = dict.fromkeys(("BTC", "ETH"), 0)
    for minute in range(60):
        for symbol in ("HYPE", "BTC", "ETH"):
            indicators = taapi.latest(symbol)
            if symbol in missing and minute > 5:
                missing[symbol] += indicators is None
        await taapi.settled()
        await clock.advance(timedelta(minutes=1))
    assert missing == {"BTC": 0, "ETH": 0}


async def test_old_values_are_not_shown(server: FakeTaapi, taapi: Taapi, clock: ShiftedClock) -> None:
    assert await fetched(taapi) is not None
    server.reply = FakeTaapi.json({"error": "down"}, 500)
    await clock.advance(timedelta(minutes=15))
    assert await fetched(taapi) is not None
    await clock.advance(timedelta(seconds=1))
    assert taapi.latest("BTC") is None


async def cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def html(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>", content_type="text/html")


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (FakeTaapi.json({"error": f"limit for {KEY}"}, 429), "status 429"),
        (FakeTaapi.json({}, 500), "status 500"),
        (html, "an answer of an unknown form"),
        (FakeTaapi.json({"data": "none"}), "an answer of an unknown form"),
        (FakeTaapi.json({"data": []}), "an answer without values"),
        (
            FakeTaapi.json({"data": [item("macd", valueMACD="NaN"), item("mfi", value=True)]}),
            "an answer without values",
        ),
        (FakeTaapi.json({"data": [item("cmf", value=10**400)]}), "an answer of an unknown form"),
        (FakeTaapi.json({"data": [], "more": " " * 300_000}), "more than 256 KiB"),
        (cut, "ServerDisconnectedError"),
        (hang, "no answer within 0.5 s"),
    ],
)
async def test_failures_yield_no_values_and_lengthen_the_pause(
    server: FakeTaapi, taapi: Taapi, clock: ShiftedClock, caplog: pytest.LogCaptureFixture, reply: Reply, why: str
) -> None:
    server.reply = reply
    for rest_s in (60, 120):
        asked = len(server.bodies)
        assert await fetched(taapi) is None
        assert len(server.bodies) == asked + 1
        assert f"no indicators for BTC ({why}); next attempt in {rest_s} s" in caplog.text
        await clock.advance(timedelta(seconds=rest_s - 1))
        assert await fetched(taapi) is None
        assert len(server.bodies) == asked + 1, "it rests"
        await clock.advance(timedelta(seconds=1))
    server.reply = FakeTaapi.json(GOOD)
    assert await fetched(taapi) is not None
    assert KEY not in caplog.text


async def test_a_refused_key_is_out_of_use(
    server: FakeTaapi, taapi: Taapi, clock: ShiftedClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.reply = FakeTaapi.json({"error": f"unknown secret {KEY}"}, 401)
    assert await fetched(taapi) is None
    await clock.advance(timedelta(hours=1))
    server.reply = FakeTaapi.json(GOOD)
    assert await fetched(taapi) is None
    assert len(server.bodies) == 1
    assert "refused the key with status 401" in caplog.text
    assert KEY not in caplog.text + repr(taapi) + repr(vars(taapi))


async def test_a_bug_in_a_request_is_logged_and_the_request_repeated(
    taapi: Taapi, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**_: object) -> Supplementary:
        raise KeyError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr("trader.agents.providers.taapi.Supplementary", broken)
        assert await fetched(taapi) is None
    assert "in broken" in caplog.text, "with its trace"
    await clock.advance(timedelta(minutes=5))
    assert await fetched(taapi) is not None


async def test_a_clock_set_back_delays_no_request_and_returns_nothing_old(
    server: FakeTaapi, taapi: Taapi, clock: ShiftedClock
) -> None:
    assert await fetched(taapi) is not None
    await clock.advance(timedelta(minutes=4))
    clock.shift -= timedelta(hours=1)
    assert taapi.latest("BTC") is None, "how old they are is not known"
    await taapi.settled()
    assert len(server.bodies) == 2
    assert taapi.latest("BTC") is not None
    server.reply = FakeTaapi.json({}, 500)
    await clock.advance(timedelta(minutes=6))
    await fetched(taapi)
    clock.shift -= timedelta(hours=1)
    server.reply = FakeTaapi.json(GOOD)
    assert await fetched(taapi) is not None, "nor does it put off the next one after a failure"


async def test_closing_cancels_a_pending_request(server: FakeTaapi, taapi: Taapi) -> None:
    server.reply = hang
    taapi.latest("BTC")
    await until(lambda: server.bodies)
    await asyncio.wait_for(taapi.close(), 0.4)
    assert taapi.latest("BTC") is None


def test_only_the_live_market_is_supplemented(tmp_path: Path) -> None:
    clock = ManualClock(START)
    keyed = {"TAAPI_API_KEY": KEY, "OPENAI_API_KEY": "sk-x"}
    assert make_supplier(Settings.load(keyed, None, demo=False), clock) is not None
    assert make_supplier(Settings.load({"OPENAI_API_KEY": "sk-x"}, None, demo=False), clock) is None
    for source in ("synthetic", f"replay:{tmp_path}"):
        assert make_supplier(make_settings(MARKET_SOURCE=source, TAAPI_API_KEY=KEY), clock) is None


async def test_a_model_sees_them_as_supplementary(database: Database, server: FakeTaapi) -> None:
    made: list[Taapi] = []

    def supplier(clock: ManualClock) -> Taapi:
        made.append(Taapi(Secret(KEY), clock, url=server.url))
        return made[0]

    async with open_floor(database, supplier=supplier) as floor:
        (taapi,) = made
        await floor.add("ada")
        floor.provider.scripts["ada"] = [hold()]
        await floor.cycle()
        await taapi.settled()
        await floor.cycle()
        await taapi.close()
    first, second = (data_of(turn.messages[1]["content"])["now"] for turn in floor.provider.turns)
    assert [symbol for symbol, market in first.items() if "supplementary" in market] == []
    seen = second["BTC"]["supplementary"]
    assert (seen["source"], seen["macd"], "moneyFlowIndex" in seen) == ("taapi.io", 120.5, False)
    assert second["ETH"]["supplementary"] is None, "one market at a time"
