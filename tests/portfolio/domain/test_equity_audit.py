"""The audit of hourly equity against the prices of the market."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

from trader.portfolio.domain.equity_audit import HourlyCandles, compare_with_marks
from trader.portfolio.domain.histories import HourlyValue

HOUR = timedelta(hours=1)
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
CANDLES = [("BTC", FIRST + number * HOUR, 100.0, 100.5) for number in range(3)]
HOURS = [
    HourlyValue("a", FIRST + number * HOUR, Decimal(equity), FIRST + number * HOUR + 59 * HOUR / 60, 1.0)
    for number, equity in enumerate((100, 103))
]


def problems(known_until: datetime) -> list[str]:
    candles = HourlyCandles(CANDLES, known_until)
    return list(compare_with_marks(Decimal(100), HOURS, 0.0, candles.move_over))


def test_equity_that_moves_more_than_the_market_is_reported() -> None:
    (problem,) = problems(FIRST + 2 * HOUR)
    assert problem.endswith("is 103, +3.00 % from 100; the market and its leverage allow 1.50 %")


def test_equity_is_not_compared_with_an_hour_whose_minutes_are_still_being_recorded() -> None:
    """A start records missed minutes over several calls; until then an hour shows too little of the market."""
    assert problems(FIRST + HOUR + HOUR / 2) == []
