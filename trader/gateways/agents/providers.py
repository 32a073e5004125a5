"""Providers of decisions: the table of AI providers, and the rule agents, which need no network."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from trader.domain.agents.conversation import ModelAnswer, Turn
from trader.domain.agents.tools import request_of
from trader.domain.market.markets import Interval
from trader.domain.models import Model, ProviderDefinition
from trader.gateways.agents.client import ProviderClient
from trader.gateways.agents.strategy_process import StrategyProvider, StrategyStates
from trader.provider_settings import PROVIDERS as SHIPPED
from trader.provider_settings import ProviderSettings, name_of_keys
from trader.settings import Settings
from trader.variants import VARIANTS

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
        """Whether the provider is remote, and so reads the messages of a turn."""
        ...

    def left_out(self, model: Model) -> Collection[str]:
        """Return the fields that requests for a model leave out, since the provider has refused them."""
        ...

    async def intervals(self, model: Model) -> Sequence[Interval]:
        """Return the intervals of the candles and indicators that a model's view has.

        :raises ProviderError: the model cannot be asked
        """
        ...

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Answer one turn.

        :raises ProviderTimeout: it did not answer in time
        :raises ProviderError: no usable answer; the message says why, without secrets
        """
        ...

    async def close(self) -> None: ...


class RuleProvider:
    """The rule agents as a provider: the first answer has their orders, a second one `holding`."""

    name = "rules"
    is_remote = False

    def left_out(self, model: Model) -> Collection[str]:
        return ()

    async def intervals(self, model: Model) -> Sequence[Interval]:
        return VARIANTS[model.variant].agent.intervals

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
        """Do nothing: no resource is open."""


class Providers(Mapping[str, Provider]):
    """The providers by name: the configured ones, and those that models bring. `make` returns the client of one."""

    def __init__(
        self, *providers: Provider, make: Callable[[ProviderDefinition], ProviderClient] | None = None
    ) -> None:
        self._providers = {provider.name: provider for provider in providers}
        self._make = make
        self._replaced: list[Provider] = []

    def __getitem__(self, name: str) -> Provider:
        return self._providers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._providers)

    def __len__(self) -> int:
        return len(self._providers)

    def learn(self, models: Iterable[Model]) -> None:
        """Create a client for every provider that models define; a changed definition replaces its client."""
        for model in models:
            definition = model.configuration.provider_definition
            known = self._providers.get(model.provider)
            if definition is None or self._make is None:
                continue
            if isinstance(known, ProviderClient) and known.definition == definition:
                continue
            if known is not None:
                self._replaced.append(known)  # its requests under way go on
            self._providers[model.provider] = self._make(definition)

    async def close(self) -> None:
        """Close the connections of all providers."""
        for provider in (*self._providers.values(), *self._replaced):
            await provider.close()


def make_providers(settings: Settings, states: StrategyStates | None = None) -> Providers:
    """Return a client per configured provider, the rule agents, and the strategies, with the keeper of their states."""

    def make(definition: ProviderDefinition) -> ProviderClient:
        configured = settings.providers.get(_configured_as(definition), ProviderSettings(None, ()))
        is_shipped, prefix = definition.name in PROVIDERS, definition.name.upper()
        return ProviderClient(
            definition,
            configured.keys,
            base_url=configured.base_url if is_shipped else None,
            set_by=f"{prefix}_BASE_URL" if is_shipped else "base_url of its [[providers]]",
            key_variable=f"{prefix}_API_KEY" if is_shipped else definition.key_variable,
            attempt_limit_s=settings.attempt_timeout_s,
        )

    clients = [make(PROVIDERS[name]) for name in settings.providers if name in PROVIDERS]
    return Providers(RuleProvider(), StrategyProvider(states), *clients, make=make)


def base_url_of(model: Model, settings: Settings) -> str | None:
    """Return the base URL of a model's provider; None for a rule agent and for an undefined provider."""
    definition = model.configuration.provider_definition or PROVIDERS.get(model.provider)
    if definition is None:
        return None
    configured = settings.providers.get(model.provider) if model.provider in PROVIDERS else None
    return definition.base_url if configured is None else configured.base_url or definition.base_url


def _configured_as(definition: ProviderDefinition) -> str:
    """Return the name under which the settings hold the keys of a provider."""
    if definition.name in PROVIDERS:
        return definition.name
    return "" if definition.key_variable is None else name_of_keys(definition.key_variable)


def find_in_cooldown(providers: Mapping[str, Provider]) -> dict[str, str]:
    """Return the AI providers and single keys that are unavailable at present, with the reasons."""
    unavailable = find_outages(providers)
    for name, provider in providers.items():
        if isinstance(provider, ProviderClient) and name not in unavailable:
            unavailable |= {f"{name} {key}": why for key, why in provider.keys_in_cooldown().items()}
    return unavailable


def find_outages(providers: Mapping[str, Provider]) -> dict[str, str]:
    """Return the AI providers that are unavailable to all models at present, with the reason."""
    outages = {name: provider.outage() for name, provider in providers.items() if isinstance(provider, ProviderClient)}
    return {name: reason for name, reason in outages.items() if reason is not None}
