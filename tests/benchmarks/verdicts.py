"""False verdicts when only luck differs, under daily looks: the share of wrong seasons and its interval.

    scripts/benchmark verdicts [--seasons 1000] [--models 100] [--days 90] [--process normal] [--kind boards]

A season of the kind `boards` counts as wrong when the board of all models, of a variant or of a window judges anything
better or worse at any daily look from the third day on; only an account that lost everything is rightly judged worse.
Of the other kinds, `primary` is wrong when the primary comparison is judged, `exploratory` when e-BH discovers
anything, `latecomers` and `replicates` when a board of models that enter late, or have ruined replicates, judges
anything or excludes a place. The share of wrong seasons has a Clopper-Pearson interval of 95 %, whose upper end is
judged, except for processes beyond what verdicts are said to bound.

The kind `discoveries` gives every other model an edge, and shows the largest mean share of false discoveries that e-BH
makes at a weekly look.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from benchmarks.figures import Figures
from numpy.typing import NDArray
from support.null_seasons import (
    EXPLORATORY,
    HOUR,
    HOURLY,
    PROCESSES,
    START,
    NullSeason,
    Process,
    Returns,
    Sums,
    is_wrong,
    looks,
    months,
    normal,
    ruin,
    share_interval,
    strongest,
    wrong_seasons,
)

from trader.portfolio.domain.board import NO_SEASON, JudgedEntrant, judge_board
from trader.portfolio.domain.evidence import judge_family
from trader.portfolio.domain.returns import mean_series


def frequent_ruin(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
    """Return gains that are offset by losing everything once in 500 hours, with mean zero."""
    return ruin(1 / 500, rng, accounts, hours)


def lotteries(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
    """Return small losses that are offset by a gain of 500 % once in 2,000 hours, with mean zero."""
    chance = 1 / 2000
    values = np.log1p(rng.normal(-5 * chance / (1 - chance), HOURLY / 10, (accounts, hours)))
    values[rng.random((accounts, hours)) < chance] = math.log(6)
    return values


def _is_primary_judged(season: NullSeason, hours: int) -> bool:
    model = season.alive(hours, [0])
    if not len(model.logs):
        return False
    (verdict,) = judge_family([strongest(model, Sums.nothing(model))])
    return verdict.word != "not distinguishable yet"


BEYOND: Final[dict[str, Process]] = {
    "loss of all in 0.2 % of hours": Process(frequent_ruin, (1.0, 1.0), 1.0, normal),
    "gain of 500 % in 0.05 % of hours": Process(lotteries, (1.0, 1.0), 1.0, normal),
    "drift that turns every 30 days": Process(months),
}
"""Seasons that no sequence bounds: moves beyond the bounds of the bets, and drift that turns late."""


def wrong_primaries(seeds: Iterable[int], models: int, days: int, process: Process) -> Iterator[bool]:
    """Yield for each season whether a primary comparison of one model with holding nothing is ever judged."""
    for seed in seeds:
        season = NullSeason.draw(seed, models, days, process)
        yield any(_is_primary_judged(season, hours) for hours in looks(days))


def exploratory_seasons(seeds: Iterable[int], models: int, days: int, process: Process) -> Iterator[bool]:
    """Yield for each season whether e-BH ever discovers a difference on the board of all models."""
    for seed in seeds:
        season = NullSeason.draw(seed, models, days, process)
        yield any(is_wrong(*season.entrants(hours), EXPLORATORY) for hours in looks(days))


def false_discoveries(seed: int, models: int, days: int, edge: float) -> Iterator[float]:
    """Yield for each weekly look the share of false discoveries if every other model has an edge, the same for all."""
    season = NullSeason.draw(seed, models, days, Process(normal, (1.0, 1.0)))
    season = season._replace(models=season.models + edge * (np.arange(models) % 2)[:, None])
    for hours in range(168, 24 * days + 1, 168):
        entrants, _ = season.entrants(hours)
        board = judge_board(entrants, {}, None, rules=EXPLORATORY)
        places = {entrant.key: number for number, entrant in enumerate(entrants)}
        made = [
            (places[key] % 2, 0 if each.reference_key is None else places[each.reference_key] % 2, each.verdict.word)
            for key, comparisons in board.comparisons.items()
            for each in comparisons
            if each.verdict.word != "not distinguishable yet"
        ]
        false = [word != ("better" if own > other else "worse") or own == other for own, other, word in made]
        yield sum(false) / len(false) if false else 0.0


def late_seasons(seeds: Iterable[int], models: int, days: int, process: Process) -> Iterator[bool]:
    """Yield for each season whether it is ever wrong, when every other model enters at a random hour of its first half.

    A verdict is wrong, and a rank that excludes a place.
    """
    for seed in seeds:
        season, rng = NullSeason.draw(seed, models, days, process), np.random.default_rng(seed)
        entries = rng.integers(1, 12 * days, models) * (np.arange(models) % 2)

        def present(
            hours: int, season: NullSeason = season, entries: NDArray[np.int64] = entries
        ) -> list[JudgedEntrant]:
            whole, _ = season.entrants(hours)
            return [
                each._replace(series=each.series.within(START + int(entry) * HOUR, each.series.end))
                for each, entry in zip(whole, entries, strict=True)
                if entry < hours and each.series is not None
            ]

        yield any(is_wrong(present(hours), {}, NO_SEASON) for hours in looks(days))


def replicate_seasons(seeds: Iterable[int], models: int, days: int, process: Process) -> Iterator[bool]:
    """Yield for each season whether it is ever wrong, when models have five replicates each, which may be ruined."""
    for seed in seeds:
        season = NullSeason.draw(seed, 5 * models, days, process)

        def joint(hours: int, season: NullSeason = season) -> list[JudgedEntrant]:
            copies, _ = season.entrants(hours)
            groups = [copies[5 * number : 5 * number + 5] for number in range(models)]
            return [
                group[0]._replace(series=mean_series([each.series for each in group if each.series is not None]))
                for group in groups
            ]

        yield any(is_wrong(joint(hours), {}, NO_SEASON) for hours in looks(days))


WRONG_PERCENT_MAX: Final = 5.0
EDGE_PER_HOUR: Final = 0.003

KINDS: Final = {
    "boards": wrong_seasons,
    "primary": wrong_primaries,
    "exploratory": exploratory_seasons,
    "latecomers": late_seasons,
    "replicates": replicate_seasons,
}


def measure(kind: str, process: str, seasons: int, models: int, days: int, figures: Figures) -> None:
    began_s = time.process_time()
    wrong = sum(KINDS[kind](range(seasons), models, days, (PROCESSES | BEYOND)[process]))
    low, high = share_interval(wrong, seasons)
    figures.show(f"{kind}, {process}: {wrong} of {seasons} wrong", 100 * wrong / seasons, "%")
    figures.show(
        f"  95 % interval from {100 * low:.1f} % to",
        100 * high,
        "%",
        at_most=WRONG_PERCENT_MAX,
        is_judged=process in PROCESSES,
    )
    print(f"  {time.process_time() - began_s:.0f} s of the processor", flush=True)


def measure_discoveries(seasons: int, models: int, days: int, figures: Figures) -> None:
    shares = np.array([list(false_discoveries(seed, models, days, EDGE_PER_HOUR)) for seed in range(seasons)])
    figures.show("false discoveries at a weekly look", 100 * shares.mean(axis=0).max(), "%", at_most=WRONG_PERCENT_MAX)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seasons", type=int, default=1000)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--days", type=int, default=90)
    parser.add_argument("--process", choices=PROCESSES | BEYOND, action="append")
    parser.add_argument("--kind", choices=[*KINDS, "discoveries"], default="boards")
    options = parser.parse_args()
    figures = Figures()
    if options.kind == "discoveries":
        measure_discoveries(options.seasons, options.models, options.days, figures)
        return figures.exit_code
    for process in options.process or PROCESSES | BEYOND:
        measure(options.kind, process, options.seasons, options.models, options.days, figures)
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
