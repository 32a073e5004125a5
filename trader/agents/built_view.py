"""Views for the unit tests of strategies: built from prices alone, by the assembler of the real views."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Final, NamedTuple

from msgspec.structs import replace

from trader.agents.domain.observation import RunHistory
from trader.agents.domain.view import SERIES_SHOWN, Column, Memory, ObservedMarket, ObservedStats, View
from trader.core.clock import floor_time
from trader.core.money import divide, from_number
from trader.exchange.domain.account import Position
from trader.exchange.domain.ledger import ExchangeRules, row_id, unopened_account
from trader.exchange.domain.orders import ExitPlan, Side
from trader.market.domain.indicators import indicators
from trader.market.domain.markets import INTERVALS, MARKETS, PLAIN_FUNDING_RATE, Book, Candle, Interval, Level, Quote
from trader.market.sources.books import Grid

_AT: Final = datetime(2025, 1, 6, 12, tzinfo=UTC)
_DEPTH: Final = Decimal(1_000)
_RULES: Final = ExchangeRules(dict(MARKETS), Decimal("0.0005"), Decimal("0.0002"))


class GivenPosition(NamedTuple):
    """A position in a market: its side, quantity and entry price, with leverage and exit plan."""

    side: Side
    quantity: float
    entry: float
    leverage: float = 1.0
    exit_plan: ExitPlan = ExitPlan()


def build_view(
    closes: Mapping[str, Sequence[float] | Column],
    *,
    interval: Interval = "15m",
    held: Mapping[str, GivenPosition] | None = None,
    capital: float = 10_000,
    at: datetime = _AT,
) -> View:
    """Return the view of an account at a time (UTC), with candles of one interval that closed at these prices.

    Each candle opens at the close before it, and a market's price is its last close, on its grid of half ticks. The
    account's figures follow from its capital and from the positions that it `held`; indicators, the rules of the
    markets and fees are those of a real view.
    """
    quotes = {symbol: _quote(symbol, prices[-1], at) for symbol, prices in closes.items()}
    account = unopened_account("test", from_number(float(capital)), "USDT", at - timedelta(days=1))
    positions = {symbol: _position(symbol, each, at) for symbol, each in (held or {}).items()}
    history = RunHistory(
        run_id=account.run.id, sequence=0, hour=floor_time(at, timedelta(hours=1)), trades=(), stats=ObservedStats(),
        actions={}, peak=None, day_opening=None,
    )  # fmt: skip
    context = history.risk_context(
        replace(account, positions=positions),
        None,
        at,
        marks={symbol: quote.mark for symbol, quote in quotes.items()},
        quoted_at=dict.fromkeys(quotes, at),
        leverage_max={symbol: MARKETS[symbol].leverage_max for symbol in quotes},
    )
    markets = {symbol: _market(quote, interval, closes[symbol]) for symbol, quote in quotes.items()}
    return history.view(
        context, markets, _RULES, stats=history.stats, memory=Memory(), every_minutes=1, restriction=None
    )


def _quote(symbol: str, price: float, at: datetime) -> Quote:
    grid = Grid(MARKETS[symbol])

    def book(at: datetime, bid: int, ask: int) -> Book:
        tick = grid.market.tick
        return Book(symbol, at, (Level(bid * tick, _DEPTH),), (Level(ask * tick, _DEPTH),))

    return grid.quote(at, grid.nearest(float(price)), 1, book)


def _market(quote: Quote, interval: Interval, closes: Sequence[float] | Column) -> ObservedMarket:
    span = INTERVALS[interval]
    first = floor_time(quote.at, span) - len(closes) * span
    prices = [float(closes[0]), *map(float, closes)]
    candles = tuple(
        Candle(first + number * span, opened, max(opened, close), min(opened, close), close, 1.0)
        for number, (opened, close) in enumerate(pairwise(prices))
    )
    lengths = range(len(candles) - SERIES_SHOWN + 1, len(candles) + 1)
    computed = tuple(indicators(candles[: max(0, length)]) for length in lengths)
    return ObservedMarket.of(
        MARKETS[quote.symbol],
        quote,
        quote.at,
        opened_a_day_ago=None,
        funding_rate=PLAIN_FUNDING_RATE,
        open_interest=None,
        candles={interval: candles},
        indicators={interval: computed[-1]},
        indicator_history={interval: computed},
        supplementary=None,
    )


def _position(symbol: str, held: GivenPosition, at: datetime) -> Position:
    quantity = from_number(float(held.quantity))
    notional = quantity * from_number(float(held.entry))
    return Position(
        id=row_id(symbol, 1),
        symbol=symbol,
        side=held.side,
        quantity=quantity,
        entry_notional=notional,
        margin=divide(notional, from_number(float(held.leverage))),
        opened_at=at,
        funded_until=at,
        leveraged=True,
        exit_plan=held.exit_plan,
    )
