"""Entrants: models as they were configured, and the fingerprint that says whether two were configured alike."""

import hashlib
from collections.abc import Collection, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple

import msgspec
import orjson
import rfc8785

from trader.domain.agents.tools import tool_schemas
from trader.domain.agents.view import VariantLimits
from trader.domain.models import Model
from trader.domain.money import format_decimal

FIRST: Final = 1
"""The number of a model's first entrant."""

COVERAGE_MIN_PERCENT: Final = 95
"""The coverage below which an entrant is listed without a rank."""


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it was configured from `began_at` on. A change begins the next one; `number` counts from 1.

    `configuration` is canonical JSON; `answered_by` is the name of the model that the provider says answered, None
    until it has. Number 0 is what ran before entrants were recorded: its configuration is not known.

    The fields are in the order of the table's columns.
    """

    model_id: str
    number: int
    fingerprint: str | None
    configuration: str | None
    answered_by: str | None
    began_at: datetime


class EntrantRecord(NamedTuple):
    """What a model's present entrant did in the model's run. `began_at` may be before the run.

    A cycle is due when the entrant's cadence asks for a decision while the model is active and the service runs. It is
    decided when its invocation was completed. Number 0 is an entrant whose configuration is not known. `manual_since`
    is the time of the first order by hand on the model's account in the run; from then on it is not judged. `declared`
    is what an external agent said of itself when it was this entrant, as JSON: model, version and promptDigest.
    """

    number: int
    fingerprint: str | None
    began_at: datetime | None
    cycles_decided: int
    cycles_due: int
    manual_since: datetime | None = None
    declared: Mapping[str, str] | None = None

    @property
    def coverage_percent(self) -> float | None:
        """The part of the due cycles in which it decided, in percent; None before the first."""
        return 100 * self.cycles_decided / self.cycles_due if self.cycles_due else None

    @property
    def is_ranked(self) -> bool:
        """Whether it decided often enough for a rank on a board, and alone."""
        if self.manual_since is not None:
            return False
        return self.cycles_due > 0 and 100 * self.cycles_decided >= COVERAGE_MIN_PERCENT * self.cycles_due


NO_RECORD: Final = EntrantRecord(0, None, None, 0, 0)
"""The record of a model that was never invoked."""


class ServiceConditions(NamedTuple):
    """What the service adds to the configuration of every model: bounds of tokens, fees, latency, markets and version.

    `base_url` is the address that the model is asked at, None for a rule agent.
    """

    base_url: str | None
    invocation_tokens_max: int
    answer_tokens_max: int
    taker_fee_bps: Decimal
    maker_fee_bps: Decimal
    latency_ms: int
    markets: tuple[str, ...]
    version: str


def canonical_json(value: Any) -> bytes:
    """Return a JSON value in its canonical form (RFC 8785), in which every number is a double."""
    if _is_plain(value):  # most are, and this is two hundred times as fast
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    try:
        return rfc8785.dumps(value)
    except rfc8785.IntegerDomainError:
        return rfc8785.dumps(_with_doubles(value))


def _is_plain(value: Any) -> bool:
    """Whether an encoder that sorts keys writes the canonical form: no fractions or large numbers, and ASCII keys."""
    if isinstance(value, str | bool | None):
        return True
    if isinstance(value, int):
        return abs(value) < 2**53
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, dict) and all(key.isascii() and _is_plain(item) for key, item in value.items())


def _with_doubles(value: Any) -> Any:
    """Return the value with a float for each whole number that may not be exact as one, which the library refuses."""
    if isinstance(value, Mapping):
        return {key: _with_doubles(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_doubles(item) for item in value]
    return float(value) if isinstance(value, int) and abs(value) >= 2**53 else value


def configuration_of(
    model: Model,
    prompt: str,
    limits: VariantLimits,
    temperature: float,
    service: ServiceConditions,
    left_out: Collection[str],
) -> str:
    """Return everything that decides how a model trades, as canonical JSON; what only names or shows it is left out.

    `left_out` are the fields that its provider refused, and that its requests therefore do not have.
    """
    definition = model.configuration.provider_definition
    own = {} if definition is None else definition.request
    sampling = {"temperature": temperature, **own, **model.configuration.request}
    return canonical_json(
        {
            "prompt": prompt,
            "tools": tool_schemas(service.markets),
            "limits": msgspec.to_builtins(limits),
            "variant": model.variant.value,
            "provider": model.provider,
            "routerModelName": model.router_model_name,
            "baseUrl": service.base_url,
            "protocol": "chat" if definition is None else definition.protocol,
            "sampling": {name: value for name, value in sampling.items() if name not in left_out and value is not None},
            "tokens": {"invocation": service.invocation_tokens_max, "answer": service.answer_tokens_max},
            **({"params": dict(model.configuration.params)} if model.configuration.params else {}),
            **({"external": _external(model)} if model.is_external else {}),
            "cadenceSeconds": model.configuration.cadence.total_seconds(),
            "fees": {
                "takerBps": format_decimal(service.taker_fee_bps),
                "makerBps": format_decimal(service.maker_fee_bps),
            },
            "latencyMs": service.latency_ms,
            "serviceVersion": service.version,
        }
    ).decode()


def _external(model: Model) -> Mapping[str, Any]:
    """Return whose an external agent is and what it says of itself. One that says nothing is like no other.

    Its key is not in it: a new key is no other agent.
    """
    owner, declared = model.configuration.owner, model.configuration.declared
    if declared is None:
        return {"owner": owner, "agent": model.id}
    return {"owner": owner, "version": declared.version, "promptDigest": declared.prompt_digest}


def fingerprint(configuration: str, answered_by: str | None) -> str:
    """Return the SHA-256 of a configuration together with the name of the model that answered, in hexadecimal."""
    whole: Mapping[str, Any] = {**orjson.loads(configuration), "answeredBy": answered_by}
    return hashlib.sha256(canonical_json(whole)).hexdigest()
