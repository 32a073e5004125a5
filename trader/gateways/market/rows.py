"""Rows of markets: those of the build by VENUE_PRESET, and those of the file that MARKETS_FILE names."""

import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from trader.domain.market.markets import (
    PLAIN_FUNDING_RATE,
    SIMULATED_MARKETS,
    Calm,
    Character,
    MarginTier,
    Market,
    SimulatedMarket,
)
from trader.domain.market.presets import PRESET_MARKETS
from trader.domain.money import from_number
from trader.errors import StartError
from trader.setting_forms import BPS_DECIMALS_MAX

Positive = Annotated[float, Meta(gt=0, le=1e12)]
Rate = Annotated[float, Meta(gt=0, lt=1)]
BasisPoints = Annotated[float, Meta(ge=0, le=1000)]
Leverage = Annotated[int, Meta(ge=1, le=1000)]


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table `[[markets]]`: the fields of `Market`, `Character` and `Calm`.

    Only fees and funding may be left out: those of VENUE_PRESET and of the settings hold then.
    """

    symbol: Annotated[str, Meta(pattern="^[A-Z0-9]{1,20}$")]
    tick: Positive
    lot: Positive
    min_notional: Positive
    leverage_max: Leverage
    maintenance_rate: Rate
    tiers: list[tuple[Positive, Rate, Leverage]]
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
        """Return the row as the sources take it.

        :raises ValueError: its margins contradict each other, or a fee has too many digits
        """
        fees = [None if fee is None else _decimal(fee) for fee in (self.taker_fee_bps, self.maker_fee_bps)]
        if any(fee is not None and fee != round(fee, BPS_DECIMALS_MAX) for fee in fees):
            raise ValueError(f"fees have at most {BPS_DECIMALS_MAX} decimals")
        steps = [(0.0, self.maintenance_rate, self.leverage_max), *self.tiers]
        if any(rate * leverage >= 1 for _, rate, leverage in steps):
            raise ValueError("maintenance_rate must be below 1 / leverage_max, in each of the tiers, too")
        if any(not (a[0] < b[0] and a[1] < b[1] and a[2] > b[2]) for a, b in pairwise(steps)):
            raise ValueError("tiers must ascend in notional and rate and descend in leverage")
        tiers = tuple(MarginTier(from_number(above), from_number(rate), most) for above, rate, most in self.tiers)
        tick, lot, minimum, rate = map(_decimal, (self.tick, self.lot, self.min_notional, self.maintenance_rate))
        taker, maker = (None if fee is None else fee / 10_000 for fee in fees)
        funding = PLAIN_FUNDING_RATE if self.funding_rate is None else _decimal(self.funding_rate)
        return SimulatedMarket(
            Market(
                self.symbol,
                tick,
                lot,
                minimum,
                self.leverage_max,
                rate,
                tiers,
                taker,
                maker,
                self.funding_interval_h,
                funding,
            ),
            Character(self.level, self.beta, self.own_volatility, self.minute_volume),
            Calm(self.half_spread_bp, self.depth),
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    markets: list[_Row]


def _decimal(value: float) -> Decimal:
    """Return a number of the file exactly; a whole one without a fraction, as the rows of the build have it."""
    return from_number(int(value) if value.is_integer() else value)


def read_rows(path: Path | None) -> Mapping[str, SimulatedMarket]:
    """Return the markets of a file by symbol; none without a file.

    :raises StartError: it cannot be read, a row lacks a figure or has a wrong one, or a market is known already
    """
    if path is None:
        return {}
    rows: dict[str, SimulatedMarket] = {}
    try:
        for row in msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).markets:
            if row.symbol in SIMULATED_MARKETS or row.symbol in rows:
                raise ValueError(f"{row.symbol} is a market already; a file adds further ones")
            rows[row.symbol] = row.market()
    except (OSError, ValueError) as error:  # of TOML and of msgspec, too
        raise StartError(f"MARKETS_FILE {path}: {error}") from None
    return rows


def preset_rows(preset: str, path: Path | None) -> Mapping[str, SimulatedMarket]:
    """Return the markets of a VENUE_PRESET and those of a file. Raise `StartError` as `read_rows`."""
    return {**PRESET_MARKETS[preset], **read_rows(path)}


def chosen_rows(symbols: Sequence[str], rows: Mapping[str, SimulatedMarket]) -> Mapping[str, SimulatedMarket]:
    """Return the rows of the chosen markets.

    :raises StartError: a market has no row, so its tick, lot, margin or depth is not known
    """
    if unknown := [symbol for symbol in symbols if symbol not in rows]:
        raise StartError(
            f"MARKETS names {', '.join(unknown)}, whose figures are not known; those of VENUE_PRESET and MARKETS_FILE "
            f"are {', '.join(rows)}"
        )
    return {symbol: rows[symbol] for symbol in symbols}
