"""A page of the dashboard in a real browser, and waits for its content."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.chromium import Tab, open_tab
from support.waiting import until

RECORD_JUMPS = """
window.jumps = []
new PerformanceObserver(list => {
  for (const { hadRecentInput, sources, startTime, value } of list.getEntries()) {
    if (hadRecentInput) continue
    const moved = sources.map(({ node, previousRect: from, currentRect: to }) => [
      node?.outerHTML?.slice(0, 80) ?? node?.textContent?.slice(0, 80),
      ...[from, to].map(({ x, y, width, height }) => [x, y, width, height].map(Math.round).join(' '))].join(' | '))
    window.jumps.push({ at: Math.round(startTime), value, moved })
  }
}).observe({ type: 'layout-shift', buffered: true })
"""
"""Keeps each layout shift without a reader's input as one of `jumps`, with what moved, from where and to where."""

RECORD_ANSWERS = """
window.answers = {}
const fetched = window.fetch
window.fetch = async (path, init) => {
  const response = await fetched(path, init)
  if (init) answers[path.replace('/api/rpc/', '') + ' ' + init.body] = await response.clone().json()
  return response
}
"""

KEEP_FILES = """
const makeAddress = URL.createObjectURL
URL.createObjectURL = blob => { window.saved = blob; return makeAddress(blob) }
HTMLAnchorElement.prototype.click = new Proxy(HTMLAnchorElement.prototype.click, {
  apply: (click, link) => (link.download ? undefined : Reflect.apply(click, link, [])) })
"""
"""Keeps the last file that the page saves as `saved`, instead of downloading it."""


async def check_jumps(tab: Tab) -> None:
    """Nothing jumps under the reader, whatever comes late."""
    jumps = await tab.evaluate("jumps")
    assert sum(jump["value"] for jump in jumps) < 0.03, jumps


async def shows(tab: Tab, text: str) -> None:
    await until(lambda: tab.evaluate(f"document.body.innerText.includes({json.dumps(text)})"))


async def shows_figures(
    tab: Tab, table: str, answered: Callable[[], Awaitable[list[dict[str, Any]] | None]], name: str
) -> None:
    """Wait until the rows of a table show exactly this figure of the rows answered at the same time."""
    titles = f"""(() => {{
        const rows = document.querySelectorAll('section[aria-label="{table}"] tbody tr')
        return [...rows].map(row => [...row.querySelectorAll('td span[title]:not(.key)')].map(one => one.title))
    }})()"""

    async def are_equal() -> bool:
        rows, shown = await answered(), await tab.evaluate(titles)
        if not rows or len(rows) != len(shown):
            return False
        numbers = [row[name] for row in rows]
        texts = await tab.evaluate(f"({json.dumps(numbers)}).map(String)")
        return all(text in seen for text, seen in zip(texts, shown, strict=True))

    await until(are_equal)


async def gone(tab: Tab, text: str) -> None:
    await until(lambda: tab.evaluate(f"!document.body.innerText.includes({json.dumps(text)})"))


@asynccontextmanager
async def on_page(folder: Path, url: str, path: str = "/") -> AsyncIterator[Tab]:
    """Open a connected page of the dashboard."""
    async with open_tab(folder, "about:blank#start") as tab:
        await tab.command("Page.addScriptToEvaluateOnNewDocument", source=RECORD_JUMPS + RECORD_ANSWERS)
        await visit(tab, url, path)
        yield tab


async def visit(tab: Tab, url: str, path: str) -> None:
    await tab.command("Page.navigate", url="about:blank")
    await tab.command("Page.navigate", url=url + path)
    await until(lambda: tab.evaluate("document.querySelector('.status')?.innerText.startsWith('live')"))


async def choose_moment(tab: Tab, label: str, minute: str) -> None:
    """Enter a minute in one of the fields of the range."""
    chosen = f"""(() => {{
        const field = [...document.querySelectorAll('.moment')].find(one => one.innerText.startsWith('{label}')).control
        field.value = '{minute}'
        field.dispatchEvent(new Event('change', {{ bubbles: true }}))
    }})()"""
    await tab.evaluate(chosen)
