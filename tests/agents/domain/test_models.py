"""Configuration of a model: its cadence and its prices."""

from datetime import timedelta
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.agents.domain.models import ModelConfiguration, TokenPrice

COUNTS = st.integers(0, 10**9)


@pytest.mark.parametrize(
    ("every", "seconds"),
    [(None, 60), ("5s", 5), ("59s", 59), ("1m", 60), ("5m", 300), ("90m", 5_400), ("1h", 3_600), ("24h", 86_400)],
)
def test_every_determines_the_cadence(every: str | None, seconds: int) -> None:
    assert msgspec.convert({"every": every}, ModelConfiguration).cadence == timedelta(seconds=seconds)


@pytest.mark.parametrize("every", ["0s", "60s", "0m", "25h", "5", "5d"])
def test_another_cadence_is_refused(every: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"every": every}, ModelConfiguration)


def test_cached_input_has_a_separate_price() -> None:
    price = TokenPrice(input=0.28, cached=0.028, output=0.42)
    assert price.cost(1_000_000, 0, 0) == Decimal("0.28")
    assert price.cost(1_000_000, 900_000, 500_000) == Decimal("0.028") + Decimal("0.0252") + Decimal("0.21")
    assert TokenPrice(input=2, output=8).cost(1_000, 1_000, 0) == Decimal("0.002")


def test_input_written_to_a_cache_has_a_separate_price() -> None:
    price = TokenPrice(input=3, cached=0.3, output=15)
    assert price.cost(1_000_000, 600_000, 0, 300_000) == Decimal("0.3") + Decimal("0.18") + Decimal("1.125")
    own = msgspec.structs.replace(price, cache_write=6)
    assert own.cost(1_000_000, 600_000, 0, 300_000) == Decimal("0.3") + Decimal("0.18") + Decimal("1.8")
    assert own.in_usd(2).cost(1_000, 0, 0, 1_000) == Decimal("0.012")


def test_input_written_to_a_cache_for_an_hour_has_a_separate_price() -> None:
    price = TokenPrice(input=3, cached=0.3, output=15)
    assert price.cost(1_000_000, 0, 0, 300_000, 200_000) == Decimal("2.1") + Decimal("0.375") + Decimal("1.2")
    own = msgspec.structs.replace(price, cache_write_1h=4)
    assert own.cost(1_000_000, 0, 0, 300_000, 300_000) == Decimal("2.1") + Decimal("1.2")
    assert own.in_usd(2).cost(1_000, 0, 0, 1_000, 1_000) == Decimal("0.008")


@given(asked=COUNTS, cached=COUNTS, answered=COUNTS)
def test_a_cache_never_raises_the_cost(asked: int, cached: int, answered: int) -> None:
    price = TokenPrice(input=3, cached=0.3, output=15)
    assert 0 <= price.cost(asked, cached, answered) <= price.cost(asked, 0, answered)
