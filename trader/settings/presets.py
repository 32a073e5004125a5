"""Venue presets from `market/presets.toml`: different defaults of settings, rules of markets, and sources."""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta


class PresetVenue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A venue with known figures.

    `markets` have the fields of a `Market`. `presets` maps each VENUE_PRESET to the texts of the settings whose default
    it changes; a venue with several fee tiers has several presets, and `MARKET_SOURCE=venue` uses VENUE's first one.
    `liquidation` has the rules of liquidation that differ from the default's. `sources` say where the figures come
    from.
    """

    markets: list[dict[str, Any]]
    presets: Annotated[dict[str, dict[str, str]], Meta(min_length=1)]
    sources: Annotated[dict[str, str], Meta(min_length=1)]
    liquidation: dict[str, Any] = {}


def read_venues(text: str) -> Mapping[str, PresetVenue]:
    """Return the venues in a presets file. Raise `ValueError` if it is malformed."""
    return msgspec.convert(tomllib.loads(text), dict[str, PresetVenue])


PRESET_VENUES: Final = read_venues(files("trader").joinpath("market", "presets.toml").read_text(encoding="utf-8"))
PRESETS: Final[Mapping[str, Mapping[str, str]]] = {
    "default": {},
    **{preset: texts for venue in PRESET_VENUES.values() for preset, texts in venue.presets.items()},
}
"""The settings whose defaults each VENUE_PRESET changes."""
