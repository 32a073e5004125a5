"""Alarms for operators: how long they last, which alarms explain others, and when each is reported.

A condition lasts from its start until it has been away for its settle time, so that a flapping one is a single alarm:

    pending ─── reported ──▶ firing ─── away for settle_s ──▶ resolved (reported)
       └──────── away for settle_s ──▶ forgotten, never reported

A condition that another one explains stays pending: it is a consequence of the other one, whose notices list it. It is
reported separately only if it outlasts its explanation. An event happens at one moment: it is reported at once, and
again after an hour at the earliest, with the number of repetitions.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import chain
from typing import Final, Literal, NamedTuple

import msgspec

from trader.exchange.domain.halts import LIMITS, Halt

NoticeKind = Literal[
    "start",
    "stop",
    "takeover",
    "halt",
    "approval",
    "loss limit",
    "liquidation",
    "reconciliation",
    "provider",
    "model",
    "price",
    "scheduler",
    "market",
    "database",
    "degraded",
    "requests",
    "disk",
    "clock",
    "books",
    "maintenance",
    "access",
    "notices",
    "test",
]

EXPLAINED_BY: Final[Mapping[NoticeKind, frozenset[NoticeKind]]] = {
    "takeover": frozenset({"database"}),
    "disk": frozenset({"database"}),
    "scheduler": frozenset({"clock", "database", "degraded", "market"}),
    "market": frozenset({"clock", "database"}),
    "model": frozenset({"clock", "database", "market"}),
    "reconciliation": frozenset({"clock", "database", "market"}),
}
"""The kinds that are consequences of others, regardless of their subjects."""

EVERY_S: Final = 3600.0
"""The shortest time between two notices of one event, or of one lasting condition, in real seconds."""

SETTLE_S: Final = 15.0
"""How long a condition must be away before it is resolved; doubled if it begins again soon after its end."""

SETTLE_MAX_S: Final = 300.0
SOON_S: Final = 600.0
"""A condition that begins again within this time after its end counts as flapping."""

EXPLAIN_WAIT_S: Final = 15.0
"""How long a possible consequence waits for its explanation."""

AFTERMATH_S: Final = 90.0
"""How long consequences may outlast their explanation without a report: a scheduler runs again within a minute."""

HOLD_S: Final = 5.0
STARTS_MAX: Final = 3
MEMORY_S: Final = 60.0
"""A condition of health is reported once it has held for `HOLD_S` in all, or has begun `STARTS_MAX` times, without
being away for `MEMORY_S`. So a single failed statement does not raise an alarm, but a recurring condition does."""

_OF_HEALTH: Final[frozenset[NoticeKind]] = frozenset({"database", "requests", "market", "scheduler", "reconciliation"})

_EACH_IS_SENT: Final[frozenset[NoticeKind]] = frozenset({"start", "stop", "takeover", "approval"})
"""Events that are never held back for an hour: which process trades now, and what waits for a person."""

_ORDERED: Final[frozenset[NoticeKind]] = frozenset({"halt", "loss limit", "price", "maintenance"})
"""Conditions that a decision or a run begins and ends: they do not flap, and are not repeated while they last."""


class AlarmCause(NamedTuple):
    """What an alarm is about. `subject` is an account, a provider, a model or a scheduler, or empty."""

    kind: NoticeKind
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}" if self.subject else self.kind


class Alarm(NamedTuple):
    """A problem to notify operators of. The text contains no secret. `under` is the cause that may explain it.

    `since` is when it began, in real time, if that is known from what failed; otherwise it began when it was first
    seen. `impact` lists the failures that it caused.
    """

    cause: AlarmCause
    text: str
    under: AlarmCause | None = None
    since: datetime | None = None
    impact: str = ""

    def is_explained_by(self, cause: AlarmCause) -> bool:
        return cause == self.under or cause.kind in EXPLAINED_BY.get(self.cause.kind, ())


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A report of an alarm, which began `count` times between `since` and `at`."""

    state: Literal["firing", "resolved", "event"]
    cause: AlarmCause
    text: str
    at: datetime
    since: datetime
    count: int = 1
    consequences: tuple[str, ...] = ()
    impact: str = ""


class Condition(msgspec.Struct, frozen=True):
    """A condition that is pending or firing. Fields in `_s` are monotonic seconds; `seen` is when it last held.

    `held_s` is how long it has held in all. `is_away`: it did not hold at the last check.
    """

    alarm: Alarm
    since: datetime
    began_s: float
    seen_at: datetime
    seen_s: float
    settle_s: float
    count: int = 1
    held_s: float = 0.0
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
            impact=self.alarm.impact,
        )

    @property
    def ends_after_s(self) -> float:
        """How long it must be away to be over: resolved if it was reported, otherwise forgotten."""
        is_remembered = self.reported_s is None and self.alarm.cause.kind in _OF_HEALTH
        return max(self.settle_s, MEMORY_S) if is_remembered else self.settle_s


class Ended(NamedTuple):
    """When a condition was resolved, in monotonic seconds, and the settle time that it had."""

    at_s: float
    settle_s: float


class HeldEvent(msgspec.Struct, frozen=True):
    """A cause's unsent events as one notice, and when its last notice was sent."""

    alarm: Alarm
    waiting: Notice | None
    waits_since_s: float
    sent_s: float | None = None


class AlarmState(msgspec.Struct, frozen=True):
    """Everything known about the alarms of one process, by cause."""

    conditions: Mapping[AlarmCause, Condition] = {}
    ended: Mapping[AlarmCause, Ended] = {}
    events: Mapping[AlarmCause, HeldEvent] = {}

    def firing(self) -> list[Condition]:
        """Return the conditions that were reported and are not resolved, oldest first."""
        reported = (each for each in self.conditions.values() if each.reported_s is not None)
        return sorted(reported, key=lambda each: each.since)

    def present(self) -> list[Condition]:
        """Return the conditions that were reported and are not resolved, and what else holds now, oldest first.

        A condition of health that was not reported yet is left out: the health report says at once whether it holds.
        """
        present = (
            each
            for cause, each in self.conditions.items()
            if each.reported_s is not None or not (each.is_away or cause.kind in _OF_HEALTH)
        )
        return sorted(present, key=lambda each: each.since)

    def explanations(self, alarm: Alarm) -> list[AlarmCause]:
        """Return the current conditions that explain an alarm."""
        current = (cause for cause, each in self.conditions.items() if each.reported_s is not None or not each.is_away)
        return [cause for cause in current if cause != alarm.cause and alarm.is_explained_by(cause)]


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

    Several alarms with the same cause form one condition, with their texts joined.
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
        by_cause[alarm.cause] = alarm if known is None else _joined(known, alarm)
    conditions = {
        cause: msgspec.structs.replace(each, is_away=cause not in by_cause) for cause, each in state.conditions.items()
    }
    for cause, alarm in by_cause.items():
        condition = conditions.get(cause)
        if condition is None:
            settle_s = _settle_s(state.ended.get(cause), cause)
            conditions[cause] = Condition(alarm, alarm.since or at, now_s, at, now_s, settle_s)
        else:
            was_away = state.conditions[cause].is_away
            conditions[cause] = msgspec.structs.replace(
                condition,
                alarm=alarm._replace(impact=alarm.impact or condition.alarm.impact),
                since=min(condition.since, alarm.since or condition.since),
                seen_at=at,
                seen_s=now_s,
                count=condition.count + was_away,
                held_s=condition.held_s + (0.0 if was_away else now_s - condition.seen_s),
            )
    return msgspec.structs.replace(state, conditions=conditions)


def _joined(alarm: Alarm, other: Alarm) -> Alarm:
    """Return two alarms with the same cause as one."""
    since = min(filter(None, (alarm.since, other.since)), default=None)
    impact = "; ".join(filter(None, (alarm.impact, other.impact)))
    return alarm._replace(text=f"{alarm.text}; {other.text}", since=since, impact=impact)


def _settle_s(ended: Ended | None, cause: AlarmCause) -> float:
    if cause.kind in _ORDERED:
        return 0.0
    return SETTLE_S if ended is None else min(2 * ended.settle_s, SETTLE_MAX_S)


def _resolve(state: AlarmState, now_s: float) -> tuple[AlarmState, list[Notice]]:
    """End the conditions that have been away for long enough, and forget those that ended long ago."""
    over = {
        cause: each
        for cause, each in state.conditions.items()
        if each.is_away and now_s - each.seen_s >= each.ends_after_s
    }
    ended = {cause: each for cause, each in state.ended.items() if now_s - each.at_s < SOON_S}
    ended |= {cause: Ended(now_s, each.settle_s) for cause, each in over.items() if each.reported_s is not None}
    conditions = {cause: each for cause, each in state.conditions.items() if cause not in over}
    notices = [each.notice("resolved") for each in over.values() if each.reported_s is not None]
    return msgspec.structs.replace(state, conditions=conditions, ended=ended), notices


def _note_consequences(state: AlarmState) -> AlarmState:
    """List pending conditions and unsent events as consequences of the conditions that explain them.

    An event is settled once it is explained, or reported as a condition of the same cause.
    """
    conditions, events = dict(state.conditions), dict(state.events)
    pending = (each.alarm for each in state.conditions.values() if each.reported_s is None)
    unsent = [each.alarm for each in state.events.values() if each.waiting is not None]
    for alarm in chain(pending, unsent):
        # Every change of the leader is told with its text.
        consequence = f"{alarm.cause}: {alarm.text}" if alarm.cause.kind in _EACH_IS_SENT else str(alarm.cause)
        for cause in state.explanations(alarm):
            known = conditions[cause]
            if consequence not in known.consequences:
                consequences = (*known.consequences, consequence)
                conditions[cause] = msgspec.structs.replace(known, consequences=consequences)
    for alarm in unsent:  # what a pending condition explains waits: that condition may be forgotten
        explanations = [alarm.cause, *state.explanations(alarm)]
        if any(cause in conditions and conditions[cause].reported_s is not None for cause in explanations):
            events[alarm.cause] = msgspec.structs.replace(events[alarm.cause], waiting=None)
    return msgspec.structs.replace(state, conditions=conditions, events=events)


def _report(state: AlarmState, now_s: float) -> tuple[AlarmState, list[Notice]]:
    """Report the conditions that have begun and are not explained, and repeat those that have lasted an hour."""
    conditions, notices = dict(state.conditions), []
    for cause, each in state.conditions.items():
        if each.is_away:
            is_due = False
        elif each.reported_s is None:
            is_certain = cause.kind not in _OF_HEALTH or each.held_s >= HOLD_S or each.count >= STARTS_MAX
            is_due = is_certain and not _is_explained(state, each.alarm, each.began_s, now_s)
        else:
            is_due = cause.kind not in _ORDERED and now_s - each.reported_s >= EVERY_S
        if is_due:
            conditions[cause] = msgspec.structs.replace(each, reported_s=now_s)
            notices.append(each.notice("firing"))
    return msgspec.structs.replace(state, conditions=conditions), notices


def _is_explained(state: AlarmState, alarm: Alarm, began_s: float, now_s: float) -> bool:
    """Return whether an alarm is a consequence, or may still turn out to be one."""
    may_be_explained = alarm.under is not None or alarm.cause.kind in EXPLAINED_BY
    return may_be_explained and (
        bool(state.explanations(alarm))
        or now_s - began_s < EXPLAIN_WAIT_S
        or any(alarm.is_explained_by(cause) and now_s - each.at_s < AFTERMATH_S for cause, each in state.ended.items())
    )


def _send_events(state: AlarmState, now_s: float) -> tuple[AlarmState, list[Notice]]:
    """Return the events to send now, and forget causes with nothing left to track."""
    due: list[Notice] = []
    left: dict[AlarmCause, HeldEvent] = {}
    for cause, each in state.events.items():
        is_held = each.sent_s is not None and now_s - each.sent_s < EVERY_S and cause.kind not in _EACH_IS_SENT
        waits = cause in state.conditions or _is_explained(state, each.alarm, each.waits_since_s, now_s)
        if is_held or (each.waiting is not None and waits):
            left[cause] = each
        elif each.waiting is not None:
            due.append(each.waiting)
            left[cause] = msgspec.structs.replace(each, waiting=None, sent_s=now_s)
    return msgspec.structs.replace(state, events=left), due


def flush(state: AlarmState) -> list[Notice]:
    """Return the notices of the pending events, for the end of the process."""
    return [each.waiting for each in state.events.values() if each.waiting is not None]


def alarm_of_halt(halt: Halt) -> Alarm:
    """Return the alarm for a halt in force; its subject is the account, or `all accounts`."""
    subject = halt.account_id or "all accounts"
    return Alarm(AlarmCause("loss limit" if halt.cause in LIMITS else "halt", subject), str(halt))
