"""Contradictory reports of a venue: lists and ids, reused ids, parts of groups, numbers and decimals.

Each family runs against both venues. A position keeps its stop, and the books equal the venue's within a minute, or an
alarm stands; once the venue is right again, everything agrees.
"""

from collections.abc import AsyncIterator
from decimal import Decimal

import pytest
from support.fake_exchange import FakeExchange
from support.fake_hyperliquid import FakeHyperliquid
from support.fake_ledger import Standing
from support.fake_venue import IDS
from support.live import Bench, add_model, prepared

from trader.database.pool import Database
from trader.exchange.domain.orders import ExitPlan, OrderStatus, OrderType

D = Decimal
BTC = IDS["BTC"]
PLAN = ExitPlan(stop=D(90000), target=D(99000))
CYCLE_S, STOPPED_WITHIN, MINUTE = 5, 3, 12


@pytest.fixture(params=[FakeExchange, FakeHyperliquid])
async def bench(database: Database, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with prepared(database, request.param) as bench:
        bench.venue.ledger.deposit = D(100_000)
        await add_model(database, "apex")
        await bench.start()
        await bench.tell()
        yield bench
        await bench.stop()


async def pass_time(bench: Bench, cycles: int = MINUTE) -> None:
    bare = 0
    for _ in range(cycles):
        await bench.cycle(CYCLE_S)
        is_bare = bench.venue.positions().get(BTC, D(0)) > 0 and not bench.venue.ledger.is_stopped(BTC)
        bare = bare + 1 if is_bare and not bench.exchange.troubles else 0
        assert bare < STOPPED_WITHIN, "a position without its stop"


def only(bench: Bench, kind: str) -> Standing:
    (order,) = [each for each in bench.venue.ledger.standing(BTC) if each.type == kind]
    return order


async def test_a_stop_that_a_list_lacks_and_its_id_finds_stays_alone(bench: Bench) -> None:
    await bench.buy("0.1", exit_plan=PLAN)
    await pass_time(bench, 4)
    stop = only(bench, "stop-loss")
    bench.venue.unlisted = {stop.client_index}
    for _ in range(MINUTE):
        await pass_time(bench, 1)
        assert only(bench, "stop-loss") is stop
    bench.venue.unlisted.clear()
    await pass_time(bench)
    await bench.agree()


async def test_an_id_that_another_program_uses_again_hides_no_fill(bench: Bench) -> None:
    """The order fills while nobody looks, and its id then names an order of another program."""
    resting = await bench.buy("0.1", type=OrderType.LIMIT, limit_price=D(93000), exit_plan=PLAN)
    assert resting.status is OrderStatus.RESTING
    await pass_time(bench, 4)
    ours = next(index for index, order in bench.venue.orders.items() if order.type == "limit")
    bench.venue.reach("BTC", "92900")
    bench.venue.give_again(ours)
    await bench.tell()
    await pass_time(bench)
    assert bench.exchange.troubles or bench.account().positions["BTC"].quantity == D("0.1")
    assert bench.account().positions["BTC"].exit_plan == PLAN
    bench.venue.orders[ours].status = "canceled"
    await pass_time(bench)
    await bench.agree()


@pytest.mark.parametrize("kind", ["stop-loss", "take-profit"])
async def test_a_part_of_a_group_that_covers_too_little_is_replaced(bench: Bench, kind: str) -> None:
    await bench.buy("0.1", exit_plan=PLAN)
    await pass_time(bench, 4)
    only(bench, kind).quantity = D("0.04")
    await pass_time(bench)
    assert only(bench, kind).quantity == D("0.1")
    await bench.agree()


async def test_trades_with_lower_numbers_than_those_before_are_booked(bench: Bench) -> None:
    await bench.buy("0.1", exit_plan=PLAN)
    await bench.buy("1", symbol="ETH")
    await pass_time(bench, 2)
    bench.venue.restart()
    await bench.sell("0.04", reduce_only=True)
    bench.venue.trade_by_hand("ETH", "-2")
    bench.venue.trade_by_hand("ETH", "3")
    await pass_time(bench)
    bench.venue.reach("BTC", "89900")
    await bench.tell()
    await pass_time(bench)
    assert set(bench.account().positions) == {"ETH"}
    await bench.agree()


@pytest.mark.parametrize("fees", [(D("123.456789123"), D("-12.345678")), (D(0), D(0)), (D(-20), D(-40))])
async def test_fees_of_any_decimals_and_signs_are_booked_as_charged(
    bench: Bench, fees: tuple[Decimal, Decimal]
) -> None:
    if not isinstance(bench.venue, FakeHyperliquid):  # its fees are whole millionths
        fees = round(fees[0]), round(fees[1])  # type: ignore[assignment]
    bench.venue.taker_fee, bench.venue.maker_fee = fees  # type: ignore[assignment]
    await bench.buy("0.1234", exit_plan=PLAN)
    await bench.buy("0.1", type=OrderType.LIMIT, limit_price=D(93000))
    bench.venue.reach("BTC", "92900")
    await bench.tell()
    await pass_time(bench)
    await bench.sell("0.0567", reduce_only=True)
    await pass_time(bench)
    assert bench.account().positions["BTC"].quantity == D("0.1667")
    await bench.agree()
