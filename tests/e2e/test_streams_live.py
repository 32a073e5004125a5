"""The event streams of the running service."""

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import pytest
from support.process import serving
from support.sse import streaming
from support.waiting import until
from support.wire import check_output

pytestmark = pytest.mark.processes

STREAMS = ("positions", "trades", "conversations", "portfolio", "candles", "workflow")
MODELS = ["apex-rules", "contrarian-rules", "sovereign-rules", "trendsurfer-rules"]


async def test_sigterm_ends_streams_and_pending_requests_within_three_seconds(tmp_path: Path, dsn: str) -> None:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="2000"))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        streams = [
            await stack.enter_async_context(streaming(http, service.url, name)) for name in STREAMS for _ in range(3)
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
        check_output("simulator.placeOrder", answers[0])
