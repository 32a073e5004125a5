"""In-process event bus: services publish after they commit, streams listen."""

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

import msgspec

log = logging.getLogger("trader")

WorkflowType = Literal[
    "workflow:started", "workflow:step", "workflow:call", "workflow:complete", "workflow:failed", "batch:complete"
]


class Event(msgspec.Struct, frozen=True):
    """Something that has happened. Subjects define further events next to their own types."""


class MarketChecked(Event, frozen=True):
    """The price tracker's interval has passed; live values are due."""

    at: datetime


class PricesChanged(Event, frozen=True):
    """A tick was applied: the markets have new prices."""

    at: datetime


class PositionsChanged(Event, frozen=True):
    """A position or a resting order of these accounts was opened, changed or closed."""

    at: datetime
    account_ids: tuple[str, ...]


class ConversationsChanged(Event, frozen=True):
    """An invocation of this model was recorded."""

    at: datetime
    model_id: str


class VenueDiffers(Event, frozen=True):
    """The account differs from its venue account; published once per difference. `text` includes the rule."""

    at: datetime
    account_id: str
    kind: str
    text: str


class ApprovalWanted(Event, frozen=True):
    """An order of the account waits for a person; `text` says how to approve it."""

    at: datetime
    account_id: str
    text: str


class PostingRefused(Event, frozen=True):
    """A posting of the account violated a schema constraint, which is a bug; nothing was written."""

    account_id: str
    text: str


class LeadershipChanged(Event, frozen=True):
    """A standby has begun to lead, or a leader has lost its role; `text` says which."""

    text: str


class WorkflowProgress(Event, frozen=True):
    """A step of the trading workflow. `details` holds what the wire adds (`modelId`, `modelIds`, …)."""

    type: WorkflowType
    at: datetime
    details: dict[str, Any]


class EventBus:
    """Calls every listener within `publish`, in order of subscription. A listener takes note and returns at once.

    An error in a listener is a bug, which is logged. It reaches neither the other listeners nor the publisher, who has
    already committed what it publishes.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def publish(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed at the event %s", type(event).__name__)
