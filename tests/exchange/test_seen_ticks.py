"""The order of ticks, not the clocks, determines which ones an account has processed, on a real PostgreSQL."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from support.manual_clock import ManualClock
from support.scripted import START, HangingSource, ScriptedSource, make_tick
from support.tasks import ended
from support.venue import Venue, agree_with_rows, refuse_posting, running
from support.waiting import turns, until

from trader.core.clock import ScaledClock
from trader.core.errors import MarketDataError, Unavailable
from trader.database.pool import Database
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import ExitPlan, OrderType
from trader.exchange.ledger_writer import LedgerWriter
from trader.market.domain.markets import Tick

D = Decimal
HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)
QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}
STOPPED = {**QUIET, "BTC": "92500"}
PLAN = ExitPlan(stop=D(93_000))


async def run_ahead(venue: Venue, span: timedelta = HOUR, *, ticks: int = 2) -> None:
    """Let the clock run ahead for a few ticks, and then correct it."""
    venue.clock.set_by(span)
    for _ in range(ticks):
        await venue.see(QUIET)
    venue.clock.set_by(-span)


async def die(venue: Venue) -> None:
    """End as in a kill: nothing more is recorded."""
    venue.exchange.suspend()


def missed(source: ScriptedSource, at: datetime, mids: dict[str, str] = STOPPED) -> None:
    """Let the market move while no process runs."""
    source.script.append(make_tick(at, mids))
    source.script.append(make_tick(at + SECOND, mids))


async def test_two_ticks_an_hour_ahead_do_not_prevent_catching_up_half_an_hour_later(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)
        await run_ahead(venue)
        await venue.see(QUIET, after_s=1_800)
        source.script = [tick for tick in source.script if tick.at <= clock.now()]
        last = source.script[-1].at
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT processed_until FROM service_state") == last
    missed(source, clock.now() + SECOND)
    await clock.advance(timedelta(minutes=5))
    async with running(database, source, clock) as venue:
        assert not venue.exchange.accounts["a"].positions, "the stop was reached while no process ran"
        await agree_with_rows(venue)


async def test_a_start_that_finds_future_ticks_reports_it_and_continues_from_the_last_applied_one(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)
        await run_ahead(venue)
        await die(venue)
    source.script = [tick for tick in source.script if tick.at <= clock.now()]
    missed(source, clock.now() + 3 * SECOND)
    await clock.advance(timedelta(minutes=5))
    with caplog.at_level(logging.WARNING, "trader.exchange"):
        async with running(database, source, clock) as venue:
            assert not venue.exchange.accounts["a"].positions
    assert "13:00:32.000Z, in the future" in caplog.text


async def test_an_account_that_traded_while_the_clock_was_ahead_catches_up_too(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        clock.set_by(HOUR)
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)
        clock.set_by(-HOUR)
        await die(venue)
    source.script = [tick for tick in source.script if tick.at <= clock.now()]
    missed(source, clock.now() + SECOND)
    await clock.advance(timedelta(minutes=5))
    async with running(database, source, clock) as venue:
        assert not venue.exchange.accounts["a"].positions


Decide = Callable[[Venue], object]


async def _hold_with_stop(venue: Venue) -> None:
    await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)


async def _hold_at_leverage(venue: Venue) -> None:
    await venue.buy("4", leverage=D(40))


async def _rest(venue: Venue) -> None:
    await venue.buy("0.1", leverage=D(5), type=OrderType.LIMIT, limit_price=D(93_000))


async def _hold_with_target(venue: Venue) -> None:
    await venue.sell("0.1", leverage=D(5), exit_plan=ExitPlan(target=D(93_000)))


@pytest.mark.parametrize("hold", [_hold_with_stop, _hold_at_leverage, _rest, _hold_with_target])
async def test_a_tick_that_arrives_after_a_later_decision_is_not_counted_as_processed(
    database: Database, hold: Callable[[Venue], AsyncIterator[None]]
) -> None:
    """The tick is dated 5 ms before its arrival, and a decision falls in between; then the process is killed."""
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        await hold(venue)  # type: ignore[misc]
        before = venue.exchange.accounts["a"]
        source.script.append(make_tick(clock.now() + timedelta(milliseconds=1), STOPPED))
        await clock.advance(timedelta(milliseconds=4))
        await venue.buy("0.01", symbol="ETH", leverage=D(5))
        await die(venue)
    await clock.advance(SECOND)
    async with running(database, source, clock) as venue:
        after = venue.exchange.accounts["a"]
        assert (after.positions.get("BTC"), after.resting) != (before.positions.get("BTC"), before.resting)
        await agree_with_rows(venue)


async def test_a_tick_applied_during_catching_up_is_not_applied_again(database: Database) -> None:
    """A repeated liquidation step at the same time would find no recovered depth."""
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        await venue.buy("4", leverage=D(40))
        await die(venue)
    tick = make_tick(clock.now() + SECOND, STOPPED)
    source.script.append(tick)
    await clock.advance(SECOND)
    async with running(database, source, clock) as venue:
        once = venue.exchange.accounts["a"]
        assert once.positions["BTC"].quantity < D(4)
        await venue.market.take(tick, venue.exchange.on_tick)
        assert venue.exchange.accounts["a"].positions == once.positions


async def test_a_replay_applies_no_second_twice(database: Database) -> None:
    """After a failover, the feed of a replay begins before the last tick that the accounts have been through."""
    clock: Any = ScaledClock(START, 1)  # which nobody advances
    async with running(database, ScriptedSource(), clock) as venue:
        quiet, stopped = make_tick(START + SECOND, QUIET), make_tick(START + 2 * SECOND, STOPPED)
        await venue.market.take(quiet, venue.exchange.on_tick)
        await venue.buy("4", leverage=D(40))
        await venue.market.take(stopped, venue.exchange.on_tick)
        once = venue.exchange.accounts["a"]
        assert once.positions["BTC"].quantity < D(4)
        for tick in (quiet, stopped):
            await venue.market.take(tick, venue.exchange.on_tick)
        assert venue.exchange.accounts["a"].positions == once.positions


async def test_an_account_in_doubt_does_not_stop_others(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    source, clock = HangingSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        source.answers.clear()  # what was missed a moment ago is known without the source
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN, account_id="b")
        await venue.doubt(monkeypatch, "a")
        async with asyncio.timeout(10):
            async with database.transaction() as busy:
                await busy.execute("SELECT FROM accounts WHERE id = 'a' FOR UPDATE")
                await venue.see(QUIET)
                await venue.see(STOPPED)
                await venue.see(QUIET)
                assert not venue.exchange.accounts["b"].positions, "its stop waits for nobody"
                assert venue.exchange.accounts["a"].positions
            await venue.recovered()
        assert not venue.exchange.accounts["a"].positions, "it has caught up on the tick that the others saw"
        (a,), (b,) = [await _trades(database, account_id) for account_id in ("a", "b")]
        assert a == b
        await agree_with_rows(venue)


class RefusingSource(ScriptedSource):
    """A source that answers its history only when it is up, and counts the requests."""

    is_up, asked = False, 0

    async def history(self, after: datetime, until: datetime) -> AsyncIterator[Tick]:
        self.asked += 1
        await asyncio.sleep(0)
        if not self.is_up:
            raise MarketDataError("the venue answers 429")
        async for tick in super().history(after, until):
            yield tick


@pytest.mark.parametrize("set_by", [timedelta(0), -HOUR])
async def test_accounts_in_doubt_for_long_share_one_reading_of_the_history_and_back_off(
    dsn: str, monkeypatch: pytest.MonkeyPatch, set_by: timedelta
) -> None:
    monkeypatch.setattr("trader.exchange.tick_processor.KEPT_MAX", 5)
    monkeypatch.setattr("trader.exchange.tick_processor.deque", lambda maxlen: deque(maxlen=5))
    source, clock = RefusingSource(), ManualClock(START)
    names = [f"of-{number}" for number in range(20)]
    async with AsyncExitStack() as stack:
        database = await Database.connect(dsn, command_timeout_s=0.5)  # the accounts are locked for longer
        stack.push_async_callback(database.close)
        venue = await stack.enter_async_context(running(database, source, clock))
        source.asked = 0
        await venue.see(QUIET)
        for name in names:
            await venue.buy("0.01", leverage=D(5), exit_plan=PLAN, account_id=name)
        with monkeypatch.context() as patched:
            patched.setattr(LedgerWriter, "write", refuse_posting)
            await venue.see(STOPPED)
        assert len(venue.accounts.in_doubt) == len(names)
        source.script = [make_tick(clock.now() + set_by, STOPPED)]  # as the history dates it
        clock.set_by(set_by)
        async with database.transaction() as busy:
            await busy.execute("SELECT FROM accounts FOR UPDATE")
            for _ in range(8):
                await venue.see(QUIET)
        for _ in range(9):
            await venue.see(QUIET)
            await ended("recovery of ")
        assert source.asked <= 2, "one failed, and the others wait"
        source.is_up, asked = True, source.asked
        await venue.see(QUIET, after_s=10)
        await venue.recovered()
        assert source.asked - asked < len(names) // 2, "statements that time out on a busy machine ask again"
        assert not any(venue.exchange.accounts[name].positions for name in names)
        await agree_with_rows(venue)


async def test_an_account_in_doubt_catches_up_on_ticks_of_a_clock_that_was_set_back(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(START)
    async with running(database, ScriptedSource(), clock) as venue:
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)
        await venue.doubt(monkeypatch, "a")
        clock.set_by(-HOUR)
        await venue.see(STOPPED)
        await venue.see(QUIET)
        await venue.recovered()
        assert not venue.exchange.accounts["a"].positions
        await agree_with_rows(venue)


async def test_a_recovery_that_begins_during_a_tick_includes_that_tick(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        for account_id in ("a", "b"):
            await venue.buy("0.1", leverage=D(5), exit_plan=PLAN, account_id=account_id)
        write, release = LedgerWriter.write, asyncio.Event()

        async def fail_or_wait(writer: LedgerWriter, posting: Posting) -> None:
            if posting.account.id == "a":
                raise Unavailable("the server is gone")
            await release.wait()
            await write(writer, posting)

        monkeypatch.setattr(LedgerWriter, "write", fail_or_wait)
        ticking = asyncio.create_task(venue.see(STOPPED))
        await until(lambda: "a" in venue.accounts.in_doubt)
        monkeypatch.setattr(LedgerWriter, "write", write)
        order = asyncio.create_task(venue.buy("0.01", symbol="ETH", leverage=D(5)))
        await asyncio.sleep(0.1)  # long enough to read the rows, if the recovery did not wait for the tick
        release.set()
        await ticking
        await order
        assert "BTC" not in venue.exchange.accounts["a"].positions
        await agree_with_rows(venue)


@pytest.mark.parametrize("machine", ["the same", "another"])
async def test_a_checkpoint_does_not_pass_a_tick_that_an_account_in_doubt_has_missed(
    database: Database, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)
        with monkeypatch.context() as patch:
            patch.setattr(LedgerWriter, "write", refuse_posting)
            await venue.see(STOPPED)
            await venue.see(QUIET)
            await venue.see(QUIET, after_s=29)
            await venue.see(QUIET, after_s=29)
            await venue.see(QUIET, after_s=29)
            assert "a" in venue.accounts.in_doubt
            await die(venue)
    if machine == "another":
        clock.origin = machine
        await clock.advance(SECOND)
    async with running(database, source, clock) as venue:
        assert not venue.exchange.accounts["a"].positions, "its stop was reached"
        await agree_with_rows(venue)


@pytest.mark.parametrize("how", ["recovery", "history", "kill"])
async def test_missed_funding_of_an_account_in_doubt_uses_the_mark_before_the_boundary(
    database: Database, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "history":  # the missed tick is kept no longer when the account recovers
        monkeypatch.setattr("trader.exchange.tick_processor.KEPT_MAX", 1)
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        await venue.see(QUIET, after_s=(HOUR - timedelta(seconds=35)).total_seconds())
        for account_id in ("a", "b"):
            await venue.buy("0.1", leverage=D(5), account_id=account_id)
        write = LedgerWriter.write

        async def fail(writer: LedgerWriter, posting: Posting) -> None:
            if posting.account.id == "a":
                raise Unavailable("the server is gone")
            await write(writer, posting)

        with monkeypatch.context() as patch:
            patch.setattr(LedgerWriter, "write", fail)
            await venue.see(STOPPED, after_s=5)  # the boundary has passed, and prices have moved
            if how == "kill":
                for _ in range(3):
                    await venue.see(STOPPED, after_s=29)  # a checkpoint is due
                await die(venue)
        if how != "kill":
            await venue.see(STOPPED)
            await venue.recovered()
    async with running(database, source, clock) as venue:
        paid = {account_id: account.funding for account_id, account in venue.exchange.accounts.items()}
        assert paid["a"] == paid["b"] != 0
        await agree_with_rows(venue)


async def test_a_decision_that_a_tick_waits_for_is_dated_before_that_tick(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        write, writing, release = LedgerWriter.write, asyncio.Event(), asyncio.Event()

        async def write_slowly(writer: LedgerWriter, posting: Posting) -> None:
            writing.set()
            await release.wait()
            await write(writer, posting)

        monkeypatch.setattr(LedgerWriter, "write", write_slowly)
        async with asyncio.TaskGroup() as group:
            group.create_task(venue.buy("0.1", leverage=D(5)))
            await writing.wait()
            group.create_task(venue.buy("0.1", leverage=D(5), client_order_id="waits"))
            await until(lambda: len(venue.accounts.under_way("a")) == 2)
            await turns()
            group.create_task(venue.see(QUIET))
            await until(lambda: len(source.script) == 2)
            await turns()
            await clock.advance(SECOND)
            release.set()
        assert await _date_of(database, "waits") < source.script[-1].at
        await agree_with_rows(venue)


async def test_a_decision_while_a_gap_closes_is_dated_before_the_tick_that_ends_it(database: Database) -> None:
    source, clock = HangingSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)
        source.asked.clear()
        source.answers.clear()
        ticking = asyncio.create_task(venue.see(STOPPED, after_s=61))
        await until(lambda: source.asked)
        await clock.advance(SECOND)
        await venue.buy("0.1", leverage=D(5), client_order_id="meanwhile")
        source.answers.set()
        await ticking
        assert await _date_of(database, "meanwhile") < source.script[-1].at
        await agree_with_rows(venue)


async def test_a_position_does_not_meet_a_tick_from_before_it_after_a_kill(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        await venue.sell("0.01", symbol="ETH", leverage=D(5))
        await venue.see(STOPPED)
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)
        await die(venue)
    async with running(database, source, clock) as venue:
        assert venue.exchange.accounts["a"].positions["BTC"].quantity == D("0.1")
        await agree_with_rows(venue)


async def _trades(database: Database, account_id: str) -> list[tuple[object, ...]]:
    query = "SELECT close_reason, exit_notional, closed_at FROM orders WHERE account_id = $1 AND status = 'CLOSED'"
    async with database.connection() as conn:
        return [tuple(row) for row in await conn.fetch(query, account_id)]


async def _date_of(database: Database, client_order_id: str) -> datetime:
    query = "SELECT created_at FROM order_requests WHERE client_order_id = $1"
    async with database.connection() as conn:
        moment: datetime = await conn.fetchval(query, client_order_id)
    return moment


async def hold(venue: Venue, account_id: str = "a") -> None:
    """Buy with a stop, at the first book after the latency."""
    order = asyncio.create_task(venue.buy("0.1", leverage=D(5), exit_plan=PLAN, account_id=account_id))
    await until(lambda: venue.market.orders_waiting > 0)
    await venue.see(QUIET)
    assert (await order).status == "filled"


AS_SERVED = {"SIM_LATENCY_MS": "200"}


@pytest.mark.parametrize("back", [timedelta(seconds=60), timedelta(seconds=90), HOUR, timedelta(days=2)])
@pytest.mark.parametrize("killed", ["never", "while the clock is back", "before it is set back", "with both"])
async def test_a_clock_set_back_and_corrected_repeats_no_tick(database: Database, back: timedelta, killed: str) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock, **AS_SERVED) as venue:
        await venue.see(STOPPED)
        for _ in range(20):
            await venue.see(STOPPED, after_s=4)
        await hold(venue, "old")
        if killed in {"never", "while the clock is back"}:
            clock.set_by(-back)
            await venue.see(QUIET)
            await hold(venue)
            if killed == "never":
                clock.set_by(back)
                await venue.see(QUIET)
                await venue.see(QUIET)
        else:
            await die(venue)
            await clock.advance(2 * SECOND)
            clock.set_by(-back)
        if killed == "while the clock is back":
            await die(venue)
    if killed == "with both":
        async with running(database, source, clock, **AS_SERVED) as venue:
            await venue.see(QUIET)
            await hold(venue)
            await die(venue)
    if killed in {"while the clock is back", "with both"}:
        await clock.advance(2 * SECOND)
        clock.set_by(back)
    async with running(database, source, clock, **AS_SERVED) as venue:
        await venue.see(QUIET)
        if killed == "before it is set back":
            await hold(venue)
            clock.set_by(back)
            await venue.see(QUIET)
        await venue.see(QUIET)
        assert venue.exchange.accounts["a"].positions, "closed at a price from before it was opened"
        assert venue.exchange.accounts["old"].positions
        await venue.see(STOPPED)
        await venue.see(STOPPED)
        assert not venue.exchange.accounts["a"].positions, "a stop that is reached now closes it"
        await agree_with_rows(venue)


@pytest.mark.parametrize("ahead", [timedelta(minutes=2), 3 * HOUR, timedelta(days=40)])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("reached", ["ahead", "after"])
async def test_a_clock_ahead_for_one_tick_disables_no_stop(
    database: Database, ahead: timedelta, restart: bool, reached: str
) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock, **AS_SERVED) as venue:
        await venue.see(QUIET)
        await hold(venue)
        clock.set_by(ahead)
        await venue.see(STOPPED if reached == "ahead" else QUIET)
        clock.set_by(-ahead)
        if restart:
            await die(venue)
        else:
            await venue.see(STOPPED)
            await venue.see(STOPPED)
            assert not venue.exchange.accounts["a"].positions
            await agree_with_rows(venue)
            return
    source.script = [tick for tick in source.script if tick.at <= clock.now()]
    missed(source, clock.now() + SECOND)
    await clock.advance(timedelta(seconds=5))
    async with running(database, source, clock, **AS_SERVED) as venue:
        assert not venue.exchange.accounts["a"].positions, "the stop was reached while no process ran"
        await agree_with_rows(venue)


@pytest.mark.parametrize("machine", ["the same", "another"])
@pytest.mark.parametrize(("behind_s", "away_s"), [(2, 4), (29, 4), (31, 40), (90, 4)])
@pytest.mark.parametrize("is_touched", [True, False])
async def test_a_successor_whose_clock_is_behind_skips_no_tick_and_repeats_none(
    database: Database, behind_s: int, away_s: int, machine: str, is_touched: bool
) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    away = timedelta(seconds=away_s)
    async with running(database, source, clock, **AS_SERVED) as venue:
        await venue.see(QUIET, after_s=100)
        await venue.see(STOPPED)  # before the position is opened
        await hold(venue)
        if machine == "the same":  # a minute's checkpoint may be older than what the accounts have seen
            await venue.exchange.resign()
        await die(venue)
    missed(source, clock.now() + away - 3 * SECOND, STOPPED if is_touched else QUIET)
    await clock.advance(away)
    clock.set_by(-timedelta(seconds=behind_s))
    if machine == "another":
        clock.origin = machine
        async with database.connection() as conn:  # as the database's clock measures it
            await conn.execute("UPDATE service_state SET processed_at = processed_at - $1::interval", away)
    async with running(database, source, clock, **AS_SERVED) as venue:
        assert bool(venue.exchange.accounts["a"].positions) is not is_touched
        await venue.see(QUIET)
        assert bool(venue.exchange.accounts["a"].positions) is not is_touched
        await agree_with_rows(venue)


async def test_a_limit_placed_after_a_clock_was_ahead_fills(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(QUIET)
        clock.set_by(3 * HOUR)
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5))
        clock.set_by(-3 * HOUR)
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5), type=OrderType.LIMIT, limit_price=D(93_000), symbol="BTC")
        await venue.see(STOPPED)
        assert not venue.exchange.accounts["a"].resting
