"""External agents in a backtest: the procedures of `agent`, MCP and webhooks, in the time of the recording.

An agent is the provider of its model's workflow, like an AI model: its view is the request of the first step, each of
its calls the answer to one step, and the result of a call is in the request of the next step. So a cassette keeps the
calls by what the agent had seen, and a second run needs no agent. Market time stands still until the agent asks for its
view, and while it waits for the next one.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, Protocol
from uuid import NAMESPACE_OID, UUID, uuid5

import msgspec
from aiohttp import web

from trader.agents.desk import AccountState
from trader.agents.domain.conversation import ChatMessage, ModelAnswer, ToolRequest, Turn
from trader.agents.domain.invocations import invocation_id
from trader.agents.domain.messages import decision_json
from trader.agents.domain.models import EXTERNAL, Declared, Model
from trader.agents.domain.tools import (
    CancelOrder,
    ClosePosition,
    Decision,
    FetchIndicators,
    FetchOrderBook,
    HaltTrading,
    Holding,
    PlaceOrder,
    answer_of,
    request_of,
)
from trader.agents.domain.view import Shown
from trader.agents.execute import InvocationEnvironment
from trader.agents.invocations import FinishedInvocation
from trader.agents.providers.webhook import WebhookClient
from trader.agents.record import InvocationRecord
from trader.agents.variants import VARIANTS, limits_of
from trader.agents.webhooks import decisions_in
from trader.api import edge
from trader.api.context import ACCESS
from trader.api.mcp import McpServer
from trader.api.registry import REGISTRY, load_procedures
from trader.api.rpc import DISPATCHER, Dispatcher
from trader.api.schemas.agents import ViewOutput
from trader.api.schemas.common import ENCODER
from trader.core.errors import (
    Conflict,
    Precondition,
    ProviderError,
    SeasonOver,
    StartError,
    Unavailable,
    ViewDecided,
    ViewExpired,
    ViewUnknown,
    WebhookError,
)
from trader.core.money import ZERO
from trader.database.pool import Page
from trader.exchange.domain.halts import OperatorCommand, Verb, opening_orders
from trader.exchange.domain.orders import OrderAnswer
from trader.exchange.idempotent_orders import no_such_order, order_id_of
from trader.operations.access import Access
from trader.operations.domain.credentials import Credential
from trader.portfolio.domain.histories import RunWindow
from trader.portfolio.leaderboard import LeaderboardEntry, SortKey
from trader.settings.settings import Settings

IDLE_S: Final = 200.0
"""How long a view waits for its agent. A backtest asks three times, then it ends."""

NEXT_VIEW_S: Final = 20.0
"""How long a request waits for the next view before it is told to ask again."""

FAREWELL_S: Final = 2.0
"""How long the end of a backtest waits for an agent to ask for the next view."""

_NO_DECISION: Final = "the agent did not decide before the deadline of its view"


LeaderboardMaker = Callable[[RunWindow, SortKey], list[LeaderboardEntry]]
"""Makes the board of a run, as of the time reached."""


class AgentEnvironment(InvocationEnvironment, Protocol):
    """The environment of an external agent's decision, which also knows its orders."""

    def order(self, order_id: UUID) -> OrderAnswer | None:
        """Return the current answer of an order of the account; None if there is no such order."""
        ...


class ServedView(NamedTuple):
    """The `OpenedView` of a backtest."""

    id: str
    opened_at: datetime
    deadline: datetime
    messages: list[ChatMessage]

    @classmethod
    def of(cls, turn: Turn, deadline_s: int) -> "ServedView":
        """Return the view of a decision's first turn."""
        at = turn.view.at
        deadline = at + timedelta(seconds=deadline_s)
        return cls(str(invocation_id(turn.model, at)), at, deadline, turn.messages[:2])


def _answer(model: Model, number: int, decision: Decision, began_s: float) -> ModelAnswer:
    """Return a call as the answer to a step. A cost that is not declared counts as none, as no budget limits it."""
    request = request_of(number, decision)
    answer = answer_of(request, decision, model.router_model_name)
    return msgspec.structs.replace(
        answer,
        message={"role": "assistant", "content": "", "tool_calls": [_call_json(request)]},
        cost_usd=answer.cost_usd or ZERO,
        duration_ms=_since_ms(began_s),
    )


def _call_json(request: ToolRequest) -> dict[str, Any]:
    return {
        "id": request.id,
        "type": "function",
        "function": {"name": request.name, "arguments": request.arguments},
    }


def _end(model: Model, text: str, began_s: float, *, is_refusal: bool = False) -> ModelAnswer:
    """Return an answer without a call, which ends the decision; `is_refusal`: as a missed one, for this reason."""
    return ModelAnswer(
        text=text,
        calls=(),
        message={"role": "assistant", "content": text},
        model=model.router_model_name,
        cost_usd=ZERO,
        duration_ms=_since_ms(began_s),
        is_refusal=is_refusal,
    )


def _since_ms(began_s: float) -> int:
    return round(1000 * (time.monotonic() - began_s))


class _AgentProvider:
    """An external agent as a provider. `environment` belongs to its latest decision."""

    name = EXTERNAL
    is_remote = True

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model = model
        self.deadline_s = limits_of(model, settings.attempt_timeout_s).decision_age_max_s
        self.environment: AgentEnvironment | None = None

    def left_out(self, model: Model) -> Collection[str]:
        return ()

    async def shown(self, model: Model) -> Shown:
        return Shown(VARIANTS[model.variant].intervals)

    def end_decision(self, record: InvocationRecord) -> None:
        """End the open decision, whose workflow has ended with this record."""

    async def close(self) -> None:
        """End the backtest for the agent."""


class CalledAgent(_AgentProvider):
    """An agent with a webhook: it is sent each view, and answers with all its decisions."""

    def __init__(self, model: Model, settings: Settings, url: str, secret: str) -> None:
        super().__init__(model, settings)
        self._url = url
        self._secret = secret
        self._client = WebhookClient(loopback=True)
        self._left: deque[Decision] = deque()
        self._view_id: str | None = None

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Return the next decision of the answer to the view.

        :raises ProviderError: the webhook did not answer, or its answer is invalid
        """
        began_s, view = time.monotonic(), ServedView.of(turn, self.deadline_s)
        if self._view_id != view.id:
            body = ENCODER.encode(ViewOutput.of(view))
            try:
                answer = await self._client.call(self._url, self._secret, view.id, body, self.deadline_s)
                decided = decisions_in(answer)
            except WebhookError as error:
                raise ProviderError(str(error)) from error
            self._left, self._view_id = deque(decided[turn.number - 1 :]), view.id
        if not self._left:
            return _end(self.model, "the answer of the webhook has no further decisions", began_s)
        return _answer(self.model, turn.number, self._left.popleft(), began_s)

    async def close(self) -> None:
        await self._client.close()


def _executed(turn: Turn) -> Iterator[tuple[ToolRequest, dict[str, Any]]]:
    """Yield the calls that were executed before a turn, with their results."""
    for made, result in zip(turn.messages[2::2], turn.messages[3::2], strict=True):
        (call,) = made["tool_calls"]
        yield ToolRequest(id=call["id"], **call["function"]), msgspec.json.decode(result["content"])


class _Call(NamedTuple):
    """A call of an agent, and the result that it waits for."""

    decision: Decision
    result: asyncio.Future[dict[str, Any]]


class CallingAgent(_AgentProvider):
    """An agent with a key: it asks for each view, and makes its calls one by one.

    waiting --the first turn--> offered --getView--> open --hold, the deadline or the end of the workflow--> waiting
    """

    def __init__(self, model: Model, settings: Settings) -> None:
        super().__init__(model, settings)
        self._view: ServedView | None = None
        self._until_s = 0.0
        self._ended: dict[str, type[ViewDecided | ViewExpired]] = {}
        self._first_results: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        """The order of each client order id, and its result."""

        self._kept: deque[tuple[ToolRequest, dict[str, Any]]] = deque()
        """The calls of the open decision that the cassette knows, until the agent has repeated them."""

        self.finished: list[FinishedInvocation] = []
        """Its decisions so far, oldest first."""

        self._calls: asyncio.Queue[_Call] = asyncio.Queue(1)
        self._executed: _Call | None = None
        self._offered, self._fetched = asyncio.Event(), asyncio.Event()
        self._calling = asyncio.Lock()
        self._has_called = self._is_over = False
        self._told = asyncio.Event()
        """Whether the agent knows that the backtest has ended."""

    # --- the workflow's side ------------------------------------------------------------------------------------------

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Show the agent the view or the result of its last call, and return its next call.

        :raises ProviderError: the agent has not asked for its view
        """
        if self._executed is not None:
            self._executed.result.set_result(msgspec.json.decode(turn.messages[-1]["content"]))
            self._executed = None
        elif not self._fetched.is_set():
            await self._offer(turn)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._until_s - began_s):
                call = await self._calls.get()
        except TimeoutError:
            self._close(ViewExpired)
            return _end(self.model, _NO_DECISION, began_s, is_refusal=turn.number == 1)
        if isinstance(call.decision, Holding):
            self._close(ViewDecided)
            call.result.set_result({"result": "ok", "holding": True})
        else:
            self._executed = call
        return _answer(self.model, turn.number, call.decision, began_s)

    async def _offer(self, turn: Turn) -> None:
        """Wait until the agent asks for its view, from which its time counts."""
        self._view, self._kept = ServedView.of(turn, self.deadline_s), deque(_executed(turn))
        self._offered.set()
        try:
            async with asyncio.timeout(IDLE_S):
                await self._fetched.wait()
        except TimeoutError:
            raise ProviderError(f"it has not asked for its view with agent.getView within {IDLE_S:g} s") from None
        self._until_s = time.monotonic() + self.deadline_s

    def end_decision(self, record: InvocationRecord) -> None:
        self.finished.append(FinishedInvocation(record.invocation, self.model, tuple(record.calls)))
        self._close(ViewDecided)

    def _close(self, why: type[ViewDecided | ViewExpired]) -> None:
        if self._view is not None:
            self._ended[self._view.id] = why
        self._view = None
        self._fetched.clear()
        if not self._is_over:
            self._offered.clear()
        left = [] if self._executed is None else [self._executed]
        self._executed = None
        while not self._calls.empty():
            left.append(self._calls.get_nowait())
        for call in left:
            call.result.set_exception(why("the decision has ended; get a new view"))

    async def close(self) -> None:
        """Tell the agent, if there is one, that the backtest has ended, once it asks for the next view."""
        self._is_over = True
        self._close(ViewExpired)
        self._offered.set()
        if self._has_called:
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._told.wait()

    # --- the agent's side ---------------------------------------------------------------------------------------------

    async def view(self) -> ServedView:
        """Return the view of the open decision, or wait for the next one.

        :raises Unavailable: it is not due yet
        :raises SeasonOver: the backtest has ended
        """
        try:
            async with asyncio.timeout(NEXT_VIEW_S):
                await self._offered.wait()
        except TimeoutError:
            raise Unavailable("the next decision is not due yet; ask again") from None
        self._has_called = True
        if self._view is None:
            self._told.set()
            raise SeasonOver("the backtest has ended: there are no more views")
        self._fetched.set()
        return self._view

    async def decide(self, view_id: str | None, decision: Decision) -> dict[str, Any]:
        """Let the workflow execute a call on the view (None: on the open one), and return its result."""
        async with self._calling:
            chosen = decision.client_order_id if isinstance(decision, PlaceOrder) else None
            if chosen in self._first_results:
                order, result = self._first_results[chosen]
                if order != decision_json(decision):
                    raise Conflict(f"the clientOrderId {chosen!r} was used for another order; use a new one")
                return result
            view = self._view if self._fetched.is_set() else None
            if view is None or view_id not in (None, view.id):
                ended = self._ended.get(view_id or "")
                if ended is not None:
                    raise ended(f"the decision of the view {view_id} has ended; get a new one")
                known = (
                    "open view, to which this belongs in a backtest" if view_id is None else f"view {view_id[:40]!r}"
                )
                raise ViewUnknown(f"{self.model.id} has no {known}; get one with agent.getView")
            result = self._kept_result(decision) or await self._executed_result(decision)
            if chosen is not None and result["result"] != "failed":
                self._first_results[chosen] = decision_json(decision), result
            return result

    def _kept_result(self, decision: Decision) -> dict[str, Any] | None:
        """Return the result of a call that the agent repeats after a run was cut off; None if it makes another one."""
        if self._kept:
            request, result = self._kept.popleft()
            if request == request_of(int(request.id.removeprefix("call_")), decision):
                return result
            self._kept.clear()
        return None

    async def _executed_result(self, decision: Decision) -> dict[str, Any]:
        call = _Call(decision, asyncio.get_running_loop().create_future())
        await self._calls.put(call)
        return await call.result

    async def operate(self, verb: Literal[Verb.HALT, Verb.FLATTEN], reason: str) -> OperatorCommand:
        """Halt the account for the rest of the run, as calls on the open view; `flatten` also closes everything."""
        command_id = uuid5(NAMESPACE_OID, f"{self._view and self._view.id} {verb}")
        await self.decide(None, HaltTrading(reason=reason))
        account = self.opened.account()
        for order in account.resting if verb is Verb.FLATTEN else opening_orders(account):
            await self.decide(None, CancelOrder(symbol=order.symbol, order_id=str(order.id)))
        for symbol in account.positions if verb is Verb.FLATTEN else ():
            while symbol in self.opened.account().positions:  # a book may fill only a part of it
                result = await self.decide(None, ClosePosition(symbol=symbol))
                if result["result"] != "ok":
                    break
        asked_by = f"the agent {self.model.id}"
        return OperatorCommand(id=command_id, verb=verb, account_id=self.model.id, reason=reason, asked_by=asked_by)

    @property
    def opened(self) -> AgentEnvironment:
        """The environment of its latest decision.

        :raises Unavailable: there was none yet
        """
        if self.environment is None:
            raise Unavailable("the backtest has not begun; get a view first")
        return self.environment


class BacktestDesk:
    """The `AgentDesk` of the agents with keys in a backtest."""

    def __init__(self, agents: Sequence[CallingAgent]) -> None:
        self._agents = {agent.model.id: agent for agent in agents}

    async def agent(self, account_id: str) -> Model:
        return self._agents[account_id].model

    def deadline_s(self, model: Model) -> int:
        return self._agents[model.id].deadline_s

    async def view(self, model: Model, decisions_per_minute: int | None) -> ServedView:
        return await self._agents[model.id].view()

    async def decide(self, model: Model, view_id: str, decision: Decision) -> dict[str, Any]:
        return await self._agents[model.id].decide(view_id, decision)

    async def read(self, model: Model, decision: FetchIndicators | FetchOrderBook) -> dict[str, Any]:
        return await self._agents[model.id].decide(None, decision)

    async def declare(self, model: Model, name: str, declared: Declared) -> Model:
        """Set the agent's declaration for this run; the cassette and the result have the model as it began."""
        configuration = msgspec.structs.replace(model.configuration, declared=declared)
        agent = self._agents[model.id]
        agent.model = msgspec.structs.replace(model, router_model_name=name, configuration=configuration)
        return agent.model

    def account(self, model: Model) -> AccountState:
        environment = self._agents[model.id].opened
        return AccountState(environment.account(), environment.marks(), environment.markets, is_open=True)

    async def cancel_order(self, model: Model, order_id: str) -> OrderAnswer:
        agent, wanted = self._agents[model.id], order_id_of(model.id, order_id)
        for order in agent.opened.account().resting:
            if order.id == wanted:
                await agent.decide(None, CancelOrder(symbol=order.symbol, order_id=order_id))
        answer = agent.opened.order(wanted)
        if answer is None:
            raise no_such_order(model.id, order_id)
        return answer

    async def operate(self, model: Model, verb: Literal[Verb.HALT, Verb.FLATTEN], reason: str) -> OperatorCommand:
        return await self._agents[model.id].operate(verb, reason)


class RunReader:
    """What agents with keys read of the run: their decisions so far, and the board."""

    def __init__(self, agents: Sequence[CallingAgent]) -> None:
        self.agents = agents
        self.board: LeaderboardMaker | None = None
        """None before the run has begun, and in an exam."""

    async def finished(self, model_id: str, *, page: Page, with_answers: bool) -> list[FinishedInvocation]:
        """Return the finished decisions of an agent, latest first. It has no raw answers, `with_answers` or not."""
        (agent,) = (each for each in self.agents if each.model.id == model_id)
        older = (
            each for each in reversed(agent.finished) if page.until is None or each.invocation.started_at < page.until
        )
        return list(islice(older, page.skip, page.skip + page.limit))

    async def leaderboard(self, window: RunWindow, sort_by: SortKey) -> list[LeaderboardEntry]:
        """Return the board as of the last whole hour.

        :raises Precondition: there is none
        """
        if self.board is None:
            raise Precondition("there is no board before a backtest has begun, and none in an exam")
        return self.board(window, sort_by)

    async def latest_season(self) -> None:
        """Return None: a backtest is not a season."""


@dataclass(frozen=True, slots=True)
class BacktestContext:
    """The context of the procedures that a backtest serves."""

    settings: Settings
    desk: BacktestDesk
    invocations: RunReader
    analytics: RunReader


def agent_app(reader: RunReader, keys: Sequence[Credential], settings: Settings) -> web.Application:
    """Return the application that serves the procedures of `agent`, and MCP, to the holders of these keys."""
    load_procedures()
    served = REGISTRY.part(name for name in REGISTRY.procedures if name.startswith("agent."))
    context = BacktestContext(settings, BacktestDesk(reader.agents), reader, reader)
    app = web.Application()
    app[ACCESS] = Access(None, None, keys=keys)
    app[DISPATCHER] = Dispatcher(served, context)
    app.add_routes(app[DISPATCHER].routes())
    app.add_routes(McpServer(app[DISPATCHER], settings.http_body_timeout_s).routes())
    edge.setup(app, settings)
    return app


@asynccontextmanager
async def serving_agents(
    reader: RunReader, keys: Sequence[Credential], settings: Settings, port: int
) -> AsyncIterator[str]:
    """Serve the agents on this machine, and yield the address. Port 0 takes any free one.

    :raises StartError: the port is in use
    """
    runner = web.AppRunner(agent_app(reader, keys, settings), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    except OSError as error:
        await runner.cleanup()
        raise StartError(
            f"Agents cannot be served on port {port}: {error.strerror}; --listen names another."
        ) from error
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        for agent in reader.agents:
            await agent.close()
        await runner.cleanup()
