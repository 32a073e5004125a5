"""A trading floor on a fresh database."""

from collections.abc import AsyncIterator

import pytest
from support.floor import Floor, open_floor

from trader.store.database.pool import Database


@pytest.fixture
async def floor(database: Database) -> AsyncIterator[Floor]:
    async with open_floor(database) as floor:
        yield floor
