"""Providers of decisions: the table of AI providers, and the rule agents, which need no network."""

from collections.abc import Collection, Iterator, Mapping
from typing import Final, Protocol

import msgspec

from trader.domain.agents.conversation import ModelAnswer, ToolRequest, Turn
from trader.domain.agents.tools import TOOL_NAMES, Decision
from trader.domain.models import Model
from trader.gateways.agents.chat import ChatClient, ProviderRow
from trader.provider_settings import PROVIDERS as CONFIGURABLE
from trader.settings import Settings
from trader.variants import VARIANTS

PROVIDERS: Final[Mapping[str, ProviderRow]] = {
    row.name: row
    for row in (
        ProviderRow("openrouter", "https://openrouter.ai/api/v1", extra={"usage": {"include": True}}),
        ProviderRow("nim", "https://integrate.api.nvidia.com/v1"),
        ProviderRow("mistral", "https://api.mistral.ai/v1"),
        ProviderRow("openai", "https://api.openai.com/v1", limit_field="max_completion_tokens"),
    )
}
assert set(PROVIDERS) == set(CONFIGURABLE), "every provider that can be configured has its row"


class Provider(Protocol):
    """Decides for a model: an AI behind a network, or a rule agent."""

    @property
    def name(self) -> str: ...

    @property
    def is_remote(self) -> bool:
        """Whether it reads the messages of a turn."""
        ...

    def left_out(self, model: Model) -> Collection[str]:
        """Return the fields that requests for a model leave out, since the provider has refused them."""
        ...

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Answer one turn.

        :raises ProviderTimeout: it did not answer in time
        :raises ProviderError: no usable answer; the message says why, without secrets
        """
        ...

    async def close(self) -> None: ...


class RuleProvider:
    """The rule agents as a provider: their orders are in the first answer, `holding` in one of its own."""

    name = "rules"
    is_remote = False

    def left_out(self, model: Model) -> Collection[str]:
        return ()

    async def answer(self, turn: Turn) -> ModelAnswer:
        variant = VARIANTS[turn.model.variant]
        *changes, holding = variant.agent(turn.view, variant.limits)
        decisions = changes if changes and turn.number == 1 else [holding]
        return ModelAnswer(
            text=None,
            calls=tuple(_tool_request(number, decision) for number, decision in enumerate(decisions, 1)),
            message={},
            model=turn.model.router_model_name,
        )

    async def close(self) -> None:
        """Nothing is open."""


def _tool_request(number: int, decision: Decision) -> ToolRequest:
    return ToolRequest(
        id=f"call_{number}", name=TOOL_NAMES[type(decision)], arguments=msgspec.json.encode(decision).decode()
    )


class Providers(Mapping[str, Provider]):
    """The configured providers by name."""

    def __init__(self, *providers: Provider) -> None:
        self._providers = {provider.name: provider for provider in providers}

    def __getitem__(self, name: str) -> Provider:
        return self._providers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._providers)

    def __len__(self) -> int:
        return len(self._providers)

    async def close(self) -> None:
        """Close the connections of all providers."""
        for provider in self._providers.values():
            await provider.close()


def make_providers(settings: Settings) -> Providers:
    """Return a client per configured provider, and the rule agents, which need no configuration."""
    clients = (
        ChatClient(
            PROVIDERS[name],
            configured.keys,
            base_url=configured.base_url,
            attempt_limit_s=settings.attempt_timeout_s,
        )
        for name, configured in settings.providers.items()
    )
    return Providers(RuleProvider(), *clients)


def find_resting(providers: Mapping[str, Provider]) -> dict[str, str]:
    """Return the AI providers that no model can ask at present, and the single keys that rest, with the reasons."""
    resting = find_outages(providers)
    for name, provider in providers.items():
        if isinstance(provider, ChatClient) and name not in resting:
            resting |= {f"{name} {key}": why for key, why in provider.resting_keys().items()}
    return resting


def find_outages(providers: Mapping[str, Provider]) -> dict[str, str]:
    """Return the AI providers that no model can ask at present, with the reason."""
    outages = {name: provider.outage() for name, provider in providers.items() if isinstance(provider, ChatClient)}
    return {name: reason for name, reason in outages.items() if reason is not None}
