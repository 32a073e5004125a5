"""Views for the unit tests of strategies: built from prices or candles, by the assembler of the real views."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from trader.agents.domain.guard import order_of
from trader.agents.domain.models import CYCLE
from trader.agents.domain.observation import RunHistory
from trader.agents.domain.tools import PlaceOrder
from trader.agents.domain.view import (
    HISTORY_CANDLES,
    SERIES_SHOWN,
    Column,
    Memory,
    ObservedMarket,
    ObservedStats,
    View,
)
from trader.core.clock import floor_time
from trader.core.money import divide, from_number
from trader.exchange.domain.account import Position, RestingOrder
from trader.exchange.domain.ledger import ExchangeRules, row_id, unopened_account
from trader.exchange.domain.orders import ExitPlan, Side
from trader.market.domain.indicators import Indicators, indicators
from trader.market.domain.markets import INTERVALS, MARKETS, PLAIN_FUNDING_RATE, Book, Candle, Interval, Level, Quote
from trader.market.sources.books import Grid

_AT: Final = datetime(2025, 1, 6, 12, tzinfo=UTC)
_DEPTH: Final = Decimal(1_000)
_RULES: Final = ExchangeRules(dict(MARKETS), Decimal("0.0005"), Decimal("0.0002"))

Prices = Sequence[float] | Column | Sequence[Candle]
"""Closes of successive candles, or the candles themselves."""

_Candles = Mapping[Interval, tuple[Candle, ...]]


class GivenPosition(NamedTuple):
    """A position in a market: its side, quantity and entry price, with leverage and exit plan."""

    side: Side
    quantity: float
    entry: float
    leverage: float = 1.0
    exit_plan: ExitPlan = ExitPlan()


def build_view(
    closes: Mapping[str, Prices | Mapping[Interval, Prices]],
    *,
    interval: Interval = "15m",
    held: Mapping[str, GivenPosition] | None = None,
    orders: Sequence[PlaceOrder] = (),
    capital: float = 10_000,
    at: datetime = _AT,
) -> View:
    """Return the view of an account at a time (UTC) in markets with these prices.

    Each market has the closes of one interval, or a mapping of several intervals to theirs. A candle opens at the close
    before it and has a volume of 1, unless candles are given in place of closes. The market's price is the last close
    of its finest interval, on its grid of half ticks. `orders` are limit orders that rest, oldest first. The account's
    figures follow from its capital and from the positions that it `held`. Indicators, market rules and fees are the
    same as in a real view.

    :raises ValueError: a market, an interval, a price, a time or another figure is not allowed
    """
    if at.tzinfo is None:
        raise ValueError(f"at is {at!r}; it needs a time zone, such as UTC")
    at = at.astimezone(UTC)
    _check_keys("closes has", closes, MARKETS)
    candles = {symbol: _series(symbol, given, interval, at) for symbol, given in closes.items()}
    quotes = {
        symbol: _quote(symbol, series[min(series, key=INTERVALS.__getitem__)][-1].close, at)
        for symbol, series in candles.items()
    }
    _check_keys("held has", held or {}, quotes)
    _check_keys("orders has", [order.symbol for order in orders], quotes)
    opened = unopened_account("test", _amount("capital", capital), "USDT", at - timedelta(days=1))
    account = replace(
        opened,
        positions={symbol: _position(symbol, each, at) for symbol, each in (held or {}).items()},
        resting=tuple(
            _resting(number, order, opened.run.started_at + timedelta(seconds=number))
            for number, order in enumerate(orders, 1)
        ),
    )
    history = RunHistory(
        run_id=account.run.id, sequence=0, hour=floor_time(at, timedelta(hours=1)), trades=(), stats=ObservedStats(),
        actions={}, peak=None, day_opening=None,
    )  # fmt: skip
    context = history.risk_context(
        account,
        None,
        at,
        marks={symbol: quote.mark for symbol, quote in quotes.items()},
        quoted_at=dict.fromkeys(quotes, at),
        leverage_max={symbol: MARKETS[symbol].leverage_max for symbol in quotes},
    )
    markets = {symbol: _market(quote, candles[symbol]) for symbol, quote in quotes.items()}
    return history.view(context, markets, _RULES, stats=history.stats, memory=Memory(), cadence=CYCLE, restriction=None)


def _check_keys(where: str, given: Iterable[Any], allowed: Collection[Any]) -> None:
    for each in given:
        if each not in allowed:
            raise ValueError(f"{where} {each!r}; allowed are {', '.join(allowed) or 'none, as closes is empty'}")


def _number(name: str, value: Any) -> float:
    """Return a number above 0. Raise `ValueError`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")
    return number


def _amount(name: str, value: Any) -> Decimal:
    return from_number(_number(name, value))


def _series(symbol: str, given: Prices | Mapping[Interval, Prices], interval: Interval, at: datetime) -> _Candles:
    by_interval: Mapping[Interval, Prices] = given if isinstance(given, Mapping) else {interval: given}
    if not by_interval:
        raise ValueError(f"{symbol} has no interval; it needs at least one of {', '.join(INTERVALS)}")
    _check_keys(f"{symbol} has the interval", by_interval, INTERVALS)
    return {each: _candles(f"{symbol} {each}", each, prices, at) for each, prices in by_interval.items()}


def _candles(name: str, interval: Interval, given: Prices, at: datetime) -> tuple[Candle, ...]:
    """Return the candles of a market and an interval; `name` is their name in errors."""
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise ValueError(f"{name} is {given!r}; it must be a sequence of closes or of Candles")
    prices, span = list(given), INTERVALS[interval]
    if not prices:
        raise ValueError(f"{name} has no prices; it needs at least one close or Candle")
    if not isinstance(prices[0], Candle):
        closes = [_number(f"{name}[{place}]", price) for place, price in enumerate(prices)]
        first = floor_time(at, span) - len(closes) * span
        return tuple(
            Candle(first + number * span, opened, max(opened, close), min(opened, close), close, 1.0)
            for number, (opened, close) in enumerate(pairwise([closes[0], *closes]))
        )
    after = None
    for place, candle in enumerate(prices):
        if not isinstance(candle, Candle):
            raise ValueError(f"{name}[{place}] is {candle!r}; it must be a Candle, as the first one is")
        opens = candle.open_time
        if opens.tzinfo is None or opens != floor_time(opens, span) or opens + span > at or (after and opens <= after):
            allowed = f"candles of {interval} ascend, begin on the interval in UTC and close by {at.isoformat()}"
            raise ValueError(f"{name}[{place}] opens at {opens.isoformat()}; {allowed}, the time of the view")
        after = opens
        for field in ("open", "high", "low", "close"):
            _number(f"{name}[{place}].{field}", getattr(candle, field))
    return tuple(prices)


def _quote(symbol: str, price: float, at: datetime) -> Quote:
    grid = Grid(MARKETS[symbol])

    def book(at: datetime, bid: int, ask: int) -> Book:
        tick = grid.market.tick
        return Book(symbol, at, (Level(bid * tick, _DEPTH),), (Level(ask * tick, _DEPTH),))

    return grid.quote(at, grid.nearest(price), 1, book)


def _market(quote: Quote, candles: _Candles) -> ObservedMarket:
    computed = {interval: _indicators(series) for interval, series in candles.items()}
    return ObservedMarket.of(
        MARKETS[quote.symbol],
        quote,
        quote.at,
        opened_a_day_ago=None,
        funding_rate=PLAIN_FUNDING_RATE,
        open_interest=None,
        candles=candles,
        indicators={interval: values[-1] for interval, values in computed.items()},
        indicator_history=computed,
        supplementary=None,
    )


def _indicators(candles: Sequence[Candle]) -> tuple[Indicators, ...]:
    """Return the indicators at the last candles; empty ones where there are fewer."""
    lengths = range(len(candles) - SERIES_SHOWN + 1, len(candles) + 1)
    return tuple(indicators(candles[max(0, length - HISTORY_CANDLES) : max(0, length)]) for length in lengths)


def _position(symbol: str, held: GivenPosition, at: datetime) -> Position:
    quantity = _amount(f"the quantity held in {symbol}", held.quantity)
    notional = quantity * _amount(f"the entry of {symbol}", held.entry)
    return Position(
        id=row_id(symbol, 1),
        symbol=symbol,
        side=Side(held.side),
        quantity=quantity,
        entry_notional=notional,
        margin=divide(notional, _amount(f"the leverage of {symbol}", held.leverage)),
        opened_at=at,
        funded_until=at,
        leveraged=True,
        exit_plan=held.exit_plan,
    )


def _resting(number: int, order: PlaceOrder, at: datetime) -> RestingOrder:
    if order.limit_price is None:
        raise ValueError(f"orders has {order!r}; allowed are limit orders, since others do not rest")
    figures = {name: _number(f"the {name} of an order", getattr(order, name)) for name in ("quantity", "limit_price")}
    approved, order_id = order_of(replace(order, **figures), order.symbol), row_id("order", number)
    placed = approved.order("test", order_id, number)
    price = from_number(figures["limit_price"])
    return RestingOrder.of(placed, order_id, placed.quantity, placed.quantity, price, at)
