"""Warnings about models: why they do not run, or do not run as configured."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final, NamedTuple

from trader.agents.budgets import ASSUMED_PRICE, Budgets
from trader.agents.conversation import CUT_PROMPT, Learned
from trader.agents.domain.invocations import Failing, Invocation
from trader.agents.domain.models import Model
from trader.agents.domain.shares import Budget
from trader.agents.providers.providers import Provider

INTERRUPTED: Final = "interrupted"
"""The failure reason of an invocation canceled by the end of its process."""

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
) -> dict[str, str]:
    """Return a warning for each active model that has a problem, by model id."""
    warnings = {}
    for model in models:
        provider = providers.get(model.provider)
        if not model.active or (provider is None and model.id not in failing):
            continue
        texts = []
        if model.id in failing:
            count, reason = failing[model.id]
            texts.append(f"{model.id} failed {count} times in a row: {reason}")
        if provider is not None and (fields := sorted(provider.left_out(model))):
            texts.append(f"{model.id} is asked without {', '.join(fields)}, which its provider refused")
        if (known := learned.get(model.id)) is not None:
            texts += [f"{model.id}: {CUT_PROMPT}"] if known.is_cut else []
            texts += _slowness(model, known)
        texts += filter(None, [budgets.price_warning(model)])
        texts += _budget_warning(model, budgets)
        if texts:
            warnings[model.id] = "; ".join(texts)
    return warnings


def warning_about(
    models: Iterable[Model],
    providers: Mapping[str, Provider],
    warnings: Mapping[str, str],
    in_cooldown: Mapping[str, str],
) -> str | None:
    """Return the problems of the active models and their providers as one text; None if there are none."""
    active = [model for model in models if model.active]
    if not active:
        return "No model is active, so nothing trades. Add models with `trader models add FILE`."
    texts = []
    if idle := [model for model in active if model.is_asked and model.provider not in providers]:
        names = ", ".join(f"{model.id} ({model.provider})" for model in idle[:10])
        texts.append(f"{len(idle)} active model(s) name a provider that is not configured: {names}")
    texts += [f"{name}: {why}" for name, why in in_cooldown.items()]
    return "; ".join([*texts, *warnings.values()]) or None


def _slowness(model: Model, learned: Learned) -> list[str]:
    """Say that a model decides more slowly than it is asked, and at which cadence it would not."""
    cadence, took = model.configuration.cadence, learned.took
    if took <= cadence:
        return []
    minutes = -(-took // timedelta(minutes=1))
    return [
        f"{model.id} takes {took.total_seconds():.0f} s for a decision, longer than its cadence of "
        f'{cadence.total_seconds():.0f} s, so it misses cycles; every = "{minutes}m" would fit'
    ]


def _budget_warning(model: Model, budgets: Budgets) -> list[str]:
    budget = budgets.of(model)
    if budget is None:
        return []
    if budget.state != "open":
        return [spent_budget(model, budget)]
    if budget.is_estimated and model.configuration.price is None:
        price = f"{ASSUMED_PRICE.input:g} and {ASSUMED_PRICE.output:g} USD per million tokens of input and output"
        return [
            f"{model.id} has a budget and no price, so what its provider does not report is estimated at {price}: "
            "give it a price in the models file"
        ]
    return []


def spent_budget(model: Model, budget: Budget) -> str:
    """Describe what a model with a spent budget does."""
    does = "only manages what it holds" if budget.state == "manage" else "pauses"
    return f"{model.id} {does} until 00:00 UTC: a daily budget that limits it, or its share of one, is spent"
