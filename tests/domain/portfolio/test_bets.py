"""Bets: the wealth against its formula, bounds by leverage, and what is called visible against simulated seasons."""

import math

import numpy as np
import pytest
from support.null_seasons import HOURLY, START, disasters, looks, normal

from trader.domain.portfolio.bets import HOURLY_MOVE_MAX, STAKES, bet_level, days_needed, loss_bounds, smallest_visible
from trader.domain.portfolio.evidence import compare, judge_family
from trader.domain.portfolio.intervals import Returns, estimate
from trader.domain.portfolio.returns import ReturnSeries

FAMILY = 52


def test_the_level_is_one_over_the_largest_mean_wealth() -> None:
    returns = np.random.default_rng(1).normal(0.01, 0.03, 40)
    bounds = np.linspace(0.2, 0.6, 40)
    wealth = [
        np.mean([math.prod(1 + stake * returns[hour] / bounds[hour] for hour in range(until)) for stake in STAKES])
        for until in range(1, 41)
    ]
    assert bet_level(returns, bounds) == pytest.approx(1 / max(wealth))
    assert bet_level(-returns, bounds) == 1.0 or bet_level(-returns, bounds) > 0.5
    assert (len(STAKES), STAKES[0], STAKES[-1]) == (24, 0.05, 0.95)


def test_a_loss_beyond_its_bound_ruins_the_bet_and_nothing_more() -> None:
    assert bet_level(np.array([0.1] * 20 + [-1.0] + [0.1] * 20), np.full(41, 0.2)) < 1e-2
    assert bet_level(np.array([-1.0] + [0.001] * 40), np.full(41, 0.2)) == 1.0


def test_what_an_account_can_lose_follows_from_the_leverage_that_it_had_before() -> None:
    leverages = np.array([0.0, 0.5, 3.0, 1.0, 2.0, 50.0, 0.0])
    assert loss_bounds(leverages) == pytest.approx([0.2, 0.2, 0.2, 0.6, 0.6, 0.6, 1.0])
    assert loss_bounds(np.array([1.0, math.nan, 1.0])) == pytest.approx([0.2, 0.2, 1.0]), "not known: no bound"
    assert len(loss_bounds(np.array([]))) == 0


def is_ever_called(returns: Returns, days: int) -> bool:
    """Return whether daily looks ever call it better than holding nothing, on a board of eight."""
    for hours in looks(days):
        series = ReturnSeries(START, returns[:hours])
        nothing = ReturnSeries(START, np.zeros(hours), None, np.zeros(hours))
        if judge_family([compare(series, nothing)], FAMILY)[0].word == "better":
            return True
    return False


@pytest.mark.parametrize("percent", [2, 0.5])
def test_small_gains_with_a_rare_large_loss_are_not_called_better_than_nothing(percent: float) -> None:
    """The confidence sequence alone calls 28 and 73 % of them better."""
    returns = disasters(percent)(np.random.default_rng(7), 30, 24 * 90)
    called = sum(is_ever_called(values, 90) for values in returns)
    assert called == 0


def test_four_of_five_seasons_call_the_difference_that_is_said_to_be_visible() -> None:
    days, seasons = 90, 60
    noise = normal(np.random.default_rng(3), seasons, 24 * days)
    visible = smallest_visible(estimate(noise[0])._replace(variance=HOURLY**2), HOURLY_MOVE_MAX, 0.05 / FAMILY)
    assert visible is not None
    called = sum(is_ever_called(visible + values, days) for values in noise)
    assert 0.65 * seasons <= called <= 0.95 * seasons
    seen = estimate(noise[0])._replace(variance=HOURLY**2, mean=visible)
    assert days_needed(seen, HOURLY_MOVE_MAX, 0.05 / FAMILY) == pytest.approx(days, rel=0.1)
    assert days_needed(seen._replace(mean=1e-9), HOURLY_MOVE_MAX, 0.05 / FAMILY) is None
