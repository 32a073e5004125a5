"""Times in inputs, and pages of lists that are read newest first.

A page that is cut carries `nextBefore`, the time of its last row, for the `before` of the next one. When rows of the
same millisecond follow, the last three of nine decimals count those that the pages so far have had: none is lost.
"""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, TypeVar

from msgspec import UNSET, Meta, UnsetType

from trader.clock import cut_to_ms, iso
from trader.errors import InvalidInput, Issue
from trader.store.database.pool import Page

T = TypeVar("T")

IsoTime = Annotated[
    str,
    Meta(
        min_length=10,
        max_length=40,
        description="an ISO 8601 time or date",
        extra_json_schema={"anyOf": [{"format": "date-time"}, {"format": "date"}]},
    ),
]

_EXAMPLE = "expected an ISO 8601 time such as 2025-01-31T12:00:00.000Z"

_COUNTED: Final = re.compile(r"(.*\.\d{3})000(\d{3})Z")
_MILLISECOND: Final = timedelta(milliseconds=1)
_SKIP_MAX: Final = 999


def moment_of(written: str, field: str) -> datetime:
    """Return the time of an input field, to the millisecond; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(written)
        return cut_to_ms(moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC))
    except (ValueError, OverflowError):
        raise InvalidInput(Issue((field,), _EXAMPLE)) from None


def page_of(limit: int, before: str | UnsetType) -> Page:
    """Return the page to read: one row more than asked for, which shows whether the page is cut."""
    if before is UNSET:
        return Page(limit + 1)
    counted = _COUNTED.fullmatch(before)
    if counted is None:
        return Page(limit + 1, moment_of(before, "before"))
    skip = int(counted[2])
    return Page(limit + 1, moment_of(counted[1] + "Z", "before") + (_MILLISECOND if skip else timedelta(0)), skip)


def cut_page(rows: Sequence[T], page: Page, time_of: Callable[[T], datetime]) -> tuple[Sequence[T], str | UnsetType]:
    """Return the rows of a page without the one too many, and `nextBefore` if there was one."""
    if len(rows) < page.limit:
        return rows, UNSET
    shown, last = rows[:-1], cut_to_ms(time_of(rows[-2]))
    if cut_to_ms(time_of(rows[-1])) != last:
        return shown, iso(last)
    same = sum(cut_to_ms(time_of(row)) == last for row in shown)
    if page.until == last + _MILLISECOND and same == len(shown):
        same += page.skip
    return shown, f"{iso(last)[:-1]}000{min(same, _SKIP_MAX):03d}Z"
