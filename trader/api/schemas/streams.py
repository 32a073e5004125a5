"""Messages of the event streams that no procedure returns."""

from decimal import Decimal
from typing import Any, Literal

import msgspec

from trader.agents.domain.invocations import EndedBy, ToolCallStatus, ToolCallType
from trader.agents.domain.models import Model
from trader.agents.domain.tools import NotePart
from trader.agents.variants import color_of
from trader.api.schemas.common import UNSET, Timestamp, UnsetType, VariantId, Wire
from trader.api.schemas.health import HaltInForce
from trader.api.schemas.positions import Markets, PositionView, positions_of_account
from trader.exchange.domain.account import Account, Marks, available_cash, has_marks, unrealized


class PositionEventData(Wire, kw_only=True):
    """The positions of one model. The two sums are null, never zero, while they depend on an unknown price.

    An account without a model has its id as modelId and modelName, and no variant.
    """

    model_id: str
    model_name: str
    model_variant: VariantId | UnsetType = UNSET
    color: str | UnsetType = UNSET
    positions: list[PositionView]
    total_unrealized_pnl: Decimal | None
    available_cash: Decimal | None

    @classmethod
    def of(cls, account: Account, marks: Marks, markets: Markets, model: Model | None) -> "PositionEventData":
        is_valued = has_marks(account, marks)
        return cls.from_attributes(
            model_id=account.id,
            model_name=account.id if model is None else model.name,
            model_variant=None if model is None else model.variant,
            color=None if model is None else color_of(model),
            positions=positions_of_account(account, marks, markets, model),
            total_unrealized_pnl=unrealized(account, marks) if is_valued else None,
            available_cash=available_cash(account, marks) if is_valued else None,
        )


class WorkflowEvent(Wire, kw_only=True, tag_field="type"):
    """The base of every message of the workflow stream. The event's name is its `type`."""

    timestamp: Timestamp


class Connected(WorkflowEvent, kw_only=True, tag="connected"):
    """The first message, sent on connection."""


class RunEvent(WorkflowEvent, kw_only=True):
    """An event of one run of a model."""

    model_id: str
    model_name: str
    model_variant: VariantId
    invocation_id: str


class WorkflowStarted(RunEvent, kw_only=True, tag="workflow:started"):
    """A run of a model has started."""


class WorkflowStep(RunEvent, kw_only=True, tag="workflow:step"):
    """One exchange with the provider has ended. `text` is what the model said, at most 4,000 characters."""

    step: int
    tool_names: list[str]
    input_tokens: int | None
    output_tokens: int | None
    text: str | None


class WorkflowCall(RunEvent, kw_only=True, tag="workflow:call"):
    """A tool call has ended: the decisions parsed from it and their results, without fetched indicators."""

    number: int
    call_type: ToolCallType
    status: ToolCallStatus
    decisions: list[dict[str, Any]]
    results: list[dict[str, Any]]


class NoteMessage(Wire, kw_only=True):
    """An event `note` of the stream `conversations`: steps and reasons of an external agent, as they come.

    The finished run has them among its tool calls.
    """

    model_id: str
    model_name: str
    model_variant: VariantId
    invocation_id: str
    parts: list[NotePart]

    @classmethod
    def of(cls, call: WorkflowCall) -> "NoteMessage | None":
        """Return the parts of a call; None without any."""
        parts = next((decision.get("parts") for decision in call.decisions), None)
        if call.call_type != "NOTE" or parts is None:
            return None
        return cls.from_attributes(call, parts=msgspec.convert(parts, list[NotePart]))


class WorkflowComplete(RunEvent, kw_only=True, tag="workflow:complete"):
    """The run has succeeded. Its model ended it (`holding`, `answer` without a call), a limit (`steps`, `tokens`), or
    the `deadline` of an external agent.
    """

    status: Literal["completed"]
    steps: int
    tool_calls: int
    ended_by: EndedBy


class WorkflowFailed(RunEvent, kw_only=True, tag="workflow:failed"):
    """The run has ended without a result; `failure_reason` says why."""

    status: Literal["failed", "timeout"]
    ended_by: EndedBy
    steps: int
    tool_calls: int
    failure_reason: str


class BatchComplete(WorkflowEvent, kw_only=True, tag="batch:complete"):
    """All due models have ended their runs."""

    model_ids: list[str]


class PositionsMoved(WorkflowEvent, kw_only=True, tag="positions:changed"):
    """Positions or resting orders of these accounts have changed; a model's account has the model's id."""

    account_ids: list[str]


class TradesMade(WorkflowEvent, kw_only=True, tag="trades:changed"):
    """Trades of these accounts were completed."""

    account_ids: list[str]


class ConversationRecorded(WorkflowEvent, kw_only=True, tag="conversations:changed"):
    """A run of this model was recorded."""

    model_id: str


class HaltsMoved(WorkflowEvent, kw_only=True, tag="halts:changed"):
    """A halt took effect or was lifted; `halts` are the halts in force now."""

    halts: list[HaltInForce]


WorkflowMessage = (
    Connected
    | WorkflowStarted
    | WorkflowStep
    | WorkflowCall
    | WorkflowComplete
    | WorkflowFailed
    | BatchComplete
    | PositionsMoved
    | TradesMade
    | ConversationRecorded
    | HaltsMoved
)
"""One message of the workflow stream, distinguished by `type`."""


class EmptyList(Wire, kw_only=True):
    """The following list of a stream is still empty; `message` says why."""

    stream: str
    message: str


class Reset(WorkflowEvent, kw_only=True, tag="reset"):
    """Workflow events were lost: the client must reload any state that it built from them."""
