"""Broadcasters of states: each loads its state when something may have changed it, and sends it, or what changed.

Changes are JSON Merge Patches (RFC 7396) between the keyed forms of two states. A merge patch replaces a list as a
whole, and a null in it deletes. In the keyed form, a list whose items have ids is therefore an object with the `ids` in
the order of the list and the `items` by id, and null members are omitted.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from trader.api.broadcast import Broadcaster
from trader.api.stream_messages import EventsMessage, NumberedEvent, StateMessage
from trader.api.subscriber import Subscriber
from trader.core import tasks
from trader.core.errors import TraderError, Unavailable

log = logging.getLogger(__name__)

LOAD_S = 10.0
"""A state that takes longer to load counts as unavailable."""

RETRY_S = 1.0
"""Delay after a failed load before an event triggers the next one."""

SPACING_S = 0.1
"""Minimum interval between loads for everyone; events in between share the next one. A load only for newcomers is this
far from any previous load, so constantly reconnecting clients do not delay everyone's messages."""

Load = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class StateOptions:
    """How a state is sent.

    `spacing_s` and `patch_spacing_s` are the minimum real times between two whole states and between two patches; an
    urgent change is patched after `spacing_s`. Patches round the amounts named in `cents` to cents. `empty` is the data
    of an event `empty` that newcomers receive before a state that is an empty list.
    """

    spacing_s: float = SPACING_S
    patch_spacing_s: float = SPACING_S
    cents: tuple[str, ...] = ()
    empty: bytes = b""


DEFAULTS: Final = StateOptions()


class StateBroadcaster(Broadcaster):
    """Broadcaster of a state, which is loaded for newcomers and after every event that may have changed it.

    One long-lived task does all loading. Nothing is loaded without subscribers; requests that arrive before a load
    begins share it. A failure to load or send a state is logged and disconnects the newcomers that waited for it. If
    something was unavailable, the load is repeated soon, otherwise on the next event. Whole states and patches are
    paced separately.
    """

    def __init__(
        self,
        name: str,
        load: Load,
        last_id: Callable[[], str] = str,
        options: StateOptions = DEFAULTS,
    ) -> None:
        """Take a function that loads the state as JSON, and one that returns the id of the last sent event."""
        super().__init__(name)
        self._load = load
        self._last_id = last_id
        self._options = options
        self._spacings_s = {False: options.spacing_s, True: options.patch_spacing_s}
        self._wanted = asyncio.Event()
        # The keys say whether a subscriber reads patches.
        self._changed: set[bool] = set()  # the subscribers for which the state may have changed
        self._is_urgent = False  # whether the next patch is due without `patch_spacing_s`
        self._due_s = {False: 0.0, True: 0.0}  # times of the event loop from which a load for them is allowed
        self._newcomers: dict[Subscriber, None] = {}
        self._newcomers_due_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._last_keyed: bytes | None = None  # the last keyed state sent to all readers of patches
        self._version = 0
        self.loads = 0
        self.failures = 0

    def add(self, subscriber: Subscriber, last_id: str | None = None) -> None:
        # Subscribe first and load afterwards, so that no change is missed in between.
        super().add(subscriber)
        self._newcomers[subscriber] = None
        self._wanted.set()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        super().unsubscribe(subscriber)
        self._newcomers.pop(subscriber, None)

    def changed(self, *, urgent: bool = False) -> None:
        """Note that the state may have changed: it is loaded and sent soon, once for all events up to then.

        `urgent`: its patch does not wait for `patch_spacing_s`.
        """
        self._changed = {False, True}
        self._is_urgent |= urgent
        self._wanted.set()

    def send_event(self, name: str, data: bytes) -> None:
        """Send a named event now, only to readers of this stream alone: the combined stream has the workflow's."""
        self.send(EventsMessage([NumberedEvent(name, data, "")]), to=lambda form: not form.numbered)

    async def start(self) -> None:
        self._task = tasks.keep(self._refresh_forever, f"stream {self.name}")

    async def close(self) -> None:
        await super().close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1)

    async def _refresh_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = await self._due()
            newcomers, self._newcomers = self._newcomers, {}
            self._changed -= due
            self._is_urgent &= True in self._changed
            state = await self._loaded()
            try:
                await self._hand_out(state, newcomers, due)
            except Exception as error:
                self.failures += 1
                log.exception("stream %s: a state could not be sent", self.name)
                for subscriber in newcomers:
                    subscriber.end(error)
            now_s, retries = loop.time(), bool(due) and isinstance(state, TraderError)
            self._newcomers_due_s = now_s + (RETRY_S if retries else self._options.spacing_s)
            self._due_s |= {patched: now_s + (RETRY_S if retries else self._spacings_s[patched]) for patched in due}
            if retries:
                self.changed()

    async def _due(self) -> set[bool]:
        """Wait until a load is due. Return which subscribers it is for; none if it is for newcomers only."""
        loop = asyncio.get_running_loop()
        while True:
            self._wanted.clear()
            self._changed &= {subscriber.form.patched for subscriber in self._subscribers}
            due_s = {patched: self._due_s[patched] for patched in self._changed}
            if self._is_urgent and True in due_s:
                due_s[True] = min(due_s[True], self._newcomers_due_s)  # which is `spacing_s` after the last load
            first_s, now_s = min([self._newcomers_due_s if self._newcomers else math.inf, *due_s.values()]), loop.time()
            if first_s <= now_s:
                return {patched for patched in due_s if due_s[patched] <= now_s}
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if first_s == math.inf else first_s):
                    await self._wanted.wait()

    async def _hand_out(
        self, state: bytes | BaseException, newcomers: dict[Subscriber, None], due: Collection[bool]
    ) -> None:
        if isinstance(state, BaseException):
            for subscriber in newcomers:
                subscriber.end(state)
            return
        message = await self._make_message(state, newcomers, due)
        if self._options.empty and state == b"[]":
            for subscriber in newcomers:
                subscriber.offer(EventsMessage([NumberedEvent("empty", self._options.empty, message.event_id)]))
        # Subscribers since the load began wait for the next one: this state may be older than their subscription.
        for subscriber in self._subscribers:
            if (subscriber in newcomers or subscriber.form.patched in due) and subscriber not in self._newcomers:
                subscriber.offer(message)

    async def _make_message(
        self, state: bytes, newcomers: Collection[Subscriber], due: Collection[bool]
    ) -> StateMessage:
        """Return the message of a state in the forms that its readers need: compressed, keyed, and as a patch."""
        message = StateMessage(self.name, state)
        forms = {each.form for each in self._subscribers if each in newcomers or each.form.patched in due}
        if any(form.patched for form in forms):
            await self._add_patch(message, state, for_all=True in due)
        for form in forms:
            sent = (message.patch or message.keyed) if form.patched else message
            if form.compressed and sent is not None:
                await sent.compress()
        event_id = self._last_id()  # read only now, since events may have been sent during the compression
        for each in filter(None, (message, message.keyed, message.patch)):
            each.event_id = event_id
        return message

    async def _add_patch(self, message: StateMessage, state: bytes, *, for_all: bool) -> None:
        """Add the keyed form of its state to a message; `for_all`: also the patch for all readers of patches."""
        keyed, last_keyed = await asyncio.to_thread(encode_keyed, state, self._options.cents), self._last_keyed
        message.keyed = StateMessage(self.name, keyed)
        if for_all:
            self._version += 1
            self._last_keyed = keyed
            if last_keyed is not None:
                patch = await asyncio.to_thread(encode_patch, last_keyed, keyed)
                message.patch = StateMessage(self.name, patch, is_patch=True)
        if for_all or keyed == last_keyed:
            message.version = self._version

    async def _loaded(self) -> bytes | BaseException:
        """Return the encoded state, or the failure as a value, since no failure may end the loading task."""
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


# --- patches ----------------------------------------------------------------------------------------------------------

_KEYS: Final = ("symbol", "id", "modelId")
"""The members that identify the items of a list; the first that differs between all items is used."""

_ABSENT: Any = object()


def encode_keyed(state: bytes, cents: Collection[str] = ()) -> bytes:
    """Return the keyed form of a state, both as JSON text; `cents` names the members that are rounded to cents."""
    return msgspec.json.encode(_keyed(msgspec.json.decode(state), cents))


def encode_patch(old: bytes, new: bytes) -> bytes:
    """Return the merge patch between two keyed forms, all as JSON text."""
    return msgspec.json.encode(_patch(msgspec.json.decode(old), msgspec.json.decode(new)))


def _keyed(value: Any, cents: Collection[str]) -> Any:
    if isinstance(value, dict):
        return {
            name: round(float(member), 2) if name in cents else _keyed(member, cents)
            for name, member in value.items()
            if member is not None
        }
    if not isinstance(value, list):
        return value
    for key in _KEYS:
        ids = [item.get(key) if isinstance(item, dict) else None for item in value]
        if all(isinstance(name, str) for name in ids) and len(set(ids)) == len(ids):
            return {"ids": ids, "items": {name: _keyed(item, cents) for name, item in zip(ids, value, strict=True)}}
    return value


def _patch(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    removed = {name: None for name in old if name not in new}
    changed = {name: _patch(old.get(name), value) for name, value in new.items() if old.get(name, _ABSENT) != value}
    return {**removed, **changed}
