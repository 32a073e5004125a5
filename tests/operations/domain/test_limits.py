"""Loss limits: hit exactly when the loss reaches them, and never by capital that is added or withdrawn."""

from datetime import date, timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.exchange.domain.halts import HaltCause
from trader.operations.domain.loss_limits import (
    LossBaseline,
    LossThresholds,
    RecordedEquity,
    RunEquity,
    advance,
    begin,
    breach,
    net_deposits,
    reset,
    restore,
    shift,
    update,
)

D = Decimal
RUN, NEXT_RUN = UUID(int=1), UUID(int=2)
DAY = date(2025, 1, 1)
CAPITAL = D(10_000)

money = st.decimals(min_value=0, max_value=100_000, places=2)
percents = st.decimals(min_value="0.01", max_value=100, places=2)
days = st.integers(min_value=0, max_value=2)


def steps(curve: list[tuple[int, Decimal]]) -> list[tuple[date, Decimal]]:
    """Equities on ascending days."""
    return [(DAY + timedelta(days=day), equity) for day, equity in sorted(curve, key=lambda step: step[0])]


@given(st.lists(st.tuples(days, money), min_size=1), percents, percents)
def test_a_limit_is_hit_exactly_when_the_loss_reaches_it(
    curve: list[tuple[int, Decimal]], daily: Decimal, drawdown: Decimal
) -> None:
    baseline = begin(RUN, CAPITAL, CAPITAL, DAY)
    seen = [(DAY, CAPITAL)]
    for day, equity in steps(curve):
        baseline = advance(baseline, equity, day)
        seen.append((day, equity))
        start = next(worth for when, worth in seen if when == day)
        peak = max(worth for _, worth in seen)
        lost_today = start > 0 and (start - equity) / start * 100 >= daily
        fell = (peak - equity) / peak * 100 >= drawdown
        hit = breach(baseline, LossThresholds(daily, drawdown))
        assert (hit is not None) == (lost_today or fell), (baseline, hit)
        if hit is not None:
            assert hit[0] is (HaltCause.DAILY_LOSS if lost_today else HaltCause.DRAWDOWN)
        assert breach(baseline, LossThresholds()) is None


@given(st.lists(st.tuples(days, money), min_size=1))
def test_a_gain_never_hits_a_limit(curve: list[tuple[int, Decimal]]) -> None:
    baseline = begin(RUN, CAPITAL, CAPITAL, DAY)
    for day, equity in sorted(steps(curve), key=lambda step: (step[0], step[1])):
        rising = max(baseline.last, equity)
        baseline = advance(baseline, rising, day)
        assert breach(baseline, LossThresholds(D("0.01"), D("0.01"))) is None


@given(st.lists(st.tuples(days, money), min_size=1), st.integers(min_value=0))
def test_a_stop_in_between_changes_nothing(curve: list[tuple[int, Decimal]], cut: int) -> None:
    """The state recorded before the stop continues; snapshots of equity already seen add nothing."""
    straight = stopped = begin(RUN, CAPITAL, CAPITAL, DAY)
    for number, (day, equity) in enumerate(steps(curve)):
        if number == cut % len(curve):
            stopped = restore(RecordedEquity(RUN, CAPITAL, stopped, stopped.last, None), stopped.day)
        straight, stopped = advance(straight, equity, day), advance(stopped, equity, day)
    assert stopped == straight


def test_losses_during_the_stop_come_from_snapshots() -> None:
    baseline = LossBaseline(run_id=RUN, day=DAY, day_start=D(9_000), peak=D(11_000), last=D(10_000))
    later = DAY + timedelta(days=1)
    result = restore(RecordedEquity(RUN, CAPITAL, baseline, D(12_000), D(11_500)), later)
    assert result == LossBaseline(run_id=RUN, day=later, day_start=D(11_500), peak=D(12_000), last=D(10_000))
    same_day = restore(RecordedEquity(RUN, CAPITAL, baseline, D(10_500), D(10_200)), DAY)
    assert same_day == baseline, "a halt may have been lifted since the first equity of the day"
    assert restore(RecordedEquity(RUN, CAPITAL, None, D(9_500), D(9_100)), DAY) == LossBaseline(
        run_id=RUN, day=DAY, day_start=D(9_100), peak=CAPITAL, last=D(9_500)
    )
    assert restore(RecordedEquity(RUN, CAPITAL, None, None, None), DAY) == begin(RUN, CAPITAL, CAPITAL, DAY)
    renewed = reset(baseline)
    assert restore(RecordedEquity(RUN, CAPITAL, renewed, D(12_000), D(11_500)), later) == renewed


@given(money, money, percents)
def test_after_a_halt_is_lifted_losses_count_from_the_next_equity(
    before: Decimal, after: Decimal, limit: Decimal
) -> None:
    baseline = advance(begin(RUN, CAPITAL, CAPITAL, DAY), before, DAY)
    baseline = advance(reset(baseline), after, DAY)
    assert breach(baseline, LossThresholds(limit, limit)) is None
    assert (baseline.day_start, baseline.peak) == (after, after)
    if after > 0:
        fallen = advance(baseline, after * (1 - limit / 100), DAY)
        assert breach(fallen, LossThresholds(limit, None)) is not None


@given(st.lists(money, min_size=1, max_size=5), st.lists(money, max_size=5), percents)
def test_added_or_withdrawn_capital_is_not_a_loss(before: list[Decimal], new: list[Decimal], limit: Decimal) -> None:
    """Accounts open, and every old one starts a new run: in total, nothing was lost."""
    baselines = {f"a{n}": begin(RUN, CAPITAL, equity, DAY) for n, equity in enumerate(before)}
    together = sum(before, D(0))
    total = LossBaseline(run_id=None, day=DAY, day_start=together, peak=together, last=together)
    equities = {account_id: RunEquity(NEXT_RUN, CAPITAL, CAPITAL) for account_id in baselines}
    equities |= {f"b{n}": RunEquity(RUN, capital, capital) for n, capital in enumerate(new)}
    after = advance(
        shift(total, net_deposits(baselines, equities)), sum((equity.equity for equity in equities.values()), D(0)), DAY
    )
    assert breach(after, LossThresholds(limit, limit)) is None
    assert after.day_start == after.peak == after.last
    updated = {account_id: update(baselines.get(account_id), current, DAY) for account_id, current in equities.items()}
    assert net_deposits(updated, equities) == 0


def test_the_text_of_a_breach_has_its_figures() -> None:
    baseline = advance(begin(RUN, CAPITAL, CAPITAL, DAY), D(9_450), DAY)
    hit = breach(baseline, LossThresholds(D(5), D(50)))
    assert hit is not None
    assert hit[1] == ("equity 9450.00 is 5.50 % below 10000.00, the first of 2025-01-01 (UTC); the limit is 5 %")
    hit = breach(baseline, LossThresholds(None, D("5.5")))
    assert hit is not None
    assert hit[1] == "equity 9450.00 is 5.50 % below 10000.00, its peak; the limit is 5.5 %"


@pytest.mark.parametrize("start", [D(0), D(-5)])
def test_an_account_with_nothing_left_hits_no_percentage_limit(start: Decimal) -> None:
    baseline = LossBaseline(run_id=RUN, day=DAY, day_start=start, peak=None, last=D(-10))
    assert breach(baseline, LossThresholds(D(5), D(5))) is None


def test_a_clock_that_goes_back_starts_no_day() -> None:
    baseline = advance(begin(RUN, CAPITAL, CAPITAL, DAY + timedelta(days=1)), D(9_000), DAY)
    assert (baseline.day, baseline.day_start) == (DAY + timedelta(days=1), CAPITAL)
