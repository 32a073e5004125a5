"""Whether an order and its exit plan are let in: sizes, prices and times as a market takes them."""

from datetime import datetime
from decimal import Decimal

from trader.domain.exchange.account import Account, opposing
from trader.domain.exchange.orders import ExitPlan, Order, OrderSide, Side
from trader.domain.market.markets import Market
from trader.domain.money import ZERO, ceil_to, floor_to, format_decimal


def quantity_of(account: Account, order: Order, market: Market) -> Decimal:
    """The quantity that trades: down to the lot, and to the position when the order is reduce-only."""
    if order.reduce_only:
        position = opposing(account, order.symbol, order.side)
        return position if order.quantity >= position else floor_to(order.quantity, market.lot)
    return floor_to(order.quantity, market.lot)


def passive_limit(order: Order, market: Market) -> Decimal | None:
    """The limit price on the tick of its passive side: down for a buy, up for a sell."""
    if order.limit_price is None:
        return None
    rounded = floor_to if order.side is OrderSide.BUY else ceil_to
    return rounded(order.limit_price, market.tick)


def entry_mark(side: OrderSide, mark: Decimal, limit: Decimal | None) -> Decimal:
    """The mark that an entry will see: that of now, or the limit when the order waits for it."""
    if limit is None:
        return mark
    return min(mark, limit) if side is OrderSide.BUY else max(mark, limit)


def refusal_of_size(account: Account, order: Order, quantity: Decimal, price: Decimal, market: Market) -> str | None:
    """Why an order is too small to trade; one that closes a whole position never is."""
    if price <= 0:
        limit, tick = format_decimal(order.limit_price or ZERO), format_decimal(market.tick)
        return f"the limit price {limit} is below one tick ({tick})"
    if order.reduce_only:
        position = opposing(account, order.symbol, order.side)
        if not position:
            return f"nothing to reduce: no {order.symbol} position that a {order.side} would reduce"
        if quantity == position:
            return None
    if quantity < market.lot:
        asked, lot = format_decimal(order.quantity), format_decimal(market.lot)
        return f"the quantity {asked} is below one lot of {order.symbol} ({lot})"
    notional = quantity * price
    if notional < market.min_notional:
        return f"the notional {format_decimal(notional)} is below the minimum of {format_decimal(market.min_notional)}"
    return None


def refusal_of_plan(plan: ExitPlan | None, side: Side, mark: Decimal, at: datetime) -> str | None:
    """Why an exit plan cannot be set: a price on the side where it would fire at once, or a time that has passed."""
    if plan is None:
        return None
    for name, price, protects in (
        ("stop", plan.stop, True),
        ("invalidation price", plan.invalidation_price, True),
        ("target", plan.target, False),
    ):
        if price is None:
            continue
        must_be_below = (side is Side.LONG) == protects
        if price >= mark if must_be_below else price <= mark:
            where = "below" if must_be_below else "above"
            shown = format_decimal(price)
            return f"the {name} {shown} of a {side.lower()} must be {where} the mark {format_decimal(mark)}"
    if plan.time_exit is not None and plan.time_exit <= at:
        return "the time exit has passed already"
    return None
