"""False verdicts: how often boards that are read daily distinguish models that differ only by luck."""

import numpy as np
import pytest
from benchmarks.verdicts import KINDS
from support.null_seasons import PROCESSES, NullSeason, share_interval, statements_of, strongest_verdict, wrong_seasons
from support.run_profile import is_nightly

from trader.portfolio.domain.board import judge_board
from trader.portfolio.domain.evidence import Verdict


def strongest_of_board(season: NullSeason, hours: int) -> Verdict:
    """Return the verdict of the smallest p value on the board of all models after this many hours."""
    return strongest_verdict(season, statements_of(season, hours, range(len(season.models))))


SEASONS, MODELS, DAYS = (1000, 100, 90) if is_nightly() else (3, 12, 30)


@pytest.mark.parametrize("drift", [0, 0.0004, 0.001, 0.003])
@pytest.mark.parametrize("process", ["normal", "loss in 0.5 % of hours"])
def test_the_fast_board_has_the_smallest_p_value_of_the_services(drift: float, process: str) -> None:
    season = NullSeason.draw(1, 12, 20, PROCESSES[process])
    season = season._replace(models=season.models + drift * np.arange(12)[:, None] / 11)
    for hours in (72, 240, 480):
        board = judge_board(*season.entrants(hours), None)
        verdicts = [each.verdict for comparison in board.comparisons.values() for each in comparison]
        smallest = min(verdicts, key=lambda verdict: verdict.p_value)
        result = strongest_of_board(season, hours)
        assert result.p_value == pytest.approx(smallest.p_value, rel=1e-6, abs=1e-12)
        assert (result.word == "not distinguishable yet") == (smallest.word == "not distinguishable yet")


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES)
def test_models_that_differ_only_by_luck_stay_indistinguishable_under_daily_looks(process: str) -> None:
    """In nightly runs the upper end of the share's 95 % interval is at most 5 %; with few seasons, the lower end."""
    wrong = sum(wrong_seasons(range(SEASONS), MODELS, DAYS, PROCESSES[process]))
    low, high = share_interval(wrong, SEASONS)
    assert (high if is_nightly() else low) <= 0.05, f"{wrong} of {SEASONS} seasons"


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"boards"}))
def test_other_boards_of_luck_stay_undecided_too(kind: str) -> None:
    assert not any(KINDS[kind](range(3), 6, 20, PROCESSES["bankruptcies"]))
