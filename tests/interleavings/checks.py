"""What must hold after every schedule: the books, the memory, the record, and the independent reference account."""

from datetime import datetime
from decimal import Decimal
from fractions import Fraction

from interleavings.arena import STOP, Arena, Process, same
from support.gaps import run_as
from support.reference_account import ReferenceAccount

from trader.domain.exchange.account import Account
from trader.domain.exchange.tick_rules import Moment
from trader.domain.market.markets import PLAIN_FUNDING_RATE, Tick
from trader.services.agents.chain import verify
from trader.services.agents.results import record_results
from trader.services.events import PostingRefused
from trader.services.exchange.audit import audit
from trader.store.database.pool import Connection
from trader.store.exchange.accounts import select_accounts, select_processed_until
from trader.store.portfolio.baselines import select_baseline_states


async def problems_before(arena: Arena) -> list[str]:
    """What a crash at this moment would lose: rows that say that a tick was seen which they have not seen."""
    async with arena.database.connection() as conn, conn.transaction(isolation="repeatable_read", readonly=True):
        seen_until = await select_processed_until(conn)
        accounts = await select_accounts(conn)
        baselines = await select_baseline_states(conn)
    problems = []
    for account in accounts.values():
        position = account.positions.get("BTC")
        if position is None or position.exit_plan.stop != STOP or seen_until is None:
            continue
        if (at := _touched(arena, max(position.opened_at, account.changed_at), seen_until)) is not None:
            problems.append(f"account {account.id} is saved as having seen {at:%X}, and its stop did not fire")
    for baseline, state, until in baselines:
        if state.account.positions and (at := _touched(arena, state.account.changed_at, until)) is not None:
            problems.append(f"{baseline.id} is saved as having seen {at:%X}, and its stop did not fire")
    for process in arena.processes.values():
        if process.leadership.role == "standby" and process.lock is not arena.holder:
            await run_as(process.name, process.exchange.follow())
            if not same(process.accounts.by_id, accounts):
                problems.append(f"{process.name}, which follows, does not show the rows")
    return problems


def _touched(arena: Arena, after: datetime, until: datetime) -> datetime | None:
    """Return the time of the first tick of (after, until] that reaches the stop."""
    touches = (tick.at for tick in arena.source.script if after < tick.at <= until and tick.quotes["BTC"].mark <= STOP)
    return next(touches, None)


async def problems_of(arena: Arena, leader: Process) -> list[str]:
    """What is wrong once everything has come to its end."""
    problems = [f"audit: {problem}" for problem in (await audit(arena.database)).problems]
    async with arena.database.connection() as conn:
        rows = await select_accounts(conn)
        problems += [problem async for problem in _broken_promises(arena, conn)]
        for account in rows.values():
            problems += [
                f"reference, {account.id}: {difference}" for difference in await _differences(arena, conn, account)
            ]
    if not same(leader.accounts.by_id, rows):
        problems.append(f"the memory of the leader {leader.name} is not its rows")
    for process in arena.processes.values():
        problems += [f"alarm: {event.text}" for event in process.events if isinstance(event, PostingRefused)]
    if (term := leader.exchange.term) is not None:
        await run_as(leader.name, record_results(arena.database, term, arena.clock.now()))
    verified = await verify(arena.database, [])
    problems += [f"chain: {finding}" for finding in verified.findings]
    if verified.waiting and leader.exchange.term is not None:
        problems.append(f"chain: the ledger of {verified.waiting} accounts is in no record")
    return problems


async def _broken_promises(arena: Arena, conn: Connection):  # type: ignore[no-untyped-def]  # an async iterator
    rows = await conn.fetch("SELECT account_id, client_order_id, id FROM order_requests")
    booked = {(row["account_id"], row["client_order_id"]): row["id"] for row in rows}
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
        """  # a call that failed left nothing in the books
        calls = [tuple(row) for row in await conn.fetch(query, arena.view_id)]
        if calls != [("CREATE_POSITION", "ok"), ("HOLDING", "ok")]:
            yield f"the record of the agent's decision has the calls {calls}"
    for row in unrecorded:
        yield f"the record of {row['id']} does not say what became of its order {row['client_order_id']}"


async def _differences(arena: Arena, conn: Connection, account: Account) -> list[str]:
    """Compare an account with the reference, which meets the same orders and every tick in order of time."""
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
        "SELECT id, initial_capital, started_at, ended_at FROM runs WHERE account_id = $1 ORDER BY number", account_id
    )
    reference = ReferenceAccount(
        runs[0]["initial_capital"], dict(rules.markets), runs[0]["started_at"], taker=rules.taker_rate,
        maker=rules.maker_rate, liquidation=rules.liquidation_rate, recovery=rules.book_recovery, latency=rules.latency,
    )  # fmt: skip
    numbers: dict[str, int] = {}
    ticks = iter([tick for tick in arena.source.script if tick.at > runs[0]["started_at"]])
    moment = _moment(next(tick for tick in reversed(arena.source.script) if tick.at <= runs[0]["started_at"]), None)
    tick = next(ticks, None)
    for number, run in enumerate(runs):
        if number:
            reference.reset(run["initial_capital"], _at(moment, runs[number - 1]["ended_at"]), _rate)
        for at, kind, name, order_id in await _acts(conn, run["id"]):
            while tick is not None and tick.at <= at:
                moment = _moment(tick, moment)
                reference.update(moment, _rate)
                tick = next(ticks, None)
            if kind == "order":
                reference.place(arena.asked[account_id, name], _at(moment, at), _rate)
                if reference.resting:
                    numbers.setdefault(order_id, reference.resting[-1].number)
            elif order_id in numbers:
                reference.cancel(numbers[order_id], at)
        while tick is not None and (run["ended_at"] is None or tick.at <= run["ended_at"]):
            moment = _moment(tick, moment)
            reference.update(moment, _rate)
            tick = next(ticks, None)
    return reference


async def _acts(conn: Connection, run_id: object) -> list[tuple[datetime, str, str, str]]:
    """Return the orders and cancellations of a run in the order in which they were decided."""
    rows = await conn.fetch(
        """
        SELECT q.id::text, q.client_order_id AS name, q.created_at AS at,
               coalesce((SELECT min(sequence) FROM fills f WHERE f.request_id = q.id), l.sequence) AS sequence,
               CASE WHEN l.cancel_reason LIKE 'cancelled by%' OR l.cancel_reason = 'cancelled' THEN l.closed_at END
               AS cancelled_at
        FROM order_requests q LEFT JOIN limit_orders l ON l.id = q.id
        WHERE q.run_id = $1 AND q.answer ->> 'status' <> 'rejected'
        """,
        run_id,
    )
    placed = [(row["at"], row["sequence"], "order", row["name"], row["id"]) for row in rows]
    cancelled = [
        (row["cancelled_at"], 1 << 60, "cancel", row["name"], row["id"]) for row in rows if row["cancelled_at"]
    ]
    return [(at, kind, name, id_) for at, _, kind, name, id_ in sorted(placed + cancelled)]


def _moment(tick: Tick, before: Moment | None) -> Moment:
    marks = {symbol: quote.mark for symbol, quote in tick.quotes.items()}
    return Moment(tick.at, tick.quotes, marks, frozenset(tick.quotes), {} if before is None else before.marks)


def _at(moment: Moment, at: datetime) -> Moment:
    return Moment(at, moment.quotes, moment.marks)


def _rate(symbol: str, boundary: datetime) -> Decimal:
    return PLAIN_FUNDING_RATE
