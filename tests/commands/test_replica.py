"""Commands on a streaming replica: they see the service on the primary, and a backup can be made there."""

import asyncio
from pathlib import Path

import pytest
from support.records import add_model
from support.replication import replicated

from trader.__main__ import main
from trader.embedded import dumps
from trader.store.database.pool import Database
from trader.store.database.schema import apply_schema


async def test_a_replica_tells_of_the_service_on_its_primary(
    open_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with replicated(open_folder) as cluster:
        database = await Database.connect(cluster.dsn, size=1)
        await apply_schema(database)
        async with database.connection() as conn:
            await add_model(conn, "ada")
            await conn.execute(
                "INSERT INTO service_state (market_identity, trading_mode, heartbeat_at, schedulers)"
                " VALUES ('synthetic:0', 'simulated', now(), $1)",
                {"tradeExecutor": True},
            )
        await database.close()
        replica = await cluster.add_replica()
        assert await asyncio.to_thread(main, ["status", "--database-url", replica.dsn]) == 0
        assert "(a replica, read-only), the service is running" in capsys.readouterr().err
        await dumps.dump(dumps.libpq_address(replica.dsn), 15, open_folder / "a.dump")
        rows = await dumps.read_rows(open_folder / "a.dump", "models")
        assert [one["id"] for one in rows["models"]] == ["ada"]
        assert await asyncio.to_thread(main, ["halt", "--database-url", replica.dsn]) == 1
