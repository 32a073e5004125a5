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

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
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

_AHEAD: Final = 16
"""So many minutes are drawn at once."""

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
Places = NDArray[np.int64]
Marks = NDArray[np.int64]
"""In half ticks, sixty for a minute."""


def _knots(rules: Sequence[Sequence[tuple[int, int, int]]]) -> Places:
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
    """Paths that minutes might have taken beside their leaders'. The minutes are the first axis."""

    levels: Floats
    """Sixty for each path, in half ticks."""
    payoffs: Floats
    """What each rule would earn on each path, as a part of the reach."""
    reaches: Floats
    """The range of each minute, or that of a leader if it is larger, as a part of the open."""
    fit: NDArray[np.bool_]
    """Whether any path of the minute can be mapped onto the candle."""


class MinutePaths:
    """Draws the paths of the minutes of one recorded market. `name` is the seed of all its draws.

    Minutes are drawn one by one or many at once, which is faster, with the same paths.
    """

    def __init__(self, name: str, grid: Grid, minutes: Minutes, leaders: Sequence["MinutePaths"] = ()) -> None:
        self._name = name
        self._minutes: Places = np.array(minutes.minute)
        self._leaders = leaders[:LEADERS_MAX]
        self._pool = walk_pool()
        self._candles = np.array([corners(grid, minutes[place]) for place in range(len(minutes))], dtype=float)
        low, high, opened, close = self._candles.reshape(-1, 4).T
        self._moves = (close - opened) / opened
        ranges = (high - low) / opened
        at_edge = ((opened == low) | (opened == high)) * 0.5 + ((close == low) | (close == high)) * 0.5
        few = _FEW_BP / 1e4
        shares = (_trailing(at_edge * ranges, _EDGES_OVER) + _FEW_SHARE * few) / (_trailing(ranges, _EDGES_OVER) + few)
        self.kinds = np.searchsorted(EDGE_SHARES, shares, side="right")
        """The class of each minute, whose weights of kinds its walks have: by the hour before it."""
        counts = np.minimum(np.arange(len(minutes)), _USUAL_OVER)
        usual = np.where(counts, _trailing(ranges, _USUAL_OVER) / np.maximum(counts, 1), ranges)
        self._usual = np.maximum(usual, _USUAL_BP_MIN / 1e4)
        self._betas = lru_cache(maxsize=16)(self._leading_betas)
        self._drawn: dict[int, Marks] = {}

    def draw(self, place: int) -> list[int]:
        """Return the sixty marks of a recorded minute in half ticks, within low and high and touching both."""
        path: list[int] = self._marks(place).tolist()
        return path

    def _marks(self, place: int) -> Marks:
        if place not in self._drawn:
            # Who reads on gets the next minutes at once: numpy takes as long to be called as to draw one.
            count = _AHEAD if place - 1 in self._drawn else 1
            places = np.arange(place, min(place + count, len(self._minutes)))
            self._drawn.update(zip(places.tolist(), self._draw(places), strict=True))
            while len(self._drawn) > 2 * _AHEAD:
                del self._drawn[next(iter(self._drawn))]
        return self._drawn[place]

    def _draw(self, places: Places) -> Marks:
        """Return the marks of minutes, a row for each."""
        candles, numbers = self._candles[places], self._numbers(places)
        low, high, opened, close = candles.T[:, :, None]
        levels = np.repeat(low, SECONDS, axis=1)
        is_alone = (low < high)[:, 0]
        for leaders, rows in self._led(places):
            candidates = self.candidates(places[rows], leaders, numbers[rows, :-2])
            # Sums of products and not products of matrices, whose last digits depend on the machine.
            scores = (candidates.payoffs * TILTS[len(leaders) - 1]).sum(axis=-1)
            chosen = _picks(scores, numbers[rows, -2:-1])[:, 0]
            levels[rows] = candidates.levels[np.arange(len(rows)), chosen]
            is_alone[rows] = ~candidates.fit
        for row in np.flatnonzero(is_alone):
            levels[row] = self._alone(places[row], float(numbers[row, -2]))
        # One random offset for all, not the nearest mark for each, leaves small moves their size on average.
        marks: Marks = np.clip(np.floor(levels + numbers[:, -1:]), low, high).astype(np.int64)
        marks[:, :1], marks[:, -1:] = opened, close
        return marks

    def _numbers(self, places: Places) -> Floats:
        """Return random numbers in [0, 1), a row for each minute: for its candidates, its choice and its rounding."""
        count = 3 + CANDIDATES if self._leaders else 2
        randoms = [Random(f"{self._name}:{minute}").random for minute in self._minutes[places].tolist()]
        return np.array([[random() for _ in range(count)] for random in randoms])

    def _alone(self, place: int, chance: float) -> Floats:
        """Return the levels of a minute with a range that is drawn beside no other market."""
        low, high, opened, close = candle = self._candles[place]
        walk = self._pool.choose(self.kinds[place], cell(opened - low, close - low, high - low), chance)
        return _mapped(walk, 0.0, TOP, (walk[0], walk[-1]), candle)

    # --- beside leaders -----------------------------------------------------------------------------------------------

    def _led(self, places: Places) -> Iterator[tuple[tuple[int, ...], Places]]:
        """Return which leaders have a minute, by their numbers, and the rows of such minutes that have a range."""
        low, high, *_ = self._candles[places].T
        rows_of: dict[tuple[int, ...], list[int]] = {}
        present = np.array([leader.has(self._minutes[places]) for leader in self._leaders]).reshape(-1, len(places))
        for row in np.flatnonzero(low < high).tolist():
            rows_of.setdefault(tuple(np.flatnonzero(present[:, row]).tolist()), []).append(row)
        return ((leaders, np.array(rows)) for leaders, rows in rows_of.items() if leaders)

    def candidates(self, places: Places, leaders: tuple[int, ...], numbers: Floats) -> Candidates:
        """Return paths of minutes with a range that these leaders have; `numbers` in [0, 1) choose them."""
        minutes = self._minutes[places]
        low, high, opened, close = candle = self._candles[places].T[:, :, None]
        moves = opened * np.array([self._leaders[number].moved(minutes) for number in leaders])
        betas = np.array([self._betas(day, leaders) for day in (minutes // _DAY).tolist()])
        together, each = betas.T.reshape(2, len(leaders), -1, 1)
        led, alone = (together * moves).sum(axis=0), each * moves
        usual = self._usual[places, None] * opened
        net = close - opened - led[:, -1:]
        net = np.copysign(np.maximum(np.abs(net), _NET_MIN * usual), net)
        end = led[:, -1:] + net
        walks, scales = self._pool.sample(self.kinds[places], numbers[:, 1:])
        stretches = net / walks[..., -1]
        levels = led[:, None] + stretches[..., None] * walks
        levels[..., -1] = end  # to the last digit, so that no path goes beyond its end by rounding
        bottoms, tops = levels.min(axis=-1), levels.max(axis=-1)
        size = np.sqrt(np.maximum(np.ptp(led, axis=1, keepdims=True), _LED_MIN * usual) * usual)
        mean, deviation = _STRETCH
        unusual = (np.log(np.abs(stretches) / scales / size) - mean) / deviation
        misses = ((tops - (high - opened)) ** 2 + (bottoms - (low - opened)) ** 2) / (_MISS * (high - low)) ** 2
        scores = np.where(_touches(bottoms, tops, end, candle), -0.5 * (misses + unusual**2), _UNFIT)
        kept = _picks(scores, (numbers[:, :1] + _PLACES) / KEPT)
        rows = np.arange(len(places))[:, None]
        at_bottom, at_top = bottoms[rows, kept, None], tops[rows, kept, None]
        levels = _mapped(levels[rows, kept], at_bottom, at_top, (0.0, end[..., None]), candle[..., None])
        own = levels[..., _AT_KNOTS] - opened[..., None]
        reach = np.maximum(high - low, np.ptp(alone, axis=2, keepdims=True).max(axis=0))
        payoffs = _payoffs(own, alone[..., _AT_KNOTS]) / reach[..., None]
        return Candidates(levels, payoffs, (reach / opened)[:, 0], scores.max(axis=1) > _UNFIT)

    def has(self, minutes: Places) -> NDArray[np.bool_]:
        """Return whether each minute is recorded."""
        places = np.searchsorted(self._minutes, minutes)
        recorded: NDArray[np.bool_] = self._minutes.take(places, mode="clip") == minutes
        return recorded

    def moved(self, minutes: Places) -> Floats:
        """Return by how much of its open the price has risen at each second of recorded minutes."""
        marks = np.array([self._marks(place) for place in np.searchsorted(self._minutes, minutes).tolist()])
        moves: Floats = marks / marks[:, :1] - 1
        return moves

    def _leading_betas(self, day: int, present: tuple[int, ...]) -> Floats:
        """Return, for each of these leaders, the beta to it beside the others, and that to it alone, as columns."""
        alone = np.concatenate([self._day_betas(day, (number,)) for number in present])
        return np.column_stack([self._day_betas(day, present), alone])

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

    def minutes_between(self, begin: int, stop: int) -> Places:
        """Return the recorded minutes in [begin, stop)."""
        first, last = np.searchsorted(self._minutes, (begin, stop))
        minutes: Places = self._minutes[first:last]
        return minutes

    def moves(self, minutes: Places) -> Floats:
        """Return by how much of their opens recorded minutes closed higher."""
        moves: Floats = self._moves[np.searchsorted(self._minutes, minutes)]
        return moves


def _trailing(values: Floats, count: int) -> Floats:
    """Return, for each value, the sum of so many before it, or of as many as there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    trailing: Floats = sums[places] - sums[np.maximum(places - count, 0)]
    return trailing


def _picks(scores: Floats, chances: Floats) -> Places:
    """Return, in each row, the places of choices by chances in [0, 1), in proportion to the exponentials of scores."""
    sums = np.cumsum(np.exp(scores - scores.max(axis=1, keepdims=True)), axis=1)
    places = (sums[:, None] < (chances * sums[:, -1:])[..., None]).sum(axis=-1)
    picks: Places = np.minimum(places, scores.shape[1] - 1)
    return picks


def _payoffs(own: Floats, led: Floats) -> Floats:
    """Return what each rule earns on each path.

    `own` has minutes, paths and knots; `led` has leaders, minutes and knots: its beta times its move. The rules across
    markets come four times for each leader: that the market catches up with it, follows it, is followed by it, and is
    caught up with by it.
    """
    all_past, all_later = _looks(own, _RULES)
    past, later = all_past[..., :_ACROSS], all_later[..., :_ACROSS]
    led_past, led_later = _looks(led[:, :, None], _RULES[:, :_ACROSS])
    across = [
        np.sign(led_past - past) * later,
        np.sign(led_past) * later,
        np.sign(past) * led_later,
        np.sign(_COUNTER * past - led_past) * led_later,
    ]
    return np.concatenate(
        [*(each for by_leader in across for each in by_leader), np.sign(all_past) * all_later], axis=-1
    )


def _looks(paths: Floats, rules: Places) -> tuple[Floats, Floats]:
    """Return the move that each rule looks at, and the one that it earns or loses by. Time is the last axis."""
    since, at, until = (paths.take(knots, axis=-1) for knots in rules)
    return at - since, until - at


def _touches(bottoms: Floats, tops: Floats, end: Floats, candle: Floats) -> NDArray[np.bool_]:
    """Return whether each path from 0 to its end goes beyond both where the candle does."""
    low, high, opened, close = candle
    is_above = (tops > np.maximum(end, 0)) | (high == np.maximum(opened, close))
    is_below = (bottoms < np.minimum(end, 0)) | (low == np.minimum(opened, close))
    touches: NDArray[np.bool_] = is_above & is_below
    return touches


def _mapped(
    levels: Floats, bottoms: Floats | float, tops: Floats | float, ends: tuple[Floats | float, Floats], candle: Floats
) -> Floats:
    """Map paths with these two ends piecewise linearly: bottom to low, the ends to open and close, top to high."""
    low, high, opened, close = candle
    first, second = np.minimum(*ends), np.maximum(*ends)
    at_first, at_second = np.minimum(opened, close), np.maximum(opened, close)
    lower = (at_first - low) / np.maximum(first - bottoms, _NO_MOVE)
    middle = (at_second - at_first) / np.maximum(second - first, _NO_MOVE)
    upper = (high - at_second) / np.maximum(tops - second, _NO_MOVE)
    between = np.where(levels < second, at_first + (levels - first) * middle, high - (tops - levels) * upper)
    mapped: Floats = np.where(levels <= first, low + (levels - bottoms) * lower, between)
    return mapped


def corners(grid: Grid, row: Row) -> Candle:
    """Return low, high, open and close of a candle in half ticks."""
    low, high = grid.within(row.low, row.high)
    return low, high, min(max(grid.nearest(row.open), low), high), min(max(grid.nearest(row.close), low), high)
