"""The rows of bookings: each struct has the columns of its table, in order; a test holds the two together."""

from datetime import datetime
from decimal import Decimal
from uuid import UUID

import msgspec

from trader.domain.exchange.account import Position, RestingOrder
from trader.domain.exchange.ledger import ClosedTrade, Posting, RestingChange
from trader.domain.exchange.orders import ExitPlan, Fill, FundingPayment, InsurancePayment, Order, OrderAnswer
from trader.domain.exchange.venue_orders import SentOrder, VenueFill
from trader.domain.money import ZERO


class AccountChange(msgspec.Struct):
    """The account row's step from the sequence that a booking was decided on to the one that it leads to."""

    id: str
    sequence_before: int
    sequence: int
    changed_at: datetime
    last_order_at: datetime | None


class RunRow(msgspec.Struct):
    id: UUID
    account_id: str
    number: int
    initial_capital: Decimal
    quote_currency: str
    started_at: datetime
    ended_at: datetime | None


class OrderRow(msgspec.Struct):
    id: UUID
    parent_id: UUID | None
    account_id: str
    run_id: UUID
    symbol: str
    side: str
    status: str
    quantity: Decimal
    entry_notional: Decimal
    margin: Decimal
    leveraged: bool
    exit_notional: Decimal | None
    gross_pnl: Decimal | None
    fees: Decimal
    liquidation_fees: Decimal
    funding: Decimal
    net_pnl: Decimal | None
    insurance: Decimal
    close_reason: str | None
    closing: str | None
    stop: Decimal | None
    target: Decimal | None
    invalidation: str | None
    invalidation_price: Decimal | None
    time_exit: datetime | None
    confidence: Decimal | None
    invocation_id: UUID | None
    opened_at: datetime
    funded_until: datetime
    closed_at: datetime | None


class RequestRow(msgspec.Struct):
    id: UUID
    account_id: str
    run_id: UUID
    client_order_id: str | None
    answer: OrderAnswer
    created_at: datetime


class LimitOrderRow(msgspec.Struct):
    id: UUID
    account_id: str
    run_id: UUID
    symbol: str
    side: str
    status: str
    quantity: Decimal
    remaining: Decimal
    limit_price: Decimal
    leverage: Decimal | None
    reduce_only: bool
    stop: Decimal | None
    target: Decimal | None
    invalidation: str | None
    invalidation_price: Decimal | None
    time_exit: datetime | None
    has_exit_plan: bool
    confidence: Decimal | None
    invocation_id: UUID | None
    cancel_reason: str | None
    sequence: int
    created_at: datetime
    closed_at: datetime | None


class FillRow(msgspec.Struct):
    account_id: str
    sequence: int
    run_id: UUID
    order_id: UUID
    request_id: UUID | None
    symbol: str
    side: str
    quantity: Decimal
    price: Decimal
    fee: Decimal
    liquidation_fee: Decimal
    maker: bool
    cause: str
    created_at: datetime


class FundingRow(msgspec.Struct):
    account_id: str
    sequence: int
    run_id: UUID
    order_id: UUID
    symbol: str
    boundary: datetime
    quantity: Decimal
    mark: Decimal
    rate: Decimal
    amount: Decimal
    created_at: datetime


class InsuranceRow(msgspec.Struct):
    account_id: str
    sequence: int
    run_id: UUID
    order_id: UUID
    amount: Decimal
    created_at: datetime


class VenueOrderRow(msgspec.Struct):
    account_id: str
    client_index: int
    run_id: UUID
    cause: str
    status: str
    symbol: str
    side: str
    type: str
    quantity: Decimal
    price: Decimal
    trigger_price: Decimal | None
    reduce_only: bool
    request_id: UUID | None
    request: Order | None
    nonce: int | None
    expires_at: datetime
    venue_index: int | None
    filled: Decimal
    reason: str | None
    created_at: datetime
    changed_at: datetime


class VenueTradeRow(msgspec.Struct):
    account_id: str
    trade_id: int
    run_id: UUID
    client_index: int | None
    kind: str
    symbol: str
    side: str
    quantity: Decimal
    price: Decimal
    fee_rate: Decimal
    maker: bool
    traded_at: datetime


def account_change(posting: Posting) -> AccountChange:
    account = posting.account
    return AccountChange(
        account.id, posting.sequence_before, account.sequence, account.changed_at, account.last_order_at
    )


def run_rows(posting: Posting) -> list[RunRow]:
    if not posting.starts_run:
        return []
    old, new, account_id = posting.run, posting.account.run, posting.account.id
    return [
        RunRow(
            id=run.id,
            account_id=account_id,
            number=run.number,
            initial_capital=run.initial_capital,
            quote_currency=run.quote_currency,
            started_at=run.started_at,
            ended_at=ended_at,
        )
        for run, ended_at in ((old, new.started_at), (new, None))
    ]


def request_row(posting: Posting, answer: OrderAnswer) -> RequestRow:
    return RequestRow(answer.id, posting.account.id, posting.run.id, answer.client_order_id, answer, answer.at)


def order_rows(posting: Posting) -> list[OrderRow]:
    closed = [closed_row(posting, trade) for trade in posting.trades]
    return closed + [open_row(posting, position) for position in posting.positions]


def open_row(posting: Posting, position: Position) -> OrderRow:
    plan = position.exit_plan
    return OrderRow(
        id=position.id,
        parent_id=None,
        account_id=posting.account.id,
        run_id=posting.run.id,
        symbol=position.symbol,
        side=position.side,
        status="OPEN",
        quantity=position.quantity,
        entry_notional=position.entry_notional,
        margin=position.margin,
        leveraged=position.leveraged,
        exit_notional=None,
        gross_pnl=None,
        fees=position.fees,
        liquidation_fees=ZERO,
        funding=position.funding,
        net_pnl=None,
        insurance=ZERO,
        close_reason=None,
        closing=position.closing,
        stop=plan.stop,
        target=plan.target,
        invalidation=plan.invalidation,
        invalidation_price=plan.invalidation_price,
        time_exit=plan.time_exit,
        confidence=position.confidence,
        invocation_id=position.invocation_id,
        opened_at=position.opened_at,
        funded_until=position.funded_until,
        closed_at=None,
    )


def closed_row(posting: Posting, trade: ClosedTrade) -> OrderRow:
    part = trade.part
    return msgspec.structs.replace(
        open_row(posting, part),
        parent_id=trade.parent_id,
        status="CLOSED",
        exit_notional=trade.exit_notional,
        gross_pnl=trade.gross_pnl,
        liquidation_fees=trade.liquidation_fees,
        net_pnl=trade.gross_pnl - part.fees + part.funding,
        insurance=trade.insurance,
        close_reason=trade.close_reason,
        closing=None,
        closed_at=trade.closed_at,
    )


def limit_order_row(posting: Posting, change: RestingChange) -> LimitOrderRow:
    order: RestingOrder = change.order
    plan = order.exit_plan or ExitPlan()
    return LimitOrderRow(
        id=order.id,
        account_id=posting.account.id,
        run_id=posting.run.id,
        symbol=order.symbol,
        side=order.side,
        status=change.status,
        quantity=order.quantity,
        remaining=order.remaining,
        limit_price=order.limit_price,
        leverage=order.leverage,
        reduce_only=order.reduce_only,
        stop=plan.stop,
        target=plan.target,
        invalidation=plan.invalidation,
        invalidation_price=plan.invalidation_price,
        time_exit=plan.time_exit,
        has_exit_plan=order.exit_plan is not None,
        confidence=order.confidence,
        invocation_id=order.invocation_id,
        cancel_reason=change.cancel_reason,
        sequence=change.sequence,
        created_at=order.created_at,
        closed_at=change.closed_at,
    )


def fill_row(posting: Posting, fill: Fill) -> FillRow:
    return FillRow(
        account_id=posting.account.id,
        sequence=fill.sequence,
        run_id=posting.run.id,
        order_id=fill.order_id,
        request_id=fill.request_id,
        symbol=fill.symbol,
        side=fill.side,
        quantity=fill.quantity,
        price=fill.price,
        fee=fill.fee,
        liquidation_fee=fill.liquidation_fee,
        maker=fill.maker,
        cause=fill.cause,
        created_at=fill.at,
    )


def funding_row(posting: Posting, payment: FundingPayment) -> FundingRow:
    return FundingRow(
        account_id=posting.account.id,
        sequence=payment.sequence,
        run_id=posting.run.id,
        order_id=payment.order_id,
        symbol=payment.symbol,
        boundary=payment.boundary,
        quantity=payment.quantity,
        mark=payment.mark,
        rate=payment.rate,
        amount=payment.amount,
        created_at=payment.at,
    )


def insurance_row(posting: Posting, payment: InsurancePayment) -> InsuranceRow:
    return InsuranceRow(
        posting.account.id, payment.sequence, posting.run.id, payment.order_id, payment.amount, payment.at
    )


def venue_order_row(sent: SentOrder) -> VenueOrderRow:
    order = sent.order
    return VenueOrderRow(
        account_id=sent.account_id,
        client_index=order.client_index,
        run_id=sent.run_id,
        cause=sent.cause,
        status=sent.status,
        symbol=order.symbol,
        side=order.side,
        type=order.type,
        quantity=order.quantity,
        price=order.price,
        trigger_price=order.trigger,
        reduce_only=order.reduce_only,
        request_id=sent.request_id,
        request=sent.request,
        nonce=sent.nonce,
        expires_at=sent.expires_at,
        venue_index=sent.venue_index,
        filled=sent.filled,
        reason=sent.reason,
        created_at=sent.created_at,
        changed_at=sent.changed_at,
    )


def venue_trade_row(posting: Posting, fill: VenueFill) -> VenueTradeRow:
    return VenueTradeRow(
        account_id=posting.account.id,
        trade_id=fill.trade_id,
        run_id=posting.run.id,
        client_index=fill.client_index,
        kind=fill.kind,
        symbol=fill.symbol,
        side=fill.side,
        quantity=fill.quantity,
        price=fill.price,
        fee_rate=fill.fee_rate,
        maker=fill.maker,
        traded_at=fill.at,
    )
