"""Worlds: minute markets that end in a state, with one planted edge or none, drawn from a secret.

An edge is a pattern in a market's past together with a law for its future; the table `PATTERNS` has one row for each. A
null world shows ordinary hours, or a pattern without its telltale sign, and nothing follows. In a reversed world the
opposite follows.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Literal, NamedTuple

import numpy as np

from trader.core.statistics import Floats
from trader.exam.domain.law import HORIZON, RISK_BUDGET, Law
from trader.market.domain.markets import SimulatedMarket

RECENT: Final = 2880
"""The minutes before the state that have 1-minute candles: two days."""

OLD_STEP: Final = 15
OLD: Final = (305 * 240 - RECENT) // OLD_STEP
"""The candles of 15 minutes before those: as many as 305 candles of 4 hours need."""

AFTER: Final = 4
"""The minutes after the state in which the orders of a decision meet their books; prices stand still meanwhile."""

STRENGTHS: Final = (3.0, 5.0)
"""The oracle's annual Sharpe ratio, after costs, of one such state a day."""

STATES_PER_YEAR: Final = 365

HELD_FOR: Final = 120
"""The minutes for which an account has held its position, where it holds one."""

_MINUTES_PER_YEAR: Final = 365.25 * 1440
_FACTOR_VOLATILITY: Final = 0.36
_COMMON: Final = 0.6
"""How strongly markets move with their common factor; the square is the correlation of two of them."""
_CLOSE: Final = 0.95
"""The same for a leader and its follower."""
_APART: Final = 0.3
"""The same for a market that follows no other."""

_FIRST_DAY: Final = 20_454
"""Days since 1970 of 1 January 2026, the day of the first states, which are at 4, 8, 12, 16 and 20 o'clock."""

_STATES_PER_DAY: Final = 5
_HOUR: Final = 60


class Edge(StrEnum):
    """A structure that a world may hold."""

    BREAKOUT = "breakout"
    OVERSHOOT = "overshoot"
    SQUEEZE = "squeeze"
    NEWS = "news"
    LEAD_LAG = "lead_lag"
    CARRY = "carry"
    DRAIN = "drain"


Kind = Literal["planted", "null", "reversed"]
"""Whether a world has its edge, no edge, or the opposite edge."""


class Pattern(NamedTuple):
    """The past of an edge, and how long its law holds.

    For `calm` minutes, volatility is `calm_factor` times its usual level; then the price moves by `push` times the
    usual hourly deviation within `push_minutes`, on `volume` times the usual volume; then `since` minutes pass. From
    the push on, volatility is `unrest` times its usual level. The drift lasts `lasts` minutes, along the push (1),
    against it (-1) or not at all (0).
    """

    push: float
    push_minutes: int
    since: int
    volume: float
    lasts: int
    along: int
    calm: int = 0
    calm_factor: float = 1.0
    unrest: float = 1.0


PATTERNS: Final[Mapping[Edge, Pattern]] = {
    Edge.BREAKOUT: Pattern(1.5, 15, 3, 3.0, 180, 1, calm=360, calm_factor=0.7, unrest=1.2),
    Edge.OVERSHOOT: Pattern(3.0, 60, 2, 5.0, 120, -1),
    Edge.SQUEEZE: Pattern(0.7, 10, 2, 2.0, 180, 1, calm=720, calm_factor=0.35),
    Edge.NEWS: Pattern(2.5, 1, 15, 6.0, 120, 1, unrest=1.4),
    Edge.LEAD_LAG: Pattern(2.2, 20, 2, 2.0, 90, 1),
    Edge.CARRY: Pattern(0.0, 1, 0, 1.0, HORIZON, 0),
    Edge.DRAIN: Pattern(1.5, 60, 0, 2.0, HORIZON, 1, unrest=2.0),
}

_STANDING: Final = 5 / 12
"""How often accounts hold a position in worlds other than `drain`, so that they do in half of all worlds."""

_DRIED_UP: Final = 0.5
"""The volume of a move that nothing follows, relative to the usual."""
_FADED_CARRY: Final = 0.08
"""The funding rate of a null world with the pattern of `carry`, relative to one that pays."""


class Bars(NamedTuple):
    """The candles of one market as columns, ascending; prices in quote currency, volume in base units."""

    open: Floats
    high: Floats
    low: Floats
    close: Floats
    volume: Floats

    def last(self, count: int) -> "Bars":
        """Return the last `count` candles."""
        return Bars(*(column[len(column) - count :] for column in self))

    def followed_by(self, later: "Bars") -> "Bars":
        """Return these candles and later ones."""
        return Bars(*map(np.concatenate, zip(self, later, strict=True)))

    def joined(self, width: int) -> "Bars":
        """Return candles of `width` of these each; their number is a multiple of it."""
        opens, highs, lows, closes, volumes = (column.reshape(-1, width) for column in self)
        return Bars(opens[:, 0], highs.max(axis=1), lows.min(axis=1), closes[:, -1], volumes.sum(axis=1))


class World(NamedTuple):
    """A world. `market` has the edge, whose drift has the sign `side`; `state` is its last second, a full hour.

    `recent` has the minutes until `AFTER` minutes after the state, `old` the candles of 15 minutes before those.
    `standing` is the side of the position that every account holds (0: none) in the market `stands_in`, `funding` the
    hourly rate of each market.
    """

    number: int
    kind: Kind
    edge: Edge | None
    symbols: tuple[str, ...]
    market: int
    side: int
    strength: float
    state: int
    recent: tuple[Bars, ...]
    old: tuple[Bars, ...]
    funding: tuple[float, ...]
    standing: int
    stands_in: int
    law: Law


class FillCosts(NamedTuple):
    """The cost of a fill in each market, as a fraction of its notional: the taker fee and half the usual spread."""

    rows: Sequence[SimulatedMarket]
    taker: Sequence[float]

    @property
    def of_fill(self) -> Floats:
        spreads = [row.calm.half_spread_bp / 10_000 for row in self.rows]
        fills: Floats = np.array(self.taker) + np.array(spreads)
        return fills


def seed_of(secret: str, number: int) -> int:
    """Return the seed of a world; neither it nor the secret can be derived from the worlds."""
    return int.from_bytes(hashlib.sha256(f"{secret}:{number}".encode()).digest()[:16], "big")


def deviations(rows: Sequence[SimulatedMarket]) -> Floats:
    """Return the usual standard deviation of each market's log return in a minute."""
    yearly = [math.hypot(row.character.beta * _FACTOR_VOLATILITY, row.character.own_volatility) for row in rows]
    usual: Floats = np.array(yearly) / math.sqrt(_MINUTES_PER_YEAR)
    return usual


def draw_world(secret: str, number: int, edge: Edge | None, kind: Kind, costs: FillCosts) -> World:
    """Draw a world with three or more markets.

    :raises ValueError: a world without an edge is not a null world
    """
    if edge is None and kind != "null":
        raise ValueError("only a null world is without an edge")
    seed = seed_of(secret, number)
    return _Drawing(np.random.default_rng(seed), edge, kind, costs).world(number, seed % 2**63)


class _Drawing:
    """The drawing of one world: its past in usual deviations, shaped by the pattern of its edge."""

    def __init__(self, rng: np.random.Generator, edge: Edge | None, kind: Kind, costs: FillCosts) -> None:
        self._rng, self._edge, self._kind, self._costs = rng, edge, kind, costs
        self._count = len(costs.rows)
        self._usual = deviations(costs.rows)
        self._direction = int(rng.choice((-1, 1)))
        """The side of the push, or of whoever receives funding."""
        self._market = int(rng.integers(1 if edge is Edge.LEAD_LAG else 0, self._count))
        """The market of the edge. The first market leads."""
        self._strength = float(rng.uniform(*STRENGTHS))
        self._fades = edge in (Edge.NEWS, Edge.DRAIN) and rng.random() < 0.5
        is_drain = edge is Edge.DRAIN
        self._standing = -self._direction if is_drain else int(rng.choice((-1, 1))) * (rng.random() < _STANDING)
        self._stands_in = self._market if is_drain or rng.random() < 0.5 else int(rng.integers(self._count))
        minutes = RECENT + AFTER
        self._scales = np.ones((self._count, minutes))
        self._pushes = np.zeros((self._count, minutes))
        self._volumes = np.ones((self._count, minutes))
        self._loads = np.full(self._count, _COMMON)

    def world(self, number: int, seed: int) -> World:
        edge, market = self._edge, self._market
        if edge is not None:
            self._shape(edge, PATTERNS[edge])
        law, funding = self._law(seed)
        recent, old = self._bars()
        day, place = divmod(number, _STATES_PER_DAY)  # no two at the same time, since decisions are named by it
        state = ((_FIRST_DAY + day) * 24 + 4 * (place + 1)) * 3600
        return World(
            number=number, kind=self._kind, edge=edge, symbols=tuple(row.rules.symbol for row in self._costs.rows),
            market=market, side=self._side, strength=self._strength, state=state, recent=recent, old=old,
            funding=tuple(funding.tolist()), standing=self._standing, stands_in=self._stands_in, law=law,
        )  # fmt: skip

    @property
    def _side(self) -> int:
        """The sign of the drift, or the side that funding pays; 0 in a null world."""
        if self._edge is None or self._kind == "null":
            return 0
        along = PATTERNS[self._edge].along or 1
        return self._direction * along * (-1 if self._fades else 1) * (-1 if self._kind == "reversed" else 1)

    def _shape(self, edge: Edge, pattern: Pattern) -> None:
        """Shape the past of the market of the edge, or of the first one, which leads."""
        moved = 0 if edge is Edge.LEAD_LAG else self._market
        last = RECENT - pattern.since
        first = last - pattern.push_minutes
        is_null = self._kind == "null"
        self._scales[moved, first - pattern.calm : first] = pattern.calm_factor
        if not (edge is Edge.DRAIN and is_null):
            self._scales[moved, first:] = pattern.unrest
        steps = np.arange(1.0, pattern.push_minutes + 1) if edge is Edge.OVERSHOOT else np.ones(pattern.push_minutes)
        size = self._direction * pattern.push * math.sqrt(_HOUR) * self._rng.uniform(0.85, 1.2)
        self._pushes[moved, first:last] = size * steps / steps.sum()
        has_dried_up = edge is Edge.DRAIN and self._fades if not is_null else edge is not Edge.LEAD_LAG
        volume = _DRIED_UP if has_dried_up else pattern.volume
        self._volumes[moved, last - min(15, pattern.push_minutes) :] = volume
        if edge is Edge.NEWS:
            self._volumes[moved, first:last] = pattern.volume
            self._volumes[moved, last:] = 1.0 if is_null else _DRIED_UP if self._fades else pattern.volume / 2
        if edge is Edge.LEAD_LAG:
            self._loads[:] = _APART
            self._loads[[0, self._market]] = _CLOSE
            if is_null:
                self._pushes[self._market] = self._pushes[0]

    def _law(self, seed: int) -> tuple[Law, Floats]:
        """Return the law, and the hourly funding rate of each market."""
        edge, market, fill = self._edge, self._market, self._costs.of_fill
        drift = np.zeros((self._count, HORIZON))
        deviation = np.repeat(self._usual[:, None], HORIZON, axis=1)
        closing = np.repeat(fill[:, None], HORIZON, axis=1)
        funding = np.array([float(row.rules.funding_rate) for row in self._costs.rows])
        deviation *= self._scales[:, RECENT - 1 : RECENT]
        if edge is not None:
            pattern, sign = PATTERNS[edge], -1 if self._kind == "reversed" else 1
            noise = float(deviation[market, 0]) * math.sqrt(pattern.lasts)
            net = self._strength * noise / math.sqrt(STATES_PER_YEAR)
            gross = net + 2 * float(fill[market])
            if edge is Edge.CARRY:
                rate = gross / (HORIZON // _HOUR)
                funding[market] = -self._direction * rate * (_FADED_CARRY if self._kind == "null" else 1.0)
                if sign < 0:
                    drift[market] = -self._direction * 2 * gross / HORIZON
            elif self._kind == "planted" and edge is Edge.DRAIN and not self._fades:
                drift[market] = self._side * net / 2 / HORIZON
                closing[market] += net / 2 * np.arange(1.0, HORIZON + 1) / HORIZON
            elif self._kind != "null":
                drift[market, : pattern.lasts] = self._side * gross / pattern.lasts
        return Law(drift, deviation, funding, closing, seed), funding

    def _bars(self) -> tuple[tuple[Bars, ...], tuple[Bars, ...]]:
        """Return the minutes around the state, and the candles of 15 minutes before those."""
        rng, steps = self._rng, OLD + RECENT + AFTER
        common, recent, old = rng.standard_normal(steps), [], []
        for market, row in enumerate(self._costs.rows):
            load = self._loads[market]
            sizes = np.concatenate([np.full(OLD, math.sqrt(OLD_STEP)), self._scales[market]]) * self._usual[market]
            sizes[OLD + RECENT :] = 0
            moves = (load * common + math.sqrt(1 - load**2) * rng.standard_normal(steps)) * sizes
            moves[OLD:] += self._pushes[market] * self._usual[market]
            ends = math.log(row.character.level) + 0.2 * rng.standard_normal() + np.cumsum(moves)
            begins = np.concatenate([ends[:1] - moves[:1], ends[:-1]])
            # The extremes of a Brownian bridge from one close to the next.
            spans = np.sqrt(moves**2 - 2 * sizes**2 * np.log(rng.uniform(1e-12, 1.0, (2, steps))))
            highs, lows = (begins + ends + spans[0]) / 2, (begins + ends - spans[1]) / 2
            usual = row.character.minute_volume * np.exp(-ends)
            busy = 0.5 + 0.5 * np.abs(moves) / np.where(sizes > 0, sizes, 1)
            volumes = usual * busy * (0.3 + 2 * rng.random(steps) ** 2)
            volumes[:OLD] *= OLD_STEP
            volumes[OLD:] *= self._volumes[market]
            bars = Bars(np.exp(begins), np.exp(highs), np.exp(lows), np.exp(ends), volumes)
            old.append(Bars(*(column[:OLD] for column in bars)))
            recent.append(Bars(*(column[OLD:] for column in bars)))
        return tuple(recent), tuple(old)


def usual_value(edge: Edge | None) -> float:
    """Return the oracle's usual value in worlds of an edge as a fraction of equity, known before the exam; without an
    edge, that of one that lasts over the horizon."""
    lasts = HORIZON if edge is None else PATTERNS[edge].lasts
    return RISK_BUDGET * sum(STRENGTHS) / 2 * math.sqrt(lasts / HORIZON / STATES_PER_YEAR)


def standing_weight(costs: FillCosts, market: int) -> float:
    """Return the notional of a standing position as a fraction of equity: half the risk budget in a usual market."""
    return RISK_BUDGET / 2 / float(deviations(costs.rows)[market] * math.sqrt(HORIZON))
