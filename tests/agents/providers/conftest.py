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
def timer() -> Timer:
    return Timer()


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    async with TestServer(app) as running:
        server.url = str(running.make_url("/v1"))
        yield server


@pytest.fixture
async def client_of(server: FakeServer, timer: Timer) -> AsyncIterator[MakeClient]:
    made: list[ProviderClient] = []

    def make(*keys: str, limit_s: float = 5.0) -> ProviderClient:
        client = ProviderClient(
            ProviderDefinition(name="fake", base_url=server.url),
            ProviderAccess([Secret(key) for key in keys]),
            AttemptTiming(limit_s, 0.001, timer, timer.sleep),
        )
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()
