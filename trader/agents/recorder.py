"""Recorders: write the record of an invocation to its rows, and keep the inputs of its calls for reproduction."""

import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import msgspec

from trader.agents.domain.call_inputs import CallInputs
from trader.agents.domain.conversation import ChatMessage, ToolRequest, Turn
from trader.agents.domain.entrants import Entrant
from trader.agents.domain.invocations import (
    Step,
    ToolCall,
    tool_call_id,
)
from trader.agents.domain.messages import order_outcome, results_json
from trader.agents.domain.models import Model
from trader.agents.domain.strategy import StrategyState
from trader.agents.domain.tools import RECORDED_TOOLS, Change, decode
from trader.agents.entrants import Entrants
from trader.agents.payloads import PayloadPacker
from trader.agents.record import AlreadyClosed, InvocationRecord, StartedCall
from trader.agents.sql.external import OpenView, insert_decision, update_pending_order, update_view_inputs
from trader.agents.sql.invocations import UnrecordedCall, insert_invocation, insert_payload, select_invocation
from trader.agents.sql.models import select_strategy_state, upsert_strategy_state
from trader.core.errors import Unavailable
from trader.core.events import ConversationsChanged, EventBus
from trader.database.leadership import hold_term
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.exchange.sql.accounts import select_answer_of_client

LED_BY_ANOTHER: Final = "another process leads now"

_log = logging.getLogger("trader.agents")


class StoredStates:
    """The states of strategies, stored in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self, model_id: str) -> StrategyState | None:
        """Return the last saved state; None if there is none. Raises `Unavailable`."""
        async with self._database.connection() as conn:
            return await select_strategy_state(conn, model_id)

    async def save(self, state: Any, turn: Turn, replaced: datetime | None) -> datetime | None:
        """Save the state after a turn's decisions, as `upsert_strategy_state` does. Raises `Unavailable`."""
        async with self._database.writing() as conn:
            return await upsert_strategy_state(conn, turn.model.id, state, turn.view.at, replaced)


class RecorderServices(msgspec.Struct, frozen=True):
    """Dependencies shared by the recorders of a process.

    `settle` waits until the books have the certain outcome of every pending order of an account.
    """

    database: Database
    events: EventBus
    packer: PayloadPacker
    entrants: Entrants
    settle: Callable[[str], Awaitable[None]]


class InvocationRecorder(InvocationRecord):
    """Writes the record of an invocation to its rows in few transactions; a failed `save` can be repeated."""

    _is_handed_on = False
    """Whether the next leader continues the invocation instead of ending it."""

    term: int | None = None
    """The term of the leader, in which alone it begins; None outside of a service."""

    def __init__(
        self, services: RecorderServices, model: Model, started_at: datetime, reserved_usd: Decimal | None = None
    ) -> None:
        super().__init__(model, started_at, reserved_usd)
        self._database = services.database
        self._events = services.events
        self._packer = services.packer
        self._entrants = services.entrants
        self._settle = services.settle
        self._is_saved = False

    @property
    def is_unsaved(self) -> bool:
        """Whether the invocation has ended but its rows do not say so yet."""
        return self.is_closed and not self._is_saved

    async def open(self) -> bool:
        """Insert the invocation row. Return False if it already exists, as after the restart of a replay.

        :raises Unavailable: the database did not confirm it; the record is closed as failed, for a later `save`
        """
        try:
            self.set_entrant(await self._entrants.enter(self.model, self.invocation.started_at))
            return await self._insert()
        except Unavailable as error:
            self.close("failed", "error", f"it could not be started: {error}", None, self.invocation.started_at)
            raise

    async def _insert(self) -> bool:
        async with self._database.transaction() as conn:
            if self.term is not None:
                await self._require_term(conn)
            return await insert_invocation(conn, self.invocation)

    async def _require_term(self, conn: Connection) -> None:
        if not await hold_term(conn, self.term):
            raise Unavailable(LED_BY_ANOTHER)

    async def save(self) -> None:
        """Write all unwritten parts in one transaction.

        :raises Unavailable: nothing was written; everything is kept for the next call
        """
        if self._entrant is not None and self.answered_by is not None:
            started_at = self.invocation.started_at
            self.set_entrant(await self._entrants.answered(self._entrant, self.answered_by, started_at))
        if self._pending is not None and self.is_closed:
            await self._settle(self.model.id)  # the order's outcome is read from the books
        is_only_end = self.is_closed and self._pending is None
        is_only_end = is_only_end and self._written == (len(self.steps), len(self.calls)) and not self._is_handed_on
        has_row = True
        try:
            # A single statement is its own transaction: it holds the chain's lock for less than a round trip.
            async with self._database.writing() if is_only_end else self._database.transaction() as conn:
                if self._pending is not None and self.is_closed:
                    await self._settle_pending(conn, self._pending)
                await self.write(conn)
        except AlreadyClosed:  # by a write without confirmation, or by another process; or it has never begun
            async with self._database.reading() as conn:
                has_row = await select_invocation(conn, self.id) is not None
        self._written = len(self.steps), len(self.calls)
        self._is_saved = self.is_closed
        if self._is_saved and has_row:
            self._events.publish(ConversationsChanged(at=self._ended_at(), model_id=self.model.id))
            await self._save_payload()

    async def settle_pending(self) -> None:
        """Record the outcome of the order whose answer is unknown, if there is one.

        :raises Unavailable: the books cannot be read now
        """
        if self._pending is not None:
            await self._settle(self.model.id)
            async with self._database.connection() as conn:
                await self._settle_pending(conn, self._pending)

    async def _settle_pending(self, conn: Connection, pending: StartedCall) -> None:
        """Record the ledger's outcome of an order that was pending when the invocation was interrupted."""
        ids = pending.client_order_ids(self.id)
        answers = [await select_answer_of_client(conn, self.model.id, each) for each in ids]
        self._pending = None
        status, result = order_outcome([*filter(None, answers)])
        self.add_call(pending.number, pending.request, pending.decision, status, result, pending.at)

    async def _save_payload(self) -> None:
        """Store the messages and raw answers of an AI model, and the inputs of any model's calls."""
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


def recovered_call(invocation_id: UUID, call: UnrecordedCall) -> ToolCall:
    """Reconstruct a call from its orders as far as possible; the model's arguments are lost."""
    status, result = order_outcome(call.answers)
    results = [{**each, "recovered": True} for each in results_json(result)]
    return ToolCall(
        id=tool_call_id(invocation_id, call.number),
        invocation_id=invocation_id,
        number=call.number,
        type="CREATE_POSITION" if call.opened else "CLOSE_POSITION",
        status=status,
        metadata={"raw": None, "decisions": [], "results": results},
        created_at=call.at,
    )


class ExternalRecorder(InvocationRecorder):
    """The record of a decision that the next leader continues; each leader writes only in its own term."""

    _is_handed_on = True

    messages: list[ChatMessage]
    """The messages shown to the agent."""

    deadline: datetime
    """The deadline for acting on them."""

    _inputs_written = 0

    def show(self, messages: list[ChatMessage], deadline: datetime) -> None:
        """Set the messages shown to the agent, and the deadline for acting on them."""
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
        """Continue the record of a process that ended."""
        self.set_entrant(entrant)
        self.show(msgspec.json.decode(view.shown, type=list[ChatMessage]), view.deadline)
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
            assert isinstance(decision, Change), "it had been decoded before it was sent"
            self.call_count = view.pending["number"]
            at = datetime.fromisoformat(view.pending["at"])
            self._pending = StartedCall(self.call_count, request, decision, at)

    async def require_term(self) -> None:
        """:raises Unavailable: another process leads, or the database cannot answer now"""
        async with self._database.connection() as conn:
            await self._require_term(conn)

    async def before_order(self) -> None:
        await super().before_order()
        request = self.call.request
        sent = {"number": self.call.number, "name": request.name, "arguments": request.arguments}
        async with self._database.transaction() as conn:
            await self._require_term(conn)
            await update_pending_order(conn, self.id, {**sent, "at": self.call.at.isoformat()})

    async def save(self) -> None:
        await super().save()
        self._inputs_written = len(self._inputs)

    async def write(self, conn: Connection) -> None:
        await self._require_term(conn)
        await super().write(conn)
        if not self.is_closed and (new := self._inputs[self._inputs_written :]):
            await update_view_inputs(conn, self.id, [msgspec.json.encode(each).decode() for each in new])
