"""Decisions of external agents: a view opens one, calls are executed in it, and `holding` or its deadline ends it.

Each is an invocation like any other. What is open is kept in the database, so a restart keeps its deadline.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID, uuid4

import msgspec

from trader.clock import Clock, cut_to_ms, floor_time
from trader.domain.agents.conversation import ModelAnswer, ToolRequest
from trader.domain.agents.guard import order_of
from trader.domain.agents.invocations import ToolCall
from trader.domain.agents.messages import account_json, decision_json, order_outcome
from trader.domain.agents.prompt import opening_messages
from trader.domain.agents.tools import (
    PLACE_ORDER,
    TOOL_NAMES,
    Change,
    Decision,
    FetchIndicators,
    FetchOrderBook,
    Holding,
    PlaceOrder,
)
from trader.domain.agents.view import SERIES_SHOWN
from trader.domain.exchange.halts import OperatorCommand, Verb
from trader.domain.market.markets import canonical_symbol
from trader.domain.models import CYCLE, EXTERNAL, Declared, Model
from trader.errors import (
    Conflict,
    MarketUnavailable,
    NotFound,
    SeasonOver,
    TooManyRequests,
    Unavailable,
    ViewDecided,
    ViewExpired,
    ViewUnknown,
)
from trader.services.agents.calls import CallExecutor, EndedBy, read_market
from trader.services.agents.entrants import Entrants
from trader.services.agents.observer import Observer
from trader.services.agents.payloads import PayloadPacker
from trader.services.agents.recorder import ExternalRecorder
from trader.services.events import EventBus
from trader.services.exchange.idempotent_orders import first_answer
from trader.services.exchange.protocol import Exchange, not_trading
from trader.settings import Settings
from trader.store.agents.chain import select_entrants
from trader.store.agents.external import delete_decided_views, select_open_views
from trader.store.agents.invocations import select_invocation, select_steps, select_tool_calls
from trader.store.agents.models import update_model_declared
from trader.store.database.pool import Database
from trader.store.operations.halts import insert_halting_command, select_open_command
from trader.store.portfolio.seasons import select_latest_season
from trader.variants import VARIANTS, limits_of

CALLS_MAX: Final = 100
"""Calls of one decision."""

_log = logging.getLogger("trader.agents")


class ExternalDecision:
    """A decision that is open: its record, and what executes its calls."""

    def __init__(self, record: ExternalRecorder, calls: CallExecutor) -> None:
        self.record = record
        self.calls = calls

    @property
    def id(self) -> str:
        return str(self.record.id)

    @property
    def deadline(self) -> datetime:
        return self.record.deadline

    @property
    def has_decided(self) -> bool:
        """Whether it has ordered anything, were it refused or not."""
        changes = ("CREATE_POSITION", "CLOSE_POSITION", "UPDATE_EXIT_PLAN")
        return any(call.type in changes for call in self.record.calls)

    def earlier(self, client_order_id: str) -> ToolCall | None:
        """Return the recorded call with the order of this id; one that failed left nothing in the books."""
        for call in self.record.calls:
            ids = [decision.get("clientOrderId") for decision in call.metadata["decisions"]]
            if client_order_id in ids and call.status != "failed":
                return call
        return None


class ExternalAgents:
    """Owns the open decisions of external agents, at most one of each. Only the leader has any."""

    def __init__(
        self,
        database: Database,
        exchange: Exchange,
        observer: Observer,
        entrants: Entrants,
        packer: PayloadPacker,
        clock: Clock,
        events: EventBus,
        settings: Settings,
    ) -> None:
        self._database = database
        self._exchange = exchange
        self._observer = observer
        self._clock = clock
        self._events = events
        self._settings = settings
        self._entrants = entrants
        self._packer = packer
        self._open: dict[str, ExternalDecision] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._opened: dict[str, tuple[datetime, int]] = {}  # the last minute with a decision, and how many it had
        self._cycles: dict[str, datetime] = {}  # the last cycle that was due
        self._unsaved: list[ExternalRecorder] = []

    # --- start and end ------------------------------------------------------------------------------------------------

    async def start(self, models: Mapping[str, Model]) -> None:
        """Go on with the decisions that are open. It may be called again after `close`."""
        async with self._database.reading() as conn:
            views = await select_open_views(conn)
            ids = [view.invocation.id for view in views]
            entrants = await select_entrants(conn) if views else {}
            steps, calls = await select_steps(conn, ids), await select_tool_calls(conn, ids)
        for view in views:
            invocation = view.invocation
            assert invocation.entrant is not None, "an invocation is opened with its entrant"
            record = self._record_of(models[invocation.model_id], invocation.started_at)
            entrant = entrants[invocation.model_id, invocation.entrant]
            record.resume(entrant, steps.get(invocation.id, []), calls.get(invocation.id, []), view)
            self._opened[record.model.id] = invocation.started_at, 1
            self._go_on(record)

    def close(self) -> None:
        """Forget the open decisions, and ends that were not saved in this term: the next leader goes on with them."""
        self._open.clear()
        self._unsaved.clear()
        self._cycles.clear()

    async def begin_cycle(self, due: Iterable[Model], now: datetime) -> None:
        """End the decisions whose deadline has passed, and count as missed those of a whole cycle without any.

        `due` are the agents whose cadence falls into this cycle, which begins some milliseconds after its time. The
        first of a process is seldom whole: the count begins there.

        :raises Unavailable: the database did not confirm it
        """
        for model_id in [*self._open]:
            async with self._locks[model_id]:
                if (decision := self._open.get(model_id)) is not None and decision.deadline < now:
                    await self._expire(decision)
        missed = []
        for model in due:
            before, begun = self._cycles.get(model.id, now), floor_time(now, model.configuration.cadence)
            self._cycles[model.id] = begun if model.id in self._cycles else now
            is_whole = begun - before >= model.configuration.cadence
            if is_whole and (model.id not in self._opened or self._opened[model.id][0] < before):
                missed.append(model)
        if missed:
            await self._entrants.count_missed(missed, now)
        await self._save_ended()

    async def _save_ended(self) -> None:
        """Save the decisions whose end the database did not confirm."""
        for record in [*self._unsaved]:
            await record.save()
            self._unsaved = [each for each in self._unsaved if each is not record]

    # --- what agents do -----------------------------------------------------------------------------------------------

    async def view(self, model: Model, decisions_per_minute: int | None) -> ExternalDecision:
        """Open a decision; while one is open return that one, as it was shown.

        :raises TooManyRequests: the agent has decided often enough in this minute
        :raises MarketUnavailable: no market has a price now
        :raises Unavailable: another process leads, or the database does not confirm it
        """
        self._require_lead()
        async with self._locks[model.id], self._clock.busy():
            decision = self._open.get(model.id)
            if decision is not None:
                if self._clock.now() <= decision.deadline:
                    return decision
                await self._expire(decision)
            return await self._begin(model, decisions_per_minute)

    async def decide(self, model: Model, view_id: str, decision: Decision) -> dict[str, Any]:
        """Execute a call in the decision of this view. Return the result that the agent sees.

        :raises ViewUnknown: the agent has no such view
        :raises ViewExpired: its deadline has passed
        :raises ViewDecided: its decision has ended
        :raises SeasonOver: it could open a position, and the agent's season is over
        :raises Conflict: the client order id was used for another order
        """
        self._require_lead()
        async with self._locks[model.id], self._clock.busy():
            if isinstance(decision, PlaceOrder) and (earlier := await self._answered_before(model, decision)):
                return earlier
            opened = await self._current(model, view_id)
            if isinstance(decision, PlaceOrder) and not decision.reduce_only:
                await self._require_season(model)
            await opened.record.settle_pending()
            return await self._execute(opened, decision)

    async def end(self, model: Model, view_id: str, failure: str | None = None) -> None:
        """End the decision of this view, if it is open, as its answer does; `failure`: why there is none."""
        async with self._locks[model.id], self._clock.busy():
            opened = self._open.get(model.id)
            if opened is not None and opened.id == view_id:
                await opened.record.settle_pending()
                await self._end(opened, "answer" if failure is None else None, failure=failure)

    async def declare(self, model: Model, name: str, declared: Declared) -> None:
        """Set what the agent says of itself; what it says anew makes its next decision that of another entrant.

        :raises Unavailable: another process leads, or the database does not confirm it
        """
        self._require_lead()
        if (model.router_model_name, model.configuration.declared) == (name, declared):
            return
        async with self._database.connection() as conn:
            await update_model_declared(conn, model.id, name, declared)

    async def operate(self, model: Model, verb: Literal[Verb.HALT, Verb.FLATTEN], reason: str) -> OperatorCommand:
        """Write a command for the agent's account, which the leader obeys as it does an operator's.

        The same command is returned again until it is obeyed.

        :raises Unavailable: another process leads, or the database does not confirm it
        """
        self._require_lead()
        command = OperatorCommand(
            id=uuid4(), verb=verb, account_id=model.id, reason=reason, asked_by=f"the agent {model.id}"
        )
        async with self._database.transaction() as conn:
            asked = await select_open_command(conn, model.id, verb)
            if asked is None:
                await insert_halting_command(conn, command)
        return asked or command

    async def read(self, model: Model, decision: FetchIndicators | FetchOrderBook) -> dict[str, Any]:
        """Execute a call that only reads; a decision that is open has it among its calls.

        :raises NotFound: there is no such market
        """
        symbol = canonical_symbol(decision.symbol)
        if symbol not in self._exchange.markets:
            known = ", ".join(self._exchange.markets)
            raise NotFound(f"there is no market {decision.symbol!r}; the markets are {known}")
        async with self._locks[model.id]:
            opened = self._open.get(model.id)
            if opened is not None and self._clock.now() <= opened.deadline:
                return await self._execute(opened, decision)
        status, result = await read_market(decision, symbol, model.id, self._observer, self._clock.now())
        return {"result": status, **result}

    async def _begin(self, model: Model, decisions_per_minute: int | None) -> ExternalDecision:
        now = cut_to_ms(self._clock.now())
        minute = floor_time(now, CYCLE)
        last, count = self._opened.get(model.id, (minute, 0))
        count = count if floor_time(last, CYCLE) == minute else 0
        if decisions_per_minute is not None and count >= decisions_per_minute:
            wait_s = int((minute + CYCLE - now).total_seconds()) + 1
            raise TooManyRequests(f"this key may decide {decisions_per_minute} times a minute", wait_s)
        await self._exchange.open_account(model.id)
        variant = VARIANTS[model.variant]
        view = await self._observer.view(model, variant.intervals, now, SERIES_SHOWN)
        if not view.markets:
            raise MarketUnavailable("no market has a price now")
        limits = limits_of(model, self._settings.attempt_timeout_s)
        messages = opening_messages(model.configuration.prompt or variant.prompt, limits, view)
        record = self._record_of(model, now)
        record.show(messages, now + timedelta(seconds=limits.decision_age_max_s))
        if not await record.open():  # its id is made of the time
            raise TooManyRequests("a decision of this millisecond has ended", 1)
        self._opened[model.id] = now, count + 1
        decision = self._go_on(record)
        decision.calls.publish("workflow:started", {})
        return decision

    def _record_of(self, model: Model, started_at: datetime) -> ExternalRecorder:
        shared = self._database, self._events, self._packer, self._entrants
        record = ExternalRecorder(*shared, model, started_at, self._exchange.settle)
        record.term = self._exchange.term
        return record

    def _go_on(self, record: ExternalRecorder) -> ExternalDecision:
        limits = limits_of(record.model, self._settings.attempt_timeout_s)
        calls = CallExecutor(record, self._exchange, self._observer, self._clock, self._events, limits)
        decision = self._open[record.model.id] = ExternalDecision(record, calls)
        return decision

    async def _answered_before(self, model: Model, decision: PlaceOrder) -> dict[str, Any] | None:
        """Return the first answer to the order, from the open decision or from the books; None without one.

        :raises Conflict: it was for another order
        """
        opened = self._open.get(model.id)
        if opened is not None:
            await opened.record.settle_pending()
            if (call := opened.earlier(decision.client_order_id)) is not None:
                if call.metadata["decisions"] != [decision_json(decision)]:
                    raise _other_contents(decision)
                return {"result": call.status, **call.metadata["results"][0], **self._account(model)}
        answer = await first_answer(self._database, model.id, decision.client_order_id)
        if answer is None:
            return None
        order = order_of(decision, canonical_symbol(decision.symbol)).order(model.id, UUID(int=0), 0)
        if answer.contents_digest != order.contents_digest():
            raise _other_contents(decision)
        status, result = order_outcome(answer)
        return {"result": status, **result, **self._account(model)}

    def _account(self, model: Model) -> dict[str, Any]:
        return {"account": account_json(self._exchange.account(model.id), self._exchange.marks())}

    async def _current(self, model: Model, view_id: str) -> ExternalDecision:
        decision = self._open.get(model.id)
        if decision is not None and decision.id == view_id:
            if self._clock.now() > decision.deadline:
                await self._expire(decision)
                raise ViewExpired(f"the deadline of the view {view_id} has passed; get a new one")
            if decision.record.call_count < CALLS_MAX:
                return decision
            raise ViewDecided(f"a decision has at most {CALLS_MAX} calls; hold, and get a new view")
        await self._save_ended()
        try:
            async with self._database.connection() as conn:
                invocation = await select_invocation(conn, UUID(view_id))
        except ValueError:
            invocation = None
        if invocation is None or invocation.model_id != model.id:
            raise ViewUnknown(f"{model.id} has no view {view_id[:40]!r}")
        if invocation.status == "completed":
            raise ViewDecided(f"the decision of the view {view_id} has ended; get a new one")
        raise ViewExpired(f"the deadline of the view {view_id} has passed; get a new one")

    async def _execute(self, opened: ExternalDecision, decision: Decision) -> dict[str, Any]:
        name = PLACE_ORDER if isinstance(decision, PlaceOrder) else TOOL_NAMES[type(decision)]
        number = opened.record.next_call()
        request = ToolRequest(id=str(number), name=name, arguments=msgspec.json.encode(decision).decode())
        answer = ModelAnswer(text=None, calls=(request,), message={}, model=opened.record.model.router_model_name)
        opened.calls.record_step(EXTERNAL, answer)
        result = await opened.calls.execute(number, request, decision)
        if isinstance(decision, Holding):
            await self._end(opened, "holding")
        elif not isinstance(decision, Change):
            await opened.record.save()
        return result

    async def _expire(self, decision: ExternalDecision) -> None:
        """End a decision whose deadline has passed; silence is a missed decision."""
        await decision.record.settle_pending()
        await self._end(decision, "deadline" if decision.has_decided else None, at=decision.deadline)

    async def _end(
        self, opened: ExternalDecision, ended_by: EndedBy | None, at: datetime | None = None, failure: str | None = None
    ) -> None:
        del self._open[opened.record.model.id]
        if failure is not None:
            await opened.calls.finish("failed", failure)
        elif ended_by is None:
            await opened.calls.finish("timeout", "the agent did not decide before the deadline of its view", at=at)
        else:
            await opened.calls.finish("completed", None, ended_by=ended_by, at=at)
        if opened.record.is_unsaved:
            return self._unsaved.append(opened.record)
        try:
            async with self._database.connection() as conn:
                await delete_decided_views(conn)
        except Unavailable as error:  # the end of the next decision deletes them
            _log.warning("%s: its view is not deleted yet: %s", opened.record.model.id, error)

    async def _require_season(self, model: Model) -> None:
        async with self._database.connection() as conn:
            season = await select_latest_season(conn)
        if season is not None and season.rules.has(model) and season.state(self._clock.now()) in ("ended", "closed"):
            raise SeasonOver(f"{season.title} is over; until there is another one, orders only reduce (reduceOnly)")

    def _require_lead(self) -> None:
        if self._exchange.term is None:
            raise not_trading(self._settings, None)


def _other_contents(decision: PlaceOrder) -> Conflict:
    return Conflict(f"the clientOrderId {decision.client_order_id!r} was used for another order; use a new one")
