"""A process that loses the lead and regains it carries nothing over that its new term does not know."""

import asyncio
from datetime import timedelta
from decimal import Decimal

import pytest
from support.manual_clock import ManualClock
from support.proxy import behind_proxy
from support.scripted import START, HangingSource
from support.tasks import ended
from support.venue import Venue, agree_with_rows, break_ledger_writer, running
from support.waiting import until

from trader.core.errors import InternalError, Unavailable
from trader.database.pool import Database
from trader.exchange import accounts as books
from trader.exchange import tick_processor
from trader.exchange.domain.orders import ExitPlan

D = Decimal
QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}
STOPPED = {**QUIET, "BTC": "92500"}
PLAN = ExitPlan(stop=D(93_000))


async def miss_ticks(venue: Venue, count: int) -> None:
    """Let ticks pass while no account can be reread."""
    async with venue.database.transaction() as busy:
        await busy.execute("SELECT FROM accounts FOR UPDATE")
        for _ in range(count):
            await venue.see(QUIET)


async def lose(venue: Venue) -> None:
    """Lose the lead, without another checkpoint."""
    venue.exchange.suspend()
    await venue.exchange.resign()


async def test_ticks_dropped_in_a_former_term_delay_no_recovery(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tick_processor, "KEPT_MAX", 5)
    async with running(database) as venue:
        await venue.see(QUIET)
        await venue.exchange.open_account("a")
        await venue.doubt(monkeypatch, "a")
        await miss_ticks(venue, 20)
        await lose(venue)
        await venue.exchange.lead()
        await venue.see(QUIET)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)
        await venue.buy("0.1", leverage=D(5), symbol="ETH")
        await venue.doubt(monkeypatch, "a")
        for prices in (STOPPED, QUIET):
            await venue.see(prices)
            await ended("recovery of ")
        assert not venue.accounts.in_doubt
        assert list(venue.exchange.accounts["a"].positions) == ["ETH"], "its stop was reached"
        await agree_with_rows(venue)


async def test_a_jump_of_the_clock_between_two_terms_repeats_no_tick(database: Database) -> None:
    source, clock = HangingSource(), ManualClock(START)
    async with running(database, source, clock) as venue:
        await venue.see(STOPPED)
        await venue.see(QUIET, after_s=7200)
        await venue.buy("0.1", leverage=D(5), exit_plan=PLAN)
        await lose(venue)
        clock.set_by(-timedelta(hours=1))
        await venue.exchange.lead()
        source.asked.clear()
        await venue.see(QUIET)
        assert source.asked == [], "nothing was missed, and no tick waits for history"
        assert venue.exchange.accounts["a"].positions, "closed at a price from before it was opened"
        await venue.see(STOPPED)
        assert not venue.exchange.accounts["a"].positions
        await agree_with_rows(venue)


async def test_accounts_that_waited_for_history_in_a_former_term_wait_no_longer(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tick_processor, "KEPT_MAX", 5)
    monkeypatch.setattr(books, "FINISH_S", 0.05)
    source = HangingSource()
    async with running(database, source, ManualClock(START)) as venue:
        await venue.see(QUIET)
        for account_id in ("a", "b", "c"):
            await venue.buy("0.1", leverage=D(5), exit_plan=PLAN, account_id=account_id)
        await venue.doubt(monkeypatch, "a", "b")
        await miss_ticks(venue, 8)
        source.asked.clear()
        source.answers.clear()
        await venue.see(QUIET)
        await until(lambda: source.asked)  # the other one waits for its turn
        await lose(venue)
        source.answers.set()
        await venue.exchange.lead()
        regained_at = venue.clock.now()
        await venue.doubt(monkeypatch, "c")
        await miss_ticks(venue, 8)
        source.asked.clear()
        await venue.see(QUIET)
        await venue.recovered()
        assert source.asked == [regained_at], "only what the account in doubt has missed"
        await agree_with_rows(venue)


async def test_depth_of_an_order_that_did_not_finish_in_a_former_term_is_whole(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "FINISH_S", 0.05)
    async with behind_proxy(dsn) as (proxy, database), running(database, SHARED_DEPTH="on") as venue:
        await venue.see(QUIET)
        for account_id in ("a", "b", "c"):
            await venue.exchange.open_account(account_id)
        proxy.stall()
        order = asyncio.create_task(venue.buy("4", leverage=D(40)))
        await until(lambda: venue.accounts.is_changing("a"))
        await lose(venue)
        with pytest.raises(Unavailable):
            await order
        proxy.pass_on()
        await venue.exchange.lead()
        with monkeypatch.context() as patch:
            break_ledger_writer(patch, "c")
            with pytest.raises(InternalError):
                await venue.buy("1", account_id="c", leverage=D(40))
        answer = await venue.buy("1", account_id="b", leverage=D(40))
        assert answer.average_price == D("94000.1"), "the best level is whole"
        await venue.buy("0.01", account_id="c")
        await agree_with_rows(venue)
