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
from trader.gateways.market.walks import SECONDS, Floats, cell, walk_pool

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
Candle = tuple[int, int, int, int]
"""Low, high, open and close in half ticks."""


def _knots(rules: Sequence[Sequence[tuple[int, int, int]]]) -> NDArray[np.int64]:
    """Return since, at and until of all rules as numbers of knots, a column each."""
    return np.array([[_KNOTS.index(second) for second in rule] for group in rules for rule in group]).T


def _tilts(rules: Sequence[Sequence[tuple[int, int, int]]], tilts: Sequence[float]) -> Floats:
    """Return the tilt of each rule: that of its group."""
    return np.repeat(tilts, [len(group) for group in rules])


_LEAD: Final = _knots(LEAD_RULES)
_OWN: Final = _knots(OWN_RULES)
TILTS: Final = [
    np.concatenate([*(_tilts(LEAD_RULES, each) for each in across), _tilts(OWN_RULES, within)])
    for across, within in zip(LEAD_TILTS, OWN_TILTS, strict=True)
]


class Candidates(NamedTuple):
    """Paths that a minute might have taken beside its leaders', from 0 at the open on."""

    levels: Floats
    """A row of sixty for each path."""
    payoffs: Floats
    """What each rule would earn on each path, as a part of the reach."""
    reach: float
    """The range of the minute, or that of a leader if it is larger, as a part of the open."""


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
        self._betas = lru_cache(maxsize=16)(self._day_betas)
        self._levels = lru_cache(maxsize=4)(self._draw)

    def draw(self, place: int) -> list[int]:
        """Return the sixty marks of a recorded minute in half ticks, within low and high and touching both."""
        return self._levels(place)

    def _draw(self, place: int) -> list[int]:
        minute = self._minutes.minute[place]
        candle = low, high, opened, close = self._candles[place]
        if low == high:
            return [low] * SECONDS
        random = Random(f"{self._name}:{minute}").random
        levels = self._beside(place, random) if self._present(minute) else None
        if levels is None:
            levels = self._pool.choose(self.kinds(place), cell(opened - low, close - low, high - low), random())
        # One random offset for all, not the nearest mark for each, leaves small moves their size on average.
        marks = np.floor(_mapped(levels, levels.min(keepdims=True), levels.max(keepdims=True), candle) + random())
        marks = np.minimum(np.maximum(marks, low), high)
        marks[0], marks[-1] = opened, close
        return [int(mark) for mark in marks.tolist()]

    def kinds(self, place: int) -> int:
        """Return the class of a minute, whose weights of kinds its walks have: by the hour before it."""
        return int(self._kinds[place])

    # --- beside leaders -----------------------------------------------------------------------------------------------

    def place(self, minute: int) -> int | None:
        """Return the index of the minute among the recorded ones; None within a gap."""
        place = bisect_left(self._minutes.minute, minute)
        return place if place < len(self._minutes) and self._minutes.minute[place] == minute else None

    def _present(self, minute: int) -> tuple[int, ...]:
        """Return the leaders that have this minute, by number."""
        return tuple(number for number, leader in enumerate(self._leaders) if leader.place(minute) is not None)

    def _beside(self, place: int, random: Callable[[], float]) -> Floats | None:
        """Return a path that moves with the leaders; None where no candidate can be mapped onto the candle."""
        candidates = self.candidates(place, np.array([random() for _ in range(CANDIDATES + 1)]))
        if candidates is None:
            return None
        tilts = TILTS[len(self._present(self._minutes.minute[place])) - 1]
        # Sums of products and not products of matrices, whose last digits depend on the machine.
        scores = (candidates.payoffs * tilts).sum(axis=1)
        sums = np.cumsum(np.exp(scores - scores.max()))
        chosen: Floats = candidates.levels[min(int(np.searchsorted(sums, random() * sums[-1])), KEPT - 1)]
        return chosen

    def candidates(self, place: int, chances: Floats) -> Candidates | None:
        """Return paths by `CANDIDATES` + 1 chances in [0, 1). A leader has this minute, and its candle has a range.

        None where no path can be mapped onto the candle.
        """
        minute = self._minutes.minute[place]
        candle = low, high, opened, close = self._candles[place]
        present = self._present(minute)
        moves = opened * np.array([self._leaders[number].relative(minute) for number in present])
        led = (self._betas(minute // _DAY, present)[:, None] * moves).sum(axis=0)
        usual = float(self._usual[place]) * opened
        walks = self._pool.sample(self.kinds(place), chances[1:])
        net = close - opened - float(led[-1])
        stretches = copysign(max(abs(net), _NET_MIN * usual), net) / walks[:, -1:]
        levels = led + stretches * walks
        bottoms, tops = levels.min(axis=1, keepdims=True), levels.max(axis=1, keepdims=True)
        misses = np.hypot(tops[:, 0] - (high - opened), bottoms[:, 0] - (low - opened)) / (_MISS * (high - low))
        size = sqrt(max(float(np.ptp(led)), _LED_MIN * usual) * usual)
        mean, deviation = _STRETCH
        unusual = (np.log(np.abs(stretches[:, 0]) / size) - mean) / deviation
        scores = np.where(_touches(levels, bottoms, tops, candle), -0.5 * (misses**2 + unusual**2), _UNFIT)
        best = scores.max()
        if best == _UNFIT:
            return None
        sums = np.cumsum(np.exp(scores - best))
        kept = np.minimum(np.searchsorted(sums, (chances[0] + _PLACES) / KEPT * sums[-1]), CANDIDATES - 1)
        levels = levels[kept]
        each = np.concatenate([self._betas(minute // _DAY, (number,)) for number in present])
        alone = each[:, None] * moves
        reach = max(high - low, float(np.ptp(alone, axis=1).max()))
        own = _mapped(levels[:, _KNOTS], bottoms[kept], tops[kept], candle) - opened
        return Candidates(levels, _payoffs(own, alone[:, None, _KNOTS]) / reach, reach / opened)

    def relative(self, minute: int) -> Floats:
        """Return by how much of its open the price of a recorded minute has risen at each of its seconds."""
        place = bisect_left(self._minutes.minute, minute)
        marks = np.array(self.draw(place), dtype=float)
        moves: Floats = marks / marks[0] - 1
        return moves

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
    since, at, until = _LEAD
    now, led_now = own.take(at, axis=1), led.take(at, axis=2)
    past, led_past = now - own.take(since, axis=1), led_now - led.take(since, axis=2)
    later, led_later = own.take(until, axis=1) - now, led.take(until, axis=2) - led_now
    across = [
        np.sign(led_past - past) * later,
        np.sign(led_past) * later,
        np.sign(past) * led_later,
        np.sign(_COUNTER * past - led_past) * led_later,
    ]
    since, at, until = _OWN
    now = own.take(at, axis=1)
    within = np.sign(now - own.take(since, axis=1)) * (own.take(until, axis=1) - now)
    return np.concatenate([*(each for by_leader in across for each in by_leader), within], axis=1)


def _touches(levels: Floats, bottoms: Floats, tops: Floats, candle: Candle) -> NDArray[np.bool_]:
    """Return whether each path goes beyond its ends where the candle does."""
    low, high, opened, close = candle
    ends = levels[:, [0, -1]]
    is_above = (tops[:, 0] > ends.max(axis=1)) | (high == max(opened, close))
    is_below = (bottoms[:, 0] < ends.min(axis=1)) | (low == min(opened, close))
    touches: NDArray[np.bool_] = is_above & is_below
    return touches


def _mapped(levels: Floats, bottoms: Floats, tops: Floats, candle: Candle) -> Floats:
    """Map paths piecewise linearly: bottom to low, the two ends to open and close, top to high.

    The last axis of `levels` is time, and its first and last are the ends; `bottoms` and `tops` may lie beyond them.
    """
    low, high, opened, close = candle
    begin, end = levels[..., :1], levels[..., -1:]
    first, second = np.minimum(begin, end), np.maximum(begin, end)
    at_first, at_second = min(opened, close), max(opened, close)
    lower = (at_first - low) / np.maximum(first - bottoms, _NO_MOVE)
    middle = (at_second - at_first) / np.maximum(second - first, _NO_MOVE)
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
