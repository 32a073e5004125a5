"""The invariants after every schedule: the books, the memory, the record, and the independent reference account."""

import asyncio
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from interleavings.arena import STOP, Arena, Process, same
from interleavings.gaps import run_as
from support.reference_account import ReferenceAccount
from support.tasks import ended

from trader.agents.verification import verify
from trader.core.events import PostingRefused
from trader.database.pool import Connection
from trader.exchange.domain.account import Account, AppliedTick, equity
from trader.exchange.domain.halts import Verb
from trader.exchange.domain.tick_rules import Moment
from trader.exchange.sql.accounts import select_accounts
from trader.market.domain.markets import PLAIN_FUNDING_RATE, Tick
from trader.operations.sql.loss_baselines import select_recorded_equity
from trader.portfolio.audit import audit
from trader.portfolio.sql.snapshots import select_baseline_states


async def problems_before(arena: Arena) -> list[str]:
    """Return what a crash at this moment would lose: rows that claim a tick which they have not applied."""
    async with arena.database.connection() as conn, conn.transaction(isolation="repeatable_read", readonly=True):
        row = await conn.fetchrow("SELECT processed_tick, processed_until FROM service_state")
        accounts = await select_accounts(conn)
        baselines = await select_baseline_states(conn)
    processed = None if row is None or row["processed_until"] is None else AppliedTick(*row)
    problems = []
    for account in accounts.values():
        position = account.positions.get("BTC")
        if position is None or position.exit_plan.stop != STOP or position.closing is not None or processed is None:
            continue
        if (at := _touched(arena, position.opened_at, account.seen_to(processed))) is not None:
            problems.append(f"account {account.id} is saved as having seen {at:%X}, and its stop did not fire")
    for baseline, state, until in baselines:
        held = state.account.positions.get("BTC")
        if held is not None and (at := _touched(arena, held.opened_at, until)) is not None:
            problems.append(f"{baseline.id} is saved as having seen {at:%X}, and its stop did not fire")
    for process in arena.processes.values():
        if process.leadership.role == "standby" and process.lock is not arena.holder:
            await run_as(process.name, process.exchange.follow())
            if not same(process.accounts.by_id, accounts):
                problems.append(f"{process.name}, which follows, does not show the rows")
    return problems


async def problems_of_memory(arena: Arena) -> list[str]:
    """Accounts that differ from their rows in the memory of the process that leads, although they are not in doubt."""
    for name in (f"{Verb.FLATTEN} ", f"{Verb.HALT} ", "recovery of "):
        await ended(name)
    for process in arena.processes.values():
        for account_id in list(process.accounts.by_id):
            if left := process.accounts.under_way(account_id):  # by a caller that was canceled
                await asyncio.wait(left)
    async with arena.database.reading() as conn:
        rows = await select_accounts(conn)
        early = 0 if arena.has_touched else await conn.fetchval(STOPPED_OUT)
    problems = [f"{early} positions were closed by a price from before they were opened"] if early else []
    for process in arena.processes.values():
        if process.leads and process.lock is arena.holder:
            known = {key: each for key, each in process.accounts.by_id.items() if key not in process.accounts.in_doubt}
            if not same(known, {key: each for key, each in rows.items() if key in known}):
                problems.append(f"another process has changed accounts that {process.name} leads")
    return problems


STOPPED_OUT = "SELECT count(*) FROM orders WHERE close_reason = 'stop'"


def _touched(arena: Arena, after: datetime, until: datetime) -> datetime | None:
    """Return the time of the first tick of (after, until] that reaches the stop."""
    touches = (tick.at for tick in arena.source.script if after < tick.at <= until and tick.quotes["BTC"].mark <= STOP)
    return next(touches, None)


async def problems_of(arena: Arena, leader: Process) -> list[str]:
    """Return the problems once everything has ended."""
    problems = [f"audit: {problem}" for problem in (await audit(arena.database)).problems]
    async with arena.database.connection() as conn:
        rows = await select_accounts(conn)
        problems += [problem async for problem in _broken_promises(arena, conn)]
        for account in () if arena.is_clock_set else rows.values():
            problems += [
                f"reference, {account.id}: {difference}" for difference in await _differences(arena, conn, account)
            ]
    for account in rows.values():
        position = account.positions.get("BTC")
        if position is not None and position.exit_plan.stop == STOP:
            problems.append(f"the stop of {account.id} was touched while no process ran, and did not fire")
    if not same(leader.accounts.by_id, rows):
        problems.append(f"the memory of the leader {leader.name} is not its rows")
    for process in (*arena.processes.values(), *arena.killed):
        problems += [f"{process.name}: {problem}" for problem in process.journal.problems()]
        problems += [f"alarm: {event.text}" for event in process.events if isinstance(event, PostingRefused)]
    await run_as(leader.name, leader.snapshot())
    async with arena.database.connection() as conn:
        for baseline, state, _ in await select_baseline_states(conn):
            if "BTC" in state.account.positions:
                problems.append(f"the stop of {baseline.id} was touched while no process ran, and did not fire")
    verified = await verify(arena.database, [])
    problems += [f"chain: {finding}" for finding in verified.findings]
    if verified.waiting and leader.exchange.term is not None:
        problems.append(f"chain: the ledger of {verified.waiting} accounts is in no record")
    return problems


async def problems_of_leading(arena: Arena, leader: Process) -> list[str]:
    """The problems in the leader's memory, and in the operators' requests, while it leads."""
    problems = []
    async with arena.database.reading() as conn:
        rows = await select_accounts(conn)
        measured = {key: each.baseline for key, each in (await select_recorded_equity(conn, arena.clock.now())).items()}
        open_commands = await conn.fetch("SELECT verb, account_id FROM commands WHERE finished_at IS NULL")
        halted = {(row["account_id"], row["cause"]) for row in await conn.fetch(HALTS_IN_FORCE)}
        asked = await conn.fetch(FLATTENED)
    if not same(leader.accounts.by_id, rows):
        problems.append(f"the memory of the leader {leader.name} is not its rows")
    for account_id, baseline in measured.items():
        if leader.halts.is_limited(account_id):  # its row waits, as it is, until the halt is lifted
            continue
        if baseline is not None and baseline.last != (now := equity(rows[account_id], leader.exchange.marks())):
            problems.append(f"the losses of {account_id} are measured from {baseline.last}, and its equity is {now}")
    if {(halt.account_id, halt.cause.value) for halt in leader.halts.in_force} != halted:
        problems.append(f"the leader knows the halts {leader.halts.in_force}, and in force are {halted}")
    problems += [f"the {row['verb']} of {row['account_id']} has no outcome" for row in open_commands]
    for row in asked:
        if rows[row["account_id"]].positions and (row["account_id"], row["cause"]) in halted:
            problems.append(f"flatten of {row['account_id']} is finished, and it holds positions")
    if any(row["account_id"] == "b" for row in [*open_commands, *asked]):
        problems.append("a leader that was replaced had an account flattened")
    return problems


HALTS_IN_FORCE = "SELECT account_id, cause FROM halts WHERE lifted_at IS NULL"
FLATTENED = """
SELECT c.account_id, h.cause FROM commands c
JOIN halts h ON h.account_id = c.account_id AND h.lifted_at IS NULL AND h.halted_at <= c.finished_at
WHERE c.verb = 'flatten' AND c.outcome -> 'left' = '[]' AND c.outcome ->> 'note' IS NULL
"""


async def _broken_promises(arena: Arena, conn: Connection):  # type: ignore[no-untyped-def]  # an async iterator
    rows = await conn.fetch("SELECT account_id, client_order_id, id, created_at FROM order_requests")
    booked = {(row["account_id"], row["client_order_id"]): row["id"] for row in rows}
    for row in () if arena.is_clock_set else rows:
        seen = arena.seen[row["account_id"], row["client_order_id"]]
        following = next((tick.at for tick in arena.source.script if tick.at > seen), row["created_at"])
        if row["created_at"] > following:
            yield f"{row['client_order_id']} is dated after the tick of {following:%X}, which it had not seen"
    if (("a", "pair 1") in booked) is not (("a", "pair 2") in booked):
        yield "one order of the pair is booked without the other"
    for key, answer in arena.acknowledged.items():
        if booked.get(key) != answer.id:
            yield f"{key} was acknowledged as {answer.id}, and is booked as {booked.get(key)}"
    unrecorded = await conn.fetch(
        """
        SELECT i.id, q.client_order_id FROM invocations i
        JOIN order_requests q ON starts_with(q.client_order_id, i.id || ':')
        LEFT JOIN tool_calls c ON c.invocation_id = i.id AND i.id || ':' || c.number = q.client_order_id
        WHERE i.status <> 'running' AND (c.status IS NULL OR (q.answer ->> 'status' = 'filled') <> (c.status = 'ok'))
        """
    )
    if arena.view_id:
        query = """
        SELECT type, status FROM tool_calls WHERE invocation_id::text = $1 AND status <> 'failed' ORDER BY number
        """  # a failed call left nothing in the books
        calls = [tuple(row) for row in await conn.fetch(query, arena.view_id)]
        if calls != [("CREATE_POSITION", "ok"), ("HOLDING", "ok")]:
            yield f"the record of the agent's decision has the calls {calls}"
    for row in unrecorded:
        yield f"the record of {row['id']} does not say what became of its order {row['client_order_id']}"


async def _differences(arena: Arena, conn: Connection, account: Account) -> list[str]:
    """Compare an account with the reference, which processes the same orders and every tick in order of time."""
    reference = await _replayed(arena, conn, account.id)
    problems = []
    if account.cash != reference.cash():
        problems.append(f"cash {account.cash}, not {Decimal(float(reference.cash())):.8f}")
    held = {symbol: position.side.direction * position.quantity for symbol, position in account.positions.items()}
    expected = {symbol: holding.quantity for symbol, holding in reference.books().holdings.items()}
    if {symbol: Fraction(quantity) for symbol, quantity in held.items()} != expected:
        problems.append(f"holds {held}, not { {symbol: float(quantity) for symbol, quantity in expected.items()} }")
    rests = [Fraction(order.remaining) for order in account.resting]
    if rests != [order.remaining for order in reference.resting]:
        problems.append(f"rests {rests}, not {[order.remaining for order in reference.resting]}")
    return problems


async def _replayed(arena: Arena, conn: Connection, account_id: str) -> ReferenceAccount:
    rules = arena.process("A").exchange.rules
    runs = await conn.fetch(
        "SELECT id, number, initial_capital, started_at, ended_at FROM runs WHERE account_id = $1 ORDER BY number",
        account_id,
    )
    reference = ReferenceAccount(
        runs[0]["initial_capital"], dict(rules.markets), runs[0]["started_at"], taker=rules.taker_rate,
        maker=rules.maker_rate, liquidation=rules.liquidation_rate, recovery=rules.book_recovery, latency=rules.latency,
    )  # fmt: skip
    numbers: dict[str, int] = {}
    acts = [await _acts(arena, conn, account_id, run["id"]) for run in runs]
    began = acts[0][0].seen if acts[0] else runs[0]["started_at"]
    ticks = iter([tick for tick in arena.source.script if tick.at > began])
    moment = _moment(next(tick for tick in reversed(arena.source.script) if tick.at <= began), None)
    tick = next(ticks, None)
    for number, run in enumerate(runs):
        if number:
            reference.reset(run["initial_capital"], _at(moment, runs[number - 1]["ended_at"]), _rate)
        for seen, _, at, kind, name, order_id, quantity in acts[number]:
            while tick is not None and tick.at <= seen:
                moment = _moment(tick, moment)
                reference.update(moment, _rate)
                tick = next(ticks, None)
            if kind == "order":
                # Two leaders close one position by one client order ID; each closes the quantity that it knows.
                order = next(order for order in arena.asked[account_id, name] if order.quantity == quantity)
                reference.place(order, _at(moment, at), _rate)
                if reference.resting:
                    numbers.setdefault(order_id, reference.resting[-1].number)
            elif order_id in numbers:
                reference.cancel(numbers[order_id], at)
        end = None if run["ended_at"] is None else arena.seen[account_id, f"run {run['number']}"]
        while tick is not None and (end is None or tick.at <= end):
            moment = _moment(tick, moment)
            reference.update(moment, _rate)
            tick = next(ticks, None)
    return reference


class Act(NamedTuple):
    """An order or a cancellation, and the last tick before it."""

    seen: datetime
    sequence: int
    at: datetime
    kind: str
    name: str
    order_id: str
    quantity: Decimal


async def _acts(arena: Arena, conn: Connection, account_id: str, run_id: object) -> list[Act]:
    """Return the orders and cancellations of a run in the order in which they were decided."""
    rows = await conn.fetch(
        """
        SELECT q.id::text, q.client_order_id AS name, q.created_at AS at,
               (q.answer ->> 'requested_quantity')::numeric AS quantity,
               coalesce((SELECT min(sequence) FROM fills f WHERE f.request_id = q.id), l.sequence) AS sequence,
               CASE WHEN l.cancel_reason LIKE 'cancelled by%' OR l.cancel_reason = 'cancelled' THEN l.closed_at END
               AS cancelled_at
        FROM order_requests q LEFT JOIN limit_orders l ON l.id = q.id
        WHERE q.run_id = $1 AND q.answer ->> 'status' <> 'rejected'
        """,
        run_id,
    )
    seen = arena.seen
    placed = [
        Act(
            seen[account_id, row["name"]],
            row["sequence"],
            row["at"],
            "order",
            row["name"],
            row["id"],
            row["quantity"],
        )
        for row in rows
    ]
    cancelled = [
        Act(
            seen[account_id, row["id"]], 1 << 60, row["cancelled_at"], "cancel", row["name"], row["id"], row["quantity"]
        )
        for row in rows
        if row["cancelled_at"]
    ]
    return sorted(placed + cancelled)


def _moment(tick: Tick, before: Moment | None) -> Moment:
    marks = {symbol: quote.mark for symbol, quote in tick.quotes.items()}
    return Moment(tick.at, tick.quotes, marks, frozenset(tick.quotes), {} if before is None else before.marks)


def _at(moment: Moment, at: datetime) -> Moment:
    return Moment(at, moment.quotes, moment.marks)


def _rate(symbol: str, boundary: datetime) -> Decimal:
    return PLAIN_FUNDING_RATE
