"""Trading rules of the markets as venues publish them: tick, lot, minimum, leverage and maintenance tiers by preset.

Sources and dates of all figures are in docs/exchange.md; fees, latency and funding interval are in `settings.PRESETS`.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from trader.domain.market.markets import SIMULATED_MARKETS, MarginTier, Market, SimulatedMarket


def _market(
    symbol: str, tick: str, lot: str, minimum: str, leverage_max: int, rate: str, *tiers: tuple[int, str, int]
) -> Market:
    """Return a market. `rate` is its maintenance rate, each tier a notional in thousands, the rate and the maximum
    leverage above it."""
    steps = tuple(MarginTier(Decimal(above) * 1000, Decimal(rate_above), most) for above, rate_above, most in tiers)
    return Market(symbol, Decimal(tick), Decimal(lot), Decimal(minimum), leverage_max, Decimal(rate), steps)


def _by_symbol(*markets: Market) -> Mapping[str, SimulatedMarket]:
    """Return the markets whose rules a preset has, by symbol. Raise `KeyError` for one that is not simulated."""
    return {market.symbol: SIMULATED_MARKETS[market.symbol]._replace(rules=market) for market in markets}


_LIGHTER: Final = _by_symbol(
    _market("BTC", "0.1", "0.00001", "10", 50, "0.012"),
    _market("ETH", "0.01", "0.0001", "10", 50, "0.012"),
    _market("SOL", "0.001", "0.001", "10", 15, "0.0399"),
    _market("XRP", "0.000001", "1", "10", 8, "0.075"),
)
_HYPERLIQUID: Final = _by_symbol(
    _market("BTC", "1", "0.00001", "10", 40, "0.0125", (150_000, "0.025", 20)),
    _market("ETH", "0.1", "0.0001", "10", 25, "0.02", (100_000, "0.0333333333333333", 15)),
    _market("SOL", "0.01", "0.01", "10", 20, "0.025", (70_000, "0.05", 10)),
    _market("BNB", "0.01", "0.001", "10", 10, "0.05", (3_000, "0.1", 5)),
    _market("XRP", "0.0001", "1", "10", 20, "0.025", (40_000, "0.05", 10)),
    _market("DOGE", "0.00001", "1", "10", 10, "0.05", (20_000, "0.1", 5)),
)
_BINANCE_LEVERAGE: Final = {
    "0.005": 100, "0.0065": 75, "0.01": 50, "0.02": 25, "0.025": 20, "0.05": 10, "0.1": 5, "0.125": 4, "0.15": 3,
    "0.25": 2, "0.5": 1,
}  # fmt: skip
"""The maximum leverage of a tier by its maintenance rate: the same in every market."""


def _binance_tiers(*steps: tuple[int, str]) -> tuple[tuple[int, str, int], ...]:
    return tuple((above, rate, _BINANCE_LEVERAGE[rate]) for above, rate in steps)


_BINANCE_FIRST_TIERS: Final = ((50, "0.005"), (600, "0.0065"), (3_000, "0.01"))


_BINANCE: Final = _by_symbol(
    _market("BTC", "0.1", "0.001", "100", 125, "0.004", *_binance_tiers(
        *_BINANCE_FIRST_TIERS, (12_000, "0.02"), (70_000, "0.025"), (100_000, "0.05"), (230_000, "0.1"),
        (480_000, "0.125"), (600_000, "0.15"), (800_000, "0.25"), (1_200_000, "0.5"))),
    _market("ETH", "0.01", "0.001", "20", 125, "0.004", *_binance_tiers(
        *_BINANCE_FIRST_TIERS, (12_000, "0.02"), (50_000, "0.025"), (65_000, "0.05"), (150_000, "0.1"),
        (320_000, "0.125"), (400_000, "0.15"), (530_000, "0.25"), (800_000, "0.5"))),
    _market("SOL", "0.001", "0.001", "10", 100, "0.005", *_binance_tiers(
        (20, "0.0065"), (100, "0.01"), (800, "0.02"), (4_000, "0.025"), (8_000, "0.05"), (40_000, "0.1"),
        (80_000, "0.125"), (100_000, "0.25"), (200_000, "0.5"))),
)  # fmt: skip

PRESET_MARKETS: Final[Mapping[str, Mapping[str, SimulatedMarket]]] = {
    "default": SIMULATED_MARKETS,
    "lighter-standard": _LIGHTER,
    "lighter-premium": _LIGHTER,
    "hyperliquid": _HYPERLIQUID,
    "binance-usdm": _BINANCE,
}
"""The markets of each VENUE_PRESET. A market whose figures at a venue are not known is missing there."""
