"""Random price paths within recorded minutes, drawn so that a path's past does not predict its future.

A candle says where its minute opened, turned and closed, but not when or in which order. A path of a fixed form gives
that away: anyone who knows the form can exploit it. Here the path of a minute is one of a pool of sixty-second random
walks, whose levels are mapped piecewise linearly onto the candle's four prices.

A market without leaders takes a walk whose open and close lie about as high between low and high as the candle's. If
candles closed near their extremes more often than the walks of the pool, the drawn price would, on average, continue as
it began. Walks are therefore drawn from a mixture of kinds that open and close there as often as the candles of the
previous week.

A market with leaders moves with them: its path is the leaders' moves times its betas of the previous day, plus its own
walk, stretched so that the sum ends at the candle's close. Among many such sums, some are kept by how well they meet
the candle's high and low and how usual their stretch is. The choice among these is tilted against every rule that would
have profited from earlier choices: the more a rule earned, the less likely a path on which it earns again. Tilts start
at zero each week and follow from the minutes since: nothing is fitted ahead.
"""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, reduce
from itertools import combinations
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trader.core.statistics import Floats
from trader.market.sources.books import Grid
from trader.market.sources.files import Minutes
from trader.market.sources.walks import CELLS, SECONDS, TOP, cells_of, walk_pool

LEADERS_MAX: Final = 2
"""The most leaders that a market moves with."""

CANDIDATES: Final = 64
"""How many of a market's own walks are tried for a path with leaders."""
KEPT: Final = 16
"""How many of these are kept for the tilted choice: the closest to the candle, the best ones more than once."""
_MISS: Final = 0.08
"""The standard deviation of a candidate's high and low from the candle's, as a fraction of its range."""
_STRETCH: Final = (-0.25, 0.65)
"""Mean and standard deviation of the logarithm of the own walk's range, relative to the geometric mean of the range of
the leaders' moves and the market's usual range."""
_UNFIT: Final = -1e9
"""The score of a path that cannot be mapped onto the candle: it lacks a wick that the candle has."""
_LED_MIN: Final = 0.03
_NET_MIN: Final = 0.002
"""The leaders' range and the own net move are at least these fractions of the usual range."""

_DAY: Final = 1440
_USUAL_OVER: Final = 30
_USUAL_BP_MIN: Final = 0.2

_BLOCK: Final = 16
"""How many minutes are drawn together, with the same tilts."""
_AHEAD: Final = 64
"""How many minutes without leaders are drawn together, which one reader at even steps needs next."""
_WEEK: Final = 7 * _DAY // _BLOCK
"""The blocks of a week. A minute can be drawn without the blocks of earlier weeks."""
_STEPS: Final = (1, 5, 15, 30, 60, 240)
"""Steps in minutes at which agents decide, and so read the minute before each decision."""
_STEP: Final = 0.5
"""The first step of each tilt; later steps shrink (AdaGrad: Duchi, Hazan and Singer, 2011)."""

_BETA_PRIOR: Final = 20 * 5e-4**2
"""Betas are pulled toward a sum of one, as if by 20 more minutes with moves of 5 basis points."""

_COUNTER: Final = 0.4
"""The fraction of an own move that the leaders follow: the square of a usual correlation of two markets."""

_NO_MOVE: Final = 1e-9
"""Smaller than any move in half ticks."""

_KNOTS: Final = np.array([*range(0, SECONDS, 5), SECONDS - 1])
_ACROSS: Final = slice(None, None, 2)
"""Rules across two markets use a ten-second grid."""
_SIZED: Final = 10.0
"""How many times the payoffs of rules that hold as much as a past move count: they are smaller than the others'."""

Places = NDArray[np.int64]
HalfTickMarks = NDArray[np.int64]
"""In half ticks, sixty per minute."""
Parts = NDArray[np.float32]
"""Moves and earnings as fractions of a minute's reach: its range, or a leader's if that is larger."""


class Candidates(NamedTuple):
    """Paths that minutes might have taken. The first axis is minutes, the second their sixteen paths."""

    levels: Floats
    """Sixty per path, in half ticks from the open, before they are mapped onto the candle."""
    bottoms: Floats
    tops: Floats
    payoffs: Parts
    """The gain of each rule on each path."""
    reaches: Floats
    """Per minute, as a fraction of the open; 0 where no path can be mapped onto the candle."""


class SpanRules(NamedTuple):
    """Each rule observes the move over the span between two knots and holds over a span that starts at its end."""

    begins: Places
    ends: Places
    """The first and last knot of each span."""
    looked: Places
    held: Places
    """The span that each rule observes, and the span over which it holds."""

    @staticmethod
    def on(knots: int) -> "SpanRules":
        """Return all rules on this many knots."""
        spans = list(combinations(range(knots), 2))
        rules = [[spans.index(rule[:2]), spans.index(rule[1:])] for rule in combinations(range(knots), 3)]
        return SpanRules(*np.array(spans).T, *np.array(rules).T)

    def moves(self, levels: Parts) -> Parts:
        """Return the moves over all spans from the levels at the knots (the last axis)."""
        return levels.take(self.ends, axis=-1) - levels.take(self.begins, axis=-1)

    def earned(self, looked: Parts, held: Parts) -> Parts:
        """Return what each rule earns by looking at one path's moves and trading another's, or its own."""
        earned: Parts = np.sign(looked).take(self.looked, axis=-1) * held.take(self.held, axis=-1)
        return earned


_RULES: Final = SpanRules.on(len(_KNOTS))
_RULES_ACROSS: Final = SpanRules.on(len(_KNOTS[_ACROSS]))


class MinutePaths:
    """Draws the paths of one recorded market's minutes. `name` seeds all draws.

    A path is the same in whatever order minutes are requested: with leaders, all earlier minutes of its week are drawn
    first, unless they already have been.
    """

    def __init__(self, name: str, grid: Grid, minutes: Minutes, leaders: Sequence["MinutePaths"] = ()) -> None:
        self._name = name
        self._minutes: Places = np.array(minutes.minute)
        self._leaders = leaders[:LEADERS_MAX]
        self._pool = walk_pool()
        self._candles = grid.all_corners(minutes).astype(float)
        low, high, opened, close = self._candles.reshape(-1, 4).T
        self._moves = (close - opened) / opened
        self._ranges = (high - low) / opened
        self._usual = _usual(self._ranges)
        self._cells = cells_of(opened - low, close - low, np.maximum(high - low, 1))
        self._weights = cache(self._walk_weights)
        self._sums = lru_cache(maxsize=CELLS)(self._walk_sums)
        self._betas = cache(self._leading_betas)
        self._tilts: dict[tuple[int, ...], tuple[Parts, Parts]] = {}
        """For each set of leaders: each rule's tilt, and the sum of squares of what it earned this week."""
        self._drawn: dict[int, HalfTickMarks] = {}
        """The marks of minutes by index: about a week at most."""
        self._last = -1
        """With leaders: the last block drawn of its week."""

    def draw(self, place: int) -> list[int]:
        """Return the sixty marks of a recorded minute in half ticks, within low and high and touching both."""
        path: list[int] = self._marks(place).tolist()
        return path

    def _marks(self, place: int) -> HalfTickMarks:
        if place not in self._drawn:
            if self._leaders:
                self._draw_week_until(place)
            else:
                # Prefetch the next minutes for reads at even steps: numpy takes about as long to draw one as several.
                step = next((each for each in _STEPS if {place - n * each for n in (1, 2, 3)} <= self._drawn.keys()), 0)
                if len(self._drawn) > _WEEK * _BLOCK:
                    self._drawn.clear()
                self._keep(
                    np.arange(place, min(place + _AHEAD * step, len(self._minutes)), step)
                    if step
                    else np.array([place])
                )
        return self._drawn[place]

    def _draw_week_until(self, place: int) -> None:
        block = int(self._minutes[place]) // _BLOCK
        begin = block - block % _WEEK
        if not begin <= self._last < block:
            # A reader that has moved on to another week may still request the minute before it.
            self._drawn = {each: marks for each, marks in self._drawn.items() if place - _BLOCK <= each < place}
            self._tilts.clear()
            self._last = begin - 1
        for number in range(self._last + 1, block + 1):
            self._keep(np.arange(*np.searchsorted(self._minutes, (number * _BLOCK, (number + 1) * _BLOCK))))
        self._last = block

    def _keep(self, places: Places) -> None:
        self._drawn.update(zip(places.tolist(), self._draw(places), strict=True))

    def _draw(self, places: Places) -> HalfTickMarks:
        """Return the marks of minutes, one row each, and learn the tilts for later minutes."""
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
        # One random offset for all marks, rather than rounding each, keeps the average size of small moves.
        marks: HalfTickMarks = np.clip(np.floor(levels + numbers[:, :1]), low, high).astype(np.int64)
        marks[:, :1], marks[:, -1:] = opened, close
        return marks

    def _choose(self, leaders: tuple[int, ...], candidates: Candidates, candles: Floats, chances: Floats) -> Floats:
        """Return the levels of one path per minute, and tilt later choices against what each rule earns by these.

        A rule's earnings are the mean over the choices that chance might have made.
        """
        rules = candidates.payoffs.shape[-1]
        tilts, squares = self._tilts.setdefault(leaders, (np.zeros(rules, np.float32), np.zeros(rules, np.float32)))
        # Sums of products, not matrix products, whose last digits depend on the machine.
        weights = _weights((candidates.payoffs * tilts).sum(axis=-1))
        parts = (weights * candidates.reaches[:, None]).astype(np.float32)
        earned = (candidates.payoffs * parts[..., None]).sum(axis=(0, 1))
        squares += earned**2
        tilts -= _STEP * earned / np.sqrt(np.where(squares, squares, 1))
        chosen = np.arange(len(chances)), _picks(weights, chances)[:, 0]
        levels, bottoms, tops = (each[chosen] for each in (candidates.levels, candidates.bottoms, candidates.tops))
        return _mapped(levels, bottoms, tops, (0.0, levels[:, -1:]), candles.T[:, :, None])

    def _numbers(self, places: Places) -> Floats:
        """Return random numbers in [0, 1), one row per minute: for its rounding, its choice and its candidates."""
        count = 3 + CANDIDATES if self._leaders else 2
        randoms = [Random(f"{self._name}:{minute}").random for minute in self._minutes[places].tolist()]
        return np.array([[random() for _ in range(count)] for random in randoms]).reshape(-1, count)

    def _alone(self, places: Places, chances: Floats) -> Floats:
        """Return the levels of minutes with a range that are drawn without leaders."""
        cells, days = self._cells[places].tolist(), (self._minutes[places] // _DAY).tolist()
        chosen = zip(cells, map(self._sums, cells, days), chances.tolist(), strict=True)
        walks = np.array([self._pool.choose(*each) for each in chosen])
        return _mapped(walks, 0.0, TOP, (walks[:, :1], walks[:, -1:]), self._candles[places].T[:, :, None])

    def _walk_weights(self, day: int) -> Floats:
        """Return the weights of the kinds of walks that fit the opens and closes of the previous week."""
        first, stop = np.searchsorted(self._minutes, ((day - 7) * _DAY, day * _DAY))
        ranges = np.bincount(self._cells[first:stop], self._ranges[first:stop], minlength=CELLS)
        return self._pool.weights(ranges / ranges.sum() if ranges.any() else np.full(CELLS, 1 / CELLS))

    def _walk_sums(self, cell: int, day: int) -> Floats:
        return self._pool.sums(cell, self._weights(day))

    # --- with leaders -------------------------------------------------------------------------------------------------

    def _led(self, places: Places) -> Iterator[tuple[tuple[int, ...], Places]]:
        """Yield which leaders have a minute, by number, with the rows of those minutes that have a range."""
        low, high, *_ = self._candles[places].T
        rows_of: dict[tuple[int, ...], list[int]] = {}
        present = np.array([leader.has(self._minutes[places]) for leader in self._leaders])
        for row in np.flatnonzero(low < high).tolist() if self._leaders else ():
            rows_of.setdefault(tuple(np.flatnonzero(present[:, row]).tolist()), []).append(row)
        return ((leaders, np.array(rows)) for leaders, rows in rows_of.items() if leaders)

    def _beside(self, places: Places, leaders: tuple[int, ...], numbers: Floats) -> Candidates:
        """Return candidate paths of minutes that have a range and these leaders; `numbers` in [0, 1) choose them."""
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
        levels[..., -1] = end  # to the last digit, so that rounding moves no path beyond its end
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
        across, sized = _payoffs_across(own, led_by), _payoffs_sized(levels, reach[..., None])
        payoffs = np.concatenate([_RULES.earned(moves, moves), *across, sized], axis=-1)
        reaches = np.where(scores.max(axis=1, keepdims=True) > _UNFIT, reach / opened, 0)
        return Candidates(levels, bottoms, tops, payoffs, reaches[:, 0])

    def has(self, minutes: Places) -> NDArray[np.bool_]:
        """Return whether each minute is recorded."""
        places = np.searchsorted(self._minutes, minutes)
        recorded: NDArray[np.bool_] = self._minutes.take(places, mode="clip") == minutes
        return recorded

    def moved(self, minutes: Places) -> Floats:
        """Return how far the price has risen at each second of recorded minutes, as a fraction of the open."""
        marks = np.array([self._marks(place) for place in np.searchsorted(self._minutes, minutes).tolist()])
        moves: Floats = marks / marks[:, :1] - 1
        return moves

    def _leading_betas(self, day: int, present: tuple[int, ...]) -> Floats:
        """Return, as columns, each leader's beta together with the other leaders, and its beta alone."""
        alone = np.concatenate([self._day_betas(day, (number,)) for number in present])
        return np.column_stack([self._day_betas(day, present), alone])

    def _day_betas(self, day: int, present: tuple[int, ...]) -> Floats:
        """Return the betas to these leaders, by least squares over the minute moves of the previous day."""
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
        """Return how far recorded minutes closed above their opens, as fractions."""
        moves: Floats = self._moves[np.searchsorted(self._minutes, minutes)]
        return moves


def _trailing(values: Floats, count: int) -> Floats:
    """Return, for each value, the sum of the `count` values before it, or of as many as there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    trailing: Floats = sums[places] - sums[np.maximum(places - count, 0)]
    return trailing


def _usual(ranges: Floats) -> Floats:
    """Return, for each minute, the mean range of earlier minutes, as a fraction of the open."""
    counts = np.minimum(np.arange(len(ranges)), _USUAL_OVER)
    usual = np.where(counts, _trailing(ranges, _USUAL_OVER) / np.maximum(counts, 1), ranges)
    at_least: Floats = np.maximum(usual, _USUAL_BP_MIN / 1e4)
    return at_least


def _spread(chances: Floats) -> Floats:
    """Return, for each row's chance, chances in [0, 1) that are spaced as far apart as possible."""
    return (chances + np.arange(KEPT)) / KEPT


def _weights(scores: Floats) -> Floats:
    """Return the exponentials of scores as fractions of their row's sum."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    parts: Floats = weights / weights.sum(axis=1, keepdims=True)
    return parts


def _picks(weights: Floats, chances: Floats) -> Places:
    """Return, per row, the indices chosen by chances in [0, 1) in proportion to weights."""
    sums = np.cumsum(weights, axis=1)
    places = (sums[:, None] < (chances * sums[:, -1:])[..., None]).sum(axis=-1)
    picks: Places = np.minimum(places, weights.shape[1] - 1)
    return picks


def _payoffs_across(own: Parts, led: Parts) -> list[Parts]:
    """Return the gains on paths of each rule across markets.

    `own` has minutes, paths and knots; `led` has leaders, minutes and knots: beta times move. For each leader, the
    rules come in four forms: the market catches up with the leader, follows it, is followed by it, and is caught up
    with.
    """
    own, led = _RULES_ACROSS.moves(own[..., _ACROSS]), _RULES_ACROSS.moves(led[:, :, None, _ACROSS])
    across = [(led - own, own), (led, own), (own, led), (_COUNTER * own - led, led)]
    return [each for looked, held in across for each in _RULES_ACROSS.earned(looked, held)]


def _payoffs_sized(levels: Floats, reach: Floats) -> Parts:
    """Return the gains on paths of two rules that hold as much as a past move, from each second to the next.

    One holds the move since the open. It earns half of the net move's square less the squares of the seconds' moves, so
    without a gain their variance ratio is one (Lo and MacKinlay, 1988). The other holds the move of the last second.
    """
    moves = np.diff(levels, axis=-1) / reach
    since_open = (moves.sum(axis=-1) ** 2 - (moves**2).sum(axis=-1)) / 2
    of_last = (moves[..., 1:] * moves[..., :-1]).sum(axis=-1)
    sized: Parts = (_SIZED * np.stack([since_open, of_last], axis=-1)).astype(np.float32)
    return sized


def _touches(bottoms: Floats, tops: Floats, end: Floats, candle: Floats) -> NDArray[np.bool_]:
    """Return whether each path, from 0 to its end, has a wick on every side on which the candle has one."""
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
