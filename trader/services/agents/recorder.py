"""Recorders: the record of an invocation written to its rows, and the inputs of its calls, kept for reproduction."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import msgspec

from trader.domain.agents.conversation import Message, ToolRequest, Turn
from trader.domain.agents.entrants import Entrant
from trader.domain.agents.invocations import (
    Step,
    ToolCall,
    tool_call_id,
)
from trader.domain.agents.messages import order_outcome
from trader.domain.agents.reproduction import CallInputs, FundingRate, RecordedQuote, RecordedUpdate
from trader.domain.agents.tools import RECORDED_TOOLS, Change, decode
from trader.domain.exchange.account import hours_crossed
from trader.domain.market.markets import Quote
from trader.domain.models import Model
from trader.errors import Unavailable
from trader.services.agents.entrants import Entrants
from trader.services.agents.payloads import PayloadPacker
from trader.services.agents.record import AlreadyClosed, InvocationRecord, PendingOrder
from trader.services.events import ConversationsChanged, EventBus
from trader.services.market.feed import MarketFeed
from trader.store.agents.external import OpenView, insert_decision, update_pending_order, update_view_inputs
from trader.store.agents.invocations import UnrecordedOrder, insert_invocation, insert_payload
from trader.store.agents.models import select_strategy_state, upsert_strategy_state
from trader.store.database.leadership import hold_term
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Connection, Database
from trader.store.exchange.accounts import select_answer_of_client

LED_BY_ANOTHER: Final = "another process leads now, and goes on with this decision"

_log = logging.getLogger("trader.agents")


class StoredStates:
    """The states of strategies, in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self, model_id: str) -> Any:
        """Return the state that was saved last; None when there is none. Raises `Unavailable`."""
        async with self._database.connection() as conn:
            return await select_strategy_state(conn, model_id)

    async def save(self, model_id: str, state: Any, turn: Turn) -> None:
        """Save the state after the decisions of a turn, unless that of a later one is there. Raises `Unavailable`."""
        async with self._database.connection() as conn:
            await upsert_strategy_state(conn, model_id, state, turn.view.at)


class InvocationRecorder(InvocationRecord):
    """Writes the record of an invocation to its rows in few transactions; a failed `save` can be called again.

    `settle` waits until every order of an account that is under way is certain in the books.
    """

    _is_handed_on = False
    """Whether the next leader goes on with the invocation, and does not end it."""

    def __init__(
        self,
        database: Database,
        events: EventBus,
        packer: PayloadPacker,
        entrants: Entrants,
        model: Model,
        started_at: datetime,
        settle: Callable[[str], Awaitable[None]],
        reserved_usd: Decimal | None = None,
    ) -> None:
        super().__init__(model, started_at, reserved_usd)
        self._database = database
        self._events = events
        self._packer = packer
        self._entrants = entrants
        self._settle = settle
        self._is_saved = False

    @property
    def is_unsaved(self) -> bool:
        """Whether the invocation has ended and its rows do not say so."""
        return self.is_closed and not self._is_saved

    async def open(self) -> bool:
        """Insert the invocation row. Return False when it exists already, as after the restart of a replay.

        :raises Unavailable: the database did not confirm it; the record is closed as failed, for a later `save`
        """
        try:
            self.set_entrant(await self._entrants.enter(self.model, self.invocation.started_at))
            return await self._insert()
        except Unavailable as error:
            self.close("failed", f"it was not begun: {error}", None, self.invocation.started_at)
            raise

    async def _insert(self) -> bool:
        async with self._database.writing() as conn:
            return await insert_invocation(conn, self.invocation)

    async def save(self) -> None:
        """Write everything that is not written yet, in one transaction.

        :raises Unavailable: nothing was written; all of it is kept
        """
        if self._entrant is not None and self.answered_by is not None:
            started_at = self.invocation.started_at
            self.set_entrant(await self._entrants.answered(self._entrant, self.answered_by, started_at))
        if self._pending is not None and self.is_closed:
            await self._settle(self.model.id)  # the order's outcome is read from the books
        is_only_end = self.is_closed and self._pending is None
        is_only_end = is_only_end and self._written == (len(self.steps), len(self.calls)) and not self._is_handed_on
        with suppress(AlreadyClosed):  # the last time it was written, but not confirmed; or another process did
            # A statement alone is a transaction of its own: it holds the lock of the chain for less than a round trip.
            async with self._database.writing() if is_only_end else self._database.transaction() as conn:
                if self._pending is not None and self.is_closed:
                    await self._settle_pending(conn, self._pending)
                await self.write(conn)
        self._written = len(self.steps), len(self.calls)
        if self.is_closed:
            self._is_saved = True
            self._events.publish(ConversationsChanged(at=self._ended_at(), model_id=self.model.id))
            await self._save_payload()

    async def settle_pending(self) -> None:
        """Record the outcome of the order whose answer is not known, if there is one.

        :raises Unavailable: the books cannot be read now
        """
        if self._pending is not None:
            await self._settle(self.model.id)
            async with self._database.connection() as conn:
                await self._settle_pending(conn, self._pending)

    async def _settle_pending(self, conn: Connection, pending: PendingOrder) -> None:
        """Record the ledger's outcome of an order that was pending when the invocation broke off."""
        answer = await select_answer_of_client(conn, self.model.id, pending.client_order_id(self.id))
        self._pending = None
        status, result = order_outcome(answer)
        self.add_call(pending.number, pending.request, pending.decision, status, result, pending.at)

    async def _save_payload(self) -> None:
        """Keep the messages and raw answers of an AI model, and the inputs of the calls of any model."""
        payload = self.payload
        if payload is None:
            return
        content = await self._packer.pack(payload)
        try:
            async with self._database.writing() as conn:
                await ensure_partitions(conn, self.invocation.started_at)
                await insert_payload(conn, self.id, content, self.invocation.started_at)
        except Unavailable as error:
            _log.warning("%s: the payload of invocation %s could not be stored: %s", self.model.id, self.id, error)

    def _ended_at(self) -> datetime:
        return self.invocation.finished_at or self.invocation.started_at


class CallRecorder:
    """Records the inputs of one call: the state it was judged by, then the market until it is answered."""

    def __init__(self, inputs: CallInputs, market: MarketFeed) -> None:
        self._inputs = inputs
        self._market = market
        self._quotes = dict(market.quotes())
        self._last_update = next(reversed(market.recent()), None)

    def refused(self) -> CallInputs:
        """Return the inputs of a call that the guard refused before it met an order book."""
        return self._inputs

    def answered(self, symbol: str, at: datetime) -> CallInputs:
        """Return the inputs of a call that reached the exchange and was answered at `at`."""
        account = self._inputs.context.account
        concerned = {symbol, *account.positions, *(order.symbol for order in account.resting)}
        latest = self._market.recent()
        first = next((n for n, tick in enumerate(latest, 1) if tick is self._last_update), 0)
        return msgspec.structs.replace(
            self._inputs,
            answered_at=at,
            quotes=_recorded(self._quotes, concerned),
            updates=tuple(RecordedUpdate(tick.at, _recorded(tick.quotes, concerned)) for tick in latest[first:]),
            rates=tuple(
                FundingRate(held, hour, self._market.funding_rate(held, hour))
                for held, position in account.positions.items()
                for hour in hours_crossed(position.funded_until, at)
            ),
        )


def _recorded(quotes: Mapping[str, Quote], symbols: set[str]) -> tuple[RecordedQuote, ...]:
    return tuple(RecordedQuote.of(quote) for symbol, quote in quotes.items() if symbol in symbols)


def recovered_call(invocation_id: UUID, order: UnrecordedOrder) -> ToolCall:
    """Return the call that placed an order, as far as the order tells; the model's arguments are lost."""
    status, result = order_outcome(order.answer)
    return ToolCall(
        id=tool_call_id(invocation_id, order.number),
        invocation_id=invocation_id,
        number=order.number,
        type="CREATE_POSITION" if order.opened else "CLOSE_POSITION",
        status=status,
        metadata={"raw": None, "decisions": [], "results": [{**result, "recovered": True}]},
        created_at=order.at,
    )


class ExternalRecorder(InvocationRecorder):
    """The record of a decision that the next leader goes on with: each leader writes in its own term only."""

    _is_handed_on = True

    term: int | None
    """The term in which this process leads."""

    messages: list[Message]
    """What the agent is shown."""

    deadline: datetime
    """Until when it may act on that."""

    _inputs_written = 0

    def show(self, messages: list[Message], deadline: datetime) -> None:
        """Set what the agent is shown, and until when it may act on that."""
        self.messages, self.deadline = messages, deadline
        self.note_messages(messages)

    async def _insert(self) -> bool:
        shown = msgspec.json.encode(self.messages).decode()
        async with self._database.writing() as conn:
            is_leading, is_new = await insert_decision(conn, self.term, self.invocation, self.deadline, shown)
        if not is_leading:
            raise Unavailable(LED_BY_ANOTHER)
        return is_new

    def resume(self, entrant: Entrant, steps: list[Step], calls: list[ToolCall], view: OpenView) -> None:
        """Take up the record of a process that ended."""
        self.set_entrant(entrant)
        self.show(msgspec.json.decode(view.shown, type=list[Message]), view.deadline)
        self.invocation = view.invocation
        self.steps, self.calls = steps, calls
        self._written = len(steps), len(calls)
        inputs = (msgspec.json.decode(each, type=CallInputs) for each in view.inputs)
        self._inputs = list({each.number: each for each in inputs}.values())
        self._inputs_written = len(self._inputs)
        self.answered_by = steps[0].model if steps else None
        self.call_count = max((call.number for call in calls), default=0)
        if view.pending is not None and view.pending["number"] > self.call_count:
            request = ToolRequest(id="", name=view.pending["name"], arguments=view.pending["arguments"])
            decision = decode(request, RECORDED_TOOLS)
            assert isinstance(decision, Change), "it was decoded before it was sent"
            self.call_count = view.pending["number"]
            at = datetime.fromisoformat(view.pending["at"])
            self._pending = PendingOrder(self.call_count, request, decision, at)

    async def before_order(self, pending: PendingOrder) -> None:
        await super().before_order(pending)
        request = pending.request
        sent = {"number": pending.number, "name": request.name, "arguments": request.arguments}
        async with self._database.transaction() as conn:
            await self._require_term(conn)
            await update_pending_order(conn, self.id, {**sent, "at": pending.at.isoformat()})

    async def save(self) -> None:
        await super().save()
        self._inputs_written = len(self._inputs)

    async def write(self, conn: Connection) -> None:
        await self._require_term(conn)
        await super().write(conn)
        if not self.is_closed and (new := self._inputs[self._inputs_written :]):
            await update_view_inputs(conn, self.id, [msgspec.json.encode(each).decode() for each in new])

    async def _require_term(self, conn: Connection) -> None:
        if not await hold_term(conn, self.term):
            raise Unavailable(LED_BY_ANOTHER)
