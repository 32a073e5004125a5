"""Trading rules of the markets as venues publish them: tick, lot, minimum, leverage and maintenance tiers by preset.

Sources and dates of all figures are in docs/exchange.md; fees, latency and funding interval are in `settings.PRESETS`.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from trader.domain.market.markets import MARKETS, MarginTier, Market


def _market(
    symbol: str, tick: str, lot: str, minimum: str, leverage_max: int, rate: str, *tiers: tuple[int, str]
) -> Market:
    """Return a market. `rate` is its maintenance rate, and each tier a notional in thousands and the rate above it."""
    steps = tuple(MarginTier(Decimal(above) * 1000, Decimal(rate_above)) for above, rate_above in tiers)
    return Market(symbol, Decimal(tick), Decimal(lot), Decimal(minimum), leverage_max, Decimal(rate), steps)


def _by_symbol(*markets: Market) -> Mapping[str, Market]:
    return {market.symbol: market for market in markets}


_LIGHTER: Final = _by_symbol(
    _market("BTC", "0.1", "0.00001", "10", 50, "0.012"),
    _market("ETH", "0.01", "0.0001", "10", 50, "0.012"),
    _market("SOL", "0.001", "0.001", "10", 15, "0.0399"),
)
_HYPERLIQUID: Final = _by_symbol(
    _market("BTC", "1", "0.00001", "10", 40, "0.0125", (150_000, "0.025")),
    _market("ETH", "0.1", "0.0001", "10", 25, "0.02", (100_000, "0.0333333333333333")),
    _market("SOL", "0.01", "0.01", "10", 20, "0.025", (70_000, "0.05")),
)
_BINANCE_TOP_RATES: Final = ("0.02", "0.025", "0.05", "0.1", "0.125", "0.15", "0.25", "0.5")
_BINANCE_FIRST_TIERS: Final = ((50, "0.005"), (600, "0.0065"), (3_000, "0.01"))


def _binance_tiers(*thousands: int) -> tuple[tuple[int, str], ...]:
    return _BINANCE_FIRST_TIERS + tuple(zip(thousands, _BINANCE_TOP_RATES, strict=True))


_BINANCE: Final = _by_symbol(
    _market("BTC", "0.1", "0.001", "100", 125, "0.004",
            *_binance_tiers(12_000, 70_000, 100_000, 230_000, 480_000, 600_000, 800_000, 1_200_000)),
    _market("ETH", "0.01", "0.001", "20", 125, "0.004",
            *_binance_tiers(12_000, 50_000, 65_000, 150_000, 320_000, 400_000, 530_000, 800_000)),
    _market("SOL", "0.001", "0.001", "10", 100, "0.005",
            (20, "0.0065"), (100, "0.01"), (800, "0.02"), (4_000, "0.025"), (8_000, "0.05"), (40_000, "0.1"),
            (80_000, "0.125"), (100_000, "0.25"), (200_000, "0.5")),
)  # fmt: skip

PRESET_MARKETS: Final[Mapping[str, Mapping[str, Market]]] = {
    "default": MARKETS,
    "lighter-standard": _LIGHTER,
    "lighter-premium": _LIGHTER,
    "hyperliquid": _HYPERLIQUID,
    "binance-usdm": _BINANCE,
}
"""The markets of each VENUE_PRESET."""
