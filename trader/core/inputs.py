"""Decode request bodies into input structs, or report every invalid field.

msgspec stops at the first mistake and shows neither the value nor the choices, so a refused input is checked again
here, field by field. That is slow, but only refused requests pay for it.

In JSON, `100` and `100.0` are the same number, and some encoders only write floating-point numbers, so a whole number
may have a zero fraction; msgspec reads that as a float. Some encoders always write every field, so null in an optional
field means that it is absent. Both are normalized, and the text is decoded again.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Final, get_type_hints

import msgspec
from msgspec import Struct, inspect

from trader.core.errors import InvalidInput, Issue

ISSUES_MAX: Final = 20
"""The most mistakes that one answer lists."""

_VALUE_LENGTH_MAX: Final = 60
_WHOLE_MAX: Final = 2**53
"""Beyond this, floats have gaps, so the intended number is unknown."""


def decode_input(decoder: msgspec.json.Decoder[Any], input_type: type[Any], text: bytes | msgspec.Raw) -> Any:
    """Return the input. Raise InvalidInput with every invalid field."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        refused = error
    plain = _rewritten(input_type, text)
    if plain is not None:
        try:
            return decoder.decode(plain)
        except msgspec.ValidationError as error:
            text, refused = plain, error
    raise InvalidInput(*find_issues(input_type, text, refused)) from None


def _rewritten(input_type: type[Any], text: bytes | msgspec.Raw) -> bytes | None:
    """Return the text with `100.0` as `100` and without null in optional fields.

    None if nothing changes or a number is out of range.
    """
    integral_count = 0

    def number(written: str) -> int | float:
        nonlocal integral_count
        value = float(written)
        if value.is_integer() and abs(value) <= _WHOLE_MAX:
            integral_count += 1
            return int(value)
        return value

    try:
        value = json.loads(bytes(text), parse_float=number)
        kept = without_nulls(input_type, value)
        return json.dumps(kept, allow_nan=False).encode() if integral_count or kept != value else None
    except ValueError:  # an infinite number, or one with thousands of digits
        return None


def find_issues(input_type: type[Any], text: bytes | msgspec.Raw, error: msgspec.ValidationError) -> tuple[Issue, ...]:
    """Return the issues of a JSON text that `input_type` refused with `error`; at least one."""
    return issues_of(input_type, json.loads(bytes(text), parse_int=_number, parse_float=_number), error)


def issues_of(input_type: type[Any], value: Any, error: msgspec.ValidationError) -> tuple[Issue, ...]:
    """Return the issues of a JSON value that `input_type` refused with `error`; at least one."""
    return tuple(islice(_issues(input_type, value, ()), ISSUES_MAX)) or (Issue((), str(error)),)


@dataclass(frozen=True, slots=True)
class _OutOfRange:
    """A number beyond the range of Python's numbers, as the caller wrote it."""

    written: str


def _number(written: str) -> int | float | _OutOfRange:
    try:
        return int(written)
    except ValueError:  # not a whole number, or one with thousands of digits
        value = float(written)
        return value if math.isfinite(value) else _OutOfRange(written)


def _issues(annotation: Any, value: Any, path: tuple[str | int, ...]) -> Iterator[Issue]:
    schema = inspect.type_info(annotation)
    struct = struct_of(schema)
    if struct is None or not isinstance(value, dict):
        yield from _leaf_issues(annotation, schema, value, path)
        return
    hints = get_type_hints(struct.cls, include_extras=True)
    fields = {field.encode_name: field for field in struct.fields}
    for name in value:
        if name not in fields:
            yield Issue((*path, name[:100]), f"unknown field; known are {', '.join(fields) or 'none'}")
    for name, field in fields.items():
        if name in value:
            yield from _issues(hints[field.name], value[name], (*path, name))
        elif field.required:
            yield Issue((*path, name), f"required: expected {describe(field.type)}")


def _leaf_issues(annotation: Any, schema: inspect.Type, value: Any, path: tuple[str | int, ...]) -> Iterator[Issue]:
    """Yield at most one issue with a value that is not a struct; for a list, the issue with its first wrong item."""
    if _fits(annotation, value):
        return
    listed = next((each for each in getattr(schema, "types", [schema]) if isinstance(each, inspect.ListType)), None)
    if listed is not None and isinstance(value, list) and len(value) <= (listed.max_length or math.inf):
        wrong = next((index for index, item in enumerate(value) if not _fits(annotation, [item])), None)
        if wrong is not None:
            schema, value, path = listed.item_type, value[wrong], (*path, wrong)
            if isinstance(schema, inspect.StructType):
                yield from _issues(schema.cls, value, path)
                return
    yield Issue(path, f"expected {describe(schema)}, got {_shown(value)}")


def _fits(annotation: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        return False
    return True


def describe(schema: inspect.Type) -> str:
    """Describe the values of a field: `one of 24h, 7d, 30d`, `a number above 0`.

    A description that is a sentence says what a field is for; any other one says what its values look like.
    """
    words = "an object"
    match schema:
        case inspect.Metadata():
            form = (schema.extra_json_schema or {}).get("description")
            words = describe(schema.type) if form is None or str(form).endswith(".") else str(form)
        case inspect.UnionType():
            words = _one_of(schema.types)
        case inspect.LiteralType() | inspect.EnumType():
            words = f"one of {', '.join(_choices(schema))}"
        case inspect.IntType():
            words = f"a whole number{_bounds(schema)}"
        case inspect.FloatType():
            words = f"a number{_bounds(schema)}"
        case inspect.StrType():
            words = f"text{_lengths(schema)}"
        case inspect.DateTimeType():
            words = "an ISO 8601 time with its zone, such as 2025-01-31T12:00:00.000Z"
        case inspect.UUIDType():
            words = "a UUID, such as 5f0c77d1-9a3e-5b7c-8d21-0e4f6a1b2c3d"
        case inspect.BoolType():
            words = "true or false"
        case inspect.NoneType():
            words = "null"
        case inspect.ListType():
            most = "" if schema.max_length is None else f" of at most {schema.max_length}"
            words = f"a list{most}, each {describe(schema.item_type)}"
    return words


def _choices(schema: inspect.LiteralType | inspect.EnumType) -> list[str]:
    if isinstance(schema, inspect.LiteralType):
        return [str(value) for value in schema.values]
    return [str(member.value) for member in schema.cls]


def _one_of(types: Sequence[inspect.Type]) -> str:
    numbers = [member for member in types if isinstance(member, inspect.FloatType)]
    choices: list[str] = []
    others: list[str] = []
    for member in types:
        if isinstance(member, inspect.LiteralType | inspect.EnumType):
            choices += _choices(member)
        elif not (numbers and isinstance(member, inspect.IntType)):  # `int | float` is a number
            others.append(describe(member))
    if choices:
        others.insert(0, f"one of {', '.join(choices)}")
    return " or ".join(others)


def _bounds(schema: inspect.IntType | inspect.FloatType) -> str:
    bounds = {"above": schema.gt, "from": schema.ge, "below": schema.lt, "up to": schema.le}
    return "".join(f" {word} {bound:g}" for word, bound in bounds.items() if bound is not None)


def _lengths(schema: inspect.StrType) -> str:
    if schema.max_length is None:
        return "" if not schema.min_length else f" of at least {schema.min_length} characters"
    return f" of {schema.min_length or 0} to {schema.max_length} characters"


def _shown(value: Any) -> str:
    """Return the value as the caller wrote it, shortened."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = value.written if isinstance(value, _OutOfRange) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_LENGTH_MAX else f"{text[:_VALUE_LENGTH_MAX]}…"


# Null in an optional field means that the field is absent.


def without_nulls(struct: type[Struct], value: Any) -> Any:
    """Return a decoded JSON value without the optional fields of the struct that are null, at every level.

    Null in a required or unknown field stays, so that decoding reports it.
    """
    if not isinstance(value, dict):
        return value
    fields = _fields(struct)
    kept = {}
    for name, member in value.items():
        field = fields.get(name)
        if member is not None or field is None or field.required:
            inner = None if field is None else struct_of(field.type)
            kept[name] = member if inner is None else without_nulls(inner.cls, member)
    return kept


def struct_of(schema: inspect.Type) -> inspect.StructType | None:
    """Return the struct among the types that a value may have, or None if there is none."""
    match schema:
        case inspect.StructType():
            return schema
        case inspect.Metadata():
            return struct_of(schema.type)
        case inspect.UnionType():
            return next((member for member in schema.types if isinstance(member, inspect.StructType)), None)
        case _:
            return None


@cache
def _fields(struct: type[Struct]) -> Mapping[str, inspect.Field]:
    """Return the fields of a struct by their names on the wire."""
    schema = inspect.type_info(struct)
    assert isinstance(schema, inspect.StructType)
    return {field.encode_name: field for field in schema.fields}
