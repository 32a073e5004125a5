"""Confidence intervals of hourly log returns: long-run variance, Student's t, and anytime-valid statements.

A trader's hourly returns are correlated, so the variance of their mean is estimated by the equal-weighted cosine
estimator: Lazarus, Lewis, Stock and Watson, "HAR Inference: Recommendations for Practice", Journal of Business and
Economic Statistics 36:4 (2018). Statements that people check every day use an asymptotic confidence sequence:
Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic confidence
sequences", Annals of Statistics 52:6 (2024).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Returns = NDArray[np.float64]
"""Log returns of successive hours."""

HOURS_MIN: Final = 24
"""Hours that an interval needs."""

TRADES_MIN: Final = 10
"""Completed trades that a model's interval needs: with fewer, too little has been observed."""

LEVEL: Final = 0.05
"""The error rate that every statement allows: an interval covers the true value in 95% of cases."""

SEQUENCE_HOURS_MIN: Final = 72
SEQUENCE_TUNED_HOURS: Final = 336
"""A confidence sequence begins after three days and is narrowest after two weeks."""

HOURS_PER_DAY: Final = 24

_NO_SPREAD: Final = 1e-12
"""A standard error below this is rounding, not spread."""

_TOGETHER: Final = 50
"""How many series to transform at once, so that their tables stay in the CPU cache."""

_SURELY_ONE: Final = 1.001
"""A level above this is 1 regardless of rounding."""

_FRACTION_STEPS: Final = 500
_TINY: Final = 1e-300


class ConfidenceInterval(NamedTuple):
    """Bounds that contain the true value in 95% of cases."""

    low: float
    high: float


class Estimate(NamedTuple):
    """The mean of hourly log returns, their long-run variance, and the degrees of freedom of that variance."""

    hours: int
    mean: float
    variance: float
    freedom: int

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return math.sqrt(self.variance / self.hours)

    @property
    def has_spread(self) -> bool:
        """Whether the returns vary at all; the difference of two equal series does not."""
        return self.error > _NO_SPREAD

    @property
    def interval(self) -> ConfidenceInterval:
        """The 95% interval of the mean, valid for a single look."""
        half = student_quantile(LEVEL / 2, self.freedom) * self.error
        return ConfidenceInterval(self.mean - half, self.mean + half)

    @property
    def sequence(self) -> ConfidenceInterval:
        """The 95% confidence sequence of the mean, valid simultaneously at every hour from the third day on."""
        half = sequence_deviations(self.hours, LEVEL, self.freedom) * self.error
        return ConfidenceInterval(self.mean - half, self.mean + half)

    def p_value(self) -> float:
        """Return the level at which the confidence sequence first excludes zero; valid for any number of looks."""
        distance = abs(self.mean) / self.error
        # The tail of Student's t is above the normal tail, so this is a lower bound of the level, and usually 1.
        if _sequence_level(distance, self.hours) > _SURELY_ONE:
            return 1.0
        tail = student_tail(distance, self.freedom)
        return 0.0 if tail < _TINY else min(1.0, _sequence_level(-_NORMAL.inv_cdf(tail), self.hours))


def influence_error(influences: Returns) -> float:
    """Return the half-width of the 95% interval of a figure whose error is the mean of these influences.

    It is valid for a single look. The influences may be correlated, so it uses their long-run variance.
    """
    freedom = freedom_of(len(influences))
    variance = float(np.sum(cosine_transforms(influences - influences.mean()) ** 2)) / freedom
    return student_quantile(LEVEL / 2, freedom) * math.sqrt(variance / len(influences))


def estimate(returns: Returns) -> Estimate:
    """Return the mean and the long-run variance Ω = Σ Λ_j² / B.

    :raises ValueError: too few returns for an interval
    """
    return estimates([returns])[0]


def estimates(series: Sequence[Returns]) -> list[Estimate]:
    """Return the estimate of each series. Transforming series of the same length together is five times as fast.

    :raises ValueError: a series has too few returns for an interval
    """
    places: dict[int, list[int]] = {}
    for place, returns in enumerate(series):
        places.setdefault(len(returns), []).append(place)
    by_place: dict[int, Estimate] = {}
    for hours, alike in places.items():
        if hours < HOURS_MIN:
            raise ValueError(f"{hours} hours are too few for an interval, which needs {HOURS_MIN}")
        for start in range(0, len(alike), _TOGETHER):
            chosen = alike[start : start + _TOGETHER]
            rows = np.stack([series[place] for place in chosen])
            transforms = cosine_transforms(rows)
            freedom = transforms.shape[-1]
            means, sums = np.mean(rows, axis=-1).tolist(), np.sum(transforms**2, axis=-1).tolist()
            for place, mean, total in zip(chosen, means, sums, strict=True):
                by_place[place] = Estimate(hours, mean, total / freedom, freedom)
    return [by_place[place] for place in range(len(series))]


def cosine_transforms(returns: Returns) -> NDArray[np.float64]:
    """Return Λ_j = √(2/T) Σ r_t cos(πj(t − ½)/T), j = 1…B, along the last axis.

    One Fourier transform of twice the length yields all of them.
    """
    hours = returns.shape[-1]
    freedom = freedom_of(hours)
    turns = np.exp(-0.5j * math.pi * np.arange(1, freedom + 1) / hours)
    turned = np.fft.rfft(returns, 2 * hours)[..., 1 : freedom + 1] * turns
    coefficients: NDArray[np.float64] = math.sqrt(2 / hours) * turned.real
    return coefficients


def freedom_of(hours: int) -> int:
    """Return B = max(4, round(0.4 T^(2/3))), the degrees of freedom of the long-run variance."""
    return max(4, round(0.4 * math.cbrt(hours) ** 2))


def percent(log_return: float) -> float:
    """Return the gain in percent that corresponds to a log return."""
    return 100 * math.expm1(min(log_return, 700.0))


def percent_interval(interval: ConfidenceInterval, hours: int) -> ConfidenceInterval:
    """Return the interval of the return over `hours`, in percent."""
    return ConfidenceInterval(percent(hours * interval.low), percent(hours * interval.high))


def holm(p_values: Sequence[float], family: int | None = None) -> list[float]:
    """Return Holm-corrected p values of a family of statements, which bound the family's error rate.

    `family` is the size of the family (None: only these); its other statements may have any p value.
    Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6:2 (1979).
    """
    corrected = [0.0] * len(p_values)
    reached, count = 0.0, max(len(p_values), family or 0)
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        reached = max(reached, min(1.0, (count - rank) * p_values[place]))
        corrected[place] = reached
    return corrected


def e_bh(e_values: Sequence[float], family: int) -> list[float]:
    """Return, for each statement of a family, the smallest false discovery rate at which the e-BH procedure makes it.

    The procedure makes the k strongest statements whose weakest e value is at least `family` / (k · rate). It holds
    the rate under any dependence. Wang and Ramdas, "False discovery rate control with e-values", Journal of the Royal
    Statistical Society B 84:3 (2022).
    """
    rates, reached = [1.0] * len(e_values), 1.0
    weakest_first = sorted(range(len(e_values)), key=e_values.__getitem__)
    for rank, place in zip(range(len(e_values), 0, -1), weakest_first, strict=True):
        if e_values[place] > 0:
            reached = min(reached, family / (rank * e_values[place]))
        rates[place] = reached
    return rates


# Confidence sequences


@lru_cache(maxsize=1)
def _sequence_density() -> float:
    """Return the ρ² that makes the sequence narrowest at `SEQUENCE_TUNED_HOURS`."""
    doubled = -2 * math.log(LEVEL)
    return (doubled + math.log(doubled + 1)) / SEQUENCE_TUNED_HOURS


def _sequence_level(deviations: float, hours: int) -> float:
    """Return the level at which the sequence of normal data first excludes a value this many standard errors away."""
    weight = hours * _sequence_density()
    return math.sqrt(weight + 1) * math.exp(-(deviations**2) * weight / (2 * (weight + 1)))


def sequence_deviations(hours: int, level: float, freedom: int) -> float:
    """Return the half-width of the sequence after `hours`, in standard errors with these degrees of freedom."""
    weight = hours * _sequence_density()
    normal = math.sqrt(2 * (weight + 1) / weight * math.log(math.sqrt(weight + 1) / level))
    tail = 0.5 * math.erfc(normal / math.sqrt(2))  # of a standard normal value
    return student_quantile(tail, freedom)


# Tails and quantiles

_NORMAL: Final = NormalDist()


@lru_cache(maxsize=4096)  # a statement needs its p value several times
def student_tail(value: float, freedom: int) -> float:
    """Return the probability that Student's t exceeds `value`, which must not be negative."""
    return 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + value * value))


@lru_cache(maxsize=4096)
def student_quantile(tail: float, freedom: int) -> float:
    """Return the value that Student's t exceeds with probability `tail`, which must be at most a half."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > tail:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle in {low, high}:
            break
        if student_tail(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function, using whichever continued fraction converges fast."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(scale) * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Evaluate the continued fraction by Lentz's method: Abramowitz and Stegun, 26.5.8."""
    upper, lower = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = lower
    for step in range(1, _FRACTION_STEPS):
        even = step * (b - step) * x / ((a + 2 * step - 1) * (a + 2 * step))
        odd = -(a + step) * (a + b + step) * x / ((a + 2 * step) * (a + 2 * step + 1))
        for term in (even, odd):
            lower = 1 / (1 + term * lower)
            upper = 1 + term / upper
            value *= lower * upper
        if abs(lower * upper - 1) < 1e-15:
            break
    return value
