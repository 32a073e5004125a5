"""Fixtures of the security suite."""

from collections.abc import AsyncIterator

import pytest
from support.attacked import FAST, Service, running


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running(FAST) as started:
        yield started
