"""Participants of a backtest that are asked: AI models of a models file, and external agents."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from trader.agents.domain.mask import Mask
from trader.agents.domain.models import EXTERNAL, Model, ModelConfiguration, ModelId
from trader.agents.models_file import ANSWER_TOKENS, PROMPT_TOKENS, PROMPT_TOKENS_CACHED, ModelEntry, read_models
from trader.agents.providers.batches import BATCH_MAX, INTERFACES
from trader.agents.providers.cassette import Cassette
from trader.agents.providers.provider import definition_of
from trader.agents.providers.providers import make_providers
from trader.agents.providers.webhook import check_address, new_secret
from trader.agents.record import InvocationRecord
from trader.agents.variants import VARIANTS
from trader.backtest.accounts import BacktestAccount, DecisionSource
from trader.backtest.agents import BacktestDesk, CalledAgent, CallingAgent, serving_agents
from trader.backtest.answers import KeptAnswers, Spending
from trader.backtest.chosen import Chosen, loaded, twin_of
from trader.backtest.masking import MaskedSession
from trader.backtest.session import AccountSession
from trader.backtest.sources import AiSource, RecordingStrategySource
from trader.backtest.spec import Participants
from trader.core.clock import iso
from trader.core.errors import SettingsError, WebhookError
from trader.core.variant_id import VariantId
from trader.operations.access import issue
from trader.operations.domain.credentials import AGENT_MARK, Credential, digest_of, prefix_of
from trader.settings.dotenv import read_dotenv
from trader.settings.providers import OTHER_KEY_NAME, PROVIDERS
from trader.settings.settings import Settings

_FROM_ENVIRONMENT: Final = ("AI_ATTEMPT_TIMEOUT_S", "MAX_PARALLEL_MODELS")
"""Settings for asking models, which do not change a result. Keys and addresses of the providers are read as well."""


class AgentSource(AiSource):
    """Decision source of an external agent that is called now."""

    keeps_orders = True

    def __init__(
        self,
        model: Model,
        provider: KeptAnswers,
        agent: CalledAgent | CallingAgent,
        settings: Settings,
        ends_at: datetime,
        mask: Mask | None = None,
    ) -> None:
        super().__init__(model, provider, settings, ends_at, mask)
        self.agent = agent

    def renewed(self, model: Model, settings: Settings, ends_at: datetime, mask: Mask | None) -> "AgentSource":
        return AgentSource(model, self.provider, self.agent, settings, ends_at, mask)

    def _environment(self, session: AccountSession) -> AccountSession | MaskedSession:
        environment = super()._environment(session)
        self.agent.begin(environment, session.record)
        return environment

    def _note(self, record: InvocationRecord, followed: BacktestAccount, began_at: datetime) -> None:
        super()._note(record, followed, began_at)
        self.agent.end_decision(record)


def _cassette_of(entrants: Participants) -> Cassette:
    assert entrants.cassette is not None, "a backtest that asks has a cassette"
    return Cassette(entrants.cassette)


# --- external agents --------------------------------------------------------------------------------------------------


async def choose_agents(
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
    twins = [] if mask is None else [(twin_of(model), url, mask) for model, url in called]
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


def choose_of_file(
    entrants: Participants,
    environ: Mapping[str, str],
    settings: Settings,
    period: tuple[datetime, datetime],
    stack: AsyncExitStack,
    decisions: int | None,
) -> Chosen:
    """Return the models of a models file. Raise `SettingsError` with every mistake."""
    file = entrants.models
    assert file is not None, "there is a file of models"
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
        strategy = loaded(entrants, model.router_model_name, model.configuration.params)
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
