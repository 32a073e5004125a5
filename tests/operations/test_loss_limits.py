"""Accounts that lose too much are halted, durably, on a real PostgreSQL."""

import asyncio
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from support.manual_clock import ManualClock
from support.operated_exchange import OperatedExchange, operating
from support.scripted import START, ScriptedSource, make_tick
from support.waiting import until

from trader.composition.leadership import Coordination, Leadership, TradingParts
from trader.core.events import EventBus
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.exchange.domain.halts import HaltCause, Verb
from trader.exchange.domain.orders import OrderStatus, OrderType
from trader.operations import operator_commands as operations
from trader.portfolio.baselines import Baselines
from trader.portfolio.snapshots import PortfolioService

D = Decimal
QUIET = {"BTC": "94000", "ETH": "3300", "SOL": "200"}
CAUSES = list[tuple[str | None, HaltCause]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "RETRY_S", 0.01)


def in_force(operated: OperatedExchange) -> CAUSES:
    return [(halt.account_id, halt.cause) for halt in operated.halts.in_force]


async def test_without_a_limit_nothing_is_measured_or_halted(database: Database) -> None:
    async with operating(database) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("1", leverage=D(20))
        await operated.see({"BTC": "86000"})
        assert in_force(operated) == []
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT count(*) FROM equity_marks") == 0


async def test_the_daily_loss_halts_only_that_account(database: Database) -> None:
    async with operating(database, MAX_DAILY_LOSS_PERCENT="5") as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.5", leverage=D(10))
        await operated.venue.buy("0.01", account_id="b")
        await operated.venue.buy("0.01", type=OrderType.LIMIT, limit_price=D(80_000), leverage=D(10))
        await operated.see({"BTC": "93100"})  # 450 plus fees of 23.5
        assert in_force(operated) == []
        await operated.see({"BTC": "93000"})
        assert in_force(operated) == [("a", HaltCause.DAILY_LOSS)]
        refused = await operated.venue.buy("0.01", leverage=D(10))
        assert refused.status is OrderStatus.REJECTED
        assert refused.reason is not None
        assert "daily loss: equity 9476.45 is 5.24 % below 10000.00, the first of 2025-01-01 (UTC)" in refused.reason
        assert (await operated.venue.buy("0.01", account_id="b")).status is OrderStatus.FILLED
        while operated.venue.exchange.accounts["a"].resting:
            await operated.operations.poll()
        assert "BTC" in operated.venue.exchange.accounts["a"].positions, "it may close at any time"
        async with database.connection() as conn:
            row = await conn.fetchrow("SELECT account_id, cause, halted_by FROM halts WHERE lifted_at IS NULL")
        assert row is not None
        assert tuple(row) == ("a", "daily loss", "limit")


async def test_a_clock_set_back_does_not_suspend_the_monitor(database: Database) -> None:
    clock = ManualClock(START)
    async with operating(database, ScriptedSource(), clock, MAX_DAILY_LOSS_PERCENT="5") as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        bought_at = operated.venue.exchange.accounts["a"].changed_at
        clock.set_by(-timedelta(hours=1))
        await operated.see({"BTC": "86500"})
        assert in_force(operated) == [("a", HaltCause.DAILY_LOSS)]
        assert (await operated.venue.sell("0.1", reduce_only=True)).status is OrderStatus.FILLED
        assert operated.venue.exchange.accounts["a"].changed_at >= bought_at, "the books never run backwards"


async def test_a_new_day_lifts_no_halt_and_starts_a_new_measurement(database: Database) -> None:
    clock = ManualClock(START)
    async with operating(database, ScriptedSource(), clock, MAX_DAILY_LOSS_PERCENT="5") as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        await operated.venue.buy("0.5", leverage=D(10), account_id="b")
        await operated.see({"BTC": "90000"})
        assert in_force(operated) == [("b", HaltCause.DAILY_LOSS)]
        await operated.see({"BTC": "90000"}, after_s=12 * 3600)
        await operated.see({"BTC": "86500"})  # a lost 3.6% before midnight, and 3.6% after
        assert in_force(operated) == [("b", HaltCause.DAILY_LOSS)]
        await operated.see({"BTC": "84000"})
        assert ("a", HaltCause.DAILY_LOSS) in in_force(operated)


async def test_a_clock_set_back_over_midnight_starts_no_day_twice(database: Database) -> None:
    source, clock, limits = ScriptedSource(), ManualClock(START), {"MAX_DAILY_LOSS_PERCENT": "5"}
    async with operating(database, source, clock, **limits) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        await operated.see({"BTC": "90000"})
        await operated.see({"BTC": "90000"}, after_s=12 * 3600)  # a new day starts with about 9600
        clock.set_by(-timedelta(minutes=30))
        await operated.see({"BTC": "87000"})  # 7% lost since the previous day started, and 3.1% since this one did
        assert in_force(operated) == []
    async with operating(database, source, clock, **limits) as operated:
        await operated.see({"BTC": "86500"})
        assert in_force(operated) == []
        await operated.see({"BTC": "86500"}, after_s=3600)  # midnight comes again
        await operated.see({"BTC": "84500"})
        assert in_force(operated) == [("a", HaltCause.DAILY_LOSS)]


async def test_the_drawdown_is_from_the_peak_and_survives_a_restart(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    limits = {"MAX_DRAWDOWN_PERCENT": "10"}
    async with operating(database, source, clock, **limits) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        await operated.see({"BTC": "114000"})
        await operated.see({"BTC": "114000"}, after_s=20)  # recorded now at the latest: the peak is about 12 000
    async with operating(database, source, clock, **limits) as operated:
        await operated.see({"BTC": "103000"})
        assert in_force(operated) == []  # 9.2% below the peak
        await operated.see({"BTC": "101500"})  # still above the initial capital
        assert in_force(operated) == [("a", HaltCause.DRAWDOWN)]
    async with operating(database, source, clock, **limits) as operated:
        assert in_force(operated) == [("a", HaltCause.DRAWDOWN)]
        assert (await operated.venue.buy("0.01", leverage=D(10))).status is OrderStatus.REJECTED


async def test_a_peak_from_before_the_limit_was_set_comes_from_snapshots(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    async with operating(database, source, clock) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        await operated.see({"BTC": "114000"})
        venue = operated.venue
        async with database.connection() as conn:
            await ensure_partitions(conn, clock.now())
        await PortfolioService(database, venue.exchange, clock, venue.settings).take_snapshots(clock.now())
    async with operating(database, source, clock, MAX_DRAWDOWN_PERCENT="10") as operated:
        await operated.see({"BTC": "101500"})
        assert in_force(operated) == [("a", HaltCause.DRAWDOWN)]


async def test_after_a_resume_losses_count_from_then_on(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    limits = {"MAX_DAILY_LOSS_PERCENT": "5", "MAX_DRAWDOWN_PERCENT": "5"}
    async with operating(database, source, clock, **limits) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        await operated.see({"BTC": "88000"})
        assert in_force(operated) == [("a", HaltCause.DAILY_LOSS)]
        await operated.do(Verb.RESUME, "a")
        await operated.see({"BTC": "88000"}, after_s=20)
        assert in_force(operated) == []
        assert (await operated.venue.buy("0.001", leverage=D(10))).status is OrderStatus.FILLED
        await operated.see({"BTC": "83000"})
        assert in_force(operated) == [("a", HaltCause.DAILY_LOSS)]
        await operated.ask(Verb.RESUME, "a")
        await operated.see({"BTC": "82950"}, after_s=20)  # the service ends before it has seen that
    async with operating(database, source, clock, **limits) as operated:
        await operated.see({"BTC": "82900"})
        await operated.see({"BTC": "82800"}, after_s=20)
        assert in_force(operated) == []


async def test_resuming_after_a_persons_halt_forgives_no_loss(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    limits = {"MAX_DAILY_LOSS_PERCENT": "5", "MAX_DRAWDOWN_PERCENT": "5"}
    async with operating(database, source, clock, **limits) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        await operated.see({"BTC": "91000"}, after_s=20)  # 3% lost
        await operated.do(Verb.HALT, "a")
        await operated.do(Verb.RESUME, "a")
    async with operating(database, source, clock, **limits) as operated:  # from the rows
        await operated.see({"BTC": "90000"})
        await operated.do(Verb.HALT, "a")
        await operated.do(Verb.RESUME, "a")
        await operated.see({"BTC": "90000"})
        assert in_force(operated) == []
        await operated.see({"BTC": "88900"})
        assert in_force(operated) == [("a", HaltCause.DAILY_LOSS)]


async def test_all_accounts_together_are_halted_and_new_capital_is_no_gain(database: Database) -> None:
    async with operating(database, MAX_TOTAL_DAILY_LOSS_PERCENT="5") as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        await operated.see({"BTC": "93000"})
        await operated.venue.exchange.open_account("b")
        await operated.see({"BTC": "93000"})
        await operated.venue.exchange.reset_account("a")  # a loss of 1% is forgotten, and none is incurred
        await operated.see({"BTC": "93000"})
        assert in_force(operated) == []
        await operated.venue.buy("0.5", leverage=D(10))
        await operated.see({"BTC": "91300"})  # 850 of the present 20 000
        assert in_force(operated) == []
        await operated.see({"BTC": "90900"})
        assert in_force(operated) == [(None, HaltCause.DAILY_LOSS)]
        assert (await operated.venue.buy("0.01", account_id="b")).status is OrderStatus.REJECTED


async def test_capital_of_a_removed_account_is_not_a_loss_even_after_a_restart(database: Database) -> None:
    clock, limits = ManualClock(START), {"MAX_TOTAL_DRAWDOWN_PERCENT": "5"}
    async with operating(database, ScriptedSource(), clock, **limits) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.01")
        await operated.venue.exchange.open_account("b")
        await operated.see(QUIET, after_s=11)  # recorded
        assert await operated.venue.exchange.remove_account("b")
        async with database.connection() as conn:
            rows = await conn.fetch("SELECT account_id FROM equity_marks ORDER BY account_id")
            assert [row["account_id"] for row in rows] == ["a", None]
            assert await conn.fetchval("SELECT peak < 10001 FROM equity_marks WHERE account_id IS NULL")
        await operated.see(QUIET, after_s=11)
        assert in_force(operated) == []
    async with operating(database, ScriptedSource(), clock, **limits) as operated:
        await operated.see(QUIET)
        assert in_force(operated) == []


async def test_in_lockstep_resting_orders_are_canceled_at_the_update_that_halts(database: Database) -> None:
    """So that the result does not depend on how fast the replay runs."""
    clock = ManualClock(START)
    async with operating(database, ScriptedSource(), clock, MAX_DAILY_LOSS_PERCENT="5") as operated:
        await operated.see(QUIET)
        venue = operated.venue
        await venue.buy("0.1", leverage=D(10))
        await venue.buy("0.01", leverage=D(10), type=OrderType.LIMIT, limit_price=D(50_000))
        context = SimpleNamespace(
            exchange=venue.exchange,
            market=venue.market,
            clock=clock,
            agents=None,
            portfolio=None,
            settings=venue.settings,
        )
        baselines = Baselines(database, venue.exchange, venue.market, clock, venue.settings)
        limits = operated.limits, operated.bounds
        trading = TradingParts(venue.accounts, baselines, operated.halts, *limits, operated.operations)
        unused: Any = None
        leadership = Leadership(context, database, EventBus(), unused, trading, Coordination(None, unused, unused))  # type: ignore[arg-type]
        halting = make_tick(START + timedelta(minutes=1), {"BTC": "86500"})
        venue.source.script += [halting, make_tick(START + timedelta(minutes=2), {"BTC": "86500"})]
        following = asyncio.create_task(leadership.follow_market())
        await until(lambda: venue.market.last_update_at == START + timedelta(minutes=2))
        following.cancel()
        await asyncio.wait([following])
        assert in_force(operated) == [("a", HaltCause.DAILY_LOSS)]
        assert venue.exchange.accounts["a"].resting == ()
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT closed_at FROM limit_orders") == halting.at


async def test_a_limit_can_flatten_too(database: Database) -> None:
    async with operating(database, MAX_DRAWDOWN_PERCENT="5", FLATTEN_ON_LIMIT="on") as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        await operated.venue.buy("0.01", account_id="b")
        await operated.see({"BTC": "88000"})
        assert in_force(operated) == [("a", HaltCause.DRAWDOWN)]
        while operated.venue.exchange.accounts["a"].positions:
            await operated.operations.poll()
        assert "BTC" in operated.venue.exchange.accounts["b"].positions
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT close_reason FROM orders WHERE status = 'CLOSED'") == "operator"


async def test_a_market_without_a_price_is_waited_for(database: Database) -> None:
    source, clock = ScriptedSource(), ManualClock(START)
    limits = {"MAX_DRAWDOWN_PERCENT": "5", "MAX_TOTAL_DRAWDOWN_PERCENT": "5"}
    async with operating(database, source, clock, **limits) as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        await operated.see(QUIET, after_s=11)
    async with database.connection() as conn:
        await conn.execute("DELETE FROM last_marks")
    source.script.clear()
    clock.set_by(timedelta(seconds=5))
    async with operating(database, source, clock, **limits) as operated:
        await operated.see({"ETH": "3300"})
        assert in_force(operated) == []
        await operated.see({"BTC": "88000"})
        assert set(in_force(operated)) == {("a", HaltCause.DRAWDOWN), (None, HaltCause.DRAWDOWN)}


async def test_a_baseline_that_another_term_has_changed_is_recorded_again(database: Database) -> None:
    async with operating(database, MAX_DRAWDOWN_PERCENT="10") as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.1", leverage=D(10))
        await operated.see(QUIET, after_s=20)
        async with database.connection() as conn:
            assert await conn.execute("DELETE FROM equity_marks WHERE account_id = 'a'") == "DELETE 1"
            await operated.limits.load(operated.venue.clock.now())
            await operated.see(QUIET, after_s=20)
            assert await conn.fetchval("SELECT count(*) FROM equity_marks WHERE account_id = 'a'") == 1


async def test_a_new_term_measures_nothing_before_it_has_read_the_baselines(database: Database) -> None:
    async with operating(database, MAX_DRAWDOWN_PERCENT="5") as operated:
        await operated.see(QUIET)
        await operated.venue.buy("0.5", leverage=D(10))
        operated.limits.stop()
        await operated.venue.exchange.resign()
        await operated.venue.exchange.lead()
        await operated.see({"BTC": "93000"})
        assert in_force(operated) == []
        await operated.limits.load(operated.venue.clock.now())
        await operated.see({"BTC": "93000"})
        assert in_force(operated) == [("a", HaltCause.DRAWDOWN)]
