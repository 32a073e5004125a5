"""Fixtures of live trading."""

from collections.abc import AsyncIterator

import pytest
from support.live import Bench, trading

from trader.database.pool import Database


@pytest.fixture
async def bench(database: Database) -> AsyncIterator[Bench]:
    """A service that trades one model at the fake venue."""
    async with trading(database) as bench:
        yield bench
