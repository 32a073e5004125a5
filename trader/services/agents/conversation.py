"""Conversation of an invocation with its provider: the view, the messages, the requests and their answers."""

import asyncio
import logging
from datetime import datetime, timedelta
from typing import Final

from msgspec.structs import replace

from trader.domain.agents.conversation import Message, ModelAnswer, Turn
from trader.domain.agents.prompt import estimated_tokens, opening_messages
from trader.domain.agents.tools import contains_tool_call
from trader.domain.agents.view import SERIES_SHOWN, VariantLimits, View
from trader.domain.models import Model
from trader.errors import MarketUnavailable, ProviderError, ProviderTimeout
from trader.gateways.agents.providers import Provider
from trader.services.agents.protocols import AgentClock, AgentObserver
from trader.services.agents.record import InvocationRecord
from trader.variants import VARIANTS

WAIT_LIMIT_S: Final = 20.0
"""Longest total wait for keys in cooldown of an invocation without a trade; one that has traded waits until its end."""

ANSWER_S: Final = 5.0
"""How much of an invocation's time is left for an answer after a wait."""

_log = logging.getLogger("trader.agents")


class Conversation:
    """Requests answers from the provider. The view is renewed and the model corrected at most once each."""

    def __init__(
        self,
        record: InvocationRecord,
        provider: Provider,
        observer: AgentObserver,
        clock: AgentClock,
        limit_s: float,
        restriction: str | None,
        limits: VariantLimits,
        *,
        thinks_until: datetime | None,
        tokens: int,
    ) -> None:
        self._record = record
        self._model: Model = record.model
        self._variant = VARIANTS[record.model.variant]
        self._provider = provider
        self._observer = observer
        self._clock = clock
        self._restriction = restriction
        self._limits = limits
        self._thinks_until = thinks_until
        self._tokens_by_estimate = 1.0
        self._ends_at_s = asyncio.get_running_loop().time() + limit_s
        self._waited_s = 0.0
        self._was_corrected = False
        self._messages: list[Message] = []
        self.view: View
        self.tokens_left = tokens
        """What is left of the invocation's tokens, with attempts that nobody reported counted at their most."""

        self.was_renewed = False
        self.has_traded = False
        self.is_prompt_cut = False
        """Whether the provider counted less than half of the tokens that the first prompt has: it saw only a part."""

    async def open(self) -> None:
        """Take the view, and begin the messages of a provider that reads them.

        :raises MarketUnavailable: no market has a price in time
        """
        await self._look()
        if self._provider.is_remote:
            if not self.view.markets:  # a service that has just started hears its first prices a moment later
                await self._observer.wait_for_price(self._clock.now())
                await self._look()
            if not self.view.markets:
                raise MarketUnavailable("no market has a price now")
            self._messages += self._opening()
            self._record.note_messages(self._messages)
        else:
            self._record.note_view(self.view)

    async def ask(self, number: int, answer_tokens_max: int) -> ModelAnswer:
        """Return the provider's answer to step `number`. After a time-out it is asked once more, with a new view.

        :raises ProviderError: the provider gave no usable answer
        """
        while True:
            turn = Turn(
                model=self._model,
                temperature=self._variant.temperature,
                number=number,
                view=self.view,
                messages=self._messages,
                answer_tokens_max=answer_tokens_max,
                wait_max_s=self._wait_max_s(),
                tokens_max=self.tokens_left,
            )
            try:
                answer = await self._think(turn)
            except asyncio.CancelledError:
                if self._provider.is_remote:  # what it was asked may be charged, whoever hears the answer
                    most = self.expected_tokens(), answer_tokens_max
                    self._record.add_failure(ProviderError("cancelled", unmetered_attempts=1, unreported=most))
                raise
            except ProviderError as error:
                self._record.add_failure(error)
                self.tokens_left -= sum(error.unreported)
                if not isinstance(error, ProviderTimeout) or self.was_renewed or not self._can_ask(answer_tokens_max):
                    raise
                _log.info("%s: %s; asked once more with a new view", self._model.id, error)
            else:
                self.tokens_left -= answer.tokens_spent
                self._waited_s += answer.waited_s
                self._calibrate(answer, number)
                return answer
            await self.renew_view()

    async def _think(self, turn: Turn) -> ModelAnswer:
        """Ask the provider, and let the market's time pass by the recorded duration of its answer."""
        if self._thinks_until is None:
            return await self._provider.answer(turn)
        began = self._clock.now()
        with self._clock.thinking():
            answer = await self._provider.answer(turn)
        if answer.duration_ms:
            thought = began + timedelta(milliseconds=answer.duration_ms)
            await self._clock.sleep_until(min(thought, self._thinks_until))
        return answer

    def expected_tokens(self) -> int:
        """Return how many tokens the next prompt will have, as the provider counts them."""
        return round(self._estimated_tokens() * self._tokens_by_estimate) if self._provider.is_remote else 0

    def _estimated_tokens(self) -> int:
        return estimated_tokens(self._messages, tuple(self.view.markets))

    def _can_ask(self, answer_tokens_max: int) -> bool:
        """Return whether the invocation's tokens allow the same request again."""
        return self.tokens_left >= self.expected_tokens() + answer_tokens_max

    async def renew_view(self) -> None:
        """Show the model the markets and its account as they are now."""
        self.was_renewed = True
        await self._look()
        opening = self._opening()
        if self._messages[-1]["role"] == "user":
            self._messages[:] = opening
        else:
            self.add_note(f"The view above is old. {opening[-1]['content']}")

    def correct(self, answer: ModelAnswer) -> bool:
        """Tell the model when its answer decides nothing although it looks complete. Return whether it does.

        :raises ProviderError: it was corrected before
        """
        flaw = _flaw(answer) if self._provider.is_remote else None
        if flaw is None:
            return False
        if self._was_corrected:
            raise ProviderError(f"{flaw}, for the second time")
        self._was_corrected = True
        _log.info("%s: %s", self._model.id, flaw)
        self.add_note(f"Your last answer could not be used: {flaw}. Call a tool; `holding` ends the cycle.")
        return True

    def add(self, message: Message) -> None:
        """Add a message of the model, or the result of a call."""
        self._messages.append(message)

    def add_note(self, note: str) -> None:
        """Add to what the model reads next: a message of its own is not accepted everywhere after those of tools."""
        self._messages[-1]["content"] += f"\n\n{note}"

    def _calibrate(self, answer: ModelAnswer, number: int) -> None:
        """Learn from an answer how many tokens its provider counts for the estimated ones."""
        if not self._provider.is_remote or not answer.input_tokens:
            return
        self._tokens_by_estimate = answer.input_tokens / self._estimated_tokens()
        is_asked = answer.duration_ms is not None
        self.is_prompt_cut = self.is_prompt_cut or (number == 1 and is_asked and self._tokens_by_estimate < 0.5)

    async def _look(self) -> None:
        intervals = await self._provider.intervals(self._model)
        series = 1 if self._model.provider == "rules" else SERIES_SHOWN  # rule agents look at the last candle alone
        view = await self._observer.view(self._model, intervals, self._clock.now(), series)
        self.view = replace(view, restriction=self._restriction)

    def _opening(self) -> list[Message]:
        prompt = self._model.configuration.prompt or self._variant.prompt
        return opening_messages(prompt, self._limits, self.view)

    def _wait_max_s(self) -> float:
        """Return how long the provider may wait now for its keys to be free again."""
        left_s = self._ends_at_s - asyncio.get_running_loop().time() - ANSWER_S
        return max(0.0, left_s if self.has_traded else min(left_s, WAIT_LIMIT_S - self._waited_s))


def _flaw(answer: ModelAnswer) -> str | None:
    """Return why an answer decides nothing although it looks complete; None for any other."""
    if answer.calls or answer.cut_by is not None:
        return None
    if answer.is_legacy_call:
        return "the answer has a function_call, the form that preceded tool calls, which is not executed"
    if not (answer.text or "").strip():
        return "the answer is empty: neither text nor a tool call"
    if contains_tool_call(answer.text or ""):
        return "the answer has a tool call written as text, which is not executed"
    return None
