"""Tool calls of an invocation: each is executed through the guard, recorded, and published."""

import asyncio
import logging
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from trader.domain.agents.conversation import ModelAnswer, ToolRequest, storable
from trader.domain.agents.guard import STALE_DECISION, Refusal, judge
from trader.domain.agents.invocations import InvocationStatus, ToolCallStatus
from trader.domain.agents.messages import (
    HELD,
    Outcome,
    account_json,
    book_json,
    failed,
    indicators_json,
    order_outcome,
    plan_outcome,
    refused,
)
from trader.domain.agents.tools import Change, Decision, FetchIndicators, FetchOrderBook, Holding, Note
from trader.domain.agents.view import VariantLimits
from trader.domain.exchange.orders import ExitPlan
from trader.domain.market.markets import canonical_symbol
from trader.errors import InvalidInput, OrderUndecided, TraderError, Unavailable
from trader.services.agents.model_warnings import INTERRUPTED
from trader.services.agents.protocols import AgentClock, AgentExchange, AgentObserver
from trader.services.agents.record import InvocationRecord, PendingOrder
from trader.services.events import EventBus, WorkflowProgress, WorkflowType

STEP_TEXT_MAX: Final = 4_000
"""Characters of a step's text that are published; the record has all of it."""

CLOSING_S: Final = 1.5
"""How long a cancelled invocation may take to write its record."""

EndedBy = Literal["holding", "answer", "steps", "tokens", "deadline"]
"""What ended a completed invocation: the model, by a call or by an answer without one, or a limit or deadline."""

_log = logging.getLogger("trader.agents")


async def read_market(
    decision: FetchIndicators | FetchOrderBook, symbol: str, account_id: str, observer: AgentObserver, now: datetime
) -> Outcome:
    """Return the outcome of a call that only reads a market."""
    if isinstance(decision, FetchIndicators):
        candles, computed = await observer.indicators(symbol, decision.interval)
        return "ok", indicators_json(symbol, decision.interval, candles[-24:], computed)
    book = observer.order_book(account_id, symbol, now)
    return failed(f"There is no price of {symbol} now.") if book is None else ("ok", book_json(book))


class CallExecutor:
    """Executes the calls of one invocation, whoever asks for them: an AI provider, a rule agent or an external agent.

    `viewed_at` is the time of the view that the next call is decided from. `is_stale`: a call came too late after it.
    """

    def __init__(
        self,
        record: InvocationRecord,
        exchange: AgentExchange,
        observer: AgentObserver,
        clock: AgentClock,
        events: EventBus,
        limits: VariantLimits,
        restriction: str | None = None,
    ) -> None:
        self._record = record
        self._model = record.model
        self._exchange = exchange
        self._observer = observer
        self._clock = clock
        self._events = events
        self._restriction = restriction
        self._limits = limits
        self.viewed_at = record.invocation.started_at
        self.is_stale = False
        self.has_traded = False
        self.reasons: list[str] = []
        self._text: str | None = None

    def record_step(self, provider: str, answer: ModelAnswer) -> None:
        """Record an answer that has come, and publish it."""
        if answer.text:
            self._text = answer.text
        step = self._record.add_step(provider, answer, self._clock.now())
        details = {
            "step": step.number,
            "toolNames": step.tool_names,
            "inputTokens": step.input_tokens,
            "outputTokens": step.output_tokens,
            "text": None if answer.text is None else storable(answer.text)[:STEP_TEXT_MAX],
        }
        self.publish("workflow:step", details)

    async def execute(self, number: int, request: ToolRequest, decision: Decision) -> dict[str, Any]:
        """Execute one call and record it. Return the result that the model sees."""
        pending = PendingOrder(number, request, decision, self._clock.now())
        try:
            status, result = await self._outcome(decision, pending)
        except (InvalidInput, OrderUndecided) as error:
            status, result = failed(str(error))
        except TraderError as error:
            if not self._record.has_pending_order:  # else its outcome is read from the books later
                status, result = failed(str(error))
                self.record_call(number, request, decision, status, result)
            raise
        # What is awaited from here on must not come between the outcome and its record.
        self.record_call(number, request, decision, status, result)
        if isinstance(decision, Change):
            self.has_traded |= status == "ok"
            self._record.after_order()
            await self._record.save()
            account = account_json(self._exchange.account(self._model.id), self._exchange.marks())
            return {"result": status, **result, "account": account}
        return {"result": status, **result}

    def record_call(
        self,
        number: int,
        request: ToolRequest,
        decision: Decision | None,
        status: ToolCallStatus,
        result: dict[str, Any],
    ) -> None:
        """Record a call that has ended, and publish it; what was fetched is too long for that."""
        is_fetched = isinstance(decision, FetchIndicators | FetchOrderBook) and status == "ok"
        call = self._record.add_call(number, request, decision, status, result, self._clock.now())
        details = {
            "number": number,
            "callType": call.type,
            "status": status,
            "decisions": call.metadata["decisions"],
            "results": [] if is_fetched else call.metadata["results"],
        }
        self.publish("workflow:call", details)

    async def _outcome(self, decision: Decision, pending: PendingOrder) -> Outcome:
        if isinstance(decision, Holding):
            self.reasons.append(decision.reason)
            return HELD
        if isinstance(decision, Note):
            return "ok", {"noted": True}
        symbol = canonical_symbol(decision.symbol)
        if symbol not in self._exchange.markets:
            known = ", ".join(self._exchange.markets)
            return failed(f"There is no market {decision.symbol!r}; the markets are {known}.")
        if isinstance(decision, FetchIndicators | FetchOrderBook):
            return await read_market(decision, symbol, self._model.id, self._observer, self._clock.now())
        return await self._change(decision, symbol, pending)

    async def _change(self, decision: Change, symbol: str, pending: PendingOrder) -> Outcome:
        """Pass a decision that changes the books through the guard to the exchange, and record its inputs."""
        context = await self._observer.risk_context(self._model.id, self._clock.now())
        context = msgspec.structs.replace(context, viewed_at=self.viewed_at, restriction=self._restriction)
        call = self._observer.call_recorder(pending.number, self._limits, context)
        verdict = judge(decision, symbol, context, self._limits)
        if isinstance(verdict, Refusal):
            self.is_stale |= verdict.rule == STALE_DECISION
            self._record.add_inputs(call.refused())
            return refused(verdict)
        if isinstance(verdict, ExitPlan):
            refusal = await self._exchange.set_exit_plan(self._model.id, symbol, verdict)
            outcome, answered_at = plan_outcome(verdict, refusal), self._clock.now()
        else:
            await self._record.before_order(pending)
            answer = await self._exchange.place_order(verdict.order(self._model.id, self._record.id, pending.number))
            outcome, answered_at = order_outcome(answer), answer.at
        self._record.add_inputs(call.answered(symbol, answered_at))
        return outcome

    def publish(self, kind: WorkflowType, details: dict[str, Any]) -> None:
        """Publish what the invocation does, with its model."""
        model = {
            "modelId": self._model.id,
            "modelName": self._model.name,
            "modelVariant": self._model.variant.value,
            "invocationId": str(self._record.id),
        }
        self._events.publish(WorkflowProgress(kind, self._clock.now(), model | details))

    async def finish(
        self,
        status: InvocationStatus,
        reason: str | None,
        *,
        ended_by: EndedBy | None = None,
        at: datetime | None = None,
    ) -> None:
        """Close the record, write it and publish the end, now or at `at`.

        What cannot be written is left to a later `save`.
        """
        response = "\n\n".join(filter(None, [self._text, *self.reasons])) or None
        self._record.close(status, reason, response, at or self._clock.now())
        try:
            await self._write(CLOSING_S if reason == INTERRUPTED else None)
        except asyncio.CancelledError:
            await self._write(CLOSING_S)  # the invocation had ended before the process did: its rows must say so
            raise
        steps, calls = self._record.invocation.step_count, self._record.call_count
        details: dict[str, Any] = {"status": status, "steps": steps, "toolCalls": calls}
        if reason is None:
            self.publish("workflow:complete", {**details, "endedBy": ended_by})
            level, end = logging.DEBUG, f", ended by {ended_by}"
        else:
            self.publish("workflow:failed", {**details, "failureReason": reason})
            level, end = logging.WARNING, f": {reason}"
        _log.log(level, "%s: %s after %d steps and %d tool calls%s", self._model.id, status, steps, calls, end)

    async def _write(self, limit_s: float | None) -> None:
        """Write the closed record. After `limit_s` real seconds (None: no limit) it is left to a later `save`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._record.save()
        except (Unavailable, TimeoutError) as error:
            _log.warning("%s: invocation %s is not recorded yet: %s", self._model.id, self._record.id, error)
