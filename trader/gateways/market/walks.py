"""Families of random walks of one minute, all fair: past signs do not predict future moves.

A kind draws the moves of a walk: their sizes may depend on each other, their signs are those of fair coins. The kinds
differ in how many moves there are, and when the large ones come, and so in how often a walk opens or closes at its
extremes or in the middle of its range.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import exp, sqrt
from random import Random
from statistics import NormalDist
from typing import Final

SECONDS: Final = 60
MOVES: Final = SECONDS - 1
"""From each second of a minute to the next."""

_NORMAL: Final = [NormalDist().inv_cdf((place + 0.5) / 4096) for place in range(4096)]

Kind = Callable[[Random], Sequence[float]]
"""Draws the moves of a walk, one or more for each second."""
Shape = Callable[[float, float], float]
"""Volatility as a function of the time and of a moment drawn for each family, both in seconds."""


def _jumps(chance: float, noise: float) -> Kind:
    """Few large moves at random seconds, over a little noise."""

    def draw(rng: Random) -> Sequence[float]:
        moves, small = rng.choices(_NORMAL, k=MOVES), rng.choices(_NORMAL, k=MOVES)
        random = rng.random
        return [(move if random() < chance else 0.0) + noise * each for move, each in zip(moves, small, strict=True)]

    return draw


def _shaped(shape: Shape, parts: int = 1) -> Kind:
    """Volatility of this shape, with so many moves a second."""

    def draw(rng: Random) -> Sequence[float]:
        moment = rng.uniform(-5.0, MOVES)
        moves = rng.choices(_NORMAL, k=MOVES * parts)
        return [move * shape((place + 0.5) / parts, moment) for place, move in enumerate(moves)]

    return draw


def _even(second: float, moment: float) -> float:
    return 1.0


def _decay(seconds: float, size: float) -> Shape:
    """High volatility that decays from the beginning on."""
    return lambda second, moment: 1 + size * exp(-second / seconds)


def _burst(seconds: float, size: float) -> Shape:
    """Volatility that leaps at the moment and decays."""
    return lambda second, moment: 1.0 if second < moment else 1 + size * exp((moment - second) / seconds)


def _hump(seconds: float, least: float) -> Shape:
    """Volatility that grows towards the moment and falls after it."""
    return lambda second, moment: least + exp(-abs(second - moment) / seconds)


def _fade(seconds: float) -> Shape:
    """Volatility that decays to almost none."""
    return lambda second, moment: 0.01 + exp(-second / seconds)


def _calm(opening: float, closing: float, seconds: float) -> Shape:
    """Volatility that grows until so long after the open, and falls from so long before the close on."""
    return lambda second, moment: (
        0.01
        + min(
            1.0,
            exp((second - opening) / seconds) if opening else 1.0,
            exp((SECONDS - closing - second) / seconds) if closing else 1.0,
        )
    )


def _excited(chance: float) -> Kind:
    """Moves at random seconds, with volatility that feeds on the last move, from a calm beginning: GARCH(1, 1)."""

    def draw(rng: Random) -> Sequence[float]:
        variance, moves = 1.0, []
        for normal in rng.choices(_NORMAL, k=MOVES):
            move = sqrt(variance) * normal if rng.random() < chance else 0.0
            moves.append(move)
            if move:
                variance = min(0.02 + 0.6 * move * move + 0.4 * variance, 1e4)
        return moves

    return draw


def _ticks(size: float) -> Kind:
    """Moves of whole ticks of about this size, so that prices repeat."""
    return lambda rng: [float(round(size * normal)) for normal in rng.choices(_NORMAL, k=MOVES)]


def _wandering(parts: int) -> Kind:
    """Volatility that wanders from one stretch of nine seconds to the next."""

    def draw(rng: Random) -> Sequence[float]:
        deviations = [exp(level) for level in accumulate(rng.choices(_NORMAL, k=7))]
        moves = rng.choices(_NORMAL, k=MOVES * parts)
        return [move * deviations[place // (9 * parts)] for place, move in enumerate(moves)]

    return draw


KINDS: Final[tuple[Kind, ...]] = (
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
