"""Common parts of the wire structs: naming, strictness, the format of decimals and times, and error bodies."""

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Self, TypeVar
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from trader.agents.domain.shares import Budget, State
from trader.core.clock import iso
from trader.core.money import format_decimal
from trader.core.variant_id import VariantId

T = TypeVar("T")

__all__ = [
    "ENCODER",
    "UNSET",
    "DecimalText",
    "Empty",
    "ErrorBody",
    "Input",
    "LongOutput",
    "Number",
    "PositiveNumber",
    "Refusal",
    "Timestamp",
    "UnsetType",
    "VariantFilter",
    "VariantId",
    "Wire",
    "chosen_variant",
    "decoder_of",
    "encoded",
    "format_decimal",
    "iso",
    "or_none",
    "trimmed",
]

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

DecimalText = Annotated[str, Meta(extra_json_schema={"pattern": r"^-?(0|[1-9]\d*)(\.\d+)?$", "examples": ["0.25"]})]
"""A decimal number as text, as `format_decimal` writes it."""


class Wire(msgspec.Struct, rename="camel", kw_only=True):
    """An output. A field that may be absent is `… | UnsetType = UNSET`; one that may be null is `… | None`."""

    @classmethod
    def from_attributes(cls, source: object, **others: Any) -> Self:
        """Return a record from the `others`, and from the attributes of `source` that match its other fields."""
        own = {name: _shown(getattr(source, name)) for name in cls.__struct_fields__ if name not in others}
        values = own | {name: _as_text(value) for name, value in others.items()}
        absent = [name for name in _optional_fields(cls) if values[name] is None]
        return cls(**values | dict.fromkeys(absent, UNSET))


@cache
def _optional_fields(kind: type[Wire]) -> tuple[str, ...]:
    """Return the names of the fields that may be absent."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.default is UNSET)


def _shown(value: Any) -> Any:
    return trimmed(value) if isinstance(value, Decimal) else _as_text(value)


def _as_text(value: Any) -> Any:
    match value:
        case datetime():
            return iso(value)
        case UUID():
            return str(value)
    return value


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

    usd_per_day: float | UnsetType = UNSET
    spent_today_usd: float
    reserved_usd: float | UnsetType = UNSET
    is_estimated: bool | UnsetType = UNSET
    state: State

    @classmethod
    def of(cls, budget: Budget) -> "BudgetUse":
        return cls(
            usd_per_day=UNSET if budget.usd is None else float(budget.usd),
            spent_today_usd=float(budget.spent),
            reserved_usd=float(budget.reserved) or UNSET,
            is_estimated=budget.is_estimated or UNSET,
            state=budget.state,
        )


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


def optional_text(value: Decimal | None) -> str | UnsetType:
    """Return the value as decimal text, or absence on the wire."""
    return UNSET if value is None else format_decimal(value)


def trimmed(value: Decimal) -> Decimal:
    """Return the same number without the exponent and trailing zeros that a JSON number would show."""
    return Decimal(format_decimal(value))


def or_none(value: T | UnsetType) -> T | None:
    """Return the value of an optional input field, or None if it is absent."""
    return None if value is UNSET else value


def chosen_variant(choice: VariantFilter) -> VariantId | None:
    """Return the variant, or None for `all`."""
    return None if choice == "all" else VariantId(choice)
