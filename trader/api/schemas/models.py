"""Models and their invocations on the wire. `getInvocations` and the conversations stream show the same records."""

from collections.abc import Iterable
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from trader.agents.domain.conversation import ChatMessage, reasoning_in
from trader.agents.domain.invocations import EndedBy, FinishedInvocation, ToolCall, ToolCallStatus, ToolCallType
from trader.agents.domain.models import Model
from trader.agents.sql.invocations import TurnOutcome
from trader.agents.sql.models import ModelActivity
from trader.agents.variants import color_of
from trader.api.schemas.common import (
    ENCODER,
    UNSET,
    From,
    Input,
    OfModel,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
    or_absent,
)
from trader.api.schemas.paging import PageInput, PageOutput

FinishedStatus = Literal["completed", "failed", "timeout"]


class DeclaredView(Wire, kw_only=True):
    """An agent's declaration, which is not verified."""

    model: str
    version: str | UnsetType = UNSET
    prompt_digest: str | UnsetType = UNSET

    @classmethod
    def of(cls, model: Model) -> "DeclaredView | UnsetType":
        """Return the declaration of this model's agent; unset without one, and for other models."""
        declared = model.configuration.declared
        return UNSET if declared is None else cls.from_attributes(declared, model=model.router_model_name)


class ModelView(Wire, kw_only=True):
    """A model. `invocation_count` counts its finished runs. `warning` describes a problem, if there is one.

    `declared` is an external agent's declaration. `manualSince` is the time of the first manual order in its account's
    run: from then on it is on no board.
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
    def of(cls, model: Model, activity: ModelActivity, warning: str | None) -> "ModelView":
        return cls.from_attributes(
            model, activity, declared=DeclaredView.of(model), color=color_of(model), warning=warning
        )


class GetModelsOutput(Wire, kw_only=True):
    """Every model, oldest first. `warning` says why some of them do not run."""

    models: list[ModelView]
    warning: str | UnsetType = UNSET


class GetInvocationsInput(PageInput, kw_only=True):
    """`outcome` selects the runs that tried to change their account, those that failed or had a call refused, or those
    that failed or had a call fail; `invocationId` a single one."""

    model_id: str | UnsetType = UNSET
    variant: VariantFilter = "all"
    outcome: TurnOutcome | UnsetType = UNSET
    invocation_id: UUID | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


class ToolCallMetadata(Wire, kw_only=True):
    """Contents of a tool call: the raw call, the decisions parsed from it, and the result of each.

    `raw` is null for a call whose order was found after a restart, and the unchanged text if it is not JSON.
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
    timestamp: Annotated[Timestamp, From("created_at")]


class UsageView(Wire, kw_only=True):
    """What an external agent declared about one decision, which is not verified. `steps` counts requests to models."""

    model: str | UnsetType = UNSET
    steps: int | UnsetType = UNSET
    input_tokens: int | UnsetType = UNSET
    output_tokens: int | UnsetType = UNSET
    cost_usd: float | UnsetType = UNSET

    @classmethod
    def of(cls, calls: Iterable[ToolCall]) -> "UsageView | UnsetType":
        """Return the declaration among the calls of a decision; unset without one."""
        decisions = (decision for call in calls for decision in call.metadata["decisions"])
        declared = next((decision["usage"] for decision in decisions if decision.get("usage")), None)
        return UNSET if declared is None else msgspec.convert(declared, cls)


class InvocationView(OfModel, kw_only=True):
    """One finished run of a model. `steps` counts its exchanges with the provider; `timestamp` is its start.

    Tokens are as reported by the provider (null: none). Those of an external agent, and its `costUsd`, are what it
    declares, with its model and steps in `declaredUsage`. `unmeteredAttempts`, if any, counts the requests that may
    have cost further tokens, such as those that timed out. `costIsPartial` is true if the true cost exceeds `costUsd`,
    because part was not reported and the model has no price; `costIsEstimated` is true if `costUsd` includes such a
    part, at its possible maximum.

    `responsePayload` holds the provider's raw answers, one text per step, only in `getInvocations`, as long as they are
    retained: at most 32 KiB per run and 512 KiB in total, newest runs first; longer ones are omitted.
    """

    model_variant: Annotated[VariantId, From("model.variant")]
    model_logo: Annotated[str | None, From("model.logo")]
    response: str | None
    response_payload: Annotated[list[str] | UnsetType, From("answers")] = UNSET
    status: FinishedStatus
    ended_by: EndedBy | None
    failure_reason: str | None
    steps: Annotated[int, From("step_count")]
    input_tokens: int | None
    output_tokens: int | None
    unmetered_attempts: Annotated[int | UnsetType, From(convert=or_absent)] = UNSET
    cost_usd: Decimal | UnsetType = UNSET
    cost_is_partial: Annotated[bool | UnsetType, From("is_cost_partial")] = UNSET
    cost_is_estimated: Annotated[bool | UnsetType, From("is_cost_estimated")] = UNSET
    declared_usage: UsageView | UnsetType = UNSET
    duration_ms: int
    timestamp: Annotated[Timestamp, From("started_at")]
    tool_calls: list[ToolCallView]


class GetInvocationsOutput(PageOutput, kw_only=True):
    conversations: list[InvocationView]


class GetConversationInput(Input, kw_only=True):
    invocation_id: UUID


class MessageView(Wire, kw_only=True):
    """One message. `text` is its content, and its tool calls as JSON; `reasoning` is what its model says that it
    thought. Both have at most 100,000 characters."""

    role: str
    text: str
    reasoning: str | UnsetType = UNSET

    @classmethod
    def of(cls, message: ChatMessage) -> "MessageView":
        content, calls = message.get("content"), message.get("tool_calls")
        parts = [content if isinstance(content, str) else ENCODER.encode(content).decode()] if content else []
        if calls:
            parts.append(ENCODER.encode(calls).decode())
        return cls(
            role=str(message.get("role", "")),
            text="\n".join(parts)[:_MESSAGE_CHARACTERS],
            reasoning=(reasoning_in(message) or "")[:_MESSAGE_CHARACTERS] or UNSET,
        )


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
        record,
        model_name=model.name,
        **(dict.fromkeys(("input_tokens", "output_tokens")) if nothing_known else {}),
        declared_usage=UsageView.of(record.tool_calls) if model.is_external else UNSET,
        duration_ms=(ended_at - invocation.started_at) // timedelta(milliseconds=1),
    )
