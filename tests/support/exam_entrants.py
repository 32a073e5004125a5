"""Entrants of known skill: the oracle and parts of it, noise, nothing, and traders who follow every trend."""

import math
from collections.abc import Sequence
from datetime import timedelta
from random import Random

import numpy as np

from trader.agents.domain.models import Model, ModelConfiguration
from trader.agents.domain.strategy import Strategy
from trader.agents.domain.tools import ClosePosition, CreatePosition, Decision
from trader.agents.domain.view import View
from trader.backtest.sources import RecordingStrategySource
from trader.core.clock import moment_of
from trader.core.variant_id import VariantId
from trader.exam.domain.law import RISK_BUDGET, PlannedPosition
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
        if view.positions:
            is_better = world.kind == "planted"
            return [ClosePosition(symbol=view.positions[0].symbol, fraction=self._size)] if is_better else []
        return [
            opening(view, world.symbols[each.market], each._replace(weight=each.weight * self._size))
            for each in world.law.oracle(filling).held
        ]


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


def entrant(strategy: Strategy) -> Examinee:
    """Return a strategy as an entrant."""
    model = Model(
        id=strategy.name,
        name=strategy.name,
        variant=VariantId.APEX,
        provider="strategy",
        router_model_name="scripted",
        created_at=moment_of(0),
        configuration=ModelConfiguration(every=EVERY),
    )
    return Examinee(model, lambda model, ends_at: RecordingStrategySource(model, strategy))
