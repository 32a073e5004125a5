"""Masks: an agent's input and output with markets renamed, dates shifted and prices rescaled.

A market's prices are multiplied by a power of two and its quantities divided by it, so every float keeps its digits and
every amount of money stays the same. Dates move by whole weeks, which preserves hours, weekdays and UTC days.
"""

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Context, Decimal
from itertools import repeat
from math import frexp
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from trader.core.clock import floor_time
from trader.market.domain.markets import canonical_symbol

MaskPart = Literal["symbols", "dates", "scale"]
T = TypeVar("T")

UNKNOWN: Final = "?"
"""Stands for the market of a decision that names no masked market; it does not exist."""

_PRICES: Final = frozenset(
    {
        "ask", "atr", "average_price", "bid", "bollinger_lower", "bollinger_middle", "bollinger_upper", "close",
        "ema_20", "ema_50", "entry_price", "exit_price", "high", "invalidation_price", "keltner_lower",
        "keltner_upper", "kijun_sen", "limit_price", "liquidation_price", "low", "mark", "marks", "momentum", "open",
        "price", "spread", "stop", "target", "tick", "trailing_distance", "vwap", "vwap_deviation", "vwap_lower",
        "vwap_upper",
    }
)  # fmt: skip
_QUANTITIES: Final = frozenset(
    {"ahead", "lot", "quantity", "remaining", "requested_quantity", "total_quantity", "volume"}
)
"""The fields of views and decisions that hold prices, and those that hold quantities in base units."""

_WEEK: Final = timedelta(weeks=1)
_SHOWN_FROM: Final = datetime.fromisoformat("2001-01-04T00:00:00Z")
"""The week, on the grid of whole weeks since 1970-01-01, in which a masked market begins."""

_FIGURE: Final = r"\d[\w.:+-]*"
_WIDE: Final = Context(prec=80)


class Mask(NamedTuple):
    """A mask: the new name of each market, the power of two that its prices are multiplied by, and the shift of times.

    `powers` is keyed by the names before masking, in the inverse mask by the masked ones.
    """

    names: Mapping[str, str]
    powers: Mapping[str, int]
    shift: timedelta

    @classmethod
    def hiding(cls, parts: frozenset[MaskPart], prices: Mapping[str, float], starts_at: datetime) -> "Mask":
        """Return the mask that hides these parts of markets with these first prices.

        Masked markets keep their order. If the scale is hidden, their prices begin between 64 and 128.
        """
        return cls(
            {symbol: f"M{number:02}" if "symbols" in parts else symbol for number, symbol in enumerate(prices, 1)},
            {symbol: (7 - frexp(price)[1] or 1) if "scale" in parts else 0 for symbol, price in prices.items()},
            _SHOWN_FROM - floor_time(starts_at, _WEEK) if "dates" in parts else timedelta(),
        )

    def inverse(self) -> "Mask":
        """Return the inverse mask."""
        return Mask(
            {masked: symbol for symbol, masked in self.names.items()},
            {self.names[symbol]: -power for symbol, power in self.powers.items()},
            -self.shift,
        )

    def apply(self, value: T, symbol: str | None = None) -> T:
        """Apply the mask to any struct, tuple or mapping.

        A value without a symbol belongs to the market `symbol`. Texts stay unchanged.
        """
        masked: T = self._masked(value, symbol, None)
        return masked

    def price(self, symbol: str, price: Decimal) -> Decimal:
        """Return a price of the market `symbol`."""
        return _scaled_decimal(price, self.powers[symbol])

    def text(self, text: str) -> str:
        """Return a text from the exchange with the markets' masked names and without figures."""
        symbols = "|".join(map(re.escape, self.names))
        return re.sub(rf"\b(?:{symbols})\b|{_FIGURE}", lambda match: self.names.get(match[0], "…"), text)

    def _masked(self, value: Any, symbol: str | None, name: str | None) -> Any:
        """Return the masked value of the field `name`."""
        match value:
            case datetime():
                value += self.shift
            case str() if name == "symbol":
                value = self.names.get(canonical_symbol(value), UNKNOWN)
            case int() | float() | Decimal() if name in _PRICES:
                value = _scaled(value, self.powers.get(symbol or "", 0))
            case int() | float() | Decimal() if name in _QUANTITIES:
                value = _scaled(value, -self.powers.get(symbol or "", 0))
            case msgspec.Struct():
                own = canonical_symbol(getattr(value, "symbol", None) or symbol or "")
                value = type(value)(
                    **{field: self._masked(getattr(value, field), own, field) for field in value.__struct_fields__}
                )
            case Mapping():
                value = {
                    self.names.get(key, key): self._masked(item, key if key in self.names else symbol, name)
                    for key, item in value.items()
                }
            case list() | tuple():
                fields = getattr(value, "_fields", repeat(name))
                items = [self._masked(item, symbol, field) for field, item in zip(fields, value, strict=False)]
                value = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value


def _scaled(value: float | Decimal, power: int) -> float | Decimal:
    """Return value × 2^power, exactly."""
    return _scaled_decimal(value, power) if isinstance(value, Decimal) else value * 2.0**power


def _scaled_decimal(value: Decimal, power: int) -> Decimal:
    return _WIDE.multiply(value, _WIDE.power(2, power))
