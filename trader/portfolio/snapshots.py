"""Portfolio: snapshots of account values, equity histories, and completed trades."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from trader.agents.sql.models import select_models
from trader.core.clock import Clock, floor_time, interval_elapsed
from trader.core.errors import NotFound
from trader.core.variant_id import VariantId
from trader.database.partitions import drop_partitions_before, ensure_partitions, week_of
from trader.database.pool import Database, Page
from trader.database.relay import RelayReader
from trader.exchange.domain.account import Account
from trader.exchange.protocol import Exchange
from trader.exchange.sql import trades as trades_store
from trader.portfolio.domain.histories import (
    RESOLUTIONS,
    WINDOWS,
    Point,
    Resolution,
    Snapshot,
    Window,
    choose_resolution,
    minute_end,
    value_account,
)
from trader.portfolio.sql import snapshots as store
from trader.settings.settings import Settings

log = logging.getLogger("trader.portfolio")

ACTIVE_AFTER_ORDER: Final = timedelta(minutes=10)
"""How long after its last order an account without positions still counts as active."""

SLICE_BUCKETS: Final = 8
"""Number of a history's buckets in one text: about 800 records for a hundred models."""

HISTORIES_AT_ONCE: Final = 2
"""Number of histories that the database computes concurrently; others wait and leave its connections to trading."""

HELD: Final = timedelta(minutes=65)
"""How long a snapshot stays valid: an idle account has one an hour, plus a few minutes of delay."""

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_MILLISECOND: Final = timedelta(milliseconds=1)


class Curves(NamedTuple):
    """Models' equity on one list of times, the ends of buckets: a JSON record per model."""

    times: Sequence[datetime]
    resolution: Resolution
    records: Sequence[bytes]


class LiveValues(msgspec.Struct, frozen=True):
    """The value of every account at one moment. `snapshots_created` is the row count of the last snapshot job."""

    at: datetime
    values: Mapping[str, Snapshot]
    snapshots_created: int


class PortfolioService:
    """Snapshots of all accounts, and reads of their history."""

    def __init__(
        self,
        database: Database,
        exchange: Exchange,
        clock: Clock,
        settings: Settings,
        leader: RelayReader | None = None,
    ) -> None:
        """With `leader`, another process takes the snapshots."""
        self._database = database
        self._exchange = exchange
        self._clock = clock
        self._histories = asyncio.Semaphore(HISTORIES_AT_ONCE)
        self._retention = timedelta(days=settings.snapshot_retention_days)
        self._last: dict[str, store.LastSnapshot] = {}
        self._last_term: int | None = None
        self._week: datetime | None = None
        self._retired_at: datetime | None = None
        self._created = 0
        self._leader = leader
        self.version = 0
        """Increases each time snapshots are written."""

    def note_written(self) -> None:
        """Record that another process has written snapshots."""
        self.version += 1

    # -- the scheduler's job

    async def take_snapshots(self, now: datetime) -> None:
        """Record account values: active accounts at every call, idle ones once an hour and run."""
        term = self._exchange.term
        if term is None:
            return
        await self.maintain(now)
        if self._last_term != term:  # those of a former term may have been refused, or followed by others
            async with self._database.connection() as conn:
                self._last, self._last_term = await store.select_last_snapshots(conn), term
        due = [
            snapshot
            for account in self._exchange.accounts.values()
            if is_due(account, self._last.get(account.id), now) and (snapshot := self._value(account, now)) is not None
        ]
        self._created = 0
        if not due:
            return
        due.sort(key=lambda snapshot: snapshot.account_id)
        try:
            async with self._database.writing() as conn:
                self._created = await store.insert_snapshots(conn, due, term)
        finally:
            self.version += 1  # an unconfirmed write may have succeeded
        for snapshot in due:
            self._last[snapshot.account_id] = store.LastSnapshot(snapshot.run_id, now)

    async def maintain(self, now: datetime) -> None:
        """Create the partitions of this week and the next, and once a day drop the oldest one beyond the retention.

        The retention ends with the newest snapshot, since the clock may be ahead. Idempotent, and cheap if there is
        nothing to do.
        """
        if self._week != week_of(now):
            async with self._database.writing() as conn:
                await ensure_partitions(conn, now)
            self._week = week_of(now)
        if self._retired_at is None or interval_elapsed(self._retired_at + _DAY, _DAY, now):
            async with self._database.writing() as conn:
                newest = await store.select_newest(conn)
                until = now if newest is None else min(now, newest)
                dropped = await drop_partitions_before(conn, until - self._retention, parts_max=1)
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
        """Return the current value of every account. Accounts whose markets have no price yet are absent."""
        now, marks = self._clock.now(), self._exchange.marks()
        values = (value_account(account, marks, now) for account in self._exchange.accounts.values())
        return LiveValues(now, {value.account_id: value for value in values if value is not None}, self.created)

    @property
    def created(self) -> int:
        """How many rows the last snapshot job wrote."""
        if self._leader is None:
            return self._created
        return 0 if self._leader.view is None else self._leader.view.snapshots_created

    # -- the past

    async def variant_history(self, window: Window) -> dict[VariantId, list[Point]]:
        """Return the average of the window's snapshots per variant and hour; variants without snapshots are empty."""
        histories: dict[VariantId, list[Point]] = {variant: [] for variant in VariantId}
        async with self._database.connection() as conn:
            rows = await store.select_variant_hours(conn, minute_end(self._clock.now()) - WINDOWS[window])
        for variant, hour, value in rows:
            histories[variant].append(Point(hour, value))
        return histories

    async def history(
        self,
        *,
        model_id: str | None = None,
        variant: VariantId | None = None,
        start: datetime,
        end: datetime,
        points_max: int,
    ) -> tuple[Sequence[bytes], Resolution]:
        """Return the equity of models within [start, end]: the last snapshot of each bucket, `points_max` per model.

        They are ascending JSON records, joined by commas into a few texts. Beyond the retention the finest resolution
        is hourly.
        """
        start, resolution = self._fitting(start, end, points_max)
        bucket = RESOLUTIONS[resolution]
        width = SLICE_BUCKETS * bucket
        async with self._histories, self._database.connection() as conn:
            chunks = await store.select_history(conn, model_id, variant, start, end, bucket, width)
            return chunks, resolution

    async def equity_curves(
        self,
        *,
        model_id: str | None = None,
        variant: VariantId | None = None,
        start: datetime,
        end: datetime,
        points_max: int,
        baselines: bool = False,
    ) -> Curves:
        """Return the equity of models within [start, end] on one list of at most `points_max` times.

        With `baselines`, the variant's baselines (or all) follow.
        """
        end = min(end, max(start, minute_end(self._clock.now())))  # the future has no records
        start, resolution = self._fitting(min(start, end), end, points_max)
        bucket = RESOLUTIONS[resolution]
        first = floor_time(start, bucket)
        last = max(first, floor_time(end - min(_MILLISECOND, end - start), bucket))
        async with self._histories, self._database.connection() as conn:
            records = await store.select_equity_curves(
                conn, model_id, variant, first, last, bucket, end, HELD, baselines=baselines
            )
        times = [first + number * bucket for number in range(1, (last - first) // bucket + 2)]
        return Curves(times, resolution, records)

    def _fitting(self, start: datetime, end: datetime, points_max: int) -> tuple[datetime, Resolution]:
        """Return the resolution of a range, and its start, which is later if even the coarsest has too many points."""
        now = minute_end(self._clock.now())
        resolution = choose_resolution(start, end, points_max, now - self._retention)
        bucket = RESOLUTIONS[resolution]
        if end - start >= points_max * bucket:  # show the latest part up to now
            start = max(start, floor_time(min(end, max(start, now)), bucket) - (points_max - 1) * bucket)
        return start, resolution

    async def trades(
        self,
        *,
        account_id: str | None = None,
        variant: VariantId | None = None,
        chosen: trades_store.TradeFilter = trades_store.ALL_TRADES,
        page: Page,
    ) -> list[trades_store.ModelTrade]:
        """Return the latest completed trades of one account or variant, or of all (None), that fit the filter.

        Newest first; includes trades of earlier runs.
        """
        async with self._database.reading() as conn:
            if variant is not None:
                ids = [model.id for model in await select_models(conn) if model.variant is variant]
                accounts = [each for each in ids if account_id in (None, each)]
            elif account_id is not None:
                accounts = [account_id]
            else:
                return await trades_store.select_trades(conn, page, chosen)
            return await trades_store.select_account_trades(conn, accounts, page, chosen)

    async def trade(self, trade_id: UUID) -> trades_store.WholeTrade:
        """Return one position or completed trade with its fills, by its id or the id of an order that filled in it.

        :raises NotFound: there is no such trade
        """
        async with self._database.reading() as conn:
            trade = await trades_store.select_trade(conn, trade_id)
        if trade is None:
            raise NotFound(f"There is no trade {trade_id}")
        return trade


def is_due(account: Account, last: store.LastSnapshot | None, now: datetime) -> bool:
    """Return whether the account's snapshot of this minute is due: an idle account has one an hour."""
    if not account.is_idle:
        return True
    if account.last_order_at is not None and now - account.last_order_at <= ACTIVE_AFTER_ORDER:
        return True
    if last is None or last.run_id != account.run.id:
        return True
    is_of_this_hour = last.created_at <= now < last.created_at + _HOUR and last.created_at.hour == now.hour
    return not is_of_this_hour  # or it is by a clock that was ahead
