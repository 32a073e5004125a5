"""Price paths within a recorded minute, drawn so that nobody who knows only the past can tell what comes next.

A candle says where its minute opened, turned and closed, not when or in which order. A path of a fixed form gives that
away: whoever knows the form can trade it. Here the path of a minute is one of a pool of random walks of sixty seconds,
chosen by chance among those whose open and close lie about as high between low and high as the candle's, and its
levels are mapped piecewise linearly onto the candle's four prices.

That alone is not fair: if candles closed near their extremes more often than walks do, the drawn price would, on
average, go on as it began. So the pool holds families of walks of many kinds (few large moves or many small ones, calm
or excited, early or late). Each family is fair by itself, and their weights are fitted to the recording, by
expectation maximisation, until open and close of the mixture lie between low and high as often as those of the
candles. Both sides are weighted by range, because what a rule earns in a minute is proportional to it: for a fair walk
X with range R, the mean of R · (sign of a past move of X/R) · (a later move of X/R) is zero, and without the factor R
it is not.
"""

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import floor, fsum
from operator import mul
from random import Random
from typing import Final

from trader.gateways.market.books import Grid
from trader.gateways.market.files import Minutes, Row
from trader.gateways.market.walks import KINDS, MOVES, SECONDS

_TOP: Final = 65_535
"""The height of a walk's maximum; its minimum is 0. Heights are kept as 16-bit whole numbers."""

_EDGES: Final = (
    1e-9, 0.03, 0.06, 0.1, 0.16, 0.24, 0.33, 0.44,
    0.56, 0.67, 0.76, 0.84, 0.9, 0.94, 0.97, 1 - 1e-9,
)  # fmt: skip
"""Borders between classes of height; the first and the last class are the exact low and high."""
_CLASSES: Final = len(_EDGES) + 1
_CELLS: Final = _CLASSES * _CLASSES
"""One for each pair of the class of the open and that of the close. Cell n mirrors cell `_CELLS` - 1 - n."""

_FAMILIES_PER_KIND: Final = 32
_SIGNS: Final = [[(row & column).bit_count() & 1 for column in range(64)] for row in range(64)]
"""A Hadamard matrix: over its rows, the products of the signs in any two columns add up to zero. A family is one draw
of moves with the signs of each row, so that over the family any two moves are uncorrelated."""
_POOL_SEED: Final = "walks of sixty seconds"
_FIT_ROUNDS: Final = 150
_FIT_POWER: Final = 1.9
"""Expectation maximisation converges about twice as fast with its factors raised to a power below 2."""
_MINUTES_MIN: Final = 2_000
"""A shorter recording says too little about its own distribution: its families weigh the same."""

Second = tuple[float, float, float, int, int]
"""Within one second: the net move, the rise and the (negative) fall, and whether each is reached at its end (1)."""


class _Pool:
    """Walks of all kinds as heights between their minimum and maximum; each stands for its mirror image too."""

    def __init__(self) -> None:
        self.heights = array("H")
        self.families = array("H")
        """The family of each walk."""
        self.weights = array("d")
        """The range of each walk as a part of the ranges of its family."""
        self.members = [array("L") for _ in range(_CELLS)]
        """By cell: 2 × the number of each walk in it, + 1 where it is its mirror image."""
        self.family_count = 0
        for number, draw in enumerate(KINDS):
            rng = Random(f"{_POOL_SEED}:{number}")
            for _ in range(_FAMILIES_PER_KIND):
                self._add_family(draw(rng), rng)

    def _add_family(self, moves: Sequence[float], rng: Random) -> None:
        seconds = _seconds(moves)
        columns = rng.sample(range(1, len(_SIGNS)), k=MOVES)
        walks = [_heights([pair[row[column]] for pair, column in zip(seconds, columns, strict=True)]) for row in _SIGNS]
        total = fsum(reach for _, reach in walks)
        if not total:
            return  # a walk without a jump
        for heights, reach in walks:
            place = len(self.families)
            self.heights.extend(heights)
            self.families.append(self.family_count)
            self.weights.append(reach / total)
            cell = _cell(heights[0], heights[-1], _TOP)
            self.members[cell].append(2 * place)
            self.members[_CELLS - 1 - cell].append(2 * place + 1)
        self.family_count += 1


@cache
def _pool() -> _Pool:
    return _Pool()


def _seconds(moves: Sequence[float]) -> list[tuple[Second, Second]]:
    """Sum up the moves of each second, as they are and mirrored."""
    parts = len(moves) // MOVES
    seconds = []
    for number in range(MOVES):
        levels = list(accumulate(moves[number * parts : (number + 1) * parts], initial=0.0))
        net, rise, fall = levels[-1], max(levels), min(levels)
        at_rise, at_fall = (_nearer_end(levels.index(extreme), parts, number) for extreme in (rise, fall))
        seconds.append(((net, rise, fall, at_rise, at_fall), (-net, -fall, -rise, at_fall, at_rise)))
    return seconds


def _nearer_end(place: int, parts: int, second: int) -> int:
    """Return 1 for the end of the second and 0 for its beginning. Open and close never stand for an extreme nearby."""
    if place in (0, parts) or 0 < second < MOVES - 1:
        return int(2 * place >= parts)
    return 1 if second == 0 else 0


def _heights(seconds: Sequence[Second]) -> tuple[list[int], float]:
    """Return a walk as heights, and its range. An extreme within a second is shown at the nearer end of it."""
    levels = list(accumulate((second[0] for second in seconds), initial=0.0))
    tops = [level + second[1] for level, second in zip(levels, seconds, strict=False)]
    bottoms = [level + second[2] for level, second in zip(levels, seconds, strict=False)]
    high, low = max(tops), min(bottoms)
    reach = high - low
    if not reach:
        return [0] * SECONDS, 0.0
    at_high, at_low = tops.index(high), bottoms.index(low)
    is_high_later = at_high >= at_low
    at_high, at_low = at_high + seconds[at_high][3], at_low + seconds[at_low][4]
    if at_high == at_low:  # the later one moves on, or the earlier one back where it would become the close
        step = 1 if at_high < MOVES - 1 else -1
        if is_high_later == (step > 0):
            at_high += step
        else:
            at_low += step
    levels[at_low], levels[at_high] = low, high
    scale = _TOP / reach
    return [round((level - low) * scale) for level in levels], reach


def _cell(opened: float, close: float, top: float) -> int:
    return bisect_right(_EDGES, opened / top) * _CLASSES + bisect_right(_EDGES, close / top)


class MinutePaths:
    """Draws the paths of the minutes of one recorded market. `name` is the seed of all its draws."""

    def __init__(self, name: str, grid: Grid, minutes: Minutes) -> None:
        self._name = name
        self._grid = grid
        self._pool = _pool()
        self._walks_of = cache(self._weighted_walks)
        self._family_weights: Sequence[float] = [1.0] * self._pool.family_count
        if len(minutes) >= _MINUTES_MIN:
            self._family_weights = _fit(self._pool, _recorded_shares(grid, minutes))

    def _weighted_walks(self, cell: int) -> tuple[Sequence[int], Sequence[float]]:
        """Return the walks of a cell, or of the nearest one that has some, and the sums of their weights."""
        pool = self._pool
        members = pool.members[cell]
        if not members:
            opened, close = divmod(cell, _CLASSES)
            filled = (other for other in range(_CELLS) if pool.members[other])
            nearest = min(filled, key=lambda o: abs(o // _CLASSES - opened) + abs(o % _CLASSES - close))
            members = pool.members[nearest]
        weights = (self._family_weights[pool.families[one >> 1]] * pool.weights[one >> 1] for one in members)
        return members, array("d", accumulate(weights))

    def draw(self, row: Row) -> list[int]:
        """Return sixty marks in half ticks, from open to close, within low and high and touching both."""
        low, high, opened, close = corners(self._grid, row)
        reach = high - low
        if not reach:
            return [low] * SECONDS
        members, sums = self._walks_of(_cell(opened - low, close - low, reach))
        random = Random(f"{self._name}:{row.minute}").random
        one = members[min(bisect_right(sums, random() * sums[-1]), len(members) - 1)]
        begin = (one >> 1) * SECONDS
        walk: Sequence[int] = self._pool.heights[begin : begin + SECONDS]
        if one & 1:
            walk = [_TOP - height for height in walk]
        marks = _mapped(walk, sorted(((walk[0], opened), (walk[-1], close))), low, high, random())
        marks[0], marks[-1] = opened, close
        return marks


def _mapped(walk: Sequence[int], inner: Sequence[tuple[int, int]], low: int, high: int, offset: float) -> list[int]:
    """Map heights piecewise linearly: 0 to `low`, the two inner ones to the marks beside them, the top to `high`.

    One random `offset` for all, not the nearest mark for each, leaves small moves their size on average.
    """
    (first, at_first), (second, at_second) = inner
    if at_first > at_second:  # classes of height are wider than the difference of open and close
        at_first, at_second = at_second, at_first
    lower = (at_first - low) / first if first else 0.0
    middle = (at_second - at_first) / (second - first) if second > first else 0.0
    upper = (high - at_second) / (_TOP - second) if second < _TOP else 0.0
    return [
        floor(low + height * lower + offset)
        if height <= first
        else floor(at_first + (height - first) * middle + offset)
        if height < second
        else floor(high - (_TOP - height) * upper + offset)
        for height in walk
    ]


def corners(grid: Grid, row: Row) -> tuple[int, int, int, int]:
    """Return low, high, open and close of a candle in half ticks."""
    low, high = grid.within(row.low, row.high)
    return low, high, min(max(grid.nearest(row.open), low), high), min(max(grid.nearest(row.close), low), high)


def _recorded_shares(grid: Grid, minutes: Minutes) -> list[float]:
    """Return the part of the recorded range in each cell."""
    shares = [0.0] * _CELLS
    for place in range(len(minutes)):
        row = minutes[place]
        low, high, opened, close = corners(grid, row)
        if reach := high - low:
            shares[_cell(opened - low, close - low, reach)] += reach / row.open
    total = fsum(shares)
    return [share / total for share in shares] if total else shares


def _fit(pool: _Pool, recorded: Sequence[float]) -> Sequence[float]:
    """Return the weights of the families whose mixture has the recorded shares. A cell and its mirror image are one."""
    wanted: list[float] = []
    by_cell: list[dict[int, float]] = []
    for cell in range(_CELLS // 2 + 1):
        shares: dict[int, float] = defaultdict(float)
        half = 0.5 if cell == _CELLS // 2 else 1.0  # the cell in the middle is its own mirror image
        for one in pool.members[cell]:
            shares[pool.families[one >> 1]] += half * pool.weights[one >> 1]
        share = half * (recorded[cell] + recorded[_CELLS - 1 - cell])
        if share and shares:
            wanted.append(share)
            by_cell.append(shares)
    by_family: list[dict[int, float]] = [{} for _ in range(pool.family_count)]
    for number, shares in enumerate(by_cell):
        for family, share in shares.items():
            by_family[family][number] = share
    weights = [1 / pool.family_count] * pool.family_count
    for _ in range(_FIT_ROUNDS):
        mixture = _weighted_sums(weights, by_cell)
        ratios = [share / part for share, part in zip(wanted, mixture, strict=True)]
        factors = _weighted_sums(ratios, by_family)
        weights = [weight * factor**_FIT_POWER for weight, factor in zip(weights, factors, strict=True)]
        total = fsum(weights)
        weights = [weight / total for weight in weights]
    return weights


def _weighted_sums(weights: Sequence[float], parts: Sequence[dict[int, float]]) -> list[float]:
    return [fsum(map(mul, map(weights.__getitem__, part), part.values())) for part in parts]
