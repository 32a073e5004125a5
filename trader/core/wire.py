"""Values as JSON: in the form of the API, with camelCase names, and in canonical form, of which digests are made."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

import msgspec
import orjson
import rfc8785

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


def canonical_json(value: Any) -> bytes:
    """Return a JSON value in its canonical form (RFC 8785), in which every number is a double."""
    if _is_plain(value):  # the common case, and two hundred times faster
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    try:
        return rfc8785.dumps(value)
    except rfc8785.IntegerDomainError:
        return rfc8785.dumps(_with_doubles(value))


def _is_plain(value: Any) -> bool:
    """Return whether sorting keys is enough for the canonical form: no fractions, no large numbers, only ASCII keys."""
    if isinstance(value, str | bool | None):
        return True
    if isinstance(value, int):
        return abs(value) < 2**53
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, dict) and all(key.isascii() and _is_plain(item) for key, item in value.items())


def _with_doubles(value: Any) -> Any:
    """Return the value with large whole numbers as floats: the library refuses integers that a double may not hold."""
    if isinstance(value, Mapping):
        return {key: _with_doubles(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_doubles(item) for item in value]
    return float(value) if isinstance(value, int) and abs(value) >= 2**53 else value
