"""Fixtures of the security suite."""

from collections.abc import AsyncIterator

import pytest
from support.raw_socket_service import FAST, Service, running


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running(FAST) as started:
        yield started
