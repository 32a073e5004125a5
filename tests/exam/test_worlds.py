"""Worlds hold one edge of the stated strength or none, and nothing in them tells which before the report."""

import math
from importlib.resources import files
from inspect import getsource
from itertools import product

import numpy as np
import pytest

from trader.agents.domain.rules import apex, contrarian, sovereign, trendsurfer
from trader.exam.domain.law import HORIZON, LOSS_MAX, RISK_BUDGET, SIZE_MAX, PlannedPosition, credited
from trader.exam.domain.worlds import (
    AFTER,
    HELD_FOR,
    OLD,
    RECENT,
    STRENGTHS,
    USUAL_VALUE,
    Edge,
    FillCosts,
    Kind,
    World,
    draw_patterns,
    draw_world,
    standing_weight,
)
from trader.market.domain.markets import SIMULATED_MARKETS

COSTS = FillCosts([SIMULATED_MARKETS[symbol] for symbol in ("BTC", "ETH", "SOL")], [0.0005] * 3)


def worlds(edge: Edge | None, kind: Kind, count: int, secret: str = "s") -> list[World]:
    return [draw_world(secret, number, edge, kind, COSTS) for number in range(count)]


def standing(world: World) -> tuple[PlannedPosition, ...]:
    weight = standing_weight(COSTS, world.stands_in)
    return (PlannedPosition(world.stands_in, world.standing, weight),) if world.standing else ()


@pytest.mark.parametrize("edge", Edge)
def test_oracle_earns_the_stated_strength_after_costs(edge: Edge) -> None:
    for world in worlds(edge, "planted", 12):
        held, law = standing(world) if edge is Edge.DRAIN else (), world.law
        choice = law.oracle(COSTS.of_fill, held)
        assert STRENGTHS[0] <= world.strength <= STRENGTHS[1]
        if edge is Edge.DRAIN and world.side == -world.standing:
            assert held[0] not in choice.held
            assert choice.value > world.strength * RISK_BUDGET / 2
        else:
            assert choice.value == pytest.approx(world.strength * RISK_BUDGET, rel=0.04)
            assert (choice.held[-1].market, choice.held[-1].side) == (world.market, world.side)


@pytest.mark.parametrize("edge", [None, *Edge])
def test_null_world_pays_nobody(edge: Edge | None) -> None:
    for world in worlds(edge, "null", 12):
        held = standing(world)
        assert not world.law.drift.any()
        assert world.side == 0
        assert world.law.oracle(COSTS.of_fill, held).value == pytest.approx(
            0, abs=1.5e-4
        )  # a long that closes saves its funding


@pytest.mark.parametrize("edge", [edge for edge in Edge if edge not in (Edge.CARRY, Edge.DRAIN)])
def test_reversed_world_has_the_same_past_and_the_opposite_drift(edge: Edge) -> None:
    planted, turned = (worlds(edge, kind, 1)[0] for kind in ("planted", "reversed"))
    assert np.array_equal(planted.recent, turned.recent)
    assert np.array_equal(planted.law.drift[planted.market], -turned.law.drift[turned.market])


@pytest.mark.parametrize("edge", [edge for edge in Edge if edge is not Edge.DRAIN])
def test_no_pair_of_positions_is_credited_more_than_the_oracle(edge: Edge) -> None:
    for world in worlds(edge, "planted", 4):
        law, best = world.law, world.law.oracle(COSTS.of_fill)
        (position,) = best.held
        for other, side, part in product({0, 1, 2} - {position.market}, (1, -1), (0.3, 1.0, 2.0)):
            weight = part * 0.01 / float(law.horizon_deviation[other])
            held = [position._replace(weight=(1 + part) * position.weight), PlannedPosition(other, side, weight)]
            costs = sum(each.weight * float(COSTS.of_fill[each.market]) for each in held)
            assert credited(law.value(held) - costs, law.risk(held), USUAL_VALUE) <= best.value


@pytest.mark.parametrize("edge", Edge)
def test_up_and_down_are_equally_likely(edge: Edge) -> None:
    ups = sum(world.side > 0 for world in worlds(edge, "planted", 24))
    assert 4 <= ups <= 20


@pytest.mark.parametrize("edge", Edge)
def test_other_edges_of_a_world_are_mostly_near_zero(edge: Edge) -> None:
    others: list[float] = []
    for world in worlds(edge, "planted", 24):
        strengths = np.abs(world.law.drift).sum(axis=1) / world.law.horizon_deviation
        others += np.delete(strengths, world.market).tolist()
        usual = [float(row.rules.funding_rate) for row in COSTS.rows]
        paying = {place for place, rate in enumerate(world.funding) if rate != usual[place]}
        assert paying == ({world.market} if edge is Edge.CARRY else set())
    assert np.median(others) == 0
    assert 0.1 < max(others) <= 0.6


def test_no_position_within_the_limit_loses_more_than_the_largest_loss() -> None:
    kinds: tuple[Kind, ...] = ("planted", "reversed")
    for kind, edge, number in product(kinds, Edge, range(4)):
        world = draw_world("s", number, edge, kind, COSTS)
        law, stood = world.law, standing(world)
        for market, side, stop in product(range(3), (1, -1), (math.inf, 0.005)):
            weight = SIZE_MAX * RISK_BUDGET / float(law.horizon_deviation[market])
            held = PlannedPosition(market, side, weight, -stop, stop)
            spent = weight * float(COSTS.of_fill[market])
            assert law.value((*stood, held)) - law.value(stood) - spent > -LOSS_MAX * USUAL_VALUE


def test_a_position_stands_in_half_of_all_worlds_and_to_close_it_pays_as_often_as_it_costs() -> None:
    drawn = [world for edge in Edge for world in worlds(edge, "planted", 60)]
    assert 0.45 < sum(world.standing != 0 for world in drawn) / len(drawn) < 0.55
    closed, best = 0.0, 0.0
    for world in drawn:
        held, law = standing(world), world.law
        closes = np.log(world.recent[world.stands_in].close[RECENT - HELD_FOR : RECENT])
        assert np.ptp(closes) < 12 * law.horizon_deviation[world.stands_in], "none is stopped out before its state"
        cost = sum(each.weight * float(COSTS.of_fill[each.market]) for each in held)
        closed += credited(-cost - law.value(held), law.risk((), held), USUAL_VALUE)
        best += law.oracle(COSTS.of_fill, held).value
    assert -0.25 < closed / best < 0.05


def test_candles_are_candles() -> None:
    for world in worlds(Edge.NEWS, "planted", 3):
        for bars, count in ((world.recent[0], RECENT + AFTER), (world.old[0], OLD)):
            assert len(bars.close) == count
            assert np.all(bars.low <= np.minimum(bars.open, bars.close))
            assert np.all(bars.high >= np.maximum(bars.open, bars.close))
            assert np.all(bars.volume > 0)
            assert np.allclose(bars.open[1:], bars.close[:-1])
        assert world.state % (HORIZON * 60) == 0
        assert (OLD * 15 + RECENT) % HORIZON == 0


def test_past_without_a_pattern_is_fair_and_has_the_noise_of_a_market() -> None:
    """Recorded minutes of January 2025: yearly volatility 0.6 to 1.2, kurtosis 19 to 900, and autocorrelations of
    absolute returns of 0.39 to 0.47 after a minute and 0.14 to 0.25 after two hours."""
    moves = np.concatenate([np.diff(np.log(world.recent[0].close[:RECENT])) for world in worlds(None, "null", 24)])
    assert abs(np.corrcoef(moves[1:], moves[:-1])[0, 1]) < 12 / math.sqrt(len(moves))
    assert moves.std() * math.sqrt(365.25 * 1440) == pytest.approx(math.hypot(0.36, 0.22), rel=0.15)
    assert np.mean(moves**4) / np.mean(moves**2) ** 2 > 12
    sizes = np.abs(moves)
    near, far = (np.corrcoef(sizes[lag:], sizes[:-lag])[0, 1] for lag in (1, 120))
    assert 0.2 < near < 0.5
    assert 0.05 < far < near


def test_worlds_follow_from_the_secret_alone() -> None:
    first, again, other = (worlds(Edge.NEWS, "planted", 1, secret)[0] for secret in ("s", "s", "t"))
    assert np.array_equal(first.recent, again.recent)
    assert not np.array_equal(first.recent, other.recent)
    assert draw_patterns("s", 3) != draw_patterns("t", 3)


UNTOLD = {
    Edge.LEAD_LAG: (" leads ", " lags ", "leader"),
    Edge.CARRY: ("funding rate", "fundingrate", "carry"),
    Edge.DRAIN: ("liquidity", "thin book"),
}
"""The edges that entrants have to discover, and the words that would give them away."""


def test_untold_edges_are_in_no_prompt_and_no_rule_agent() -> None:
    texts = [path.read_text("utf-8") for path in files("trader.agents").joinpath("prompts").iterdir()]
    texts += [getsource(module) for module in (apex, contrarian, sovereign, trendsurfer)]
    said = " ".join(texts).lower()
    for edge, words in UNTOLD.items():
        assert not [word for word in words if word in said], edge
