"""Kill a paced replay at random moments while clients trade in it, and repeat their orders in an unkilled run.

The second run is in this process: it processes the same ticks, and places each order at the time at which the first run
decided on it. The rows of both must be the same.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
from support.manual_clock import ManualClock
from support.process import ServiceProcess
from support.scripted import make_settings
from support.venue import make_exchange

from trader.agents.domain.models import Model
from trader.agents.sql.models import upsert_model
from trader.api.schemas.simulator import PlaceOrderInput
from trader.core.variant_id import VariantId
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


@dataclass
class Storm:
    """The requests and observations of clients, across all lives of the service."""

    acts: list[Act] = field(default_factory=list)
    resting: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Account and id of the orders that were left resting, by the number of the act."""
    seen_until: str = ""
    """The latest market time seen by any observer."""
    lived_twice: list[tuple[str, str]] = field(default_factory=list)
    """Times of the market at a start that were not later than what had been seen before."""


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


async def without_models(database: Database, now: datetime) -> None:
    """Make a demo invoke no models: it creates models only if there are none."""
    async with database.connection() as conn:
        await upsert_model(
            conn,
            Model(
                id="nobody", name="Nobody", variant=VariantId.APEX, provider="rules", router_model_name="rules/apex",
                active=False, created_at=now,
            ),
        )  # fmt: skip


async def carry_on(service: ServiceProcess, storm: Storm, rng: Random, life_s: float) -> None:
    """Trade with every account until the service is killed, after `life_s` seconds."""
    _, report = await service.get("/health/schedulers")
    began = report["market"]["lastUpdateAt"] or ""
    if began and began < storm.seen_until:
        storm.lived_twice.append((storm.seen_until, began))
    clients = [asyncio.create_task(_trade(service, storm, account_id, Random(rng.random()))) for account_id in ACCOUNTS]
    clients.append(asyncio.create_task(_watch(service, storm)))
    await asyncio.sleep(life_s)  # the moment of the kill is random
    await service.kill()
    for outcome in await asyncio.gather(*clients, return_exceptions=True):
        if not isinstance(outcome, aiohttp.ClientError | OSError):
            raise AssertionError(outcome)


async def _watch(service: ServiceProcess, storm: Storm) -> None:
    while True:
        _, report = await service.get("/health/schedulers")
        storm.seen_until = max(storm.seen_until, report["market"]["lastUpdateAt"] or "")


async def _trade(service: ServiceProcess, storm: Storm, account_id: str, rng: Random) -> None:
    while True:
        prices = {
            price["symbol"]: price["price"] for price in (await service.call("trading.getCryptoPrices"))["prices"]
        }
        number = len(storm.acts)
        resting = [entry for entry, (owner, _) in storm.resting.items() if owner == account_id]
        if resting and rng.random() < 0.1:
            cancelled = rng.choice(resting[-5:])
            storm.acts.append(Act(account_id, number, {}, cancelled))
            order_id = storm.resting[cancelled][1]
            await service.try_call("simulator.cancelOrder", accountId=account_id, orderId=order_id)
            continue
        order = _order(rng, prices)
        storm.acts.append(Act(account_id, number, order))
        status, body = await service.try_call(
            "simulator.placeOrder", accountId=account_id, clientOrderId=str(number), **order
        )
        if status == 503:  # the database has not yet noticed that the killed process is gone, so this one stands by
            await asyncio.sleep(0.05)
            continue
        assert status == 200, (status, body)
        if body["order"]["status"] == "resting":
            storm.resting[number] = account_id, body["order"]["id"]


def _order(rng: Random, prices: dict[str, float]) -> dict[str, Any]:
    """Return mostly limit orders so near the price that a book of the next minutes fills them, or a recent one did."""
    symbol, side = rng.choice(list(SIZES)), rng.choice(["buy", "sell"])
    order: dict[str, Any] = {
        "symbol": symbol, "side": side, "quantity": SIZES[symbol] * rng.choice([0.2, 1, 3]), "leverage": 10,
        "reduceOnly": rng.random() < 0.15,
    }  # fmt: skip
    sign = 1 if side == "buy" else -1
    if rng.random() < 0.7:
        order |= {"type": "limit", "limitPrice": prices[symbol] * (1 - sign * rng.uniform(-0.0001, 0.0015))}
    elif rng.random() < 0.7:
        away = prices[symbol] * rng.uniform(0.0005, 0.003)
        order["exitPlan"] = {"stop": prices[symbol] - sign * away, "target": prices[symbol] + sign * away}
    return order


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
        await exchange.place_order(msgspec.convert(request, PlaceOrderInput).to_order())
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
    """Every row of the accounts as text, sorted. Without numbers of ticks, which count across leaders."""
    async with database.connection() as conn:
        return {
            table: [
                row[0]
                for row in await conn.fetch(f"SELECT (to_jsonb(t) - 'seen_tick')::text FROM {table} t ORDER BY 1")
                if "nobody" not in row[0]
            ]
            for table in TABLES
        }
