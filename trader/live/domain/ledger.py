"""Booking of venue reports: the fills of an order, funding, and trades that none of our orders made.

The venue decides quantities, prices and fees; these functions decide only how they are booked. Each takes the account
under its lock and returns one `Posting` that writes the fills, the order's status and the answer to the caller
together.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from operator import attrgetter

import msgspec

from trader.exchange.domain.account import Account, Marks, Position, RestingOrder
from trader.exchange.domain.account_update import AccountUpdate
from trader.exchange.domain.ledger import NO_TERMS, ExchangeRules, Posting, Terms
from trader.exchange.domain.matching import Execution, totals
from trader.exchange.domain.orders import Cause, Order, OrderAnswer, OrderSide, OrderStatus
from trader.exchange.domain.rules import refuse
from trader.exchange.domain.venue_orders import OrderEvent, SentOrder, SentStatus, VenueFill, VenueOrderType, advance
from trader.live.domain.orders import VenueFunding, VenueOrderState


def settle(
    account: Account, sent: SentOrder, state: VenueOrderState, fills: Sequence[VenueFill], marks: Marks,
    rules: ExchangeRules, now: datetime,
) -> Posting:  # fmt: skip
    """Book an order's new fills and its state at the venue. The first posting of a request carries its answer."""
    update = AccountUpdate(account, rules, {**_prices(fills), **marks}, _at(fills, now))
    update.next_sequence()
    known = _known(sent, state, fills, update.at)
    answers = []
    if sent.request is not None and sent.status is SentStatus.SENT:
        update.last_order_at = update.at
        answer = _answer_first(update, sent, sent.request, state, fills)
        if answer is None:
            return _refused(account, known, sent.request, f"the venue ended the order: {state.status}", now)
        answers.append(answer)
    elif sent.request is not None:
        _book_resting(update, sent, state, fills)
    elif sent.order.type is VenueOrderType.LIMIT:
        update.reduce_target(sent.symbol, sent.order.price, totals(_executions(fills))[0])
        _execute(update, sent.order.side, fills, sent.cause, NO_TERMS)
    else:
        _execute(update, sent.order.side, fills, sent.cause, NO_TERMS)
        if state.is_final and (known.filled or state.has_fired):  # in this read or an earlier one
            _keep_closing(update, sent)
    return msgspec.structs.replace(update.posting(answers), sent=[known], venue_fills=list(fills))


def refuse_sent(account: Account, sent: SentOrder, reason: str, now: datetime) -> Posting:
    """Book that an order is not at the venue and never will be; the answer gives the reason."""
    known = advance(sent, OrderEvent.REJECTED, reason=reason, changed_at=max(now, sent.created_at))
    if sent.request is not None:
        return _refused(account, known, sent.request, reason, now)
    after = msgspec.structs.replace(account, sequence=account.sequence + 1, changed_at=max(now, account.changed_at))
    return Posting(account=after, sequence_before=account.sequence, run=account.run, sent=[known])


def book_foreign_trades(
    account: Account, fills: Sequence[VenueFill], payments: Sequence[VenueFunding], marks: Marks,
    rules: ExchangeRules, now: datetime,
) -> Posting:  # fmt: skip
    """Book trades of the account that none of our orders made: liquidations or manual trades.

    `payments` is the funding of the same period; payments on positions that these trades held are booked with them.
    """
    update = AccountUpdate(account, rules, {**_prices(fills), **marks}, _at(fills, now))
    due = sorted(payments, key=attrgetter("boundary"))
    for fill in fills:
        due = [payment for payment in due if not _receive(update, payment, before=fill.at)]
        _execute(update, fill.side, [fill], fill.cause, NO_TERMS)
    unnamed = [msgspec.structs.replace(fill, client_index=None) for fill in fills]
    return msgspec.structs.replace(update.posting(), venue_fills=unnamed)


def _receive(update: AccountUpdate, payment: VenueFunding, *, before: datetime) -> bool:
    """Book a payment on an open position. Return whether there was such a position."""
    position = update.positions.get(payment.symbol)
    if position is None or not position.funded_until < payment.boundary <= before:
        return False
    update.book_funding(position, payment.boundary, payment.rate, payment.amount, update.marks[payment.symbol])
    return True


def book_payments(
    account: Account, payments: Sequence[VenueFunding], until: Mapping[str, datetime], marks: Marks,
    rules: ExchangeRules, now: datetime,
) -> Posting | None:  # fmt: skip
    """Book the venue's funding of open positions, per market for whole hours up to `until`; None if nothing is new.

    An hour for which the venue shows no payment had none.
    """
    update = AccountUpdate(account, rules, marks, now)
    for symbol, held in account.positions.items():
        last = until.get(symbol, held.funded_until)
        for payment in sorted(payments, key=attrgetter("boundary")):
            if payment.symbol == symbol:
                _receive(update, payment, before=last)
        if update.positions[symbol].funded_until < last:
            update.positions[symbol] = msgspec.structs.replace(update.positions[symbol], funded_until=last)
            update.next_sequence()
    return update.posting() if update.has_changes else None


def _answer_first(
    update: AccountUpdate, sent: SentOrder, order: Order, state: VenueOrderState, fills: Sequence[VenueFill]
) -> OrderAnswer | None:
    """Book the first known state of a placed order and return its answer; None when it ended without a fill."""
    assert sent.request_id is not None
    executions = _executions(fills)
    filled, _ = totals(executions)
    if state.is_final and not filled:
        return None
    _execute(update, order.side, fills, order.cause, Terms.of(order, sent.request_id))
    status, reason = OrderStatus.FILLED, None
    if filled < sent.order.quantity:
        status, reason = OrderStatus.PARTIAL, f"the venue ended the rest: {state.status}"
        if not state.is_final:
            status, reason = OrderStatus.RESTING, None
            remaining, limit = sent.order.quantity - filled, sent.order.price
            update.rest(RestingOrder.of(order, sent.request_id, sent.order.quantity, remaining, limit, update.at))
    return update.answer(order, sent.request_id, executions, status, reason)


def _book_resting(update: AccountUpdate, sent: SentOrder, state: VenueOrderState, fills: Sequence[VenueFill]) -> None:
    """Book the fills or the end of a resting order."""
    assert sent.request_id is not None
    assert sent.request is not None
    held = update.positions.get(sent.symbol)
    for maker, group in groupby(fills, key=attrgetter("maker")):
        executions = _executions(list(group))
        resting = update.resting.get(sent.request_id)
        if resting is not None:
            update.fill_resting(resting, executions, maker=maker)
        else:
            terms = Terms.of(sent.request, sent.request_id)
            update.execute(sent.symbol, sent.order.side, executions, Cause.LIMIT, terms, maker=maker)
    _fund_from_opening(update, held, fills)
    resting = update.resting.get(sent.request_id)
    if state.is_final and resting is not None:
        update.cancel(resting, sent.reason or f"the venue ended it: {state.status}")


def _keep_closing(update: AccountUpdate, sent: SentOrder) -> None:
    """Keep closing the position of a trigger that fired: later orders fill what the venue could not."""
    position = update.positions.get(sent.symbol)
    if position is not None and position.side is not sent.order.side.opens and position.closing is None:
        update.positions[sent.symbol] = msgspec.structs.replace(position, closing=sent.cause.value)


def _execute(update: AccountUpdate, side: OrderSide, fills: Sequence[VenueFill], cause: Cause, terms: Terms) -> None:
    for (symbol, maker), group in groupby(fills, key=attrgetter("symbol", "maker")):
        some, held = list(group), update.positions.get(symbol)
        update.execute(symbol, side, _executions(some), cause, terms, maker=maker)
        _fund_from_opening(update, held, some)


def _fund_from_opening(update: AccountUpdate, held: Position | None, fills: Sequence[VenueFill]) -> None:
    """Date a position that is booked late from its fill, so that its funding since then is booked."""
    position = update.positions.get(fills[0].symbol) if fills else None
    if position is not None and (held is None or held.id != position.id):
        since = min(position.funded_until, *(fill.at for fill in fills))
        update.positions[position.symbol] = msgspec.structs.replace(position, funded_until=since)


def _executions(fills: Sequence[VenueFill]) -> list[Execution]:
    return [Execution(fill.price, fill.quantity, fill.fee_rate) for fill in fills]


def _known(sent: SentOrder, state: VenueOrderState, fills: Sequence[VenueFill], at: datetime) -> SentOrder:
    return advance(
        sent,
        state.event,
        venue_index=state.venue_index,
        filled=sent.filled + totals(_executions(fills))[0],
        reason=sent.reason or (state.status if state.is_final else None),
        changed_at=max(at, sent.created_at),
    )


def _refused(account: Account, known: SentOrder, order: Order, reason: str, now: datetime) -> Posting:
    assert known.request_id is not None
    posting = refuse(account, order, reason, now)
    answers = [msgspec.structs.replace(answer, id=known.request_id) for answer in posting.answers]
    return msgspec.structs.replace(posting, answers=answers, sent=[known])


def _prices(fills: Sequence[VenueFill]) -> Marks:
    """Return the trades' prices, as marks for markets that have none yet."""
    return {fill.symbol: fill.price for fill in fills}


def _at(fills: Sequence[VenueFill], now: datetime) -> datetime:
    """Return the time of the last fill, or `now` if that is earlier."""
    return min(now, max((fill.at for fill in fills), default=now))
