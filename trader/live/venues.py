"""Maps each value of `VENUE` to its package. Only this module imports the venues' packages."""

from typing import Final

from trader.live import lighter
from trader.live.venue import VenuePackage
from trader.settings.presets import PRESET_VENUES

VENUES: Final[dict[str, VenuePackage]] = {"lighter": lighter}
assert VENUES.keys() <= PRESET_VENUES.keys(), "every venue has figures in market/presets.toml, in a table of its name"
