"""External agents on the wire: their identity, views and decisions."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from trader.agents.desk import OpenDecision
from trader.agents.domain.invocations import ToolCallStatus
from trader.agents.domain.models import DeclaredName, Model, PromptDigest
from trader.agents.domain.tools import (
    AgentNote,
    AgentOrderId,
    ClosePosition,
    FetchIndicators,
    FetchOrderBook,
    Hold,
    PlaceOrder,
    UpdateExitPlan,
)
from trader.api.schemas.common import UNSET, DecimalText, From, Input, Timestamp, UnsetType, VariantId, Wire
from trader.api.schemas.models import DeclaredView
from trader.api.schemas.paging import PageInput
from trader.api.schemas.positions import ExitPlanView
from trader.api.schemas.simulator import AccountId
from trader.exchange.domain.halts import REASON_MAX, Verb
from trader.exchange.domain.orders import OrderSide, OrderStatus, Side
from trader.market.domain.markets import Interval
from trader.operations.domain.credentials import Credential, Scope
from trader.portfolio.domain.histories import RunWindow


class AgentInput(Input, kw_only=True):
    """Input of an agent. A key belongs to one account, so `accountId` is optional; any other account is refused."""

    account_id: AccountId | None = None


class AgentDeclareInput(AgentInput, kw_only=True):
    """An agent's complete declaration: it replaces the previous one, including omitted fields."""

    model: DeclaredName
    version: DeclaredName | None = None
    prompt_digest: PromptDigest | None = None


ViewId = Annotated[str, Meta(min_length=1, max_length=64, description="Id of the view behind the decision.")]


class ViewOutput(Wire, kw_only=True):
    """A decision that is open until its deadline, with the prompt and the view of a model of the variant."""

    view_id: Annotated[str, From("id")]
    opened_at: Timestamp
    deadline: Timestamp
    prompt: str
    view: dict[str, Any]

    @classmethod
    def of(cls, opened: OpenDecision) -> "ViewOutput":
        system, shown = opened.messages
        view = msgspec.json.decode(shown["content"])
        return cls.from_attributes(opened, prompt=system["content"], view=view)


class AgentOrderInput(PlaceOrder, frozen=True, kw_only=True):
    client_order_id: AgentOrderId
    view_id: ViewId
    account_id: AccountId | None = None


class AgentCloseInput(ClosePosition, frozen=True, kw_only=True):
    view_id: ViewId
    account_id: AccountId | None = None


class AgentExitPlanInput(UpdateExitPlan, frozen=True, kw_only=True):
    view_id: ViewId
    account_id: AccountId | None = None


class AgentHoldInput(Hold, frozen=True, kw_only=True):
    view_id: ViewId
    account_id: AccountId | None = None


class AgentNoteInput(AgentNote, frozen=True, kw_only=True):
    view_id: ViewId
    account_id: AccountId | None = None


class AgentCandlesInput(FetchIndicators, frozen=True, kw_only=True):
    account_id: AccountId | None = None


class AgentBookInput(FetchOrderBook, frozen=True, kw_only=True):
    account_id: AccountId | None = None


class AgentCancelInput(AgentInput, kw_only=True):
    order_id: Annotated[str, Meta(min_length=1, max_length=64, description="The `orderId` of a resting order.")]


class AgentOperateInput(AgentInput, kw_only=True):
    reason: Annotated[str, Meta(min_length=1, max_length=REASON_MAX)]


class OperateOutput(Wire, kw_only=True):
    """A recorded command, which the service executes within a second. `by` is the agent's name in the halt."""

    command_id: Annotated[str, From("id")]
    verb: Verb
    by: Annotated[str, From("asked_by")]


class AgentHistoryInput(PageInput, kw_only=True):
    account_id: AccountId | None = None
    limit: Annotated[int, Meta(ge=1, le=200)] = 20


class AgentBoardInput(AgentInput, kw_only=True):
    window: RunWindow = "7d"


class HeldPosition(Wire, kw_only=True):
    symbol: str
    side: Side
    quantity: DecimalText


class HeldAccount(Wire, kw_only=True):
    """The account after a call."""

    equity: DecimalText
    available_cash: DecimalText
    positions: list[HeldPosition]


class DecisionOutput(Wire, kw_only=True):
    """The result of a call, as a model sees it. `rejected` names the rule and its reason, `failed` the error.

    For an order: its id, its status at the exchange, the filled quantity, price and fees.
    """

    result: ToolCallStatus
    rule: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    error: str | UnsetType = UNSET
    order_id: str | UnsetType = UNSET
    status: OrderStatus | UnsetType = UNSET
    side: OrderSide | UnsetType = UNSET
    requested_quantity: DecimalText | UnsetType = UNSET
    filled_quantity: DecimalText | UnsetType = UNSET
    average_price: DecimalText | UnsetType = UNSET
    fees: DecimalText | UnsetType = UNSET
    realized_pnl: DecimalText | UnsetType = UNSET
    at: Timestamp | UnsetType = UNSET
    exit_plan: ExitPlanView | UnsetType = UNSET
    holding: bool | UnsetType = UNSET
    noted: bool | UnsetType = UNSET
    account: HeldAccount | UnsetType = UNSET

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "DecisionOutput":
        return msgspec.convert({name: value for name, value in result.items() if value is not None}, cls)


class MarketOutput(Wire, kw_only=True):
    """Data of a market: candles and indicators, or the best levels of its order book; or why there are none."""

    result: ToolCallStatus
    error: str | UnsetType = UNSET
    symbol: str | UnsetType = UNSET
    interval: Interval | UnsetType = UNSET
    indicators: dict[str, Any] | UnsetType = UNSET
    candles: list[list[str | int | float | None]] | UnsetType = UNSET
    at: Timestamp | UnsetType = UNSET
    bids: list[list[DecimalText]] | UnsetType = UNSET
    asks: list[list[DecimalText]] | UnsetType = UNSET


class WhoAmIOutput(Wire, kw_only=True):
    """An agent, its declaration, and its key with fingerprint, scopes and rate limits per minute.

    A decision is due every `decisionEverySeconds`; otherwise the cycle counts as missed. It must end within
    `decisionDeadlineSeconds` of its view.
    """

    agent_id: Annotated[str, From("id")]
    account_id: str
    variant: VariantId
    owner: str | UnsetType = UNSET
    model: Annotated[str, From("router_model_name")]
    declared: DeclaredView | UnsetType = UNSET
    decision_every_seconds: Annotated[int, From("cadence", lambda cadence: int(cadence.total_seconds()))]
    decision_deadline_seconds: int
    key_prefix: Annotated[str, From("prefix")]
    key_fingerprint: Annotated[str, From("fingerprint")]
    scopes: list[Scope]
    requests_per_minute: int | None
    decisions_per_minute: int | None

    @classmethod
    def of(cls, model: Model, deadline_s: int, key: Credential) -> "WhoAmIOutput":
        return cls.from_attributes(
            model.configuration,
            model,
            key,
            declared=DeclaredView.of(model),
            decision_deadline_seconds=deadline_s,
            scopes=list(key.scopes),
        )
