"""Sessions: settings of a role, a database or a server do not reach what the service relies on."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from support.composed import composed
from support.served import Client
from support.waiting import until

from trader.core.errors import DatabaseUnavailable, StartError
from trader.database import pool
from trader.database.pool import PINNED, Database, connect_alone, require_own_sessions
from trader.exchange.sql.audit import select_differences

UNLIKE = {
    "application_name": "other",
    "array_nulls": "off",
    "bytea_output": "escape",
    "datestyle": "German",
    "default_transaction_deferrable": "on",
    "default_transaction_isolation": "serializable",
    "extra_float_digits": "-15",
    "idle_in_transaction_session_timeout": "1ms",
    "idle_session_timeout": "300ms",
    "intervalstyle": "sql_standard",
    "lock_timeout": "1ms",
    "row_security": "off",
    "search_path": "pg_catalog",
    "standard_conforming_strings": "off",
    "statement_timeout": "1ms",
    "synchronous_commit": "off",
    "timezone": "Asia/Kathmandu",
    "transform_null_equals": "on",
}


async def set_unlike(dsn: str, name: str, value: str) -> None:
    conn = await asyncpg.connect(dsn, server_settings={"statement_timeout": "0"})
    try:
        await conn.execute(f"ALTER DATABASE {urlsplit(dsn).path[1:]} SET {name} = '{value}'")
    finally:
        await conn.close()


async def call(client: Client, name: str, request: dict[str, Any]) -> Any:
    async with client.post(f"/api/rpc/{name}", json=request) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def test_every_pinned_setting_is_tried() -> None:
    assert UNLIKE.keys() == PINNED.keys()


@pytest.mark.parametrize(("name", "value"), UNLIKE.items())
async def test_a_setting_of_the_database_does_not_reach_a_session(dsn: str, name: str, value: str) -> None:
    database = await Database.connect(dsn, size=1)
    async with database.connection() as conn:
        usual = await conn.fetchval(f"SHOW {name}")
    await database.close()
    await set_unlike(dsn, name, value)
    database, alone = await Database.connect(dsn, size=1), await connect_alone(dsn)
    async with database.connection() as conn:
        assert await conn.fetchval(f"SHOW {name}") == usual
    assert await alone.fetchval(f"SHOW {name}") == ("0" if name.endswith("timeout") else usual)
    await alone.close()
    await database.close()


@pytest.mark.slow
async def test_the_service_trades_whatever_its_database_sets(dsn: str) -> None:
    for name, value in UNLIKE.items():
        await set_unlike(dsn, name, value)
    async with composed(dsn, MARKET_SOURCE="synthetic", SIM_LATENCY_MS="0") as (service, client):
        await until(lambda: service.context.market.quote("BTC") is not None)
        order = {"accountId": "a", "symbol": "BTC", "side": "buy", "quantity": 0.01, "clientOrderId": "one"}
        placed, *others = await asyncio.gather(*(call(client, "simulator.placeOrder", order) for _ in range(5)))
        assert placed["order"]["status"] == "filled"
        assert others == [placed] * 4
        other = order | {"side": "sell", "quantity": 0.01, "clientOrderId": "two"}
        await call(client, "simulator.placeOrder", other)
        (trade,) = (await call(client, "trading.getTrades", {"modelId": "a"}))["trades"]
        assert trade["closedAt"].endswith("Z")
        async with service.database.reading() as conn:
            assert await select_differences(conn) == []


async def test_a_database_without_foreign_keys_is_refused(dsn: str) -> None:
    await set_unlike(dsn, "session_replication_role", "replica")
    with pytest.raises(StartError, match="sets session_replication_role to replica, so foreign keys"):
        await Database.connect(dsn)


async def test_an_address_may_choose_its_schema(dsn: str) -> None:
    database = await Database.connect(
        f"{dsn}{'&' if '?' in dsn else '?'}search_path=pg_catalog&default_transaction_isolation=serializable"
    )
    async with database.connection() as conn:
        assert await conn.fetchval("SHOW search_path") == "pg_catalog"
        assert await conn.fetchval("SHOW default_transaction_isolation") == "read committed"
    await database.close()


async def test_a_frozen_transaction_ends_and_its_locks_with_it(dsn: str) -> None:
    database = await Database.connect(dsn, size=2, idle_in_transaction_s=0.3)
    with pytest.raises(DatabaseUnavailable):
        async with database.transaction() as conn:
            await conn.execute("LOCK TABLE accounts")
            async with database.transaction() as successor:  # it waits until the server ends the first
                await successor.execute("LOCK TABLE accounts")
            await conn.fetchval("SELECT 1")
    await database.close()


async def test_a_pooler_that_shares_sessions_is_refused(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await require_own_sessions(dsn)
    shared = await asyncpg.connect(dsn)

    async def lend(_: str) -> Any:
        return shared

    monkeypatch.setattr(pool, "connect_alone", lend)
    with pytest.raises(StartError, match="set pool_mode = session"):
        await require_own_sessions(dsn)
