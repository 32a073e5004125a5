"""Portfolio: snapshots of what accounts are worth, equity histories, and completed trades."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from trader.clock import Clock
from trader.domain.exchange.account import Account
from trader.domain.exchange.orders import Trade
from trader.domain.models import VariantId
from trader.domain.portfolio.histories import (
    RESOLUTIONS,
    WINDOWS,
    Point,
    Resolution,
    Snapshot,
    Window,
    average_by_hour,
    choose_resolution,
    floor_to_bucket,
    minute_end,
    value_account,
)
from trader.errors import NotFound
from trader.services.exchange.protocol import Exchange
from trader.services.relay import RelayReader
from trader.settings import Settings
from trader.store.agents.models import select_models
from trader.store.database.partitions import drop_partitions_before, ensure_partitions, week_of
from trader.store.database.pool import Database, Page
from trader.store.exchange import trades as trades_store
from trader.store.portfolio import snapshots as store

log = logging.getLogger("trader.portfolio")

ACTIVE_AFTER_ORDER: Final = timedelta(minutes=10)
"""How long after its last order an account without positions still counts as active."""

SLICE_BUCKETS: Final = 8
"""Buckets of a history in one text: of a hundred models some 800 records."""

HISTORIES_AT_ONCE: Final = 2
"""Histories that the database makes at once; the others wait, and leave its connections to trading."""

HELD: Final = timedelta(minutes=65)
"""How long a snapshot stands for what follows: an idle account has one an hour, and some minutes are its delay."""

_DAY: Final = timedelta(days=1)
_MILLISECOND: Final = timedelta(milliseconds=1)
_LAST_DAY: Final = datetime.fromisoformat("9999-12-30T00:00:00Z")
"""No curve ends later: the end of its last bucket must be a time."""


class VariantHistories(NamedTuple):
    """Hourly averages per variant, ascending, and the plain average over the variants."""

    variants: Mapping[VariantId, Sequence[Point]]
    aggregate: Sequence[Point]


class History(NamedTuple):
    """Equity over time of models at one resolution: JSON records, ascending, in texts of many joined by commas."""

    chunks: Sequence[bytes]
    resolution: Resolution


class Curves(NamedTuple):
    """Equity of models on one list of times, the ends of buckets: a JSON record of each model."""

    times: Sequence[datetime]
    resolution: Resolution
    records: Sequence[bytes]


class LiveValues(msgspec.Struct, frozen=True):
    """What every account is worth at one moment. `snapshots_created` is how many rows the last snapshot job wrote."""

    at: datetime
    values: Mapping[str, Snapshot]
    snapshots_created: int


class Portfolio:
    """Snapshots of all accounts, and what is read of their past."""

    def __init__(
        self,
        database: Database,
        exchange: Exchange,
        clock: Clock,
        settings: Settings,
        leader: RelayReader | None = None,
    ) -> None:
        """With `leader` another process takes the snapshots."""
        self._database = database
        self._exchange = exchange
        self._clock = clock
        self._histories = asyncio.Semaphore(HISTORIES_AT_ONCE)
        self._retention = timedelta(days=settings.snapshot_retention_days)
        self._last: dict[str, store.LastSnapshot] | None = None
        self._week: datetime | None = None
        self._retired_at: datetime | None = None
        self._created = 0
        self._leader = leader
        self.version = 0
        """Grows each time snapshots are written."""

    def note_written(self) -> None:
        """Note that another process has written snapshots."""
        self.version += 1

    # -- the scheduler's job

    async def take_snapshots(self, now: datetime) -> None:
        """Record what accounts are worth: the active ones at every call, the idle ones once an hour and run."""
        term = self._exchange.term
        if term is None:
            return
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
        try:
            async with self._database.writing() as conn:
                self._created = await store.insert_snapshots(conn, due, term)
        finally:
            self.version += 1  # what was not confirmed may have been written
        for snapshot in due:
            self._last[snapshot.account_id] = store.LastSnapshot(snapshot.run_id, now)

    async def maintain(self, now: datetime) -> None:
        """Create the partitions of this week and the next, and once a day drop those beyond the retention.

        Idempotent, and cheap when there is nothing to do.
        """
        if self._week != week_of(now):
            async with self._database.writing() as conn:
                await ensure_partitions(conn, now)
            self._week = week_of(now)
        if self._retired_at is None or now - self._retired_at >= _DAY:
            async with self._database.writing() as conn:
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
        """Return the worth of every account now. One whose markets have no price yet is absent."""
        now, marks = self._clock.now(), self._exchange.marks()
        values = (value_account(account, marks, now) for account in self._exchange.accounts.values())
        return LiveValues(now, {value.account_id: value for value in values if value is not None}, self.created)

    @property
    def created(self) -> int:
        """How many rows the last snapshot job wrote."""
        if self._leader is None:
            return self._created
        return 0 if self._leader.view is None else self._leader.view.snapshots_created

    def equity(self) -> dict[str, float]:
        """Return what each account is worth now, by its id."""
        return {account_id: float(value.net_portfolio) for account_id, value in self.live().values.items()}

    # -- the past

    async def variant_history(self, window: Window) -> VariantHistories:
        """Return the average of the snapshots in the window per variant and hour; variants without any are empty."""
        async with self._database.connection() as conn:
            rows = await store.select_variant_hours(conn, minute_end(self._clock.now()) - WINDOWS[window])
        histories: dict[VariantId, list[Point]] = {variant: [] for variant in VariantId}
        for row in rows:
            histories[row.variant].append(Point(row.hour, row.value))
        return VariantHistories(histories, average_by_hour(histories.values()))

    async def history(
        self,
        *,
        model_id: str | None = None,
        variant: VariantId | None = None,
        start: datetime,
        end: datetime,
        points_max: int,
    ) -> History:
        """Return the equity of models within [start, end]: the last snapshot of each bucket, `points_max` per model.

        What is older than the retention has hourly values at the finest.
        """
        start, resolution = self._fitting(start, end, points_max)
        bucket = RESOLUTIONS[resolution]
        asked = store.HistoryRange(model_id, variant, start, end, bucket)
        async with self._histories, self._database.connection() as conn:
            return History(await store.select_history(conn, asked, SLICE_BUCKETS * bucket), resolution)

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
        """Return the equity of models within [start, end] on the same `points_max` times at most for all of them.

        With `baselines`, those of the variant (or all) follow.
        """
        end = min(end, max(start, minute_end(self._clock.now())), _LAST_DAY)  # nothing was recorded in the future
        start, resolution = self._fitting(min(start, end), end, points_max)
        bucket = RESOLUTIONS[resolution]
        first = floor_to_bucket(start, bucket)
        last = max(first, floor_to_bucket(end - min(_MILLISECOND, end - start), bucket))
        grid = store.CurveGrid(model_id, variant, first, last, bucket, end, HELD, baselines)
        async with self._histories, self._database.connection() as conn:
            records = await store.select_equity_curves(conn, grid)
        times = [first + number * bucket for number in range(1, (last - first) // bucket + 2)]
        return Curves(times, resolution, records)

    def _fitting(self, start: datetime, end: datetime, points_max: int) -> tuple[datetime, Resolution]:
        """Return the resolution of a range, and its start: later when even the coarsest has too many points."""
        now = minute_end(self._clock.now())
        resolution = choose_resolution(start, end, points_max, now - self._retention)
        bucket = RESOLUTIONS[resolution]
        if end - start >= points_max * bucket:  # show the latest part up to now
            start = max(start, floor_to_bucket(min(end, max(start, now)), bucket) - (points_max - 1) * bucket)
        return start, resolution

    async def trades(
        self,
        *,
        account_id: str | None = None,
        variant: VariantId | None = None,
        symbol: str | None = None,
        page: Page,
    ) -> list[Trade]:
        """Return the latest completed trades of one account, variant or market, or of all (None), the newest first.

        Trades of earlier runs are among them.
        """
        async with self._database.reading() as conn:
            if variant is not None:
                chosen = [model.id for model in await select_models(conn) if model.variant is variant]
                accounts = [each for each in chosen if account_id in (None, each)]
            elif account_id is not None:
                accounts = [account_id]
            else:
                return await trades_store.select_trades(conn, page, symbol)
            return await trades_store.select_account_trades(conn, accounts, page, symbol)

    async def trade(self, trade_id: UUID) -> trades_store.TradeRecord:
        """Return one position or completed trade with its fills, by its id or that of an order that filled in it.

        :raises NotFound: there is none
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
    return last.created_at < now.replace(minute=0, second=0, microsecond=0)
