"""Warnings about models: what keeps them from running, or from what is configured for them."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

from trader.domain.models import Model
from trader.gateways.agents.providers import Provider
from trader.services.agents.budgets import ASSUMED_PRICE, Budget, Budgets

CUT_PROMPT: Final = (
    "its provider counted less than half of the tokens of the prompt, so it seems to cut it; "
    "raise the context length of the server (num_ctx of Ollama)"
)


def warning_about(
    models: Iterable[Model], providers: Mapping[str, Provider], budgets: Budgets, with_cut_prompts: Container[str]
) -> str | None:
    """Return what is wrong with the active models, in words; None for nothing."""
    active = [model for model in models if model.active]
    if not active:
        return "No model is active, so nothing trades. Add models with `trader models add FILE`."
    warnings = []
    if idle := [model for model in active if model.provider not in providers]:
        names = ", ".join(f"{model.id} ({model.provider})" for model in idle[:10])
        warnings.append(f"{len(idle)} active model(s) name a provider that is not configured: {names}")
    for model in active:
        provider = providers.get(model.provider)
        if provider is not None and (fields := sorted(provider.left_out(model))):
            warnings.append(f"{model.id} is asked without {', '.join(fields)}, which its provider refused")
    warnings += [f"{model.id}: {CUT_PROMPT}" for model in active if model.id in with_cut_prompts]
    warnings += _budget_warnings(active, budgets)
    return "; ".join(warnings) or None


def _budget_warnings(active: Sequence[Model], budgets: Budgets) -> list[str]:
    warnings = []
    for model in active:
        budget = budgets.of(model)
        if budget is None:
            continue
        if budget.state != "open":
            warnings.append(spent_budget(model, budget))
        elif budget.is_estimated and model.configuration.price is None:
            price = f"{ASSUMED_PRICE.input:g} and {ASSUMED_PRICE.output:g} USD per million tokens of input and output"
            warnings.append(
                f"{model.id} has a budget and no price, so what its provider does not report is estimated at {price}: "
                "give it a price in the models file"
            )
    return warnings


def spent_budget(model: Model, budget: Budget) -> str:
    """Return what a model does whose budget is spent, in words."""
    does = "only manages what it holds" if budget.state == "manage" else "pauses"
    return f"{model.id} {does} until 00:00 UTC: a budget of the day that limits it is spent"
