"""Variants and models."""

from collections.abc import Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from trader.core.logs import STEERING
from trader.core.variant_id import VariantId

RESERVED_REQUEST_FIELDS: Final = (
    "contents", "include", "input", "messages", "model", "n", "store", "stream", "stream_options", "system",
    "systemInstruction", "tools",
)  # fmt: skip
"""Request fields that the service sets itself; a configuration may set any other field."""

CODE_PROVIDERS: Final = ("rules", "strategy")
"""The providers whose decisions are made by code: the rule agents, and strategies from files."""

CYCLE: Final = timedelta(seconds=60)
"""The interval of the trade executor: the shortest cadence of a model, and the unit of the reversal rule."""


EXTERNAL: Final = "external"
"""The provider of the models that external agents trade."""


def _described(description: str) -> Meta:
    """Return the description that the error about an invalid field quotes."""
    return Meta(extra_json_schema={"description": description})


_UNITS: Final = {"s": timedelta(seconds=1), "m": timedelta(minutes=1), "h": timedelta(hours=1)}

Every = Annotated[
    str,
    Meta(pattern=r"^([1-9][0-9]{0,2}m|([1-9]|1[0-9]|2[0-4])h)$(?!\n)"),
    _described('minutes or hours, such as "5m" or "1h", at most "24h"'),
]
EveryInBacktest = Annotated[
    str,
    Meta(pattern=r"^(([1-9]|[1-5][0-9])s|[1-9][0-9]{0,2}m|([1-9]|1[0-9]|2[0-4])h)$(?!\n)"),
    _described('seconds below a minute, minutes or hours, such as "10s", "5m" or "1h", at most "24h"'),
]
"""Intervals of decisions that also have seconds, for backtests on recordings of books."""

UsdPerMillion = Annotated[float, Meta(ge=0, le=10_000), _described("USD per million tokens, a number from 0 to 10000")]
Usd = Annotated[float, Meta(gt=0, le=1e6), _described("USD, a number above 0 and at most 1000000")]
Color = Annotated[str, Meta(pattern=r"^#[0-9a-fA-F]{6}$(?!\n)"), _described('a color such as "#a855f7"')]
ModelId = Annotated[
    str,
    Meta(pattern=r"^(?!\.{1,2}$)[A-Za-z0-9._:-]{1,64}$(?!\n)"),  # which URLs interpret as folders
    _described("1 to 64 letters, digits or any of . _ : - (not only one or two dots)"),
]
Line = Annotated[
    str,
    Meta(min_length=1, max_length=200, pattern=f"^[^{STEERING}]*$"),
    _described("a line of 1 to 200 characters, without control and direction characters"),
]
Currency = Annotated[str, Meta(pattern=r"^[A-Z]{3}$(?!\n)"), _described('a currency such as "USD"')]
Day = Annotated[date, _described("a date such as 2025-06-30")]


CACHE_WRITE_FACTOR: Final = 1.25
CACHE_WRITE_1H_FACTOR: Final = 2.0
"""What input written to Anthropic's cache for 5 minutes, or for an hour, costs relative to other input (its document
"Prompt caching", 23 November 2026)."""


class TokenPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The cost of a model's tokens.

    `cached` is the price of input from the provider's cache; None: the price of other input. `cache_write` is the price
    of input written to the cache, `cache_write_1h` of input written to it for an hour; None: as Anthropic charges,
    1.25 times and twice the price of other input.

    A models file may use another `currency`; the database has prices in USD.
    """

    input: UsdPerMillion
    output: UsdPerMillion
    cached: UsdPerMillion | None = None
    cache_write: UsdPerMillion | None = None
    cache_write_1h: UsdPerMillion | None = None
    currency: Currency = "USD"

    @property
    def is_free(self) -> bool:
        return not (self.input or self.output)

    def in_usd(self, rate: float) -> "TokenPrice":
        """Return the price in USD, where `rate` is the worth of one unit of its currency in USD."""
        names = "input", "output", "cached", "cache_write", "cache_write_1h"
        prices = {name: price * rate for name in names if (price := getattr(self, name)) is not None}
        return TokenPrice(**prices)

    def cost(
        self,
        input_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        written_tokens: int = 0,
        written_1h_tokens: int = 0,
    ) -> Decimal:
        """Return the cost of an answer in USD.

        The input tokens include those read from the cache and written to it, and the written ones those written for an
        hour.
        """
        cached = self.input if self.cached is None else self.cached
        cache_write = self.input * CACHE_WRITE_FACTOR if self.cache_write is None else self.cache_write
        for_an_hour = self.input * CACHE_WRITE_1H_FACTOR if self.cache_write_1h is None else self.cache_write_1h
        read = min(cached_tokens, input_tokens)
        written = min(written_tokens, input_tokens - read)
        hourly = min(written_1h_tokens, written)
        parts = (
            (self.input, input_tokens - read - written),
            (cached, read),
            (cache_write, written - hourly),
            (for_an_hour, hourly),
            (self.output, output_tokens),
        )
        return sum((Decimal(repr(price)) * tokens for price, tokens in parts), Decimal(0)) / 1_000_000


ProviderName = Annotated[
    str, Meta(pattern=r"^[a-z][a-z0-9-]{0,31}$(?!\n)"), _described("1 to 32 lower-case letters, digits or -")
]
KeyVariable = Annotated[
    str,
    Meta(pattern=r"^(?!.*_VENUE_API_KEY$)[A-Z][A-Z0-9_]{0,50}_API_KEY$(?!\n)"),
    _described('a variable in capital letters that ends with _API_KEY, such as "ANTHROPIC_API_KEY"'),
]
WebAddress = Annotated[
    str, Meta(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$(?!\n)"), _described("an http or https address")
]


ContextTokens = Annotated[
    int, Meta(ge=3072, le=10**8), _described("the tokens of a context, at least 3072: no prompt fits into fewer")
]
CallsForm = Annotated[Literal["tools", "json"], _described('"tools" or "json"')]


class ProviderDefinition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An AI provider: its address, its protocol, and the variable with its keys.

    Further keys are in variables of the same name with a number at the end. `key_host` repeats the host of `base_url`,
    with its port if it has one: keys of a provider that does not ship with the service go nowhere else. `private`
    allows http to a private network. With `stream` answers are streamed, which some models require. `slots` limits the
    concurrent requests to its server, whatever the models' names (None: the service's limit for each name). `request`
    has fields to add to every request; null omits a field that the service sends. `limit_field` is the name of the
    field that limits an answer's tokens (None: the protocol's usual field). `protocol` is a key of `PROTOCOLS`. With
    `calls = "json"` models answer with their calls as JSON (`response_format`), which servers without a parser of tool
    calls need. `context_tokens` is the length of its models' contexts (None: the server is asked, or its refusals
    tell).
    """

    name: ProviderName
    base_url: WebAddress
    protocol: str = "chat"
    key_variable: KeyVariable | None = None
    key_host: Line | None = None
    stream: bool = False
    headers: Mapping[str, str] = {}
    slots: Annotated[int, Meta(ge=1, le=256)] | None = None
    private: bool = False
    request: Mapping[str, Any] = {}
    limit_field: Literal["max_tokens", "max_completion_tokens"] | None = None
    calls: CallsForm = "tools"
    context_tokens: ContextTokens | None = None

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def server(self) -> str:
        """The host and port of its address, by which providers that are one server are known."""
        parts = urlsplit(self.base_url)
        host = "localhost" if self.host in ("127.0.0.1", "::1") else self.host
        return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


DeclaredName = Annotated[
    str,
    Meta(min_length=1, max_length=100, pattern=r"^[\x21-\x7e]+( [\x21-\x7e]+)*$(?!\n)"),
    _described("at most 100 printable characters of ASCII, with single spaces between them"),
]
PromptDigest = Annotated[
    str, Meta(pattern="^[0-9a-f]{64}$(?!\n)"), _described("a SHA-256 digest: 64 hexadecimal digits in lower case")
]


class Declared(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An external agent's declaration about itself, in addition to the name of its model; none of it is verified."""

    version: DeclaredName | None = None
    prompt_digest: PromptDigest | None = None


Count = Annotated[int, Meta(ge=0, le=10**9)]


class DeclaredUsage(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True
):
    """An external agent's declaration about one decision; none of it is verified.

    `model` is the model that decided, if it is not the declared one. `steps` counts its requests to models.
    """

    model: DeclaredName | None = None
    steps: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cost_usd: Annotated[float, Meta(ge=0, le=10_000)] | None = None


ToolOff = Literal[
    "createPosition", "closePosition", "updateExitPlan", "placeOrder", "cancelOrder", "fetchIndicators",
    "fetchOrderBook", "note",
]  # fmt: skip
"""The tools that a model may be without; `holding` ends a cycle."""


class ModelConfiguration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a model in the models file, except its identity; the file and the database use the same names.

    `request` has fields to add to every request to its provider; null omits a field that the service sends.
    `attempt_timeout_s` limits one attempt (None: the service's limit), and `decision_age_max_s` the age of a decision's
    view (None: the limit of one attempt). `every` is the interval between its decisions, on the grid of the trade
    executor (None: every cycle); below a minute only in a backtest. `budget_usd_per_day` limits its cost per UTC day;
    once that is spent, it only manages its positions, or pauses. `prompt` replaces the prompt of its variant: in the
    file the name of a text file, in the database the text. `training_cutoff` is the end of its training data. Models
    with the same `replicate_of` are replicates: one model run several times, to see how much of a result is noise.
    `owner_budget_usd_per_day` limits all models of one `owner` together; `manage_usd_per_day` of each budget is kept
    for managing positions (None: a fifth).
    `temperature` replaces its variant's, and `tools_off` are the tools that it is not offered.
    `calls` and `context_tokens` replace its provider's.
    `provider_definition` is the definition of a provider from the models file; the database stores it with each of its
    models. `cache_ttl` is how long a provider with the Messages protocol keeps marked prompts (None: 5 minutes).
    `params` are the parameters of a strategy, by name, and `network` tells whether it may use the network. `declared`
    is an external agent's declaration (None: nothing declared); `router_model_name` then names its declared model.
    """

    request: Mapping[str, Any] = {}
    attempt_timeout_s: Annotated[int, Meta(ge=5, le=600)] | None = None
    decision_age_max_s: Annotated[int, Meta(ge=5, le=600)] | None = None
    every: EveryInBacktest | None = None
    price: TokenPrice | None = None
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
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    tools_off: tuple[ToolOff, ...] = ()
    calls: CallsForm | None = None
    context_tokens: ContextTokens | None = None
    cache_ttl: Annotated[Literal["5m", "1h"], _described('"5m" or "1h"')] | None = None
    params: Mapping[str, Any] = {}
    network: bool = False
    declared: Declared | None = None

    @property
    def known_context(self) -> int | None:
        """The length of the model's context in tokens, as its row or provider states it."""
        provider = None if self.provider_definition is None else self.provider_definition.context_tokens
        return self.context_tokens or provider

    @property
    def calls_as_json(self) -> bool:
        """Whether the model answers with its calls as JSON rather than as tool calls."""
        provider = None if self.provider_definition is None else self.provider_definition.calls
        return (self.calls or provider) == "json"

    @property
    def cadence(self) -> timedelta:
        """The time between two decisions."""
        if self.every is None:
            return CYCLE
        return int(self.every[:-1]) * _UNITS[self.every[-1]]


Contamination = Literal["after cut-off", "before cut-off", "unknown"]
"""Whether a model may have been trained on the period of a result."""


def contamination(training_cutoff: date | None, start: datetime) -> Contamination:
    """Return whether a result that begins at `start` lies after the end of its model's training data."""
    if training_cutoff is None:
        return "unknown"
    return "after cut-off" if start.date() > training_cutoff else "before cut-off"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """An AI model or rule agent that trades one variant. Its account has the same id.

    `venue_account_index` is its account at the venue, and `venue_key_variable` the variable with the key to it; None
    means VENUE_ACCOUNT_INDEX and VENUE_API_KEY.
    """

    id: str
    name: str
    variant: VariantId
    provider: str
    router_model_name: str
    created_at: datetime
    logo: str | None = None
    active: bool = True
    venue_account_index: str | None = None
    venue_key_variable: str | None = None
    configuration: ModelConfiguration = ModelConfiguration()

    @property
    def is_external(self) -> bool:
        """Whether an external agent decides for it, which calls the service instead of being called."""
        return self.provider == EXTERNAL

    @property
    def is_asked(self) -> bool:
        """Whether the service asks it for a decision in each of its due cycles."""
        return self.active and not self.is_external

    @property
    def is_ai(self) -> bool:
        """Whether a paid AI provider decides; rule agents and strategies from files cost nothing."""
        return self.provider not in CODE_PROVIDERS

    @property
    def calls_tools(self) -> bool:
        """Whether it is a model that its provider is asked for tool calls."""
        return self.is_ai and not self.is_external


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
