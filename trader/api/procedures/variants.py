"""Procedures of `variants`: their definitions, histories and statistics."""

import msgspec

from trader.agents.variants import VARIANTS
from trader.api.context import Context
from trader.api.registry import procedure
from trader.api.response_cache import constant_token, histories_token, trades_token
from trader.api.schemas.common import Empty
from trader.api.schemas.variants import (
    GetVariantHistoryInput,
    GetVariantHistoryOutput,
    GetVariantsOutput,
    GetVariantStatsOutput,
    VariantStatsView,
    VariantView,
    variant_history_of,
)


@procedure("variants.getVariants", token=constant_token)
async def get_variants(_: Context, __: Empty) -> GetVariantsOutput:
    """List the strategy variants. They are fixed while the service runs."""
    views = msgspec.convert(list(VARIANTS.values()), list[VariantView], from_attributes=True)
    return GetVariantsOutput(variants=views)


@procedure("variants.getVariantHistory", long=True, token=histories_token)
async def get_variant_history(context: Context, request: GetVariantHistoryInput) -> GetVariantHistoryOutput:
    """Return the hourly average equity of each variant's models, and of the variants together.

    A variant without data has an empty history; the aggregate has the hours in which at least one has a value.
    """
    return variant_history_of(await context.portfolio.variant_history(request.window))


@procedure("variants.getVariantStats", long=True, token=trades_token)
async def get_variant_stats(context: Context, _: Empty) -> GetVariantStatsOutput:
    """Return the aggregated performance of each variant's models, including variants without models."""
    return GetVariantStatsOutput(
        stats=[VariantStatsView.of(stats) for stats in await context.analytics.variant_stats()]
    )
