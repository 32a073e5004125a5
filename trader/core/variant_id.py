"""IDs of the variants in this build. Their definitions are in `agents/variants.py`."""

from enum import StrEnum


class VariantId(StrEnum):
    """The ID of a variant. Each start adds missing ones to the table `variants`."""

    APEX = "Apex"
    TRENDSURFER = "Trendsurfer"
    CONTRARIAN = "Contrarian"
    SOVEREIGN = "Sovereign"
