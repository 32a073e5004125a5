"""Alarms of the running process: a webhook's messages next to a hanging sink, the dead-man ping, and sd_notify."""

import asyncio
import re
import socket
import sys
from pathlib import Path

import orjson
import pytest
from support.process import passed_on, serving
from support.sinks import sinks
from support.waiting import becomes

pytestmark = pytest.mark.processes

TOKEN = "s3cret-t0ken"


async def operate(folder: Path, *arguments: str, **environ: str) -> int | None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "trader", *arguments,
        cwd=folder, env={**passed_on(), "HOME": str(folder), **environ}, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    return await process.wait()


async def listen(systemd: socket.socket, states: list[str]) -> None:
    """Record every state until the service stops, without delay, since the queue of a datagram socket is short."""
    while states[-1:] != ["STOPPING=1"]:
        states.append((await asyncio.get_running_loop().sock_recv(systemd, 100)).decode())


async def test_an_operator_is_notified_of_start_halt_and_stop(tmp_path: Path, dsn: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "systemd"))
        systemd.setblocking(False)
        states: list[str] = []
        listener = asyncio.create_task(listen(systemd, states))
        async with sinks() as here, asyncio.timeout(120):
            environ = {
                "DATABASE_URL": dsn,
                "NOTIFY_URL": f"{here.url}/hangs?key={TOKEN},{here.url}/works?key={TOKEN}",
                "HEARTBEAT_URL": f"{here.url}/ping/{TOKEN}",
                "NOTIFY_SOCKET": str(tmp_path / "systemd"),
                "WATCHDOG_USEC": "200000",
            }
            async with serving(tmp_path, **environ) as service:
                await here.wait_for("/works")
                await here.wait_for(f"/ping/{TOKEN}")
                assert await operate(tmp_path, "halt", "--reason", "strange prices", DATABASE_URL=dsn) == 0
                await becomes(lambda: any(b'"halt"' in request.body for request in here.of("/works")), True)
                async with service.http.get(f"{service.url}/metrics") as response:
                    figures = await response.text()
                assert await service.stop() == 0, "a sink that hangs holds up nothing"
                log = b"".join(service.log).decode()
            heard = [orjson.loads(request.body) for request in here.of("/works")]
        await asyncio.wait([listener], timeout=30)
    heard = [alarm for alarm in heard if alarm["cause"] != "notices"]  # of the sink that hangs, once it took too long
    assert [(alarm["cause"], alarm["subject"]) for alarm in heard] == [
        ("start", ""),
        ("halt", "all accounts"),
        ("stop", ""),
    ]
    assert heard[0]["message"] == "started as leader (simulated, market synthetic)"
    assert heard[1]["message"] == "all accounts: operator: strange prices"
    assert (states[0], states[-1]) == ("READY=1", "STOPPING=1")
    assert len(states) > 3
    assert set(states[1:-1]) == {"WATCHDOG=1"}
    assert len(here.of("/hangs")) >= 1
    assert re.search(r'trader_notifications_total\{outcome="sent",sink="json 2"\} [23]\.0', figures)
    assert 'trader_notifications_total{outcome="sent",sink="json 1"} 0.0' in figures
    assert TOKEN not in log + figures
