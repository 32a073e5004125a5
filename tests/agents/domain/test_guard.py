"""The guard: each rule at its boundary, and no order beyond the limits for any decision."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.agents.domain.conversation import ToolRequest
from trader.agents.domain.guard import (
    Approved,
    GuardRefusal,
    LastTrade,
    RiskContext,
    is_halted,
    judge,
    judge_closing,
    judge_opening,
    judge_plan,
)
from trader.agents.domain.tools import (
    ARGUMENTS_MAX,
    TOOL_NAMES,
    TOOLS,
    BadCall,
    Change,
    ClosePosition,
    CreatePosition,
    PlaceOrder,
    PlacePair,
    PlannedExit,
    PlannedTarget,
    UpdateExitPlan,
    call_type,
    decode,
    tool_schemas,
)
from trader.agents.domain.view import VariantLimits
from trader.core.clock import EPOCH, INPUT_TIME_MAX
from trader.exchange.domain.account import Account, Position, Run
from trader.exchange.domain.ledger import row_id
from trader.exchange.domain.orders import ExitPlan, OrderSide, OrderType, PlanTarget, Side
from trader.market.domain.markets import MARKETS

NOW = datetime(2025, 1, 2, 12, tzinfo=UTC)
LIMITS = VariantLimits(leverage_max=5)
MARKS = {"BTC": Decimal(100_000), "ETH": Decimal(4_000), "SOL": Decimal(200)}


def held(symbol: str, side: Side, quantity: str, entry: str | None = None, **more: Any) -> Position:
    notional = Decimal(quantity) * (Decimal(entry) if entry else MARKS[symbol])
    fields: dict[str, Any] = {"exit_plan": ExitPlan(stop=MARKS[symbol] * (1 - side.direction * Decimal("0.1")))} | more
    return Position(
        id=row_id(symbol, 1), symbol=symbol, side=side, quantity=Decimal(quantity), entry_notional=notional,
        margin=notional / 5, opened_at=NOW, funded_until=NOW, **fields,
    )  # fmt: skip


def context(*positions: Position, capital: str = "10000", **more: Any) -> RiskContext:
    run = Run(
        id=row_id("a", 0), number=1, initial_capital=Decimal(capital), quote_currency="USDT", started_at=NOW
    )  # fmt: skip
    account = Account(id="a", run=run, sequence=1, changed_at=NOW, positions={p.symbol: p for p in positions})
    fields: dict[str, Any] = {
        "marks": MARKS,
        "quoted_at": dict.fromkeys(MARKS, NOW),
        "day_opening_equity": Decimal(capital),
        "day_lowest_equity": None,
        "last_trades": {},
    } | more
    return RiskContext(
        now=NOW, account=account, leverage_max={s: m.leverage_max for s, m in MARKETS.items()}, **fields
    )  # fmt: skip


def opening(**changes: Any) -> CreatePosition:
    fields: dict[str, Any] = {
        "symbol": "BTC", "side": Side.LONG, "quantity": 0.1, "leverage": 5.0, "stop": 99_000.0, "target": 103_000.0,
        "invalidation": "close under 99 000", "confidence": 60.0,
    } | changes  # fmt: skip
    return CreatePosition(**fields)


def refused(decision: CreatePosition, now: RiskContext, limits: VariantLimits = LIMITS) -> GuardRefusal:
    verdict = judge_opening(decision, "BTC", now, limits)
    assert isinstance(verdict, GuardRefusal), verdict
    return verdict


def approved(decision: CreatePosition, now: RiskContext, limits: VariantLimits = LIMITS) -> Approved:
    verdict = judge_opening(decision, "BTC", now, limits)
    assert isinstance(verdict, Approved), verdict
    return verdict


def test_a_valid_opening_passes_unchanged() -> None:
    order = approved(opening(confidence=61.5), context())
    assert order == Approved(
        symbol="BTC",
        side=OrderSide.BUY,
        quantity=Decimal("0.1"),
        leverage=Decimal(5),
        exit_plan=ExitPlan(stop=Decimal(99_000), target=Decimal(103_000), invalidation="close under 99 000"),
        confidence=Decimal("61.5"),
    )


def test_a_restricted_model_may_only_reduce() -> None:
    spent = context(held("BTC", Side.LONG, "0.1"), restriction="Only reducing is allowed: the budget is spent.")
    refused = judge(opening(), "BTC", spent, LIMITS)
    assert refused == GuardRefusal("budget", "Only reducing is allowed: the budget is spent.")
    assert isinstance(judge(ClosePosition(symbol="BTC"), "BTC", spent, LIMITS), Approved)
    assert isinstance(judge(UpdateExitPlan(symbol="BTC", stop=98_000.0), "BTC", spent, LIMITS), ExitPlan)


def test_leverage_of_the_variant_and_of_the_market() -> None:
    assert approved(opening(leverage=5.0), context()).leverage == 5
    verdict = refused(opening(leverage=5.01), context())
    assert verdict == GuardRefusal("leverage", "Leverage 5.01 is above the 5 that your variant allows.")
    wide = VariantLimits(leverage_max=50)
    assert refused(opening(leverage=41.0), context(), wide).reason == "Leverage 41 is above the 40 that BTC allows."


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"stop": 100_000.0}, "stop"),
        ({"stop": 100_001.0}, "stop"),
        ({"side": Side.SHORT, "stop": 99_999.0, "target": None}, "stop"),
        ({"target": 100_000.0}, "target"),
        ({"side": Side.SHORT, "stop": 101_000.0, "target": 100_500.0}, "target"),
        ({"invalidation_price": 100_500.0}, "invalidationPrice"),
        ({"time_exit": NOW}, "timeExit"),
    ],
)
def test_exit_plan_prices_lie_on_their_side_of_the_mark(changes: dict[str, Any], rule: str) -> None:
    assert refused(opening(**changes), context()).rule == rule


def test_times_of_any_zone_are_converted_to_utc() -> None:
    zone = timezone(timedelta(hours=5))
    later = (NOW + timedelta(hours=1, microseconds=1_500)).astimezone(zone)
    in_utc = NOW + timedelta(hours=1, milliseconds=1)
    plan = approved(opening(time_exit=later), context()).exit_plan
    assert plan is not None
    assert (plan.time_exit, plan.time_exit.tzinfo if plan.time_exit else None) == (in_utc, UTC)
    changed = judge_plan(
        UpdateExitPlan(symbol="BTC", time_exit=later), "BTC", context(held("BTC", Side.LONG, "0.1")), LIMITS
    )
    assert isinstance(changed, ExitPlan)
    assert (changed.time_exit, changed.time_exit.tzinfo if changed.time_exit else None) == (in_utc, UTC)
    passed = refused(opening(time_exit=NOW.astimezone(zone)), context())
    assert passed.reason == "The timeExit 2025-01-02T12:00:00.000Z is not in the future."


def test_the_tool_itself_requires_a_stop() -> None:
    arguments = msgspec.json.decode(msgspec.json.encode(opening()))
    for missing in ({"stop": None}, {}):
        changed = {key: value for key, value in arguments.items() if key != "stop"} | missing
        answer = decode(ToolRequest("1", "createPosition", msgspec.json.encode(changed).decode()))
        assert isinstance(answer, BadCall)
        assert "stop" in answer.error


def test_notional_of_one_position() -> None:
    assert approved(opening(quantity=0.5), context()).quantity == Decimal("0.5")
    verdict = refused(opening(quantity=0.50001), context())
    assert verdict.rule == "notional"
    assert "The BTC position would be worth 50001.00, 5.00 × the equity 10000.00; the limit is 5 ×." in verdict.reason


def test_adding_counts_the_held_position() -> None:
    now = context(held("BTC", Side.LONG, "0.4"))
    assert approved(opening(quantity=0.1), now).quantity == Decimal("0.1")
    assert refused(opening(quantity=0.11), now).rule == "notional"


def test_notional_of_all_positions() -> None:
    limits = VariantLimits(leverage_max=3)
    now = context(held("ETH", Side.SHORT, "5"))  # 20,000
    assert approved(opening(quantity=0.1, leverage=3.0), now, limits)
    verdict = refused(opening(quantity=0.101, leverage=3.0), now, limits)
    assert verdict.reason.startswith("All positions together would be worth 30100.00, 3.01 ×")


def test_no_equity_no_position() -> None:
    now = context(held("BTC", Side.SHORT, "1", entry="80000"), capital="15000", day_opening_equity=Decimal(-6000))
    assert now.equity < 0
    assert refused(opening(side=Side.SHORT, stop=110_000.0, target=None), now).rule in {"notional", "day loss"}


@pytest.mark.parametrize(("age_s", "passes"), [(30, True), (30.001, False), (-30, True), (-3600, False)])
def test_stale_market(age_s: float, passes: bool) -> None:
    now = context(quoted_at={"BTC": NOW - timedelta(seconds=age_s)})
    verdict = judge_opening(opening(), "BTC", now, LIMITS)
    assert isinstance(verdict, Approved) is passes
    if isinstance(verdict, GuardRefusal):
        assert verdict.rule == "stale market"


@pytest.mark.parametrize(
    "decision",
    [opening(), ClosePosition(symbol="BTC"), UpdateExitPlan(symbol="BTC", stop=95_000.0)],
)
def test_a_decision_is_judged_by_the_age_of_its_view(decision: Change) -> None:
    position = held("BTC", Side.LONG, "0.01")
    for age_s, passes in ((0, True), (120, True), (120.001, False), (600, False)):
        now = context(position, viewed_at=NOW - timedelta(seconds=age_s))
        verdict = judge(decision, "BTC", now, LIMITS)
        assert isinstance(verdict, GuardRefusal) != passes
        assert passes or (isinstance(verdict, GuardRefusal) and verdict.rule == "stale decision")
    slow = VariantLimits(leverage_max=5, decision_age_max_s=700)
    assert not isinstance(
        judge(decision, "BTC", context(position, viewed_at=NOW - timedelta(minutes=10)), slow), GuardRefusal
    )
    assert not isinstance(judge(decision, "BTC", context(position), LIMITS), GuardRefusal), (
        "records of before have no view"
    )


def test_no_price_at_all() -> None:
    assert refused(opening(), context(quoted_at={})).rule == "price"


def test_the_day_loss_rule_applies_until_midnight() -> None:
    calm = context(day_opening_equity=Decimal(11_000))
    assert not is_halted(calm, LIMITS)
    lost = context(day_opening_equity=Decimal("11111.2"))
    assert is_halted(lost, LIMITS)
    verdict = refused(opening(), lost)
    assert verdict.rule == "day loss"
    assert "reached 10 % of its opening equity 11111.20 (equity now 10000.00)" in verdict.reason
    recovered = context(day_opening_equity=Decimal(10_000), day_lowest_equity=Decimal(9_000))
    assert refused(opening(), recovered).rule == "day loss"
    assert approved(opening(), context(day_opening_equity=Decimal(10_000), day_lowest_equity=Decimal("9000.01")))


def test_day_loss_allows_reducing() -> None:
    now = context(held("BTC", Side.LONG, "0.3"), day_opening_equity=Decimal(20_000))
    verdict = judge_closing(ClosePosition(symbol="BTC", fraction=0.5), "BTC", now)
    assert verdict == Approved(symbol="BTC", side=OrderSide.SELL, quantity=Decimal("0.15"), reduce_only=True)


def test_reversal_closes_and_opens() -> None:
    now = context(held("BTC", Side.SHORT, "0.2"))
    order = approved(opening(quantity=0.1), now)
    assert (order.side, order.quantity, order.reduce_only) == (OrderSide.BUY, Decimal("0.3"), False)
    assert refused(opening(quantity=0.51), now).rule == "notional", "the size after the reversal counts"


@pytest.mark.parametrize(
    ("age_s", "passes"), [(0, False), (60, False), (180, False), (180.001, True), (240, True), (-3600, True)]
)
def test_no_reversal_within_three_cycles(age_s: float, passes: bool) -> None:
    last = {"BTC": LastTrade(Side.SHORT, NOW - timedelta(seconds=age_s))}
    for positions in ((held("BTC", Side.SHORT, "0.2"),), ()):  # closing first makes no difference
        verdict = judge_opening(opening(), "BTC", context(*positions, last_trades=last), LIMITS)
        assert isinstance(verdict, Approved) is passes, (positions, verdict)
        if isinstance(verdict, GuardRefusal):
            assert verdict.rule == "reversal"
            assert "within 3 cycles" in verdict.reason


@pytest.mark.parametrize(
    ("traded_s", "judged_s", "cycles"),
    [(5, 8, 0), (5, 59, 0), (59.9, 60, 1), (5, 70, 1), (5, 190, 3), (5, 239.9, 3), (59.9, 240, 4)],
)
def test_slow_invocations_do_not_change_the_count_of_cycles(traded_s: float, judged_s: float, cycles: int) -> None:
    last = {"BTC": LastTrade(Side.SHORT, NOW + timedelta(seconds=traded_s))}
    now = msgspec.structs.replace(context(last_trades=last), now=NOW + timedelta(seconds=judged_s))
    fresh = msgspec.structs.replace(now, quoted_at=dict.fromkeys(MARKS, now.now))
    assert fresh.cycles_ago("BTC") == cycles
    assert isinstance(judge_opening(opening(), "BTC", fresh, LIMITS), Approved) is (cycles > 3)


def test_adding_soon_after_a_trade_is_not_a_reversal() -> None:
    last = {"BTC": LastTrade(Side.LONG, NOW)}
    assert approved(opening(), context(held("BTC", Side.LONG, "0.1"), last_trades=last))
    assert approved(opening(), context(last_trades=last))


def test_closing_everything_or_nothing() -> None:
    now = context(held("ETH", Side.SHORT, "2.5"))
    assert judge_closing(ClosePosition(symbol="ETH"), "ETH", now) == Approved(
        symbol="ETH", side=OrderSide.BUY, quantity=Decimal("2.5"), reduce_only=True
    )
    verdict = judge_closing(ClosePosition(symbol="BTC"), "BTC", now)
    assert verdict == GuardRefusal("no position", "You hold no position in BTC. Positions held: ETH.")


def test_a_plan_update_changes_only_the_given_fields() -> None:
    plan = ExitPlan(stop=Decimal(95_000), target=Decimal(110_000), invalidation="words")
    now = context(held("BTC", Side.LONG, "0.1", exit_plan=plan))
    changed = judge_plan(UpdateExitPlan(symbol="BTC", stop=98_000.5), "BTC", now, LIMITS)
    assert changed == ExitPlan(stop=Decimal("98000.5"), target=Decimal(110_000), invalidation="words")
    assert isinstance(judge_plan(UpdateExitPlan(symbol="BTC", stop=100_000.0), "BTC", now, LIMITS), GuardRefusal)
    assert isinstance(judge_plan(UpdateExitPlan(symbol="ETH", stop=1.0), "ETH", now, LIMITS), GuardRefusal)


def test_plan_without_a_stop_is_refused() -> None:
    now = context(held("BTC", Side.LONG, "0.1", exit_plan=ExitPlan()))
    verdict = judge_plan(UpdateExitPlan(symbol="BTC", target=110_000.0), "BTC", now, LIMITS)
    assert isinstance(verdict, GuardRefusal)
    assert verdict.rule == "stop"


def test_targets_stay_unless_others_or_none_are_given() -> None:
    resting = PlanTarget(price=Decimal(110_000), fraction=Decimal("0.5"), quantity=Decimal("0.05"))
    plan = ExitPlan(stop=Decimal(90_000), trailing_distance=Decimal(5_000), targets=(resting,))
    now = context(held("BTC", Side.LONG, "0.1", exit_plan=plan))

    def changed(**fields: Any) -> ExitPlan | GuardRefusal:
        return judge_plan(UpdateExitPlan(symbol="BTC", **fields), "BTC", now, LIMITS)

    assert changed(stop=91_000.0) == msgspec.structs.replace(plan, stop=Decimal(91_000))
    assert changed(targets=[]) == msgspec.structs.replace(plan, targets=())
    other = PlanTarget(price=Decimal(120_000), fraction=Decimal(1))
    given = PlannedTarget(price=120_000.0, fraction=1.0)
    assert changed(targets=[given]) == msgspec.structs.replace(plan, targets=(other,))
    refusal = changed(targets=[given, given])
    assert refusal == GuardRefusal("targets", "The fractions of the targets add up to 2; at most 1.")
    refusal = changed(trailing_distance=1e6)
    assert isinstance(refusal, GuardRefusal)
    assert (refusal.rule, refusal.reason[:29]) == ("trailingDistance", "The trailingDistance 1000000 ")


def order(symbol: str, side: Literal["buy", "sell"], quantity: float, **more: Any) -> PlaceOrder:
    stop = {"buy": 1.0, "sell": 1e9}[side]
    return PlaceOrder(symbol=symbol, side=side, quantity=quantity, exit_plan=PlannedExit(stop=stop), **more)


@pytest.mark.parametrize(
    ("side", "limit", "plan", "why"),
    [
        ("buy", 95_000.0, {"stop": 94_000.0, "target": 97_000.0}, None),
        ("sell", 105_000.0, {"stop": 106_000.0, "target": 103_000.0}, None),
        ("buy", 95_000.0, {"stop": 97_000.0}, "The stop 97000 of a LONG must be below the limit 95000."),
        ("sell", 105_000.0, {"stop": 103_000.0}, "The stop 103000 of a SHORT must be above the limit 105000."),
        ("buy", 95_000.0, {"stop": 1.0, "target": 95e3}, "The target 95000 of a LONG must be above the limit 95000."),
        ("buy", 101_000.0, {"stop": 1.0, "target": 1e5}, "The target 100000 of a LONG must be above the mark 100000."),
    ],
)  # fmt: skip
def test_the_plan_of_an_order_is_judged_at_its_own_price(
    side: Literal["buy", "sell"], limit: float, plan: dict[str, Any], why: str | None
) -> None:
    decision = PlaceOrder(
        symbol="BTC", side=side, quantity=0.1, type=OrderType.LIMIT, limit_price=limit, exit_plan=PlannedExit(**plan)
    )
    verdict = judge(decision, "BTC", context(), LIMITS)
    assert (verdict.reason if isinstance(verdict, GuardRefusal) else None) == why


def test_the_notional_of_an_order_is_measured_at_its_own_price() -> None:
    def limit(side: Literal["buy", "sell"], price: float) -> PlaceOrder:
        return order("BTC", side, 0.5, leverage=5, type=OrderType.LIMIT, limit_price=price)

    limits = VariantLimits(leverage_max=5, position_notional_max=5)
    assert isinstance(judge(limit("buy", 99_000.0), "BTC", context(capital="9900"), limits), Approved)
    verdict = judge(limit("sell", 101_000.0), "BTC", context(), limits)
    assert isinstance(verdict, GuardRefusal)
    assert verdict.reason.startswith("The BTC position would be worth 50500.00, 5.05 × the equity")


def test_the_second_order_of_a_pair_is_judged_in_the_state_after_the_first() -> None:
    full = context(held("BTC", Side.LONG, "0.4"))
    opened = order("ETH", "buy", 5)
    alone = judge(opened, "ETH", full, LIMITS)
    assert isinstance(alone, GuardRefusal)
    closed = PlaceOrder(symbol="BTC", side="sell", quantity=9, reduce_only=True)
    verdict = judge(PlacePair(first=closed, second=opened), "BTC", full, LIMITS)
    assert isinstance(verdict, list)
    assert [(each.symbol, each.side, float(each.quantity)) for each in verdict] == [
        ("BTC", OrderSide.SELL, 9), ("ETH", OrderSide.BUY, 5),
    ]  # fmt: skip
    reversed_order = judge(PlacePair(first=opened, second=closed), "ETH", full, LIMITS)
    assert isinstance(reversed_order, GuardRefusal)
    assert reversed_order == alone._replace(reason=f"The first order of the pair: {alone.reason}")


@pytest.mark.parametrize(
    ("first", "second", "rule"),
    [
        (order("BTC", "buy", 0.1), order("ETH", "sell", 0.1, leverage=9), "leverage"),
        (order("BTC", "buy", 0.3), order("BTC", "buy", 0.3), "notional"),
        (order("BTC", "buy", 0.1), order("BTC", "sell", 0.2), "reversal"),
        (order("BTC", "buy", 0.1), PlaceOrder(symbol="ETH", side="buy", quantity=1, reduce_only=True), "no position"),
        (order("BTC", "buy", 0.1), PlaceOrder(symbol="ETH", side="buy", quantity=1), "stop"),
    ],
)
def test_a_refusal_names_the_second_order_of_a_pair(first: PlaceOrder, second: PlaceOrder, rule: str) -> None:
    verdict = judge(PlacePair(first=first, second=second), "BTC", context(), LIMITS)
    assert isinstance(verdict, GuardRefusal)
    assert (verdict.rule, verdict.reason.partition(": ")[0]) == (rule, "The second order of the pair")


prices = st.floats(min_value=1e-9, max_value=1e12, allow_nan=False)
hostile = st.builds(
    opening,
    side=st.sampled_from(Side),
    quantity=st.floats(min_value=5e-324, max_value=1e12),
    leverage=st.floats(min_value=1, max_value=100),
    stop=prices,
    target=st.none() | prices,
    invalidation_price=st.none() | prices,
    time_exit=st.none()
    | st.datetimes(EPOCH.replace(tzinfo=None), INPUT_TIME_MAX.replace(tzinfo=None), timezones=st.just(UTC)),
)
sizes = st.decimals(min_value="0.00001", max_value="2", places=5)
books = st.lists(
    st.builds(
        lambda symbol, side, size: held(symbol, side, str(size)),
        st.sampled_from(sorted(MARKS)),
        st.sampled_from(Side),
        sizes,
    ),
    max_size=3,
    unique_by=lambda p: p.symbol,
)


@given(
    hostile,
    books,
    st.decimals(min_value="-100", max_value="100000", places=2),
    st.integers(1, 10),
    st.integers(0, 400),
)
def test_no_order_exceeds_the_limits(
    decision: CreatePosition, positions: list[Position], capital: Decimal, leverage_max: int, age_s: int
) -> None:
    limits = VariantLimits(leverage_max=leverage_max)
    last = {"BTC": LastTrade(Side.SHORT, NOW - timedelta(seconds=age_s))}
    now = context(*positions, capital=str(capital), last_trades=last)
    verdict = judge_opening(decision, "BTC", now, limits)
    if isinstance(verdict, GuardRefusal):
        assert verdict.rule
        assert len(verdict.reason) < 1_000
        return
    after = {p.symbol: p.quantity * p.side.direction for p in positions}
    after["BTC"] = after.get("BTC", Decimal(0)) + verdict.quantity * verdict.side.direction
    worth = {symbol: abs(quantity) * MARKS[symbol] for symbol, quantity in after.items()}
    assert worth["BTC"] <= 5 * now.equity
    assert sum(worth.values()) <= leverage_max * now.equity
    assert verdict.leverage is not None
    assert verdict.leverage <= leverage_max
    assert verdict.exit_plan is not None
    assert verdict.exit_plan.stop is not None
    below = verdict.exit_plan.stop < MARKS["BTC"]
    assert below is (decision.side is Side.LONG)
    assert (after["BTC"] > 0) is (decision.side is Side.LONG), "it ends on the side that was asked for"
    if age_s <= 180 and decision.side is Side.LONG:
        assert any(p.symbol == "BTC" and p.side is Side.LONG for p in positions)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
fields = st.sampled_from(["symbol", "side", "quantity", "stop", "fraction", "interval", "reason", "timeExit"])


@given(
    st.sampled_from([*TOOLS, "nothing", ""]),
    st.text() | st.dictionaries(fields, json_values).map(lambda value: msgspec.json.encode(value).decode()),
)
def test_any_call_is_a_decision_or_an_explained_error(name: str, arguments: str) -> None:
    answer = decode(ToolRequest("1", name, arguments))
    assert isinstance(answer, (BadCall, *TOOLS.values()))
    assert call_type(ToolRequest("1", name, arguments), None if isinstance(answer, BadCall) else answer)


@pytest.mark.parametrize(
    "arguments",
    [
        "1" + "0" * 400, '{"symbol": "BTC", "fraction": 1' + "0" * 400 + "}", '{"symbol": "BTC", "fraction": 1e999}',
        "[" * 10_000, '{"symbol": "BTC", "fraction": NaN}', '"\\ud800"', " " * (ARGUMENTS_MAX + 1),
        '{"symbol": "BTC", "leverage": 3}', '{"symbol": "BTC", "fraction": "0.5"}', '{"symbol": "BTC", "fraction": 0}',
    ],
)  # fmt: skip
def test_bad_arguments_are_explained(arguments: str) -> None:
    answer = decode(ToolRequest("1", "closePosition", arguments))
    assert isinstance(answer, BadCall)
    assert answer.error


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"])
def test_a_time_outside_of_1970_to_2200_is_refused(moment: str) -> None:
    arguments = msgspec.json.decode(msgspec.json.encode(opening())) | {"timeExit": moment}
    answer = decode(ToolRequest("1", "createPosition", msgspec.json.encode(arguments).decode()))
    assert isinstance(answer, BadCall)
    assert "`timeExit`: expected a time from 1970-01-01 to 2200-01-01" in answer.error


def test_nul_characters_never_reach_a_decision() -> None:
    answer = decode(ToolRequest("1", "holding", '{"reason": "a\\u0000b"}'))
    assert answer == TOOLS["holding"](reason="ab")  # type: ignore[call-arg]


def test_schemas_are_strict_and_fit_the_structs() -> None:
    for schema in tool_schemas(("BTC", "DOGE")):
        function = schema["function"]
        parameters = function["parameters"]
        assert function["strict"] is True
        assert parameters["additionalProperties"] is False
        assert parameters["required"] == list(parameters["properties"])
        struct = TOOLS[function["name"]]
        assert TOOL_NAMES[struct] == function["name"]
        fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
        for name in ("clientOrderId", "tag"):  # a model's call has an id of its own, and says why
            fields.pop(name, None)
        assert list(parameters["properties"]) == [*fields]
        for name, described in parameters["properties"].items():
            if name == "symbol":
                assert described == {"type": "string", "enum": ["BTC", "DOGE"]}
                continue
            assert described.get("description"), name
            assert described.keys() <= {"type", "enum", "anyOf", "description", "items"}
            nullable = any(option == {"type": "null"} for option in described.get("anyOf", ()))
            assert nullable is (fields[name].default is None), "what may be absent is nullable, as strict schemas need"
            assert all(map(is_closed, objects_in(described)))


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects within a schema."""
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for each in schema.values():
            yield from objects_in(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from objects_in(each)


def is_closed(schema: dict[str, Any]) -> bool:
    return schema["additionalProperties"] is False and schema["required"] == list(schema["properties"])


def test_strict_calls_decode_with_nulls_for_omitted_fields() -> None:
    arguments = msgspec.json.decode(msgspec.json.encode(opening(target=None)))
    assert arguments["target"] is None
    decoded = decode(ToolRequest("1", "createPosition", msgspec.json.encode(arguments).decode()))
    assert decoded == opening(target=None)
