"""The desk of external agents: what their procedures need, from a service or from a backtest."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol

from trader.agents.domain.conversation import ChatMessage
from trader.agents.domain.models import Declared, Model
from trader.agents.domain.tools import Decision, FetchIndicators, FetchOrderBook
from trader.exchange.domain.account import Account, Marks
from trader.exchange.domain.halts import OperatorCommand, Verb
from trader.exchange.domain.orders import OrderAnswer
from trader.market.domain.markets import Market


class OpenedView(Protocol):
    """A view that opened a decision: its id, its times, and its messages, the system message and the view as JSON."""

    @property
    def id(self) -> str: ...

    @property
    def opened_at(self) -> datetime: ...

    @property
    def deadline(self) -> datetime: ...

    @property
    def messages(self) -> list[ChatMessage]: ...


class AccountState(NamedTuple):
    """An account with the present marks. `is_open`: it is stored."""

    account: Account
    marks: Marks
    markets: Mapping[str, Market]
    is_open: bool


class AgentDesk(Protocol):
    """Serves the views of external agents, and executes their calls."""

    async def agent(self, account_id: str) -> Model:
        """Return the agent that trades an account, which is open from now on."""
        ...

    def deadline_s(self, model: Model) -> int:
        """Return how many seconds after its view a decision of the agent must end."""
        ...

    async def view(self, model: Model, decisions_per_minute: int | None) -> OpenedView:
        """Open a decision; if one is already open, return its view, as first shown.

        :raises TooManyRequests: the agent has reached its decisions for this minute
        :raises MarketUnavailable: no market has a price now
        :raises Unavailable: there is no view now
        """
        ...

    async def decide(self, model: Model, view_id: str, decision: Decision) -> dict[str, Any]:
        """Execute a call within the decision on this view. Return the result shown to the agent.

        :raises ViewUnknown: the agent has no such view
        :raises ViewExpired: its deadline has passed
        :raises ViewDecided: its decision has ended
        :raises SeasonOver: the call could open a position, and the agent's season is over
        :raises Conflict: the client order id was used for another order
        """
        ...

    async def read(self, model: Model, decision: FetchIndicators | FetchOrderBook) -> dict[str, Any]:
        """Execute a read-only call. An open decision records it among its calls.

        :raises NotFound: there is no such market
        """
        ...

    async def declare(self, model: Model, name: str, declared: Declared) -> Model:
        """Set the agent's declaration about itself, and return the agent with it."""
        ...

    def account(self, model: Model) -> AccountState:
        """Return the agent's account."""
        ...

    async def cancel_order(self, model: Model, order_id: str) -> OrderAnswer:
        """Cancel a resting order.

        :raises NotFound: the account has no such order
        """
        ...

    async def operate(self, model: Model, verb: Literal[Verb.HALT, Verb.FLATTEN], reason: str) -> OperatorCommand:
        """Give a command for the agent's account, and return it.

        Repeated calls return the same command until it is executed.
        """
        ...
