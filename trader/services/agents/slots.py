"""Slots: at most so many invocations of one provider at once; the models that are due beyond that wait in turn."""

from collections import Counter, deque
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from trader.domain.models import Model


class Batch:
    """The invocations that one cycle started; `left` counts those that have not ended."""

    __slots__ = ("left", "model_ids")

    def __init__(self, model_ids: tuple[str, ...]) -> None:
        self.model_ids = model_ids
        self.left = len(model_ids)


class Queued(NamedTuple):
    """A model that waits for a slot of its provider."""

    model: Model
    batch: Batch
    since: datetime


class Slots:
    """The slots of every provider, and the models that wait for one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: Counter[str] = Counter()
        self._queues: dict[str, deque[Queued]] = {}

    def add(self, queued: Queued) -> None:
        """Let a model wait for a slot of its provider."""
        self._queues.setdefault(queued.model.provider, deque()).append(queued)

    def take(self, provider: str) -> Queued | None:
        """Take a slot for the model that has waited longest; None when no slot is free, or no model waits."""
        queue = self._queues.get(provider)
        if not queue or self._taken[provider] >= self._size:
            return None
        self._taken[provider] += 1
        return queue.popleft()

    def free(self, provider: str) -> None:
        """Give a slot back."""
        self._taken[provider] -= 1

    def clear(self) -> None:
        """Forget the models that wait."""
        self._queues.clear()

    def waiting(self) -> Mapping[str, datetime]:
        """Return the models that wait, and since when."""
        return {queued.model.id: queued.since for queue in self._queues.values() for queued in queue}
