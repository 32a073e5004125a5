"""Variants and models."""

from datetime import datetime
from enum import StrEnum

import msgspec


class VariantId(StrEnum):
    """The variants of this build; the database has the same enum."""

    APEX = "Apex"
    TRENDSURFER = "Trendsurfer"
    CONTRARIAN = "Contrarian"
    SOVEREIGN = "Sovereign"


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
