"""Tool calls of an invocation: each is executed through the guard, recorded, and published."""

import asyncio
import logging
from datetime import datetime
from typing import Any, Final

from trader.agents.domain.conversation import ModelAnswer, ToolRequest, storable
from trader.agents.domain.guard import STALE_DECISION
from trader.agents.domain.invocations import INTERRUPTED, EndedBy, InvocationStatus, ToolCallStatus
from trader.agents.domain.messages import account_json, failed
from trader.agents.domain.tools import Change, Decision, FetchIndicators, FetchOrderBook, Holding
from trader.agents.execute import InvocationEnvironment, execute
from trader.agents.record import InvocationRecord, StartedCall
from trader.core.errors import TraderError, Unavailable
from trader.core.events import EventBus, WorkflowProgress, WorkflowType

STEP_TEXT_MAX: Final = 4_000
"""Characters of a step's text that are published; the record keeps all of it."""

CLOSING_S: Final = 1.5
"""How long a canceled invocation may take to write its record."""

_log = logging.getLogger("trader.agents")


class CallExecutor:
    """Executes the calls of one invocation, whether they come from an AI provider, a rule agent or an external agent.

    `is_stale`: a call came too long after the view it was based on. `has_valid_call`: a call was executed, or refused
    by the guard or the exchange.
    """

    def __init__(self, record: InvocationRecord, environment: InvocationEnvironment, events: EventBus) -> None:
        self._record = record
        self._model = record.model
        self._environment = environment
        self._events = events
        self.is_stale = False
        self.has_traded = False
        self.has_valid_call = False
        self.reasons: list[str] = []
        self._text: str | None = None

    def record_step(self, provider: str, answer: ModelAnswer) -> None:
        """Record an answer, and publish it."""
        if answer.text:
            self._text = answer.text
        step = self._record.add_step(provider, answer, self._environment.now())
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
        environment = self._environment
        self._record.call = StartedCall(number, request, decision, environment.now())
        try:
            status, result = await execute(decision, environment)
        except TraderError as error:
            if not self._record.has_pending_order:  # otherwise its outcome is read from the books later
                status, result = failed(str(error))
                self.record_call(number, request, decision, status, result)
            raise
        # From here on, nothing may be awaited between the outcome and its record.
        self._record.add_inputs(environment.take_inputs())
        self.record_call(number, request, decision, status, result)
        if isinstance(decision, Holding):
            self.reasons.append(decision.reason)
        self.is_stale |= result.get("rule") == STALE_DECISION
        if isinstance(decision, Change):
            self.has_traded |= status == "ok"
            self._record.after_order()
            await self._record.save()
            return {"result": status, **result, "account": account_json(environment.account(), environment.marks())}
        return {"result": status, **result}

    def record_call(
        self,
        number: int,
        request: ToolRequest,
        decision: Decision | None,
        status: ToolCallStatus,
        result: dict[str, Any],
    ) -> None:
        """Record a finished call, and publish it without fetched data, which is too long."""
        is_fetched = isinstance(decision, FetchIndicators | FetchOrderBook) and status == "ok"
        call = self._record.add_call(number, request, decision, status, result, self._environment.now())
        self.has_valid_call |= status != "failed"
        details = {
            "number": number,
            "callType": call.type,
            "status": status,
            "decisions": call.metadata["decisions"],
            "results": [] if is_fetched else call.metadata["results"],
        }
        self.publish("workflow:call", details)

    def publish(self, kind: WorkflowType, details: dict[str, Any]) -> None:
        """Publish an event of the invocation, with its model."""
        model = {
            "modelId": self._model.id,
            "modelName": self._model.name,
            "modelVariant": self._model.variant.value,
            "invocationId": str(self._record.id),
        }
        self._events.publish(WorkflowProgress(kind, self._environment.now(), model | details))

    async def finish(
        self, status: InvocationStatus, ended_by: EndedBy, reason: str | None = None, at: datetime | None = None
    ) -> None:
        """Close the record, write it and publish the end, now or at `at`. `reason` is why it failed.

        A failed write is left to a later `save`.
        """
        response = "\n\n".join(filter(None, [self._text, *self.reasons])) or None
        self._record.close(status, ended_by, reason, response, at or self._environment.now())
        try:
            await self._write(CLOSING_S if reason == INTERRUPTED else None)
        except asyncio.CancelledError:
            await self._write(CLOSING_S)  # the invocation ended before the process did, and its rows must say so
            raise
        steps, calls = self._record.invocation.step_count, self._record.call_count
        details: dict[str, Any] = {"status": status, "steps": steps, "toolCalls": calls}
        if reason is None:
            self.publish("workflow:complete", {**details, "endedBy": ended_by})
            level, end = logging.DEBUG, f", ended by {ended_by}"
        else:
            self.publish("workflow:failed", {**details, "endedBy": ended_by, "failureReason": reason})
            level, end = logging.WARNING, f": {reason}"
        _log.log(level, "%s: %s after %d steps and %d tool calls%s", self._model.id, status, steps, calls, end)

    async def _write(self, limit_s: float | None) -> None:
        """Write the closed record. After `limit_s` real seconds (None: no limit) it is left to a later `save`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._record.save()
        except (Unavailable, TimeoutError) as error:
            _log.warning("%s: invocation %s is not recorded yet: %s", self._model.id, self._record.id, error)
