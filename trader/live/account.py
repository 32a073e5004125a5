"""Live account: one account at a real venue, whose operations run one at a time.

An order passes the same rules as on paper, is recorded, sent, and booked as the venue filled it; then the
protective orders of its exit plan are placed. Every cycle of the price tracker synchronizes the account: the
outcomes of sent orders are booked, exits are executed, and the ledger is compared with the venue.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import msgspec

from trader.core.clock import interval_elapsed
from trader.core.errors import MarketDataError, OrderUndecided, Precondition, TraderError, Unavailable
from trader.core.money import ZERO, format_decimal
from trader.exchange.domain import rules as rules_of_exchange
from trader.exchange.domain.halts import may_open
from trader.exchange.domain.orders import ExitPlan, Order, OrderAnswer, OrderStatus
from trader.exchange.domain.tick_rules import Moment
from trader.exchange.domain.venue_orders import SentOrder, SentStatus, VenueOrder
from trader.exchange.idempotent_orders import first_answer, refusal_of_price
from trader.live.domain.protective_orders import protection_of, venue_order
from trader.live.exits import Exits
from trader.live.ledger import AccountLedger, LiveContext, run_each
from trader.live.outbox import Outbox
from trader.live.protective_orders import ProtectiveOrders
from trader.live.reconciler import Reconciler

log = logging.getLogger("trader.live")

_ASK_AGAIN_S: Final = 5
_EXITS_EVERY: Final = timedelta(seconds=2)
"""Minimum interval between venue requests for an exit plan that fires but cannot be executed."""

_FEES_EVERY: Final = timedelta(hours=1)

_LOOK_SOON, _LOOK_RARELY, _IDLE_SHARE = timedelta(seconds=8), timedelta(seconds=30), 0.3
"""How often a followed account is compared, since pushed changes may get lost: rarely once much of the venue's limit is
used, unless something was pushed or differs."""

_ORDERS_KEPT: Final = 5
"""Room for an entry with its stop and target, and for a stop and target that replace others."""

_PROTECTED_WITHIN, _CLOSED_WITHIN = timedelta(seconds=8), timedelta(seconds=30)
"""How long a stop may be missing, and a position be open after its exit has fired, before the account opens nothing."""

_FAILURES_MAX: Final = 3
"""After this many consecutive failed synchronizations, the account opens nothing until one succeeds."""


class LiveAccount:
    """One account at a venue, with its outbox, protective orders and reconciliation."""

    def __init__(self, context: LiveContext, account_id: str, account_index: str, agreed_at: datetime) -> None:
        self.account_id = account_id
        self.account_index = account_index
        self.lock = asyncio.Lock()
        """Serializes all operations on the account."""

        self._context = context
        self._ledger = AccountLedger(context, account_id)
        self._outbox = Outbox(context, self._ledger, account_index, self._on_push)
        self._protective_orders = ProtectiveOrders(context, self._ledger, self._outbox)
        self._exits = Exits(context, self._ledger, self._outbox)
        self._reconciler = Reconciler(context, self._ledger, self._outbox, self._protective_orders, agreed_at)
        self._rules = context.rules
        self._fees_due = context.clock.now()
        self._wake = asyncio.Event()
        self._synchronized_at = self._looked_at = context.clock.now()
        self._looked_following = 0
        self._is_hinted = False
        self._failures = 0
        self._accepting: frozenset[str] = frozenset()

    @property
    def trouble(self) -> str | None:
        """Why the account may open nothing; reducing is allowed."""
        texts = [self._outbox.trouble, self._reconciler.trouble]
        for since, within, what in (
            (self._protective_orders.missing, _PROTECTED_WITHIN, "the {} is not at the venue; it is watched here"),
            (self._exits.fired_at, _CLOSED_WITHIN, "the exit from {} has fired and is not filled"),
        ):
            now = self._context.clock.now()
            texts += [what.format(each) for each, at in since.items() if interval_elapsed(at + within, within, now)]
        return "; ".join(filter(None, texts)) or None

    @property
    def undecided(self) -> Collection[str]:
        """The markets with an order that may open, from its acceptance until its fills are booked."""
        opening = {sent.symbol for sent in self.sent if not sent.order.reduce_only}
        return (self._outbox.unsettled & opening) | self._accepting

    @property
    def sent(self) -> Sequence[SentOrder]:
        """The orders that may be open at the venue."""
        return tuple(self._ledger.open_orders.values())

    # Requests of callers

    async def place(self, order: Order, is_approved: bool | None = None) -> OrderAnswer:
        """Place an order; `is_approved` is False for one that nobody approved in time, and None for any other.

        :raises OrderUndecided: its outcome is unknown, or it waits for a person
        """
        async with self.lock:
            unready = await self._refusal_unless_ready()
            if (earlier := await self._earlier_answer(order)) is not None:
                return earlier
            refusal = unready or self._refusal(order)
            if refusal is None and (ladder := self._context.ladder) is not None:
                sending, marks = self._sending_of(order), self._context.market.marks
                refusal = await ladder.refusal_to_decide(order, sending, marks, is_approved)
                refusal = refusal or self._refusal(order)  # the market and the halts went on
            if refusal is not None:
                return await self._refuse(order, refusal)
            account, market = self._ledger.account, self._context.rules.markets[order.symbol]
            self._accepting = frozenset([order.symbol] if may_open(account, order) else ())
            try:
                sending = self._sending_of(order)
                protection = [] if sending.reduce_only else protection_of(account, order, sending.quantity, market)
                result = await self._outbox.send(sending, order.cause, order, protection)
            except (MarketDataError, Unavailable) as error:
                raise self._order_undecided(order.symbol) from error
            finally:
                self._accepting = frozenset()
            if result.answer is None:
                raise self._order_undecided(order.symbol)
            await self._update_protection()
            return result.answer

    async def cancel(self, order_id: str) -> None:
        """Cancel a resting order at the venue; do nothing if it is not resting. Raise `Unavailable`."""
        async with self.lock:
            if (unready := await self._refusal_unless_ready()) is not None:
                raise Unavailable(unready, _ASK_AGAIN_S)
            for sent in self.sent:
                if str(sent.request_id) != order_id:
                    continue
                try:
                    is_ended = await self._outbox.cancel(sent, "cancelled by the caller")
                except MarketDataError as error:
                    raise Unavailable(f"The venue cannot be reached now: {error}", _ASK_AGAIN_S) from error
                if not is_ended:
                    raise self._order_undecided(sent.symbol)

    async def set_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        """Replace an exit plan. Return None when it is set, else why the old one stays."""
        async with self.lock:
            if (unready := await self._refusal_unless_ready()) is not None:
                return unready
            try:
                return await self._protective_orders.set_plan(symbol, plan)
            except MarketDataError as error:
                return f"the venue cannot be reached now: {error}"

    # Synchronization

    def _on_push(self) -> None:
        """Book what the venue pushes, and compare soon."""
        self._is_hinted = True
        self.wake()

    def _is_look_due(self) -> bool:
        """Return whether to ask the venue: always, unless it pushes each change and none was missed."""
        if not self._outbox.following or self._outbox.following != self._looked_following:
            return True
        is_open = self._is_hinted or self.trouble is not None or not self._reconciler.agrees
        is_idle = self._context.venue.budget.used_share < _IDLE_SHARE
        every = _LOOK_SOON if is_open or is_idle else _LOOK_RARELY
        return interval_elapsed(self._looked_at + every, every, self._context.clock.now())

    def wake(self) -> None:
        """Request a synchronization soon."""
        self._wake.set()

    def on_marks(self) -> None:
        """Request a synchronization when an exit plan fires at the new marks, or its stop follows them."""
        self._outbox.note_triggers()
        is_time = interval_elapsed(self._synchronized_at + _EXITS_EVERY, _EXITS_EVERY, self._context.clock.now())
        if is_time and (self._exits.are_due() or self._protective_orders.are_behind()):
            self.wake()

    async def run(self) -> None:
        """Synchronize on each request, until canceled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.try_synchronize(looks=self._is_look_due())

    async def try_synchronize(self, *, looks: bool = True) -> None:
        """Synchronize. Log a failure; the next synchronization tries again."""
        try:
            await self.synchronize(looks=looks)
        except TraderError as error:
            log.warning("%s: the comparison with the venue failed and will be retried: %s", self.account_id, error)
            self._failures += 1
            if self._failures >= _FAILURES_MAX:
                self._reconciler.trouble = f"it could not be compared with the venue: {error}"
        except Exception as error:  # without synchronizations, nothing would watch the account
            log.exception("%s: a bug ended a synchronization with the venue; it will be retried", self.account_id)
            self._ledger.invalidate()
            self._reconciler.trouble = (
                f"it could not be compared with the venue: internal error ({type(error).__name__}); "
                "the log has its cause"
            )

    async def synchronize(self, *, looks: bool = True) -> None:
        """Execute exits, book the outcomes of sent orders, and, if it looks, compare the ledger with the venue.

        Exits come first and again before each other step, and an error of one step, even a bug, stops no other.

        :raises TraderError: the venue or the database does not answer; the next synchronization completes the work
        """
        async with self.lock:
            self._synchronized_at = self._context.clock.now()
            await self._outbox.refresh()
            following = self._outbox.following
            steps = [self._outbox.resolve, self._outbox.poll, self._cancel_pointless, self._protective_orders.sync]
            if looks:
                self._looked_at, self._is_hinted, self._looked_following = self._synchronized_at, False, 0
                book_funding = partial(self._ledger.book_funding, self._outbox.records)
                steps += [book_funding, self._reconciler.compare, self._read_fees, self._watch_ladder]
            await run_each(act() for step in steps for act in (self._exits.execute, step))
            if looks:
                self._failures, self._looked_following = 0, following

    async def close_unbooked(self) -> dict[str, str]:
        """Close what the venue holds beyond the books. Return the positions that are left, with the reasons.

        :raises Unavailable: the database cannot answer now, or this process no longer trades
        """
        async with self.lock:
            try:
                await self._outbox.refresh()
                theirs, ours = (await self._outbox.records.report()).positions, self._ledger.held
                left = {
                    f"{format_decimal(quantity)} {symbol} at the venue": why
                    for symbol in {**theirs, **ours}
                    if (quantity := theirs.get(symbol, ZERO) - ours.get(symbol, ZERO))
                    and (why := await self._outbox.close_unrecorded(symbol, quantity)) is not None
                }
            except MarketDataError as error:
                left = {"what the venue holds": f"it cannot be read now: {error}"}
        self.wake()
        return left

    async def begin_run(self) -> None:
        """End the run, and start the next with the venue's balance. Raise `Precondition` unless the account is flat."""
        async with self.lock:
            await self._outbox.refresh()
            account, context, report = self._ledger.account, self._context, await self._outbox.records.report()
            has_any = account.positions or self.sent or report.positions or report.protective_orders or report.others
            if has_any or self._outbox.is_young(None) or report.balance <= 0:
                raise Precondition("A run at a venue ends without positions and orders, seconds after the last trade.")
            moment = Moment(context.clock.now(), context.market.quotes(), context.market.marks)
            currency, rate = account.run.quote_currency, context.market.funding_rate
            await self._ledger.commit(
                lambda held: rules_of_exchange.reset(held, report.balance, currency, moment, context.rules, rate)
            )

    async def _read_fees(self) -> None:
        """Periodically read the fees of the account's tier; until they are known, the settings' fees apply."""
        now = self._context.clock.now()
        if not interval_elapsed(self._fees_due, _FEES_EVERY, now):
            return
        self._fees_due = now + _FEES_EVERY
        try:
            taker, maker = await self._outbox.records.fee_rates()
        except MarketDataError as error:
            log.warning(
                "%s: the fees of its tier are unknown; the previous ones still apply: %s", self.account_id, error
            )
            return
        self._rules = msgspec.structs.replace(self._context.rules, taker_rate=taker, maker_rate=maker)

    async def _watch_ladder(self) -> None:
        """Step down if the rule of the account's step is broken."""
        if (ladder := self._context.ladder) is not None:
            marks, term = self._context.market.marks, self._ledger.require_term()
            await ladder.watch(self._ledger.account, marks, self._reconciler.difference, term)

    async def _cancel_pointless(self) -> None:
        """Cancel orders open at the venue that no longer rest in the ledger, because nothing is left to reduce."""
        resting = {order.id for order in self._ledger.account.resting}
        await run_each(
            self._outbox.cancel(sent, "nothing is left to reduce")
            for sent in self.sent
            if sent.venue_index is not None and sent.request_id is not None and sent.request_id not in resting
        )

    async def _update_protection(self) -> None:
        """Place the protective orders after an order; the next synchronization retries failures."""
        try:
            await self._cancel_pointless()
            await self._protective_orders.sync()
        except TraderError as error:
            log.warning("%s: protective orders will be placed later: %s", self.account_id, error)
            self.wake()

    # One order

    def _refusal(self, order: Order) -> str | None:
        """Return why an order is not sent: by the paper rules on the current book, or by the live rules."""
        context, now = self._context, self._context.clock.now()
        account = self._ledger.account
        if (refusal := refusal_of_price(context.market, order.symbol, now)) is not None:
            return refusal
        if order.symbol in self._outbox.unsettled:
            return f"an earlier order of {order.symbol} is not decided yet; nothing else trades there until it is"
        if may_open(account, order):
            if unknown := {sent.symbol for sent in self.sent if sent.status is SentStatus.SENT}:
                return f"an earlier order of {min(unknown)} is not decided yet; nothing else opens until it is"
            if self.trouble is not None:
                return f"the account is stopped, only reducing is allowed: {self.trouble}"
            refusal = self._refusal_by_limits(order.symbol) or context.halts.refusal_to_open(self.account_id)
            if refusal is not None:
                return refusal
        moment = Moment(now, context.market.quotes(), context.market.marks)
        trial = rules_of_exchange.place(account, order, moment, self._rules, context.market.funding_rate)
        (answer,) = trial.answers
        return answer.reason if answer.status is OrderStatus.REJECTED else None

    def _sending_of(self, order: Order) -> VenueOrder:
        """Return the order to send for a caller's order on the current book."""
        market, quote = self._context.rules.markets[order.symbol], self._context.market.quotes()[order.symbol]
        return venue_order(self._ledger.account, order, market, quote)

    def _refusal_by_limits(self, symbol: str) -> str | None:
        """Return why an order that opens, with its stop and target, might meet the venue's limits of orders."""
        limits, here = self._context.venue.budget.orders, [sent for sent in self.sent if sent.symbol == symbol]
        if limits is None:
            return None
        waiting, waiting_here = ([sent for sent in some if sent.is_protective] for some in (self.sent, here))
        counts = (len(self.sent), len(here), len(waiting), len(waiting_here))
        if all(count + _ORDERS_KEPT <= most for count, most in zip(counts, limits, strict=True)):
            return None
        return f"so many orders stand at the venue that {symbol} might not get its stop; cancel some first"

    async def _refuse(self, order: Order, refusal: str) -> OrderAnswer:
        posting = await self._ledger.commit(
            lambda account: rules_of_exchange.refuse(account, order, refusal, self._context.clock.now())
        )
        assert posting is not None
        (answer,) = posting.answers
        return answer

    async def _earlier_answer(self, order: Order) -> OrderAnswer | None:
        """Return the answer that a synchronization or a canceled call booked while the order's caller waited.

        :raises OrderUndecided: the order was sent, and its answer is still unknown
        """
        name = order.client_order_id
        if name is None:
            return None
        if any(sent.request is not None and sent.request.client_order_id == name for sent in self.sent):
            raise self._order_undecided(order.symbol)
        return await first_answer(self._context.database, self.account_id, name)

    def _order_undecided(self, symbol: str) -> OrderUndecided:
        self.wake()
        return OrderUndecided(
            "The outcome of this order at the venue is not known yet: its answer was lost, and the venue is asked "
            f"until it is certain. Until then the account {self.account_id} opens nothing, and {symbol} waits.",
            _ASK_AGAIN_S,
        )

    async def _refusal_unless_ready(self) -> str | None:
        """Return why nothing can be sent now; None when memory matches the rows and the venue is reachable."""
        try:
            await self._outbox.refresh()
        except MarketDataError as error:
            return f"the venue cannot be reached now: {error}"
        return None
