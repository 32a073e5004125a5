"""Orders as sent to a venue: market and limit orders of callers, and the protective orders of exit plans.

A protective order is a stop or target that waits at the venue for its trigger price, reduce-only, for a whole position,
or the limit of one of several targets, for a part of it.
"""

from collections.abc import Iterable
from decimal import Decimal
from typing import Final

import msgspec

from trader.core.money import ONE, ceil_to, floor_to, round_to
from trader.exchange.domain.account import Account, Position
from trader.exchange.domain.halts import may_open
from trader.exchange.domain.order_validation import passive_limit, quantity_of
from trader.exchange.domain.orders import CLOSING_SIDE, Cause, ExitPlan, Order, OrderSide, OrderType
from trader.exchange.domain.venue_orders import SentOrder, VenueOrder, VenueOrderType
from trader.market.domain.markets import Market, Quote

OPENING_SLIPPAGE: Final = Decimal("0.01")
CLOSING_SLIPPAGE: Final = Decimal("0.045")
"""How much worse than the current price a market order may fill, as a fraction of that price.

Venues allow 5 % from their own mark, which moves while the order is on its way.
"""

TRIGGER_SLIPPAGE: Final = Decimal("0.05")
"""The same for a stop or target and its trigger, which does not move."""

CAUSES: Final = {
    VenueOrderType.STOP: Cause.STOP,
    VenueOrderType.TARGET: Cause.TARGET,
    VenueOrderType.LIMIT: Cause.TARGET,
}
"""The cause of the fills of each type of protective order."""


class ProtectiveTerms(msgspec.Struct, frozen=True):
    """What distinguishes one protective order of a market from another. The trigger of a limit is its price."""

    symbol: str
    type: VenueOrderType
    side: OrderSide
    quantity: Decimal
    trigger: Decimal


def venue_order(account: Account, order: Order, market: Market, quote: Quote) -> VenueOrder:
    """Return the order to send for a caller's order at this quote, without its client index."""
    is_limit = order.type is OrderType.LIMIT
    limit = passive_limit(order, market) if is_limit else None
    price = reachable_price(order.side, quote, closes=order.reduce_only, market=market) if limit is None else limit
    return VenueOrder(
        client_index=0,
        symbol=order.symbol,
        side=order.side,
        type=VenueOrderType.LIMIT if is_limit else VenueOrderType.MARKET,
        quantity=quantity_of(account, order, market),
        price=price,
        # Accepted because it reduces the position; if that is gone at the venue meanwhile, it must open nothing.
        reduce_only=not may_open(account, order),
        post_only=order.post_only,
    )


def protective_order(terms: ProtectiveTerms, market: Market) -> VenueOrder:
    """Return the order to send for a stop or target, without its client index."""
    if terms.type is VenueOrderType.LIMIT:
        given = {**msgspec.structs.asdict(terms), "trigger": None}
        return VenueOrder(**given, client_index=0, price=terms.trigger, reduce_only=True)
    price = worst_price(terms.side, terms.trigger, TRIGGER_SLIPPAGE, market)
    return VenueOrder(**msgspec.structs.asdict(terms), client_index=0, price=price, reduce_only=True)


def protection_of(account: Account, order: Order, quantity: Decimal, market: Market) -> list[VenueOrder]:
    """Return the stop and target to send with an order that may open: those of the plan that its position will have."""
    held, plan = account.positions.get(order.symbol), order.exit_plan
    if plan is None and held is not None and order.side.opens is held.side:
        plan = held.exit_plan
    if plan is None:
        return []
    terms = terms_of(order.symbol, CLOSING_SIDE[order.side.opens], quantity, plan, market)
    return [protective_order(each, market) for each in terms]


def terms_of_plan(position: Position, plan: ExitPlan, market: Market) -> list[ProtectiveTerms]:
    """Return the terms for the plan of a position, its several targets included."""
    symbol, side = position.symbol, CLOSING_SIDE[position.side]
    limits = [
        ProtectiveTerms(symbol, VenueOrderType.LIMIT, side, target.quantity, target.price) for target in plan.targets
    ]
    return terms_of(symbol, side, position.quantity, plan, market) + limits


def terms_of(symbol: str, side: OrderSide, quantity: Decimal, plan: ExitPlan, market: Market) -> list[ProtectiveTerms]:
    """Return the terms for a plan, stop first. Triggers are rounded to the tick; those below one tick are omitted."""
    terms = []
    for kind, price in ((VenueOrderType.STOP, plan.stop), (VenueOrderType.TARGET, plan.target)):
        trigger = None if price is None else round_to(price, market.tick_at(price))
        if trigger:
            terms.append(ProtectiveTerms(symbol, kind, side, quantity, trigger))
    return terms


def terms_of_account(account: Account, markets: dict[str, Market], busy: Iterable[str] = ()) -> list[ProtectiveTerms]:
    """Return the terms for every position, except positions that are closing or in `busy` markets."""
    skipped = frozenset(busy)
    return [
        terms
        for symbol, position in account.positions.items()
        if symbol not in skipped and position.closing is None
        for terms in terms_of_plan(position, position.exit_plan, markets[symbol])
    ]


def terms_of_sent(sent: SentOrder) -> ProtectiveTerms:
    """Return the terms of a protective order that was sent; those of a limit have what it has not filled yet."""
    order = sent.order
    if order.trigger is None:
        return ProtectiveTerms(order.symbol, order.type, order.side, order.quantity - sent.filled, order.price)
    return msgspec.convert(order, ProtectiveTerms, from_attributes=True)


def worst_price(side: OrderSide, price: Decimal, slippage: Decimal, market: Market) -> Decimal:
    """Return the worst price that an order accepts: at least one tick, and never more than the slippage away.

    Venues refuse a price that is further from the market, even by a part of a tick.
    """
    if side is OrderSide.BUY:
        worst = price * (ONE + slippage)
        return max(market.tick, floor_to(worst, market.tick_at(worst)))
    worst = price * (ONE - slippage)
    return ceil_to(worst, market.tick_at(worst))


def reachable_price(side: OrderSide, quote: Quote, *, closes: bool, market: Market) -> Decimal:
    """Return the worst price of a market order sent at this quote, from the stricter of best price and mark."""
    slippage = CLOSING_SLIPPAGE if closes else OPENING_SLIPPAGE
    if side is OrderSide.BUY:
        limit = worst_price(side, min(quote.ask, quote.mark), CLOSING_SLIPPAGE, market)
        return min(limit, worst_price(side, quote.ask, slippage, market))
    limit = worst_price(side, max(quote.bid, quote.mark), CLOSING_SLIPPAGE, market)
    return max(limit, worst_price(side, quote.bid, slippage, market))
