"""Fair shares of a budget, for any models and any costs."""

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from trader.agents.domain.shares import Sharer, Shares
from trader.core.money import ZERO

AMOUNTS = st.integers(0, 1_000).map(Decimal)
SHARERS = st.lists(st.builds(Sharer, used=AMOUNTS, least=AMOUNTS, wanted=AMOUNTS), min_size=2, max_size=8)


def shares_of(left: Decimal, sharers: list[Sharer]) -> Shares:
    return Shares(left, {str(number): each for number, each in enumerate(sharers)})


@given(left=AMOUNTS, sharers=SHARERS)
def test_no_model_may_use_more_than_is_left(left: Decimal, sharers: list[Sharer]) -> None:
    shares = shares_of(left, sharers)
    for number in range(len(sharers)):
        in_turn, at_all = (shares.available(str(number), in_turn=turn) for turn in (True, False))
        assert in_turn <= at_all <= left


@given(
    budget=st.integers(100, 10_000).map(Decimal),
    count=st.integers(2, 20),
    least=st.integers(1, 500).map(Decimal),
    data=st.data(),
)
def test_equal_models_are_never_apart_by_more_than_an_invocation(
    budget: Decimal, count: int, least: Decimal, data: st.DataObject
) -> None:
    """In any order, each claims all that it may and then costs an unpredictable part of it."""
    used = [ZERO] * count
    most = least
    for _ in range(30):
        reserved = list(used)
        for number in data.draw(st.permutations(range(count))):
            sharers = [Sharer(each, least, budget) for each in reserved]
            available = shares_of(budget - sum(reserved), sharers).available(str(number), in_turn=True)
            if available >= least:
                most = max(most, available)
                reserved[number] += available
        part = data.draw(st.sampled_from([Decimal("0.1"), Decimal("0.5"), Decimal(1)]))
        used = [before + (after - before) * part for before, after in zip(used, reserved, strict=True)]
        assert sum(used) <= budget
    assert max(used) - min(used) <= most, "and what is left pays for no invocation, or all had their turns"


def test_a_model_that_wants_nothing_leaves_its_share_to_the_others() -> None:
    small, none = Sharer(ZERO, Decimal(10), Decimal(1_000)), Sharer(ZERO, Decimal(10), Decimal(9))
    assert shares_of(Decimal(100), [small, none]).available("0", in_turn=True) == 100
    assert shares_of(Decimal(100), [small, small]).available("0", in_turn=True) == 50


def test_the_model_that_has_cost_the_least_is_first() -> None:
    first, second = Sharer(Decimal(1), Decimal(60), Decimal(1_000)), Sharer(Decimal(2), Decimal(60), Decimal(1_000))
    shares = shares_of(Decimal(97), [first, second])
    assert shares.available("0", in_turn=True) == 60
    assert shares.available("1", in_turn=True) == 37, "not enough"
    assert shares.available("1", in_turn=False) == 97, "its budget is not spent, it waits"
