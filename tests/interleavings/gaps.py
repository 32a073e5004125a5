"""Gaps of the services under test: every statement, commit and await at which another actor may intervene.

A task factory drives each task step by step, and a database hands out connections that stop around each statement.
Between two gaps, a task of the watched process runs alone: nobody can observe it or intervene.
"""

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from pathlib import Path
from threading import Thread
from types import coroutine
from typing import Any, Final, Literal, cast, get_args

import asyncpg

from trader.database.pool import Connection, Database

SERVICE: Final = f"{Path(inspect.getfile(Database)).parents[2]}/"

IDLE_TURNS: Final = 12
"""An actor without progress for this many loop turns, and with no statement but those that wait for locks, is stuck."""

LOOK_S: Final = 0.02
"""How long a statement runs before the server is asked whether it waits for a lock."""

COUNT_WAITING: Final = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""

IN_TRANSACTION: Final = " in a transaction"
"""The end of the labels of statements that are lost with their transaction."""

Fault = Literal["lost statement", "lost acknowledgement", "late statement"]
FAULTS: Final = get_args(Fault)


def gaps_for(actor: str, gaps: list[str]) -> list[int]:
    """Return the numbers of the gaps in which an actor has a distinct effect: for most actors, all of them.

    A fault strikes the next statement, so the last gap before it stands for all earlier ones. Within a transaction, a
    lost acknowledgement and a late statement lose the transaction, just like a lost statement. For the others, the gap
    before a statement of a transaction stands for the one after the statement before it: the rows and locks are the
    same, and memory follows only the commit.
    """
    if actor in FAULTS:
        return [number for number, gap in enumerate(gaps) if _can_strike(actor, gap)]
    return [number for number, gap in enumerate(gaps) if not _is_repeated(gap, gaps[number + 1 : number + 2])]


def _is_repeated(gap: str, following: list[str]) -> bool:
    is_inside = gap.startswith("after ") and gap.endswith(IN_TRANSACTION)
    return is_inside and following != [] and following[0].startswith("before ")


def _can_strike(fault: str, gap: str) -> bool:
    if not gap.startswith("before ") or gap == "before BEGIN":
        return False
    if fault == "lost statement":
        return True
    return not gap.endswith(IN_TRANSACTION) and (fault == "lost acknowledgement" or gap != "before COMMIT")


EMPTY: Final = """
DO $$ DECLARE name text; BEGIN
    SET LOCAL session_replication_role = replica;  -- foreign keys are checked by triggers, and rows of a record kept
    FOR name IN SELECT quote_ident(c.relname) FROM pg_class c
                WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
                  AND c.relname NOT IN ('schema_version', 'variants')
    LOOP
        EXECUTE 'DELETE FROM ' || name;
    END LOOP;
END $$
"""
"""Not TRUNCATE, after which every connection plans every statement again; the one that sets the role does so, too."""

KEEPER_S: Final = 60.0

_process: ContextVar[str | None] = ContextVar("process", default=None)
_in_driver: ContextVar[bool] = ContextVar("in_driver", default=False)


def asked_for() -> list[str]:
    """Return the operation, actor and gap of the schedule named by SCHEDULE; an empty name without it."""
    return os.environ.get("SCHEDULE", "").split(" / ")


def running_as(process: str) -> Context:
    """Return a context whose tasks belong to this process."""
    context = copy_context()
    context.run(_process.set, process)
    return context


async def run_as(process: str, work: Coroutine[Any, Any, Any]) -> Any:
    """Run work as a task of this process."""
    return await asyncio.create_task(work, context=running_as(process))


class Gaps:
    """Counts the gaps of one process while it is watched, and lets an actor act in one of them."""

    def __init__(self, keeper: "Keeper") -> None:
        self.passed: list[str] = []
        """The statement, commit or await that each gap precedes or follows."""

        self.acted: asyncio.Task[Any] | None = None
        self.fault: Fault | None = None
        """What happens to the next statement of the watched process, or to the next one of the function `fault_in`."""

        self.fault_in: str | None = None

        self.late: list[Callable[[], Awaitable[object]]] = []
        """Statements that the server has not executed yet, although their callers no longer wait."""

        self._watched: str | None = None
        self._act: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self._at = -1
        self._standing: asyncio.Task[Any] | None = None
        self._steps = 0
        self._keeper = keeper
        self._in_flight = 0
        self._statement_ended = asyncio.Event()

    @contextmanager
    def watching(self, process: str, at: int, act: Callable[[], Coroutine[Any, Any, Any]]) -> Iterator[None]:
        """Count the gaps of a process, and act in gap number `at`."""
        self.passed, self.acted, self._watched, self._act, self._at = [], None, process, act, at
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()
        loop.set_task_factory(self._make_task)
        try:
            yield
        finally:
            loop.set_task_factory(before)
            self._watched = None

    async def land(self) -> None:
        """Let the server execute the late statement."""
        late, self.late = self.late, []
        for execute in late:
            await execute()

    def take_fault(self, label: str) -> Fault | None:
        """Return the fault of the statement about to begin."""
        if not self._is_watched() or self.fault_in not in {None, label}:
            return None
        fault, self.fault = self.fault, None
        return fault

    async def reach(self, label: str) -> None:
        """Pass a gap, after the actor if this is its gap."""
        if self._standing is not None or not self._is_watched():
            return
        number = len(self.passed)
        self.passed.append(label)
        if number == self._at:
            await self.act()

    async def act(self) -> None:
        """Let the actor complete its step, or as much as it can while the first process waits in its gap."""
        if self._act is None:
            return
        act, self._act = self._act, None
        self.acted = asyncio.create_task(act(), context=running_as("actor"))
        self._standing = asyncio.current_task()
        try:
            await self._done_or_stuck(self.acted)
        finally:
            self._standing = None

    async def run(self, execute: Callable[[], Awaitable[Any]]) -> Any:
        """Execute a statement, or return a connection; awaits within the driver are not gaps."""
        token = _in_driver.set(True)
        self._in_flight += 1
        try:
            return await execute()
        finally:
            self._in_flight -= 1
            self._statement_ended.set()
            _in_driver.reset(token)

    def _is_watched(self) -> bool:
        return self._watched is not None and _process.get() == self._watched

    async def _done_or_stuck(self, task: asyncio.Task[Any]) -> None:
        steps, turns = self._steps, 0
        while not task.done():
            await _turn()
            turns += 1
            if self._steps != steps:
                steps, turns = self._steps, 0
            elif turns > IDLE_TURNS:
                if not self._in_flight or (await self._is_slow() and self._waits_for_locks()):
                    return
                turns = 0

    async def _is_slow(self) -> bool:
        """Wait until a statement ends, for a short time; return whether none has."""
        self._statement_ended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._statement_ended.wait()
        return not self._statement_ended.is_set()

    def _waits_for_locks(self) -> bool:
        """Return whether every statement in flight waits for a lock, and therefore for the paused process."""
        return bool(self._keeper.fetchval(COUNT_WAITING) >= self._in_flight)

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(self._driven(work), loop=loop, **options)
        task.add_done_callback(lambda _: work.close())  # the task was canceled before its first step
        return task

    async def _driven(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._drive(work)

    @coroutine
    def _drive(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run a coroutine; each of its suspensions outside the database driver is a gap."""
        value, error = None, None
        while True:
            try:
                waits_for = work.send(value) if error is None else work.throw(error)
            except StopIteration as end:
                return end.value
            value = error = None
            place = None if _in_driver.get() or not self._is_watched() else _place(work)
            try:
                value = yield waits_for
                self._steps += asyncio.current_task() is not self._standing
                if place is not None:
                    yield from self.reach(place).__await__()
            except GeneratorExit:
                work.close()
                raise
            except BaseException as raised:  # noqa: BLE001 - whatever it is, it belongs to the coroutine
                error = raised


@coroutine
def _turn() -> Generator[None, None, None]:
    """Let every task that can run do so once."""
    yield


def _place(work: Any) -> str | None:
    """Return the line of the service at which a coroutine waits; None if it is not in the service."""
    place = None
    while work is not None:
        frame = getattr(work, "cr_frame", None) or getattr(work, "ag_frame", None)
        if frame is not None and frame.f_code.co_filename.startswith(SERVICE):
            name = frame.f_code.co_filename.removeprefix(SERVICE)
            place = f"await in {name}:{frame.f_lineno} {frame.f_code.co_name}"
        work = getattr(work, "cr_await", None) or getattr(work, "ag_await", None)
    return place


class Keeper:
    """A connection of the harness's own, whose statements are over when its methods return: no task runs meanwhile."""

    def __init__(self, dsn: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._conn = self._call(asyncpg.connect(dsn))

    def fetchval(self, query: str, *args: object) -> Any:
        return self._call(self._conn.fetchval(query, *args))

    def execute(self, query: str) -> None:
        self._call(self._conn.execute(query))

    def close(self) -> None:
        self._call(self._conn.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(KEEPER_S)


class GapDatabase(Database):
    """A database whose connections stop before and after each statement."""

    gaps: Gaps
    keeper: Keeper

    @classmethod
    async def open(cls, dsn: str) -> "GapDatabase":
        database = await cls.connect(dsn, size=12)
        assert isinstance(database, GapDatabase)
        database.keeper = Keeper(dsn)
        return database

    async def close(self) -> None:
        self.keeper.close()
        await super().close()

    def begin(self) -> Gaps:
        """Delete every row, for the next schedule, and return its gaps."""
        self.gaps = Gaps(self.keeper)
        self.keeper.execute(EMPTY)
        return self.gaps

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        borrowed = super().connection()
        token = _in_driver.set(True)
        try:
            conn = await borrowed.__aenter__()
        finally:
            _in_driver.reset(token)
        gap_conn = GapConnection(conn, self)
        try:
            yield cast("Connection", gap_conn)
        except BaseException as error:
            if not await borrowed.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            give_back = partial(borrowed.__aexit__, None, None, None)
            await (self.gaps.run(give_back) if gap_conn.has_just_ended else give_back())

    async def execute_late(self, method: str, query: str, *args: object) -> None:
        """Execute a statement whose caller no longer waits."""
        async with super().connection() as conn:
            await getattr(conn, method)(query, *args)


class GapConnection:
    """A borrowed connection with a gap before and after each statement, unless a gap equals the previous one.

    There is none after BEGIN, which neither reads nor locks anything; none when the connection is returned after a
    COMMIT, since the service does nothing in between; and, in a transaction with one snapshot, none after a further
    statement, which reads the same regardless of other commits.
    """

    def __init__(self, conn: Connection, database: GapDatabase) -> None:
        self._conn = conn
        self._database = database
        self._gaps = database.gaps
        self._is_in_transaction = False
        self._has_snapshot: bool | None = None
        """Whether the snapshot of the present transaction is taken; None where each statement takes its own."""

        self.has_just_ended = False
        """Whether the last thing done was to end a transaction."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    async def fetch(self, query: str, *args: object, **options: Any) -> Any:
        return await self._statement("fetch", query, *args, **options)

    async def fetchrow(self, query: str, *args: object, **options: Any) -> Any:
        return await self._statement("fetchrow", query, *args, **options)

    async def fetchval(self, query: str, *args: object, **options: Any) -> Any:
        return await self._statement("fetchval", query, *args, **options)

    async def execute(self, query: str, *args: object, **options: Any) -> Any:
        return await self._statement("execute", query, *args, **options)

    @asynccontextmanager
    async def transaction(self, **options: Any) -> AsyncIterator[None]:
        transaction = self._conn.transaction(**options)
        await self._gaps.reach("before BEGIN")
        await self._gaps.run(transaction.start)
        self._is_in_transaction = True
        self._has_snapshot = False if options.get("readonly") else None
        try:
            yield
            await self._gaps.reach("before COMMIT")
        except BaseException:
            if not self._conn.is_closed():
                await self._gaps.run(transaction.rollback)
            raise
        else:
            await self._gaps.run(partial(self._with_fault, "COMMIT", transaction.commit))
            if self._has_snapshot is None:
                await self._gaps.reach("after COMMIT")
            self.has_just_ended = True
        finally:
            self._is_in_transaction = False
            self._has_snapshot = None

    async def _statement(self, method: str, query: str, *args: object, **options: Any) -> Any:
        frame = inspect.currentframe()
        caller = None if frame is None or frame.f_back is None else frame.f_back.f_back
        label = query.split(maxsplit=1)[0] if caller is None else caller.f_code.co_name

        async def late() -> Any:
            self._gaps.late.append(partial(self._database.execute_late, method, query, *args))
            raise TimeoutError

        self.has_just_ended = False

        execute = partial(getattr(self._conn, method), query, *args, **options)
        place = f"{label}{IN_TRANSACTION}" if self._is_in_transaction else label
        await self._gaps.reach(f"before {place}")
        result = await self._gaps.run(partial(self._with_fault, label, execute, late))
        if not self._has_snapshot:
            await self._gaps.reach(f"after {place}")
        if self._has_snapshot is False:
            self._has_snapshot = True
        return result

    async def _with_fault(
        self, label: str, execute: Callable[[], Awaitable[Any]], late: Callable[[], Awaitable[Any]] | None = None
    ) -> Any:
        fault = self._gaps.take_fault(label)
        if fault is None:
            return await execute()
        if fault == "late statement" and late is not None and not self._is_in_transaction:
            return await late()
        if fault == "lost acknowledgement":
            await execute()
        self._conn.terminate()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")
