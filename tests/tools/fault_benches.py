"""Services under a fault: each has a database, a notification sink, a trading client, and the subject of its fault."""

import asyncio
import os
from collections.abc import AsyncIterator
from configparser import ConfigParser
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import asyncpg
import msgspec
import orjson
from support.fake_venue import FakeVenue, fake_venue
from support.process import COMMAND, ROOT, ServiceProcess
from support.proxy import FaultyProxy
from support.records import make_model
from support.replication import Replica
from support.sinks import Sinks, sinks
from support.trading_provider import TradingProvider, trading_provider

from trader.agents.sql.models import upsert_model
from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.binaries import choose_binaries
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Database
from trader.database.schema import apply_schema
from trader.portfolio.audit import audit

ORDER_EVERY_S: Final = 0.5
PRICES_EVERY_S: Final = 0.5
START_TOLD_S: Final = 60.0
DISK_BYTES: Final = 200 << 20

UNIT: Final = ROOT / "scripts" / "packaging" / "trader.service"
FAKE_CLOCKS: Final = sorted(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"))

PASSWORD: Final = "p&#%@:/ 1"
"""Of characters that have a meaning in addresses and in settings."""


class Bench:
    """The service under test, its database, its sink and a client that trades."""

    command: tuple[str, ...] = COMMAND
    arguments: tuple[str, ...] = ()
    """Of the service; without any it runs the demo."""

    postgres = Path("postgres")
    """Where the database server has its folder."""

    healthy_within_s = 150.0
    """How long after the end of a fault it may take until the service is healthy."""

    def __init__(self, folder: Path, http: aiohttp.ClientSession, stack: AsyncExitStack, here: Sinks) -> None:
        self.folder = folder
        self.http = http
        self.stack = stack
        self.sinks = here
        self.server = EmbeddedPostgres(folder / self.postgres, durable=True)
        self.database = "trader"
        self.proxy: FaultyProxy
        self.service: ServiceProcess
        self.environ = {"NOTIFY_URL": f"{here.url}/away", "SIM_LATENCY_MS": "0"}
        self.acknowledged: dict[str, str] = {}
        self.answers: list[str] = []
        self._numbers = count()

    async def open(self) -> None:
        """Start the database server, the service and its client."""
        await self.open_database()
        await self.start_service()
        trading = asyncio.create_task(self._trade())
        self.stack.callback(trading.cancel)

    async def open_database(self) -> None:
        """Start a server behind a proxy, and let the service know its address."""
        await self.server.start()
        self.stack.push_async_callback(self.server.stop)
        self.proxy = FaultyProxy(await self.server.ensure_database(self.database))
        self.environ["DATABASE_URL"] = await self.proxy.start()
        self.stack.push_async_callback(self.proxy.close)

    async def start_service(self) -> None:
        self.service = await self.launch()

    async def launch(self, **environ: str) -> ServiceProcess:
        """Start a process of the service, and wait until the sink receives its notice."""
        heard = len(self.sinks.of("/away"))
        service = await ServiceProcess.start(
            self.folder, self.http, *self.arguments, command=self.command, **{**self.environ, **environ}
        )
        self.stack.push_async_callback(_kill, service)
        async with asyncio.timeout(START_TOLD_S):
            await self.sinks.wait_for("/away", heard + 1)
        return service

    async def _trade(self) -> None:
        """Place an order every half second in one of ten accounts, and record the acknowledged ones."""
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
                "simulator.placeOrder", **order, quantity=0.01, clientOrderId=str(number)
            )
            if status == 200 and body["order"]["status"] != "rejected":
                self.acknowledged[str(number)] = body["order"]["id"]
            else:
                self.answers.append(f"{status} {body.get('error') or body.get('message') or body['order']['reason']}")

    async def is_healthy(self) -> bool:
        return (await self.ask(self.service, "/health"))[0] == 200

    async def ask(self, service: ServiceProcess, path: str) -> tuple[int, Any]:
        """Return a service's answer to a GET; 0 and None if it does not answer within three seconds."""
        try:
            async with asyncio.timeout(3):
                return await service.get(path)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, None

    def notices(self) -> list[dict[str, Any]]:
        """Every notice that the sink accepted, in order."""
        return [orjson.loads(each.body) for each in self.sinks.of("/away") if each.is_taken]

    async def administer(self, *statements: str) -> Any:
        """Execute statements as an administrator. Return the first value of the last one."""
        writable = {"default_transaction_read_only": "off"}
        conn = await asyncpg.connect(self.server.superuser_dsn(), server_settings=writable)
        try:
            for statement in statements:
                value = await conn.fetchval(statement)
        finally:
            await conn.close()
        return value

    async def lost(self) -> tuple[int, list[str]]:
        """Return the number of acknowledged orders missing in the database, and the findings of the audit."""
        acknowledged = dict(self.acknowledged)  # later ones are not in the rows read now
        database = await Database.connect(self.server.superuser_dsn(self.database), size=2)
        try:
            async with database.connection() as conn:
                rows = await conn.fetch("SELECT client_order_id, id::text FROM order_requests")
            ids = {row["client_order_id"]: row["id"] for row in rows}
            problems = list((await audit(database)).problems)
        finally:
            await database.close()
        return sum(ids.get(number) != order_id for number, order_id in acknowledged.items()), problems


class SmallDiskBench(Bench):
    """Its database server has a separate small file system, which only root may mount."""

    @staticmethod
    def lacks() -> str | None:
        return None if os.getuid() == 0 else "the right to mount a small file system"

    async def open_database(self) -> None:
        place = self.folder / self.postgres
        place.mkdir(parents=True)
        options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=755", "tmpfs", str(place)]
        await run_program("mount", *options)
        self.stack.push_async_callback(run_program, "umount", str(place))
        await super().open_database()


class PasswordBench(Bench):
    """Its service has its own role and password, without superuser rights."""

    async def open_database(self) -> None:
        await super().open_database()
        rules = Path(await self.administer("SHOW hba_file"))
        rules.write_text(f"local all service scram-sha-256\n{rules.read_text()}")
        await self.set_password(PASSWORD, "CREATE")
        await self.administer(f"ALTER DATABASE {self.database} OWNER TO service", "SELECT pg_reload_conf()")
        dsn = self.environ["DATABASE_URL"]
        self.environ["DATABASE_URL"] = dsn.replace("trader@", f"service:{quote(PASSWORD, safe='')}@")

    async def set_password(self, password: str, how: str = "ALTER") -> None:
        await self.administer(f"{how} ROLE service LOGIN PASSWORD '{password}'")


class EmbeddedBench(Bench):
    """The service runs the embedded server itself, and is restarted by the rules of the systemd unit."""

    postgres = EMBEDDED_FOLDER
    healthy_within_s = 10.0

    async def open_database(self) -> None:
        """Do nothing: the service does it."""

    async def start_service(self) -> None:
        await super().start_service()
        await self.stack.enter_async_context(self.server.attach())
        (self.database,) = await self.server.databases()
        self.stack.push_async_callback(self._end, asyncio.create_task(self._supervise()))

    async def _supervise(self) -> None:
        unit = ConfigParser(interpolation=None)
        unit.read(UNIT)
        rules = unit["Service"]
        assert rules["Restart"] == "on-failure"
        while await self.service.process.wait() not in (0, int(rules["RestartPreventExitStatus"])):
            await asyncio.sleep(float(rules["RestartSec"]))
            self.service = await ServiceProcess.spawn(self.folder, self.http, command=self.command, **self.environ)

    async def _end(self, supervising: asyncio.Task[None]) -> None:
        supervising.cancel()
        await asyncio.wait([supervising])
        await self.service.stop()  # together with its server, which briefly outlives a kill


class EmbeddedSmallDiskBench(SmallDiskBench, EmbeddedBench):
    """Its embedded server has a separate small file system."""


class StandbyBench(Bench):
    """A second process stands by. The bench is healthy if a process leads."""

    standby: ServiceProcess

    async def start_service(self) -> None:
        await super().start_service()
        self.standby = await self.launch()

    async def is_healthy(self) -> bool:
        _, report = await self.ask(self.service, "/health/schedulers")
        return await super().is_healthy() and report is not None and report["role"] == "leader"


class ReaderBench(Bench):
    """A process reads from a replica. Its health counts."""

    replica: Replica
    reader: ServiceProcess

    async def start_service(self) -> None:
        await super().start_service()
        self.replica = Replica(self.folder / "replica", choose_binaries(self.server.data))
        self.stack.push_async_callback(self.replica.stop)
        await self.replica.start(self.server)
        self.reader = await self.launch(DATABASE_URL=self.replica.dsn, ROLE="reader")

    async def is_healthy(self) -> bool:
        return (await self.ask(self.reader, "/health"))[0] == 200


class VenueBench(Bench):
    """The service trades on a venue's market data, with prices that move twice a second."""

    command = COMMAND[:-1]
    arguments = COMMAND[-1:]  # without the demo
    venue: FakeVenue

    async def open_database(self) -> None:
        self.venue = await self.stack.enter_async_context(fake_venue())
        moving = asyncio.create_task(self._move())
        self.stack.callback(moving.cancel)
        self.environ |= {"VENUE_URL": self.venue.url, "MARKETS": "BTC,ETH", "OPENAI_BASE_URL": "http://127.0.0.1:9"}
        await super().open_database()

    async def _move(self) -> None:
        for number in count():
            for symbol, mid in (("BTC", 94_000), ("ETH", 3_300)):
                await self.venue.move(symbol, f"{mid + number % 5}.0")
            await asyncio.sleep(PRICES_EVERY_S)


class ClockBench(VenueBench):
    """The service's clock can be set while it runs; the clocks of the database and the venue stay correct."""

    @staticmethod
    def lacks() -> str | None:
        return None if FAKE_CLOCKS else "libfaketime (the package faketime of Debian)"

    async def open_database(self) -> None:
        self.set_clock(0)
        self.environ |= {
            "LD_PRELOAD": str(FAKE_CLOCKS[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._setting),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",
        }
        await super().open_database()

    @property
    def _setting(self) -> Path:
        return self.folder / "clock"

    def set_clock(self, ahead_s: int) -> None:
        """Set the service's clock ahead of the real one, or behind it."""
        new = self._setting.with_suffix(".new")
        new.write_text(f"{ahead_s:+d}")
        new.replace(self._setting)

    async def lost(self) -> tuple[int, list[str]]:
        """Also find trades in the future of the market."""
        lost, problems = await super().lost()
        conn = await asyncpg.connect(self.server.superuser_dsn(self.database))
        try:
            early = await conn.fetchval("SELECT count(*) FROM fills WHERE created_at > now() + interval '1 second'")
        finally:
            await conn.close()
        return lost, [*problems, *([f"{early} fills are dated in the future"] if early else [])]


class ProviderBench(Bench):
    """The service runs models whose provider answers every request."""

    models = 1
    command = COMMAND[:-1]
    arguments = COMMAND[-1:]  # without the demo
    provider: TradingProvider

    async def open_database(self) -> None:
        await super().open_database()
        self.provider = self.stack.enter_context(trading_provider())
        provider = {"OPENAI_BASE_URL": self.provider.url, "OPENAI_API_KEY": "sk-of-the-bench-0001"}
        self.environ |= {"MARKET_SOURCE": "synthetic", **provider}
        database = await Database.connect(self.server.dsn(self.database), size=1)
        await apply_schema(database)
        async with database.connection() as conn:
            for number in range(self.models):
                await upsert_model(conn, msgspec.structs.replace(make_model(f"asked-{number}"), provider="openai"))
        await database.close()


class ProviderOfManyBench(ProviderBench):
    """An outage of a provider is one once three turns in a row have failed."""

    models = 3


async def _kill(service: ServiceProcess) -> None:
    if service.process.returncode is None:
        await service.kill()


async def run_program(*command: str) -> None:
    """Run a program to its end.

    :raises RuntimeError: it fails
    """
    process = await asyncio.create_subprocess_exec(*command)
    if code := await process.wait():
        raise RuntimeError(f"{' '.join(command)} ended with {code}.")


@asynccontextmanager
async def opened(folder: Path, kind: type[Bench]) -> AsyncIterator[Bench]:
    """Run a bench in an empty folder that every user can access."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        bench = kind(folder, http, stack, await stack.enter_async_context(sinks()))
        await bench.open()
        yield bench
