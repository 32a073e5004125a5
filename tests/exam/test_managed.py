"""Managed worlds: what a path is worth by the law, the most that can be earned on it, and entrants of known skill."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exam_entrants import Manager, Nothing, TrendTrader, entrant
from support.exam_readers import Inferring, Reading
from support.run_profile import is_nightly

from trader.agents.domain.strategy import Strategy
from trader.backtest.spec import settings_of
from trader.core.statistics import Floats
from trader.exam.domain.law import GAIN_MAX, LOSS_MAX, RISK_BUDGET, SIZE_MAX, PlannedPosition
from trader.exam.domain.managed import MINUTES, RESPONSES, STEP_MINUTES, STEPS, Course, PricedFill
from trader.exam.domain.scores import share_of_oracle
from trader.exam.domain.worlds import RECENT, USUAL_VALUE, Edge, FillCosts, Kind, World, draw_world
from trader.exam.sitting import EVERY_STEP, Sitting, WorldRoom
from trader.market.domain.markets import SIMULATED_MARKETS

SYMBOLS = ("BTC", "ETH", "SOL")
COSTS = FillCosts([SIMULATED_MARKETS[symbol] for symbol in SYMBOLS], [0.0005] * 3)
FILL = 0.0006
DEVIATION = np.array([0.009, 0.012])
ONE = RISK_BUDGET / DEVIATION


def course(rng: np.random.Generator, drift: Floats, funding: Sequence[float] = (0.0, 0.0)) -> Course:
    """Return a course on a path of two markets with this drift."""
    deviation = DEVIATION[:, None] / np.sqrt(240)
    moves = drift - deviation**2 / 2 + deviation * rng.standard_normal((2, MINUTES))
    prices = np.exp(np.concatenate([np.zeros((2, 1)), np.cumsum(moves, axis=1)], axis=1))
    return Course(prices, drift, np.array(funding), np.full(2, FILL), DEVIATION)


def responding(strength: float) -> Floats:
    """Return the drift of three responses in the first market, the second one downward."""
    drift = np.zeros((2, MINUTES))
    for begins, side in ((0, 1), (4 * STEP_MINUTES, -1), (8 * STEP_MINUTES, 1)):
        drift[0, begins : begins + 30] = side * strength * DEVIATION[0] / 30
    return drift


def test_the_oracle_holds_each_response_and_pays_for_it() -> None:
    still = Course(np.ones((2, MINUTES + 1)), responding(1.0), np.zeros(2), np.full(2, FILL), DEVIATION)
    gain = ONE[0] * (
        30 * np.expm1(DEVIATION[0] / 30) + 30 * -np.expm1(-DEVIATION[0] / 30) + 30 * np.expm1(DEVIATION[0] / 30)
    )
    assert still.oracle(()) == pytest.approx((gain - 6 * ONE[0] * FILL) / RESPONSES)
    funded = Course(
        np.ones((2, MINUTES + 1)), np.zeros((2, MINUTES)), np.array([0.0, 0.002]), np.full(2, FILL), DEVIATION
    )
    assert funded.oracle(()) == pytest.approx(ONE[1] * (6 * 0.002 - 2 * FILL) / RESPONSES)
    minute = float(np.expm1(DEVIATION[0] / 30))
    for trades, gained in (
        ([PricedFill(10.5, 0, 0.5, 0.001), PricedFill(25, 0, -0.5, 0.002)], 0.5 * 15 * minute - 0.003),
        ([PricedFill(31, 1, 0.5, 0.001)], -0.001 - 0.5 * FILL),
    ):
        assert still.judge(trades, (), USUAL_VALUE).value == pytest.approx(gained / RESPONSES)
    stood = (PlannedPosition(1, 1, 0.4),)
    rest = RISK_BUDGET / DEVIATION[1] - 0.4
    assert funded.oracle(stood) == pytest.approx((0.4 * 6 * 0.002 + rest * (6 * 0.002 - 2 * FILL)) / RESPONSES)


holdings = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from((-1.0, -0.5, 0.0, 0.5, 1.0))), min_size=STEPS, max_size=STEPS
)


@given(holdings, st.integers(0, 1000), st.floats(-2, 2), st.floats(-0.003, 0.003), st.sampled_from((-1, 0, 1)))
def test_nobody_within_the_budget_earns_more_than_the_oracle(
    held: list[tuple[int, float]], seed: int, strength: float, rate: float, side: int
) -> None:
    path = course(np.random.default_rng(seed), responding(strength), (0.0, rate))
    stood = (PlannedPosition(0, side, 0.5 * float(ONE[0])),) if side else ()
    assert path.judge(trades_of(path, held), stood, USUAL_VALUE).score <= path.oracle(stood) + 1e-9
    whole = trades_of(path, [(market, round(size)) for market, size in held])  # at the budget, or nothing
    double = [each._replace(weight=2 * each.weight, cost=2 * each.cost) for each in whole]
    once, twice = (path.judge(trades, (), USUAL_VALUE).score for trades in (whole, double))
    assert twice <= max(once, 0.0) + 1e-9, "gains beyond the budget earn nothing, losses count"


def trades_of(path: Course, held: Sequence[tuple[int, float]]) -> list[PricedFill]:
    """Return the fills that hold, from each step on, so much of the budget in one market."""
    now, trades = np.zeros(2), []
    for step, (market, size) in enumerate(held):
        wanted = np.zeros(2)
        wanted[market] = size * ONE[market]
        for place in np.flatnonzero(wanted != now).tolist():
            weight = float(wanted[place] - now[place])
            price = float(path.prices[place, step * STEP_MINUTES])
            trades.append(PricedFill(step * STEP_MINUTES, place, weight, abs(weight) * FILL * price))
        now = wanted
    return trades


def test_scores_are_what_accounts_gain_on_average_whatever_decisions_depend_on() -> None:
    rng, errors = np.random.default_rng(5), []
    for _ in range(400):
        path = course(rng, responding(1.5), (0.001, -0.002))
        prices, trades, gained, held = path.prices, list[PricedFill](), 0.0, np.zeros(2)
        for step in range(STEPS):
            begin, end = step * STEP_MINUTES, (step + 1) * STEP_MINUTES
            wanted = np.sign(prices[:, begin] - prices[:, max(0, begin - 45)])  # it follows what the path has done
            trades += [PricedFill(begin, place, float(more), 0.0) for place, more in enumerate(wanted - held) if more]
            held = wanted
            gained += float(held @ (prices[:, end] - prices[:, begin]))
            if end % 60 == 0:
                gained -= float(held @ (np.array([0.001, -0.002]) * prices[:, end]))
        gained -= float(np.abs(held) @ (FILL * prices[:, -1]))
        errors.append(gained / RESPONSES - path.judge(trades, (), USUAL_VALUE).value)
    assert abs(np.mean(errors)) < 3.5 * np.std(errors) / np.sqrt(len(errors))
    assert np.std(errors) > 0.002, "the noise of the market is not in the score"


@pytest.mark.parametrize("edge", Edge)
def test_a_managed_world_goes_on_as_it_was_and_pays_as_much_for_each_response(edge: Edge) -> None:
    for number in range(3):
        world = draw_world("s", number, edge, "planted", COSTS, is_managed=True)
        closes = np.array([bars.close[RECENT - 1 : RECENT + MINUTES] for bars in world.recent])
        path = Course(
            closes / closes[:, :1], world.law.drift, world.law.funding, COSTS.of_fill, world.law.horizon_deviation
        )
        assert path.oracle(()) == pytest.approx(world.strength * RISK_BUDGET, rel=0.15)
        if edge is not Edge.CARRY:
            paying = np.flatnonzero(world.law.drift[world.market])
            begins = paying[np.diff(paying, prepend=-2) > 1]
            assert len(begins) == RESPONSES
            assert not (begins % STEP_MINUTES).any()
        one = RISK_BUDGET / float(world.law.horizon_deviation[world.market])
        worst = [PricedFill(0, world.market, -world.side * SIZE_MAX * one, 0.0)]
        assert path.judge(worst, (), USUAL_VALUE).value > -LOSS_MAX * USUAL_VALUE
        assert not draw_world("s", number, edge, "null", COSTS, is_managed=True).law.drift.any()


@cache
def room() -> WorldRoom:
    settings = settings_of({"SIM_SEED": "0", "MARKETS": ",".join(SYMBOLS), "REPLAY_THINKING": "off"})
    rows = {symbol: SIMULATED_MARKETS[symbol] for symbol in SYMBOLS}
    return WorldRoom(settings, rows, ["1m", "15m", "1h"], is_managed=True)


def sat(make: Callable[[World], Sequence[Strategy]], edges: Sequence[Edge], kind: Kind) -> dict[str, list[Sitting]]:
    """Return what strategies do in a managed world of each edge, by entrant."""

    async def all_states() -> list[Sitting]:
        sittings: list[Sitting] = []
        for number, edge in enumerate(edges):
            world = draw_world("managed", number, edge, kind, room().costs, is_managed=True)
            sittings += await room().sit(world, [entrant(each, every=EVERY_STEP) for each in make(world)])
        return sittings

    by_entrant: dict[str, list[Sitting]] = {}
    for sitting in asyncio.run(all_states()):
        by_entrant.setdefault(sitting.entrant, []).append(sitting)
    return by_entrant


def test_who_manages_as_the_law_is_earns_all_of_it_and_size_earns_no_more() -> None:
    edges = (Edge.BREAKOUT, Edge.CARRY, Edge.LEAD_LAG, Edge.NEWS)
    decided = sat(
        lambda world: [Manager(world), Manager(world, 0.5, "half"), Nothing(), TrendTrader()], edges, "planted"
    )
    shares = {name: share_of_oracle(own) for name, own in decided.items()}
    manager, half, nothing, trend = (share.share for share in shares.values() if share is not None)
    assert manager == pytest.approx(1, abs=0.05)
    assert half == pytest.approx(0.5, abs=0.05)
    assert nothing == 0
    assert trend == pytest.approx(-LOSS_MAX * USUAL_VALUE * 4 / sum(each.oracle for each in decided["nothing"]))
    assert all("risk budget" in each.answer.refused for each in decided["trend+1-1.0"]), "it adds to what it holds"
    assert all(len(each.answer.decided) == STEPS for each in decided["trend+1-1.0"])
    assert all(each.oracle <= GAIN_MAX * USUAL_VALUE for each in decided["nothing"])


def test_who_infers_manages_and_who_only_knows_page_and_code_does_not() -> None:
    edges = 8 * tuple(Edge) if is_nightly() else (Edge.OVERSHOOT, Edge.SQUEEZE, Edge.LEAD_LAG)
    shares = map(share_of_oracle, sat(lambda world: [Inferring(), Reading()], edges, "planted").values())
    inferring, reading = (share.share for share in shares if share is not None)
    assert inferring > 0.5
    assert reading < 0.3
