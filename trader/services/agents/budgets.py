"""Budgets: what the models have cost today (UTC), and what those whose budget is spent may still do.

A budget is spent when the known costs reach it, so the invocation that reaches it is the last. Then, until 00:00 UTC,
the model only manages what it holds, once in 15 minutes, or pauses, as it is configured. Costs that nobody reported and
no price tells count as 0, and the state says that they are missing.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, Literal, NamedTuple

from trader.clock import floor_time
from trader.domain.agents.invocations import Invocation
from trader.domain.models import CYCLE, Model
from trader.domain.money import ZERO, format_decimal, from_number
from trader.store.agents.invocations import select_costs_since
from trader.store.database.pool import Database

MANAGE_EVERY: Final = timedelta(minutes=15)
DAY: Final = timedelta(days=1)

State = Literal["open", "manage", "pause"]


class Budget(NamedTuple):
    """The budget of a model and what it has cost today. `usd` is its own, None when only the one of all limits it.

    `is_partial`: it has cost more than that, and nobody knows how much.
    """

    usd: Decimal | None
    spent: Decimal
    is_partial: bool
    state: State


class _Cost(NamedTuple):
    usd: Decimal = ZERO
    is_partial: bool = False


class Budgets:
    """The costs of the present day. `total_usd` is the budget of all models together, None for none."""

    def __init__(self, database: Database, total_usd: Decimal | None) -> None:
        self._database = database
        self.total_usd = total_usd
        self._day: datetime | None = None
        self._costs: dict[str, _Cost] = {}
        self._last_cycle: datetime | None = None

    def forget(self) -> None:
        """Read the costs again with the next cycle: another process may have led meanwhile."""
        self._day = self._last_cycle = None
        self._costs = {}

    async def begin_cycle(self, now: datetime) -> None:
        """Read the costs of the day when it is another one than in the last cycle.

        :raises Unavailable: they cannot be read
        """
        day = floor_time(now, DAY)
        if day != self._day:
            await self._read(day)

    async def follow(self, now: datetime) -> None:
        """Read the costs of the day that another process counts.

        :raises Unavailable: they cannot be read
        """
        await self._read(floor_time(now, DAY))

    async def _read(self, day: datetime) -> None:
        async with self._database.connection() as conn:
            found = await select_costs_since(conn, day)
        self._costs = {model_id: _Cost(cost or ZERO, is_partial) for model_id, cost, is_partial in found}
        self._day = day

    def end_cycle(self, now: datetime) -> None:
        """Note a cycle, from which the next ones are counted."""
        self._last_cycle = now

    def add(self, invocation: Invocation) -> None:
        """Count an invocation that has ended."""
        if self._day is None or floor_time(invocation.started_at, DAY) != self._day:
            return
        before = self._costs.get(invocation.model_id, _Cost())
        is_partial = before.is_partial or bool(invocation.unmetered_attempts or invocation.unpriced_steps)
        self._costs[invocation.model_id] = _Cost(before.usd + (invocation.cost_usd or ZERO), is_partial)

    @property
    def total_spent(self) -> Decimal:
        """What all models together have cost today."""
        return sum((cost.usd for cost in self._costs.values()), ZERO)

    def of(self, model: Model) -> Budget | None:
        """Return the budget that limits a model; None without one, and before the first cycle of this process."""
        wanted = model.configuration.budget_usd_per_day
        if model.provider == "rules" or self._day is None or (wanted is None and self.total_usd is None):
            return None
        usd, cost = None if wanted is None else from_number(wanted), self._costs.get(model.id, _Cost())
        is_spent = (usd is not None and cost.usd >= usd) or (
            self.total_usd is not None and self.total_spent >= self.total_usd
        )
        return Budget(usd, cost.usd, cost.is_partial, model.configuration.when_spent if is_spent else "open")

    def limits(self, models: Iterable[Model]) -> bool:
        """Return whether there is a budget for any of these models."""
        return self.total_usd is not None or any(model.configuration.budget_usd_per_day for model in models)

    def states(self, models: Mapping[str, Model]) -> dict[str, Budget]:
        """Return the budgets of the models that have one, by id."""
        found = {model.id: self.of(model) for model in models.values()}
        return {model_id: budget for model_id, budget in found.items() if budget is not None}

    def is_due(self, model: Model, now: datetime) -> bool:
        """Return whether a model decides in this cycle, as its cadence asks for and its budget allows."""
        budget, cadence = self.of(model), model.configuration.cadence
        if budget is not None and budget.state == "pause":
            return False
        if budget is not None and budget.state == "manage":
            cadence = max(cadence, MANAGE_EVERY)
        return self._is_on_grid(cadence, now)

    def is_asked_for(self, model: Model, now: datetime) -> bool:
        """Return whether the cadence of a model asks for a decision in this cycle, whatever its budget allows."""
        return self._is_on_grid(model.configuration.cadence, now)

    def _is_on_grid(self, cadence: timedelta, now: datetime) -> bool:
        """Return whether the cadence has a time in this cycle; it lies on a fixed grid, as all schedules do."""
        if cadence <= CYCLE:
            return True
        last = self._last_cycle
        if last is None or last > now:
            last = floor_time(now, CYCLE) - CYCLE
        return floor_time(now, cadence) > last

    def restriction(self, model: Model) -> str | None:
        """Return why a model may only reduce now, in words; None when it may open positions."""
        budget = self.of(model)
        if budget is None or budget.state == "open":
            return None
        whose = (
            f"your budget of {format_decimal(budget.usd)} USD"
            if budget.usd is not None and budget.spent >= budget.usd
            else (f"the budget of {format_decimal(self.total_usd or ZERO)} USD for all models")
        )
        return f"Only reducing is allowed until 00:00 UTC: {whose} for the day is spent."
