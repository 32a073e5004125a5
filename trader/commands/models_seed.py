"""The command models add: models and accounts from a file or arguments, optionally with a history."""

import argparse
import os
from collections.abc import Container, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from msgspec.structs import replace

from trader.agents.domain.models import CODE_PROVIDERS, Model, rule_model
from trader.agents.models_file import (
    ModelEntry,
    add_keys_argument,
    day_cost_of,
    entry_of,
    read_models,
    surplus_replicates,
    variant_argument,
)
from trader.agents.sql.models import (
    lock_history,
    select_models,
    update_model_active,
    update_provider_definition,
    update_venue_account,
    upsert_model,
)
from trader.backtest.history import history_database, past_of, write_history
from trader.commands.command import (
    EXIT_WRONG_SETTINGS,
    Result,
    allowed,
    command,
    print_error,
    print_result,
    run_to_end,
    show,
)
from trader.commands.database import TargetDatabase, add_database_options, run_in_database
from trader.commands.progress import Progress
from trader.composition.external import make_source, settle_seed
from trader.core.clock import SystemClock, floor_time, iso
from trader.core.errors import SettingsError, StartError
from trader.core.money import counted, format_decimal, from_number
from trader.core.variant_id import VariantId
from trader.database.embedded.server import EmbeddedPostgres, database_name
from trader.database.leadership import LeaderLock
from trader.database.pool import Connection
from trader.exchange.domain.ledger import unopened_account
from trader.exchange.sql.accounts import insert_account, select_accounts, select_identity, select_processed_until
from trader.market.sources.synthetic import SyntheticSource
from trader.operations.sql.status import select_service_facts
from trader.settings.dotenv import read_dotenv
from trader.settings.providers import name_of_keys, read_providers
from trader.settings.settings import Settings, merged_texts, read_some

CYCLE_MINUTES: Final = 5

_MINUTE: Final = timedelta(minutes=1)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, help="a TOML file of models")
    parser.add_argument("--variant", type=variant_argument, help="one model of this variant")
    parser.add_argument("--provider", help="the model's provider")
    parser.add_argument("--router-model", help="the provider's name for the model; rules need none")
    parser.add_argument("--id", help="the model's id; default: made from the two options above and the variant")
    parser.add_argument("--name", help="the model's name; default: its id")
    parser.add_argument("--capital", type=float, help="the account's starting capital; default: SIM_INITIAL_CAPITAL")
    parser.add_argument("--every", metavar="5m", help="the model's decision interval; default: every minute")
    parser.add_argument("--request", metavar="JSON", help="fields of every request to the model's provider")
    parser.add_argument("--models", type=int, metavar="N", help="N rule models, spread over the variants")
    parser.add_argument(
        "--history",
        type=float,
        metavar="DAYS",
        help="trade the last DAYS days, in a new database without a service",
    )
    parser.add_argument(
        "--cycle", type=float, metavar="MINUTES", help=f"minutes between decisions; default: {CYCLE_MINUTES}"
    )
    parser.add_argument(
        "--demo", action="store_true", help="the database of `trader --demo`, if no service is running in this folder"
    )
    add_keys_argument(parser)
    add_database_options(parser)


@command("models add", example="trader models add --demo --models 8", arguments=_arguments)
def add(options: argparse.Namespace) -> int:
    """Create models and accounts, optionally with a trading history. Safe to repeat: only new models are added.

      trader models add models.toml                   the models in a file
      trader models add --variant Apex --provider openrouter --router-model deepseek/deepseek-chat
      trader models add --demo --models 8             rule models, spread over the variants
      trader models add --demo --models 4 --history 7         with seven days of trading history

    The models go to the database of --database-url or DATABASE_URL. Without either, they go to the database of the
    service running in this folder, which trades them within a minute; if none is running, to the embedded database of
    the configured market (with --demo, of the synthetic market), which is created if it is missing.

    A history needs the synthetic market and a new database: with a running service or open accounts, the past does not
    change. The rule agents trade it by the service's own workflow.

    A file has a table for each model; docs/models.md lists its further fields:

      [[models]]
      id = "deepseek-apex"                      # 1 to 64 letters, digits, . _ : -
      variant = "Apex"                          # Apex, Trendsurfer, Contrarian, Sovereign
      provider = "openrouter"                   # openrouter, nim, mistral, openai, rules, strategy, or your own
      router_model = "deepseek/deepseek-chat"   # the provider's name for it; rules need none
    """
    options.demo |= options.history is not None
    try:
        entries, settings = _entries(options), None
        if options.history is not None:
            settings = Settings.load(os.environ, options.env_file, demo=True)
            if (source := settings.market_source) != "synthetic":
                raise SettingsError([f"--history needs the synthetic market; MARKET_SOURCE is {source}"])
        work = partial(_seed, entries, settings)
        return print_result(
            run_to_end(run_in_database(work, options, changes=True, create=_create_database)), as_json=options.json
        )
    except SettingsError as error:
        print_error("Nothing was changed:", error.problems, as_json=options.json)
        return EXIT_WRONG_SETTINGS


def _entries(options: argparse.Namespace) -> list[ModelEntry]:
    """Return the models that the arguments describe.

    :raises SettingsError: the arguments are wrong; lists every error
    """
    problems = []
    if options.history is not None and not 0 < options.history <= 366:
        problems.append("--history must be above 0 and at most 366 days")
    if options.cycle is not None and not 1 <= options.cycle <= 60:
        problems.append("--cycle must be from 1 to 60 minutes")
    if options.models is not None and not 1 <= options.models <= 1000:
        problems.append("--models must be from 1 to 1000")
    if (options.variant is None) != (options.provider is None):
        problems.append("one model needs --variant and --provider")
    of_one_model = {"--id": options.id, "--name": options.name, "--capital": options.capital}
    of_one_model |= {"--request": options.request, "--every": options.every, "--router-model": options.router_model}
    misplaced = [name for name, value in of_one_model.items() if value is not None]
    if misplaced and not options.variant:
        problems.append(f"{', '.join(misplaced)}: only for one model, with --variant; in a file each model has its own")
    if not any((options.file, options.variant, options.models, options.history)):
        problems.append("give a file, --variant, --models or --history; see --help")
    if problems:
        raise SettingsError(problems)
    entries = read_models(options.file, options.env_file, options.send_keys_to) if options.file else []
    if options.variant:
        entries.append(_entry_of(options))
    if options.models:
        entries += sample_models(options.models)
    ids = [entry.id for entry in entries]
    if problems := [f"{model_id}: given twice" for model_id in sorted(set(ids)) if ids.count(model_id) > 1]:
        raise SettingsError(problems)
    return entries


def _entry_of(options: argparse.Namespace) -> ModelEntry:
    variant, name = options.variant.lower(), options.router_model
    default_id = f"{variant}-{options.provider}" if name is None else f"{name.rpartition('/')[2]}-{variant}"
    given = {each: getattr(options, each) for each in ("name", "variant", "provider", "router_model", "every")}
    own = {"id": options.id or default_id, "initial_capital": options.capital, "request": options.request or {}}
    return entry_of(given | own)


def sample_models(count: int) -> list[ModelEntry]:
    """Return rule models spread over the variants, the first of each variant with its id in `--demo`."""
    entries = []
    for number in range(count):
        rank, place = divmod(number, len(VariantId))
        model = rule_model(list(VariantId)[place], SystemClock().now())
        entry = ModelEntry(
            id=model.id, name=model.name, variant=model.variant, provider="rules", router_model=model.router_model_name
        )
        entries.append(replace(entry, id=f"{entry.id}-{rank + 1}", name=f"{entry.name} {rank + 1}") if rank else entry)
    return entries


async def _seed(
    entries: Sequence[ModelEntry], settings: Settings | None, options: argparse.Namespace, target: TargetDatabase
) -> Result:
    """Create the models, and write their history with these settings (None: no history)."""
    now = SystemClock().now()
    capital, currency, accounts_max, configured_mode = read_some(
        os.environ, options.env_file, "initial_capital", "quote_currency", "max_accounts", "trading_mode"
    )
    async with AsyncExitStack() as stack:
        lock = LeaderLock(target.dsn)
        stack.push_async_callback(lock.release)
        is_locked = settings is not None and await lock.try_acquire()
        async with target.database.transaction() as conn:
            facts = await select_service_facts(conn)
            if target.is_served and facts.key_names is not None:
                _require_keys(entries, facts.key_names, f"(market {facts.market_identity})")
            texts = merged_texts(os.environ, read_dotenv(options.env_file).values)
            unset = [] if target.is_served else _missing_keys(entries, read_providers(texts, [])).values()
            is_live = (facts.trading_mode or configured_mode) == "live"
            if is_live and options.demo:
                raise StartError(f"{target.place} is for live trading, which excludes --demo and --history.")
            history: tuple[datetime, datetime] | str | None = None
            if settings is not None:
                history = await _plan_history(conn, entries, options, now) if is_locked else "a service is using it"
            start = history[0] if isinstance(history, tuple) else now
            opening = Opening(capital, currency, accounts_max, is_live)
            added, opened, notes = await create_models(conn, entries, start, opening)
        if isinstance(history, str):
            notes.append(f"No history was written, and new models start now: {history}.")
        elif history is not None and settings is not None:
            notes.append(await _write_history(target.dsn, settings, *history, options.cycle))
    taken = "running service picks up new models within a minute" if target.is_served else "next start picks them up"
    those = counted(len(entries), "model")
    lines = [f"{added} of {those} added, {counted(opened, 'account')} opened. The {taken}.", *notes]
    providers = {entry.provider: entry.provider_definition for entry in entries if entry.provider_definition}
    lines += [
        f"{name} gets the keys in {provider.key_variable} at {urlsplit(provider.base_url).netloc}."
        for name, provider in providers.items()
        if provider.key_variable is not None
    ]
    lines += filter(None, map(day_cost_of, entries))
    lines += [f"{variable} is not set here: the service needs it when it starts." for variable in unset]
    return Result({"models": len(entries), "added": added, "opened": opened, "notes": notes}, lines)


def _require_keys(entries: Sequence[ModelEntry], key_names: Sequence[str], which: str) -> None:
    """Refuse models that the running service could not call, given the names of the keys it has.

    :raises StartError: the service has no key of a model's provider
    """
    if missing := _missing_keys(entries, key_names):
        raise StartError(
            f"The running service {which} has no key of {' and '.join(missing)}. Nothing was changed. Stop it with "
            f"Ctrl+C, set {' and '.join(missing.values())} in the environment or in .env, add the models, and start "
            "`trader serve`."
        )


def _missing_keys(entries: Sequence[ModelEntry], key_names: Container[str]) -> dict[str, str]:
    """Return the providers of models that could not be called with these keys, and the variable of each one's key."""
    called = [entry for entry in entries if entry.active and entry.provider not in CODE_PROVIDERS]
    own = {entry.provider: entry.provider_definition for entry in called}
    needed = {name: f"{name.upper()}_API_KEY" if given is None else given.key_variable for name, given in own.items()}
    return {name: variable for name, variable in needed.items() if variable and name_of_keys(variable) not in key_names}


async def _create_database(server: EmbeddedPostgres, options: argparse.Namespace, names: Sequence[str]) -> str:
    """Create the database of the settings (with `options.demo`, the demo's) if it is missing, and return its name."""
    settings = Settings.load(os.environ, options.env_file, demo=options.demo)
    source = make_source(settings)
    await source.open()
    try:
        account = settings.venue_account_index if settings.trading_mode == "live" else None
        name = database_name(source.identity, account)
    finally:
        await source.close()
    await server.ensure_database(name)
    if others := [other for other in names if other != name]:
        why = f"MARKET_SOURCE is {settings.market_source}; --database selects another one: {', '.join(others)}"
        show(f"no service is running in this folder, and {why}", on_stderr=True)
    return name


async def _plan_history(
    conn: Connection, entries: Sequence[ModelEntry], options: argparse.Namespace, now: datetime
) -> tuple[datetime, datetime] | str:
    """Return start and end of the history to write or continue, or the reason why the past does not change.

    :raises StartError: the history can be written neither now nor later
    """
    identity = await select_identity(conn)
    if identity is not None and not identity.market_identity.startswith("synthetic"):
        raise StartError(f"--history needs the synthetic market; the database belongs to {identity.market_identity}.")
    past_end = await select_processed_until(conn)
    start = floor_time(now - timedelta(days=options.history) if past_end is None else past_end, _MINUTE)
    models: dict[str, Model | ModelEntry] = {model.id: model for model in await select_models(conn)}
    models |= {entry.id: entry for entry in entries}
    accounts = await select_accounts(conn)
    late = [account.id for account in accounts.values() if account.run.started_at > start]
    others = [each.id for each in models.values() if each.active and each.provider != "rules"]
    if past_end is not None and late:
        return f"after its end at {iso(past_end)} accounts were opened, such as {late[0]}"
    if past_end is not None and (unknown := sorted(accounts.keys() - models.keys())):
        return f"its account {unknown[0]} belongs to no model"
    if late:
        raise StartError(
            f"These accounts are open without a history: {allowed(late)}. Write the history first, in a new database."
        )
    if others:
        raise StartError(f"Only rule agents can trade a --history; these models are not: {allowed(others)}.")
    return start, floor_time(now, _MINUTE)


async def _write_history(dsn: str, settings: Settings, start: datetime, end: datetime, cycle: float | None) -> str:
    """Write the history, `cycle` minutes between its decisions. Return a line for the operator."""
    if start >= end:
        return f"The history is complete up to {iso(start)}."
    progress = Progress(start, end)
    async with history_database(dsn) as database:
        try:
            source = make_source(settings)
            assert isinstance(source, SyntheticSource), "no other market has a history"
            await settle_seed(source, database, is_written=True)
            past = past_of(source, settings, start, end)
            every = timedelta(minutes=cycle or CYCLE_MINUTES)
            return await write_history(database, settings, past, every, progress.show)
        finally:
            progress.end()


class Opening(NamedTuple):
    """Terms for opening accounts. In live trading the service opens them, with their balances at the venue."""

    initial_capital: Decimal
    quote_currency: str
    accounts_max: int
    is_live: bool


async def create_models(
    conn: Connection, entries: Sequence[ModelEntry], at: datetime, opening: Opening
) -> tuple[int, int, list[str]]:
    """Add new models, update the others, and open missing accounts, once no history is being written.

    Deactivate replicates that are no longer among the entries. Return the numbers of added models and accounts, and a
    sentence for each deactivation and each unchanged capital.

    :raises StartError: the models would exceed SIM_MAX_ACCOUNTS
    """
    await lock_history(conn)
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
        named = entry.venue_account_index
        if named is not None or entry.venue_key_variable is not None:
            venue_account = None if named is None else str(named).lower()
            await update_venue_account(conn, entry.id, venue_account, entry.venue_key_variable)
        if opening.is_live:
            continue
        capital = opening.initial_capital if entry.initial_capital is None else from_number(entry.initial_capital)
        await insert_account(conn, entry.id, unopened_account(entry.id, capital, opening.quote_currency, at).run)
        account = accounts.get(entry.id)
        if account is not None and entry.initial_capital is not None and account.run.initial_capital != capital:
            stays = format_decimal(account.run.initial_capital)
            notes.append(f"{entry.id} is already open with {stays}; its capital does not change.")
    definitions = {entry.provider: entry.provider_definition for entry in entries if entry.provider_definition}
    for name, definition in definitions.items():
        await update_provider_definition(conn, name, definition)
    present = {model.id: model for model in await select_models(conn)}
    for model_id in surplus_replicates(present, entries):
        await update_model_active(conn, model_id, is_active=False)
        notes.append(f"{model_id} is a surplus replicate and was deactivated; its results stay.")
    opened = 0 if opening.is_live else sum(entry.id not in accounts for entry in entries)
    return sum(entry.id not in known for entry in entries), opened, notes
