"""Charts as inline SVG: they scale with the page and take its colors, light or dark."""

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
HOURS_UNTIL = timedelta(days=3)
"""A shorter stretch has its hours beside its days."""

ROUNDING = 1e-9
"""Of a step: what floats lose must not cost a chart a whole one."""


class Line(NamedTuple):
    """A named series of (moment, value)."""

    name: str
    color: str
    points: Sequence[tuple[datetime, float]]
    is_main: bool = False


def thin(points: Sequence[tuple[datetime, float]]) -> list[tuple[datetime, float]]:
    """At most POINTS_MAX points, the first and the last among them."""
    if len(points) <= POINTS_MAX:
        return list(points)
    step = (len(points) - 1) / (POINTS_MAX - 1)
    return [points[round(number * step)] for number in range(POINTS_MAX)]


def steps(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that span [low, high]."""
    span = high - low or abs(high) or 1.0
    raw = span / count
    size = 10 ** floor(log10(raw))
    width = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw)
    first = floor(low / width + ROUNDING)
    return [width * number for number in range(first, max(ceil(high / width - ROUNDING), first + 1) + 1)]


def line_chart(lines: Sequence[Line], show: Callable[[float], str], label: str, width: int = WIDTH) -> str:
    """Lines over time on a common scale; the main ones are drawn last and thicker."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return '<p class="none">No data.</p>'
    moments = [moment for line in drawn for moment, _ in line.points]
    first, last = min(moments), max(moments)
    if first == last:
        return '<p class="none">A line needs two hours; there is one so far.</p>'
    values = [value for line in drawn for _, value in line.points]
    grid = steps(min(values), max(values))
    bottom, top = grid[0], grid[-1]
    span = (last - first).total_seconds()

    def x(moment: datetime) -> float:
        return LEFT + (width - LEFT - RIGHT) * (moment - first).total_seconds() / span

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - value) / (top - bottom or 1.0)

    form = "%d %b" if last - first >= HOURS_UNTIL else "%d %b, %H:%M"
    parts = [_rule(y(value), show(value), width) for value in grid]
    parts += [
        f'<text class="tick" x="{x(moment):.0f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{moment:{form}}</text>'
        for moment, anchor in (
            (first, "start"),
            (first + (last - first) / 2, "middle"),
            (last, "end"),
        )
    ]
    for line in sorted(drawn, key=lambda each: each.is_main):
        path = " ".join(f"{x(moment):.1f},{y(value):.1f}" for moment, value in thin(line.points))
        kind = "main" if line.is_main else "thin"
        title = f"<title>{escape(line.name)}: {escape(show(line.points[-1][1]))}</title>"
        parts.append(f'<polyline class="{kind}" stroke="{line.color}" points="{path}">{title}</polyline>')
    return _svg(parts, HEIGHT, label, width)


def _rule(height: float, text: str, width: int = WIDTH) -> str:
    return (
        f'<line class="rule" x1="{LEFT}" x2="{width - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{height + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def _svg(parts: Sequence[str], height: int, label: str, width: int = WIDTH) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{body}</svg>'


def histogram(groups: Sequence[tuple[str, str, Sequence[float]]], low: float, high: float, label: str) -> str:
    """Shares of values by bin, one outline per (name, color, values); what lies beyond the ends is in the last bins."""
    bins = 48
    width = (high - low) / bins
    shares = []
    for _, _, values in groups:
        counts = [0] * bins
        for value in values:
            counts[min(bins - 1, max(0, int((value - low) / width)))] += 1
        shares.append([count / (len(values) or 1) for count in counts])
    top = max((max(each) for each in shares), default=0) or 1.0
    bar = (WIDTH - LEFT - RIGHT) / bins
    floor_y = HEIGHT - BOTTOM
    parts = [_rule(floor_y - (floor_y - TOP) * share / top, f"{100 * share:.1f} %") for share in (0, top / 2, top)]
    for (name, color, values), share in zip(groups, shares, strict=True):
        tops = [floor_y - (floor_y - TOP) * part / top for part in share]
        outline = " ".join(
            f"{LEFT + place * bar:.1f},{height:.1f} {LEFT + (place + 1) * bar:.1f},{height:.1f}"
            for place, height in enumerate(tops)
        )
        title = f"<title>{escape(name)}: {len(values):,} trades</title>"
        parts.append(f'<polyline class="main" stroke="{color}" points="{outline}">{title}</polyline>')
    zero = LEFT + (WIDTH - LEFT - RIGHT) * (0 - low) / (high - low)
    parts.append(f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="{TOP}" y2="{floor_y}"/>')
    for value in (low, low / 2, 0, high / 2, high):
        place = LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)
        parts.append(f'<text class="tick" x="{place:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{value:g} %</text>')
    return _svg(parts, HEIGHT, label)


def bars(rows: Sequence[tuple[str, float, str]], label: str) -> str:
    """Horizontal bars from a common zero: (name, value, text)."""
    height = 26
    low, high = min(0.0, *(value for _, value, _ in rows)), max(0.0, *(value for _, value, _ in rows))
    left, right = 130, 110
    span = high - low or 1.0

    def x(value: float) -> float:
        return left + (WIDTH - left - right) * (value - low) / span

    parts = []
    for place, (name, value, text) in enumerate(rows):
        y = place * height
        sign = "gain" if value >= 0 else "loss"
        start, width = min(x(0), x(value)), abs(x(value) - x(0))
        parts.append(
            f'<text class="tick" x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="{sign}" x="{start:.1f}" y="{y + 5}" width="{max(width, 1):.1f}" height="{height - 10}"/>'
            f'<text class="value" x="{max(x(0), x(value)) + 6:.1f}" y="{y + 17}">{escape(text)}</text>'
        )
    parts.append(f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="0" y2="{height * len(rows)}"/>')
    return _svg(parts, height * len(rows), label)


def interval(low: float | None, value: float, high: float | None, least: float, most: float) -> str:
    """A value and its interval on a small scale from `least` to `most`, with a mark at zero."""
    span = most - least or 1.0

    def x(number: float) -> float:
        return 4 + 152 * (min(max(number, least), most) - least) / span

    parts = [f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="2" y2="18"/>']
    if low is not None and high is not None:
        parts.append(f'<line class="range" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="10" y2="10"/>')
    sign = "gain" if value >= 0 else "loss"
    parts.append(f'<circle class="{sign}" cx="{x(value):.1f}" cy="10" r="3.5"/>')
    return f'<svg class="small" viewBox="0 0 160 20" aria-hidden="true">{"".join(parts)}</svg>'
