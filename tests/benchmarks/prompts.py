"""Prompts of AI models: tokens of the first step, and how much of it a provider's prompt cache can keep.

    scripts/benchmark prompts [folder of kline files] [--hours 4] [--show VARIANT]

Recorded candles are replayed in lockstep through the real workflow. A provider that is asked like an AI model, and
answers like the rule agent of the variant, keeps what it is asked: the tools, the system message and the user message,
in the order in which providers cache them. Tokens are those of o200k. A cache keeps the common beginning of two
prompts; it is counted with the tools, and of the messages alone.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from benchmarks.figures import Figures, temporary_folder
from rs_bpe.bpe import openai
from support.candles import FOLDER
from support.prompts import kept_part, replayed_prompts

from trader.domain.models import VariantId
from trader.embedded.server import EmbeddedPostgres
from trader.store.database.pool import Database
from trader.store.database.schema import apply_schema

START = datetime(2025, 1, 20, 12, tzinfo=UTC)
TOKENS_MAX = 6_500
KEPT_MIN, KEPT_IN = 0.8, 0.9


async def collect(folder: Path, candles: Path, span: timedelta) -> dict[VariantId, list[str]]:
    async with EmbeddedPostgres(folder / "postgres", durable=False) as server:
        database = await Database.connect(await server.ensure_database("trader_benchmark"))
        try:
            await apply_schema(database)
            return await replayed_prompts(database, candles, START, span)
        finally:
            await database.close()


def judge(figures: Figures, variant: VariantId, prompts: Sequence[str]) -> None:
    count = openai.o200k_base().count
    tokens = [count(prompt) for prompt in prompts]
    tools = count(prompts[0].partition("\n")[0])
    figures.show(f"{variant}: tokens of the first step, median", median(tokens), "", reference=("tools", tools))
    figures.show(f"{variant}: tokens of the first step, most", max(tokens), "", at_most=TOKENS_MAX)
    for what, texts in (
        ("with tools", prompts),
        ("messages alone", [prompt.partition("\n")[2] for prompt in prompts]),
    ):
        kept = [kept_part(before, after) for before, after in pairwise(texts)]
        enough = mean(part >= KEPT_MIN for part in kept)
        figures.show(
            f"{variant}: cycles that keep {KEPT_MIN:.0%}, {what}", 100 * enough, "%", at_least=100 * KEPT_IN,
            reference=("mean kept", 100 * mean(kept)), is_judged=what == "with tools",
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="kline files of BTC, ETH and SOL")
    parser.add_argument("--hours", type=float, default=4)
    parser.add_argument("--show", type=VariantId, help="print the last prompt of this variant")
    options = parser.parse_args()
    with temporary_folder() as folder:
        prompts = asyncio.run(collect(folder, options.folder, timedelta(hours=options.hours)))
    if options.show:
        print(prompts[options.show][-1])
        return 0
    figures = Figures()
    for variant in VariantId:
        judge(figures, variant, prompts[variant])
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
