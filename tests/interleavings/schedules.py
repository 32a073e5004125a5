"""Operations of the service, and the actors that interfere: each pair of them is a set of schedules."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final, NamedTuple

from interleavings import outside
from interleavings.arena import AGENT, MODEL, OTHER_AGENT, QUIET, RECORDED_AFTER, START, STOPPED, Arena, D
from interleavings.gaps import FAULTS, Gaps, run_as
from support.seasons import add_season
from support.tasks import ended
from support.trading_floor import calling, hold, opening

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.exchange.domain.halts import Halt, HaltCause, Verb
from trader.exchange.domain.orders import OrderType
from trader.exchange.sql.halts import insert_halt, update_halts_lifted

HOUR: Final = timedelta(hours=1)
SEASON_END: Final = START.replace(minute=0, second=0) + 2 * HOUR
SEASON_START: Final = SEASON_END - HOUR
"""The start of a season that is opened, ten seconds before it."""

INVOCATION: Final = f"invocation of {MODEL}"
DECISION: Final = opening(stop=90_000)
FILLED: Final = {**QUIET, "ETH": "3100"}


class Schedule:
    """One run of an operation, with an actor in one of its gaps."""

    def __init__(self, arena: Arena, gaps: Gaps) -> None:
        self.arena, self.gaps = arena, gaps
        self.task: asyncio.Task[object] | None = None
        """The operation."""

        self.ticking: asyncio.Task[None] | None = None
        self.thought = asyncio.Event()


Step = Callable[[Schedule], Awaitable[object]]


async def _nothing(schedule: Schedule) -> None:
    """Prepare nothing."""


class Operation(NamedTuple):
    """The actions of the observed process, after unobserved preparations."""

    run: Step
    prepare: Step = _nothing
    process: str = "A"


# --- operations -------------------------------------------------------------------------------------------------------


async def order(s: Schedule) -> None:
    await s.arena.process("A").place("op")


async def pair(s: Schedule) -> None:
    await s.arena.process("A").place_pair()


async def first_order(s: Schedule) -> None:
    await s.arena.process("A").place("op", account_id="d")


async def limit_order(s: Schedule) -> None:
    await s.arena.process("A").place("op", type=OrderType.LIMIT, limit_price=D(93500))


async def cancel(s: Schedule) -> None:
    assert s.arena.resting is not None
    await s.arena.process("A").exchange.cancel_order("a", str(s.arena.resting.id))


async def reset(s: Schedule) -> None:
    await s.arena.process("A").exchange.reset_account("a")


async def have_untraded(s: Schedule) -> None:
    """Set up an account that has never traded."""
    await run_as("A", s.arena.process("A").exchange.open_account("d"))


async def remove(s: Schedule) -> None:
    await s.arena.process("A").exchange.remove_account("d")


async def stop_tick(s: Schedule) -> None:
    await s.arena.see(STOPPED)


async def fill_tick(s: Schedule) -> None:
    await s.arena.see(FILLED)


async def funding_tick(s: Schedule) -> None:
    await s.arena.see(after_s=20)


async def gap_tick(s: Schedule) -> None:
    """Have a tick with a stop end a gap of the feed."""
    await s.arena.see(STOPPED, after_s=61)


async def open_large(s: Schedule) -> None:
    await run_as("A", s.arena.process("A").place("large", "4", account_id="c", leverage=D(40)))


async def snapshot(s: Schedule) -> None:
    await s.arena.process("A").snapshot()


async def have_unrecorded(s: Schedule) -> None:
    """Set up a ledger that has grown since it was recorded."""
    await run_as("A", s.arena.process("A").place("unrecorded", "0.02"))


async def have_no_record(s: Schedule) -> None:
    """Set up a halt, and a chain without results, as before the first minute of a new database."""
    async with s.arena.database.transaction() as conn:
        await insert_halt(conn, Halt(account_id="b", cause=HaltCause.OPERATOR, reason="lunch", by="eve", at=START))
        await conn.execute("DELETE FROM chain_links; DELETE FROM chain_marks")


async def halt(s: Schedule) -> None:
    await s.arena.halt(s.arena.process("A"), Verb.HALT)


async def flatten(s: Schedule) -> None:
    await s.arena.halt(s.arena.process("A"), Verb.FLATTEN)


async def command_flatten(s: Schedule) -> None:
    await s.arena.command(Verb.FLATTEN, "a")
    await s.arena.process("A").operations.poll()
    await ended(f"{Verb.FLATTEN} ")


async def measure(s: Schedule) -> None:
    """Measure losses and record their baselines, at a tick that is also due for a checkpoint."""
    await s.arena.see(after_s=61)


async def follow(s: Schedule) -> None:
    await s.arena.process("C").leadership.take_role()


async def have_news(s: Schedule) -> None:
    await run_as("C", follow(s))
    await run_as("A", s.arena.process("A").place("news"))


async def take_role(s: Schedule) -> None:
    await s.arena.process("B").leadership.take_role()


async def free_lock(s: Schedule) -> None:
    """Have the server free the lock of a leader that does not know it."""
    await run_as("B", take_role(s))
    s.arena.holder = None


async def doubt(s: Schedule) -> None:
    """Set up a commit in doubt that the server executes later."""
    s.gaps.fault, s.gaps.fault_in = "late statement", "write_postings"
    with s.gaps.watching("A", -1, lambda: asyncio.sleep(0)):
        await asyncio.gather(run_as("A", s.arena.process("A").place("doubtful")), return_exceptions=True)
    s.gaps.fault_in = None


async def recover_at_tick(s: Schedule) -> None:
    """Have the next tick find an account in doubt, which nothing else changes."""
    await quiet_tick(s)
    await ended("recovery of ")


async def invoke(s: Schedule) -> None:
    await s.arena.process("A").agents.start_batch(s.arena.clock.now())
    await ended(INVOCATION)


async def have_decision(s: Schedule) -> None:
    s.arena.process("A").provider.scripts[MODEL] = [calling(DECISION), hold()]


async def have_tick_at_order(s: Schedule) -> None:
    """Have a tick begin just before the model's order, which waits until the tick is applied."""
    await have_decision(s)
    exchange = s.arena.process("A").exchange

    async def begin_tick() -> None:
        exchange.tick_began.clear()
        s.ticking = asyncio.create_task(s.arena.see(STOPPED))
        await exchange.tick_began.wait()

    exchange.before_order = begin_tick


async def invoke_at_tick(s: Schedule) -> None:
    await invoke(s)
    if s.ticking is not None:
        await s.ticking


async def have_view(s: Schedule) -> None:
    await run_as("A", s.arena.open_view())


async def decide(s: Schedule) -> None:
    await s.arena.process("A").decide()


async def have_keys(s: Schedule) -> None:
    await s.arena.add_keys()


async def decide_by_key(s: Schedule) -> None:
    """Have an agent decide over HTTP; a caller that leaves does not end its request."""
    callers, a = s.arena.callers, s.arena.process("A")
    try:
        await callers.decide(AGENT, a)
    finally:
        await callers.idle(a)


async def have_webhook(s: Schedule) -> None:
    await run_as("A", s.arena.add_webhook())


async def call_webhook(s: Schedule) -> None:
    await s.arena.process("A").call_webhook()


async def have_unsent_anchor(s: Schedule) -> None:
    """Set up an anchor that the sink has not received, and a record after it."""
    a, s.arena.sink.is_down = s.arena.process("A"), True
    await run_as("A", a.anchors.update())
    s.arena.sink.is_down = False
    await have_unrecorded(s)
    await run_as("A", snapshot(s))


async def anchor(s: Schedule) -> None:
    await s.arena.process("A").anchors.update()


async def have_follower(s: Schedule) -> None:
    """Set up a follower that has read a record of the leader."""
    await run_as("A", s.arena.process("A").relay_events())
    await run_as("C", follow(s))


async def relay(s: Schedule) -> None:
    s.arena.process("A").act()
    await s.arena.process("A").relay_events()


async def open_season(s: Schedule) -> None:
    s.arena.has_season = s.arena.opens_season = True
    await outside.open_season(s.arena.database, SEASON_START)


async def have_season(s: Schedule) -> None:
    """Create a season of two hours, the first of which is over and recorded."""
    async with s.arena.database.transaction() as conn:
        await add_season(conn, start=SEASON_END - 2 * HOUR, end=SEASON_END)
    s.arena.has_season = True
    await s.arena.see_until(SEASON_END - HOUR + RECORDED_AFTER)
    await run_as("A", snapshot(s))


async def close_season(s: Schedule) -> None:
    await outside.close_season(s.arena.database)


async def have_slow_model(s: Schedule) -> None:
    """Set up a model that is still thinking when its next cycle is due."""

    async def answer(turn: Turn) -> ModelAnswer:
        await s.thought.wait()
        return hold()

    s.arena.process("A").provider.scripts[MODEL] = [answer]
    await run_as("A", s.arena.process("A").agents.start_batch(s.arena.clock.now()))


async def count_missed(s: Schedule) -> None:
    await s.arena.process("A").agents.start_batch(s.arena.clock.now())
    s.thought.set()
    await ended(INVOCATION)


OPERATIONS: Final = {
    "order": Operation(order),
    "pair": Operation(pair),
    "first order": Operation(first_order),
    "limit order": Operation(limit_order),
    "cancel": Operation(cancel),
    "reset": Operation(reset),
    "removal": Operation(remove, have_untraded),
    "tick with stop": Operation(stop_tick),
    "tick with limit fill": Operation(fill_tick),
    "tick with funding": Operation(funding_tick),
    "tick after a gap": Operation(gap_tick),
    "tick with liquidation": Operation(stop_tick, open_large),
    "snapshot": Operation(snapshot, have_unrecorded),
    "first record": Operation(snapshot, have_no_record),
    "halt": Operation(halt),
    "flatten": Operation(flatten),
    "command flatten": Operation(command_flatten),
    "measure": Operation(measure),
    "follow": Operation(follow, have_news, "C"),
    "take over": Operation(take_role, free_lock, "B"),
    "recover": Operation(order, doubt),
    "recover at a tick": Operation(recover_at_tick, doubt),
    "invocation": Operation(invoke, have_decision),
    "invocation at a tick": Operation(invoke_at_tick, have_tick_at_order),
    "missed cycle": Operation(count_missed, have_slow_model),
    "external decision": Operation(decide, have_view),
    "decision by key": Operation(decide_by_key, have_keys),
    "webhook": Operation(call_webhook, have_webhook),
    "anchor": Operation(anchor, have_unsent_anchor),
    "relay": Operation(relay, have_follower),
    "open season": Operation(open_season, have_unrecorded),
    "close season": Operation(close_season, have_season),
}


# --- actors -----------------------------------------------------------------------------------------------------------


async def other_order(s: Schedule) -> None:
    await run_as("A", s.arena.process("A").place("actor", "0.02"))


async def same_order(s: Schedule) -> None:
    await run_as("A", s.arena.process("A").place("op"))


async def order_elsewhere(s: Schedule) -> None:
    await run_as("A", s.arena.process("A").place("actor", "0.02", account_id="b"))


async def cancelled_limit(s: Schedule) -> None:
    await run_as("A", cancel(s))


async def reset_account(s: Schedule) -> None:
    await run_as("A", reset(s))


async def remove_account(s: Schedule) -> None:
    await run_as("A", remove(s))


async def untraded_order(s: Schedule) -> None:
    await run_as("A", first_order(s))


async def quiet_tick(s: Schedule) -> None:
    await s.arena.see()


async def ended_gap(s: Schedule) -> None:
    """End a gap of the feed by a tick that reaches the stop."""
    await gap_tick(s)


async def touched_stop(s: Schedule) -> None:
    await s.arena.see(STOPPED)
    await s.arena.see()


async def lifted_halt(s: Schedule) -> None:
    async with s.arena.database.transaction() as conn:
        await update_halts_lifted(conn, "b", "eve")


async def lost_statement(s: Schedule) -> None:
    s.gaps.fault = "lost statement"


async def lost_acknowledgement(s: Schedule) -> None:
    s.gaps.fault = "lost acknowledgement"


async def late_statement(s: Schedule) -> None:
    s.gaps.fault = "late statement"


async def late_lands(s: Schedule) -> None:
    await s.gaps.land()


async def cancellation(s: Schedule) -> None:
    """Cancel the first process's work (its callers and the invocation that it began), and wait for its end."""
    assert s.task is not None
    begun = [s.task, *(task for task in asyncio.all_tasks() if task.get_name().startswith((INVOCATION, "webhook of")))]
    for task in begun:
        task.cancel()
    await asyncio.wait(begun)


async def retry(s: Schedule) -> None:
    """Cancel the first order's caller, which retries immediately."""
    await cancellation(s)
    await same_order(s)


async def lost_lock(s: Schedule) -> None:
    await run_as("A", s.arena.process("A").lose_lock())


async def second_life(s: Schedule) -> None:
    """Lose the role, and regain it after another process has led, in the same process."""
    a, b = s.arena.process("A"), s.arena.process("B")
    await lost_lock(s)
    await run_as("B", b.leadership.take_role())
    await run_as("B", b.place("second", "0.03"))
    await run_as("B", b.lose_lock())
    await run_as("A", a.leadership.take_role())


async def second_leader(s: Schedule) -> None:
    s.arena.holder = None
    second = s.arena.process("B")
    await run_as("B", second.leadership.take_role())
    await run_as("B", second.place("second", "0.03"))


async def clock_ahead(s: Schedule) -> None:
    """Set the clock an hour ahead for two ticks, and right again for the next."""
    s.arena.set_clock(HOUR)
    await s.arena.see()
    await s.arena.see()
    s.arena.set_clock(-HOUR)
    await s.arena.see()


async def clock_corrected(s: Schedule) -> None:
    """Set the clock ahead and right again, and back and right again, with ticks in between."""
    for span in (HOUR, -HOUR, -HOUR / 60, HOUR / 60):
        s.arena.set_clock(span)
        await s.arena.see()


async def clock_back(s: Schedule) -> None:
    s.arena.set_clock(-HOUR / 6)
    await s.arena.see()


async def other_snapshot(s: Schedule) -> None:
    await run_as("A", s.arena.process("A").snapshot())


async def snapshot_elsewhere(s: Schedule) -> None:
    await second_leader(s)
    await run_as("B", s.arena.process("B").snapshot())


async def commanded(s: Schedule) -> None:
    """Have an operator flatten an account, which the service finds out."""
    await s.arena.command(Verb.FLATTEN, "a")
    await run_as("A", s.arena.process("A").operations.poll())


async def commanded_elsewhere(s: Schedule) -> None:
    """Have an operator flatten an account that only the second leader knows; the first one polls, too."""
    await second_leader(s)
    await run_as("B", s.arena.process("B").place("only there", "0.02", account_id="e"))
    await s.arena.command(Verb.FLATTEN, "e")
    await run_as("A", s.arena.process("A").operations.poll())
    await run_as("B", s.arena.process("B").operations.poll())


async def resumed(s: Schedule) -> None:
    await s.arena.command(Verb.RESUME, "a")
    await run_as("A", s.arena.process("A").operations.poll())


async def stop(s: Schedule) -> None:
    await run_as("A", s.arena.process("A").leadership.resign())


async def other_agent(s: Schedule) -> None:
    """Have another external agent, with its own key, decide on its own view."""
    await run_as("A", s.arena.decide_elsewhere())


async def other_key(s: Schedule) -> None:
    """Have another agent decide with its own key, and with the view of the first one, which it does not have."""
    callers, a = s.arena.callers, s.arena.process("A")
    await callers.decide(OTHER_AGENT, a)
    if callers.views.get(AGENT):
        assert await callers.decide_for(AGENT, OTHER_AGENT, a) == "VIEW_UNKNOWN"


async def anchor_elsewhere(s: Schedule) -> None:
    await second_leader(s)
    await run_as("B", s.arena.process("B").anchors.update())


async def sink_down(s: Schedule) -> None:
    s.arena.sink.is_down = True


async def act(s: Schedule) -> None:
    s.arena.process("A").act()


async def webhook_elsewhere(s: Schedule) -> None:
    """Have a second leader call the webhook; not just after the first one has confirmed its term, when it sends."""
    if "after hold_term" in s.gaps.passed[-2:]:
        return
    await second_leader(s)
    await run_as("B", s.arena.process("B").call_webhook())


async def season_elsewhere(s: Schedule) -> None:
    """Have another operator open a season."""
    await run_as("actor", outside.open_season(s.arena.database, SEASON_START + HOUR))


async def started_season(s: Schedule) -> None:
    """Let the first hour of the season pass, and record what the accounts were worth in it."""
    for moment in (SEASON_START + HOUR / 2, SEASON_START + HOUR + RECORDED_AFTER):
        await s.arena.see_until(moment)
        await run_as("A", snapshot(s))


async def ended_season(s: Schedule) -> None:
    """Let the season end; its last hour is not recorded yet."""
    await s.arena.see_until(SEASON_END)
    await run_as("A", snapshot(s))


async def recorded_season(s: Schedule) -> None:
    """Let the season end, and its last hour be recorded."""
    await s.arena.see_until(SEASON_END + RECORDED_AFTER)
    await run_as("A", snapshot(s))


async def amended_season(s: Schedule) -> None:
    """Have an operator prolong the season."""
    await outside.prolong_season(s.arena.database)


ACTORS: Final[dict[str, Step]] = {
    "order": other_order,
    "same order": same_order,
    "order elsewhere": order_elsewhere,
    "cancel": cancelled_limit,
    "reset": reset_account,
    "remove": remove_account,
    "first order": untraded_order,
    "tick": quiet_tick,
    "touched stop": touched_stop,
    "ended gap": ended_gap,
    "lifted halt": lifted_halt,
    "lost statement": lost_statement,
    "lost acknowledgement": lost_acknowledgement,
    "late statement": late_statement,
    "late commit": late_lands,
    "cancellation": cancellation,
    "retry": retry,
    "lost lock": lost_lock,
    "second life": second_life,
    "second leader": second_leader,
    "clock ahead": clock_ahead,
    "clock back": clock_back,
    "clock corrected": clock_corrected,
    "snapshot": other_snapshot,
    "snapshot elsewhere": snapshot_elsewhere,
    "flatten": commanded,
    "flatten elsewhere": commanded_elsewhere,
    "resume": resumed,
    "stop": stop,
    "other agent": other_agent,
    "other key": other_key,
    "webhook elsewhere": webhook_elsewhere,
    "anchor elsewhere": anchor_elsewhere,
    "sink down": sink_down,
    "activity": act,
    "season elsewhere": season_elsewhere,
    "started season": started_season,
    "ended season": ended_season,
    "recorded season": recorded_season,
    "amended season": amended_season,
}

ONLY_FOR: Final = {
    "same order": {"order", "limit order", "recover"},
    "retry": {"order", "limit order", "recover"},
    "late commit": {"recover", "recover at a tick"},
    "remove": {"first order", "removal"},
    "first order": {"removal"},
    "ended gap": {
        "order",
        "cancel",
        "reset",
        "snapshot",
        "flatten",
        "take over",
        "recover",
        "recover at a tick",
        "invocation",
    },
    "lifted halt": {"first record"},
    "clock ahead": {"order", "reset", "tick with stop", "snapshot", "take over", "recover", "measure"},
    "clock back": {
        "order",
        "reset",
        "tick with stop",
        "snapshot",
        "take over",
        "recover",
        "recover at a tick",
        "measure",
    },
    "snapshot": {"order", "tick with stop", "snapshot", "invocation", "anchor", "open season"},
    "snapshot elsewhere": {"order", "tick with stop", "snapshot", "invocation"},
    "flatten": {"order", "limit order", "tick with stop", "halt", "flatten", "command flatten"},
    "flatten elsewhere": {"halt", "measure"},
    "resume": {"halt", "flatten", "command flatten"},
    "other agent": {"external decision", "webhook"},
    "other key": {"decision by key"},
    "webhook elsewhere": {"webhook"},
    "anchor elsewhere": {"anchor"},
    "sink down": {"anchor"},
    "activity": {"relay"},
    "season elsewhere": {"open season"},
    "started season": {"open season"},
    "ended season": {"close season"},
    "recorded season": {"close season"},
    "amended season": {"close season"},
}
"""Actors that mean something for these operations only."""

ONLY_BY: Final = {
    "pair": {
        "order",
        "reset",
        "tick",
        "touched stop",
        *FAULTS,
        "cancellation",
        "lost lock",
        "second life",
        "second leader",
        "stop",
    },
    "removal": {
        "first order",
        "remove",
        "tick",
        *FAULTS,
        "cancellation",
        "lost lock",
        "second life",
        "second leader",
        "stop",
    },
    "recover at a tick": {"late commit", "touched stop", "ended gap", "order", "lost statement", "clock back"},
    "command flatten": {
        "order",
        "tick",
        "lost acknowledgement",
        "lost statement",
        "late statement",
        "lost lock",
        "second life",
        "second leader",
        "stop",
        "flatten",
        "resume",
    },
    "measure": {
        "order",
        "lost acknowledgement",
        "lost statement",
        "late statement",
        "lost lock",
        "second life",
        "second leader",
        "clock ahead",
        "clock back",
        "flatten elsewhere",
    },
    "tick after a gap": {"order", *FAULTS, "lost lock", "second life", "second leader", "stop"},
    "first order": {"remove"},
    "first record": {"lifted halt", "lost statement", "lost acknowledgement", "second leader"},
    "invocation at a tick": {
        "cancellation",
        "lost statement",
        "late statement",
        "lost lock",
        "second life",
        "second leader",
        "stop",
        "reset",
    },
    "external decision": {
        "lost acknowledgement",
        "lost statement",
        "late statement",
        "cancellation",
        "lost lock",
        "second life",
        "second leader",
        "stop",
        "other agent",
    },
    "decision by key": {
        "lost acknowledgement",
        "lost statement",
        "late statement",
        "cancellation",
        "lost lock",
        "second life",
        "second leader",
        "stop",
        "other key",
    },
    "webhook": {
        "lost acknowledgement",
        "lost statement",
        "late statement",
        "cancellation",
        "lost lock",
        "second life",
        "stop",
        "other agent",
        "webhook elsewhere",
    },
    "anchor": {
        "lost acknowledgement",
        "lost statement",
        "cancellation",
        "snapshot",
        "anchor elsewhere",
        "sink down",
    },
    "relay": {
        "lost acknowledgement",
        "lost statement",
        "late statement",
        "lost lock",
        "second life",
        "second leader",
        "activity",
    },
    "open season": {
        "lost acknowledgement",
        "lost statement",
        "second leader",
        "snapshot",
        "season elsewhere",
        "started season",
    },
    "close season": {
        "lost acknowledgement",
        "lost statement",
        "second leader",
        "ended season",
        "recorded season",
        "amended season",
    },
    "missed cycle": {"lost acknowledgement", "lost statement", "cancellation", "second leader", "stop"},
}
"""Operations that are another one with a twist, and the actors for which that matters."""

PAIRS: Final = [
    (operation, actor)
    for operation in OPERATIONS
    for actor in ACTORS
    if operation in ONLY_FOR.get(actor, OPERATIONS) and actor in ONLY_BY.get(operation, ACTORS)
]
