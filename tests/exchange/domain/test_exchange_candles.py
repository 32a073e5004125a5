"""The exchange rules against the reference account on recorded candles, including the crash of February 3, 2025."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from random import Random

import pytest
from support.books import DEFAULT_MARKETS
from support.candles import FOLDER
from support.run_profile import is_nightly
from support.side_by_side import SideBySide

from trader.core.money import round_to
from trader.exchange.domain import account as figures
from trader.exchange.domain.orders import Cause, ExitPlan, Order, OrderSide, OrderType
from trader.exchange.domain.tick_rules import Moment
from trader.market.domain.markets import MARKETS, PLAIN_FUNDING_RATE, Quote, Tick
from trader.market.sources.replay import ReplaySource

CRASH = datetime(2025, 2, 3, 1, 50, tzinfo=UTC)
"""Ten minutes before ETH fell from 2,785 to 2,125 in 38 minutes."""

SPAN = timedelta(minutes=61)
"""Covers the crash, and a change of the hour anywhere."""

FLOWS = 40 if is_nightly() else 1

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the recorded candles are not available")


@pytest.fixture(scope="module")
def source() -> ReplaySource:
    source = ReplaySource(FOLDER, tuple(DEFAULT_MARKETS))
    asyncio.run(source.open())
    return source


def moments(source: ReplaySource, start: datetime, span: timedelta) -> Iterator[Moment]:
    quotes: dict[str, Quote] = {}
    marks: dict[str, Decimal] = {}

    async def told() -> list[Tick]:
        return [tick async for tick in source.history(start, start + span)]

    for tick in asyncio.run(told()):
        quotes |= tick.quotes
        marks |= {symbol: quote.mark for symbol, quote in tick.quotes.items()}
        yield Moment(tick.at, dict(quotes), dict(marks), frozenset(tick.quotes))


def rate_of_hour(symbol: str, boundary: datetime) -> Decimal:
    return PLAIN_FUNDING_RATE


def random_order(random: Random, moment: Moment, capital: Decimal) -> Order:
    symbol, side = random.choice(list(DEFAULT_MARKETS)), random.choice(list(OrderSide))
    mark, leverage = moment.marks[symbol], random.choice((None, Decimal(3), Decimal(10), Decimal(20)))
    margin = Decimal(random.choice((1, 5, 20, 40, 70))) / 100

    def price(width: float, sign: int) -> Decimal | None:
        off = Decimal(repr(random.uniform(0.0002, width)))
        return None if random.random() < 0.5 else mark * (1 + sign * side.direction * off)

    limit = price(0.004, random.choice((-1, -1, 1)))
    return Order(
        account_id="default",
        symbol=symbol,
        side=side,
        quantity=round_to(capital * margin * (leverage or 1) / mark, Decimal("1e-7")) + MARKETS[symbol].lot,
        type=OrderType.MARKET if limit is None else OrderType.LIMIT,
        limit_price=limit,
        leverage=leverage,
        reduce_only=random.random() < 0.15,
        exit_plan=ExitPlan(
            stop=price(0.03, -1),
            target=price(0.03, 1),
            time_exit=None if random.random() < 0.7 else moment.at + timedelta(seconds=random.randint(1, 3_000)),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("flow", range(FLOWS))
def test_random_orders_over_the_recorded_market(source: ReplaySource, flow: int) -> None:
    """The first flow trades the crash; the others trade an hour elsewhere in the recording."""
    random = Random(flow)
    start = CRASH if not flow else datetime(2025, 1, 2, tzinfo=UTC) + timedelta(seconds=random.randint(0, 31 * 86_400))
    both = SideBySide(Decimal(random.choice((500, 10_000, 400_000))), rate_of_hour, start)
    for moment in moments(source, start, SPAN):
        both.update(moment)
        roll = random.random()
        if roll < 0.02:
            both.place(random_order(random, moment, both.account.run.initial_capital), moment)
        elif roll < 0.022 and both.account.resting:
            both.cancel(random.randrange(len(both.account.resting)), moment)
        elif roll < 0.0224 and both.account.cash < both.account.run.initial_capital / 4:
            both.reset(Decimal(10_000), moment)
    assert both.seen[Cause.LIMIT]
    assert both.seen["filled"]
    assert both.seen["funding"]


@pytest.mark.slow
def test_a_leveraged_long_is_liquidated_in_the_crash_at_the_books_prices(source: ReplaySource) -> None:
    """ETH at 10×: equity ends at zero or above, and an insurance row, if any, closes the books."""
    both: SideBySide | None = None
    liquidated = expected = None
    for moment in moments(source, CRASH, SPAN):
        if both is None:
            both = SideBySide(Decimal(10_000), rate_of_hour, CRASH)
            quantity = round_to(Decimal(97_000) / moment.marks["ETH"], Decimal("0.001"))
            while sum(position.quantity for position in both.account.positions.values()) < quantity:
                both.place(
                    Order(
                        account_id="default",
                        symbol="ETH",
                        side=OrderSide.BUY,
                        quantity=quantity,
                        leverage=Decimal(10),
                    ),
                    moment,
                )
            expected = figures.liquidation_price(both.account, "ETH", moment.marks, MARKETS)
        both.update(moment)
        if liquidated is None and both.seen[Cause.LIQUIDATION]:
            liquidated = moment
            assert expected is not None
            assert moment.marks["ETH"] <= expected + 1
    assert both is not None
    assert liquidated is not None
    assert both.seen[Cause.LIQUIDATION]
    assert not both.account.positions
    assert both.account.cash >= 0
    assert sum(trade.insurance for posting in both.rows for trade in posting.trades) == both.account.insurance
