"""Variants on the wire: definitions, hourly histories, statistics."""

from decimal import Decimal
from functools import lru_cache
from typing import Final

import msgspec

from trader.api.schemas.common import ENCODER, Input, Timestamp, VariantId, Wire, checked, iso, trimmed
from trader.services.portfolio.analytics import VariantStats
from trader.services.portfolio.snapshots import Point, VariantHistories, Window
from trader.variants import VARIANTS, Variant


class VariantView(Wire, kw_only=True):
    id: VariantId
    label: str
    description: str
    temperature: float
    color: str

    @classmethod
    def of(cls, variant: Variant) -> "VariantView":
        return cls(
            id=variant.id,
            label=variant.label,
            description=variant.description,
            temperature=variant.temperature,
            color=variant.color,
        )


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


_POINT: Final = msgspec.json.Decoder(HistoryPoint)


@lru_cache(maxsize=20_000)
def _point(point: Point) -> bytes:
    """A point, encoded and checked as a caller would read it. Most of them are those of the answer before."""
    encoded = ENCODER.encode(HistoryPoint(timestamp=iso(point.hour), value=trimmed(point.value)))
    _POINT.decode(encoded)
    return encoded


def variant_history_of(histories: VariantHistories) -> GetVariantHistoryOutput:
    """The output, of points that were checked one by one; the frame around them is checked here."""
    frame = GetVariantHistoryOutput(
        variants=[
            VariantHistory(variant_id=variant.id, label=variant.label, color=variant.color, history=[])
            for variant in VARIANTS.values()
        ],
        aggregate=[],
    )
    msgspec.convert(msgspec.to_builtins(frame), GetVariantHistoryOutput)
    series = [*(histories.variants[variant] for variant in VARIANTS), histories.aggregate]
    parts = ENCODER.encode(frame).split(b"[]")
    filled = (part + b"[" + b",".join(map(_point, points)) + b"]" for part, points in zip(parts, series, strict=False))
    return checked(GetVariantHistoryOutput, b"".join(filled) + parts[-1])


class VariantStatsView(Wire, kw_only=True):
    """Completed trades of the variant's models in their current runs. `winRate` is in percent."""

    variant_id: VariantId
    label: str
    color: str
    model_count: int
    total_trades: int
    win_rate: float | None
    total_pnl: Decimal
    avg_pnl: Decimal | None

    @classmethod
    def of(cls, stats: VariantStats) -> "VariantStatsView":
        variant = VARIANTS[stats.variant]
        return cls(
            variant_id=variant.id,
            label=variant.label,
            color=variant.color,
            model_count=stats.model_count,
            total_trades=stats.trades,
            win_rate=stats.win_rate,
            total_pnl=trimmed(stats.total_pnl),
            avg_pnl=None if stats.average_pnl is None else trimmed(stats.average_pnl),
        )


class GetVariantStatsOutput(Wire, kw_only=True):
    stats: list[VariantStatsView]
