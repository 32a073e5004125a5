"""Common parts of the wire structs: naming, strictness, the format of decimals and times, and error bodies."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import cache, partial
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from trader.agents.domain.shares import State
from trader.core.clock import iso
from trader.core.money import format_decimal
from trader.core.variant_id import VariantId

__all__ = ["UNSET", "UnsetType", "VariantId", "iso"]  # of other modules; everything defined here is public, too

T = TypeVar("T")

ENCODER = msgspec.json.Encoder(decimal_format="number")
"""The one encoder of the wire: a Decimal is a JSON number. Where the contract wants text, a field is `str`."""

if TYPE_CHECKING:
    VariantFilter = str
else:
    VariantFilter = Literal[(*(variant.value for variant in VariantId), "all")]
    """The values of `VariantId`, and `all`: msgspec does not support a union of an enum and a literal."""

decoder_of = cache(msgspec.json.Decoder)
"""Returns the decoder of a type."""


def encoded(output: object, decoder: msgspec.json.Decoder[Any]) -> bytes:
    """Return an output as JSON text that matches the type of its decoder.

    :raises msgspec.MsgspecError: it does not match
    :raises ValueError: a number in it is not finite
    """
    text = ENCODER.encode(output)
    if decoder.decode(text) != output and b"null" in text:  # the text of a NaN, which a field may allow
        json.dumps(msgspec.to_builtins(output, str_keys=True), allow_nan=False)
    return text


Number = int | float
"""A strict, finite JSON number; `domain.money.from_number` converts it to a Decimal."""

PositiveNumber = Annotated[int, Meta(gt=0, le=10**12)] | Annotated[float, Meta(gt=0, le=1e12)]

# These two describe the service's own output, so they are in the JSON schema but not checked per response.
Timestamp = Annotated[
    str,
    Meta(
        extra_json_schema={
            "format": "date-time",
            "pattern": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z$",
            "examples": ["2025-01-31T12:00:00.000Z"],
        }
    ),
]
"""ISO 8601 in UTC with milliseconds and `Z`, as `iso` writes it."""


class From(NamedTuple):
    """Where `from_attributes` finds a field's value: the path of an attribute, and a function of its value."""

    path: str = ""
    convert: Callable[[Any], Any] | None = None


class Wire(msgspec.Struct, rename="camel", kw_only=True):
    """An output. A field that may be absent is `… | UnsetType = UNSET`; one that may be null is `… | None`."""

    @classmethod
    def from_attributes(cls, *sources: object, **others: Any) -> Self:
        """Return a record from the `others`, and from the attributes that its other fields name.

        Each attribute is that of the first source that has it. A field that may be absent is, for None and false.
        """
        values = {
            name: shown(others.pop(name) if name in others else _attribute(sources, path))
            for name, path, shown in _plan(cls)
        }
        return cls(**values, **others)


def _attribute(sources: tuple[object, ...], path: Sequence[str]) -> Any:
    value: Any = UNSET
    for source in sources:
        if (value := getattr(source, path[0], UNSET)) is not UNSET:
            break
    else:
        raise AttributeError(f"no source has {path[0]}")
    for name in path[1:]:
        value = None if value is None else getattr(value, name)
    return value


@cache
def _plan(kind: type[Wire]) -> Sequence[tuple[str, Sequence[str], Callable[[Any], Any]]]:
    """Return each field's name, the path of its value, and the function that gives the value its form on the wire."""
    hints, plan = get_type_hints(kind, include_extras=True), []
    for field in msgspec.structs.fields(kind):
        parts = list(_parts(hints[field.name]))
        marks = [each for each in parts if isinstance(each, From)]
        path = next((mark.path for mark in marks if mark.path), field.name)
        convert = next((mark.convert for mark in marks if mark.convert), None)
        nested = next((each for each in parts if isinstance(each, type) and issubclass(each, Wire)), None)
        form = convert or (None if nested is None else partial(_nested, nested))
        shown = partial(_shown, form, field.default is UNSET, NoneType in parts)
        plan.append((field.name, path.split("."), shown))
    return plan


def _parts(hint: Any) -> Iterator[Any]:
    """Yield what a type is made of: its marks outermost first, then the types within it."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__[::-1]
        yield from _parts(hint.__origin__)
    else:
        yield hint
        for inner in get_args(hint):
            yield from _parts(inner)


def _shown(convert: Callable[[Any], Any] | None, may_be_absent: bool, may_be_null: bool, value: Any) -> Any:
    if value is not UNSET and not (value is None and (may_be_absent or may_be_null)):
        value = _as_text(value if convert is None else convert(value))
    return UNSET if may_be_absent and (value is None or value is False) else value


def _nested(kind: type[Wire], value: Any) -> Any:
    if isinstance(value, Wire):
        return value
    if isinstance(value, Mapping):
        return msgspec.convert(value, kind)
    if type(value) in (list, tuple):  # not a named one
        return [_nested(kind, each) for each in value]
    return kind.from_attributes(value)


def _as_text(value: Any) -> Any:
    """Return a decimal without an exponent and trailing zeros, and a time, a day, an id or a digest as text."""
    match value:
        case Decimal():
            return trimmed(value)
        case datetime():
            return iso(value)
        case date():
            return value.isoformat()
        case UUID():
            return str(value)
        case bytes():
            return value.hex()
    return value


DecimalText = Annotated[
    str,
    Meta(extra_json_schema={"pattern": r"^-?(0|[1-9]\d*)(\.\d+)?$", "examples": ["0.25"]}),
    From(convert=format_decimal),
]
"""A decimal number as text, as `format_decimal` writes it."""


class OfModel(Wire, kw_only=True):
    """A record of a model. For an account without a model, modelId and modelName are the account's id."""

    id: str
    model_id: str
    model_name: str


class Input(msgspec.Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """An input: unknown fields are refused, optional ones have defaults."""


class BudgetUse(Wire, kw_only=True):
    """A model's cost today (UTC) and its budget. `usdPerDay` is absent if only AI_BUDGET_USD_PER_DAY limits it.

    `reservedUsd` is the maximum cost of its running invocation. `state` is `open` until a budget is spent; then, until
    00:00 UTC, it is `manage` (the model may only reduce, once every 15 minutes) or `pause`. `isEstimated` is true if
    part of the cost was not reported.
    """

    usd_per_day: Annotated[float | UnsetType, From("usd", float)] = UNSET
    spent_today_usd: Annotated[float, From("spent", float)]
    reserved_usd: Annotated[float | UnsetType, From("reserved", lambda usd: float(usd) or None)] = UNSET
    is_estimated: bool | UnsetType = UNSET
    state: State


class Refusal(Wire):
    """The body of a refusal."""

    error: str


class InputIssue(Wire, kw_only=True):
    """One invalid field: its path in the input, and what was expected."""

    path: list[str | int]
    message: str


class ErrorBody(Wire, kw_only=True):
    """Why a call failed. `error` is for people, `code` for programs; `issues` comes with VALIDATION_ERROR."""

    error: str
    code: str
    issues: list[InputIssue] | UnsetType = UNSET


class Empty(Input):
    """The input of a procedure without parameters."""


class LongOutput(Generic[T]):
    """An output whose one long list is already JSON text: the output with that list empty, and the list in chunks.

    Each chunk has some of the list's records, joined by commas.
    """

    def __init__(self, frame: T, records: msgspec.json.Decoder[Any], chunks: Sequence[bytes]) -> None:
        """Take the output without its list, a decoder of a list of its records, and the chunks."""
        self._frame = frame
        self._records = records
        self._chunks = chunks

    def encode(self) -> bytes:
        """Return the whole text."""
        head, tail = ENCODER.encode(self._frame).split(b"[]")
        return b"".join((head, b"[", b",".join(self._chunks), b"]", tail))

    async def check(self, decoder: msgspec.json.Decoder[T]) -> None:
        """Decode the output part by part, because decoding 20 MB at once would block the event loop.

        :raises msgspec.MsgspecError: a part does not match its type
        """
        encoded(self._frame, decoder)
        for chunk in self._chunks:
            self._records.decode(b"[%b]" % chunk)
            await asyncio.sleep(0)


def trimmed(value: Decimal) -> Decimal:
    """Return the same number without the exponent and trailing zeros that a JSON number would show."""
    return Decimal(format_decimal(value))


def or_none(value: T | UnsetType) -> T | None:
    """Return the value of an optional input field, or None if it is absent."""
    return None if value is UNSET else value


def or_absent(value: T) -> T | None:
    """Return the value of a field that is absent for 0 and empty text."""
    return value or None


def chosen_variant(choice: VariantFilter) -> VariantId | None:
    """Return the variant, or None for `all`."""
    return None if choice == "all" else VariantId(choice)
