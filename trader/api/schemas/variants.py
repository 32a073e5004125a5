"""Variants on the wire: definitions, hourly histories, statistics."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated

from trader.agents.variants import VARIANTS
from trader.api.schemas.analytics import IntervalPercent
from trader.api.schemas.common import From, Input, Timestamp, VariantId, Wire
from trader.portfolio.analytics import VariantStats
from trader.portfolio.domain.histories import Point, Window, average_by_hour


class VariantView(Wire, kw_only=True):
    id: VariantId
    label: str
    description: str
    temperature: float
    color: str


class GetVariantsOutput(Wire, kw_only=True):
    variants: list[VariantView]


class HistoryPoint(Wire, kw_only=True, gc=False):
    timestamp: Annotated[Timestamp, From("hour")]
    value: Decimal


class VariantHistory(Wire, kw_only=True):
    variant_id: Annotated[VariantId, From("id")]
    label: str
    color: str
    history: list[HistoryPoint]


class GetVariantHistoryInput(Input, kw_only=True):
    window: Window = "7d"


class GetVariantHistoryOutput(Wire, kw_only=True):
    variants: list[VariantHistory]
    aggregate: list[HistoryPoint]


def variant_history_of(histories: Mapping[VariantId, Sequence[Point]]) -> GetVariantHistoryOutput:
    """Return the output: every variant of the build, and the plain average over them."""
    return GetVariantHistoryOutput.from_attributes(
        variants=[
            VariantHistory.from_attributes(variant, history=list(histories[variant.id]))
            for variant in VARIANTS.values()
        ],
        aggregate=list(average_by_hour(histories.values())),
    )


class VariantStatsView(Wire, kw_only=True):
    """Completed trades of the variant's models in their current runs; `winRate` and its 95 % interval in percent."""

    variant_id: Annotated[VariantId, From("id")]
    label: str
    color: str
    model_count: int
    total_trades: Annotated[int, From("trades")]
    win_rate: float | None
    win_rate_interval: IntervalPercent | None
    total_pnl: Decimal
    avg_pnl: Annotated[Decimal | None, From("average_pnl")]

    @classmethod
    def of(cls, stats: VariantStats) -> "VariantStatsView":
        return cls.from_attributes(stats, VARIANTS[stats.variant])


class GetVariantStatsOutput(Wire, kw_only=True):
    stats: list[VariantStatsView]
