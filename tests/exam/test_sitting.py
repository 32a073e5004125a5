"""Scripted entrants decide through the view, guard and exchange, and get the scores that their skill is known to be
worth."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from support.exam_entrants import NoiseTrader, Nothing, Oracle, TrendTrader, entrant, opening
from support.exam_readers import Inferring, Reading
from support.run_profile import is_nightly

from trader.agents.domain.strategy import Strategy
from trader.agents.domain.tools import Decision
from trader.agents.domain.view import View
from trader.backtest.spec import settings_of
from trader.exam.domain.law import RISK_BUDGET, PlannedPosition
from trader.exam.domain.scores import burnt, share_of_oracle
from trader.exam.domain.worlds import Edge, Kind, World, draw_world
from trader.exam.sitting import Sitting, WorldRoom
from trader.market.domain.markets import SIMULATED_MARKETS

TRENDS = (Edge.BREAKOUT, Edge.OVERSHOOT, Edge.SQUEEZE, Edge.NEWS)
"""The edges whose pattern is a move of the market that has the edge."""


@cache
def room() -> WorldRoom:
    settings = settings_of({"SIM_SEED": "0", "MARKETS": "BTC,ETH,SOL", "REPLAY_THINKING": "off"})
    rows = {symbol: SIMULATED_MARKETS[symbol] for symbol in ("BTC", "ETH", "SOL")}
    return WorldRoom(settings, rows, ["1m", "15m", "1h"])


def sat(
    make: Callable[[World], Sequence[Strategy]], edges: Sequence[Edge | None], kind: Kind, count: int
) -> dict[str, list[Sitting]]:
    """Return the decisions of the strategies that `make` makes for each world, by entrant."""

    async def all_states() -> list[Sitting]:
        sittings: list[Sitting] = []
        for number in range(count):
            world = draw_world("sitting", number, edges[number % len(edges)], kind, room().costs)
            sittings += await room().sit(world, [entrant(each) for each in make(world)])
        return sittings

    by_entrant: dict[str, list[Sitting]] = {}
    for sitting in asyncio.run(all_states()):
        by_entrant.setdefault(sitting.entrant, []).append(sitting)
    return by_entrant


@cache
def planted() -> dict[str, list[Sitting]]:
    def make(world: World) -> list[Strategy]:
        parts = [Oracle(world, 0.5), Oracle(world, 2.0), Oracle(world, knows=(Edge.CARRY,))]
        return [Oracle(world), *parts, Nothing()]

    return sat(make, tuple(Edge), "planted", 28 if is_nightly() else 14)


def shares(sittings: Sequence[Sitting]) -> dict[str, float]:
    by_edge = {edge: share_of_oracle([each for each in sittings if each.edge is edge]) for edge in Edge}
    return {edge: share.share for edge, share in by_edge.items() if share is not None}


def test_oracle_gets_all_of_the_oracle() -> None:
    assert shares(planted()["oracle-1.0-7"]) == {edge: pytest.approx(1, abs=0.03) for edge in Edge}
    assert all(each.risk <= 1.02 * RISK_BUDGET for each in planted()["oracle-1.0-7"])


def test_half_the_oracle_gets_half() -> None:
    assert shares(planted()["oracle-0.5-7"]) == {edge: pytest.approx(0.5, abs=0.04) for edge in Edge}


def test_twice_the_oracle_gets_no_more_than_the_oracle() -> None:
    twice = shares(planted()["oracle-2.0-7"])
    assert all(share <= 1.05 for share in twice.values())


def test_oracle_of_one_edge_gets_that_edge_and_burns_nothing() -> None:
    assert shares(planted()["oracle-1.0-1"]) == {
        edge: pytest.approx(1, abs=0.05) if edge is Edge.CARRY else 0 for edge in Edge
    }


def test_nothing_gets_nothing() -> None:
    assert {each.score for each in planted()["nothing"]} == {0}


def test_who_infers_earns_most_of_the_oracle_and_who_only_knows_page_and_code_does_not() -> None:
    def make(world: World) -> list[Strategy]:
        return [Inferring(), Reading()]

    states = 56 if is_nightly() else 14
    known = {name: share_of_oracle(decided) for name, decided in sat(make, tuple(Edge), "planted", states).items()}
    inferring, reading = (each.share for each in known.values() if each is not None)
    assert inferring > 0.65
    assert reading < 0.4


def test_trend_traders_earn_nothing_in_null_worlds_or_reversed_ones() -> None:
    def make(world: World) -> list[Strategy]:
        return [TrendTrader(1), TrendTrader(-1), TrendTrader(1, 4.0), NoiseTrader(world.number)]

    for sittings in sat(make, (None, *Edge), "null", 8).values():
        cost = burnt(sittings)
        assert cost is not None
        assert cost.mean > 4
        assert all(each.value < 1e-4 for each in sittings)
    turned = sat(make, (Edge.BREAKOUT, Edge.SQUEEZE, Edge.LEAD_LAG), "reversed", 6)
    assert sum(each.score for name in ("trend+1-1.0", "trend-1-1.0") for each in turned[name]) < 0


def test_following_every_pattern_pays_on_balance_nothing() -> None:
    sittings = sat(lambda world: [TrendTrader(1), TrendTrader(-1)], TRENDS, "planted", 16)
    for decided in sittings.values():
        share = share_of_oracle(decided)
        assert share is not None
        assert share.share < 0.3


def test_every_order_of_a_decision_is_executed() -> None:
    class Splitter(Strategy):
        name = "splitter"

        def decide(self, view: View) -> list[Decision]:
            parts = [PlannedPosition(place, 1, 0.02) for place in range(3)]
            return [*(opening(view, symbol, part) for symbol, part in zip(view.markets, parts, strict=True))] * 5

    for sittings in sat(lambda world: [Splitter()], (None, Edge.DRAIN), "null", 2).values():
        assert all(not each.answer.refused for each in sittings)
        assert all(each.risk > 15 * 0.02 * 0.006 for each in sittings)
