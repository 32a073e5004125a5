"""Slots: limit the concurrent invocations of each provider model, or server; further invocations queue.

A model that hangs occupies only the slots of its own name at the provider, so it delays no other model. Where a
provider states the slots of its server, all models there share them.
"""

from collections import Counter, deque
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from trader.agents.domain.models import Model


class Batch:
    """The invocations that one cycle started; `left` counts the unfinished ones."""

    __slots__ = ("left", "model_ids")

    def __init__(self, model_ids: tuple[str, ...]) -> None:
        self.model_ids = model_ids
        self.left = len(model_ids)


class QueuedModel(NamedTuple):
    """A model waiting for a slot."""

    model: Model
    batch: Batch
    since: datetime


SlotName = tuple[str, str]
"""Key of a group of slots: the provider and its name for the model, or a server and nothing."""


def slot_name(model: Model) -> SlotName:
    """Return the name of a model's slots: its server, if its provider states that one's slots, else its own."""
    definition = model.configuration.provider_definition
    if definition is None or definition.slots is None:
        return model.provider, model.router_model_name
    return definition.server, ""


class Slots:
    """The slots of every provider model, and the models that wait for one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: Counter[SlotName] = Counter()
        self._queues: dict[SlotName, deque[QueuedModel]] = {}

    def add(self, queued: QueuedModel) -> None:
        self._queues.setdefault(slot_name(queued.model), deque()).append(queued)

    def take(self, name: SlotName) -> QueuedModel | None:
        """Take a slot for the model that has waited longest; None if no slot is free or no model waits."""
        queue = self._queues.get(name)
        if not queue or self._taken[name] >= self._size_for(queue[0].model):
            return None
        self._taken[name] += 1
        return queue.popleft()

    def _size_for(self, model: Model) -> int:
        definition = model.configuration.provider_definition
        return self._size if definition is None or definition.slots is None else definition.slots

    def free(self, name: SlotName) -> None:
        self._taken[name] -= 1

    def clear(self) -> None:
        self._queues.clear()

    def waiting(self) -> Mapping[str, datetime]:
        """Return the waiting models, each with the start of its wait."""
        return {queued.model.id: queued.since for queue in self._queues.values() for queued in queue}
