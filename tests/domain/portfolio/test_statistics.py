"""Statistics against numpy and the standard library, and at their edges."""

import math
import statistics as stdlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from typing import Any

import numpy
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trader.domain.portfolio import statistics as ours
from trader.domain.portfolio.statistics import EquityPoint

MIDNIGHT = datetime(2025, 1, 1, tzinfo=UTC)

equities = st.floats(min_value=1.0, max_value=1e7)
pnls = st.lists(st.floats(min_value=-1e6, max_value=1e6).map(lambda pnl: round(pnl, 4)), max_size=60)


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def hourly(values: Sequence[float], start: datetime = MIDNIGHT) -> list[EquityPoint]:
    return [EquityPoint(start + timedelta(hours=index), value) for index, value in enumerate(values)]


def closing(*closes: float) -> list[EquityPoint]:
    """Days that end at these values: each hour of a day holds its close, and one hour follows the last midnight."""
    return hourly([*(close for close in closes for _ in range(24)), closes[-1]])


def sharpe(series: Sequence[EquityPoint]) -> float | None:
    return ours.sharpe_ratio(ours.daily_closes(series))


def sortino(series: Sequence[EquityPoint]) -> float | None:
    return ours.sortino_ratio(ours.daily_closes(series))


def calmar(series: Sequence[EquityPoint]) -> float | None:
    return ours.calmar_ratio(ours.daily_closes(series), ours.max_drawdown(point.value for point in series))


# Daily closes


def test_a_close_is_the_last_value_before_midnight() -> None:
    assert ours.daily_closes(hourly(list(range(1, 50)))) == [24, 48]


def test_the_running_day_has_no_close() -> None:
    assert ours.daily_closes(hourly([5.0] * 24)) == []
    assert ours.daily_closes(hourly([5.0] * 25)) == [5.0]
    assert ours.daily_closes([]) == []


def test_a_day_without_values_keeps_the_close_before() -> None:
    series = [EquityPoint(MIDNIGHT, 1.0), EquityPoint(MIDNIGHT + timedelta(days=3, hours=2), 2.0)]
    assert ours.daily_closes(series) == [1.0, 1.0, 1.0]


def test_fewer_than_three_closes_make_no_ratio() -> None:
    two, three = closing(100, 110), closing(100, 110, 105)
    for ratio in (sharpe, sortino, calmar):
        assert ratio(two) is None
        assert ratio(three) is not None
        assert ratio([]) is None


# Ratios of the equity series


@given(st.lists(equities, min_size=3, max_size=40))
def test_sharpe_and_sortino_are_their_formulas(closes: list[float]) -> None:
    returns = numpy.diff(closes) / closes[:-1]
    spread = float(numpy.std(returns, ddof=1))
    assume(spread > 1e-9 * float(numpy.max(numpy.abs(returns))))
    expected = float(numpy.mean(returns)) / spread * math.sqrt(365)
    assert sharpe(closing(*closes)) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    downside = math.sqrt(float(numpy.mean(numpy.minimum(returns, 0) ** 2)))
    assume(downside == 0 or downside > 1e-9 * float(numpy.max(numpy.abs(returns))))  # less is rounding
    found = sortino(closing(*closes))
    if downside > 0:
        assert found == pytest.approx(float(numpy.mean(returns)) / downside * math.sqrt(365), rel=1e-6, abs=1e-6)
    else:
        assert found == math.inf


def test_sharpe_by_hand() -> None:
    # Returns 10 %, -10 %, 10 %: mean 1/30, standard deviation 0.2/√3.
    assert sharpe(closing(100, 110, 99, 108.9)) == near((1 / 30) / (0.2 / math.sqrt(3)) * math.sqrt(365))
    assert sortino(closing(100, 110, 99, 108.9)) == near((1 / 30) / math.sqrt(0.01 / 3) * math.sqrt(365))


def test_calmar_by_hand() -> None:
    # Two days from 100 to 121 with a fall of a tenth on the way.
    assert calmar(closing(100, 90, 121)) == near((1.21 ** (365 / 2) - 1) / 0.1)


def test_calmar_of_what_fell_is_negative() -> None:
    found = calmar(closing(100, 99, 98))
    assert found is not None
    assert -50 <= found < 0


def test_a_steady_gain_is_unbounded_and_a_steady_loss_has_no_sharpe() -> None:
    gaining, losing, still = closing(100, 110, 121), closing(100, 90, 81), closing(100, 100, 100)
    assert sharpe(gaining) == sortino(gaining) == calmar(gaining) == math.inf
    assert sharpe(losing) is None
    assert sortino(losing) == near(-math.sqrt(365))
    assert sharpe(still) is sortino(still) is calmar(still) is None


def test_equity_that_reached_zero_still_has_figures() -> None:
    ruined = closing(100, 50, 0, 0)
    assert ours.daily_returns(ours.daily_closes(ruined)) == [-0.5, -1.0]
    assert sharpe(ruined) == near(-0.75 / stdlib.stdev([-0.5, -1.0]) * math.sqrt(365))
    assert calmar(ruined) == -1.0
    assert ours.return_confidence(ruined) is None
    assert calmar(closing(0, 0, 0)) is None


def test_an_absurd_gain_does_not_overflow() -> None:
    assert calmar(closing(1, 0.5, 1e7)) == math.inf


# Drawdown


@given(st.lists(st.floats(min_value=0.0, max_value=1e7), min_size=1, max_size=60))
def test_max_drawdown_is_the_largest_fall_from_a_running_peak(values: list[float]) -> None:
    peaks = numpy.maximum.accumulate(numpy.array(values))
    falls = peaks - values
    found = ours.max_drawdown(values)
    assert found is not None
    assert found.money == near(float(numpy.max(falls)))
    risen = peaks > 0
    expected = float(numpy.max(falls[risen] / peaks[risen], initial=0.0)) * 100
    assert found.percent == near(expected)
    assert 0 <= found.percent <= 100


def test_max_drawdown_in_percent_and_in_money_may_be_two_falls() -> None:
    assert ours.max_drawdown([10, 5, 100, 80]) == (50.0, 20.0)
    assert ours.max_drawdown([1, 2, 3]) == (0.0, 0.0)
    assert ours.max_drawdown([]) is None


# Trades


@given(pnls)
def test_figures_of_trades_are_their_formulas(trades: list[float]) -> None:
    wins, losses = [pnl for pnl in trades if pnl > 0], [pnl for pnl in trades if pnl <= 0]
    assert ours.win_rate(trades) == (near(100 * len(wins) / len(trades)) if trades else None)
    assert ours.expectancy(trades) == (near(stdlib.fmean(trades)) if trades else None)
    assert ours.average_win(trades) == (near(stdlib.fmean(wins)) if wins else None)
    assert ours.average_loss(trades) == (near(-stdlib.fmean(losses)) if losses else None)
    lost = -sum(losses)
    if lost > 0:
        assert ours.profit_factor(trades) == pytest.approx(sum(wins) / lost, rel=1e-9)
    else:
        assert ours.profit_factor(trades) == (math.inf if wins else None)
    if wins and lost > 0:
        expected = stdlib.fmean(wins) / abs(stdlib.fmean(losses))
        assert ours.average_r_multiple(trades) == pytest.approx(expected, rel=1e-9)
    if len(trades) > 1 and stdlib.pstdev(trades) > 1e-9 * max(map(abs, trades)):
        expected = stdlib.fmean(trades) / stdlib.stdev(trades)
        assert ours.trade_signal_to_noise(trades) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert ours.summary(trades) == (
        (near(stdlib.fmean(trades)), near(stdlib.median(trades)), max(trades)) if trades else (None, None, None)
    )


def test_without_trades_nothing_has_a_value() -> None:
    assert ours.win_rate([]) is ours.expectancy([]) is ours.profit_factor([]) is ours.average_r_multiple([]) is None
    assert ours.trade_signal_to_noise([]) is ours.decision_quality([]) is None
    assert ours.recovery_factor([], ours.Drawdown(1.0, 1.0)) is None
    assert ours.streaks([]) == (0, 0, 0, "none")
    assert ours.average_minutes([], won=True) is None


def test_only_wins_are_unbounded_and_only_losses_are_not() -> None:
    assert ours.profit_factor([1.0, 2.0]) == math.inf
    assert ours.average_r_multiple([1.0, 2.0]) is None
    assert ours.profit_factor([-1.0]) == 0.0
    assert ours.average_r_multiple([-1.0]) is None
    assert ours.trade_signal_to_noise([2.0, 2.0]) == math.inf
    assert ours.trade_signal_to_noise([-2.0, -2.0]) is None
    assert ours.trade_signal_to_noise([2.0]) is None


def test_recovery_is_profit_over_the_worst_fall_in_money() -> None:
    assert ours.recovery_factor([30.0, -10.0], ours.Drawdown(5.0, 8.0)) == 2.5
    assert ours.recovery_factor([30.0, -10.0], ours.Drawdown(0.0, 0.0)) == math.inf
    assert ours.recovery_factor([-10.0], ours.Drawdown(0.0, 0.0)) is None
    assert ours.recovery_factor([30.0], None) is None


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-1e5, 1e5)), min_size=3, max_size=40))
def test_decision_quality_is_the_pearson_correlation(decisions: list[tuple[float, float]]) -> None:
    confidences, outcomes = zip(*decisions, strict=True)
    spreads = [float(numpy.std(column)) for column in (confidences, outcomes)]
    assume(all(spread > 1e-3 for spread in spreads))
    found = ours.decision_quality(decisions)
    assert found == pytest.approx(float(numpy.corrcoef(confidences, outcomes)[0, 1]), abs=1e-6)


def test_decision_quality_needs_three_trades_that_differ() -> None:
    assert ours.decision_quality([(50, 1.0), (60, 2.0)]) is None
    assert ours.decision_quality([(50, 1.0), (50, 2.0), (50, 3.0)]) is None
    assert ours.decision_quality([(50, 1.0), (60, 1.0), (70, 1.0)]) is None
    assert ours.decision_quality([(50, 1.0), (60, 2.0), (70, 3.0)]) == near(1.0)
    assert ours.decision_quality([(50, 3.0), (60, 2.0), (70, 1.0)]) == near(-1.0)


def test_streaks_count_what_follows_each_other() -> None:
    assert ours.streaks([1, 1, -1, 0, -1, 1, 1]) == (2, 3, 2, "win")
    assert ours.streaks([-1]) == (0, 1, 1, "loss")
    assert ours.streaks([1, 0]) == (1, 1, 1, "loss")


@given(pnls)
def test_streaks_agree_with_their_text(trades: list[float]) -> None:
    text = "".join("w" if pnl > 0 else "l" for pnl in trades)
    found = ours.streaks(trades)
    assert found.longest_win == max(map(len, text.split("l")))
    assert found.longest_loss == max(map(len, text.split("w")))
    last = text[-1:]
    assert found.current_count == len(text) - len(text.rstrip(last or None))
    assert found.current_type == {"w": "win", "l": "loss", "": "none"}[last]


def test_durations_are_told_apart_by_outcome() -> None:
    opened = MIDNIGHT
    assert ours.minutes(opened, opened + timedelta(hours=1, seconds=30)) == 60.5
    holds = [(1.0, 10.0), (2.0, 20.0), (-1.0, 5.0), (0.0, 7.0)]
    assert ours.average_minutes(holds, won=True) == 15.0
    assert ours.average_minutes(holds, won=False) == 6.0


def test_returns_are_against_the_start() -> None:
    assert ours.return_percent(10_000, 9_500) == -5.0
    assert ours.return_percent(0, 10) is None


# The bootstrap


def wander(seed: int, hours: int, drift: float = 0.0) -> list[EquityPoint]:
    rng = Random(seed)
    value, values = 10_000.0, []
    for _ in range(hours):
        values.append(value)
        value *= math.exp(rng.gauss(drift, 0.004))
    return hourly(values)


def test_under_48_hours_there_is_no_interval() -> None:
    assert ours.return_confidence(wander(1, 47)) is None
    assert ours.return_confidence(wander(1, 48)) is not None
    assert ours.return_confidence([]) is None


def test_the_interval_is_the_same_every_time() -> None:
    assert ours.return_confidence(wander(2, 168)) == ours.return_confidence(wander(2, 168))


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_agrees_with_a_plain_resampling_by_numpy(seed: int) -> None:
    """The textbook form of the stationary bootstrap: step by step, a new block beginning with probability 1/24."""
    series = wander(seed, 168, drift=0.0005)
    changes = numpy.diff(numpy.log([point.value for point in series]))
    count, rng = len(changes), numpy.random.default_rng(seed)
    place = rng.integers(count, size=4_000)
    totals = changes[place].copy()
    for _ in range(count - 1):
        fresh = rng.random(4_000) < 1 / 24
        place = numpy.where(fresh, rng.integers(count, size=4_000), (place + 1) % count)
        totals += changes[place]
    low, high = (float(bound) for bound in 100 * numpy.expm1(numpy.quantile(totals, [0.025, 0.975])))
    found = ours.return_confidence(series)
    assert found is not None
    width = high - low
    assert found.low == pytest.approx(low, abs=0.12 * width)
    assert found.high == pytest.approx(high, abs=0.12 * width)


@pytest.mark.parametrize("hours", [48, 168, 169])
def test_series_of_one_length_share_their_draws_and_nothing_else(hours: int) -> None:
    """Drawn anew for every series, block by block, as the paper has it."""
    for seed in range(3):
        series = wander(seed, hours)
        logs = [math.log(point.value) for point in series]
        changes = [after - before for before, after in pairwise(logs)]
        rng, totals = Random(ours.BOOTSTRAP_SEED), []
        for _ in range(ours.BOOTSTRAP_DRAWS):
            drawn: list[float] = []
            while len(drawn) < len(changes):
                length = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / ours.BOOTSTRAP_BLOCK_HOURS))
                start = int(rng.random() * len(changes))
                drawn += [changes[(start + step) % len(changes)] for step in range(min(length, len(changes)))]
            totals.append(math.fsum(drawn[: len(changes)]))
        low, high = numpy.quantile(totals, [0.025, 0.975])
        assert ours.return_confidence(series) == (near(100 * math.expm1(low)), near(100 * math.expm1(high)))


def test_a_constant_series_has_an_interval_of_nothing() -> None:
    assert ours.return_confidence(hourly([10_000.0] * 60)) == (0.0, 0.0)


def test_a_steady_series_has_its_return_as_its_interval() -> None:
    series = hourly([10_000 * 1.001**hour for hour in range(101)])
    found = ours.return_confidence(series)
    assert found == (near(100 * (1.001**100 - 1)), near(100 * (1.001**100 - 1)))


def test_a_missing_hour_keeps_the_value_before() -> None:
    series = [EquityPoint(MIDNIGHT, 1.0), EquityPoint(MIDNIGHT + timedelta(hours=3), 2.0)]
    assert ours.hourly_values(series) == [1.0, 1.0, 1.0, 2.0]
    assert ours.hourly_values([]) == []


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(min_value=1e-3, max_value=1e9), min_size=48, max_size=90))
def test_the_interval_of_any_series_is_ordered_and_finite(values: list[float]) -> None:
    found = ours.return_confidence(hourly(values), draws=200)
    assert found is not None
    assert -100 <= found.low <= found.high < math.inf


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], part: float) -> None:
    assert ours.quantile(sorted(values), part) == pytest.approx(float(numpy.quantile(values, part)), abs=1e-6)
