"""A page of the dashboard in a real browser, and waits for its content."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

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


WRITTEN = """
window.written = []
const fillText = CanvasRenderingContext2D.prototype.fillText
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
  const half = this.measureText(text).width / { center: 2, right: 1, end: 1 }[this.textAlign] || 0
  written.push([String(text), x - half, y, this.canvas.parentElement?.parentElement?.parentElement?.ariaLabel ?? ''])
  return fillText.call(this, text, x, y, ...rest)
}
"""
"""Keeps each text that a chart draws as one of `written`: the text, where, and the name of the chart."""


def figure(value: float | None, places: int = 2, unit: str = "", *, sign: bool = False) -> str:
    if value is None:
        return "–"
    text = f"{value:{'+' if sign and round(value, places) else ''},.{places}f}{unit}"
    return text.replace("-", "−" if round(value, places) else "")


async def check_jumps(tab: Tab) -> None:
    """Nothing jumps under the reader, whatever comes late."""
    jumps = await tab.evaluate("jumps")
    assert sum(jump["value"] for jump in jumps) < 0.03, jumps


async def shows(tab: Tab, text: str) -> None:
    await until(lambda: tab.evaluate(f"document.body.innerText.includes({json.dumps(text)})"))


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
