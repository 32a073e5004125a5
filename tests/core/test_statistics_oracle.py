"""The ratios agree with an independent library."""

import math
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import numpy
import pytest

from trader.core.statistics import (
    EquityPoint,
    calmar_ratio,
    daily_closes,
    daily_returns,
    max_drawdown,
    sharpe_ratio,
    sortino_ratio,
)

START = datetime(2025, 1, 1, tzinfo=UTC)


def _close(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def _walk(rng: Random, hours: int, *, drift: float = 0.0, memory: float = 0.0) -> list[EquityPoint]:
    """Hourly equity whose log returns have a mean and depend on the previous hour."""
    value, noise, points = 10_000.0, 0.0, []
    for hour in range(hours):
        points.append(EquityPoint(START + timedelta(hours=hour), value))
        noise = memory * noise + rng.gauss(0, 0.004)
        value *= math.exp(drift + noise)
    return points


@pytest.mark.slow
def test_ratios_agree_with_empyrical() -> None:
    empyrical = pytest.importorskip("empyrical")  # in one worker alone: it brings pandas and scipy.stats
    for seed in range(20):
        rng = Random(seed)
        series = _walk(rng, rng.randrange(300, 2200), drift=rng.uniform(-3e-4, 3e-4), memory=rng.uniform(0, 0.5))
        closes = daily_closes(series, 10_000.0)
        daily = numpy.array(daily_returns(closes))
        assert sharpe_ratio(closes) == _close(empyrical.sharpe_ratio(daily, annualization=365)), seed
        assert sortino_ratio(closes) == _close(empyrical.sortino_ratio(daily, annualization=365)), seed
        values = numpy.array([point.value for point in series])
        fall = empyrical.max_drawdown(values[1:] / values[:-1] - 1)
        drawdown = max_drawdown([point.value for point in series])
        assert drawdown is not None
        assert drawdown.percent == _close(-100 * fall), seed
        annual = empyrical.annual_return(daily, annualization=365)
        assert calmar_ratio(closes, drawdown) == _close(annual / abs(fall)), seed
