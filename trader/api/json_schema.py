"""JSON Schema (2020-12) of wire structs, derived by msgspec and corrected to match the service's output.

msgspec's schema differs from the wire if the encoder has options (a Decimal is a JSON number here), and is more verbose
than necessary (`int | float` is a number).
"""

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from types import UnionType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

REFERENCE: Final = "#/components/schemas/"

NO_NUL: Final = "^[^\\u0000]*$"
"""Text that a database can store."""

Schema = dict[str, Any]

_DECIMAL: Final = {"type": "string", "format": "decimal"}
_PYTHON_END: Final = r"(?!\n)"
"""The end of a pattern in Python, where `$` also matches before a last line feed."""


def components_of(types: Iterable[Any]) -> tuple[list[Schema], dict[str, Schema]]:
    """Return the schema of each type, and the named schemas that they refer to under `#/components/schemas/`."""
    types = list(types)
    schemas, named = msgspec.json.schema_components(types, ref_template=REFERENCE + "{name}")
    names = {name: name.removesuffix("View") for name in named}
    assert len(set(names.values())) == len(names), "two structs would have one name"
    components = {names[name]: _component(names[name], schema, names) for name, schema in named.items()}
    cleaned = [_clean(schema, names) for schema in schemas]
    orders: dict[frozenset[Any], list[Any]] = {}
    _note_orders(types, orders, set())
    _reorder([cleaned, list(components.values())], orders)
    return cleaned, dict(sorted(components.items()))


def _note_orders(annotations: Iterable[Any], orders: dict[frozenset[Any], list[Any]], seen: set[Any]) -> None:
    """Collect the choices of enums and literals in definition order, because msgspec sorts them."""
    for annotation in annotations:
        if isinstance(annotation, type) and annotation not in seen:
            seen.add(annotation)
            if issubclass(annotation, msgspec.Struct):
                _note_orders(get_type_hints(annotation, include_extras=True).values(), orders, seen)
            elif issubclass(annotation, Enum):
                values = [member.value for member in annotation]
                orders.setdefault(frozenset(values), values)
        if get_origin(annotation) is Literal:
            orders.setdefault(frozenset(get_args(annotation)), list(get_args(annotation)))
        elif get_origin(annotation) is not None or isinstance(annotation, UnionType):
            _note_orders(get_args(annotation), orders, seen)


def _reorder(node: Any, orders: Mapping[frozenset[Any], list[Any]]) -> None:
    if isinstance(node, dict):
        if isinstance(node.get("enum"), list):
            node["enum"] = orders.get(frozenset(node["enum"]), node["enum"])
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            _reorder(item, orders)


def _component(name: str, schema: Schema, names: Mapping[str, str]) -> Schema:
    cleaned: Schema = _clean(schema, names)
    cleaned["title"] = name
    if "description" in cleaned:
        cleaned["description"] = _in_wire_names(inspect.cleandoc(cleaned["description"]), cleaned.get("properties", {}))
    if cleaned.get("additionalProperties") is False:
        _refuse_nul(cleaned["properties"])
        _allow_null(cleaned)
    return cleaned


def _allow_null(component: Schema) -> None:
    """Add null to the optional fields of an input, where it means the same as absence.

    Their defaults become words, because generators of clients take a field with a default for one that is always there.
    """
    for name, field in component["properties"].items():
        if name not in component.get("required", ()):
            default, text = field.get("default"), field.get("description", "")
            if default is not None:
                text = f"Default: {default if isinstance(default, str) else json.dumps(default)}. {text}".rstrip()
            notes = {"description": text} if text else {}
            plain = {key: value for key, value in field.items() if key not in {"description", "default"}}
            options = plain["anyOf"] if plain.keys() == {"anyOf"} else [plain]
            null = [] if _takes_null(field) else [{"type": "null"}]
            component["properties"][name] = _merged({"anyOf": [*options, *null], **notes})


def _takes_null(field: Schema) -> bool:
    return "null" in field.get("type", ()) or any(map(_takes_null, field.get("anyOf", ())))


def _in_wire_names(description: str, properties: Mapping[str, Schema]) -> str:
    """Return the docstring with the wire names of its fields."""

    def renamed(match: re.Match[str]) -> str:
        first, *others = match[1].split("_")
        name = first + "".join(part.capitalize() for part in others)
        return f"`{name}`" if name in properties else match[0]

    return re.sub(r"`([a-z]+(?:_[a-z]+)+)`", renamed, description)


def _clean(node: Any, names: Mapping[str, str]) -> Any:
    if isinstance(node, list):
        return [_clean(item, names) for item in node]
    if not isinstance(node, dict):
        return int(node) if isinstance(node, float) and node.is_integer() else node
    if node.items() >= _DECIMAL.items():
        node = {key: value for key, value in node.items() if key != "format"} | {"type": "number"}
    cleaned = {key: _clean(value, names) for key, value in node.items() if key != "required" or value}
    if "$ref" in cleaned:
        cleaned["$ref"] = REFERENCE + names[cleaned["$ref"].removeprefix(REFERENCE)]
    if "discriminator" in cleaned:
        mapping = cleaned["discriminator"]["mapping"]
        cleaned["discriminator"]["mapping"] = {
            kind: REFERENCE + names[target.removeprefix(REFERENCE)] for kind, target in mapping.items()
        }
    if "enum" in cleaned and all(isinstance(value, str) for value in cleaned["enum"]):
        cleaned["type"] = "string"
    if isinstance(cleaned.get("pattern"), str):
        cleaned["pattern"] = cleaned["pattern"].removesuffix(_PYTHON_END)
    return _merged(cleaned)


def _merged(schema: Schema) -> Schema:
    """Remove needless alternatives: `integer or number` is a number, and null is one more type."""
    options = schema.get("anyOf")
    if not isinstance(options, list):
        return schema
    kinds = {option.get("type") for option in options if isinstance(option.get("type"), str)}
    if kinds >= {"integer", "number"}:
        options = [option for option in options if option.get("type") != "integer"]
    rest = [option for option in options if option != {"type": "null"}]
    outside = {key: value for key, value in schema.items() if key != "anyOf"}
    if len(options) == 1:
        return {**options[0], **outside}
    if len(rest) == 1 and isinstance(rest[0].get("type"), str) and "enum" not in rest[0]:
        return {**rest[0], "type": [rest[0]["type"], "null"], **outside}
    return outside | {"anyOf": options}


def _refuse_nul(node: Any) -> None:
    if isinstance(node, list):
        for item in node:
            _refuse_nul(item)
    elif isinstance(node, dict):
        kinds = node.get("type")
        if (kinds == "string" or (isinstance(kinds, list) and "string" in kinds)) and not (
            node.keys() & {"pattern", "enum", "format", "anyOf"}
        ):
            node["pattern"] = NO_NUL
        for value in list(node.values()):
            _refuse_nul(value)
