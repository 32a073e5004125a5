"""False verdicts of all boards together when only luck differs, under daily looks: their share and its interval.

    scripts/benchmark verdicts [--seasons 1000] [--models 100] [--days 90] [--process normal]

A season counts as wrong when the board of all models, of a variant or of a window judges anything better or worse at
any daily look from the third day on; only an account that lost everything is rightly judged worse. The share of wrong
seasons has a Clopper-Pearson interval of 95 %, whose upper end is judged, except for processes beyond what verdicts are
said to bound.
"""

import argparse
import sys
import time

from benchmarks.figures import Figures
from support.null_seasons import BEYOND, PROCESSES, share_interval, wrong_seasons

WRONG_PERCENT_MAX = 5.0


def measure(process: str, seasons: int, models: int, days: int, figures: Figures) -> None:
    began_s = time.process_time()
    wrong = sum(wrong_seasons(range(seasons), models, days, (PROCESSES | BEYOND)[process]))
    low, high = share_interval(wrong, seasons)
    figures.show(f"{process}: {wrong} of {seasons} wrong", 100 * wrong / seasons, "%")
    figures.show(
        f"  95 % interval from {100 * low:.1f} % to",
        100 * high,
        "%",
        at_most=WRONG_PERCENT_MAX,
        is_judged=process in PROCESSES,
    )
    print(f"  {time.process_time() - began_s:.0f} s of the processor", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seasons", type=int, default=1000)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--days", type=int, default=90)
    parser.add_argument("--process", choices=PROCESSES | BEYOND, action="append")
    options = parser.parse_args()
    figures = Figures()
    for process in options.process or PROCESSES | BEYOND:
        measure(process, options.seasons, options.models, options.days, figures)
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
