"""Entrants of known skill: the oracle and parts of it, noise, nothing, and traders who follow every trend."""

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from random import Random

import numpy as np

from trader.agents.domain.mask import Mask
from trader.agents.domain.models import Model, ModelConfiguration
from trader.agents.domain.strategy import Strategy
from trader.agents.domain.tools import ClosePosition, CreatePosition, Decision
from trader.agents.domain.view import View
from trader.backtest.sources import RecordingStrategySource
from trader.core.clock import moment_of
from trader.core.variant_id import VariantId
from trader.exam.domain.law import RISK_BUDGET, PlannedPosition
from trader.exam.domain.managed import MINUTES, STEP_MINUTES
from trader.exam.domain.worlds import Edge, World
from trader.exam.sitting import EVERY, Examinee
from trader.exchange.domain.orders import Side

_FAR = 0.3
"""The log distance of a stop that is never reached."""


def opening(view: View, symbol: str, held: PlannedPosition, *, stop: float = _FAR) -> CreatePosition:
    """Return the decision that opens a position of this side, size and time exit."""
    price = float(view.markets[symbol].price)
    return CreatePosition(
        symbol=symbol,
        side=Side.LONG if held.side > 0 else Side.SHORT,
        quantity=held.weight * float(view.account.equity) / price,
        leverage=5,
        stop=price * math.exp(-held.side * stop),
        invalidation="the script is wrong",
        time_exit=view.at + timedelta(minutes=held.minutes),
        confidence=60,
    )


class Oracle(Strategy):
    """Decides like the oracle of a world, at a part of its size, if it knows the edge."""

    def __init__(self, world: World, size: float = 1.0, knows: Sequence[Edge] = tuple(Edge)) -> None:
        self.name = f"oracle-{size}-{len(knows)}"
        self._world, self._size, self._knows = world, size, knows

    def decide(self, view: View) -> list[Decision]:
        world = self._world
        spreads = [float(each.spread / each.price) / 2 for each in view.markets.values()]
        filling = np.array(spreads) + float(view.account.taker_fee_rate)
        if world.edge not in self._knows:
            return []
        held = [
            PlannedPosition(
                world.symbols.index(each.symbol),
                each.side.direction,
                float(each.quantity) * float(view.markets[each.symbol].price) / float(view.account.equity),
            )
            for each in view.positions
        ]
        after = world.law.oracle(filling, held).held
        closing = [world.symbols[each.market] for each in held if each not in after]
        return [
            *(ClosePosition(symbol=symbol, fraction=min(1.0, self._size)) for symbol in closing),
            *(
                opening(view, world.symbols[each.market], each._replace(weight=each.weight * self._size))
                for each in after
                if each not in held
            ),
        ]


class Manager(Strategy):
    """Knows when and where something follows in a managed world, and holds a position as long as it does."""

    def __init__(self, world: World, size: float = 1.0, name: str = "manager") -> None:
        self.name, self._world, self._size = name, world, size

    def decide(self, view: View) -> list[Decision]:
        world, law = self._world, self._world.law
        begin = STEP_MINUTES * round((view.at - moment_of(world.state)) / timedelta(minutes=STEP_MINUTES))
        drift = law.drift[world.market]
        minutes = 2 * MINUTES
        if world.edge is not Edge.CARRY:
            minutes = int(np.argmin(np.abs(drift[begin:]) > 0))
            if not minutes or (begin and drift[begin - 1]):
                return []
        elif begin:
            return []
        side = world.side if world.edge is Edge.CARRY else int(np.sign(drift[begin]))
        weight = self._size * RISK_BUDGET / float(law.horizon_deviation[world.market])
        symbol = world.symbols[world.market]
        return [opening(view, symbol, PlannedPosition(world.market, side, weight, minutes=minutes))]


class TrendTrader(Strategy):
    """Trades what moved most in the last hour, along its move (1) or against it (-1)."""

    intervals = ("15m", "1h")

    def __init__(self, sense: int = 1, size: float = 1.0) -> None:
        self.name = f"trend{sense:+}-{size}"
        self._sense, self._size = sense, size

    def decide(self, view: View) -> list[Decision]:
        candles = {symbol: market.candles["1h"][-1] for symbol, market in view.markets.items()}
        moves = {symbol: math.log(candle.close / candle.open) for symbol, candle in candles.items()}
        symbol = max(moves, key=lambda name: abs(moves[name]))
        side = self._sense * (1 if moves[symbol] > 0 else -1)
        return [opening(view, symbol, PlannedPosition(0, side, self._size * RISK_BUDGET / 0.012))]


class NoiseTrader(Strategy):
    """Trades any market, in any direction."""

    def __init__(self, seed: int) -> None:
        self.name = "noise"
        self._rng = Random(seed)

    def decide(self, view: View) -> list[Decision]:
        symbol, side = self._rng.choice(sorted(view.markets)), self._rng.choice((1, -1))
        return [
            opening(view, symbol, PlannedPosition(0, side, RISK_BUDGET / 0.012), stop=self._rng.uniform(0.004, 0.02))
        ]


class Nothing(Strategy):
    """Does nothing."""

    name = "nothing"

    def decide(self, view: View) -> list[Decision]:
        return []


class Cheat(Strategy):
    """Knows what becomes of every market of a recording, whose closes it has by minute, and takes the largest move.

    It finds its place by `clue`: "memory" knows names, dates and prices; "shape" knows the last returns.
    """

    intervals = ("15m",)

    def __init__(self, clue: str, closes: Mapping[str, Mapping[int, float]], minutes: int) -> None:
        self.name = f"cheat-{clue}"
        self._clue, self._closes, self._minutes = clue, closes, minutes
        self._places = {
            self._key(symbol, minute, [own[minute - 1 - 15 * back] for back in (4, 3, 2, 1, 0)]): (symbol, minute)
            for symbol, own in closes.items()
            for minute in own
            if minute % 60 == 0 and minute - 61 in own
        }

    def _key(self, symbol: str, minute: int, closes: Sequence[float]) -> object:
        if self._clue == "memory":
            return symbol, minute, round(closes[-1], 1)
        return tuple(round(math.log(later / earlier), 9) for earlier, later in pairwise(closes))

    def decide(self, view: View) -> list[Decision]:
        minute, moves = int(view.at.timestamp()) // 60, {}
        for shown, market in view.markets.items():
            closes = [candle.close for candle in market.candles["15m"][-5:]]
            symbol, found = self._places.get(self._key(shown, minute, closes), (shown, 0))
            own = self._closes.get(symbol, {})
            if found + self._minutes in own:
                moves[shown] = math.log(own[found + self._minutes] / own[found - 1])
        if not moves:
            return []
        best = max(moves, key=lambda name: abs(moves[name]))
        return [opening(view, best, PlannedPosition(0, 1 if moves[best] > 0 else -1, 1.0))]


def entrant(strategy: Strategy, mask: Mask | None = None, every: str = EVERY) -> Examinee:
    """Return a strategy as an entrant, behind a mask if there is one."""
    model = Model(
        id=strategy.name if mask is None else f"{strategy.name}:masked",
        name=strategy.name,
        variant=VariantId.APEX,
        provider="strategy",
        router_model_name="scripted",
        created_at=moment_of(0),
        configuration=ModelConfiguration(every=every),
    )
    return Examinee(model, lambda model, ends_at: RecordingStrategySource(model, strategy, mask))
