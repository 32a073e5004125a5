"""Kill a paced replay at random moments while clients trade in it, and repeat their orders in an unkilled run.

The second run is in this process: it processes the same ticks, and places each order at the time at which the first run
decided on it. The rows of both must be the same.
"""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from support.manual_clock import ManualClock
from support.scripted import make_settings
from support.venue import make_exchange

from trader.api.schemas.simulator import PlaceOrderInput
from trader.database.pool import Database
from trader.exchange.paper import PaperExchange
from trader.exchange.sql.accounts import select_lived_until
from trader.market.feed import MarketFeed
from trader.market.sources.recorder import Recorder
from trader.market.sources.source import MarketSource
from trader.market.sources.synthetic import SyntheticSource

ACCOUNTS: Final = [f"storm-{n}" for n in range(6)]
SIZES: Final = {"BTC": 0.05, "ETH": 1.5, "SOL": 20.0}

TABLES: Final = (
    "accounts", "runs", "orders", "fills", "funding_payments", "insurance_payments", "limit_orders", "order_requests",
)  # fmt: skip
"""What of the database belongs to the accounts."""


class Act(NamedTuple):
    """A client's request: place an order, cancel its order number `cancels`, or (neither) open its account."""

    account_id: str
    number: int
    order: dict[str, Any]
    cancels: int | None = None


async def write_candles(folder: Path, seed: int, begin: datetime, hours: int) -> None:
    """Write kline files of a synthetic market."""
    folder.mkdir()
    source = SyntheticSource(seed, list(SIZES))
    for symbol in SIZES:
        candles = await source.candles(symbol, "1m", begin, begin + timedelta(hours=hours))
        lines = (
            f"{int(c.open_time.timestamp() * 1000)},{c.open},{c.high},{c.low},{c.close},{c.volume}" for c in candles
        )
        (folder / f"{symbol}USDT-1m.csv").write_text("\n".join(lines))


# --- the unkilled run -------------------------------------------------------------------------------------------------


class Timed(NamedTuple):
    """An act and the time of its decision."""

    at: datetime
    act: Act


async def acts_of_rows(database: Database, acts: list[Act]) -> list[Timed]:
    """Return the executed acts, by the time of their decision."""
    async with database.connection() as conn:
        placed = {
            (row["account_id"], row["client_order_id"]): row["created_at"]
            for row in await conn.fetch("SELECT account_id, client_order_id, created_at FROM order_requests")
        }
        cancelled = {
            (row["account_id"], row["client_order_id"]): row["closed_at"]
            for row in await conn.fetch(
                "SELECT q.account_id, q.client_order_id, l.closed_at"
                " FROM limit_orders l JOIN order_requests q USING (id)"
                " WHERE l.cancel_reason = 'cancelled by the caller'"
            )
        }
        opened = await conn.fetch("SELECT id, created_at FROM accounts WHERE id <> 'nobody'")
    timed_acts = [Timed(row["created_at"], Act(row["id"], -1, {})) for row in opened]
    for act in acts:
        which = str(act.number if act.cancels is None else act.cancels)
        at = (placed if act.cancels is None else cancelled).pop((act.account_id, which), None)
        if at is not None:
            timed_acts.append(Timed(at, act))
    assert not placed
    assert not cancelled
    return sorted(timed_acts, key=lambda timed: (timed.at, timed.act.number))


async def settle(
    source: MarketSource, database: Database, recorder: Recorder | None = None, **settings: str
) -> datetime:
    """Bring every account to the same tick, since a stop may end within one. Return its time."""
    async with database.connection() as conn:
        lived_until = await select_lived_until(conn)
    assert lived_until is not None
    clock = ManualClock(lived_until + timedelta(seconds=5))
    market = MarketFeed(source, clock, recorder=recorder)
    market.begin_recording()
    exchange = make_exchange(database, market, clock, make_settings(**settings))
    await exchange.lead()
    await exchange.resign()
    market.end_recording()
    return clock.now()


class PlacedAtOnce(PaperExchange):
    """A paper exchange for orders that meet the book at a known time; its triggers wait for the latency."""

    async def _wait_for_books(self, symbols: Sequence[str]) -> None:
        return None


async def repeat(
    source: MarketSource,
    database: Database,
    timed: list[Timed],
    begin: datetime,
    until: datetime,
    *,
    recorder: Recorder | None = None,
    **settings: str,
) -> None:
    """Process the ticks of (begin, until] without a stop, and execute each act at its time."""
    clock = ManualClock(begin)
    market = MarketFeed(source, clock, recorder=recorder)
    market.begin_recording()
    exchange = make_exchange(database, market, clock, make_settings(**settings), kind=PlacedAtOnce)
    await exchange.lead()
    left = list(reversed(timed))

    async def act_until(moment: datetime) -> None:
        while left and left[-1].at < moment:
            at, act = left.pop()
            await clock.advance_to(at)
            await _carry_out(exchange, database, act)

    async for tick in source.history(begin, until):
        await act_until(tick.at)
        await clock.advance_to(tick.at)
        await market.take(tick, exchange.on_tick)
    await act_until(until + timedelta(days=1))
    await exchange.resign()
    market.end_recording()


async def _carry_out(exchange: PaperExchange, database: Database, act: Act) -> None:
    if act.order:
        request = {"accountId": act.account_id, "clientOrderId": str(act.number), **act.order}
        await exchange.place_orders(msgspec.convert(request, PlaceOrderInput).to_order())
        return
    if not act.order and act.cancels is None:
        await exchange.open_account(act.account_id)
        return
    async with database.connection() as conn:
        order_id = await conn.fetchval(
            "SELECT id::text FROM order_requests WHERE account_id = $1 AND client_order_id = $2",
            act.account_id, str(act.cancels),
        )  # fmt: skip
    await exchange.cancel_order(act.account_id, order_id)


async def rows(database: Database) -> dict[str, list[str]]:
    """Every row of the accounts as text, sorted.

    Without numbers of ticks, which count across leaders. Ticks are of whole seconds, and what follows the last one at a
    takeover, which has seen the market up to that moment, is no other tick.
    """
    async with database.connection() as conn:
        return {
            table: [
                re.sub(r'("seen_until": "[^".+]*)\.\d+', r"\1", row[0])
                for row in await conn.fetch(f"SELECT (to_jsonb(t) - 'seen_tick')::text FROM {table} t ORDER BY 1")
                if "nobody" not in row[0]
            ]
            for table in TABLES
        }
