"""A minimal reader of server-sent events, and an event to send."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, NamedTuple

import aiohttp
import orjson

from trader.core.events import WorkflowProgress

FIELDS = {"data", "event", "id", "retry", ""}
RUN = {"modelId": "apex", "modelName": "Apex Rules", "modelVariant": "Apex", "invocationId": "6f1b"}


def workflow_step(at: datetime, step: int, text: str | None = None, /, **others: object) -> WorkflowProgress:
    """Return the event of a step, with fields that its schema does not have, if any."""
    told = {"step": step, "toolNames": [], "inputTokens": None, "outputTokens": None, "text": text}
    return WorkflowProgress("workflow:step", at, {**RUN, **told, **others})


class Message(NamedTuple):
    """One message: its name (None for an unnamed one) and its data."""

    event: str | None
    data: str

    def json(self) -> Any:
        return orjson.loads(self.data)


class Stream:
    """An open stream. Messages are read in order; a line that is not a field of the protocol is an error."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.seen: list[Message] = []

    async def next(self, *, within_s: float = 30) -> Message:
        event, data = None, []
        async with asyncio.timeout(within_s):
            while line := await self.response.content.readuntil(b"\n"):
                name, _, value = line.decode().rstrip("\r\n").partition(":")
                assert name in FIELDS, line
                if line in {b"\n", b"\r\n"}:
                    break
                if name == "event":
                    event = value.removeprefix(" ")
                elif name == "data":
                    data.append(value.removeprefix(" "))
        message = Message(event, "\n".join(data))
        self.seen.append(message)
        return message

    async def until(self, wanted: Callable[[Message], bool], *, within_s: float = 30) -> Message:
        """Return the next message of that kind; others are skipped, but kept in `seen`."""
        async with asyncio.timeout(within_s):
            while not wanted(message := await self.next(within_s=within_s)):
                pass
        return message


@asynccontextmanager
async def streaming(http: aiohttp.ClientSession, url: str, name: str) -> AsyncIterator[Stream]:
    """Subscribe for the duration of the block; the answer must be a stream."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    async with http.get(f"{url}/api/events/{name}", timeout=timeout) as response:
        assert response.status == 200, await response.text()
        yield Stream(response)
