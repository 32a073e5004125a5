"""Markets, books, quotes, ticks and candles: the values of every market source."""

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, Literal, NamedTuple

import msgspec

from trader.core.clock import floor_time, iso
from trader.core.errors import InvalidInput, Issue
from trader.core.money import ZERO

Interval = Literal["1m", "5m", "15m", "1h", "4h"]
INTERVALS: Final[Mapping[Interval, timedelta]] = {
    "1m": timedelta(minutes=1),
    "5m": timedelta(minutes=5),
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "4h": timedelta(hours=4),
}

STALE_AFTER: Final = timedelta(seconds=30)
"""A quote older than this, or further in the future, is stale and is never traded on."""

IMBALANCE_LEVELS: Final = 10
"""Number of levels on each side of an order book whose quantities make its imbalance."""

PLAIN_FUNDING_RATE: Final = Decimal("0.0000125")
"""Hourly funding rate for sources that have no rates."""

_QUOTE_SUFFIXES = ("USDT", "USDC", "USD", "PERP")


class MarginTier(NamedTuple):
    """A maintenance rate for the part of a position's notional above a limit, and the maximum leverage of an order that
    brings a position above it."""

    above: Decimal
    maintenance_rate: Decimal
    leverage_max: int


class Market(msgspec.Struct, frozen=True):
    """The trading rules of one perpetual market. Prices are in quote currency, quantities in base units.

    `maintenance_rate` and `leverage_max` apply up to the first of `tiers`, which ascend in notional and rate and
    descend in leverage. Fees (fractions of notional) and the funding interval in hours default to the exchange's where
    they are None. `funding_rate` is hourly, for sources that have no rates. `begins_at` and `ends_at` are the times of
    the first and last price of a market that a recording lists or ends within its span. `tick` is the smallest step of
    prices; with `figures`, they are whole numbers or have at most so many significant figures.
    """

    symbol: str
    tick: Decimal
    lot: Decimal
    min_notional: Decimal
    leverage_max: int
    maintenance_rate: Decimal
    tiers: tuple[MarginTier, ...] = ()
    taker_rate: Decimal | None = None
    maker_rate: Decimal | None = None
    funding_interval_h: int | None = None
    funding_rate: Decimal = PLAIN_FUNDING_RATE
    begins_at: datetime | None = None
    ends_at: datetime | None = None
    figures: int | None = None

    def tick_at(self, price: Decimal) -> Decimal:
        """Return the step between prices near this one."""
        if self.figures is None or price <= 0:
            return self.tick
        return max(self.tick, min(Decimal(1), Decimal(1).scaleb(price.adjusted() + 1 - self.figures)))

    def is_listed(self, at: datetime) -> bool:
        """Return whether the market has begun and not ended."""
        return (self.begins_at is None or at >= self.begins_at) and (self.ends_at is None or at < self.ends_at)

    def maintenance_lines(self) -> Iterator[tuple[Decimal, Decimal]]:
        """Yield (rate, deduction) for each tier. Maintenance is the largest notional × rate − deduction."""
        rate, deduction = self.maintenance_rate, Decimal(0)
        yield rate, deduction
        for tier in self.tiers:
            deduction += tier.above * (tier.maintenance_rate - rate)
            rate = tier.maintenance_rate
            yield rate, deduction

    def leverage_max_at(self, notional: Decimal) -> int:
        """Return the maximum leverage of an order that brings a position to this notional."""
        reached = [tier.leverage_max for tier in self.tiers if notional > tier.above]
        return reached[-1] if reached else self.leverage_max

    def maintenance(self, notional: Decimal) -> Decimal:
        """Return the maintenance margin of a position: each part of its notional at its tier's rate."""
        if not self.tiers:
            return notional * self.maintenance_rate
        return max(notional * rate - deduction for rate, deduction in self.maintenance_lines())


class Character(NamedTuple):
    """Parameters of a market's synthetic prices: its usual price, its beta to the common factor, the yearly volatility
    of its own walk, and the volume of a quiet minute in quote currency."""

    level: float
    beta: float
    own_volatility: float
    minute_volume: float


class Calm(NamedTuple):
    """A market's book in a usual minute: half its spread in basis points, and the depth of one side within 2 basis
    points of the mid, in quote currency.

    In every minute, each side of the book is further from the mid by `surcharge_bp`, in basis points.
    """

    half_spread_bp: float
    depth: float
    surcharge_bp: float = 0.0


class SimulatedMarket(NamedTuple):
    """Everything needed to simulate a market; a row that lacks a figure fails when this module is imported.

    The correlation of two markets follows from the share of the common factor in their volatility. Latency is the same
    in every market, and so are fees and the funding interval unless the market's rules have their own.
    """

    rules: Market
    character: Character
    calm: Calm


def _market(symbol: str, tick: str, lot: str, leverage_max: int, maintenance_rate: str) -> Market:
    return Market(symbol, Decimal(tick), Decimal(lot), Decimal(10), leverage_max, Decimal(maintenance_rate))


SIMULATED_MARKETS: Final[Mapping[str, SimulatedMarket]] = {
    row.rules.symbol: row
    for row in (
        SimulatedMarket(
            _market("BTC", "0.1", "0.00001", 40, "0.0125"),
            Character(level=95_000, beta=1.0, own_volatility=0.22, minute_volume=1_500_000),
            Calm(half_spread_bp=0.1, depth=300_000),
        ),
        SimulatedMarket(
            _market("ETH", "0.01", "0.0001", 25, "0.02"),
            Character(level=3_000, beta=1.2, own_volatility=0.40, minute_volume=900_000),
            Calm(half_spread_bp=0.3, depth=200_000),
        ),
        SimulatedMarket(
            _market("SOL", "0.001", "0.001", 20, "0.025"),
            Character(level=200, beta=1.4, own_volatility=0.55, minute_volume=500_000),
            Calm(half_spread_bp=0.6, depth=100_000),
        ),
        SimulatedMarket(
            _market("BNB", "0.01", "0.001", 10, "0.05"),
            Character(level=650, beta=0.9, own_volatility=0.38, minute_volume=200_000),
            Calm(half_spread_bp=0.7, depth=60_000),
        ),
        SimulatedMarket(
            _market("XRP", "0.0001", "1", 20, "0.025"),
            Character(level=2.5, beta=1.2, own_volatility=0.60, minute_volume=400_000),
            Calm(half_spread_bp=0.7, depth=80_000),
        ),
        SimulatedMarket(
            _market("DOGE", "0.00001", "1", 10, "0.05"),
            Character(level=0.25, beta=1.5, own_volatility=0.60, minute_volume=300_000),
            Calm(half_spread_bp=0.9, depth=60_000),
        ),
    )
}
"""Every market that this build simulates. Rules that differ at a venue are in `presets.toml`."""

MARKETS: Final[Mapping[str, Market]] = {symbol: row.rules for symbol, row in SIMULATED_MARKETS.items()}
"""The rules of the paper markets; when a venue is the source, its own rules replace these."""


def untimely(at: datetime, now: datetime) -> str | None:
    """Return why a price dated `at` cannot be traded on (it is old, or the clock was set back), or None."""
    if abs(now - at) <= STALE_AFTER:
        return None
    return "too old to trade on" if at < now else "in the future, since the clock was set back"


def canonical_symbol(spelling: str) -> str:
    """Return the market that a spelling names: `btc`, `BTCUSDT`, `BTC-PERP` and `BTC/USDT:USDT` are all `BTC`."""
    symbol = spelling.strip().upper().partition(":")[0]
    for separator in "/-_":
        symbol = symbol.partition(separator)[0] or symbol
    for suffix in _QUOTE_SUFFIXES:
        if symbol.endswith(suffix) and len(symbol) > len(suffix):
            return symbol.removesuffix(suffix)
    return symbol


def traded_symbol(spelling: str, markets: Collection[str]) -> str:
    """Return the market that a request names. Raise `InvalidInput` if it is not one of these."""
    symbol = canonical_symbol(spelling)
    if symbol not in markets:
        known = ", ".join(sorted(markets))
        raise InvalidInput(Issue(("symbol",), f"{spelling!r} is not traded here; markets are {known}"))
    return symbol


class Level(NamedTuple):
    """One price level of a book."""

    price: Decimal
    quantity: Decimal


class Book(msgspec.Struct, frozen=True):
    """A snapshot of an order book: bids descending, asks ascending, never crossed; either side may be empty."""

    symbol: str
    at: datetime
    bids: tuple[Level, ...]
    asks: tuple[Level, ...]


class Quote:
    """The market at one moment: mark price, best bid and ask, and the book, which is built on first access.

    If a side of the book is empty, its best price is the price at which that side would start. A source makes thousands
    of quotes for each one that an order meets; the lazy book keeps them cheap.
    """

    __slots__ = ("_book", "_make_book", "ask", "at", "bid", "mark", "symbol")

    def __init__(
        self, symbol: str, at: datetime, bid: Decimal, ask: Decimal, mark: Decimal, make_book: Callable[[], Book]
    ) -> None:
        self.symbol = symbol
        self.at = at
        self.bid = bid
        self.ask = ask
        self.mark = mark
        self._make_book = make_book
        self._book: Book | None = None

    @property
    def book(self) -> Book:
        if self._book is None:
            self._book = self._make_book()
        return self._book

    @property
    def imbalance(self) -> float | None:
        """(bids − asks) / (bids + asks) of the quantities at the best levels of the book; None if it is empty."""
        sides = self.book.bids, self.book.asks
        bids, asks = (sum((level.quantity for level in side[:IMBALANCE_LEVELS]), ZERO) for side in sides)
        return round(float((bids - asks) / (bids + asks)), 3) if bids + asks else None

    def is_stale(self, now: datetime) -> bool:
        """Return whether the quote is too old or too new to trade on."""
        return untimely(self.at, now) is not None

    @classmethod
    def of(cls, book: Book) -> "Quote":
        """Return the quote of a two-sided book; its mark is the mid of the best bid and ask."""
        bid, ask = book.bids[0].price, book.asks[0].price
        return cls(book.symbol, book.at, bid, ask, (bid + ask) / 2, lambda: book)


class EvenQuote(Quote):
    """A quote whose book has the same quantities on both sides."""

    __slots__ = ()

    @property
    def imbalance(self) -> float:
        return 0.0


def refusal_to_trade(quote: Quote | None, symbol: str, now: datetime) -> str | None:
    """Return why a market's latest quote cannot be traded on now, or None."""
    if quote is None:
        return f"there is no price for {symbol} yet"
    why = untimely(quote.at, now)
    return None if why is None else f"the last {symbol} price is of {iso(quote.at)}, {why}"


class PriceRange(msgspec.Struct, frozen=True):
    """The extremes that one market reached: lowest and highest mark, lowest best ask, highest best bid."""

    lowest_mark: Decimal
    highest_mark: Decimal
    lowest_ask: Decimal
    highest_bid: Decimal


class Tick(msgspec.Struct, frozen=True):
    """One update of the markets: the quotes that are new at `at`. Venues push some markets, simulations all."""

    at: datetime
    quotes: Mapping[str, Quote]


class Candle(NamedTuple):
    """One closed candle, in floats, since candles feed indicators and never enter the books."""

    open_time: datetime
    open: float
    high: float
    low: float
    close: float
    volume: float


def extend_candle(candle: Candle | None, at: datetime, price: float) -> Candle:
    """Return the minute's running candle after a price, or a new one if the price belongs to another minute.

    Its volume is 0, since prices carry none.
    """
    open_time = floor_time(at, INTERVALS["1m"])
    if candle is None or candle.open_time != open_time:
        return Candle(open_time, price, price, price, price, 0.0)
    return candle._replace(high=max(candle.high, price), low=min(candle.low, price), close=price)
