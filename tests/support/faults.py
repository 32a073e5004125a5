"""Inject faults into a service of its own, and measure when they are told, when they are over, and what was lost.

A service on a PostgreSQL server in a temporary folder books an order every half a second, while one fault after the
other begins, lasts and ends. For each the table shows how long it took until `/health` and a webhook of NOTIFY_URL said
so, how long after its end both said that it is over, in how many notices, and which acknowledged orders were lost.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import asyncpg
import orjson
from support.process import ServiceProcess
from support.proxy import FaultyProxy
from support.sinks import Sinks, sinks

from trader.embedded.server import EmbeddedPostgres
from trader.services.exchange.audit import audit
from trader.store.database.pool import Database

DATABASE: Final = "trader"
ORDER_EVERY_S: Final = 0.5
LOOK_EVERY_S: Final = 0.1
TOLD_S: Final = 60.0
RESOLVED_S: Final = 150.0
DISK_BYTES: Final = 200 << 20


class Bench:
    """The service under test, its database, its sink and a client that trades."""

    def __init__(self, folder: Path, http: aiohttp.ClientSession, stack: AsyncExitStack, here: Sinks) -> None:
        self.folder = folder
        self.http = http
        self.stack = stack
        self.sinks = here
        self.server = EmbeddedPostgres(folder / "postgres", durable=True)
        self.proxy: FaultyProxy
        self.service: ServiceProcess
        self.environ: dict[str, str] = {}
        self.acknowledged: dict[str, str] = {}
        self.answers: list[str] = []
        self._numbers = count()

    async def open(self) -> None:
        """Start the database server and the service."""
        await self.server.start()
        self.stack.push_async_callback(self.server.stop)
        self.proxy = FaultyProxy(await self.server.ensure_database(DATABASE))
        dsn = await self.proxy.start()
        self.stack.push_async_callback(self.proxy.close)
        self.environ = {"DATABASE_URL": dsn, "NOTIFY_URL": f"{self.sinks.url}/away", "SIM_LATENCY_MS": "0"}
        await self.start_service()
        self.stack.push_async_callback(self.stop_service)
        trading = asyncio.create_task(self._trade())
        self.stack.callback(trading.cancel)

    async def start_service(self) -> None:
        self.service = await ServiceProcess.start(self.folder, self.http, **self.environ)

    async def restart_service(self) -> None:
        """Start the service anew, and wait until the sink has heard of it."""
        heard = len(self.notices())
        await self.stop_service()
        await self.start_service()
        await _until(lambda: _is_told(self, heard, "start"), TOLD_S)

    async def stop_service(self) -> None:
        if self.service.process.returncode is None:
            await self.service.kill()

    async def _trade(self) -> None:
        """Place an order every half a second in one of ten accounts, and note the acknowledged ones."""
        pending: set[asyncio.Task[None]] = set()
        while True:
            task = asyncio.create_task(self._order(next(self._numbers)))
            pending.add(task)
            task.add_done_callback(pending.discard)
            await asyncio.sleep(ORDER_EVERY_S)

    async def _order(self, number: int) -> None:
        order = {"accountId": f"client-{number % 10}", "symbol": "BTC", "side": "buy" if number % 20 < 10 else "sell"}
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            status, body = await self.service.try_call(
                "simulator.placeOrder", **order, quantity=0.001, clientOrderId=str(number)
            )
            if status == 200:
                self.acknowledged[str(number)] = body["order"]["id"]
            else:
                self.answers.append(f"{status} {body.get('error') or body.get('message')}")

    async def is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(3):
                status, _ = await self.service.get("/health")
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        return status == 200

    def notices(self) -> list[dict[str, Any]]:
        """Every notice that the sink took, in order."""
        return [orjson.loads(each.body) for each in self.sinks.of("/away") if each.is_taken]

    async def administer(self, *statements: str) -> None:
        writable = {"default_transaction_read_only": "off"}
        conn = await asyncpg.connect(self.server.dsn("postgres"), server_settings=writable)
        try:
            for statement in statements:
                await conn.execute(statement)
        finally:
            await conn.close()

    async def lost(self) -> tuple[int, list[str]]:
        """Return how many acknowledged orders are not in the database, and what the audit finds."""
        acknowledged = dict(self.acknowledged)  # those of later are not in the rows that are read now
        database = await Database.connect(self.server.dsn(DATABASE), size=2)
        try:
            async with database.connection() as conn:
                rows = await conn.fetch("SELECT client_order_id, id::text FROM order_requests")
            ids = {row["client_order_id"]: row["id"] for row in rows}
            problems = list((await audit(database)).problems)
        finally:
            await database.close()
        return sum(ids.get(number) != order_id for number, order_id in acknowledged.items()), problems


class Fault(NamedTuple):
    """A fault: its name in docs/runbooks.md, the cause of its notice, and what makes and ends it.

    `quick_cause` is how a fault is named that is told at once, without waiting for a time limit.
    """

    name: str
    kind: str
    inject: Callable[[Bench], Any]
    lasts_s: float = 20.0
    quick_cause: str | None = None
    needs_root: bool = False


@asynccontextmanager
async def locked_tables(bench: Bench) -> AsyncIterator[None]:
    conn = await asyncpg.connect(bench.server.dsn(DATABASE))
    try:
        async with conn.transaction():
            await conn.execute("LOCK TABLE fills, orders, runs")
            yield
    finally:
        await conn.close()


@asynccontextmanager
async def read_only(bench: Bench) -> AsyncIterator[None]:
    await bench.administer("ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
    yield
    await bench.administer("ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()")


@asynccontextmanager
async def no_connections_left(bench: Bench) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        bench.proxy.cut()
        with suppress(asyncpg.PostgresError):
            while True:
                conn = await asyncpg.connect(bench.server.dsn("postgres"))
                stack.push_async_callback(conn.close)
        yield


@asynccontextmanager
async def full_disk(bench: Bench) -> AsyncIterator[None]:
    filler = bench.folder / "postgres" / "filler"
    with filler.open("wb") as file, suppress(OSError):
        while True:
            file.write(b"x" * 65536)
            file.flush()
    yield
    filler.unlink()


@asynccontextmanager
async def killed_database(bench: Bench) -> AsyncIterator[None]:
    os.kill(_postmaster(bench), signal.SIGKILL)
    await bench.server.stop()
    yield
    await bench.server.start()


@asynccontextmanager
async def stopped_database(bench: Bench) -> AsyncIterator[None]:
    """SIGSTOP of every process of the server: connections stay open and nothing answers."""
    group = [_postmaster(bench), *_children(_postmaster(bench))]
    for pid in group:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in group:
        os.kill(pid, signal.SIGCONT)


def _postmaster(bench: Bench) -> int:
    return int((bench.server.data / "postmaster.pid").read_text().split()[0])


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def unreachable_database(bench: Bench) -> AsyncIterator[None]:
    bench.proxy.stop()
    yield
    bench.proxy.pass_on()


@asynccontextmanager
async def killed_leader(bench: Bench) -> AsyncIterator[None]:
    await bench.service.kill()
    yield
    await bench.start_service()


@asynccontextmanager
async def suspended_process(bench: Bench) -> AsyncIterator[None]:
    """The machine sleeps, and its clock goes on: another process may lead meanwhile."""
    bench.service.process.send_signal(signal.SIGSTOP)
    yield
    bench.service.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def unreachable_sink(bench: Bench) -> AsyncIterator[None]:
    """A sink that is away hears of a fault of the meantime when it is back, as over."""
    bench.sinks.away = True
    async with unreachable_database(bench):
        yield
    await asyncio.sleep(25)
    bench.sinks.away = False


FAULTS: Final = (
    Fault("the database is locked", "database", locked_tables, lasts_s=40),
    Fault("the disk is full", "database", full_disk, needs_root=True),
    Fault("the database is read-only", "database", read_only, quick_cause="read-only"),
    Fault("no connection is left", "database", no_connections_left),
    Fault("the database is killed", "database", killed_database, quick_cause="not reachable"),
    Fault("the database is stopped", "database", stopped_database),
    Fault("the database is unreachable", "database", unreachable_database),
    Fault("the leader is killed", "start", killed_leader, lasts_s=0),
    Fault("the process is suspended", "takeover", suspended_process),
    Fault("the sink is away", "database", unreachable_sink),
)


class Told(NamedTuple):
    """What was measured of a fault, in seconds; None: it was not told."""

    fault: str
    unhealthy_s: float | None
    told_s: float | None
    healthy_s: float | None
    resolved_s: float | None
    notices: Sequence[str]
    lost: int
    problems: Sequence[str]
    answer: str

    @property
    def is_clean(self) -> bool:
        return self.lost == 0 and not self.problems and self.unhealthy_s is not None and self.healthy_s is not None


async def measure(bench: Bench, fault: Fault, *, waits_for_notices: bool) -> Told:
    """Let a fault happen, and measure."""
    heard, began = len(bench.notices()), len(bench.answers)
    async with fault.inject(bench):
        begun_s = time.monotonic()
        is_told = asyncio.create_task(_until(lambda: _is_told(bench, heard, fault.kind), TOLD_S))
        unhealthy_s = await _until(lambda: _is(bench, healthy=False), TOLD_S)
        if waits_for_notices:
            await asyncio.sleep(max(0.0, fault.lasts_s - (time.monotonic() - begun_s)))
        answers = bench.answers[began:]
    ended_s = time.monotonic()
    healthy_s = await _until(lambda: _is(bench, healthy=True), RESOLVED_S)
    resolved_s = None
    if waits_for_notices:
        await is_told
        if (await _until(lambda: _is_resolved(bench, heard), 30)) is not None:
            resolved_s = time.monotonic() - ended_s
    is_told.cancel()
    lost, problems = await bench.lost()
    notices = [f"{notice['state']} {notice['cause']}" for notice in bench.notices()[heard:]]
    told_s = is_told.result() if is_told.done() and not is_told.cancelled() else None
    return Told(
        fault.name, unhealthy_s, told_s, healthy_s, resolved_s, notices, lost, problems, answers[-1] if answers else ""
    )


async def _is(bench: Bench, *, healthy: bool) -> bool:
    return await bench.is_healthy() is healthy


async def _is_told(bench: Bench, heard: int, kind: str) -> bool:
    return any(notice["cause"] == kind for notice in bench.notices()[heard:])


async def _is_resolved(bench: Bench, heard: int) -> bool:
    return any(notice["state"] == "resolved" for notice in bench.notices()[heard:])


async def _until(condition: Callable[[], Any], limit_s: float) -> float | None:
    """Return after how many seconds a condition held; None when it did not within the limit."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < limit_s:
        if await condition():
            return time.monotonic() - began_s
        await asyncio.sleep(LOOK_EVERY_S)
    return None


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Bench]:
    """A bench in an empty folder that every user can reach."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        bench = Bench(folder, http, stack, await stack.enter_async_context(sinks()))
        await bench.open()
        yield bench


async def run(folder: Path, faults: Sequence[Fault]) -> bool:
    """Run the faults and print a row of each. Return whether nothing was lost, and each was told and resolved."""
    is_clean = True
    async with opened(folder) as bench:
        heads = ("fault", "unhealthy", "told", "healthy", "resolved", "lost", "notices")
        print("{:28} {:>10} {:>8} {:>8} {:>9} {:>5}  {}".format(*heads), flush=True)
        for fault in faults:
            await bench.restart_service()  # what begins again soon after its end is resolved later
            told = await measure(bench, fault, waits_for_notices=True)
            is_clean = is_clean and told.is_clean
            times = (told.unhealthy_s, told.told_s, told.healthy_s, told.resolved_s)
            shown = ["-" if each is None else f"{each:.1f} s" for each in times]
            row = (told.fault, *shown, told.lost, ", ".join(told.notices))
            print("{:28} {:>10} {:>8} {:>8} {:>9} {:>5}  {}".format(*row), flush=True)
            print(f"{'':28}   {told.answer}", *told.problems, sep="\n", flush=True)
    return is_clean


@asynccontextmanager
async def small_disk(folder: Path, *, is_wanted: bool) -> AsyncIterator[bool]:
    """A file system of its own for the database server, which only root may mount. Return whether there is one."""
    place = folder / "postgres"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=755", "tmpfs", str(place)]
    is_mounted = is_wanted and os.getuid() == 0 and await _succeeds("mount", *options)
    try:
        yield is_mounted
    finally:
        if is_mounted:
            await _succeeds("umount", str(place))


async def _succeeds(*command: str) -> bool:
    process = await asyncio.create_subprocess_exec(*command)
    return await process.wait() == 0


async def _main(options: argparse.Namespace, folder: Path) -> bool:
    chosen = [fault for fault in FAULTS if not options.faults or any(word in fault.name for word in options.faults)]
    async with small_disk(folder, is_wanted=any(fault.needs_root for fault in chosen)) as is_small:
        skipped = [] if is_small else [fault for fault in chosen if fault.needs_root]
        for fault in skipped:
            print(f"{fault.name}: skipped, it needs the right to mount a small file system")
        return await run(folder, [fault for fault in chosen if fault not in skipped])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="WORD", help="only the faults whose name has one of these words")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trader-faults-"))
    folder.chmod(0o755)  # as root the server runs as nobody, which must have access
    try:
        return 0 if asyncio.run(_main(options, folder)) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
