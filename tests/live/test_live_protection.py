"""Protection of live positions: exits before reads, a stop from the first moment, and no harm from late reads."""

import asyncio
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal

import pytest
from support.fake_exchange import AT_ONCE
from support.fake_venue import IDS
from support.live import Bench, add_model, prepared
from support.run_profile import is_nightly

from trader.core.errors import StartError, TraderError
from trader.core.events import VenueDiffers
from trader.database.pool import Database
from trader.exchange.domain.orders import ExitPlan, OrderStatus, OrderType, PlanTarget

D = Decimal
BTC = IDS["BTC"]
PLAN = ExitPlan(stop=D(90000), target=D(99000))
LAG_S = 13


def stops(bench: Bench) -> list[Decimal]:
    """Return the triggers of the stops that wait at the venue."""
    return [order.trigger for order in bench.venue.ledger.standing(BTC) if order.type == "stop-loss"]


async def fire(bench: Bench, symbol: str = "BTC") -> None:
    """Let the time of a position run out: an exit that no order at the venue executes."""
    plan = ExitPlan(stop=D(90000) if symbol == "BTC" else D(3000), time_exit=bench.clock.now() + timedelta(seconds=5))
    await bench.buy("0.1" if symbol == "BTC" else "1", symbol=symbol, leverage=D(5), exit_plan=plan)
    await bench.see({}, after_s=6)


# Exits


@pytest.mark.parametrize(
    "path", ["positionFunding", "account", "accountOrders", "accountActiveOrders", "accountLimits"]
)
async def test_an_exit_acts_although_a_read_fails(bench: Bench, path: str) -> None:
    await fire(bench)
    bench.venue.failing = {path}
    with suppress(TraderError):
        await bench.synchronize()
    assert bench.venue.positions() == {}
    bench.venue.failing = set()
    await bench.reconcile()


async def test_an_unbookable_order_of_one_market_holds_up_no_exit_of_another_or_its_own(bench: Bench) -> None:
    await bench.buy("1", symbol="ETH", leverage=D(5), type=OrderType.LIMIT, limit_price=D(3290))
    await fire(bench)
    bench.venue.reach("ETH", "3280.00")
    bench.venue.hides_trades_of = {order.index for order in bench.venue.orders.values() if order.market_id == 0}
    await bench.synchronize()
    assert BTC not in bench.venue.positions()
    assert "does not show all its trades yet" in bench.exchange.troubles["apex"]
    bench.venue.hides_trades_of = set()
    await bench.reconcile()


async def test_a_close_that_the_venue_is_too_busy_for_is_sent_again(bench: Bench) -> None:
    await fire(bench)
    bench.venue.send_faults = ["busy"] * 2
    for _ in range(3):
        await bench.move({}, after_s=1)
    assert bench.venue.positions() == {}
    await bench.agree()


async def test_a_callers_close_that_meets_a_busy_venue_is_not_told_refused(bench: Bench) -> None:
    await bench.buy("0.1", leverage=D(5))
    bench.venue.send_faults = ["busy"]
    with pytest.raises(TraderError, match="not known yet"):
        await bench.sell("0.1", reduce_only=True, client_order_id="close")
    await bench.synchronize()
    assert (await bench.sell("0.1", reduce_only=True, client_order_id="close")).status is OrderStatus.FILLED
    await bench.agree()


async def test_a_stop_that_fired_and_did_not_fill_is_closed_with_an_alarm(bench: Bench) -> None:
    await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    bench.venue.fill_share = D(0)
    await bench.see({"BTC": "80000.0"})
    bench.venue.fill_share = D(1)
    await bench.synchronize()
    assert bench.venue.positions() == {}
    (alarm,) = [event.text for event in bench.events if isinstance(event, VenueDiffers)]
    assert "fired at the venue and was not filled: it filled 0 of 0.1" in alarm
    await bench.reconcile()
    assert await bench.close_reasons() == ["stop"]


async def test_a_stop_that_does_not_fire_at_the_venue_is_closed_by_the_service(bench: Bench) -> None:
    await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    bench.venue.markets["BTC"].place(D("89000.0"))  # and nothing fires there
    for _ in range(2):
        await bench.move({}, after_s=10)
    assert bench.venue.positions() == {}
    await bench.reconcile()


# Stops from the first moment


@pytest.mark.parametrize("turns", range(0, 60, 4 if is_nightly() else 12))
async def test_a_fill_has_its_stop_whenever_the_service_is_killed(bench: Bench, turns: int) -> None:
    placing = asyncio.create_task(bench.buy("0.1", leverage=D(5), exit_plan=PLAN))
    for _ in range(turns):
        await asyncio.sleep(0.0005 if turns % 8 else 0)  # the moment is what is tried
    await bench.kill()
    placing.cancel()
    with suppress(TraderError, asyncio.CancelledError):
        await placing
    assert bool(bench.venue.positions()) == bool(stops(bench))
    await bench.start()
    await bench.tell()
    await bench.reconcile()


async def test_a_limit_order_that_fills_while_the_service_is_down_has_its_stop(bench: Bench) -> None:
    await bench.buy("0.1", leverage=D(5), type=OrderType.LIMIT, limit_price=D(93000), exit_plan=PLAN)
    await bench.synchronize()
    assert dict(bench.exchange.troubles) == {}
    assert stops(bench) == []
    await bench.kill()
    bench.venue.reach("BTC", "92900.0")
    assert stops(bench) == [90000]
    await bench.start()
    await bench.tell()
    await bench.agree()


async def test_a_limit_order_that_fills_in_part_has_a_stop_of_that_size(bench: Bench) -> None:
    answer = await bench.buy("0.4", leverage=D(5), type=OrderType.LIMIT, limit_price=D(93000), exit_plan=PLAN)
    bench.venue.fill_share = D("0.25")
    await bench.move({"BTC": "92900.0"})
    assert stops(bench)
    await bench.exchange.cancel_order("apex", str(answer.id))
    bench.venue.fill_share = D(1)
    for _ in range(2):
        await bench.move({}, after_s=LAG_S)
    await bench.agree()


async def test_a_canceled_limit_order_takes_its_stop_with_it(bench: Bench) -> None:
    answer = await bench.buy("0.1", leverage=D(5), type=OrderType.LIMIT, limit_price=D(93000), exit_plan=PLAN)
    await bench.exchange.cancel_order("apex", str(answer.id))
    await bench.reconcile()
    assert bench.exchange.live_account("apex").sent == ()


async def test_an_entry_whose_stop_the_venue_does_not_accept_is_refused(bench: Bench) -> None:
    bench.venue.refused_types = {2}
    answer = await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    assert (answer.status, bench.venue.positions()) == (OrderStatus.REJECTED, {})
    await bench.agree()


async def test_an_addition_of_the_same_size_and_plan_keeps_one_stop_of_the_whole(bench: Bench) -> None:
    for _ in range(2):
        await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    await bench.reconcile()


# Several targets, stops that follow, post-only


def limits(bench: Bench) -> list[tuple[Decimal, Decimal]]:
    """Return price and quantity of the limit orders that stand at the venue."""
    standing = [order for order in bench.venue.ledger.standing(BTC) if order.status == "open"]
    return sorted((order.price, order.quantity - order.filled) for order in standing)


def in_parts(*given: tuple[int, str]) -> ExitPlan:
    targets = (PlanTarget(price=D(price), fraction=D(fraction)) for price, fraction in given)
    return ExitPlan(stop=D(90000), targets=tuple(targets))


async def test_targets_stand_at_the_venue_for_their_parts_until_the_position_ends(bench: Bench) -> None:
    await bench.buy("0.4", leverage=D(5), exit_plan=in_parts((98000, "0.25"), (96000, "0.5")))
    assert limits(bench) == [(D(96000), D("0.2")), (D(98000), D("0.1"))]
    bench.venue.fill_share = D("0.5")
    await bench.see({"BTC": "96100.0"})
    bench.venue.fill_share = D(1)
    await bench.reconcile()
    assert limits(bench) == [(D(96000), D("0.1")), (D(98000), D("0.1"))]
    await bench.kill()
    bench.venue.reach("BTC", "96200.0")
    await bench.start()
    await bench.tell()
    await bench.reconcile()
    assert (limits(bench), bench.account().positions["BTC"].quantity) == ([(D(98000), D("0.1"))], D("0.2"))
    await bench.move({"BTC": "89000.0"})
    await bench.agree()
    assert (limits(bench), bench.venue.positions()) == ([], {})
    assert await bench.close_reasons() == ["target", "target", "stop"]


async def test_a_plan_with_other_targets_replaces_their_orders_and_a_smaller_position_trims_them(bench: Bench) -> None:
    await bench.buy("0.4", leverage=D(5), exit_plan=in_parts((96000, "0.5"), (98000, "0.5")))
    assert await bench.exchange.set_exit_plan("apex", "BTC", in_parts((97000, "0.5"), (98000, "0.5"))) is None
    assert limits(bench) == [(D(97000), D("0.2")), (D(98000), D("0.2"))]
    await bench.sell("0.3", reduce_only=True)
    await bench.reconcile()
    assert limits(bench) == [(D(97000), D("0.1"))]
    assert await bench.exchange.set_exit_plan("apex", "BTC", PLAN) is None
    await bench.agree()
    assert limits(bench) == []


async def test_a_stop_at_the_venue_follows_the_mark_in_steps(bench: Bench) -> None:
    await bench.buy("0.1", leverage=D(5), exit_plan=ExitPlan(trailing_distance=D(4000)))
    begun = stops(bench)
    for mid in ("94300.0", "96000.0", "93000.0"):
        await bench.move({"BTC": mid})
        await bench.agree()
        begun += stops(bench)
    assert begun[1:] == [begun[0], D(92000), D(92000)]
    assert abs(begun[0] - 90000) <= 1


async def test_a_post_only_order_is_refused_here_or_at_the_venue_rather_than_take(bench: Bench) -> None:
    order = {"leverage": D(5), "type": OrderType.LIMIT, "limit_price": D(93500), "post_only": True}
    taking = await bench.buy("0.1", **{**order, "limit_price": D(95000)})
    assert (taking.status, (taking.reason or "")[:9]) == (OrderStatus.REJECTED, "post-only")
    bench.venue.markets["BTC"].place(D("93400.0"))  # which is not known here yet
    late = await bench.buy("0.1", **order)
    assert (late.status, late.reason) == (OrderStatus.REJECTED, "the venue ended the order: canceled-post-only")
    bench.venue.markets["BTC"].place(D("94000.0"))
    assert (await bench.buy("0.1", **order)).status is OrderStatus.RESTING
    await bench.agree()


@pytest.mark.parametrize("change", ["no id", "smaller"])
async def test_a_stop_that_is_not_the_one_in_the_books_is_replaced(bench: Bench, change: str) -> None:
    bench.venue.keeps_child_ids = change != "no id"
    await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    if change == "smaller":
        for order in bench.venue.ledger.standing(BTC):
            order.quantity, order.changed_ms = D("0.05"), order.changed_ms + 1
    for _ in range(10):
        await bench.cycle(5)
        assert stops(bench)
    assert dict(bench.exchange.troubles) == {}
    await bench.agree()


# Late reads


async def test_a_report_older_than_the_last_trade_cancels_nothing(bench: Bench) -> None:
    bench.venue.positions_shown = []
    await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    before = len(bench.venue.sent)
    await bench.synchronize()
    assert [kind for kind, _ in bench.venue.sent[before:]] == []
    assert dict(bench.exchange.troubles) == {}
    bench.venue.positions_shown = None
    await bench.reconcile()


async def test_rounded_average_entries_are_no_difference(database: Database) -> None:
    async with prepared(database) as bench:
        await add_model(database, "apex")
        bench.venue.ledger.deposit = D(100_000)
        await bench.start()
        await bench.tell()
        await bench.buy("11", symbol="ETH", leverage=D(5))
        await bench.see({"ETH": "3301.01"})
        await bench.buy("11.1", symbol="ETH", leverage=D(5))
        await bench.move({}, after_s=LAG_S)
        assert dict(bench.exchange.troubles) == {}
        await bench.stop()


async def test_an_order_older_than_the_venue_shows_is_booked_by_its_trades(bench: Bench) -> None:
    await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    await bench.kill()
    bench.venue.reach("BTC", "89990.0")
    bench.venue.hidden.update(bench.venue.orders)
    await bench.clock.advance(timedelta(hours=30))
    await bench.start()
    await bench.tell()
    await bench.reconcile()
    assert await bench.close_reasons() == ["stop"]


async def test_a_trade_by_hand_is_booked_although_the_venues_clock_is_behind(bench: Bench) -> None:
    bench.venue.ahead = timedelta(seconds=-90)
    bench.venue.trade_by_hand("BTC", "0.1")
    await bench.reconcile()


async def test_a_partial_liquidation_that_cancels_all_orders_first_leaves_a_stop(bench: Bench) -> None:
    await bench.buy("0.2", leverage=D(20), exit_plan=PLAN)
    for order in bench.venue.ledger.standing(BTC):
        order.status = "canceled-liquidation"
    bench.venue.liquidate("BTC", "-0.1")
    await bench.reconcile()
    assert bench.account().positions["BTC"].quantity == D("0.1")


async def test_a_market_that_ends_is_settled(bench: Bench) -> None:
    await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    bench.venue.markets["BTC"].status = "inactive"
    for order in bench.venue.ledger.standing(BTC):
        order.status = "canceled"
    bench.venue.liquidate("BTC", "-0.1", kind="market-settlement")
    await bench.move({}, after_s=LAG_S)
    await bench.agree()
    assert await bench.close_reasons() == ["ended"]
    assert "does not trade BTC now" in ((await bench.buy("0.1", leverage=D(5))).reason or "")


# People


@pytest.mark.parametrize("is_shown", [True, False])
async def test_flattening_closes_what_only_the_venue_holds(bench: Bench, is_shown: bool) -> None:
    bench.venue.event_lag_s = AT_ONCE  # the position was opened some time ago
    bench.venue.trade_by_hand("BTC", "0.3")
    trades = bench.venue.ledger.trades
    if not is_shown:
        bench.venue.ledger.trades = []
    async with asyncio.timeout(20), bench.flattening() as operations, bench.database.connection() as conn:
        while not await conn.fetchval("SELECT count(*) FROM commands WHERE finished_at IS NOT NULL"):
            await operations.poll()
    assert bench.venue.positions() == {}
    if not is_shown:
        bench.venue.ledger.trades = trades + bench.venue.ledger.trades
    await bench.move({}, after_s=LAG_S)
    await bench.agree()


async def test_a_second_service_on_an_account_is_refused_at_the_start(bench: Bench, database: Database) -> None:
    await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    await bench.sell("0.1", reduce_only=True)
    await bench.kill()
    await bench.start()  # its own orders are no reason
    await bench.kill()
    async with database.connection() as conn:
        await conn.execute("TRUNCATE venue_orders, venue_trades")
    with pytest.raises(StartError, match="Two services on one account"):
        await bench.start()
    await bench.stop()
    bench.venue.ahead += timedelta(minutes=11)
    await bench.start()
