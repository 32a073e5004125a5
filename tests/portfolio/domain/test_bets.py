"""Bets: the wealth against its formula, bounds by leverage, and visible differences against simulated seasons."""

import math

import numpy as np
import pytest
from support.null_seasons import HOUR, HOURLY, PROCESSES, START, disasters, looks, normal
from support.run_profile import is_nightly

from trader.core.intervals import Returns, estimate
from trader.core.statistics import EquityPoint
from trader.portfolio.domain.bets import HOURLY_MOVE_MAX, STAKES, bet, days_needed, move_bounds, smallest_visible
from trader.portfolio.domain.evidence import Verdict, compare, judge_family
from trader.portfolio.domain.returns import EquitySeries, Exposures, ReturnSeries, holding_nothing, mean_series

FAMILY = 52


def test_the_level_is_one_over_the_largest_mean_wealth() -> None:
    returns = np.random.default_rng(1).normal(0.01, 0.03, 40)
    bounds = np.linspace(0.2, 0.6, 40)
    wealth = [
        np.mean([math.prod(1 + stake * returns[hour] / bounds[hour] for hour in range(until)) for stake in STAKES])
        for until in range(1, 41)
    ]
    assert tuple(bet(returns, bounds)) == pytest.approx((1 / max(wealth), wealth[-1]))
    assert bet(-returns, bounds).level > 0.5
    assert np.diff(np.log(STAKES)) == pytest.approx(np.log(95) / 7), "in equal ratios from 0.01 to 0.95"


def test_a_loss_beyond_its_bound_only_ruins_the_bet() -> None:
    assert bet(np.array([0.1] * 20 + [-1.0] + [0.1] * 20), np.full(41, 0.2)).level < 1e-2
    assert bet(np.array([-1.0] + [0.001] * 40), np.full(41, 0.2)).level == 1.0


def test_the_bet_does_not_depend_on_the_scale_of_the_risk() -> None:
    """The same Sharpe ratio needs the same days whether an hour's volatility is 2 or 25 % of its bound."""

    def days(bound: float) -> int | None:
        variance = HOURLY**2
        mean = 4 * HOURLY / math.sqrt(8760)
        return days_needed(estimate(np.ones(2160))._replace(variance=variance, mean=mean), bound, 0.05 / FAMILY)

    needed = [days(HOURLY / share) for share in (0.02, 0.05, 0.1, 0.25)]
    assert None not in needed
    assert max(filter(None, needed)) < 1.3 * min(filter(None, needed))


def test_without_an_edge_the_e_value_is_at_most_one_on_average() -> None:
    """On either side of zero, at any hour, also with losses that are stopped at the bound."""
    for process in ("normal", "loss stopped at 20 % in 0.2 % of hours", "gain stopped at 20 % in 0.2 % of hours"):
        returns = PROCESSES[process].models(np.random.default_rng(11), 400, 500)
        nothing = ReturnSeries(START, np.zeros(500), None, np.zeros(500))
        values = [compare(ReturnSeries(START, each), nothing).e_value for each in returns]
        assert 0 < np.mean(values) <= 1.1
        assert np.mean(np.array(values) > 20) <= 0.05


def test_an_enforced_bound_replaces_what_was_held_before() -> None:
    held = ReturnSeries(START, np.zeros(3), None, np.array([0.2, 1.4, 1.4]))
    bounded = held._replace(loss_max=0.04, gain_max=0.06).within(START + HOUR, START + 3 * HOUR)
    assert (bounded.loss_bounds.tolist(), bounded.gain_bounds.tolist()) == ([0.04] * 2, [0.06] * 2)
    joint = mean_series([bounded, bounded])
    assert joint is not None
    assert (joint.loss_bounds.tolist(), joint.gain_bounds.tolist()) == ([0.04] * 2, [0.06] * 2)
    assert not holding_nothing(bounded).gain_bounds.any()


def test_the_bounds_follow_from_earlier_leverage() -> None:
    leverages = np.array([0.0, 0.5, 3.0, 1.0, 2.0, 50.0, 0.0])
    assert move_bounds(leverages) == pytest.approx([0.2, 0.2, 0.2, 0.6, 0.6, 0.6, 10.0])
    series = ReturnSeries(START, np.zeros(7), None, move_bounds(leverages))
    assert series.gain_bounds[-1] == pytest.approx(10)
    assert series.loss_bounds.tolist() == pytest.approx([0.2, 0.2, 0.2, 0.6, 0.6, 0.6, 1.0]), "a loss is at most all"
    assert move_bounds(np.array([1.0, math.nan, 1.0])).tolist() == pytest.approx([0.2, 0.2, 1.0]), "not known"
    assert len(move_bounds(np.array([]))) == 0


def test_a_position_between_two_values_of_the_equity_counts() -> None:
    exposures = Exposures([(30_000.0, START + 1.2 * HOUR, START + 1.4 * HOUR), (5_000.0, START + 2 * HOUR, None)])
    assert exposures.largest(START, 5).tolist() == [0, 30_000, 5_000, 5_000, 5_000]
    equity = EquitySeries(10_000.0)
    equity.set(EquityPoint(START + hour * HOUR, 10_000.0, 0.5) for hour in range(5))
    seen, known = equity.returns(START + 5 * HOUR), equity.returns(START + 5 * HOUR, exposures)
    assert seen is not None
    assert known is not None
    assert seen.gain_bounds == pytest.approx([0.2] * 5)
    assert known.gain_bounds == pytest.approx([0.2, 0.2, 0.6, 0.6, 0.6])


@pytest.mark.parametrize(("move", "word"), [(-0.5, "better"), (5.0, "worse")])
def test_a_move_beyond_its_bound_withdraws_the_verdict(move: float, word: str) -> None:
    """A loss of half at no leverage, or a lottery's gain of 500 %, which must not lead to a verdict."""
    drift = 0.002 if word == "better" else -0.02
    values = np.random.default_rng(1).normal(drift, 0.002, 1000)

    def verdict(values: Returns) -> Verdict:
        nothing = ReturnSeries(START, np.zeros(len(values)), None, np.zeros(len(values)))
        return judge_family([compare(ReturnSeries(START, values), nothing)])[0]

    assert verdict(values).word == word
    values[500] = math.log1p(move)
    after = verdict(values)
    assert after.word == "not distinguishable yet"
    assert after.why is not None
    assert after.why.startswith(f"withdrawn: an hour had a {'loss' if move < 0 else 'gain'} of {abs(100 * move):.1f} %")


def is_ever_called(returns: Returns, days: int) -> bool:
    """Return whether daily looks ever judge it better than holding nothing, on a board of eight."""
    for hours in looks(days):
        series = ReturnSeries(START, returns[:hours])
        nothing = ReturnSeries(START, np.zeros(hours), None, np.zeros(hours))
        if judge_family([compare(series, nothing)], FAMILY)[0].word == "better":
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("percent", [2, 0.5])
def test_small_gains_with_a_rare_large_loss_are_not_judged_better_than_nothing(percent: float) -> None:
    """The confidence sequence alone judges 28 and 73 % of them better."""
    returns = disasters(percent)(np.random.default_rng(7), 30, 24 * 90)
    called = sum(is_ever_called(values, 90) for values in returns)
    assert called == 0


@pytest.mark.slow
def test_four_of_five_seasons_detect_the_smallest_visible_difference() -> None:
    days, seasons = 90, 60 if is_nightly() else 30
    noise = normal(np.random.default_rng(3), seasons, 24 * days)
    visible = smallest_visible(estimate(noise[0])._replace(variance=HOURLY**2), HOURLY_MOVE_MAX, 0.05 / FAMILY)
    assert visible is not None
    called = sum(is_ever_called(visible + values, days) for values in noise)
    assert 0.65 * seasons <= called <= 0.95 * seasons
    seen = estimate(noise[0])._replace(variance=HOURLY**2, mean=visible)
    assert days_needed(seen, HOURLY_MOVE_MAX, 0.05 / FAMILY) == pytest.approx(days, rel=0.1)
    assert days_needed(seen._replace(mean=1e-9), HOURLY_MOVE_MAX, 0.05 / FAMILY) is None
