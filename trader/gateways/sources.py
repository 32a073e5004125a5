"""Factories of the market source (synthetic, replay or venue, by MARKET_SOURCE) and of its recorder."""

from pathlib import Path

from trader.domain.market.presets import PRESET_MARKETS
from trader.errors import StartError
from trader.gateways.lighter.api import MAINNET_URL, LighterApi
from trader.gateways.lighter.source import VenueSource
from trader.gateways.market.recorded import RecordedSource
from trader.gateways.market.recorder import Recorder, find_recording
from trader.gateways.market.replay import ReplaySource
from trader.gateways.market.source import MarketSource
from trader.gateways.market.synthetic import SyntheticSource
from trader.settings import Settings


def make_source(settings: Settings) -> MarketSource:
    """Return the source that MARKET_SOURCE names. Raises `StartError` for an unknown one."""
    kind, _, place = settings.market_source.partition(":")
    markets = PRESET_MARKETS[settings.venue_preset]
    match kind:
        case "synthetic":
            return SyntheticSource(settings.seed, settings.market_symbols, markets)
        case "replay" if find_recording(Path(place).expanduser()):
            return RecordedSource(
                Path(place).expanduser(),
                settings.market_symbols,
                speed=settings.replay_speed,
                start=settings.replay_start,
                end=settings.replay_end,
            )
        case "replay":
            return ReplaySource(
                Path(place).expanduser(),
                settings.market_symbols,
                markets=markets,
                seed=settings.seed,
                speed=settings.replay_speed,
                start=settings.replay_start,
                end=settings.replay_end,
            )
        case "venue":
            return VenueSource(LighterApi(settings.venue_url or MAINNET_URL), settings.market_symbols)
        case _:
            raise StartError(
                f"MARKET_SOURCE {kind} is not available in this build; use venue, synthetic or replay:<folder or file>"
            )


def make_recorder(settings: Settings, source: MarketSource) -> Recorder | None:
    """Return the recorder of a source, ready to write; None without RECORD. Raises `StartError`."""
    if settings.record is None:
        return None
    recorder = Recorder(settings.record, source)
    recorder.open()
    return recorder
