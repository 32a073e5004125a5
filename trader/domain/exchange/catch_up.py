"""Which stretches of the past leave an account as it is, so that catching up need not look at every update of them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal

import msgspec

from trader.domain.exchange.account import Account, Position
from trader.domain.exchange.ledger import Rules
from trader.domain.exchange.orders import OrderSide, Side
from trader.domain.exchange.rules import Moment
from trader.domain.money import ZERO


class Range(msgspec.Struct, frozen=True):
    """The extremes that one market reached: of its mark, its best ask (lowest) and its best bid (highest)."""

    lowest_mark: Decimal
    highest_mark: Decimal
    lowest_ask: Decimal
    highest_bid: Decimal


class Stretch(msgspec.Struct, frozen=True):
    """A few updates that follow each other, and the range of each market in them."""

    until: datetime
    ranges: Mapping[str, Range]


def stretch_of(moments: Sequence[Moment]) -> Stretch:
    """The stretch of one or more moments. A market counts with every mark that it has in them, updated or not."""
    ranges = {}
    for symbol in moments[-1].marks:
        seen = [moment for moment in moments if symbol in moment.marks]
        marks = [moment.marks[symbol] for moment in seen]
        quotes = [moment.quotes[symbol] for moment in seen if symbol in moment.quotes]
        ranges[symbol] = Range(
            lowest_mark=min(marks),
            highest_mark=max(marks),
            lowest_ask=min((quote.ask for quote in quotes), default=Decimal("Infinity")),
            highest_bid=max((quote.bid for quote in quotes), default=ZERO),
        )
    return Stretch(moments[-1].at, ranges)


def is_calm(account: Account, stretch: Stretch, rules: Rules) -> bool:
    """Whether no update of the stretch can change the account.

    On the safe side: the worst equity and the highest maintenance are taken together, though they may be of different
    moments. True therefore means that `exchange.is_due` is false for each moment of the stretch; false means nothing.
    """
    hour = stretch.until.replace(minute=0, second=0, microsecond=0)
    worst, required = account.cash, ZERO
    for symbol, position in account.positions.items():
        reached = stretch.ranges[symbol]
        if position.funded_until < hour or _may_trigger(position, reached, stretch.until):
            return False
        worst += position.unrealized(reached.lowest_mark if position.side is Side.LONG else reached.highest_mark)
        required += position.quantity * reached.highest_mark * rules.markets[symbol].maintenance_rate
    for order in account.resting:
        if order.symbol not in stretch.ranges:
            continue
        reached = stretch.ranges[order.symbol]
        if (
            reached.lowest_ask <= order.limit_price
            if order.side is OrderSide.BUY
            else reached.highest_bid >= order.limit_price
        ):
            return False
    return not account.positions or worst > required


def _may_trigger(position: Position, reached: Range, until: datetime) -> bool:
    plan = position.exit_plan
    if position.closing is not None or (plan.time_exit is not None and until >= plan.time_exit):
        return True
    protecting, winning = (plan.stop, plan.invalidation_price), (plan.target,)
    is_long = position.side is Side.LONG
    falling_to, rising_to = (protecting, winning) if is_long else (winning, protecting)
    return any(price is not None and reached.lowest_mark <= price for price in falling_to) or any(
        price is not None and reached.highest_mark >= price for price in rising_to
    )
