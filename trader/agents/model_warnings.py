"""Warnings about models: why they do not run, or do not run as configured."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Final, NamedTuple

from trader.agents.budgets import ASSUMED_PRICE, Budgets
from trader.agents.conversation import CUT_PROMPT, Learned
from trader.agents.domain.invocations import INTERRUPTED, Failing, Invocation
from trader.agents.domain.models import Model
from trader.agents.domain.shares import Budget
from trader.agents.providers.provider import Provider
from trader.agents.providers.providers import find_in_cooldown

FAILURES_MAX: Final = 3
"""Number of consecutive failed invocations at which a model is reported."""


class Warnings(NamedTuple):
    """Why models do not run, or not as configured: as one text (None without problems), and by model id."""

    summary: str | None
    by_model: Mapping[str, str]


class ConsecutiveFailures:
    """Counts each model's consecutive failed invocations."""

    def __init__(self) -> None:
        self._failing: dict[str, Failing] = {}

    def load(self, failing: Mapping[str, Failing]) -> None:
        """Begin with these counts, which the rows of earlier processes give."""
        self._failing = dict(failing)

    def add(self, invocation: Invocation) -> None:
        """Count a finished invocation; ignore one that the end of the process interrupted."""
        if invocation.status == "completed":
            self._failing.pop(invocation.model_id, None)
        elif invocation.failure_reason != INTERRUPTED:
            count = self._failing.get(invocation.model_id, Failing(0, "")).in_a_row + 1
            self._failing[invocation.model_id] = Failing(count, invocation.failure_reason or invocation.status)

    def failing(self, models: Iterable[Model]) -> dict[str, Failing]:
        """Return the active models with at least `FAILURES_MAX` consecutive failed invocations."""
        return {
            model.id: failing
            for model in models
            if model.active and (failing := self._failing.get(model.id)) and failing.in_a_row >= FAILURES_MAX
        }


def model_warnings(
    models: Iterable[Model],
    providers: Mapping[str, Provider],
    budgets: Budgets,
    learned: Mapping[str, Learned],
    failing: Mapping[str, Failing],
) -> Warnings:
    """Return what is wrong with the active models and their providers."""
    active = [model for model in models if model.active]
    if not active:
        return Warnings("No model is active, so nothing trades. Add models with `trader models add FILE`.", {})
    by_model: dict[str, str] = {}
    texts = []
    for model in active:
        provider = providers.get(model.provider)
        if provider is not None or model.id in failing:
            problems = _problems(model, provider, budgets, learned.get(model.id), failing.get(model.id))
            by_model |= {model.id: text} if (text := "; ".join(problems)) else {}
    if idle := [model for model in active if model.is_asked and model.provider not in providers]:
        names = ", ".join(f"{model.id} ({model.provider})" for model in idle[:10])
        texts.append(f"{len(idle)} active model(s) name a provider that is not configured: {names}")
    texts += [f"{name}: {why}" for name, why in find_in_cooldown(providers).items()]
    return Warnings("; ".join([*texts, *by_model.values()]) or None, by_model)


def _problems(
    model: Model, provider: Provider | None, budgets: Budgets, learned: Learned | None, failing: Failing | None
) -> Iterator[str]:
    if failing is not None:
        yield f"{model.id} failed {failing.in_a_row} times in a row: {failing.reason}"
    if provider is not None and (fields := sorted(provider.left_out(model))):
        yield f"{model.id} is asked without {', '.join(fields)}, which its provider refused"
    if learned is not None and learned.is_cut:
        yield f"{model.id}: {CUT_PROMPT}"
    cadence = model.configuration.cadence
    if learned is not None and learned.took > cadence:
        minutes = -(-learned.took // timedelta(minutes=1))
        yield (
            f"{model.id} takes {learned.took.total_seconds():.0f} s for a decision, longer than its cadence of "
            f'{cadence.total_seconds():.0f} s, so it misses cycles; every = "{minutes}m" would fit'
        )
    if (price_warning := budgets.price_warning(model)) is not None:
        yield price_warning
    budget = budgets.of(model)
    if budget is not None and budget.state != "open":
        yield spent_budget(model, budget)
    elif budget is not None and budget.is_estimated and model.configuration.price is None:
        price = f"{ASSUMED_PRICE.input:g} and {ASSUMED_PRICE.output:g} USD per million tokens of input and output"
        yield (
            f"{model.id} has a budget and no price, so what its provider does not report is estimated at {price}: "
            "give it a price in the models file"
        )


def spent_budget(model: Model, budget: Budget) -> str:
    """Describe what a model with a spent budget does."""
    does = "only manages what it holds" if budget.state == "manage" else "pauses"
    return f"{model.id} {does} until 00:00 UTC: a daily budget that limits it, or its share of one, is spent"
