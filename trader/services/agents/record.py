"""Record of an invocation: collects its steps and calls, and writes them as rows."""

from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from trader.domain.agents.chain import ChainRecord, PayloadDigests, encoded_digest, record_digest, shown_digest
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
from trader.domain.agents.memory import note_of
from trader.domain.agents.messages import decision_json
from trader.domain.agents.reproduction import CallInputs
from trader.domain.agents.tools import Decision, PlaceOrder, call_type, raw_of
from trader.domain.agents.view import View
from trader.domain.models import Model
from trader.errors import ProviderError
from trader.services.agents.payloads import EncodedPayload
from trader.store.agents.chain import update_invocation_closed
from trader.store.agents.invocations import insert_step, insert_tool_call, update_invocation, upsert_note
from trader.store.database.pool import Connection

NAME_MAX = 200
"""Characters kept of the name of a tool or model that a provider sends."""

RESPONSE_MAX = 20_000
"""Characters of the response kept in the row; the payload has all of it."""


class AlreadyClosed(Exception):
    """The rows say that the invocation has ended: nothing may be added to it."""


def cost_of(answer: ModelAnswer, model: Model) -> Decimal | None:
    """Return what an answer cost in USD: by the price of the model, else as its provider reports; None if unknown.

    With a price, the tokens that were not reported are included at their most.
    """
    price = model.configuration.price
    if price is None:
        return answer.cost_usd
    read, written = answer.cached_tokens or 0, answer.cache_write_tokens or 0
    known = price.cost(answer.input_tokens or 0, read, answer.output_tokens or 0, written)
    return known + model.configuration.highest_cost(price, *answer.unreported)


class PendingOrder(msgspec.Struct, frozen=True):
    """An order that was sent and whose answer is not known yet."""

    number: int
    request: ToolRequest
    decision: Decision
    at: datetime

    def client_order_id(self, invocation_id: UUID) -> str:
        """Return the client order id of the order, which the agent may have chosen."""
        chosen = self.decision.client_order_id if isinstance(self.decision, PlaceOrder) else None
        return chosen or client_order_id(invocation_id, self.number)


class InvocationRecord:
    """Collects what an invocation does. Without a database `open` and `save` do nothing; `write` writes it anywhere."""

    def __init__(self, model: Model, started_at: datetime, reserved_usd: Decimal | None = None) -> None:
        self.model = model
        self.invocation = Invocation(
            id=invocation_id(model, started_at),
            model_id=model.id,
            status="running",
            started_at=started_at,
            reserved_usd=reserved_usd,
        )
        self.answered_by: str | None = None
        """The model that the first step was answered by, as its provider calls it."""

        self.steps: list[Step] = []
        self.calls: list[ToolCall] = []
        self.call_count = 0
        self._entrant: Entrant | None = None
        self._written = 0, 0  # how many of the steps and of the calls
        self._view_digest: bytes | None = None  # of a rule agent
        self._pending: PendingOrder | None = None
        self._answers: list[str] = []
        self._messages: list[Message] = []
        self._encoded = b"[]", b"[]"  # messages and answers, as of the end
        self._inputs: list[CallInputs] = []

    @property
    def id(self) -> UUID:
        return self.invocation.id

    @property
    def is_closed(self) -> bool:
        return self.invocation.status != "running"

    @property
    def is_completed(self) -> bool:
        return self.invocation.status == "completed"

    @property
    def has_pending_order(self) -> bool:
        """Whether an order was sent whose answer is not known."""
        return self._pending is not None

    async def open(self) -> bool:
        """Begin the record. Return False when there is one already."""
        return True

    async def before_order(self, pending: PendingOrder) -> None:
        """Save what is known, and remember the order that is sent next."""
        await self.save()
        self._pending = pending

    def set_entrant(self, entrant: Entrant) -> None:
        """Set the entrant that the model is in this invocation."""
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
            cache_write_tokens=answer.cache_write_tokens,
        )
        self.steps.append(step)
        self.answered_by = self.answered_by or step.model
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
        """Add what a provider sent instead of an answer, and what the attempts may have cost at most."""
        self.add_answer(error.raw)
        before, price = self.invocation, self.model.configuration.price
        cost, is_unpriced = before.cost_usd, False
        if any(error.unreported):
            is_unpriced = price is None
            if price is not None:
                cost = (cost or Decimal(0)) + self.model.configuration.highest_cost(price, *error.unreported)
        self.invocation = msgspec.structs.replace(
            before,
            cost_usd=cost,
            unmetered_attempts=before.unmetered_attempts + error.unmetered_attempts,
            unpriced_steps=before.unpriced_steps + is_unpriced,
        )

    def add_inputs(self, inputs: CallInputs | None) -> None:
        """Add the inputs of a call, so that it can be reproduced; None where they are not recorded."""
        if inputs is not None:
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
            type=call_type(request, decision),
            status=status,
            metadata=storable(metadata),
            created_at=at,
        )
        self.calls.append(call)
        return call

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
        """Save what is not saved yet."""

    async def write(self, conn: Connection) -> None:
        """Write what is new, and when the invocation has ended also its link of the chain, last: it locks the chain."""
        steps, calls = self._written
        for step in self.steps[steps:]:
            await insert_step(conn, step)
        for call in self.calls[calls:]:
            await insert_tool_call(conn, call)
            if (note := note_of(call)) is not None:
                await upsert_note(conn, self.model.id, note, call.created_at)
        if not self.is_closed:
            if not await update_invocation(conn, self.invocation):
                raise AlreadyClosed
            return
        encoded = self._encoded = msgspec.json.encode(self._messages), msgspec.json.encode(self._answers)
        shown, answers = (encoded_digest(part) for part in encoded)
        digests = PayloadDigests(shown if self._messages else self._view_digest, answers if self._answers else None)
        record = ChainRecord(self.invocation, self._entrant, self.steps, self.calls)
        if not await update_invocation_closed(conn, self.invocation, digests, record_digest(record, digests)):
            raise AlreadyClosed

    @property
    def payload(self) -> EncodedPayload | None:
        """The messages and raw answers of an AI model, and the inputs of the calls of any model; None without any.

        They are those that `write` has digested.
        """
        if not self._messages and not self._inputs:
            return None
        messages, answers = self._encoded
        return EncodedPayload(messages=msgspec.Raw(messages), answers=msgspec.Raw(answers), inputs=self._inputs)
