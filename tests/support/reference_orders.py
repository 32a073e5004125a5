"""Orders and exit plans of the reference account, and the rules that need nothing else."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal, localcontext
from fractions import Fraction

from trader.exchange.domain.orders import ExitPlan
from trader.market.domain.markets import Market


@dataclass(frozen=True)
class Terms:
    """An order's terms for the position that it opens or adds to; None: not given."""

    leverage: Fraction | None = None
    plan: ExitPlan | None = None
    confidence: Decimal | None = None


@dataclass
class Rest:
    """A resting limit order. `number` is its place in the order of arrival."""

    number: int
    symbol: str
    sign: int
    remaining: Fraction
    limit: Fraction
    terms: Terms
    reduce_only: bool
    created_at: datetime
    ahead: Fraction = Fraction(0)


@dataclass
class Goal:
    """A target: the price of its limit, what is left of it, and the quantity ahead of it."""

    price: Fraction
    left: Fraction
    ahead: Fraction


@dataclass
class Watch:
    """The state of a position besides its figures.

    Its plan, with the stop and the targets as they are now, the trigger that is closing it and the time its order meets
    a book, the last funded boundary, and from its orders the last confidence, and whether any specified a leverage.
    """

    plan: ExitPlan
    funded_until: datetime
    stop: Fraction | None = None
    goals: tuple[Goal, ...] = ()
    closing: str | None = None
    due: datetime | None = None
    confidence: Decimal | None = None
    leveraged: bool = False


@dataclass
class Answer:
    status: str
    quantity: Fraction = Fraction(0)
    average: Fraction | None = None
    fees: Fraction = Fraction(0)
    realized: Fraction = Fraction(0)


def first(parts: list[tuple[Fraction, Fraction]], quantity: Fraction) -> list[tuple[Fraction, Fraction]]:
    """The first parts, up to the quantity."""
    chosen = []
    for price, size in parts:
        if quantity <= 0:
            break
        chosen.append((price, min(size, quantity)))
        quantity -= size
    return chosen


def halved(age: timedelta, half_life: timedelta) -> Fraction:
    """The remaining share after this time: exact for whole half-lives, to 60 digits for the rest."""
    whole, rest = divmod(age, half_life)
    with localcontext(prec=60):
        part = Decimal(2) ** -(Decimal(rest / timedelta(microseconds=1)) / (half_life // timedelta(microseconds=1)))
    return Fraction(1, 2**whole) * (Fraction(part) if rest else 1)


def plan_is_sound(plan: ExitPlan, sign: int, mark: Fraction, at: datetime, built: Fraction, market: Market) -> bool:
    """Stop and invalidation price behind the mark, targets before it and of a size that the market takes, time ahead.

    A trailing distance that is the whole price leaves no stop. `built` is the size of the position.
    """
    behind = all(price is None or sign * (mark - Fraction(price)) > 0 for price in (plan.stop, plan.invalidation_price))
    goals = [plan.target, *(target.price for target in plan.targets)]
    before = all(price is None or sign * (Fraction(price) - mark) > 0 for price in goals)
    follows = plan.trailing_distance is None or plan.trailing_distance < mark
    parts = [(Fraction(each.fraction), Fraction(each.price)) for each in plan.targets]
    takes = built <= 0 or all(
        part == 1 or (built * part >= market.lot and built * part * price >= market.min_notional)
        for part, price in parts
    )
    is_ahead = plan.time_exit is None or plan.time_exit > at
    return behind and before and follows and takes and sum(part for part, _ in parts) <= 1 and is_ahead


def fired(watch: Watch, held: Fraction, mark: Fraction, at: datetime) -> str | None:
    sign, plan = 1 if held > 0 else -1, watch.plan
    if watch.stop is not None and sign * (mark - watch.stop) <= 0:
        return "stop"
    if plan.invalidation_price is not None and sign * (mark - Fraction(plan.invalidation_price)) <= 0:
        return "invalidation"
    if plan.target is not None and sign * (mark - Fraction(plan.target)) >= 0:
        return "target"
    if plan.time_exit is not None and at >= plan.time_exit:
        return "time"
    return None
