"""Invocations: the record of one pass of a model through the trading workflow, its steps and tool calls."""

from datetime import datetime
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID, uuid5

import msgspec

from trader.agents.domain.models import Model
from trader.core.clock import iso

_NAMESPACE: Final = UUID("5f0d6a3c-7a0b-5c6e-9a63-2f1f2f0d8c11")
"""Namespace of invocation ids. Ids are derived, so a repeated replay writes the same rows."""

InvocationStatus = Literal["running", "completed", "failed", "timeout"]
EndedBy = Literal["holding", "answer", "steps", "tokens", "deadline", "calls", "error", "timeout", "interruption"]
"""What ended an invocation: the model (by a call, or by an answer without one), a limit or a deadline; a failed one,
the lack of a usable call, another error, its time limit, or the end of its process."""

INTERRUPTED: Final = "interrupted"
"""The failure reason of an invocation canceled by the end of its process."""

FAILED_ENDS: Final = ("calls", "error", "timeout", "interruption")
ToolCallType = Literal[
    "CREATE_POSITION", "CLOSE_POSITION", "UPDATE_EXIT_PLAN", "HOLDING", "FETCH_INDICATORS", "FETCH_ORDER_BOOK", "NOTE",
    "CANCEL_ORDER",
]  # fmt: skip
ToolCallStatus = Literal["ok", "rejected", "failed"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call of an invocation. `metadata` is {raw, decisions, results}."""

    id: UUID
    invocation_id: UUID
    number: int
    type: ToolCallType
    status: ToolCallStatus
    metadata: dict[str, Any]
    created_at: datetime


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the provider within an invocation and its answer. `key_number` counts the provider's keys from 1.

    Tokens are None if the provider did not report them; the cost is None if neither the provider nor the models file
    gives a price. `cached_tokens` of the input came from the provider's cache, and `cache_write_tokens` were written to
    it.
    """

    invocation_id: UUID
    number: int
    provider: str
    key_number: int | None
    model: str
    tool_names: list[str]
    input_tokens: int | None
    output_tokens: int | None
    cost_usd: Decimal | None
    duration_ms: int
    created_at: datetime
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class Failing(NamedTuple):
    """The number of a model's consecutive failed invocations, and the reason of the last failure."""

    in_a_row: int
    reason: str


class Invocation(msgspec.Struct, frozen=True, kw_only=True):
    """One pass of a model through the trading workflow. `entrant` is the number of the model's entrant at that time.

    Tokens are the reported ones; `unmetered_attempts` counts the attempts at a provider, failed or answered, that may
    have cost unreported tokens. `cost_usd` includes the maximum cost of these attempts if the model has a price;
    `unpriced_steps` counts the answers and attempts whose cost is unknown. `reserved_usd` is its maximum cost; None for
    a model that costs nothing.
    """

    id: UUID
    model_id: str
    status: InvocationStatus
    started_at: datetime
    finished_at: datetime | None = None
    ended_by: EndedBy | None = None
    failure_reason: str | None = None
    response: str | None = None
    step_count: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: Decimal | None = None
    unmetered_attempts: int = 0
    unpriced_steps: int = 0
    entrant: int | None = None
    reserved_usd: Decimal | None = None

    @property
    def is_cost_partial(self) -> bool:
        """Whether it may have cost more than the known cost."""
        return self.cost_usd is not None and self.unpriced_steps > 0

    @property
    def is_cost_estimated(self) -> bool:
        """Whether a part of the cost is an estimate, because its tokens were not reported."""
        return self.cost_usd is not None and self.unmetered_attempts > 0


def invocation_id(model: Model, started_at: datetime) -> UUID:
    """Return the id of the invocation that a model started at this time."""
    return uuid5(_NAMESPACE, f"{model.id}:{iso(started_at)}")


def client_order_id(invocation: UUID, number: int, place: int = 1) -> str:
    """Return the client order id of the n-th tool call of an invocation, which prevents placing its order twice.

    `place` is the position of the order within the call, from 1; a pair has two orders.
    """
    return f"{invocation}:{number}" if place == 1 else f"{invocation}:{number}:{place}"


def tool_call_id(invocation: UUID, number: int) -> UUID:
    """Return the id of the n-th tool call of an invocation."""
    return uuid5(invocation, str(number))


class FinishedInvocation(msgspec.Struct, frozen=True):
    """A finished invocation, its model, and its tool calls in order.

    `answers` are the provider's raw answers; None if they were not requested, are no longer kept, or are too long.
    """

    invocation: Invocation
    model: Model
    tool_calls: tuple[ToolCall, ...]
    answers: list[str] | None = None
