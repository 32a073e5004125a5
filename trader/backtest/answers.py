"""Answers of AI models in a backtest: replayed from a cassette, or requested within a budget and stored before use."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from decimal import Decimal
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.models import Model
from trader.agents.domain.strategy import Strategy
from trader.agents.domain.tools import RECORDED_TOOLS, Decision, request_of
from trader.agents.domain.view import Shown, View
from trader.agents.providers.cassette import Cassette, KeptAnswer, missing_text, request_digest, view_digest
from trader.agents.providers.provider import Provider
from trader.agents.record import cost_of
from trader.agents.variants import VARIANTS
from trader.core.errors import ContextExceeded, ProviderError
from trader.core.money import ZERO, format_decimal

WAIT_MAX_S: Final = 600.0
"""How long a model waits for keys in cooldown; market time pauses meanwhile."""

ATTEMPTS_MAX: Final = 3
"""Maximum requests to a provider for one answer, each with the retries of its client."""

PAUSE_S: Final = 5.0
"""Delay before the second request; doubled before the third."""

_log = logging.getLogger("trader.backtest")


class AskingEnded(ProviderError):
    """No model is asked any more, and the asking invocation has failed.

    `cause` is the budget, the provider, or a cassette without the answer.
    """

    def __init__(self, cause: Literal["budget", "provider", "missing"], message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Spending:
    """Spending of one command against its budget, shared by all models. `budget_usd` None: no model may be asked."""

    def __init__(self, budget_usd: Decimal | None) -> None:
        self.budget_usd = budget_usd
        self.spent_usd = ZERO
        self.asked = 0
        self.ended: AskingEnded | None = None

    def check(self) -> None:
        """Raise `AskingEnded` if no model may be asked any more."""
        if self.ended is None and self.budget_usd is not None and self.spent_usd >= self.budget_usd:
            budget, spent = format_decimal(self.budget_usd), format_decimal(self.spent_usd)
            self.ended = AskingEnded(
                "budget", f"The budget of {budget} USD is spent: {self.asked} answers cost {spent} USD."
            )
        if self.ended is not None:
            raise self.ended

    def add(self, model: Model, cost_usd: Decimal | None) -> None:
        """Count an answer. An unknown cost ends all asking, since no budget could hold."""
        self.asked += 1
        self.spent_usd += cost_usd or ZERO
        if cost_usd is None:
            self.ended = AskingEnded(
                "budget",
                f"{model.provider} does not say what an answer of {model.id} costs, so that no budget could hold: "
                "give the model a `price` in the models file.",
            )


class KeptAnswers:
    """Provider that answers from a cassette, and asks `inner` for missing answers (None: never asks)."""

    is_remote = True

    def __init__(
        self,
        name: str,
        cassette: Cassette,
        spending: Spending,
        inner: Provider | None,
        parallel_max: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = name
        self._cassette = cassette
        self._spending = spending
        self._inner = inner
        self._slots = asyncio.Semaphore(parallel_max)
        self._sleep = sleep

    @property
    def ended(self) -> AskingEnded | None:
        """Why no model is asked any more; None while models are asked."""
        return self._spending.ended

    def left_out(self, model: Model) -> Collection[str]:
        return () if self._inner is None else self._inner.left_out(model)

    async def shown(self, model: Model) -> Shown:
        known = model.configuration.known_context or self._cassette.contexts.get(model.id)
        if known is None and self._inner is not None:
            known = (await self._inner.shown(model)).context_tokens
        return Shown(VARIANTS[model.variant].intervals, context_tokens=known)

    async def answer(self, turn: Turn) -> ModelAnswer:
        """Return the recorded answer, or ask for it and record it. Raise `AskingEnded` if there is none."""
        digest = request_digest(self.name, turn)
        answer = self._cassette.get(digest)
        if answer is not None:
            return answer
        if self._inner is None:
            self._spending.ended = AskingEnded("missing", missing_text(self._cassette.folder, turn, digest))
            raise self._spending.ended
        async with self._slots:
            self._spending.check()
            answer = await self._ask(self._inner, turn)
            # The wait for keys is an accident of this recording, not part of the model's thinking.
            thought_ms = max(0, (answer.duration_ms or 0) - round(1000 * answer.waited_s))
            answer = replace(answer, duration_ms=thought_ms, waited_s=0.0)
            cost = cost_of(answer, turn.model)
            kept = KeptAnswer(
                digest=digest, model=turn.model.id, at=turn.view.at, step=turn.number, cost_usd=cost, answer=answer
            )
            self._cassette.keep_context(turn.model.id, turn.context_tokens)
            await self._cassette.add(kept)
            self._spending.add(turn.model, cost)
        return answer

    async def _ask(self, inner: Provider, turn: Turn) -> ModelAnswer:
        """Ask the provider, with retries. Its failures do not affect a backtest, whose time pauses meanwhile."""
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                return await inner.answer(replace(turn, wait_max_s=WAIT_MAX_S))
            except ContextExceeded:
                raise
            except ProviderError as error:
                if attempt == ATTEMPTS_MAX:
                    ended = AskingEnded("provider", f"{turn.model.id} cannot be asked: {error}.")
                    self._spending.ended = self._spending.ended or ended
                    raise ended from error
                _log.info("%s: %s; asked again", turn.model.id, error)
                await self._sleep(PAUSE_S * 2 ** (attempt - 1))
                self._spending.check()
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()


class KeptDecisions:
    """Keeps the decisions of one model's strategy in a cassette, by what it saw.

    With each goes the strategy's state, as `save` returns it: it is restored when a run goes on beyond the cassette.
    """

    def __init__(self, cassette: Cassette, spending: Spending) -> None:
        self._cassette = cassette
        self._spending = spending
        self._state: bytes | None = None
        """The state after the last decision, if it came from the cassette."""

    def decide(self, model: Model, answered_by: str, strategy: Strategy, view: View) -> list[Decision]:
        """Return the recorded decisions, or let the strategy decide and record it.

        :raises StrategyError: the strategy fails
        """
        digest = view_digest(model, answered_by, view)
        answer = self._cassette.get(digest)
        if answer is not None:
            self._state = answer.raw.encode()
            return [msgspec.json.decode(call.arguments, type=RECORDED_TOOLS[call.name]) for call in answer.calls]
        if self._state is not None and (state := msgspec.json.decode(self._state)) is not None:
            strategy.load(state)
        self._state = None
        made = list(strategy.decide(view) or ())
        calls = tuple(request_of(number, decision) for number, decision in enumerate(made, 1))
        state_now = msgspec.json.encode(strategy.save()).decode()
        answer = ModelAnswer(text=None, calls=calls, message={}, model=answered_by, cost_usd=ZERO, raw=state_now)
        self._cassette.add_now(
            KeptAnswer(digest=digest, model=model.id, at=view.at, step=1, cost_usd=ZERO, answer=answer)
        )
        self._spending.add(model, ZERO)
        return made
