"""The budget of a model and its use, and fair shares: how much of a shared budget each of its models may use."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Literal, NamedTuple

from trader.core.money import ZERO

State = Literal["open", "manage", "pause"]


class Budget(NamedTuple):
    """The budget of a model and its use. `usd` is the model's own budget, None when only shared ones limit it.

    `reserved` is the maximum cost of its running invocation. `is_estimated`: part of `spent` was not reported.
    `tokens` is the number that its next invocation may use.
    """

    usd: Decimal | None
    spent: Decimal
    is_estimated: bool
    state: State
    reserved: Decimal = ZERO
    tokens: int = 0


class Sharer(NamedTuple):
    """A model that shares a budget, with amounts in USD.

    `used` is what it has cost today, `least` the maximum cost of its smallest invocation, and `wanted` the most that it
    may still cost today: its cadence allows only so many invocations, and it may have a budget of its own.
    """

    used: Decimal
    least: Decimal
    wanted: Decimal


class Shares:
    """The shares of a budget with `left` USD.

    Each model has an equal share for the day. The rest of a share is claimed as long as it pays for an invocation that
    its model still wants today. Models whose share does not pay for one wait for what nobody claims: first the one that
    has cost the least.
    """

    def __init__(self, left: Decimal, sharers: Mapping[str, Sharer]) -> None:
        self._left = left
        self._sharers = sharers
        self._share = (left + sum((each.used for each in sharers.values()), ZERO)) / len(sharers)
        self._claims: dict[str, Decimal] = {}
        self._waiting: dict[str, Sharer] = {}
        for name, each in sharers.items():
            claim = min(self._share - each.used, each.wanted)
            if claim >= each.least:
                self._claims[name] = claim
            elif each.wanted >= each.least:  # otherwise it wants no further invocation today
                self._waiting[name] = each
        self._claimed = sum(self._claims.values(), ZERO)

    def available(self, name: str, *, in_turn: bool) -> Decimal:
        """Return how much of the budget a model may use now. `in_turn`: what models before it wait for is not free."""
        sharer = self._sharers[name]
        free = self._left - self._claimed + self._claims.get(name, ZERO)
        waiting = [each for other, each in self._waiting.items() if other != name]
        own = self._share - sharer.used
        if own >= sharer.least:
            return min(own, free) if waiting else free
        if not in_turn:
            return free
        before = sum((each.least for each in waiting if each.used < sharer.used and each.least <= free), ZERO)
        return min(free - before, max(sharer.least, free / (len(waiting) + 1)))
