"""Fidelity of the market model: the fairness of its paths, and the cost of trading on its books.

scripts/benchmark fidelity [folder of kline files] [--pictures folder]
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import combinations, product
from pathlib import Path
from random import Random
from time import perf_counter

import numpy
from benchmarks.figures import Figures
from benchmarks.market_pictures import write_pictures
from support.candles import FOLDER
from support.market_fidelity import (
    CALM_DEPTHS,
    CALM_SPREADS,
    Costs,
    CrossRule,
    OfMinutes,
    Paths,
    Rule,
    Sample,
    correlation,
    draw_together,
    is_inside,
    judge_cross_rules,
    judge_passed,
    judge_rules,
    log_paths,
    recorded_quotes,
    sample,
    worst,
)
from support.searching_judge import DrawnMarket, measure_motion, search

from trader.core.clock import epoch_second
from trader.market.domain.markets import MARKETS, SIMULATED_MARKETS
from trader.market.sources.books import DAY_MINUTES, Grid, marks_of_candle
from trader.market.sources.files import Minutes, find_files, read_market
from trader.market.sources.rows import surcharged
from trader.market.sources.synthetic import SyntheticSource
from trader.market.sources.walks import walk_pool


def closes_at_extremes(minutes: Minutes) -> OfMinutes:
    """Return 1 for each minute that closed exactly at its high, -1 at its low, and 0 for the others."""
    high, low, close = (numpy.array(column) for column in (minutes.high, minutes.low, minutes.close))
    at_extremes: OfMinutes = numpy.where(close == high, 1.0, 0.0) - numpy.where(close == low, 1.0, 0.0)
    return at_extremes


def judge_first_second(path: Paths, minutes: Minutes) -> tuple[float, float]:
    """Follow the first price of each minute, against the close of the candle before, to the last second.

    Return the t and the mean, in basis points, of the gains. The close has all recorded digits, which the price on the
    market's grid may lack: a grid that rounds an open differently from the close before tells which way.
    """
    closes = numpy.log(numpy.array(minutes.close)) * 1e4
    follows = numpy.diff(numpy.array(minutes.minute)) == 1
    earned = (numpy.sign(path[1:, 0] - closes[:-1]) * (path[1:, -1] - path[1:, 0]))[follows]
    return float(earned.mean() / earned.std() * len(earned) ** 0.5), float(earned.mean())


def momentum_of_candles(watched: Minutes, traded: Minutes) -> tuple[float, float]:
    """Follow a close of one market exactly at its high or low, by trading it or another market through the next minute.

    Return the t and the mean, in basis points, of the gains, using only closes and opens.
    """
    opened, close = numpy.array(traded.open), numpy.array(traded.close)
    sign = closes_at_extremes(watched)[:-1]
    earned = (sign * (close / opened - 1)[1:])[sign != 0] * 1e4
    return float(earned.mean() / earned.std() * len(earned) ** 0.5), float(earned.mean())


SEEDS = (10, 11, 12)
"""None of them was used when the way to draw paths, and its few numbers, were chosen."""
STEP_S = 5
TURNED_BY = (60, 240, 1440)
"""In minutes."""
T_MAX = 4.0
CROSS_STEP_S = 10
CROSS_T_MAX = 6.0
CROSS_MEAN_BP_MAX = 0.3
VARIANCE_RATIO = (0.9, 1.15)
AUTOCORRELATION_MAX = 0.01
SECOND_SHARE_MAX = 1.3
LEARNED, TRIED = range(7 * DAY_MINUTES, 21 * DAY_MINUTES), range(21 * DAY_MINUTES, 34 * DAY_MINUTES)
"""The minutes on which the boosted model learns and is tried, each with another seed."""
BEST, BEST_OF_ALL = 0.2, 0.05
"""The fractions of the moments in which the boosted model trades; the second one at zero fees."""
WIDE_NET_BP_MAX = 1.5
"""January 2025 gave away more than the mean of the two months."""
SEARCHED_NET_BP_MAX = {"BTC": 0.3, "ETH": 0.0, "SOL": 0.0}
PASSED = (0.02, 0.1, 0.35, 1.0, 2.0)
"""In usual ranges from the open."""
POOL_S_MAX = 3.0
DRAW_US_MAX = 500.0
RATIO_MIN = 8.0
FAST_BP_MIN = 3.0
TOLERANCE = 0.2
SYNTHETIC_HOURS = 250


def show_rules(figures: Figures, name: str, rules: Sequence[Rule], *, t_max: float | None = None) -> None:
    strongest = worst(rules)
    rms = (sum(rule.t**2 for rule in rules) / len(rules)) ** 0.5
    where = f"{name}: {len(rules)} rules, largest |t|"
    figures.show(where, abs(strongest.t), "", reference=("root mean square", rms), at_most=t_max)
    print(
        f"    its rule: look back {strongest.look_back} s at second {strongest.second}, "
        f"exit at second {strongest.exit_second}"
    )


def show_cross_rules(figures: Figures, name: str, rules: Sequence[CrossRule], *, is_judged: bool = True) -> None:
    strongest, dearest = worst(rules), max(abs(rule.mean_bp) for rule in rules)
    where = f"{name}: {len(rules)} rules across markets, largest |t|"
    figures.show(where, abs(strongest.t), "", at_most=CROSS_T_MAX, is_judged=is_judged)
    how = "leads" if strongest.leads else "and the other meet again"
    print(
        f"    its rule: {strongest.watched} {how}, trade {strongest.traded} at second {strongest.second}, look back "
        f"{strongest.look_back} s, exit at second {strongest.exit_second}: {strongest.mean_bp:+.2f} bp"
    )
    where = f"{name}: largest mean across markets"
    figures.show(where, dearest, "bp", at_most=CROSS_MEAN_BP_MAX, is_judged=is_judged)


def judge_across(figures: Figures, name: str, paths: Mapping[str, Paths], at_extremes: OfMinutes) -> None:
    """Judge how well markets predict each other within a minute and, where none closed at an extreme, the next minute.

    After a close at an extreme the candles themselves continue, which no path can remove.
    """
    rules = judge_cross_rules(paths, CROSS_STEP_S)
    show_cross_rules(figures, f"{name}, inside a minute", list(filter(is_inside, rules)))
    into_next = [rule for rule in rules if not is_inside(rule)]
    show_cross_rules(figures, f"{name}, into the next", into_next, is_judged=False)
    follows_none = numpy.concatenate([[0.0], at_extremes[:-1] == 0])
    into_next = [rule for rule in judge_cross_rules(paths, CROSS_STEP_S, follows_none) if not is_inside(rule)]
    show_cross_rules(figures, f"{name}, into the next after no extreme", into_next)
    for pair, other in combinations(paths, 2):
        spans = (1, 5, 15, 30, 59)
        shown = ", ".join(f"{span} s {correlation(paths[pair], paths[other], span):.2f}" for span in spans)
        print(f"    correlation of {pair} and {other}: {shown}")


def judge_within(figures: Figures, name: str, paths: Mapping[str, Paths]) -> None:
    """Judge how well a market's past predicts its future, for each market and for all together."""
    for symbol, path in paths.items():
        rules = judge_rules([path], STEP_S)
        show_rules(figures, f"{name}, {symbol}, inside a minute", list(filter(is_inside, rules)), t_max=T_MAX)
    rules = judge_rules(list(paths.values()), STEP_S)
    show_rules(figures, f"{name}, inside a minute", list(filter(is_inside, rules)), t_max=T_MAX)
    into_next = [rule for rule in rules if rule.second and not is_inside(rule)]
    show_rules(figures, f"{name}, into the next", into_next, t_max=T_MAX)
    show_rules(figures, f"{name}, from the open on", [rule for rule in rules if not rule.second])
    for minutes in TURNED_BY:
        rules = list(filter(is_inside, judge_rules(list(paths.values()), STEP_S, turned_by=minutes)))
        show_rules(figures, f"{name}, inside a minute, by what the rule earned in {minutes} minutes", rules)


def judge_first_seconds(
    figures: Figures, name: str, paths: Mapping[str, Paths], recorded: Mapping[str, Minutes]
) -> None:
    """Judge whether the first price of a minute, against the last recorded close, tells where the minute goes."""
    for symbol, path in paths.items():
        t, mean_bp = judge_first_second(path, recorded[symbol])
        figures.show(f"{name}, {symbol}, follow the first second, |t|", abs(t), "", at_most=T_MAX)
        print(f"    its mean: {mean_bp:+.3f} bp")


def show_passed(
    figures: Figures, name: str, markets: Mapping[str, DrawnMarket], recorded: Mapping[str, Minutes]
) -> None:
    """Show what following a price beyond a level earns on the drawn paths, beside what the candles themselves give."""
    for (symbol, market), distance in product(markets.items(), PASSED):
        found = judge_passed(market.paths, recorded[symbol], market.usual_bp, distance)
        where = f"{name}, {symbol}, follow a price beyond {distance:g} usual ranges"
        figures.show(where, found.drawn_bp, "bp")
        print(f"    by the candles alone: {found.recorded_bp:+.2f} bp, {found.times:,} times")


def judge_motion(figures: Figures, name: str, markets: Mapping[str, DrawnMarket]) -> None:
    """Judge how evenly the variance of a minute is spread over its seconds: a martingale's is even."""
    for symbol, market in markets.items():
        motion = measure_motion(market.paths[DAY_MINUTES:], market.usual_bp[DAY_MINUTES:])
        low, high = VARIANCE_RATIO
        where = f"{name}, {symbol}"
        figures.show(f"{where}, variance ratio of 1 s", motion.variance_ratio, "", at_least=low, at_most=high)
        size = abs(motion.autocorrelation)
        figures.show(f"{where}, autocorrelation of seconds, size", size, "", at_most=AUTOCORRELATION_MAX)
        share = motion.largest_share
        figures.show(f"{where}, largest variance of a second / mean", share, "", at_most=SECOND_SHARE_MAX)
        print(f"    autocorrelation {motion.autocorrelation:+.3f}, largest variance at second {motion.largest_at}")


def judge_search(
    figures: Figures, name: str, learned: Mapping[str, DrawnMarket], tried: Mapping[str, DrawnMarket]
) -> None:
    """Judge what a boosted model earns in its best moments after the spread, in weeks and with a seed it never saw.

    Where anyone can trade at any second without fees, spreads are wider by what it earned on average in two months.
    """
    for symbol, alone in product(tried, (True, False)):
        row = SIMULATED_MARKETS[symbol]
        free = surcharged(row, tried[symbol].minutes.range_bp, Decimal(0))
        books = (row.calm, BEST), (free.calm, BEST_OF_ALL)
        usual, wide = search(symbol, learned, tried, (LEARNED, TRIED), books, alone=alone)
        where = f"{name}, boosted model, {symbol} by {'itself' if alone else 'all markets'}"
        figures.show(f"{where}, best fifth, net", usual.net_bp, "bp", at_most=SEARCHED_NET_BP_MAX[symbol])
        print(f"    gross {usual.gross_bp:+.2f} bp, t of the net {usual.t:+.1f}")
        figures.show(
            f"{where}, best twentieth, net of the spread at zero fees", wide.net_bp, "bp", at_most=WIDE_NET_BP_MAX
        )


def judge_paths(figures: Figures, recorded: Mapping[str, Minutes]) -> None:
    grids = {symbol: Grid(MARKETS[symbol]) for symbol in recorded}
    began_s = perf_counter()
    walk_pool()
    figures.show("pool of walks", perf_counter() - began_s, "s", at_most=POOL_S_MAX)
    markets: list[dict[str, DrawnMarket]] = []
    for seed in SEEDS:
        began_s = perf_counter()
        marks = draw_together(recorded, seed)
        each_us = (perf_counter() - began_s) / sum(map(len, marks.values())) * 1e6
        figures.show(f"seed {seed}: a minute's path", each_us, "µs", at_most=DRAW_US_MAX)
        misses = sum(
            (min(path), max(path), path[0], path[-1]) != grids[symbol].corners(minutes[place])
            for symbol, minutes in recorded.items()
            for place, path in enumerate(marks[symbol])
        )
        figures.show(f"seed {seed}: paths that miss their candle", misses, "", at_most=0)
        drawn = {symbol: log_paths(grids[symbol], rows) for symbol, rows in marks.items()}
        at_extremes = numpy.sum([numpy.abs(closes_at_extremes(minutes)) for minutes in recorded.values()], axis=0)
        judge_within(figures, f"seed {seed}", drawn)
        judge_first_seconds(figures, f"seed {seed}", drawn, recorded)
        judge_across(figures, f"seed {seed}", drawn, at_extremes)
        markets.append({symbol: DrawnMarket.of(symbol, recorded[symbol], rows) for symbol, rows in marks.items()})
        judge_motion(figures, f"seed {seed}", markets[-1])
        show_passed(figures, f"seed {seed}", markets[-1], recorded)
    for seed, tried in zip(SEEDS[1:], markets[1:], strict=True):
        judge_search(figures, f"seed {seed} after {SEEDS[0]}", markets[0], tried)
    for watched, traded in product(recorded, recorded):
        t, mean_bp = momentum_of_candles(recorded[watched], recorded[traded])
        name = f"candles alone: {traded} after a close of {watched} at an extreme"
        figures.show(f"{name}, t", t, "")
        figures.show(f"{name}, mean", mean_bp, "bp")
    corner = [
        log_paths(grids[symbol], [marks_of_candle(grids[symbol], minutes[place]) for place in range(len(minutes))])
        for symbol, minutes in recorded.items()
    ]
    show_rules(figures, "path of fixed corners, for comparison", list(filter(is_inside, judge_rules(corner, STEP_S))))


def show_costs(figures: Figures, name: str, symbol: str, costs: Costs, *, is_violent: bool) -> None:
    spread, depth = CALM_SPREADS[symbol], CALM_DEPTHS[symbol] / 1000
    for what, value, unit, wanted in (
        ("calm half spread", costs.half_spread_bp, "bp", spread),
        ("calm depth within 2 bp", costs.depth / 1000, "k", depth),
    ):
        low, high = wanted * (1 - TOLERANCE), wanted * (1 + TOLERANCE)
        figures.show(f"{name} {symbol}: {what}", value, unit, at_least=round(low, 3), at_most=round(high, 3))
    ratio = costs.violent_cost_bp / costs.cost_bp
    print(f"    20,000 cost {costs.cost_bp:.2f} bp in calm, {costs.violent_cost_bp:.2f} bp in the most violent 1 %")
    figures.show(f"{name} {symbol}: cost, violent over calm", ratio, "×", at_least=RATIO_MIN, is_judged=is_violent)
    if costs.fast_cost_bp is not None:
        figures.show(f"{name} {symbol}: cost above 100 bp a minute", costs.fast_cost_bp, "bp", at_least=FAST_BP_MIN)


async def synthetic_samples(symbol: str) -> list[Sample]:
    """Return a book of each minute of hours spread over five years."""
    source, random, samples = SyntheticSource(0, (symbol,)), Random(symbol), []
    first = datetime(2024, 1, 1, tzinfo=UTC)
    for _ in range(SYNTHETIC_HOURS):
        start = first + timedelta(hours=random.randrange(5 * 8766))
        for candle in await source.candles(symbol, "1m", start, start + timedelta(hours=1)):
            tick = source.tick(epoch_second(candle.open_time) + random.randrange(60))
            samples.append(sample(tick.quotes[symbol], (candle.high - candle.low) / candle.open * 1e4))
    return samples


def judge_books(figures: Figures, recorded: Mapping[str, Minutes]) -> None:
    for symbol, minutes in recorded.items():
        samples = [sample(quote, range_bp) for range_bp, quote in recorded_quotes(symbol, minutes, 0)]
        show_costs(figures, "replay", symbol, Costs.of(samples), is_violent=True)
    for symbol in recorded:
        costs = Costs.of(asyncio.run(synthetic_samples(symbol)))
        show_costs(figures, "synthetic", symbol, costs, is_violent=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/benchmark fidelity", description="Judge the market model.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="kline files of BTC, ETH and SOL")
    parser.add_argument("--pictures", type=Path, help="write the pictures of docs/exchange.md to this folder")
    arguments = parser.parse_args()
    recorded = {symbol: read_market(paths) for symbol, paths in find_files(arguments.folder).items()}
    if arguments.pictures is not None:
        write_pictures(arguments.pictures, recorded)
        return 0
    figures = Figures()
    judge_paths(figures, recorded)
    judge_books(figures, recorded)
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
