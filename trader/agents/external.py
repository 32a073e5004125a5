"""Decisions of external agents: a view opens one, its calls are executed, and `holding` or the deadline ends it.

Each is an invocation like any other. The database keeps open decisions, so their deadlines survive a restart.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Literal, NoReturn
from uuid import UUID, uuid4

from msgspec import to_builtins

from trader.agents.calls import CallExecutor
from trader.agents.desk import AccountState, AgentDesk, OpenDecision, view_expired
from trader.agents.domain.invocations import EndedBy, ToolCall
from trader.agents.domain.models import CYCLE, EXTERNAL, Declared, Model
from trader.agents.domain.prompt import opening_messages
from trader.agents.domain.tools import (
    Change,
    Decision,
    FetchIndicators,
    FetchOrderBook,
    Holding,
    PlaceOrder,
    answer_of,
    request_of,
)
from trader.agents.domain.view import Shown
from trader.agents.environment import ServiceEnvironment
from trader.agents.execute import execute
from trader.agents.observer import Observer
from trader.agents.recorder import ExternalRecorder, RecorderServices
from trader.agents.services import AgentServices
from trader.agents.sql.entrants import select_entrants
from trader.agents.sql.external import delete_decided_views, select_open_views
from trader.agents.sql.invocations import select_invocation, select_steps, select_tool_calls
from trader.agents.sql.models import update_model_configuration
from trader.agents.variants import VARIANTS, limits_of
from trader.core.clock import Clock, cut_to_ms, floor_time
from trader.core.errors import (
    MarketUnavailable,
    TooManyRequests,
    Unavailable,
    ViewDecided,
    ViewUnknown,
)
from trader.exchange.domain.halts import OperatorCommand, Verb
from trader.exchange.domain.orders import OrderAnswer
from trader.exchange.idempotent_orders import first_answer
from trader.exchange.protocol import not_trading
from trader.exchange.sql.halts import insert_halting_command, select_open_command
from trader.market.domain.markets import traded_symbol

_log = logging.getLogger("trader.agents")


class ExternalDecision(OpenDecision):
    """An open decision with the executor of its calls. Its rows keep it beyond the process."""

    record: ExternalRecorder

    def __init__(self, record: ExternalRecorder, calls: CallExecutor, clock: Clock) -> None:
        super().__init__(record, record.messages, record.deadline)
        self.calls = calls
        self._clock = clock
        left = min(self.deadline - clock.now(), self.deadline - self.opened_at)  # the clock may have been set back
        self._ends_s = clock.steady_s() + left.total_seconds()

    @property
    def is_over(self) -> bool:
        """Whether its deadline has passed, wherever the clock was set since it was opened or resumed."""
        return self._clock.steady_s() > self._ends_s

    @property
    def has_decided(self) -> bool:
        """Whether it has placed any order, refused ones and one whose answer is not known included."""
        changes = ("CREATE_POSITION", "CLOSE_POSITION", "UPDATE_EXIT_PLAN")
        return self.record.has_pending_order or any(call.type in changes for call in self.record.calls)

    async def execute(self, decision: Decision) -> dict[str, Any]:
        """Execute a call and record it, as a step with the tokens and cost that the agent declares for its decision.

        Return the result shown to the agent.
        """
        number = self.record.next_call()
        request = request_of(number, decision)
        self.calls.record_step(EXTERNAL, answer_of(request, decision, self.record.model.router_model_name))
        return await self.calls.execute(number, request, decision)


class ExternalAgents(AgentDesk[ExternalDecision]):
    """The desk of a service: owns the open decisions. Only the leader has any."""

    def __init__(self, services: AgentServices, observer: Observer, recorders: RecorderServices) -> None:
        super().__init__(services.settings)
        self._database = services.database
        self._exchange = services.exchange
        self._clock = services.clock
        self._events = services.events
        self._models = services.models
        self._require_season = services.require_season
        self._observer = observer
        self._recorders = recorders
        self._open: dict[str, ExternalDecision] = {}
        self._opened: dict[str, tuple[datetime, int]] = {}  # the last minute with decisions, and their number
        self._cycles: dict[str, datetime] = {}  # the last cycle that was due
        self._unsaved: list[ExternalRecorder] = []

    # --- start and end ------------------------------------------------------------------------------------------------

    async def start(self, models: Mapping[str, Model]) -> None:
        """Resume the open decisions. May be called again after `close`."""
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
        """Forget the open decisions and the ends not yet saved in this term: the next leader resumes them."""
        self._open.clear()
        self._unsaved.clear()
        self._cycles.clear()

    async def begin_cycle(self, due: Iterable[Model], now: datetime) -> None:
        """End the decisions whose deadline has passed, and count a whole cycle without a decision as missed.

        `due` holds the agents whose cadence falls into this cycle, which starts some milliseconds after its time. A
        process's first cycle is seldom whole, so counting starts there.

        :raises Unavailable: the database did not confirm it
        """
        for model_id in [*self._open]:
            async with self._locks[model_id]:
                if (decision := self._open.get(model_id)) is not None and decision.is_over:
                    await self._expire(decision)
        missed = []
        for model in due:
            before, begun = self._cycles.get(model.id, now), floor_time(now, model.configuration.cadence)
            self._cycles[model.id] = begun if model.id in self._cycles else now
            is_whole = begun - before >= model.configuration.cadence
            if is_whole and (model.id not in self._opened or self._opened[model.id][0] < before):
                missed.append(model)
        if missed:
            await self._recorders.entrants.count_missed(missed, now)
        await self._save_ended()

    async def _save_ended(self) -> None:
        """Save the ends of decisions that the database did not confirm."""
        for record in [*self._unsaved]:
            await record.save()
            self._unsaved = [each for each in self._unsaved if each is not record]

    # --- calls of agents ----------------------------------------------------------------------------------------------

    async def agent(self, account_id: str) -> Model:
        if account_id not in self._models.by_id:  # added by a command since the last cycle
            await self._models.reload()
        if self._exchange.term is not None and account_id not in self._exchange.accounts:
            await self._exchange.open_account(account_id)
        return self._models.by_id[account_id]

    def account(self, model: Model) -> AccountState:
        account, exchange = self._exchange.account(model.id), self._exchange
        return account, exchange.marks(), exchange.markets, account.id in exchange.accounts

    async def cancel_order(self, model: Model, order_id: str) -> OrderAnswer:
        return await self._exchange.cancel_order(model.id, order_id)

    @asynccontextmanager
    async def _turn(self, model: Model) -> AsyncIterator[None]:
        """Wait until no other call of the agent is in progress, and keep the clock from advancing meanwhile.

        :raises Unavailable: another process leads
        """
        self._require_lead()
        async with self._locks[model.id], self._clock.busy():
            yield

    async def end(self, model: Model, view_id: str, failure: str | None = None) -> None:
        """End the decision on this view, if it is open. `failure` says why there was no answer."""
        async with self._locks[model.id], self._clock.busy():
            opened = self._open.get(model.id)
            if opened is not None and opened.id == view_id:
                await opened.record.settle_pending()
                await self._end(opened, "answer" if failure is None else None, failure=failure)

    async def declare(self, model: Model, name: str, declared: Declared) -> Model:
        """Set the agent's declaration about itself. A changed declaration makes its next decision a new entrant's.

        :raises Unavailable: another process leads, or the database does not confirm it
        """
        self._require_lead()
        if (model.router_model_name, model.configuration.declared) != (name, declared):
            async with self._database.transaction() as conn:
                await update_model_configuration(conn, model.id, {"declared": to_builtins(declared)}, name)
            await self._models.reload()
        return self._models.by_id[model.id]

    async def operate(self, model: Model, verb: Literal[Verb.HALT, Verb.FLATTEN], reason: str) -> OperatorCommand:
        """Write a command for the agent's account, which the leader executes like an operator's.

        Repeated calls return the same command until it is executed.

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

    async def _look(self, model: Model, decision: FetchIndicators | FetchOrderBook) -> dict[str, Any]:
        traded_symbol(decision.symbol, self._exchange.markets)
        status, result = await execute(decision, self._environment_of(self._record_of(model, self._clock.now())))
        return {"result": status, **result}

    def _current(self, model: Model) -> ExternalDecision | None:
        return self._open.get(model.id)

    async def _goes_on(self, opened: ExternalDecision) -> bool:
        if opened.is_over:
            await self._expire(opened)
            return False
        await opened.record.require_term()  # another leader may have executed an order on it
        return True

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
        view = await self._observer.view(model, Shown(variant.intervals), now)
        if not view.markets:
            raise MarketUnavailable("no market has a price now")
        limits = limits_of(model, self._settings.attempt_timeout_s)
        prompt, entries = model.configuration.prompt or variant.prompt, variant.agent().entries(view)
        messages = opening_messages(prompt, limits, view, entries, is_lean=False)
        record = self._record_of(model, now)
        record.show(messages, now + timedelta(seconds=limits.decision_age_max_s))
        if not await record.open():  # its id is derived from the time
            raise TooManyRequests("a decision opened in this millisecond has already ended", 1)
        self._opened[model.id] = now, count + 1
        decision = self._go_on(record)
        decision.calls.publish("workflow:started", {})
        return decision

    def _record_of(self, model: Model, started_at: datetime) -> ExternalRecorder:
        record = ExternalRecorder(self._recorders, model, started_at)
        record.term = self._exchange.term
        return record

    def _go_on(self, record: ExternalRecorder) -> ExternalDecision:
        calls = CallExecutor(record, self._environment_of(record), self._events)
        decision = self._open[record.model.id] = ExternalDecision(record, calls, self._clock)
        return decision

    def _environment_of(self, record: ExternalRecorder) -> ServiceEnvironment:
        limits = limits_of(record.model, self._settings.attempt_timeout_s)
        return ServiceEnvironment(record, self._exchange, self._observer, self._clock, limits)

    async def _first_answer(self, model: Model, order: PlaceOrder) -> ToolCall | OrderAnswer | None:
        opened, chosen = self._open.get(model.id), order.client_order_id or ""
        if opened is not None:
            await opened.record.settle_pending()
            if (call := opened.earlier(chosen)) is not None:
                return call
        return await first_answer(self._database, model.id, chosen)

    async def _refuse_view(self, model: Model, view_id: str | None) -> NoReturn:
        await self._save_ended()
        try:
            async with self._database.connection() as conn:
                invocation = await select_invocation(conn, UUID(view_id or ""))
        except ValueError:
            invocation = None
        if invocation is None or invocation.model_id != model.id:
            raise ViewUnknown(f"{model.id} has no view {(view_id or '')[:40]!r}")
        if invocation.status == "completed":
            raise ViewDecided(f"the decision of the view {view_id} has ended; get a new one")
        raise view_expired(view_id)

    async def _execute(self, opened: ExternalDecision, decision: Decision) -> dict[str, Any]:
        if isinstance(decision, PlaceOrder) and not decision.reduce_only:
            await self._require_season(opened.record.model)
        await opened.record.settle_pending()
        result = await opened.execute(decision)
        if isinstance(decision, Holding):
            await self._end(opened, "holding")
        elif not isinstance(decision, Change):
            await opened.record.save()
        return result

    async def _expire(self, opened: ExternalDecision) -> None:
        """End a decision whose deadline has passed; silence counts as a missed decision."""
        await opened.record.settle_pending()
        await self._end(opened, "deadline" if opened.has_decided else None, at=opened.deadline)

    async def _end(
        self, opened: ExternalDecision, ended_by: EndedBy | None, at: datetime | None = None, failure: str | None = None
    ) -> None:
        if self._open.get(opened.record.model.id) is opened:  # else this process has lost its lock in the meantime
            del self._open[opened.record.model.id]
        if failure is not None:
            await opened.calls.finish("failed", "error", failure)
        elif ended_by is None:
            await opened.calls.finish(
                "timeout", "timeout", "the agent did not decide before the deadline of its view", at=at
            )
        else:
            await opened.calls.finish("completed", ended_by, at=at)
        if opened.record.is_unsaved:
            if opened.record.term == self._exchange.term:  # else the next leader ends it, and no save may succeed
                self._unsaved.append(opened.record)
            return
        try:
            async with self._database.connection() as conn:
                await delete_decided_views(conn)
        except Unavailable as error:  # the end of the next decision deletes them
            _log.warning("%s: its view is not deleted yet: %s", opened.record.model.id, error)

    def _require_lead(self) -> None:
        if self._exchange.term is None:
            raise not_trading(self._settings, None)
