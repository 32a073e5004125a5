"""The commands models try, one trial invocation of a model on the current market, and models check, which asks its
server what its row needs; nothing is stored."""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import orjson
from msgspec.structs import replace

from trader.agents.built_view import build_view
from trader.agents.conversation import InvocationLimits
from trader.agents.domain.as_written import with_calls_of_text
from trader.agents.domain.conversation import Turn
from trader.agents.domain.invocations import Invocation, Step
from trader.agents.domain.models import Model
from trader.agents.domain.prompt import opening_messages
from trader.agents.entrants import Entrants
from trader.agents.environment import ServiceEnvironment
from trader.agents.models_file import add_keys_argument, entry_of, read_models, variant_argument
from trader.agents.observer import Observer
from trader.agents.payloads import PayloadPacker
from trader.agents.providers.client import ProviderClient
from trader.agents.providers.provider import own_answer_limit
from trader.agents.providers.providers import make_providers
from trader.agents.providers.taapi import make_supplier
from trader.agents.record import InvocationRecord
from trader.agents.recorder import InvocationRecorder, RecorderServices
from trader.agents.sql.models import select_models, upsert_model
from trader.agents.variants import VARIANTS, limits_of, temperature_of
from trader.agents.workflow import Workflow
from trader.commands.command import allowed, command, show
from trader.commands.database import add_database_options, find_database
from trader.composition.external import make_source, settle_seed
from trader.core import tasks
from trader.core.clock import Clock, LockstepClock, SystemClock
from trader.core.errors import ProviderError, SettingsError, StartError
from trader.core.events import EventBus
from trader.core.logs import configure_logs
from trader.core.money import format_decimal
from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.database.schema import apply_schema
from trader.exchange.accounts import Accounts
from trader.exchange.halts import Halts
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.paper import PaperExchange
from trader.market.feed import MarketFeed
from trader.market.sources.source import SeededSource
from trader.settings.providers import PROVIDERS
from trader.settings.settings import Settings, read_database_url, require_provider

QUOTES_WAIT_S: Final = 15.0


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="ID", help="a stored model, or with --file one of the file")
    parser.add_argument("--file", type=Path, help="a models file; then --id names the model in it")
    parser.add_argument("--id", help="the model of --file; without it, the first")
    add_keys_argument(parser)
    add_database_options(parser)


def _arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser)
    parser.add_argument("--provider", choices=[*PROVIDERS, "rules"])
    parser.add_argument("--model", help="the provider's name for it")
    parser.add_argument("--variant", type=variant_argument)
    parser.add_argument("--demo", action="store_true", help="the synthetic market instead of the configured one")
    parser.add_argument("--request", metavar="JSON", help="fields of every request, as in the models file")


@command(
    "models try",
    example="trader models try --provider openrouter --model deepseek/deepseek-chat --variant Apex",
    arguments=_arguments,
    has_json=False,
)
def try_model(options: argparse.Namespace) -> int:
    """Run one invocation of one model on the current market and print everything. Nothing is stored.

    The command reads keys and the market source as the service does; --demo uses the synthetic market. The model sees a
    new account with SIM_INITIAL_CAPITAL. Its calls pass the real workflow, the real guard and the paper exchange,
    regardless of TRADING_MODE: its orders fill on the current books, in a temporary database that is deleted
    afterwards, so the model gets realistic results. A synthetic market is that of the running service, if there is one.
    """
    configure_logs("warning", "console")
    model = asyncio.run(_stored(options)) if options.name and options.file is None else _chosen(options)
    settings = Settings.load(os.environ, options.env_file, demo=options.demo or model.provider == "rules")
    if model.configuration.provider_definition is None:
        require_provider(settings)
    with tempfile.TemporaryDirectory(prefix="trader-try-") as folder:
        Path(folder).chmod(0o755)  # under root the server runs as another user, who needs access
        return asyncio.run(_try(settings, model, Path(folder), options))


@command(
    "models check",
    example="trader models check qwen --file models.toml",
    arguments=_model_arguments,
    has_json=False,
)
def check_model(options: argparse.Namespace) -> int:
    """Ask a model's server whether it has the model, for its context, and for one forced call, and say how fast it is.

    Nothing is traded and nothing is stored. The request is a first prompt, with invented prices.
    """
    configure_logs("warning", "console")
    model = asyncio.run(_stored(options)) if options.file is None else _chosen(options)
    return asyncio.run(_check(Settings.load(os.environ, options.env_file, demo=True), model))


async def _check(settings: Settings, model: Model) -> int:
    own, variant = model.configuration, VARIANTS[model.variant]
    forced = {} if own.calls_as_json else {"tool_choice": "required", **own.request}
    asked = replace(model, configuration=replace(own, request=forced or own.request))
    view = build_view({symbol: {each: [100.0] * 300 for each in variant.intervals} for symbol in ("BTC", "ETH", "SOL")})
    messages = opening_messages(own.prompt or variant.prompt, variant.limits, view, variant.agent().entries(view))
    turn = Turn(
        model=asked, temperature=temperature_of(model), number=1, view=view, messages=messages,
        answer_tokens_max=own_answer_limit(model) or settings.answer_tokens_max,
    )  # fmt: skip
    providers = make_providers(settings)
    providers.learn([model])
    try:
        if not isinstance(provider := providers.get(model.provider), ProviderClient):
            raise SettingsError([f"{model.name}: {model.provider} is no provider with a key or an address"])
        context = (await provider.shown(model)).context_tokens
        answer = await provider.answer(turn)
        left_out = provider.left_out(asked)
    except ProviderError as error:
        show(f"{model.name} cannot be asked: {error}")
        return 1
    finally:
        await providers.close()
    answer = with_calls_of_text(answer, 1, is_json=own.calls_as_json)
    seconds, tokens = (answer.duration_ms or 0) / 1000, answer.output_tokens or 0
    show(f"model: {answer.model} answered")
    show(f"context: {context or 'not told; state it as context_tokens'}, prompt: {answer.input_tokens} tokens")
    if left_out:
        show(f"refused fields, which requests omit: {', '.join(left_out)}")
    show(f"speed: {seconds:.1f} s for {tokens} tokens of answer, at a cadence of {own.cadence.total_seconds():.0f} s")
    if not answer.calls:
        show('call: none, so the server may not read calls: try `calls = "json"`')
        return 1
    call = answer.calls[0]
    is_leaked = call.form is not None and not own.calls_as_json
    show(f"call: {call.name}{f', which the server left in the text ({call.form})' if is_leaked else ''}")
    return 0


async def _stored(options: argparse.Namespace) -> Model:
    """Return a model of the database.

    :raises SettingsError: there is none of this name
    """
    async with find_database(options) as target, target.database.reading() as conn:
        models = {model.id: model for model in await select_models(conn)}
    if options.name not in models:
        raise SettingsError([f"there is no model {options.name!r}; there are {allowed(models)}"])
    return models[options.name]


def _chosen(options: argparse.Namespace) -> Model:
    """Return the model described by the arguments, or the one chosen from the file.

    :raises SettingsError: the arguments describe no model, or the file has no such model
    """
    if options.file is not None:
        entries = read_models(options.file, options.env_file, options.send_keys_to)
        wanted = options.name or options.id
        entry = next((entry for entry in entries if wanted in (None, entry.id)), None)
        if entry is None:
            ids = allowed(entry.id for entry in entries)
            raise SettingsError([f"{options.file} has no model {wanted!r}; it has {ids}"])
    elif None in (options.provider, options.model, options.variant):
        raise SettingsError(["give --provider, --model and --variant, or a models file with --file"])
    else:
        own = {"router_model": options.model, "request": options.request or {}}
        entry = entry_of({"id": "try", "variant": options.variant, "provider": options.provider, **own})
    return Model(
        id="try", name=entry.router_model, variant=entry.variant, provider=entry.provider,
        router_model_name=entry.router_model, created_at=SystemClock().now(), configuration=entry.configuration,
    )  # fmt: skip


async def _try(settings: Settings, chosen: Model, folder: Path, options: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        source = make_source(settings)
        await source.open()
        stack.push_async_callback(source.close)
        server = await stack.enter_async_context(EmbeddedPostgres(folder, durable=False))
        database = await Database.connect(await server.ensure_database("try"), size=2)
        stack.push_async_callback(database.close)
        await apply_schema(database)
        given = options.database_url or read_database_url(os.environ, options.env_file)
        if isinstance(source, SeededSource) and source.seed is None and (given or EMBEDDED_FOLDER.exists()):
            with suppress(StartError):  # there is no such service, so its market is a new one
                async with find_database(options) as target:
                    if target.is_served:
                        await settle_seed(source, target.database, is_written=False)
        await settle_seed(source, database, is_written=True)
        clock, events = source.clock(None), EventBus()
        market = MarketFeed(source, clock)
        accounts, halts = Accounts(database, LedgerWriter(database), events), Halts(database, clock, events)
        exchange = PaperExchange(database, market, clock, settings, accounts, halts)
        await exchange.lead()
        stack.push_async_callback(exchange.resign)
        feed = tasks.start(market.run(exchange.on_tick, clock.now()), "market feed")
        stack.push_async_callback(tasks.end, feed)
        await _first_quotes(market, clock)
        providers = make_providers(settings)
        stack.push_async_callback(providers.close)
        supplier = make_supplier(settings, clock)
        if supplier is not None:
            stack.push_async_callback(supplier.close)
            supplier.latest(next(iter(market.markets)))  # only one market: a free plan allows one request at a time
            await supplier.settled()
        observer = Observer(database, exchange, market, settings, supplier)
        model = replace(chosen, created_at=clock.now())
        providers.learn([model])
        async with database.connection() as conn:
            await ensure_partitions(conn, clock.now())
            await upsert_model(conn, model)
        entrants = Entrants(database, settings)
        recorders = RecorderServices(database, events, PayloadPacker(), entrants, exchange.settle)
        record = InvocationRecorder(recorders, model, clock.now())
        limits = InvocationLimits(settings.run_tokens_max, settings.answer_tokens_max, settings.attempt_timeout_s)
        async with clock.busy():
            environment = ServiceEnvironment(record, exchange, observer, clock, limits_of(model, limits.attempt_s))
            await Workflow(record, providers, environment, events, limits).execute()
        _print(record)
        return 0 if record.invocation.status == "completed" else 1


async def _first_quotes(market: MarketFeed, clock: Clock) -> None:
    """Wait until every market has a price, at most `QUOTES_WAIT_S`."""
    if isinstance(clock, LockstepClock):
        return
    for _ in range(int(QUOTES_WAIT_S * 10)):
        if market.quotes().keys() >= market.markets.keys():
            return
        await asyncio.sleep(0.1)
    missing = market.markets.keys() - market.quotes().keys()
    show(f"no price of {', '.join(sorted(missing))} after {QUOTES_WAIT_S:g} s: {market.last_error or 'no update'}")


def _print(record: InvocationRecord) -> None:
    """Print the recorded messages, calls, steps and response of an invocation."""
    invocation, payload = record.invocation, record.payload
    for message in [] if payload is None else orjson.loads(bytes(payload.messages)):
        show(f"\n=== {message['role']}\n{message.get('content') or ''}")
    for call in record.calls:
        show(f"\n=== call {call.number}: {call.metadata['raw']['name']} → {call.status}")
        show(f"    {call.metadata['raw']['arguments']}")
        for result in call.metadata["results"]:
            show(f"    {orjson.dumps(result).decode()}")
    show(f"\n=== {invocation.status}{f': {invocation.failure_reason}' if invocation.failure_reason else ''}")
    for step in record.steps:
        key = "" if step.key_number is None else f" with key {step.key_number}"
        cost = "not reported" if step.cost_usd is None else f"{format_decimal(step.cost_usd)} USD"
        tokens = " + ".join("?" if count is None else str(count) for count in (step.input_tokens, step.output_tokens))
        show(f"step {step.number}: {step.model}{key}, {tokens} tokens, {step.duration_ms} ms, cost {cost}")
    show(_total(invocation, record.steps))
    if invocation.response:
        show(f"\n{invocation.response}")


def _total(invocation: Invocation, steps: Sequence[Step]) -> str:
    """Describe the decision's cost, its tokens, and the share of its input read from the cache."""
    cached = sum(step.cached_tokens or 0 for step in steps)
    share = f"{100 * cached / invocation.input_tokens:.0f} %" if invocation.input_tokens else "unknown"
    if all(step.cached_tokens is None for step in steps):
        share = "not reported"
    cost = "unknown" if invocation.cost_usd is None else f"{format_decimal(invocation.cost_usd)} USD"
    mark = ", partly estimated" if invocation.is_cost_estimated else ""
    mark += ", partly unknown" if invocation.is_cost_partial else ""
    tokens = (
        f"{invocation.input_tokens:,} input tokens ({share} from the cache), {invocation.output_tokens:,} output tokens"
    )
    return f"total: {tokens}, cost {cost}{mark}"
