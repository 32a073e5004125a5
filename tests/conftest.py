"""Fixtures for every test: a real PostgreSQL, and a fresh database made from the schema for each test that asks.

The server is the embedded one with the wheel's programs; TRADER_TEST_POSTGRES=system takes the machine's programs, and
TRADER_TEST_DSN an existing server (a superuser's connection string). Each worker of a parallel run has its own.
"""

import asyncio
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from trader.embedded.binaries import Binaries, system_binaries
from trader.embedded.server import EmbeddedPostgres
from trader.store.database.pool import Database
from trader.store.database.schema import apply_schema

pytest.register_assert_rewrite("support")  # an assertion there that fails shows its values, as one of a test does
from support.process import ServiceProcess, serving  # noqa: E402 - rewritten from here on

FOLDER_PREFIX = "trader-test-"


# The extent of a run (tests/support/extent.py). A deadline per example would measure the machine, not the code.
settings.register_profile(
    "normal", max_examples=25, deadline=None, report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("all", settings.get_profile("normal"), max_examples=100)
settings.register_profile("nightly", settings.get_profile("normal"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "normal"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores: a third of the time a test waits for another process."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return cores + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live as long as the run: to look for garbage among them again and again takes much of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of processes begin early, so that none runs alone at the end; others between them use their waiting."""
    parts: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
    for item in items:
        parts[item.get_closest_marker("processes") is not None].append(item)
    short, long = parts
    between = len(short) * 2 // 3 // max(1, len(long))
    items[:] = [
        *(item for number, first in enumerate(long) for item in (first, *short[number * between :][:between])),
        *short[len(long) * between :],
    ]


@pytest.fixture(scope="session")
def chosen_binaries() -> Binaries | None:
    """The programs asked for; None leaves the choice to the launcher."""
    match os.environ.get("TRADER_TEST_POSTGRES", "wheel"):
        case "wheel":
            return None
        case "system":
            binaries = next(system_binaries(), None)
            assert binaries is not None, "TRADER_TEST_POSTGRES=system, but this machine has no PostgreSQL"
            return binaries
        case other:
            raise ValueError(f"TRADER_TEST_POSTGRES is {other!r}; wheel or system")


def _base_folder() -> Path:
    """In memory where there is room: making a database there takes 20 ms, on a slow disk ten times that."""
    memory = Path("/dev/shm")  # where there is one, there is /proc
    if not memory.is_dir() or not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 2 << 30:
        return Path(tempfile.gettempdir())
    for folder in memory.glob(f"{FOLDER_PREFIX}*"):  # of runs that were killed: their memory is still taken
        if not Path("/proc", folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)
    return memory


@contextmanager
def _open_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=_base_folder()))
    folder.chmod(0o755)  # as root the server runs as another user, who must have access
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """An empty folder that every user can reach, unlike `tmp_path`, and on which a server starts quickly."""
    with _open_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def server_dsn(chosen_binaries: Binaries | None) -> Iterator[str]:
    """The connection string of the administrative database of this run's server."""
    if existing := os.environ.get("TRADER_TEST_DSN"):
        yield existing
        return
    with _open_folder() as folder:
        server = EmbeddedPostgres(folder, durable=False, binaries=chosen_binaries)
        asyncio.run(server.start())
        yield server.superuser_dsn()
        asyncio.run(server.stop())


def _with_database(dsn: str, name: str) -> str:
    return urlsplit(dsn)._replace(path=f"/{name}").geturl()


async def _administer(server_dsn: str, *commands: str) -> None:
    conn = await asyncpg.connect(server_dsn)
    try:
        for command in commands:
            await conn.execute(command)
    finally:
        await conn.close()


@pytest.fixture(scope="session")
def template(server_dsn: str) -> Iterator[str]:
    """The name of a database with the schema and nothing else."""
    name = f"trader_template_{os.getpid()}"

    async def make() -> None:
        await _administer(server_dsn, f"DROP DATABASE IF EXISTS {name}", f"CREATE DATABASE {name}")
        database = await Database.connect(_with_database(server_dsn, name), size=1)
        await apply_schema(database)
        await database.close()

    asyncio.run(make())
    yield name
    asyncio.run(_administer(server_dsn, f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
async def empty_dsn(server_dsn: str) -> AsyncIterator[str]:
    """The connection string of a fresh database without any table."""
    name = f"trader_empty_{os.getpid()}_{next(_numbers)}"
    await _administer(server_dsn, f"CREATE DATABASE {name} TEMPLATE template0")
    yield _with_database(server_dsn, name)
    await _administer(server_dsn, f"DROP DATABASE {name} WITH (FORCE)")


@asynccontextmanager
async def _fresh_database(server_dsn: str, template: str) -> AsyncIterator[str]:
    name = f"trader_test_{os.getpid()}_{next(_numbers)}"
    await _administer(server_dsn, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    yield _with_database(server_dsn, name)
    await _administer(server_dsn, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def dsn(server_dsn: str, template: str) -> AsyncIterator[str]:
    """The connection string of a fresh database with the schema."""
    async with _fresh_database(server_dsn, template) as dsn:
        yield dsn


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def service(
    server_dsn: str, template: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServiceProcess]:
    """A service with four models, for tests that only read: one for all of a worker, in the loop of the session."""
    async with (
        _fresh_database(server_dsn, template) as dsn,
        serving(tmp_path_factory.mktemp("service"), DATABASE_URL=dsn) as service,
    ):
        yield service


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    """A pool on a fresh database with the schema."""
    database = await Database.connect(dsn, size=8)
    yield database
    await database.close()


_numbers = iter(range(1, 1_000_000))
