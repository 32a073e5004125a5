"""Prompts of AI models: tokens of the first step, and the part that a provider's prompt cache can keep.

    scripts/benchmark prompts [folder of kline files] [--hours 4] [--show VARIANT] [--costs]

Recorded candles are replayed in lockstep through the real workflow. A provider that is called like an AI model, and
answers like the rule agent of the variant, records its requests: the tools, the system message and the user message, in
the order in which providers cache them. Tokens are counted in o200k. A cache keeps the common beginning of two prompts,
which is counted with and without the tools.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from benchmarks.figures import Figures, temporary_folder
from rs_bpe.bpe import openai
from support.candles import FOLDER
from support.prompts import kept_part, replayed_prompts

from trader.agents.domain.models import TokenPrice
from trader.core.variant_id import VariantId
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Database
from trader.database.schema import apply_schema

START = datetime(2025, 1, 20, 12, tzinfo=UTC)
TOKENS_MAX = 8_000
KEPT_MIN = 0.85

PRICES = (
    TokenPrice(input=0.28, cached=0.028, output=0.42),
    TokenPrice(input=1.25, cached=0.125, output=10),
    TokenPrice(input=3, cached=0.3, output=15),
)
"""A cheap, a middle and an expensive model of today, in USD per million tokens."""

CADENCES = (1, 5)
ANSWER_TOKENS = 300
"""A few sentences and one or two tool calls; reasoning comes on top."""


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
        figures.show(
            f"{variant}: mean kept, {what}", 100 * mean(kept), "%", at_least=100 * KEPT_MIN,
            is_judged=what == "with tools",
        )  # fmt: skip


def print_costs(prompts: Mapping[VariantId, Sequence[str]]) -> None:
    """Print the daily cost of each prompt: one step per invocation, with an answer of `ANSWER_TOKENS`.

    The first figure prices the part that repeats the previous prompt as cached input, the second one everything as full
    input.
    """
    count = openai.o200k_base().count
    prices = " | ".join(f"{price.input:g} / {price.cached:g} / {price.output:g}" for price in PRICES)
    print(f"| USD per day | {prices} |\n|---|{'---|' * len(PRICES)}")
    for minutes in CADENCES:
        for variant, texts in prompts.items():
            asked = texts[::minutes]
            tokens = round(mean(count(text) for text in asked[::5]))
            cached = round(tokens * mean(kept_part(before, after) for before, after in pairwise(asked)))
            cells = [
                " to ".join(
                    f"{24 * 60 // minutes * price.cost(tokens, part, ANSWER_TOKENS):.2f}" for part in (cached, 0)
                )
                for price in PRICES
            ]
            print(f"| {variant}, every {minutes} min | {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="kline files of BTC, ETH and SOL")
    parser.add_argument("--hours", type=float, default=4)
    parser.add_argument("--show", type=VariantId, help="print the last prompt of this variant")
    parser.add_argument("--costs", action="store_true", help="print what a day of each prompt costs, as a table")
    options = parser.parse_args()
    with temporary_folder() as folder:
        prompts = asyncio.run(collect(folder, options.folder, timedelta(hours=options.hours)))
    if options.show:
        print(prompts[options.show][-1])
        return 0
    if options.costs:
        print_costs(prompts)
        return 0
    figures = Figures()
    for variant in VariantId:
        judge(figures, variant, prompts[variant])
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
