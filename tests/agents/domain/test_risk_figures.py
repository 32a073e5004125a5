"""The risk figures of a run, followed hour by hour, equal those of its whole series."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from trader.agents.domain.observation import RiskFigures
from trader.agents.domain.view import ObservedStats
from trader.core.statistics import EquityPoint, daily_closes, max_drawdown, sharpe_ratio

steps = st.lists(
    st.tuples(st.sampled_from((1, 5, 17, 40)), st.floats(-50, 300).map(lambda value: round(value, 8))), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 23), steps)
def test_figures_that_follow_each_hour_equal_those_of_the_series(first: int, made: list[tuple[int, float]]) -> None:
    hours, at = [], datetime(2025, 1, 1, first, tzinfo=UTC)
    for gap, value in made:
        hours.append(EquityPoint(at, value))
        at += timedelta(hours=gap)
    seen = RiskFigures.of(Decimal(100), hours).beside(ObservedStats())
    fall = max_drawdown([100.0, *(hour.value for hour in hours)]) if hours else None
    assert seen.max_drawdown_percent == (None if fall is None else fall.percent)
    assert seen.sharpe_ratio == sharpe_ratio(daily_closes(hours, 100.0))
