"""Postings: each change of an account as the new account and every row to write for it.

`AccountUpdate` makes postings; `store.exchange.ledger` writes each in one transaction or not at all.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Final, Literal
from uuid import UUID

import msgspec

from trader.domain.exchange.account import Account, Position, RestingOrder, Run
from trader.domain.exchange.orders import Cause, ExitPlan, Fill, FundingPayment, InsurancePayment, Order, OrderAnswer
from trader.domain.exchange.venue_orders import SentOrder, VenueFill
from trader.domain.market.markets import Market
from trader.domain.money import ZERO

RateOfHour = Callable[[str, datetime], Decimal]
"""The hourly funding rate of a market at an hour boundary."""

MarkAt = Callable[[str, datetime], Decimal]
"""The mark of a market at an hour boundary."""

_NAMESPACE: Final = UUID("6d7c0a52-6f0e-5a4e-9f6b-2f1f2f9e4f10").bytes


LimitFills = Literal["touch", "through", "queue"]
"""When a resting order fills.

`touch`: in full, as soon as the mark reaches its limit. `through`: once the best opposite price is at or beyond its
limit, up to the quantity shown there. `queue`: like `through`, once what stood before it at its price has traded.
"""


class Rules(msgspec.Struct, frozen=True):
    """The exchange's own rules: markets, and rates as fractions of notional.

    `liquidation_rate` is charged for each fill of a liquidation beside the taker fee. `book_recovery` is the half-life
    with which depth that was taken comes back; zero where the books themselves show what is missing. Funding is paid
    every `funding_interval_h` hours from 00:00 UTC on. The fees and the interval hold in the markets without their own.
    `latency` passes from a trigger of an exit plan until its order meets a book.
    """

    markets: dict[str, Market]
    taker_rate: Decimal
    maker_rate: Decimal
    liquidation_rate: Decimal = Decimal("0.01")
    book_recovery: timedelta = timedelta(seconds=5)
    funding_interval_h: int = 1
    limit_fills: LimitFills = "through"
    latency: timedelta = timedelta(0)

    def fee_rate(self, symbol: str, *, maker: bool) -> Decimal:
        """Return the fee rate of a market for makers or takers."""
        market = self.markets[symbol]
        own, general = (market.maker_rate, self.maker_rate) if maker else (market.taker_rate, self.taker_rate)
        return general if own is None else own

    def funding_hours(self, symbol: str) -> int:
        """Return the hours between two payments of funding in a market."""
        return self.markets[symbol].funding_interval_h or self.funding_interval_h


class ClosedTrade(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A completed trade: the closed share of a position and what it was closed for.

    `part` carries the closed quantity with its share of entry notional, margin and funding; its `fees` are those of
    entry and exit together. `parent_id` is the position when only a part of it was closed.
    """

    part: Position
    run_id: UUID
    parent_id: UUID | None
    exit_notional: Decimal
    gross_pnl: Decimal
    liquidation_fees: Decimal
    close_reason: Cause
    closed_at: datetime
    insurance: Decimal = ZERO

    @property
    def net_pnl(self) -> Decimal:
        """The gross pnl after the fees of entry and exit and the funding."""
        return self.gross_pnl - self.part.fees + self.part.funding


class RestingChange(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A resting order as it is after the posting: RESTING, FILLED or CANCELLED (then with the reason)."""

    order: RestingOrder
    status: str
    sequence: int
    cancel_reason: str | None = None
    closed_at: datetime | None = None


class Posting(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one account, written in one transaction or not at all.

    `sequence_before` is the account's sequence that the change was decided on. `run` is the run of the rows; a reset
    ends it and starts `account.run`. Live trading adds `venue_fills`, the venue's trades that the posting records, and
    `sent`, the new state of their orders.
    """

    account: Account
    sequence_before: int
    run: Run
    fills: Sequence[Fill] = ()
    positions: Sequence[Position] = ()
    trades: Sequence[ClosedTrade] = ()
    funding: Sequence[FundingPayment] = ()
    insurance: Sequence[InsurancePayment] = ()
    resting: Sequence[RestingChange] = ()
    answer: OrderAnswer | None = None
    sent: Sequence[SentOrder] = ()
    venue_fills: Sequence[VenueFill] = ()

    @property
    def starts_run(self) -> bool:
        return self.account.run.id != self.run.id


class Terms(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Fields of an order that the position takes over when the order opens or increases it."""

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
    """Return the account as it would open with its first run; nothing of it is stored yet."""
    run = Run(id=row_id(account_id, 1), number=1, initial_capital=capital, quote_currency=quote_currency, started_at=at)
    return Account(id=account_id, run=run, sequence=0, changed_at=at)


def row_id(account_id: str, sequence: int) -> UUID:
    """Return the id of the row with this sequence number of an account: a hash, in half the time of `uuid5`."""
    digest = blake2b(f"{account_id}:{sequence}".encode(), digest_size=16, key=_NAMESPACE).digest()
    return UUID(bytes=digest, version=5)
