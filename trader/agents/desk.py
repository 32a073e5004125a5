"""The desk of external agents: opens their views and executes their calls, of a service or of a backtest.

At the desk of a service (`external.py`) an agent opens a decision when it asks for a view, and rows keep it. At that of
a backtest (`backtest/agents.py`) market time opens the next decision, and a cassette keeps its calls.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Generic, Literal, NoReturn, TypeVar
from uuid import UUID

from trader.agents.domain.conversation import ChatMessage
from trader.agents.domain.guard import order_of
from trader.agents.domain.invocations import ToolCall
from trader.agents.domain.messages import account_json, decisions_json, order_outcome
from trader.agents.domain.models import Declared, Model
from trader.agents.domain.tools import CALLS_MAX, Decision, FetchIndicators, FetchOrderBook, PlaceOrder
from trader.agents.record import InvocationRecord
from trader.agents.variants import limits_of
from trader.core.errors import Conflict, ViewDecided, ViewExpired
from trader.exchange.domain.account import Account, Marks
from trader.exchange.domain.halts import OperatorCommand, Verb
from trader.exchange.domain.orders import OrderAnswer
from trader.market.domain.markets import Market, canonical_symbol, traded_symbol
from trader.settings.settings import Settings


class OpenDecision:
    """An open decision: its record, its messages (the system message and the view as JSON), and its deadline."""

    def __init__(self, record: InvocationRecord, messages: list[ChatMessage], deadline: datetime) -> None:
        self.record = record
        self.messages = messages
        self.deadline = deadline

    @property
    def id(self) -> str:
        return str(self.record.id)

    @property
    def opened_at(self) -> datetime:
        return self.record.invocation.started_at

    def earlier(self, client_order_id: str) -> ToolCall | None:
        """Return the recorded call with this client order id. Ignore failed calls, which left no trace in the books."""
        calls = (call for call in self.record.calls if call.status != "failed")
        return next((call for call in calls if client_order_id in chosen_ids(call)), None)


def chosen_ids(call: ToolCall) -> list[str | None]:
    """Return the client order ids that an agent chose for the orders of a call."""
    return [decision.get("clientOrderId") for decision in call.metadata["decisions"]]


AccountState = tuple[Account, Marks, Mapping[str, Market], bool]
"""An account with the present marks, the markets, and whether it is stored."""

D = TypeVar("D", bound=OpenDecision)


class AgentDesk(ABC, Generic[D]):
    """Opens at most one decision per agent at a time, and executes its calls one after another."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    # --- calls of agents ----------------------------------------------------------------------------------------------

    async def view(self, model: Model, decisions_per_minute: int | None) -> D:
        """Open a decision; if one is already open, return it, with its view as first shown.

        :raises TooManyRequests: the agent has reached its decisions for this minute
        :raises MarketUnavailable: no market has a price now
        :raises Unavailable: there is no view now
        :raises SeasonOver: the backtest has ended
        """
        async with self._turn(model):
            opened = self._current(model)
            if opened is None or not await self._goes_on(opened):
                opened = await self._begin(model, decisions_per_minute)
            return opened

    async def decide(self, model: Model, view_id: str | None, decision: Decision) -> dict[str, Any]:
        """Execute a call within the decision on this view (None: on the open one). Return the result for the agent.

        A repeated order gets its first answer, whatever its view.

        :raises ViewUnknown: the agent has no such view
        :raises ViewExpired: its deadline has passed
        :raises ViewDecided: its decision has ended
        :raises SeasonOver: the call could open a position, and the agent's season is over
        :raises Conflict: the client order id was used for another order
        """
        async with self._turn(model):
            if isinstance(decision, PlaceOrder) and (first := await self._first_result(model, decision)) is not None:
                return first
            opened = self._current(model)
            if opened is None or view_id not in (None, opened.id):
                await self._refuse_view(model, view_id)
            if not await self._goes_on(opened):
                raise view_expired(view_id)
            if opened.record.call_count >= CALLS_MAX:
                raise ViewDecided(f"a decision has at most {CALLS_MAX} calls; hold, and get a new view")
            return await self._execute(opened, decision)

    async def read(self, model: Model, decision: FetchIndicators | FetchOrderBook) -> dict[str, Any]:
        """Execute a read-only call. An open decision records it among its calls.

        :raises InvalidInput: there is no such market
        """
        async with self._locks[model.id]:
            opened = self._current(model)
            if opened is not None and await self._goes_on(opened):
                traded_symbol(decision.symbol, self.account(model)[2])
                return await self._execute(opened, decision)
        return await self._look(model, decision)

    def deadline_s(self, model: Model) -> int:
        """Return how many seconds after its view a decision of the agent must end."""
        return limits_of(model, self._settings.attempt_timeout_s).decision_age_max_s

    async def _first_result(self, model: Model, order: PlaceOrder) -> dict[str, Any] | None:
        """Return the first result of the order with this client order id, beside the present account; None if new."""
        first = None if order.client_order_id is None else await self._first_answer(model, order)
        if first is None:
            return None
        if isinstance(first, ToolCall):
            is_same = first.metadata["decisions"] == decisions_json(order)
            status, result = first.status, first.metadata["results"][0]
        else:
            wanted = order_of(order, canonical_symbol(order.symbol)).order(model.id, UUID(int=0), 0)
            is_same = first.contents_digest == wanted.contents_digest()
            status, result = order_outcome([first])
        if not is_same:
            raise Conflict(f"the clientOrderId {order.client_order_id!r} was used for another order; use a new one")
        account, marks, *_ = self.account(model)
        return {"result": status, **result, "account": account_json(account, marks)}

    # --- agents and accounts of the service or the backtest -----------------------------------------------------------

    @abstractmethod
    async def agent(self, account_id: str) -> Model:
        """Return the agent that trades an account, which is open from now on."""

    @abstractmethod
    async def declare(self, model: Model, name: str, declared: Declared) -> Model:
        """Set the agent's declaration about itself, and return the agent with it."""

    @abstractmethod
    def account(self, model: Model) -> AccountState:
        """Return the agent's account."""

    @abstractmethod
    async def cancel_order(self, model: Model, order_id: str) -> OrderAnswer:
        """Cancel a resting order.

        :raises NotFound: the account has no such order
        """

    @abstractmethod
    async def operate(self, model: Model, verb: Literal[Verb.HALT, Verb.FLATTEN], reason: str) -> OperatorCommand:
        """Give a command for the agent's account, and return it.

        Repeated calls return the same command until it is executed.
        """

    # --- who opens decisions, which clock ends them, and where they are kept ------------------------------------------

    @asynccontextmanager
    async def _turn(self, model: Model) -> AsyncIterator[None]:
        """Wait until no other call of the agent is in progress."""
        async with self._locks[model.id]:
            yield

    @abstractmethod
    def _current(self, model: Model) -> D | None:
        """Return the open decision, whose deadline may have passed."""

    async def _goes_on(self, opened: D) -> bool:
        """Return whether an open decision goes on; if its deadline has passed, end it."""
        return True  # in lockstep its workflow ends it in time

    @abstractmethod
    async def _begin(self, model: Model, decisions_per_minute: int | None) -> D:
        """Open the next decision. Raises like `view`."""

    @abstractmethod
    async def _execute(self, opened: D, decision: Decision) -> dict[str, Any]:
        """Execute and record a call. Return the result for the agent."""

    @abstractmethod
    async def _look(self, model: Model, decision: FetchIndicators | FetchOrderBook) -> dict[str, Any]:
        """Execute a read-only call outside of any decision."""

    @abstractmethod
    async def _refuse_view(self, model: Model, view_id: str | None) -> NoReturn:
        """Raise the error that says why no decision on this view is open."""

    @abstractmethod
    async def _first_answer(self, model: Model, order: PlaceOrder) -> ToolCall | OrderAnswer | None:
        """Return the first call with the client order id of an order, or what the books alone have of it."""


def view_expired(view_id: str | None) -> ViewExpired:
    return ViewExpired(f"the deadline of the view {view_id} has passed; get a new one")
