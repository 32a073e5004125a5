"""Reproduction of a recorded call: the guard and the rules of the exchange, executed again on its recorded inputs.

`CallInputs` are recorded with every call that may change the books. They hold everything that the pure rules look at,
so executing the call again must give the same result and the same rows.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from trader.domain.agents.guard import Refusal, RiskContext, judge
from trader.domain.agents.messages import Outcome, order_outcome, plan_outcome, refused
from trader.domain.agents.tools import Change
from trader.domain.agents.view import VariantLimits
from trader.domain.exchange import rules as exchange
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.exchange.orders import ExitPlan
from trader.domain.exchange.tick_rules import Moment, apply_tick
from trader.domain.market.markets import Book, Level, Quote

MOMENTS_MAX: Final = 8
"""Moments tried for one call, the latest first."""


class RecordedQuote(msgspec.Struct, frozen=True):
    """A quote with its whole book."""

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
    """An update of the markets that came while the call was executed."""

    at: datetime
    quotes: tuple[RecordedQuote, ...]


class FundingRate(NamedTuple):
    """The hourly funding rate of a market at an hour boundary."""

    symbol: str
    boundary: datetime
    rate: Decimal


class CallInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of the call with this number: account and marks, then the market until it was answered.

    `quotes` are those of the moment of `context`, for every market that concerns the account or the call. A call that
    the guard refused has none.
    """

    number: int
    limits: VariantLimits
    rules: Rules
    latency_ms: int
    context: RiskContext = msgspec.field(name="situation")
    answered_at: datetime
    quotes: tuple[RecordedQuote, ...] = ()
    updates: tuple[RecordedUpdate, ...] = ()
    rates: tuple[FundingRate, ...] = ()


class Reproduced(NamedTuple):
    """The result of executing a call again. `posting` is None when nothing is booked."""

    outcome: Outcome
    posting: Posting | None


def reproduce(inputs: CallInputs, decision: Change, symbol: str, invocation_id: UUID) -> Iterator[Reproduced]:
    """Yield the result of the call at the moment of its answer, then at each earlier moment that it may have met.

    An update within the milliseconds of the commit may have come before or after it; nothing else is uncertain.
    """
    verdict = judge(decision, symbol, inputs.context, inputs.limits)
    if isinstance(verdict, Refusal):
        yield Reproduced(refused(verdict), None)
        return
    rates = {(symbol, boundary): rate for symbol, boundary, rate in inputs.rates}
    for account, moment in reversed(list(_moments(inputs, rates))[-MOMENTS_MAX:]):
        if isinstance(verdict, ExitPlan):
            result = exchange.set_exit_plan(account, symbol, verdict, moment, inputs.rules)
            if isinstance(result, str):
                yield Reproduced(plan_outcome(verdict, result), None)
            else:
                yield Reproduced(plan_outcome(verdict, None), result)
        elif _has_book(inputs, symbol, moment):
            order = verdict.order(account.id, invocation_id, inputs.number)
            posting = exchange.place(account, order, moment, inputs.rules, lambda *key: rates[key])
            yield Reproduced(order_outcome(posting.answer), posting)


def _moments(inputs: CallInputs, rates: dict[tuple[str, datetime], Decimal]) -> Iterator[tuple[Account, Moment]]:
    """Yield the account and the markets before the first update and after each one, at the time of the answer."""
    account = inputs.context.account
    quotes = {recorded.symbol: recorded.quote() for recorded in inputs.quotes}
    marks = dict(inputs.context.marks)
    yield account, Moment(inputs.answered_at, dict(quotes), dict(marks))
    for update in inputs.updates:
        new = {recorded.symbol: recorded.quote() for recorded in update.quotes}
        quotes.update(new)
        before = dict(marks)
        marks.update({symbol: quote.mark for symbol, quote in new.items()})
        moment = Moment(update.at, dict(quotes), dict(marks), frozenset(new), before)
        posting = apply_tick(account, moment, inputs.rules, lambda *key: rates[key])
        if posting is not None:
            account = posting.account
        yield account, Moment(inputs.answered_at, moment.quotes, moment.marks)


def _has_book(inputs: CallInputs, symbol: str, moment: Moment) -> bool:
    """Return whether the order can meet a book: the first one after the latency."""
    quote = moment.quotes.get(symbol)
    latency = timedelta(milliseconds=inputs.latency_ms)
    return quote is not None and (not latency or quote.at >= inputs.context.now + latency)
