"""The guard: risk rules that every decision of an agent must pass before it becomes an order.

The functions are pure: they take the account and marks of one moment and return an approved order or a refusal. A
refusal states its rule in words and figures, for the record and for the model.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from trader.agents.domain.invocations import client_order_id
from trader.agents.domain.models import CYCLE
from trader.agents.domain.tools import (
    CancelOrder,
    Change,
    ClosePosition,
    CreatePosition,
    PlaceOrder,
    PlacePair,
    PlannedExit,
    UpdateExitPlan,
)
from trader.agents.domain.view import VariantLimits
from trader.core.clock import EPOCH, input_time, iso
from trader.core.money import ONE, ZERO, divide, format_decimal, from_number
from trader.exchange.domain.account import Account, Marks, equity, openings, opposing
from trader.exchange.domain.account_update import AccountUpdate
from trader.exchange.domain.ledger import ExchangeRules
from trader.exchange.domain.matching import Execution
from trader.exchange.domain.order_validation import MisplacedPrice, PastTime, TooMuch, check_plan, entry_mark
from trader.exchange.domain.orders import (
    CLOSING_SIDE,
    Cause,
    ExitPlan,
    Order,
    OrderContents,
    OrderSide,
    OrderType,
    PlanTarget,
    Side,
)
from trader.market.domain.markets import STALE_AFTER, canonical_symbol, untimely

STALE_DECISION: Final = "stale decision"
"""The rule that refuses a decision that comes too long after its view."""

UNLIMITED: Final = VariantLimits(
    leverage_max=1_000_000,
    position_notional_max=1_000_000,
    day_loss_max_percent=1_000_000,
    reversal_cycles=-1,
    decision_age_max_s=1_000_000_000,
    stop_required=False,
)
"""Limits that refuse nothing, so that only the rules of the exchange apply."""

OPENING_SIDE: Final = {Side.LONG: OrderSide.BUY, Side.SHORT: OrderSide.SELL}


class GuardRefusal(NamedTuple):
    """A decision that breaks a rule. `rule` is the rule's short name, `reason` a sentence with the figures."""

    rule: str
    reason: str


class Approved(OrderContents, frozen=True, kw_only=True, gc=False):
    """An order that complies with every rule: a market order unless it has a limit price.

    Without a `client_order_id` the order gets one derived from its call.
    """

    def order(self, account_id: str, invocation_id: UUID, number: int, place: int = 1) -> Order:
        """Return the order of call `number` of an invocation; `place` is its place in a pair."""
        own = {"client_order_id": self.client_order_id or client_order_id(invocation_id, number, place)}
        return Order(
            account_id=account_id,
            type=OrderType.MARKET if self.limit_price is None else OrderType.LIMIT,
            invocation_id=invocation_id,
            **msgspec.structs.asdict(self) | own,
        )


def orders_of_call(approved: Sequence[Approved], account_id: str, invocation_id: UUID, number: int) -> list[Order]:
    """Return the orders of call `number` of an invocation: one, or the two of a pair."""
    return [each.order(account_id, invocation_id, number, place) for place, each in enumerate(approved, 1)]


class LastTrade(NamedTuple):
    """The last trade in a market, including exits by the exchange: the side that it closed or took, and its time."""

    side: Side
    at: datetime


class RiskContext(msgspec.Struct, frozen=True, kw_only=True):
    """The state by which the guard judges a decision. `marks` and `quoted_at` hold every market that has a price.

    `leverage_max` has each market's limit. `day_opening_equity` is the equity at 00:00 UTC or at the start of the run,
    `day_lowest_equity` the lowest equity recorded since (None: nothing was recorded). `viewed_at` is the time of the
    view on which the decision was made (None: its age is not judged). `restriction` says why the model may only reduce
    positions, for example because its budget is spent.
    """

    now: datetime
    account: Account
    marks: Marks
    quoted_at: Mapping[str, datetime]
    leverage_max: Mapping[str, int]
    day_opening_equity: Decimal
    day_lowest_equity: Decimal | None
    last_trades: Mapping[str, LastTrade]
    viewed_at: datetime | None = None
    restriction: str | None = None

    @property
    def equity(self) -> Decimal:
        return equity(self.account, self.marks)

    def after(self, order: Approved) -> "RiskContext":
        """Return the context after a market order, as if all of it filled at the mark and without fees."""
        symbol, against = order.symbol, opposing(self.account, order.symbol, order.side)
        quantity = min(order.quantity, against) if order.reduce_only else order.quantity
        if not quantity:
            return self
        update = AccountUpdate(self.account, ExchangeRules({}, ZERO, ZERO), self.marks, self.now)
        update.execute(symbol, order.side, [Execution(self.marks[symbol], quantity)], Cause.RESET)  # which has no fees
        side = order.side.opens if quantity > against else self.account.positions[symbol].side
        trades = {**self.last_trades, symbol: LastTrade(side, self.now)}
        return msgspec.structs.replace(self, account=update.account(), last_trades=trades)

    def cycles_ago(self, symbol: str) -> int | None:
        """Return how many cycles ago the market was last traded: 0 in this cycle, 1 in the previous one.

        Cycles are counted on their fixed grid, so the time that a model takes to answer does not change the count.
        None without a trade, and after one of a clock that was ahead.
        """
        last = self.last_trades.get(symbol)
        cycles = -1 if last is None else (self.now - EPOCH) // CYCLE - (last.at - EPOCH) // CYCLE
        return cycles if cycles >= 0 else None


def is_halted(context: RiskContext, limits: VariantLimits) -> bool:
    """Return whether the day's loss has reached the limit at any time today; it stays reached until 00:00 UTC."""
    floor = context.day_opening_equity * (100 - limits.day_loss_max_percent) / 100
    lowest = context.equity
    if context.day_lowest_equity is not None:
        lowest = min(lowest, context.day_lowest_equity)
    return lowest <= floor


def judge(
    decision: Change, symbol: str, context: RiskContext, limits: VariantLimits
) -> Approved | list[Approved] | ExitPlan | CancelOrder | GuardRefusal:
    """Return the order, pair, exit plan or cancellation that a decision becomes, or why it is refused."""
    if isinstance(decision, CancelOrder):  # it only reduces risk, however old it is
        return decision
    return _stale_decision(context, limits) or _judge_timely(decision, symbol, context, limits)


def _judge_timely(
    decision: CreatePosition | ClosePosition | UpdateExitPlan | PlaceOrder | PlacePair,
    symbol: str,
    context: RiskContext,
    limits: VariantLimits,
) -> Approved | list[Approved] | ExitPlan | GuardRefusal:
    match decision:
        case CreatePosition():
            return judge_opening(decision, symbol, context, limits)
        case ClosePosition():
            return judge_closing(decision, symbol, context)
        case UpdateExitPlan():
            return judge_plan(decision, symbol, context, limits)
        case PlaceOrder():
            return judge_order(decision, symbol, context, limits)
        case PlacePair():
            return judge_pair(decision, context, limits)


def judge_opening(
    decision: CreatePosition, symbol: str, context: RiskContext, limits: VariantLimits
) -> Approved | GuardRefusal:
    """Return the order that opens, adds or reverses; a reversal closes the position and opens the quantity at once."""
    plan, quantity = _exit_plan(decision), from_number(decision.quantity)
    opening = _Opening(decision.side, quantity, decision.leverage, plan)
    refusal = _refusal_of_opening(opening, symbol, context, limits)
    if refusal is not None:
        return refusal
    held = context.account.positions.get(symbol)
    reversed_quantity = held.quantity if held is not None and held.side is not decision.side else ZERO
    return Approved(
        symbol=symbol,
        side=OPENING_SIDE[decision.side],
        quantity=quantity + reversed_quantity,
        leverage=from_number(decision.leverage),
        exit_plan=plan,
        confidence=from_number(decision.confidence),
    )


class _Opening(NamedTuple):
    """What an order opens: the side and the quantity, with leverage, exit plan and the limit of a limit order."""

    side: Side
    quantity: Decimal
    leverage: float
    plan: ExitPlan
    limit: Decimal | None = None


def _refusal_of_opening(
    opening: _Opening, symbol: str, context: RiskContext, limits: VariantLimits
) -> GuardRefusal | None:
    return (
        _restriction(context)
        or _no_fresh_price(symbol, context)
        or _day_loss(context, limits)
        or _leverage(opening.leverage, symbol, context, limits)
        or _plan(opening.plan, opening.side, context.marks[symbol], context.now, opening.limit)
        or _reversal(opening.side, symbol, context, limits)
        or _notional(opening, symbol, context, limits)
    )


def judge_closing(decision: ClosePosition, symbol: str, context: RiskContext) -> Approved | GuardRefusal:
    """Return the order that reduces a position; it is always allowed when there is one."""
    held = context.account.positions.get(symbol)
    if held is None:
        return _no_position(symbol, context)
    fraction = ONE if decision.fraction is None else from_number(decision.fraction)
    return Approved(symbol=symbol, side=CLOSING_SIDE[held.side], quantity=held.quantity * fraction, reduce_only=True)


def judge_plan(
    decision: UpdateExitPlan, symbol: str, context: RiskContext, limits: VariantLimits
) -> ExitPlan | GuardRefusal:
    """Return the position's exit plan with the changes of the decision."""
    held = context.account.positions.get(symbol)
    if held is None:
        return _no_position(symbol, context)
    changes = _exit_plan(decision)
    refusal = _plan(changes, held.side, context.marks[symbol], context.now)
    if refusal is not None:
        return refusal
    changed = {name: value for name, value in msgspec.structs.asdict(changes).items() if value not in (None, ())}
    plan = msgspec.structs.replace(held.exit_plan, **changed)
    if decision.targets == []:
        plan = msgspec.structs.replace(plan, targets=())
    if plan.stop is None and limits.stop_required:
        return GuardRefusal("stop", f"A stop is mandatory, and the {symbol} position has none: give one.")
    return plan


def judge_order(
    decision: PlaceOrder, symbol: str, context: RiskContext, limits: VariantLimits
) -> Approved | GuardRefusal:
    """Return the requested order: the part that may open is judged as an opening, the rest is always allowed.

    The position that a resting order would reduce now may be gone when it fills, so all of it may open.
    """
    order = order_of(decision, symbol)
    held = context.account.positions.get(symbol)
    is_opposed = held is not None and held.side is not decision.opens and order.limit_price is None
    closes = held.quantity if held is not None and is_opposed else ZERO
    if decision.reduce_only or order.quantity <= closes:
        return order if held is not None else _no_position(symbol, context)
    plan = order.exit_plan or ExitPlan()
    if plan.stop is None and limits.stop_required:
        return GuardRefusal("stop", "A stop is mandatory for an order that may open a position: give exitPlan.stop.")
    opening = _Opening(decision.opens, order.quantity - closes, decision.leverage or 1.0, plan, order.limit_price)
    return _refusal_of_opening(opening, symbol, context, limits) or order


def judge_pair(decision: PlacePair, context: RiskContext, limits: VariantLimits) -> list[Approved] | GuardRefusal:
    """Return the orders of a pair, of which the second is judged in the state after the first."""
    approved: list[Approved] = []
    for which, order in (("first", decision.first), ("second", decision.second)):
        verdict = judge_order(order, canonical_symbol(order.symbol), context, limits)
        if isinstance(verdict, GuardRefusal):
            return verdict._replace(reason=f"The {which} order of the pair: {verdict.reason}")
        approved.append(verdict)
        context = context.after(verdict)
    return approved


def order_of(decision: PlaceOrder, symbol: str) -> Approved:
    """Return the order that a call requests, before the guard judges it."""
    return Approved(
        symbol=symbol,
        side=OPENING_SIDE[decision.opens],
        quantity=from_number(decision.quantity),
        leverage=_decimal(decision.leverage),
        reduce_only=decision.reduce_only,
        post_only=decision.post_only,
        exit_plan=None if decision.exit_plan is None else _exit_plan(decision.exit_plan),
        confidence=_decimal(decision.confidence),
        limit_price=_decimal(decision.limit_price),
        client_order_id=decision.client_order_id,
    )


def _plan(
    plan: ExitPlan, side: Side, mark: Decimal, now: datetime, limit: Decimal | None = None
) -> GuardRefusal | None:
    """The exchange's own check of an exit plan, with the fields named as the model's tools name them."""
    match check_plan(plan, side, mark, now, limit):
        case None:
            return None
        case PastTime(time_exit):
            return GuardRefusal("timeExit", f"The timeExit {iso(time_exit)} is not in the future.")
        case TooMuch() as total:
            return GuardRefusal("targets", f"{total}.".capitalize())
        case MisplacedPrice(field, price, where, entry):
            name = ExitPlan.__struct_encode_fields__[ExitPlan.__struct_fields__.index(field)]
            return GuardRefusal(name, f"The {name} {format_decimal(price)} of a {side} must be {where} {entry}.")


def _stale_decision(context: RiskContext, limits: VariantLimits) -> GuardRefusal | None:
    if context.viewed_at is None:
        return None
    age_s = (context.now - context.viewed_at).total_seconds()
    if age_s <= limits.decision_age_max_s:
        return None
    return GuardRefusal(
        STALE_DECISION,
        f"The decision came {age_s:.0f} s after the view that it was made from; the limit is "
        f"{limits.decision_age_max_s} s.",
    )


def _restriction(context: RiskContext) -> GuardRefusal | None:
    return None if context.restriction is None else GuardRefusal("budget", context.restriction)


def _no_fresh_price(symbol: str, context: RiskContext) -> GuardRefusal | None:
    quoted_at = context.quoted_at.get(symbol)
    if quoted_at is None or symbol not in context.marks:
        return GuardRefusal("price", f"There is no price of {symbol} now.")
    if untimely(quoted_at, context.now) is None:
        return None
    age_s = (context.now - quoted_at).total_seconds()
    age = f"{age_s:.0f} s old" if age_s > 0 else f"{-age_s:.0f} s in the future, since the clock was set back"
    return GuardRefusal(
        "stale market",
        f"No new position while the last update of {symbol} is older than {STALE_AFTER.seconds} s; it is {age}.",
    )


def _day_loss(context: RiskContext, limits: VariantLimits) -> GuardRefusal | None:
    if not is_halted(context, limits):
        return None
    opening = context.day_opening_equity
    return GuardRefusal(
        "day loss",
        f"Only reducing is allowed until 00:00 UTC: the day's loss reached {limits.day_loss_max_percent} % of its "
        f"opening equity {opening:.2f} (equity now {context.equity:.2f}).",
    )


def _leverage(leverage: float, symbol: str, context: RiskContext, limits: VariantLimits) -> GuardRefusal | None:
    for allowed, whose in ((limits.leverage_max, "your variant"), (context.leverage_max[symbol], symbol)):
        if leverage > allowed:
            return GuardRefusal("leverage", f"Leverage {leverage:g} is above the {allowed} that {whose} allows.")
    return None


def _reversal(side: Side, symbol: str, context: RiskContext, limits: VariantLimits) -> GuardRefusal | None:
    last, cycles = context.last_trades.get(symbol), context.cycles_ago(symbol)
    held = context.account.positions.get(symbol)
    if last is None or cycles is None or cycles > limits.reversal_cycles:
        return None
    stood = held.side if held is not None else last.side
    if stood is side:
        return None
    return GuardRefusal(
        "reversal",
        f"No reversal of {symbol} within {limits.reversal_cycles} cycles of the last trade in it: "
        f"it was {stood} {cycles} cycle(s) ago.",
    )


def _notional(opening: _Opening, symbol: str, context: RiskContext, limits: VariantLimits) -> GuardRefusal | None:
    """Limit one position to n × equity, and all positions to max leverage × equity, at the marks and after this order.

    Resting orders, and this one if it waits, count with the notional that they would open at their limit prices.
    """
    own_equity, marks = context.equity, context.marks
    held = context.account.positions.get(symbol)
    position = opening.quantity * entry_mark(opening.side, marks[symbol], opening.limit)
    if held is not None and held.side is opening.side:
        position += held.notional(marks[symbol])
    waiting = {symbol: ZERO}
    for order, opens in openings(context.account):
        waiting[order.symbol] = waiting.get(order.symbol, ZERO) + opens * order.limit_price
    position += waiting.pop(symbol)
    others = sum(waiting.values(), ZERO)
    others += sum((p.notional(marks[p.symbol]) for p in context.account.positions.values() if p is not held), ZERO)
    for value, allowed, what in (
        (position, limits.position_notional_max, f"The {symbol} position"),
        (position + others, limits.leverage_max, "All positions together"),
    ):
        if value > allowed * own_equity:
            times = divide(value, own_equity) if own_equity > 0 else None
            return GuardRefusal(
                "notional",
                f"{what} would be worth {value:.2f}"
                + (f", {times:.2f} × the equity {own_equity:.2f}" if times is not None else ", with no equity left")
                + f"; the limit is {allowed} ×.",
            )
    return None


def _no_position(symbol: str, context: RiskContext) -> GuardRefusal:
    held = ", ".join(context.account.positions) or "none"
    return GuardRefusal("no position", f"You hold no position in {symbol}. Positions held: {held}.")


def _exit_plan(decision: CreatePosition | UpdateExitPlan | PlannedExit) -> ExitPlan:
    """Return the exit plan of a decision in the types of the books: decimals, and times in UTC."""
    return ExitPlan(
        stop=_decimal(decision.stop),
        target=_decimal(decision.target),
        invalidation=decision.invalidation,
        invalidation_price=_decimal(decision.invalidation_price),
        time_exit=None if decision.time_exit is None else input_time(decision.time_exit),
        trailing_distance=_decimal(decision.trailing_distance),
        targets=tuple(
            PlanTarget(price=from_number(target.price), fraction=from_number(target.fraction))
            for target in decision.targets or ()
        ),
    )


def _decimal(value: float | None) -> Decimal | None:
    return None if value is None else from_number(value)
