"""Paths within a minute: they match their candle exactly, are a function of seed, market and minute, and are fair."""

import subprocess
import sys
from bisect import bisect_left
from collections.abc import Sequence
from decimal import Decimal
from random import Random

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.candles import FOLDER
from support.market_fidelity import (
    CALM_DEPTHS,
    CALM_SPREADS,
    Costs,
    Paths,
    correlation,
    draw_together,
    is_inside,
    judge_cross_rules,
    judge_rules,
    log_paths,
    recorded_quotes,
    sample,
    worst,
)
from support.searching_judge import measure_motion

from trader.market.domain.markets import MARKETS
from trader.market.sources.books import Grid, TrailingDay, marks_of_candle
from trader.market.sources.files import FileRow, Minutes, find_files, read_market
from trader.market.sources.minute_paths import MinutePaths


def part_of(minutes: Minutes, begin: int, stop: int) -> Minutes:
    """Return the candles [begin, stop)."""
    part = Minutes()
    for place in range(begin, stop):
        part.append(minutes[place])
    return part


SYMBOLS = ("BTC", "ETH", "SOL")
GRIDS = {symbol: Grid(MARKETS[symbol]) for symbol in SYMBOLS}

needs_real = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the recorded candles are not at {FOLDER}")


@st.composite
def candles(draw: st.DrawFn) -> FileRow:
    """Draw a candle: its width from zero to a quarter of the price, its open and close often at the edges."""
    low = draw(st.floats(10, 1e6))
    high = low * (1 + draw(st.sampled_from((0.0, 1e-7, 1e-6, 1e-5, 1e-3, 0.25))) * draw(st.floats(0, 1)))
    edges = st.sampled_from((low, high)) | st.floats(low, high)
    return FileRow(draw(st.integers(0, 40_000_000)), draw(edges), high, low, draw(edges), draw(st.floats(0, 1e9)))


def recording(*rows: FileRow) -> Minutes:
    minutes = Minutes()
    for row in rows:
        minutes.append(row)
    return minutes


def draw(row: FileRow, symbol: str = "BTC", *, seed: int = 7, leaders: Sequence[FileRow] = ()) -> list[int]:
    """Draw the path of one candle, along with those of other markets in the same minute."""
    leading = [
        MinutePaths(f"{seed}:{number}", GRIDS["BTC"], recording(each._replace(minute=row.minute)))
        for number, each in enumerate(leaders)
    ]
    return MinutePaths(f"{seed}:{symbol}", GRIDS[symbol], recording(row), leading).draw(0)


@pytest.mark.slow
@settings(max_examples=2 * settings().max_examples)
@given(candles(), st.sampled_from(SYMBOLS), st.lists(candles(), max_size=2))
def test_a_path_meets_open_high_low_and_close_and_stays_within_them(
    row: FileRow, symbol: str, leaders: list[FileRow]
) -> None:
    grid = GRIDS[symbol]
    path = draw(row, symbol, leaders=leaders)
    assert (min(path), max(path), path[0], path[-1]) == grid.corners(row)
    assert len(path) == 60
    prices = [grid.price(mark) for mark in path]
    quarter = MARKETS[symbol].tick / 4 * Decimal("1.000001")
    for price, recorded in zip(
        (min(prices), max(prices), prices[0], prices[-1]), (row.low, row.high, row.open, row.close), strict=True
    ):
        assert abs(price - Decimal(recorded)) <= quarter, "rounded to the nearest half tick, whatever the candle"


@given(candles(), st.sampled_from(SYMBOLS), st.floats(0, 1))
def test_a_path_reaches_each_price_of_its_market_that_the_candle_reached(
    row: FileRow, symbol: str, height: float
) -> None:
    grid, path = GRIDS[symbol], draw(row, symbol)
    reached = grid.price(grid.nearest(row.low + height * (row.high - row.low)))
    if row.low <= float(reached) <= row.high:
        assert grid.price(min(path)) <= reached <= grid.price(max(path))


ROW = FileRow(29_000_000, 95_000.0, 95_060.0, 94_990.0, 95_020.0, 5.0)


LEADER = FileRow(29_000_000, 3_000.0, 3_004.0, 2_998.0, 3_003.0, 5.0)


@pytest.mark.parametrize("leaders", [[], [LEADER], [LEADER, ROW]])
def test_a_path_is_a_function_of_seed_market_minute_and_leaders(leaders: list[FileRow]) -> None:
    path = draw(ROW, leaders=leaders)
    assert path == draw(ROW, leaders=leaders)
    later = [draw(ROW._replace(minute=ROW.minute + number), leaders=leaders) for number in range(1, 8)]
    others = [draw(ROW, seed=seed, leaders=leaders) for seed in range(20, 28)]
    assert len({tuple(each) for each in [path, *later, *others]}) > 13


@pytest.mark.processes
def test_another_process_draws_the_same_paths() -> None:
    code = (
        "from trader.market.domain.markets import MARKETS\n"
        "from trader.market.sources.books import Grid\n"
        "from trader.market.sources.files import FileRow, Minutes\n"
        "from trader.market.sources.minute_paths import MinutePaths\n"
        "minutes = Minutes()\n"
        f"minutes.append({ROW!r})\n"
        "grid = Grid(MARKETS['BTC'])\n"
        "leader = MinutePaths('7:0', grid, minutes)\n"
        "print(MinutePaths('7:BTC', grid, minutes, [leader]).draw(0))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(draw(ROW, leaders=[ROW]))


def test_extremes_are_reached_at_any_second_and_in_any_order() -> None:
    rows = [
        ROW._replace(minute=minute, open=94_990.0 + minute * 7 % 71, close=94_990.0 + minute * 11 % 71)
        for minute in range(3_000)
    ]
    drawn = MinutePaths("7:BTC", GRIDS["BTC"], recording(*rows))
    paths = [drawn.draw(place) for place in range(len(rows))]
    lows, highs = ([path.index(extreme(path)) for path in paths] for extreme in (min, max))
    assert len(set(lows)) > 55 < len(set(highs))
    assert 0.3 < sum(low < high for low, high in zip(lows, highs, strict=True)) / len(paths) < 0.7


def test_a_gap_of_its_leader_leaves_a_market_alone() -> None:
    rows = [ROW._replace(minute=ROW.minute + number) for number in range(3)]
    leader = MinutePaths("7:0", GRIDS["BTC"], recording(rows[0], rows[2]))
    absent = MinutePaths("7:0", GRIDS["BTC"], recording(ROW._replace(minute=ROW.minute + 3)))
    beside, alone = (MinutePaths("7:BTC", GRIDS["BTC"], recording(*rows), [each]) for each in (leader, absent))
    assert [beside.draw(place) == alone.draw(place) for place in range(3)] == [False, True, False]


@pytest.mark.slow
def test_minutes_take_the_same_paths_in_any_order_regardless_of_later_minutes() -> None:
    random, week = Random(0), 7 * 1440
    rows, first = [], ROW.minute // week * week - 20
    for number in range(30):
        opened, close, high, low = (95_000.0 + random.choice((0, 1, 30)) * random.random() for _ in range(4))
        edges = (opened, close, high, low)
        rows.append(FileRow(first + number, opened, max(edges), min(edges), close, 1.0))
    recordings = [recording(*rows[:12], *rows[15:]), recording(*rows[::3]), recording(*rows)]

    def paths(stop: int) -> MinutePaths:
        markets: list[MinutePaths] = []
        for number, each in enumerate(recordings):
            known = part_of(each, 0, bisect_left(each.minute, first + stop))
            markets.append(MinutePaths(f"7:{number}", GRIDS["BTC"], known, markets))
        return markets[-1]

    in_a_row = paths(len(rows))
    drawn = [in_a_row.draw(place) for place in range(len(rows))]
    assert drawn == [paths(place + 1).draw(place) for place in range(len(rows))]
    assert drawn[::-1] == [in_a_row.draw(place) for place in reversed(range(len(rows)))]


# Fairness on recorded candles; `scripts/benchmark fidelity` judges the whole month on a finer grid

DAYS = 4


@pytest.fixture(scope="module")
def recorded() -> dict[str, Minutes]:
    return {symbol: part_of(read_market(files), 0, DAYS * 1440) for symbol, files in find_files(FOLDER).items()}


def largest_t(paths: Sequence[Paths]) -> float:
    return abs(worst(list(filter(is_inside, judge_rules(paths, 15)))).t)


@pytest.mark.slow
@needs_real
def test_drawn_paths_are_fair_and_markets_move_together_within_seconds_as_much_as_within_a_minute(
    recorded: dict[str, Minutes],
) -> None:
    drawn = {symbol: log_paths(GRIDS[symbol], marks) for symbol, marks in draw_together(recorded, 0).items()}
    assert largest_t(list(drawn.values())) < 4.5, "no rule within a minute earns"
    assert abs(worst(list(filter(is_inside, judge_cross_rules(drawn, 20)))).t) < 4.5, "nor one across markets"
    for symbol in ("ETH", "SOL"):  # the seconds of a market with leaders neither trend nor turn
        paths, day = drawn[symbol][1440:], TrailingDay(float(MARKETS[symbol].tick), recorded[symbol])
        usual_bp = numpy.array([day.usual_range(1440 + place) * 1e4 for place in range(len(paths))])
        motion = measure_motion(paths, usual_bp)
        assert motion.variance_ratio == pytest.approx(1, abs=0.2)
        assert abs(motion.autocorrelation) < 0.02
    for pair in (("BTC", "ETH"), ("BTC", "SOL"), ("ETH", "SOL")):
        first, second = (drawn[symbol] for symbol in pair)
        assert correlation(first, second, 1) > 0.85 * correlation(first, second, 59) > 0.4


@pytest.mark.slow
@needs_real
def test_the_fairness_check_detects_a_path_of_fixed_form(recorded: dict[str, Minutes]) -> None:
    marks = {
        symbol: [marks_of_candle(GRIDS[symbol], minutes[place]) for place in range(len(minutes))]
        for symbol, minutes in recorded.items()
    }
    assert largest_t([log_paths(GRIDS[symbol], rows) for symbol, rows in marks.items()]) > 50


@pytest.mark.slow
@needs_real
def test_an_order_costs_many_times_more_in_a_violent_minute(recorded: dict[str, Minutes]) -> None:
    for symbol, minutes in recorded.items():
        costs = Costs.of([sample(quote, range_bp) for range_bp, quote in recorded_quotes(symbol, minutes, 0)])
        assert costs.half_spread_bp == pytest.approx(CALM_SPREADS[symbol], rel=0.35)
        assert costs.depth == pytest.approx(CALM_DEPTHS[symbol], rel=0.35)
        assert costs.violent_cost_bp > 5 * costs.cost_bp


# The path of fixed corners, for minutes in which a venue was away


@settings(max_examples=3 * settings().max_examples)
@given(candles(), st.sampled_from(SYMBOLS))
def test_the_corner_path_meets_its_candle_at_fixed_seconds(row: FileRow, symbol: str) -> None:
    marks = marks_of_candle(GRIDS[symbol], row)
    assert len(marks) == 60
    assert (min(marks), max(marks), marks[0], marks[-1]) == GRIDS[symbol].corners(row)
    assert {marks[20], marks[40]} == {min(marks), max(marks)}
    assert abs(marks[0] - marks[20]) <= abs(marks[0] - marks[40])


def test_the_corner_path_goes_to_the_nearer_extreme_first() -> None:
    grid = GRIDS["BTC"]
    marks = [grid.number(mark) for mark in marks_of_candle(grid, FileRow(0, 100.0, 140.0, 80.0, 119.0, 1.0))]
    assert (marks[0], marks[20], marks[40], marks[59]) == (100, 80, 140, 119)
    assert marks[:3] == [100, 99, 98]
    assert marks[21:23] == [83, 86]
    mirrored = [grid.number(mark) for mark in marks_of_candle(grid, FileRow(0, 120.0, 140.0, 80.0, 119.0, 1.0))]
    assert (mirrored[20], mirrored[40]) == (140, 80)


def test_of_two_equally_near_extremes_the_one_away_from_the_close_comes_first() -> None:
    grid = GRIDS["BTC"]
    assert grid.number(marks_of_candle(grid, FileRow(0, 100.0, 110.0, 90.0, 105.0, 1.0))[20]) == 90
    assert grid.number(marks_of_candle(grid, FileRow(0, 100.0, 110.0, 90.0, 95.0, 1.0))[20]) == 110
