"""The faults of docs/runbooks.md: what makes and ends each, around the length of a block."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import asyncpg
from support.fault_benches import (
    PASSWORD,
    Bench,
    ClockBench,
    EmbeddedBench,
    EmbeddedSmallDiskBench,
    PasswordBench,
    ProviderBench,
    ReaderBench,
    SmallDiskBench,
    StandbyBench,
    VenueBench,
)

END_CONNECTIONS: Final = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'trader'"


class Fault(NamedTuple):
    """A fault: its name in docs/runbooks.md, the cause of its notice, what makes and ends it, and where.

    `quick_cause` is how a fault is named that is told at once, without waiting for a time limit.
    """

    name: str
    kind: str
    inject: Callable[[Any], Any]
    bench: type[Bench] = Bench
    lasts_s: float = 20.0
    quick_cause: str | None = None
    lacks: Callable[[], str | None] = lambda: None
    """Return what this machine lacks for the fault, or None."""
    is_unhealthy: bool = True
    """Whether `/health` says it. A standby takes over within a moment."""


@asynccontextmanager
async def locked_tables(bench: Bench) -> AsyncIterator[None]:
    conn = await asyncpg.connect(bench.server.dsn(bench.database))
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
        first = await asyncpg.connect(bench.server.superuser_dsn())
        stack.push_async_callback(first.close)
        while await first.fetchval(END_CONNECTIONS):  # the service tries for each that is free
            with suppress(asyncpg.PostgresError):
                while True:
                    conn = await asyncpg.connect(bench.server.superuser_dsn())
                    stack.push_async_callback(conn.close)
        yield


@asynccontextmanager
async def full_disk(bench: Bench) -> AsyncIterator[None]:
    filler = bench.folder / bench.postgres / "filler"
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
async def killed_service(bench: EmbeddedBench) -> AsyncIterator[None]:
    """A supervisor starts it again."""
    await bench.service.kill()
    yield


@asynccontextmanager
async def killed_server(bench: EmbeddedBench) -> AsyncIterator[None]:
    """The service ends with its embedded server, and a supervisor starts it again."""
    os.kill(_postmaster(bench), signal.SIGKILL)
    yield


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


@asynccontextmanager
async def refused_password(bench: PasswordBench) -> AsyncIterator[None]:
    """Another password at the server, and new connections."""
    await bench.set_password("another")
    bench.proxy.cut()
    yield
    await bench.set_password(PASSWORD)


@asynccontextmanager
async def leader_killed_beside_standby(bench: StandbyBench) -> AsyncIterator[None]:
    await bench.service.kill()
    bench.service = bench.standby
    yield


@asynccontextmanager
async def paused_replica(bench: ReaderBench) -> AsyncIterator[None]:
    await bench.replica.pause(paused=True)
    yield
    await bench.replica.pause(paused=False)


@asynccontextmanager
async def unreachable_venue(bench: VenueBench) -> AsyncIterator[None]:
    await bench.venue.stop()
    yield
    await bench.venue.start()


@asynccontextmanager
async def provider_without_credit(bench: ProviderBench) -> AsyncIterator[None]:
    """Every request is answered 402 from here on; the service asks again once a minute."""
    async with asyncio.timeout(90):
        while not bench.provider.requests:  # it was answered before
            await asyncio.sleep(0.1)
    bench.provider.status = 402
    yield
    bench.provider.status = 200


@asynccontextmanager
async def clock_forward(bench: ClockBench) -> AsyncIterator[None]:
    bench.set_clock(3600)
    yield
    bench.set_clock(0)


@asynccontextmanager
async def clock_back(bench: ClockBench) -> AsyncIterator[None]:
    bench.set_clock(-3600)
    yield
    bench.set_clock(0)


FAULTS: Final = (
    Fault("the database is locked", "database", locked_tables, lasts_s=40),
    Fault("the disk is full", "database", full_disk, SmallDiskBench, lacks=SmallDiskBench.lacks),
    Fault("the database is read-only", "database", read_only, quick_cause="read-only"),
    Fault("no connection is left", "database", no_connections_left),
    Fault("the database is killed", "database", killed_database, quick_cause="not reachable"),
    Fault("the database is stopped", "database", stopped_database),
    Fault("the database is unreachable", "database", unreachable_database),
    Fault("the password is refused", "database", refused_password, PasswordBench),
    Fault("the leader is killed", "start", killed_leader, lasts_s=0),
    Fault("the leader of two is killed", "takeover", leader_killed_beside_standby, StandbyBench, 0, is_unhealthy=False),
    Fault("the process is suspended", "database", suspended_process),
    Fault("the replica is behind", "database", paused_replica, ReaderBench, lasts_s=75),
    Fault("the venue is unreachable", "market", unreachable_venue, VenueBench, lasts_s=95),
    Fault("the provider is out of credit", "provider", provider_without_credit, ProviderBench, 75, is_unhealthy=False),
    Fault("the clock is set forward", "clock", clock_forward, ClockBench, lacks=ClockBench.lacks),
    Fault("the clock is set back", "clock", clock_back, ClockBench, lacks=ClockBench.lacks),
    Fault("the sink is away", "database", unreachable_sink),
    Fault("embedded: the database is locked", "database", locked_tables, EmbeddedBench, lasts_s=40),
    Fault("embedded: the disk is full", "database", full_disk, EmbeddedSmallDiskBench, lacks=SmallDiskBench.lacks),
    Fault("embedded: the database is read-only", "database", read_only, EmbeddedBench),
    Fault("embedded: no connection is left", "database", no_connections_left, EmbeddedBench),
    Fault("embedded: the database is killed", "start", killed_server, EmbeddedBench, lasts_s=0),
    Fault("embedded: the database is stopped", "database", stopped_database, EmbeddedBench),
    Fault("embedded: the service is killed", "start", killed_service, EmbeddedBench, lasts_s=0),
    Fault("embedded: the process is suspended", "database", suspended_process, EmbeddedBench),
)
