"""Recorders: what an invocation does, written to its rows, and the inputs of its calls, kept for reproduction."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from trader.domain.agents.chain import ChainRecord, Evidence, encoded_digest, record_digest, shown_digest
from trader.domain.agents.conversation import Message, ModelAnswer, ToolRequest, storable
from trader.domain.agents.entrants import Entrant
from trader.domain.agents.invocations import (
    Invocation,
    InvocationStatus,
    Step,
    ToolCall,
    ToolCallStatus,
    client_order_id,
    invocation_id,
    tool_call_id,
)
from trader.domain.agents.messages import decision_json, order_outcome
from trader.domain.agents.reproduction import CallInputs, FundingRate, RecordedQuote, RecordedUpdate
from trader.domain.agents.tools import Decision, call_type, raw_of
from trader.domain.agents.view import View
from trader.domain.exchange.account import hours_crossed
from trader.domain.market.markets import Quote
from trader.domain.models import Model
from trader.errors import ProviderError, Unavailable
from trader.services.agents.entrants import Entrants
from trader.services.agents.payloads import EncodedPayload, Packer
from trader.services.events import ConversationsChanged, EventBus
from trader.services.market.feed import MarketFeed
from trader.store.agents.chain import update_invocation_closed
from trader.store.agents.invocations import (
    UnrecordedOrder,
    insert_invocation,
    insert_payload,
    insert_step,
    insert_tool_call,
    update_invocation,
)
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Connection, Database
from trader.store.exchange.accounts import select_answer_of_client

NAME_MAX = 200
"""Characters kept of the name of a tool or model that a provider sends."""

RESPONSE_MAX = 20_000
"""Characters of the response kept in the row; the payload has all of it."""

_log = logging.getLogger("trader.agents")


class _AlreadyClosed(Exception):
    """The rows say that the invocation has ended: nothing may be added to it."""


def cost_of(answer: ModelAnswer, model: Model) -> Decimal | None:
    """Return what an answer cost in USD: as its provider says, else by the price of the model; None: nobody knows."""
    price = model.configuration.price
    if answer.cost_usd is not None or price is None or answer.input_tokens is None or answer.output_tokens is None:
        return answer.cost_usd
    return price.cost(answer.input_tokens, answer.cached_tokens or 0, answer.output_tokens)


class PendingOrder(msgspec.Struct, frozen=True):
    """An order that was sent and whose answer is not known yet."""

    number: int
    request: ToolRequest
    decision: Decision
    at: datetime


class InvocationRecorder:
    """Collects what an invocation does and writes it in few transactions; a failed `save` can be called again."""

    def __init__(
        self,
        database: Database,
        events: EventBus,
        packer: Packer,
        entrants: Entrants,
        model: Model,
        started_at: datetime,
    ) -> None:
        self._database = database
        self._events = events
        self._packer = packer
        self._entrants = entrants
        self._entrant: Entrant | None = None
        self.model = model
        self.invocation = Invocation(
            id=invocation_id(model, started_at), model_id=model.id, status="running", started_at=started_at
        )
        self._answered_by: str | None = None  # by which model the first step was
        self._steps: list[Step] = []
        self._calls: list[ToolCall] = []
        self._written = 0, 0  # how many of the steps and of the calls
        self._view_digest: bytes | None = None  # of a rule agent
        self._pending: PendingOrder | None = None
        self._answers: list[str] = []
        self._messages: list[Message] = []
        self._encoded = b"[]", b"[]"  # messages and answers, as of the end
        self._inputs: list[CallInputs] = []
        self.call_count = 0
        self._is_saved = False

    @property
    def id(self) -> UUID:
        return self.invocation.id

    @property
    def is_closed(self) -> bool:
        return self.invocation.status != "running"

    @property
    def is_unsaved(self) -> bool:
        """Whether the invocation has ended and its rows do not say so."""
        return self.is_closed and not self._is_saved

    @property
    def has_pending_order(self) -> bool:
        """Whether an order was sent whose answer is not known."""
        return self._pending is not None

    async def open(self) -> bool:
        """Insert the invocation row. Return False when it exists already, as after the restart of a replay.

        :raises Unavailable: the database did not confirm it; the record is closed as failed, for a later `save`
        """
        try:
            self._set_entrant(await self._entrants.enter(self.model, self.invocation.started_at))
            async with self._database.connection() as conn:
                return await insert_invocation(conn, self.invocation)
        except Unavailable as error:
            self.close("failed", f"it was not begun: {error}", None, self.invocation.started_at)
            raise

    def _set_entrant(self, entrant: Entrant) -> None:
        self._entrant = entrant
        self.invocation = msgspec.structs.replace(self.invocation, entrant=entrant.number)

    def note_messages(self, messages: list[Message]) -> None:
        """Keep the conversation for the payload; the list may still grow."""
        self._messages = messages

    def note_view(self, view: View) -> None:
        """Keep the digest of the view of a rule agent, which is not kept itself."""
        self._view_digest = shown_digest(view)

    def add_step(self, provider: str, answer: ModelAnswer, at: datetime) -> Step:
        """Add a step that has ended."""
        before = self.invocation
        step_cost = cost_of(answer, self.model)
        step = Step(
            invocation_id=self.id,
            number=before.step_count + 1,
            provider=provider,
            key_number=answer.key_number,
            model=answer.model[:NAME_MAX],
            tool_names=[call.name[:NAME_MAX] for call in answer.calls],
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
            cost_usd=step_cost,
            duration_ms=answer.duration_ms or 0,
            created_at=at,
            cached_tokens=answer.cached_tokens,
        )
        self._steps.append(step)
        self._answered_by = self._answered_by or step.model
        self.add_answer(answer.raw)
        cost = before.cost_usd if step_cost is None else (before.cost_usd or Decimal(0)) + step_cost
        is_unpriced = step_cost is None and answer.duration_ms is not None  # a rule agent costs nothing
        self.invocation = msgspec.structs.replace(
            before,
            step_count=step.number,
            input_tokens=before.input_tokens + (step.input_tokens or 0),
            output_tokens=before.output_tokens + (step.output_tokens or 0),
            cost_usd=cost,
            unmetered_attempts=before.unmetered_attempts + answer.unmetered_attempts,
            unpriced_steps=before.unpriced_steps + is_unpriced,
        )
        return step

    def add_answer(self, raw: str) -> None:
        """Add the raw answer of a provider, usable or not."""
        if raw:
            self._answers.append(raw)

    def add_failure(self, error: ProviderError) -> None:
        """Add what a provider sent instead of an answer, and the attempts that may have cost tokens."""
        self.add_answer(error.raw)
        unmetered = self.invocation.unmetered_attempts + error.unmetered_attempts
        self.invocation = msgspec.structs.replace(self.invocation, unmetered_attempts=unmetered)

    def add_inputs(self, inputs: CallInputs) -> None:
        """Add the inputs of a call, so that it can be reproduced."""
        self._inputs.append(inputs)

    def next_call(self) -> int:
        """Return the number of the next tool call."""
        self.call_count += 1
        return self.call_count

    def add_call(
        self,
        number: int,
        request: ToolRequest,
        decision: Decision | None,
        status: ToolCallStatus,
        result: dict[str, Any],
        at: datetime,
    ) -> ToolCall:
        """Add a tool call that has ended, and return its record."""
        metadata = {
            "raw": raw_of(request),
            "decisions": [] if decision is None else [decision_json(decision)],
            "results": [result],
        }
        call = ToolCall(
            id=tool_call_id(self.id, number),
            invocation_id=self.id,
            number=number,
            type=call_type(request),
            status=status,
            metadata=storable(metadata),
            created_at=at,
        )
        self._calls.append(call)
        return call

    async def before_order(self, pending: PendingOrder) -> None:
        """Write what is known, and remember the order that is sent next."""
        await self.save()
        self._pending = pending

    def after_order(self) -> None:
        """Forget the pending order: its answer has been added."""
        self._pending = None

    def close(self, status: InvocationStatus, reason: str | None, response: str | None, at: datetime) -> None:
        """Set how the invocation ended; `save` writes it."""
        self.invocation = msgspec.structs.replace(
            self.invocation,
            status=status,
            failure_reason=None if reason is None else storable(reason),
            response=None if response is None else storable(response)[:RESPONSE_MAX],
            finished_at=max(at, self.invocation.started_at),
        )

    async def save(self) -> None:
        """Write everything that is not written yet, in one transaction.

        :raises Unavailable: nothing was written; all of it is kept
        """
        if self._entrant is not None and self._answered_by is not None:
            started_at = self.invocation.started_at
            self._set_entrant(await self._entrants.answered(self._entrant, self._answered_by, started_at))
        is_only_end = self.is_closed and self._pending is None
        is_only_end = is_only_end and self._written == (len(self._steps), len(self._calls))
        with suppress(_AlreadyClosed):  # the last time it was written, but not confirmed; or another process did
            # A statement alone is a transaction of its own: it holds the lock of the chain for less than a round trip.
            async with self._database.connection() if is_only_end else self._database.transaction() as conn:
                await self._write(conn)
        self._written = len(self._steps), len(self._calls)
        if self.is_closed:
            self._is_saved = True
            self._events.publish(ConversationsChanged(at=self._ended_at(), model_id=self.model.id))
            await self._save_payload()

    async def _write(self, conn: Connection) -> None:
        """Write what is new, and when the invocation has ended also its link of the chain, last: it locks the chain."""
        if self._pending is not None and self.is_closed:
            await self._settle_pending(conn, self._pending)
        steps, calls = self._written
        for step in self._steps[steps:]:
            await insert_step(conn, step)
        for call in self._calls[calls:]:
            await insert_tool_call(conn, call)
        if not self.is_closed:
            await update_invocation(conn, self.invocation)
            return
        encoded = self._encoded = msgspec.json.encode(self._messages), msgspec.json.encode(self._answers)
        shown, answers = (encoded_digest(part) for part in encoded)
        evidence = Evidence(shown if self._messages else self._view_digest, answers if self._answers else None)
        record = ChainRecord(self.invocation, self._entrant, self._steps, self._calls)
        if not await update_invocation_closed(conn, self.invocation, evidence, record_digest(record, evidence)):
            raise _AlreadyClosed

    async def _settle_pending(self, conn: Connection, pending: PendingOrder) -> None:
        """Record the outcome of an order that was under way when the invocation broke off, as the books hold it."""
        answer = await select_answer_of_client(conn, self.model.id, client_order_id(self.id, pending.number))
        self._pending = None
        status, result = order_outcome(answer)
        self.add_call(pending.number, pending.request, pending.decision, status, result, pending.at)

    async def _save_payload(self) -> None:
        """Keep the messages and raw answers of an AI model, and the inputs of the calls of any model."""
        if not self._messages and not self._inputs:
            return
        messages, answers = self._encoded
        payload = EncodedPayload(messages=msgspec.Raw(messages), answers=msgspec.Raw(answers), inputs=self._inputs)
        content = await self._packer.pack(payload)
        try:
            async with self._database.connection() as conn:
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
        """Return the inputs of a call that the guard refused: it met no book."""
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
