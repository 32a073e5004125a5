"""Postings: each change of an account as the new account and every row to write for it.

`AccountUpdate` creates postings; `exchange.sql.ledger` writes each in one transaction or not at all.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Final, Literal
from uuid import UUID

import msgspec

from trader.core.money import ZERO
from trader.exchange.domain.account import Account, Position, RestingOrder, Run, Trade
from trader.exchange.domain.orders import ExitPlan, Fill, FundingPayment, InsurancePayment, Order, OrderAnswer
from trader.exchange.domain.venue_orders import SentOrder, VenueFill
from trader.market.domain.markets import Market

RateOfHour = Callable[[str, datetime], Decimal]
"""The funding rate due at an hour boundary, per hour of the market's interval; zero if nothing is due."""

MarkAt = Callable[[str, datetime], Decimal]
"""The mark of a market at an hour boundary."""

_NAMESPACE: Final = UUID("6d7c0a52-6f0e-5a4e-9f6b-2f1f2f9e4f10").bytes


LimitFills = Literal["touch", "through", "queue"]
"""When a resting order fills.

`touch`: in full, as soon as the mark reaches its limit. `through`: once the best opposite price is at or beyond its
limit, up to the quantity shown there. `queue`: like `through`, once the quantity ahead of it at its price has traded.
"""


class Liquidation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an exchange liquidates an account whose equity has fallen to its maintenance margin.

    Each step closes a `part` of a position, or all of it up to a notional of `whole_up_to` (None: below 10 × the
    market's minimum), until equity is above `until` × maintenance. After a step that left a part, steps close whole
    positions for `cooldown_s` seconds. When equity is below `backstop` × maintenance after the step of an update, or no
    book has anything left for the step, a liquidator takes over all positions at their marks, and what is left of
    equity.
    """

    part: Decimal = Decimal("0.25")
    whole_up_to: Decimal | None = None
    until: Decimal = Decimal("1.1")
    cooldown_s: int = 0
    backstop: Decimal = ZERO


class ExchangeRules(msgspec.Struct, frozen=True):
    """The exchange's own rules: markets, and rates as fractions of notional.

    `liquidation_rate` is charged on each liquidation fill in addition to the taker fee. `book_recovery` is the
    half-life with which taken depth returns; zero if the books themselves show what is missing. Funding is paid every
    `funding_interval_h` hours, counted from 00:00 UTC. Fees and interval apply to markets that do not set their own.
    `latency` passes between a trigger of an exit plan and its order meeting a book.
    """

    markets: dict[str, Market]
    taker_rate: Decimal
    maker_rate: Decimal
    liquidation_rate: Decimal = Decimal("0.01")
    book_recovery: timedelta = timedelta(seconds=5)
    funding_interval_h: int = 1
    limit_fills: LimitFills = "through"
    latency: timedelta = timedelta(0)
    liquidation: Liquidation = Liquidation()

    def fee_rate(self, symbol: str, *, maker: bool) -> Decimal:
        """Return the fee rate of a market for makers or takers."""
        market = self.markets[symbol]
        own, general = (market.maker_rate, self.maker_rate) if maker else (market.taker_rate, self.taker_rate)
        return general if own is None else own

    def funding_hours(self, symbol: str) -> int:
        """Return the hours between funding payments in a market."""
        return self.markets[symbol].funding_interval_h or self.funding_interval_h


class RestingChange(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A resting order after the posting: RESTING, FILLED or CANCELLED (with the reason)."""

    order: RestingOrder
    status: str
    sequence: int
    cancel_reason: str | None = None
    closed_at: datetime | None = None


class Posting(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one account, written in one transaction or not at all.

    `sequence_before` is the account's sequence on which the change was decided. `run` is the run of the rows; a reset
    ends it and starts `account.run`. `answers` are those to the orders of the change: one, or the two of a pair. Live
    trading adds `venue_fills`, the venue's trades that the posting records, and `sent`, the new state of their orders.
    """

    account: Account
    sequence_before: int
    run: Run
    fills: Sequence[Fill] = ()
    positions: Sequence[Position] = ()
    trades: Sequence[Trade] = ()
    funding: Sequence[FundingPayment] = ()
    insurance: Sequence[InsurancePayment] = ()
    resting: Sequence[RestingChange] = ()
    answers: Sequence[OrderAnswer] = ()
    sent: Sequence[SentOrder] = ()
    venue_fills: Sequence[VenueFill] = ()

    @property
    def starts_run(self) -> bool:
        return self.account.run.id != self.run.id


def merge(postings: Sequence[Posting]) -> Posting:
    """Merge successive changes of one account in one run into a single change."""
    last = postings[-1]
    changed = {position.id for posting in postings for position in posting.positions}
    return msgspec.structs.replace(
        last,
        sequence_before=postings[0].sequence_before,
        positions=[position for position in last.account.positions.values() if position.id in changed],
        resting=list({change.order.id: change for posting in postings for change in posting.resting}.values()),
        **{
            name: [entry for posting in postings for entry in getattr(posting, name)]
            for name in ("fills", "trades", "funding", "insurance", "answers")
        },
    )


class Terms(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Fields of an order that the position adopts when the order opens or increases it."""

    request_id: UUID | None = None
    leverage: Decimal | None = None
    exit_plan: ExitPlan | None = None
    confidence: Decimal | None = None
    invocation_id: UUID | None = None

    @classmethod
    def of(cls, order: Order | RestingOrder, request_id: UUID) -> "Terms":
        return msgspec.structs.replace(msgspec.convert(order, cls, from_attributes=True), request_id=request_id)


NO_TERMS: Final = Terms()


def unopened_account(account_id: str, capital: Decimal, quote_currency: str, at: datetime) -> Account:
    """Return the account that its first run would open, without storing it."""
    run = Run(id=row_id(account_id, 1), number=1, initial_capital=capital, quote_currency=quote_currency, started_at=at)
    return Account(id=account_id, run=run, sequence=0, changed_at=at)


def row_id(account_id: str, sequence: int) -> UUID:
    """Return the ID of an account's row with this sequence number: a hash that takes half the time of `uuid5`."""
    digest = blake2b(f"{account_id}:{sequence}".encode(), digest_size=16, key=_NAMESPACE).digest()
    return UUID(bytes=digest, version=5)
