"""Client of Hyperliquid's interface, and its public calls: market rules, books, candles and funding.

All reads are one address (`/info`) and all actions another (`/exchange`). Numbers are texts, times milliseconds, a
funding rate is a fraction of the notional for one hour that longs pay if it is positive.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final, TypeVar

import msgspec

from trader.core.clock import EPOCH, Clock, floor_time
from trader.core.errors import MarketDataError
from trader.core.money import divide
from trader.live.book import BookChange
from trader.live.budget import OrderLimits, RequestBudget
from trader.live.http import VenueHttp, excerpt
from trader.live.hyperliquid.stream import BookRow, HyperliquidStream, book_of, open_stream
from trader.live.market import Listing, VenueMarket, candle_of
from trader.live.socket import time_of
from trader.market.domain.markets import INTERVALS, Candle, Interval, MarginTier, Market, canonical_symbol

ADDRESS: Final = "https://api.hyperliquid.xyz"
TESTNET: Final = "https://api.hyperliquid-testnet.xyz"

CANDLES_PER_CALL: Final = 500
FUNDINGS_PER_CALL: Final = 500

_WEIGHT_PER_MINUTE: Final = 1200
_ACTIONS_PER_MINUTE: Final = 600
_ORDERS: Final = OrderLimits(1000, 1000, 1000, 1000)
_LIGHT: Final = frozenset({"l2Book", "clearinghouseState", "orderStatus", "spotClearinghouseState"})
_HEAVY: Final = {
    "userRole": 60, "candleSnapshot": 29, "fundingHistory": 45, "userFills": 120, "userFillsByTime": 120,
    "historicalOrders": 120, "userFunding": 45,
}  # fmt: skip
"""Lists cost more the longer they are: here for the longest."""

_WEIGHT: Final = 20
_OK: Final = 200
_PAUSE_S: Final = 1.0
_FIGURES: Final = 5
_DECIMALS: Final = 6
_SIZE_DECIMALS_MAX: Final = 6
_MIN_NOTIONAL: Final = Decimal(10)
_RATE_DECIMALS: Final = 6
_MILLISECOND: Final = timedelta(milliseconds=1)
_HOUR: Final = timedelta(hours=1)

T = TypeVar("T")


class _Asset(msgspec.Struct, rename="camel"):
    name: str
    sz_decimals: int
    max_leverage: int
    margin_table_id: int = 0
    is_delisted: bool | None = None
    only_isolated: bool | None = None


class _Tier(msgspec.Struct, rename="camel"):
    lower_bound: Decimal
    max_leverage: int


class _Table(msgspec.Struct, rename="camel"):
    margin_tiers: list[_Tier]


class _Meta(msgspec.Struct, rename="camel"):
    universe: list[_Asset]
    margin_tables: list[tuple[int, _Table]] = []


class _Candle(msgspec.Struct):
    t: int
    o: str
    h: str
    l: str  # noqa: E741 - the venue's name
    c: str
    v: str


class _Funding(msgspec.Struct, rename="camel"):
    time: int
    funding_rate: Decimal


def ms_of(at: datetime) -> int:
    return (at - EPOCH) // _MILLISECOND


class HyperliquidApi(VenueHttp):
    """The interface at one address. Every call raises `MarketDataError` for a failed or invalid answer."""

    venue, streams_rates = "hyperliquid", False

    def __init__(self, base_url: str, budget: RequestBudget | None = None, *, pause_s: float = _PAUSE_S) -> None:
        """Share `budget` with the others who ask this address. `pause_s` scales all waiting, the minute included."""
        budget = budget or RequestBudget(
            _WEIGHT_PER_MINUTE, per_kind=_ACTIONS_PER_MINUTE, minute_s=60 * pause_s / _PAUSE_S
        )
        budget.is_weighted, budget.orders = True, _ORDERS
        super().__init__(base_url, budget, pause_s=pause_s)
        self.coins: dict[int, str] = {}
        """The venue's names of the markets, by number."""

    def stream(self, markets: Sequence[VenueMarket], clock: Clock) -> AbstractAsyncContextManager[HyperliquidStream]:
        """Open a stream of the markets. Raise `StreamUnreachable` if it cannot be opened."""
        return open_stream(self, markets, clock, self.coins)

    async def info(self, kind: str, answer: type[T], **fields: Any) -> T:
        """Send a read and decode its answer; retry when over the rate limit."""
        weight = _HEAVY.get(kind, 2 if kind in _LIGHT else _WEIGHT)
        status, body = await self.read("POST", "/info", weight, json={"type": kind, **fields})
        if status != _OK:
            raise MarketDataError(f"{kind}: the venue answered with status {status}: {excerpt(body)}")
        try:
            return msgspec.json.decode(body, type=answer)
        except msgspec.DecodeError as error:
            raise MarketDataError(f"{kind}: the venue's answer cannot be decoded: {error}") from error

    async def listings(self) -> Mapping[str, Listing]:
        """Return the perpetual markets by symbol. One without cross margin cannot be traded here."""
        meta = await self.info("meta", _Meta)
        tables, listings = dict(meta.margin_tables), {}
        for number, asset in enumerate(meta.universe):
            symbol = canonical_symbol(asset.name)
            if not (0 <= asset.sz_decimals <= _SIZE_DECIMALS_MAX and asset.max_leverage >= 1):
                raise MarketDataError(f"The venue's rules of {symbol} are impossible: {asset}")
            self.coins[number] = asset.name
            is_active = not (asset.is_delisted or asset.only_isolated)
            listings[symbol] = Listing(number, _market(symbol, asset, tables.get(asset.margin_table_id)), is_active)
        return self.remember(listings)

    def symbol_of(self, coin: str) -> str | None:
        """Return the symbol of a perpetual market by the venue's name; None for anything else, such as a spot pair."""
        return canonical_symbol(coin) if coin in self.coins.values() else None

    async def book(self, market_id: int) -> BookChange:
        """Return the best 20 levels of each side."""
        return book_of(await self.info("l2Book", BookRow, coin=self.coins[market_id]))

    async def candles(self, market_id: int, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        """Return the candles that open in [start, end), ascending, with the unclosed candle."""
        span, candles = INTERVALS[interval], dict[datetime, Candle]()
        while start < end:
            stop = min(end, start + CANDLES_PER_CALL * span)
            asked = {"coin": self.coins[market_id], "interval": interval, "startTime": ms_of(start)}
            rows = await self.info("candleSnapshot", list[_Candle], req={**asked, "endTime": ms_of(stop) - 1})
            for candle in map(_candle, rows):
                if candle is not None and start <= candle.open_time < stop:
                    candles[candle.open_time] = candle
            start = stop
        return [candles[open_time] for open_time in sorted(candles)]

    async def fundings(self, market_id: int, start: datetime, end: datetime) -> dict[datetime, Decimal]:
        """Return the hourly rates due at the whole hours in [start, end]; longs pay a positive one."""
        rates = {}
        while start <= end:
            stop = min(end, start + FUNDINGS_PER_CALL * _HOUR)
            times = {"startTime": ms_of(start), "endTime": ms_of(stop + _HOUR) - 1}
            for row in await self.info("fundingHistory", list[_Funding], coin=self.coins[market_id], **times):
                hour = floor_time(time_of(row.time), _HOUR)
                if row.funding_rate.is_finite() and start <= hour <= stop:
                    rates[hour] = row.funding_rate
            start = stop + _HOUR
        return rates


def _market(symbol: str, asset: _Asset, table: _Table | None) -> Market:
    """Return the rules of a market: maintenance is half the initial margin at the leverage of its tier."""
    first, *others = table.margin_tiers if table is not None else [_Tier(Decimal(0), asset.max_leverage)]
    tiers = tuple(MarginTier(tier.lower_bound, _maintenance(tier.max_leverage), tier.max_leverage) for tier in others)
    return Market(
        symbol=symbol,
        tick=Decimal(1).scaleb(asset.sz_decimals - _DECIMALS),
        lot=Decimal(1).scaleb(-asset.sz_decimals),
        min_notional=_MIN_NOTIONAL,
        leverage_max=first.max_leverage,
        maintenance_rate=_maintenance(first.max_leverage),
        tiers=tiers,
        figures=_FIGURES,
    )


def _maintenance(leverage: int) -> Decimal:
    return round(divide(Decimal(1), Decimal(2 * leverage)), _RATE_DECIMALS).normalize()


def _candle(row: _Candle) -> Candle | None:
    try:
        return candle_of(time_of(row.t), *map(float, (row.o, row.h, row.l, row.c, row.v)))
    except ValueError:
        return None
