"""The embedded server accepts its own service, and no other process on the machine."""

import asyncio
import os
import subprocess
from pathlib import Path

import asyncpg
import pytest
from support.replication import admit

from trader.database.embedded.binaries import choose_binaries
from trader.database.embedded.folders import server_account
from trader.database.embedded.server import EmbeddedPostgres


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_process_of_the_servers_user_is_not_its_superuser(open_folder: Path) -> None:
    async with EmbeddedPostgres(open_folder / "server", durable=False) as server:
        account = server_account()
        assert account is not None
        user = account.name
        dsn = await server.ensure_database("trader_test")
        conn = await asyncpg.connect(dsn)
        assert await conn.fetchval("SELECT current_user") == "trader"
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await conn.execute("COPY (SELECT 1) TO PROGRAM 'cat'")  # injected SQL cannot run programs
        await conn.close()
        psql = choose_binaries(server.data).readable_copy().program("psql")

        async def run_as(user: str) -> subprocess.CompletedProcess[str]:
            command = [psql, "--no-psqlrc", "-c", "SELECT 1", dsn]
            return await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False, user=user, cwd="/"
            )

        if user != "nobody":  # it belongs to no other program
            assert "Permission denied" in (await run_as("nobody")).stderr
        refused = await run_as(user)
        assert refused.returncode == 2
        assert 'Peer authentication failed for user "trader"' in refused.stderr
        await admit(server.superuser_dsn(), user)
        assert (await run_as(user)).returncode == 0, "it is that rule that refused it"
