"""Start, failed starts, kill and restart of the service."""

import asyncio
import os
import random
import shutil
import signal
import socket
import sys
from contextlib import ExitStack, closing, suppress
from itertools import cycle, product
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
from support.process import ROOT, ServiceProcess, passed_on, serving
from support.run_profile import is_nightly
from support.waiting import becomes, until
from support.wire import check_output
from yarl import URL

from trader.core.variant_id import VariantId

pytestmark = pytest.mark.processes


async def ended(folder: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    """Run the command to its end; return its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "trader", *arguments,
        cwd=folder,
        env={**passed_on(), "HOME": str(folder), "PORT": "0", **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_a_start_without_a_provider_creates_nothing(tmp_path: Path, empty_dsn: str) -> None:
    for environ in ({}, {"DATABASE_URL": empty_dsn}):
        code, output = await ended(tmp_path, MARKET_SOURCE="synthetic", **environ)
        assert (code, "API_KEY" in output) == (2, True), output
    assert list(tmp_path.iterdir()) == []
    conn = await asyncpg.connect(empty_dsn)
    assert await conn.fetchval("SELECT to_regclass('schema_version')") is None
    await conn.close()


async def test_a_taken_port_is_reported(tmp_path: Path, dsn: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        code, output = await ended(tmp_path, "--demo=fresh", DATABASE_URL=dsn, PORT=str(port))
    assert code == 1
    assert f"trader cannot start: cannot listen on 127.0.0.1 port {port}: Address already in use." in output
    assert "leading" not in output, "a service that cannot listen must not trade"


async def test_a_foreign_host_address_is_reported(tmp_path: Path, dsn: str) -> None:
    for host in ("no-such-host.invalid", "192.0.2.1"):
        code, output = await ended(tmp_path, "--demo=fresh", DATABASE_URL=dsn, HOST=host, API_TOKEN="a" * 16)
        assert code == 1
        assert f"trader cannot start: cannot listen on {host} port " in output
        assert "Traceback" not in output


async def test_scripts_run_on_a_fresh_folder_needs_nothing_else(open_folder: Path) -> None:
    """`scripts/run --demo` with the embedded PostgreSQL; a second start in the same folder; kill -9 and again.

    The first start begins with three days traded by its rule agents, under the rules and records of the service.
    """
    async with aiohttp.ClientSession() as http:
        first = await start_by_script(open_folder, http)
        try:
            await healthy(first)
            models = (await first.call("models.getModels"))["models"]
            assert sorted(model["variant"] for model in models) == sorted(VariantId)
            assert {(model["provider"], model["active"]) for model in models} == {("rules", True)}
            trades = (await first.call("trading.getTrades", limit=500))["trades"]
            variants = {trade["modelVariant"] for trade in trades}
            assert len(variants) >= len(VariantId) - 1, "of which the most careful may close nothing in three days"
            curves = await first.call("trading.getEquityCurves")
            assert all(sum(value is not None for value in curve["values"]) >= 70 for curve in curves["models"])
            audit = await asyncio.create_subprocess_exec(ROOT / "scripts" / "run", "audit", cwd=open_folder)
            assert await audit.wait() == 0
            placed = await first.call("simulator.placeOrder", symbol="ETH", side="sell", quantity=1, clientOrderId="a")
            resting = {"symbol": "BTC", "side": "buy", "quantity": 0.01, "type": "limit", "limitPrice": 900}
            await first.call("simulator.placeOrder", **resting)
            assert placed["order"]["status"] == "filled"
            await second_start_is_clear(open_folder)
            before = await books(first)
        finally:
            await first.kill()

        again = await start_by_script(open_folder, http)
        try:
            await healthy(again)
            assert not any(b"the last 3 days" in line for line in again.log), "only an empty database gets a past"
            assert await books(again) == before
            repeated = await again.call(
                "simulator.placeOrder", symbol="ETH", side="sell", quantity=1, clientOrderId="a"
            )
            assert repeated == placed
            assert await again.stop() == 0
            assert not again.traceback()
        finally:
            if again.process.returncode is None:
                await again.kill()


async def test_the_service_can_be_stopped_while_catching_up_on_a_long_downtime(tmp_path: Path, dsn: str) -> None:
    """Catching up on months takes many minutes; an operator may interrupt it."""
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service:
        placed = await service.call("simulator.placeOrder", symbol="BTC", side="buy", quantity=0.001)
        assert placed["order"]["status"] == "filled"
        assert await service.stop() == 0
    conn = await asyncpg.connect(dsn)
    await conn.execute("UPDATE service_state SET processed_until = now() - interval '90 days'")
    before = await conn.fetchval("SELECT processed_until FROM service_state")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "trader", "--demo=fresh",
        cwd=tmp_path,
        env={**passed_on(), "HOME": str(tmp_path), "PORT": "0", "DATABASE_URL": dsn},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while b"catching up" not in (line := await process.stderr.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGTERM)
        output = (await process.stderr.read()).decode()
        assert await process.wait() == 0
    assert "stopping before startup is complete" in output
    assert "leading" not in output
    assert "Traceback" not in output
    assert await conn.fetchval("SELECT processed_until FROM service_state") >= before, "it goes on from there"
    await conn.close()


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = (
    ["-P", "-m", "trader", "--demo"],
    [str(ROOT / "scripts" / "seed_accounts.py"), "--models", "2", "--history", "1"],
)


def processes_in(folder: Path) -> list[str]:
    """The programs that run in a folder or name it: servers, their workers, and children of both."""
    seen = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or has no owner
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(folder) in command or (process / "cwd").readlink().is_relative_to(folder):
                seen.append(f"{process.name} {command}")
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    ("command", "number"),
    list(product(INTERRUPTED, SIGNALS)) if is_nightly() else list(zip(cycle(INTERRUPTED), SIGNALS)),
)
async def test_an_interrupt_at_any_moment_leaves_no_process(
    open_folder: Path, command: list[str], number: signal.Signals
) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": str(open_folder), "PORT": "0"}
    devnull = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=open_folder, env=environ, stdout=devnull, stderr=devnull
    )
    await until(lambda: list(open_folder.rglob("data.unfinished")) or process.returncode is not None)
    assert process.returncode is None
    async with asyncio.timeout(90):
        await asyncio.sleep(random.random() * 3)  # while the server is created, starts, or the models trade
        process.send_signal(number)
        assert await process.wait() in (0, 130), "it ends by its own decision, not by the signal"
        await becomes(lambda: processes_in(open_folder), [])


async def start_by_script(folder: Path, http: aiohttp.ClientSession) -> ServiceProcess:
    assert shutil.which("bash")
    return await ServiceProcess.start(folder, http, "--demo", command=(str(ROOT / "scripts" / "run"),))


async def healthy(service: ServiceProcess) -> None:
    await becomes(service.status, 200)
    _, report = await service.get("/health")
    assert report["status"] == "healthy"
    assert report["schedulers"] == {"priceTracker": True, "tradeExecutor": True, "portfolioSnapshot": True}


async def books(service: ServiceProcess) -> dict[str, Any]:
    """Return everything about the account that does not depend on prices, which a restart must not change."""
    answer = await service.call("simulator.getAccount")
    check_output("simulator.getAccount", answer)
    account = answer["account"]
    kept = ("symbol", "side", "quantity", "avgEntryPrice", "margin", "leverage", "realizedPnl", "exitPlan")
    return {
        "runId": account["runId"],
        "fees": account["totalFees"],
        "realized": account["totalRealizedPnl"],
        "orders": account["openOrders"],
        "positions": [{key: position[key] for key in kept} for position in account["positions"]],
        "ids": [
            (entry["id"], entry["openedAt"]) for entry in await service.call("trading.getPositions", modelId="default")
        ],
    }


async def second_start_is_clear(folder: Path) -> None:
    """The embedded server belongs to the process that started it."""
    code, output = await ended(folder, "--demo")
    assert code == 1
    assert "Traceback" not in output
    assert "another" in output.lower() or "already" in output.lower(), output


@pytest.mark.asyncio(loop_scope="session")
async def test_the_service_listens_after_reading_its_statistics(service: ServiceProcess) -> None:
    output = b"".join(service.log).decode()
    assert 0 < output.find("statistics of the current runs were read") < output.find("listening on")


async def test_simultaneous_connections_are_all_accepted(tmp_path: Path, dsn: str) -> None:
    """As after a restart: a caller that finds no room in the queue would retry after a second."""
    async with serving(tmp_path, DATABASE_URL=dsn) as service:
        url = URL(service.url)
        service.process.send_signal(signal.SIGSTOP)  # it accepts no connections meanwhile
        try:
            with ExitStack() as stack:
                callers = []
                for _ in range(500):
                    caller = socket.create_connection((str(url.host), url.port or 0), timeout=0.5)
                    callers.append(stack.enter_context(caller))
                service.process.send_signal(signal.SIGCONT)
                for caller in callers:
                    caller.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                for caller in callers:
                    caller.settimeout(10)
                    assert caller.recv(65536).startswith(b"HTTP/1.1 ")
        finally:
            service.process.send_signal(signal.SIGCONT)
