"""The trading workflow: one run of one model, from what it sees to what is recorded of it.

A run ends in one of three ways, and each is recorded: completed, failed (with the reason) or timeout. Orders go
through the guard and carry ids made of the run's, so nothing is placed twice.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

from trader.clock import Clock, iso
from trader.domain.agents.conversation import Message, ModelAnswer, ToolRequest, Turn
from trader.domain.agents.guard import Refusal, judge
from trader.domain.agents.invocations import InvocationStatus
from trader.domain.agents.messages import (
    Outcome,
    account_json,
    failed,
    indicators_json,
    opening_messages,
    order_outcome,
    plan_outcome,
    refused,
    tool_message,
)
from trader.domain.agents.tools import BadCall, Change, Decision, FetchIndicators, Holding, decode
from trader.domain.agents.view import View
from trader.domain.exchange.orders import ExitPlan
from trader.domain.market.markets import canonical_symbol
from trader.domain.models import Model
from trader.errors import (
    InvalidInput,
    MarketUnavailable,
    OrderUndecided,
    ProviderError,
    TraderError,
    Unavailable,
)
from trader.gateways.agents.providers import Provider
from trader.services.agents.observer import Observer
from trader.services.agents.recorder import InvocationRecorder, PendingOrder
from trader.services.events import EventBus, WorkflowProgress, WorkflowType
from trader.services.exchange.protocol import Exchange
from trader.variants import VARIANTS

STEPS_MAX: Final = 10
INVOCATION_LIMIT_S: Final = 600.0
INTERRUPTED: Final = "interrupted"
CLOSING_S: Final = 1.5
"""How long a cancelled run may take to write its record."""

EndedBy = Literal["holding", "answer", "steps", "tokens"]
"""What ended a completed run: the model, by a call or by an answer without one, or one of the two limits."""

_log = logging.getLogger("trader.agents")


class InvocationLimits(NamedTuple):
    """What a run may take: tokens in all and of one answer, and seconds of real time."""

    tokens: int
    answer_tokens: int
    lasts_s: float = INVOCATION_LIMIT_S


class Workflow:
    """One run. `execute` never raises for what goes wrong in the run itself, a bug or a cancellation excepted."""

    def __init__(
        self,
        record: InvocationRecorder,
        providers: Mapping[str, Provider],
        exchange: Exchange,
        observer: Observer,
        clock: Clock,
        events: EventBus,
        bounds: InvocationLimits,
    ) -> None:
        self.record = record
        self._model: Model = record.model
        self._variant = VARIANTS[record.model.variant]
        self._providers = providers
        self._exchange = exchange
        self._observer = observer
        self._clock = clock
        self._events = events
        self.bounds = bounds
        self._texts: list[str] = []
        self._reasons: list[str] = []
        self._ended_by: EndedBy | None = None

    @property
    def response(self) -> str | None:
        """The last words of the model, and the reasons it held for."""
        return "\n\n".join([*self._texts[-1:], *self._reasons]) or None

    async def execute(self) -> None:
        """Run to the end and record it.

        :raises Unavailable: the database did not take the invocation row; nothing was done
        """
        if not await self.record.open():
            _log.info("%s has run at %s already", self._model.id, iso(self.record.invocation.started_at))
            return
        self._publish("workflow:started", {})
        async with _Closing(self), asyncio.timeout(self.bounds.lasts_s):
            self._ended_by = await self._converse()

    async def _converse(self) -> EndedBy:
        provider = self._provider()
        await self._exchange.open_account(self._model.id)
        view = await self._observer.view(self._model.id, self._variant.intervals, self._clock.now())
        messages: list[Message] = []
        if provider.is_remote:
            if not view.markets:
                raise MarketUnavailable("no market has a price now")
            messages += opening_messages(self._variant.prompt, self._variant.limits, view)
            self.record.note_messages(messages)
        tokens_left = self.bounds.tokens
        for number in range(1, STEPS_MAX + 1):
            limit = min(self.bounds.answer_tokens, tokens_left)
            answer = await self._step(provider, view, messages, number, limit)
            tokens_left -= answer.tokens_spent
            if not answer.calls:
                return _ended_without_calls(answer, limit, tokens_left)
            if await self._execute_calls(answer, messages):
                return "holding"
            if tokens_left <= 0:
                return "tokens"
        return "steps"

    def _provider(self) -> Provider:
        provider = self._providers.get(self._model.provider)
        if provider is None:
            known = ", ".join(self._providers) or "none"
            raise ProviderError(f"the provider {self._model.provider!r} is not configured; configured are: {known}")
        return provider

    async def _step(
        self, provider: Provider, view: View, messages: list[Message], number: int, answer_tokens_max: int
    ) -> ModelAnswer:
        turn = Turn(
            model=self._model,
            temperature=self._variant.temperature,
            number=number,
            view=view,
            messages=messages,
            answer_tokens_max=answer_tokens_max,
        )
        try:
            answer = await provider.answer(turn)
        except ProviderError as error:
            self.record.add_answer(error.said)
            raise
        if answer.text:
            self._texts.append(answer.text)
        messages.append(answer.message)
        step = self.record.add_step(provider.name, answer, self._clock.now())
        details = {
            "step": step.number,
            "toolNames": step.tool_names,
            "inputTokens": step.input_tokens,
            "outputTokens": step.output_tokens,
        }
        self._publish("workflow:step", details)
        return answer

    async def _execute_calls(self, answer: ModelAnswer, messages: list[Message]) -> bool:
        """Execute the calls of an answer in their order. Whether one of them ended the cycle."""
        ended = False
        for request in answer.calls:
            decision = decode(request)
            number = self.record.next_call()
            if isinstance(decision, BadCall):
                status, result = failed(decision.error)
                self.record.add_call(number, request, None, status, result, self._clock.now())
            else:
                result = await self._execute(number, request, decision)
                ended = ended or isinstance(decision, Holding)
            messages.append(tool_message(request.id, result))
        if not ended:
            await self.record.save()
        return ended

    async def _execute(self, number: int, request: ToolRequest, decision: Decision) -> dict[str, Any]:
        """Execute one call and record it. Gives what the model is told."""
        pending = PendingOrder(number, request, decision, f"{self.record.id}:{number}", self._clock.now())
        try:
            status, result = await self._outcome(decision, pending)
        except (InvalidInput, OrderUndecided) as error:
            status, result = failed(str(error))
        except TraderError as error:
            if not self.record.has_pending_order:  # else the books say later what became of the order
                status, result = failed(str(error))
                self.record.add_call(number, request, decision, status, result, self._clock.now())
            raise
        # What is awaited from here on must not come between the outcome and its record.
        self.record.add_call(number, request, decision, status, result, self._clock.now())
        if isinstance(decision, Change):
            self.record.after_order()
            await self.record.save()
            account = account_json(self._exchange.account(self._model.id), self._exchange.marks())
            return {"result": status, **result, "account": account}
        return {"result": status, **result}

    async def _outcome(self, decision: Decision, pending: PendingOrder) -> Outcome:
        if isinstance(decision, Holding):
            self._reasons.append(decision.reason)
            return "ok", {"holding": True}
        symbol = canonical_symbol(decision.symbol)
        if symbol not in self._exchange.markets:
            known = ", ".join(self._exchange.markets)
            return failed(f"There is no market {decision.symbol!r}; the markets are {known}.")
        if isinstance(decision, FetchIndicators):
            candles, computed = await self._observer.indicators(symbol, decision.interval)
            return "ok", indicators_json(symbol, decision.interval, candles[-24:], computed)
        return await self._change(decision, symbol, pending)

    async def _change(self, decision: Change, symbol: str, pending: PendingOrder) -> Outcome:
        """A decision that changes the books: through the guard, then the exchange; what it met is kept."""
        context = await self._observer.context(self._model.id, self._clock.now())
        witness, limits = self._observer.witness(context), self._variant.limits
        verdict = judge(decision, symbol, context, limits)
        if isinstance(verdict, Refusal):
            self.record.add_inputs(witness.refused(pending.number, limits))
            return refused(verdict)
        if isinstance(verdict, ExitPlan):
            refusal = await self._exchange.set_exit_plan(self._model.id, symbol, verdict)
            outcome, answered_at = plan_outcome(verdict, refusal), self._clock.now()
        else:
            await self.record.before_order(pending)
            answer = await self._exchange.place_order(verdict.order(self._model.id, self.record.id, pending.number))
            outcome, answered_at = order_outcome(answer), answer.at
        self.record.add_inputs(witness.answered(pending.number, limits, symbol, answered_at))
        return outcome

    def _publish(self, kind: WorkflowType, details: dict[str, Any]) -> None:
        told = {
            "modelId": self._model.id,
            "modelName": self._model.name,
            "modelVariant": self._model.variant.value,
            "invocationId": str(self.record.id),
            **details,
        }
        self._events.publish(WorkflowProgress(kind, self._clock.now(), told))

    async def finish(self, status: InvocationStatus, reason: str | None) -> None:
        """Close the record, write it and tell it. What cannot be written stays in the record for a later `save`."""
        self.record.close(status, reason, self.response, self._clock.now())
        try:
            await self._write(CLOSING_S if reason == INTERRUPTED else None)
        except asyncio.CancelledError:
            await self._write(CLOSING_S)  # the run had ended before the process did: the next start must not deny it
            raise
        ended = self.record.invocation
        details: dict[str, Any] = {"status": status, "steps": ended.step_count, "toolCalls": self.record.call_count}
        if reason is None:
            self._publish("workflow:complete", {**details, "endedBy": self._ended_by})
        else:
            self._publish("workflow:failed", {**details, "failureReason": reason})
        _log.log(
            logging.DEBUG if reason is None else logging.WARNING,
            "%s: %s after %d steps and %d tool calls%s",
            self._model.id,
            status,
            ended.step_count,
            self.record.call_count,
            f", ended by {self._ended_by}" if reason is None else f": {reason}",
        )

    async def _write(self, limit_s: float | None) -> None:
        """Write the closed record. After `limit_s` real seconds (None: no limit) it is left to a later `save`."""
        try:
            async with asyncio.timeout(limit_s):
                if self.record.has_pending_order:
                    with suppress(Unavailable):
                        await self._exchange.open_account(self._model.id)  # waits until the account has settled
                await self.record.save()
        except (Unavailable, TimeoutError) as error:
            _log.warning("%s: run %s is not recorded yet: %s", self._model.id, self.record.id, error)


def _ended_without_calls(answer: ModelAnswer, limit: int, tokens_left: int) -> EndedBy:
    """What ended a run whose model called no tool. :raises ProviderError: it was cut off, and decided nothing"""
    if answer.cut_by is None:
        return "answer"
    if answer.cut_by == "length" and tokens_left <= 0:
        return "tokens"
    told = (
        f"at its limit of {limit} tokens (ANSWER_TOKENS_MAX)"
        if answer.cut_by == "length"
        else "by a filter of the provider"
    )
    raise ProviderError(f"the answer was cut off {told}, before any tool call")


class _Closing:
    """Around a run: whatever ends it, its record is closed with a truthful status.

    Failures that belong to the run end here; a cancellation and a bug go on, for the owner of the task to see.
    """

    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        match error:
            case None:
                await self._workflow.finish("completed", None)
            case TimeoutError():
                await self._workflow.finish("timeout", f"the run took longer than {self._workflow.bounds.lasts_s:g} s")
            case TraderError():
                await self._workflow.finish("failed", str(error))
            case asyncio.CancelledError():
                await self._workflow.finish("failed", INTERRUPTED)
            case _:
                await self._workflow.finish("failed", f"internal error ({type(error).__name__})")
        return error is None or isinstance(error, TimeoutError | TraderError)
