"""Position sizing: sizes a signal's order to lose its risk at the stop, within every cap, in whole lots."""

from datetime import timedelta
from decimal import ROUND_CEILING, Decimal
from typing import Final, NamedTuple

import msgspec

from trader.agents.domain.tools import CreatePosition
from trader.agents.domain.view import ObservedMarket, VariantLimits, View
from trader.core.money import ONE, ZERO, ceil_to, divide, floor_to, format_decimal, from_number
from trader.exchange.domain.orders import Side

HEADROOM: Final = Decimal("0.98")
"""Share of a cap to use, since the mark moves between the view and the order."""


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that a rule proposes. `risk` is the share of equity lost at the stop; `why` states the figures.

    Without words and confidence, it is only what the rule would stake on a side.

    `margin_risk` is the share of its margin that the position may lose at the stop, and determines the leverage;
    None selects the lowest leverage that the free cash allows.
    """

    side: Side
    stop: float
    risk: Decimal
    invalidation: str = ""
    confidence: float = 0.0
    why: str = ""
    target: float | None = None
    lifetime: timedelta | None = None
    margin_risk: Decimal | None = None


class Room(NamedTuple):
    """Capacity for new positions: free cash, total notional, and the number of markets that share the cash."""

    cash: Decimal
    notional: Decimal
    shares: int


class Entry(NamedTuple):
    """The order that would open a market on a side. `cost` is the share of the way to the target (without one, to the
    stop) that both taker fees and the spread take."""

    symbol: str
    side: Side
    stop: float
    quantity: float
    leverage: float
    cost: float


def room_of(view: View, limits: VariantLimits) -> Room:
    """Return an account's room before any decision."""
    held = {position.symbol for position in view.positions}
    notional = limits.leverage_max * view.account.equity * HEADROOM - view.account.exposure
    return Room(view.account.available_cash, notional, len(view.markets.keys() - held))


def entry_price(market: ObservedMarket, side: Side) -> Decimal:
    """Return the price at which a market order would start to fill."""
    return market.ask if side is Side.LONG else market.bid


def sized(
    view: View, limits: VariantLimits, market: ObservedMarket, signal: Signal, room: Room
) -> CreatePosition | str:
    """Return the order for a signal, or why there is none.

    Quantity = risk × equity / |entry − stop|, reduced to the notional caps and to the market's share of the free cash
    at the highest leverage. The leverage is then the lowest integer whose margin and fee fit that share or, if higher,
    the highest at which the stop loses at most `margin_risk` of the margin: margin_risk × entry / |entry − stop|.
    """
    prices = _prices(market, signal)
    if isinstance(prices, str):
        return prices
    entry, stop, target = prices
    account = view.account
    leverage_max = Decimal(min(limits.leverage_max, market.leverage_max))
    dearest = max(entry, market.price)
    cash = divide(max(room.cash, ZERO), Decimal(max(room.shares, 1))) * HEADROOM
    stop_distance = abs(entry - stop)
    quantity = floor_to(
        min(
            divide(account.equity * signal.risk, stop_distance),
            divide(limits.position_notional_max * account.equity * HEADROOM, dearest),
            divide(max(room.notional, ZERO), dearest),
            divide(cash, dearest * (divide(ONE, leverage_max) + account.taker_fee_rate)),
        ),
        market.lot,
    )
    notional = quantity * dearest
    if quantity <= 0 or quantity * min(entry, market.price) < market.min_notional:
        return (
            f"risk, caps and free cash allow {notional:.2f}, below the minimum of {format_decimal(market.min_notional)}"
        )
    needed = divide(notional, cash - notional * account.taker_fee_rate).to_integral_value(ROUND_CEILING)
    wanted = floor_to(divide((signal.margin_risk or ZERO) * entry, stop_distance), ONE)
    return CreatePosition(
        symbol=market.symbol,
        side=signal.side,
        quantity=float(quantity),
        leverage=float(min(max(needed, wanted, ONE), leverage_max)),
        stop=float(stop),
        target=None if target is None else float(target),
        invalidation=signal.invalidation,
        time_exit=None if signal.lifetime is None else view.at + signal.lifetime,
        confidence=round(min(max(signal.confidence, 0.0), 100.0), 1),
    )


def _prices(market: ObservedMarket, signal: Signal) -> tuple[Decimal, Decimal, Decimal | None] | str:
    """Return entry, stop (rounded away from it) and target (toward it) on the tick grid, or why they are invalid."""
    rising = signal.side is Side.LONG
    on_grid = floor_to if rising else ceil_to
    entry = entry_price(market, signal.side)
    stop = on_grid(from_number(signal.stop), market.tick)
    target = None if signal.target is None else on_grid(from_number(signal.target), market.tick)
    lowest, highest = min(entry, market.price), max(entry, market.price)
    if stop <= 0 or (stop >= lowest if rising else stop <= highest):
        return f"the stop {format_decimal(stop)} is on the wrong side of {format_decimal(market.price)}"
    if target is not None and (target <= 0 or (target <= highest if rising else target >= lowest)):
        return f"the target {format_decimal(target)} is on the wrong side of {format_decimal(market.price)}"
    return entry, stop, target


def tightened(tick: Decimal, side: Side, stop: Decimal | None, price: float) -> Decimal | None:
    """Return the stop moved to `price` on the tick grid; None if that would not tighten it."""
    moved = (floor_to if side is Side.LONG else ceil_to)(from_number(price), tick)
    return moved if stop is None or (moved - stop) * side.direction > 0 else None
