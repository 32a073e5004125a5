"""Deflated Sharpe ratios: the best of many trials without skill is expected, and skill is still detected."""

import numpy as np
import pytest

from trader.backtest.domain.selection import deflate, expected_best, hourly_sharpe, spread_within


def test_the_expected_best_matches_simulated_trials_without_skill() -> None:
    rng = np.random.default_rng(1)
    for trials in (5, 50, 500):
        best = np.mean([rng.standard_normal(trials).max() for _ in range(4_000)])
        assert expected_best(2.0, trials) == pytest.approx(2 * best, rel=0.04)
    assert expected_best(0.1, 1) == 0


def test_the_spread_of_ratios_is_the_one_within_families() -> None:
    assert spread_within([[1.0, 3.0], [-8.0, -6.0, -4.0], [50.0]]) == pytest.approx(((2 + 8) / 3) ** 0.5)
    assert spread_within([[1.0], [50.0], []]) is None
    # Without a spread, the ratios of rules without skill vary by their standard error.
    rng = np.random.default_rng(3)
    ratios = [hourly_sharpe(rule) or 0.0 for rule in rng.normal(0, 0.01, (2_000, 240))]
    deflated = deflate(rng.normal(0, 0.01, 240), None, 50)
    assert deflated is not None
    assert deflated.expected_best == pytest.approx(expected_best(float(np.std(ratios)), 50), rel=0.05)


def test_the_best_of_many_random_rules_is_insignificant_and_a_real_edge_is_not() -> None:
    rng = np.random.default_rng(2)
    believed = 0
    for _ in range(200):
        rules = rng.normal(0, 0.01, (100, 720))
        ratios = [hourly_sharpe(rule) or 0.0 for rule in rules]
        deflated = deflate(rules[int(np.argmax(ratios))], spread_within([ratios]), len(ratios))
        assert deflated is not None
        assert deflated.trials == 100
        believed += deflated.probability > 0.95
    assert believed / 200 < 0.05
    skilled = deflate(rng.normal(0.003, 0.01, 720), spread_within([ratios]), len(ratios))
    assert skilled is not None
    assert skilled.probability > 0.95


def test_without_hours_or_variation_there_is_no_figure() -> None:
    assert deflate(np.zeros(100), 0.1, 2) is None
    assert deflate(np.ones(23) * 0.01, 0.1, 2) is None
    assert hourly_sharpe(np.array([np.nan] * 48)) is None
