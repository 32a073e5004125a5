"""Finished invocations as callers read them: the model, tool calls, raw answers and messages of each."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from trader.domain.agents.conversation import Message
from trader.domain.agents.invocations import Invocation, ToolCall
from trader.domain.models import Model
from trader.errors import NotFound
from trader.services.agents.payloads import answers_of, unpacked
from trader.store.agents.invocations import select_invocation, select_payloads
from trader.store.database.pool import Database, Page

LATEST: Final = Page(50)
"""The page of invocations that is read when none is requested."""

INVOCATION_ANSWERS_BYTES_MAX: Final = 32 * 1024
ANSWERS_BYTES_MAX: Final = 512 * 1024
"""Bytes of raw answers that are returned of one invocation, and of all invocations at once."""


class FinishedInvocation(msgspec.Struct, frozen=True):
    """A finished invocation, its model, and its tool calls in order.

    `answers` are the provider's raw answers; None when they were not requested, are not kept, or are too long.
    """

    invocation: Invocation
    model: Model
    tool_calls: tuple[ToolCall, ...]
    answers: list[str] | None = None


class ModelSummary(msgspec.Struct, frozen=True):
    """A model, how many of its invocations have ended, when the last one started, and when a hand first traded it."""

    model: Model
    invocation_count: int = 0
    last_invoked_at: datetime | None = None
    manual_since: datetime | None = None


def short_answers(invocations: Sequence[Invocation], payloads: Mapping[UUID, bytes]) -> dict[UUID, list[str]]:
    """Return the raw answers by invocation id, within the limits of this module. Call it in a thread."""
    encoded = answers_of(invocations, payloads, INVOCATION_ANSWERS_BYTES_MAX, ANSWERS_BYTES_MAX)
    return {key: msgspec.json.decode(answers, type=list[str]) for key, answers in encoded.items()}


async def read_messages(database: Database, invocation_id: UUID) -> list[Message]:
    """Return the messages exchanged with the model in an invocation; empty when they are no longer kept.

    :raises NotFound: there is no such invocation
    """
    async with database.connection() as conn:
        invocation = await select_invocation(conn, invocation_id)
        if invocation is None:
            raise NotFound(f"there is no invocation {invocation_id}")
        payload = (await select_payloads(conn, [invocation])).get(invocation_id)
    return [] if payload is None else (await asyncio.to_thread(unpacked, payload)).messages
