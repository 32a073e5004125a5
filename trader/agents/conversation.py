"""Conversation of an invocation with its provider: the view, the messages, the requests and their answers."""

import asyncio
import logging
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec

from trader.agents.domain.as_written import contains_tool_call
from trader.agents.domain.conversation import ChatMessage, ModelAnswer, ToolRequest, Turn, refusal_in
from trader.agents.domain.messages import tool_message
from trader.agents.domain.models import Model
from trader.agents.domain.prompt import SHORTENINGS, estimated_tokens, json_text, opening_messages
from trader.agents.domain.tools import RESTING_TOOLS, TOOLS
from trader.agents.domain.view import View
from trader.agents.execute import InvocationEnvironment
from trader.agents.providers.protocols import ANSWER_TOKENS_MIN
from trader.agents.providers.provider import Provider, answer_tokens_min
from trader.agents.record import InvocationRecord
from trader.agents.variants import VARIANTS, temperature_of
from trader.core.errors import ContextExceeded, MarketUnavailable, NoUsableCall, ProviderError, ProviderTimeout

WAIT_LIMIT_S: Final = 20.0
"""Longest total wait for keys in cooldown while an invocation has not traded; after a trade it waits until its end."""

ANSWER_S: Final = 5.0
"""How much of an invocation's time a wait leaves for the answer."""

INVOCATION_LIMIT_S: Final = 600.0

CUT_PROMPT: Final = (
    "its provider counted fewer tokens than the prompt has, so it seems to truncate the prompt or to leave out the "
    "tools; raise the context length of the server (num_ctx of Ollama) or state it in the row as `context_tokens`, "
    'or set `calls = "json"`'
)

LEARNED_S: Final = 3600.0
"""How long a learned context counts: an operator may give the server a longer one."""

REFUSALS_MAX: Final = 5
"""So often a request is shortened after a refusal."""

CUT_SHARE: Final = 0.85
"""A prompt of which a server counts less than this share was truncated."""
TOKENS_BY_ESTIMATE_MIN: Final = 0.75
"""The estimate is at most so much too high, for any tokenizer."""
CALIBRATION_ERROR: Final = 0.03

ROOMY_CONTEXT: Final = 8_192
"""In a context of fewer tokens, the tools of resting orders would leave no room for the view."""

_log = logging.getLogger("trader.agents")


class Learned:
    """What the invocations of a model have learned of its server.

    `context_tokens` is what fits into its context, from a refusal or a truncated prompt, and `tokens_by_estimate` how
    its count compares with the estimate (None: not known). `is_cut`: it truncated a prompt. `took` is how long the last
    invocation took.
    """

    context_tokens: int | None = None
    learned_at_s = 0.0
    tokens_by_estimate: float | None = None
    is_cut = False
    took = timedelta(0)


class InvocationLimits(NamedTuple):
    """Limits of one invocation: tokens of the whole and of one answer, real seconds of one attempt and of the whole.

    `is_capped`: a budget limits the tokens, so even the first prompt must fit into them.

    `learned` is kept from one invocation of a model to the next (None: nothing is kept).

    `thinks_until` is the market time until which a thinking model is awaited (the end of a recording); None: a
    replay pauses while models think.
    """

    tokens: int
    answer_tokens: int
    attempt_s: int
    seconds: float = INVOCATION_LIMIT_S
    thinks_until: datetime | None = None
    is_capped: bool = False
    learned: Learned | None = None


class Conversation:
    """Requests answers from the provider. The view is renewed and the model corrected at most once each."""

    def __init__(
        self,
        record: InvocationRecord,
        provider: Provider,
        environment: InvocationEnvironment,
        limits: InvocationLimits,
    ) -> None:
        self._record = record
        self._model: Model = record.model
        self._variant = VARIANTS[record.model.variant]
        self._provider = provider
        self._environment = environment
        self._thinks_until = limits.thinks_until
        self._learned = limits.learned or Learned()
        now_s = asyncio.get_running_loop().time()
        if now_s > self._learned.learned_at_s + LEARNED_S:
            self._learned.context_tokens = None
        self._ends_at_s = now_s + limits.seconds
        self._waited_s = 0.0
        self._was_corrected = False
        self._was_told_reading = False
        self._messages: list[ChatMessage] = []
        self._opening_size = 0
        self._refusals = 0
        self.view: View
        self.tokens_left = limits.tokens
        """The invocation's remaining tokens, with unreported attempts counted at their maximum."""

        self.was_renewed = False
        self.has_called = False
        self.has_traded = False
        self.context_tokens: int | None = None

    async def open(self) -> None:
        """Take the view and, for a provider that reads messages, begin them.

        :raises MarketUnavailable: no market has a price in time
        """
        await self._look()
        if self._provider.is_remote:
            if not self.view.markets:  # a service that has just started receives its first prices a moment later
                await self._environment.wait_for_price()
                await self._look()
            if not self.view.markets:
                raise MarketUnavailable("no market has a price now")
            self._messages += self._opening()
            self._opening_size = len(self._messages)
            self._record.note_messages(self._messages)
        else:
            self._record.note_view(self.view)

    async def ask(self, number: int, answer_tokens_max: int) -> ModelAnswer:
        """Return the provider's answer to step `number`. After a timeout, ask once more with a new view.

        :raises ProviderError: the provider gave no usable answer
        """
        while True:
            turn = Turn(
                model=self._asked,
                temperature=temperature_of(self._model),
                number=number,
                view=self.view,
                messages=self._messages,
                answer_tokens_max=answer_tokens_max,
                wait_max_s=self._wait_max_s(),
                tokens_max=self.tokens_left,
                context_tokens=self.context_tokens,
            )
            try:
                answer = await self._think(turn)
            except asyncio.CancelledError:
                if self._provider.is_remote:  # the request may be charged even if its answer is lost
                    most = self.expected_tokens(), answer_tokens_max
                    self._record.add_failure(ProviderError("cancelled", unmetered_attempts=1, unreported=most))
                raise
            except ContextExceeded as error:
                self._record.add_failure(error)
                answer_tokens_max = self._shorten(error, answer_tokens_max)
                continue
            except ProviderError as error:
                self._record.add_failure(error)
                self.tokens_left -= sum(error.unreported)
                is_affordable = self.tokens_left >= self.expected_tokens() + answer_tokens_max
                if not isinstance(error, ProviderTimeout) or self.was_renewed or not is_affordable:
                    raise
                _log.info("%s: %s; asked once more with a new view", self._model.id, error)
            else:
                self.tokens_left -= answer.tokens_spent
                self._waited_s += answer.waited_s
                self._calibrate(answer)
                return answer
            await self.renew_view()

    def room(self) -> int:
        """Return how many tokens the next answer may have."""
        most = self.tokens_left if self.context_tokens is None else min(self.tokens_left, self.context_tokens)
        return most - self.expected_tokens()

    def _shorten(self, error: ContextExceeded, answer_tokens_max: int) -> int:
        """Learn the context from a refusal, and show less. Return the limit of the answer.

        :raises ContextExceeded: the refusals go on
        """
        asked = self.expected_tokens() + answer_tokens_max
        known = min(asked, self.context_tokens or asked)
        self._refusals += 1
        if self._refusals > REFUSALS_MAX:
            raise error
        self._learn_context(error.limit if error.limit < known else known // 2)
        self.context_tokens = self._learned.context_tokens
        self._messages[: self._opening_size] = self._opening()
        return max(min(answer_tokens_max, self.room()), ANSWER_TOKENS_MIN)

    def _learn_context(self, tokens: int) -> None:
        self._learned.context_tokens = tokens
        self._learned.learned_at_s = asyncio.get_running_loop().time()
        _log.warning("%s: its context has %d tokens", self._model.id, tokens)

    async def _think(self, turn: Turn) -> ModelAnswer:
        """Ask the provider, and advance the market time by the recorded duration of its answer."""
        if self._thinks_until is None:
            return await self._provider.answer(turn)
        began = self._environment.now()
        with self._environment.thinking():
            answer = await self._provider.answer(turn)
        if answer.duration_ms:
            thought = began + timedelta(milliseconds=answer.duration_ms)
            await self._environment.sleep_until(min(thought, self._thinks_until))
        return answer

    def expected_tokens(self) -> int:
        """Return how many tokens the next prompt will have, as the provider counts them."""
        return self._expected(self._messages) if self._provider.is_remote else 0

    def _expected(self, messages: list[ChatMessage]) -> int:
        return round(self._estimated_tokens(messages) * (self._learned.tokens_by_estimate or 1.0))

    def _estimated_tokens(self, messages: list[ChatMessage]) -> int:
        return estimated_tokens(messages, tuple(self.view.markets), self._asked.configuration.tools_off)

    @property
    def _asked(self) -> Model:
        """The model, without the tools for which a small context has no room."""
        model, configuration = self._model, self._model.configuration
        if self.context_tokens is None or self.context_tokens >= ROOMY_CONTEXT:
            return model
        off = (*configuration.tools_off, *RESTING_TOOLS)
        return msgspec.structs.replace(model, configuration=msgspec.structs.replace(configuration, tools_off=off))

    async def renew_view(self) -> None:
        """Show the model the current markets and its current account."""
        self.was_renewed = True
        await self._look()
        opening = self._opening()
        if len(self._messages) == len(opening):
            self._messages[:] = opening
        else:
            self.add_note(f"The view above is old. {opening[-1]['content']}")

    def correct(self, answer: ModelAnswer) -> bool:
        """If an answer looks complete but decides nothing, say so to the model. Return whether that was the case.

        :raises ProviderError: it was corrected before
        """
        flaw = _flaw(answer, must_call=self._model.calls_tools and not self.has_called)
        if flaw is None or not self._provider.is_remote:
            return False
        if self._was_corrected:
            raise NoUsableCall(f"{flaw}, for the second time")
        self._was_corrected = True
        _log.info("%s: %s", self._model.id, flaw)
        self.add_note(f"Your last answer could not be used: {flaw}. Call a tool; `holding` ends the cycle.")
        return True

    def add(self, message: ChatMessage) -> None:
        """Add a message from the model, or the result of a call."""
        self._messages.append(message)

    def add_result(self, request: ToolRequest, result: dict[str, Any]) -> None:
        """Add the result of a call: as a tool's, or in words if the call was read from the model's text.

        The first time that arguments were written in another form, say how they were read.
        """
        if request.form is None:
            self.add(tool_message(request.id, result))
        else:
            told = f"Result of {request.name}, which your answer contains as text: {json_text(result)}"
            if self._messages[-1]["role"] == "user":
                self.add_note(told)
            else:
                self.add({"role": "user", "content": told})
        if request.sent is not None and not self._was_told_reading:
            self._was_told_reading = True
            self.add_note(
                f"The arguments of {request.name} were read as {request.arguments}; `confidence` is in percent."
            )

    def add_note(self, note: str) -> None:
        """Add to the next text that the model reads: some providers refuse a separate message after tool results."""
        self._messages[-1]["content"] += f"\n\n{note}"

    def _calibrate(self, answer: ModelAnswer) -> None:
        """Learn from an answer how the provider's token count compares with the estimate.

        A count far below it, or a power of two that it does not confirm, is that of a truncated prompt.
        """
        counted = answer.input_tokens
        if not self._provider.is_remote or not counted:
            return
        estimate, known = self._estimated_tokens(self._messages), self._learned.tokens_by_estimate
        expected = estimate * (known or TOKENS_BY_ESTIMATE_MIN)
        if known is None and self._model.configuration.calls_as_json:  # most servers count no schema of the answer
            expected = estimated_tokens(self._messages, (), tuple(TOOLS)) * TOKENS_BY_ESTIMATE_MIN
        is_round = counted >= 1024 and counted.bit_count() == 1
        is_confirmed = known is not None and abs(counted / expected - 1) < CALIBRATION_ERROR
        if answer.duration_ms is not None and (counted < CUT_SHARE * expected or (is_round and not is_confirmed)):
            if not self._learned.is_cut:
                _log.warning("%s: %s", self._model.id, CUT_PROMPT)
            self._learned.is_cut = True
            if is_round:
                self._learn_context(counted)
            return
        self._learned.tokens_by_estimate = counted / estimate

    async def _look(self) -> None:
        shown = await self._provider.shown(self._model)
        self.context_tokens = self._learned.context_tokens or shown.context_tokens
        self.view = await self._environment.view(shown)

    def _opening(self) -> list[ChatMessage]:
        """Return the first messages, with as much of the view as fits into the context.

        :raises ProviderError: nothing fits
        """
        prompt = self._model.configuration.prompt or self._variant.prompt
        entries, is_lean = self._variant.agent().entries(self.view), self._model.calls_tools
        for shortening in range(len(SHORTENINGS) if is_lean else 1):
            messages = opening_messages(
                prompt, self._environment.limits, self.view, entries, is_lean=is_lean, shortening=shortening
            )
            needed = self._expected(messages) + answer_tokens_min(self._model)
            if self.context_tokens is None or needed <= self.context_tokens:
                return messages
        if needed * TOKENS_BY_ESTIMATE_MIN > (self.context_tokens or needed):
            raise ProviderError(
                f"its context of {self.context_tokens} tokens is too small: the shortest prompt and an answer need "
                f"about {needed}. Give the server a longer context, or the row `tools_off`"
            )
        return messages

    def _wait_max_s(self) -> float:
        """Return how long the provider may wait now for one of its keys to leave cooldown."""
        left_s = self._ends_at_s - asyncio.get_running_loop().time() - ANSWER_S
        return max(0.0, left_s if self.has_traded else min(left_s, WAIT_LIMIT_S - self._waited_s))


def _flaw(answer: ModelAnswer, *, must_call: bool) -> str | None:
    """Return why an answer that looks complete decides nothing; None for any other answer.

    `must_call`: the model has made no valid call yet, so a text alone ends nothing.
    """
    if answer.calls or answer.cut_by is not None:
        return None
    if not (answer.text or "").strip():
        return "the answer is empty: neither text nor a tool call"
    if contains_tool_call(answer.text or ""):
        return "the answer has a tool call written as text, which is not executed"
    return "the answer has no tool call" if must_call and refusal_in(answer) is None else None
