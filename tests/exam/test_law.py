"""The law values plans exactly: against closed forms, and against positions that are simulated second by second."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_profile import is_nightly

from trader.exam.domain.law import HORIZON, LOSS_MAX, RISK_BUDGET, SIZE_MAX, Law, PlannedPosition, credited

_MINUTE = 0.0008
_FILL = 0.0005

distances = st.floats(0.001, 0.05)
sides = st.sampled_from((1, -1))
minutes = st.integers(1, HORIZON)


def law_of(
    drift: float = 0.0, lasts: int = HORIZON, *, funding: float = 0.0, growth: float = 0.0, seed: int = 1
) -> Law:
    """Return the law of one market with this drift in all, and closing costs that grow by `growth`."""
    drifts = np.zeros((1, HORIZON))
    drifts[0, :lasts] = drift / lasts
    closing = np.full((1, HORIZON), _FILL) + growth * np.arange(1.0, HORIZON + 1) / HORIZON
    return Law(
        drifts, np.full((1, HORIZON), _MINUTE), np.array([funding]), closing, seed,
        np.array([_MINUTE]),
    )  # fmt: skip


def simulated(law: Law, held: PlannedPosition, paths: int) -> tuple[float, float]:
    """Return the mean gain of a position over paths of one-second steps, and its standard error."""
    rng, looks = np.random.default_rng(3), 60
    levels, is_open, gains = np.zeros(paths), np.ones(paths, bool), np.zeros(paths)
    for minute in range(held.minutes):
        size, drift = float(law.deviation[0, minute]), float(law.drift[0, minute])
        for _ in range(looks):
            levels += (drift - size**2 / 2) / looks + size / math.sqrt(looks) * rng.standard_normal(paths)
            hit = is_open & ((levels <= held.below) | (levels >= held.above))
            gains[hit] += held.side * np.expm1(levels[hit]) - law.closing[0, minute] * np.exp(levels[hit])
            is_open &= ~hit
        if minute % 60 == 59:
            gains[is_open] -= held.side * law.funding[0] * np.exp(levels[is_open])
    last = law.closing[0, held.minutes - 1]
    gains[is_open] += held.side * np.expm1(levels[is_open]) - last * np.exp(levels[is_open])
    return float(gains.mean()), float(gains.std() / math.sqrt(paths))


@given(side=sides, below=distances, above=distances, closes=minutes)
def test_no_plan_earns_where_nothing_drifts(side: int, below: float, above: float, closes: int) -> None:
    value = law_of().value([PlannedPosition(0, side, 1.0, -below, above, closes)])
    assert value == pytest.approx(-_FILL, rel=0.04)  # the cost of closing, at the price by then


@given(drift=st.floats(-0.02, 0.02), side=sides, closes=minutes)
def test_a_distant_plan_is_worth_as_much_as_none(drift: float, side: int, closes: int) -> None:
    law = law_of(drift, funding=1e-4, growth=0.002)
    far = law.value([PlannedPosition(0, side, 1.0, -0.5, 0.5, closes)])
    assert far == pytest.approx(law.value([PlannedPosition(0, side, 1.0, minutes=closes)]), abs=3e-4)


@given(drift=st.floats(0.001, 0.01), below=distances)
def test_a_stop_costs_exposure_to_a_drift(drift: float, below: float) -> None:
    law = law_of(drift)
    assert law.value([PlannedPosition(0, 1, 1.0, -below)]) <= law.value([PlannedPosition(0, 1, 1.0)]) + 3e-5


@pytest.mark.parametrize(
    ("law", "held"),
    [
        (law_of(0.006, 180), PlannedPosition(0, 1, 1.0, -0.006, 0.01)),
        (law_of(0.006, 120), PlannedPosition(0, -1, 1.0, -0.01, 0.006, 200)),
        (law_of(funding=4e-4), PlannedPosition(0, 1, 1.0, -0.005, 0.006)),
        (law_of(-0.004, growth=0.003), PlannedPosition(0, 1, 1.0, -0.01, 0.02, 235)),
    ],
)
def test_value_of_a_plan_equals_a_simulation_by_seconds(law: Law, held: PlannedPosition) -> None:
    expected, error = simulated(law, held, 4000 if is_nightly() else 500)
    assert law.value([held]) == pytest.approx(expected, abs=3.5 * error)


def test_values_of_a_plan_hardly_depend_on_the_paths() -> None:
    held = [PlannedPosition(0, 1, 1.0, -0.006, 0.01)]
    values = [law_of(0.004, 180, seed=seed).value(held) for seed in range(30)]
    assert np.std(values) < 0.025 * 0.004


@given(drift=st.floats(-0.02, 0.02), side=sides, below=distances, above=distances, closes=minutes)
def test_no_plan_within_the_budget_beats_the_oracle(
    drift: float, side: int, below: float, above: float, closes: int
) -> None:
    law = law_of(drift, 180)
    weight = RISK_BUDGET / float(law.horizon_deviation[0])
    held = [PlannedPosition(0, side, weight, -below, above, closes)]
    assert law.value(held) - weight * _FILL <= law.oracle(np.array([_FILL])).value + 4e-5


def test_oracle_does_nothing_where_nothing_pays() -> None:
    assert law_of(1.5 * _FILL).oracle(np.array([_FILL])) == ((), 0.0)


@given(value=st.floats(-0.01, 0.01), factor=st.floats(1, 20))
def test_gains_count_up_to_the_risk_budget_losses_in_full_and_more_than_two_budgets_as_the_largest_loss(
    value: float, factor: float
) -> None:
    whole = credited(value * factor, RISK_BUDGET * factor, 0.01)
    expected = value if value > 0 else value * factor
    assert whole == pytest.approx(expected if factor <= SIZE_MAX else -LOSS_MAX * 0.01)
