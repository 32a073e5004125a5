"""Boards: verdicts against each reference, the set that cannot be told from the best, and how often they are wrong."""

import math
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from trader.domain.models import VariantId
from trader.domain.portfolio.baselines import BUY_AND_HOLD, rule_agent
from trader.domain.portfolio.board import Board, Contender, judge_board
from trader.domain.portfolio.evidence import EquitySeries, ReturnSeries, compare, judge_family, state_return
from trader.domain.portfolio.intervals import Returns, estimate, percent_interval
from trader.domain.portfolio.replicates import split_variance
from trader.domain.portfolio.statistics import EquityPoint

START = datetime(2025, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def noise(seed: int, hours: int = 500, drift: float = 0.0) -> Returns:
    return np.random.default_rng(seed).normal(drift, 0.005, hours)


def series(values: Returns, start: datetime = START) -> ReturnSeries:
    return ReturnSeries(start, values)


def contender(key: str, values: Returns, trades: int = 50, start: datetime = START) -> Contender:
    return Contender(key, VariantId.APEX, series(values, start), trades)


def words(board: Board, key: str) -> dict[str, str]:
    return {each.reference: each.verdict.word for each in board.comparisons[key]}


def test_hours_without_a_value_keep_the_one_before_and_the_first_counts_from_the_capital() -> None:
    equity = EquitySeries(100.0)
    equity.set([EquityPoint(START, 110.0), EquityPoint(START + 3 * HOUR, 99.0)])
    found = equity.returns(START + 4 * HOUR)
    assert found is not None
    assert found.start == START
    assert np.expm1(found.values) == pytest.approx([0.1, 0, 0, -0.1])
    equity.set([EquityPoint(START + 3 * HOUR, 110.0), EquityPoint(START + 4 * HOUR, 121.0)])
    found = equity.returns(START + 9 * HOUR)
    assert found is not None
    assert np.expm1(found.values) == pytest.approx([0.1, 0, 0, 0, 0.1])
    assert equity.returns(START) is None
    assert EquitySeries(100.0).returns(START) is None


def test_a_statement_is_an_interval_or_a_reason() -> None:
    values = noise(1)
    found = state_return(series(values), 10)
    assert found.interval_percent == percent_interval(estimate(values).interval, 500)
    for reason, given in {
        "there are no whole hours yet": (None, 10),
        "23 whole hours; an interval needs 24": (series(values[:23]), 10),
        "9 completed trades; a statement about a model needs 10": (series(values), 9),
        "no hour differs from another": (series(np.zeros(100)), 10),
        "the equity reached zero, after which there is no return": (series(np.array([*values, -np.inf, np.nan])), 10),
    }.items():
        assert state_return(*given) == (0 if given[0] is None else len(given[0].values), None, reason)


def test_comparisons_are_over_the_hours_that_both_have() -> None:
    values = noise(2)
    one, other = series(values), series(noise(3, 300), START + 100 * HOUR)
    found = compare(one, other)
    assert found.hours == 300
    assert found.estimate is not None
    assert found.estimate.mean == pytest.approx(float(np.mean(values[100:400] - other.values)))
    assert compare(one, series(values, START + 600 * HOUR)).reason == "the two have no hour in common"


def test_clear_differences_are_told_and_the_best_is_a_set() -> None:
    good, fair, twin, poor, young = (
        contender("good", noise(1, drift=0.004)),
        contender("fair", noise(2, drift=0.0001)),
        contender("twin", noise(1, drift=0.004) + noise(7) / 5),
        contender("poor", noise(3, drift=-0.004)),
        contender("young", noise(4, 60)),
    )
    baselines = {BUY_AND_HOLD.id: series(noise(5)), rule_agent(VariantId.APEX).id: series(noise(6))}
    board = judge_board([good, fair, twin, poor, young], baselines, None)
    assert words(board, "good") == {
        "ruleAgent": "better", "holdNothing": "better", "buyAndHold": "better", "bestOther": "not distinguishable yet",
    }  # fmt: skip
    assert words(board, "poor") == dict.fromkeys(("ruleAgent", "holdNothing", "buyAndHold", "bestOther"), "worse")
    assert words(board, "fair")["holdNothing"] == "not distinguishable yet"
    assert words(board, "fair")["bestOther"] == "worse"
    assert board.best in {"good", "twin"}
    assert board.among_best == {"good", "twin", "young"}
    (why,) = (each.verdict.why for each in board.comparisons["fair"] if each.reference == "holdNothing")
    assert why is not None
    assert "a difference under" in why
    assert "% a day cannot be seen" in why
    (why,) = (each.verdict.why for each in board.comparisons["young"] if each.reference == "holdNothing")
    assert why == "60 common hours; a verdict needs 72"


def test_the_window_has_an_interval_and_the_verdict_is_of_all_hours() -> None:
    one = contender("one", noise(1, drift=0.004))
    board = judge_board([one], {}, START + 332 * HOUR)
    found = {each.reference: each for each in board.comparisons["one"]}
    nothing = found["holdNothing"]
    assert (nothing.window.hours, nothing.verdict.statement.hours) == (168, 500)
    assert nothing.verdict.word == "better"
    assert found["buyAndHold"].verdict.statement.reason == "this baseline has no whole hours yet"
    assert found["bestOther"].verdict.statement.reason == "there are no two entrants with enough hours and trades"
    assert board.best == "one"


def test_more_comparisons_need_more_evidence() -> None:
    found = compare(series(noise(1, drift=0.0012)), series(np.zeros(500)))
    weak = compare(series(noise(8)), series(np.zeros(500)))
    (alone,) = judge_family([found])
    among = judge_family([found, *[weak] * 99])[0]
    assert alone.p_value < among.p_value
    assert among.p_value == pytest.approx(min(1.0, 100 * alone.p_value))


def test_replicates_split_the_variance_of_an_hour() -> None:
    market, hours = noise(1, 2000), 2000
    copies = {f"m-{number}": series(market + noise(10 + number, hours) / 2) for number in range(8)}
    found = split_variance(copies)
    assert found is not None
    assert (found.hours, len(found.model_ids)) == (hours, 8)
    assert found.noise_percent == pytest.approx(20, abs=3), "a fourth of the market's variance: a fifth of the whole"
    assert found.lowest_percent < found.highest_percent
    assert split_variance({"a": series(noise(1, 23)), "b": series(noise(2, 23))}) is None


def test_an_account_that_began_without_money_has_returns_from_its_first_hour_on() -> None:
    series = EquitySeries(0.0)
    assert series.returns(START + 3 * HOUR) is None
    series.set([EquityPoint(START, 100.0), EquityPoint(START + HOUR, 110.0)])
    found = series.returns(START + 2 * HOUR)
    assert found is not None
    assert found.values.tolist() == [0.0, pytest.approx(math.log(1.1))]
