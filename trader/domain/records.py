"""What is recorded beside the books: models, completed trades, invocations and portfolio snapshots.

Store functions return these; the wire's structs are made of them in `api`.
"""

from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Literal
from uuid import UUID

import msgspec

from trader.domain.orders import Side


class VariantId(StrEnum):
    """The variants of this build; the database has the same enum."""

    APEX = "Apex"
    TRENDSURFER = "Trendsurfer"
    CONTRARIAN = "Contrarian"
    SOVEREIGN = "Sovereign"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """An AI model (or a rule agent) that trades one variant. Its account has the same id.

    `venue_account_index` is the account that it trades at a venue; None means VENUE_ACCOUNT_INDEX.
    """

    id: str
    name: str
    variant: VariantId
    provider: str
    router_model_name: str
    created_at: datetime
    logo: str | None = None
    active: bool = True
    venue_account_index: int | None = None


class Trade(msgspec.Struct, frozen=True, kw_only=True):
    """A completed trade: a row of `orders` with status CLOSED. `net_pnl = gross_pnl − fees + funding`.

    The `model_…` fields are None for an account that belongs to no model. `leverage` is None when none was given.
    """

    id: UUID
    account_id: str
    run_id: UUID
    symbol: str
    side: Side
    quantity: Decimal
    entry_notional: Decimal
    exit_notional: Decimal
    entry_price: Decimal
    exit_price: Decimal
    leverage: Decimal | None
    gross_pnl: Decimal
    fees: Decimal
    liquidation_fees: Decimal
    funding: Decimal
    net_pnl: Decimal
    insurance: Decimal
    close_reason: str
    confidence: Decimal | None
    invocation_id: UUID | None
    opened_at: datetime
    closed_at: datetime
    model_name: str | None = None
    model_variant: VariantId | None = None
    model_router_name: str | None = None


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


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The worth of an account at one moment. `net_portfolio = cash + unrealized_pnl`."""

    account_id: str
    run_id: UUID
    net_portfolio: Decimal
    cash: Decimal
    unrealized_pnl: Decimal
    created_at: datetime
