"""Judgments of the market model: whether generated paths are fair to trade on, and the cost of trading on its books."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import permutations, product
from random import Random
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import numpy

from trader.market.domain.markets import MARKETS, SIMULATED_MARKETS, Level, Quote
from trader.market.sources.books import BookModel, CandlePath, Grid, TrailingDay
from trader.market.sources.files import Minutes
from trader.market.sources.minute_paths import MinutePaths

AT = datetime(2025, 1, 1, tzinfo=UTC)
ORDER = 20_000.0
"""The market order whose cost is judged, in quote currency."""

Paths = numpy.ndarray[tuple[int, int], numpy.dtype[numpy.float64]]
"""Log prices in basis points: a row for each minute, a column for each of its seconds."""
OfMinutes = numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]


def log_paths(grid: Grid, marks: Sequence[Sequence[int]]) -> Paths:
    return numpy.log(numpy.array(marks, dtype=numpy.float64) / grid.halves_per_unit) * 1e4


def paths_together(recorded: Mapping[str, Minutes], seed: int) -> dict[str, MinutePaths]:
    """Return the paths of each market, drawn together with those of the markets before it."""
    paths: dict[str, MinutePaths] = {}
    for symbol, minutes in recorded.items():
        paths[symbol] = MinutePaths(f"{seed}:{symbol}", Grid(MARKETS[symbol]), minutes, list(paths.values()))
    return paths


def draw_together(recorded: Mapping[str, Minutes], seed: int) -> dict[str, list[list[int]]]:
    """Draw the marks of markets with the same recorded minutes: one row per minute."""
    paths = paths_together(recorded, seed)
    marks: dict[str, list[list[int]]] = {symbol: [] for symbol in recorded}
    for place in range(min(map(len, recorded.values()))):
        for symbol, rows in marks.items():
            rows.append(paths[symbol].draw(place))
    return marks


class Rule(NamedTuple):
    """A rule that follows, at `second`, the price move of the last `look_back` seconds until `exit_second`.

    `t` is its mean gain before costs over the standard error. Negative: the opposite rule gains.
    """

    t: float
    look_back: int
    second: int
    exit_second: int


def judge_rules(paths: Sequence[Paths], step: int, *, turned_by: int | None = None) -> list[Rule]:
    """Return all rules on a grid of `step` seconds, each over all markets; some look back into the previous minute.

    With `turned_by`, follow the rule or its opposite, whichever gained more in this many previous minutes.
    """
    rules = []
    series = [path.reshape(-1) for path in paths]
    starts = [numpy.arange(1, len(path)) * 60 for path in paths]
    for second in range(0, 60, step):
        for look_back in range(step, 61, step):
            past = [
                numpy.sign(prices[start + second] - prices[start + second - look_back])
                for prices, start in zip(series, starts, strict=True)
            ]
            for exit_second in sorted({*range(second + step, 60, step), 59} - {second}):
                earned = [
                    sign * (prices[start + exit_second] - prices[start + second])
                    for sign, prices, start in zip(past, series, starts, strict=True)
                ]
                if turned_by is not None:
                    earned = [turned(each, turned_by) for each in earned]
                variance = sum(each.var() * len(each) for each in earned)
                t = sum(each.sum() for each in earned) / variance**0.5 if variance else 0.0
                rules.append(Rule(float(t), look_back, second, exit_second))
    return rules


def turned(earned: OfMinutes, minutes: int) -> OfMinutes:
    """Return the gains of following the opposite of a rule whenever it lost in this many previous minutes."""
    sums = numpy.concatenate([[0.0], numpy.cumsum(earned)])
    sides: OfMinutes = numpy.sign(sums[minutes:-1] - sums[: -minutes - 1])
    return sides * earned[minutes:]


class Passed(NamedTuple):
    """The mean gain of following prices that pass a level to the close, in basis points before costs.

    `recorded_bp` is by the candles alone, from the level itself, and 0 for any continuous martingale; no path within
    them can remove it. `drawn_bp` is from the first price at or beyond the level that a drawn path shows.
    """

    recorded_bp: float
    drawn_bp: float
    times: int


def judge_passed(paths: Paths, minutes: Minutes, usual_bp: OfMinutes, distance: float) -> Passed:
    """Follow prices that pass `distance` usual ranges above or below the open, once per side and minute."""
    opened, high, low, close = (
        numpy.log(numpy.array(column)) * 1e4 for column in (minutes.open, minutes.high, minutes.low, minutes.close)
    )
    recorded, drawn = [], []
    for side, extreme in ((1.0, high), (-1.0, low)):
        reach = distance * usual_bp
        passed = (usual_bp > 0) & (side * (extreme - opened) >= reach)
        recorded.append((side * (close - opened) - reach)[passed])
        moves = side * (paths - paths[:, :1])
        has_passed = moves >= reach[:, None]
        shown = (usual_bp > 0) & has_passed.any(axis=1)
        entries = moves[numpy.arange(len(moves)), has_passed.argmax(axis=1)]
        drawn.append((moves[:, -1] - entries)[shown])
    gains, of_paths = numpy.concatenate(recorded), numpy.concatenate(drawn)
    return Passed(float(gains.mean()), float(of_paths.mean()), len(gains))


class CrossRule(NamedTuple):
    """A rule that trades one market, at `second`, on its move and another market's in the last `look_back` seconds.

    `leads` follows the other market; without it, the rule expects the two to converge, and buys the market that rose by
    less than beta times the other's move. `t` and `mean_bp` describe its gain before costs, in basis points of its
    market.
    """

    t: float
    look_back: int
    second: int
    exit_second: int
    traded: str
    watched: str
    leads: bool
    mean_bp: float


def judge_cross_rules(paths: Mapping[str, Paths], step: int, followed: OfMinutes | None = None) -> list[CrossRule]:
    """Return all rules across two markets on a grid of `step` seconds; both markets have the same minutes.

    They are applied in the minutes for which `followed` is not 0; without it, in all but the first.
    """
    rules = []
    series = {symbol: path.reshape(-1) for symbol, path in paths.items()}
    minutes = numpy.arange(1, min(map(len, paths.values())))
    starts = (minutes if followed is None else minutes[followed[1:] != 0]) * 60
    for second, look_back in product(range(0, 60, step), range(step, 61, step)):
        now = {symbol: prices[starts + second] for symbol, prices in series.items()}
        past = {symbol: now[symbol] - prices[starts + second - look_back] for symbol, prices in series.items()}
        signals = []
        for traded, watched in permutations(series, 2):
            beta = float(past[traded] @ past[watched]) / float(past[watched] @ past[watched])
            signals.append((traded, watched, True, numpy.sign(past[watched])))
            signals.append((traded, watched, False, numpy.sign(beta * past[watched] - past[traded])))
        for exit_second in sorted({*range(second + step, 60, step), 59} - {second}):
            later = {symbol: prices[starts + exit_second] - now[symbol] for symbol, prices in series.items()}
            for traded, watched, leads, sign in signals:
                earned = sign * later[traded]
                mean, deviation = float(earned.mean()), float(earned.std())
                t = mean / deviation * len(earned) ** 0.5 if deviation else 0.0
                rules.append(CrossRule(t, look_back, second, exit_second, traded, watched, leads, mean))
    return rules


def is_inside(rule: Rule | CrossRule) -> bool:
    """Whether the rule uses only its own minute."""
    return rule.look_back <= rule.second


AnyRule = TypeVar("AnyRule", Rule, CrossRule)


def worst(rules: Sequence[AnyRule]) -> AnyRule:
    return max(rules, key=lambda rule: abs(rule.t))


def correlation(paths: Paths, other: Paths, seconds: int) -> float:
    """Return the correlation of two markets' returns over this many seconds within a minute."""
    first, second = ((path[:, seconds::seconds] - path[:, :-seconds:seconds]).reshape(-1) for path in (paths, other))
    return float(numpy.corrcoef(first, second)[0, 1])


class Sample(NamedTuple):
    """A book at a random second of a minute: the minute's range, half the spread, the depth of one side within 2 basis
    points of the mid, and what orders cost against the mid; all but the depth in basis points."""

    range_bp: float
    half_spread_bp: float
    depth: float
    cost_bp: float


def cost_bp(side: Sequence[Level], mid: float, amount: float) -> float:
    """Return the distance of the average price of an order of this amount from the mid. The book must fill it."""
    left, quantity = amount, 0.0
    for level in side:
        taken = min(left, float(level.price) * float(level.quantity))
        quantity += taken / float(level.price)
        left -= taken
    assert left < 1e-6 * amount, "the book is too thin"
    return abs(amount / quantity / mid - 1) * 1e4


def sample(quote: Quote, range_bp: float) -> Sample:
    mid, book = float(quote.mark), quote.book
    depth = sum(float(level.price * level.quantity) for level in book.asks if float(level.price) <= mid * 1.0002)
    half_spread = float(quote.ask - quote.bid) / 2 / mid * 1e4
    return Sample(range_bp, half_spread, depth, cost_bp(book.asks, mid, ORDER))


def recorded_quotes(symbol: str, minutes: Minutes, seed: int) -> Iterator[tuple[float, Quote]]:
    """Yield, for each minute but the first, its range in basis points and its quote at a random second."""
    grid, random = Grid(MARKETS[symbol]), Random(seed)
    paths, day = MinutePaths(f"{seed}:{symbol}", grid, minutes), TrailingDay(float(MARKETS[symbol].tick), minutes)
    model, before = BookModel(grid, SIMULATED_MARKETS[symbol].calm), paths.draw(0)
    for place in range(1, len(minutes)):
        row = minutes[place]
        marks = paths.draw(place)
        path = CandlePath(model, marks, before=before, usual_range=day.usual_range(place), busyness=day.busyness(place))
        yield (row.high - row.low) / row.open * 1e4, path.quote(random.randrange(60), AT)
        before = marks


class Costs(NamedTuple):
    """Figures of a market's books: medians of the calmer half of its minutes, by range, and the costs of the others."""

    half_spread_bp: float
    depth: float
    cost_bp: float
    violent_cost_bp: float
    """The mean in the most violent 1 % of the minutes."""
    fast_cost_bp: float | None
    """The mean in minutes of more than 100 basis points."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Costs":
        by_range = sorted(samples)
        calm, violent = by_range[: len(by_range) // 2], by_range[-max(1, len(by_range) // 100) :]
        fast = [each.cost_bp for each in by_range if each.range_bp > 100]
        return cls(
            median(each.half_spread_bp for each in calm),
            median(each.depth for each in calm),
            median(each.cost_bp for each in calm),
            fmean(each.cost_bp for each in violent),
            fmean(fast) if fast else None,
        )


CALM_SPREADS: Mapping[str, float] = {"BTC": 0.1, "ETH": 0.3, "SOL": 0.6}
CALM_DEPTHS: Mapping[str, float] = {"BTC": 300_000, "ETH": 200_000, "SOL": 100_000}
"""What calm books are calibrated to."""
