"""Variants: what they are, and how their models do."""

from trader.api.context import Context
from trader.api.rpc import procedure
from trader.api.schemas.common import Empty
from trader.api.schemas.variants import (
    GetVariantHistoryInput,
    GetVariantHistoryOutput,
    GetVariantsOutput,
    GetVariantStatsOutput,
    VariantStatsView,
    VariantView,
)
from trader.variants import VARIANTS


@procedure("variants.getVariants", static=True)
async def get_variants(_: Context, __: Empty) -> GetVariantsOutput:
    return GetVariantsOutput(variants=[VariantView.of(variant) for variant in VARIANTS.values()])


@procedure("variants.getVariantHistory")
async def get_variant_history(context: Context, request: GetVariantHistoryInput) -> GetVariantHistoryOutput:
    return GetVariantHistoryOutput.of(await context.portfolio.variant_history(request.window, context.clock.now()))


@procedure("variants.getVariantStats")
async def get_variant_stats(context: Context, _: Empty) -> GetVariantStatsOutput:
    return GetVariantStatsOutput(
        stats=[VariantStatsView.of(stats) for stats in await context.analytics.variant_stats()]
    )
