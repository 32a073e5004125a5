"""Broadcasters of states: each loads its state when something may have changed it, and sends it to everyone."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from trader.api.broadcast import CAPACITY, Broadcaster
from trader.api.state_patches import encode_patch
from trader.api.stream_messages import StateMessage
from trader.api.subscriber import Subscriber
from trader.errors import TraderError, Unavailable

log = logging.getLogger(__name__)

LOAD_S = 10.0
"""A state that takes longer to load counts as unavailable."""

RETRY_S = 1.0
"""How long after a failed load the state is loaded again, if an event asked for it."""

SPACING_S = 0.1
"""Loads for everyone are at least this far apart, and events between them share the next one; a load for newcomers
alone is this far from any before. So clients that reconnect all the time do not delay what everyone gets."""

Load = Callable[[], Awaitable[bytes]]


class StateBroadcaster(Broadcaster):
    """Broadcaster of a state, which is loaded for newcomers and after every event that may have changed it.

    One long-lived task does all loading. Nothing is loaded without subscribers; requests that came before a load began
    share it. A load that fails is logged and ends the newcomers that waited for it. One that failed because something
    is unavailable is repeated soon, any other on the next event.
    """

    def __init__(
        self,
        name: str,
        load: Load,
        last_id: Callable[[], str] = str,
        *,
        capacity: int = CAPACITY,
        spacing_s: float = SPACING_S,
    ) -> None:
        """Take the function that loads the state as JSON, and the one that returns the id of the last sent event."""
        super().__init__(name, capacity=capacity)
        self._load = load
        self._last_id = last_id
        self._spacing_s = spacing_s
        self._wanted = asyncio.Event()
        self._changed = False
        self._newcomers: dict[Subscriber, None] = {}
        self._everyone_due_s = self._newcomers_due_s = 0.0  # of the event loop's time: when each may be loaded for
        self._task: asyncio.Task[None] | None = None
        self._last_state: bytes | None = None  # what everyone got last
        self._version = 0
        self.loads = 0
        self.failures = 0

    def add(self, subscriber: Subscriber, last_id: str | None = None) -> None:
        # Subscribed first, loaded for afterwards: no change falls between the two.
        super().add(subscriber)
        self._newcomers[subscriber] = None
        self._wanted.set()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        super().unsubscribe(subscriber)
        self._newcomers.pop(subscriber, None)

    def changed(self) -> None:
        """Note that the state may have changed: it is loaded and sent soon, once for all events until then."""
        self._changed = True
        self._wanted.set()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._refresh_forever(), name=f"stream {self.name}")

    async def close(self) -> None:
        await super().close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1)

    async def _refresh_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            everyone = await self._due()
            newcomers, self._newcomers = self._newcomers, {}
            if everyone:
                self._changed = False
            state = await self._loaded()
            await self._hand_out(state, newcomers, everyone)
            self._newcomers_due_s = loop.time() + self._spacing_s
            if everyone:
                self._everyone_due_s = self._newcomers_due_s
                if isinstance(state, TraderError):
                    self._everyone_due_s = self._newcomers_due_s = loop.time() + RETRY_S
                    self.changed()

    async def _due(self) -> bool:
        """Wait until a load is due. Return whether it is for everyone, not only for newcomers."""
        loop = asyncio.get_running_loop()
        while True:
            self._wanted.clear()
            self._changed = self._changed and bool(self._subscribers)
            everyone_s = self._everyone_due_s if self._changed else math.inf
            newcomers_s = self._newcomers_due_s if self._newcomers else math.inf
            due_s, now_s = min(everyone_s, newcomers_s), loop.time()
            if due_s <= now_s:
                return everyone_s <= now_s
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if due_s == math.inf else due_s):
                    await self._wanted.wait()

    async def _hand_out(self, state: bytes | BaseException, newcomers: dict[Subscriber, None], everyone: bool) -> None:
        if isinstance(state, BaseException):
            for subscriber in newcomers:
                subscriber.end(state)
            return
        message = await self._make_message(state, everyone)
        # Who subscribed after the load began waits for the next one: this state may be older than its subscription.
        for subscriber in self._subscribers if everyone else newcomers:
            if subscriber not in self._newcomers:
                subscriber.offer(message)

    async def _make_message(self, state: bytes, everyone: bool) -> StateMessage:
        """Return the message of a state, with what its subscribers need: compressed, and as a patch."""
        message, last_state = StateMessage(self.name, state), self._last_state
        if everyone:
            self._version += 1
            self._last_state = state
        if everyone or state == last_state:
            message.version = self._version
        if everyone and last_state is not None and any(subscriber.form.patched for subscriber in self._subscribers):
            patch = await asyncio.to_thread(encode_patch, last_state, state)
            message.patch = StateMessage(self.name, patch, is_patch=True)
        forms = {subscriber.form for subscriber in self._subscribers}
        if message.patch is not None and any(form.compressed and form.patched for form in forms):
            await message.patch.compress()
        if any(form.compressed and not (form.patched and message.patch is not None) for form in forms):
            await message.compress()
        message.event_id = self._last_id()  # only now: events may have been sent during the compression
        if message.patch is not None:
            message.patch.event_id = message.event_id
        return message

    async def _loaded(self) -> bytes | BaseException:
        """Return the encoded state, or the failure as a value: none may end the task that loads."""
        self.loads += 1
        task = asyncio.ensure_future(self._load())
        try:
            await asyncio.wait({task}, timeout=LOAD_S)
        finally:
            late = not task.done()
            task.cancel()
        if late:
            await asyncio.wait({task}, timeout=1)
        if not late and not task.cancelled() and task.exception() is None:
            return task.result()
        self.failures += 1
        error = None if late or task.cancelled() else task.exception()
        if error is None or isinstance(error, TraderError):
            error = error or Unavailable("The state took too long to load")
            log.warning("stream %s: load failed: %s", self.name, error)
        else:
            log.error("stream %s: load failed: %r", self.name, error, exc_info=error)
        return error
