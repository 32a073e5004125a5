"""What the venue's word does to the books: the fills of an order, funding, and trades that no order of ours made.

The venue decides what is filled, at which price and fee; these functions decide nothing but how it is booked. Each
takes the account under its lock and gives one `Posting`, in which the fills, the answer to the caller and what is now
known of the order are written together.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import groupby
from operator import attrgetter

import msgspec

from trader.domain.exchange.account import Account, Marks, Position, RestingOrder
from trader.domain.exchange.account_update import AccountUpdate
from trader.domain.exchange.ledger import NO_TERMS, Posting, Rules, Terms
from trader.domain.exchange.matching import Execution, totals
from trader.domain.exchange.orders import AnswerFill, Cause, Order, OrderAnswer, OrderSide, OrderStatus, OrderType
from trader.domain.exchange.rules import refuse
from trader.domain.exchange.venue_orders import SentOrder, SentStatus, VenueFill
from trader.domain.live.orders import VenueFunding, VenueOrderState
from trader.domain.money import divide


def settle(
    account: Account, sent: SentOrder, state: VenueOrderState, fills: Sequence[VenueFill], marks: Marks, rules: Rules,
    now: datetime,
) -> Posting:  # fmt: skip
    """Book the new fills of an order, and what the venue says of it. The first booking of a request has its answer."""
    draft = AccountUpdate(account, rules, {**_prices(fills), **marks}, _at(fills, now))
    draft.next_sequence()
    known = _known(sent, state, fills, draft.at)
    answer = None
    if sent.request is not None and sent.status is SentStatus.SENT:
        draft.last_order_at = draft.at
        answer = _first_answer(draft, sent, sent.request, state, fills)
        if answer is None:
            return _refused(account, known, sent.request, f"the venue ended the order: {state.status}", now)
    elif sent.request is not None:
        _follow(draft, sent, state, fills)
    else:
        _execute(draft, sent.order.side, fills, sent.cause, NO_TERMS)
        if state.is_final and known.filled:  # in this look or in one before
            _go_on_closing(draft, sent)
    return msgspec.structs.replace(draft.posting(answer), sent=[known], venue_fills=list(fills))


def refuse_sent(account: Account, sent: SentOrder, reason: str, now: datetime) -> Posting:
    """Book that an order does not stand at the venue and never will; whoever placed it is told why."""
    changed_at = max(now, sent.created_at)
    known = msgspec.structs.replace(sent, status=SentStatus.REFUSED, reason=reason, changed_at=changed_at)
    if sent.request is not None:
        return _refused(account, known, sent.request, reason, now)
    after = msgspec.structs.replace(account, sequence=account.sequence + 1, changed_at=max(now, account.changed_at))
    return Posting(account=after, sequence_before=account.sequence, run=account.run, sent=[known])


def book_strays(
    account: Account, fills: Sequence[VenueFill], payments: Sequence[VenueFunding], marks: Marks, rules: Rules,
    now: datetime,
) -> Posting:  # fmt: skip
    """Book trades of the account that no order of ours made: liquidations, or what somebody traded there by hand.

    `payments` are those of the time since; one that was for what these trades held is booked with them.
    """
    draft = AccountUpdate(account, rules, {**_prices(fills), **marks}, _at(fills, now))
    due = sorted(payments, key=attrgetter("boundary"))
    for fill in fills:
        due = [payment for payment in due if not _receive(draft, payment, before=fill.at)]
        cause = Cause.LIQUIDATION if fill.is_forced else Cause.ORDER
        _execute(draft, fill.side, [fill], cause, NO_TERMS)
    unnamed = [msgspec.structs.replace(fill, client_index=None) for fill in fills]
    return msgspec.structs.replace(draft.posting(), venue_fills=unnamed)


def _receive(draft: AccountUpdate, payment: VenueFunding, *, before: datetime) -> bool:
    """Book a payment for what is held. Whether it was for that."""
    position = draft.positions.get(payment.symbol)
    if position is None or not position.funded_until < payment.boundary <= before:
        return False
    draft.book_funding(position, payment.boundary, payment.rate, payment.amount)
    return True


def book_fundings(
    account: Account, payments: Sequence[VenueFunding], until: Mapping[str, datetime], marks: Marks, rules: Rules,
    now: datetime,
) -> Posting | None:  # fmt: skip
    """Book what the venue paid on what is held, per market for the whole hours up to `until`; None when nothing is new.

    An hour for which the venue names no payment had none.
    """
    draft = AccountUpdate(account, rules, marks, now)
    for symbol, held in account.positions.items():
        position, last = held, until.get(symbol, held.funded_until)
        for payment in sorted(payments, key=attrgetter("boundary")):
            if payment.symbol == symbol and position.funded_until < payment.boundary <= last:
                position = draft.book_funding(position, payment.boundary, payment.rate, payment.amount)
        if position.funded_until < last:
            draft.positions[symbol] = msgspec.structs.replace(position, funded_until=last)
            draft.next_sequence()
    return draft.posting() if draft.has_changes else None


def _first_answer(
    draft: AccountUpdate, sent: SentOrder, order: Order, state: VenueOrderState, fills: Sequence[VenueFill]
) -> OrderAnswer | None:
    """Book the first that is known of a placed order; None when it ended without any fill."""
    assert sent.request_id is not None
    filled, notional = totals(_executions(fills))
    if state.is_final and not filled:
        return None
    _execute(draft, order.side, fills, order.cause, _terms(sent, order))
    status, reason = OrderStatus.FILLED, None
    if filled < sent.order.quantity:
        status, reason = OrderStatus.PARTIAL, f"the venue ended the rest: {state.status}"
        if not state.is_final:
            status, reason = OrderStatus.RESTING, None
            draft.rest(_resting(sent, order, sent.order.quantity - filled, draft.at))
    return OrderAnswer(
        id=sent.request_id,
        client_order_id=order.client_order_id,
        account_id=draft.before.id,
        symbol=order.symbol,
        side=order.side,
        type=order.type,
        status=status,
        reason=reason,
        requested_quantity=order.quantity,
        total_quantity=filled,
        average_price=divide(notional, filled) if filled else None,
        total_fees=draft.fees - draft.before.fees,
        realized_pnl=draft.realized - draft.before.realized,
        fills=tuple([AnswerFill(f.quantity, f.price, f.fee, f.maker, f.at) for f in draft.fills]),
        at=draft.at,
    )


def _follow(draft: AccountUpdate, sent: SentOrder, state: VenueOrderState, fills: Sequence[VenueFill]) -> None:
    """Book what became of an order that rested."""
    assert sent.request_id is not None
    assert sent.request is not None
    held = draft.positions.get(sent.symbol)
    for maker, group in groupby(fills, key=attrgetter("maker")):
        executions = _executions(list(group))
        resting = draft.resting.get(sent.request_id)
        if resting is not None:
            draft.fill_resting(resting, executions, maker=maker)
        else:
            terms = _terms(sent, sent.request)
            draft.execute(sent.symbol, sent.order.side, executions, Cause.LIMIT, terms, maker=maker)
    _fund_from_opening(draft, held, fills)
    resting = draft.resting.get(sent.request_id)
    if state.is_final and resting is not None:
        draft.cancel(resting, sent.reason or f"the venue ended it: {state.status}")


def _go_on_closing(draft: AccountUpdate, sent: SentOrder) -> None:
    """A trigger that fired stays fired: what the venue could not fill is closed with the next orders."""
    position = draft.positions.get(sent.symbol)
    if position is not None and position.side is not sent.order.side.opens and position.closing is None:
        draft.positions[sent.symbol] = msgspec.structs.replace(position, closing=sent.cause.value)


def _execute(draft: AccountUpdate, side: OrderSide, fills: Sequence[VenueFill], cause: Cause, terms: Terms) -> None:
    for (symbol, maker), group in groupby(fills, key=attrgetter("symbol", "maker")):
        some, held = list(group), draft.positions.get(symbol)
        draft.execute(symbol, side, _executions(some), cause, terms, maker=maker)
        _fund_from_opening(draft, held, some)


def _fund_from_opening(draft: AccountUpdate, held: Position | None, fills: Sequence[VenueFill]) -> None:
    """A position that is booked late has been funded since the venue filled it."""
    position = draft.positions.get(fills[0].symbol) if fills else None
    if position is not None and (held is None or held.id != position.id):
        since = min(position.funded_until, *(fill.at for fill in fills))
        draft.positions[position.symbol] = msgspec.structs.replace(position, funded_until=since)


def _executions(fills: Sequence[VenueFill]) -> list[Execution]:
    return [Execution(fill.price, fill.quantity, fill.fee_rate) for fill in fills]


def _known(sent: SentOrder, state: VenueOrderState, fills: Sequence[VenueFill], at: datetime) -> SentOrder:
    return msgspec.structs.replace(
        sent,
        status=SentStatus.DONE if state.is_final else SentStatus.STANDING,
        venue_index=state.venue_index,
        filled=sent.filled + totals(_executions(fills))[0],
        reason=sent.reason or (state.status if state.is_final else None),
        changed_at=max(at, sent.created_at),
    )


def _refused(account: Account, known: SentOrder, order: Order, reason: str, now: datetime) -> Posting:
    assert known.request_id is not None
    posting = refuse(account, order, reason, now)
    assert posting.answer is not None
    answer = msgspec.structs.replace(posting.answer, id=known.request_id)
    return msgspec.structs.replace(posting, answer=answer, sent=[known])


def _terms(sent: SentOrder, order: Order) -> Terms:
    return Terms(
        request_id=sent.request_id,
        leverage=order.leverage,
        exit_plan=order.exit_plan,
        confidence=order.confidence,
        invocation_id=order.invocation_id,
    )


def _resting(sent: SentOrder, order: Order, remaining: Decimal, at: datetime) -> RestingOrder:
    assert sent.request_id is not None
    assert order.type is OrderType.LIMIT
    return RestingOrder(
        id=sent.request_id,
        symbol=order.symbol,
        side=order.side,
        quantity=sent.order.quantity,
        remaining=remaining,
        limit_price=sent.order.price,
        created_at=at,
        leverage=order.leverage,
        reduce_only=order.reduce_only,
        exit_plan=order.exit_plan,
        confidence=order.confidence,
        client_order_id=order.client_order_id,
        invocation_id=order.invocation_id,
    )


def _prices(fills: Sequence[VenueFill]) -> Marks:
    """A market without a mark yet has at least the price at which it was traded."""
    return {fill.symbol: fill.price for fill in fills}


def _at(fills: Sequence[VenueFill], now: datetime) -> datetime:
    """When the last fill happened, as far as that has passed already."""
    return min(now, max((fill.at for fill in fills), default=now))
