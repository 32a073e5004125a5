"""Decimal arithmetic of the books, compared with exact fractions."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.core.money import QUANTUM, ceil_to, divide, floor_to, format_decimal, from_number, round_to, share

amounts = st.decimals(min_value=-(10**9), max_value=10**9, places=8)
positive = st.decimals(min_value=Decimal("1e-8"), max_value=10**9, places=8)
steps = st.sampled_from([Decimal(step) for step in ("0.1", "0.01", "0.00001", "5", "0.25")])


@given(amounts, positive)
def test_a_quotient_is_rounded_half_even_to_the_quantum(dividend: Decimal, divisor: Decimal) -> None:
    assert Fraction(divide(dividend, divisor)) == Fraction(
        round(Fraction(dividend) / Fraction(divisor) / Fraction(QUANTUM))
    ) * Fraction(QUANTUM)


@pytest.mark.parametrize(("dividend", "text_of_quotient"), [("1e-16", "0"), ("3e-16", "2"), ("5e-16", "2")])
def test_ties_go_to_the_even_digit(dividend: str, text_of_quotient: str) -> None:
    assert divide(Decimal(dividend), Decimal(2)) == Decimal(text_of_quotient) * QUANTUM


@given(amounts, positive, positive)
def test_a_share_and_the_rest_add_up_to_the_whole(whole: Decimal, first: Decimal, second: Decimal) -> None:
    part, total = min(first, second), max(first, second)
    taken = share(whole, part, total)
    assert taken + (whole - taken) == whole
    assert abs(Fraction(taken) - Fraction(whole) * Fraction(part) / Fraction(total)) <= Fraction(QUANTUM) / 2
    assert share(whole, total, total) == whole


@given(amounts, steps)
def test_rounding_to_a_step(value: Decimal, step: Decimal) -> None:
    below, above, nearest = floor_to(value, step), ceil_to(value, step), round_to(value, step)
    assert below <= value <= above
    assert above - below in {Decimal(0), step}
    assert nearest in {below, above}
    assert abs(nearest - value) * 2 <= step
    assert all(not rounded % step for rounded in (below, above, nearest))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_keeps_its_written_digits(number: float) -> None:
    assert float(from_number(number)) == number
    assert from_number(0.1) == Decimal("0.1")


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20))
def test_formatted_decimals_are_plain_and_exact(value: Decimal) -> None:
    written = format_decimal(value)
    assert Decimal(written) == value
    assert "E" not in written.upper()
    assert written != "-0"
    assert "." not in written or written[-1] not in "0."


def test_formatted_whole_numbers_keep_their_zeros() -> None:
    assert [format_decimal(Decimal(value)) for value in ("100", "1E+2", "100.50", "-0.0")] == [
        "100",
        "100",
        "100.5",
        "0",
    ]
