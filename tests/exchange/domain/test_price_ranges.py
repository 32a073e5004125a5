"""Price ranges: no tick within them affects an account that they leave unaffected."""

from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.books import RULES
from support.scripted import START, make_tick

from trader.exchange.domain.account import Account, Run, equity, last_boundary, maintenance
from trader.exchange.domain.ledger import row_id
from trader.exchange.domain.orders import ExitPlan, Order, OrderSide, OrderType, PlanTarget
from trader.exchange.domain.rules import place
from trader.exchange.domain.tick_rules import Moment, is_affected, is_unaffected, price_ranges
from trader.market.domain.markets import PLAIN_FUNDING_RATE

PRICES = {"BTC": 94000, "ETH": 3300}


Drawn = tuple[str, OrderSide, int, int | None, int | None, int | None, int | None, list[int]]
"""Market, side, leverage, stop, target and limit, trailing distance and targets."""


def moment_at(second: int, shifts: dict[str, int]) -> Moment:
    mids = {symbol: str(price + price * shifts[symbol] // 1000) for symbol, price in PRICES.items()}
    tick = make_tick(START + timedelta(seconds=second), mids)
    return Moment(tick.at, tick.quotes, {s: q.mark for s, q in tick.quotes.items()}, frozenset(tick.quotes))


def account_with(orders: list[Drawn]) -> Account:
    """An account after these orders at the first prices; plan distances and the limit are in permille of the price."""
    run = Run(id=row_id("a", 0), number=1, initial_capital=Decimal(10000), quote_currency="USDT", started_at=START)
    account = Account(id="a", run=run, sequence=0, changed_at=START)
    now = moment_at(0, dict.fromkeys(PRICES, 0))
    for symbol, side, leverage, stop, target, limit, trail, targets in orders:
        price, sign = Decimal(PRICES[symbol]), side.direction
        plan = ExitPlan(
            stop=None if stop is None else price * (1000 - sign * stop) / 1000,
            target=None if target is None else price * (1000 + sign * target) / 1000,
            trailing_distance=None if trail is None else price * trail / 1000,
            targets=tuple(
                PlanTarget(price=price * (1000 + sign * far) / 1000, fraction=Decimal("0.3")) for far in targets
            ),
        )
        order = Order(
            account_id="a",
            symbol=symbol,
            side=side,
            quantity=Decimal(3000 * leverage) / price,
            leverage=Decimal(leverage),
            exit_plan=plan if limit is None else None,
            type=OrderType.MARKET if limit is None else OrderType.LIMIT,
            limit_price=None if limit is None else price * (1000 - sign * limit) / 1000,
        )
        account = place(account, order, now, RULES, lambda _symbol, _hour: PLAIN_FUNDING_RATE).account
    return account


distances = st.none() | st.integers(1, 60)
orders = st.lists(
    st.tuples(
        st.sampled_from(list(PRICES)), st.sampled_from(OrderSide), st.sampled_from([1, 5, 20]), distances, distances,
        st.none() | st.integers(1, 40), distances, st.lists(st.integers(1, 60), max_size=3),
    ),
    max_size=4,
)  # fmt: skip
walks = st.lists(st.fixed_dictionaries({s: st.integers(-60, 60) for s in PRICES}), min_size=1, max_size=8)


@given(orders, walks, st.sampled_from([0, 1700, 3590]), st.none() | st.integers(0, 8))
def test_no_tick_within_price_ranges_affects_an_account_that_they_leave_unaffected(
    placed: list[Drawn],
    walk: list[dict[str, int]],
    start_s: int,
    ends: int | None,
) -> None:
    account = account_with(placed)
    ends_at = None if ends is None else START + timedelta(seconds=start_s + ends)
    markets = RULES.markets | {"ETH": replace(RULES.markets["ETH"], ends_at=ends_at)}
    rules = replace(RULES, markets=markets)
    moments = [moment_at(start_s + 1 + n, shifts) for n, shifts in enumerate(walk)]
    if is_unaffected(account, price_ranges(moments), rules):
        assert not any(is_affected(account, moment, rules) for moment in moments)


def test_a_quiet_minute_leaves_a_safe_position_unaffected() -> None:
    account = account_with(
        [("BTC", OrderSide.BUY, 1, 50, 50, None, 60, [40]), ("ETH", OrderSide.BUY, 1, None, None, 40, None, [])]
    )
    moments = [moment_at(1 + n, {"BTC": n % 5, "ETH": -n % 5}) for n in range(60)]
    assert is_unaffected(account, price_ranges(moments), RULES)
    fallen = [*moments, moment_at(61, {"BTC": -51, "ETH": 0})]
    assert not is_unaffected(account, price_ranges(fallen), RULES)


LONG, SHORT = OrderSide.BUY, OrderSide.SELL


@pytest.mark.parametrize(
    ("order", "reached", "missed"),
    [
        pytest.param(("BTC", LONG, 1, 10, None, None, None, []), -10, -9, id="stop of a long position"),
        pytest.param(("BTC", SHORT, 1, 10, None, None, None, []), 10, 9, id="stop of a short position"),
        pytest.param(("BTC", LONG, 1, None, 10, None, None, []), 10, 9, id="target of a long position"),
        pytest.param(("BTC", SHORT, 1, None, 10, None, None, []), -10, -9, id="target of a short position"),
        pytest.param(("BTC", LONG, 1, None, None, 10, None, []), -10, -9, id="limit of a bid"),
        pytest.param(("BTC", SHORT, 1, None, None, 10, None, []), 10, 9, id="limit of an ask"),
        pytest.param(("BTC", LONG, 1, None, None, None, None, [10, 20]), 10, 9, id="targets of a long position"),
        pytest.param(("BTC", SHORT, 1, None, None, None, None, [20, 10]), -10, -9, id="targets of a short position"),
        pytest.param(("BTC", LONG, 1, 12, None, None, 20, []), 9, 8, id="stop of a long position that follows"),
        pytest.param(("BTC", SHORT, 1, 12, None, None, 20, []), -9, -8, id="stop of a short position that follows"),
    ],
)
def test_a_price_that_is_just_reached_is_within_the_ranges(order: Drawn, reached: int, missed: int) -> None:
    account, rules = account_with([order]), replace(RULES, limit_fills="touch")
    assert account.positions or account.resting
    for shift, is_reached in ((reached, True), (missed, False)):
        moment = moment_at(1, {"BTC": shift, "ETH": 0})
        assert is_affected(account, moment, rules) is is_reached
        assert is_unaffected(account, price_ranges([moment]), rules) is not is_reached


@pytest.mark.parametrize(("side", "gain"), [(LONG, 9), (SHORT, -9)])
def test_the_best_mark_on_the_way_draws_a_stop_that_follows(side: OrderSide, gain: int) -> None:
    account = account_with([("BTC", side, 1, 12, None, None, 20, [])])
    there, back = moment_at(1, {"BTC": gain, "ETH": 0}), moment_at(2, {"BTC": 0, "ETH": 0})
    assert not is_unaffected(account, price_ranges([there, back]), RULES)
    assert is_unaffected(account, price_ranges([back]), RULES)


@pytest.mark.parametrize(("side", "shift"), [(LONG, -20), (SHORT, 20)])
def test_equity_that_just_equals_the_maintenance_margin_is_within_the_ranges(side: OrderSide, shift: int) -> None:
    account = account_with([("BTC", side, 20, None, None, None, None, [])])
    quiet, worst = (moment_at(second, {"BTC": change, "ETH": 0}) for second, change in ((1, 0), (2, shift)))
    spare = equity(account, worst.marks) - maintenance(account, worst.marks, RULES.markets)
    poor = replace(account, realized=account.realized - spare)
    assert is_affected(poor, worst, RULES)
    assert not is_unaffected(poor, price_ranges([worst]), RULES)
    assert not is_unaffected(poor, price_ranges([quiet, worst]), RULES)
    richer = replace(poor, realized=poor.realized + Decimal("0.00000001"))
    assert not is_affected(richer, worst, RULES)
    assert is_unaffected(richer, price_ranges([worst]), RULES)


def test_a_date_of_a_plan_and_an_hour_of_funding_that_are_just_reached_are_within_the_ranges() -> None:
    account, moment = (
        account_with([("BTC", LONG, 1, None, None, None, None, [])]),
        moment_at(3599, dict.fromkeys(PRICES, 0)),
    )
    (position,) = account.positions.values()
    hour, instant = last_boundary(moment.at, RULES.funding_hours("BTC")), timedelta(milliseconds=1)
    for funded_until, time_exit, is_reached in (
        (hour, moment.at + instant, False),
        (hour, moment.at, True),
        (hour - instant, moment.at + instant, True),
    ):
        held = replace(position, funded_until=funded_until, exit_plan=ExitPlan(time_exit=time_exit))
        changed = replace(account, positions={"BTC": held})
        assert is_affected(changed, moment, RULES) is is_reached
        assert is_unaffected(changed, price_ranges([moment]), RULES) is not is_reached
