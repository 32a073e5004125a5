"""The trading workflow: one invocation of a model, from its view of the market to the record of what it did.

An invocation ends in one of three ways, and each is recorded: completed, failed (with the reason) or timeout. Orders
pass the guard and carry ids derived from the invocation's, so nothing is placed twice.
"""

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Final, NamedTuple

from trader.clock import iso
from trader.domain.agents.conversation import ModelAnswer, refusal_in
from trader.domain.agents.guard import Refusal
from trader.domain.agents.messages import (
    failed,
    refused,
    tool_message,
)
from trader.domain.agents.tools import ORDER_TOOLS, BadCall, Holding, decode
from trader.domain.models import Model
from trader.errors import (
    ProviderError,
    TraderError,
)
from trader.gateways.agents.providers import Provider
from trader.services.agents.calls import CallExecutor, EndedBy
from trader.services.agents.conversation import Conversation
from trader.services.agents.model_warnings import INTERRUPTED
from trader.services.agents.protocols import AgentClock, AgentExchange, AgentObserver
from trader.services.agents.record import InvocationRecord
from trader.services.events import EventBus
from trader.variants import limits_of

STEPS_MAX: Final = 10
ANSWER_TOKENS_MIN: Final = 256
"""A model is not asked again when the tokens of its invocation leave less for the answer."""

INVOCATION_LIMIT_S: Final = 600.0
HOLDING_BESIDE_ORDER: Final = Refusal(
    "holding",
    "An answer either places orders or holds. The other calls of this answer were executed, so do not repeat them: "
    "look at their results, then call `holding` alone to end the cycle.",
)

_log = logging.getLogger("trader.agents")


class InvocationLimits(NamedTuple):
    """Limits of one invocation: its tokens, the tokens of one answer, and seconds of real time of the whole and of one
    attempt at the provider.

    `is_capped`: the tokens are what a budget has left, so even the first prompt must fit into them.

    `thinks_until` is the time of the market beyond which nobody waits for a model that thinks: the end of a recording;
    None: a replay stands still while models think.
    """

    tokens: int
    answer_tokens: int
    attempt_s: int
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
        self._providers = providers
        self._exchange = exchange
        self._observer = observer
        self._clock = clock
        self._limits = limits
        self._restriction = restriction
        self._conversation: Conversation
        self.is_prompt_cut = False
        self._rules = limits_of(record.model, limits.attempt_s)
        self._calls = CallExecutor(record, exchange, observer, clock, events, self._rules, restriction)

    async def execute(self) -> None:
        """Carry out the invocation to its end and record it.

        :raises Unavailable: the database did not take the invocation row; nothing was done
        """
        if not await self._record.open():
            _log.info("%s already has an invocation at %s", self._model.id, iso(self._record.invocation.started_at))
            return
        self._calls.publish("workflow:started", {})
        try:
            async with asyncio.timeout(self._limits.seconds):
                ended_by = await self._converse()
        except TimeoutError:
            await self._calls.finish("timeout", f"the invocation took longer than {self._limits.seconds:g} s")
        except TraderError as error:
            await self._calls.finish("failed", str(error))
        except asyncio.CancelledError:
            await self._calls.finish("failed", INTERRUPTED)
            raise
        except BaseException as error:
            await self._calls.finish("failed", f"internal error ({type(error).__name__})")
            raise
        else:
            await self._calls.finish("completed", None, ended_by=ended_by)

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
            self._rules,
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
            if self._calls.is_stale and not talk.was_renewed:
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
        self._calls.record_step(provider.name, answer)
        return answer

    async def _execute_calls(self, answer: ModelAnswer) -> bool:
        """Execute the calls of an answer in order. Return whether one of them ended the cycle."""
        ended = False
        self._calls.viewed_at = self._conversation.view.at
        has_order = any(request.name in ORDER_TOOLS for request in answer.calls)
        for request in answer.calls:
            decision = decode(request)
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
            self._conversation.add(tool_message(request.id, result))
        self._conversation.has_traded = self._calls.has_traded
        if answer.calls_left_out:
            done = len(answer.calls)
            note = f"Of the {done + answer.calls_left_out} calls of this answer only the first {done} were executed"
            _log.warning("%s: %s", self._model.id, note)
            self._conversation.add_note(f"{note}. Repeat the others, or call `holding`.")
            ended = False
        if not ended:
            await self._record.save()
        return ended


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
