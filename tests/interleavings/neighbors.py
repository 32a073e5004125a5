"""The invariants of what a process keeps besides the books: budgets, webhooks, anchors, followers and seasons."""

from datetime import datetime, timedelta

from interleavings.arena import RECORDED_AFTER, Arena, Process
from interleavings.gaps import run_as
from interleavings.outside import close_season, open_season, read_record

from trader.agents.budgets import Budgets
from trader.core.events import WorkflowProgress
from trader.portfolio.sql.seasons import select_latest_season
from trader.record.sql.chain import select_anchors


async def problems_of_neighbors(arena: Arena, leader: Process) -> list[str]:
    """The problems of what the leader keeps besides the books: budgets, webhooks, anchors, followers and the season."""
    problems = [*await _uncounted_costs(arena, leader), *await _repeated_requests(arena)]
    problems += await arena.callers.problems()
    arena.sink.is_down = False
    await run_as(leader.name, leader.anchors.update())
    async with arena.database.reading() as conn:
        anchored = [anchor.position for anchor in await select_anchors(conn)]
    if list(dict.fromkeys(arena.sink.received)) != anchored:
        problems.append(f"the anchors are {anchored}, and the sink received {arena.sink.received}")
    if arena.acts and (follower := arena.processes.get("C")) is not None:
        await run_as(leader.name, leader.relay_events())
        await run_as("C", follower.relayed.poll())
        read = [event.details["number"] for event in follower.events if isinstance(event, WorkflowProgress)]
        numbers = [int(bytes(number)) for number in read]
        is_complete = numbers == arena.acts if leader.name == "A" else set(numbers) <= {*arena.acts}
        if numbers != sorted(set(numbers)) or not is_complete:
            problems.append(f"a follower read the events {numbers} of {arena.acts}")
    if arena.opens_season:
        problems += await _problems_of_opening(arena)
    if arena.has_season:
        problems += await _problems_of_season(arena, leader)
    return problems


async def _uncounted_costs(arena: Arena, leader: Process) -> list[str]:
    """Compare the leader's costs of the day with the rows, unless an invocation is still open."""
    now, models, known = arena.clock.now(), leader.models.by_id, leader.agents.budgets
    async with arena.database.reading() as conn:
        open_rows = await conn.fetchval("SELECT count(*) FROM invocations WHERE status = 'running'")
    if open_rows or leader.agents.running():
        return []
    settings = arena.settings
    rows = Budgets(arena.database, None, settings.run_tokens_max, settings.answer_tokens_max)
    await rows.begin_cycle(now, models)
    await known.begin_cycle(now, models)
    problems = [f"{key} ended, and its reservation is left" for key, model in models.items() if known.reserved(model)]
    if known.total_spent != rows.total_spent:
        problems.append(f"the budget counts {known.total_spent}, and the rows {rows.total_spent}")
    return problems


async def _repeated_requests(arena: Arena) -> list[str]:
    """Requests for a decision on a view whose first order was executed."""
    asked = arena.webhook.asked
    async with arena.database.reading() as conn:
        names = {row[0] for row in await conn.fetch("SELECT client_order_id FROM order_requests")}
    executed = [(number, view) for number, view in enumerate(asked) if f"asked {number}" in names]
    return [
        f"the order of request {number} was executed, and its view was sent again"
        for number, view in executed
        if view in asked[number + 1 :]
    ]


async def _problems_of_opening(arena: Arena) -> list[str]:
    """Open the season that was not opened; there must be one, and the record must have it before its start."""
    async with arena.database.reading() as conn:
        season = await select_latest_season(conn)
    if season is None:
        await open_season(arena.database, arena.market_at.replace(minute=0, second=0) + timedelta(hours=1))
    async with arena.database.reading() as conn:
        record = await read_record(conn)
    problems = [f"season {number} was opened after its start" for number, _ in record.late]
    if (count := len(record.seasons)) != 1:
        problems.append(f"{count} seasons are open")
    return problems


async def _problems_of_season(arena: Arena, leader: Process) -> list[str]:
    """Close the season if it is still open, after its end; it must cover its last hour."""
    async with arena.database.reading() as conn:
        season = await select_latest_season(conn)
    assert season is not None
    if season.closed_at is None:
        for span in (-RECORDED_AFTER, RECORDED_AFTER):  # each hour has a snapshot
            await arena.see_until(max(season.rules.end + span, arena.market_at + timedelta(minutes=2)))
            await run_as(leader.name, leader.snapshot())
        await close_season(arena.database)
        async with arena.database.reading() as conn:
            season = await select_latest_season(conn)
        assert season is not None
    closed, result = season.records[-1], season.records[-1].result
    if closed.step != "closed" or result is None or datetime.fromisoformat(result.until) != season.rules.end:
        return [f"the season ended at {season.rules.end:%X}, and was closed with {result}"]
    return []
