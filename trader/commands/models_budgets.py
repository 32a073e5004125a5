"""The command budgets: today's cost of the models, and what is left of their budgets."""

import argparse
import os
from collections.abc import Mapping
from typing import Final

from trader.clock import SystemClock
from trader.commands.command import Result, table
from trader.commands.database import TargetDatabase, database_command
from trader.domain.models import Model
from trader.domain.money import format_decimal
from trader.services.agents.budgets import Budget, Budgets
from trader.settings import read_some
from trader.store.agents.models import select_models
from trader.store.exchange.accounts import select_lived_until

STATES: Final = {"open": "open", "manage": "only reduces", "pause": "paused by its budget"}


@database_command("budgets", example="trader budgets")
async def budgets(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Show the budget of every model that has one, its cost today (UTC), and the tokens left.

    Costs that a provider did not report are estimated and marked with "~". Reservations of running invocations are
    not shown.
    """
    async with target.reading() as conn:
        models = {model.id: model for model in await select_models(conn)}
    kept = await read_budgets(options, target, models)
    total_usd, states = kept.total_usd, kept.states(models)
    rows = [(model_id, models[model_id].configuration.owner or "", *_row(state)) for model_id, state in states.items()]
    lines = list(table(("model", "owner", "budget", "today", "state", "tokens left"), rows, text_columns=2))
    if total_usd is not None:
        spent = format_decimal(kept.total_spent)
        lines += [f"All models: {spent} of {format_decimal(total_usd)} USD (AI_BUDGET_USD_PER_DAY)."]
    value = {
        "totalUsd": total_usd,
        "totalSpentUsd": kept.total_spent,
        "budgets": {
            model_id: {
                "usd": state.usd,
                "spentUsd": state.spent,
                "isEstimated": state.is_estimated,
                "state": state.state,
            }
            for model_id, state in states.items()
        },
    }
    return Result(value, lines if states else ["No model has a budget."])


async def read_budgets(options: argparse.Namespace, target: TargetDatabase, models: Mapping[str, Model]) -> Budgets:
    """Return the budgets with the costs of the present day, which is the market's own in a replay."""
    total_usd, run_tokens, answer_tokens = read_some(
        os.environ, options.env_file, "ai_budget_usd_per_day", "run_tokens_max", "answer_tokens_max"
    )
    async with target.reading() as conn:
        now = await select_lived_until(conn) or SystemClock().now()
    kept = Budgets(target.database, total_usd, run_tokens, answer_tokens)
    await kept.follow(now, models)
    return kept


def _row(budget: Budget) -> tuple[str, ...]:
    return (
        "shared" if budget.usd is None else f"{format_decimal(budget.usd)} USD",
        f"{'~' if budget.is_estimated else ''}{budget.spent:.4f} USD",
        STATES[budget.state],
        f"{budget.tokens:,}",
    )
