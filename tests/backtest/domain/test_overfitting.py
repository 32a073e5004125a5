"""Probability of backtest overfitting: a case by hand, the definition, and rules with and without skill."""

from itertools import combinations

import numpy as np
import pytest

from trader.backtest.domain.selection import Overfitting, overfitting


def test_a_case_that_can_be_checked_by_hand() -> None:
    # Three configurations in four blocks of two hours, whose returns are mean - 1 and mean + 1.
    means = np.array([[2, -2, 1], [2, -2, 1], [-2, 2, 1], [-2, 2, 1]])
    returns = (means[:, None, :] + np.array([-1, 1])[None, :, None]).reshape(8, 3).astype(float)
    # Blocks 1 and 2 choose the first, which is the worst in 3 and 4, and the reverse chooses the second. Each of the
    # other four choices has a block of either kind: the third is the best on both sides.
    assert overfitting(returns, 4) == Overfitting(2 / 6, 3, 4, 6)


def test_it_equals_the_definition_and_averages_ties() -> None:
    rng = np.random.default_rng(1)
    returns = np.round(rng.normal(0, 0.01, (51, 7)), 3)
    returns[:, 3] = returns[:, 2]
    returns[:, 4] = 0.0
    blocks = np.split(returns[3:], 8)
    logits = []
    for chosen in combinations(range(8), 4):
        inside, outside = (
            [
                0.0 if (part := np.concatenate(side)[:, column]).std() == 0 else part.mean() / part.std(ddof=1)
                for column in range(7)
            ]
            for side in (
                [blocks[each] for each in chosen],
                [blocks[each] for each in range(8) if each not in chosen],
            )
        )
        best = outside[int(np.argmax(inside))]
        ranks = [place + 1 for place, ratio in enumerate(sorted(outside)) if ratio == pytest.approx(best, abs=1e-12)]
        omega = float(np.mean(ranks)) / 8
        logits.append(np.log(omega / (1 - omega)))
    assert overfitting(returns) == Overfitting(float(np.mean(np.array(logits) <= 1e-12)), 7, 8, 70)


def test_rules_without_skill_are_overfitted_half_of_the_time_and_a_skilled_one_never() -> None:
    rng = np.random.default_rng(2)
    found = [overfitting(rng.normal(0, 0.01, (240, 20))) for _ in range(20)]
    assert np.mean([each.probability for each in found if each is not None]) == pytest.approx(0.5, abs=0.1)
    returns = rng.normal(0, 0.01, (240, 20))
    returns[:, 7] += 0.01
    assert overfitting(returns) == Overfitting(0.0, 20, 16, 12_870)


def test_too_little_for_a_figure() -> None:
    assert overfitting(np.ones((240, 1))) is None
    assert overfitting(np.ones((23, 5))) is None
    assert overfitting(np.full((240, 5), np.nan)) is None
