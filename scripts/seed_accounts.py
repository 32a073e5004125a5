#!/usr/bin/env python3
"""Create models and accounts, optionally with a trading history. Safe to repeat: only new models are added.

  scripts/seed_accounts.py models.toml                    the models of a file (see below)
  scripts/seed_accounts.py --variant Apex --provider openrouter --router-model deepseek/deepseek-chat
  scripts/seed_accounts.py --demo --models 8              rule models, spread over the variants
  scripts/seed_accounts.py --models 4 --history 7         and the days that they have traded already
  scripts/seed_accounts.py --models 100 --history 90 --language-models     a season, to look at or to measure

A history is of the synthetic market (settings as with --demo). One of up to 30 model-days is traded by the service
itself, minute for minute; a longer one is made in bulk, with decisions that are made up and books that are as exact
(--how tells otherwise).

The database and SIM_INITIAL_CAPITAL are those of the service: the environment and .env, or --database-url. A running
service takes new models up within a minute. In the file:

  [[models]]
  id = "deepseek-apex"                      # 1 to 64 letters, digits, . _ : -
  name = "DeepSeek"                         # optional: the id
  variant = "Apex"                          # Apex, Trendsurfer, Contrarian, Sovereign
  provider = "openrouter"                   # openrouter, nim, mistral, openai, rules
  router_model = "deepseek/deepseek-chat"   # the provider's name for it
  logo = "https://example.org/logo.svg"     # optional
  active = true                             # optional
  initial_capital = 10000                   # optional; only for an account that is not open yet
  venue_account_index = 12                  # optional; live: the account at the venue (default: VENUE_ACCOUNT_INDEX)
  request = {reasoning_effort = "none"}     # optional; fields of every request to its provider, or as JSON text
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if importlib.util.find_spec("trader") is None:  # called by a Python without the service: take that of its environment
    subprocess.run([ROOT / "scripts" / "make_environment", "run"], check=True)  # noqa: S603 - our own script
    python = ROOT / ".venv" / "bin" / "python"
    os.execv(python, [str(python), __file__, *sys.argv[1:]])  # noqa: S606 - as above

# ruff: noqa: E402 - nothing of the service can be imported before its environment is there

import argparse
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta

from seed_season import write_season

from trader.clock import SystemClock, floor_time, iso
from trader.commands.command import run_to_end
from trader.commands.models import Opening, create_models
from trader.commands.models_file import Entry, day_cost_of, entry_of, read_models, variant_argument
from trader.domain.models import VariantId
from trader.dotenv import add_env_file_option
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.errors import SettingsError, StartError, TraderError
from trader.external import ensure_embedded_database, make_source
from trader.history import Pace, write_history
from trader.logs import configure_logs
from trader.settings import Settings
from trader.store.agents.models import select_models
from trader.store.database.leadership import LeaderLock
from trader.store.database.pool import Connection, Database, place
from trader.store.database.schema import apply_schema
from trader.store.exchange.accounts import select_accounts, select_processed_until

EXIT_NO_START = 1
EXIT_WRONG = 2
EXIT_INTERRUPTED = 128 + 2

SERVICE_MODEL_DAYS_MAX = 30
SERVICE_CYCLE_MINUTES = 5
SERVICE_TICKS = timedelta(seconds=5)
SEASON_CYCLE_MINUTES = 13
"""A hundred models come to a million decisions in 90 days."""

MINUTE = timedelta(minutes=1)
BAR_WIDTH = 30

LANGUAGE_MODELS = (
    ("DeepSeek", "deepseek/deepseek-chat"),
    ("Qwen", "qwen/qwen3-max"),
    ("GPT", "openai/gpt-5-mini"),
    ("Claude", "anthropic/claude-sonnet"),
    ("Gemini", "google/gemini-flash"),
    ("Grok", "x-ai/grok-fast"),
    ("Llama", "meta-llama/llama-4-maverick"),
    ("Mistral", "mistralai/mistral-medium"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    environ = dict(os.environ)
    if options.database_url:
        environ["DATABASE_URL"] = options.database_url
    try:
        entries = _entries(options)
        settings = Settings.load(environ, options.env_file, demo=options.demo or options.history is not None)
    except SettingsError as error:
        print("Nothing was changed:", *(f"  {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return EXIT_WRONG
    configure_logs("warning" if settings.log_level == "info" else settings.log_level, settings.log_format)
    try:
        run_to_end(_seed(settings, entries, options))
    except TraderError as error:
        print(f"seed_accounts: {error}", file=sys.stderr)
        return EXIT_NO_START
    except KeyboardInterrupt:
        print("\nInterrupted. Repeat the command to go on from what is written.", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/seed_accounts.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, help="a TOML file of models")
    parser.add_argument("--variant", type=variant_argument, help="one model of this variant")
    parser.add_argument("--provider", help="of that model")
    parser.add_argument("--router-model", help="of that model: the provider's name for it")
    parser.add_argument("--id", help="of that model; default: made of the two before and the variant")
    parser.add_argument("--name", help="of that model; default: its id")
    parser.add_argument("--capital", type=float, help="of that model's account; default: SIM_INITIAL_CAPITAL")
    parser.add_argument("--every", metavar="5m", help="of that model: how often it decides; default: every minute")
    parser.add_argument("--request", metavar="JSON", help="of that model: fields of every request to its provider")
    parser.add_argument("--models", type=int, metavar="N", help="N rule models, spread over the variants")
    parser.add_argument("--history", type=float, metavar="DAYS", help="let them trade through the last days")
    parser.add_argument("--how", choices=("service", "bulk"), help="of the history; default: by its size")
    parser.add_argument(
        "--language-models", action="store_true", help="N inactive language models of openrouter, not rule models"
    )
    parser.add_argument(
        "--cycle", type=float, metavar="MINUTES", help="between the decisions; default: 5, of a season in bulk 13"
    )
    add_env_file_option(parser)
    parser.add_argument("--demo", action="store_true", help="settings as of `scripts/run --demo`")
    parser.add_argument("--database-url", help="default: DATABASE_URL, else the embedded PostgreSQL of this folder")
    return parser


def _entries(options: argparse.Namespace) -> list[Entry]:
    """Return the models that the arguments describe.

    :raises SettingsError: with every mistake in them
    """
    problems = []
    if options.history is not None and not 0 < options.history <= 366:
        problems.append("--history must be above 0 and at most 366 days")
    if options.cycle is not None and not 1 <= options.cycle <= 60:
        problems.append("--cycle must be from 1 to 60 minutes")
    if options.models is not None and not 1 <= options.models <= 1000:
        problems.append("--models must be from 1 to 1000")
    if (options.variant is None) != (options.provider is None) or (options.variant and not options.router_model):
        problems.append("one model needs --variant, --provider and --router-model")
    of_one_model = {"--id": options.id, "--name": options.name, "--capital": options.capital}
    of_one_model |= {"--request": options.request, "--every": options.every}
    misplaced = [name for name, value in of_one_model.items() if value is not None]
    if misplaced and not options.variant:
        problems.append(f"{', '.join(misplaced)}: only of one model, with --variant; in a file each model has its own")
    if not any((options.file, options.variant, options.models, options.history)):
        problems.append("give a file, --variant, --models or --history; see --help")
    if problems:
        raise SettingsError(problems)
    entries = read_models(options.file, options.env_file) if options.file else []
    if options.variant:
        entries.append(_entry_of_arguments(options))
    if options.models:
        entries += sample_models(options.models, are_language_models=options.language_models)
    ids = [entry.id for entry in entries]
    if problems := [f"{model_id}: given twice" for model_id in sorted(set(ids)) if ids.count(model_id) > 1]:
        raise SettingsError(problems)
    return entries


def _entry_of_arguments(options: argparse.Namespace) -> Entry:
    values = {
        "id": options.id or f"{options.router_model.rpartition('/')[2]}-{options.variant.lower()}",
        "name": options.name,
        "variant": options.variant,
        "provider": options.provider,
        "router_model": options.router_model,
        "initial_capital": options.capital,
        "request": options.request or {},
        "every": options.every,
    }
    return entry_of(values)


def sample_models(count: int, *, are_language_models: bool) -> list[Entry]:
    """Return models spread over the variants: rule models, the first of each variant with its id of `--demo`, or
    language models, which are inactive: a history of theirs needs no key, trading does."""
    entries = []
    for number in range(count):
        rank, place = divmod(number, len(VariantId))
        variant = list(VariantId)[place]
        if are_language_models:
            rank, place = divmod(rank, len(LANGUAGE_MODELS))
            provider, (name, router_model) = "openrouter", LANGUAGE_MODELS[place]
            model_id = f"{name.lower()}-{variant.lower()}"
        else:
            provider, router_model = "rules", f"rules/{variant.lower()}"
            model_id, name = f"{variant.lower()}-rules", f"{variant} Rules"
        if rank:
            model_id, name = f"{model_id}-{rank + 1}", f"{name} {rank + 1}"
        entries.append(
            Entry(
                id=model_id, name=name, variant=variant, provider=provider, router_model=router_model,
                active=not are_language_models,
            )
        )  # fmt: skip
    return entries


async def _seed(settings: Settings, entries: Sequence[Entry], options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        url = settings.database_url
        dsn = await _embedded_dsn(settings, stack) if url is None else url.reveal()
        # The last moments that a crash of the server would lose are written again by the next call.
        database = await Database.connect(f"{dsn}{'&' if '?' in dsn else '?'}synchronous_commit=off")
        stack.push_async_callback(database.close)
        await apply_schema(database)
        now = SystemClock().now()
        start, end, is_bulk = now, floor_time(now, MINUTE), False
        if options.history is not None:
            start = floor_time(now - timedelta(days=options.history), MINUTE)
            await _lock_out_services(dsn, settings, stack)
        async with database.transaction() as conn:
            opening = Opening(
                settings.initial_capital, settings.quote_currency, settings.max_accounts, _is_live(settings)
            )
            added, opened, notes = await create_models(conn, entries, start, opening)
            if options.history is not None:  # where a history cannot be written, nothing is
                start, is_bulk = await _check_past(conn, start, options)
        print(
            f"{place(dsn)}: {added} of {len(entries)} models are new, {opened} accounts were opened.", *notes, sep="\n"
        )
        if options.history is None:
            for words in filter(None, map(day_cost_of, entries)):
                print(words)
            return
        if start >= end:
            print(f"The history is complete up to {iso(start)}.")
        elif is_bulk:
            cycle = round(options.cycle or SEASON_CYCLE_MINUTES)
            print(await write_season(database, dsn, settings, start, end, cycle, Progress(start, end).show))
        else:
            pace = Pace(SERVICE_TICKS, MINUTE, timedelta(minutes=options.cycle or SERVICE_CYCLE_MINUTES))
            print(await write_history(database, settings, start, end, pace, Progress(start, end).show))


async def _lock_out_services(dsn: str, settings: Settings, stack: AsyncExitStack) -> None:
    """Lock every service out of the database until the history is written.

    :raises StartError: a service uses it, or the market has no past that can be simulated
    """
    if settings.market_source != "synthetic":
        raise StartError(f"--history needs the synthetic market; MARKET_SOURCE is {settings.market_source}.")
    lock = LeaderLock(dsn)
    stack.push_async_callback(lock.release)
    if not await lock.try_acquire():
        raise StartError(f"A service is at work on {place(dsn)}; stop it first. Nothing was changed.")


async def _check_past(conn: Connection, start: datetime, options: argparse.Namespace) -> tuple[datetime, bool]:
    """Return where the history begins or continues, and whether it is written in bulk.

    :raises StartError: it cannot be written
    """
    past_end = await select_processed_until(conn)
    models = await select_models(conn)
    is_bulk = past_end is None and len(models) * options.history > SERVICE_MODEL_DAYS_MAX
    if options.how is not None:
        is_bulk = options.how == "bulk"
    if is_bulk and past_end is not None:
        raise StartError("This database has a past already; a season in bulk needs a new database.")
    others = [model.id for model in models if model.active and model.provider != "rules"]
    if others and not is_bulk:
        raise StartError(f"--history is traded by rule agents; these models are none: {', '.join(others[:10])}.")
    if past_end is not None:
        start = floor_time(past_end, MINUTE)
    late = [account.id for account in (await select_accounts(conn)).values() if account.run.started_at > start]
    if late:
        raise StartError(f"These accounts were opened after the history begins: {', '.join(late[:10])}.")
    return start, is_bulk


class Progress:
    """Progress bar on a terminal; elsewhere a line for each tenth."""

    def __init__(self, start: datetime, end: datetime) -> None:
        self._start = start
        self._end = end
        self._began_s = time.monotonic()
        self._stage = -1

    def show(self, reached: datetime, account_count: int) -> None:
        part = (reached - self._start) / (self._end - self._start)
        is_terminal = sys.stderr.isatty()
        stage = int(part * (1000 if is_terminal else 10))
        if stage == self._stage:
            return
        self._stage = stage
        spent_s = time.monotonic() - self._began_s
        left = "" if part < 0.005 else f", {timedelta(seconds=round(spent_s / part - spent_s))} left"
        days = (reached - self._start) / timedelta(days=1)
        bar = "#" * int(part * BAR_WIDTH)
        line = f"[{bar:<{BAR_WIDTH}}] {part:4.0%} {days:.1f} days of {account_count} accounts{left}"
        print(f"\r{line:<90}" if is_terminal else line, end="" if is_terminal and part < 1 else "\n", file=sys.stderr)


def _is_live(settings: Settings) -> bool:
    return settings.trading_mode == "live"


async def _embedded_dsn(settings: Settings, stack: AsyncExitStack) -> str:
    """Return the address of the service's database in the embedded PostgreSQL, which is started if it does not run."""
    source = make_source(settings)
    await source.open()
    stack.push_async_callback(source.close)
    server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER).attach(creates=True))
    return await ensure_embedded_database(server, source, settings.venue_account_index if _is_live(settings) else None)


if __name__ == "__main__":
    sys.exit(main())
