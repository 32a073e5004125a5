"""Alarms for operators and their rate limit: at most one notice per cause and hour, which counts the rest.

An event is an alarm each time it happens. A condition, such as a market without updates, is one when it begins and once
an hour while it lasts.
"""

from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from trader.domain.exchange.halts import LIMITS, Halt

Kind = Literal[
    "start",
    "stop",
    "takeover",
    "halt",
    "loss limit",
    "liquidation",
    "reconciliation",
    "provider",
    "provider recovered",
    "model",
    "model recovered",
    "scheduler",
    "market",
    "database",
    "disk",
    "books",
]

RECOVERED: Final[Mapping[Kind, Kind]] = {"provider": "provider recovered", "model": "model recovered"}
"""The conditions whose end is an alarm as well."""

EVERY_S: Final = 3600.0
"""The shortest time between two notices of one cause, in real seconds."""


class AlarmCause(NamedTuple):
    """What an alarm is about. `subject` is a provider, a model, a scheduler, or `all accounts`; never an account."""

    kind: Kind
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}" if self.subject else self.kind


class Alarm(NamedTuple):
    """A problem that operators are notified of. The text holds no secret."""

    cause: AlarmCause
    text: str


class Notice(msgspec.Struct, frozen=True):
    """What is sent: the last of `count` alarms of one cause, the first of which was at `since`."""

    cause: AlarmCause
    text: str
    at: datetime
    count: int
    since: datetime


class HeldNotice(msgspec.Struct, frozen=True):
    """The alarms of a cause that were not sent yet, as one notice, and when the last notice was sent."""

    waiting: Notice | None = None
    sent_s: float | None = None

    def may_send(self, now_s: float) -> bool:
        """Whether the hour after the last notice is over. `now_s` is in monotonic seconds, as is `sent_s`."""
        return self.sent_s is None or now_s - self.sent_s >= EVERY_S


AllHeld: TypeAlias = Mapping[AlarmCause, HeldNotice]


def add(held: AllHeld, alarm: Alarm, at: datetime) -> AllHeld:
    """Return what is held with one more alarm."""
    before = held.get(alarm.cause, HeldNotice())
    waiting = before.waiting
    notice = Notice(
        alarm.cause,
        alarm.text,
        at,
        count=1 if waiting is None else waiting.count + 1,
        since=at if waiting is None else waiting.since,
    )
    return {**held, alarm.cause: msgspec.structs.replace(before, waiting=notice)}


def add_conditions(
    held: AllHeld, before: Set[AlarmCause], present: Sequence[Alarm], at: datetime, now_s: float
) -> AllHeld:
    """Return what is held with the conditions that have begun, and those that last and are due again.

    `before` are the causes of the conditions at the last look; each cause is found once at most.
    """
    for alarm in present:
        known = held.get(alarm.cause, HeldNotice())
        if alarm.cause not in before or (known.waiting is None and known.may_send(now_s)):
            held = add(held, alarm, at)
    return held


def ended(before: Set[AlarmCause], current: Set[AlarmCause]) -> list[Alarm]:
    """Return a recovery alarm for each condition that has ended, if its end is reported."""
    return [
        Alarm(AlarmCause(RECOVERED[cause.kind], cause.subject), f"{cause} works again")
        for cause in sorted(before - current)
        if cause.kind in RECOVERED
    ]


def take_due(held: AllHeld, now_s: float) -> tuple[list[Notice], AllHeld]:
    """Return the notices to send now, and what stays held. Causes of which nothing is left to know are dropped."""
    due: list[Notice] = []
    left: dict[AlarmCause, HeldNotice] = {}
    for cause, each in held.items():
        if not each.may_send(now_s):
            left[cause] = each
        elif each.waiting is not None:
            due.append(each.waiting)
            left[cause] = HeldNotice(sent_s=now_s)
    return due, left


def alarm_of_halt(halt: Halt) -> Alarm:
    """Return the alarm of a halt that came into force: halts of single accounts share one cause."""
    subject = "all accounts" if halt.account_id is None else ""
    return Alarm(AlarmCause("loss limit" if halt.cause in LIMITS else "halt", subject), str(halt))
