"""A provider of decisions, what its definition says of a model, and the rule agents, which need no network."""

from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Final, Protocol

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.models import Model, ProviderDefinition, TokenPrice
from trader.agents.domain.tools import request_of
from trader.agents.domain.view import Shown
from trader.agents.providers.gemini import GeminiWire
from trader.agents.providers.messages import MessagesWire
from trader.agents.providers.protocols import (
    ANSWER_TOKENS_MIN,
    THINKING_TOKENS_MIN,
    ChatWire,
    ProviderProtocol,
    thinking_budget,
)
from trader.agents.providers.responses import ResponsesWire
from trader.agents.variants import VARIANTS
from trader.settings.providers import PROVIDERS as SHIPPED
from trader.settings.settings import Settings

PROTOCOLS: Final[dict[str, ProviderProtocol]] = {
    "chat": ChatWire(),
    "responses": ResponsesWire(),
    "messages": MessagesWire(),
    "gemini": GeminiWire(),
}
"""The protocols by their name in a provider's definition: OpenAI's chat completions and Responses, Anthropic's
Messages, Gemini's own."""

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
    """Return the token limit that request fields set for an answer; those of the model's row take precedence."""
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
