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
import sys
import time
from typing import Final

import numpy as np
from benchmarks.figures import Figures
from support.null_seasons import (
    BEYOND,
    PROCESSES,
    exploratory_seasons,
    false_discoveries,
    late_seasons,
    replicate_seasons,
    share_interval,
    wrong_primaries,
    wrong_seasons,
)

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
