"""Builders of books, quotes and moments for tests of the exchange."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from trader.exchange.domain.account import Account, Run
from trader.exchange.domain.ledger import ExchangeRules, row_id
from trader.exchange.domain.tick_rules import Moment
from trader.market.domain.markets import MARKETS, PLAIN_FUNDING_RATE, Book, Level, Quote

START = datetime(2025, 2, 3, 1, 30, tzinfo=UTC)
"""Half an hour before a funding boundary."""

DEFAULT_MARKETS = {symbol: MARKETS[symbol] for symbol in ("BTC", "ETH", "SOL")}
"""The markets that are traded when none are chosen."""

RULES = ExchangeRules(DEFAULT_MARKETS, Decimal("0.0005"), Decimal("0.0002"))
"""The paper markets at the default fees: 5 bps for takers, 2 bps for makers."""

Side = Sequence[tuple[str | Decimal | int, str | Decimal | int]]


def levels(side: Side) -> tuple[Level, ...]:
    return tuple(Level(Decimal(price), Decimal(quantity)) for price, quantity in side)


def depth(side: tuple[Level, ...]) -> Decimal:
    """The total quantity on one side of a book."""
    return sum((level.quantity for level in side), Decimal(0))


def make_quote(
    symbol: str, bids: Side, asks: Side, *, at: datetime = START, mark: str | Decimal | None = None
) -> Quote:
    """The quote of a book given as (price, quantity) pairs, best first. `mark` stands for a venue's own mark price."""
    book = Book(symbol, at, levels(bids), levels(asks))
    quote = Quote.of(book)
    return quote if mark is None else Quote(symbol, at, quote.bid, quote.ask, Decimal(mark), lambda: book)


def deep_quote(symbol: str, mid: str | Decimal | int, *, at: datetime = START) -> Quote:
    """A book with a minimal spread of one tick on each side of the mid, and practically unlimited depth."""
    tick, mid = MARKETS[symbol].tick, Decimal(mid)
    return make_quote(symbol, [(mid - tick, 1_000_000)], [(mid + tick, 1_000_000)], at=at)


def moment_of(*quotes: Quote, at: datetime | None = None, before: Moment | None = None) -> Moment:
    """The moment at which these quotes are new; the quotes of `before` are still known."""
    known = dict(before.quotes) if before is not None else {}
    known |= {quote.symbol: quote for quote in quotes}
    return Moment(
        at=at or max(quote.at for quote in quotes),
        quotes=known,
        marks={symbol: quote.mark for symbol, quote in known.items()},
        updated=frozenset(quote.symbol for quote in quotes),
        before={} if before is None else before.marks,
    )


def open_account(capital: str | int = 10_000, *, account_id: str = "default", at: datetime = START) -> Account:
    run = Run(
        id=row_id(account_id, 0), number=1, initial_capital=Decimal(capital), quote_currency="USDT", started_at=at
    )
    return Account(id=account_id, run=run, sequence=0, changed_at=at)


def plain_rate(symbol: str, boundary: datetime) -> Decimal:
    """The hourly funding rate of sources without rates."""
    return PLAIN_FUNDING_RATE


def rates(by_symbol: Mapping[str, str]):  # type: ignore[no-untyped-def]  # a RateOfHour
    return lambda symbol, boundary: Decimal(by_symbol.get(symbol, "0"))


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)
