"""The ratios agree with an independent library."""

import math
import statistics as plain
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
    decision_quality,
    deviation,
    max_drawdown,
    sharpe_ratio,
    sortino_ratio,
    trade_signal_to_noise,
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


@pytest.mark.parametrize("seed", range(20))
def test_figures_of_trades_agree_with_numpy(seed: int) -> None:
    rng = Random(seed)
    trades = [(rng.uniform(30, 95), rng.gauss(1, 80)) for _ in range(rng.randrange(3, 400))]
    pnls = numpy.array([pnl for _, pnl in trades])
    assert deviation(list(pnls)) == _close(numpy.std(pnls, ddof=1))
    assert trade_signal_to_noise(list(pnls)) == _close(numpy.mean(pnls) / numpy.std(pnls, ddof=1))
    assert decision_quality(trades) == _close(numpy.corrcoef(numpy.array(trades).T)[0, 1])
    assert plain.median(pnls) == _close(numpy.median(pnls))
