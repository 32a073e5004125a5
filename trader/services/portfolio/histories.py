"""Equity histories, kept bucket by bucket in the form in which they are answered.

A week of a hundred models is 67,000 records: to read, build and encode them takes seconds, to hand out what is ready
milliseconds. A bucket is kept once no snapshot can fall into it any more; the end of every history is read anew, so
an answer holds all that is written. A clock that is set back makes times come again: what is kept of them is forgotten.
What a bucket holds depends on the models alone: when one is added, or is given
another name, all of it is made again.
"""

import asyncio
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Final, NamedTuple

from trader.domain.models import Model, VariantId
from trader.store.agents import invocations as agents_store
from trader.store.database.pool import Connection, Database
from trader.store.portfolio import snapshots as store
from trader.store.portfolio.snapshots import EquityValue, HourTail, VariantHour

SETTLED_AFTER: Final = timedelta(minutes=5)
"""How long after its time a snapshot may be on its way into the database; far longer than a statement may take."""

BYTES_MAX: Final = 128 * 2**20
BUCKET_BYTES: Final = 256
"""About what a bucket takes beside its records."""

CHUNK_BUCKETS: Final = 24
"""Buckets that are read and encoded at once, so that nobody waits long for the event loop."""

KEPT_HOURS_MAX: Final = 32 * 24
"""More than the longest window."""

TAILS_MAX: Final = 12
"""Hours whose tails are kept: those that the windows cut now and next, with room for requests of a moment ago."""

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime.fromisoformat("2000-01-01T00:00:00Z")

Encode = Callable[[Sequence[EquityValue], Mapping[str, Model]], list[bytes]]
"""One encoded and checked record per value."""


Ids = tuple[str, ...]
Piece = bytes | memoryview
"""Encoded records, joined by commas."""


class Bucket(NamedTuple):
    """The encoded records of one bucket in the order of time, joined by commas; and of each its model, time and end.

    They are kept in one piece, so that an answer is made without touching, or copying, each.
    """

    ids: Ids
    times: tuple[datetime, ...]
    ends: Sequence[int]
    joined: bytes

    @property
    def size(self) -> int:
        """Bytes of its records, and of itself: one that is empty costs something too."""
        return BUCKET_BYTES + len(self.joined)

    def of(self, stretches: Sequence[range], since: datetime) -> list[Piece]:
        """The records at these ascending places, from `since` on."""
        joined, ends = memoryview(self.joined), self.ends
        if self.times and self.times[0] < since:
            first = bisect_left(self.times, since)
            stretches = [range(max(first, each.start), each.stop) for each in stretches if each.stop > first]
        return [joined[ends[each.start - 1] + 1 if each.start else 0 : ends[each.stop - 1]] for each in stretches]


def make_bucket(values: Sequence[EquityValue], records: Sequence[bytes], ids: Mapping[str, str]) -> Bucket:
    """A bucket of values in the order of time, and their records.

    Every id is the object that `ids` has for it, and equal times are one object: to go through a season of objects
    that are each somewhere else in memory takes longer than all that is done with them.
    """
    times: dict[datetime, datetime] = {}
    return Bucket(
        tuple([ids[value.account_id] for value in values]),
        tuple([times.setdefault(value.created_at, value.created_at) for value in values]),
        array("Q", (end - 1 for end in accumulate(len(record) + 1 for record in records))),
        b",".join(records),
    )


def stretches(ids: Sequence[str], chosen: Set[str]) -> list[range]:
    """The places of the chosen models, ascending, those beside each other together."""
    flags = bytes(map(chosen.__contains__, ids)) + b"\0"
    found: list[range] = []
    first = flags.find(1)
    while first >= 0:
        after = flags.find(0, first)
        found.append(range(first, after))
        first = flags.find(1, after)
    return found


def floor_to_bucket(moment: datetime, bucket: timedelta) -> datetime:
    """The start of the bucket that holds the moment; buckets divide a UTC day."""
    return moment - (moment - _EPOCH) % bucket


async def select_values(
    database: Database, account_ids: Sequence[str], start: datetime, end: datetime, bucket: timedelta
) -> list[EquityValue]:
    """The last snapshot of each bucket within [start, end], the oldest first: from raw rows, or from the rollup."""
    if not account_ids or start > end:
        return []
    select = store.select_raw_history if bucket < _HOUR else store.select_hourly_history
    async with database.connection() as conn:
        return await select(conn, account_ids, start, end, bucket)


class Histories:
    """The buckets of all models that were asked for, by the width of the bucket and its start."""

    def __init__(self, database: Database, *, bytes_max: int = BYTES_MAX) -> None:
        self._database = database
        self._bytes_max = bytes_max
        self._models: tuple[Model, ...] = ()
        self._kept: dict[timedelta, dict[datetime, Bucket]] = {}
        self._written_until = _EPOCH
        self._lock = asyncio.Lock()
        self.size = 0

    async def read(
        self,
        models: Mapping[str, Model],
        chosen: Collection[str],
        start: datetime,
        end: datetime,
        bucket: timedelta,
        encode: Encode,
        written_until: datetime,
    ) -> list[Piece]:
        """The encoded records of the chosen models within [start, end], the oldest first.

        All snapshots before `written_until` are in the database.
        """
        first = floor_to_bucket(start, bucket)
        settled = max(first, floor_to_bucket(min(end, written_until), bucket))
        async with self._lock:
            self._forget_other(models)
            self._follow_back(written_until)
            starts = _starts(first, settled, bucket)
            kept = await self._fill(models, starts, bucket, encode)
            wanted, are_all = frozenset(chosen), len(chosen) == len(models)
            places: dict[Ids, list[range]] = {}
            pieces: list[Piece] = []
            for place in starts:
                found = kept[place]
                if are_all and place >= start:
                    pieces.append(found.joined)
                    continue
                if found.ids not in places:
                    places[found.ids] = stretches(found.ids, wanted)
                pieces += found.of(places[found.ids], start)
            self._bound(bucket)
        last = await select_values(self._database, list(chosen), max(start, settled), end, bucket)
        pieces.append(b",".join(encode(last, models)))
        return [piece for piece in pieces if piece]

    def _forget_other(self, models: Mapping[str, Model]) -> None:
        shown = tuple(models.values())
        if shown != self._models:
            self._models = shown
            self._kept.clear()
            self.size = 0

    def _follow_back(self, written_until: datetime) -> None:
        """Forget what is still being written, or is again."""
        if written_until < self._written_until:
            for bucket, kept in self._kept.items():
                for place in [place for place in kept if place + bucket > written_until]:
                    self.size -= kept.pop(place).size
        self._written_until = written_until

    async def _fill(
        self, models: Mapping[str, Model], starts: Sequence[datetime], bucket: timedelta, encode: Encode
    ) -> dict[datetime, Bucket]:
        """Read what is missing of the buckets that begin at these moments; the newest in use come last."""
        kept = self._kept.pop(bucket, {})
        self._kept[bucket] = kept
        missing = [place for place in starts if place not in kept]
        while missing:
            count = next(
                (n for n in range(1, len(missing)) if n == CHUNK_BUCKETS or missing[n] != missing[0] + n * bucket),
                len(missing),
            )
            chunk, missing = missing[:count], missing[count:]
            await self._read_chunk(models, chunk, bucket, encode)
        return kept

    async def _read_chunk(
        self, models: Mapping[str, Model], chunk: Sequence[datetime], bucket: timedelta, encode: Encode
    ) -> None:
        # The rollup has whole hours up to the end given; a snapshot at that very moment belongs to the next bucket.
        until = chunk[-1] + bucket
        values = await select_values(self._database, list(models), chunk[0], until, bucket)
        records = encode(values, models)
        kept, place = self._kept[bucket], 0
        ids = {model.id: model.id for model in self._models}
        for start in chunk:
            after = bisect_left(values, start + bucket, place, key=lambda value: value.created_at)
            kept[start] = found = make_bucket(values[place:after], records[place:after], ids)
            self.size += found.size
            place = after

    def _bound(self, bucket: timedelta) -> None:
        """Forget widths that were used longest ago, then the oldest buckets, until what is kept is small enough."""
        while self.size > self._bytes_max and (width := next(iter(self._kept))) != bucket:
            self.size -= sum(each.size for each in self._kept.pop(width).values())
        if self.size > self._bytes_max:
            kept = self._kept[bucket]
            for place in sorted(kept):
                if self.size <= self._bytes_max:
                    return
                self.size -= kept.pop(place).size


def _starts(first: datetime, end: datetime, bucket: timedelta) -> list[datetime]:
    return [first + number * bucket for number in range((end - first) // bucket)]


class VariantHours:
    """The hourly averages of the variants, kept once their hour is over; an hour that is not is read anew.

    Hours that are over change with the models alone: with who they are, and to which variant they belong.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._models: frozenset[tuple[str, VariantId]] = frozenset()
        self._kept: list[VariantHour] = []
        self._from = self._until = _EPOCH
        self._tails: dict[datetime, list[HourTail]] = {}
        self._lock = asyncio.Lock()

    async def read(self, since: datetime, written_until: datetime) -> list[VariantHour]:
        """The averages of the snapshots with `created_at >= since`, the oldest first.

        All snapshots before `written_until` are in the database.
        """
        first, settled = store.ceil_to_hour(since), floor_to_bucket(written_until, _HOUR)
        async with self._lock, self._database.connection() as conn:
            await self._forget_other(conn)
            self._follow_back(settled)
            cut = _cut(await self._tails_of(conn, first - _HOUR, settled), since) if since < first else []
            if not self._from <= first <= self._until:
                self._from, self._until, self._kept = first, first, []
            known = self._until
            new = await store.select_variant_hours(conn, known)
            over = bisect_left(new, max(known, settled), key=lambda row: row.hour)
            if settled > known:
                self._kept += new[:over]
                self._until = settled
            start = bisect_left(self._kept, first, key=lambda row: row.hour)
            found = cut + self._kept[start:] + (new[over:] if settled > known else new)
            self._drop_before(settled)
            return found

    async def prepare(self, sinces: Iterable[datetime], written_until: datetime) -> None:
        """Read the hours that windows beginning at these moments cut, and those that they will cut next.

        No request has to read raw rows then, as the hours go by.
        """
        settled = floor_to_bucket(written_until, _HOUR)
        async with self._lock, self._database.connection() as conn:
            await self._forget_other(conn)
            self._follow_back(settled)
            hours = {floor_to_bucket(since, _HOUR) for since in sinces}
            for hour in sorted(hours | {hour + _HOUR for hour in hours}):
                await self._tails_of(conn, hour, settled)

    async def _forget_other(self, conn: Connection) -> None:
        models = frozenset((model.id, model.variant) for model in await agents_store.select_models(conn))
        if models != self._models:
            self._models, self._from, self._until, self._kept = models, _EPOCH, _EPOCH, []
            self._tails.clear()

    def _follow_back(self, settled: datetime) -> None:
        """Forget the hours that are not over, or not any more."""
        if settled < self._until:
            self._kept = self._kept[: bisect_left(self._kept, settled, key=lambda row: row.hour)]
            self._until = max(self._from, settled)
            self._tails = {hour: tails for hour, tails in self._tails.items() if hour + _HOUR <= settled}

    async def _tails_of(self, conn: Connection, hour: datetime, settled: datetime) -> list[HourTail]:
        known = self._tails.pop(hour, None)
        tails = await store.select_hour_tails(conn, hour) if known is None else known
        if hour + _HOUR <= settled:
            self._tails[hour] = tails
            if len(self._tails) > TAILS_MAX:
                del self._tails[next(iter(self._tails))]  # the one that was used longest ago
        return tails

    def _drop_before(self, settled: datetime) -> None:
        """Forget what is older than any window, now and then."""
        oldest = settled - KEPT_HOURS_MAX * _HOUR
        if oldest - self._from > _DAY:
            self._kept = self._kept[bisect_left(self._kept, oldest, key=lambda row: row.hour) :]
            self._from = oldest


def _cut(tails: Sequence[HourTail], since: datetime) -> list[VariantHour]:
    """Of each variant's tails of an hour the one that begins with the first snapshot at or after `since`."""
    firsts: dict[VariantId, HourTail] = {}
    for tail in tails:
        if tail.since >= since:
            firsts.setdefault(tail.variant, tail)
    return [VariantHour(tail.variant, floor_to_bucket(tail.since, _HOUR), tail.value) for tail in firsts.values()]
