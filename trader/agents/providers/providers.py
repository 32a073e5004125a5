"""The providers of a process: a client for each configured one, and the code that decides here."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from trader.agents.domain.models import CODE_PROVIDERS, Model, ProviderDefinition
from trader.agents.models_file import provider_issues
from trader.agents.providers.batches import INTERFACES, Batches
from trader.agents.providers.client import AttemptTiming, ProviderAccess, ProviderClient
from trader.agents.providers.provider import PROVIDERS, Provider, RuleProvider
from trader.agents.providers.strategy_process import StrategyProvider, StrategyStates
from trader.settings.providers import ProviderSettings, name_of_keys
from trader.settings.settings import Settings
from trader.settings.toml_lines import name_of

log = logging.getLogger("trader.agents")


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
