"""A call that changes the books, executed again: the guard and the rules of the exchange, on the market it met.

A `CallInputs` is kept with every such call of a run. It holds all that the pure rules look at, so that they can be run
again at any time and must come to the same books.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from trader.domain.agents import outcomes
from trader.domain.agents.guard import Approved, Refusal, RiskContext, judge_closing, judge_opening, judge_plan
from trader.domain.agents.outcomes import Outcome
from trader.domain.agents.tools import ClosePosition, CreatePosition, UpdateExitPlan
from trader.domain.agents.view import VariantLimits
from trader.domain.exchange import rules as exchange
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.exchange.orders import ExitPlan
from trader.domain.exchange.rules import Moment
from trader.domain.market.markets import Book, Level, Quote

Change = CreatePosition | ClosePosition | UpdateExitPlan
"""The decisions that change the books."""

TRIED_MAX: Final = 8
"""How many moments are tried at most for one call, the latest first."""


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
    """The hourly rate of a market at an hour boundary."""

    symbol: str
    boundary: datetime
    rate: Decimal


class CallInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the call with this number met: the account and marks, then the books, until it was answered.

    `quotes` are those of the moment of `situation`, of every market that the account or the call has to do with. Of a
    call that the guard refused there are none.
    """

    number: int
    limits: VariantLimits
    rules: Rules
    latency_ms: int
    situation: RiskContext
    answered_at: datetime
    quotes: tuple[RecordedQuote, ...] = ()
    updates: tuple[RecordedUpdate, ...] = ()
    rates: tuple[FundingRate, ...] = ()


class Reproduced(NamedTuple):
    """What a call comes to when it is executed again. `booking` is None when nothing is booked."""

    outcome: Outcome
    posting: Posting | None


def judge(
    decision: Change, symbol: str, situation: RiskContext, limits: VariantLimits
) -> Approved | ExitPlan | Refusal:
    """What the guard makes of a decision."""
    match decision:
        case CreatePosition():
            return judge_opening(decision, symbol, situation, limits)
        case ClosePosition():
            return judge_closing(decision, symbol, situation)
        case UpdateExitPlan():
            return judge_plan(decision, symbol, situation)


def reproduce(meeting: CallInputs, decision: Change, symbol: str, invocation_id: UUID) -> Iterator[Reproduced]:
    """What the call comes to: at the moment of its answer first, then at each earlier one it may have met.

    An update that came within the milliseconds of the commit may have been met or not; nothing else is uncertain.
    """
    verdict = judge(decision, symbol, meeting.situation, meeting.limits)
    if isinstance(verdict, Refusal):
        yield Reproduced(outcomes.refused(verdict), None)
        return
    rates = {(symbol, boundary): rate for symbol, boundary, rate in meeting.rates}
    for account, moment in reversed(list(_moments(meeting, rates))[-TRIED_MAX:]):
        if isinstance(verdict, ExitPlan):
            yield _set_plan(account, symbol, verdict, moment, meeting.rules)
        elif _meets_book(meeting, symbol, moment):
            order = verdict.order(account.id, invocation_id, meeting.number)
            posting = exchange.place(account, order, moment, meeting.rules, lambda *key: rates[key])
            yield Reproduced(outcomes.of_order(posting.answer), posting)


def _moments(meeting: CallInputs, rates: dict[tuple[str, datetime], Decimal]) -> Iterator[tuple[Account, Moment]]:
    """The account and the markets after each update, as seen when the call was answered."""
    account = meeting.situation.account
    quotes = {shown.symbol: shown.quote() for shown in meeting.quotes}
    marks = dict(meeting.situation.marks)
    yield account, Moment(meeting.answered_at, dict(quotes), dict(marks))
    for update in meeting.updates:
        new = {shown.symbol: shown.quote() for shown in update.quotes}
        quotes.update(new)
        marks.update({symbol: quote.mark for symbol, quote in new.items()})
        moment = Moment(update.at, dict(quotes), dict(marks), frozenset(new))
        reviewed = exchange.review(account, moment, meeting.rules, lambda *key: rates[key])
        if reviewed is not None:
            account = reviewed.account
        yield account, Moment(meeting.answered_at, dict(quotes), dict(marks))


def _meets_book(meeting: CallInputs, symbol: str, moment: Moment) -> bool:
    """Whether there is a book that the order could meet: the first one after the latency."""
    quote = moment.quotes.get(symbol)
    latency = timedelta(milliseconds=meeting.latency_ms)
    return quote is not None and (not latency or quote.at >= meeting.situation.now + latency)


def _set_plan(account: Account, symbol: str, plan: ExitPlan, moment: Moment, rules: Rules) -> Reproduced:
    result = exchange.set_exit_plan(account, symbol, plan, moment, rules)
    if isinstance(result, str):
        return Reproduced(outcomes.of_plan(plan, result), None)
    return Reproduced(outcomes.of_plan(plan, None), result)
