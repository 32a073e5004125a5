"""Null in JSON from callers and models: null in an optional field means that the field is absent."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from msgspec import Struct, inspect


class _Field(NamedTuple):
    is_required: bool
    struct: type[Struct] | None


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
        if member is None and field is not None and not field.is_required:
            continue
        kept[name] = member if field is None or field.struct is None else without_nulls(field.struct, member)
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
def _fields(struct: type[Struct]) -> Mapping[str, _Field]:
    """Return the fields of a struct by their names on the wire."""
    schema = inspect.type_info(struct)
    assert isinstance(schema, inspect.StructType)
    inner = {field.encode_name: struct_of(field.type) for field in schema.fields}
    return {
        field.encode_name: _Field(field.required, None if (found := inner[field.encode_name]) is None else found.cls)
        for field in schema.fields
    }
