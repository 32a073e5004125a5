"""Invocations of models: the record of one run through the trading workflow, its steps and its tool calls."""

from datetime import datetime
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import msgspec

InvocationStatus = Literal["running", "completed", "failed", "timeout"]
ToolCallType = Literal["CREATE_POSITION", "CLOSE_POSITION", "UPDATE_EXIT_PLAN", "HOLDING", "FETCH_INDICATORS"]
ToolCallStatus = Literal["ok", "rejected", "failed"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call of a run. `metadata` is {raw, decisions, results}."""

    id: UUID
    invocation_id: UUID
    number: int
    type: ToolCallType
    status: ToolCallStatus
    metadata: dict[str, Any]
    created_at: datetime


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange with the provider within a run. `key_number` counts the provider's keys from 1."""

    invocation_id: UUID
    number: int
    provider: str
    key_number: int | None
    model: str
    tool_names: list[str]
    input_tokens: int
    output_tokens: int
    cost_usd: Decimal | None
    duration_ms: int
    created_at: datetime


class Invocation(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a model through the trading workflow."""

    id: UUID
    model_id: str
    status: InvocationStatus
    started_at: datetime
    finished_at: datetime | None = None
    failure_reason: str | None = None
    response: str | None = None
    step_count: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: Decimal | None = None
