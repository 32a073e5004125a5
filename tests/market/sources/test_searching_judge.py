"""The judge that searches finds a planted tell, and nothing in fair walks."""

import numpy
import pytest
from support.market_fidelity import judge_passed
from support.searching_judge import DrawnMarket, measure_motion, search

from trader.market.domain.markets import MARKETS, SIMULATED_MARKETS
from trader.market.sources.books import Grid
from trader.market.sources.files import FileRow, Minutes

COUNT = 900


def walks(seed: int, continues: float) -> dict[str, DrawnMarket]:
    """Draw minutes of a walk whose moves continue in the direction of the one before with this chance."""
    random = numpy.random.default_rng(seed)
    turns = numpy.where(random.random((COUNT, 60)) < continues, 1, -1)
    moves = numpy.cumprod(turns, axis=1) * random.exponential(40.0, (COUNT, 60))
    marks = (2_000_000 + numpy.cumsum(moves.reshape(-1) - moves.mean())).astype(int).reshape(COUNT, 60)
    grid, minutes = Grid(MARKETS["BTC"]), Minutes()
    for number, row in enumerate(marks.tolist()):
        opened, high, low, close = (grid.number(each) for each in (row[0], max(row), min(row), row[-1]))
        minutes.append(FileRow(29_000_000 + number, opened, high, low, close, 1.0))
    return {"BTC": DrawnMarket.of("BTC", minutes, marks.tolist())}


@pytest.mark.parametrize(("continues", "finds"), [(0.5, False), (0.9, True)])
def test_a_boosted_model_finds_a_tell_and_nothing_in_fair_walks(continues: float, *, finds: bool) -> None:
    learned, tried = walks(1, continues), walks(2, continues)
    weeks, calm = (range(100, COUNT), range(100, COUNT)), SIMULATED_MARKETS["BTC"].calm
    books = (calm, 0.2), (calm._replace(surcharge_bp=2.0), 0.2)
    usual, wide = search("BTC", learned, tried, weeks, books)
    assert (usual.gross_bp > 0.2) == finds
    assert usual.net_bp < usual.gross_bp
    assert wide.net_bp < usual.net_bp - 2.0, "the surcharge is paid at the entry and at the exit"


def test_a_price_beyond_a_level_is_followed_from_there_on_the_path_and_from_the_level_by_the_candles() -> None:
    paths = numpy.array([[0.0, 3.0, 6.0, -1.0], [0.0, -1.0, -1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    minutes = Minutes()
    for number, row in enumerate(paths):
        opened, high, low, close = numpy.exp(numpy.array([row[0], row.max(), row.min(), row[-1]]) / 1e4).tolist()
        minutes.append(FileRow(29_000_000 + number, opened, high, low, close, 1.0))
    passed = judge_passed(paths, minutes, numpy.array([4.0, 4.0, 0.0]), 0.5)
    assert passed.times == 1, "no other minute passes, and the last has no range"
    assert passed.recorded_bp == pytest.approx(-1 - 2)
    assert passed.drawn_bp == pytest.approx(-1 - 3)
    both = judge_passed(paths, minutes, numpy.array([4.0, 4.0, 0.0]), 0.25)
    assert both.times == 4
    assert both.recorded_bp == pytest.approx(((-1 - 1) + (1 - 1) + (1 - 1) + (-1 - 1)) / 4)
    assert both.drawn_bp == pytest.approx(((-1 - 3) + (1 - 1) + (1 - 1) + (-1 - 1)) / 4)


def test_motion_of_a_fair_walk_is_that_of_a_martingale_and_a_trend_shows() -> None:
    fair, trend = (walks(3, continues)["BTC"] for continues in (0.5, 0.7))
    motion = measure_motion(fair.paths, numpy.full(COUNT, 10.0))
    assert motion.variance_ratio == pytest.approx(1, abs=0.1)
    assert motion.autocorrelation == pytest.approx(0, abs=0.015)
    assert motion.largest_share < 1.3
    motion = measure_motion(trend.paths, numpy.full(COUNT, 10.0))
    assert motion.variance_ratio < 0.7
    assert motion.autocorrelation > 0.1
