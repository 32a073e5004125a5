"""An input made of its JSON text.

To JSON `100` and `100.0` are one number, and some writers know no other than floating-point ones, so a whole number
may be written with a fraction of zero. The decoder takes it for a float; such a text is put right and read again,
which only those pay for who write it so, or whose input is refused.
"""

import json
from typing import Any, Final

import msgspec

from trader.api.issues import find_issues
from trader.errors import InvalidInput

_WHOLE_MAX: Final = 2**53
"""Beyond it floats have gaps, so what was meant is not known."""


def decode_input(decoder: msgspec.json.Decoder[Any], input_type: type[Any], text: bytes | msgspec.Raw) -> Any:
    """The input. Raises InvalidInput with every field that does not fit."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        refused = error
    whole = _with_whole_numbers(text)
    if whole is not None:
        try:
            return decoder.decode(whole)
        except msgspec.ValidationError as error:
            text, refused = whole, error
    raise InvalidInput(*find_issues(input_type, text, refused)) from None


def _with_whole_numbers(text: bytes | msgspec.Raw) -> bytes | None:
    """The text with `100.0` as `100`; None when it has no such number, or one that cannot be written again."""
    found = 0

    def number(written: str) -> int | float:
        nonlocal found
        value = float(written)
        if value.is_integer() and abs(value) <= _WHOLE_MAX:
            found += 1
            return int(value)
        return value

    try:
        value = json.loads(bytes(text), parse_float=number)
        return json.dumps(value, allow_nan=False).encode() if found else None
    except ValueError:  # an infinite number, or one of thousands of digits
        return None
