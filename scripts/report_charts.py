"""Charts of the reports as inline SVG, which scale with the page and take its colors, light or dark."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

WIDTH = 1100
CARD_WIDTH = 540
HEIGHT = 260
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 10, 24
POINTS_MAX = 240
BINS = 48
BAR_HEIGHT, BARS_LEFT, BARS_RIGHT = 26, 130, 110

DAYS_FROM = timedelta(days=3)
"""A shorter time axis shows hours beside its days."""

ROUNDING = 1e-9
"""Of a step: floating-point errors below it do not add a step to a scale."""


class Line(NamedTuple):
    """A named series of (moment, value)."""

    name: str
    color: str
    points: Sequence[tuple[datetime, float]]
    is_main: bool = False


def steps(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that span [low, high]."""
    span = high - low or abs(high) or 1.0
    raw = span / count
    size = 10 ** floor(log10(raw))
    width = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw)
    first = floor(low / width + ROUNDING)
    return [width * number for number in range(first, max(ceil(high / width - ROUNDING), first + 1) + 1)]


def line_chart(lines: Sequence[Line], show: Callable[[float], str], label: str, width: int = WIDTH) -> str:
    """Draw lines over time on a common scale; the main ones are drawn last and thicker."""
    lines = sorted((line for line in lines if line.points), key=lambda line: line.is_main)
    if not lines:
        return '<p class="none">No data.</p>'
    first = min(line.points[0][0] for line in lines)
    last = max(line.points[-1][0] for line in lines)
    if first == last:
        return '<p class="none">A line needs two hours; there is one so far.</p>'
    values = [value for line in lines for _, value in line.points]
    grid = steps(min(values), max(values))

    def x(moment: datetime) -> float:
        return LEFT + (width - LEFT - RIGHT) * ((moment - first) / (last - first))

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (grid[-1] - value) / (grid[-1] - grid[0])

    form = "%d %b" if last - first >= DAYS_FROM else "%d %b, %H:%M"
    parts = [_rule(y(value), show(value), width) for value in grid]
    for moment, anchor in ((first, "start"), (first + (last - first) / 2, "middle"), (last, "end")):
        parts.append(_tick(x(moment), HEIGHT - 6, f"{moment:{form}}", anchor))
    for line in lines:
        every = len(line.points) // POINTS_MAX + 1
        drawn = [*line.points[::every], line.points[-1]]
        path = " ".join(f"{x(moment):.1f},{y(value):.1f}" for moment, value in drawn)
        title = f"{line.name}: {show(line.points[-1][1])}"
        parts.append(_polyline("main" if line.is_main else "thin", line.color, path, title))
    return _svg(parts, HEIGHT, label, width)


def histogram(groups: Sequence[tuple[str, str, Sequence[float]]], low: float, high: float, label: str) -> str:
    """Draw the share of values in each bin, one outline per (name, color, values); outliers are in the last bins."""
    shares = []
    for _, _, values in groups:
        counts = [0] * BINS
        for value in values:
            counts[min(BINS - 1, max(0, int((value - low) / (high - low) * BINS)))] += 1
        shares.append([count / (len(values) or 1) for count in counts])
    top = max((max(each) for each in shares), default=0.0) or 1.0
    bar = (WIDTH - LEFT - RIGHT) / BINS

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share / top

    parts = [_rule(y(share), f"{100 * share:.1f} %", WIDTH) for share in (0, top / 2, top)]
    for (name, color, values), outline in zip(groups, shares, strict=True):
        path = " ".join(
            f"{LEFT + (place + side) * bar:.1f},{y(share):.1f}"
            for place, share in enumerate(outline)
            for side in (0, 1)
        )
        parts.append(_polyline("main", color, path, f"{name}: {len(values):,} trades"))
    parts.append(_zero(x(0), TOP, HEIGHT - BOTTOM))
    parts += [_tick(x(value), HEIGHT - 6, f"{value:g} %") for value in (low, low / 2, 0, high / 2, high)]
    return _svg(parts, HEIGHT, label)


def bars(rows: Sequence[tuple[str, float, str]], label: str) -> str:
    """Draw horizontal bars from a common zero: (name, value, text)."""
    low, high = min(0.0, *(value for _, value, _ in rows)), max(0.0, *(value for _, value, _ in rows))

    def x(value: float) -> float:
        return BARS_LEFT + (WIDTH - BARS_LEFT - BARS_RIGHT) * (value - low) / (high - low or 1.0)

    parts = []
    for place, (name, value, text) in enumerate(rows):
        y, start, end = place * BAR_HEIGHT, *sorted((x(0), x(value)))
        parts += [
            _tick(BARS_LEFT - 8, y + 17, name, "end"),
            f'<rect class="{"gain" if value >= 0 else "loss"}" x="{start:.1f}" y="{y + 5}" '
            f'width="{max(end - start, 1):.1f}" height="{BAR_HEIGHT - 10}"/>',
            f'<text class="value" x="{end + 6:.1f}" y="{y + 17}">{escape(text)}</text>',
        ]
    parts.append(_zero(x(0), 0, BAR_HEIGHT * len(rows)))
    return _svg(parts, BAR_HEIGHT * len(rows), label)


def interval(bounds: tuple[float, float] | None, value: float, least: float, most: float) -> str:
    """Draw a value and its interval on a small scale from `least` to `most`, with a mark at zero."""

    def x(number: float) -> float:
        return 4 + 152 * (min(max(number, least), most) - least) / (most - least or 1.0)

    parts = [_zero(x(0), 2, 18)]
    if bounds is not None:
        parts.append(f'<line class="range" x1="{x(bounds[0]):.1f}" x2="{x(bounds[1]):.1f}" y1="10" y2="10"/>')
    parts.append(f'<circle class="{"gain" if value >= 0 else "loss"}" cx="{x(value):.1f}" cy="10" r="3.5"/>')
    return f'<svg class="small" viewBox="0 0 160 20" aria-hidden="true">{"".join(parts)}</svg>'


def _svg(parts: Sequence[str], height: int, label: str, width: int = WIDTH) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{body}</svg>'


def _rule(y: float, text: str, width: int) -> str:
    line = f'<line class="rule" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _tick(LEFT - 6, y + 3.5, text, "end")


def _tick(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{x:.0f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _zero(x: float, top: float, bottom: float) -> str:
    return f'<line class="zero" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'


def _polyline(kind: str, color: str, path: str, title: str) -> str:
    return f'<polyline class="{kind}" stroke="{color}" points="{path}"><title>{escape(title)}</title></polyline>'
