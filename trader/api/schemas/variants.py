"""Variants on the wire: definitions, hourly histories, statistics."""

from collections.abc import Mapping, Sequence
from decimal import Decimal

from trader.agents.variants import VARIANTS
from trader.api.schemas.analytics import IntervalPercent
from trader.api.schemas.common import Input, Timestamp, VariantId, Wire, iso, trimmed
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
    timestamp: Timestamp
    value: Decimal


class VariantHistory(Wire, kw_only=True):
    variant_id: VariantId
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
    return GetVariantHistoryOutput(
        variants=[
            VariantHistory(
                variant_id=variant.id,
                label=variant.label,
                color=variant.color,
                history=_points(histories[variant.id]),
            )
            for variant in VARIANTS.values()
        ],
        aggregate=_points(average_by_hour(histories.values())),
    )


def _points(points: Sequence[Point]) -> list[HistoryPoint]:
    return [HistoryPoint(timestamp=iso(point.hour), value=trimmed(point.value)) for point in points]


class VariantStatsView(Wire, kw_only=True):
    """Completed trades of the variant's models in their current runs; `winRate` and its 95 % interval in percent."""

    variant_id: VariantId
    label: str
    color: str
    model_count: int
    total_trades: int
    win_rate: float | None
    win_rate_interval: IntervalPercent | None
    total_pnl: Decimal
    avg_pnl: Decimal | None

    @classmethod
    def of(cls, stats: VariantStats) -> "VariantStatsView":
        variant = VARIANTS[stats.variant]
        return cls.from_attributes(
            stats,
            variant_id=variant.id,
            label=variant.label,
            color=variant.color,
            total_trades=stats.trades,
            win_rate_interval=IntervalPercent.of(stats.win_rate_interval),
            avg_pnl=None if stats.average_pnl is None else trimmed(stats.average_pnl),
        )


class GetVariantStatsOutput(Wire, kw_only=True):
    stats: list[VariantStatsView]
