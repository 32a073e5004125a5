"""A strict matcher of JSON values against shapes written by hand, independent of the service's structs.

A shape is a dict (exactly these keys; `"key?"` may be absent), a one-element list (each item), a tuple (any of them), a
function that returns an error (or None), or a constant.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Shape = Any
Check = Callable[[Any], str | None]

_ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_HOUR = re.compile(r"\d{4}-\d\d-\d\dT\d\d:00:00\.000Z")
_DECIMAL = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HOLDING = re.compile(r"\d+h [0-5]\dm")
_COLOR = re.compile(r"#[0-9a-f]{6}")


def _matching(pattern: re.Pattern[str], what: str) -> Check:
    def check(value: Any) -> str | None:
        return None if isinstance(value, str) and pattern.fullmatch(value) else f"no {what}"

    return check


def text(value: Any) -> str | None:
    """A non-empty text."""
    return None if isinstance(value, str) and value else "no text"


def number(value: Any) -> str | None:
    """A JSON number."""
    return None if isinstance(value, int | float) and not isinstance(value, bool) else "no number"


def count(value: Any) -> str | None:
    """A non-negative integer."""
    return None if type(value) is int and value >= 0 else "no count"


def boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "no boolean"


def anything(_: Any) -> None:
    return None


iso = _matching(_ISO, "ISO time with milliseconds and Z")
hour = _matching(_HOUR, "whole hour")
decimal = _matching(_DECIMAL, "decimal text")
uuid = _matching(_UUID, "UUID")
holding_time = _matching(_HOLDING, "holding time")
color = _matching(_COLOR, "colour")


def mismatches(value: Any, shape: Shape, path: str = "$") -> list[str]:
    """Return every place where the value does not match the shape."""
    if isinstance(shape, dict):
        return _of_object(value, shape, path)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{path}: no list but {value!r:.80}"]
        return [
            mismatch for place, item in enumerate(value) for mismatch in mismatches(item, shape[0], f"{path}[{place}]")
        ]
    if isinstance(shape, tuple):
        lists = [mismatches(value, alternative, path) for alternative in shape]
        return [] if [] in lists else min(lists, key=len)
    if callable(shape):
        problem = shape(value)
        return [] if problem is None else [f"{path}: {problem}: {value!r:.80}"]
    return [] if type(value) is type(shape) and value == shape else [f"{path}: not {shape!r} but {value!r:.80}"]


def _of_object(value: Any, shape: Mapping[str, Shape], path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{path}: no object but {value!r:.80}"]
    wanted = {key.removesuffix("?"): part for key, part in shape.items()}
    must = {key for key in shape if not key.endswith("?")}
    result = [f"{path}.{key}: missing" for key in sorted(must - value.keys())]
    result += [f"{path}.{key}: unexpected" for key in sorted(value.keys() - wanted.keys())]
    for key, part in wanted.items():
        if key in value:
            result += mismatches(value[key], part, f"{path}.{key}")
    return result


def assert_shape(value: Any, shape: Shape) -> None:
    lists = mismatches(value, shape)
    assert not lists, "\n".join(lists)
