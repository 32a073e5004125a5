"""Times in inputs, and pages of lists that are read newest first.

A truncated page includes `nextBefore`, the time of its last row, for the `before` of the next one. Rows of one
millisecond stay together: a page ends before a group that does not fit. If a group does not fit on one page, `nextSkip`
counts its rows on the pages so far, so that none is lost.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Final, Generic, NamedTuple, Protocol, TypeVar

from msgspec import UNSET, Meta, UnsetType

from trader.api.schemas.common import Input, Timestamp, Wire
from trader.core.clock import cut_to_ms, input_time, iso
from trader.core.errors import InvalidInput, Issue
from trader.database.pool import Page

T = TypeVar("T")

IsoTime = Annotated[
    str,
    Meta(
        min_length=10,
        max_length=40,
        description="an ISO 8601 time or date from 1970-01-01 to 2200-01-01",
        extra_json_schema={"anyOf": [{"format": "date-time"}, {"format": "date"}]},
    ),
]

_EXAMPLE = "expected an ISO 8601 time such as 2025-01-31T12:00:00.000Z"

_MILLISECOND: Final = timedelta(milliseconds=1)
_SKIP_MAX: Final = 1_000_000


Skip = Annotated[int, Meta(ge=0, le=_SKIP_MAX)]
"""The `nextSkip` of the previous page, together with its `nextBefore`."""


class PageInput(Input, kw_only=True):
    """Where a page begins."""

    before: IsoTime | UnsetType = UNSET
    skip: Skip = 0


class PagedInput(Protocol):
    """An input that says where a page begins."""

    before: str | UnsetType
    skip: int


class PageOutput(Wire, kw_only=True):
    """Where the next page begins."""

    next_before: Timestamp | UnsetType = UNSET
    next_skip: int | UnsetType = UNSET


class Cut(NamedTuple, Generic[T]):
    """The rows of a page, and where the next page begins."""

    rows: Sequence[T]
    next_before: str | UnsetType = UNSET
    next_skip: int | UnsetType = UNSET


def moment_of(written: str, field: str) -> datetime:
    """Return the time of an input field, to the millisecond; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(written)
    except ValueError:
        raise InvalidInput(Issue((field,), _EXAMPLE)) from None
    return bounded(moment, field)


def bounded(moment: datetime, *path: str) -> datetime:
    """Return the time of an input field in UTC, to the millisecond; without a zone it is UTC.

    :raises InvalidInput: it is not from 1970-01-01 to 2200-01-01
    """
    try:
        return input_time(moment)
    except ValueError as error:
        raise InvalidInput(Issue(path, str(error))) from None


def page_of(limit: int, request: PagedInput) -> Page:
    """Return the page to read: one row more than requested, which shows whether more rows follow."""
    if request.before is UNSET:
        return Page(limit + 1)
    until = moment_of(request.before, "before")
    return Page(limit + 1, until + _MILLISECOND, request.skip) if request.skip else Page(limit + 1, until)


def cut_page(rows: Sequence[T], page: Page, time_of: Callable[[T], datetime]) -> Cut[T]:
    """Return the rows of a page without the extra row, and, if there was one, where the next page begins."""
    if len(rows) < page.limit:
        return Cut(rows)
    times = [cut_to_ms(time_of(row)) for row in rows]
    if fitting := times.index(times[-1]):
        return Cut(rows[:fitting], iso(times[fitting - 1]))
    skipped = page.skip if page.until == times[0] + _MILLISECOND else 0
    return Cut(rows[:-1], iso(times[0]), skipped + len(rows) - 1)
