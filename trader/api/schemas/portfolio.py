"""Equity of models on the wire: over time, and live for the portfolio stream."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from trader.api.schemas.common import (
    ENCODER,
    UNSET,
    Input,
    Pieces,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
    checked,
    iso,
    trimmed,
)
from trader.api.schemas.positions import ModelId
from trader.clock import cut_to_ms
from trader.domain.models import Model
from trader.errors import InvalidInput, Issue
from trader.services.portfolio.snapshots import EncodedHistory, LiveValues, Resolution
from trader.store.portfolio.snapshots import EquityValue

IsoTime = Annotated[
    str,
    Meta(
        min_length=10,
        max_length=40,
        description="an ISO 8601 time or date",
        extra_json_schema={"anyOf": [{"format": "date-time"}, {"format": "date"}]},
    ),
]

_EXAMPLE = "expected an ISO 8601 time such as 2025-01-31T12:00:00.000Z"


class GetPortfolioHistoryInput(Input, kw_only=True):
    """A time without a zone is UTC; a date alone is its first moment."""

    variant: VariantFilter = "all"
    model_id: ModelId | UnsetType = UNSET
    start_date: IsoTime | UnsetType = UNSET
    end_date: IsoTime | UnsetType = UNSET
    max_points: Annotated[int, Meta(ge=100, le=15_000)] = 1000

    def start(self) -> datetime | None:
        return None if self.start_date is UNSET else _moment(self.start_date, "startDate")

    def end(self) -> datetime | None:
        return None if self.end_date is UNSET else _moment(self.end_date, "endDate")


def _moment(written: str, field: str) -> datetime:
    try:
        moment = datetime.fromisoformat(written)
        return cut_to_ms(moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC))
    except (ValueError, OverflowError):
        raise InvalidInput(Issue((field,), _EXAMPLE)) from None


class HistoryModel(Wire, kw_only=True):
    name: str
    variant: VariantId
    open_router_model_name: str

    @classmethod
    def of(cls, model: Model) -> "HistoryModel":
        return cls(name=model.name, variant=model.variant, open_router_model_name=model.router_model_name)


class HistoryEntry(Wire, kw_only=True, gc=False):
    """The last snapshot of a model in one bucket of time. The id is that of the snapshot at every resolution."""

    id: str
    model_id: str
    net_portfolio: Decimal
    created_at: Timestamp
    updated_at: Timestamp
    model: HistoryModel


class GetPortfolioHistoryOutput(Wire, kw_only=True):
    history: list[HistoryEntry]
    resolution: Resolution


_ENTRY: Final = msgspec.json.Decoder(HistoryEntry)


def records_of(values: Sequence[EquityValue], models: Mapping[str, Model]) -> list[bytes]:
    """The records of a history in its order, each encoded and checked as a caller would read it."""
    shown = {model.id: HistoryModel.of(model) for model in models.values()}
    times: dict[datetime, str] = {}
    records = []
    for account_id, net_portfolio, created_at in values:
        at = times.get(created_at) or times.setdefault(created_at, iso(created_at))
        entry = HistoryEntry(
            id=f"{account_id}@{at}",
            model_id=account_id,
            net_portfolio=trimmed(net_portfolio),
            created_at=at,
            updated_at=at,
            model=shown[account_id],
        )
        record = ENCODER.encode(entry)
        _ENTRY.decode(record)
        records.append(record)
    return records


def history_of(history: EncodedHistory) -> GetPortfolioHistoryOutput:
    """The output, of records that were checked one by one: a hundred models have 19 MB of them, which nobody copies."""
    pieces: list[bytes | memoryview] = [b'{"history":[']
    for piece in history.pieces:
        pieces += (piece, b",")
    if history.pieces:
        del pieces[-1]
    pieces.append(b'],"resolution":%b}' % ENCODER.encode(history.resolution))
    return checked(GetPortfolioHistoryOutput, Pieces(pieces))


class LiveSnapshot(Wire, kw_only=True):
    model_id: str
    model_name: str
    variant: VariantId
    net_portfolio: Decimal
    cash: Decimal
    unrealized_pnl: Decimal
    created_at: Timestamp


class PortfolioUpdate(Wire, kw_only=True):
    """A message of the portfolio stream. `snapshotsCreated` is how many rows the last snapshot job wrote."""

    last_updated_at: Timestamp
    models_updated: int
    snapshots_created: int
    snapshots: list[LiveSnapshot]

    @classmethod
    def of(cls, live: LiveValues, models: Iterable[Model]) -> "PortfolioUpdate":
        """The models that have a value now, in the order given."""
        at = iso(live.at)
        snapshots = [
            LiveSnapshot(
                model_id=model.id,
                model_name=model.name,
                variant=model.variant,
                net_portfolio=trimmed(value.net_portfolio),
                cash=trimmed(value.cash),
                unrealized_pnl=trimmed(value.unrealized_pnl),
                created_at=at,
            )
            for model in models
            if (value := live.values.get(model.id)) is not None
        ]
        return cls(
            last_updated_at=at,
            models_updated=len(snapshots),
            snapshots_created=live.snapshots_created,
            snapshots=snapshots,
        )
