"""Entrants: models in one configuration each, and the fingerprint that identifies a configuration."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from trader.agents.domain.models import Model
from trader.agents.domain.tools import tool_schemas
from trader.agents.domain.view import VariantLimits
from trader.core.canonical_json import canonical_json
from trader.core.money import format_decimal

FIRST: Final = 1
"""The number of a model's first entrant."""

COVERAGE_MIN_PERCENT: Final = 95
"""Minimum coverage in percent for a rank; entrants below it are listed without one."""


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the configuration that began at `began_at`. A change begins the next entrant; `number` counts from 1.

    `configuration` is canonical JSON; `answered_by` is the name of the answering model as reported by the provider,
    None before the first answer. Number 0 covers everything before entrants were recorded: its configuration is
    unknown.
    """

    model_id: str
    number: int
    fingerprint: str | None
    configuration: str | None
    answered_by: str | None
    began_at: datetime


class EntrantRecord(msgspec.Struct, frozen=True):
    """The activity of a model's present entrant in the model's run. `began_at` may be before the run.

    A cycle is due when the entrant's cadence calls for a decision while the model is active and the service runs. It is
    decided when its invocation completes. Number 0 is an entrant whose configuration is unknown. `manual_since` is the
    time of the first manual order on the model's account in the run; from then on the entrant is not judged. `declared`
    is the declaration of an external agent while it was this entrant, as JSON: model, version and promptDigest.
    `is_in_vain`: its last three invocations ended without a call that can be executed.
    """

    number: int
    fingerprint: str | None
    began_at: datetime | None
    cycles_decided: int
    cycles_due: int
    manual_since: datetime | None = None
    declared: Mapping[str, str] | None = None
    is_in_vain: bool = False

    @property
    def coverage_percent(self) -> float | None:
        """The decided share of the due cycles, in percent; None before the first."""
        return 100 * self.cycles_decided / self.cycles_due if self.cycles_due else None

    @property
    def is_ranked(self) -> bool:
        """Whether it decides, and did so often enough for a rank on a board, without manual orders."""
        if self.manual_since is not None or self.is_in_vain:
            return False
        return self.cycles_due > 0 and 100 * self.cycles_decided >= COVERAGE_MIN_PERCENT * self.cycles_due


NO_RECORD: Final = EntrantRecord(0, None, None, 0, 0)
"""The record of a model that was never invoked."""


def joint_record(records: Sequence[EntrantRecord]) -> EntrantRecord:
    """Return the record of replicates together, with the cycles of all of them."""
    return msgspec.structs.replace(
        records[0],
        began_at=max((each.began_at for each in records if each.began_at is not None), default=None),
        cycles_decided=sum(each.cycles_decided for each in records),
        cycles_due=sum(each.cycles_due for each in records),
        is_in_vain=any(each.is_in_vain for each in records),
    )


def joint_id(models: Sequence[Model], record: EntrantRecord) -> str:
    """Return the id of an entrant's account; for replicates their fingerprint, since no account has their means."""
    return models[0].id if len(models) == 1 else record.fingerprint or models[0].id


def joint_name(models: Sequence[Model]) -> str:
    """Return the name of an entrant's model; for replicates what their names have in common, and how many they are."""
    name = models[0].name
    return name if len(models) == 1 else f"{name.rstrip('0123456789').rstrip(' -') or name} (mean of {len(models)})"


class ServiceConditions(NamedTuple):
    """The service's part in the configuration of every model: token limits, fees, latency, markets and version.

    `base_url` is the address of the model's provider, None for a rule agent.
    """

    base_url: str | None
    invocation_tokens_max: int
    answer_tokens_max: int
    taker_fee_bps: Decimal
    maker_fee_bps: Decimal
    latency_ms: int
    markets: tuple[str, ...]
    version: str


def configuration_of(
    model: Model,
    prompt: str,
    limits: VariantLimits,
    temperature: float,
    service: ServiceConditions,
    left_out: Collection[str],
) -> str:
    """Return everything that affects how a model trades, as canonical JSON, without its names and display fields.

    `left_out` are the fields that its requests omit because its provider refused them.
    """
    definition = model.configuration.provider_definition
    own = {} if definition is None else definition.request
    sampling = {"temperature": temperature, **own, **model.configuration.request}
    return canonical_json(
        {
            "prompt": prompt,
            "tools": tool_schemas(service.markets, model.configuration.tools_off),
            "limits": msgspec.to_builtins(limits),
            "variant": model.variant.value,
            "provider": model.provider,
            "routerModelName": model.router_model_name,
            "baseUrl": service.base_url,
            "protocol": "chat" if definition is None else definition.protocol,
            "sampling": {name: value for name, value in sampling.items() if name not in left_out and value is not None},
            "tokens": {"invocation": service.invocation_tokens_max, "answer": service.answer_tokens_max},
            **({"calls": "json"} if model.configuration.calls_as_json else {}),
            **(
                {}
                if model.configuration.known_context is None
                else {"contextTokens": model.configuration.known_context}
            ),
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
    """Return the owner and declaration of an external agent. An agent that declares nothing equals no other.

    The key is excluded: an agent with a new key is the same agent.
    """
    owner, declared = model.configuration.owner, model.configuration.declared
    if declared is None:
        return {"owner": owner, "agent": model.id}
    return {"owner": owner, "version": declared.version, "promptDigest": declared.prompt_digest}


def fingerprint(configuration: str, answered_by: str | None) -> str:
    """Return the SHA-256 of a configuration together with the name of the model that answered, in hexadecimal."""
    whole: Mapping[str, Any] = {**orjson.loads(configuration), "answeredBy": answered_by}
    return hashlib.sha256(canonical_json(whole)).hexdigest()
