"""Limits of losses: what an account, or all together, may lose in a day and from its peak. Pure.

A day is one of UTC. The daily loss is measured against the first equity seen in it, the drawdown against the highest
seen in the run. After a halt was lifted both are measured anew, from the equity of that moment.
"""

from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import msgspec

from trader.domain.exchange.halts import HaltCause
from trader.domain.money import ZERO, divide


class LossThresholds(msgspec.Struct, frozen=True):
    """In percent; None is no limit."""

    daily_loss: Decimal | None = None
    drawdown: Decimal | None = None

    @property
    def are_set(self) -> bool:
        return self.daily_loss is not None or self.drawdown is not None


class Worth(NamedTuple):
    """What an account is worth at one moment, in the run that it is in."""

    run_id: UUID
    initial_capital: Decimal
    equity: Decimal


class LossBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """What losses are measured against. None is taken from the next equity seen; `run_id` None is of all accounts."""

    run_id: UUID | None
    day: date
    day_start: Decimal | None
    peak: Decimal | None
    last: Decimal


class Breach(NamedTuple):
    """A limit that was hit, with its figures in words."""

    cause: HaltCause
    reason: str


def begin(run_id: UUID | None, initial_capital: Decimal, equity: Decimal, day: date) -> LossBaseline:
    """The mark of a run that begins on this day, with its capital."""
    return LossBaseline(
        run_id=run_id, day=day, day_start=initial_capital, peak=max(initial_capital, equity), last=equity
    )


def advance(mark: LossBaseline, equity: Decimal, day: date) -> LossBaseline:
    """The mark after an equity was seen. A clock that goes back to the day before does not begin a day."""
    begins = day > mark.day or mark.day_start is None
    return LossBaseline(
        run_id=mark.run_id,
        day=max(day, mark.day),
        day_start=equity if begins else mark.day_start,
        peak=equity if mark.peak is None else max(mark.peak, equity),
        last=equity,
    )


def follow(mark: LossBaseline | None, worth: Worth, day: date) -> LossBaseline:
    """The mark of an account after it was seen; a run without one has just begun."""
    if mark is None or mark.run_id != worth.run_id:
        return begin(worth.run_id, worth.initial_capital, worth.equity, day)
    return advance(mark, worth.equity, day)


def recall(
    mark: LossBaseline | None,
    run_id: UUID,
    initial_capital: Decimal,
    day: date,
    *,
    peak_since: Decimal | None,
    first_today: Decimal | None,
) -> LossBaseline | None:
    """The mark with which to go on after a stop: as it was recorded, and what snapshots say of the time since.

    `peak_since` is the highest equity after the mark (or in the whole run without one), `first_today` the first of
    this day; None where there is no snapshot.
    """
    if mark is None or mark.run_id != run_id:
        if peak_since is None:
            return mark
        peak = max(initial_capital, peak_since)
        return LossBaseline(run_id=run_id, day=day, day_start=first_today, peak=peak, last=peak_since)
    if mark.peak is None:  # renewed: what was before does not count
        return mark
    if peak_since is not None:
        mark = msgspec.structs.replace(mark, peak=max(mark.peak, peak_since))
    if mark.day < day and first_today is not None:
        mark = msgspec.structs.replace(mark, day=day, day_start=first_today)
    return mark


def renew(mark: LossBaseline) -> LossBaseline:
    """The mark after a halt was lifted: losses are measured from the next equity on."""
    return msgspec.structs.replace(mark, day_start=None, peak=None)


def flow(before: Mapping[str, LossBaseline], worths: Mapping[str, Worth]) -> Decimal:
    """The capital that came (or went, negative) since the marks: accounts that were opened, or started a new run."""
    total = ZERO
    for account_id, worth in worths.items():
        mark = before.get(account_id)
        if mark is None:
            total += worth.initial_capital
        elif mark.run_id != worth.run_id:
            total += worth.initial_capital - mark.last
    return total


def shift(mark: LossBaseline, amount: Decimal) -> LossBaseline:
    """The mark after capital came or went: that is neither a profit nor a loss."""
    return msgspec.structs.replace(
        mark,
        day_start=None if mark.day_start is None else mark.day_start + amount,
        peak=None if mark.peak is None else mark.peak + amount,
        last=mark.last + amount,
    )


def breach(mark: LossBaseline, limits: LossThresholds) -> Breach | None:
    """The limit that the last equity hits, the daily one first; None when it keeps both."""
    for cause, limit, start, words in (
        (HaltCause.DAILY_LOSS, limits.daily_loss, mark.day_start, f"began {mark.day} (UTC) with"),
        (HaltCause.DRAWDOWN, limits.drawdown, mark.peak, "had at its peak"),
    ):
        if limit is None or start is None or start <= 0:
            continue
        lost = start - mark.last
        if 100 * lost >= limit * start:
            percent = divide(100 * lost, start)
            return Breach(
                cause,
                f"equity {mark.last:.2f} is {percent:.2f} % below the {start:.2f} it {words}; the limit is {limit:f} %",
            )
    return None
