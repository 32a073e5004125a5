"""Fixtures for every test: a real PostgreSQL, and a fresh database with the schema for each test that requests one.

The server is the embedded one with the wheel's programs; TRADER_TEST_POSTGRES=system uses the machine's programs, and
TRADER_TEST_DSN an existing server (a superuser's connection string). Each worker of a parallel run has its own.
"""

import asyncio
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from trader.__main__ import main
from trader.database.embedded.binaries import Binaries, system_binaries
from trader.database.embedded.folders import SERVICE_ROLE
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Database
from trader.database.schema import apply_schema

pytest.register_assert_rewrite("support")  # a failed assertion there shows its values, as in a test
from support.calls import Call, Said  # noqa: E402 - rewritten from here on
from support.process import ServiceProcess, serving  # noqa: E402 - as above
from support.trading_floor import Floor, open_floor  # noqa: E402 - as above

FOLDER_PREFIX = "trader-test-"
OWNER = SERVICE_ROLE  # which every version of PostgreSQL maps to this user
CREATE_OWNER = f"""
DO $$ BEGIN CREATE ROLE {OWNER} LOGIN PASSWORD '{OWNER}';
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$
"""

_STATE = tempfile.TemporaryDirectory(prefix="trader-test-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name  # the marks of the folders that tests make

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by `nohup`; processes that tests start would inherit it
    signal.signal(signal.SIGHUP, lambda *_: None)


# The extent of a run (tests/support/run_profile.py). A deadline per example would measure the machine, not the code.
settings.register_profile(
    "normal", max_examples=25, deadline=None, report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("normal"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "normal"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use two workers per core: tests often wait for other processes and for schedules."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return cores * 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze modules and tests, which live as long as the run: searching them for garbage repeatedly is expensive."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start tests of processes early, so that none runs alone at the end; tests in between use their waiting time."""
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
    """The requested programs; None leaves the choice to the launcher."""
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
    """Return a folder in memory if there is room: creating a database takes 20 ms there, not ten times that."""
    memory = Path("/dev/shm")  # a system that has it also has /proc
    if not memory.is_dir() or not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 2 << 30:
        return Path(tempfile.gettempdir())
    for folder in memory.glob(f"{FOLDER_PREFIX}*"):  # left by killed runs, whose memory is still in use
        if not Path("/proc", folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)
    return memory


@contextmanager
def _open_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=_base_folder()))
    folder.chmod(0o755)  # as root, the server runs as another user, which must have access
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """An empty folder that, unlike `tmp_path`, every user can access, and in which a server starts quickly."""
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


def _with_database(dsn: str, name: str, user: str | None = None) -> str:
    parts = urlsplit(dsn)
    netloc = parts.netloc if user is None else f"{user}:{user}@{parts.netloc.rpartition('@')[2]}"
    return parts._replace(netloc=netloc, path=f"/{name}").geturl()


class Administrator:
    """A connection to the administrative database for all tests, in a loop of its own: opening one is not cheap."""

    def __init__(self, dsn: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._conn = self._loop.run_until_complete(asyncpg.connect(dsn))

    def execute(self, *commands: str) -> None:
        for command in commands:
            self._loop.run_until_complete(self._conn.execute(command))

    def close(self) -> None:
        self._loop.run_until_complete(self._conn.close())
        self._loop.close()


@pytest.fixture(scope="session")
def administrator(server_dsn: str) -> Iterator[Administrator]:
    """The superuser who creates and drops the databases of tests."""
    administrator = Administrator(server_dsn)
    yield administrator
    administrator.close()


@pytest.fixture(scope="session")
def template(server_dsn: str, administrator: Administrator) -> Iterator[str]:
    """The name of a database with the schema and nothing else."""
    name = f"trader_template_{os.getpid()}"

    async def make() -> None:
        database = await Database.connect(_with_database(server_dsn, name), size=1)
        await apply_schema(database)
        await database.close()

    administrator.execute(f"DROP DATABASE IF EXISTS {name}", f"CREATE DATABASE {name}")
    asyncio.run(make())
    yield name
    administrator.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def empty_dsn(server_dsn: str, administrator: Administrator) -> Iterator[str]:
    """The connection string of a fresh database without any table, as its owner, who is not a superuser."""
    name = f"trader_empty_{os.getpid()}_{next(_numbers)}"
    administrator.execute(CREATE_OWNER, f"CREATE DATABASE {name} TEMPLATE template0 OWNER {OWNER}")
    yield _with_database(server_dsn, name, OWNER)
    administrator.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def empty_superuser_dsn(server_dsn: str, empty_dsn: str) -> str:
    """The connection string of the database without any table, as a superuser."""
    return _with_database(server_dsn, urlsplit(empty_dsn).path.strip("/"))


@contextmanager
def _fresh_database(server_dsn: str, template: str, administrator: Administrator) -> Iterator[str]:
    name = f"trader_test_{os.getpid()}_{next(_numbers)}"
    administrator.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    yield _with_database(server_dsn, name)
    administrator.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def dsn(server_dsn: str, template: str, administrator: Administrator) -> Iterator[str]:
    """The connection string of a fresh database with the schema."""
    with _fresh_database(server_dsn, template, administrator) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def shared_dsn(server_dsn: str, template: str, administrator: Administrator) -> Iterator[str]:
    """The connection string of a database that tests share, which each of them empties: one per worker."""
    with _fresh_database(server_dsn, template, administrator) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def service_dsn(server_dsn: str, template: str, administrator: Administrator) -> Iterator[str]:
    """The connection string of the database of `service`."""
    with _fresh_database(server_dsn, template, administrator) as dsn:
        yield dsn


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def service(service_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServiceProcess]:
    """A service with four models, for tests that only read: one per worker, in the session's event loop."""
    async with serving(tmp_path_factory.mktemp("service"), DATABASE_URL=service_dsn) as service:
        yield service


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    """A pool on a fresh database with the schema."""
    database = await Database.connect(dsn, size=8)
    yield database
    await database.close()


_numbers = iter(range(1, 1_000_000))


@pytest.fixture
async def floor(database: Database) -> AsyncIterator[Floor]:
    """A trading floor on a fresh database."""
    async with open_floor(database) as floor:
        yield floor


@pytest.fixture
def call(dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Commands on a separate database, called in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setenv("PORT", "0")  # so that no service on this machine is asked

    async def run(*arguments: str) -> Said:
        code = await asyncio.to_thread(main, arguments)  # the test already has an event loop
        return Said(code, *capsys.readouterr())

    return run
