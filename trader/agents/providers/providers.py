"""Providers of decisions: the table of AI providers, and the rule agents, which need no network."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.models import CODE_PROVIDERS, Model, ProviderDefinition, TokenPrice
from trader.agents.domain.tools import request_of
from trader.agents.domain.view import Shown
from trader.agents.models_file import provider_issues
from trader.agents.providers.batches import INTERFACES, Batches
from trader.agents.providers.client import PROTOCOLS, AttemptTiming, ProviderAccess, ProviderClient
from trader.agents.providers.protocols import ANSWER_TOKENS_MIN, THINKING_TOKENS_MIN, thinking_budget
from trader.agents.providers.strategy_process import StrategyProvider, StrategyStates
from trader.agents.variants import VARIANTS
from trader.settings.providers import PROVIDERS as SHIPPED
from trader.settings.providers import ProviderSettings, name_of_keys
from trader.settings.settings import Settings
from trader.settings.toml_lines import name_of

log = logging.getLogger("trader.agents")

PROVIDERS: Final[Mapping[str, ProviderDefinition]] = {
    name: ProviderDefinition(name=name, **fields) for name, fields in SHIPPED.items()
}
"""The providers that ship with the service; their keys and addresses are settings."""


class Provider(Protocol):
    """Source of a model's decisions: a remote AI or a rule agent."""

    @property
    def name(self) -> str: ...

    @property
    def is_remote(self) -> bool:
        """Whether the provider is remote and therefore reads the messages of a turn."""
        ...

    def left_out(self, model: Model) -> Collection[str]:
        """Return the fields omitted from a model's requests because the provider refused them."""
        ...

    async def shown(self, model: Model) -> Shown:
        """Return what a model's view shows of each market.

        :raises ProviderError: the model cannot be called
        """
        ...

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Answer one turn.

        :raises ProviderTimeout: the provider did not answer in time
        :raises ProviderError: no usable answer; the message says why, without secrets
        """
        ...

    async def close(self) -> None: ...


class RuleProvider:
    """The rule agents as a provider: the first answer has their orders, the second `holding`."""

    name = "rules"
    is_remote = False

    def left_out(self, model: Model) -> Collection[str]:
        return ()

    async def shown(self, model: Model) -> Shown:
        return VARIANTS[model.variant].agent().shown

    async def answer(self, turn: Turn) -> ModelAnswer:
        variant = VARIANTS[turn.model.variant]
        *changes, holding = variant.agent().decide(turn.view)
        decisions = changes if changes and turn.number == 1 else [holding]
        return ModelAnswer(
            text=None,
            calls=tuple(request_of(number, decision) for number, decision in enumerate(decisions, 1)),
            message={},
            model=turn.model.router_model_name,
        )

    async def close(self) -> None:
        """Do nothing: there are no open resources."""


class Providers(dict[str, Provider]):
    """The providers by name, configured or defined by models. `make` creates the client of a definition."""

    def __init__(
        self, *providers: Provider, make: Callable[[ProviderDefinition], ProviderClient | None] | None = None
    ) -> None:
        super().__init__({provider.name: provider for provider in providers})
        self._make = make
        self._replaced: list[Provider] = []

    def learn(self, models: Iterable[Model]) -> None:
        """Create a client for every provider that models define; a changed definition replaces its client.

        No definition replaces a provider that ships with the service, whatever a row of the database says.
        """
        for model in models:
            definition = model.configuration.provider_definition
            known = self.get(model.provider)
            if definition is None or self._make is None or model.provider in (*PROVIDERS, *CODE_PROVIDERS):
                continue
            if isinstance(known, ProviderClient) and known.definition == definition:
                continue
            if known is not None:
                self._replaced.append(known)  # its pending requests continue
            if (client := self._make(definition)) is not None:
                self[model.provider] = client
            else:
                self.pop(model.provider, None)

    async def close(self) -> None:
        """Close the connections of all providers."""
        for provider in (*self.values(), *self._replaced):
            await provider.close()


def make_providers(settings: Settings, states: StrategyStates | None = None, batches: Path | None = None) -> Providers:
    """Return a client per configured provider, the rule agents, and the strategies with the store of their states.

    With a folder for journals of `batches`, providers that have a batch interface are asked through it.
    """

    timing = AttemptTiming(settings.attempt_timeout_s)
    servers: dict[str, asyncio.Semaphore] = {}
    addresses = {name: given.base_url for name, given in settings.providers.items() if given.base_url is not None}

    def client_of(definition: ProviderDefinition, access: ProviderAccess, slots: int | None) -> ProviderClient:
        semaphore = servers.setdefault(definition.server, asyncio.Semaphore(slots)) if slots else None
        if batches is None or definition.protocol not in INTERFACES:
            return ProviderClient(definition, access, timing, semaphore)
        journal = batches / f"batches-{definition.name}.json"
        definition, access = replace(definition, stream=False), replace(access, secrets=access.secrets[:1])
        return ProviderClient(definition, access, timing, None, Batches(journal, definition.protocol, timing.sleep))

    def make_shipped(name: str, configured: ProviderSettings) -> ProviderClient:
        place = f"{name.upper()}_BASE_URL", f"{name.upper()}_API_KEY"
        return client_of(PROVIDERS[name], ProviderAccess(configured.keys, configured.base_url, *place), None)

    def make(definition: ProviderDefinition) -> ProviderClient | None:
        for path, message in provider_issues(msgspec.to_builtins(definition), addresses):
            log.error("the provider %s is not called: its %s: %s", definition.name, name_of(path), message)
            return None
        name = "" if definition.key_variable is None else name_of_keys(definition.key_variable)
        keys = settings.providers.get(name, ProviderSettings(None, ())).keys
        access = ProviderAccess(keys, key_variable=definition.key_variable)
        return client_of(definition, access, definition.slots)

    clients = [make_shipped(name, given) for name, given in settings.providers.items() if name in PROVIDERS]
    return Providers(RuleProvider(), StrategyProvider(states), *clients, make=make)


def definition_of(model: Model) -> ProviderDefinition | None:
    """Return the definition of a model's provider; None for code and for an undefined provider."""
    return model.configuration.provider_definition or PROVIDERS.get(model.provider)


def answer_tokens_min(model: Model) -> int:
    """Return the lowest token limit that an answer may have; it includes the smallest thinking budget."""
    definition = definition_of(model)
    fields = ({} if definition is None else definition.request, model.configuration.request)
    thinks = any(thinking_budget(each) is not None for each in fields)
    return ANSWER_TOKENS_MIN + (THINKING_TOKENS_MIN if thinks else 0)


def own_answer_limit(model: Model) -> int | None:
    """Return the limit of an answer's tokens that request fields set, those of the model's row first."""
    definition = definition_of(model)
    if definition is None:
        return None
    for request in (model.configuration.request, definition.request):
        for fields in (request, request.get("generationConfig")):
            for name in PROTOCOLS[definition.protocol].limit_fields:
                limit = fields.get(name) if isinstance(fields, Mapping) else None
                if isinstance(limit, int) and limit > 0:
                    return limit
    return None


def highest_cost(model: Model, price: TokenPrice, input_tokens: int, output_tokens: int) -> Decimal:
    """Return the maximum cost of these tokens: all input is assumed to be written to a cache that charges."""
    definition = definition_of(model)
    is_charged = price.cache_write is not None or (
        definition is not None and PROTOCOLS[definition.protocol].charges_cache_writes
    )
    plain = price.cost(input_tokens, 0, output_tokens)
    hourly = input_tokens if model.configuration.cache_ttl == "1h" else 0
    return max(plain, price.cost(input_tokens, 0, output_tokens, input_tokens, hourly)) if is_charged else plain


def base_url_of(model: Model, settings: Settings) -> str | None:
    """Return the base URL of a model's provider; None for a rule agent and for an undefined provider."""
    definition = definition_of(model)
    if definition is None:
        return None
    configured = settings.providers.get(model.provider) if model.provider in PROVIDERS else None
    return definition.base_url if configured is None else configured.base_url or definition.base_url


def find_in_cooldown(providers: Mapping[str, Provider]) -> dict[str, str]:
    """Return the AI providers and individual keys that are currently unavailable, with the reasons."""
    unavailable = find_outages(providers)
    for name, provider in providers.items():
        if isinstance(provider, ProviderClient) and name not in unavailable:
            unavailable |= {f"{name} {key}": why for key, why in provider.keys_in_cooldown().items()}
    return unavailable


def find_outages(providers: Mapping[str, Provider]) -> dict[str, str]:
    """Return the AI providers that are currently unavailable to all models, with the reasons."""
    outages = {name: provider.outage() for name, provider in providers.items() if isinstance(provider, ProviderClient)}
    return {name: reason for name, reason in outages.items() if reason is not None}
