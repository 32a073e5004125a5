"""A chat-completions server, and clients of it."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.chat_server import FakeServer, MakeClient, Timer

from trader.agents.domain.models import ProviderDefinition
from trader.agents.providers.client import AttemptTiming, ProviderAccess, ProviderClient
from trader.settings.forms import Secret


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServer, str]]:
    server = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    async with TestServer(app) as running:
        yield server, str(running.make_url("/v1"))


@pytest.fixture
async def client_of(fake: tuple[FakeServer, str]) -> AsyncIterator[MakeClient]:
    made: list[ProviderClient] = []

    def make(*keys: str, timer: Timer | None = None, limit_s: float = 5.0) -> ProviderClient:
        timer = timer or Timer()
        client = ProviderClient(
            ProviderDefinition(name="fake", base_url=fake[1]),
            ProviderAccess([Secret(key) for key in keys]),
            AttemptTiming(limit_s, 0.001, timer, timer.sleep),
        )
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()
