"""The commands models list, pause, resume and remove, and the models' budgets: their cost today, and what remains."""

import argparse
import os
from collections.abc import Mapping
from typing import Final

import asyncpg

import trader.commands.models_seed
import trader.commands.models_try  # noqa: F401 - declares its command
from trader.agents.budgets import Budgets
from trader.agents.domain.models import Model
from trader.agents.domain.shares import Budget
from trader.agents.sql.models import (
    ModelActivity,
    delete_model,
    select_model_activity,
    select_models,
    update_model_active,
)
from trader.commands.command import Result, allowed, moment, table
from trader.commands.database import TargetDatabase, database_command
from trader.commands.operate import operate
from trader.core.clock import SystemClock
from trader.core.errors import StartError
from trader.core.money import format_decimal
from trader.database.leadership import LeaderLock
from trader.exchange.domain.halts import Verb
from trader.exchange.sql.accounts import delete_account, select_lived_until
from trader.settings.settings import read_some

STATES: Final = {"open": "open", "manage": "only reduces", "pause": "paused by its budget"}
_SOON = "A running service applies this in its next cycle, within a minute."


@database_command("models list", example="trader models list")
async def list_models(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """List every model, oldest first, with its state, budget and number of invocations."""
    async with target.database.reading() as conn:
        models, activity = await select_models(conn), await select_model_activity(conn)
    by_id = {model.id: model for model in models}
    kept = (await read_budgets(options, target, by_id)).states(by_id)
    heads = ("model", "variant", "provider", "name at the provider", "state", "every", "invocations", "last")
    listed = [(model, activity.get(model.id, ModelActivity())) for model in models]
    rows = [
        (
            model.id,
            model.variant,
            model.provider,
            model.router_model_name,
            _state(model, kept.get(model.id)) + (", manual" if done.manual_since else ""),
            model.configuration.every or "1m",
            f"{done.invocation_count:,}",
            moment(done.last_invoked_at),
        )
        for model, done in listed
    ]
    value = {
        "models": [
            {
                "model": model,
                "invocationCount": done.invocation_count,
                "lastInvokedAt": done.last_invoked_at,
                "manualSince": done.manual_since,
            }
            for model, done in listed
        ]
    }
    return Result(value, table(heads, rows, text_columns=6))


def _state(model: Model, budget: Budget | None) -> str:
    if not model.active:
        return "paused"
    return "active" if budget is None or budget.state == "open" else STATES[budget.state]


def _model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="ID", help="the model, as `trader models list` shows it")


@database_command("models pause", example="trader models pause apex-rules", arguments=_model_argument, changes=True)
async def pause(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Stop the invocations of a model; the exit plans of its positions stay active."""
    return await _set_active(target, options.model, is_active=False)


@database_command("models resume", example="trader models resume apex-rules", arguments=_model_argument, changes=True)
async def resume(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Resume the invocations of a paused model."""
    return await _set_active(target, options.model, is_active=True)


def _remove_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("account", metavar="ID", help="the model, as `trader models list` shows it")
    parser.set_defaults(reason="its model was removed by an operator")


@database_command("models remove", example="trader models remove typo", arguments=_remove_arguments, changes=True)
async def remove(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Remove a model that has never decided, with its account. A model with a record is paused instead.

    The record of a model that has decided or traded stays, with its account, trades and place on the boards. So do its
    open positions with their exit plans.
    """
    model_id: str = options.account
    lock = LeaderLock(target.dsn)
    try:
        if not target.is_served and not await lock.try_acquire():
            raise StartError("A service is starting. Nothing was changed; try again in a minute.")
        async with target.database.transaction() as conn:
            is_gone = await delete_model(conn, model_id)
            if is_gone and not target.is_served:
                await delete_account(conn, model_id, None)
    except asyncpg.ForeignKeyViolationError:
        is_gone = False
    finally:
        await lock.release()
    if not is_gone:
        paused = await _set_active(target, model_id, is_active=False)
        kept = f"Its record stays, with its account and positions: `trader flatten --account {model_id}` closes them."
        return Result({**paused.value, "removed": False}, [*paused.lines, kept])
    line, value = f"{model_id} is removed. It had never decided or traded.", {"modelId": model_id, "removed": True}
    if not target.is_served:
        return Result(value, [line])
    done = await operate(Verb.REMOVE, options, target)
    return Result({**done.value, **value}, [line, *done.lines], done.code)


async def _set_active(target: TargetDatabase, model_id: str, *, is_active: bool) -> Result:
    async with target.database.transaction() as conn:
        models = {model.id: model for model in await select_models(conn)}
        if model_id not in models:
            raise StartError(f"There is no model {model_id!r}. Existing models: {allowed(models)}.")
        await update_model_active(conn, model_id, is_active=is_active)
    state = "active" if is_active else "paused"
    line = f"{model_id} is {state}. {_SOON}"
    if models[model_id].active == is_active:
        line = f"{model_id} was already {state}."
    return Result({"modelId": model_id, "active": is_active}, [line])


async def show_budgets(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Return the budget of every model that has one, its cost today (UTC), and the remaining tokens."""
    async with target.database.reading() as conn:
        models = {model.id: model for model in await select_models(conn)}
    kept = await read_budgets(options, target, models)
    total_usd, states = kept.total_usd, kept.states(models)
    rows = [
        (model_id, models[model_id].configuration.owner or "", *_budget_row(state))
        for model_id, state in states.items()
    ]
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
    """Return the budgets with the costs of the current day; in a replay, the market's day."""
    total_usd, run_tokens, answer_tokens = read_some(
        os.environ, options.env_file, "ai_budget_usd_per_day", "run_tokens_max", "answer_tokens_max"
    )
    async with target.database.reading() as conn:
        now = await select_lived_until(conn) or SystemClock().now()
    kept = Budgets(target.database, total_usd, run_tokens, answer_tokens)
    await kept.follow(now, models)
    return kept


def _budget_row(budget: Budget) -> tuple[str, ...]:
    return (
        "shared" if budget.usd is None else f"{format_decimal(budget.usd)} USD",
        f"{'~' if budget.is_estimated else ''}{budget.spent:.4f} USD",
        STATES[budget.state],
        f"{budget.tokens:,}",
    )
