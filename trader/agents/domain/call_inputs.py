"""Inputs of a call that may change the books, recorded so that the call can be executed again.

They include everything that the guard and the rules of the exchange read, so they determine the result and the rows.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal

import msgspec

from trader.agents.domain.guard import RiskContext
from trader.agents.domain.view import VariantLimits
from trader.exchange.domain.account import hours_crossed
from trader.exchange.domain.ledger import ExchangeRules, RateOfHour
from trader.market.domain.markets import Book, Level, Quote, Tick


class RecordedQuote(msgspec.Struct, frozen=True):
    """A quote with its complete order book."""

    symbol: str
    at: datetime
    bid: Decimal
    ask: Decimal
    mark: Decimal
    bids: tuple[Level, ...]
    asks: tuple[Level, ...]

    @classmethod
    def of(cls, quote: Quote) -> "RecordedQuote":
        book = quote.book
        return cls(quote.symbol, quote.at, quote.bid, quote.ask, quote.mark, book.bids, book.asks)

    def quote(self) -> Quote:
        book = Book(self.symbol, self.at, self.bids, self.asks)
        return Quote(self.symbol, self.at, self.bid, self.ask, self.mark, lambda: book)


class RecordedUpdate(msgspec.Struct, frozen=True):
    """A market update that arrived while the call was being executed."""

    at: datetime
    quotes: tuple[RecordedQuote, ...]


class CallInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of one call, by its number: account and marks, then the market until its answer.

    `quotes` has a quote at the moment of `context` for every market that concerns the account or the call. A call that
    the guard refused has none. `rates` are hourly funding rates, each with its market and the boundary of its hour.
    """

    number: int
    limits: VariantLimits
    rules: ExchangeRules
    latency_ms: int
    context: RiskContext = msgspec.field(name="situation")
    answered_at: datetime
    quotes: tuple[RecordedQuote, ...] = ()
    updates: tuple[RecordedUpdate, ...] = ()
    rates: tuple[tuple[str, datetime, Decimal], ...] = ()

    @classmethod
    def of(
        cls, number: int, limits: VariantLimits, rules: ExchangeRules, latency: timedelta, context: RiskContext
    ) -> "CallInputs":
        """Return the inputs of a call that begins at the moment of the context."""
        return cls(
            number=number,
            limits=limits,
            rules=msgspec.structs.replace(rules, markets=dict(rules.markets)),
            latency_ms=latency // timedelta(milliseconds=1),
            context=msgspec.structs.replace(context, marks=dict(context.marks)),
            answered_at=context.now,
        )

    def answered(
        self,
        symbols: Collection[str],
        at: datetime,
        quotes: Mapping[str, Quote],
        ticks: Iterable[Tick],
        rate_of_hour: RateOfHour,
    ) -> "CallInputs":
        """Return the inputs of a call about these markets that reached the exchange and was answered at `at`.

        `quotes` are those at the moment of the context, and `ticks` are all later ones.
        """
        account = self.context.account
        concerned = {*symbols, *account.positions, *(order.symbol for order in account.resting)}
        return msgspec.structs.replace(
            self,
            answered_at=at,
            quotes=_recorded(quotes, concerned),
            updates=tuple(RecordedUpdate(tick.at, _recorded(tick.quotes, concerned)) for tick in ticks),
            rates=tuple(
                (held, hour, rate_of_hour(held, hour))
                for held, position in account.positions.items()
                for hour in hours_crossed(position.funded_until, at)
            ),
        )


def _recorded(quotes: Mapping[str, Quote], symbols: Collection[str]) -> tuple[RecordedQuote, ...]:
    return tuple(RecordedQuote.of(quote) for symbol, quote in quotes.items() if symbol in symbols)
