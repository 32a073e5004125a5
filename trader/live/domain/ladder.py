"""The ladder from paper to money: what each step asks of the step below, and the caps of what is sent to a venue.

    paper ──▶ shadow ──▶ testnet ──▶ live

A person approves each step up, once its rule holds. The highest drawdown and drift that a step asks for also hold on
it, and its caps bound what its orders may open.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from trader.core.errors import Issue
from trader.core.money import ONE, ZERO, format_decimal
from trader.exchange.domain.orders import OrderSide
from trader.live.domain.protective_orders import OPENING_SLIPPAGE
from trader.market.domain.markets import Market

DAY: Final = timedelta(hours=24)
"""The span of the cap of a day: any 24 hours, so that no change of the date frees it."""


LadderStep = Literal["paper", "shadow", "testnet", "live"]

STEPS: Final[Sequence[LadderStep]] = get_args(LadderStep)

BELOW: Final[Mapping[LadderStep, LadderStep]] = dict(zip(STEPS[1:], STEPS, strict=False))
"""The step below each step."""


class Caps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most that may be open or on its way, in USD.

    They bound one order, one account, what an account opens within 24 hours, and all accounts together. An order above
    `approve_above` waits for a person.
    """

    order: Decimal
    account: Decimal
    day: Decimal
    total: Decimal
    approve_above: Decimal | None = None


class StepRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the step below must have shown, and the caps of a step that sends orders."""

    days: int
    fills: int
    drawdown_percent: Decimal
    drift_p95_bps: Decimal | None = None
    caps: Caps | None = None


class LadderRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rule of each step above paper."""

    shadow: StepRule
    testnet: StepRule
    live: StepRule

    def of(self, step: LadderStep) -> StepRule:
        rule: StepRule = getattr(self, step)
        return rule


class LadderFigures(msgspec.Struct, frozen=True):
    """What an entrant has shown on its step since it was let onto it.

    `days` are days (UTC) with a recorded equity. `drift_p95_bps` is of the absolute errors, and None without one.
    `difference` is an unexplained difference between the books and the venue; None if they agree.
    """

    days: int = 0
    fills: int = 0
    drawdown_percent: Decimal = ZERO
    drift_p95_bps: Decimal | None = None
    difference: str | None = None


def find_contradictions(rules: LadderRules, markets: Iterable[Market]) -> Iterator[Issue]:
    """Yield what contradicts itself in the rules, or lets no order of a market through."""
    if wrong := [*_not_positive(msgspec.structs.asdict(rules))]:
        yield from wrong
        return
    for field in ("drift_p95_bps", "caps"):
        if getattr(rules.shadow, field) is not None:
            yield Issue(("shadow", field), "nothing is sent in shadow, and paper has no drift: remove it")
        missing = [step for step in STEPS[2:] if getattr(rules.of(step), field) is None]
        yield from (Issue((step, field), "expected a value, since this step sends orders") for step in missing)
    for lower, upper in pairwise(STEPS[1:]):
        for field, sign in (("days", 1), ("fills", 1), ("drawdown_percent", -1), ("drift_p95_bps", -1)):
            asked, before = getattr(rules.of(upper), field), getattr(rules.of(lower), field)
            if None not in (asked, before) and sign * asked < sign * before:
                more = "at least" if sign > 0 else "at most"
                yield Issue((upper, field), f"expected {more} {before}, which {lower} asks for, got {asked}")
    for step in STEPS[2:]:
        if (caps := rules.of(step).caps) is not None:
            yield from (Issue((step, "caps", field), text) for field, text in _contradictions(caps, markets))


def _not_positive(values: Mapping[str, Any], *path: str) -> Iterator[Issue]:
    for name, value in values.items():
        if isinstance(value, msgspec.Struct):
            yield from _not_positive(msgspec.structs.asdict(value), *path, name)
        elif value is not None and not (math.isfinite(value) and value > 0):
            yield Issue((*path, name), f"expected a number above 0, got {value}")


def _contradictions(caps: Caps, markets: Iterable[Market]) -> Iterator[tuple[str, str]]:
    pairs = (("order", "account"), ("order", "day"), ("account", "total"), ("approve_above", "order"))
    for lower, upper in pairs:
        least, most = getattr(caps, lower), getattr(caps, upper)
        if least is not None and least > most:
            yield lower, f"expected at most {format_decimal(most)}, which is {upper}, got {format_decimal(least)}"
    for market in markets:
        if caps.order < market.min_notional:
            least = f"{format_decimal(market.min_notional)} USD, the venue's minimum of {market.symbol}"
            yield "order", f"expected at least {least}, got {format_decimal(caps.order)}"


def find_lacks(rule: StepRule, shown: LadderFigures) -> list[str]:
    """Return what an entrant still lacks for a step; nothing if the rule holds."""
    counts = ((shown.days, rule.days, "days"), (shown.fills, rule.fills, "fills"))
    lacks = [f"{have} of {needed} {unit}" for have, needed, unit in counts if have < needed]
    if rule.drift_p95_bps is not None and shown.drift_p95_bps is None:
        lacks.append("no drift was measured")
    return [*lacks, *find_breaches(rule, shown)]


def find_breaches(rule: StepRule, shown: LadderFigures) -> list[str]:
    """Return what an entrant may not have shown, on the step below or on the step itself."""
    figures = (
        ("the drawdown", shown.drawdown_percent, rule.drawdown_percent, " %"),
        ("the drift (p95)", shown.drift_p95_bps, rule.drift_p95_bps, " bp"),
    )
    found = [
        f"{name} {have:.2f}{unit} is above {format_decimal(most)}{unit}"
        for name, have, most, unit in figures
        if have is not None and most is not None and have > most
    ]
    return found if shown.difference is None else [*found, f"an unexplained difference: {shown.difference}"]


class Commitment(NamedTuple):
    """A position that is held, what an open order may still fill, or what was traded within a day.

    `price` is the average price of what was filled, and the worst price of a buy that is open.
    """

    account_id: str
    symbol: str
    side: OrderSide
    quantity: Decimal
    price: Decimal
    state: Literal["held", "open", "traded"] = "open"

    def usd(self, marks: Mapping[str, Decimal]) -> Decimal:
        """Return what it counts for. A sale may fill above its limit: at the mark, and what that may move."""
        mark = marks.get(self.symbol, ZERO)
        least = {"held": mark, "open": mark * (ONE + OPENING_SLIPPAGE), "traded": ZERO}[self.state]
        is_bounded = self.state == "open" and self.side is OrderSide.BUY
        return self.quantity * (self.price if is_bounded else max(self.price, least))


def refusal_by_caps(
    caps: Caps, account_id: str, committed: Sequence[Commitment], marks: Mapping[str, Decimal], order: Decimal = ZERO
) -> str | None:
    """Return the cap that an account exceeds with an order of so many USD; None if it exceeds none.

    Everything in `committed` counts in full, since any order may fill before any other.
    """

    def total(state: str, some: Iterable[Commitment]) -> Decimal:
        return order + sum((each.usd(marks) for each in some if each.state in (state, "open")), ZERO)

    own = [each for each in committed if each.account_id == account_id]
    for name, usd, most in (
        ("the order", order, caps.order),
        ("the account", total("held", own), caps.account),
        ("the account within 24 hours", total("traded", own), caps.day),
        ("all accounts", total("held", committed), caps.total),
    ):
        if usd > most:
            worth = f"{name} would have {usd:.2f} USD, with what rests and what is not certain"
            return f"the ladder's cap: {worth}; the cap is {format_decimal(most)} USD"
    return None


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """A person's approval of a step for an entrant, with the figures and the rules by which it was given.

    `entrant` says what decides under the name: another model has no certificate. `rules` is the digest of the ladder's
    rules, and `below` that of the certificate of the step below, empty for shadow.
    """

    name: str
    step: LadderStep
    entrant: str
    shown: LadderFigures
    rules: str
    below: str
    approved_by: str
    approved_at: datetime
    digest: str = ""
