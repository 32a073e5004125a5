"""Self-contained HTML files of the reports, with the style sheet and the chart code of the dashboard inside.

The body has an element with `data-chart` in place of each chart; the script draws it from the data of the page.
"""

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from typing import Any, Final

import msgspec

from trader.api.dashboard.assets import text_of

_IMPORT: Final = re.compile(r"(\bfrom |\bimport |\bimport\()'\./([^']+\.js)'")
_NO_FORMS: Final = "base-uri 'none'; form-action 'none'"
_FONT_FACE: Final = re.compile(r"@font-face \{[^}]*\}")


def document(title: str, body: str, data: Mapping[str, Any] | None = None, script: str = "report.js") -> str:
    """Return an HTML document in the style of the dashboard, with the charts that `script` draws of `data`, if any."""
    styles = ("base.css", "parts.css", "report.css") if data else ("base.css", "report.css")
    style = _FONT_FACE.sub("", "".join(text_of(name) for name in styles))  # the font is not worth 64 kB here
    # Authors of text in the body cannot know its digest in advance, so a script in their text never has the nonce.
    nonce = sha256(body.encode()).hexdigest()
    charts = "" if data is None else _charts(data, nonce, script)
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; {_NO_FORMS}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>{body}</main>{charts}</body></html>\n"
    )


def _charts(data: Mapping[str, Any], nonce: str, script: str) -> str:
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    modules = _modules(script)
    entry = modules.pop(script)
    imports = {
        name: f"data:text/javascript;base64,{b64encode(source.encode()).decode()}" for name, source in modules.items()
    }
    return (
        f'<script type="application/json" id="data">{text}</script>'
        f'<script nonce="{nonce}">{text_of("vendor/uplot.js")}</script>'
        f'<script nonce="{nonce}" type="importmap">{msgspec.json.encode({"imports": imports}).decode()}</script>'
        f'<script nonce="{nonce}" type="module">{entry}</script>'
    )


def _modules(name: str) -> dict[str, str]:
    """Return the sources of a module and all its imports, by the names that they use for each other."""
    modules: dict[str, str] = {}
    names = [name]
    for each in names:
        if each not in modules:
            source = text_of(each)
            names += [name for _, name in _IMPORT.findall(source)]
            modules[each] = _IMPORT.sub(r"\1'\2'", source)
    return modules


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a table of HTML cells, with text in the first columns and figures in the others."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="text"' if place < text_columns else "" for place in range(len(cells))]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{line('th', heads)}</tr></thead>"
    return f'<div class="panel scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def interval(bounds: tuple[float, float] | None, value: float, least: float, most: float, color: str = "") -> str:
    """Draw a value and its interval on the scale from `least` to `most`, with a mark at zero."""

    def at(number: float) -> str:
        return f"{(min(max(number, least), most) - least) / (most - least or 1.0):.4f}"

    low, high = bounds or (value, value)
    style = f"--zero:{at(0)};--at:{at(value)};--low:{at(low)};--high:{at(high)}" + (f";--key:{color}" if color else "")
    drawn = '<i class="range"></i>' if bounds else ""
    return f'<span class="interval" style="{style}"><i class="zero"></i>{drawn}<i class="value"></i></span>'


def scale(values: Iterable[float | None], intervals: Iterable[tuple[float, float] | None]) -> tuple[float, float]:
    """Return a common scale for the intervals of several rows; the widest 2 % are cut off."""
    numbers = sorted(
        [*(value for value in values if value is not None), *(bound for bounds in intervals for bound in bounds or ())]
    )
    cut = len(numbers) // 50
    return (min(0.0, numbers[cut]), max(0.0, numbers[-1 - cut])) if numbers else (0.0, 0.0)


def bar(value: float, least: float, most: float) -> str:
    """Draw a bar from zero to the value on the scale from `least` to `most`, which contains both."""
    start, end = sorted(((number - least) / (most - least or 1.0)) for number in (0.0, value))
    kind = "gain" if value >= 0 else "loss"
    return f'<span class="bar {kind}" style="--from:{start:.4f};--to:{end:.4f}"><i></i></span>'


def key(color: str) -> str:
    return f'<i class="key" style="--key:{color}"></i>'


def minus(text: str) -> str:
    return text.replace("-", "−")
