"""The event streams of the running service."""

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.contract import INVOCATION, LIVE_PORTFOLIO, OUTPUTS, POSITION_EVENT, RUNNING_CANDLE, TRADE
from support.process import ServiceProcess, serving
from support.shapes import Shape, assert_shape, iso
from support.sse import Message, Stream, streaming
from support.waiting import until

pytestmark = pytest.mark.processes

STATES: dict[str, Shape] = {
    "positions": [POSITION_EVENT],
    "trades": [TRADE],
    "conversations": [INVOCATION],
    "portfolio": LIVE_PORTFOLIO,
    "candles": [RUNNING_CANDLE],
}
MODELS = ["apex-rules", "contrarian-rules", "sovereign-rules", "trendsurfer-rules"]


def is_state(message: Message) -> bool:
    return message.event is None


def held_by_hand(message: Message) -> list[Any]:
    if message.event is not None:
        return []
    return [position for entry in message.json() if entry["modelId"] == "default" for position in entry["positions"]]


def by_hand(message: Message) -> list[Any]:
    """The trades of a state that were not made by agents."""
    return [trade for trade in message.json() if trade["modelId"] == "default"] if is_state(message) else []


async def place(service: ServiceProcess, **order: Any) -> Any:
    answer = await service.call("simulator.placeOrder", symbol="BTC", quantity=0.01, **order)
    assert answer["order"]["status"] == "filled"
    return answer["order"]


async def test_streams_begin_with_the_state_and_follow_its_changes(tmp_path: Path, dsn: str) -> None:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0"))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        streams = {
            name: await stack.enter_async_context(streaming(http, service.url, name)) for name in (*STATES, "workflow")
        }
        for name, stream in streams.items():
            check_headers(stream)
            first = await stream.until(lambda message: message.event != "empty", within_s=5)
            if name == "workflow":
                assert first.event == "connected"
                assert_shape(first.json(), {"type": "connected", "timestamp": iso})
            else:
                assert first.event is None
                assert_shape(first.json(), STATES[name])
        entries = streams["positions"].seen[0].json()
        assert sorted(entry["modelId"] for entry in entries) == MODELS
        assert len(streams["portfolio"].seen[0].json()["snapshots"]) == len(MODELS)

        await place(service, side="buy")
        event = await streams["positions"].until(lambda message: bool(held_by_hand(message)), within_s=5)
        assert_shape(event.json(), STATES["positions"])
        (position,) = held_by_hand(event)
        (listed,) = await service.call("trading.getPositions", modelId="default")
        still = ("currentPrice", "notional", "unrealizedPnl", "liquidationPrice")
        assert {key: position[key] for key in position if key not in still} == {
            key: listed[key] for key in listed if key not in still
        }
        await place(service, side="sell", reduceOnly=True)
        event = await streams["trades"].until(lambda message: bool(by_hand(message)), within_s=5)
        assert_shape(event.json(), STATES["trades"])
        assert by_hand(event) == (await service.call("trading.getTrades", modelId="default"))["trades"]
        for name in ("positions:changed", "trades:changed"):  # the agents may trade meanwhile
            message = await streams["workflow"].until(
                lambda message, name=name: message.event == name and message.json()["accountIds"] == ["default"],  # type: ignore[misc]
                within_s=5,
            )
            assert_shape(message.json(), {"type": name, "timestamp": iso, "accountIds": ["default"]})
        await service.call("simulator.resetAccount")
        await streams["workflow"].until(lambda message: message.event == "positions:changed", within_s=5)

        await check_ping_and_price_updates(streams["positions"], streams["portfolio"])
        assert await service.stop() == 0
        assert not service.traceback()


def check_headers(stream: Stream) -> None:
    headers = stream.response.headers
    assert headers["Content-Type"] == "text/event-stream"
    assert headers["Cache-Control"] == "no-cache, no-transform"
    assert headers["X-Accel-Buffering"] == "no"
    assert "Content-Length" not in headers
    assert headers["Content-Encoding"] == "gzip"  # the client accepts it


async def check_ping_and_price_updates(positions: Stream, portfolio: Stream) -> None:
    """Check for a ping every 15 s, no matter what else is sent, and a state with new prices every 10 s."""

    async def pings(stream: Stream) -> None:
        begun = len(stream.seen)
        ping = await stream.until(lambda message: message.event == "ping", within_s=18)
        assert ping.data == ""
        states = [message for message in stream.seen[begun:] if is_state(message)]
        assert states, "the price tracker publishes every 10 s"

    await asyncio.gather(pings(positions), pings(portfolio))


async def test_sigterm_ends_streams_and_pending_requests_within_three_seconds(tmp_path: Path, dsn: str) -> None:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="2000"))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        streams = [
            await stack.enter_async_context(streaming(http, service.url, name))
            for name in (*STATES, "workflow")
            for _ in range(3)
        ]
        for stream in streams:
            await stream.next()

        async def has_run() -> bool:
            return len((await service.call("models.getInvocations"))["conversations"]) >= len(MODELS)

        await until(has_run)  # the first cycle of the models is over
        under_way = asyncio.create_task(
            service.try_call("simulator.placeOrder", symbol="BTC", side="buy", quantity=0.01, clientOrderId="late")
        )
        for _ in range(3):  # by the time these are answered, it has arrived and waits for its book
            assert (await service.call("simulator.getAccount"))["account"]["runId"] is None
        assert not under_way.done()
        started_s = time.monotonic()
        assert await service.stop() == 0
        assert time.monotonic() - started_s < 3
        for stream in streams:
            async with asyncio.timeout(1):  # each ended properly, none within a message
                await stream.response.content.read()
        with suppress(aiohttp.ClientConnectionError):  # it may be cut off, but must not be a 500
            status, body = await under_way
            assert status in {200, 503}, body
        assert not service.traceback()
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as again:
        # Whatever the caller received, repeating the order with the same id leaves only one.
        answers = [
            await again.call("simulator.placeOrder", symbol="BTC", side="buy", quantity=0.01, clientOrderId="late")
            for _ in range(2)
        ]
        assert answers[0] == answers[1]
        orders = OUTPUTS["simulator.placeOrder"]
        assert_shape(answers[0], orders)
