"""Live trading against the fake venue: the books equal the venue's fills, whatever goes wrong."""

from datetime import timedelta
from decimal import Decimal

import pytest
from support.fake_exchange import AT_ONCE
from support.fake_ledger import ACCOUNT, KEY_INDEX, PLAIN_KEY, public_key_of
from support.fake_venue import IDS
from support.live import Bench, PlainSigner, add_model, live_settings, prepared
from support.records import add_run, make_run
from support.venue import break_ledger_writer
from support.waiting import until

from trader.core.errors import (
    InternalError,
    InvalidInput,
    MarketDataError,
    NotFound,
    OrderUndecided,
    Precondition,
    StartError,
    Unavailable,
)
from trader.core.events import EventBus, MarketChecked, VenueDiffers
from trader.database.pool import Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.halts import HaltCause
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import ExitPlan, Order, OrderSide, OrderStatus, OrderType
from trader.exchange.halts import Halts
from trader.exchange.ledger_writer import LedgerWriter
from trader.live.drift import DriftRecorder
from trader.live.exchange import LiveExchange
from trader.live.ledger import LiveContext
from trader.live.lighter.account import LighterAccounts
from trader.live.lighter.orders import LighterOrders

D = Decimal
PLAN = ExitPlan(stop=D("90000.04"), target=D(99000))
LAG_S = 13
"""After this time, what the venue does not show is not merely late."""


# Orders


async def test_an_order_is_booked_with_the_venues_fills_and_fees(bench: Bench) -> None:
    answer = await bench.buy("0.25", leverage=D(5), client_order_id="one")
    assert (answer.status, answer.total_quantity, answer.average_price) == (OrderStatus.FILLED, D("0.25"), D(94000))
    assert answer.total_fees == D("0.25") * 94000 * 280 / 1_000_000
    assert [fill.quantity for fill in answer.fills] == [D("0.1250"), D("0.1250")]
    assert bench.account().positions["BTC"].leverage == 5
    await bench.reconcile()
    assert await bench.buy("0.25", leverage=D(5), client_order_id="one") == answer
    assert len(bench.venue.orders) == 1


async def test_an_order_that_cannot_be_signed_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "the venue's SDK does not sign this: OrderExpiry is invalid"

    def refuse(*_: object, **__: object) -> None:
        raise StartError(why)

    with monkeypatch.context() as patched:
        patched.setattr(PlainSigner, "create_orders", refuse)
        answer = await bench.buy("0.25", leverage=D(5), exit_plan=PLAN, client_order_id="one")
    assert (answer.status, answer.reason) == (OrderStatus.REJECTED, why)
    await bench.reconcile()
    assert (await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)).status is OrderStatus.FILLED


async def test_an_order_whose_outcome_cannot_be_asked_for_without_a_token_is_not_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: PlainSigner) -> str:
        if bench.venue.sent:
            raise StartError("the venue's SDK created no token")
        return ""

    with monkeypatch.context() as patched:
        patched.setattr(PlainSigner, "authorization", refuse)
        with pytest.raises(StartError, match="created no token"):
            await bench.buy("0.25", leverage=D(5), client_order_id="one")
    await bench.reconcile()
    assert bench.account().positions["BTC"].quantity == D("0.25")
    assert (await bench.buy("0.25", leverage=D(5), client_order_id="one")).status is OrderStatus.FILLED
    assert len(bench.venue.orders) == 1


async def test_orders_are_judged_by_the_fees_of_the_account_tier(bench: Bench) -> None:
    """The settings have no fees; the tier pays 2.8 basis points, which the margin left by this order cannot cover."""
    assert bench.exchange.rules.taker_rate == 0
    refused = await bench.buy("2.127", leverage=D(20))
    assert refused.status is OrderStatus.REJECTED
    assert "with its fees" in (refused.reason or "")
    assert (await bench.buy("2.1", leverage=D(20))).status is OrderStatus.FILLED


async def test_a_part_that_the_venue_did_not_fill_is_not_booked(bench: Bench) -> None:
    bench.venue.fill_share = D("0.4")
    answer = await bench.sell("0.25", leverage=D(5))
    assert (answer.status, answer.total_quantity) == (OrderStatus.PARTIAL, D("0.1"))
    assert answer.reason == "the venue ended the rest: canceled-too-much-slippage"
    await bench.agree()


async def test_a_refusal_of_the_venue_is_an_answer(bench: Bench) -> None:
    bench.venue.refusal = (21739, "not enough margin to create the order")
    answer = await bench.buy("0.25", leverage=D(5), client_order_id="x")
    assert answer.status is OrderStatus.REJECTED
    assert "not enough margin" in (answer.reason or "")
    bench.venue.refusal = None
    assert await bench.buy("0.25", leverage=D(5), client_order_id="x") == answer
    assert bench.venue.orders == {}
    await bench.agree()


async def test_orders_refused_by_the_rules_are_never_sent(bench: Bench) -> None:
    for more, reason in (
        ({"quantity": "50"}, "insufficient margin"),
        ({"quantity": "0.0001"}, "below the minimum"),
        ({"quantity": "0.1", "exit_plan": ExitPlan(stop=D(95000))}, "the stop 95000"),
        ({"quantity": "0.1", "reduce_only": True}, "nothing to reduce"),
    ):
        answer = await bench.buy(**{"leverage": D(2), **more})  # type: ignore[arg-type]
        assert answer.status is OrderStatus.REJECTED
        assert reason in (answer.reason or "")
    await bench.clock.advance(timedelta(seconds=31))
    assert "too old to trade on" in ((await bench.buy("0.1")).reason or "")
    assert bench.venue.sent == []


async def test_a_limit_order_rests_and_is_booked_by_difference(bench: Bench) -> None:
    answer = await bench.buy("0.4", type=OrderType.LIMIT, limit_price=D("93000.07"), leverage=D(10))
    assert answer.status is OrderStatus.RESTING
    await bench.agree()
    bench.venue.fill_share = D("0.25")
    await bench.move({"BTC": "92990.0"})
    assert (bench.account().positions["BTC"].quantity, bench.account().resting[0].remaining) == (D("0.1"), D("0.3"))
    await bench.agree()
    bench.venue.fill_share = D(1)
    await bench.move({"BTC": "92000.0"})
    await bench.agree()
    position = bench.account().positions["BTC"]
    assert (position.quantity, position.entry_price, bench.account().resting) == (D("0.4"), D(93000), ())
    assert bench.account().fees == D("0.4") * 93000 * 40 / 1_000_000, "a maker's fee"


async def test_a_makers_rebate_is_booked_as_a_negative_fee(bench: Bench) -> None:
    bench.venue.maker_fee = -30
    await bench.buy("0.4", type=OrderType.LIMIT, limit_price=D(93000), leverage=D(10))
    await bench.move({"BTC": "92990.0"})
    await bench.agree()
    assert bench.account().fees == D("-1.116")
    bench.venue.liquidate("BTC", "-0.4")
    await bench.move({}, after_s=LAG_S)
    assert not bench.account().positions
    await bench.agree()


async def test_a_resting_order_is_canceled_at_the_venue(bench: Bench) -> None:
    answer = await bench.buy("0.4", type=OrderType.LIMIT, limit_price=D(93000), leverage=D(10))
    bench.venue.fill_share = D("0.25")
    await bench.see({"BTC": "93000.0"})
    ended = await bench.exchange.cancel_order("apex", str(answer.id))
    assert (ended.status, ended.total_quantity, ended.reason) == (
        OrderStatus.CANCELLED, D("0.1"), "cancelled by the caller",
    )  # fmt: skip
    await bench.agree()
    assert (await bench.exchange.cancel_order("apex", str(answer.id))).status is OrderStatus.CANCELLED
    with pytest.raises(NotFound):
        await bench.exchange.cancel_order("apex", "7d9b6a0e-0000-4000-8000-000000000000")


GONE = "the venue showed it once and no longer knows it"


@pytest.mark.parametrize(("filled", "refuses"), [("0", False), ("0.1", False), ("0.1", True)])
async def test_a_resting_order_that_the_venue_has_lost_is_booked_as_ended(
    bench: Bench, filled: str, refuses: bool
) -> None:
    bench.venue.refuses_idle_ends = refuses
    answer = await bench.buy("0.4", type=OrderType.LIMIT, limit_price=D(93000), leverage=D(10))
    bench.venue.fill_share = D(filled) / D("0.4")
    await bench.see({"BTC": "93000.0"})
    bench.venue.orders.clear()
    bench.venue.fill_share = D(1)
    await bench.move({}, after_s=LAG_S)
    await bench.agree()
    ended = await bench.exchange.cancel_order("apex", str(answer.id))
    assert (ended.status, ended.total_quantity, ended.reason) == (OrderStatus.CANCELLED, D(filled), GONE)
    assert (await bench.buy("0.1", leverage=D(5))).status is OrderStatus.FILLED


async def test_a_resting_order_that_is_merely_hidden_is_canceled_at_the_venue(bench: Bench) -> None:
    await bench.buy("0.4", type=OrderType.LIMIT, limit_price=D(93000), leverage=D(10))
    other = await bench.buy("0.4", type=OrderType.LIMIT, limit_price=D(92500), leverage=D(10))
    bench.venue.hidden.update(bench.venue.orders)
    await bench.see({}, after_s=LAG_S)
    ended = await bench.exchange.cancel_order("apex", str(other.id))
    assert (ended.status, ended.reason) == (OrderStatus.CANCELLED, "cancelled by the caller")
    await bench.reconcile()
    await bench.see({"BTC": "92000.0"})
    assert bench.venue.positions() == {}, "an order that the books have written off fills nothing"


@pytest.mark.parametrize("passed_s", [LAG_S, -3600])
async def test_a_lost_order_that_the_venue_cannot_cancel_now_waits(bench: Bench, passed_s: float) -> None:
    await bench.buy("0.4", type=OrderType.LIMIT, limit_price=D(93000), leverage=D(10))
    bench.venue.orders.clear()
    bench.clock.set_by(timedelta(seconds=passed_s))
    await bench.tell()
    bench.venue.send_faults = ["busy"] * 100
    await bench.synchronize()
    assert "is not open at the venue" in bench.exchange.troubles["apex"]
    assert len(bench.account().resting) == 1
    bench.venue.send_faults.clear()
    await bench.reconcile()


async def test_a_lost_order_with_hidden_trades_stops_new_orders_until_they_appear(bench: Bench) -> None:
    answer = await bench.buy("0.4", type=OrderType.LIMIT, limit_price=D(93000), leverage=D(10))
    bench.venue.fill_share = D("0.25")
    await bench.see({"BTC": "93000.0"})
    bench.venue.orders.clear()
    await bench.see({}, after_s=LAG_S)
    trades, bench.venue.ledger.trades = bench.venue.ledger.trades, []
    await bench.synchronize()
    assert "BTC: the venue holds a position that the books do not know" in bench.exchange.troubles["apex"]
    assert "only reducing is allowed" in ((await bench.buy("0.1", symbol="ETH", leverage=D(5))).reason or "")
    bench.venue.ledger.trades = trades
    await bench.reconcile()
    assert (await bench.exchange.cancel_order("apex", str(answer.id))).total_quantity == D("0.1")


async def test_a_trade_is_closed_with_its_fees(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5))
    await bench.see({"BTC": "95000.0"})
    answer = await bench.sell("0.25", reduce_only=True)
    assert answer.realized_pnl == 250
    assert bench.account().positions == {}
    await bench.agree()


# Lost answers


@pytest.mark.parametrize("fault", ["lose_after", "500_after", "nonsense", "lose_before", "late", "maintenance"])
async def test_a_lost_answer_is_neither_failure_nor_success(bench: Bench, fault: str) -> None:
    bench.venue.send_faults = [fault]
    answer = await bench.buy("0.25", leverage=D(5))
    bench.venue.deliver()
    happened = fault in ("lose_after", "500_after", "nonsense")
    assert answer.status is (OrderStatus.FILLED if happened else OrderStatus.REJECTED)
    await bench.reconcile()


async def test_a_market_with_an_undecided_order_is_not_traded(bench: Bench) -> None:
    bench.venue.send_faults = ["lose_after"]
    bench.venue.read_faults = ["ok", *["500"] * 5000]
    with pytest.raises(OrderUndecided, match="The outcome of this order at the venue is not known yet"):
        await bench.buy("0.25", leverage=D(5), client_order_id="lost")
    for reduce_only in (False, True):
        other = await bench.sell("0.1", reduce_only=reduce_only)
        assert (other.status, "is not decided yet" in (other.reason or "")) == (OrderStatus.REJECTED, True)
    with pytest.raises(Unavailable):
        await bench.buy("0.25", leverage=D(5), client_order_id="lost")
    other = await bench.buy("1", symbol="ETH", leverage=D(5))
    assert "an earlier order of BTC is not decided yet; nothing else opens" in (other.reason or "")
    assert "of BTC: its answer was lost" in bench.exchange.troubles["apex"]
    bench.venue.read_faults.clear()
    await bench.synchronize()
    assert (await bench.buy("1", symbol="ETH", leverage=D(5))).status is OrderStatus.FILLED
    assert bench.account().positions["BTC"].quantity == D("0.25")
    answer = await bench.buy("0.25", leverage=D(5), client_order_id="lost")
    assert (answer.status, answer.total_quantity) == (OrderStatus.FILLED, D("0.25"))
    await bench.agree()


async def test_an_order_that_never_appears_is_refused_only_after_its_expiry(bench: Bench) -> None:
    """The venue accepts no transactions at all, so the nonce of the lost one cannot be used up."""
    bench.venue.send_faults = ["lose_before"] * 1000
    with pytest.raises(Unavailable):
        await bench.buy("0.25", leverage=D(5), client_order_id="lost")
    for _ in range(3):
        await bench.synchronize()
        assert (await bench.sell("0.1")).status is OrderStatus.REJECTED
    await bench.clock.advance(timedelta(seconds=650))
    await bench.tell()
    await bench.synchronize()
    assert (await bench.sell("0.1")).reason == (
        "an earlier order of BTC is not decided yet; nothing else trades there until it is"
    )
    await bench.clock.advance(timedelta(seconds=20))
    await bench.tell()
    await bench.synchronize()
    bench.venue.send_faults.clear()
    answer = await bench.buy("0.25", leverage=D(5), client_order_id="lost")
    assert answer.status is OrderStatus.REJECTED
    assert "did not take it before it expired" in (answer.reason or "")
    await bench.agree()


@pytest.mark.parametrize("hours", [1, -1])
async def test_only_the_venues_clock_tells_that_an_order_has_expired(bench: Bench, hours: int) -> None:
    is_late = hours > 0
    bench.venue.send_faults = ["late" if is_late else "lose_before", *["lose_before"] * 1000]
    with pytest.raises(Unavailable):
        await bench.buy("0.25", leverage=D(5), client_order_id="lost")
    bench.clock.set_by(timedelta(hours=hours))
    bench.venue.ahead -= timedelta(hours=hours)
    await bench.synchronize()
    with pytest.raises(Unavailable):
        await bench.buy("0.25", leverage=D(5), client_order_id="lost")
    bench.venue.deliver()  # by its own clock the venue still takes it
    await bench.clock.advance(timedelta(minutes=16))
    await bench.tell()
    await bench.synchronize()
    bench.venue.send_faults.clear()
    answer = await bench.buy("0.25", leverage=D(5), client_order_id="lost")
    assert answer.status is (OrderStatus.FILLED if is_late else OrderStatus.REJECTED)
    await bench.agree()


async def test_trades_that_appear_late_or_twice_are_booked_once(bench: Bench) -> None:
    bench.venue.hides_trades, bench.venue.doubles_trades = 3, True
    answer = await bench.buy("0.25", leverage=D(5))
    assert answer.total_quantity == D("0.25")
    await bench.agree()
    bench.venue.hides_trades = 100
    with pytest.raises(Unavailable):
        await bench.sell("0.25", reduce_only=True, client_order_id="close")
    bench.venue.hides_trades = 0
    await bench.synchronize()
    assert (await bench.sell("0.25", reduce_only=True, client_order_id="close")).status is OrderStatus.FILLED
    await bench.agree()


async def test_a_booking_that_the_database_does_not_confirm_leaves_the_order_undecided(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(_: Posting) -> None:
        raise Unavailable("The database did not confirm it.")

    with monkeypatch.context() as patch:
        patch.setattr(bench.writer, "write", write)
        with pytest.raises(OrderUndecided):
            await bench.buy("0.25", leverage=D(5), client_order_id="lost")
    await bench.synchronize()
    assert (await bench.buy("0.25", leverage=D(5), client_order_id="lost")).status is OrderStatus.FILLED
    assert len(bench.venue.orders) == 1
    await bench.agree()


async def test_a_bug_in_the_ledger_writer_is_an_internal_error_and_does_not_resend_the_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_ledger_writer(patch)
        with pytest.raises(InternalError):
            await bench.buy("0.25", leverage=D(5), client_order_id="lost")
    await bench.synchronize()
    assert (await bench.buy("0.25", leverage=D(5), client_order_id="lost")).status is OrderStatus.FILLED
    assert len(bench.venue.orders) == 1
    await bench.agree()


async def test_the_next_process_resolves_the_orders_of_the_last_one(bench: Bench) -> None:
    bench.venue.send_faults = ["lose_after"]
    bench.venue.read_faults = ["ok", *["500"] * 20]
    with pytest.raises(Unavailable):
        await bench.buy("0.25", leverage=D(5), client_order_id="lost", exit_plan=PLAN)
    bench.venue.read_faults.clear()
    await bench.kill()
    await bench.start()
    await bench.tell()
    await bench.agree()
    again = await bench.buy("0.25", leverage=D(5), client_order_id="lost", exit_plan=PLAN)
    assert again.total_quantity == D("0.25")
    assert len(bench.venue.positions()) == 1


async def test_a_recorded_but_unsent_order_is_refused_by_the_next_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(*_: object) -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(LighterOrders, "place", die)
        await bench.buy("0.25", leverage=D(5), client_order_id="cut")
    await bench.kill()
    await bench.start()
    await bench.tell()
    answer = await bench.buy("0.25", leverage=D(5), client_order_id="cut")
    assert (answer.status, bench.venue.orders) == (OrderStatus.REJECTED, {})
    await bench.agree()


# Exit plans


async def test_stop_and_target_wait_at_the_venue_and_are_removed_with_the_position(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    await bench.agree()
    kinds = sorted((order.type, order.trigger, order.reduce_only) for order in bench.venue.ledger.standing(1))
    assert kinds == [("stop-loss", D("90000.0"), True), ("take-profit", D("99000.0"), True)]
    await bench.move({"BTC": "89990.0"})
    await bench.agree()
    assert bench.account().positions == {}
    async with bench.database.connection() as conn:
        row = await conn.fetchrow("SELECT close_reason, exit_notional FROM orders WHERE status = 'CLOSED'")
    assert row is not None
    assert tuple(row) == ("stop", D("0.25") * D("89990.0"))


async def test_a_position_that_grows_gets_protective_orders_of_its_size(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    await bench.buy("0.1", leverage=D(5))
    await bench.agree()
    await bench.sell("0.2", reduce_only=True)
    await bench.agree()
    assert {order.quantity for order in bench.venue.ledger.standing(1)} == {D("0.15")}


async def test_a_new_plan_is_placed_before_the_old_one_is_removed(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    before = len(bench.venue.sent)
    assert await bench.exchange.set_exit_plan("apex", "BTC", ExitPlan(stop=D(91000), target=D(99000))) is None
    assert [kind for kind, _ in bench.venue.sent[before:]] == [14, 15]
    assert bench.account().positions["BTC"].exit_plan.stop == 91000
    await bench.agree()


@pytest.mark.parametrize("refused", [2, 4])
async def test_a_plan_refused_by_the_venue_keeps_the_old_one(bench: Bench, refused: int) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    bench.venue.refused_types = {refused}
    refusal = await bench.exchange.set_exit_plan("apex", "BTC", ExitPlan(stop=D(91000), target=D(98000)))
    assert refusal is not None
    assert "invalid trigger price" in refusal
    assert bench.account().positions["BTC"].exit_plan == PLAN
    await bench.agree()


async def test_a_plan_with_an_unknown_outcome_keeps_the_old_one(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    bench.venue.send_faults = ["lose_after"]
    bench.venue.read_faults = ["ok", *["500"] * 20]
    refusal = await bench.exchange.set_exit_plan("apex", "BTC", ExitPlan(stop=D(91000)))
    assert refusal == "whether the venue accepted the stop is not known yet; the plan stays unchanged"
    assert bench.account().positions["BTC"].exit_plan == PLAN
    bench.venue.read_faults.clear()
    await bench.reconcile()


async def buy_and_lose_stops(bench: Bench) -> None:
    """Open a position whose stop and target the venue cancels and does not accept again."""
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    for order in bench.venue.ledger.standing(IDS["BTC"]):
        order.status = "canceled-liquidation"
    bench.venue.refused_types = {2, 4}


async def test_a_stop_refused_by_the_venue_is_watched_by_the_service(bench: Bench) -> None:
    await buy_and_lose_stops(bench)
    for _ in range(3):
        await bench.cycle(5)
    assert bench.venue.ledger.standing(1) == []
    for kind in ("stop", "target"):
        assert f"the {kind} of BTC is not at the venue; it is watched here" in bench.exchange.troubles["apex"]
    await bench.move({"BTC": "89990.0"})
    assert bench.account().positions == {}
    await bench.agree()


async def test_an_exit_refused_by_the_venue_is_retried_but_not_too_often(bench: Bench) -> None:
    await buy_and_lose_stops(bench)
    await bench.synchronize()
    bench.venue.refusal = (21700, "market is halted")
    before = len(bench.venue.sent)
    for _ in range(9):
        await bench.move({"BTC": "89990.0"})
    assert len([sent for kind, sent in bench.venue.sent[before:] if sent.get("Type") == 1]) == 1
    bench.venue.refusal = None
    await bench.move({}, after_s=10)
    assert bench.account().positions == {}
    await bench.agree()


async def test_a_stop_lost_by_the_venue_is_placed_again(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    (lost,) = (index for index, order in bench.venue.orders.items() if order.type == "stop-loss")
    del bench.venue.orders[lost]
    await bench.move({}, after_s=LAG_S)
    await bench.agree()
    assert len(bench.venue.ledger.standing(1)) == 2


async def test_a_partly_filled_stop_lost_by_the_venue_stays_fired(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=ExitPlan(stop=D(90000)))
    bench.venue.fill_share = D("0.4")
    await bench.see({"BTC": "90000.0"})
    bench.venue.orders.clear()
    bench.venue.fill_share = D(1)
    await bench.move({}, after_s=LAG_S)
    await bench.synchronize()
    assert bench.account().positions == {}
    await bench.agree()


@pytest.mark.parametrize(
    ("plan", "mid", "after_s", "reason"),
    [
        (ExitPlan(stop=D(80000), invalidation_price=D(93000)), "92999.0", 1, "invalidation"),
        (ExitPlan(stop=D(80000), time_exit=D(0)), "94000.0", 60, "time"),  # type: ignore[arg-type]
    ],
)
async def test_invalidation_and_time_exits_are_executed_by_the_service(
    bench: Bench, plan: ExitPlan, mid: str, after_s: int, reason: str
) -> None:
    if plan.time_exit is not None:
        plan = ExitPlan(stop=plan.stop, time_exit=bench.clock.now() + timedelta(seconds=30))
    await bench.buy("0.25", leverage=D(5), exit_plan=plan)
    await bench.move({"BTC": mid}, after_s=after_s)
    assert await bench.close_reasons() == [reason]
    assert bench.venue.sent[-1][0] == 15, "the stop went with its position"
    await bench.agree()


async def test_a_partly_filled_exit_continues(bench: Bench) -> None:
    await bench.buy("0.4", leverage=D(5), exit_plan=PLAN)
    bench.venue.fill_share = D("0.5")
    await bench.see({"BTC": "89990.0"})
    bench.venue.refused_types = {2}
    await bench.synchronize()
    bench.venue.fill_share = D(1)
    await bench.move({"BTC": "91000.0"})
    await bench.synchronize()
    assert bench.account().positions == {}, "a stop that fired stays fired, wherever the price goes"
    await bench.agree()


# Actions of the venue


async def test_funding_equals_the_venues_payments(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5))
    bench.funding_rate = "0.0003"
    await bench.see({}, after_s=3600)
    bench.venue.hides_fundings = True
    await bench.synchronize()
    assert bench.account().funding == 0, "missing trades are never invented"
    assert bench.exchange.troubles == {}
    bench.venue.hides_fundings = False
    await bench.synchronize()
    assert bench.account().funding == -D("0.25") * 94000 * D("0.0003")
    await bench.agree()
    await bench.reconcile()


async def test_funding_is_booked_before_the_position_closes(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5))
    bench.funding_rate = "0.0003"
    await bench.see({}, after_s=3600)
    await bench.sell("0.25", reduce_only=True)
    async with bench.database.connection() as conn:
        assert await conn.fetchval("SELECT funding FROM orders WHERE status = 'CLOSED'") == D("-7.05")
    await bench.agree()


async def test_a_liquidation_is_booked_from_the_venues_trades(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(20), exit_plan=PLAN)
    bench.venue.markets["BTC"].place(D("90500.0"))
    bench.venue.liquidate("BTC", "-0.25")
    await bench.synchronize()
    assert await bench.close_reasons() == ["liquidation"]
    await bench.agree()


async def test_a_position_opened_by_hand_is_booked_as_manual_and_protected_with_the_rest(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    bench.venue.trade_by_hand("BTC", "0.1")
    bench.venue.trade_by_hand("ETH", "-2")
    await bench.move({}, after_s=LAG_S)
    await bench.agree()
    assert {order.quantity for order in bench.venue.ledger.standing(IDS["BTC"])} == {D("0.35")}
    await bench.see({"ETH": "3310.00"})
    bench.venue.trade_by_hand("ETH", "2")
    await bench.move({}, after_s=LAG_S)
    await bench.agree()
    assert await bench.close_reasons() == ["manual"]


async def test_trades_that_are_shown_late_are_booked_however_often_they_were_sought(bench: Bench) -> None:
    bench.venue.trade_by_hand("ETH", "2")
    await bench.see({"ETH": "3310.00"})
    bench.venue.trade_by_hand("ETH", "-2")
    trades, bench.venue.ledger.trades = bench.venue.ledger.trades, []
    for _ in range(7):
        await bench.move({}, after_s=LAG_S)
    assert "the venue's balance differs" in bench.exchange.troubles["apex"]
    bench.venue.ledger.trades = trades
    await bench.reconcile()


async def test_trades_by_hand_are_booked_although_the_clock_was_ahead_at_the_last_agreement(bench: Bench) -> None:
    for span in (timedelta(hours=3), -timedelta(hours=3)):
        bench.clock.set_by(span)
        await bench.tell()
        if span > timedelta(0):
            await bench.synchronize()
    bench.venue.trade_by_hand("ETH", "0.2")
    await bench.move({}, after_s=LAG_S)
    await bench.agree()


async def test_funding_is_booked_although_the_clock_was_ahead(bench: Bench) -> None:
    bench.funding_rate = "0.0003"
    await bench.buy("0.25", leverage=D(5))
    for span in (timedelta(hours=3, minutes=20), -timedelta(hours=3, minutes=20)):
        bench.clock.set_by(span)
        bench.venue.ahead -= span
        await bench.tell()
        await bench.synchronize()
    await bench.move({"BTC": "95000.0"}, after_s=3600)
    await bench.agree()
    assert bench.account().funding != 0


async def test_a_position_that_no_trade_explains_stops_new_orders_until_it_is_gone(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5))
    bench.venue.trade_by_hand("ETH", "0.2")
    trades, bench.venue.ledger.trades = bench.venue.ledger.trades, []
    await bench.move({}, after_s=LAG_S)
    await bench.synchronize()
    told = [event.kind for event in bench.events if isinstance(event, VenueDiffers)]
    assert told == ["the venue holds a position that the books do not know"], "reported once"
    assert "ETH: the venue holds a position" in bench.exchange.troubles["apex"]
    opening = await bench.buy("0.1", leverage=D(5))
    assert "only reducing is allowed" in (opening.reason or "")
    bench.venue.ledger.trades = trades
    await bench.reconcile()
    assert (await bench.buy("0.1", leverage=D(5))).status is OrderStatus.FILLED


async def test_a_manual_reduction_of_a_position_is_booked(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    bench.venue.trade_by_hand("BTC", "-0.1")
    await bench.synchronize()
    assert bench.account().positions["BTC"].quantity == D("0.15")
    await bench.reconcile()


async def test_an_unexplained_balance_stops_new_orders(bench: Bench) -> None:
    bench.venue.ledger.deposit += 50
    await bench.synchronize()
    assert "the venue's balance differs from the books" in bench.exchange.troubles["apex"]
    bench.venue.ledger.deposit -= 50
    await bench.reconcile()


async def test_a_difference_stops_new_orders_also_while_nothing_can_be_asked_about_it(bench: Bench) -> None:
    await bench.buy("0.1", leverage=D(5))
    await bench.reconcile()
    bench.venue.ledger.deposit += 50
    bench.venue.failing = {"trades"}
    with pytest.raises(MarketDataError):
        await bench.synchronize()
    assert bench.exchange.troubles == {}, "what the venue shows may be older than the order"
    await bench.see({}, after_s=LAG_S)
    with pytest.raises(MarketDataError):
        await bench.synchronize()
    assert "the venue's balance differs from the books" in bench.exchange.troubles["apex"]
    bench.venue.ledger.deposit -= 50
    bench.venue.failing = set()
    await bench.reconcile()
    assert bench.exchange.troubles == {}


async def test_an_account_waits_seconds_for_the_venues_limit_and_not_as_long_as_its_start(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """It is locked meanwhile, so a longer wait would hold up its orders."""
    bench.venue_accounts.budget.per_minute = 0
    bench.bus.publish(MarketChecked(bench.clock.now()))
    await until(lambda: "a minute leaves nothing for this now" in caplog.text, within_s=20)


@pytest.mark.parametrize("moved", [5000, -5000])
async def test_money_in_and_out_is_the_capital_of_a_new_run_and_no_profit(bench: Bench, moved: int) -> None:
    await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    bench.venue.ledger.deposit += moved
    with pytest.raises(Precondition, match="ends without positions and orders"):
        await bench.exchange.reset_account("apex")
    await bench.see({"BTC": "94500.0"})
    await bench.sell("0.1", reduce_only=True)
    with pytest.raises(Precondition, match="seconds after the last trade"):
        await bench.exchange.reset_account("apex")
    await bench.move({}, after_s=13)
    gained = bench.account().cash - bench.account().run.initial_capital
    assert "the venue's balance differs" in bench.exchange.troubles["apex"]
    after = await bench.exchange.reset_account("apex")
    assert (after.run.number, after.cash) == (2, D("10000.25") + gained + moved)
    await bench.cycle(5)
    assert bench.exchange.troubles == {}
    await bench.buy("0.1", leverage=D(5), exit_plan=PLAN)
    await bench.agree()
    await bench.kill()
    await bench.start()
    await bench.agree()


async def test_an_impossible_position_stops_new_orders(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Every cycle of the price tracker synchronizes; an impossible report is an error, not a position."""
    bench.venue.positions_shown = [{"market_id": 1, "sign": 2, "position": "0.5", "avg_entry_price": "1"}]
    for failures in range(1, 4):
        bench.bus.publish(MarketChecked(bench.clock.now()))
        await until(lambda most=failures: caplog.text.count("the comparison with the venue failed") == most)  # type: ignore[misc]
    assert "a position of sign 2 and size 0.5 is impossible" in bench.exchange.troubles["apex"]
    assert "only reducing is allowed" in ((await bench.buy("0.1", leverage=D(5))).reason or "")
    bench.venue.positions_shown = None
    bench.bus.publish(MarketChecked(bench.clock.now()))
    await until(lambda: not bench.exchange.troubles)
    await bench.agree()


# Start


async def refused(bench: Bench, reason: str, **settings: str) -> None:
    """Assert that a start is refused for this reason."""
    with pytest.raises(StartError, match=reason):
        await bench.start(**settings)
    await bench.stop()


async def test_a_standby_shows_the_leaders_trades_and_sends_nothing(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    accounts = LighterAccounts(live_settings(bench.venue.url), make_signer=PlainSigner)
    events = EventBus()
    context = LiveContext(
        database=bench.database, market=bench.market, clock=bench.clock, settings=live_settings(bench.venue.url),
        accounts=Accounts(bench.database, LedgerWriter(bench.database), events), events=events, venue=accounts,
        halts=Halts(bench.database, bench.clock, events), drift=DriftRecorder(bench.database),
    )  # fmt: skip
    standby = LiveExchange(context)
    await standby.follow()
    assert standby.term is None
    assert standby.accounts["apex"].positions == bench.account().positions
    before = len(bench.venue.sent)
    with pytest.raises(Unavailable, match="standby"):
        await standby.place_orders(
            Order(account_id="apex", symbol="BTC", side=OrderSide.SELL, quantity=D("0.1"), reduce_only=True)
        )
    await standby.on_tick(bench.source.script[-1])
    events.publish(MarketChecked(bench.clock.now()))
    await standby.resign()
    await accounts.close()
    assert len(bench.venue.sent) == before


async def test_the_troubles_of_a_term_end_with_it(bench: Bench) -> None:
    await bench.buy("0.4", type=OrderType.LIMIT, limit_price=D(93000), leverage=D(10))
    bench.venue.fill_share = D("0.25")
    await bench.see({"BTC": "93000.0"})
    bench.venue.orders.clear()
    bench.venue.ledger.trades = []
    await bench.move({}, after_s=LAG_S)
    assert bench.exchange.troubles
    bench.exchange.suspend()
    await bench.exchange.resign()
    assert bench.exchange.troubles == {}, "the next leader reports them"


async def test_two_models_never_share_an_account(database: Database) -> None:
    async with prepared(database) as bench:
        await add_model(database, "one")
        await add_model(database, "two", ACCOUNT)
        await refused(bench, "one and two would trade the venue's account 7 together")
        await add_model(database, "two", 8)
        await add_model(database, "idle", active=False)
        bench.venue.open(8, "500")
        await bench.start()
        await bench.tell()
        assert (await bench.buy("0.01", account_id="two", leverage=D(5))).status is OrderStatus.FILLED
        assert bench.venue.ledgers[ACCOUNT].positions() == {}
        await bench.agree("two", 8)
        await bench.agree("one", ACCOUNT)
        assert bench.account("two").run.initial_capital == 500
        assert "idle" not in bench.exchange.accounts
        await bench.stop()


async def test_a_row_may_name_the_key_of_its_account(database: Database) -> None:
    async with prepared(database) as bench:
        await add_model(database, "apex")
        await add_model(database, "two", 8, key_variable="TWO_VENUE_API_KEY")
        bench.venue.open(8).keys = {KEY_INDEX: public_key_of("cd" * 40)}
        unset, wrong = (
            (dict[str, str](), "which is not set"),
            ({"TWO_VENUE_API_KEY": PLAIN_KEY}, "not the private part"),
        )
        for given, reason in (unset, wrong):
            await refused(bench, reason, **given)
        await bench.start(TWO_VENUE_API_KEY="cd" * 40)
        await bench.tell()
        assert (await bench.buy("0.01", account_id="two", leverage=D(5))).status is OrderStatus.FILLED
        await bench.stop()


async def test_a_new_account_with_positions_is_refused(database: Database) -> None:
    async with prepared(database) as bench:
        await add_model(database, "apex")
        bench.venue.event_lag_s = AT_ONCE  # traded some time ago
        bench.venue.trade_by_hand("BTC", "1")
        await refused(bench, "holds BTC already")


@pytest.mark.parametrize(
    ("keys", "mode", "reason"),
    [
        ({}, 0, "registered are none"),
        ({9: "0x12"}, 0, "no API key with index 4 for account 7; registered are 9"),
        ({KEY_INDEX: "0x12"}, 0, "not the private part of API key 4 of the venue's account 7"),
        (None, 1, "account 7 is in the unified mode"),
    ],
)
@pytest.mark.parametrize("is_new", [True, False])
async def test_an_account_is_traded_only_with_its_key_and_in_the_classic_mode(
    database: Database, keys: dict[int, str] | None, mode: int, reason: str, is_new: bool
) -> None:
    async with prepared(database) as bench:
        await add_model(database, "apex")
        if not is_new:
            await bench.start()
            await bench.stop()
        bench.venue.ledger.keys = bench.venue.ledger.keys if keys is None else keys
        bench.venue.ledger.trading_mode = mode
        await refused(bench, reason)
        assert bench.venue.sent == []


async def test_an_account_that_the_venue_does_not_have_is_refused_at_the_start(database: Database) -> None:
    async with prepared(database) as bench:
        await add_model(database, "apex", 4321)
        await refused(bench, "The venue has no account 4321")


async def test_an_account_with_paper_capital_is_not_traded_live(database: Database) -> None:
    async with prepared(database) as bench:
        await add_model(database, "apex")
        async with database.connection() as conn:
            await add_run(conn, "apex", make_run("apex", capital="10000"))
        await refused(bench, r"apex is open in this database with 10000, and .* has 10000\.25")


async def test_a_model_keeps_its_account(bench: Bench) -> None:
    await bench.stop()
    await add_model(bench.database, "apex", 8)
    bench.venue.open(8)
    await refused(bench, "The books of apex belong to the venue's account 7")
    await add_model(bench.database, "apex")
    await bench.start()


async def test_a_database_of_another_account_mode_or_venue_is_refused(bench: Bench, database: Database) -> None:
    await bench.stop()
    await refused(bench, "holds the orders of account 7 at http", VENUE_ACCOUNT_INDEX="9", LIVE_CONFIRM="9")
    async with database.connection() as conn:
        await conn.execute("UPDATE service_state SET venue_url = 'https://elsewhere.example'")
    await refused(bench, r"at https://elsewhere\.example")
    async with database.connection() as conn:
        await conn.execute(
            "UPDATE service_state SET trading_mode = 'simulated', venue_url = NULL, venue_account_index = NULL"
        )
    await refused(bench, "holds simulated orders; TRADING_MODE is live")
    async with database.connection() as conn:
        await conn.execute("DELETE FROM service_state")
    await bench.start()


async def test_a_restart_while_the_venue_is_unreachable_shows_everything_and_opens_nothing(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    await bench.kill()
    bench.venue.is_down = True
    await bench.start()
    await bench.tell()
    assert bench.account().positions["BTC"].quantity == D("0.25")
    assert bench.exchange.troubles == {"apex": "it has not been compared with the venue yet"}
    refusal = await bench.buy("0.1", leverage=D(5))
    assert "the venue cannot be reached now" in (refusal.reason or "")
    bench.venue.is_down = False
    await bench.reconcile()


async def test_a_halt_stops_opening_and_allows_closing(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5))
    await bench.halts.halt(None, HaltCause.OPERATOR, "strange prices", "somebody")
    assert "strange prices" in ((await bench.buy("0.1", leverage=D(5))).reason or "")
    assert (await bench.sell("0.25", reduce_only=True)).status is OrderStatus.FILLED
    await bench.agree()


async def test_an_operator_flattens_through_the_venue(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    await bench.buy("1", symbol="ETH", type=OrderType.LIMIT, limit_price=D(3000), leverage=D(5))
    async with bench.flattening() as operations:

        async def has_flattened() -> bool:
            await operations.poll()
            return bench.account().is_idle

        await until(has_flattened)
    assert await bench.close_reasons() == ["operator"]
    await bench.reconcile()


async def test_every_fill_is_compared_with_paper(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    await bench.move({"BTC": "89990.0"})
    async with bench.database.connection() as conn:
        drift = await conn.fetch("SELECT side, quantity, venue_price, paper_price FROM fill_drift ORDER BY sequence")
        assert await conn.fetchval("SELECT count(*) FROM fills") == len(drift) == 4
    assert [tuple(row) for row in drift] == [
        ("buy", D("0.125"), D(94000), D("94000.1")), ("buy", D("0.125"), D(94000), D("94000.1")),
        ("sell", D("0.125"), D("89990.0"), D("89989.9")), ("sell", D("0.125"), D("89990.0"), D("89989.9")),
    ]  # fmt: skip


async def test_a_stop_is_compared_with_paper_on_the_book_at_its_trigger(bench: Bench) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    bench.venue.is_down = True  # what fires is booked later
    await bench.see({"BTC": "89990.0"})
    bench.venue.is_down = False
    await bench.move({"BTC": "89500.0"})
    async with bench.database.connection() as conn:
        prices = await conn.fetch("SELECT DISTINCT paper_price FROM fill_drift WHERE side = 'sell'")
    assert [row["paper_price"] for row in prices] == [D("89989.9")]


async def test_a_pair_is_refused_since_no_venue_has_atomic_pairs(bench: Bench) -> None:
    before = len(bench.venue.sent)
    order = Order(account_id="apex", symbol="BTC", side=OrderSide.BUY, quantity=D("0.1"))
    with pytest.raises(InvalidInput, match="no pair of orders is atomic there; use single orders"):
        await bench.exchange.place_orders(order, order)
    assert len(bench.venue.sent) == before
