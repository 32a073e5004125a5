"""Budgets: the cost of models today (UTC), and what each may still spend.

A budget is a cap. Before an invocation starts, its maximum cost is reserved against every budget that limits the
model: its own, its owner's, and the budget of all models. When it ends, its actual cost replaces the reservation. A run
gets fewer tokens when a budget does not allow all of them, and does not start with fewer than `RUN_TOKENS_MIN`.

A shared budget is shared equally by its models, for the day. A model's share is its own as long as it pays for an
invocation that the model's cadence still allows today. What is left beyond these shares goes to the models whose
share is used up, or too small for an invocation: first to the one that has cost the least.

A part of each budget is kept for managing positions: when the rest is spent, a model configured to `manage` is called
once every 15 minutes and may only reduce, within that part. Then it pauses until 00:00 UTC.

Unreported tokens are estimated and charged at the model's price, or at `ASSUMED_PRICE` without one. If the costs that
a provider reports are higher than the model's price, reservations grow by that factor.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import ROUND_UP, Context, Decimal
from typing import Final, NamedTuple

from trader.agents.domain.invocations import Invocation
from trader.agents.domain.models import CYCLE, Model, TokenPrice
from trader.agents.domain.shares import Budget, Sharer, Shares, State
from trader.agents.providers.provider import highest_cost, own_answer_limit
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

PRICE_TOLERANCE: Final = Decimal("0.2")
"""By how much of the costs by its price a model's reported costs may differ before that is reported."""

TOKEN_COST_STEP: Final = Decimal("1e-12")

RUN_TOKENS_MIN: Final = 9_500
"""Tokens of a first prompt and a short answer; an invocation that has fewer does not start."""

PROMPT_TOKENS_MAX: Final = 8_000
"""The longest first prompt of any variant, assumed for attempts with unreported tokens."""

PROMPT_TOKENS_MIN: Final = 3_000
"""The shortest prompt of a step. The shorter the prompt, the more of the tokens can be output, which costs more."""


class _Cap(NamedTuple):
    """A budget that limits a model: its limit, its use, and whose it is. `sharers` are the models that share it."""

    usd: Decimal
    used: Decimal
    whose: str
    owner: str | None = None
    sharers: Mapping[str, Model] = {}


_Group = tuple[Decimal, Mapping[str, Model]]


class _Compared(NamedTuple):
    """The total costs of the same answers of a model: as its provider reports them, and by the price in the file."""

    price: TokenPrice
    own: Decimal
    by_price: Decimal

    @property
    def factor(self) -> Decimal:
        """How many times the price the provider charges."""
        return self.own / self.by_price


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
        self._now: datetime
        self._costs: dict[str, DayCost] = {}
        self._spent: dict[str, Decimal] = {}
        self._reserved: dict[str, Decimal] = {}
        self._compared: dict[str, _Compared] = {}
        self._models: Mapping[str, Model] = {}
        self._token_costs: dict[str, tuple[Model, Decimal]] = {}
        self._wants: dict[str, tuple[Decimal, Decimal]] = {}  # until the next cycle, or another price
        self._groups: dict[tuple[str | None, bool], _Group] = {}  # until anything is spent or reserved
        self._shares: dict[tuple[str | None, Decimal, bool], Shares] = {}  # the same
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
        self._look(now, models)
        day = floor_time(now, DAY)
        if day != self._day:
            await self._read(day)

    async def follow(self, now: datetime, models: Mapping[str, Model]) -> None:
        """Reload the day's costs, which the leader records.

        :raises Unavailable: they cannot be read
        """
        self._look(now, models)
        await self._read(floor_time(now, DAY))

    def _look(self, now: datetime, models: Mapping[str, Model]) -> None:
        self._now = floor_time(now, CYCLE)
        self._models = models
        self._wants.clear()
        self._forget_shares()

    async def _read(self, day: datetime) -> None:
        async with self._database.connection() as conn:
            self._costs = await select_costs_since(conn, day)
        self._spent = {model_id: self._spent_by(cost) for model_id, cost in self._costs.items()}
        self._day = day
        self._forget_shares()

    def _forget_shares(self) -> None:
        """Discard what is computed from the models, the costs and the reservations."""
        self._groups.clear()
        self._shares.clear()

    def _set_reserved(self, model_id: str, usd: Decimal | None) -> None:
        """Set the reservation for a model, None for none, and discard what is computed from the reservations."""
        if self._reserved.get(model_id) == usd:
            return
        if usd is None:
            del self._reserved[model_id]
        else:
            self._reserved[model_id] = usd
        self._groups = {key: group for key, group in self._groups.items() if not key[-1]}
        self._shares = {key: shares for key, shares in self._shares.items() if not key[-1]}

    def end_cycle(self, now: datetime) -> None:
        """Record the time of this cycle, from which the next cycle determines which models are due."""
        self._last_cycle = now

    def reserve(self, model: Model) -> int | None:
        """Reserve the maximum cost of an invocation of the model.

        Return the number of tokens that it may use; None when the budgets do not allow it now.
        """
        self._set_reserved(model.id, None)
        budget, tokens = self.of(model), self._run_tokens_max
        if budget is not None:
            tokens = self._affordable_tokens(model, budget.state == "manage")
            if budget.state == "pause" or tokens < RUN_TOKENS_MIN:
                return None
        if model.is_ai:
            self._set_reserved(model.id, tokens * self._token_cost(model))
        return tokens

    def reserved(self, model: Model) -> Decimal | None:
        """Return the reservation for a model's invocation; None for one that costs nothing."""
        return self._reserved.get(model.id)

    def settle(self, invocation: Invocation) -> None:
        """Replace the reservation for an invocation with its actual cost."""
        model_id = invocation.model_id
        self._set_reserved(model_id, None)
        if self._day is None or floor_time(invocation.started_at, DAY) != self._day:
            return
        self._costs[model_id] = self._costs.get(model_id, DayCost()).plus(invocation)
        self._spent[model_id] = self._spent_by(self._costs[model_id])
        self._forget_shares()

    def compare(self, model: Model, own: Decimal, by_price: Decimal) -> None:
        """Add the cost of the same answers, as their provider reports it and by the model's price."""
        price, known = model.configuration.price, self._compared.get(model.id)
        if price is None or not by_price:
            return
        if known is not None and known.price == price:
            own, by_price = known.own + own, known.by_price + by_price
        self._compared[model.id] = _Compared(price, own, by_price)
        self._wants.pop(model.id, None)

    def price_warning(self, model: Model) -> str | None:
        """Say that a model's price is not what its provider charges; None while they differ by less than a fifth."""
        compared = self._compared.get(model.id)
        if compared is None or compared.price != model.configuration.price:
            return None
        if abs(compared.own - compared.by_price) < PRICE_TOLERANCE * compared.by_price:
            return None
        return (
            f"{model.id}: its provider reports costs of {_usd(compared.own)} USD, but its price in the models file "
            f"gives {_usd(compared.by_price)} USD for the same answers; the provider's figure counts"
        )

    @property
    def total_spent(self) -> Decimal:
        """Total cost of all models today, in USD."""
        return sum(self._spent.values(), ZERO)

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
            spent=self._spent.get(model.id, ZERO),
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
        return self.is_on_grid(cadence, now)

    def is_on_grid(self, cadence: timedelta, now: datetime) -> bool:
        """Return whether a cadence is due in this cycle. Like all schedules, it follows a fixed grid."""
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
        cap = min(self._caps(model), key=lambda cap: self._left(model, cap, is_managing=False, with_reserved=False))
        share = "your share of " if len(cap.sharers) > 1 else ""
        return (
            f"Only reducing is allowed until 00:00 UTC: {share}{cap.whose} of {format_decimal(cap.usd)} USD for the "
            "day is spent, except for what is kept for managing positions."
        )

    # --- remaining amounts --------------------------------------------------------------------------------------------

    def _caps(self, model: Model, *, with_reserved: bool = False) -> Iterator[_Cap]:
        """Yield the budgets that limit a model. A rule agent has none: it costs nothing."""
        if not model.is_ai:
            return
        configuration = model.configuration
        if configuration.budget_usd_per_day is not None:
            usd = from_number(configuration.budget_usd_per_day)
            yield _Cap(usd, self._used(model.id, with_reserved=with_reserved), "your budget")
        if configuration.owner_budget_usd_per_day is not None:
            usd = from_number(configuration.owner_budget_usd_per_day)
            used, sharers = self._group(configuration.owner, with_reserved=with_reserved)
            yield _Cap(usd, used, "the budget of your owner", configuration.owner, sharers)
        if self.total_usd is not None:
            used, sharers = self._group(None, with_reserved=with_reserved)
            yield _Cap(self.total_usd, used, "the budget of all models", None, sharers)

    def _group(self, owner: str | None, *, with_reserved: bool) -> _Group:
        """Return what the models of an owner, or all models, have used, and those that are active."""
        key = owner, with_reserved
        if (known := self._groups.get(key)) is None:
            models = [each for each in self._models.values() if owner is None or each.configuration.owner == owner]
            ids = {*self._spent, *self._reserved} if owner is None else [model.id for model in models]
            used = sum((self._used(model_id, with_reserved=with_reserved) for model_id in ids), ZERO)
            known = self._groups[key] = used, {each.id: each for each in models if each.is_asked and each.is_ai}
        return known

    def _used(self, model_id: str, *, with_reserved: bool) -> Decimal:
        spent = self._spent.get(model_id, ZERO)
        return spent + self._reserved.get(model_id, ZERO) if with_reserved else spent

    def _spent_by(self, cost: DayCost) -> Decimal:
        attempt = ASSUMED_PRICE.cost(PROMPT_TOKENS_MAX, 0, self._answer_tokens_max)
        unreported = ASSUMED_PRICE.cost(cost.unpriced_input, 0, cost.unpriced_output)
        return cost.usd + unreported + cost.unpriced_attempts * attempt

    def _left(self, model: Model, cap: _Cap, *, is_managing: bool, with_reserved: bool) -> Decimal:
        """Return what remains of a budget for the model, for managing only or for any use."""
        kept = ZERO
        if not is_managing and model.configuration.when_spent == "manage":
            own = model.configuration.manage_usd_per_day
            kept = cap.usd * MANAGE_SHARE if own is None else min(from_number(own), cap.usd)
        left = cap.usd - kept - cap.used
        if len(cap.sharers) < 2 or model.id not in cap.sharers:
            return left
        key = cap.owner, left, with_reserved
        if (shares := self._shares.get(key)) is None:
            sharers = {each.id: self._sharer(each, with_reserved=with_reserved) for each in cap.sharers.values()}
            shares = self._shares[key] = Shares(left, sharers)
        return shares.available(model.id, in_turn=with_reserved)

    def _sharer(self, model: Model, *, with_reserved: bool) -> Sharer:
        if (known := self._wants.get(model.id)) is None:
            token_cost = self._token_cost(model)
            cycles_left = (floor_time(self._now, DAY) + DAY - self._now) // model.configuration.cadence
            wants = RUN_TOKENS_MIN * token_cost, cycles_left * self._run_tokens_max * token_cost
            known = self._wants[model.id] = wants
        (least, wanted), used = known, self._used(model.id, with_reserved=with_reserved)
        if (own := model.configuration.budget_usd_per_day) is not None:
            wanted = min(wanted, from_number(own) - used)
        return Sharer(used, least, wanted)

    def _affordable_tokens(self, model: Model, is_managing: bool, *, with_reserved: bool = True) -> int:
        """Return the number of tokens that an invocation may use without exceeding any budget."""
        left = min(
            self._left(model, cap, is_managing=is_managing, with_reserved=with_reserved)
            for cap in self._caps(model, with_reserved=with_reserved)
        )
        token_cost = self._token_cost(model)
        if not token_cost:
            return self._run_tokens_max
        return min(self._run_tokens_max, max(0, int(left / token_cost)))

    def _token_cost(self, model: Model) -> Decimal:
        """Return the maximum average cost of an invocation's token, which assumes the shortest possible prompts."""
        known = self._token_costs.get(model.id)
        if known is None or known[0] is not model:
            price = model.configuration.price or ASSUMED_PRICE
            answer = own_answer_limit(model) or self._answer_tokens_max
            mixed = highest_cost(model, price, PROMPT_TOKENS_MIN, answer) / (PROMPT_TOKENS_MIN + answer)
            known = self._token_costs[model.id] = model, max(mixed, highest_cost(model, price, 1, 0))
        compared = self._compared.get(model.id)
        cost = known[1] if compared is None else known[1] * max(Decimal(1), compared.factor)
        return cost.quantize(TOKEN_COST_STEP, ROUND_UP)  # so that a number of tokens times their cost is exact


def _usd(amount: Decimal) -> str:
    return format_decimal(amount.normalize(Context(prec=3)))
