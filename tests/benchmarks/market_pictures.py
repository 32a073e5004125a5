"""Pictures of the market model as SVG files."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import ceil, floor, log10
from pathlib import Path
from statistics import median
from typing import NamedTuple

from support.market_fidelity import AT, cost_bp

from trader.core.clock import epoch_second
from trader.market.domain.markets import MARKETS, SIMULATED_MARKETS
from trader.market.sources.books import BookModel, CandlePath, Grid, TrailingDay
from trader.market.sources.files import Minutes
from trader.market.sources.minute_paths import MinutePaths

CRASH = datetime(2025, 2, 3, 1, 30, tzinfo=UTC)
CRASH_MINUTES = 60
AMOUNTS = (1_000.0, 20_000.0, 100_000.0, 500_000.0)
COLOURS = ("#1f6fb4", "#d1622b", "#3a8a3d", "#8457a5", "#8a6d3b", "#5b6770")

_WIDTH, _HEIGHT = 640, 300
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 30, 100, 45

Point = tuple[float, float]


class Line(NamedTuple):
    name: str
    points: Sequence[Point]


def _identity(value: float) -> float:
    return value


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    if is_log:
        decades = [10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1)]
        return [tick for tick in decades if low <= tick <= high]
    step = 10.0 ** floor(log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]


def chart(
    title: str, x_name: str, y_name: str, lines: Sequence[Line], *, log_x: bool = False, log_y: bool = False
) -> str:
    """Return a line chart as SVG, each line with its name at its end."""
    to_x: Callable[[float], float] = log10 if log_x else _identity
    to_y: Callable[[float], float] = log10 if log_y else _identity
    xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
    (left, right), (bottom, top) = (min(xs), max(xs)), (min(ys), max(ys))
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> Point:
        across = (to_x(x) - to_x(left)) / (to_x(right) - to_x(left))
        up = (to_y(y) - to_y(bottom)) / (to_y(top) - to_y(bottom))
        return round(_LEFT + across * wide, 1), round(_TOP + (1 - up) * tall, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13" font-weight="bold">{title}</text>',
        f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{x_name}</text>',
        f'<text transform="translate(14 {_TOP + tall / 2}) rotate(-90)" text-anchor="middle">{y_name}</text>',
    ]
    for tick in _ticks(left, right, is_log=log_x):
        x, _ = place(tick, bottom)
        parts.append(f'<path d="M{x} {_TOP}V{_TOP + tall}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x}" y="{_TOP + tall + 15}" text-anchor="middle">{tick:,g}</text>')
    for tick in _ticks(bottom, top, is_log=log_y):
        _, y = place(left, tick)
        parts.append(f'<path d="M{_LEFT} {y}H{_LEFT + wide}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:,.10g}</text>')
    name_y = float("-inf")
    for line, colour in sorted(zip(lines, COLOURS, strict=False), key=lambda pair: place(*pair[0].points[-1])[1]):
        way = "M" + "L".join(f"{x} {y}" for x, y in (place(*point) for point in line.points))
        parts.append(f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        end_x, end_y = place(*line.points[-1])
        name_y = max(end_y, name_y + 13)
        parts.append(f'<text x="{end_x + 5}" y="{name_y + 4}" fill="{colour}">{line.name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_paths(minutes: Minutes) -> str:
    """Draw five paths of the same candle, from five seeds."""
    grid = Grid(MARKETS["BTC"])
    place = next(n for n in range(5_000, len(minutes)) if 60 < minutes.high[n] - minutes.low[n] < 70)
    lines = [
        Line(
            f"seed {seed}",
            [(s, grid.number(m)) for s, m in enumerate(MinutePaths(f"{seed}:BTC", grid, minutes).draw(place))],
        )
        for seed in range(5)
    ]
    return chart("Five paths of one BTC candle", "second of the minute", "price", lines)


def draw_model(what: str) -> str:
    """Draw the spread or the depth of each market as a function of its stress."""
    lines = []
    for symbol, price in (("BTC", 95_000), ("ETH", 3_300), ("SOL", 200)):
        grid = Grid(MARKETS[symbol])
        points = []
        for number in range(41):
            stress = 0.5 * 200 ** (number / 40)
            quote = BookModel(grid, SIMULATED_MARKETS[symbol].calm).quote(AT, grid.nearest(price), stress, 0.85)
            if what == "spread":
                value = float((quote.ask - quote.bid) / quote.mark) / 2 * 1e4
            else:
                limit = float(quote.ask) * 1.001
                near = [level for level in quote.book.asks if float(level.price) <= limit]
                value = sum(float(level.price * level.quantity) for level in near) / 1e3
            points.append((stress, value))
        lines.append(Line(symbol, points))
    if what == "spread":
        return chart("Half spread", "stress", "basis points", lines, log_x=True, log_y=True)
    return chart("Depth within 10 bp of the best price", "stress", "thousand USD", lines, log_x=True, log_y=True)


def crash_costs(symbol: str, minutes: Minutes) -> tuple[list[float], list[Line]]:
    """Return the median costs of a calm hour the day before, and of each minute of the crash."""
    grid, day = Grid(MARKETS[symbol]), TrailingDay(float(MARKETS[symbol].tick), minutes)
    paths, model = MinutePaths(f"0:{symbol}", grid, minutes), BookModel(grid, SIMULATED_MARKETS[symbol].calm)
    first = bisect_left(minutes.minute, epoch_second(CRASH) // 60)

    def costs(place: int) -> list[float]:
        """Return the cost of each amount, the median of every tenth second."""
        marks, before = paths.draw(place), paths.draw(place - 1)
        path = CandlePath(model, marks, before=before, usual_range=day.usual_range(place), busyness=day.busyness(place))
        quotes = [path.quote(second, AT) for second in range(5, 60, 10)]
        return [median(cost_bp(q.book.asks, float(q.mark), amount) for q in quotes) for amount in AMOUNTS]

    calm = [costs(place) for place in range(first - 1440, first - 1380)]
    fallen = [costs(place) for place in range(first, first + CRASH_MINUTES)]
    lines = [
        Line(f"{amount / 1000:g},000", [(minute, each[number]) for minute, each in enumerate(fallen)])
        for number, amount in enumerate(AMOUNTS)
    ]
    return [median(each) for each in zip(*calm, strict=True)], lines


def write_pictures(folder: Path, recorded: Mapping[str, Minutes]) -> None:
    """Write the pictures of docs/exchange.md, and print the table of costs next to them."""
    (folder / "market-paths.svg").write_text(draw_paths(recorded["BTC"]))
    for what in ("spread", "depth"):
        (folder / f"market-{what}.svg").write_text(draw_model(what))
    for symbol, minutes in recorded.items():
        calm, lines = crash_costs(symbol, minutes)
        worst = [max(cost for _, cost in line.points) for line in lines]
        for name, costs in (("calm", calm), ("worst minute of the crash", worst)):
            print(f"| {symbol}, {name} | " + " | ".join(f"{cost:.2f}" for cost in costs) + " |")
        if symbol == "ETH":
            picture = chart(
                "Cost of an order in USD, ETH, 3 February 2025",
                "minute after 01:30 UTC",
                "basis points",
                lines,
                log_y=True,
            )
            (folder / "market-crash.svg").write_text(picture)
