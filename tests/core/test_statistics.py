"""Statistics against numpy and the standard library, and at their edges."""

import math
import statistics as stdlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trader.core import statistics as ours
from trader.core.statistics import EquityPoint

MIDNIGHT = datetime(2025, 1, 1, tzinfo=UTC)

pnls = st.lists(st.floats(min_value=-1e6, max_value=1e6).map(lambda pnl: round(pnl, 4)), max_size=60)


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def hourly(values: Sequence[float], start: datetime = MIDNIGHT) -> list[EquityPoint]:
    return [EquityPoint(start + timedelta(hours=index), value) for index, value in enumerate(values)]


Curve = tuple[float, list[EquityPoint]]


def closing(capital: float, *closes: float) -> Curve:
    """A capital and days that end at these values: each hour has its close, and one hour follows the last midnight."""
    return capital, hourly([*(close for close in closes for _ in range(24)), *closes[-1:]])


def flat(capital: float, *closes: float) -> Curve:
    """At least ten days: the last of the given values repeats."""
    return closing(capital, *closes, *closes[-1:] * (10 - len(closes)))


def sharpe(curve: Curve) -> float | None:
    return ours.sharpe_ratio(ours.daily_closes(curve[1], curve[0]))


def sortino(curve: Curve) -> float | None:
    return ours.sortino_ratio(ours.daily_closes(curve[1], curve[0]))


def calmar(curve: Curve) -> float | None:
    capital, series = curve
    drawdown = ours.max_drawdown([capital, *(point.value for point in series)])
    return ours.calmar_ratio(ours.daily_closes(series, capital), drawdown)


# Daily closes


def test_a_close_is_the_last_value_before_midnight() -> None:
    assert ours.daily_closes(hourly(list(range(1, 50))), 7) == [7, 24, 48]


def test_the_running_day_has_no_close() -> None:
    assert ours.daily_closes(hourly([5.0] * 24), 4) == [4]
    assert ours.daily_closes(hourly([5.0] * 25), 4) == [4, 5.0]
    assert ours.daily_closes([], 4) == [4]


def test_a_day_without_values_repeats_the_previous_close() -> None:
    series = [EquityPoint(MIDNIGHT, 1.0), EquityPoint(MIDNIGHT + timedelta(days=3, hours=2), 2.0)]
    assert ours.daily_closes(series, 1.0) == [1.0, 1.0, 1.0, 1.0]


def test_fewer_than_ten_daily_returns_give_no_ratio() -> None:
    values = [100.0 + (-1) ** day * day for day in range(10)]
    nine, ten = closing(100, *values[:9]), closing(100, *values)
    for ratio in (sharpe, sortino, calmar):
        assert ratio(nine) is None
        assert ratio(ten) is not None
        assert ratio((100, [])) is None


def test_the_first_day_counts_from_the_capital() -> None:
    returns = ours.daily_returns(ours.daily_closes(flat(100, 90, 99)[1], 100))
    assert returns == [near(-0.1), near(0.1), *[0.0] * 8]


# Ratios of the equity series


def test_sharpe_computed_by_hand() -> None:
    # Returns 10%, -10% and eight of 0: mean 0, so the ratio is 0; 10% alone: mean 1%, downside 0.
    assert sharpe(flat(100, 110, 99)) == near(0.0)
    assert sortino(flat(100, 110)) == math.inf
    # Returns -10% and nine of 0: mean -1%, downside √(0.01 / 10).
    assert sortino(flat(100, 90)) == near(-0.01 / math.sqrt(0.001) * math.sqrt(365))


def test_calmar_computed_by_hand() -> None:
    # Ten days from 100 to 121, with a fall of a tenth on the way.
    assert calmar(flat(100, 90, 121)) == near((1.21 ** (365 / 10) - 1) / 0.1)


def test_calmar_of_a_falling_series_is_negative() -> None:
    ratio = calmar(flat(100, 99, 98))
    assert ratio is not None
    assert -50 <= ratio < 0


def test_a_steady_gain_is_unbounded_and_a_steady_loss_has_no_sharpe() -> None:
    gaining, losing = (closing(100, *(100 * step**day for day in range(1, 11))) for step in (2, 0.5))
    still = flat(100, 100)
    assert sharpe(gaining) == sortino(gaining) == calmar(gaining) == math.inf
    assert sharpe(losing) is None
    assert sortino(losing) == near(-math.sqrt(365))
    assert sharpe(still) is sortino(still) is calmar(still) is None


def test_equity_that_reached_zero_still_has_statistics() -> None:
    ruined = closing(100, *[100] * 7, 50, 0, 0)
    returns = ours.daily_returns(ours.daily_closes(ruined[1], 100))
    assert returns == [*[0.0] * 7, -0.5, -1.0]
    assert sharpe(ruined) == near(stdlib.fmean(returns) / stdlib.stdev(returns) * math.sqrt(365))
    assert calmar(ruined) == -1.0
    assert calmar(flat(0, 0)) is None


def test_an_extreme_gain_does_not_overflow() -> None:
    assert calmar(flat(1, 0.5, 1e9)) == math.inf


# Drawdown


@given(st.lists(st.floats(min_value=-1e5, max_value=1e7), min_size=1, max_size=60))
def test_max_drawdown_is_the_largest_fall_from_a_running_peak(values: list[float]) -> None:
    floored = numpy.maximum(values, 0.0)  # nobody loses more than everything
    peaks = numpy.maximum.accumulate(floored)
    falls = peaks - floored
    drawdown = ours.max_drawdown(values)
    assert drawdown is not None
    assert drawdown.money == near(float(numpy.max(falls)))
    risen = peaks > 0
    expected = float(numpy.max(falls[risen] / peaks[risen], initial=0.0)) * 100
    assert drawdown.percent == near(expected)
    assert 0 <= drawdown.percent <= 100


def test_max_drawdown_in_percent_and_in_money_may_be_different_falls() -> None:
    assert ours.max_drawdown([10, 5, 100, 80]) == (50.0, 20.0)
    assert ours.max_drawdown([1, 2, 3]) == (0.0, 0.0)
    assert ours.max_drawdown([100, -50]) == (100.0, 100.0)
    assert ours.max_drawdown([]) is None


# Trades


@given(pnls)
def test_trade_statistics_match_their_formulas(trades: list[float]) -> None:
    wins, losses = [pnl for pnl in trades if pnl > 0], [pnl for pnl in trades if pnl <= 0]
    assert ours.win_rate(trades) == (near(100 * len(wins) / len(trades)) if trades else None)
    assert ours.mean(trades) == (near(stdlib.fmean(trades)) if trades else None)
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


def test_without_trades_no_statistic_has_a_value() -> None:
    assert ours.win_rate([]) is ours.mean([]) is ours.profit_factor([]) is ours.average_r_multiple([]) is None
    assert ours.trade_signal_to_noise([]) is ours.decision_quality([]) is None
    assert ours.recovery_factor(None, ours.Drawdown(1.0, 1.0)) is None
    assert ours.streaks([]) == (0, 0, 0, "none")
    assert ours.average_minutes([], won=True) is None


def test_only_wins_is_unbounded_and_only_losses_is_not() -> None:
    assert ours.profit_factor([1.0, 2.0]) == math.inf
    assert ours.average_r_multiple([1.0, 2.0]) is None
    assert ours.profit_factor([-1.0]) == 0.0
    assert ours.average_r_multiple([-1.0]) is None
    assert ours.trade_signal_to_noise([2.0, 2.0]) == math.inf
    assert ours.trade_signal_to_noise([-2.0, -2.0]) is None
    assert ours.trade_signal_to_noise([2.0]) is None


def test_recovery_is_profit_over_the_worst_fall_in_money() -> None:
    assert ours.recovery_factor(20.0, ours.Drawdown(5.0, 8.0)) == 2.5
    assert ours.recovery_factor(20.0, ours.Drawdown(0.0, 0.0)) == math.inf
    assert ours.recovery_factor(-10.0, ours.Drawdown(0.0, 0.0)) is None
    assert ours.recovery_factor(30.0, None) is None


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-1e5, 1e5)), min_size=3, max_size=40))
def test_decision_quality_is_the_pearson_correlation(decisions: list[tuple[float, float]]) -> None:
    confidences, outcomes = zip(*decisions, strict=True)
    spreads = [float(numpy.std(column)) for column in (confidences, outcomes)]
    assume(all(spread > 1e-3 for spread in spreads))
    quality = ours.decision_quality(decisions)
    assert quality == pytest.approx(float(numpy.corrcoef(confidences, outcomes)[0, 1]), abs=1e-6)


def test_decision_quality_needs_three_trades_with_variation() -> None:
    assert ours.decision_quality([(50, 1.0), (60, 2.0)]) is None
    assert ours.decision_quality([(50, 1.0), (50, 2.0), (50, 3.0)]) is None
    assert ours.decision_quality([(50, 1.0), (60, 1.0), (70, 1.0)]) is None
    assert ours.decision_quality([(50, 1.0), (60, 2.0), (70, 3.0)]) == near(1.0)
    assert ours.decision_quality([(50, 3.0), (60, 2.0), (70, 1.0)]) == near(-1.0)


@given(pnls)
def test_streaks_match_a_text_search(trades: list[float]) -> None:
    text = "".join("w" if pnl > 0 else "l" for pnl in trades)
    streaks = ours.streaks(trades)
    assert streaks.longest_win == max(map(len, text.split("l")))
    assert streaks.longest_loss == max(map(len, text.split("w")))
    last = text[-1:]
    assert streaks.current_count == len(text) - len(text.rstrip(last or None))
    assert streaks.current_type == {"w": "win", "l": "loss", "": "none"}[last]


def test_durations_are_separated_by_outcome() -> None:
    opened = MIDNIGHT
    assert ours.minutes(opened, opened + timedelta(hours=1, seconds=30)) == 60.5
    holds = [(1.0, 10.0), (2.0, 20.0), (-1.0, 5.0), (0.0, 7.0)]
    assert ours.average_minutes(holds, won=True) == 15.0
    assert ours.average_minutes(holds, won=False) == 6.0


def test_returns_are_relative_to_the_start() -> None:
    assert ours.return_percent(10_000, 9_500) == -5.0
    assert ours.return_percent(0, 10) is None


# Intervals of ratios


@pytest.mark.parametrize(("skew", "persistence"), [(0.0, 0.0), (0.0, 0.3), (1.0, 0.0)])
def test_the_intervals_of_ratios_cover_the_truth(skew: float, persistence: float) -> None:
    """Over 90 days and 200 trades, whose true ratios are computed from a million more."""
    rng = numpy.random.default_rng(5)

    def draw(shape: tuple[int, ...]) -> "numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.float64]]":
        shocks = rng.normal(0, 1, shape) + skew * (rng.exponential(1, shape) - 1)
        for number in range(1, shape[-1]):
            shocks[..., number] += persistence * shocks[..., number - 1]
        return 0.002 + 0.01 * shocks

    long = draw((500, 2_000))
    sharpe = float(long.mean() / long.std()) * math.sqrt(365)
    factor = float(numpy.maximum(long, 0).sum() / numpy.maximum(-long, 0).sum())
    wins = 100 * float((long > 0).mean())
    covered = numpy.zeros(3)
    for days, trades in zip(draw((300, 90)), draw((300, 200)), strict=True):
        intervals = (
            (sharpe, ours.sharpe_interval(numpy.cumprod([1.0, *(1 + days)]).tolist())),
            (factor, ours.profit_factor_interval(trades.tolist())),
            (wins, ours.win_rate_interval(int((trades > 0).sum()), 200)),
        )
        covered += [interval is not None and interval.low <= truth <= interval.high for truth, interval in intervals]
    assert (covered[:2] / 300 > 0.9).all()
    assert covered[2] / 300 > (0.9 if persistence == 0 else 0.8), "the method assumes independent trades"


def test_ratios_of_too_few_values_have_no_interval() -> None:
    assert ours.sharpe_interval([100.0 + day for day in range(10)]) is None
    assert ours.win_rate_interval(5, 9) is None
    assert ours.profit_factor_interval([1.0] * 20) is None
    assert ours.profit_factor_interval([1.0, -1.0] * 4) is None
