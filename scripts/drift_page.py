"""The picture of the drift: one HTML file with nothing outside of it, a row of dots per market, side and size."""

from collections.abc import Sequence
from html import escape
from random import Random
from typing import NamedTuple

from report_charts import steps
from report_page import STYLE

from trader.domain.live.drift import Figures, figures

WIDTH, LEFT, RIGHT = 1100, 190, 20
ROW, BOTTOM = 46, 30
DOTS_MAX = 300
SHOWN = 0.98
"""The share of errors that the scale spans; what lies beyond is drawn at its ends."""

MORE_STYLE = """
.dot { fill: var(--accent); opacity: .4 } .span { stroke: var(--ink); stroke-width: 1.5 }
.middle { stroke: var(--ink); stroke-width: 3 } svg text.name { fill: var(--ink); font-size: 12.5px }
"""


class Group(NamedTuple):
    """The errors of one market, side and size, in basis points, at least one."""

    symbol: str
    side: str
    size: str
    errors: Sequence[float]
    figures: Figures


def page(name: str, groups: Sequence[Group], thin: int, unsimulated: int) -> str:
    """The whole page."""
    every = figures([error for group in groups for error in group.errors])
    tiles = (
        ("fills compared", f"{every.fills:,}"),
        ("mean error", f"{every.mean:+.2f} bps"),
        ("median error", f"{every.median:+.2f} bps"),
        ("95 % are within", f"{every.p95:.2f} bps"),
        ("worst", f"{every.worst:+.2f} bps"),
    )
    shown = "".join(f'<div class="tile"><b>{_minus(value)}</b><span>{title}</span></div>' for title, value in tiles)
    missing = [
        words
        for count, words in (
            (thin, f"{thin:,} fills were larger than the book that was shown, and have no price on paper."),
            (unsimulated, f"{unsimulated:,} fills were never simulated."),
        )
        if count
    ]
    body = (
        f"<h1>Paper against the venue</h1><p>{escape(name)}: each fill of the venue, simulated on the book of the "
        "moment its order was sent. Errors are in basis points of paper's price; right of zero the venue is dearer.</p>"
        f'<div class="tiles">{shown}</div>'
        "<section><h2>Errors</h2><p>A dot is a fill. The thick mark is the median, the line spans the middle 90 %; "
        f'what lies beyond the scale is drawn at its end.</p><div class="card">{chart(groups)}</div></section>'
        f"<section><h2>Figures</h2><p>In basis points; p95 is of the errors without sign. {' '.join(missing)}</p>"
        f"{_table(groups)}</section>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Paper against the venue: {escape(name)}</title><style>{STYLE}{MORE_STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def chart(groups: Sequence[Group]) -> str:
    """One row per group on a common scale of basis points, zero in it."""
    every = sorted(abs(error) for group in groups for error in group.errors)
    reach = max(every[int(SHOWN * (len(every) - 1))], 0.5)
    grid = steps(-reach, reach)
    low, high = grid[0], grid[-1]
    height = ROW * len(groups) + BOTTOM

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (min(max(value, low), high) - low) / (high - low)

    parts = []
    for value in grid:
        kind = "zero" if value == 0 else "rule"
        parts.append(
            f'<line class="{kind}" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="0" y2="{height - BOTTOM}"/>'
            f'<text class="tick" x="{x(value):.1f}" y="{height - 10}" text-anchor="middle">'
            f"{_minus(f'{value:+g}')}</text>"
        )
    for number, group in enumerate(groups):
        middle = ROW * number + ROW / 2
        rng = Random(f"{group.symbol}:{group.side}:{group.size}")
        errors = list(group.errors)
        drawn = errors if len(errors) <= DOTS_MAX else rng.sample(errors, DOTS_MAX)
        parts += [
            f'<circle class="dot" cx="{x(error):.1f}" cy="{middle + rng.uniform(-13, 13):.1f}" r="2.6"/>'
            for error in drawn
        ]
        ordered = sorted(errors)
        first, last = ordered[int(0.05 * (len(errors) - 1))], ordered[-1 - int(0.05 * (len(errors) - 1))]
        at = x(group.figures.median)
        label = f"{group.symbol} {group.side}, {group.size}"
        parts.append(
            f'<line class="span" x1="{x(first):.1f}" x2="{x(last):.1f}" y1="{middle}" y2="{middle}"/>'
            f'<line class="middle" x1="{at:.1f}" x2="{at:.1f}" y1="{middle - 9}" y2="{middle + 9}"/>'
            f'<text class="name" x="{LEFT - 14}" y="{middle + 4}" text-anchor="end">{escape(label)}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Errors in basis points">{"".join(parts)}</svg>'


def _table(groups: Sequence[Group]) -> str:
    names = ("market", "side", "size", "fills", "mean", "median", "p95", "worst")
    heads = "".join(f'<th class="{"text" if place < 3 else ""}">{name}</th>' for place, name in enumerate(names))
    rows = "".join(
        f'<tr><td>{escape(group.symbol)}</td><td class="text">{escape(group.side)}</td>'
        f'<td class="text">{escape(group.size)}</td>'
        f"<td>{one.fills:,}</td><td>{_minus(f'{one.mean:+.2f}')}</td><td>{_minus(f'{one.median:+.2f}')}</td>"
        f"<td>{one.p95:.2f}</td><td>{_minus(f'{one.worst:+.2f}')}</td></tr>"
        for group in groups
        for one in (group.figures,)
    )
    return f'<div class="scroll"><table><tr>{heads}</tr>{rows}</table></div>'


def _minus(text: str) -> str:
    return text.replace("-", "−")
