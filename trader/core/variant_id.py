"""IDs of the variants in this build. Their definitions are in `agents/variants.py`."""

from enum import StrEnum


class VariantId(StrEnum):
    """A variant's ID; the database has the same enum."""

    APEX = "Apex"
    TRENDSURFER = "Trendsurfer"
    CONTRARIAN = "Contrarian"
    SOVEREIGN = "Sovereign"
