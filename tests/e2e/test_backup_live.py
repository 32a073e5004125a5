"""A move from the embedded PostgreSQL to a server and back, by backups while the service runs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.process import COMMAND, ServiceProcess, passed_on, serving
from support.tables import digests

from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.server import EmbeddedPostgres

pytestmark = pytest.mark.processes

QUICKLY = {"SIM_LATENCY_MS": "0"}


async def call(folder: Path, *arguments: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, "--json",
        cwd=folder, env={**passed_on(), "HOME": str(folder)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(100):
        out, _ = await process.communicate()
    assert process.returncode == 0, out
    return json.loads(out)


async def trade(service: ServiceProcess) -> int:
    """Trade until canceled. Return how many orders were filled."""
    filled = 0
    try:
        while True:
            await asyncio.sleep(0.1)  # the pace of a trader
            for side in ("buy", "sell"):
                order = {"accountId": "me", "symbol": "ETH", "side": side, "quantity": 0.01}
                filled += (await service.call("simulator.placeOrder", **order))["order"]["status"] == "filled"
    except asyncio.CancelledError:
        return filled


async def embedded_digests(folder: Path) -> dict[str, tuple[int, str]]:
    async with EmbeddedPostgres(folder / EMBEDDED_FOLDER).attach() as server:
        return await digests(server.dsn("trader_synthetic"))


async def test_backups_move_a_database_to_a_server_and_back(open_folder: Path, empty_dsn: str) -> None:
    here, there = open_folder / "here", open_folder / "there"
    here.mkdir()
    there.mkdir()
    async with serving(here, **QUICKLY) as service:
        position = {"accountId": "me", "symbol": "BTC", "side": "buy", "quantity": 0.02}
        assert (await service.call("simulator.placeOrder", **position))["order"]["status"] == "filled"
        trading = asyncio.create_task(trade(service))
        made = await call(here, "backup", "one.dump")
        trading.cancel()
        assert await trading > 0, "the service trades on"
        assert (made["isClean"], made["database"]["service"]) == (True, "running")
        assert await service.stop() == 0
    assert sorted(file.name for file in here.iterdir()) == [".trader", "one.dump"]

    restored = await call(here, "restore", "one.dump", "--database-url", empty_dsn)
    assert restored["problems"] == []
    assert restored["backup"]["marketIdentity"].startswith("synthetic:sha256:")
    async with serving(there, DATABASE_URL=empty_dsn, **QUICKLY) as service:
        account = (await service.call("simulator.getAccount", accountId="me"))["account"]
        assert "BTC" in [entry["symbol"] for entry in account["positions"]]
        assert await service.stop() == 0

    await call(there, "backup", "two.dump", "--database-url", empty_dsn)
    restored = await call(there, "restore", "two.dump")
    assert "embedded in ./.trader/postgres (trader_synthetic)" in restored["place"]
    assert await embedded_digests(there) == await digests(empty_dsn)
    async with serving(there, **QUICKLY) as service:
        again = (await service.call("simulator.getAccount", accountId="me"))["account"]
        assert again["cashBalance"] == account["cashBalance"]
        assert await service.stop() == 0
