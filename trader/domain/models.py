"""Variants and models."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

RESERVED_REQUEST_FIELDS: Final = ("messages", "model", "n", "stream", "tools")
"""Fields of a request that the service sets itself; a configuration may set any other."""


class VariantId(StrEnum):
    """The variants of this build; the database has the same enum."""

    APEX = "Apex"
    TRENDSURFER = "Trendsurfer"
    CONTRARIAN = "Contrarian"
    SOVEREIGN = "Sovereign"


class ModelConfiguration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the models file sets for a model beside its identity; the file and the database have the same names.

    `request` has fields that every request to its provider carries; null leaves out one that the service sends.
    """

    request: Mapping[str, Any] = {}


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
