"""Alarms for operators: how long they last, which explains which, and when each is reported.

A condition lasts from its beginning until it has been away for its settle time, so that one that flaps is one alarm:

    pending ─── reported ──▶ firing ─── away for settle_s ──▶ resolved (reported)
       └──────── away for settle_s ──▶ forgotten, never reported

A condition that another one explains stays pending: it is a consequence of that one, whose notices list it. It is
reported by itself only if it outlasts its explanation. An event happens at one moment: it is reported at once, and
again after an hour at the earliest, with the number of its repetitions.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import chain
from typing import Final, Literal, NamedTuple

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
    "model",
    "scheduler",
    "market",
    "database",
    "disk",
    "clock",
    "books",
    "access",
    "test",
]

EXPLAINED_BY: Final[Mapping[Kind, frozenset[Kind]]] = {
    "takeover": frozenset({"database"}),
    "scheduler": frozenset({"clock", "database", "market"}),
    "market": frozenset({"clock", "database"}),
    "model": frozenset({"clock", "database", "market"}),
    "reconciliation": frozenset({"clock", "database", "market"}),
}
"""The kinds that are consequences of others, whatever their subjects."""

EVERY_S: Final = 3600.0
"""The shortest time between two notices of one event, or of one condition that lasts, in real seconds."""

SETTLE_S: Final = 15.0
"""How long a condition must be away before it is resolved; doubled when it begins again soon after its end."""

SETTLE_MAX_S: Final = 300.0
SOON_S: Final = 600.0
"""How long after its end a condition that begins again counts as flapping."""

EXPLAIN_WAIT_S: Final = 15.0
"""How long what may be a consequence waits for its explanation."""

AFTERMATH_S: Final = 90.0
"""How long consequences may outlast their explanation unreported: a scheduler runs again within a minute."""

_ORDERED: Final[frozenset[Kind]] = frozenset({"halt", "loss limit"})
"""Conditions that a decision begins and ends: they do not flap, and are not repeated while they last."""


class AlarmCause(NamedTuple):
    """What an alarm is about. `subject` is an account, a provider, a model or a scheduler, or empty."""

    kind: Kind
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}" if self.subject else self.kind


class Alarm(NamedTuple):
    """A problem that operators are notified of. The text holds no secret. `under` is the cause that may explain it."""

    cause: AlarmCause
    text: str
    under: AlarmCause | None = None

    def is_explained_by(self, cause: AlarmCause) -> bool:
        return cause == self.under or cause.kind in EXPLAINED_BY.get(self.cause.kind, ())

    @property
    def may_be_explained(self) -> bool:
        return self.under is not None or self.cause.kind in EXPLAINED_BY


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A report of an alarm, which began `count` times between `since` and `at`."""

    state: Literal["firing", "resolved", "event"]
    cause: AlarmCause
    text: str
    at: datetime
    since: datetime
    count: int = 1
    consequences: tuple[str, ...] = ()


class Condition(msgspec.Struct, frozen=True):
    """A condition that is pending or firing. `_s` are monotonic seconds; `seen` is the last look at which it held.

    `is_away`: it did not hold at the last look.
    """

    alarm: Alarm
    since: datetime
    began_s: float
    seen_at: datetime
    seen_s: float
    settle_s: float
    count: int = 1
    is_away: bool = False
    reported_s: float | None = None
    consequences: tuple[str, ...] = ()

    def notice(self, state: Literal["firing", "resolved"]) -> Notice:
        return Notice(
            state=state,
            cause=self.alarm.cause,
            text=self.alarm.text,
            at=self.seen_at,
            since=self.since,
            count=self.count,
            consequences=self.consequences,
        )


class Ended(NamedTuple):
    """When a condition was resolved, in monotonic seconds, and the settle time that it had."""

    at_s: float
    settle_s: float


class HeldEvent(msgspec.Struct, frozen=True):
    """The events of a cause that were not sent yet, as one notice, and when the last notice was sent."""

    alarm: Alarm
    waiting: Notice | None
    waits_since_s: float
    sent_s: float | None = None


class AlarmState(msgspec.Struct, frozen=True):
    """Everything that is known of the alarms of one process, by cause."""

    conditions: Mapping[AlarmCause, Condition] = {}
    ended: Mapping[AlarmCause, Ended] = {}
    events: Mapping[AlarmCause, HeldEvent] = {}

    def firing(self) -> list[Condition]:
        """Return the conditions that were reported and are not resolved, the oldest first."""
        reported = (each for each in self.conditions.values() if each.reported_s is not None)
        return sorted(reported, key=lambda each: each.since)

    def explanations(self, alarm: Alarm) -> list[AlarmCause]:
        """Return the conditions of now that explain an alarm."""
        return [cause for cause in self.conditions if cause != alarm.cause and alarm.is_explained_by(cause)]


def add_event(state: AlarmState, alarm: Alarm, at: datetime, now_s: float) -> AlarmState:
    """Return the state with one more event."""
    known = state.events.get(alarm.cause)
    before = None if known is None else known.waiting
    waiting = Notice(
        state="event",
        cause=alarm.cause,
        text=alarm.text,
        at=at,
        since=at if before is None else before.since,
        count=1 if before is None else before.count + 1,
    )
    waits_since_s = now_s if known is None or before is None else known.waits_since_s
    held = HeldEvent(alarm, waiting, waits_since_s, None if known is None else known.sent_s)
    return msgspec.structs.replace(state, events={**state.events, alarm.cause: held})


def look(state: AlarmState, present: Iterable[Alarm], at: datetime, now_s: float) -> tuple[AlarmState, list[Notice]]:
    """Compare the conditions that hold now with the state. Return the new state and the notices that are due.

    Several alarms of one cause are one condition, with their texts joined.
    """
    state = _note_present(state, present, at, now_s)
    state, resolved = _resolve(state, now_s)
    state, fired = _report(_note_consequences(state), now_s)
    state, events = _send_events(state, now_s)
    return state, [*resolved, *fired, *events]


def _note_present(state: AlarmState, present: Iterable[Alarm], at: datetime, now_s: float) -> AlarmState:
    by_cause: dict[AlarmCause, Alarm] = {}
    for alarm in present:
        known = by_cause.get(alarm.cause)
        by_cause[alarm.cause] = alarm if known is None else known._replace(text=f"{known.text}; {alarm.text}")
    conditions = {
        cause: msgspec.structs.replace(each, is_away=cause not in by_cause) for cause, each in state.conditions.items()
    }
    for cause, alarm in by_cause.items():
        condition = conditions.get(cause)
        if condition is None:
            conditions[cause] = Condition(alarm, at, now_s, at, now_s, _settle_s(state.ended.get(cause), cause))
        else:
            count = condition.count + state.conditions[cause].is_away
            conditions[cause] = msgspec.structs.replace(condition, alarm=alarm, seen_at=at, seen_s=now_s, count=count)
    return msgspec.structs.replace(state, conditions=conditions)


def _settle_s(ended: Ended | None, cause: AlarmCause) -> float:
    if cause.kind in _ORDERED:
        return 0.0
    return SETTLE_S if ended is None else min(2 * ended.settle_s, SETTLE_MAX_S)


def _resolve(state: AlarmState, now_s: float) -> tuple[AlarmState, list[Notice]]:
    """End the conditions that have been away for long enough, and forget those that ended long ago."""
    over = {
        cause: each for cause, each in state.conditions.items() if each.is_away and now_s - each.seen_s >= each.settle_s
    }
    ended = {cause: each for cause, each in state.ended.items() if now_s - each.at_s < SOON_S}
    ended |= {cause: Ended(now_s, each.settle_s) for cause, each in over.items()}
    conditions = {cause: each for cause, each in state.conditions.items() if cause not in over}
    notices = [each.notice("resolved") for each in over.values() if each.reported_s is not None]
    return msgspec.structs.replace(state, conditions=conditions, ended=ended), notices


def _note_consequences(state: AlarmState) -> AlarmState:
    """List what is pending and was not sent yet at the conditions that explain it.

    An event is done when it is explained, or is told as a condition of the same cause.
    """
    conditions, events = dict(state.conditions), dict(state.events)
    pending = (each.alarm for each in state.conditions.values() if each.reported_s is None)
    unsent = [each.alarm for each in state.events.values() if each.waiting is not None]
    for alarm in chain(pending, unsent):
        for cause in state.explanations(alarm):
            known = conditions[cause]
            if str(alarm.cause) not in known.consequences:
                consequences = (*known.consequences, str(alarm.cause))
                conditions[cause] = msgspec.structs.replace(known, consequences=consequences)
    for alarm in unsent:
        if alarm.cause in conditions or state.explanations(alarm):
            events[alarm.cause] = msgspec.structs.replace(events[alarm.cause], waiting=None)
    return msgspec.structs.replace(state, conditions=conditions, events=events)


def _report(state: AlarmState, now_s: float) -> tuple[AlarmState, list[Notice]]:
    """Report the conditions that have begun and are not explained, and repeat those that last an hour."""
    conditions, notices = dict(state.conditions), []
    for cause, each in state.conditions.items():
        if each.is_away:
            is_due = False
        elif each.reported_s is None:
            is_due = not _is_explained(state, each.alarm, each.began_s, now_s)
        else:
            is_due = cause.kind not in _ORDERED and now_s - each.reported_s >= EVERY_S
        if is_due:
            conditions[cause] = msgspec.structs.replace(each, reported_s=now_s)
            notices.append(each.notice("firing"))
    return msgspec.structs.replace(state, conditions=conditions), notices


def _is_explained(state: AlarmState, alarm: Alarm, began_s: float, now_s: float) -> bool:
    """Whether an alarm is a consequence, or may still turn out to be one."""
    if not alarm.may_be_explained:
        return False
    return (
        bool(state.explanations(alarm))
        or now_s - began_s < EXPLAIN_WAIT_S
        or any(alarm.is_explained_by(cause) and now_s - each.at_s < AFTERMATH_S for cause, each in state.ended.items())
    )


def _send_events(state: AlarmState, now_s: float) -> tuple[AlarmState, list[Notice]]:
    """Return the events to send now. Causes of which nothing is left to know are forgotten."""
    due: list[Notice] = []
    left: dict[AlarmCause, HeldEvent] = {}
    for cause, each in state.events.items():
        is_held = each.sent_s is not None and now_s - each.sent_s < EVERY_S
        if is_held or (each.waiting is not None and _is_explained(state, each.alarm, each.waits_since_s, now_s)):
            left[cause] = each
        elif each.waiting is not None:
            due.append(each.waiting)
            left[cause] = msgspec.structs.replace(each, waiting=None, sent_s=now_s)
    return msgspec.structs.replace(state, events=left), due


def alarm_of_halt(halt: Halt) -> Alarm:
    """Return the alarm of a halt in force; its subject is the account, or `all accounts`."""
    subject = halt.account_id or "all accounts"
    return Alarm(AlarmCause("loss limit" if halt.cause in LIMITS else "halt", subject), str(halt))
