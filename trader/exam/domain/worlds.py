"""Worlds: minute markets that end in a state, with one planted edge or none, drawn from a secret.

An edge is a family of patterns in a market's past together with a law for its future. Each exam draws one pattern of
each family, and each world the sign of what follows it, which can only be inferred from what followed it before. A null
world shows ordinary hours, or a pattern that nothing follows. In a reversed world the opposite follows.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import numpy as np

from trader.core.statistics import Floats
from trader.exam.domain.law import HORIZON, RISK_BUDGET, STEP, Law
from trader.exam.domain.managed import MINUTES, RESPONSES, STEP_MINUTES, STEPS
from trader.market.domain.markets import SimulatedMarket

RECENT: Final = 2880
"""The minutes before the state that have 1-minute candles: two days."""

OLD_STEP: Final = 15
OLD: Final = (305 * 240 - RECENT) // OLD_STEP
"""The candles of 15 minutes before those: as many as 305 candles of 4 hours need."""

AFTER: Final = 4
"""The minutes after the state in which the orders of a decision meet their books; prices stand still meanwhile."""

STRENGTHS: Final = (0.8, 1.3)
"""The oracle's gain in a planted world after costs, in deviations of the horizon in usual hours. It is far larger than
any market's, so that a handful of occurrences is enough to infer it."""

USUAL_VALUE: Final = RISK_BUDGET * sum(STRENGTHS) / 2
"""The oracle's usual value in planted worlds as a fraction of equity, the same for each edge."""

HELD_FOR: Final = 29
"""The minutes for which an account has held its position, where it holds one: nobody decides as often as that."""

_MINUTES_PER_YEAR: Final = 365.25 * 1440
_FACTOR_VOLATILITY: Final = 0.36
_COMMON: Final = 0.6
"""How strongly markets move with their common factor; the square is the correlation of two of them."""

_SWITCHES: Final = (1 / 10, 1 / 120, 1 / 1440)
"""How often per minute each factor of the variance is drawn anew: `_FACTOR`, or 2 - `_FACTOR`, at equal chance.

Calvet and Fisher, "How to forecast long-run volatility", Journal of Financial Econometrics 2:1 (2004). With the jumps,
kurtosis and autocorrelation of absolute returns are close to those of BTC, ETH and SOL in January 2025."""
_FACTOR: Final = 1.7
_JUMPS: Final = 0.001
"""Jumps per minute, in all markets at once, each with the deviation of `_JUMP` usual minutes."""
_JUMP: Final = 8.0

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

Extent = tuple[float, float]


class Family(NamedTuple):
    """The patterns of an edge, from which each exam draws one: a span for each figure.

    For `calm` minutes, volatility is `calm_factor` times its level; then the price moves by `push` times the usual
    hourly deviation within `push_minutes`; then `since` minutes pass before anything follows. From the push until the
    response ends, volatility is `unrest` times its level.
    """

    push: Extent
    push_minutes: Extent
    since: Extent = (1, 5)
    calm: Extent = (0, 0)
    calm_factor: Extent = (1, 1)
    unrest: Extent = (1, 1)


FAMILIES: Final[Mapping[Edge, Family]] = {
    Edge.BREAKOUT: Family((2.0, 3.0), (8, 15), calm=(10, 20), calm_factor=(0.5, 0.7), unrest=(0.6, 0.8)),
    Edge.OVERSHOOT: Family((3.0, 4.0), (15, 25), unrest=(0.6, 0.9)),
    Edge.SQUEEZE: Family((1.5, 2.0), (5, 10), calm=(20, 30), calm_factor=(0.3, 0.4), unrest=(0.6, 0.8)),
    Edge.NEWS: Family((2.0, 3.0), (1, 2), since=(8, 15), unrest=(0.7, 0.9)),
    Edge.LEAD_LAG: Family((2.2, 3.2), (8, 20), unrest=(0.6, 0.8)),
    Edge.DRAIN: Family((2.2, 3.2), (10, 20), since=(0, 2), unrest=(0.7, 0.9)),
}
"""The edges whose patterns are moves; `carry` is a funding rate."""

_LASTS: Final = (2, 5)
"""How many steps of the law a response lasts, at least and less than."""
_TELLTALES: Final = ((1, -1), (1, 0), (0, 1))
"""What follows a move on high and on low volume, relative to a world's sign."""
_OFTEN: Final = (16, 21)
"""How often a pattern has occurred before, at least and less than."""
_ASIDE: Final = (Edge.BREAKOUT, Edge.OVERSHOOT, Edge.SQUEEZE, Edge.NEWS)
"""The patterns that occur in other markets of a world; half of these have an edge, of a strength up to `_ASIDE_MOST`
that is mostly near zero."""
_ASIDE_MOST: Final = 0.6

_STANDING: Final = 5 / 12
"""How often accounts hold a position in worlds other than `drain`, so that they do in half of all worlds."""


class Pattern(NamedTuple):
    """The pattern of an edge in one exam: figures of its family, and what the exam draws beside them.

    A move on high volume has `volume` times the usual, and one on low volume `dried_up` times; `telltale` has the sign
    of what follows each. The drift lasts `lasts` minutes. `leader` is the market that moves in `lead_lag`.
    """

    push: float
    push_minutes: int
    since: int
    calm: int
    calm_factor: float
    unrest: float
    volume: float
    dried_up: float
    telltale: tuple[int, int]
    lasts: int
    leader: int


Patterns = Mapping[Edge, Pattern]


@lru_cache(maxsize=64)
def draw_patterns(secret: str, count: int) -> Patterns:
    """Draw the patterns of an exam in this many markets."""
    rng = np.random.default_rng(seed_of(secret, -1))
    patterns = {}
    for edge, family in FAMILIES.items():
        push, minutes, since, calm, calm_factor, unrest = (float(rng.uniform(*span)) for span in family)
        patterns[edge] = Pattern(
            push, round(minutes), round(since), round(calm), calm_factor, unrest, volume=float(rng.uniform(5, 9)),
            dried_up=float(rng.uniform(0.1, 0.2)), telltale=_TELLTALES[rng.integers(len(_TELLTALES))],
            lasts=STEP * int(rng.integers(*_LASTS)), leader=int(rng.integers(count)),
        )  # fmt: skip
    return patterns


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
    """A world. `market` has the edge, whose drift has the sign `side` (or the side that funding pays; 0: neither);
    `state` is its last second, a full hour.

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


def draw_world(
    secret: str, number: int, edge: Edge | None, kind: Kind, costs: FillCosts, *, is_managed: bool = False
) -> World:
    """Draw a world with three or more markets; a managed one goes on after its state, where its pattern occurs again.

    :raises ValueError: a world without an edge is not a null world
    """
    if edge is None and kind != "null":
        raise ValueError("only a null world is without an edge")
    seed, patterns = seed_of(secret, number), draw_patterns(secret, len(costs.rows))
    drawing = _Drawing(np.random.default_rng(seed), patterns, edge, kind, costs, is_managed=is_managed)
    return drawing.world(number, seed % 2**63)


class _Drawing:
    """The drawing of one world: its past in usual deviations, shaped by the patterns that occur in it."""

    def __init__(
        self,
        rng: np.random.Generator,
        patterns: Patterns,
        edge: Edge | None,
        kind: Kind,
        costs: FillCosts,
        *,
        is_managed: bool,
    ) -> None:
        self._rng, self._patterns, self._edge, self._kind, self._costs = rng, patterns, edge, kind, costs
        self._count = len(costs.rows)
        self._usual = deviations(costs.rows)
        self._strength = float(rng.uniform(*STRENGTHS))
        leader = patterns[edge].leader if edge is Edge.LEAD_LAG else None
        self._market = int(rng.choice([market for market in range(self._count) if market != leader]))
        self._moved = self._market if leader is None else leader
        """The market of the edge, and the one whose move it follows."""
        self._side = int(rng.choice((-1, 1)))
        self._standing = int(rng.choice((-1, 1))) * (rng.random() < _STANDING)
        self._stands_in = self._market if rng.random() < 0.5 else int(rng.integers(self._count))
        self._is_managed, self._minutes = is_managed, MINUTES if is_managed else HORIZON
        shown = (self._count, RECENT + AFTER + (MINUTES if is_managed else 0))
        self._scales, self._volumes, self._pushes = np.ones(shown), np.ones(shown), np.zeros(shown)
        future = (self._count, self._minutes)
        self._unrest, self._drift = np.ones(future), np.zeros(future)
        self._closing = np.repeat(costs.of_fill[:, None], self._minutes, axis=1)
        apart = STEPS // RESPONSES
        jitter = rng.integers(-1, 2, RESPONSES - 1).tolist() if is_managed else []
        self._begins = [0, *(STEP_MINUTES * (apart * (n + 1) + late) for n, late in enumerate(jitter))]
        """The minutes after the state when something may follow a pattern."""

        self._funding = np.array([float(row.rules.funding_rate) for row in costs.rows])

    def world(self, number: int, seed: int) -> World:
        edge, market = self._edge, self._market
        if edge is Edge.CARRY:
            self._carry()
        elif edge is not None:
            self._plant(edge)
        if edge is not None:
            self._aside()
        recent, old, expected = self._bars()
        law = Law(
            self._drift, self._usual[:, None] * np.sqrt(expected) * self._unrest, self._funding, self._closing, seed,
            self._usual,
        )  # fmt: skip
        # No two decide at the same time, since decisions are named by it.
        apart, states_per_day = (12, 2) if self._is_managed else (4, _STATES_PER_DAY)
        day, place = divmod(number, states_per_day)
        state = ((_FIRST_DAY + day) * 24 + 4 + apart * place) * 3600
        return World(
            number=number, kind=self._kind, edge=edge, symbols=tuple(row.rules.symbol for row in self._costs.rows),
            market=market, side=0 if self._kind == "null" else self._side, strength=self._strength, state=state,
            recent=recent, old=old, funding=tuple(self._funding.tolist()), standing=self._standing,
            stands_in=self._stands_in, law=law,
        )  # fmt: skip

    def _gross(self, market: int, strength: float) -> float:
        """Return the drift that earns this strength after the costs of a fill and of closing."""
        return strength * float(self._usual[market]) * math.sqrt(HORIZON) + 2 * float(self._costs.of_fill[market])

    def _carry(self) -> None:
        """Let one side of a market be paid; in a null world by less than costs, in a reversed one for its loss."""
        market, side = self._market, self._side
        gross = self._gross(market, self._strength * len(self._begins))
        paid = 0.3 * float(self._costs.of_fill[market]) if self._kind == "null" else gross
        self._funding[market] = -side * paid / (self._minutes // _HOUR)
        if self._kind == "reversed":
            self._side = -side
            self._drift[market] = -2 * side * gross / self._minutes

    def _plant(self, edge: Edge) -> None:
        """Let the pattern of the edge occur, and let the law follow in a planted world.

        In a null world it occurs for the first time, or nothing regular has followed it, or this time its telltale is
        the one that nothing follows.
        """
        rng, pattern, market = self._rng, self._patterns[edge], self._market
        marks, often, is_regular = [0, 1], int(rng.integers(*_OFTEN)), self._kind != "null"
        if self._kind != "null":
            marks = [mark for mark in marks if pattern.telltale[mark]]
        elif rng.random() < 1 / 3:
            often = 0
        elif 0 in pattern.telltale and rng.random() < 0.5:
            is_regular, marks = True, [pattern.telltale.index(0)]
        gross = self._gross(market, self._strength)
        self._side, direction = self._occur(pattern, (self._moved, market), gross, often, marks, is_regular)
        if edge is Edge.DRAIN:
            self._standing, self._stands_in = -direction, market
            if self._kind != "null" and self._side != self._standing and not self._is_managed:
                reached = np.minimum(np.arange(1.0, HORIZON + 1) / pattern.lasts, 1.0)
                self._closing[market] += 2 * float(self._costs.of_fill[market]) * reached

    def _aside(self) -> None:
        """Let patterns occur in other markets: nothing follows most of them, and mostly little the rest."""
        rng = self._rng
        for market in sorted({*range(self._count)} - {self._market, self._moved}):
            if rng.random() < 0.5:
                pattern = self._patterns[_ASIDE[rng.integers(len(_ASIDE))]]
                strength = _ASIDE_MOST * rng.random() ** 3 * (rng.random() < 0.5 and self._kind != "null")
                drift = strength * float(self._usual[market]) * math.sqrt(HORIZON)
                self._occur(pattern, (market, market), drift, int(rng.integers(*_OFTEN)), (0, 1), True)

    def _occur(
        self, pattern: Pattern, markets: tuple[int, int], drift: float, often: int, marks: Sequence[int], regular: bool
    ) -> tuple[int, int]:
        """Let a pattern occur before each of the times when the law may respond, and `often` before the state.

        `markets` are the one that moves and the one that responds, `drift` is the size of a response, and `marks` are
        the volumes on which the law's may occur (0: high, 1: low). Return the sign of the law's first response, and
        the direction of the move before it.
        """
        rng, sign, (_, responds) = self._rng, int(self._rng.choice((-1, 1))), markets
        firsts, lasts, law = (
            list[tuple[int, int]](),
            pattern.lasts,
            {"null": 0, "planted": 1, "reversed": -1}[self._kind],
        )
        for begins in self._begins:
            direction, mark = self._show(pattern, markets, RECENT + begins, int(rng.choice(marks)))
            side = law * direction * sign * pattern.telltale[mark]
            self._drift[responds, begins : begins + lasts] = side * drift / lasts
            self._unrest[responds, begins : begins + lasts] = pattern.unrest
            firsts.append((side, direction))
        begins, length = RECENT, pattern.push_minutes + pattern.since + pattern.calm
        for mark in rng.permutation(np.arange(often) % 2).tolist():
            begins -= length + lasts + int(rng.integers(2 * OLD_STEP))
            begins -= begins % OLD_STEP  # responses begin with a candle of 15 minutes, as the state does
            if begins < length:
                break
            direction, _ = self._show(pattern, markets, begins, mark)
            side = direction * sign * pattern.telltale[mark] if regular else int(rng.choice((-1, 1)))
            self._pushes[responds, begins : begins + lasts] += side * drift / lasts / float(self._usual[responds])
        return firsts[0]

    def _show(self, pattern: Pattern, markets: tuple[int, int], begins: int, mark: int) -> tuple[int, int]:
        """Let a pattern occur before the minute in which the response to it begins; return its direction and mark."""
        (moved, responds), last, direction = markets, begins - pattern.since, int(self._rng.choice((-1, 1)))
        first = last - pattern.push_minutes
        self._scales[moved, first - pattern.calm : first] = pattern.calm_factor
        self._scales[responds, begins : begins + pattern.lasts] *= pattern.unrest
        steps = np.arange(1.0, pattern.push_minutes + 1)
        size = direction * pattern.push * math.sqrt(_HOUR) * self._rng.uniform(0.85, 1.2)
        self._pushes[moved, first:last] += size * steps / steps.sum()
        if begins > RECENT:  # so that a move in either direction has no expectation
            self._pushes[moved, last - 1] -= size**2 / 2 * self._usual[moved]
        self._volumes[moved, first : max(begins, last + 1)] = (pattern.volume, pattern.dried_up)[mark]
        return direction, mark

    def _variances(self) -> tuple[Floats, Floats]:
        """Return the variance of each step relative to the usual, and the expected one of each minute from the state
        on."""
        rng, widths = self._rng, np.concatenate([np.full(OLD, OLD_STEP), np.ones(self._scales.shape[1])])
        variances, expected = np.ones(len(widths)), np.ones(self._minutes)
        for often in _SWITCHES:
            draws = np.cumsum(rng.random(len(widths)) < 1 - (1 - often) ** widths)
            factors = np.where(rng.random(len(widths) + 1) < 0.5, _FACTOR, 2 - _FACTOR)[draws]
            variances *= factors
            expected *= 1 + (factors[OLD + RECENT - 1] - 1) * (1 - often) ** np.arange(1, self._minutes + 1)
        variances += (rng.random(len(widths)) < _JUMPS * widths) * _JUMP**2 / widths
        return variances / (1 + _JUMPS * _JUMP**2), expected

    def _bars(self) -> tuple[tuple[Bars, ...], tuple[Bars, ...], Floats]:
        """Return the minutes around the state, the candles of 15 minutes before those, and the expected variances."""
        rng, steps, now = self._rng, OLD + self._scales.shape[1], OLD + RECENT
        variances, expected = self._variances()
        common, recent, old = rng.standard_normal(steps), [], []
        for market, row in enumerate(self._costs.rows):
            scales = np.concatenate([np.full(OLD, math.sqrt(OLD_STEP)), self._scales[market]]) * np.sqrt(variances)
            sizes = scales * self._usual[market]
            sizes[now + (MINUTES if self._is_managed else 0) :] = 0
            noise = _COMMON * common + math.sqrt(1 - _COMMON**2) * rng.standard_normal(steps)
            moves = noise * sizes
            moves[OLD:] += self._pushes[market] * self._usual[market]
            if self._is_managed:
                moves[now : now + MINUTES] += self._drift[market] - sizes[now : now + MINUTES] ** 2 / 2
            ends = math.log(row.character.level) + 0.2 * rng.standard_normal() + np.cumsum(moves)
            begins = np.concatenate([ends[:1] - moves[:1], ends[:-1]])
            # The extremes of a Brownian bridge from one close to the next.
            spans = np.sqrt(moves**2 - 2 * sizes**2 * np.log(rng.uniform(1e-12, 1.0, (2, steps))))
            highs, lows = (begins + ends + spans[0]) / 2, (begins + ends - spans[1]) / 2
            usual = row.character.minute_volume * np.exp(-ends) * np.sqrt(variances)
            volumes = usual * (0.5 + 0.5 * np.abs(noise)) * (0.3 + 2 * rng.random(steps) ** 2)
            volumes[:OLD] *= OLD_STEP
            volumes[OLD:] *= self._volumes[market]
            bars = Bars(np.exp(begins), np.exp(highs), np.exp(lows), np.exp(ends), volumes)
            old.append(Bars(*(column[:OLD] for column in bars)))
            recent.append(Bars(*(column[OLD:] for column in bars)))
        return tuple(recent), tuple(old), expected


def standing_weight(costs: FillCosts, market: int) -> float:
    """Return the notional of a standing position as a fraction of equity: half the risk budget in a usual market."""
    return RISK_BUDGET / 2 / float(deviations(costs.rows)[market] * math.sqrt(HORIZON))
