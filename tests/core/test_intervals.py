"""Intervals and confidence sequences: their formulas, scipy's quantiles, and their coverage in simulations."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special  # without scipy.stats, which takes a second of every worker
from support.run_profile import is_nightly

from trader.core import intervals as ours

Draw = Callable[[np.random.Generator, int], ours.Returns]


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9)


# Tails and quantiles


@given(st.integers(1, 1_000), st.floats(1e-12, 0.49))
def test_quantiles_match_scipy(freedom: int, tail: float) -> None:
    quantile = -float(special.stdtrit(freedom, tail))
    assert ours.student_quantile(tail, freedom) == pytest.approx(quantile, rel=1e-8, abs=1e-9)
    assert ours.student_tail(quantile, freedom) == pytest.approx(tail, rel=1e-8)


def test_tails_of_extreme_values() -> None:
    assert ours.student_tail(0, 5) == 0.5
    assert ours.student_quantile(0.5, 5) == pytest.approx(0, abs=1e-9)
    assert 0 < ours.student_tail(1e6, 4) < 1e-20


# Families


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0, 20.0, 40.0, 60.0, 1e12]), max_size=8), st.integers(0, 20))
def test_e_bh_discovers_what_its_definition_does(e_values: list[float], more: int) -> None:
    """It discovers the k largest, for the largest k of which the k-th is at least the family over k times the rate."""
    family = len(e_values) + more
    rates = ours.e_bh(e_values, family)
    for rate in (0.01, 0.05, 0.5):
        ordered = sorted(e_values, reverse=True)
        found = max((k for k, value in enumerate(ordered, 1) if k * value >= family / rate), default=0)
        assert sum(each <= rate for each in rates) == sum(value >= ordered[found - 1] for value in ordered if found)
    assert all(0 < each <= 1 for each in rates)


# Estimates


@pytest.mark.parametrize("hours", [24, 25, 48, 168, 719])
def test_the_long_run_variance_matches_its_formula(hours: int) -> None:
    returns = np.random.default_rng(hours).normal(0.001, 0.01, hours)
    estimate = ours.estimate(returns)
    freedom = max(4, round(0.4 * hours ** (2 / 3)))
    times = np.arange(1, hours + 1) - 0.5
    transforms = [
        math.sqrt(2 / hours) * float(np.sum(returns * np.cos(math.pi * j * times / hours)))
        for j in range(1, freedom + 1)
    ]
    variance = sum(value**2 for value in transforms) / freedom
    assert (estimate.hours, estimate.freedom) == (hours, freedom)
    assert (estimate.mean, estimate.variance) == (near(float(np.mean(returns))), near(variance))
    half = float(special.stdtrit(freedom, 0.975)) * math.sqrt(variance / hours)
    assert estimate.interval == pytest.approx((estimate.mean - half, estimate.mean + half), rel=1e-8)


def test_the_confidence_sequence_matches_its_formula() -> None:
    returns = np.random.default_rng(3).normal(0.001, 0.01, 500)
    estimate = ours.estimate(returns)
    density = (-2 * math.log(0.05) + math.log(-2 * math.log(0.05) + 1)) / 336
    weight = 500 * density
    width = math.sqrt(2 * (weight + 1) / (500**2 * density) * math.log(math.sqrt(weight + 1) / 0.05))
    tail = float(special.ndtr(-width * math.sqrt(500)))
    half = -float(special.stdtrit(estimate.freedom, tail)) * estimate.error
    assert estimate.sequence == pytest.approx((estimate.mean - half, estimate.mean + half), rel=1e-8)


@given(st.integers(72, 2_500), st.floats(0.0, 8.0))
def test_a_p_value_under_5_percent_means_a_sequence_without_zero(hours: int, deviations: float) -> None:
    estimate = ours.Estimate(hours, deviations * 0.01 / math.sqrt(hours), 0.0001, max(4, round(0.4 * hours ** (2 / 3))))
    p_value = estimate.p_value()
    assert 0 <= p_value <= 1
    if abs(p_value - 0.05) > 1e-9:
        assert (p_value < 0.05) == (estimate.sequence.low > 0)


def test_too_few_hours_and_hours_without_spread_have_no_interval() -> None:
    with pytest.raises(ValueError, match="23 hours are too few"):
        ours.estimate(np.zeros(23))
    assert not ours.estimate(np.full(50, 0.001)).has_spread


def test_log_returns_convert_to_percent() -> None:
    assert ours.percent_interval(ours.ConfidenceInterval(-0.001, 0.001), 100) == near(
        (100 * math.expm1(-0.1), 100 * math.expm1(0.1))
    )
    assert math.isfinite(ours.percent(1e9))


# Families


@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_matches_its_definition(p_values: list[float]) -> None:
    adjusted = ours.holm(p_values)
    ordered = sorted(p_values)
    for p_value, corrected in zip(p_values, adjusted, strict=True):
        steps = [(len(ordered) - rank) * each for rank, each in enumerate(ordered) if each <= p_value]
        assert corrected == pytest.approx(min(1.0, max(steps)))


# Coverage


def normal(rng: np.random.Generator, hours: int) -> ours.Returns:
    return rng.normal(0, 0.01, hours)


def heavy_tailed(rng: np.random.Generator, hours: int) -> ours.Returns:
    return 0.01 * rng.standard_t(3, hours)


def remembering(rng: np.random.Generator, hours: int) -> ours.Returns:
    """AR(0.5), from its stationary state."""
    noise, values = rng.normal(0, 0.01, hours), np.empty(hours)
    value = rng.normal(0, 0.01 / math.sqrt(0.75))
    for hour in range(hours):
        values[hour] = value = 0.5 * value + noise[hour]
    return values


def turbulent(rng: np.random.Generator, hours: int) -> ours.Returns:
    """GARCH(0.08, 0.90), after 200 hours."""
    noise, values, variance = rng.normal(size=hours + 200), np.empty(hours + 200), 0.02
    for hour in range(hours + 200):
        values[hour] = math.sqrt(variance) * noise[hour]
        variance = 0.02 * 0.02 + 0.08 * values[hour] ** 2 + 0.90 * variance
    return values[200:]


def seldom_in_the_market(rng: np.random.Generator, hours: int) -> ours.Returns:
    """In the market a fifth of the time, in clusters of ten hours."""
    inside, values = rng.random() < 0.2, rng.normal(0, 0.01, hours)
    leaves, enters = rng.random(hours) < 0.1, rng.random(hours) < 0.025
    for hour in range(hours):
        inside = not leaves[hour] if inside else enters[hour]
        values[hour] *= inside
    return values


def coverage(draw: Draw, hours: int, paths: int) -> float:
    rng = np.random.default_rng(hours)
    held = 0
    for _ in range(paths):
        returns = draw(rng, hours)
        if returns.any():
            low, high = ours.estimate(returns).interval
            held += low <= 0 <= high
        else:
            held += 1
    return held / paths


PATHS = 4_000 if is_nightly() else 700
SLACK = 0.004 if is_nightly() else 0.012
"""Two standard errors of a 95% coverage over this many paths; beyond them, the interval is at fault."""

CASES: list[tuple[Draw, int, float, float]] = [
    *((draw, hours, 0.93, 0.97) for draw in (normal, heavy_tailed, turbulent) for hours in (24, 168)),
    *((remembering, hours, 0.92 if hours < 48 else 0.93, 0.97) for hours in (24, 168)),
    *((seldom_in_the_market, hours, 0.93, least) for hours, least in ((168, 0.985), (336, 0.97))),
]
NIGHTLY_CASES: list[tuple[Draw, int, float, float]] = [
    *(
        (draw, hours, 0.93, 0.97)
        for draw in (normal, heavy_tailed, remembering, turbulent)
        for hours in (48, 336, 720, 2160)
    ),
    *((seldom_in_the_market, hours, 0.93, 0.97) for hours in (720, 2160)),
]


@pytest.mark.parametrize(("draw", "hours", "least", "most"), CASES + NIGHTLY_CASES * is_nightly())
def test_the_interval_has_its_nominal_coverage(draw: Draw, hours: int, least: float, most: float) -> None:
    paths = PATHS if hours < 1000 else PATHS // 4
    assert least - SLACK <= coverage(draw, hours, paths) <= most + SLACK
