"""Reports as files: the data in them, and their tables as a browser shows them."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
from support.chromium import Tab, open_tab


class _Outline(HTMLParser):
    """The unclosed tags of a page, and the resources it would fetch from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in {"src", "href", "xlink:href", "data"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report_data(file: Path) -> dict[str, Any]:
    """Return the data in a report, whose elements are closed and which fetches nothing."""
    html = file.read_text(encoding="utf-8")
    outline = _Outline()
    outline.feed(html)
    assert (outline.open, outline.fetched) == ([], [])
    assert re.findall(r"url\((?!.data:)", html.partition("</style>")[0]) == []
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    data: dict[str, Any] = orjson.loads(text)
    return data


@asynccontextmanager
async def opened_report(file: Path, folder: Path) -> AsyncIterator[Tab]:
    """Open a report in a browser with its profile below `folder`; at the end, its console must be empty."""
    async with open_tab(folder / "profile", file.as_uri()) as tab:
        await tab.until("[...document.querySelectorAll('main .scroll > div')].every(one => one.style.height === '0px')")
        yield tab
        assert tab.problems == []


CELLS = """[...document.querySelectorAll('section')].filter(one => one.querySelector('h2')?.innerText === {title!r})
    .flatMap(one => [...one.querySelectorAll('tr')]).map(row => [...row.children].map(cell => cell.innerText))"""


async def rows_of(tab: Tab, title: str) -> list[list[str]]:
    """Return the texts of the rows of the tables of a section, heads included."""
    rows: list[list[str]] = await tab.evaluate(CELLS.format(title=title))
    return [[" ".join(cell.split()).replace("−", "-") for cell in row] for row in rows]
