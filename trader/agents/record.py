"""Record of an invocation: collects its steps and calls, and writes them as rows."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from trader.agents.domain.call_inputs import CallInputs
from trader.agents.domain.conversation import ChatMessage, ModelAnswer, ToolRequest, storable
from trader.agents.domain.entrants import Entrant
from trader.agents.domain.guard import Approved, orders_of_call
from trader.agents.domain.invocation_digest import ChainRecord, record_digest, shown_digest
from trader.agents.domain.invocations import (
    EndedBy,
    Invocation,
    InvocationStatus,
    Step,
    ToolCall,
    ToolCallStatus,
    client_order_id,
    invocation_id,
    tool_call_id,
)
from trader.agents.domain.memory import note_of
from trader.agents.domain.messages import decisions_json, results_json
from trader.agents.domain.models import Model, TokenPrice
from trader.agents.domain.tools import Decision, PlaceOrder, call_type, raw_of
from trader.agents.domain.view import View
from trader.agents.payloads import EncodedPayload
from trader.agents.providers.provider import highest_cost
from trader.agents.sql.invocations import insert_step, insert_tool_call, update_invocation, upsert_note
from trader.agents.sql.linked_invocations import update_invocation_closed
from trader.core.errors import ProviderError
from trader.core.money import ZERO
from trader.database.pool import Connection
from trader.exchange.domain.orders import Order
from trader.record.domain.chain import PayloadDigests, encoded_digest

NAME_MAX = 200
"""Maximum characters stored of a tool or model name sent by a provider."""

RESPONSE_MAX = 20_000
"""Maximum characters of the response stored in the row; the payload has all of it."""


class AlreadyClosed(Exception):
    """According to its rows the invocation has ended, so nothing may be added to it."""


def cost_of(answer: ModelAnswer, model: Model) -> Decimal | None:
    """Return the cost of an answer in USD: as reported by its provider, else by the model's price; None if unknown.

    With a price, unreported tokens are included at their maximum.
    """
    price = model.configuration.price
    if price is None:
        return answer.cost_usd
    known = cost_by_price(answer, price) if answer.cost_usd is None else answer.cost_usd
    return known + highest_cost(model, price, *answer.unreported)


def cost_by_price(answer: ModelAnswer, price: TokenPrice) -> Decimal:
    """Return the cost of the reported tokens of an answer, in USD."""
    read, written = answer.cached_tokens or 0, answer.cache_write_tokens or 0
    hourly = answer.cache_write_1h_tokens or 0
    return price.cost(answer.input_tokens or 0, read, answer.output_tokens or 0, written, hourly)


def compared_costs_of(answer: ModelAnswer, model: Model) -> tuple[Decimal, Decimal]:
    """Return the cost of an answer as its provider reports it, and by the model's price; 0 unless both are known."""
    price = model.configuration.price
    if price is None or answer.cost_usd is None or answer.input_tokens is None or answer.output_tokens is None:
        return ZERO, ZERO
    return answer.cost_usd, cost_by_price(answer, price)


class StartedCall(msgspec.Struct, frozen=True):
    """A tool call that has not ended. `number` counts the calls of its invocation from 1."""

    number: int
    request: ToolRequest
    decision: Decision
    at: datetime

    def client_order_ids(self, invocation_id: UUID) -> list[str]:
        """Return the client order ids of the call's orders, of which the agent may have chosen a single one."""
        if isinstance(self.decision, PlaceOrder) and self.decision.client_order_id is not None:
            return [self.decision.client_order_id]
        count = len(decisions_json(self.decision))
        return [client_order_id(invocation_id, self.number, place) for place in range(1, count + 1)]


class InvocationRecord:
    """Collects the actions of an invocation.

    `open` and `save` do nothing here; `write` writes the rows to any connection.
    """

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
        """The name, as given by the provider, of the model that answered the first step."""

        self.steps: list[Step] = []
        self.calls: list[ToolCall] = []
        self.call_count = 0
        self._entrant: Entrant | None = None
        self._written = 0, 0  # numbers of written steps and calls
        self._view_digest: bytes | None = None  # only for a rule agent
        self.call: StartedCall
        """The call now being executed."""

        self._pending: StartedCall | None = None
        """The call whose order was sent and whose answer is not known yet."""

        self.compared_costs = ZERO, ZERO
        """The sums of `compared_costs_of` the answers."""

        self._answers: list[str] = []
        self._messages: list[ChatMessage] = []
        self._encoded = b"[]", b"[]"  # messages and answers at the end
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
        """Begin the record. Return False if the record already exists."""
        return True

    def orders(self, approved: Sequence[Approved]) -> list[Order]:
        """Return the orders of the current call."""
        return orders_of_call(approved, self.model.id, self.id, self.call.number)

    async def before_order(self) -> None:
        """Save everything so far, and remember that the current call sends an order."""
        await self.save()
        self._pending = self.call

    def set_entrant(self, entrant: Entrant) -> None:
        """Set the model's entrant in this invocation."""
        self._entrant = entrant
        self.invocation = msgspec.structs.replace(self.invocation, entrant=entrant.number)

    def note_messages(self, messages: list[ChatMessage]) -> None:
        """Keep the conversation for the payload; the list may still grow."""
        self._messages = messages

    def note_view(self, view: View) -> None:
        """Keep the digest of a rule agent's view; the view itself is not kept."""
        self._view_digest = shown_digest(view)

    def add_step(self, provider: str, answer: ModelAnswer, at: datetime) -> Step:
        """Add a finished step."""
        before = self.invocation
        step_cost = cost_of(answer, self.model)
        own, by_price = compared_costs_of(answer, self.model)
        self.compared_costs = self.compared_costs[0] + own, self.compared_costs[1] + by_price
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
        """Add what a provider sent instead of an answer, and the maximum cost of the attempts."""
        self.add_answer(error.raw)
        before, price = self.invocation, self.model.configuration.price
        cost, is_unpriced = before.cost_usd, False
        if any(error.unreported):
            is_unpriced = price is None
            if price is not None:
                cost = (cost or Decimal(0)) + highest_cost(self.model, price, *error.unreported)
        self.invocation = msgspec.structs.replace(
            before,
            cost_usd=cost,
            unmetered_attempts=before.unmetered_attempts + error.unmetered_attempts,
            unpriced_steps=before.unpriced_steps + is_unpriced,
        )

    def add_inputs(self, inputs: CallInputs | None) -> None:
        """Add the inputs of a call, so that it can be reproduced; None if they are not recorded."""
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
        """Add a finished tool call, and return its record."""
        metadata = {
            "raw": raw_of(request),
            "decisions": [] if decision is None else decisions_json(decision),
            "results": results_json(result),
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
        """Clear the pending order: its answer has been added."""
        self._pending = None

    def close(
        self, status: InvocationStatus, ended_by: EndedBy, reason: str | None, response: str | None, at: datetime
    ) -> None:
        """Set the end of the invocation; `save` writes it."""
        self.invocation = msgspec.structs.replace(
            self.invocation,
            status=status,
            ended_by=ended_by,
            failure_reason=None if reason is None else storable(reason),
            response=None if response is None else storable(response)[:RESPONSE_MAX],
            finished_at=max(at, self.invocation.started_at),
        )

    async def save(self) -> None:
        """Save everything that is not saved yet."""

    async def write(self, conn: Connection) -> None:
        """Write everything new.

        Once the invocation has ended, write its chain link last, since that locks the chain.
        """
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
        """The messages and raw answers of an AI model, and the inputs of any model's calls; None if there are none.

        `write` has computed the digests of exactly these.
        """
        if not self._messages and not self._inputs:
            return None
        messages, answers = self._encoded
        return EncodedPayload(messages=msgspec.Raw(messages), answers=msgspec.Raw(answers), inputs=self._inputs)
