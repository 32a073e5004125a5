"""The orders that an exit plan has at the venue: a stop and a target that only reduce, for the whole position."""

from collections.abc import Iterable
from decimal import Decimal
from typing import Final

import msgspec

from trader.domain.exchange.account import Account, Position
from trader.domain.exchange.orders import CLOSING_SIDE, Cause, ExitPlan, OrderSide
from trader.domain.exchange.venue_orders import SentOrder, VenueOrderType
from trader.domain.market.markets import Market, Quote
from trader.domain.money import ONE, ceil_to, floor_to, round_to

OPENING_SLIPPAGE: Final = Decimal("0.01")
CLOSING_SLIPPAGE: Final = Decimal("0.05")
"""How much worse than the price of the moment a market order may be filled, as a fraction of it."""

CAUSES: Final = {VenueOrderType.STOP: Cause.STOP, VenueOrderType.TARGET: Cause.TARGET}


class ProtectiveTerms(msgspec.Struct, frozen=True):
    """What tells one stop or target of a market from another."""

    symbol: str
    type: VenueOrderType
    side: OrderSide
    quantity: Decimal
    trigger: Decimal


def wanted_legs(position: Position, plan: ExitPlan, market: Market) -> list[ProtectiveTerms]:
    """The legs of a plan for a position, the stop first. Triggers are on the market's tick; one below it has none."""
    side = CLOSING_SIDE[position.side]
    legs = []
    for kind, price in ((VenueOrderType.STOP, plan.stop), (VenueOrderType.TARGET, plan.target)):
        trigger = None if price is None else round_to(price, market.tick)
        if trigger:
            legs.append(ProtectiveTerms(position.symbol, kind, side, position.quantity, trigger))
    return legs


def all_wanted(account: Account, markets: dict[str, Market], busy: Iterable[str] = ()) -> list[ProtectiveTerms]:
    """The legs of every position, but those that are being closed already and those in `busy` markets."""
    skipped = frozenset(busy)
    return [
        leg
        for symbol, position in account.positions.items()
        if symbol not in skipped and position.closing is None
        for leg in wanted_legs(position, position.exit_plan, markets[symbol])
    ]


def terms_of(sent: SentOrder) -> ProtectiveTerms:
    """The terms of a leg that was sent."""
    order = sent.order
    assert order.trigger is not None
    return ProtectiveTerms(order.symbol, order.type, order.side, order.quantity, order.trigger)


def worst_price(side: OrderSide, price: Decimal, slippage: Decimal, market: Market) -> Decimal:
    """The worst price that a market order accepts: at least one tick."""
    if side is OrderSide.BUY:
        return ceil_to(price * (ONE + slippage), market.tick)
    return max(market.tick, floor_to(price * (ONE - slippage), market.tick))


def reachable_price(side: OrderSide, quote: Quote, *, closes: bool, market: Market) -> Decimal:
    """The worst price of a market order that is sent at this quote."""
    best = quote.ask if side is OrderSide.BUY else quote.bid
    return worst_price(side, best, CLOSING_SLIPPAGE if closes else OPENING_SLIPPAGE, market)
