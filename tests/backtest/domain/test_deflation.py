"""Deflated Sharpe ratios: the best of many trials without skill is expected, and skill is still detected."""

import numpy as np
import pytest

from trader.backtest.domain.deflation import deflate, expected_best, hourly_sharpe


def test_the_expected_best_matches_simulated_trials_without_skill() -> None:
    rng = np.random.default_rng(1)
    for trials in (5, 50, 500):
        best = np.mean([rng.standard_normal(trials).max() for _ in range(4_000)])
        assert expected_best([-1.0, 1.0] * trials, trials) / np.std([-1.0, 1.0] * trials, ddof=1) == pytest.approx(
            best, rel=0.04
        )
    assert expected_best([0.1], 1) == 0


def test_the_best_of_many_random_rules_is_insignificant_and_a_real_edge_is_not() -> None:
    rng = np.random.default_rng(2)
    believed = 0
    for _ in range(200):
        rules = rng.normal(0, 0.01, (100, 720))
        ratios = [hourly_sharpe(rule) or 0.0 for rule in rules]
        deflated = deflate(rules[int(np.argmax(ratios))], ratios, len(ratios))
        assert deflated is not None
        assert deflated.trials == 100
        believed += deflated.probability > 0.95
    assert believed / 200 < 0.05
    skilled = deflate(rng.normal(0.003, 0.01, 720), ratios, len(ratios))
    assert skilled is not None
    assert skilled.probability > 0.95


def test_without_hours_or_variation_there_is_no_figure() -> None:
    assert deflate(np.zeros(100), [0.1, 0.2], 2) is None
    assert deflate(np.ones(23) * 0.01, [0.1, 0.2], 2) is None
    assert hourly_sharpe(np.array([np.nan] * 48)) is None
