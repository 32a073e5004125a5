"""Order validation: sizes and prices that a market accepts, and exit plans that would not fire at once."""

from datetime import datetime
from decimal import Decimal
from typing import Final, Literal, NamedTuple

from trader.core.money import ONE, ZERO, ceil_to, floor_to, format_decimal, round_to
from trader.exchange.domain.account import Account, opposing, promised_notional
from trader.exchange.domain.orders import ExitPlan, Order, OrderSide, Side
from trader.market.domain.markets import Market

NOTIONAL_MAX: Final = Decimal("1e12")
"""Largest notional of an order: all digits derived from it fit the decimal context, so the arithmetic is exact."""

_CENT: Final = Decimal("0.01")


def quantity_of(account: Account, order: Order, market: Market) -> Decimal:
    """Return the quantity to trade: rounded down to the lot, and at most the position if the order is reduce-only."""
    if order.reduce_only:
        position = opposing(account, order.symbol, order.side)
        return position if order.quantity >= position else floor_to(order.quantity, market.lot)
    return floor_to(order.quantity, market.lot)


def passive_limit(order: Order, market: Market) -> Decimal | None:
    """Return the limit price rounded to the tick on its passive side: down for a buy, up for a sell."""
    if order.limit_price is None:
        return None
    rounded = floor_to if order.side is OrderSide.BUY else ceil_to
    return rounded(order.limit_price, market.tick_at(order.limit_price))


def entry_mark(side: Side, mark: Decimal, limit: Decimal | None) -> Decimal:
    """Return the mark that an entry will see: the current one, or the limit if the order waits for it."""
    if limit is None:
        return mark
    return min(mark, limit) if side is Side.LONG else max(mark, limit)


def refusal_of_size(account: Account, order: Order, quantity: Decimal, price: Decimal, market: Market) -> str | None:
    """Return why an order is too small or too large, or None; an order that closes a position is never too small."""
    if price <= 0:
        limit, tick = format_decimal(order.limit_price or ZERO), format_decimal(market.tick)
        return f"the limit price {limit} is below one tick ({tick})"
    position = opposing(account, order.symbol, order.side) if order.reduce_only else ZERO
    if order.reduce_only and not position:
        return f"nothing to reduce: no {order.symbol} position that a {order.side} would reduce"
    closes = order.reduce_only and quantity == position
    if quantity < market.lot and not closes:
        asked, lot = format_decimal(order.quantity), format_decimal(market.lot)
        return f"the quantity {asked} is below one lot of {order.symbol} ({lot})"
    notional = quantity * price
    if notional < market.min_notional and not closes:
        return f"the notional {format_decimal(notional)} is below the minimum of {format_decimal(market.min_notional)}"
    if notional > NOTIONAL_MAX:
        return f"the notional is above the maximum of {format_decimal(NOTIONAL_MAX)}"
    return None


def refusal_of_leverage(after: Account, order: Order, mark: Decimal, market: Market) -> str | None:
    """Return why an order's leverage is too high for the position that it builds, or None.

    `after` is the account with the order's fills and its resting part. No leverage means 1.
    """
    leverage = order.leverage or ONE
    if not market.tiers or leverage <= market.tiers[-1].leverage_max:
        return None
    notional = promised_notional(after, order.symbol, order.side, mark)
    allowed = market.leverage_max_at(notional)
    if leverage <= allowed:
        return None
    return (
        f"the leverage {format_decimal(leverage)} is above {allowed}, the maximum of a {order.symbol} position of "
        f"{format_decimal(round_to(notional, _CENT))}"
    )


class MisplacedPrice(NamedTuple):
    """A price of an exit plan that would fire at once because it is not `where` of `entry`. `field` is its name."""

    field: str
    price: Decimal
    where: Literal["below", "above"]
    entry: str


class PastTime(NamedTuple):
    """A time exit that is not in the future."""

    time_exit: datetime


class TooMuch(NamedTuple):
    """Targets whose fractions add up to more than the position."""

    fractions: Decimal

    def __str__(self) -> str:
        return f"the fractions of the targets add up to {format_decimal(self.fractions)}; at most 1"


def check_plan(
    plan: ExitPlan, side: Side, mark: Decimal, at: datetime, limit: Decimal | None = None
) -> MisplacedPrice | PastTime | TooMuch | None:
    """Return the first field of an exit plan that would fire at once or makes no sense, or None if it can be set.

    `limit` is the price of the order that sets it: the plan begins at the mark at which that order fills.
    """
    entry = entry_mark(side, mark, limit)
    for field, price, is_protective in (
        ("stop", plan.stop, True),
        ("invalidation_price", plan.invalidation_price, True),
        ("target", plan.target, False),
        *(("target", target.price, False) for target in plan.targets if not target.quantity),  # others rest already
        ("trailing_distance", plan.trailing_distance, side is Side.LONG),  # below the price on either side
    ):
        where: Literal["below", "above"] = "below" if (side is Side.LONG) == is_protective else "above"
        if price is not None and (price >= entry if where == "below" else price <= entry):
            name = "mark" if entry == mark else "limit"
            return MisplacedPrice(field, price, where, f"the {name} {format_decimal(entry)}")
    if plan.time_exit is not None and plan.time_exit <= at:
        return PastTime(plan.time_exit)
    fractions = sum((target.fraction for target in plan.targets), ZERO)
    return TooMuch(fractions) if fractions > ONE else None


def refusal_of_targets(plan: ExitPlan | None, quantity: Decimal, market: Market) -> str | None:
    """Return why a market refuses the targets of a plan for a position of this quantity, or None."""
    for target in () if plan is None or quantity <= 0 else plan.targets:
        closes = quantity * target.fraction
        if target.fraction < ONE and (closes < market.lot or closes * target.price < market.min_notional):
            part = f"the target {format_decimal(target.price)} closes {format_decimal(closes)} {market.symbol}"
            least = f"one lot ({format_decimal(market.lot)}) or a notional of {format_decimal(market.min_notional)}"
            return f"{part}, less than {least}"
    return None


def refusal_of_plan(
    plan: ExitPlan | None, side: Side, mark: Decimal, at: datetime, limit: Decimal | None = None
) -> str | None:
    """Return in words why an exit plan cannot be set; None if it can, or if there is no plan."""
    match None if plan is None else check_plan(plan, side, mark, at, limit):
        case None:
            return None
        case TooMuch() as total:
            return str(total)
        case PastTime():
            return "the time exit has passed already"
        case MisplacedPrice(field, price, where, entry):
            name = field.replace("_", " ")
            return f"the {name} {format_decimal(price)} of a {side.lower()} must be {where} {entry}"
