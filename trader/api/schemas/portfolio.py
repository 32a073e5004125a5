"""Equity of models on the wire: its history, and the live values of the portfolio stream."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from trader.agents.domain.models import Model
from trader.api.schemas.common import (
    UNSET,
    From,
    Input,
    LongOutput,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
    iso,
)
from trader.api.schemas.paging import IsoTime, moment_of
from trader.portfolio.domain.histories import Resolution, RunWindow
from trader.portfolio.run_statistics import WindowStart
from trader.portfolio.snapshots import Curves, LiveValues


class RangeInput(Input, kw_only=True):
    """A time range, and the requested models."""

    variant: VariantFilter = "all"
    model_id: str | UnsetType = UNSET
    start_date: IsoTime | UnsetType = UNSET
    end_date: IsoTime | UnsetType = UNSET

    def start(self) -> datetime | None:
        return None if self.start_date is UNSET else moment_of(self.start_date, "startDate")

    def end(self) -> datetime | None:
        return None if self.end_date is UNSET else moment_of(self.end_date, "endDate")


class GetPortfolioHistoryInput(RangeInput, kw_only=True):
    """A time without a zone is UTC; a date alone is its first moment."""

    max_points: Annotated[int, Meta(ge=100, le=15_000)] = 1000


class GetEquityCurvesInput(RangeInput, kw_only=True):
    """A time without a zone is UTC; a date alone is its first moment. `points` limits the times, not the models.

    A `window` takes the place of both dates. The response grows with points and models: 100 models with 600 points or
    more exceed 150 kB, compressed.
    """

    window: RunWindow | UnsetType = UNSET
    points: Annotated[int, Meta(ge=50, le=2000)] = 300
    baselines: bool = False


class HistoryModel(Wire, kw_only=True):
    name: str
    variant: VariantId
    open_router_model_name: str


class HistoryEntry(Wire, kw_only=True, gc=False):
    """The last snapshot of a model in one time bucket. The id is the snapshot's at every resolution."""

    id: str
    model_id: str
    net_portfolio: Decimal
    created_at: Timestamp
    updated_at: Timestamp
    model: HistoryModel


class GetPortfolioHistoryOutput(Wire, kw_only=True):
    history: list[HistoryEntry]
    resolution: Resolution


_RECORDS: Final = msgspec.json.Decoder(list[HistoryEntry])


def history_of(chunks: Sequence[bytes], resolution: Resolution) -> LongOutput[GetPortfolioHistoryOutput]:
    """Return the output of records encoded by the database: a hundred models have 67,000 of them, 19 MB."""
    return LongOutput(GetPortfolioHistoryOutput(history=[], resolution=resolution), _RECORDS, chunks)


class EquityCurve(Wire, kw_only=True, gc=False):
    """The equity of a model at each time, to the cent; null before its first snapshot and where none was taken.

    `baseline` marks a baseline, which is not a model: its variant is a rule agent's, otherwise null.
    """

    id: str
    name: str
    variant: VariantId | None
    baseline: bool | UnsetType = UNSET
    values: list[float | None]


class CurveStart(Wire, kw_only=True):
    """A moment, and the account's value then."""

    at: Timestamp
    value: Decimal


class GetEquityCurvesOutput(Wire, kw_only=True):
    """One list of times for all models: the ends of the buckets, the last of which may be incomplete.

    `start` is that of the window or range, and `starts` tells where the current entrant of each account begins in it:
    returns count from there, as in `getLeaderboard`.
    """

    times: list[Timestamp]
    resolution: Resolution
    start: Timestamp
    starts: dict[str, CurveStart]
    models: list[EquityCurve]


_CURVES: Final = msgspec.json.Decoder(list[EquityCurve])


def curves_of(curves: Curves, start: datetime, starts: Mapping[str, WindowStart]) -> LongOutput[GetEquityCurvesOutput]:
    """Return the output of records encoded by the database."""
    frame = GetEquityCurvesOutput(
        times=[iso(time) for time in curves.times],
        resolution=curves.resolution,
        start=iso(start),
        starts={key: CurveStart.from_attributes(each) for key, each in starts.items()},
        models=[],
    )
    return LongOutput(frame, _CURVES, curves.records)


class LiveSnapshot(Wire, kw_only=True):
    model_id: Annotated[str, From("id")]
    model_name: Annotated[str, From("name")]
    variant: VariantId
    net_portfolio: Decimal
    cash: Decimal
    unrealized_pnl: Decimal
    created_at: Annotated[Timestamp, From("at")]


class PortfolioUpdate(Wire, kw_only=True):
    """A message of the portfolio stream. `snapshotsCreated` is the row count of the last snapshot job."""

    last_updated_at: Annotated[Timestamp, From("at")]
    models_updated: int
    snapshots_created: int
    snapshots: list[LiveSnapshot]

    @classmethod
    def of(cls, live: LiveValues, models: Iterable[Model]) -> "PortfolioUpdate":
        """Return the message with the models that have a value now, in the order given."""
        valued = [model for model in models if model.id in live.values]
        snapshots = [LiveSnapshot.from_attributes(model, live, live.values[model.id]) for model in valued]
        return cls.from_attributes(live, models_updated=len(snapshots), snapshots=snapshots)
