"""Random trading over random markets, once uninterrupted and once with stops, crashes and downtime."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from random import Random

import pytest
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource
from support.venue import Venue, agree_with_rows, dump

from trader.core.money import floor_to, round_to
from trader.database.pool import Database
from trader.exchange.domain.orders import ExitPlan, Order, OrderSide, OrderType, PlanTarget
from trader.market.domain.markets import MARKETS, Book, Level, Quote, Tick

PRICES = {"BTC": Decimal(94_000), "ETH": Decimal(3_300), "SOL": Decimal(200)}
MOVES = (0, 0, 10, -10, 50, -50, 200, -200, 600, -800)
"""Moves of all markets from one update to the next, in basis points."""

UPDATES = 100

Act = Order | str
"""An order to place, or the account to reset."""


def drawn_updates(rng: Random) -> list[Tick]:
    """Updates of every market, many of them on a full hour."""
    prices, at, ticks = dict(PRICES), START, []
    for _ in range(UPDATES):
        hour = at.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        at = min(at + timedelta(seconds=rng.choice((1, 1, 7, 29, 600, 1_800))), hour)
        move = 1 + Decimal(rng.choice(MOVES)) / 10_000
        prices = {symbol: round_to(price * move, MARKETS[symbol].tick) for symbol, price in prices.items()}
        books = [Book(s, at, _side(rng, s, price, -1), _side(rng, s, price, 1)) for s, price in prices.items()]
        ticks.append(Tick(at, {book.symbol: Quote.of(book) for book in books}))
    return ticks


def _side(rng: Random, symbol: str, price: Decimal, direction: int) -> tuple[Level, ...]:
    market = MARKETS[symbol]
    depths = [floor_to(rng.choice((20, 1_000, 50_000)) / price, market.lot) for _ in range(rng.choice((1, 4)))]
    return tuple(
        Level(price + direction * n * 10 * market.tick, max(market.lot, size)) for n, size in enumerate(depths, 1)
    )


def drawn_acts(rng: Random, tick: Tick) -> list[Act]:
    return [_act(rng, tick) for _ in range(rng.choice((0, 0, 1, 2, 3)))]


def _act(rng: Random, tick: Tick) -> Act:
    account_id, symbol, side = rng.choice("ab"), rng.choice(list(PRICES)), rng.choice(list(OrderSide))
    if rng.random() < 0.02:
        return account_id
    mark, leverage, rests = tick.quotes[symbol].mark, rng.choice((1, 3, 7, 20)), rng.random() < 0.5

    def beyond(basis_points: Sequence[int]) -> Decimal:
        return mark * (1 + side.direction * Decimal(rng.choice(basis_points)) / 10_000)

    plan = ExitPlan(
        stop=beyond((-150, -700)),
        target=beyond((50, 300)) if rng.random() < 0.5 else None,
        trailing_distance=mark / 100 if rng.random() < 0.5 else None,
        targets=tuple(
            PlanTarget(price=beyond(basis_points), fraction=Decimal(fraction))
            for basis_points, fraction in (((20, 60), "0.3"), ((80,), "0.25"), ((150,), "0.45"))
        )[: rng.choice((0, 1, 3))],
    )
    return Order(
        account_id=account_id,
        symbol=symbol,
        side=side,
        quantity=round(rng.choice((500, 2_000, 8_000)) * leverage / mark, 7),
        type=OrderType.LIMIT if rests else OrderType.MARKET,
        limit_price=beyond((50, 0, -5, -30, -100)) if rests else None,
        leverage=Decimal(leverage),
        reduce_only=rng.random() < 0.2,
        post_only=rests and rng.random() < 0.3,
        exit_plan=plan if rng.random() < 0.7 else None,
    )


async def trade(
    database: Database,
    ticks: list[Tick],
    acts: Mapping[int, list[Act]],
    downtimes: Mapping[int, int],
    rng: Random,
    **settings: str,
) -> list[list[tuple[object, ...]]]:
    """Trade through the updates, and return the resulting rows. `downtimes` says how many are missed from where on."""
    source, clock, place = ScriptedSource(), ManualClock(START), 0
    source.script = ticks
    venue = Venue(database, source, clock, **settings)
    await venue.exchange.lead()
    while place < len(ticks):
        if place in downtimes:
            if rng.random() < 0.5:  # a crash: nothing says how far the market was followed
                venue.exchange.suspend()
            await venue.exchange.resign()
            place += downtimes[place]
            await clock.advance(ticks[place - 1].at - clock.now())
            venue = Venue(database, source, clock, **settings)
            await venue.exchange.lead()
        await clock.advance(ticks[place].at - clock.now())
        await venue.market.take(ticks[place], venue.exchange.on_tick)
        for act in acts[place]:
            await (venue.exchange.reset_account(act) if isinstance(act, str) else venue.exchange.place_orders(act))
        place += 1
    await agree_with_rows(venue)
    await venue.exchange.resign()
    return await dump(database)


@pytest.mark.parametrize(("seed", "shared"), [(1, "off"), (2, "on"), (11, "off"), (17, "on")])
async def test_restarts_leave_the_same_rows_as_never_stopping(database: Database, seed: int, shared: str) -> None:
    rng = Random(seed)
    ticks = drawn_updates(rng)
    downtimes = {place: rng.choice((0, 1, 6)) for place in range(rng.randrange(4, 9), UPDATES - 9, 9)}
    missed = {place + n for place, length in downtimes.items() for n in range(length)}
    acts = {place: [] if place in missed else drawn_acts(rng, tick) for place, tick in enumerate(ticks)}
    expected = await trade(database, ticks, acts, {}, rng, SHARED_DEPTH=shared)
    async with database.connection() as conn:  # the same database again, emptied
        await conn.execute("TRUNCATE accounts, order_requests, service_state, last_marks CASCADE")
    assert await trade(database, ticks, acts, downtimes, rng, SHARED_DEPTH=shared) == expected
    assert all(len(table) > 1 for table in expected[:4]), "there must have been trades, fills, funding and limit orders"
