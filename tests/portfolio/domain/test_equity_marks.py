"""The stored marks of a run's hourly equity, compared with the hours themselves."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from trader.portfolio.domain.baselines import EquityMarks

START = datetime(2026, 1, 1, 20, tzinfo=UTC)
HOUR = timedelta(hours=1)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 1000)), max_size=60), st.integers(0, 30))
def test_the_equity_marks_equal_those_of_all_hours(notes: list[tuple[int, int]], later: int) -> None:
    marks, hours, hour = EquityMarks(), dict[datetime, Decimal](), START
    for passed, equity in notes:
        hour += passed * HOUR
        hours[hour] = Decimal(equity)
        marks = marks.noted(hour, Decimal(equity))
    assert marks.peak == max(hours.values(), default=None)
    day = (hour + later * HOUR).date()
    before = [equity for at, equity in hours.items() if at.date() < day]
    assert marks.before(day) == (before[-1] if before else None)
