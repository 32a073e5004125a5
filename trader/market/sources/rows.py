"""Rows of markets: the built-in rows by VENUE_PRESET, and the rows of the file named by MARKETS_FILE.

A preset has tick, lot, minimum, leverage and maintenance tiers as its venue publishes them.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from trader.core.errors import StartError
from trader.core.files import SMALL_BYTES_MAX, read_regular
from trader.core.money import from_number
from trader.market.domain.markets import (
    PLAIN_FUNDING_RATE,
    SIMULATED_MARKETS,
    Calm,
    Character,
    MarginTier,
    Market,
    SimulatedMarket,
)
from trader.settings.forms import BPS_DECIMALS_MAX
from trader.settings.settings import PRESET_VENUES, PresetVenue
from trader.settings.toml_lines import decode_toml

Positive = Annotated[float, Meta(gt=0, le=1e12)]
Rate = Annotated[float, Meta(gt=0, lt=1)]
BasisPoints = Annotated[float, Meta(ge=0, le=1000)]
WholeLeverage = Annotated[int, Meta(ge=1, le=1000)]


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[[markets]]` table: the fields of `Market`, `Character` and `Calm`.

    Only fees and funding are optional; they default to VENUE_PRESET and the settings.
    """

    symbol: Annotated[str, Meta(pattern="^[A-Z0-9]{1,20}$")]
    tick: Positive
    lot: Positive
    min_notional: Positive
    leverage_max: WholeLeverage
    maintenance_rate: Rate
    tiers: list[tuple[Positive, Rate, WholeLeverage]]
    level: Positive
    beta: Annotated[float, Meta(ge=-10, le=10)]
    own_volatility: Annotated[float, Meta(gt=0, le=10)]
    minute_volume: Positive
    half_spread_bp: Annotated[float, Meta(gt=0, lt=2)]
    depth: Positive
    taker_fee_bps: BasisPoints | None = None
    maker_fee_bps: BasisPoints | None = None
    funding_interval_h: Literal[1, 2, 3, 4, 6, 8, 12, 24] | None = None
    funding_rate: Annotated[float, Meta(ge=-0.1, le=0.1)] | None = None

    def market(self) -> SimulatedMarket:
        """Return the row in the form that sources use.

        :raises ValueError: its margins contradict each other, or a fee has too many digits
        """
        fees = [None if fee is None else _decimal(fee) for fee in (self.taker_fee_bps, self.maker_fee_bps)]
        if any(fee is not None and fee != round(fee, BPS_DECIMALS_MAX) for fee in fees):
            raise ValueError(f"fees have at most {BPS_DECIMALS_MAX} decimals")
        steps = [(0.0, self.maintenance_rate, self.leverage_max), *self.tiers]
        if any(rate * leverage >= 1 for _, rate, leverage in steps):
            raise ValueError("maintenance_rate must be below 1 / leverage_max in every tier")
        if any(not (a[0] < b[0] and a[1] < b[1] and a[2] > b[2]) for a, b in pairwise(steps)):
            raise ValueError("tiers must ascend in notional and rate and descend in leverage")
        tiers = tuple(MarginTier(from_number(above), from_number(rate), most) for above, rate, most in self.tiers)
        tick, lot, minimum, rate = map(_decimal, (self.tick, self.lot, self.min_notional, self.maintenance_rate))
        taker, maker = (None if fee is None else fee / 10_000 for fee in fees)
        funding = PLAIN_FUNDING_RATE if self.funding_rate is None else _decimal(self.funding_rate)
        rules = Market(
            symbol=self.symbol, tick=tick, lot=lot, min_notional=minimum, leverage_max=self.leverage_max,
            maintenance_rate=rate, tiers=tiers, taker_rate=taker, maker_rate=maker,
            funding_interval_h=self.funding_interval_h, funding_rate=funding,
        )  # fmt: skip
        return SimulatedMarket(
            rules,
            Character(self.level, self.beta, self.own_volatility, self.minute_volume),
            Calm(self.half_spread_bp, self.depth),
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    markets: list[_Row]


def _decimal(value: float) -> Decimal:
    """Return a number of the file exactly, and a whole number without a fraction, like the built-in rows."""
    return from_number(int(value) if value.is_integer() else value)


def read_rows(path: Path | None) -> Mapping[str, SimulatedMarket]:
    """Return the markets of a file by symbol; none without a file.

    :raises StartError: the file cannot be read, a row lacks a figure or has a wrong one, or a market already exists
    """
    if path is None:
        return {}
    rows: dict[str, SimulatedMarket] = {}
    try:
        for row in msgspec.convert(decode_toml(read_regular(path, SMALL_BYTES_MAX)), _File).markets:
            if row.symbol in SIMULATED_MARKETS or row.symbol in rows:
                raise ValueError(f"{row.symbol} already exists; a markets file adds further markets")
            rows[row.symbol] = row.market()
    except (OSError, ValueError) as error:  # includes errors of TOML and msgspec
        raise StartError(f"MARKETS_FILE {path}: {error}") from None
    return rows


def simulated_markets(venue: PresetVenue) -> Mapping[str, SimulatedMarket]:
    """Return the markets of a venue by symbol, with its rules and the depth that is simulated.

    :raises KeyError: a market is not simulated
    :raises msgspec.ValidationError: a row lacks a figure
    """
    rules = msgspec.convert(venue.markets, tuple[Market, ...])
    return {market.symbol: SIMULATED_MARKETS[market.symbol]._replace(rules=market) for market in rules}


PRESET_MARKETS: Final[Mapping[str, Mapping[str, SimulatedMarket]]] = {
    "default": SIMULATED_MARKETS,
    **{preset: simulated_markets(venue) for venue in PRESET_VENUES.values() for preset in venue.presets},
}
"""The markets of each VENUE_PRESET. A market whose figures at the venue are unknown is left out."""


def preset_rows(preset: str, path: Path | None) -> Mapping[str, SimulatedMarket]:
    """Return the markets of a VENUE_PRESET and of a file. Raise `StartError` like `read_rows`."""
    return {**PRESET_MARKETS[preset], **read_rows(path)}


def require_rules(listed: Mapping[str, Market], rows: Mapping[str, SimulatedMarket]) -> None:
    """Raise `StartError` when the venue lists a market with another tick or lot than its row in MARKETS_FILE."""
    for symbol in listed.keys() & rows.keys():
        ours, theirs = rows[symbol].rules, listed[symbol]
        if (ours.tick, ours.lot) != (theirs.tick, theirs.lot):
            raise StartError(
                f"The venue lists {symbol} with a tick of {theirs.tick} and a lot of {theirs.lot}; MARKETS_FILE says "
                f"{ours.tick} and {ours.lot}. Correct the file: orders would be decided by rules that do not hold."
            )


PATH_EDGE: Final = 0.18
"""What drawn paths give away to a round trip within a minute, beyond the spread, as a share of the market's median
range of a minute: the mean of the best twentieth of moments of the boosted model of `scripts/benchmark fidelity`, over
BTC, ETH and SOL in January 2025 (1.6, 3.0 and 3.4 basis points) and in a month kept apart (0.6, 0.9 and 0.4)."""


def surcharged(row: SimulatedMarket, range_bp: float, taker_fee_bps: Decimal) -> SimulatedMarket:
    """Return a row with spreads that make up for what drawn paths give away, where taker fees are lower than that.

    `range_bp` is the median range of the market's minutes, in basis points.
    """
    own = row.rules.taker_rate
    fee_bp = float(taker_fee_bps if own is None else own * 10_000)
    return row._replace(calm=row.calm._replace(surcharge_bp=max(0.0, PATH_EDGE * range_bp / 2 - fee_bp)))


def chosen_rows(symbols: Sequence[str], rows: Mapping[str, SimulatedMarket]) -> Mapping[str, SimulatedMarket]:
    """Return the rows of the chosen markets.

    :raises StartError: a market has no row, so its tick, lot, margin or depth is unknown
    """
    if unknown := [symbol for symbol in symbols if symbol not in rows]:
        raise StartError(
            f"MARKETS names {', '.join(unknown)}, whose figures are unknown; VENUE_PRESET and MARKETS_FILE define "
            f"{', '.join(rows)}"
        )
    return {symbol: rows[symbol] for symbol in symbols}
