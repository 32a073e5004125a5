"""Families of random walks of one minute, all fair: past signs do not predict future moves.

A kind draws the moves of a walk: their sizes may depend on each other, but their signs are fair coin flips. The kinds
differ in how many moves there are and when the large ones come, and so in how often a walk opens or closes at its
extremes or in the middle of its range. The pool holds families of all kinds, about 65,000 walks.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import accumulate
from math import exp, sqrt
from random import Random
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trader.core.statistics import Floats

Heights = Floats | NDArray[np.uint16]

SECONDS: Final = 60
MOVES: Final = SECONDS - 1
"""One from each second of a minute to the next."""

_NORMAL: Final = [NormalDist().inv_cdf((place + 0.5) / 4096) for place in range(4096)]

WalkKind = Callable[[Random], Sequence[float]]
"""Draws the moves of a walk, one or more per second."""
Shape = Callable[[float, float], float]
"""Volatility as a function of time and of a moment drawn for each family, both in seconds."""


def _jumps(chance: float, noise: float) -> WalkKind:
    """Few large moves at random seconds, over slight noise."""

    def draw(rng: Random) -> Sequence[float]:
        moves, small = rng.choices(_NORMAL, k=MOVES), rng.choices(_NORMAL, k=MOVES)
        random = rng.random
        return [(move if random() < chance else 0.0) + noise * each for move, each in zip(moves, small, strict=True)]

    return draw


def _shaped(shape: Shape, parts: int = 1) -> WalkKind:
    """Volatility of this shape, with `parts` moves per second."""

    def draw(rng: Random) -> Sequence[float]:
        moment = rng.uniform(-5.0, MOVES)
        moves = rng.choices(_NORMAL, k=MOVES * parts)
        return [move * shape((place + 0.5) / parts, moment) for place, move in enumerate(moves)]

    return draw


def _even(second: float, moment: float) -> float:
    return 1.0


def _decay(seconds: float, size: float) -> Shape:
    """High volatility that decays from the start."""
    return lambda second, moment: 1 + size * exp(-second / seconds)


def _burst(seconds: float, size: float) -> Shape:
    """Volatility that leaps at the moment and decays."""
    return lambda second, moment: 1.0 if second < moment else 1 + size * exp((moment - second) / seconds)


def _hump(seconds: float, least: float) -> Shape:
    """Volatility that grows toward the moment and falls after it."""
    return lambda second, moment: least + exp(-abs(second - moment) / seconds)


def _fade(seconds: float) -> Shape:
    """Volatility that decays to almost none."""
    return lambda second, moment: 0.01 + exp(-second / seconds)


def _calm(opening: float, closing: float, seconds: float) -> Shape:
    """Volatility that grows until `opening` seconds after open and falls from `closing` seconds before the close."""
    return lambda second, moment: (
        0.01
        + min(
            1.0,
            exp((second - opening) / seconds) if opening else 1.0,
            exp((SECONDS - closing - second) / seconds) if closing else 1.0,
        )
    )


def _excited(chance: float) -> WalkKind:
    """Moves at random seconds, with volatility that feeds on the last move after a calm start: GARCH(1, 1)."""

    def draw(rng: Random) -> Sequence[float]:
        variance, moves = 1.0, []
        for normal in rng.choices(_NORMAL, k=MOVES):
            move = sqrt(variance) * normal if rng.random() < chance else 0.0
            moves.append(move)
            if move:
                variance = min(0.02 + 0.6 * move * move + 0.4 * variance, 1e4)
        return moves

    return draw


def _ticks(size: float) -> WalkKind:
    """Moves of whole ticks of about this size, so that prices repeat."""
    return lambda rng: [float(round(size * normal)) for normal in rng.choices(_NORMAL, k=MOVES)]


def _wandering(parts: int) -> WalkKind:
    """Volatility that wanders from one stretch of nine seconds to the next."""

    def draw(rng: Random) -> Sequence[float]:
        deviations = [exp(level) for level in accumulate(rng.choices(_NORMAL, k=7))]
        moves = rng.choices(_NORMAL, k=MOVES * parts)
        return [move * deviations[place // (9 * parts)] for place, move in enumerate(moves)]

    return draw


KINDS: Final[tuple[WalkKind, ...]] = (
    _jumps(0.015, 0.0),
    _jumps(0.04, 0.0),
    _jumps(0.1, 0.0),
    _jumps(0.25, 0.0),
    _jumps(0.5, 0.0),
    _jumps(0.1, 0.003),
    _jumps(0.25, 0.003),
    _jumps(0.1, 0.03),
    _jumps(0.25, 0.03),
    _jumps(0.1, 0.1),
    _ticks(0.4),
    _ticks(1.2),
    _shaped(_even),
    _shaped(_decay(3, 10)),
    _shaped(_decay(1, 20)),
    _shaped(_burst(10, 20)),
    _shaped(_burst(10, 20), 4),
    _shaped(_fade(20)),
    _shaped(_hump(8, 0.05)),
    _shaped(_hump(15, 0.005)),
    _shaped(_hump(15, 0.005), 4),
    _shaped(_hump(15, 0.05), 4),
    _shaped(_calm(5, 5, 2)),
    _shaped(_calm(10, 10, 4)),
    _shaped(_calm(10, 10, 4), 4),
    _shaped(_calm(15, 15, 8)),
    _shaped(_calm(15, 15, 8), 4),
    _shaped(_calm(0, 10, 4)),
    _shaped(_calm(10, 0, 4)),
    _excited(1.0),
    _excited(0.35),
    _wandering(4),
)

TOP: Final = 65_535
"""The height of a walk's maximum; its minimum is 0. Heights are stored as 16-bit integers."""

_EDGES: Final = (
    1e-9, 0.03, 0.06, 0.1, 0.16, 0.24, 0.33, 0.44,
    0.56, 0.67, 0.76, 0.84, 0.9, 0.94, 0.97, 1 - 1e-9,
)  # fmt: skip
"""Borders between classes of height; the first and last classes are the exact low and high."""
_CLASSES: Final = len(_EDGES) + 1
CELLS: Final = _CLASSES * _CLASSES
"""One for each pair of open class and close class. Cell n mirrors cell `CELLS` - 1 - n."""

_FAMILIES_PER_KIND: Final = 32
_SIGNS: Final = np.array([[(row & column).bit_count() & 1 for column in range(64)] for row in range(64)])
"""A Hadamard matrix: over its rows, the products of the signs in any two columns add up to zero. A family is one draw
of moves with the signs of each row, so any two moves are uncorrelated over the family."""
_POOL_SEED: Final = "walks of sixty seconds"
_FIT_ROUNDS: Final = 100
_RARE: Final = 1e-9
"""Less than the weight of any kind that is ever drawn."""
_NET_MIN: Final = 1e-3
"""A walk that ends nearer to its start than this fraction of its family's mean range cannot be stretched."""


class WalkPool:
    """Walks of all kinds as heights between their minimum and maximum; each represents its mirror image too."""

    def __init__(self) -> None:
        families: list[NDArray[np.uint16]] = []
        parts: list[Floats] = []
        kinds: list[int] = []
        for kind, draw in enumerate(KINDS):
            of_kind, ranges = _families(draw, Random(f"{_POOL_SEED}:{kind}"))
            totals = ranges.sum(axis=1, keepdims=True)
            has_moved = totals[:, 0] > 0  # else a family without a jump
            families.append(of_kind[has_moved].reshape(-1, SECONDS).astype(np.uint16))
            parts.append((ranges[has_moved] / totals[has_moved]).ravel())
            kinds += [kind] * int(has_moved.sum())
        self._heights = np.concatenate(families)
        """A row of sixty per walk."""
        self._parts = np.concatenate(parts)
        """The range of each walk as a fraction of its family's ranges."""
        self._scales = self._parts * len(_SIGNS) / TOP
        self._kinds = np.repeat(kinds, len(_SIGNS))
        self._of_members = cache(self._kinds_and_parts)
        """Returns the kinds and the parts of the walks of a cell."""
        own = cells_of(self._heights[:, 0], self._heights[:, -1], TOP)
        cells = np.concatenate([own, CELLS - 1 - own])  # of the walks and their mirror images
        kinds_and_cells = CELLS * np.tile(self._kinds, 2) + cells
        by_cell = np.bincount(kinds_and_cells, np.tile(self._parts, 2), minlength=CELLS * len(KINDS))
        by_kind = by_cell.reshape(len(KINDS), CELLS)
        self._by_kind: Floats = by_kind / by_kind.sum(axis=1, keepdims=True)
        """For each kind, the fraction of its ranges in each cell."""
        counts = np.bincount(cells, minlength=CELLS)
        filled = np.flatnonzero(counts)
        members = np.split(np.argsort(cells, kind="stable"), np.cumsum(counts)[:-1])
        self._members = [members[_nearest(filled, number)] for number in range(CELLS)]
        """The walks of each cell, or of the nearest cell that has any; mirror images are numbered after all walks."""

    @cached_property
    def _from_0(self) -> NDArray[np.float32]:
        """The walks relative to their starts."""
        return self._heights.astype(np.float32) - self._heights[:, :1]

    @cached_property
    def _free(self) -> NDArray[np.int64]:
        """The walks with a net move."""
        return np.flatnonzero(np.abs(self._from_0[:, -1] * self._scales) > _NET_MIN)

    def weights(self, shares: Floats) -> Floats:
        """Return weights of the kinds that give each cell about its share, found by expectation maximization."""
        kinds = np.full(len(KINDS), 1 / len(KINDS))
        for _ in range(_FIT_ROUNDS):
            mixture = (self._by_kind * kinds[:, None]).sum(axis=0)
            kinds *= (self._by_kind * (shares / np.maximum(mixture, _RARE))).sum(axis=1)
        return kinds + _RARE

    def sums(self, number: int, weights: Floats) -> Floats:
        """Return the cumulated ranges × weights of their kinds of the walks in a cell, to choose from."""
        kinds, parts = self._of_members(number)
        return np.cumsum(weights[kinds] * parts)

    def _kinds_and_parts(self, number: int) -> tuple[NDArray[np.int64], Floats]:
        walks = self._members[number] % len(self._heights)
        return self._kinds[walks], self._parts[walks]

    def choose(self, number: int, sums: Floats, chance: float) -> Floats:
        """Return the heights of a walk in a cell with these sums, chosen by `chance` in [0, 1)."""
        members = self._members[number]
        choice = min(int(sums.searchsorted(chance * sums[-1], side="right")), len(members) - 1)
        is_mirrored, walk = divmod(int(members[choice]), len(self._heights))
        heights: Floats = self._heights[walk].astype(float)
        return TOP - heights if is_mirrored else heights

    def sample(self, chances: Floats) -> tuple[NDArray[np.float32], Floats]:
        """Return, for each chance in [0, 1), a walk that ends away from its start, and its scale.

        Walks are heights relative to their start. A walk times its scale is in units of its family's mean range.
        """
        walks = self._free[(chances * len(self._free)).astype(np.int64)]
        return self._from_0[walks], self._scales[walks]


@cache
def walk_pool() -> WalkPool:
    return WalkPool()


def _families(draw: WalkKind, rng: Random) -> tuple[Floats, Floats]:
    """Return the heights of the walks of a kind's families, and their ranges: the first axis is families."""
    drawn = [(draw(rng), rng.sample(range(1, len(_SIGNS)), k=MOVES)) for _ in range(_FAMILIES_PER_KIND)]
    moves, columns = (np.array(each) for each in zip(*drawn, strict=True))
    seconds = _seconds(moves.reshape(_FAMILIES_PER_KIND, MOVES, -1))
    signs = _SIGNS[np.arange(len(_SIGNS))[:, None], columns[:, None]]
    places = signs * columns.size + np.arange(columns.size).reshape(_FAMILIES_PER_KIND, 1, MOVES)
    heights, ranges = _heights(seconds.reshape(len(seconds), -1).take(places.reshape(-1, MOVES), axis=1))
    return heights.reshape(_FAMILIES_PER_KIND, -1, SECONDS), ranges.reshape(_FAMILIES_PER_KIND, -1)


def _seconds(moves: Floats) -> Floats:
    """Sum up the moves within each second of each family, as drawn and mirrored: the second axis.

    The first axis is the net move, the rise and the (negative) fall, and whether each is reached at its end (1).
    """
    levels = np.zeros((*moves.shape[:-1], moves.shape[-1] + 1))
    np.cumsum(moves, axis=-1, out=levels[..., 1:])
    net, rise, fall = levels[..., -1], levels.max(axis=-1), levels.min(axis=-1)
    at_rise, at_fall = (_nearer_ends(places, moves) for places in (levels.argmax(axis=-1), levels.argmin(axis=-1)))
    return np.array([(net, -net), (rise, -fall), (fall, -rise), (at_rise, at_fall), (at_fall, at_rise)])


def _nearer_ends(places: NDArray[np.int64], moves: Floats) -> NDArray[np.bool_]:
    """Return for each second whether its end is nearer. Open and close never stand in for a nearby extreme."""
    parts = moves.shape[-1]
    is_within = (places > 0) & (places < parts)
    is_end: NDArray[np.bool_] = 2 * places >= parts
    is_end[:, 0] |= is_within[:, 0]
    is_end[:, -1] &= ~is_within[:, -1]
    return is_end


def _heights(seconds: Floats) -> tuple[Floats, Floats]:
    """Return walks as heights, and their ranges. An extreme within a second is shown at the nearer end of the second.

    `seconds` has the sums of `_seconds` for each walk and second.
    """
    net, rise, fall, at_rise, at_fall = seconds
    walks, levels = np.arange(len(net)), np.zeros((len(net), SECONDS))
    np.cumsum(net, axis=1, out=levels[:, 1:])
    tops, bottoms = levels[:, :-1] + rise, levels[:, :-1] + fall
    at_high, at_low = tops.argmax(axis=1), bottoms.argmin(axis=1)
    high, low = tops[walks, at_high], bottoms[walks, at_low]
    reach = high - low
    is_high_later = at_high >= at_low
    at_high = at_high + at_rise[walks, at_high].astype(int)
    at_low = at_low + at_fall[walks, at_low].astype(int)
    # If both are at the same second, the later one moves forward, or the earlier one back if it would become the close.
    step = np.where(at_high != at_low, 0, np.where(at_high < MOVES - 1, 1, -1))
    moves_high = is_high_later == (step > 0)
    at_high, at_low = at_high + np.where(moves_high, step, 0), at_low + np.where(moves_high, 0, step)
    levels[walks, at_low], levels[walks, at_high] = low, high
    scale = np.divide(TOP, reach, out=np.zeros_like(reach), where=reach > 0)
    return np.rint((levels - low[:, None]) * scale[:, None]), reach


def cells_of(opened: Heights, close: Heights, top: Floats | int) -> NDArray[np.int64]:
    """Return the cells of opens and closes between 0 and `top`."""
    first, last = (np.searchsorted(_EDGES, heights / top, side="right") for heights in (opened, close))
    return first * _CLASSES + last


def _nearest(cells: NDArray[np.int64], wanted: int) -> int:
    """Return the cell that is the fewest classes away from another."""
    opened, close = divmod(wanted, _CLASSES)
    nearest: int = cells[np.argmin(abs(cells // _CLASSES - opened) + abs(cells % _CLASSES - close))]
    return nearest
