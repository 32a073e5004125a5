"""Models of a backtest: rule agents, AI models of a models file, and recorded ones of a folder or a database."""

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from trader.agents.domain.mask import Mask
from trader.agents.domain.models import CODE_PROVIDERS, EXTERNAL, Model, ModelConfiguration, ModelId
from trader.agents.domain.strategy import Strategy
from trader.agents.models_file import ANSWER_TOKENS, PROMPT_TOKENS, PROMPT_TOKENS_CACHED, ModelEntry, read_models
from trader.agents.providers.batches import BATCH_MAX, INTERFACES
from trader.agents.providers.cassette import ANSWERS, MODELS, Cassette
from trader.agents.providers.providers import definition_of, make_providers
from trader.agents.providers.strategy_process import ConfinedStrategy
from trader.agents.providers.webhook import check_address, new_secret
from trader.agents.sql.invocations import select_invocations_within, select_steps, select_tool_calls
from trader.agents.sql.models import select_models
from trader.agents.strategy_files import LoadedStrategy, load_strategy
from trader.agents.variants import VARIANTS
from trader.backtest.accounts import DecisionSource
from trader.backtest.agents import BacktestDesk, CalledAgent, CallingAgent, serving_agents
from trader.backtest.answers import KeptAnswers, KeptDecisions, Spending
from trader.backtest.run import rule_models
from trader.backtest.sources import (
    AgentSource,
    AiSource,
    RecordedInvocation,
    RecordingStrategySource,
    ReplayedDecisions,
    read_recorded_run,
    recorded_invocation,
)
from trader.backtest.spec import DECISIONS, RESULT, Participants
from trader.core.clock import iso, moment_of
from trader.core.errors import SettingsError, WebhookError
from trader.core.variant_id import VariantId
from trader.database.schema import open_database
from trader.market.domain.markets import INTERVALS, Interval
from trader.operations.access import issue
from trader.operations.domain.credentials import AGENT_MARK, Credential, digest_of, prefix_of
from trader.settings.dotenv import read_dotenv
from trader.settings.providers import OTHER_KEY_NAME, PROVIDERS
from trader.settings.settings import Settings

ID_FORM: Final = "it must be 1 to 64 letters, digits or any of . _ : -"
CASSETTE: Final = "cassette"
"""The folder of the answers, inside the backtest's folder."""

MASKED: Final = ":masked"
"""The suffix of the id of an account whose model decides in a masked market."""

_BATCH: Final = 1_000
"""Number of invocations whose calls are read at once."""

_FROM_ENVIRONMENT: Final = ("AI_ATTEMPT_TIMEOUT_S", "MAX_PARALLEL_MODELS")
"""Settings for asking models, which do not change a result. Keys and addresses of the providers are read as well."""


class Chosen(NamedTuple):
    """Models with their decision sources. `cassette` stores AI answers; `is_asking`: missing answers are requested.

    `agent_lines` tell external agents where to call; those with keys are served at the `desk`.
    """

    models: list[tuple[Model, DecisionSource]]
    cassette: Cassette | None
    spending: Spending
    is_asking: bool
    agent_lines: tuple[str, ...] = ()
    desk: BacktestDesk | None = None

    @property
    def strategies(self) -> list[Strategy]:
        """The rule agents and strategies among what decides."""
        return [source.strategy for _, source in self.models if isinstance(source, RecordingStrategySource)]

    @property
    def intervals(self) -> set[Interval]:
        """The candle intervals that the models may read: all of them if there are AI models."""
        if any(isinstance(source, AiSource) for _, source in self.models):
            return set(INTERVALS)
        return {each for strategy in self.strategies for each in strategy.intervals}

    def keeping_decisions(self, folder: Path | None) -> "Chosen":
        """Return the same models. With a folder, its cassette also keeps the decisions of strategies from files."""
        if folder is None:
            return self
        cassette = Cassette(folder) if self.cassette is None else self.cassette
        for _, source in self.models:
            if isinstance(source, RecordingStrategySource) and isinstance(source.strategy, LoadedStrategy):
                source.kept = KeptDecisions(cassette, self.spending)
        return self._replace(cassette=cassette, is_asking=True)

    def open_cassette(self, stack: AsyncExitStack) -> None:
        """Open the cassette for writing. Raises `OSError`."""
        if self.cassette is not None and self.is_asking:
            stack.callback(self.cassette.close)
            self.cassette.open([model for model, source in self.models if isinstance(source, AiSource)])


async def choose_models(
    entrants: Participants,
    environ: Mapping[str, str],
    settings: Settings,
    span: range,
    stack: AsyncExitStack,
    first_prices: Mapping[str, float] | None = None,
    decisions: int | None = None,
    guard: Mapping[str, int] | None = None,
) -> Chosen:
    """Return the models of the entrants. Their resources are closed with the stack.

    `environ` has the settings of the conditions, `span` the seconds in which they decide, `first_prices` the prices
    from which a mask is made, and `guard` the limits that differ from the variants' own.

    :raises SettingsError: with every mistake; without a budget, with an estimate of the cost
    """
    starts_at, ends_at = moment_of(span.start), moment_of(span.stop - 1)
    every, guard = entrants.every, guard or {}
    own: list[tuple[Model, DecisionSource]] = []
    if entrants.variants or not (entrants.models or entrants.models_from or entrants.strategy or entrants.agents):
        own = rule_models(entrants.variants or tuple(VariantId), every, starts_at, guard)
    if entrants.strategy:
        own.append(_of_strategy(entrants, starts_at, guard))
    _check_exclusive(entrants)
    mask = Mask.hiding(entrants.mask, first_prices or {}, starts_at) if entrants.mask else None
    if entrants.agents:
        chosen = await _of_agents(entrants, settings, (starts_at, ends_at), mask, stack)
    elif entrants.models:
        chosen = _of_file(entrants, entrants.models, environ, settings, (starts_at, ends_at), stack, decisions)
    elif entrants.models_from and (Path(entrants.models_from) / ANSWERS).exists():
        cassette = Cassette(Path(entrants.models_from))
        chosen = Chosen(_from_cassette(cassette, settings, ends_at), cassette, Spending(None), is_asking=False)
    elif entrants.models_from:
        chosen = Chosen(await _replayed(entrants.models_from, starts_at, ends_at), None, Spending(None), False)
    else:
        chosen = Chosen([], None, Spending(None), is_asking=False)
    models = own + chosen.models
    if mask is not None:  # agents have their masked copies already
        plain = own if entrants.agents else models
        twins = [(_twin_of(model), each) for model, each in plain]
        models += [(twin, renewed(twin, ends_at, each, settings, mask)) for twin, each in twins]
    ids = [model.id for model, _ in models]
    if repeated := sorted({model_id for model_id in ids if ids.count(model_id) > 1}):
        raise SettingsError(
            [f"{', '.join(repeated)} is the id of two participants; give one of them another id or name"]
        )
    return chosen._replace(models=models)


def _check_exclusive(entrants: Participants) -> None:
    if entrants.models and entrants.models_from:
        raise SettingsError(["--models asks models and --models-from never does; give one of them"])
    if entrants.agents and (entrants.models or entrants.models_from):
        raise SettingsError(["--agent: not with --models or --models-from"])


def _twin_of(model: Model) -> Model:
    """Return the masked copy of a model."""
    try:
        model_id = msgspec.convert(f"{model.id}{MASKED}", ModelId)
    except msgspec.ValidationError:
        raise SettingsError([f"--mask: {model.id}{MASKED} is not a valid account id; {ID_FORM}"]) from None
    return replace(model, id=model_id, name=f"{model.name} (masked)")


def renewed(
    model: Model, ends_at: datetime, source: DecisionSource, settings: Settings, mask: Mask | None = None
) -> DecisionSource:
    """Return a source that decides as another one does, and remembers nothing; without a mask, behind the same one.

    :raises SettingsError: a strategy cannot be copied, or decisions are recorded
    """
    match source:
        case RecordingStrategySource():
            try:
                return RecordingStrategySource(model, deepcopy(source.strategy), mask or source.mask)
            except TypeError as error:
                raise SettingsError([f"{model.id} cannot be copied before it trades: {error}"]) from None
        case AgentSource():
            return AgentSource(model, source.provider, source.agent, settings, ends_at, mask or source.mask)
        case AiSource():
            return AiSource(model, source.provider, settings, ends_at, mask or source.mask)
    raise SettingsError(
        [f"{model.id} has only recorded decisions: it cannot decide in other states or behind a --mask"]
    )


def _loaded(
    entrants: Participants, reference: str | type[Any], params: Mapping[str, Any]
) -> LoadedStrategy | ConfinedStrategy:
    """Return a strategy that decides in this process, or confined in others. Raise `SettingsError`."""
    if entrants.confined and isinstance(reference, str):
        return ConfinedStrategy(reference, params)
    return load_strategy(reference, params)


def _of_strategy(entrants: Participants, at: datetime, guard: Mapping[str, int]) -> tuple[Model, DecisionSource]:
    """Return the model of the entrants' strategy with its decision source."""
    assert entrants.strategy is not None, "there is a strategy"
    strategy = _loaded(entrants, entrants.strategy, entrants.params)
    strategy.limits = replace(VARIANTS[strategy.variant].limits, **guard)
    try:
        model_id = msgspec.convert(strategy.name, ModelId)
    except msgspec.ValidationError:
        raise SettingsError([f"{strategy.file}: {strategy.class_name}.name is {strategy.name!r}; {ID_FORM}"]) from None
    model = Model(
        id=model_id,
        name=strategy.class_name,
        variant=strategy.variant,
        provider="strategy",
        router_model_name=f"{strategy.file.name}:{strategy.class_name}",
        created_at=at,
        configuration=ModelConfiguration(every=entrants.every, params=entrants.params),
    )
    return model, RecordingStrategySource(model, strategy)


def _cassette_of(entrants: Participants) -> Cassette:
    assert entrants.cassette is not None, "a backtest that asks has a cassette"
    return Cassette(entrants.cassette)


# --- external agents --------------------------------------------------------------------------------------------------


async def _of_agents(
    entrants: Participants,
    settings: Settings,
    period: tuple[datetime, datetime],
    mask: Mask | None,
    stack: AsyncExitStack,
) -> Chosen:
    """Return the models of external agents and their masked copies, and serve those that call by themselves.

    The variables TRADER_KEY and TRADER_SECRET, which the examples read too, set the keys, separated by commas, and the
    secret.
    """
    cassette, spending = _cassette_of(entrants), Spending(None)
    models: list[tuple[Model, DecisionSource]] = []
    calling: list[CallingAgent] = []
    keys: list[Credential] = []
    lines: list[str] = []
    given = os.environ.get("TRADER_KEY")
    known = [] if given is None else given.split(",")
    if len(set(known)) < len(known):
        raise SettingsError(["TRADER_KEY has a key twice; each agent needs its own"])
    called = [_agent_model(text, entrants.every, entrants.deadline_s, period[0]) for text in entrants.agents]
    twins = [] if mask is None else [(_twin_of(model), url, mask) for model, url in called]
    for model, url, hidden in [*((model, url, None) for model, url in called), *twins]:
        agent: CalledAgent | CallingAgent
        if url is None:
            agent = CallingAgent(model, settings)
            key, credential = _key_of(model.id, period[0], *known[len(calling) :][:1])
            calling.append(agent)
            keys.append(credential)
            lines.append(f"{model.id} calls with the key {key}")
        else:
            secret = os.environ.get("TRADER_SECRET") or new_secret()
            agent = CalledAgent(model, settings, url, secret)
            stack.push_async_callback(agent.close)
            lines.append(f"{model.id} is called at {url}, signed with {secret}")
        answers = KeptAnswers(EXTERNAL, cassette, spending, agent, 1)
        models.append((model, AgentSource(model, answers, agent, settings, period[1], hidden)))
    desk = BacktestDesk(calling, settings)
    if calling:
        port = settings.port if entrants.port is None else entrants.port
        address = await stack.enter_async_context(serving_agents(desk, keys, settings, port))
        lines.insert(0, f"agent.* and /mcp at {address}")
    return Chosen(models, cassette, spending, is_asking=True, agent_lines=tuple(lines), desk=desk)


def _agent_model(text: str, every: str | None, deadline_s: int | None, at: datetime) -> tuple[Model, str | None]:
    """Return the model of an argument of `--agent`, and the address of its webhook, if it has one."""
    named, has_url, url = text.partition("=")
    name, _, variant = named.partition(":")
    try:
        model = Model(
            id=msgspec.convert(name, ModelId),
            name=name,
            variant=VariantId(variant),
            provider=EXTERNAL,
            router_model_name=EXTERNAL,
            created_at=at,
            configuration=ModelConfiguration(every=every, decision_age_max_s=deadline_s),
        )
        if has_url:
            check_address(url, loopback=True)
    except (msgspec.ValidationError, ValueError, WebhookError):
        variants = ", ".join(VariantId)
        raise SettingsError(
            [
                f"--agent is {text!r}; it must be NAME:VARIANT or NAME:VARIANT=URL, such as scout:Apex or "
                f"scout:Apex=http://127.0.0.1:9000, with one of the variants {variants}"
            ]
        ) from None
    return model, url if has_url else None


def _key_of(agent_id: str, at: datetime, given: str | None = None) -> tuple[str, Credential]:
    """Return the key of an agent: the one of TRADER_KEY, or a new one."""
    key, credential = issue(AGENT_MARK, agent_id, at, ("read", "trade", "operate"), account_id=agent_id)
    if given is None:
        return key, credential
    if not given.startswith(AGENT_MARK):
        raise SettingsError([f"TRADER_KEY must begin with {AGENT_MARK}, and so must further keys after commas"])
    return given, replace(credential, prefix=prefix_of(given), digest=digest_of(given))


# --- AI models to ask -------------------------------------------------------------------------------------------------


def _of_file(
    entrants: Participants,
    file: Path,
    environ: Mapping[str, str],
    settings: Settings,
    period: tuple[datetime, datetime],
    stack: AsyncExitStack,
    decisions: int | None,
) -> Chosen:
    entries = read_models(file, entrants.env_file, entrants.send_keys_to)
    models = [_model(entry, entrants.every, period[0]) for entry in entries if entry.active]
    asked = [model for model in models if model.is_ai]
    if not models:
        raise SettingsError([f"--models: {file} has no active model"])
    texts = {**read_dotenv(entrants.env_file).values, **os.environ}
    keys = {name: text for name, text in texts.items() if _is_of_providers(name)}
    asking = Settings.load({**environ, **keys}, None, demo=True)
    problems = list(_without_key(asked, asking))
    if entrants.is_batched:
        problems += [f"--batch: {name} has no batch interface" for name in _without_batches(asked)]
    budget = entrants.budget_usd
    if budget is None and (paid := [each for each in asked if not _is_free(each)]):
        problems += _estimate(paid, *period, decisions)
        problems += ["--mask: each model is asked as often again, in the masked market"] if entrants.mask else []
    if problems:
        raise SettingsError(problems)
    cassette, spending = _cassette_of(entrants), Spending(budget)
    clients = make_providers(asking, batches=cassette.folder if entrants.is_batched else None)
    clients.learn(asked)
    stack.push_async_callback(clients.close)
    providers = {
        name: KeptAnswers(
            name, cassette, spending, client, BATCH_MAX if entrants.is_batched else asking.max_parallel_models
        )
        for name, client in clients.items()
        if client.is_remote
    }
    sources = [_with_source(entrants, model, providers, settings, period[1]) for model in models]
    return Chosen(sources, cassette, spending, True)


def _is_of_providers(name: str) -> bool:
    of_provider = name.startswith(tuple(f"{provider.upper()}_" for provider in PROVIDERS))
    is_own = of_provider and ("_API_KEY" in name or name.endswith("_BASE_URL"))
    return name in _FROM_ENVIRONMENT or is_own or OTHER_KEY_NAME.fullmatch(name) is not None


def _model(entry: ModelEntry, every: str | None, at: datetime) -> Model:
    configuration = entry.configuration
    return Model(
        id=entry.id,
        name=entry.name or entry.id,
        variant=entry.variant,
        provider=entry.provider,
        router_model_name=entry.router_model,
        logo=entry.logo,
        created_at=at,
        configuration=replace(configuration, every=configuration.every or every),
    )


def _with_source(
    entrants: Participants,
    model: Model,
    providers: Mapping[str, KeptAnswers],
    settings: Settings,
    ends_at: datetime,
) -> tuple[Model, DecisionSource]:
    if model.provider == "rules":
        return model, RecordingStrategySource(model, VARIANTS[model.variant].agent())
    if model.provider == "strategy":
        strategy = _loaded(entrants, model.router_model_name, model.configuration.params)
        strategy.limits = VARIANTS[model.variant].limits
        return model, RecordingStrategySource(model, strategy)
    return model, AiSource(model, providers[model.provider], settings, ends_at)


def _without_key(models: Sequence[Model], settings: Settings) -> Iterator[str]:
    for provider in dict.fromkeys(model.provider for model in models if not model.configuration.provider_definition):
        if provider not in settings.providers:
            names = ", ".join(model.id for model in models if model.provider == provider)
            key = provider.upper()
            yield (
                f"--models: {names}: {provider} has no key. Set {key}_API_KEY, or {key}_BASE_URL for a server of your "
                "own; --models-from executes recorded decisions without a key"
            )


def _without_batches(models: Sequence[Model]) -> list[str]:
    """Return the providers of models that answer no batches."""
    definitions = {model.provider: definition_of(model) for model in models}
    return [name for name, each in definitions.items() if each is not None and each.protocol not in INTERFACES]


def _is_free(model: Model) -> bool:
    return model.configuration.price is not None and model.configuration.price.is_free


def _estimate(models: Sequence[Model], starts_at: datetime, ends_at: datetime, decisions: int | None) -> Iterator[str]:
    """Yield lines that estimate the tokens and cost of these models, at one answer per decision."""
    yield (
        f"--budget-usd is required: the maximum cost of the AI models from {iso(starts_at)} to {iso(ends_at)}. The "
        "estimates below assume one answer per decision; each further step of a decision adds an answer"
    )
    for model in models:
        count = decisions or (ends_at - starts_at) // model.configuration.cadence + 1
        tokens = count * (PROMPT_TOKENS + ANSWER_TOKENS)
        said = f"{model.id}: {count} decisions, {tokens / 1e6:.1f} million tokens"
        price = model.configuration.price
        if price is None:
            yield f"{said}; without a `price` in the models file the cost is not known in advance"
            continue
        low, high = (count * price.cost(PROMPT_TOKENS, cached, ANSWER_TOKENS) for cached in (PROMPT_TOKENS_CACHED, 0))
        yield f"{said}, {low:.2f} USD when the provider caches prompts and {high:.2f} USD when it does not"


# --- recorded models --------------------------------------------------------------------------------------------------


def _from_cassette(cassette: Cassette, settings: Settings, ends_at: datetime) -> list[tuple[Model, DecisionSource]]:
    """Return the AI models and agents of a cassette. It names no code: a stranger may have written it."""
    if not cassette.models:
        raise SettingsError([f"--models-from: the cassette {cassette.folder} names no model in {MODELS}"])
    if code := [model.id for model in cassette.models.values() if model.provider in CODE_PROVIDERS]:
        raise SettingsError(
            [
                f"--models-from: {cassette.folder / MODELS} has {', '.join(code)}, which decide by code, and a "
                "cassette never runs any; --strategy FILE:CLASS runs your own, and --variant a rule agent"
            ]
        )
    names = {model.provider for model in cassette.models.values()}
    models = [model for model in cassette.models.values() if not is_masked(model.id, cassette.models)]
    providers = {name: KeptAnswers(name, cassette, Spending(None), None, 1) for name in names}
    return [(model, AiSource(model, providers[model.provider], settings, ends_at)) for model in models]


def is_masked(model_id: str, models: Container[str]) -> bool:
    """Return whether this is the masked copy of one of these models."""
    return model_id.endswith(MASKED) and model_id.removesuffix(MASKED) in models


async def _replayed(text: str, starts_at: datetime, ends_at: datetime) -> list[tuple[Model, DecisionSource]]:
    """Return the models with recorded decisions within the period: of a database's address, or a backtest's folder."""
    if "://" in text:
        recorded = await _from_database(text, starts_at, ends_at)
    elif not (Path(text) / RESULT).exists():
        raise SettingsError(
            [
                f"--models-from is {text!r}; it must be a cassette (a folder with {ANSWERS}), the folder of a backtest "
                f"({RESULT}, {DECISIONS}), or the address of a database; no embedded database is started for it"
            ]
        )
    else:
        run, decisions = read_recorded_run(Path(text), "--models-from")
        recorded = [(model, decisions.get(model.id, [])) for model in run.models]
    # Inactive, so that a service on the database of this backtest runs no code and calls no address of theirs.
    models: list[tuple[Model, DecisionSource]] = [
        (replace(model, active=False), ReplayedDecisions(model, within))
        for model, invocations in recorded
        if (within := [each for each in invocations if starts_at <= each.started_at <= ends_at])
    ]
    if not models:
        raise SettingsError([f"--models-from: no model decided between {iso(starts_at)} and {iso(ends_at)} there"])
    return models


async def _from_database(
    dsn: str, starts_at: datetime, ends_at: datetime
) -> list[tuple[Model, list[RecordedInvocation]]]:
    recorded: list[tuple[Model, list[RecordedInvocation]]] = []
    async with open_database(dsn) as database, database.connection() as conn:
        for model in await select_models(conn):
            invocations = await select_invocations_within(conn, model.id, starts_at, ends_at)
            decided: list[RecordedInvocation] = []
            for first in range(0, len(invocations), _BATCH):
                batch = invocations[first : first + _BATCH]
                ids = [invocation.id for invocation in batch]
                steps, calls = await select_steps(conn, ids), await select_tool_calls(conn, ids)
                decided += [
                    recorded_invocation(invocation, steps.get(invocation.id, []), calls.get(invocation.id, []))
                    for invocation in batch
                ]
            recorded.append((model, decided))
    return recorded
