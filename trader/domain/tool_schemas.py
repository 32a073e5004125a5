"""The tools as a model is shown them: JSON Schemas of the structs that decode the calls, in the strict form.

Strict means: every property is required, optional ones are nullable, nothing else is allowed, and only the keywords
that every provider takes. Bounds go into the description, since the decoder holds them in any case.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from trader.domain.tools import TOOLS, Decision

_KEPT = ("type", "enum", "description", "anyOf", "items")
_BOUNDS: Final[Mapping[str, str]] = {
    "exclusiveMinimum": "above {:g}",
    "minimum": "at least {:g}",
    "maximum": "at most {:g}",
    "maxLength": "at most {:g} characters",
}
_UNTOLD = 1e12
"""The bound that only keeps arithmetic finite; no model needs to hear of it."""


def _strict(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        return _strict({**target, **{key: value for key, value in schema.items() if key != "$ref"}}, definitions)
    result = {key: schema[key] for key in _KEPT if key in schema}
    if "anyOf" in schema:
        result["anyOf"] = [_strict(option, definitions) for option in schema["anyOf"]]
    if "enum" in schema and "type" not in schema:
        result["type"] = "string"
    bounds = [words.format(schema[key]) for key, words in _BOUNDS.items() if schema.get(key, _UNTOLD) < _UNTOLD]
    if bounds:
        result["description"] = " ".join(part for part in (schema.get("description"), f"({', '.join(bounds)})") if part)
    return result


def _tool(name: str, struct: type[Decision]) -> dict[str, Any]:
    (_,), definitions = msgspec.json.schema_components((struct,), ref_template="#/$defs/{name}")
    schema = definitions[struct.__name__]
    properties = {field: _strict(value, definitions) for field, value in schema["properties"].items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": " ".join((struct.__doc__ or "").split()),
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }


TOOL_SCHEMAS: Final = [_tool(name, struct) for name, struct in TOOLS.items()]
"""The `tools` of a chat-completions request."""
