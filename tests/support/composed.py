"""The whole service within the test's process: built as by `serve`, leading, and served over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta

from support.served import Client, served
from support.waiting import until

from trader.app import build_app
from trader.composition.external import open_external
from trader.composition.service import Service, make_service
from trader.operations.alarms import Alarms
from trader.settings.settings import Settings

UNREACHABLE = {
    "MARKET_SOURCE": "venue",
    "VENUE_URL": "http://127.0.0.1:9",
    "OPENAI_BASE_URL": "http://127.0.0.1:9",
}
"""Settings of a service without models whose venue refuses every connection."""


@asynccontextmanager
async def composed(
    dsn: str, *, started_ago: timedelta = timedelta(), **environ: str
) -> AsyncIterator[tuple[Service, Client]]:
    """Yield the service once its feed has failed or has a price; it started `started_ago` before the present."""
    settings = Settings.load({**UNREACHABLE, "DATABASE_URL": dsn, "PORT": "0", **environ}, None, demo=False)
    async with AsyncExitStack() as stack:
        external = await open_external(settings, stack)
        service = await make_service(settings, external, Alarms([]), stack)
        service = replace(service, started_at=service.started_at - started_ago)
        await service.leadership.take_role()
        stack.push_async_callback(service.leadership.resign)
        feed = asyncio.create_task(service.leadership.follow_market())
        stack.callback(feed.cancel)
        client = await stack.enter_async_context(served(build_app(settings, service)))
        market = service.context.market
        await until(lambda: market.last_error or market.last_update_at is not None)
        yield service, client
