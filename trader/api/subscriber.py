"""Subscribers: the queue of messages for one open stream."""

import asyncio
from collections.abc import Callable, Iterable

from trader.api.stream_messages import PLAIN, Message, MessageForm, deflated

BACKLOG_BYTES_MAX = 256 * 1024


class Subscriber:
    """Queue of the messages for one open response, from which its handler takes them.

    It keeps only the newest state of each stream; events wait in order: one message of any size, plus at most
    `backlog_bytes_max` bytes. `ended` is set when no more messages will come; `error` is the failure that ended it, if
    any. `cut` is set during each write, and ends its wait for the reader.
    """

    def __init__(
        self,
        form: MessageForm = PLAIN,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
        *,
        address: str = "",
        is_known: bool = False,
    ) -> None:
        self.form = form
        self.address = address
        self.is_known = is_known
        self._backlog_bytes = 0
        self._backlog_bytes_max = backlog_bytes_max
        self._waiting: dict[object, Message] = {}
        self._woken = asyncio.Event()
        self.ended = False
        self.error: BaseException | None = None
        self.cut: Callable[[], None] | None = None

    def offer(self, message: Message) -> bool:
        """Queue a message for the reader. Return False if the backlog is full; an empty one accepts any message."""
        if self.ended:
            return True
        if message.state is not None:
            self._waiting.pop(message.state, None)  # the ids of waiting messages must ascend, so it moves to the end
            self._waiting[message.state] = message
        elif not self._keep_event(message):
            return False
        self._woken.set()
        return True

    def _keep_event(self, message: Message) -> bool:
        # The first message does not count: it may hold all the events that a returning client has missed.
        if any(waiting.state is None for waiting in self._waiting.values()):
            self._backlog_bytes += len(message.text(self.form.numbered))
        if self._backlog_bytes > self._backlog_bytes_max:
            return False
        self._waiting[message] = message
        return True

    def has(self, states: Iterable[str]) -> bool:
        """Return whether a message is waiting for each of these states."""
        return all(state in self._waiting for state in states)

    async def wait(self, timeout_s: float) -> None:
        """Wait for a message or the end, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return
        finally:
            self._woken.clear()

    def take(self, before: bytes = b"", after: bytes = b"") -> bytes:
        """Remove and return the waiting messages as one, between two other texts. The caller must send it next."""
        self._woken.clear()
        messages, self._waiting, self._backlog_bytes = self._waiting, {}, 0
        numbered, compressed = self.form
        if not compressed:
            return b"".join((before, *(message.text(numbered) for message in messages.values()), after))
        blocks = (message.block(numbered) for message in messages.values())
        return b"".join((before and deflated(before), *blocks, after and deflated(after)))

    def end(self, error: BaseException | None = None) -> None:
        """End the subscription, and a write that waits for the client."""
        if self.ended:
            return
        self.ended = True
        self.error = error
        self._waiting.clear()
        self._woken.set()
        if self.cut is not None:
            self.cut()
