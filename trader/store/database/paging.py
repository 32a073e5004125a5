"""Pagination of lists that are read newest first: the limit and the cursor of a page."""

from datetime import datetime
from typing import NamedTuple


class Page(NamedTuple):
    """At most `limit` rows older than `until` (None: the newest), without the first `skip` of those."""

    limit: int
    until: datetime | None = None
    skip: int = 0
