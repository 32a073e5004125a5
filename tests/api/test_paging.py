"""Pages of lists: walking through them by `nextBefore` shows every row once, those of one moment too."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType

from trader.api.schemas.paging import cut_page, page_of

START = datetime(2025, 1, 1, tzinfo=UTC)


@given(st.lists(st.integers(0, 4000), max_size=40), st.integers(1, 7))
def test_every_row_is_on_one_page(offsets: list[int], limit: int) -> None:
    rows = sorted(
        ((START + timedelta(microseconds=offset), number) for number, offset in enumerate(offsets)), reverse=True
    )
    seen: list[tuple[datetime, int]] = []
    before: str | UnsetType = UNSET
    for _ in range(len(rows) + 1):
        page = page_of(limit, before)
        selected = [row for row in rows if page.until is None or row[0] < page.until][page.skip :][: page.limit]
        shown, before = cut_page(selected, page, lambda row: row[0])
        assert len(shown) <= limit
        seen += shown
        if before is UNSET:
            break
    assert seen == rows


def test_a_time_of_the_caller_is_exclusive_and_without_a_count() -> None:
    assert page_of(5, "2025-01-01T00:00:00.000Z") == (6, START, 0)
    assert page_of(5, "2025-01-01T00:00:00.123456+00:00") == (6, START + timedelta(milliseconds=123), 0)
