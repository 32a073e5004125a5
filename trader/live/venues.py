"""Maps each value of `VENUE` to its package. Only this module imports the venues' packages."""

from typing import Final

from trader.live import hyperliquid, lighter
from trader.live.venue import VenuePackage

VENUES: Final[dict[str, VenuePackage]] = {"lighter": lighter, "hyperliquid": hyperliquid}
"""Each has figures in market/presets.toml, in a table of its name."""
