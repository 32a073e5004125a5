"""The trading workflow: one invocation of a model, from its view of the market to the record of what it did.

An invocation ends in one of three ways, and each is recorded: completed, failed (with the reason) or timeout. Orders
pass the guard and carry ids derived from the invocation's, so nothing is placed twice.
"""

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import msgspec

from trader.clock import iso
from trader.domain.agents.conversation import ModelAnswer, ToolRequest, refusal_in, storable
from trader.domain.agents.guard import STALE_DECISION, Refusal, judge
from trader.domain.agents.invocations import InvocationStatus, ToolCallStatus
from trader.domain.agents.messages import (
    Outcome,
    account_json,
    failed,
    indicators_json,
    order_outcome,
    plan_outcome,
    refused,
    tool_message,
)
from trader.domain.agents.tools import ORDER_TOOLS, BadCall, Change, Decision, FetchIndicators, Holding, decode
from trader.domain.exchange.orders import ExitPlan
from trader.domain.market.markets import canonical_symbol
from trader.domain.models import Model
from trader.errors import (
    InvalidInput,
    OrderUndecided,
    ProviderError,
    TraderError,
    Unavailable,
)
from trader.gateways.agents.providers import Provider
from trader.services.agents.conversation import Conversation
from trader.services.agents.model_warnings import INTERRUPTED
from trader.services.agents.protocols import AgentClock, AgentExchange, AgentObserver
from trader.services.agents.record import InvocationRecord, PendingOrder
from trader.services.events import EventBus, WorkflowProgress, WorkflowType
from trader.variants import VARIANTS

STEPS_MAX: Final = 10
ANSWER_TOKENS_MIN: Final = 256
"""A model is not asked again when the tokens of its invocation leave less for the answer."""

STEP_TEXT_MAX: Final = 4_000
"""Characters of a step's text that are published; the record has all of it."""

INVOCATION_LIMIT_S: Final = 600.0
CLOSING_S: Final = 1.5
"""How long a cancelled invocation may take to write its record."""

HOLDING_BESIDE_ORDER: Final = Refusal(
    "holding",
    "An answer either places orders or holds. The other calls of this answer were executed, so do not repeat them: "
    "look at their results, then call `holding` alone to end the cycle.",
)

EndedBy = Literal["holding", "answer", "steps", "tokens"]
"""What ended a completed invocation: the model, by a call or by an answer without one, or one of the two limits."""

_log = logging.getLogger("trader.agents")


class InvocationLimits(NamedTuple):
    """Limits of one invocation: its tokens, the tokens of one answer, and seconds of real time.

    `is_capped`: the tokens are what a budget has left, so even the first prompt must fit into them.

    `thinks_until` is the time of the market beyond which nobody waits for a model that thinks: the end of a recording;
    None: a replay stands still while models think.
    """

    tokens: int
    answer_tokens: int
    seconds: float = INVOCATION_LIMIT_S
    thinks_until: datetime | None = None
    is_capped: bool = False


class Workflow:
    """One invocation. `execute` raises only for a bug, a cancellation, or a database unavailable at the start."""

    def __init__(
        self,
        record: InvocationRecord,
        providers: Mapping[str, Provider],
        exchange: AgentExchange,
        observer: AgentObserver,
        clock: AgentClock,
        events: EventBus,
        limits: InvocationLimits,
        restriction: str | None = None,
    ) -> None:
        self._record = record
        self._model: Model = record.model
        self._variant = VARIANTS[record.model.variant]
        self._providers = providers
        self._exchange = exchange
        self._observer = observer
        self._clock = clock
        self._events = events
        self._limits = limits
        self._restriction = restriction
        self._conversation: Conversation
        self._is_stale = False
        self.is_prompt_cut = False
        self._texts: list[str] = []
        self._reasons: list[str] = []

    async def execute(self) -> None:
        """Carry out the invocation to its end and record it.

        :raises Unavailable: the database did not take the invocation row; nothing was done
        """
        if not await self._record.open():
            _log.info("%s already has an invocation at %s", self._model.id, iso(self._record.invocation.started_at))
            return
        self._publish("workflow:started", {})
        try:
            async with asyncio.timeout(self._limits.seconds):
                ended_by = await self._converse()
        except TimeoutError:
            await self._finish("timeout", f"the invocation took longer than {self._limits.seconds:g} s")
        except TraderError as error:
            await self._finish("failed", str(error))
        except asyncio.CancelledError:
            await self._finish("failed", INTERRUPTED)
            raise
        except BaseException as error:
            await self._finish("failed", f"internal error ({type(error).__name__})")
            raise
        else:
            await self._finish("completed", None, ended_by)

    async def _converse(self) -> EndedBy:
        provider = self._provider()
        await self._exchange.open_account(self._model.id)
        talk = self._conversation = Conversation(
            self._record,
            provider,
            self._observer,
            self._clock,
            self._limits.seconds,
            self._restriction,
            thinks_until=self._limits.thinks_until,
            tokens=self._limits.tokens,
        )
        await talk.open()
        answer_tokens = self._model.configuration.answer_tokens_max(self._limits.answer_tokens)
        for number in range(1, STEPS_MAX + 1):
            tokens_for_answer = talk.tokens_left - talk.expected_tokens()
            if tokens_for_answer < ANSWER_TOKENS_MIN:
                if number > 1:
                    return "tokens"
                if self._limits.is_capped:
                    raise ProviderError(
                        f"its budget leaves {talk.tokens_left} tokens, too few for a prompt of about "
                        f"{talk.expected_tokens()} and an answer"
                    )
            limit = min(answer_tokens, max(ANSWER_TOKENS_MIN, tokens_for_answer))
            answer = await self._step(provider, number, limit)
            if talk.tokens_left > 0 and talk.correct(answer):
                continue
            talk.add(answer.message)
            if not answer.calls:
                is_last = talk.tokens_left <= 0 or limit < answer_tokens
                return _ended_without_calls(answer, limit, is_last=is_last)
            if await self._execute_calls(answer):
                return "holding"
            if talk.tokens_left <= 0:
                return "tokens"
            if self._is_stale and not talk.was_renewed:
                await talk.renew_view()
        return "steps"

    def _provider(self) -> Provider:
        provider = self._providers.get(self._model.provider)
        if provider is None:
            known = ", ".join(self._providers) or "none"
            raise ProviderError(f"the provider {self._model.provider!r} is not configured; configured are: {known}")
        return provider

    async def _step(self, provider: Provider, number: int, answer_tokens_max: int) -> ModelAnswer:
        answer = await self._conversation.ask(number, answer_tokens_max)
        self.is_prompt_cut = self._conversation.is_prompt_cut
        if answer.text:
            self._texts.append(answer.text)
        step = self._record.add_step(provider.name, answer, self._clock.now())
        details = {
            "step": step.number,
            "toolNames": step.tool_names,
            "inputTokens": step.input_tokens,
            "outputTokens": step.output_tokens,
            "text": None if answer.text is None else storable(answer.text)[:STEP_TEXT_MAX],
        }
        self._publish("workflow:step", details)
        return answer

    async def _execute_calls(self, answer: ModelAnswer) -> bool:
        """Execute the calls of an answer in order. Return whether one of them ended the cycle."""
        ended = False
        has_order = any(request.name in ORDER_TOOLS for request in answer.calls)
        for request in answer.calls:
            decision = decode(request)
            number = self._record.next_call()
            if isinstance(decision, BadCall):
                status, result = failed(decision.error)
                self._record_call(number, request, None, status, result)
            elif isinstance(decision, Holding) and has_order:
                status, result = refused(HOLDING_BESIDE_ORDER)
                self._record_call(number, request, decision, status, result)
            else:
                result = await self._execute(number, request, decision)
                ended = ended or isinstance(decision, Holding)
            self._conversation.add(tool_message(request.id, result))
        if answer.calls_left_out:
            done = len(answer.calls)
            note = f"Of the {done + answer.calls_left_out} calls of this answer only the first {done} were executed"
            _log.warning("%s: %s", self._model.id, note)
            self._conversation.add_note(f"{note}. Repeat the others, or call `holding`.")
            ended = False
        if not ended:
            await self._record.save()
        return ended

    async def _execute(self, number: int, request: ToolRequest, decision: Decision) -> dict[str, Any]:
        """Execute one call and record it. Return the result that the model sees."""
        pending = PendingOrder(number, request, decision, self._clock.now())
        try:
            status, result = await self._outcome(decision, pending)
        except (InvalidInput, OrderUndecided) as error:
            status, result = failed(str(error))
        except TraderError as error:
            if not self._record.has_pending_order:  # else its outcome is read from the books later
                status, result = failed(str(error))
                self._record_call(number, request, decision, status, result)
            raise
        # What is awaited from here on must not come between the outcome and its record.
        self._record_call(number, request, decision, status, result)
        if isinstance(decision, Change):
            self._conversation.has_traded |= status == "ok"
            self._record.after_order()
            await self._record.save()
            account = account_json(self._exchange.account(self._model.id), self._exchange.marks())
            return {"result": status, **result, "account": account}
        return {"result": status, **result}

    def _record_call(
        self,
        number: int,
        request: ToolRequest,
        decision: Decision | None,
        status: ToolCallStatus,
        result: dict[str, Any],
    ) -> None:
        """Record a call that has ended, and publish it; the indicators that were fetched are too long for that."""
        call = self._record.add_call(number, request, decision, status, result, self._clock.now())
        details = {
            "number": number,
            "callType": call.type,
            "status": status,
            "decisions": call.metadata["decisions"],
            "results": [] if isinstance(decision, FetchIndicators) and status == "ok" else call.metadata["results"],
        }
        self._publish("workflow:call", details)

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
        """Pass a decision that changes the books through the guard to the exchange, and record its inputs."""
        limits = self._variant.limits
        context = await self._observer.risk_context(self._model.id, self._clock.now())
        context = msgspec.structs.replace(context, viewed_at=self._conversation.view.at, restriction=self._restriction)
        call = self._observer.call_recorder(pending.number, limits, context)
        verdict = judge(decision, symbol, context, limits)
        if isinstance(verdict, Refusal):
            self._is_stale |= verdict.rule == STALE_DECISION
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

    def _publish(self, kind: WorkflowType, details: dict[str, Any]) -> None:
        model = {
            "modelId": self._model.id,
            "modelName": self._model.name,
            "modelVariant": self._model.variant.value,
            "invocationId": str(self._record.id),
        }
        self._events.publish(WorkflowProgress(kind, self._clock.now(), model | details))

    async def _finish(self, status: InvocationStatus, reason: str | None, ended_by: EndedBy | None = None) -> None:
        """Close the record, write it and publish the end. What cannot be written is left to a later `save`."""
        response = "\n\n".join([*self._texts[-1:], *self._reasons]) or None
        self._record.close(status, reason, response, self._clock.now())
        try:
            await self._write(CLOSING_S if reason == INTERRUPTED else None)
        except asyncio.CancelledError:
            await self._write(CLOSING_S)  # the invocation had ended before the process did: its rows must say so
            raise
        steps, calls = self._record.invocation.step_count, self._record.call_count
        details: dict[str, Any] = {"status": status, "steps": steps, "toolCalls": calls}
        if reason is None:
            self._publish("workflow:complete", {**details, "endedBy": ended_by})
            level, end = logging.DEBUG, f", ended by {ended_by}"
        else:
            self._publish("workflow:failed", {**details, "failureReason": reason})
            level, end = logging.WARNING, f": {reason}"
        _log.log(level, "%s: %s after %d steps and %d tool calls%s", self._model.id, status, steps, calls, end)

    async def _write(self, limit_s: float | None) -> None:
        """Write the closed record. After `limit_s` real seconds (None: no limit) it is left to a later `save`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._record.save()
        except (Unavailable, TimeoutError) as error:
            _log.warning("%s: invocation %s is not recorded yet: %s", self._model.id, self._record.id, error)


def _ended_without_calls(answer: ModelAnswer, limit: int, *, is_last: bool) -> EndedBy:
    """Return what ended an invocation whose model called no tool. `is_last`: there were no tokens for more than that.

    :raises ProviderError: it refused to answer, or the answer was cut off before it decided anything
    """
    if (refusal := refusal_in(answer)) is not None:
        raise ProviderError(f"the model refused to answer: {refusal}")
    if answer.cut_by is None:
        return "answer"
    if answer.cut_by == "length" and is_last:
        return "tokens"
    if answer.cut_by == "length":
        cause = f"at its limit of {limit} tokens (ANSWER_TOKENS_MAX)"
    else:
        cause = "by a filter of the provider"
    raise ProviderError(f"the answer was cut off {cause}, before any tool call")
