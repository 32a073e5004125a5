"""Random price paths within recorded minutes, drawn so that the past of the paths does not predict their future.

A candle says where its minute opened, turned and closed, not when or in which order. A path of a fixed form gives that
away: whoever knows the form can trade it. Here the path of a minute is one of a pool of random walks of sixty seconds,
whose levels are mapped piecewise linearly onto the candle's four prices.

A market alone takes a walk whose open and close lie about as high between low and high as the candle's. That alone is
not fair: if candles closed near their extremes more often than walks do, the drawn price would, on average, go on as it
began. So the kinds of walks have weights, by how often the candles of the last hour opened and closed at an extreme.

A market beside others, its leaders, moves with them: its path is what they moved, times its betas of the day before,
and a walk of its own that is stretched so that the sum ends at the candle's close. Of many such sums one is chosen, by
how well it meets the candle's high and low and how usual its stretch is. What rules across the markets and within them
would still earn by that is taken away by tilting the choice against them: `path_constants` has the figures.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from math import copysign, sqrt
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.gateways.market.books import Grid
from trader.gateways.market.files import Minutes, Row
from trader.gateways.market.path_constants import EDGE_SHARES, LEAD_RULES, LEAD_TILTS, OWN_RULES, OWN_TILTS
from trader.gateways.market.walks import SECONDS, TOP, Floats, cell, walk_pool

LEADERS_MAX: Final = 2
"""A market moves with so many others at most."""

CANDIDATES: Final = 64
"""Own walks that are tried for a path beside leaders."""
KEPT: Final = 16
"""Of these, so many are kept by how well they suit the candle, the best more than once, for the tilted choice."""
_PLACES: Final = np.arange(KEPT)
_MISS: Final = 0.08
"""The standard deviation of a candidate's high and low from the candle's, as a part of its range."""
_STRETCH: Final = (-0.25, 0.65)
"""Mean and standard deviation of the logarithm of the own walk's range, relative to the geometric mean of the range of
what the leaders moved and of the market's usual range."""
_UNFIT: Final = -1e9
"""The score of a path that cannot be mapped onto the candle, since it does not leave its ends where the candle does."""
_LED_MIN: Final = 0.03
_NET_MIN: Final = 0.002
"""Leaders' range and own net move are not less than these parts of the usual range."""

_EDGES_OVER: Final = 60
_USUAL_OVER: Final = 30
_FEW_BP: Final = 5.0
_FEW_SHARE: Final = 0.2
"""Beside the candles of the last hour, a range of so many basis points counts with this part of opens and closes at an
extreme."""
_USUAL_BP_MIN: Final = 0.2

_DAY: Final = 1440
_BETA_PRIOR: Final = 20 * 5e-4**2
"""Betas tend to a sum of one as if 20 more minutes with moves of 5 basis points said so."""

_COUNTER: Final = 0.6
"""The part of a move beside the leaders that they follow: the square of a usual correlation of two markets."""

_NO_MOVE: Final = 1e-9
"""Less than any move in half ticks."""

_KNOTS: Final = [*range(0, SECONDS, 5), SECONDS - 1]
_AT_KNOTS: Final = np.array(_KNOTS)
Candle = tuple[int, int, int, int]
"""Low, high, open and close in half ticks."""


def _knots(rules: Sequence[Sequence[tuple[int, int, int]]]) -> NDArray[np.int64]:
    """Return since, at and until of all rules as numbers of knots, a column each."""
    return np.array([[_KNOTS.index(second) for second in rule] for group in rules for rule in group]).T


def _tilts(rules: Sequence[Sequence[tuple[int, int, int]]], tilts: Sequence[float]) -> Floats:
    """Return the tilt of each rule: that of its group."""
    return np.repeat(tilts, [len(group) for group in rules])


_RULES: Final = _knots(OWN_RULES)
_ACROSS: Final = sum(map(len, LEAD_RULES))
"""So many of the rules, the first ones, hold across markets, too."""
TILTS: Final = [
    np.concatenate([*(_tilts(LEAD_RULES, each) for each in across), _tilts(OWN_RULES, within)])
    for across, within in zip(LEAD_TILTS, OWN_TILTS, strict=True)
]


class Candidates(NamedTuple):
    """Paths that a minute might have taken beside its leaders'."""

    levels: Floats
    """A row of sixty for each path, in half ticks."""
    payoffs: Floats
    """What each rule would earn on each path, as a part of the reach."""
    reach: float
    """The range of the minute, or that of a leader if it is larger, as a part of the open."""
    leaders: int
    """How many leaders have the minute."""


class MinutePaths:
    """Draws the paths of the minutes of one recorded market. `name` is the seed of all its draws."""

    def __init__(self, name: str, grid: Grid, minutes: Minutes, leaders: Sequence["MinutePaths"] = ()) -> None:
        self._name = name
        self._minutes = minutes
        self._leaders = leaders[:LEADERS_MAX]
        self._pool = walk_pool()
        self._candles = [corners(grid, minutes[place]) for place in range(len(minutes))]
        low, high, opened, close = np.array(self._candles, dtype=float).reshape(-1, 4).T
        self._moves = (close - opened) / opened
        ranges = (high - low) / opened
        at_edge = ((opened == low) | (opened == high)) * 0.5 + ((close == low) | (close == high)) * 0.5
        few = _FEW_BP / 1e4
        shares = (_trailing(at_edge * ranges, _EDGES_OVER) + _FEW_SHARE * few) / (_trailing(ranges, _EDGES_OVER) + few)
        self._kinds = np.searchsorted(EDGE_SHARES, shares, side="right")
        counts = np.minimum(np.arange(len(minutes)), _USUAL_OVER)
        usual = np.where(counts, _trailing(ranges, _USUAL_OVER) / np.maximum(counts, 1), ranges)
        self._usual = np.maximum(usual, _USUAL_BP_MIN / 1e4)
        self._betas = lru_cache(maxsize=16)(self._leading_betas)
        self._levels = lru_cache(maxsize=4)(self._draw)

    def draw(self, place: int) -> list[int]:
        """Return the sixty marks of a recorded minute in half ticks, within low and high and touching both."""
        return self._levels(place)

    def _draw(self, place: int) -> list[int]:
        candle = low, high, opened, close = self._candles[place]
        if low == high:
            return [low] * SECONDS
        random = Random(f"{self._name}:{self._minutes.minute[place]}").random
        levels = self._beside(place, random)
        if levels is None:
            walk = self._pool.choose(self.kinds(place), cell(opened - low, close - low, high - low), random())
            levels = _mapped(walk, 0.0, TOP, (walk[0], walk[-1]), candle)
        # One random offset for all, not the nearest mark for each, leaves small moves their size on average.
        marks = np.floor(levels + random())
        path: list[int] = np.minimum(np.maximum(marks, low), high).astype(np.int64).tolist()
        path[0], path[-1] = opened, close
        return path

    def kinds(self, place: int) -> int:
        """Return the class of a minute, whose weights of kinds its walks have: by the hour before it."""
        return int(self._kinds[place])

    # --- beside leaders -----------------------------------------------------------------------------------------------

    def _beside(self, place: int, random: Callable[[], float]) -> Floats | None:
        """Return a path that moves with the leaders; None where `candidates` returns none."""
        candidates = self.candidates(place, random)
        if candidates is None:
            return None
        # Sums of products and not products of matrices, whose last digits depend on the machine.
        scores = (candidates.payoffs * TILTS[candidates.leaders - 1]).sum(axis=1)
        sums = np.cumsum(np.exp(scores - scores.max()))
        chosen: Floats = candidates.levels[min(int(np.searchsorted(sums, random() * sums[-1])), KEPT - 1)]
        return chosen

    def candidates(self, place: int, random: Callable[[], float]) -> Candidates | None:
        """Return paths of a minute with a range. `random` draws numbers in [0, 1).

        None where no leader has the minute, or no path can be mapped onto the candle.
        """
        minute = self._minutes.minute[place]
        candle = low, high, opened, close = self._candles[place]
        leading = {number: leader.moved(minute) for number, leader in enumerate(self._leaders)}
        present = {number: moved for number, moved in leading.items() if moved is not None}
        if not present:
            return None
        together, each = self._betas(minute // _DAY, tuple(present))
        moves = opened * np.array([*present.values()])
        led, alone = (together * moves).sum(axis=0), each * moves
        usual = float(self._usual[place]) * opened
        net = close - opened - float(led[-1])
        net = copysign(max(abs(net), _NET_MIN * usual), net)
        kept_at, *chances = [random() for _ in range(CANDIDATES + 1)]
        walks, scales = self._pool.sample(self.kinds(place), np.array(chances))
        stretches = net / walks[:, -1]
        levels = led + stretches[:, None] * walks
        end = float(led[-1]) + net
        levels[:, -1] = end  # to the last digit, so that no path goes beyond its end by rounding
        bottoms, tops = levels.min(axis=1), levels.max(axis=1)
        size = sqrt(max(float(led.max() - led.min()), _LED_MIN * usual) * usual)
        mean, deviation = _STRETCH
        unusual = (np.log(np.abs(stretches) / scales / size) - mean) / deviation
        misses = ((tops - (high - opened)) ** 2 + (bottoms - (low - opened)) ** 2) / (_MISS * (high - low)) ** 2
        scores = np.where(_touches(bottoms, tops, (0.0, end), candle), -0.5 * (misses + unusual**2), _UNFIT)
        best = scores.max()
        if best == _UNFIT:
            return None
        sums = np.cumsum(np.exp(scores - best))
        kept = np.minimum(np.searchsorted(sums, (kept_at + _PLACES) / KEPT * sums[-1]), CANDIDATES - 1)
        levels = _mapped(levels.take(kept, axis=0), bottoms[kept, None], tops[kept, None], (0.0, end), candle)
        own = levels.take(_AT_KNOTS, axis=1) - opened
        reach = max(high - low, float((alone.max(axis=1) - alone.min(axis=1)).max()))
        return Candidates(levels, _payoffs(own, alone.take(_AT_KNOTS, axis=1)) / reach, reach / opened, len(present))

    def moved(self, minute: int) -> Floats | None:
        """Return by how much of its open the price has risen at each second of a minute; None within a gap."""
        place = bisect_left(self._minutes.minute, minute)
        if place == len(self._minutes) or self._minutes.minute[place] != minute:
            return None
        marks = np.array(self.draw(place), dtype=float)
        moves: Floats = marks / marks[0] - 1
        return moves

    def _leading_betas(self, day: int, present: tuple[int, ...]) -> tuple[Floats, Floats]:
        """Return the betas to these leaders together, and those to each of them alone, as columns."""
        alone = np.concatenate([self._day_betas(day, (number,)) for number in present])
        return self._day_betas(day, present)[:, None], alone[:, None]

    def _day_betas(self, day: int, present: tuple[int, ...]) -> Floats:
        """Return the betas to these leaders, by least squares over the moves of the minutes of the day before."""
        leaders = [self._leaders[number] for number in present]
        begin, stop = (day - 1) * _DAY, day * _DAY
        minutes = reduce(np.intersect1d, [each.minutes_between(begin, stop) for each in (self, *leaders)])
        own, *others = (each.moves(minutes) for each in (self, *leaders))
        count = len(leaders)
        products = np.array([[(one * other).sum() for other in others] for one in others])
        wanted = np.array([(one * own).sum() for one in others]) + _BETA_PRIOR / count
        # Rounded, since the last digits of a solution depend on the machine.
        betas: Floats = np.round(np.linalg.solve(products + _BETA_PRIOR * np.eye(count), wanted), 6)
        return betas

    def minutes_between(self, begin: int, stop: int) -> NDArray[np.int64]:
        """Return the recorded minutes in [begin, stop)."""
        minutes = self._minutes.minute
        return np.array(minutes[bisect_left(minutes, begin) : bisect_left(minutes, stop)], dtype=np.int64)

    def moves(self, minutes: NDArray[np.int64]) -> Floats:
        """Return by how much of their opens recorded minutes closed higher."""
        moves: Floats = self._moves[np.searchsorted(np.array(self._minutes.minute), minutes)]
        return moves


def _trailing(values: Floats, count: int) -> Floats:
    """Return, for each value, the sum of so many before it, or of as many as there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    trailing: Floats = sums[places] - sums[np.maximum(places - count, 0)]
    return trailing


def _payoffs(own: Floats, led: Floats) -> Floats:
    """Return what each rule earns on each path.

    `own` has a row for each path, `led` one for each leader: its beta times its move. The rules across markets come
    four times for each leader: that the market catches up with it, follows it, is followed by it, and is caught up with
    by it.
    """
    all_past, all_later = _looks(own, _RULES)
    past, later = all_past[:, :_ACROSS], all_later[:, :_ACROSS]
    led_past, led_later = _looks(led[:, None], _RULES[:, :_ACROSS])
    across = [
        np.sign(led_past - past) * later,
        np.sign(led_past) * later,
        np.sign(past) * led_later,
        np.sign(_COUNTER * past - led_past) * led_later,
    ]
    return np.concatenate(
        [*(each for by_leader in across for each in by_leader), np.sign(all_past) * all_later], axis=1
    )


def _looks(paths: Floats, rules: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the move that each rule looks at, and the one that it earns or loses by. Time is the last axis."""
    levels = paths.take(rules, axis=-1)
    moves = levels[..., 1:, :] - levels[..., :-1, :]
    return moves[..., 0, :], moves[..., 1, :]


def _touches(bottoms: Floats, tops: Floats, ends: tuple[float, float], candle: Candle) -> NDArray[np.bool_]:
    """Return whether each path goes beyond its ends where the candle does."""
    low, high, opened, close = candle
    is_above = (tops > max(ends)) | (high == max(opened, close))
    is_below = (bottoms < min(ends)) | (low == min(opened, close))
    touches: NDArray[np.bool_] = is_above & is_below
    return touches


def _mapped(
    levels: Floats, bottoms: Floats | float, tops: Floats | float, ends: tuple[float, float], candle: Candle
) -> Floats:
    """Map paths with these two ends piecewise linearly: bottom to low, the ends to open and close, top to high."""
    low, high, opened, close = candle
    first, second = min(ends), max(ends)
    at_first, at_second = min(opened, close), max(opened, close)
    lower = (at_first - low) / np.maximum(first - bottoms, _NO_MOVE)
    middle = (at_second - at_first) / max(second - first, _NO_MOVE)
    upper = (high - at_second) / np.maximum(tops - second, _NO_MOVE)
    return np.where(
        levels <= first,
        low + (levels - bottoms) * lower,
        np.where(levels < second, at_first + (levels - first) * middle, high - (tops - levels) * upper),
    )


def corners(grid: Grid, row: Row) -> Candle:
    """Return low, high, open and close of a candle in half ticks."""
    low, high = grid.within(row.low, row.high)
    return low, high, min(max(grid.nearest(row.open), low), high), min(max(grid.nearest(row.close), low), high)
