"""The commands models list, add, pause and resume."""

import argparse
import os
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import trader.commands.models_try  # noqa: F401 - declares its command
from trader.clock import SystemClock
from trader.commands.command import EXIT_WRONG_SETTINGS, Result, allowed, moment, table
from trader.commands.database import TargetDatabase, database_command
from trader.commands.models_budgets import STATES, read_budgets
from trader.commands.models_file import Entry, day_cost_of, read_models, surplus_replicates
from trader.domain.exchange.ledger import unopened_account
from trader.domain.models import Model
from trader.domain.money import format_decimal, from_number
from trader.errors import SettingsError, StartError
from trader.services.agents.budgets import Budget
from trader.settings import read_some
from trader.store.agents.models import (
    ModelActivity,
    select_model_activity,
    select_models,
    update_model_active,
    update_provider_definition,
    update_venue_account_index,
    upsert_model,
)
from trader.store.database.pool import Connection
from trader.store.exchange.accounts import insert_account, select_accounts
from trader.store.operations.status import select_service_facts

_SOON = "A running service takes this up with its next cycle, within a minute."


@database_command("models list", example="trader models list")
async def list_models(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """List every model, the oldest first, with its state, budget and number of invocations."""
    async with target.reading() as conn:
        models, activity = await select_models(conn), await select_model_activity(conn)
    by_id = {model.id: model for model in models}
    budgets = (await read_budgets(options, target, by_id)).states(by_id)
    heads = ("model", "variant", "provider", "name at the provider", "state", "every", "invocations", "last")
    listed = [(model, activity.get(model.id, ModelActivity())) for model in models]
    rows = [
        (
            model.id,
            model.variant,
            model.provider,
            model.router_model_name,
            _state(model, budgets.get(model.id)) + (", manual" if done.manual_since else ""),
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


def _file_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a TOML file of models")


@database_command("models add", example="trader models add models.toml", arguments=_file_argument, changes=True)
async def add_models(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Add the models of a file, update those that are there, and open missing accounts."""
    try:
        entries = read_models(options.file, options.env_file)
    except SettingsError as error:
        lines = ["Nothing was changed:", *(f"  {problem}" for problem in error.problems)]
        return Result({"problems": error.problems}, lines, EXIT_WRONG_SETTINGS)
    capital, currency, accounts_max = read_some(
        os.environ, options.env_file, "initial_capital", "quote_currency", "max_accounts"
    )
    async with target.database.transaction() as conn:
        is_live = (await select_service_facts(conn)).trading_mode == "live"
        opening = Opening(capital, currency, accounts_max, is_live)
        added, opened, notes = await create_models(conn, entries, SystemClock().now(), opening)
    lines = [f"{added} of {len(entries)} models are new, {opened} accounts were opened. {_SOON}", *notes]
    lines += filter(None, map(day_cost_of, entries))
    return Result({"models": len(entries), "added": added, "opened": opened, "notes": notes}, lines)


class Opening(NamedTuple):
    """Terms for opening accounts. In live trading the service opens them, with their balances at the venue."""

    initial_capital: Decimal
    quote_currency: str
    accounts_max: int
    is_live: bool


async def create_models(
    conn: Connection, entries: Sequence[Entry], at: datetime, opening: Opening
) -> tuple[int, int, list[str]]:
    """Add new models, update the others, and open missing accounts.

    Replicates that are not among the entries any more are deactivated. Return how many models and accounts were added,
    and a sentence for each of those, and for each capital that stays as it is.

    :raises StartError: there would be more accounts than SIM_MAX_ACCOUNTS
    """
    known = {model.id for model in await select_models(conn)}
    accounts = await select_accounts(conn)
    if len(known | {entry.id for entry in entries}) > opening.accounts_max:
        raise StartError(f"That would be more models than SIM_MAX_ACCOUNTS, {opening.accounts_max}.")
    notes = []
    for entry in entries:
        model = Model(
            id=entry.id, name=entry.name or entry.id, variant=entry.variant, provider=entry.provider,
            router_model_name=entry.router_model, logo=entry.logo, active=entry.active, created_at=at,
            configuration=entry.configuration,
        )  # fmt: skip
        await upsert_model(conn, model)
        if entry.venue_account_index is not None:
            await update_venue_account_index(conn, entry.id, entry.venue_account_index)
        if opening.is_live:
            continue
        capital = opening.initial_capital if entry.initial_capital is None else from_number(entry.initial_capital)
        await insert_account(conn, entry.id, unopened_account(entry.id, capital, opening.quote_currency, at).run)
        account = accounts.get(entry.id)
        if account is not None and entry.initial_capital is not None and account.run.initial_capital != capital:
            stays = format_decimal(account.run.initial_capital)
            notes.append(f"{entry.id} is open with {stays} already; its capital stays.")
    definitions = {entry.provider: entry.provider_definition for entry in entries if entry.provider_definition}
    for name, definition in definitions.items():
        await update_provider_definition(conn, name, definition)
    present = {model.id: model for model in await select_models(conn)}
    for model_id in surplus_replicates(present, entries):
        await update_model_active(conn, model_id, is_active=False)
        notes.append(f"{model_id} is a replicate too many now and was deactivated; its results stay.")
    opened = 0 if opening.is_live else sum(entry.id not in accounts for entry in entries)
    return sum(entry.id not in known for entry in entries), opened, notes


def _model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="ID", help="the model, as `trader models list` shows it")


@database_command("models pause", example="trader models pause apex-rules", arguments=_model_argument, changes=True)
async def pause(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Stop the invocations of a model; the exit plans of its positions stay in force."""
    return await _set_active(target, options.model, is_active=False)


@database_command("models resume", example="trader models resume apex-rules", arguments=_model_argument, changes=True)
async def resume(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Resume the invocations of a paused model."""
    return await _set_active(target, options.model, is_active=True)


async def _set_active(target: TargetDatabase, model_id: str, *, is_active: bool) -> Result:
    async with target.database.transaction() as conn:
        models = {model.id: model for model in await select_models(conn)}
        if model_id not in models:
            raise StartError(f"There is no model {model_id!r}. There are: {allowed(models)}.")
        await update_model_active(conn, model_id, is_active=is_active)
    state = "active" if is_active else "paused"
    line = f"{model_id} is {state}. {_SOON}"
    if models[model_id].active == is_active:
        line = f"{model_id} was {state} already."
    return Result({"modelId": model_id, "active": is_active}, [line])
