"""Tick order: which of a source's dates the accounts have seen, however the clocks that gave those dates were set.

Ticks are numbered in the order of application. A date only labels a tick, and the source's history is read by dates:
what was applied under a date is never read again.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from trader.core.clock import SET_BACK_LEAST

SPANS_MAX: Final = 8
"""Number of spans kept; each jump of the clock ahead adds one."""

BEFORE_FIRST: Final = timedelta(minutes=10)
"""Nothing was missed before a database's first tick: a clock that is behind by no more than this is behind."""


class DateSpan(NamedTuple):
    """The dates of (since, until]."""

    since: datetime
    until: datetime


DateSpans = tuple[DateSpan, ...]
"""Ascending spans that do not meet."""


def add_span(spans: Iterable[DateSpan], since: datetime, until: datetime) -> DateSpans:
    """Add the dates of (since, until]; of too many spans, the earliest are forgotten."""
    apart = []
    for span in spans:
        if span.until < since or until < span.since:
            apart.append(span)
        else:
            since, until = min(since, span.since), max(until, span.until)
    return tuple(sorted([*apart, DateSpan(since, until)])[-SPANS_MAX:])


def cut_out(spans: Iterable[DateSpan], since: datetime, until: datetime) -> DateSpans:
    """Return the spans without the dates of (since, until]."""
    parts = [
        DateSpan(*part)
        for span in spans
        for part in ((span.since, min(span.until, since)), (max(span.since, until), span.until))
    ]
    return tuple(sorted({part for part in parts if part.since < part.until}))


def unseen(spans: Iterable[DateSpan], since: datetime, until: datetime) -> DateSpans:
    """Return the dates of (since, until] that are in none of the spans."""
    left: DateSpans = (DateSpan(since, until),) if since < until else ()
    for span in spans:
        left = cut_out(left, *span)
    return left


class Resumption(NamedTuple):
    """How a start continues: the date of the last applied tick by the present clock.

    `ahead`: dates that are still to come by the present clock, which is behind, and that were missed since that tick.
    """

    at: datetime
    ahead: DateSpan | None = None


def resume(
    spans: DateSpans, last: datetime, now: datetime, jump: timedelta | None, elapsed: timedelta | None = None
) -> Resumption:
    """Continue after a tick that was applied under the date `last`.

    `jump` is how far the clock was set since then; None if unknown, as after a reboot or on another machine. Then the
    present clock is behind if less time has passed by it than has `elapsed` by the database's. Otherwise, a date in the
    future comes from a clock that was ahead: if it had been set ahead while a process ran, the time before that is
    known. Dates that were seen before are not read again.
    """
    if jump is None and elapsed is not None and now - last < elapsed - SET_BACK_LEAST:
        jump = now - last - elapsed
    if jump is None:
        at = _brought_back(spans, last, now) if last - now > SET_BACK_LEAST else last
        missed = unseen(spans, at, now)
        return Resumption(missed[0].since if missed else max(at, min(last, now)))
    if abs(jump) <= SET_BACK_LEAST:
        return Resumption(last)
    at = min(last + jump, now)
    if jump < timedelta(0) and at < now and not unseen(spans, at, min(now, last)):  # the present clock is behind
        return Resumption(now, DateSpan(last, last + (now - at)))
    return Resumption(at)


def _brought_back(spans: DateSpans, last: datetime, now: datetime) -> datetime:
    ahead = next((span.since for span in spans if span.since < last <= span.until), now)
    before = max((span.until for span in spans if span.until <= now), default=now)
    return min(last - (ahead - before), now) if ahead > now else now
