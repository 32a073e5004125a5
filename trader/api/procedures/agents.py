"""Procedures of `agent`: views and decisions of external agents, each for the account of its key."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from trader.agents.desk import AgentDesk
from trader.agents.domain.models import Declared, Model
from trader.agents.domain.tools import (
    AGENT_TOOLS,
    AgentNote,
    ClosePosition,
    Decision,
    FetchIndicators,
    FetchOrderBook,
    Hold,
    PlaceOrder,
    UpdateExitPlan,
)
from trader.api.procedures.analytics import shown_board
from trader.api.procedures.models import shown_page
from trader.api.registry import ProcedureHandler, procedure
from trader.api.schemas.agents import (
    AgentBoardInput,
    AgentBookInput,
    AgentCancelInput,
    AgentCandlesInput,
    AgentCloseInput,
    AgentDeclareInput,
    AgentExitPlanInput,
    AgentHistoryInput,
    AgentHoldInput,
    AgentInput,
    AgentNoteInput,
    AgentOperateInput,
    AgentOrderInput,
    DecisionOutput,
    MarketOutput,
    OperateOutput,
    ViewOutput,
    WhoAmIOutput,
)
from trader.api.schemas.analytics import GetLeaderboardInput, GetLeaderboardOutput
from trader.api.schemas.models import GetInvocationsOutput
from trader.api.schemas.paging import page_of
from trader.api.schemas.simulator import AccountOutput, AccountView, OrderOutput, OrderView
from trader.core.errors import ForeignAccount
from trader.exchange.domain.halts import Verb
from trader.operations.domain.credentials import Credential, Scope
from trader.settings.settings import Settings

H = TypeVar("H", bound=ProcedureHandler)


def _tool(name: str, scope: Scope) -> Callable[[H], H]:
    """Declare the procedure of a tool with the models' description of it; its docstring adds the errors."""

    def declare(handler: H) -> H:
        handler.__doc__ = f"{inspect.getdoc(AGENT_TOOLS[name])}\n\n{inspect.getdoc(handler)}"
        return procedure(f"agent.{name}", paper_only=True, scope=scope)(handler)

    return declare


class AgentContext(Protocol):
    """The context of these procedures, of a service or of a backtest, whose readers are of other classes."""

    @property
    def settings(self) -> Settings: ...

    @property
    def desk(self) -> AgentDesk[Any]: ...

    @property
    def invocations(self) -> Any: ...

    @property
    def analytics(self) -> Any: ...


class _NamesAccount(Protocol):
    @property
    def account_id(self) -> str | None: ...


class _Decides(_NamesAccount, Protocol):
    @property
    def view_id(self) -> str: ...


@procedure("agent.whoami", paper_only=True, scope="read")
async def whoami(context: AgentContext, request: AgentInput, key: Credential) -> WhoAmIOutput:
    """Show which agent the key belongs to, and its permissions."""
    return _whoami(context, await _agent_of(context, request, key), key)


@procedure("agent.declare", paper_only=True, scope="trade")
async def declare(context: AgentContext, request: AgentDeclareInput, key: Credential) -> WhoAmIOutput:
    """Declare the agent's model, its version, and the SHA-256 digest of its prompt. They are shown as declared.

    An agent that declares something else becomes a new entrant with its next decision, and its results start over.
    """
    model = await _agent_of(context, request, key)
    declared = Declared(version=request.version, prompt_digest=request.prompt_digest)
    return _whoami(context, await context.desk.declare(model, request.model, declared), key)


@procedure("agent.getView", paper_only=True, scope="trade")
async def get_view(context: AgentContext, request: AgentInput, key: Credential) -> ViewOutput:
    """Open a decision: return the view of a model of the variant, and the deadline for acting on it.

    While the decision is open, the same view is returned again. `hold` or the deadline ends it.

    :raises TooManyRequests: the key has used up its decisions of this minute.
    """
    model = await _agent_of(context, request, key)
    return ViewOutput.of(await context.desk.view(model, key.decisions_per_minute))


@_tool("getCandles", "read")
async def get_candles(context: AgentContext, request: AgentCandlesInput, key: Credential) -> MarketOutput:
    """:raises InvalidInput: there is no such market."""
    return await _read(context, request, FetchIndicators, key)


@_tool("getOrderBook", "read")
async def get_order_book(context: AgentContext, request: AgentBookInput, key: Credential) -> MarketOutput:
    """:raises InvalidInput: there is no such market."""
    return await _read(context, request, FetchOrderBook, key)


@procedure("agent.getAccount", paper_only=True, scope="read")
async def get_account(context: AgentContext, request: AgentInput, key: Credential) -> AccountOutput:
    """Show the agent's account: its equity, margin, positions with exit plans, and open orders."""
    account, marks, markets, is_open = context.desk.account(await _agent_of(context, request, key))
    return AccountOutput(account=AccountView.of(account, marks, markets, is_open=is_open))


@_tool("placeOrder", "trade")
async def place_order(context: AgentContext, request: AgentOrderInput, key: Credential) -> DecisionOutput:
    """:raises ViewUnknown: the agent has no such view.
    :raises ViewExpired: the deadline of the view has passed.
    :raises ViewDecided: the decision of the view has ended.
    :raises SeasonOver: it could open a position, and the agent's season is over.
    :raises Conflict: the `clientOrderId` was used for an order with other contents.
    """
    return await _decide(context, request, PlaceOrder, key)


@procedure("agent.cancelOrder", paper_only=True, scope="trade")
async def cancel_order(context: AgentContext, request: AgentCancelInput, key: Credential) -> OrderOutput:
    """Cancel a resting order; this needs no view.

    :raises NotFound: the account has no such order.
    """
    model = await _agent_of(context, request, key)
    return OrderOutput(order=OrderView.from_attributes(await context.desk.cancel_order(model, request.order_id)))


@_tool("closePosition", "trade")
async def close_position(context: AgentContext, request: AgentCloseInput, key: Credential) -> DecisionOutput:
    """:raises ViewUnknown: the agent has no such view.
    :raises ViewExpired: the deadline of the view has passed.
    :raises ViewDecided: the decision of the view has ended.
    """
    return await _decide(context, request, ClosePosition, key)


@_tool("setExitPlan", "trade")
async def set_exit_plan(context: AgentContext, request: AgentExitPlanInput, key: Credential) -> DecisionOutput:
    """:raises ViewUnknown: the agent has no such view.
    :raises ViewExpired: the deadline of the view has passed.
    :raises ViewDecided: the decision of the view has ended.
    """
    return await _decide(context, request, UpdateExitPlan, key)


@_tool("hold", "trade")
async def hold(context: AgentContext, request: AgentHoldInput, key: Credential) -> DecisionOutput:
    """:raises ViewUnknown: the agent has no such view.
    :raises ViewExpired: the deadline of the view has passed.
    :raises ViewDecided: the decision of the view has ended already.
    """
    return await _decide(context, request, Hold, key)


@_tool("note", "trade")
async def note(context: AgentContext, request: AgentNoteInput, key: Credential) -> DecisionOutput:
    """:raises ViewUnknown: the agent has no such view.
    :raises ViewExpired: the deadline of the view has passed.
    :raises ViewDecided: the decision of the view has ended.
    """
    return await _decide(context, request, AgentNote, key)


@procedure("agent.halt", paper_only=True, scope="operate")
async def halt(context: AgentContext, request: AgentOperateInput, key: Credential) -> OperateOutput:
    """Halt the account: cancel resting orders that could open, and open nothing until an operator lifts the halt."""
    model = await _agent_of(context, request, key)
    return OperateOutput.from_attributes(await context.desk.operate(model, Verb.HALT, request.reason))


@procedure("agent.flatten", paper_only=True, scope="operate")
async def flatten(context: AgentContext, request: AgentOperateInput, key: Credential) -> OperateOutput:
    """Halt the account, cancel every resting order, and close every position at market."""
    model = await _agent_of(context, request, key)
    return OperateOutput.from_attributes(await context.desk.operate(model, Verb.FLATTEN, request.reason))


@procedure("agent.getHistory", paper_only=True, scope="read")
async def get_history(context: AgentContext, request: AgentHistoryInput, key: Credential) -> GetInvocationsOutput:
    """List the agent's decisions with their calls and results, newest first."""
    model = await _agent_of(context, request, key)
    page = page_of(request.limit, request)
    is_private = context.settings.public == "off"
    return await shown_page(await context.invocations.finished(model.id, page=page, with_answers=is_private), page)


@procedure("agent.getBoard", paper_only=True, scope="read")
async def get_board(context: AgentContext, request: AgentBoardInput, key: Credential) -> GetLeaderboardOutput:
    """Show the leaderboard of a window, with coverage and verdicts."""
    await _agent_of(context, request, key)
    entries = await context.analytics.leaderboard(request.window, "pnlPercent")
    season = await context.analytics.latest_season()
    board = shown_board(entries, GetLeaderboardInput(window=request.window, details=True), season)
    undated = [msgspec.structs.replace(row, since=None) for row in board.entries]  # an agent's dates may be masked
    return msgspec.structs.replace(board, start=None, entries=undated)


def _whoami(context: AgentContext, model: Model, key: Credential) -> WhoAmIOutput:
    return WhoAmIOutput.of(model, context.desk.deadline_s(model), key)


async def _decide(context: AgentContext, request: _Decides, tool: type[Decision], key: Credential) -> DecisionOutput:
    """Execute a call on behalf of the key's agent."""
    model = await _agent_of(context, request, key)
    decision = msgspec.convert(request, tool, from_attributes=True)
    return DecisionOutput.of(await context.desk.decide(model, request.view_id, decision))


async def _read(
    context: AgentContext, request: _NamesAccount, tool: type[FetchIndicators | FetchOrderBook], key: Credential
) -> MarketOutput:
    model = await _agent_of(context, request, key)
    decision = msgspec.convert(request, tool, from_attributes=True)
    return msgspec.convert(await context.desk.read(model, decision), MarketOutput)


async def _agent_of(context: AgentContext, request: _NamesAccount, key: Credential) -> Model:
    """Return the model of the key's account.

    :raises ForeignAccount: the request names another one
    """
    assert key.account_id is not None, "the dispatcher lets only keys of agents through"
    if request.account_id not in (None, key.account_id):
        raise ForeignAccount(f"this key speaks for the account {key.account_id} and not for {request.account_id}")
    return await context.desk.agent(key.account_id)
