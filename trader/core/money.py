"""Decimal arithmetic for money and quantities.

Sums and products of prices, quantities and rates are exact: they fit the 28 digits of the default context. Only
division rounds, and it rounds here, to `QUANTUM`, half to even. A part split off by division leaves
`whole - part` behind, so rounding neither loses nor creates anything.
"""

from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal

ZERO = Decimal(0)
ONE = Decimal(1)
QUANTUM = Decimal("1e-16")

_DIGITS_MAX = 30
_WIDE = Context(prec=80, rounding=ROUND_HALF_EVEN)


def require_figure(value: Decimal | None) -> None:
    """Raise `ValueError` for NaN, infinity and amounts beyond 1e30, which JSON of strangers may have."""
    if value is not None and not (value.is_finite() and abs(value.adjusted()) <= _DIGITS_MAX):
        raise ValueError(f"expected an amount, got {value!s:.40}")


def divide(dividend: Decimal, divisor: Decimal) -> Decimal:
    """Return the quotient rounded half-even to `QUANTUM`. Raise `decimal.DivisionByZero` for a zero divisor."""
    return _WIDE.quantize(_WIDE.divide(dividend, divisor), QUANTUM)


def halve(quantity: Decimal, half_lives: Decimal) -> Decimal:
    """Return the remainder of a quantity after this many half-lives, rounded half-even to `QUANTUM`."""
    return _WIDE.quantize(_WIDE.multiply(quantity, _WIDE.power(2, -half_lives)), QUANTUM)


def share(whole: Decimal, part: Decimal, total: Decimal) -> Decimal:
    """Return `whole × part / total`, rounded to `QUANTUM`; exactly `whole` when `part == total`."""
    if part == total:
        return whole
    return _WIDE.quantize(_WIDE.divide(_WIDE.multiply(whole, part), total), QUANTUM)


def floor_to(value: Decimal, step: Decimal) -> Decimal:
    """Return the largest multiple of `step` that is not above `value`."""
    return _WIDE.multiply(_WIDE.divide(value, step).to_integral_value(ROUND_FLOOR), step)


def ceil_to(value: Decimal, step: Decimal) -> Decimal:
    """Return the smallest multiple of `step` that is not below `value`."""
    return _WIDE.multiply(_WIDE.divide(value, step).to_integral_value(ROUND_CEILING), step)


def round_to(value: Decimal, step: Decimal) -> Decimal:
    """Return the multiple of `step` nearest to `value`, ties to even."""
    return _WIDE.multiply(_WIDE.divide(value, step).to_integral_value(ROUND_HALF_EVEN), step)


def from_number(value: int | float) -> Decimal:
    """Return a JSON number as the decimal it was written as, by way of the float's shortest repr."""
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def format_decimal(value: Decimal) -> str:
    """Format as plain decimal text: no exponent, no trailing zeros, no negative zero."""
    if not value:
        return "0"
    plain = format(value, "f")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def counted(count: int, noun: str) -> str:
    """Format a count with its noun in the singular or the plural."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
