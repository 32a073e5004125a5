"""What the wire's structs share: naming, strictness, and how decimals and times are written."""

from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Annotated, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from trader.clock import iso
from trader.domain.models import VariantId
from trader.domain.money import format_decimal

T = TypeVar("T")

__all__ = [
    "ENCODER",
    "UNSET",
    "Body",
    "Checked",
    "DecimalText",
    "Empty",
    "Input",
    "Number",
    "Pieces",
    "PositiveNumber",
    "Timestamp",
    "UnsetType",
    "VariantFilter",
    "VariantId",
    "Wire",
    "checked",
    "chosen_variant",
    "format_decimal",
    "iso",
    "optional",
    "or_unset",
    "trimmed",
    "whole",
]

ENCODER = msgspec.json.Encoder(decimal_format="number")
"""The one encoder of the wire: a Decimal is a JSON number. Where the contract wants text, a field is `str`."""

VariantFilter = Literal["Apex", "Trendsurfer", "Contrarian", "Sovereign", "all"]
"""The values of `VariantId`, and `all`. Spelled out, since msgspec takes no union of an enum and a literal."""

Number = int | float
"""A strict, finite JSON number; `domain.money.from_number` makes the Decimal of it."""

PositiveNumber = Annotated[int, Meta(gt=0, le=10**12)] | Annotated[float, Meta(gt=0, le=1e12)]

# These two describe what the service itself writes, so they are in the JSON schema and cost no answer a check.
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
"""A decimal number as text, as `text` writes it."""


class Wire(msgspec.Struct, rename="camel", kw_only=True):
    """An output. A field that may be absent is `… | UnsetType = UNSET`; one that may be null is `… | None`."""


class Input(msgspec.Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """An input: unknown fields are refused, optional ones have defaults."""


class Empty(Input):
    """The input of a procedure without parameters."""


class Pieces:
    """A long text in the pieces in which it is kept, so that nobody makes 20 MB of it anew for every caller.

    Memory that a process has not had before costs more than what is written into it.
    """

    __slots__ = ("_pieces", "_size")

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces = tuple(pieces)
        self._size = sum(map(len, self._pieces))

    def __len__(self) -> int:
        """In bytes."""
        return self._size

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return iter(self._pieces)


Body = bytes | Pieces
"""Encoded JSON."""


def whole(body: Body) -> bytes:
    """The body in one piece."""
    return body if isinstance(body, bytes) else b"".join(body)


class Checked(msgspec.Struct, frozen=True):
    """An output that is encoded already, and whose parts were checked when they were."""

    body: Body


def checked(output_type: type[T], body: Body) -> T:
    """An encoded output in the place of one of its type. What encodes answers takes it as it is."""
    return cast("T", Checked(body))


def or_unset(value: T | None) -> T | UnsetType:
    """The value, or absence on the wire when there is none."""
    return UNSET if value is None else value


def optional_text(value: Decimal | None) -> str | UnsetType:
    """Decimal text, or absence."""
    return UNSET if value is None else format_decimal(value)


def trimmed(value: Decimal) -> Decimal:
    """The same number without exponent and trailing zeros, which a JSON number would show."""
    return Decimal(format_decimal(value))


def optional(value: T | UnsetType) -> T | None:
    """What was given, or None."""
    return None if value is UNSET else value


def chosen_variant(choice: VariantFilter) -> VariantId | None:
    """The variant, or None for `all`."""
    return None if choice == "all" else VariantId(choice)
