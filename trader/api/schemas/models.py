"""Models and their invocations on the wire. `getInvocations` and the conversations stream show the same records."""

from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from trader.api.schemas.common import (
    ENCODER,
    UNSET,
    Input,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
    iso,
    or_unset,
)
from trader.api.schemas.paging import IsoTime
from trader.domain.agents.conversation import Message
from trader.domain.agents.entrants import EntrantRecord
from trader.domain.agents.invocations import ToolCall, ToolCallStatus, ToolCallType
from trader.domain.models import Model
from trader.services.agents.invocations import FinishedInvocation, ModelSummary
from trader.variants import color_of

FinishedStatus = Literal["completed", "failed", "timeout"]


class DeclaredView(Wire, kw_only=True):
    """What an agent says of itself. Nothing of it is checked."""

    model: str
    version: str | UnsetType = UNSET
    prompt_digest: str | UnsetType = UNSET

    @classmethod
    def of(cls, model: Model) -> "DeclaredView | UnsetType":
        """Return what the agent of this model says; unset for one that has said nothing, and for other models."""
        declared = model.configuration.declared
        return UNSET if declared is None else cls.from_attributes(declared, model=model.router_model_name)

    @classmethod
    def of_entrant(cls, record: EntrantRecord) -> "DeclaredView | UnsetType":
        """Return what the agent said when it was this entrant."""
        return UNSET if record.declared is None else msgspec.convert(record.declared, cls)


class ModelView(Wire, kw_only=True):
    """A model. `invocation_count` counts its finished runs. `warning` says what is wrong with it, when something is.

    `declared` is what an external agent says of itself. `manualSince` is the time of the first order by hand in its
    account's run: from then on it is on no board.
    """

    id: str
    name: str
    variant: VariantId
    provider: str
    router_model_name: str
    declared: DeclaredView | UnsetType = UNSET
    logo: str | UnsetType = UNSET
    color: str
    active: bool
    created_at: Timestamp
    invocation_count: int
    last_invoked_at: Timestamp | UnsetType = UNSET
    manual_since: Timestamp | UnsetType = UNSET
    warning: str | UnsetType = UNSET

    @classmethod
    def of(cls, summary: ModelSummary, warning: str | None) -> "ModelView":
        model, last = summary.model, summary.last_invoked_at
        return cls.from_attributes(
            model,
            declared=DeclaredView.of(model),
            color=color_of(model),
            invocation_count=summary.invocation_count,
            last_invoked_at=UNSET if last is None else iso(last),
            manual_since=UNSET if summary.manual_since is None else iso(summary.manual_since),
            warning=or_unset(warning),
        )


class GetModelsOutput(Wire, kw_only=True):
    """Every model, the oldest first. `warning` says why some of them do not run."""

    models: list[ModelView]
    warning: str | UnsetType = UNSET


class GetInvocationsInput(Input, kw_only=True):
    model_id: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET
    variant: VariantFilter = "all"
    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    before: IsoTime | UnsetType = UNSET


class ToolCallMetadata(Wire, kw_only=True):
    """What a tool call was: as the model wrote it, the decisions parsed from it, and the result of each.

    `raw` is null for a call whose order was found after a restart, and text that is no JSON as it came.
    """

    raw: Any
    decisions: list[dict[str, Any]]
    results: list[dict[str, Any]]


class ToolCallView(Wire, kw_only=True):
    """One tool call of a run."""

    id: str
    type: ToolCallType
    status: ToolCallStatus
    metadata: ToolCallMetadata
    timestamp: Timestamp

    @classmethod
    def of(cls, call: ToolCall) -> "ToolCallView":
        metadata = msgspec.convert(call.metadata, ToolCallMetadata)
        return cls.from_attributes(call, metadata=metadata, timestamp=iso(call.created_at))


class InvocationView(Wire, kw_only=True):
    """One finished run of a model. `steps` counts its exchanges with the provider; `timestamp` is its start.

    Tokens are those that the provider reported (null: none were). `unmeteredAttempts`, when there are any, counts the
    requests that may have cost others, such as those that timed out. `costIsPartial` is true when it has cost more than
    `costUsd`, because a part was not reported and the model has no price; `costIsEstimated` when such a part is in it,
    at the most that it may have been.

    `responsePayload` holds the provider's raw answers, one text per step, in `getInvocations` only, and while they are
    kept: of a run at most 32 KiB and of all together 512 KiB, the latest runs first; what is longer is left out.
    """

    id: str
    model_id: str
    model_name: str
    model_variant: VariantId
    model_logo: str | None
    response: str | None
    response_payload: list[str] | UnsetType = UNSET
    status: FinishedStatus
    failure_reason: str | None
    steps: int
    input_tokens: int | None
    output_tokens: int | None
    unmetered_attempts: int | UnsetType = UNSET
    cost_usd: Decimal | UnsetType = UNSET
    cost_is_partial: bool | UnsetType = UNSET
    cost_is_estimated: bool | UnsetType = UNSET
    duration_ms: int
    timestamp: Timestamp
    tool_calls: list[ToolCallView]


class GetInvocationsOutput(Wire, kw_only=True):
    conversations: list[InvocationView]
    next_before: str | UnsetType = UNSET


class GetConversationInput(Input, kw_only=True):
    invocation_id: UUID


class MessageView(Wire, kw_only=True):
    """One message. `text` is its content, and its tool calls as JSON; at most 100,000 characters."""

    role: str
    text: str

    @classmethod
    def of(cls, message: Message) -> "MessageView":
        content, calls = message.get("content"), message.get("tool_calls")
        parts = [content if isinstance(content, str) else ENCODER.encode(content).decode()] if content else []
        if calls:
            parts.append(ENCODER.encode(calls).decode())
        return cls(role=str(message.get("role", "")), text="\n".join(parts)[:_MESSAGE_CHARACTERS])


_MESSAGE_CHARACTERS: Final = 100_000


class GetConversationOutput(Wire, kw_only=True):
    messages: list[MessageView]


def invocation_of(record: FinishedInvocation) -> InvocationView:
    """Return the wire record of one finished run."""
    invocation, model = record.invocation, record.model
    assert invocation.status != "running"  # only finished runs are read
    ended_at = invocation.finished_at or invocation.started_at
    nothing_known = bool(invocation.unmetered_attempts) and not invocation.input_tokens + invocation.output_tokens
    return InvocationView.from_attributes(
        invocation,
        model_name=model.name,
        model_variant=model.variant,
        model_logo=model.logo,
        response_payload=or_unset(record.answers),
        steps=invocation.step_count,
        input_tokens=None if nothing_known else invocation.input_tokens,
        output_tokens=None if nothing_known else invocation.output_tokens,
        unmetered_attempts=invocation.unmetered_attempts or UNSET,
        cost_is_partial=invocation.is_cost_partial or UNSET,
        cost_is_estimated=invocation.is_cost_estimated or UNSET,
        cost_usd=or_unset(invocation.cost_usd),
        duration_ms=(ended_at - invocation.started_at) // timedelta(milliseconds=1),
        timestamp=iso(invocation.started_at),
        tool_calls=[ToolCallView.of(call) for call in record.tool_calls],
    )
