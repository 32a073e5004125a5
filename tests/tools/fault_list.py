"""The faults that are injected: each as a context manager that causes and ends it."""

import asyncio
import os
import resource
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import asyncpg
import pytest
from support.waiting import until
from tools.fault_benches import (
    PASSWORD,
    Bench,
    ClockBench,
    EmbeddedBench,
    EmbeddedSmallDiskBench,
    PasswordBench,
    ProviderBench,
    ProviderOfManyBench,
    ReaderBench,
    SmallDiskBench,
    StandbyBench,
    VenueBench,
    run_program,
)

from trader.database.embedded.server import SERVER_LOG

END_CONNECTIONS: Final = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'trader'"


class Fault(NamedTuple):
    """A fault: its name, the cause in its notice, its context manager, and its bench.

    Without a `kind` nothing has to be reported.

    `quick_cause` is the cause in the notice of a fault that is reported at once, without waiting for a time limit.
    """

    name: str
    kind: str | None
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
        while await first.fetchval(END_CONNECTIONS):  # the service tries for each free one
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
    """Send SIGSTOP to every process of the server: connections stay open, but nothing answers."""
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
    """Kill the service, which a supervisor restarts."""
    await bench.service.kill()
    yield


@asynccontextmanager
async def killed_server(bench: EmbeddedBench) -> AsyncIterator[None]:
    """Kill the embedded server; the service ends with it, and a supervisor restarts both."""
    os.kill(_postmaster(bench), signal.SIGKILL)
    yield


@asynccontextmanager
async def suspended_process(bench: Bench) -> AsyncIterator[None]:
    """Suspend the machine while its clock continues: another process may lead meanwhile."""
    bench.service.process.send_signal(signal.SIGSTOP)
    yield
    bench.service.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def unreachable_sink(bench: Bench) -> AsyncIterator[None]:
    """Make the sink unreachable: once it returns, it receives the faults of the meantime as resolved."""
    bench.sinks.away = True
    async with unreachable_database(bench):
        yield
    await asyncio.sleep(25)  # the fault resolves meanwhile
    bench.sinks.away = False


@asynccontextmanager
async def refused_password(bench: PasswordBench) -> AsyncIterator[None]:
    """Change the password at the server, and force new connections."""
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
    """Answer every request with 402 from now on; the service retries once a minute."""
    await until(lambda: bench.provider.requests)  # it was answered before
    bench.provider.status = 402
    yield
    bench.provider.status = 200


@asynccontextmanager
async def unavailable_provider(bench: ProviderBench) -> AsyncIterator[None]:
    """Answer every request with 503 from now on."""
    await until(lambda: bench.provider.requests)  # it was answered before
    bench.provider.status = 503
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


SELECT_TABLES: Final = """
SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')
    AND NOT relispartition AND relname <> 'schema_version' ORDER BY relname
"""
NOTICED_S: Final = 15.0
SLOW: Final = (
    "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(4); RETURN NEW; END'",
    "CREATE TRIGGER slow BEFORE INSERT ON order_requests FOR EACH ROW EXECUTE FUNCTION public.slow()",
)


@asynccontextmanager
async def each_table_locked(bench: Bench) -> AsyncIterator[None]:
    """Lock the tables one by one; the service must be unhealthy each time, and healthy in between."""
    conn = await asyncpg.connect(bench.server.dsn(bench.database))
    try:
        tables = [row["relname"] for row in await conn.fetch(SELECT_TABLES)]
        for number, table in enumerate(tables):
            transaction = conn.transaction()
            await transaction.start()
            await conn.execute(f"LOCK TABLE {table}")
            if number == len(tables) - 1:
                yield
            else:
                await _health_becomes(bench, healthy=False, what=f"while {table} is locked")
            await transaction.rollback()
            await _health_becomes(bench, healthy=True, what=f"after {table} was locked")
    finally:
        await conn.close()


async def _health_becomes(bench: Bench, *, healthy: bool, what: str) -> None:
    """Wait for the health of the service."""

    async def is_so() -> bool:
        return await bench.is_healthy() is healthy

    await until(is_so, f"a {'healthy' if healthy else 'unhealthy'} service {what}", within_s=NOTICED_S)


@asynccontextmanager
async def slow_database(bench: Bench) -> AsyncIterator[None]:
    """Let every posting of an order take four seconds."""
    conn = await asyncpg.connect(bench.server.superuser_dsn(bench.database))
    try:
        for statement in SLOW:
            await conn.execute(statement)
        yield
        await conn.execute("DROP FUNCTION public.slow() CASCADE")
    finally:
        await conn.close()


@asynccontextmanager
async def flapping_database(bench: Bench) -> AsyncIterator[None]:
    """Make the database unreachable for two of every twelve seconds."""

    async def flap() -> None:
        while True:
            bench.proxy.stop()
            await asyncio.sleep(2)  # the rhythm of the fault
            bench.proxy.pass_on()
            await asyncio.sleep(10)

    flapping = asyncio.create_task(flap())
    yield
    flapping.cancel()
    await asyncio.wait([flapping])
    bench.proxy.pass_on()


@asynccontextmanager
async def connections_taken_before_the_start(bench: Bench) -> AsyncIterator[None]:
    """Stop the service, take every connection, and start it: it ends with an error that says so, and starts later."""
    await bench.service.stop()
    async with AsyncExitStack() as stack:
        with suppress(asyncpg.PostgresError):
            while True:
                conn = await asyncpg.connect(bench.server.superuser_dsn())
                stack.push_async_callback(conn.close)
        with pytest.raises(AssertionError, match="too many"):
            await bench.start_service()
        yield
    await bench.start_service()


@asynccontextmanager
async def hung_up(bench: Bench) -> AsyncIterator[None]:
    """End the service's session as a closed terminal does: it stops in an orderly way."""
    bench.service.process.send_signal(signal.SIGHUP)
    assert await bench.service.process.wait() == 0
    yield
    await bench.start_service()


@asynccontextmanager
async def rotated_logs(bench: EmbeddedBench) -> AsyncIterator[None]:
    """Rotate the server's log by a rename and by a copy, and stop the reader of the service's own log."""
    log = bench.server.data.parent / SERVER_LOG
    for how in ("create", "copytruncate"):
        rules = bench.folder / f"{how}.conf"
        rules.write_text(f"{log} {{\n{how}\nrotate 3\nsu {log.owner()} {log.group()}\n}}\n")
        rules.chmod(0o644)
        await run_program("logrotate", "--force", "--state", str(bench.folder / "rotated"), str(rules))
        assert log.stat().st_size == 0
    assert log.with_name(f"{SERVER_LOG}.2").stat().st_size > 0
    bench.service.reads_log.clear()
    yield
    bench.service.reads_log.set()


@asynccontextmanager
async def out_of_memory(bench: EmbeddedBench) -> AsyncIterator[None]:
    """Limit the service's memory to its current use. If it exits, a supervisor restarts it."""
    pid = bench.service.process.pid
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    yield
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, before)


def lacks_hangups() -> str | None:
    """Return what SIGHUP lacks under `nohup`: a service that started there ignores it."""
    return "SIGHUP, which nohup ignores" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else None


FAULTS: Final = (
    Fault("the database is locked", "database", locked_tables, lasts_s=40),
    Fault("each table is locked, one by one", "database", each_table_locked),
    Fault("the database is slow", "database", slow_database, lasts_s=40),
    Fault("the database is flapping", "database", flapping_database, lasts_s=60),
    Fault("connections are taken before the start", "start", connections_taken_before_the_start, lasts_s=0),
    Fault("the terminal hangs up", "stop", hung_up, lasts_s=0, lacks=lacks_hangups),
    Fault("the disk is full", "database", full_disk, SmallDiskBench, lacks=SmallDiskBench.lacks),
    Fault("the database is read-only", "database", read_only, quick_cause="read-only"),
    Fault("no connection is left", "database", no_connections_left),
    Fault("the database is killed", "database", killed_database, quick_cause="not reachable"),
    Fault("the database is stopped", "database", stopped_database),
    Fault("the database is unreachable", "database", unreachable_database),
    Fault("the password is refused", "database", refused_password, PasswordBench),
    Fault("the leader is killed", "start", killed_leader, lasts_s=0),
    Fault("the leader of two is killed", "takeover", leader_killed_beside_standby, StandbyBench, 0, is_unhealthy=False),
    Fault("the process is suspended", "takeover", suspended_process),
    Fault("the replica is behind", "database", paused_replica, ReaderBench, lasts_s=75),
    Fault("the venue is unreachable", "market", unreachable_venue, VenueBench, lasts_s=95),
    Fault("the provider is out of credit", "provider", provider_without_credit, ProviderBench, 75, is_unhealthy=False),
    Fault("the provider is down", "provider", unavailable_provider, ProviderOfManyBench, 75, is_unhealthy=False),
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
    Fault("embedded: the process is suspended", "takeover", suspended_process, EmbeddedBench),
    Fault(
        "embedded: the logs are rotated",
        None,
        rotated_logs,
        EmbeddedBench,
        is_unhealthy=False,
        lacks=lambda: None if shutil.which("logrotate") else "logrotate",
    ),
    Fault("embedded: the service is out of memory", None, out_of_memory, EmbeddedBench, is_unhealthy=False),
)
