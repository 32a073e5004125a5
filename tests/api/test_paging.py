"""Pages of lists: paging by `nextBefore` shows every row once, including rows of the same moment."""

import re
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from trader.api.schemas.paging import Cut, PageInput, cut_page, page_of

START = datetime(2025, 1, 1, tzinfo=UTC)


Row = tuple[datetime, int]


def rows_at(offsets: list[int]) -> list[Row]:
    return sorted(
        ((START + timedelta(microseconds=offset), number) for number, offset in enumerate(offsets)), reverse=True
    )


def read(rows: list[Row], limit: int, request: PageInput) -> Cut[Row]:
    page = page_of(limit, request)
    selected = [row for row in rows if page.until is None or row[0] < page.until][page.skip :][: page.limit]
    return cut_page(selected, page, lambda row: row[0])


@given(st.lists(st.integers(0, 4000), max_size=40), st.integers(1, 7))
def test_every_row_is_on_one_page(offsets: list[int], limit: int) -> None:
    rows = rows_at(offsets)
    seen: list[Row] = []
    request = PageInput()
    for _ in range(len(rows) + 1):
        cut = read(rows, limit, request)
        assert len(cut.rows) <= limit
        seen += cut.rows
        if cut.next_before is UNSET:
            break
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", cut.next_before)
        request = PageInput(before=cut.next_before, skip=0 if cut.next_skip is UNSET else cut.next_skip)
    assert seen == rows


@given(st.lists(st.integers(0, 4), max_size=40))
def test_paging_by_time_alone_loses_nothing_while_a_milliseconds_rows_fit_on_a_page(counts: list[int]) -> None:
    rows = rows_at([1000 * place + extra for place, count in enumerate(counts) for extra in range(count)])
    seen: list[Row] = []
    request = PageInput()
    for _ in range(len(rows) + 1):
        cut = read(rows, 5, request)
        assert cut.next_skip is UNSET
        seen += cut.rows
        if cut.next_before is UNSET:
            break
        request = PageInput(before=cut.next_before)
    assert seen == rows


def test_the_callers_time_is_exclusive_and_truncated_to_the_millisecond() -> None:
    assert page_of(5, PageInput(before="2025-01-01T00:00:00.000Z")) == (6, START, 0)
    moment = START + timedelta(milliseconds=123)
    assert page_of(5, PageInput(before="2025-01-01T00:00:00.123456+00:00")) == (6, moment, 0)
    assert page_of(5, PageInput(before="2025-01-01T00:00:00.123Z", skip=4)) == (
        6,
        moment + timedelta(milliseconds=1),
        4,
    )
