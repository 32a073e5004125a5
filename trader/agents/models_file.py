"""The models file: its entries, read from TOML or from arguments, with the line of each error."""

import argparse
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec.structs import replace

from trader.agents.domain.models import (
    CODE_PROVIDERS,
    CYCLE,
    RESERVED_REQUEST_FIELDS,
    Every,
    Line,
    Model,
    ModelConfiguration,
    ModelId,
    ProviderDefinition,
    TokenPrice,
    Usd,
)
from trader.agents.providers.protocols import StreamedProtocol
from trader.agents.providers.provider import PROTOCOLS
from trader.agents.providers.strategy_process import check_strategy
from trader.core.errors import Issue, SettingsError
from trader.core.files import is_secret_name, read_regular
from trader.core.variant_id import VariantId
from trader.settings.checks import address_problem, is_private
from trader.settings.providers import PROVIDERS, name_of_keys
from trader.settings.toml_lines import (
    find_secrets,
    is_json,
    located,
    name_of,
    read_addresses,
    read_secrets,
    read_toml,
    repeated,
    struct_issues,
)

Capital = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
VenueAccountName = (
    Annotated[int, msgspec.Meta(ge=0, lt=2**48)] | Annotated[str, msgspec.Meta(pattern="^0x[0-9a-fA-F]{40}$(?!\n)")]
)
VenueKeyVariable = Annotated[str, msgspec.Meta(pattern=r"^[A-Z][A-Z0-9_]{0,40}_VENUE_API_KEY$(?!\n)")]
ReplicateCount = Annotated[int, msgspec.Meta(ge=1, le=100)]

AI_FIELDS = (
    "request", "attempt_timeout_s", "decision_age_max_s", "price", "budget_usd_per_day", "when_spent",
    "manage_usd_per_day", "owner", "prompt", "training_cutoff", "cache_ttl",
    "temperature", "tools_off", "calls", "context_tokens",
)  # fmt: skip
"""Fields without meaning for a rule agent."""

SET_ELSEWHERE: Final = {
    "owner_budget_usd_per_day": "set it as budget_usd_per_day of the owner in [[owners]]",
    "declared": "only an external agent declares itself, with agent.declare",
    "provider_definition": "define the provider in [[providers]], and name it as `provider`",
}
"""Fields of a configuration that a model's table does not set."""

PROMPT_CHARACTERS_MAX = 40_000
PROMPT_SUFFIXES: Final = (".md", ".txt")

PROMPT_TOKENS, PROMPT_TOKENS_CACHED, ANSWER_TOKENS = 4_600, 4_000, 300
"""Approximate tokens of a one-step invocation, as measured by `scripts/benchmark prompts`."""


class ModelEntry(ModelConfiguration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model from the file or the arguments, with its configuration fields at the top level.

    `venue_key_variable` names the variable with the venue's key to its account. `replicates` is the number of models
    with this configuration, each with its own account.
    """

    id: ModelId
    variant: VariantId
    provider: Line
    router_model: Line
    every: Every | None = None
    name: Line | None = None
    logo: Line | None = None
    active: bool = True
    initial_capital: Capital | None = None
    venue_account_index: VenueAccountName | None = None
    venue_key_variable: VenueKeyVariable | None = None
    replicates: ReplicateCount = 1

    @property
    def configuration(self) -> ModelConfiguration:
        """The fields that are stored as one value."""
        return msgspec.convert(self, ModelConfiguration, from_attributes=True)


KEY_HEADERS: Final = ("authorization", "x-api-key", "x-goog-api-key")


ROUTING_HEADERS: Final = (
    "connection", "content-encoding", "content-length", "expect", "host", "te", "trailer", "transfer-encoding",
    "upgrade",
)  # fmt: skip
"""Headers that decide who gets a request, with its key, and where it ends."""


class Owner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An owner of models, and the models' combined budget for a UTC day."""

    name: ModelId
    budget_usd_per_day: Usd


class File(msgspec.Struct, forbid_unknown_fields=True):
    """A parsed models file whose tables are not validated yet.

    `temperature` is that of every AI model without its own. `rates` maps each other currency to the USD price of one
    unit.
    """

    models: list[Any]
    providers: list[Any] = []
    owners: list[Any] = []
    rates: dict[str, Any] = {}
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None


def add_keys_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that confirms where the keys of a file's own providers go."""
    parser.add_argument(
        "--send-keys-to",
        action="append",
        default=[],
        metavar="HOST",
        help="confirm the key_host of a provider in the file: its keys are sent there",
    )


def read_models(file: Path, env_file: Path | None, send_keys_to: Collection[str] = ()) -> list[ModelEntry]:
    """Return the entries of a file. No text in the file or its prompts may contain a secret of the settings.

    `send_keys_to` are the hosts to which the operator confirmed that keys may go.

    :raises SettingsError: lists every error with its line and what is allowed there
    """
    secrets, addresses = read_secrets(os.environ, env_file), read_addresses(os.environ, env_file)
    text, document = read_toml(file)
    issues = list(find_secrets(document, secrets))
    if not issues:
        issues += struct_issues(File, document)
    if not issues:
        issues += _head_issues(document, addresses)
    if not issues:
        issues += _unconfirmed_keys(document, send_keys_to)
    entries = []
    if not issues:
        whole = msgspec.convert(document, File)
        whole.owners = msgspec.convert(whole.owners, list[Owner])
        whole.providers = msgspec.convert(whole.providers, list[ProviderDefinition])
        whole.models = [_with_rules_name(values) for values in whole.models]
        for index, values in enumerate(whole.models):
            mistakes = [*_entry_issues(values, whole), *_replace_prompt(values, file.parent, secrets)]
            mistakes += _strategy_issues(values, file.parent)
            issues += [Issue(("models", index, *path), message) for path, message in mistakes]
            if not mistakes:
                entries += _replicates(_entry(values, whole))
        issues += repeated("models", "id", whole.models)
    if issues:
        raise located(file, text, issues)
    return entries


def entry_of(values: Mapping[str, Any]) -> ModelEntry:
    """Return the entry for a model given by command-line arguments.

    :raises SettingsError: with every mistake
    """
    values = _with_rules_name(values)
    if issues := list(_entry_issues(values, File([]))):
        raise SettingsError([f"the model: {name_of(path)}: {message}" for path, message in issues])
    return _entry(values, File([]))


def variant_argument(text: str) -> VariantId:
    """Return the variant that an argument names, ignoring case."""
    for variant in VariantId:
        if text.lower() == variant.value.lower():
            return variant
    raise argparse.ArgumentTypeError(f"unknown variant {text!r}; expected one of {', '.join(VariantId)}")


def day_cost_of(entry: ModelEntry) -> str | None:
    """Describe the daily cost of an AI model that decides in every cycle; None for any other model."""
    if entry.provider in CODE_PROVIDERS or entry.every is not None or not entry.active:
        return None
    invocations = timedelta(days=1) // CYCLE
    tokens = invocations * (PROMPT_TOKENS + ANSWER_TOKENS)
    cost = f"{tokens / 1e6:.1f} million tokens"
    if entry.price is not None:
        each = [entry.price.cost(PROMPT_TOKENS, cached, ANSWER_TOKENS) for cached in (PROMPT_TOKENS_CACHED, 0)]
        low, high = (f"{invocations * usd:.2f}" for usd in each)
        cost += f", {low} USD when the provider caches prompts and {high} when it does not"
    return (
        f"{entry.id} has no `every`, so it decides {invocations} times a day, of which each takes about "
        f'{PROMPT_TOKENS + ANSWER_TOKENS} tokens: {cost}. Typical values are every = "3m" to "5m".'
    )


def _entry(values: Mapping[str, Any], whole: File) -> ModelEntry:
    """Return the entry of a valid table, with its price in USD and its owner's budget."""
    request = values.get("request", {})
    entry = msgspec.convert({**values, "request": _decoded(request)}, ModelEntry)
    budgets = {owner.name: owner.budget_usd_per_day for owner in whole.owners}
    definition = next((definition for definition in whole.providers if definition.name == entry.provider), None)
    price, temperature = entry.price, entry.temperature
    if price is not None:
        price = price.in_usd({"USD": 1.0, **whole.rates}[price.currency])
    elif definition is not None and definition.key_variable is None and is_private(definition.host):
        price = TokenPrice(input=0, output=0)  # your own server
    if temperature is None and entry.provider not in CODE_PROVIDERS:
        temperature = whole.temperature
    budget = None if entry.owner is None else budgets.get(entry.owner)
    own = {"price": price, "temperature": temperature, "owner_budget_usd_per_day": budget}
    return replace(entry, **own, provider_definition=definition)


def _with_rules_name(values: Any) -> Any:
    """Return the table of a model with `router_model`, which rule agents may omit."""
    if not isinstance(values, Mapping) or values.get("provider") != "rules" or values.get("router_model") is not None:
        return values
    return {**values, "router_model": f"rules/{values.get('variant', '')}".lower()}


def _decoded(request: Any) -> Any:
    """Return the fields of a request written as JSON text, which null values require: TOML has no null.

    :raises ValueError: the text is not JSON
    """
    try:
        return msgspec.json.decode(request) if isinstance(request, str) else request
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _head_issues(document: Mapping[str, Any], addresses: Mapping[str, str]) -> Iterator[Issue]:
    """Yield the errors in a file outside its models."""
    checks = {"owners": partial(struct_issues, Owner), "providers": partial(provider_issues, addresses=addresses)}
    for table, check in checks.items():
        for index, values in enumerate(rows := document.get(table, [])):
            for path, message in check(values):
                yield Issue((table, index, *path), message)
        yield from repeated(table, "name", rows)
    for currency, rate in document.get("rates", {}).items():
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < 1e6:
            yield Issue(("rates", currency), f"expected USD for one {currency}, a number above 0, got {rate!r}")


def _unconfirmed_keys(document: Mapping[str, Any], send_keys_to: Collection[str]) -> Iterator[Issue]:
    """Yield the valid providers to whose host the operator has not confirmed that keys may go."""
    for index, values in enumerate(document.get("providers", [])):
        variable, host = values.get("key_variable"), values.get("key_host")
        if variable is not None and name_of_keys(variable) not in PROVIDERS and host not in send_keys_to:
            hint = f"the keys in {variable} would be sent to {host}: to confirm it, add --send-keys-to {host}"
            yield Issue(("providers", index, "key_host"), hint)


def provider_issues(values: Any, addresses: Mapping[str, str]) -> Iterator[Issue]:
    """Yield the errors in the definition of a provider, given the addresses that settings give to shipped ones."""
    mistakes = list(struct_issues(ProviderDefinition, values))
    yield from mistakes
    if not isinstance(values, Mapping):
        return
    if not mistakes:
        keys = values.get("key_variable"), values.get("key_host")
        if problem := address_problem(values["base_url"], *keys, addresses, private=values.get("private", False)):
            yield Issue(("base_url",), problem)
    yield from _request_issues(values.get("request", {}))
    if values.get("name") in (*PROVIDERS, *CODE_PROVIDERS):
        yield Issue(("name",), f"{values['name']!r} ships with the service; give another name")
    wire = PROTOCOLS.get(protocol) if isinstance(protocol := values.get("protocol", "chat"), str) else None
    if isinstance(protocol, str) and wire is None:
        yield Issue(("protocol",), f"expected one of {', '.join(sorted(PROTOCOLS))}")
    if values.get("stream") is True and not isinstance(wire, StreamedProtocol):
        streamed = [name for name, each in PROTOCOLS.items() if isinstance(each, StreamedProtocol)]
        yield Issue(("stream",), f"only the protocols {' and '.join(streamed)} are streamed")
    if values.get("calls") == "json" and protocol != "chat":
        yield Issue(("calls",), f"only the protocol chat takes calls as JSON, not {protocol}")
    for name, text in values.get("headers", {}).items() if isinstance(values.get("headers"), Mapping) else ():
        if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name) or name.lower() in KEY_HEADERS:
            hint = f"a header's name, but none of {', '.join(KEY_HEADERS)}: keys are in the variable `key_variable`"
            yield Issue(("headers", name), f"expected {hint}")
        elif name.lower() in ROUTING_HEADERS:
            yield Issue(("headers", name), f"the service sets it itself, as {', '.join(ROUTING_HEADERS)}")
        elif not isinstance(text, str) or not re.fullmatch(r"[\x20-\x7e]{1,500}", text):
            yield Issue(("headers", name), "expected a text of 1 to 500 printable ASCII characters")


def _entry_issues(values: Any, whole: File) -> Iterator[Issue]:
    """Yield the errors in a model's table: for each field, the errors of its own check or else of its type."""
    if not isinstance(values, Mapping):
        yield from struct_issues(ModelEntry, values)
        return
    issues = [*_reference_issues(values, whole), *_request_issues(values.get("request", {}))]
    yield from issues
    checked = {"request", *(path[0] for path, _ in issues if len(path) == 1)}
    yield from struct_issues(ModelEntry, {name: value for name, value in values.items() if name not in checked})
    provider = values.get("provider")
    if provider in CODE_PROVIDERS:
        given = (name for name in AI_FIELDS if values.get(name, {}) != {})
        yield from (Issue((name,), f"only an AI model has it, not {provider}") for name in given)
    if provider != "strategy":
        yield from (Issue((name,), "only a strategy has it") for name in ("params", "network") if name in values)
    own = next((each for each in whole.providers if each.name == provider), None)
    if values.get("calls") == "json" and own is not None and own.protocol != "chat":
        yield Issue(("calls",), f"only the protocol chat takes calls as JSON, and {provider} has {own.protocol}")
    providers = (*PROVIDERS, *(definition.name for definition in whole.providers), *CODE_PROVIDERS)
    if isinstance(provider, str) and provider not in providers:
        yield Issue(("provider",), f"unknown provider {provider!r}; expected one of {', '.join(providers)}")


def _reference_issues(values: Mapping[str, Any], whole: File) -> Iterator[Issue]:
    """Yield an error for each undefined reference of a table: its owner, or the rate of its currency."""
    owner, owners = values.get("owner"), [owner.name for owner in whole.owners]
    if isinstance(owner, str) and owner not in owners:
        yield Issue(("owner",), f"unknown owner {owner!r}; [[owners]] defines {', '.join(owners) or 'none'}")
    yield from (Issue((name,), how) for name, how in SET_ELSEWHERE.items() if name in values)
    price = values.get("price")
    currency = price.get("currency", "USD") if isinstance(price, Mapping) else "USD"
    if currency != "USD" and currency not in whole.rates:
        hint = f"give the price in USD, or what a unit is worth in USD as [rates] {currency} = …"
        yield Issue(("price", "currency"), f"there is no rate of {currency}: {hint}")
    if price is not None and not isinstance(price, Mapping):
        hint = "input and output in USD per million tokens, such as {input = 0.28, output = 0.42}"
        yield Issue(("price",), f"a price without a unit: expected a table with {hint}")


def _request_issues(request: Any) -> Iterator[Issue]:
    """Yield the errors in the fields that a model adds to its requests."""
    expected = "expected a table of fields, or the same as JSON text"
    try:
        fields = _decoded(request)
    except ValueError as error:
        yield Issue(("request",), f"{expected}: {error}")
        return
    if not isinstance(fields, dict):
        yield Issue(("request",), expected)
        return
    for name, value in fields.items():
        if name in RESERVED_REQUEST_FIELDS:
            reserved = ", ".join(RESERVED_REQUEST_FIELDS)
            yield Issue(("request", name), f"the service sets it itself; any field may be set except {reserved}")
        elif not is_json(value):
            yield Issue(("request", name), "expected text, finite numbers, true, false, lists and tables of these")


def _replace_prompt(values: Any, folder: Path, secrets: Mapping[str, str]) -> Iterator[Issue]:
    """Replace the name of a prompt file with its text, or yield why it cannot be used."""
    name = values.get("prompt") if isinstance(values, Mapping) else None
    if not isinstance(name, str) or values.get("provider") in CODE_PROVIDERS:
        return  # already reported
    expected = (
        f"expected the name of a UTF-8 file (.md or .txt) in the folder of this one, of 1 to {PROMPT_CHARACTERS_MAX} "
        "characters"
    )
    try:
        path = _below(folder, name)
        if path is None:
            yield Issue(("prompt",), f"{expected}; {name!r} is outside of it")
            return
        if path.suffix not in PROMPT_SUFFIXES or is_secret_name(path.name):
            yield Issue(("prompt",), f"{expected}, not {path.name!r}")
            return
        text = read_regular(path, 4 * PROMPT_CHARACTERS_MAX).decode()
    except (OSError, ValueError) as error:
        yield Issue(("prompt",), f"{expected}: {error}")
        return
    if not text.strip() or "\0" in text or len(text) > PROMPT_CHARACTERS_MAX:
        length = "more" if len(text) > PROMPT_CHARACTERS_MAX else len(text)
        yield Issue(("prompt",), f"{expected}; {name!r} has {length}" + (", with a NUL" if "\0" in text else ""))
    yield from find_secrets(text, secrets, "prompt")
    values["prompt"] = text


def _strategy_issues(values: Any, folder: Path) -> Iterator[Issue]:
    """Replace the name of a strategy file with its path, or yield why the strategy cannot be used."""
    if not isinstance(values, dict) or values.get("provider") != "strategy":
        return
    reference, params = values.get("router_model"), values.get("params", {})
    if not isinstance(reference, str) or not isinstance(params, Mapping):
        return  # already reported
    name, _, class_name = reference.rpartition(":")
    path = _below(folder, name)
    if path is None:
        yield Issue(("router_model",), f"expected a file in the folder of this one; {name!r} is outside of it")
        return
    absolute = f"{path}:{class_name}" if name else reference
    if problems := check_strategy(absolute, params, network=values.get("network") is True):
        yield from (Issue(("router_model",), problem) for problem in problems)
    else:
        values["router_model"] = absolute


def _below(folder: Path, name: str) -> Path | None:
    """Return the path of a file in the folder or a folder of it; None if the name leads outside or nowhere."""
    try:
        path = (folder / name).resolve()
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a NUL
        return None
    return path if path.is_relative_to(folder.resolve()) else None


def _replicates(entry: ModelEntry) -> list[ModelEntry]:
    """Return the models of an entry: the entry itself, or one per replicate, numbered in id and name."""
    if entry.replicates == 1:
        return [entry]
    name, group = entry.name or entry.id, entry.replicate_of or entry.id
    return [
        replace(entry, id=f"{entry.id}-{number}", name=f"{name} {number}", replicate_of=group, replicates=1)
        for number in range(1, entry.replicates + 1)
    ]


def surplus_replicates(models: Mapping[str, Model], entries: Sequence[ModelEntry]) -> list[str]:
    """Return the active models that are numbered replicates of an entry but not among the entries."""
    ids = {entry.id for entry in entries}
    bases = {(_base_of(entry), entry.replicate_of or entry.id) for entry in entries}
    return [
        model.id
        for model in models.values()
        if model.active and model.id not in ids and (_base_of(model), model.configuration.replicate_of) in bases
    ]


def _base_of(model: ModelEntry | Model) -> str:
    """Return the id without its replicate number; return any other id unchanged."""
    group = model.replicate_of if isinstance(model, ModelEntry) else model.configuration.replicate_of
    base, _, number = model.id.rpartition("-")
    return base if group is not None and base and number.isdecimal() else model.id
