"""Loss limits: what an account, or all accounts together, may lose within a day and from their peak equity.

Days are UTC days. The daily loss is measured against the first equity of the day, the drawdown against the highest
equity of the run. After a halt is lifted, both are measured from the equity at that moment.
"""

from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import msgspec

from trader.core.money import ZERO, divide
from trader.exchange.domain.halts import HaltCause


class LossThresholds(msgspec.Struct, frozen=True):
    """Limits in percent; None means no limit."""

    daily_loss: Decimal | None = None
    drawdown: Decimal | None = None

    @property
    def are_set(self) -> bool:
        return self.daily_loss is not None or self.drawdown is not None


class RunEquity(NamedTuple):
    """An account's equity at one moment, with its current run."""

    run_id: UUID
    initial_capital: Decimal
    equity: Decimal


class LossBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """What losses are measured against. `run_id` is None for all accounts; the next equity sets any other None."""

    run_id: UUID | None
    day: date
    day_start: Decimal | None
    peak: Decimal | None
    last: Decimal


def begin(run_id: UUID | None, initial_capital: Decimal, equity: Decimal, day: date) -> LossBaseline:
    """Return the baseline of a run that begins on this day, with its capital."""
    return LossBaseline(
        run_id=run_id, day=day, day_start=initial_capital, peak=max(initial_capital, equity), last=equity
    )


def advance(baseline: LossBaseline, equity: Decimal, day: date) -> LossBaseline:
    """Return the baseline after a new equity. If the clock is set back to the previous day, no new day begins."""
    begins = day > baseline.day or baseline.day_start is None
    return LossBaseline(
        run_id=baseline.run_id,
        day=max(day, baseline.day),
        day_start=equity if begins else baseline.day_start,
        peak=equity if baseline.peak is None else max(baseline.peak, equity),
        last=equity,
    )


def update(baseline: LossBaseline | None, current: RunEquity, day: date) -> LossBaseline:
    """Return the baseline of an account after a new equity; a run without a baseline has just begun."""
    if baseline is None or baseline.run_id != current.run_id:
        return begin(current.run_id, current.initial_capital, current.equity, day)
    return advance(baseline, current.equity, day)


class RecordedEquity(NamedTuple):
    """What is recorded of an account's run: its baseline, and the equity in its snapshots since then.

    `peak_since` is the highest equity since the baseline (or of the whole run if there is none), `first_today` the
    first equity of this day; both are None without snapshots.
    """

    run_id: UUID
    initial_capital: Decimal
    baseline: LossBaseline | None
    peak_since: Decimal | None
    first_today: Decimal | None


def restore(recorded: RecordedEquity, day: date) -> LossBaseline:
    """Return the baseline after a restart: the recorded one, updated with the snapshots since."""
    run_id, initial_capital, baseline, peak_since, first_today = recorded
    if baseline is None or baseline.run_id != run_id:
        if peak_since is None:
            return begin(run_id, initial_capital, initial_capital, day)
        peak = max(initial_capital, peak_since)
        return LossBaseline(run_id=run_id, day=day, day_start=first_today, peak=peak, last=peak_since)
    if baseline.peak is None:  # reset: earlier equity does not count
        return baseline
    if peak_since is not None:
        baseline = msgspec.structs.replace(baseline, peak=max(baseline.peak, peak_since))
    if baseline.day < day and first_today is not None:
        baseline = msgspec.structs.replace(baseline, day=day, day_start=first_today)
    return baseline


def reset(baseline: LossBaseline) -> LossBaseline:
    """Return the baseline after a halt was lifted: losses are measured from the next equity."""
    return msgspec.structs.replace(baseline, day_start=None, peak=None)


def net_deposits(before: Mapping[str, LossBaseline], equities: Mapping[str, RunEquity]) -> Decimal:
    """Return the capital that new accounts and restarted runs have added since the baselines (negative: withdrawn)."""
    total = ZERO
    for account_id, current in equities.items():
        baseline = before.get(account_id)
        if baseline is None:
            total += current.initial_capital
        elif baseline.run_id != current.run_id:
            total += current.initial_capital - baseline.last
    return total


def shift(baseline: LossBaseline, amount: Decimal) -> LossBaseline:
    """Return the baseline after capital was added or withdrawn, which is neither profit nor loss."""
    return msgspec.structs.replace(
        baseline,
        day_start=None if baseline.day_start is None else baseline.day_start + amount,
        peak=None if baseline.peak is None else baseline.peak + amount,
        last=baseline.last + amount,
    )


def breach(baseline: LossBaseline, limits: LossThresholds) -> tuple[HaltCause, str] | None:
    """Return the limit that the last equity hits, the daily one first, with a sentence; None if it hits neither."""
    for cause, limit, start, name in (
        (HaltCause.DAILY_LOSS, limits.daily_loss, baseline.day_start, f"the first of {baseline.day} (UTC)"),
        (HaltCause.DRAWDOWN, limits.drawdown, baseline.peak, "its peak"),
    ):
        if limit is None or start is None or start <= 0:
            continue
        lost = start - max(ZERO, baseline.last)
        if 100 * lost >= limit * start:
            percent = divide(100 * lost, start)
            fall = f"equity {baseline.last:.2f} is {percent:.2f} % below {start:.2f}, {name}"
            return cause, f"{fall}; the limit is {limit:f} %"
    return None
