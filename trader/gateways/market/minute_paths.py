"""Random price paths within recorded minutes, drawn so that the past of the paths does not predict their future.

A candle says where its minute opened, turned and closed, not when or in which order. A path of a fixed form gives that
away: whoever knows the form can trade it. Here the path of a minute is one of a pool of random walks of sixty seconds,
whose levels are mapped piecewise linearly onto the candle's four prices.

A market alone takes a walk whose open and close lie about as high between low and high as the candle's. If candles
closed near their extremes more often than the walks of the pool do, the drawn price would, on average, go on as it
began. So walks are drawn from a mixture of kinds that open and close there as often as the candles of the week before.

A market beside others, its leaders, moves with them: its path is what they moved, times its betas of the day before,
and a walk of its own that is stretched so that the sum ends at the candle's close. Of many such sums some are kept, by
how well they meet the candle's high and low and how usual their stretch is. The choice among these is tilted against
every rule that would have earned something by the choices before it: the more it earned, the less likely a path on
which it earns. The tilts begin at zero each week, and follow from the minutes since: nothing is fitted ahead.
"""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, reduce
from itertools import combinations
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.gateways.market.books import Grid
from trader.gateways.market.files import Minutes, Row
from trader.gateways.market.walks import CELLS, SECONDS, TOP, Floats, cells_of, walk_pool

LEADERS_MAX: Final = 2
"""A market moves with so many others at most."""

CANDIDATES: Final = 64
"""Own walks that are tried for a path beside leaders."""
KEPT: Final = 16
"""Of these, so many are kept by how well they suit the candle, the best more than once, for the tilted choice."""
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

_DAY: Final = 1440
_USUAL_OVER: Final = 30
_USUAL_BP_MIN: Final = 0.2

_BLOCK: Final = 16
"""So many minutes are drawn at once, with the same tilts."""
_WEEK: Final = 7 * _DAY // _BLOCK
"""The blocks of a week. A minute can be drawn without those of the weeks before its own."""
_STEP: Final = 0.5
"""The first step of each tilt; later ones become smaller (AdaGrad: Duchi, Hazan and Singer, 2011)."""

_BETA_PRIOR: Final = 20 * 5e-4**2
"""Betas tend to a sum of one as if 20 more minutes with moves of 5 basis points said so."""

_COUNTER: Final = 0.4
"""The part of a move beside the leaders that they follow: the square of a usual correlation of two markets."""

_NO_MOVE: Final = 1e-9
"""Less than any move in half ticks."""

_KNOTS: Final = np.array([*range(0, SECONDS, 5), SECONDS - 1])
_ACROSS: Final = slice(None, None, 2)
"""Rules across two markets have a grid of ten seconds."""

Candle = tuple[int, int, int, int]
"""Low, high, open and close in half ticks."""
Places = NDArray[np.int64]
Marks = NDArray[np.int64]
"""In half ticks, sixty for a minute."""
Parts = NDArray[np.float32]
"""Moves and what they earn as parts of the reach of a minute: its range, or that of a leader if it is larger."""


class Candidates(NamedTuple):
    """Paths that minutes might have taken. The minutes are the first axis, their sixteen paths the second."""

    levels: Floats
    """Sixty for each path, in half ticks from the open, before they are mapped onto the candle."""
    bottoms: Floats
    tops: Floats
    payoffs: Parts
    """What each rule would earn on each path."""
    reaches: Floats
    """Of each minute, as a part of the open; 0 where no path can be mapped onto the candle."""


class Rules(NamedTuple):
    """Each looks at the move over the span between two knots, and holds over one that begins at its end."""

    begins: Places
    ends: Places
    """The knots of the spans."""
    looked: Places
    held: Places
    """The spans of the rules."""

    @staticmethod
    def on(knots: int) -> "Rules":
        """Return all rules on so many knots."""
        spans = list(combinations(range(knots), 2))
        rules = [[spans.index(rule[:2]), spans.index(rule[1:])] for rule in combinations(range(knots), 3)]
        return Rules(*np.array(spans).T, *np.array(rules).T)

    def moves(self, levels: Parts) -> Parts:
        """Return the moves over all spans from the levels at the knots, which are the last axis."""
        return levels.take(self.ends, axis=-1) - levels.take(self.begins, axis=-1)

    def earned(self, looked: Parts, held: Parts) -> Parts:
        """Return what each rule earns that looks at one path's moves and trades by another's, or its own."""
        earned: Parts = np.sign(looked).take(self.looked, axis=-1) * held.take(self.held, axis=-1)
        return earned


_RULES: Final = Rules.on(len(_KNOTS))
_RULES_ACROSS: Final = Rules.on(len(_KNOTS[_ACROSS]))


class MinutePaths:
    """Draws the paths of the minutes of one recorded market. `name` is the seed of all its draws.

    A path is the same in whatever order minutes are asked for: beside leaders, all minutes of its week until its own
    are drawn before it, unless they have been.
    """

    def __init__(self, name: str, grid: Grid, minutes: Minutes, leaders: Sequence["MinutePaths"] = ()) -> None:
        self._name = name
        self._minutes: Places = np.array(minutes.minute)
        self._leaders = leaders[:LEADERS_MAX]
        self._pool = walk_pool()
        self._candles = np.array([corners(grid, minutes[place]) for place in range(len(minutes))], dtype=float)
        low, high, opened, close = self._candles.reshape(-1, 4).T
        self._moves = (close - opened) / opened
        self._ranges = (high - low) / opened
        self._usual = _usual(self._ranges)
        self._cells = cells_of(opened - low, close - low, np.maximum(high - low, 1))
        self._weights = lru_cache(maxsize=4)(self._walk_weights)
        self._betas = cache(self._leading_betas)
        self._tilts: dict[tuple[int, ...], tuple[Parts, Parts]] = {}
        """Beside each set of leaders: the tilt of each rule, and the sum of squares of what it earned in this week."""
        self._drawn: dict[int, Marks] = {}
        """The marks of minutes by their places: about a week at most."""
        self._last = -1
        """Beside leaders: the block until which those of its week are drawn."""

    def draw(self, place: int) -> list[int]:
        """Return the sixty marks of a recorded minute in half ticks, within low and high and touching both."""
        path: list[int] = self._marks(place).tolist()
        return path

    def _marks(self, place: int) -> Marks:
        if place not in self._drawn:
            if self._leaders:
                self._draw_week_until(place)
            else:
                # Who reads on gets the next ones at once: numpy takes about as long to draw one as several.
                count = _BLOCK if place - 1 in self._drawn else 1
                if len(self._drawn) > _WEEK * _BLOCK:
                    self._drawn.clear()
                self._keep(place, min(place + count, len(self._minutes)))
        return self._drawn[place]

    def _draw_week_until(self, place: int) -> None:
        block = int(self._minutes[place]) // _BLOCK
        begin = block - block % _WEEK
        if not begin <= self._last < block:
            # Who has gone on to another week may still ask for the minute before.
            self._drawn = {each: marks for each, marks in self._drawn.items() if place - _BLOCK <= each < place}
            self._tilts.clear()
            self._last = begin - 1
        for number in range(self._last + 1, block + 1):
            self._keep(*np.searchsorted(self._minutes, (number * _BLOCK, (number + 1) * _BLOCK)).tolist())
        self._last = block

    def _keep(self, first: int, stop: int) -> None:
        places = np.arange(first, stop)
        self._drawn.update(zip(places.tolist(), self._draw(places), strict=True))

    def _draw(self, places: Places) -> Marks:
        """Return the marks of minutes, a row for each, and learn the tilts of those that come after."""
        candles, numbers = self._candles[places], self._numbers(places)
        low, high, opened, close = candles.T[:, :, None]
        levels = np.repeat(low, SECONDS, axis=1)
        is_alone = (low < high)[:, 0]
        for leaders, rows in self._led(places):
            candidates = self._beside(places[rows], leaders, numbers[rows, 2:])
            levels[rows] = self._choose(leaders, candidates, candles[rows], numbers[rows, 1:2])
            is_alone[rows] = candidates.reaches == 0
        if is_alone.any():
            levels[is_alone] = self._alone(places[is_alone], numbers[is_alone, 1])
        # One random offset for all, not the nearest mark for each, leaves small moves their size on average.
        marks: Marks = np.clip(np.floor(levels + numbers[:, :1]), low, high).astype(np.int64)
        marks[:, :1], marks[:, -1:] = opened, close
        return marks

    def _choose(self, leaders: tuple[int, ...], candidates: Candidates, candles: Floats, chances: Floats) -> Floats:
        """Return the levels of one path of each minute, and tilt later choices against what each rule earns by these.

        What it earns is the mean over the choices that chance might have made.
        """
        rules = candidates.payoffs.shape[-1]
        tilts, squares = self._tilts.setdefault(leaders, (np.zeros(rules, np.float32), np.zeros(rules, np.float32)))
        # Sums of products and not products of matrices, whose last digits depend on the machine.
        weights = _weights((candidates.payoffs * tilts).sum(axis=-1))
        parts = (weights * candidates.reaches[:, None]).astype(np.float32)
        earned = (candidates.payoffs * parts[..., None]).sum(axis=(0, 1))
        squares += earned**2
        tilts -= _STEP * earned / np.sqrt(np.where(squares, squares, 1))
        chosen = np.arange(len(chances)), _picks(weights, chances)[:, 0]
        levels, bottoms, tops = (each[chosen] for each in (candidates.levels, candidates.bottoms, candidates.tops))
        return _mapped(levels, bottoms, tops, (0.0, levels[:, -1:]), candles.T[:, :, None])

    def _numbers(self, places: Places) -> Floats:
        """Return random numbers in [0, 1), a row for each minute: for its rounding, its choice and its candidates."""
        count = 3 + CANDIDATES if self._leaders else 2
        randoms = [Random(f"{self._name}:{minute}").random for minute in self._minutes[places].tolist()]
        return np.array([[random() for _ in range(count)] for random in randoms]).reshape(-1, count)

    def _alone(self, places: Places, chances: Floats) -> Floats:
        """Return the levels of minutes with a range that are drawn beside no other market."""
        days = (self._minutes[places] // _DAY).tolist()
        chosen = zip(self._cells[places], map(self._weights, days), chances.tolist(), strict=True)
        walks = np.array([self._pool.choose(*each) for each in chosen])
        return _mapped(walks, 0.0, TOP, (walks[:, :1], walks[:, -1:]), self._candles[places].T[:, :, None])

    def _walk_weights(self, day: int) -> Floats:
        """Return the weights of walks: their kinds fit the opens and closes of the week before."""
        first, stop = np.searchsorted(self._minutes, ((day - 7) * _DAY, day * _DAY))
        ranges = np.bincount(self._cells[first:stop], self._ranges[first:stop], minlength=CELLS)
        return self._pool.weights(ranges / ranges.sum() if ranges.any() else np.full(CELLS, 1 / CELLS))

    # --- beside leaders -----------------------------------------------------------------------------------------------

    def _led(self, places: Places) -> Iterator[tuple[tuple[int, ...], Places]]:
        """Return which leaders have a minute, by their numbers, and the rows of such minutes that have a range."""
        low, high, *_ = self._candles[places].T
        rows_of: dict[tuple[int, ...], list[int]] = {}
        present = np.array([leader.has(self._minutes[places]) for leader in self._leaders])
        for row in np.flatnonzero(low < high).tolist() if self._leaders else ():
            rows_of.setdefault(tuple(np.flatnonzero(present[:, row]).tolist()), []).append(row)
        return ((leaders, np.array(rows)) for leaders, rows in rows_of.items() if leaders)

    def _beside(self, places: Places, leaders: tuple[int, ...], numbers: Floats) -> Candidates:
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
        walks, scales = self._pool.sample(numbers[:, 1:])
        stretches = net / walks[..., -1]
        levels = led[:, None] + stretches[..., None] * walks
        levels[..., -1] = end  # to the last digit, so that no path goes beyond its end by rounding
        bottoms, tops = levels.min(axis=-1), levels.max(axis=-1)
        size = np.sqrt(np.maximum(np.ptp(led, axis=1, keepdims=True), _LED_MIN * usual) * usual)
        mean, deviation = _STRETCH
        unusual = (np.log(np.abs(stretches) / scales / size) - mean) / deviation
        misses = ((tops - (high - opened)) ** 2 + (bottoms - (low - opened)) ** 2) / (_MISS * (high - low)) ** 2
        scores = np.where(_touches(bottoms, tops, end, candle), -0.5 * (misses + unusual**2), _UNFIT)
        kept = _picks(_weights(scores), _spread(numbers[:, :1]))
        rows = np.arange(len(places))[:, None]
        levels, bottoms, tops = levels[rows, kept], bottoms[rows, kept, None], tops[rows, kept, None]
        at_knots = _mapped(levels[..., _KNOTS], bottoms, tops, (0.0, end[..., None]), candle[..., None])
        reach = np.maximum(high - low, np.ptp(alone, axis=2, keepdims=True).max(axis=0))
        own = ((at_knots - opened[..., None]) / reach[..., None]).astype(np.float32)
        led_by = (alone[..., _KNOTS] / reach).astype(np.float32)
        moves = _RULES.moves(own)
        payoffs = np.concatenate([_RULES.earned(moves, moves), *_payoffs_across(own, led_by)], axis=-1)
        reaches = np.where(scores.max(axis=1, keepdims=True) > _UNFIT, reach / opened, 0)
        return Candidates(levels, bottoms, tops, payoffs, reaches[:, 0])

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


def _usual(ranges: Floats) -> Floats:
    """Return, for each minute, the mean range of those before it, as a part of the open."""
    counts = np.minimum(np.arange(len(ranges)), _USUAL_OVER)
    usual = np.where(counts, _trailing(ranges, _USUAL_OVER) / np.maximum(counts, 1), ranges)
    at_least: Floats = np.maximum(usual, _USUAL_BP_MIN / 1e4)
    return at_least


def _spread(chances: Floats) -> Floats:
    """Return chances in [0, 1) that are as far from each other as can be, in each row, from one."""
    return (chances + np.arange(KEPT)) / KEPT


def _weights(scores: Floats) -> Floats:
    """Return the exponentials of scores as parts of their sum in the row."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    parts: Floats = weights / weights.sum(axis=1, keepdims=True)
    return parts


def _picks(weights: Floats, chances: Floats) -> Places:
    """Return, in each row, the places of choices by chances in [0, 1), in proportion to weights."""
    sums = np.cumsum(weights, axis=1)
    places = (sums[:, None] < (chances * sums[:, -1:])[..., None]).sum(axis=-1)
    picks: Places = np.minimum(places, weights.shape[1] - 1)
    return picks


def _payoffs_across(own: Parts, led: Parts) -> list[Parts]:
    """Return what each rule across markets earns on paths.

    `own` has minutes, paths and knots; `led` has leaders, minutes and knots: its beta times its move. For each leader,
    the rules come four times: the market catches up with it, follows it, is followed, and is caught up with.
    """
    own, led = _RULES_ACROSS.moves(own[..., _ACROSS]), _RULES_ACROSS.moves(led[:, :, None, _ACROSS])
    across = [(led - own, own), (led, own), (own, led), (_COUNTER * own - led, led)]
    return [each for looked, held in across for each in _RULES_ACROSS.earned(looked, held)]


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
