"""Finished invocations as callers read them: the model, tool calls, raw answers and messages of each.

`InvocationReader` needs no provider, so a process that only follows the leader has one too.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from trader.agents.domain.conversation import ChatMessage
from trader.agents.domain.invocations import FinishedInvocation, Invocation
from trader.agents.domain.models import Model
from trader.agents.model_warnings import Warnings
from trader.agents.payloads import answers_of, unpacked
from trader.agents.services import KnownModels
from trader.agents.sql.invocations import (
    TurnOutcome,
    select_chosen_invocations,
    select_invocation,
    select_invocations,
    select_payloads,
    select_tool_calls,
)
from trader.agents.sql.models import ModelActivity, select_model_activity
from trader.core.errors import NotFound
from trader.core.events import ConversationsChanged, Event
from trader.core.variant_id import VariantId
from trader.database.pool import Database, Page

LATEST: Final = Page(50)
"""The default page of invocations."""

INVOCATION_ANSWERS_BYTES_MAX: Final = 32 * 1024
ANSWERS_BYTES_MAX: Final = 512 * 1024
"""Maximum bytes of raw answers returned for one invocation, and for all invocations of a page."""


class InvocationReader:
    """Reads the models and the finished invocations. `warnings` returns the problems of the models.

    `version` increases with every invocation that this process has recorded or, as a follower, has read of.
    """

    def __init__(self, database: Database, models: KnownModels, warnings: Callable[[], Warnings]) -> None:
        self._database = database
        self._models = models
        self.warnings = warnings
        self.version = 0

    def on_event(self, event: Event) -> None:
        self.version += isinstance(event, ConversationsChanged)

    async def finished(
        self,
        model_id: str | None = None,
        variant: VariantId | None = None,
        page: Page = LATEST,
        *,
        outcome: TurnOutcome | None = None,
        invocation_id: UUID | None = None,
        with_answers: bool = False,
    ) -> list[FinishedInvocation]:
        """Return finished invocations, latest first, of one model, one variant, or all (None), or only one of them."""
        async with self._database.reading() as conn:
            if invocation_id is not None:
                one = await select_invocation(conn, invocation_id)
                invocations = [] if one is None or one.status == "running" else [one]
            elif model_id is None and variant is None:
                invocations = await select_invocations(conn, page, outcome)
            else:
                invocations = await select_chosen_invocations(conn, model_id, variant, page, outcome)
            calls = await select_tool_calls(conn, [invocation.id for invocation in invocations])
            payloads = await select_payloads(conn, invocations) if with_answers else {}
        if any(invocation.model_id not in self._models.by_id for invocation in invocations):
            await self._models.reload()
        models = self._models.by_id
        answers = await asyncio.to_thread(_short_answers, invocations, payloads) if payloads else {}
        return [
            FinishedInvocation(
                invocation,
                models[invocation.model_id],
                tuple(calls.get(invocation.id, ())),
                answers.get(invocation.id),
            )
            for invocation in invocations
        ]

    async def messages(self, invocation_id: UUID) -> list[ChatMessage]:
        """Return the messages exchanged with the model in an invocation; empty when they are no longer kept.

        :raises NotFound: there is no such invocation
        """
        async with self._database.connection() as conn:
            invocation = await select_invocation(conn, invocation_id)
            if invocation is None:
                raise NotFound(f"there is no invocation {invocation_id}")
            payload = (await select_payloads(conn, [invocation])).get(invocation_id)
        return [] if payload is None else (await asyncio.to_thread(unpacked, payload)).messages

    async def model_activity(self) -> list[tuple[Model, ModelActivity]]:
        """Return every model with its activity, oldest first."""
        await self._models.reload()
        async with self._database.connection() as conn:
            activity = await select_model_activity(conn)
        return [(model, activity.get(model.id, ModelActivity())) for model in self._models.by_id.values()]


def _short_answers(invocations: Sequence[Invocation], payloads: Mapping[UUID, bytes]) -> dict[UUID, list[str]]:
    """Return the raw answers by invocation id, within the limits of this module. Call it in a thread."""
    encoded = answers_of(invocations, payloads, INVOCATION_ANSWERS_BYTES_MAX, ANSWERS_BYTES_MAX)
    return {key: msgspec.json.decode(answers, type=list[str]) for key, answers in encoded.items()}
