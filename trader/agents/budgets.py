"""Budgets: the cost of models today (UTC), and what each may still spend.

A budget is a cap. Before an invocation starts, its maximum cost is reserved against every budget that limits the
model: its own, its owner's, and the budget of all models. When it ends, its actual cost replaces the reservation. A run
gets fewer tokens when a budget does not allow all of them, and does not start with fewer than `RUN_TOKENS_MIN`.

A part of each budget is kept for managing positions: when the rest is spent, a model configured to `manage` is called
once every 15 minutes and may only reduce, within that part. Then it pauses until 00:00 UTC.

Unreported tokens are estimated and charged at the model's price, or at `ASSUMED_PRICE` without one.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, Literal, NamedTuple

from trader.agents.domain.invocations import Invocation
from trader.agents.domain.models import CYCLE, Model, TokenPrice
from trader.agents.providers.providers import answer_tokens_max, highest_cost
from trader.agents.sql.invocations import DayCost, select_costs_since
from trader.core.clock import floor_time
from trader.core.money import ZERO, format_decimal, from_number
from trader.database.pool import Database

MANAGE_EVERY: Final = timedelta(minutes=15)
MANAGE_SHARE: Final = Decimal("0.2")
"""The default share of a budget kept for managing positions."""

DAY: Final = timedelta(days=1)
ASSUMED_PRICE: Final = TokenPrice(input=15, output=75)
"""USD per million tokens of a model without a price, as expensive as any in use, so that its budget holds too."""

RUN_TOKENS_MIN: Final = 8_000
"""Tokens of a first prompt and a short answer; an invocation that has fewer does not start."""

PROMPT_TOKENS_MAX: Final = 6_500
"""The longest first prompt of any variant, assumed for attempts with unreported tokens."""

PROMPT_TOKENS_MIN: Final = 3_000
"""The shortest prompt of a step. The shorter the prompt, the more of the tokens can be output, which costs more."""

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


class _Cap(NamedTuple):
    """A budget that limits a model: its limit, its use including reservations, and whose it is."""

    usd: Decimal
    used: Decimal
    whose: str


class Budgets:
    """The costs of the present day. `total_usd` is the combined budget of all models, None for none.

    An invocation uses at most `run_tokens_max` tokens, and an answer at most `answer_tokens_max` of them unless the
    model has its own limit.
    """

    def __init__(
        self, database: Database, total_usd: Decimal | None, run_tokens_max: int, answer_tokens_max: int
    ) -> None:
        self._database = database
        self.total_usd = total_usd
        self._run_tokens_max = run_tokens_max
        self._answer_tokens_max = answer_tokens_max
        self._day: datetime | None = None
        self._costs: dict[str, DayCost] = {}
        self._reserved: dict[str, Decimal] = {}
        self._models: Mapping[str, Model] = {}
        self._last_cycle: datetime | None = None

    def forget(self) -> None:
        """Discard the loaded costs: another process may have led. The next cycle reloads them."""
        self._day = self._last_cycle = None
        self._costs = {}
        self._reserved = {}

    async def begin_cycle(self, now: datetime, models: Mapping[str, Model]) -> None:
        """Load the costs of the present UTC day unless already loaded.

        :raises Unavailable: they cannot be read
        """
        self._models = models
        day = floor_time(now, DAY)
        if day != self._day:
            await self._read(day)

    async def follow(self, now: datetime, models: Mapping[str, Model]) -> None:
        """Reload the day's costs, which the leader records.

        :raises Unavailable: they cannot be read
        """
        self._models = models
        await self._read(floor_time(now, DAY))

    async def _read(self, day: datetime) -> None:
        async with self._database.connection() as conn:
            self._costs = await select_costs_since(conn, day)
        self._day = day

    def end_cycle(self, now: datetime) -> None:
        """Record the time of this cycle, from which the next cycle determines which models are due."""
        self._last_cycle = now

    def reserve(self, model: Model) -> int | None:
        """Reserve the maximum cost of an invocation of the model.

        Return the number of tokens that it may use; None when the budgets do not allow it now.
        """
        self._reserved.pop(model.id, None)
        budget, tokens = self.of(model), self._run_tokens_max
        if budget is not None:
            tokens = self._affordable_tokens(model, budget.state == "manage")
            if budget.state == "pause" or tokens < RUN_TOKENS_MIN:
                return None
        if model.is_ai:
            self._reserved[model.id] = tokens * self._token_cost(model)
        return tokens

    def reserved(self, model: Model) -> Decimal | None:
        """Return the reservation for a model's invocation; None for one that costs nothing."""
        return self._reserved.get(model.id)

    def settle(self, invocation: Invocation) -> None:
        """Replace the reservation for an invocation with its actual cost."""
        self._reserved.pop(invocation.model_id, None)
        if self._day is None or floor_time(invocation.started_at, DAY) != self._day:
            return
        before = self._costs.get(invocation.model_id, DayCost())
        self._costs[invocation.model_id] = before.plus(invocation)

    @property
    def total_spent(self) -> Decimal:
        """Total cost of all models today, in USD."""
        return sum(map(self._spent, self._costs), ZERO)

    def of(self, model: Model) -> Budget | None:
        """Return the budget that limits a model; None without one, or before the first cycle of this process."""
        if self._day is None or not any(self._caps(model)):
            return None
        wanted, cost = model.configuration.budget_usd_per_day, self._costs.get(model.id, DayCost())
        state: State = "open"
        if self._affordable_tokens(model, is_managing=False, with_reserved=False) < RUN_TOKENS_MIN:
            state = model.configuration.when_spent
            if self._affordable_tokens(model, is_managing=True, with_reserved=False) < RUN_TOKENS_MIN:
                state = "pause"
        return Budget(
            usd=None if wanted is None else from_number(wanted),
            spent=self._spent(model.id),
            is_estimated=cost.is_estimated,
            state=state,
            reserved=self._reserved.get(model.id, ZERO),
            tokens=self._affordable_tokens(model, is_managing=state == "manage"),
        )

    def limits(self, models: Iterable[Model]) -> bool:
        """Return whether a budget limits any of these models."""
        return any(any(self._caps(model)) for model in models)

    def states(self, models: Mapping[str, Model]) -> dict[str, Budget]:
        """Return the budgets of the models that have one, by id."""
        budgets = {model.id: self.of(model) for model in models.values()}
        return {model_id: budget for model_id, budget in budgets.items() if budget is not None}

    def is_due(self, model: Model, now: datetime) -> bool:
        """Return whether a model decides in this cycle, according to its cadence and budget."""
        budget, cadence = self.of(model), model.configuration.cadence
        if budget is not None and budget.state == "pause":
            return False
        if budget is not None and budget.state == "manage":
            cadence = max(cadence, MANAGE_EVERY)
        return self._is_on_grid(cadence, now)

    def is_asked_for(self, model: Model, now: datetime) -> bool:
        """Return whether a model is due in this cycle by its cadence, regardless of its budget."""
        return self._is_on_grid(model.configuration.cadence, now)

    def _is_on_grid(self, cadence: timedelta, now: datetime) -> bool:
        """Return whether the cadence is due in this cycle. Like all schedules, it follows a fixed grid."""
        if cadence <= CYCLE:
            return True
        last = self._last_cycle
        if last is None or last > now:
            last = floor_time(now, CYCLE) - CYCLE
        return floor_time(now, cadence) > last

    def restriction(self, model: Model) -> str | None:
        """Explain why a model may only reduce positions now; None when it may open them."""
        budget = self.of(model)
        if budget is None or budget.state == "open":
            return None
        cap = min(self._caps(model), key=lambda cap: self._left(model, cap, is_managing=False))
        return (
            f"Only reducing is allowed until 00:00 UTC: {cap.whose} of {format_decimal(cap.usd)} USD for the day is "
            "spent, except for what is kept for managing positions."
        )

    # --- remaining amounts --------------------------------------------------------------------------------------------

    def _caps(self, model: Model, *, with_reserved: bool = False) -> Iterator[_Cap]:
        """Yield the budgets that limit a model. A rule agent has none: it costs nothing."""
        if not model.is_ai:
            return
        configuration = model.configuration
        if configuration.budget_usd_per_day is not None:
            usd = from_number(configuration.budget_usd_per_day)
            yield _Cap(usd, self._used([model.id], with_reserved=with_reserved), "your budget")
        if configuration.owner_budget_usd_per_day is not None:
            owner = configuration.owner
            owned = [candidate.id for candidate in self._models.values() if candidate.configuration.owner == owner]
            usd = from_number(configuration.owner_budget_usd_per_day)
            yield _Cap(usd, self._used(owned, with_reserved=with_reserved), "the budget of your owner")
        if self.total_usd is not None:
            everyone = {*self._costs, *self._reserved}
            yield _Cap(self.total_usd, self._used(everyone, with_reserved=with_reserved), "the budget of all models")

    def _used(self, model_ids: Iterable[str], *, with_reserved: bool) -> Decimal:
        ids = set(model_ids)
        used = sum((self._spent(model_id) for model_id in ids), ZERO)
        return used + sum((self._reserved.get(model_id, ZERO) for model_id in ids), ZERO) if with_reserved else used

    def _spent(self, model_id: str) -> Decimal:
        cost = self._costs.get(model_id, DayCost())
        attempt = ASSUMED_PRICE.cost(PROMPT_TOKENS_MAX, 0, self._answer_tokens_max)
        unreported = ASSUMED_PRICE.cost(cost.unpriced_input, 0, cost.unpriced_output)
        return cost.usd + unreported + cost.unpriced_attempts * attempt

    def _left(self, model: Model, cap: _Cap, *, is_managing: bool) -> Decimal:
        """Return what remains of a budget, for managing only or for any use."""
        kept = ZERO
        if not is_managing and model.configuration.when_spent == "manage":
            own = model.configuration.manage_usd_per_day
            kept = cap.usd * MANAGE_SHARE if own is None else min(from_number(own), cap.usd)
        return cap.usd - kept - cap.used

    def _affordable_tokens(self, model: Model, is_managing: bool, *, with_reserved: bool = True) -> int:
        """Return the number of tokens that an invocation may use without exceeding any budget."""
        left = min(
            self._left(model, cap, is_managing=is_managing) for cap in self._caps(model, with_reserved=with_reserved)
        )
        token_cost = self._token_cost(model)
        if not token_cost:
            return self._run_tokens_max
        return min(self._run_tokens_max, max(0, int(left / token_cost)))

    def _token_cost(self, model: Model) -> Decimal:
        """Return the maximum average cost of an invocation's token, which assumes the shortest possible prompts."""
        price = model.configuration.price or ASSUMED_PRICE
        answer = answer_tokens_max(model, self._answer_tokens_max)
        mixed = highest_cost(model, price, PROMPT_TOKENS_MIN, answer) / (PROMPT_TOKENS_MIN + answer)
        return max(mixed, highest_cost(model, price, 1, 0))
