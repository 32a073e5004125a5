"""Markdown to HTML, as far as the descriptions use it: headings, paragraphs, lists, tables, code."""

import html
import re
from collections.abc import Iterator

_CODE = re.compile(r"`([^`]+)`")
_RULE = re.compile(r"^\|[-| :]+\|$")


def to_html(text: str) -> str:
    """Return the text as HTML; everything in it is escaped."""
    return "\n".join(_block(block) for block in _blocks(text))


def inline(text: str) -> str:
    """Return text within a line as HTML: escaped, with `code` marked."""
    return _CODE.sub(r"<code>\1</code>", html.escape(text, quote=False))


def _blocks(text: str) -> Iterator[list[str]]:
    """Yield the blocks of lines between empty ones; a fenced block is one."""
    block: list[str] = []
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if line.strip() or fenced:
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def _block(lines: list[str]) -> str:
    first = lines[0]
    if first.startswith("```"):
        code = html.escape("\n".join(lines[1:-1]), quote=False)
        return f"<pre><code>{code}</code></pre>"
    if first.startswith("#"):
        level = len(first) - len(first.lstrip("#"))
        return f"<h{level}>{inline(first.lstrip('# '))}</h{level}>"
    if first.startswith("|"):
        head, *rows = (_cells(line) for line in lines if not _RULE.match(line))
        return table(head, rows)
    if first.startswith("- "):
        items = "\n".join(lines).removeprefix("- ").split("\n- ")
        return "<ul>" + "".join(f"<li>{inline(item)}</li>" for item in items) + "</ul>"
    return f"<p>{inline(' '.join(lines))}</p>"


def _cells(line: str) -> list[str]:
    return [inline(cell.strip()) for cell in line.strip("|").split("|")]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table of cells that are HTML already."""
    shown = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><tr>{"".join(f"<th>{cell}</th>" for cell in head)}</tr>{shown}</table></div>'
