"""The trading workflow: one invocation of a model, from its view of the market to the record of its actions.

An invocation ends in one of three ways, and each is recorded: completed, failed (with the reason) or timeout. One in
which an AI model made no valid call has failed. Orders pass the guard and carry ids derived from the invocation's id,
so none is placed twice.
"""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Final

from trader.agents.calls import CallExecutor
from trader.agents.conversation import Conversation, InvocationLimits
from trader.agents.domain.as_written import readable, with_calls_of_text
from trader.agents.domain.conversation import ModelAnswer, refusal_in
from trader.agents.domain.guard import GuardRefusal
from trader.agents.domain.invocations import INTERRUPTED, EndedBy
from trader.agents.domain.messages import failed, refused
from trader.agents.domain.models import Model
from trader.agents.domain.tools import CALLS_MAX, ORDER_TOOLS, RECORDED_TOOLS, TOOLS, BadCall, Holding, decode
from trader.agents.execute import InvocationEnvironment
from trader.agents.providers.provider import Provider, answer_tokens_min, own_answer_limit
from trader.agents.record import InvocationRecord
from trader.core.clock import iso
from trader.core.errors import NoUsableCall, ProviderError, TraderError
from trader.core.events import EventBus

STEPS_MAX: Final = 10
EQUAL_FAILURES_MAX: Final = 3
"""So many answers whose calls fail for the same reason end an invocation."""

HOLDING_BESIDE_ORDER: Final = GuardRefusal(
    "holding",
    "An answer either places orders or holds. The other calls of this answer were executed, so do not repeat them: "
    "look at their results, then call `holding` alone to end the cycle.",
)

_log = logging.getLogger("trader.agents")


class Workflow:
    """One invocation. `execute` raises only for a bug, a cancellation, or a database unavailable at the start."""

    def __init__(
        self,
        record: InvocationRecord,
        providers: Mapping[str, Provider],
        environment: InvocationEnvironment,
        events: EventBus,
        limits: InvocationLimits,
    ) -> None:
        self._record = record
        self._model: Model = record.model
        self._providers = providers
        self._environment = environment
        self._limits = limits
        self._conversation: Conversation
        self._calls = CallExecutor(record, environment, events)
        self._failures: Counter[str] = Counter()

    async def execute(self) -> None:
        """Run the invocation to its end and record it.

        :raises Unavailable: the database did not take the invocation row; nothing was done
        """
        if not await self._record.open():
            _log.info("%s already has an invocation at %s", self._model.id, iso(self._record.invocation.started_at))
            return
        self._calls.publish("workflow:started", {})
        try:
            async with asyncio.timeout(self._limits.seconds):
                ended_by = await self._converse()
                if self._model.calls_tools and not self._calls.has_valid_call:
                    raise NoUsableCall(f"the invocation ended without a valid tool call ({ended_by})")
        except TimeoutError:
            late = f"the invocation took longer than {self._limits.seconds:g} s"
            await self._calls.finish("timeout", "timeout", late)
        except TraderError as error:
            await self._calls.finish("failed", "calls" if isinstance(error, NoUsableCall) else "error", str(error))
        except asyncio.CancelledError:
            await self._calls.finish("failed", "interruption", INTERRUPTED)
            raise
        except BaseException as error:
            await self._calls.finish("failed", "error", f"internal error ({type(error).__name__})")
            raise
        else:
            await self._calls.finish("completed", ended_by)

    async def _converse(self) -> EndedBy:
        provider = self._providers.get(self._model.provider)
        if provider is None:
            known = ", ".join(self._providers) or "none"
            raise ProviderError(f"the provider {self._model.provider!r} is not configured; configured: {known}")
        await self._environment.open_account()
        conversation = self._conversation = Conversation(self._record, provider, self._environment, self._limits)
        await conversation.open()
        own = own_answer_limit(self._model)
        # With fewer left, the model is not asked again.
        fewest = min(answer_tokens_min(self._model), own or sys.maxsize)
        answer_tokens = own or max(self._limits.answer_tokens, fewest)
        for number in range(1, 1 + (CALLS_MAX if self._model.is_external else STEPS_MAX)):
            tokens_for_answer = conversation.room()
            if tokens_for_answer < fewest:
                if number > 1:
                    return "tokens"
                if self._limits.is_capped:
                    raise ProviderError(
                        f"its budget leaves {conversation.tokens_left} tokens, too few for a prompt of about "
                        f"{conversation.expected_tokens()} and an answer"
                    )
            limit = min(answer_tokens, max(fewest, tokens_for_answer))
            answer = await conversation.ask(number, limit)
            if self._model.calls_tools:
                answer = with_calls_of_text(answer, number, is_json=self._model.configuration.calls_as_json)
            self._calls.record_step(provider.name, answer)
            if conversation.tokens_left > 0 and conversation.correct(answer):
                continue
            conversation.add(answer.message)
            if not answer.calls:
                return self._ended_without_calls(answer, limit, answer_tokens, is_own=own is not None)
            if await self._execute_calls(answer):
                return "holding"
            if conversation.tokens_left <= 0:
                return "tokens"
            if self._calls.is_stale and not conversation.was_renewed and not self._model.is_external:
                await conversation.renew_view()
        return "steps"

    async def _execute_calls(self, answer: ModelAnswer) -> bool:
        """Execute the calls of an answer in order. Return whether one of them ended the cycle."""
        ended = False
        has_all = self._model.is_external or self._model.provider == "strategy"
        off = self._model.configuration.tools_off
        tools = RECORDED_TOOLS if has_all else {name: each for name, each in TOOLS.items() if name not in off}
        has_order = any(request.name in ORDER_TOOLS for request in answer.calls)
        failures = set()
        for sent in answer.calls:
            request = readable(sent) if self._model.calls_tools else sent
            decision = decode(request, tools)
            number = self._record.next_call()
            if isinstance(decision, BadCall):
                status, result = failed(decision.error)
                self._calls.record_call(number, request, None, status, result)
            elif isinstance(decision, Holding) and has_order:
                status, result = refused(HOLDING_BESIDE_ORDER)
                self._calls.record_call(number, request, decision, status, result)
            else:
                result = await self._calls.execute(number, request, decision)
                ended = ended or isinstance(decision, Holding)
            if "error" in result:
                failures.add(result["error"])
            self._conversation.add_result(request, result)
        self._failures.update(failures)
        self._conversation.has_called = self._calls.has_valid_call
        self._conversation.has_traded = self._calls.has_traded
        if answer.calls_left_out:
            done = len(answer.calls)
            note = f"Of the {done + answer.calls_left_out} calls of this answer only the first {done} were executed"
            _log.warning("%s: %s", self._model.id, note)
            self._conversation.add_note(f"{note}. Repeat the others, or call `holding`.")
            ended = False
        if not ended:
            await self._record.save()
        for error, count in self._failures.items():
            if count >= EQUAL_FAILURES_MAX and self._model.calls_tools and not ended:
                raise NoUsableCall(f"calls of {count} answers failed for the same reason: {error}")
        return ended

    def _ended_without_calls(self, answer: ModelAnswer, limit: int, answer_tokens: int, *, is_own: bool) -> EndedBy:
        """Return the outcome of an invocation whose model called no tool.

        Its answer was limited to `limit` of the `answer_tokens` that its request fields (`is_own`) or settings allow.

        :raises ProviderError: the model refused to answer, or its answer was cut off before it decided anything
        """
        if answer.is_refusal and self._model.is_external:
            raise ProviderError(answer.text or "")
        if (refusal := refusal_in(answer)) is not None:
            raise ProviderError(f"the model refused to answer: {refusal}")
        if answer.cut_by is None:
            return "answer"
        if answer.cut_by == "content_filter":
            raise ProviderError("the answer was cut off by a filter of the provider, before any tool call")
        tokens_left, context = self._conversation.tokens_left, self._conversation.context_tokens
        by_context = context is not None and context < tokens_left
        cause = "the limit of its request fields" if is_own else "ANSWER_TOKENS_MAX"
        if limit < answer_tokens:
            cause = f"what is left of {context} tokens of context" if by_context else "tokens"
        is_last = limit < answer_tokens and (not by_context or self._calls.has_valid_call)
        if is_last or tokens_left <= 0:
            return "tokens"
        raise ProviderError(f"the answer was cut off at its limit of {limit} tokens ({cause}), before any tool call")
