"""What accounts are worth: now, every minute on record, and over time."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import msgspec

from trader.clock import Clock
from trader.domain.exchange.account import Account, unrealized
from trader.domain.models import Model, VariantId
from trader.domain.money import ZERO, divide
from trader.domain.portfolio.snapshots import Snapshot
from trader.services.exchange.protocol import Exchange
from trader.services.portfolio.histories import (
    SETTLED_AFTER,
    Encode,
    Histories,
    Piece,
    VariantHours,
    floor_to_bucket,
    select_values,
)
from trader.settings import Settings
from trader.store.agents import invocations as agents_store
from trader.store.database.partitions import drop_partitions_before, ensure_partitions, week_of
from trader.store.database.pool import Database
from trader.store.portfolio import snapshots as store

log = logging.getLogger("trader.portfolio")

Window = Literal["24h", "7d", "30d"]
WINDOWS: Final[Mapping[Window, timedelta]] = {
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}

ACTIVE_AFTER_ORDER: Final = timedelta(minutes=10)
"""How long after its last order an account without positions still counts as active."""

Resolution = Literal["1m", "5m", "15m", "1h", "4h", "1d"]
RESOLUTIONS: Final[Mapping[Resolution, timedelta]] = {
    "1m": timedelta(minutes=1),
    "5m": timedelta(minutes=5),
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "4h": timedelta(hours=4),
    "1d": timedelta(days=1),
}
_SUITED_SPANS: Final[Mapping[Resolution, timedelta]] = {
    "1m": timedelta(days=1),
    "5m": timedelta(days=3),
    "15m": timedelta(days=7),
    "1h": timedelta(days=30),
    "4h": timedelta(days=90),
    "1d": timedelta.max,
}
_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)


class Point(NamedTuple):
    """One hour of a history and its average value."""

    hour: datetime
    value: Decimal


class VariantHistories(NamedTuple):
    """Hourly averages per variant, ascending, and the plain average over the variants."""

    variants: Mapping[VariantId, Sequence[Point]]
    aggregate: Sequence[Point]


class History(NamedTuple):
    """Equity over time of models at one resolution, ascending."""

    values: Sequence[store.EquityValue]
    models: Mapping[str, Model]
    resolution: Resolution


class EncodedHistory(NamedTuple):
    """The same as encoded records, in pieces of one or more, to be joined by commas."""

    pieces: Sequence[Piece]
    resolution: Resolution


class LiveValues(msgspec.Struct, frozen=True):
    """What every account is worth at one moment. `snapshots_created` is how many rows the last snapshot job wrote."""

    at: datetime
    values: Mapping[str, Snapshot]
    snapshots_created: int


class Portfolio:
    """Snapshots of all accounts, and the histories made of them."""

    def __init__(self, database: Database, exchange: Exchange, clock: Clock, settings: Settings) -> None:
        self._database = database
        self._exchange = exchange
        self._clock = clock
        self._histories = Histories(database)
        self._variant_hours = VariantHours(database)
        self._retention = timedelta(days=settings.snapshot_retention_days)
        self._last: dict[str, store.LastSnapshot] | None = None
        self._week: datetime | None = None
        self._retired_at: datetime | None = None
        self._writing_at: datetime | None = None
        self._created = 0
        self.version = 0
        """Grows with every writing of snapshots."""

    # -- the scheduler's job

    async def take_snapshots(self, now: datetime) -> None:
        """Record what accounts are worth: the active ones at every call, the idle ones once an hour and run."""
        await self.maintain(now)
        if self._last is None:
            async with self._database.connection() as conn:
                self._last = await store.select_last_snapshots(conn)
        due = [
            snapshot
            for account in self._exchange.accounts.values()
            if is_due(account, self._last.get(account.id), now) and (snapshot := self._value(account, now)) is not None
        ]
        self._created = 0
        if not due:
            return
        due.sort(key=lambda snapshot: snapshot.account_id)
        self._writing_at = now
        try:
            async with self._database.connection() as conn:
                self._created = await store.insert_snapshots(conn, due)
        finally:
            self._writing_at = None
            self.version += 1  # what was not confirmed may have been written
        for snapshot in due:
            self._last[snapshot.account_id] = store.LastSnapshot(snapshot.run_id, now)

    async def maintain(self, now: datetime) -> None:
        """See that the partitions of this week and the next exist, and once a day drop those beyond the retention.

        Idempotent, and cheap when there is nothing to do.
        """
        if self._week != week_of(now):
            async with self._database.connection() as conn:
                await ensure_partitions(conn, now)
            self._week = week_of(now)
        if self._retired_at is None or now - self._retired_at >= _DAY:
            async with self._database.connection() as conn:
                dropped = await drop_partitions_before(conn, now - self._retention)
            self._retired_at = now
            if dropped:
                log.info("Dropped %s: older than %d days.", ", ".join(dropped), self._retention.days)

    def _value(self, account: Account, at: datetime) -> Snapshot | None:
        snapshot = value_account(account, self._exchange.marks(), at)
        if snapshot is None:
            log.warning("%s has no snapshot: no price of one of its markets is known yet.", account.id)
        return snapshot

    # -- live

    def live(self) -> LiveValues:
        """What every account is worth now. One whose markets have no price yet is absent."""
        now, marks = self._clock.now(), self._exchange.marks()
        values = (value_account(account, marks, now) for account in self._exchange.accounts.values())
        return LiveValues(now, {value.account_id: value for value in values if value is not None}, self._created)

    # -- histories

    async def variant_history(self, window: Window, now: datetime) -> VariantHistories:
        """The average of all snapshots since `now − window`, per variant and hour; variants without any are empty."""
        rows = await self._variant_hours.read(now - WINDOWS[window], self._written_until())
        histories: dict[VariantId, list[Point]] = {variant: [] for variant in VariantId}
        for row in rows:
            histories[row.variant].append(Point(row.hour, row.value))
        return VariantHistories(histories, average_by_hour(histories.values()))

    async def prepare(self, now: datetime) -> None:
        """Read the hours that the windows cut, and will cut next, so that no request reads raw rows for them."""
        await self._variant_hours.prepare([now - span for span in WINDOWS.values()], self._written_until())

    async def history(
        self,
        *,
        model_id: str | None = None,
        variant: VariantId | None = None,
        start: datetime,
        end: datetime,
        points_max: int,
    ) -> History:
        """The equity of models within [start, end]: the last snapshot of each bucket, at most `points_max` per model.

        What is older than the retention has hourly values at the finest.
        """
        start, resolution = self._fitted(start, end, points_max)
        models = _chosen(await self._models(), model_id, variant)
        values = await select_values(self._database, list(models), start, end, RESOLUTIONS[resolution])
        return History(values, models, resolution)

    async def encoded_history(
        self,
        encode: Encode,
        *,
        model_id: str | None = None,
        variant: VariantId | None = None,
        start: datetime,
        end: datetime,
        points_max: int,
    ) -> EncodedHistory:
        """The same, encoded: what has not changed since it was encoded is not encoded again."""
        start, resolution = self._fitted(start, end, points_max)
        models = await self._models()
        chosen = _chosen(models, model_id, variant)
        bucket, written_until = RESOLUTIONS[resolution], self._written_until()
        pieces = await self._histories.read(models, chosen.keys(), start, end, bucket, encode, written_until)
        return EncodedHistory(pieces, resolution)

    def _fitted(self, start: datetime, end: datetime, points_max: int) -> tuple[datetime, Resolution]:
        """The resolution of a range, and where it begins with that: even the coarsest may not hold all of it."""
        now = self._clock.now()
        resolution = choose_resolution(start, end, points_max, now - self._retention)
        bucket = RESOLUTIONS[resolution]
        if end - start >= points_max * bucket:  # the latest part is shown, of what can have happened
            start = max(start, floor_to_bucket(min(end, max(start, now)), bucket) - (points_max - 1) * bucket)
        return start, resolution

    def _written_until(self) -> datetime:
        """All snapshots before this moment are in the database."""
        return min(self._clock.now() - SETTLED_AFTER, self._writing_at or datetime.max.replace(tzinfo=UTC))

    async def _models(self) -> dict[str, Model]:
        """Every model, those of a variant beside each other: so are their records, which are cut out together."""
        async with self._database.connection() as conn:
            models = await agents_store.select_models(conn)
        return {model.id: model for model in sorted(models, key=lambda model: (model.variant, model.id))}


def _chosen(models: Mapping[str, Model], model_id: str | None, variant: VariantId | None) -> dict[str, Model]:
    return {
        model.id: model
        for model in models.values()
        if model_id in (None, model.id) and variant in (None, model.variant)
    }


def is_due(account: Account, last: store.LastSnapshot | None, now: datetime) -> bool:
    """Whether the account's snapshot of this minute is to be taken."""
    if not account.is_idle:
        return True
    if account.last_order_at is not None and now - account.last_order_at <= ACTIVE_AFTER_ORDER:
        return True
    if last is None or last.run_id != account.run.id:
        return True
    return last.created_at < now.replace(minute=0, second=0, microsecond=0)


def value_account(account: Account, marks: Mapping[str, Decimal], at: datetime) -> Snapshot | None:
    """What the account is worth at the marks; None when one of its markets has no price yet."""
    if not account.positions.keys() <= marks.keys():
        return None
    gain = unrealized(account, marks)
    return Snapshot(
        account_id=account.id,
        run_id=account.run.id,
        net_portfolio=account.cash + gain,
        cash=account.cash,
        unrealized_pnl=gain,
        created_at=at,
    )


def average_by_hour(histories: Iterable[Sequence[Point]]) -> list[Point]:
    """The plain average of the histories that have a value at each hour, rounded to 8 decimals, ascending."""
    found: defaultdict[datetime, list[Decimal]] = defaultdict(list)
    for history in histories:
        for point in history:
            found[point.hour].append(point.value)
    return [Point(hour, _average(tuple(values))) for hour, values in sorted(found.items())]


@lru_cache(maxsize=4096)
def _average(values: tuple[Decimal, ...]) -> Decimal:
    # Most are those of the answer before.
    return round(divide(sum(values, ZERO), Decimal(len(values))), 8)


def choose_resolution(start: datetime, end: datetime, points_max: int, raw_since: datetime) -> Resolution:
    """The finest resolution that suits the range, stays within the points, and for which there are rows."""
    for resolution, bucket in RESOLUTIONS.items():
        points = (floor_to_bucket(end, bucket) - floor_to_bucket(start, bucket)) // bucket + 1
        available = bucket >= _HOUR or start >= raw_since
        if end - start <= _SUITED_SPANS[resolution] and points <= points_max and available:
            return resolution
    return "1d"
