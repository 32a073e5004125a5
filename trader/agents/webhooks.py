"""Webhooks: external agents that receive each due view and answer with their decisions.

A call works like the procedures: it opens a decision, executes the calls of the answer in order, and ends the
decision. A failed call is a missed decision, with the reason in its record.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from trader.agents.domain.conversation import ToolRequest
from trader.agents.domain.models import Model
from trader.agents.domain.tools import AGENT_TOOLS, CALLS_MAX, BadCall, Decision, Holding, decode
from trader.agents.external import ExternalAgents, ExternalDecision
from trader.agents.providers.webhook import WebhookClient
from trader.agents.sql.external import Webhook, select_webhooks
from trader.core import tasks
from trader.core.clock import Clock
from trader.core.errors import TraderError, WebhookError
from trader.database.pool import Database

CLOSE_S: Final = 2.0

_log = logging.getLogger("trader.agents")


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    """A call in an answer: the short name of an `agent` procedure, and its input without `viewId`."""

    name: str
    arguments: dict[str, Any]


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """The answer of a webhook: its decisions, in order. An empty list is valid, too."""

    decisions: Annotated[list[_Call], Meta(max_length=CALLS_MAX)]


class Webhooks:
    """Owns the webhook calls, at most one per agent. Only the leader makes them.

    `shown` returns the body of a request, which equals the answer of `agent.getView`.
    """

    def __init__(
        self,
        database: Database,
        external: ExternalAgents,
        client: WebhookClient,
        clock: Clock,
        shown: Callable[[ExternalDecision], bytes],
    ) -> None:
        self._database = database
        self._external = external
        self._client = client
        self._clock = clock
        self._shown = shown
        self._calls: dict[str, asyncio.Task[None]] = {}

    async def begin_cycle(self, due: Sequence[Model]) -> None:
        """Call the due agents that have a webhook and no pending call; return without waiting for them.

        :raises Unavailable: the webhooks cannot be read
        """
        if not due:
            return
        async with self._database.connection() as conn:
            webhooks = await select_webhooks(conn)
        for model in due:
            if model.id in webhooks and model.id not in self._calls:
                call = self._call(model, webhooks[model.id])
                self._calls[model.id] = tasks.start(call, f"webhook of {model.id}")
        await asyncio.sleep(0)  # let the calls start, so that the clock waits for them

    async def close(self) -> None:
        """End the calls; the next leader repeats them with the views that are still open."""
        await tasks.end(*self._calls.values(), limit_s=CLOSE_S)
        await self._client.close()

    async def _call(self, model: Model, webhook: Webhook) -> None:
        try:
            async with self._clock.busy():
                await self._decide(model, webhook)
        except TraderError as error:
            _log.warning("%s: its webhook was not called, or its answer not executed: %s", model.id, error)
        finally:
            del self._calls[model.id]

    async def _decide(self, model: Model, webhook: Webhook) -> None:
        """Let the webhook decide on a view. Skip a view on which it placed an order before a restart.

        :raises TraderError: there is no view, or the decisions cannot be executed now
        """
        opened = await self._external.view(model, None)
        if opened.has_decided:
            return
        limit_s = (opened.deadline - self._clock.now()).total_seconds()
        try:
            with self._clock.thinking():
                answer = await self._client.call(webhook.url, webhook.secret, opened.id, self._shown(opened), limit_s)
            for decision in decisions_in(answer):
                await self._external.decide(model, opened.id, decision)
        except TraderError as error:
            await self._external.end(model, opened.id, str(error))
        else:
            await self._external.end(model, opened.id)


def decisions_in(answer: bytes) -> list[Decision]:
    """Return the decisions of an answer. One invalid decision invalidates the whole answer.

    :raises WebhookError: the answer is invalid; the message says what is wrong and what is allowed
    """
    try:
        calls = msgspec.json.decode(answer, type=_Answer).decisions
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WebhookError(f'the answer of the webhook is not {{"decisions": […]}}: {error}') from None
    decisions = []
    for number, call in enumerate(calls):
        request = ToolRequest("", call.name, msgspec.json.encode(call.arguments).decode())
        decision = decode(request, AGENT_TOOLS)
        if isinstance(decision, BadCall):
            raise WebhookError(f"decisions[{number}] of the webhook: {decision.error}")
        if isinstance(decision, Holding) and number + 1 < len(calls):
            raise WebhookError(f"decisions[{number}] of the webhook: hold comes last, since it ends the decision")
        decisions.append(decision)
    return decisions
