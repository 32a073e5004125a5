"""Entrants: models in one configuration each, and the fingerprint that identifies a configuration."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import orjson

from trader.agents.domain.models import Model
from trader.core.canonical_json import canonical_json

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


def fingerprint(configuration: str, answered_by: str | None) -> str:
    """Return the SHA-256 of a configuration together with the name of the model that answered, in hexadecimal."""
    whole: Mapping[str, Any] = {**orjson.loads(configuration), "answeredBy": answered_by}
    return hashlib.sha256(canonical_json(whole)).hexdigest()
