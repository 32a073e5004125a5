"""Values as JSON in the form of the API: camelCase names, and decimals without exponents."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

import msgspec

from trader.core.money import format_decimal

_ENCODER: Final = msgspec.json.Encoder(decimal_format="number")


def encode(value: Any) -> bytes:
    """Return a value as JSON in one line."""
    return _ENCODER.encode(to_wire(value))


def to_wire(value: Any) -> Any:
    """Return a value with its structs and named tuples as objects with camelCase names, as in the API."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        value = {_camel(field.encode_name): getattr(value, field.name) for field in fields}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = {_camel(name): item for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {name: to_wire(item) for name, item in value.items() if item is not msgspec.UNSET}
    if isinstance(value, Decimal):
        return Decimal(format_decimal(value))  # without an exponent and trailing zeros
    return [to_wire(item) for item in value] if isinstance(value, list | tuple) else value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))
