"""A process's decisions for a term end with the term: halts, commands and the baselines of losses."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from uuid import UUID, uuid4

import pytest
import pytest_asyncio
from interleavings.arena import AGENT, MODEL, STOPPED, Arena, ArenaClock, D, Process
from interleavings.gaps import GapDatabase, run_as
from support.tasks import ended
from support.trading_floor import hold
from support.waiting import until

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.tools import Holding
from trader.core.events import LeadershipChanged
from trader.exchange.domain.halts import HaltCause, OperatorCommand, Verb
from trader.exchange.sql import halts as store
from trader.market.domain.markets import Tick
from trader.operations import operator_commands as operations
from trader.portfolio.sql.snapshots import select_baseline_states

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def arena(database: GapDatabase):  # type: ignore[no-untyped-def]
    """An arena in which A leads, whose settled rows the test may inspect."""
    database.begin()
    arena = Arena(database)
    await arena.open()
    yield arena
    await arena.close()


async def replaced(arena: Arena) -> Process:
    """Let B take the lead without A noticing."""
    arena.holder = None
    await run_as("B", arena.process("B").leadership.take_role())
    return arena.process("B")


async def lose_acknowledgement(arena: Arena, statement: str) -> None:
    arena.database.gaps.fault, arena.database.gaps.fault_in = "lost acknowledgement", statement


async def ask(arena: Arena, verb: Verb, account_id: str | None) -> UUID:
    """Write an operator's command, as the command line does."""
    command = OperatorCommand(id=uuid4(), verb=verb, account_id=account_id, reason="odd", asked_by="someone")
    async with arena.database.transaction() as conn:
        await store.insert_halting_command(conn, command)
    return command.id


async def poll(process: Process, verb: Verb) -> None:
    await process.operations.poll()
    await ended(f"{verb} ")


async def halts_in_force(arena: Arena) -> list[tuple[str | None, HaltCause]]:
    async with arena.database.connection() as conn:
        return [(halt.account_id, halt.cause) for halt in await store.select_halts(conn)]


async def test_a_halt_unsaved_in_its_term_neither_halts_nor_closes_in_the_next(arena: Arena) -> None:
    a = arena.process("A")
    arena.database.gaps.fault, arena.database.gaps.fault_in = "lost statement", "insert_halt"
    with arena.database.gaps.watching("A", -1, _nothing):
        await run_as("A", a.halts.halt("b", HaltCause.DRAWDOWN, "it fell", "limit", Verb.FLATTEN, term=1))
    assert a.halts.refusal_to_open("b") is not None, "it holds in its process until its fate is known"
    b = await replaced(arena)
    await b.place("later", "0.1", account_id="b")
    await a.operations.poll()
    await poll(b, Verb.FLATTEN)
    assert await halts_in_force(arena) == []
    assert b.accounts.by_id["b"].positions["BTC"].quantity == D("0.2")
    assert a.halts.refusal_to_open("b") is None


async def test_a_halt_by_a_replaced_leader_closes_nothing(arena: Arena) -> None:
    a, b = arena.process("A"), await replaced(arena)
    await a.halts.halt("b", HaltCause.DRAWDOWN, "it fell", "limit", Verb.FLATTEN, term=1)
    await poll(b, Verb.FLATTEN)
    assert await halts_in_force(arena) == []
    assert b.accounts.by_id["b"].positions


async def test_a_lifted_halt_does_not_return_after_a_lost_acknowledgement(arena: Arena) -> None:
    a = arena.process("A")
    await lose_acknowledgement(arena, "COMMIT")
    with arena.database.gaps.watching("A", -1, _nothing):
        await run_as("A", a.halts.halt("b", HaltCause.DRAWDOWN, "it fell", "limit", Verb.FLATTEN, term=1))
    assert await halts_in_force(arena) == [("b", HaltCause.DRAWDOWN)]
    async with arena.database.transaction() as conn:
        await store.update_halts_lifted(conn, "b", "someone")
    await poll(a, Verb.FLATTEN)
    assert await halts_in_force(arena) == []
    assert arena.process("A").accounts.by_id["b"].positions


async def test_a_replaced_leader_does_not_finish_its_successors_command(arena: Arena) -> None:
    a, b = arena.process("A"), await replaced(arena)
    await b.place("e", "0.1", account_id="e")
    command_id = await ask(arena, Verb.FLATTEN, "e")
    await poll(a, Verb.FLATTEN)
    await poll(b, Verb.FLATTEN)
    assert not b.accounts.by_id["e"].positions
    async with arena.database.connection() as conn:
        state = await store.select_command_state(conn, command_id)
    assert state is not None
    assert state.outcome is not None
    assert len(state.outcome.closed) == 1


async def test_the_command_of_a_loss_limit_is_executed_once_a_leader_exists_again(arena: Arena) -> None:
    a = arena.process("A")
    await a.halts.halt("b", HaltCause.DRAWDOWN, "it fell", "limit", Verb.FLATTEN, term=1)
    await run_as("A", a.leadership.resign())
    async with arena.database.connection() as conn:
        await conn.execute("UPDATE commands SET asked_at = asked_at - $1::interval", timedelta(hours=3))
    b = arena.process("B")
    await run_as("B", b.leadership.take_role())
    await poll(b, Verb.FLATTEN)
    assert not b.accounts.by_id["b"].positions


async def test_the_command_of_a_loss_limit_is_dropped_once_trading_is_resumed(arena: Arena) -> None:
    a = arena.process("A")
    await a.halts.halt("a", HaltCause.DRAWDOWN, "it fell", "limit", Verb.FLATTEN, term=1)
    async with arena.database.transaction() as conn:
        await store.update_halts_lifted(conn, "a", "someone")
    await poll(a, Verb.FLATTEN)
    assert a.accounts.by_id["a"].positions
    assert a.accounts.by_id["a"].resting, "nothing is cancelled either"


async def test_a_loss_limit_keeps_closing_positions_that_the_book_could_not_absorb(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "FLATTEN_S", 0.0)
    a = arena.process("A")
    await arena.see(size="0.002")
    await a.halts.halt("a", HaltCause.DRAWDOWN, "it fell", "limit", Verb.FLATTEN, term=1)
    await a.operations.poll()
    await until(lambda: a.accounts.by_id["a"].positions["BTC"].quantity != D("0.1"))
    await arena.see()
    await poll(a, Verb.FLATTEN)
    assert not a.accounts.by_id["a"].positions


async def test_a_replaced_leader_begins_no_invocation_that_the_next_one_does_not_count(arena: Arena) -> None:
    a, b = arena.process("A"), await replaced(arena)
    await run_as("B", b.agents.budgets.begin_cycle(arena.clock.now(), b.models.by_id))
    a.provider.scripts[MODEL] = [hold()]
    await run_as("A", a.agents.start_batch(arena.clock.now()))
    await ended(f"invocation of {MODEL}")
    assert a.provider.turns == [], "nobody pays for it"
    async with arena.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM invocations") == 0


async def test_an_invocation_with_which_a_replaced_leader_goes_on_counts_in_full(arena: Arena) -> None:
    a, thought = arena.process("A"), asyncio.Event()

    async def answer(_: Turn) -> ModelAnswer:
        await thought.wait()
        return hold()

    a.provider.scripts[MODEL] = [answer]
    await run_as("A", a.agents.start_batch(arena.clock.now()))
    await until(lambda: a.provider.active)
    reserved = a.agents.budgets.reserved(a.models.by_id[MODEL])
    b = await replaced(arena)
    await run_as("B", b.agents.budgets.begin_cycle(arena.clock.now(), b.models.by_id))
    assert b.agents.budgets.total_spent == reserved
    thought.set()
    await ended(f"invocation of {MODEL}")
    await run_as("B", b.agents.budgets.follow(arena.clock.now(), b.models.by_id))
    assert b.agents.budgets.total_spent == reserved


async def test_a_replaced_leader_writes_no_snapshots(arena: Arena) -> None:
    a = arena.process("A")
    await replaced(arena)
    await arena.see(after_s=60)
    count = "SELECT count(*) FROM portfolio_snapshots"
    async with arena.database.connection() as conn:
        before = await conn.fetchval(count)
        await run_as("A", a.portfolio.take_snapshots(arena.clock.now()))
        assert await conn.fetchval(count) == before


async def test_a_successor_on_a_machine_that_is_behind_misses_no_touched_stop(arena: Arena) -> None:
    a, outage, behind = arena.process("A"), timedelta(seconds=42), timedelta(seconds=30)
    arena.move(STOPPED, after_s=outage.total_seconds())  # A is frozen
    arena.clock, clock = ArenaClock(), arena.clock
    arena.clock.origin, arena.clock.moment = "another machine", clock.moment - behind
    async with arena.database.connection() as conn:  # the clock of the database, which goes on in real time
        await conn.execute("UPDATE service_state SET processed_at = processed_at - $1::interval", outage)
    b = await replaced(arena)
    assert b.accounts.by_id["a"].positions["BTC"].closing == "stop", "at the next book"
    late = arena.move()
    clock.moment = late.at
    await run_as("A", a.take(late))
    arena.market_at -= behind
    await run_as("B", b.take(arena.move()))
    assert not b.accounts.by_id["a"].positions
    assert b.accounts.processed_until == arena.market_at
    await run_as("B", b.snapshot())
    async with arena.database.connection() as conn:
        assert [state.account.positions for _, state, _ in await select_baseline_states(conn)] == [{}]


async def test_an_end_unsaved_in_its_term_is_given_again_in_the_next(arena: Arena) -> None:
    a = arena.process("A")
    await arena.open_view()
    external, model = a.agents.external, a.models.by_id[AGENT]
    arena.database.gaps.fault, arena.database.gaps.fault_in = "lost statement", "update_invocation_closed"
    with arena.database.gaps.watching("A", -1, _nothing):
        await run_as("A", external.decide(model, arena.view_id, Holding(reason="unheard")))
    await run_as("A", a.lose_lock())
    await run_as("A", a.leadership.take_role())
    await external.begin_cycle([], arena.clock.now())
    assert (await external.view(model, None)).id == arena.view_id, "it goes on"
    await external.decide(model, arena.view_id, Holding(reason="heard"))
    async with arena.database.connection() as conn:
        rows = await conn.fetch("SELECT ended_by, response FROM invocations WHERE model_id = $1", AGENT)
    assert [tuple(row) for row in rows] == [("holding", "heard")]


async def test_a_former_terms_tick_ends_before_the_next_term(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    a, asked, answers = arena.process("A"), asyncio.Event(), asyncio.Event()
    history = arena.source.history

    async def hang(after: datetime, until: datetime) -> AsyncIterator[Tick]:
        is_first = not asked.is_set()
        asked.set()
        if is_first:
            await answers.wait()
        async for tick in history(after, until):
            yield tick

    monkeypatch.setattr(arena.source, "history", hang)
    arena.move(STOPPED, after_s=30)
    taking = asyncio.create_task(run_as("A", a.take(arena.move(after_s=60))))
    await asked.wait()
    await run_as("A", a.lose_lock())
    await run_as("A", a.leadership.take_role())
    assert not a.leads
    answers.set()
    await taking
    await run_as("A", a.leadership.take_role())
    assert a.leads
    assert not a.accounts.by_id["a"].positions, "its stop was reached"
    assert a.accounts.processed_until == arena.clock.now()


async def _nothing() -> None:
    """Act in no gap."""


async def test_two_leaders_are_told_apart_by_the_one_whose_term_is_over(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the lock of one is held on a server that no longer is the primary; nothing else would show it."""
    monkeypatch.setattr("trader.composition.leadership.HEARTBEAT_S", 0.01)
    a, b = arena.process("A"), await replaced(arena)

    def told(process: Process) -> list[str]:
        return [event.text for event in process.events if isinstance(event, LeadershipChanged)]

    before = len(told(b))
    keeping = [asyncio.create_task(each.leadership.keep_role()) for each in (a, b)]
    await until(lambda: told(a))
    await asyncio.sleep(0.1)
    (text,) = told(a)
    assert "another process leads as well; the term 1 of this one is over" in text
    assert len(told(b)) == before
    for task in keeping:
        task.cancel()
    await asyncio.wait(keeping)


async def test_a_bug_in_the_relay_ends_no_term(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, failed = arena.process("A"), asyncio.Event()

    async def broken(*_: object) -> None:
        failed.set()
        raise TypeError("a bug")

    monkeypatch.setattr("trader.database.relay.upsert_relay", broken)
    keeping = asyncio.create_task(a.leadership.keep_role())
    await failed.wait()
    await until(lambda: "relay ended by a bug" in caplog.text)
    assert a.leads
    assert not keeping.done()
    await a.place("goes on")
    keeping.cancel()
    await asyncio.wait([keeping])
