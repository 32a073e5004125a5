"""An operator's halt that the database does not accept yet: in force at once, kept through a kill, written later."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource
from support.venue import Venue
from support.waiting import until

from trader.core.errors import StartError, Unavailable
from trader.core.events import EventBus
from trader.database.pool import Connection, Database
from trader.exchange.domain.halts import Halt
from trader.exchange.domain.orders import OrderStatus, OrderType
from trader.exchange.events import HaltsChanged
from trader.exchange.halts import Halts, HaltTaken
from trader.exchange.paper import PaperExchange
from trader.exchange.sql import halts as store
from trader.exchange.sql.halts import select_halts
from trader.operations.loss_limits import LossLimits
from trader.operations.operator_commands import OperatorCommands

QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}


@asynccontextmanager
async def locked(dsn: str, table: str) -> AsyncIterator[None]:
    """Lock a table like someone's forgotten transaction."""
    conn = await asyncpg.connect(dsn)
    try:
        async with conn.transaction():
            await conn.execute(f"LOCK TABLE {table}")
            yield
    finally:
        await conn.close()


class KeepingVenue(Venue):
    """A venue that saves its halts to a file."""

    def __init__(self, database: Database, file: Path) -> None:
        super().__init__(database, ScriptedSource(), ManualClock(START))
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.halts = Halts(database, self.clock, bus, file)
        self.exchange = PaperExchange(database, self.market, self.clock, self.settings, self.accounts, self.halts)


@pytest.fixture
async def venue(dsn: str, tmp_path: Path) -> AsyncIterator[Venue]:
    """A leading exchange whose statements time out soon."""
    database = await Database.connect(dsn, command_timeout_s=0.5)
    venue = KeepingVenue(database, tmp_path / "data" / "halts.json")
    await venue.exchange.lead()
    await venue.see(QUIET)
    yield venue
    await venue.exchange.resign()
    await database.close()


def operations_of(venue: Venue) -> OperatorCommands:
    limits = LossLimits(venue.database, venue.exchange, venue.halts, venue.settings)
    operations = OperatorCommands(venue.database, venue.exchange, venue.halts, limits)
    operations.start()
    return operations


@pytest.mark.processes
@pytest.mark.parametrize("table", ["halts", "commands", "chain_links"])
async def test_a_halt_is_in_force_while_its_tables_are_locked_and_survives_a_kill(
    venue: Venue, dsn: str, tmp_path: Path, table: str
) -> None:
    operations, file = operations_of(venue), tmp_path / "data" / "halts.json"
    resting = await venue.buy("0.01", type=OrderType.LIMIT, limit_price=Decimal(90_000))
    assert resting.status is OrderStatus.RESTING
    async with locked(dsn, table):
        taken = await operations.halt(None, "strange prices", "eve")
        assert (taken.kept_in, file.exists()) == ("file", True)
        assert not venue.exchange.account("a").resting, "without a command it is canceled at once"
        refused = await venue.buy("0.01")
        assert refused.reason == (
            "trading is halted for all accounts (operator: strange prices); only reducing is allowed"
        )
        assert [len(event.halts) for event in venue.events if isinstance(event, HaltsChanged)] == [1]
        assert (await operations.halt(None, "again", "eve")) == ("file", None)
        with pytest.raises(Unavailable):
            await operations.poll()
    after_kill = Halts(venue.database, venue.clock, EventBus(), file)
    after_kill.recall()
    assert [halt.reason for halt in after_kill.in_force] == ["strange prices"]
    await after_kill.load()
    assert (file.exists(), [halt.by for halt in after_kill.in_force]) == (False, ["eve"])
    async with venue.database.connection() as conn:
        assert [halt.reason for halt in await select_halts(conn)] == ["strange prices"]
        assert await conn.fetchval("SELECT count(*) FROM commands") == 1
        await conn.execute("UPDATE halts SET lifted_at = now(), lifted_by = 'eve'")
    await venue.halts.load()
    assert venue.halts.in_force == (), "what was written before the kill is not written again"


async def test_a_halt_that_arrives_while_the_rows_are_read_stays_in_force(
    venue: Venue, monkeypatch: pytest.MonkeyPatch
) -> None:
    halting = []

    async def select_and_halt(conn: Connection) -> list[Halt]:
        rows = await select_halts(conn)
        halting.append(asyncio.create_task(venue.halts.halt_at_once(None, "strange prices", "eve")))
        await until(lambda: venue.halts.in_force)
        return rows

    with monkeypatch.context() as patched:
        patched.setattr(store, "select_halts", select_and_halt)
        await venue.halts.load()
    assert venue.halts.refusal_to_open("a") is not None
    await venue.halts.load()
    assert (await halting[0]).command is not None
    assert [len(event.halts) for event in venue.events if isinstance(event, HaltsChanged)] == [1]


async def test_a_halt_accepted_by_the_database_leaves_no_file(venue: Venue, tmp_path: Path) -> None:
    operations = operations_of(venue)
    halting = operations.halt("a", "lunch", "eve")
    taken = await _while_polling(operations, halting)
    assert (taken.kept_in, (tmp_path / "data").exists()) == ("database", False)
    assert taken.command is not None


async def _while_polling(operations: OperatorCommands, work: Coroutine[Any, Any, HaltTaken]) -> HaltTaken:
    halting = asyncio.create_task(work)

    async def has_ended() -> bool:
        await operations.poll()
        return halting.done()

    await until(has_ended)
    return halting.result()


async def test_an_unsaved_halt_is_reported_as_such(venue: Venue, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    async with locked(dsn, "halts"):
        assert (await operations_of(venue).halt("a", "lunch", "eve")).kept_in == "memory"
    assert (await venue.buy("0.01")).status is OrderStatus.REJECTED


def test_a_start_with_a_damaged_file_is_refused(database: Database, tmp_path: Path) -> None:
    file = tmp_path / "halts.json"
    file.write_text("[[")
    with pytest.raises(StartError, match=r"halts\.json keeps halts that are not in the database yet, and"):
        Halts(database, ManualClock(START), EventBus(), file).recall()
