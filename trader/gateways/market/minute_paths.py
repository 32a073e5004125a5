"""Random price paths within recorded minutes, drawn so that the past of a path does not predict its future.

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
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import floor, fsum
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
_SIGNS: Final = np.array([[(row & column).bit_count() & 1 for column in range(64)] for row in range(64)])
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
    """Walks of all kinds as heights between their minimum and maximum; each represents its mirror image too."""

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
        seconds = np.array(_seconds(moves))
        columns = rng.sample(range(1, len(_SIGNS)), k=MOVES)
        heights, reaches = _heights(seconds[np.arange(MOVES), _SIGNS[:, columns]])
        total = fsum(reaches)
        if not total:
            return  # a walk without a jump
        first = len(self.families)
        self.heights.frombytes(heights.astype(self.heights.typecode).tobytes())
        self.families.extend([self.family_count] * len(reaches))
        self.weights.extend(reach / total for reach in reaches)
        for place, (opened, close) in enumerate(heights[:, [0, -1]].tolist(), start=first):
            cell = _cell(opened, close, _TOP)
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


def _heights(seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[float]]:
    """Return walks as heights, and their ranges. An extreme within a second is shown at the nearer end of it.

    `seconds` has a `Second` for each walk and second.
    """
    walks = np.arange(len(seconds))
    levels = np.zeros((len(seconds), SECONDS))
    np.cumsum(seconds[:, :, 0], axis=1, out=levels[:, 1:])
    tops, bottoms = levels[:, :-1] + seconds[:, :, 1], levels[:, :-1] + seconds[:, :, 2]
    at_high, at_low = tops.argmax(axis=1), bottoms.argmin(axis=1)
    high, low = tops[walks, at_high], bottoms[walks, at_low]
    reach = high - low
    is_high_later = at_high >= at_low
    at_high = at_high + seconds[walks, at_high, 3].astype(int)
    at_low = at_low + seconds[walks, at_low, 4].astype(int)
    # Where both are at one second, the later one moves on, or the earlier one back where it would become the close.
    step = np.where(at_high != at_low, 0, np.where(at_high < MOVES - 1, 1, -1))
    moves_high = is_high_later == (step > 0)
    at_high, at_low = at_high + np.where(moves_high, step, 0), at_low + np.where(moves_high, 0, step)
    levels[walks, at_low], levels[walks, at_high] = low, high
    scale = np.divide(_TOP, reach, out=np.zeros_like(reach), where=reach > 0)
    return np.rint((levels - low[:, None]) * scale[:, None]), reach.tolist()


def _cell(opened: float, close: float, top: float) -> int:
    return bisect_right(_EDGES, opened / top) * _CLASSES + bisect_right(_EDGES, close / top)


class MinutePaths:
    """Draws the paths of the minutes of one recorded market. `name` is the seed of all its draws."""

    def __init__(self, name: str, grid: Grid, minutes: Minutes) -> None:
        self._name = name
        self._grid = grid
        self._pool = _pool()
        self._family_weights: Sequence[float] = [1.0] * self._pool.family_count
        if len(minutes) >= _MINUTES_MIN:
            self._family_weights = _fit(self._pool, _recorded_shares(grid, minutes))
        # All of them now: what a long recording comes across one after the other would look like a leak.
        weights = np.array(self._family_weights)[np.array(self._pool.families)] * np.array(self._pool.weights)
        self._walks = [self._weighted_walks(cell, weights) for cell in range(_CELLS)]

    def _weighted_walks(self, cell: int, weights: NDArray[np.float64]) -> tuple[Sequence[int], Sequence[float]]:
        """Return the walks of a cell, or of the nearest non-empty one, and the cumulative sums of their weights."""
        pool = self._pool
        members = pool.members[cell]
        if not members:
            opened, close = divmod(cell, _CLASSES)
            filled = (other for other in range(_CELLS) if pool.members[other])
            nearest = min(filled, key=lambda o: abs(o // _CLASSES - opened) + abs(o % _CLASSES - close))
            members = pool.members[nearest]
        return members, array("d", np.cumsum(weights[np.array(members) >> 1]).tobytes())

    def draw(self, row: Row) -> list[int]:
        """Return sixty marks in half ticks, from open to close, within low and high and touching both."""
        low, high, opened, close = corners(self._grid, row)
        reach = high - low
        if not reach:
            return [low] * SECONDS
        members, sums = self._walks[_cell(opened - low, close - low, reach)]
        random = Random(f"{self._name}:{row.minute}").random
        choice = members[min(bisect_right(sums, random() * sums[-1]), len(members) - 1)]
        begin = (choice >> 1) * SECONDS
        walk: Sequence[int] = self._pool.heights[begin : begin + SECONDS]
        if choice & 1:
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
    families, parts = np.array(pool.families), np.array(pool.weights)
    wanted, rows = [], []
    for cell in range(_CELLS // 2 + 1):
        half = 0.5 if cell == _CELLS // 2 else 1.0  # the cell in the middle is its own mirror image
        walks = np.array(pool.members[cell], dtype=int) >> 1
        share = half * (recorded[cell] + recorded[_CELLS - 1 - cell])
        if share and len(walks):
            wanted.append(share)
            rows.append(np.bincount(families[walks], half * parts[walks], minlength=pool.family_count))
    by_cell = np.array(rows)
    by_family = np.ascontiguousarray(by_cell.T)
    weights = np.full(pool.family_count, 1 / pool.family_count)
    for _ in range(_FIT_ROUNDS):
        # Sums of products and not products of matrices, whose last digits depend on the machine.
        mixture = (by_cell * weights).sum(axis=1)
        factors = (by_family * (wanted / mixture)).sum(axis=1)
        weights *= [factor**_FIT_POWER for factor in factors.tolist()]
        weights /= fsum(weights)
    return weights.tolist()
