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
from datetime import timedelta
from itertools import islice
from typing import Any, Final, Literal, NoReturn, Protocol
from uuid import NAMESPACE_OID, UUID, uuid5

import msgspec

from trader.agents.desk import AccountState, AgentDesk, OpenDecision, chosen_ids
from trader.agents.domain.conversation import ModelAnswer, ToolRequest, Turn
from trader.agents.domain.invocations import FinishedInvocation, ToolCall
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
from trader.agents.providers.protocols import call_of
from trader.agents.providers.webhook import WebhookClient
from trader.agents.record import InvocationRecord
from trader.agents.variants import VARIANTS, limits_of
from trader.agents.webhooks import decisions_in
from trader.api import edge
from trader.api.connections import bind, serving
from trader.api.registry import REGISTRY, load_procedures
from trader.api.rpc import Dispatcher
from trader.api.schemas.agents import ViewOutput
from trader.api.schemas.common import ENCODER
from trader.core.errors import (
    Precondition,
    ProviderError,
    SeasonOver,
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
_NOT_DUE: Final = "the next decision is not due yet; ask again"


LeaderboardMaker = Callable[[RunWindow, SortKey], list[LeaderboardEntry]]
"""Makes the board of a run, as of the time reached."""


class AgentEnvironment(InvocationEnvironment, Protocol):
    """The environment of an external agent's decision, which also knows its orders."""

    def order(self, order_id: UUID) -> OrderAnswer | None:
        """Return the current answer of an order of the account; None if there is no such order."""
        ...


def _answer(model: Model, number: int, decision: Decision, began_s: float) -> ModelAnswer:
    """Return a call as the answer to a step. A cost that is not declared counts as none, as no budget limits it."""
    request = request_of(number, decision)
    answer = answer_of(request, decision, model.router_model_name)
    return msgspec.structs.replace(
        answer,
        message={
            "role": "assistant",
            "content": "",
            "tool_calls": [call_of(request.id, request.name, request.arguments)],
        },
        cost_usd=answer.cost_usd or ZERO,
        duration_ms=_since_ms(began_s),
    )


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
    """An external agent as a provider. `environment` and `record` belong to its latest decision."""

    name = EXTERNAL
    is_remote = True

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model = model
        self.deadline_s = limits_of(model, settings.attempt_timeout_s).decision_age_max_s
        self.environment: AgentEnvironment | None = None
        self.record: InvocationRecord

    def begin(self, environment: AgentEnvironment, record: InvocationRecord) -> None:
        """Begin a decision of its workflow."""
        self.environment, self.record = environment, record

    def shown_by(self, turn: Turn) -> OpenDecision:
        """Return the decision of a turn, with the messages that opened it."""
        return OpenDecision(self.record, turn.messages[:2], turn.view.at + timedelta(seconds=self.deadline_s))

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
        began_s, view = time.monotonic(), self.shown_by(turn)
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


_Call = tuple[Decision, asyncio.Future[dict[str, Any]]]
"""A call of an agent, and the result that it waits for."""


class CallingAgent(_AgentProvider):
    """An agent with a key, as its workflow sees it: it asks for each view, and makes its calls one by one.

    waiting --the first turn--> offered --getView--> open --hold, the deadline or the end of the workflow--> waiting
    """

    def __init__(self, model: Model, settings: Settings) -> None:
        super().__init__(model, settings)
        self._offer: OpenDecision | None = None
        self._until_s = 0.0
        self.ended: dict[str, type[ViewDecided | ViewExpired]] = {}
        """Why the decision of each earlier view is over."""

        self.orders: dict[str, ToolCall] = {}
        """The calls of earlier decisions by the client order ids that the agent chose."""

        self._kept: deque[tuple[ToolRequest, dict[str, Any]]] = deque()
        """The calls of the open decision that the cassette knows, until the agent has repeated them."""

        self.finished: list[FinishedInvocation] = []
        """Its decisions so far, oldest first."""

        self._calls: asyncio.Queue[_Call] = asyncio.Queue(1)
        self._executed: asyncio.Future[dict[str, Any]] | None = None
        """The result that the agent waits for while its workflow executes the call."""

        self._offered, self._fetched = asyncio.Event(), asyncio.Event()
        self._has_called = self._is_over = False
        self._told = asyncio.Event()
        """Whether the agent knows that the backtest has ended."""

    # --- the workflow's side ------------------------------------------------------------------------------------------

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Show the agent the view or the result of its last call, and return its next call.

        :raises ProviderError: the agent has not asked for its view
        """
        if self._executed is not None:
            self._executed.set_result(msgspec.json.decode(turn.messages[-1]["content"]))
            self._executed = None
        elif not self._fetched.is_set():
            await self._offer_view(turn)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._until_s - began_s):
                decision, result = await self._calls.get()
        except TimeoutError:
            self._close(ViewExpired)
            return _end(self.model, _NO_DECISION, began_s, is_refusal=turn.number == 1)
        if isinstance(decision, Holding):
            self._close(ViewDecided)
            result.set_result({"result": "ok", "holding": True})
        else:
            self._executed = result
        return _answer(self.model, turn.number, decision, began_s)

    async def _offer_view(self, turn: Turn) -> None:
        """Wait until the agent asks for its view, from which its time counts."""
        self._offer, self._kept = self.shown_by(turn), deque(_executed(turn))
        self._offered.set()
        try:
            async with asyncio.timeout(IDLE_S):
                await self._fetched.wait()
        except TimeoutError:
            raise ProviderError(f"it has not asked for its view with agent.getView within {IDLE_S:g} s") from None
        self._until_s = time.monotonic() + self.deadline_s

    def end_decision(self, record: InvocationRecord) -> None:
        self.finished.append(FinishedInvocation(record.invocation, self.model, tuple(record.calls)))
        for call in record.calls:
            for chosen in filter(None, chosen_ids(call) if call.status != "failed" else ()):
                self.orders.setdefault(chosen, call)
        self._close(ViewDecided)

    def _close(self, why: type[ViewDecided | ViewExpired]) -> None:
        if self._offer is not None:
            self.ended[self._offer.id] = why
        self._offer = None
        self._fetched.clear()
        if not self._is_over:
            self._offered.clear()
        left = [] if self._executed is None else [self._executed]
        self._executed = None
        while not self._calls.empty():
            left.append(self._calls.get_nowait()[1])
        for result in left:
            result.set_exception(why("the decision has ended; get a new view"))

    async def close(self) -> None:
        """Tell the agent, if there is one, that the backtest has ended, once it asks for the next view."""
        self._is_over = True
        self._close(ViewExpired)
        self._offered.set()
        if self._has_called:
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._told.wait()

    # --- the desk's side ----------------------------------------------------------------------------------------------

    async def wait_for_view(self) -> None:
        """Wait until a decision is due. Raises `Unavailable` after a while."""
        try:
            async with asyncio.timeout(NEXT_VIEW_S):
                await self._offered.wait()
        except TimeoutError:
            raise Unavailable(_NOT_DUE) from None
        self._has_called = True

    def fetch(self) -> OpenDecision:
        """Open the decision that is due, from which its time counts.

        :raises SeasonOver: the backtest has ended
        :raises Unavailable: the decision has ended in the meantime
        """
        if self._is_over:
            self._told.set()
            raise SeasonOver("the backtest has ended: there are no more views")
        if self._offer is None:
            raise Unavailable(_NOT_DUE)
        self._fetched.set()
        return self._offer

    @property
    def open(self) -> OpenDecision | None:
        """The decision whose view the agent has."""
        return self._offer if self._fetched.is_set() else None

    def is_kept(self, decision: Decision) -> bool:
        """Return whether the agent repeats the next call that the cassette knows, after a run was cut off."""
        if not self._kept:
            return False
        request, _ = self._kept[0]
        return request == request_of(int(request.id.removeprefix("call_")), decision)

    async def execute(self, decision: Decision) -> dict[str, Any]:
        """Let the workflow execute a call, and return its result; of a kept call, the first one."""
        if self.is_kept(decision):
            return self._kept.popleft()[1]
        self._kept.clear()
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        await self._calls.put((decision, result))
        return await result

    @property
    def latest(self) -> AgentEnvironment:
        """The environment of its latest decision.

        :raises Unavailable: there was none yet
        """
        if self.environment is None:
            raise Unavailable("the backtest has not begun; get a view first")
        return self.environment


class BacktestDesk(AgentDesk[OpenDecision]):
    """The desk of the agents with keys in a backtest, and what they read of the run.

    What changes something belongs to an open decision.
    """

    def __init__(self, agents: Sequence[CallingAgent], settings: Settings) -> None:
        super().__init__(settings)
        self._agents = {agent.model.id: agent for agent in agents}
        self.board: LeaderboardMaker | None = None
        """None before the run has begun, and in an exam."""

    async def view(self, model: Model, decisions_per_minute: int | None) -> OpenDecision:
        await self._agents[model.id].wait_for_view()
        return await super().view(model, decisions_per_minute)

    async def _begin(self, model: Model, decisions_per_minute: int | None) -> OpenDecision:
        return self._agents[model.id].fetch()

    def _current(self, model: Model) -> OpenDecision | None:
        return self._agents[model.id].open

    async def _execute(self, opened: OpenDecision, decision: Decision) -> dict[str, Any]:
        return await self._agents[opened.record.model.id].execute(decision)

    async def _look(self, model: Model, decision: FetchIndicators | FetchOrderBook) -> dict[str, Any]:
        await self._refuse_view(model, None)

    async def _refuse_view(self, model: Model, view_id: str | None) -> NoReturn:
        ended = self._agents[model.id].ended.get(view_id or "")
        if ended is not None:
            raise ended(f"the decision of the view {view_id} has ended; get a new one")
        known = "open view, to which this belongs in a backtest" if view_id is None else f"view {view_id[:40]!r}"
        raise ViewUnknown(f"{model.id} has no {known}; get one with agent.getView")

    async def _first_answer(self, model: Model, order: PlaceOrder) -> ToolCall | None:
        agent, chosen = self._agents[model.id], order.client_order_id or ""
        if agent.is_kept(order):
            return None
        return (agent.open and agent.open.earlier(chosen)) or agent.orders.get(chosen)

    async def agent(self, account_id: str) -> Model:
        return self._agents[account_id].model

    async def declare(self, model: Model, name: str, declared: Declared) -> Model:
        """Set the agent's declaration for this run; the cassette and the result have the model as it began."""
        configuration = msgspec.structs.replace(model.configuration, declared=declared)
        agent = self._agents[model.id]
        agent.model = msgspec.structs.replace(model, router_model_name=name, configuration=configuration)
        return agent.model

    def account(self, model: Model) -> AccountState:
        environment = self._agents[model.id].latest
        return environment.account(), environment.marks(), environment.markets, True

    async def cancel_order(self, model: Model, order_id: str) -> OrderAnswer:
        environment, wanted = self._agents[model.id].latest, order_id_of(model.id, order_id)
        for order in environment.account().resting:
            if order.id == wanted:
                await self.decide(model, None, CancelOrder(symbol=order.symbol, order_id=order_id))
        answer = environment.order(wanted)
        if answer is None:
            raise no_such_order(model.id, order_id)
        return answer

    async def operate(self, model: Model, verb: Literal[Verb.HALT, Verb.FLATTEN], reason: str) -> OperatorCommand:
        """Halt the account for the rest of the run, as calls on the open view; `flatten` also closes everything."""
        opened = self._current(model)
        command_id = uuid5(NAMESPACE_OID, f"{opened and opened.id} {verb}")
        await self.decide(model, None, HaltTrading(reason=reason))
        environment = self._agents[model.id].latest
        account = environment.account()
        for order in account.resting if verb is Verb.FLATTEN else opening_orders(account):
            await self.decide(model, None, CancelOrder(symbol=order.symbol, order_id=str(order.id)))
        for symbol in account.positions if verb is Verb.FLATTEN else ():
            while symbol in environment.account().positions:  # a book may fill only a part of it
                result = await self.decide(model, None, ClosePosition(symbol=symbol))
                if result["result"] != "ok":
                    break
        asked_by = f"the agent {model.id}"
        return OperatorCommand(id=command_id, verb=verb, account_id=model.id, reason=reason, asked_by=asked_by)

    async def finished(self, model_id: str, *, page: Page, with_answers: bool) -> list[FinishedInvocation]:
        """Return the finished decisions of an agent, latest first. It has no raw answers, `with_answers` or not."""
        decisions = reversed(self._agents[model_id].finished)
        older = (each for each in decisions if page.until is None or each.invocation.started_at < page.until)
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

    async def close(self) -> None:
        """End the backtest for its agents."""
        for agent in self._agents.values():
            await agent.close()


@dataclass(frozen=True, slots=True)
class BacktestContext:
    """The context of the procedures that a backtest serves."""

    settings: Settings
    desk: BacktestDesk
    invocations: BacktestDesk
    analytics: BacktestDesk


@asynccontextmanager
async def serving_agents(
    desk: BacktestDesk, keys: Sequence[Credential], settings: Settings, port: int
) -> AsyncIterator[str]:
    """Serve the procedures of `agent`, and MCP, on this machine, and yield the address. Port 0 takes any free one.

    :raises StartError: the port is in use
    """
    load_procedures()
    served = REGISTRY.part(name for name in REGISTRY.procedures if name.startswith("agent."))
    context = BacktestContext(settings, desk, invocations=desk, analytics=desk)
    app = edge.make_app(settings, Access(None, None, keys=keys), Dispatcher(served, context))
    sockets = bind("127.0.0.1", port, "Agents call there; --listen selects another port.")
    async with serving(app, settings, sockets) as bound:
        try:
            yield f"http://127.0.0.1:{bound}"
        finally:
            await desk.close()
