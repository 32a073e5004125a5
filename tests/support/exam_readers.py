"""Entrants that know the page and the code of the exam: one infers from the past of a world, one does not."""

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from support.exam_entrants import opening

from trader.agents.domain.strategy import Strategy
from trader.agents.domain.tools import ClosePosition, Decision
from trader.agents.domain.view import Shown, View
from trader.core.statistics import Floats
from trader.exam.domain.law import HORIZON, RISK_BUDGET, PlannedPosition
from trader.exam.domain.managed import STEP_MINUTES
from trader.exam.domain.worlds import deviations
from trader.market.domain.markets import SIMULATED_MARKETS, Interval

MINUTES: Final = np.arange(3, 32)
"""How long an occurrence may be, from the begin of its move until something follows."""
BEFORE: Final = 20
"""The minutes before an occurrence with which its volume is compared."""
APART: Final = 20
QUARTER: Final = 15
"""Responses begin with a candle of 15 minutes."""
LASTS: Final = (20, 30, 40)
AGAIN: Final = (3, 4, 5, 7, 8, 9)
"""The steps of a managed world before which the pattern may occur again."""
LASTS_MAX: Final = 45
"""The minutes after which it closes what it has opened on a pattern."""
CERTAIN: Final = 2.5
"""The t value from which an inference counts."""
FOREIGN: Final = 0.8
"""How much larger it has to be for the response of another market."""


class Occurrence(NamedTuple):
    """What has just happened in a market: the direction of its move, the change of the log of its volume, and the ends
    and directions of earlier ones."""

    direction: float
    change: float
    ends: NDArray[np.int64]
    directions: Floats


class Reading(Strategy):
    """Takes funding that pays, and follows a last move on high volume and fades one on low volume, as no world has to
    agree with."""

    name = "reading"
    intervals: tuple[Interval, ...] = ("1m",)
    history = 1000
    _until: datetime | None = None
    """When the position that it has opened closes."""

    @property
    def shown(self) -> Shown:
        return Shown(self.intervals, self.history)

    def decide(self, view: View) -> Iterator[Decision]:
        if self._until is not None and view.at < self._until:
            return
        rates = {symbol: float(market.funding_rate) for symbol, market in view.markets.items()}
        paying = max(rates, key=lambda symbol: abs(rates[symbol]))
        if HORIZON / 60 * abs(rates[paying]) > 3 * float(view.account.taker_fee_rate):
            yield from self._held(view, paying, -1 if rates[paying] > 0 else 1, 2 * HORIZON)
        elif (found := self._found(view)) is not None:
            yield from self._held(view, *found, LASTS_MAX)

    def _found(self, view: View) -> tuple[str, int] | None:
        """Return the market that moves, and the side of what follows; None: nothing is seen."""
        best: tuple[float, str, int] = (CERTAIN, "", 0)
        for symbol, market in view.markets.items():
            volumes, closes = np.log(market.volumes("1m")), np.log(market.closes("1m"))
            change = volumes[-10:].mean() - volumes[-BEFORE:-10].mean()
            side = 1 if (closes[-1] > closes[-10]) == (change > 0) else -1
            best = max(best, (abs(change) * math.sqrt(10), symbol, side))
        return best[1:] if best[2] else None

    def _held(self, view: View, symbol: str, side: int, minutes: int) -> Iterator[Decision]:
        held = view.position(symbol)
        if held is not None and held.side.direction != side:
            yield ClosePosition(symbol=symbol)  # the guard does not reverse it at once
            return
        self._until = view.at + timedelta(minutes=minutes)
        weight = 1.02 * RISK_BUDGET / usual(symbol) / math.sqrt(HORIZON)
        yield opening(view, symbol, PlannedPosition(0, side, weight, minutes=minutes))


class Inferring(Reading):
    """Takes funding that pays, and infers from earlier occurrences of what has just happened what follows it."""

    name = "inferring"

    def __init__(self, *, reads_telltale: bool = True) -> None:
        self.name = "inferring" if reads_telltale else "inferring-blind"
        self._reads_telltale = reads_telltale
        self._begun: datetime | None = None
        self._pattern: tuple[str, str, float, int] = ("", "", 0.0, 0)
        """What has occurred before its first decision: the market that moved, the one that responds, the change of
        volume, and how long the response lasts."""

    def _found(self, view: View) -> tuple[str, int] | None:
        prices = {symbol: np.log(market.closes("1m")) for symbol, market in view.markets.items()}
        self._begun = self._begun or view.at
        step = round((view.at - self._begun) / timedelta(minutes=STEP_MINUTES))
        known = self._pattern if step else None
        if step and step not in AGAIN:
            return None
        best, pattern = (CERTAIN, "", 0), self._pattern
        for moved, market in view.markets.items():
            for seen in occurrences(prices[moved], np.log(market.volumes("1m")), reads_telltale=self._reads_telltale):
                for symbol, levels in prices.items():
                    if known and (known[:2] != (moved, symbol) or seen.change < 0.6 * known[2]):
                        continue
                    for lasts in LASTS:
                        begins = seen.ends - 1
                        responses = seen.directions * (levels[begins + lasts] - levels[begins])
                        responses = np.clip(responses / usual(symbol) / math.sqrt(lasts), -4, 4)
                        mean = responses.mean()  # chance agrees as well: no spread is taken to be small
                        certain = mean / max(responses.std(ddof=1), 0.8, abs(mean) / 2) * math.sqrt(len(responses))
                        side = int(seen.direction * np.sign(certain))
                        inferred = (abs(certain) - FOREIGN * (symbol != moved), symbol, side)
                        best, pattern = max((best, pattern), (inferred, (moved, symbol, seen.change, lasts)))
        if known is None:  # a pattern that recurs after the state has occurred before it
            self._pattern = pattern
        return best[1:] if best[2] else None


def usual(symbol: str) -> float:
    """Return the usual deviation of a minute."""
    return float(deviations([SIMULATED_MARKETS[symbol]])[0])


def occurrences(levels: Floats, volumes: Floats, *, reads_telltale: bool) -> Iterator[Occurrence]:
    """Yield what may just have happened, by how unusual the last volumes are, with its earlier occurrences.

    `volumes` are logs. An occurrence is alike if its volume differs as much from the one before, and its move is large.
    """
    sums, last = np.concatenate([[0.0], np.cumsum(volumes)]), len(levels)

    def unusual(ends: NDArray[np.int64], minutes: NDArray[np.int64] | int) -> Floats:
        begins = ends - minutes
        return np.asarray((sums[ends] - sums[begins]) / minutes - (sums[begins] - sums[begins - BEFORE]) / BEFORE)

    now = unusual(np.full(len(MINUTES), last), MINUTES)
    evidence = np.abs(now) * np.sqrt(MINUTES / (MINUTES + 30))
    for _ in range(3):
        place = int(np.argmax(evidence))
        minutes, change = int(MINUTES[place]), now[place]
        reach = max(2, minutes // 5)
        evidence[max(0, place - reach) : place + reach + 1] = 0
        ends = last - np.arange(QUARTER * (max(LASTS) // QUARTER + 1), last - minutes - BEFORE, QUARTER)
        moves, move = levels[ends - 1] - levels[ends - 1 - minutes], levels[-1] - levels[-1 - minutes]
        likeness = unusual(ends, minutes) / change
        likeness = likeness if reads_telltale else np.abs(likeness)
        likeness[(likeness < 0.5) | (likeness > 2) | (np.abs(moves) < 0.5 * abs(move))] = 0
        alike = []
        while likeness.any():
            alike.append(best := int(np.argmax(likeness)))
            likeness[np.abs(ends - ends[best]) < minutes + APART] = 0
        if len(alike) >= 4:
            yield Occurrence(float(np.sign(move)), abs(float(change)), ends[alike], np.sign(moves[alike]))
