"""Variants and models."""

from collections.abc import Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from trader.logs import STEERING

ANSWER_LIMIT_FIELDS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The fields of a request that limit the tokens of an answer, by protocol."""

RESERVED_REQUEST_FIELDS: Final = (
    "contents", "include", "input", "messages", "model", "n", "store", "stream", "stream_options", "system",
    "systemInstruction", "tools",
)  # fmt: skip
"""Fields of a request that the service sets itself; a configuration may set any other."""

CODE_PROVIDERS: Final = ("rules", "strategy")
"""The providers whose decisions are made by code: the rule agents, and strategies of files."""

CYCLE: Final = timedelta(seconds=60)
"""The interval of the trade executor: the shortest cadence of a model, and the unit of the reversal rule."""


EXTERNAL: Final = "external"
"""The provider of the models that external agents trade."""


class VariantId(StrEnum):
    """The variants of this build; the database has the same enum."""

    APEX = "Apex"
    TRENDSURFER = "Trendsurfer"
    CONTRARIAN = "Contrarian"
    SOVEREIGN = "Sovereign"


def _described(description: str) -> Meta:
    """Return the description that a mistake in a field is answered with."""
    return Meta(extra_json_schema={"description": description})


Every = Annotated[
    str,
    Meta(pattern="^([1-9][0-9]{0,2}m|([1-9]|1[0-9]|2[0-4])h)$"),
    _described('minutes or hours, such as "5m" or "1h", at most "24h"'),
]
UsdPerMillion = Annotated[float, Meta(ge=0, le=10_000), _described("USD per million tokens, a number from 0 to 10000")]
Usd = Annotated[float, Meta(gt=0, le=1e6), _described("USD, a number above 0 and at most 1000000")]
Color = Annotated[str, Meta(pattern="^#[0-9a-fA-F]{6}$"), _described('a color such as "#a855f7"')]
ModelId = Annotated[
    str,
    Meta(pattern=r"^(?!\.{1,2}$)[A-Za-z0-9._:-]{1,64}$(?!\n)"),  # which web addresses take for folders
    _described("1 to 64 letters, digits or any of . _ : -, but not . or .."),
]
Line = Annotated[
    str,
    Meta(min_length=1, max_length=200, pattern=f"^[^{STEERING}]*$"),
    _described("a line of 1 to 200 characters, without control and direction characters"),
]
Currency = Annotated[str, Meta(pattern="^[A-Z]{3}$"), _described('a currency such as "USD"')]
Day = Annotated[date, _described("a date such as 2025-06-30")]


CACHE_WRITE_FACTOR: Final = 1.25


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a model's tokens cost. `cached` is the price of input from the provider's cache; None: as other input.

    `cache_write` is that of input that is written to the cache; None: 1.25 times the input, as Anthropic charges for a
    cache of 5 minutes (its document "Prompt caching", 23 November 2026).

    A models file may give it in another `currency`; in the database it is in USD.
    """

    input: UsdPerMillion
    output: UsdPerMillion
    cached: UsdPerMillion | None = None
    cache_write: UsdPerMillion | None = None
    currency: Currency = "USD"

    def in_usd(self, rate: float) -> "Price":
        """Return the price in USD, of which a unit of its currency is worth `rate`."""
        cached, cache_write = (None if each is None else each * rate for each in (self.cached, self.cache_write))
        return Price(input=self.input * rate, output=self.output * rate, cached=cached, cache_write=cache_write)

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int, written_tokens: int = 0) -> Decimal:
        """Return the cost of an answer in USD; tokens read from the cache and written to it are parts of the input."""
        cached = self.input if self.cached is None else self.cached
        cache_write = self.input * CACHE_WRITE_FACTOR if self.cache_write is None else self.cache_write
        read = min(cached_tokens, input_tokens)
        written = min(written_tokens, input_tokens - read)
        parts = (
            (self.input, input_tokens - read - written),
            (cached, read),
            (cache_write, written),
            (self.output, output_tokens),
        )
        return sum((Decimal(repr(price)) * tokens for price, tokens in parts), Decimal(0)) / 1_000_000


ProtocolName = Literal["chat", "responses", "messages", "gemini"]
"""The protocols of AI providers: OpenAI's chat completions and Responses, Anthropic's Messages, Gemini's own."""

ProviderName = Annotated[
    str, Meta(pattern=r"^[a-z][a-z0-9-]{0,31}$"), _described("1 to 32 lower-case letters, digits or -")
]
KeyVariable = Annotated[
    str, Meta(pattern=r"^[A-Z][A-Z0-9_]{0,50}_API_KEY$"), _described('a variable such as "ANTHROPIC_API_KEY"')
]
WebAddress = Annotated[str, Meta(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"), _described("an http or https address")]


class ProviderDefinition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An AI provider: where it is, how it is asked, and which variable has its keys.

    Further keys are in variables of the same name with a number at the end. With `stream` answers are streamed, which
    some models demand. `slots` limits how many models of one name are asked at once (None: the service's limit).
    `request` has fields of every request; null leaves out one that the service sends. `limit_field` is the name of the
    field that limits an answer's tokens (None: that of the protocol).
    """

    name: ProviderName
    base_url: WebAddress
    protocol: ProtocolName = "chat"
    key_variable: KeyVariable | None = None
    stream: bool = False
    headers: Mapping[str, str] = {}
    slots: Annotated[int, Meta(ge=1, le=256)] | None = None
    request: Mapping[str, Any] = {}
    limit_field: Literal["max_tokens", "max_completion_tokens"] | None = None


DeclaredName = Annotated[
    str,
    Meta(min_length=1, max_length=100, pattern=r"^[\x21-\x7e]+( [\x21-\x7e]+)*$(?!\n)"),
    _described("at most 100 printable characters of ASCII, with single spaces between them"),
]
PromptDigest = Annotated[
    str, Meta(pattern="^[0-9a-f]{64}$(?!\n)"), _described("a SHA-256 digest: 64 hexadecimal digits in lower case")
]


class Declared(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an external agent says of itself beside the name of its model; nothing of it is checked."""

    version: DeclaredName | None = None
    prompt_digest: PromptDigest | None = None


class ModelConfiguration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the models file sets for a model beside its identity; the file and the database have the same names.

    `request` has fields that every request to its provider carries; null leaves out one that the service sends.
    `attempt_timeout_s` limits one attempt (None: the service's limit), and `decision_age_max_s` the age of the view of
    a decision (None: the limit of one attempt). The model decides `every` so often, on the grid
    of the trade executor (None: in every cycle). `budget_usd_per_day` limits what it may cost within a UTC day; when
    that is spent, it only manages what it holds, or pauses. `prompt` replaces the prompt of its variant: in the file
    the name of a text file, in the database the text. `training_cutoff` is the end of what it was trained on. Models
    with the same `replicate_of` are replicates: one model several times, to see how much of a result is its own noise.
    `owner_budget_usd_per_day` limits all models of one `owner` together; of each budget `manage_usd_per_day` is kept
    for managing positions (None: a fifth). `provider_definition` is that of a provider of the models file; the
    database has it with each of its models. `params` are the parameters of a strategy, by name. `declared` is what an
    external agent has said of itself (None: nothing); then `router_model_name` is the name that it gave its model.
    """

    request: Mapping[str, Any] = {}
    attempt_timeout_s: Annotated[int, Meta(ge=5, le=600)] | None = None
    decision_age_max_s: Annotated[int, Meta(ge=5, le=600)] | None = None
    every: Every | None = None
    price: Price | None = None
    budget_usd_per_day: Usd | None = None
    when_spent: Literal["manage", "pause"] = "manage"
    manage_usd_per_day: Usd | None = None
    owner: ModelId | None = None
    owner_budget_usd_per_day: Usd | None = None
    prompt: str | None = None
    training_cutoff: Day | None = None
    color: Color | None = None
    replicate_of: ModelId | None = None
    provider_definition: ProviderDefinition | None = None
    params: Mapping[str, Any] = {}
    declared: Declared | None = None

    def answer_tokens_max(self, default: int) -> int:
        """Return the limit of an answer's tokens: the one that the request fields set, else the default."""
        own = (self.request.get(field) for field in ANSWER_LIMIT_FIELDS)
        return next((limit for limit in own if isinstance(limit, int) and limit > 0), default)

    def highest_cost(self, price: Price, input_tokens: int, output_tokens: int) -> Decimal:
        """Return the most that these tokens may cost: all input is written to a cache where that is charged."""
        is_charged = price.cache_write is not None or (
            self.provider_definition is not None and self.provider_definition.protocol == "messages"
        )
        plain = price.cost(input_tokens, 0, output_tokens)
        return max(plain, price.cost(input_tokens, 0, output_tokens, input_tokens)) if is_charged else plain

    @property
    def cadence(self) -> timedelta:
        """How much time there is from one decision to the next."""
        if self.every is None:
            return CYCLE
        count = int(self.every[:-1])
        return timedelta(hours=count) if self.every.endswith("h") else timedelta(minutes=count)


Contamination = Literal["after cut-off", "before cut-off", "unknown"]
"""Whether a model may have been trained on the period that a result is of."""


def contamination(training_cutoff: date | None, start: datetime) -> Contamination:
    """Return whether a result that begins at `start` is of a time after the end of what its model was trained on."""
    if training_cutoff is None:
        return "unknown"
    return "after cut-off" if start.date() > training_cutoff else "before cut-off"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """An AI model or rule agent that trades one variant. Its account has the same id.

    `venue_account_index` is its account at the venue; None means VENUE_ACCOUNT_INDEX.
    """

    id: str
    name: str
    variant: VariantId
    provider: str
    router_model_name: str
    created_at: datetime
    logo: str | None = None
    active: bool = True
    venue_account_index: int | None = None
    configuration: ModelConfiguration = ModelConfiguration()

    @property
    def is_external(self) -> bool:
        """Whether an external agent decides for it, which asks the service instead of being asked."""
        return self.provider == EXTERNAL

    @property
    def is_asked(self) -> bool:
        """Whether the service asks it for a decision in every cycle of its cadence."""
        return self.active and not self.is_external

    @property
    def is_ai(self) -> bool:
        """Whether an AI provider is asked, which costs; a rule agent and a strategy of a file cost nothing."""
        return self.provider not in CODE_PROVIDERS


def rule_model(variant: VariantId, created_at: datetime) -> Model:
    """Return the model of a variant's rule agent."""
    return Model(
        id=f"{variant.value.lower()}-rules",
        name=f"{variant.value} Rules",
        variant=variant,
        provider="rules",
        router_model_name=f"rules/{variant.value.lower()}",
        created_at=created_at,
    )
