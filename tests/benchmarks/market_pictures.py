"""Pictures of the market model as SVG files, without any library."""

from collections.abc import Mapping
from pathlib import Path

from trader.gateways.market.files import Minutes


def write_pictures(folder: Path, recorded: Mapping[str, Minutes]) -> None:
    raise NotImplementedError
