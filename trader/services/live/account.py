"""The desk of one account at a real venue: whatever is done for the account happens here, one thing after the other.

An order goes: let in by the same rules as on paper, noted, sent, booked as the venue filled it, and then the orders of
its exit plan are placed. At every cycle of the price tracker the desk finds out what became of what was sent, books it,
and compares the books with the venue.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Final

from trader.clock import comes_up
from trader.domain.exchange import rules as rules_of_exchange
from trader.domain.exchange.account import Position
from trader.domain.exchange.halts import may_open
from trader.domain.exchange.order_validation import passive_limit, quantity_of
from trader.domain.exchange.orders import CLOSING_SIDE, Cause, ExitPlan, Order, OrderAnswer, OrderStatus, OrderType
from trader.domain.exchange.rules import Moment, triggered
from trader.domain.exchange.venue_orders import SentOrder, SentStatus, VenueOrder, VenueOrderType
from trader.domain.live.protective_orders import reachable_price
from trader.errors import MarketDataError, OrderUndecided, TraderError, Unavailable
from trader.services.exchange.idempotent_orders import first_answer, refusal_of_price
from trader.services.live.outbox import Floor, Outbox
from trader.services.live.protective_orders import ProtectiveOrders
from trader.services.live.reconciler import Reconciler

log = logging.getLogger("trader.live")

_ASK_AGAIN_S: Final = 5
_LOOK_EVERY_LEAST: Final = timedelta(seconds=2)
"""An exit plan that fires and cannot be executed does not make the desk ask the venue more often than this."""

_EXIT_AGAIN_AFTER: Final = timedelta(seconds=10)
"""When the venue refuses an exit, it is tried again after this."""

_FAILURES_MAX: Final = 3
"""After so many looks in a row that failed, nothing is opened until one has gone well."""

_AT_VENUE: Final = {Cause.STOP: VenueOrderType.STOP, Cause.TARGET: VenueOrderType.TARGET}


class LiveAccount:
    """Of one account."""

    def __init__(self, floor: Floor, outbox: Outbox, statements: Reconciler, legs: ProtectiveOrders) -> None:
        self.account_id = outbox.account_id
        self.account_index = outbox.account_index
        self._floor = floor
        self._outbox = outbox
        self._statements = statements
        self._legs = legs
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._looked_at = floor.clock.now()
        self._failures = 0
        self._letting_in: frozenset[str] = frozenset()
        self._exit_again_at: dict[str, datetime] = {}

    @property
    def trouble(self) -> str | None:
        """Why nothing may be opened for the account; reducing is allowed."""
        return self._statements.trouble

    @property
    def undecided(self) -> Collection[str]:
        """The markets in which an order that may open is on its way: let in, and what it filled is not booked yet."""
        sent = {one.symbol for one in self.sent if not one.order.reduce_only}
        return (self._outbox.unsettled & sent) | self._letting_in

    @property
    def sent(self) -> Sequence[SentOrder]:
        """What may stand at the venue."""
        return tuple(self._outbox.rows.values())

    # What callers ask for

    async def place(self, order: Order) -> OrderAnswer:
        """Place an order. Raises `OrderUndecided` when what became of it is not known now."""
        async with self._lock:
            unready = await self._unready()
            self._refuse_to_send_again(order)
            if (earlier := await self._answered_meanwhile(order)) is not None:
                return earlier
            if (refusal := unready or self._refusal(order)) is not None:
                return await self._refuse(order, refusal)
            self._letting_in = frozenset([order.symbol] if may_open(self._outbox.account, order) else ())
            try:
                concluded = await self._outbox.send(self._venue_order(order), order.cause, order)
            except (MarketDataError, Unavailable) as error:
                raise self._not_known(order.symbol) from error
            finally:
                self._letting_in = frozenset()
            if concluded.answer is None:
                raise self._not_known(order.symbol)
            await self._tidy_up()
            return concluded.answer

    async def cancel(self, order_id: str) -> None:
        """End a resting order at the venue. One that does not rest is left alone. Raises `Unavailable`."""
        async with self._lock:
            if (unready := await self._unready()) is not None:
                raise Unavailable(unready, _ASK_AGAIN_S)
            for sent in self.sent:
                if str(sent.request_id) != order_id:
                    continue
                try:
                    is_ended = await self._outbox.cancel(sent, "cancelled by the caller")
                except MarketDataError as error:
                    raise Unavailable(f"The venue cannot be asked now: {error}", _ASK_AGAIN_S) from error
                if not is_ended:
                    raise self._not_known(sent.symbol)

    async def set_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        """Replace an exit plan. None when it is set, else why not: then the old one stays."""
        async with self._lock:
            if (unready := await self._unready()) is not None:
                return unready
            try:
                return await self._legs.set_plan(symbol, plan)
            except MarketDataError as error:
                return f"the venue cannot be asked now: {error}"

    # What it does by itself

    def wake(self) -> None:
        """Have a look soon."""
        self._wake.set()

    def see(self) -> None:
        """See new marks: have a look when an exit plan asks for it."""
        if not comes_up(self._looked_at + _LOOK_EVERY_LEAST, _LOOK_EVERY_LEAST, self._floor.clock.now()):
            return
        positions = self._outbox.account.positions
        if any(self._due(one) is not None and not self._was_just_refused(symbol) for symbol, one in positions.items()):
            self.wake()

    async def run(self) -> None:
        """Look whenever it is asked for, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.look()

    async def look(self) -> None:
        """As `check`. What keeps it from its end is told, and the next look tries again."""
        try:
            await self.check()
        except TraderError as error:
            log.warning("%s: the venue and the books are compared again later: %s", self.account_id, error)
            self._failures += 1
            if self._failures >= _FAILURES_MAX:
                self._statements.trouble = f"it could not be compared with the venue: {error}"
        except Exception as error:  # an account whose looks have ended would be watched by nobody
            log.exception("%s: a look at the venue ended by a bug, and is tried again", self.account_id)
            self._outbox.doubt()
            self._statements.trouble = (
                f"it could not be compared with the venue: internal error ({type(error).__name__}); "
                "the log has its cause"
            )

    async def check(self) -> None:
        """Find out what became of what was sent, book it, act on exit plans, and compare with the venue.

        :raises TraderError: the venue or the database cannot be asked; what is left is done at the next look
        """
        async with self._lock:
            self._looked_at = self._floor.clock.now()
            await self._outbox.refresh()
            await self._outbox.resolve()
            await self._outbox.fund()
            await self._outbox.poll()
            await self._drop_orphans()
            await self._exit()
            await self._legs.sync()
            await self._statements.compare()
            self._failures = 0

    async def _exit(self) -> None:
        """Close at market what an exit plan says is to be closed, and what no order at the venue will close."""
        for symbol, position in list(self._outbox.account.positions.items()):
            cause = self._due(position)
            now = self._floor.clock.now()
            if cause is None or symbol in self._outbox.unsettled or self._was_just_refused(symbol):
                continue
            if (refusal := refusal_of_price(self._floor.market, symbol, now)) is not None:
                log.warning("%s: the exit (%s) from %s waits: %s", self.account_id, cause, symbol, refusal)
                continue
            order = Order(
                account_id=self.account_id,
                symbol=symbol,
                side=CLOSING_SIDE[position.side],
                quantity=position.quantity,
                reduce_only=True,
            )
            sent = (await self._outbox.send(self._venue_order(order), cause)).sent
            if sent.status is SentStatus.REFUSED:
                log.error("%s: the exit (%s) from %s was refused: %s", self.account_id, cause, symbol, sent.reason)
                self._exit_again_at[symbol] = now + _EXIT_AGAIN_AFTER

    def _due(self, position: Position) -> Cause | None:
        """The trigger that fires here; not that of a stop or target which waits at the venue."""
        mark = self._floor.marks.get(position.symbol)
        cause = None if mark is None else triggered(position, mark, self._floor.clock.now())
        if cause is None or position.closing is not None:
            return cause
        kind = _AT_VENUE.get(cause)
        stands = any(sent.symbol == position.symbol and sent.order.type is kind for sent in self._outbox.legs())
        return None if stands else cause

    def _was_just_refused(self, symbol: str) -> bool:
        again_at = self._exit_again_at.get(symbol)
        return again_at is not None and not comes_up(again_at, _EXIT_AGAIN_AFTER, self._floor.clock.now())

    async def _drop_orphans(self) -> None:
        """End orders that stand at the venue and rest in the books no more: nothing is left for them to reduce."""
        resting = {order.id for order in self._outbox.account.resting}
        for sent in self.sent:
            if sent.venue_index is not None and sent.request_id is not None and sent.request_id not in resting:
                await self._outbox.cancel(sent, "nothing is left to reduce")

    async def _tidy_up(self) -> None:
        """After an order: its exit plan goes to the venue. What cannot be done now is done at the next look."""
        try:
            await self._drop_orphans()
            await self._legs.sync()
        except TraderError as error:
            log.warning("%s: exit plans go to the venue later: %s", self.account_id, error)
            self.wake()

    # One order

    def _refusal(self, order: Order) -> str | None:
        """Why an order is not sent; the same rules as on paper, on the book of this moment, and those of the venue."""
        floor, now = self._floor, self._floor.clock.now()
        if (refusal := refusal_of_price(floor.market, order.symbol, now)) is not None:
            return refusal
        if order.symbol in self._outbox.unsettled:
            return f"an earlier order of {order.symbol} is not decided yet; nothing else trades there until it is"
        if may_open(self._outbox.account, order):
            if self.trouble is not None:
                return f"the account is stopped, only reducing is allowed: {self.trouble}"
            if (halted := floor.halts.refusal_to_open(self.account_id)) is not None:
                return halted
        moment = Moment(now, floor.market.quotes(), floor.marks)
        trial = rules_of_exchange.place(
            self._outbox.account, order, moment, floor.rules, floor.market.funding_rate
        ).answer
        assert trial is not None
        return trial.reason if trial.status is OrderStatus.REJECTED else None

    def _venue_order(self, order: Order) -> VenueOrder:
        account, market = self._outbox.account, self._floor.rules.markets[order.symbol]
        quote = self._floor.market.quotes()[order.symbol]
        is_limit = order.type is OrderType.LIMIT
        limit = passive_limit(order, market) if is_limit else None
        price = reachable_price(order.side, quote, closes=order.reduce_only, market=market) if limit is None else limit
        return VenueOrder(
            client_index=0,
            symbol=order.symbol,
            side=order.side,
            type=VenueOrderType.LIMIT if is_limit else VenueOrderType.MARKET,
            quantity=quantity_of(account, order, market),
            price=price,
            # Let in because it reduces what is held; if that is gone at the venue meanwhile, it is to open nothing.
            reduce_only=not may_open(account, order),
        )

    async def _refuse(self, order: Order, refusal: str) -> OrderAnswer:
        posting = await self._outbox.commit(
            lambda account: rules_of_exchange.refuse(account, order, refusal, self._floor.clock.now())
        )
        assert posting is not None
        assert posting.answer is not None
        return posting.answer

    def _refuse_to_send_again(self, order: Order) -> None:
        """An order whose first answer was lost gets it when it is known, and is never sent twice."""
        name = order.client_order_id
        if name is not None and any(
            sent.request is not None and sent.request.client_order_id == name for sent in self.sent
        ):
            raise self._not_known(order.symbol)

    async def _answered_meanwhile(self, order: Order) -> OrderAnswer | None:
        """The answer that an order got since its caller looked for one: found out by the desk, or by a lost caller."""
        if order.client_order_id is None:
            return None
        return await first_answer(self._floor.database, self.account_id, order.client_order_id)

    def _not_known(self, symbol: str) -> OrderUndecided:
        self.wake()
        return OrderUndecided(
            "What became of this order at the venue is not known yet: its answer was lost, and the venue is asked "
            f"until it is certain. Until then nothing else trades {symbol} for the account {self.account_id}.",
            _ASK_AGAIN_S,
        )

    async def _unready(self) -> str | None:
        """Why nothing can be sent now; None when what is known is what the rows say, and the venue can be asked."""
        try:
            await self._outbox.refresh()
        except MarketDataError as error:
            return f"the venue cannot be asked now: {error}"
        return None
