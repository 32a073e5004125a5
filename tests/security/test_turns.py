"""Long work takes turns: callers with keys wait for no stranger, and each address gets its share."""

import asyncio
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import turns

from trader.api.envelope import BodyStyle
from trader.api.registry import REGISTRY, Registry, load_procedures
from trader.api.rpc import LONG_AT_ONCE, Dispatcher, Target
from trader.api.schemas.common import Empty, Wire
from trader.api.turns import WAITING_MAX, Turns, in_slices
from trader.core.errors import Unavailable
from trader.operations.access import Access, Caller
from trader.settings.forms import Secret
from trader.settings.settings import Settings

TOKEN = "token-0123456789abcdef"


class Done(Wire):
    done: bool = True


class Bench:
    """A dispatcher with a long procedure, which ends when it may, and a short one."""

    def __init__(self) -> None:
        self.settings = Settings.load({}, None, demo=True)
        self.begun: list[str] = []
        self.may_end = asyncio.Semaphore(0)
        registry = Registry()
        registry.procedure("demo.long", long=True)(self._long)
        registry.procedure("demo.short")(self._short)
        self.dispatcher = Dispatcher(registry, self)

    async def _long(self, _: object, __: Empty) -> Done:
        await self.may_end.acquire()
        return Done()

    async def _short(self, _: object, __: Empty) -> Done:
        return Done()

    async def call(self, name: str, caller: Caller) -> int:
        target = Target(self.dispatcher.procedures[name], BodyStyle.PLAIN)
        return (await self.dispatcher.cached_or_call(target, b"{}", caller, "1")).status


async def known_caller() -> Caller:
    return await Access(None, Secret(TOKEN)).identify(f"Bearer {TOKEN}", "10.0.0.1")


async def test_long_answers_of_strangers_delay_neither_short_ones_nor_known_callers() -> None:
    bench, known = Bench(), await known_caller()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        strangers = [group.create_task(bench.call("demo.long", Caller(address="10.0.0.1"))) for _ in range(20)]
        await turns(5)
        assert await bench.call("demo.short", Caller(address="10.0.0.1")) == 200
        mine = group.create_task(bench.call("demo.long", known))
        await turns(5)
        bench.may_end.release()
        bench.may_end.release()
        bench.may_end.release()
        assert await mine == 200
        assert sum(task.done() for task in strangers) <= LONG_AT_ONCE
        for _ in strangers:
            bench.may_end.release()


def test_every_procedure_that_returns_pages_or_series_takes_turns() -> None:
    load_procedures()
    asked = {"limit", "points", "max_points", "interval", "window"}
    for name, declared in REGISTRY.procedures.items():
        if declared.scope is None and asked & {field.name for field in msgspec.structs.fields(declared.input_type)}:
            assert declared.long, name


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30))
def test_addresses_alternate_and_no_turn_is_lost(calls: list[tuple[str, bool]]) -> None:
    """Each call is of an address, and may be cancelled while it waits."""
    served: list[str] = []

    async def play() -> None:
        shared, may_end = Turns(1), asyncio.Event()

        async def call(address: str) -> None:
            async with shared.of(Caller(address=address)):
                await may_end.wait()
                served.append(address)

        holder = asyncio.create_task(call("holder"))
        await turns(1)
        tasks = [asyncio.create_task(call(address)) for address, _ in calls]
        await turns(1)
        for task, (_, leaves) in zip(tasks, calls, strict=True):
            if leaves:
                task.cancel()
        may_end.set()
        await holder
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        await asyncio.wait_for(call("last"), 5)

    asyncio.run(play())
    stayed = [address for address, leaves in calls if not leaves]
    assert sorted(served[1:-1]) == sorted(stayed)
    for index, address in enumerate(served[1:-1]):
        rest = served[1:-1][index + 1 :]
        if set(rest) - {address}:
            assert rest[0] != address, served


async def test_a_source_waits_with_a_bounded_number_of_calls() -> None:
    shared, key = Turns(1), Caller(address="10.0.0.1")
    async with shared.of(key):

        async def call(caller: Caller) -> None:
            async with shared.of(caller):
                pass

        waiting = [asyncio.create_task(call(key)) for _ in range(WAITING_MAX)]
        await turns(1)
        with pytest.raises(Unavailable):
            await call(key)
        other = asyncio.create_task(call(Caller(address="10.0.0.2")))
        await turns(1)
        assert not other.done()
    await asyncio.gather(other, *waiting)


async def test_other_tasks_run_between_the_slices_of_long_work() -> None:
    others = 0

    async def count() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    def make(number: int) -> int:
        return sum(range(20_000)) * 0 + number

    task = asyncio.create_task(count())
    assert await in_slices(make, range(100)) == list(range(100))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert others > 5
