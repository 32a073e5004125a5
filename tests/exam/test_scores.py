"""Shares, burnt costs and verdicts say what is true of entrants of known skill, as often as they promise."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trader.exam.domain.law import RISK_BUDGET, credited
from trader.exam.domain.scores import (
    MeanOfStates,
    Scored,
    Sizes,
    agreement,
    burnt,
    compare,
    differences,
    rank_correlation,
    share_of_oracle,
    sizes,
    together,
)
from trader.exam.domain.worlds import USUAL_VALUE as USUAL
from trader.exam.domain.worlds import Edge

Skill = Callable[[np.random.Generator], float]
"""Draws the share of the oracle that an entrant earns in one state."""


def right(chance: float) -> Skill:
    """Return the skill of an entrant that takes the oracle's side with this chance, and otherwise the other side."""
    return lambda rng: 1.0 if rng.random() < chance else -1.2


def around(mean: float) -> Skill:
    """Return the skill of an entrant that earns this share, give or take a half."""
    return lambda rng: mean + 0.5 * float(rng.standard_normal())


def examined(skill: Skill, states: int, rng: np.random.Generator, name: str = "a") -> list[Scored]:
    oracles = USUAL * rng.uniform(0.6, 1.4, states)
    return [
        Scored(
            state=number, entrant=name, edge=Edge.NEWS, kind="planted", value=(share := skill(rng)) * oracle,
            risk=0.01, score=share * oracle, oracle=oracle,
        )
        for number, oracle in enumerate(oracles.tolist())
    ]  # fmt: skip


def rarely(loss: float, chance: float) -> Skill:
    """Return the skill of an entrant that earns a half, and now and then loses this much."""
    return lambda rng: -loss if rng.random() < chance else 0.5


@pytest.mark.parametrize("states", [20, 60, 300])
@pytest.mark.parametrize(
    ("skill", "known"), [(right(0.5), -0.1), (right(0.9), 0.78), (rarely(3, 0.02), 0.43), (rarely(2.3, 0.05), 0.36)]
)
def test_interval_of_a_share_covers_the_true_one_at_every_look(skill: Skill, known: float, states: int) -> None:
    rng, missed = np.random.default_rng(1), 0
    for _ in range(60):
        share = share_of_oracle(examined(skill, states, rng))
        assert share is not None
        assert share.interval is not None
        missed += not share.interval.low <= known <= share.interval.high
    assert missed <= 6
    assert (few := share_of_oracle(examined(skill, 19, rng))) is not None
    assert few.interval is None


@pytest.mark.parametrize("count", [8, 12])
def test_a_table_of_equals_has_a_false_verdict_in_at_most_five_percent(count: int) -> None:
    rng, false = np.random.default_rng(2), 0
    for _ in range(25):
        equals = [np.where(rng.random(200) < 0.6, 1.0, -1.2) for _ in range(count)]
        table = together([compare((one - other).tolist()) for one, other in combinations(equals, 2)])
        false += any(each.verdict != "not distinguishable yet" for each in table)
    assert false <= 3


def test_a_table_calls_who_is_clearly_better_in_both_directions() -> None:
    clear = [compare([sign * 0.8] * 150) for sign in (1, -1)]
    verdicts = [each.verdict for each in together([*clear, compare([0.1, -0.1] * 75)])]
    assert verdicts == ["better", "worse", "not distinguishable yet"]


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=5, max_size=30))
def test_a_rank_correlation_is_that_of_pandas(pairs: list[tuple[int, int]]) -> None:
    first, second = zip(*pairs, strict=True)
    found = rank_correlation(first, second)
    if found is None:
        assert len(set(first)) == 1 or len(set(second)) == 1
        return
    ranks = pandas.DataFrame({"first": first, "second": second}).rank()  # scipy.stats takes a second of every worker
    assert found.correlation == pytest.approx(ranks["first"].corr(ranks["second"]))
    assert -1 < found.interval.low < found.interval.high < 1
    assert rank_correlation(first[:4], second[:4]) is None


def test_equals_are_called_different_in_at_most_five_percent() -> None:
    rng = np.random.default_rng(2)
    called = 0
    for _ in range(200):
        one, other = (examined(right(0.6), 200, rng) for _ in range(2))
        called += compare(differences(one, other)).verdict != "not distinguishable yet"
    assert called <= 10


def test_share_of_a_half_and_of_three_tenths_are_separated_within_500_states() -> None:
    rng, called = np.random.default_rng(3), 0
    for _ in range(100):
        one, other = (examined(around(mean), 500, rng) for mean in (0.5, 0.3))
        called += compare(differences(one, other)).verdict == "better"
    assert called >= 80


def gambled(sizes: tuple[float, float], wrong: float, states: int, rng: np.random.Generator) -> list[Scored]:
    """Return the scores of an entrant that holds between two sizes, in risk budgets, on the wrong side this often."""
    risks, is_wrong = rng.uniform(*sizes, states) * RISK_BUDGET, rng.random(states) < wrong
    values = USUAL * risks / RISK_BUDGET * np.where(is_wrong, -1.5, 1.0)
    return [
        Scored(
            state=number, entrant="gamble", edge=Edge.NEWS, kind="planted", value=value, risk=risk,
            score=credited(value, risk, USUAL), oracle=USUAL,
        )
        for number, (value, risk) in enumerate(zip(values.tolist(), risks.tolist(), strict=True))
    ]  # fmt: skip


GAMBLERS = [((0.5, 8), 0.14), ((4, 8), 0.05), ((1, 20), 0.02), ((8, 8), 0.14), ((2.2, 2.2), 0), ((2, 2), 0.3)]


@pytest.mark.parametrize(("sizes", "wrong"), GAMBLERS)
def test_no_gambler_is_called_better_than_nothing(sizes: tuple[float, float], wrong: float) -> None:
    rng, called = np.random.default_rng(5), 0
    for _ in range(60):
        scored = gambled(sizes, wrong, 200, rng)
        share, verdict = share_of_oracle(scored), compare([each.score / USUAL for each in scored])
        assert share is not None
        assert verdict.mean == pytest.approx(share.share)  # one estimand
        called += verdict.verdict == "better"
    assert called <= 1


@given(value=st.floats(-0.1, 0.0), risk=st.floats(0, 0.5), heavier=st.floats(1, 50))
def test_a_heavier_loser_never_beats_a_lighter_one(value: float, risk: float, heavier: float) -> None:
    assert credited(value * heavier, risk * heavier, USUAL) <= credited(value, risk, USUAL)


def test_a_verdict_stays_reached() -> None:
    first = [0.8] * 90
    assert compare(first).verdict == "better"
    assert compare([*first, *[-0.5] * 90]).better_level == compare(first).better_level
    assert compare([-each for each in first]).verdict == "worse"


def test_differences_pair_the_states_that_both_have() -> None:
    rng = np.random.default_rng(4)
    ours, theirs = examined(right(1), 3, rng), examined(right(1), 5, rng)
    assert len(differences(ours, theirs)) == 3
    assert len(differences(ours, [])) == 0
    assert compare([]).verdict == "not distinguishable yet"


def test_a_state_counts_with_the_mean_of_its_samples_once_all_are_there() -> None:
    once = examined(right(1), 2, np.random.default_rng(4))
    again = [replace(each, sample=1, score=0.0) for each in once]
    nothing = [replace(each, sample=sample, score=0.0) for each in once for sample in (0, 1)]
    first, second = differences([*once, *again], nothing, samples=2)
    assert first == pytest.approx(once[0].score / 2 / USUAL)
    assert second == pytest.approx(once[1].score / 2 / USUAL)
    assert differences([*once, again[1]], nothing, samples=2) == [second]


def test_sizes_agreement_and_burnt_costs() -> None:
    def decided(state: int, value: float, risk: float, oracle: float, sample: int = 0) -> Scored:
        return Scored(
            state=state, entrant="a", edge=None, kind="null", value=value, risk=risk, score=value, oracle=oracle,
            sample=sample,
        )  # fmt: skip

    scored = [decided(1, -0.001, 0.02, 0), decided(2, 0, 0, 0), decided(3, -0.002, 0.005, 0)]
    assert burnt(scored) == MeanOfStates(10.0, None)
    assert sizes(scored) == Sizes(1.25, 0.5)
    assert sizes(scored[1:2]) == Sizes(None, 0)
    assert share_of_oracle(scored) is None
    twice = [
        decided(1, 0.9, 0.01, 1),
        decided(1, 0.2, 0.01, 1, 1),
        decided(2, 0.6, 0.01, 1),
        decided(2, 0.7, 0.01, 1, 1),
    ]
    assert agreement(twice, 2) == 0.5
    assert agreement(twice, 3) is None
