"""Relay: passes the leader's prices and its models' workflow events to followers through the database.

Once a second, the leader writes a record of its view, with the workflow events since the last one. It does not
include accounts, trades, snapshots and invocations: followers read those rows directly. A streaming replica has neither
notifications nor locks of its primary, so followers poll.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec

from trader.core.errors import Unavailable
from trader.core.events import Event, EventBus, WorkflowProgress, WorkflowType
from trader.database.pool import Connection, Database

log = logging.getLogger("trader")

EVERY_S: Final = 1.0
"""Real seconds between records."""

EVENTS_MAX: Final = 5000
"""Workflow events in one record; further events of the same second do not reach followers."""

MARKETS_EVERY: Final = 60
"""The interval, in records, at which the markets' trading rules are repeated; a change is in the next record."""

SLOTS: Final = 128
"""How many records are kept: two minutes' worth."""


class RelayedQuote(NamedTuple):
    """A quote without its book."""

    symbol: str
    at: datetime
    bid: Decimal
    ask: Decimal
    mark: Decimal


class RelayedEvent(msgspec.Struct, frozen=True):
    """A workflow event; `details` is the JSON that the leader's own streams send."""

    type: WorkflowType
    at: datetime
    details: msgspec.Raw


class LeaderView(msgspec.Struct, frozen=True):
    """The leader's view at `now` of its clock, except what other rows contain.

    `updated_at` is the time of the market's last tick. `market_troubles` is keyed by symbol, `account_troubles` by
    account ID. `warning` says what keeps models from running, and `model_warnings` has the problem of each model, by
    model ID. `markets` is the JSON text of the trading rules; None in most records. `alarms` is the JSON text of the
    alarms in its health report.
    """

    now: datetime
    updated_at: datetime | None
    quotes: tuple[RelayedQuote, ...]
    markets: str | None
    market_troubles: dict[str, str]
    account_troubles: dict[str, str]
    warning: str | None
    snapshots_created: int
    model_warnings: dict[str, str] = {}
    alarms: str = "[]"
    events: tuple[RelayedEvent, ...] = ()
    term: int = 0
    events_before: int = 0
    """Events of this term in earlier records; if a record was written but not confirmed, its events are sent again."""


class RelayWriter:
    """Writes a leader's records. `view` returns its view, `encode` the wire's JSON of an event's details."""

    def __init__(
        self,
        database: Database,
        events: EventBus,
        view: Callable[[], LeaderView],
        encode: Callable[[Mapping[str, Any]], bytes],
    ) -> None:
        self._database = database
        self._view = view
        self._encode = encode
        self._is_open = False
        self._waiting: list[RelayedEvent] = []
        self._markets: str | None = None
        self._written = 0
        events.subscribe(self._note)

    def open(self) -> None:
        """Start gathering events, as the leader."""
        self._is_open, self._written, self._markets = True, 0, None

    def close(self) -> None:
        """Stop gathering events, and drop those not yet written."""
        self._is_open = False
        self._waiting.clear()

    def _note(self, event: Event) -> None:
        if self._is_open and isinstance(event, WorkflowProgress) and len(self._waiting) < EVENTS_MAX:
            relayed = RelayedEvent(event.type, event.at, msgspec.Raw(self._encode(event.details)))
            # One that no follower could read would end them all; the event bus logs it.
            self._waiting.append(msgspec.json.decode(msgspec.json.encode(relayed), type=RelayedEvent))

    async def run(self, term: int) -> None:
        """Write a record every second in this term, forever. Unwritten events go into the next record."""
        number: int | None = None
        while True:
            try:
                if number is None:
                    async with self._database.connection() as conn:
                        number = await select_relay_number(conn)
                number += 1
                await self._write(number, term)
            except Unavailable as error:  # the pool logs the cause once a minute
                log.debug("nothing was relayed: %s", error)
            await asyncio.sleep(EVERY_S)

    async def _write(self, number: int, term: int) -> None:
        events = tuple(self._waiting)
        view = msgspec.structs.replace(self._view(), events=events, term=term, events_before=self._written)
        markets = view.markets
        if markets == self._markets and number % MARKETS_EVERY:
            view = msgspec.structs.replace(view, markets=None)
        record = msgspec.json.encode(view).decode()
        async with self._database.writing() as conn:
            await upsert_relay(conn, number, record, term)
        del self._waiting[: len(events)]
        self._markets = markets
        self._written += len(events)


class RelayReader:
    """Reads the leader's records, and publishes their events in this process."""

    def __init__(self, database: Database, events: EventBus) -> None:
        self._database = database
        self._events = events
        self._decoder = msgspec.json.Decoder(LeaderView)
        self._after: int | None = None
        self._written_s: float | None = None
        self._news = asyncio.Event()
        self._published = 0, 0  # the term, and how many of its events
        self.view: LeaderView | None = None
        """The newest record."""

        self.markets: str | None = None
        """The JSON text of the leader's trading rules; None before the first record that has them."""

    def lag_s(self) -> float | None:
        """Return how many seconds ago the newest record was written, by the clocks of two machines.

        None before the first record, and while this process leads.
        """
        return None if self._written_s is None else max(0.0, time.monotonic() - self._written_s)

    def forget(self) -> None:
        """Start over with the newest record at the next poll, after this process has led."""
        self._after = self._written_s = None

    async def poll(self) -> None:
        """Read the records since the last poll; the first poll only reads the newest.

        :raises Unavailable: the database cannot answer now
        """
        async with self._database.connection() as conn:
            rows = await select_relay(conn, self._after or 0)
        if not rows:
            return
        is_first, after = self._after is None, self._after or 0
        if not is_first and rows[-1]["number"] - after > SLOTS:
            log.warning("%d records of the leader are lost: this process was too far behind", rows[0]["number"] - after)
        for row in rows:
            view = self._decoder.decode(row["record"])
            if view.markets is not None:
                self.markets = view.markets
            term, count = self._published
            known = count - view.events_before if term == view.term else 0
            self._published = view.term, view.events_before + len(view.events)
            for event in () if is_first else view.events[max(0, known) :]:
                details = msgspec.json.decode(event.details, type=dict[str, msgspec.Raw])
                self._events.publish(WorkflowProgress(event.type, event.at, details))
            self.view = view
        self._after = rows[-1]["number"]
        self._written_s = time.monotonic() - rows[-1]["age_s"]
        self._news.set()

    async def next_view(self) -> LeaderView:
        """Wait for a record that this has not returned yet, and return the newest."""
        await self._news.wait()
        self._news.clear()
        assert self.view is not None
        return self.view


# The commit does not wait for the disk: the next second replaces what a crash loses.
UPSERT_RELAY = """
INSERT INTO relay AS r (slot, number, written_at, record)
SELECT $1::bigint % 128, $1, clock_timestamp(), $2
FROM service_state CROSS JOIN LATERAL set_config('synchronous_commit', 'off', true)
WHERE term = $3
ON CONFLICT (slot) DO UPDATE
SET number = excluded.number, written_at = excluded.written_at, record = excluded.record
"""


async def upsert_relay(conn: Connection, number: int, record: str, term: int) -> None:
    """Write a record into its slot of the ring of `SLOTS` records; only in this term."""
    await conn.execute(UPSERT_RELAY, number, record, term)


SELECT_RELAY_NUMBER = "SELECT coalesce(max(number), 0) FROM relay"


async def select_relay_number(conn: Connection) -> int:
    """Return the number of the newest record; 0 if there is none."""
    return int(await conn.fetchval(SELECT_RELAY_NUMBER))


SELECT_RELAY = """
SELECT number, extract(epoch FROM clock_timestamp() - written_at)::float8 AS age_s, record
FROM relay WHERE number > $1 ORDER BY number
"""


async def select_relay(conn: Connection, after: int = 0) -> list[asyncpg.Record]:
    """Return the records after a number, with their ages by this database's clock; at most `SLOTS` are kept."""
    return await conn.fetch(SELECT_RELAY, after)
