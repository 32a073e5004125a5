"""The embedded server takes its own service for what it is, and no other process of the machine."""

import asyncio
import os
import subprocess
from pathlib import Path

import asyncpg
import pytest
from support.replication import admit

from trader.embedded.binaries import choose_binaries
from trader.embedded.server import EmbeddedPostgres


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_process_of_the_servers_user_is_not_its_superuser(open_folder: Path) -> None:
    async with EmbeddedPostgres(open_folder / "server", durable=False) as server:
        dsn = await server.ensure_database("trader_test")
        conn = await asyncpg.connect(dsn)
        assert await conn.fetchval("SELECT current_user") == "postgres"
        await conn.close()
        psql = choose_binaries(server.data).readable_copy().program("psql")

        async def run_as_nobody() -> subprocess.CompletedProcess[str]:
            command = [psql, "--no-psqlrc", "-c", "SELECT 1", dsn]
            return await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False, user="nobody", cwd="/"
            )

        refused = await run_as_nobody()
        assert refused.returncode == 2
        assert 'Peer authentication failed for user "postgres"' in refused.stderr
        await admit(dsn, "nobody")
        assert (await run_as_nobody()).returncode == 0, "it is that rule that refused it"
