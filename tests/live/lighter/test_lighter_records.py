"""Private records of an account: every page, each trade once with its fee, and the funding."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_exchange import FakeExchange
from support.fake_ledger import ACCOUNT
from support.live import MARKETS, PlainSigner, Sender, live_settings

from trader.core.errors import MarketDataError
from trader.exchange.domain.orders import OrderSide
from trader.exchange.domain.venue_orders import VenueOrder, VenueOrderType
from trader.live.budget import RequestBudget
from trader.live.domain.orders import Placed
from trader.live.lighter.account import LighterAccount, LighterAccounts
from trader.live.lighter.frames import AccountFrames
from trader.live.lighter.rows import OrderRow

D = Decimal
UNLIMITED = RequestBudget(10**9, per_kind=10**9)
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
async def venue() -> AsyncIterator[FakeExchange]:
    venue = FakeExchange(lambda: NOON)
    venue.excuse("lag_s", "event_lag_s")  # the rows are read, not waited for
    await venue.start()
    yield venue
    await venue.stop()


@pytest.fixture
async def account(venue: FakeExchange) -> AsyncIterator[LighterAccount]:
    accounts = LighterAccounts(live_settings(venue.url), UNLIMITED, make_signer=PlainSigner, pause_s=0.001)
    yield await accounts.account(str(ACCOUNT))
    await accounts.close()


def market_order(index: int, side: OrderSide = OrderSide.BUY) -> VenueOrder:
    return VenueOrder(
        client_index=index, symbol="BTC", side=side, type=VenueOrderType.MARKET, quantity=D("0.2"), price=D(94000)
    )


async def test_the_fills_of_an_order_come_with_their_fees(venue: FakeExchange, account: LighterAccount) -> None:
    venue.taker_fee, venue.doubles_trades = 280, True
    outcome = await Sender(account, MARKETS).place(market_order(11, OrderSide.SELL))
    await Sender(account, MARKETS).place(market_order(12))
    assert isinstance(outcome, Placed)
    fills = await account.records.fills_of(outcome.state.client_index, outcome.state.venue_index)
    assert [(fill.client_index, fill.side, fill.quantity, fill.price) for fill in fills] == [
        (11, OrderSide.SELL, D("0.1"), D(94000))
    ] * 2
    assert {(fill.fee_rate, fill.maker, fill.kind, fill.symbol, fill.at) for fill in fills} == {
        (D("0.00028"), False, "trade", "BTC", NOON)
    }
    assert len({fill.trade_id for fill in fills}) == 2


async def test_a_maker_pays_the_makers_fee_and_a_missing_fee_is_none(
    venue: FakeExchange, account: LighterAccount
) -> None:
    limit = VenueOrder(
        client_index=5, symbol="BTC", side=OrderSide.BUY, type=VenueOrderType.LIMIT, quantity=D(1), price=D(93000)
    )
    await Sender(account, MARKETS).place(limit)
    venue.reach("BTC", "93000.0")
    assert {(fill.maker, fill.fee_rate) for fill in await account.records.fills_since(NOON)} == {(True, D("0.00004"))}
    venue.taker_fee = 0
    venue.trade_by_hand("ETH", "1")
    assert (await account.records.fills_since(NOON))[-1].fee_rate == 0


async def test_many_trades_come_page_by_page_in_order(venue: FakeExchange, account: LighterAccount) -> None:
    for _ in range(250):
        venue.trade_by_hand("BTC", "0.001")
    fills = await account.records.fills_since(NOON)
    assert [fill.trade_id for fill in fills] == [trade["trade_id"] for trade in venue.ledger.trades]
    assert await account.records.fills_since(NOON + timedelta(seconds=1)) == []
    for _ in range(2000):
        venue.trade_by_hand("BTC", "0.001")
    with pytest.raises(MarketDataError, match="more than 2000 rows"):
        await account.records.fills_since(NOON)


async def test_times_are_in_seconds_or_milliseconds(venue: FakeExchange, account: LighterAccount) -> None:
    seconds = int(NOON.timestamp())
    for timestamp in (seconds, seconds * 1000, seconds * 1000 + 250):
        venue.trade_by_hand("BTC", "0.1")
        venue.ledger.trades[-1]["timestamp"] = timestamp
    late = NOON + timedelta(milliseconds=250)
    assert [fill.at for fill in await account.records.fills_since(NOON)] == [NOON, NOON, late]
    assert [fill.at for fill in await account.records.fills_since(late)] == [late]


async def test_funding_is_booked_for_its_hour(venue: FakeExchange, account: LighterAccount) -> None:
    venue.trade_by_hand("BTC", "-0.5")
    venue.pay_funding("BTC", NOON, "0.0002")
    (payment,) = await account.records.fundings_since(NOON - timedelta(hours=1))
    assert (payment.symbol, payment.boundary, payment.quantity) == ("BTC", NOON, D("0.5"))
    assert (payment.rate, payment.amount) == (D("0.0002"), D("0.5") * 94000 * D("0.0002")), "a short receives"
    assert await account.records.fundings_since(NOON + timedelta(hours=1)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"size": "-1"},
        {"size": "NaN"},
        {"bid_account_id": 1},
        {"ask_account_id": ACCOUNT},
        {"price": None},
    ],
)
async def test_an_impossible_trade_is_an_error(
    venue: FakeExchange, account: LighterAccount, change: dict[str, Any]
) -> None:
    venue.trade_by_hand("BTC", "0.5")
    venue.ledger.trades[-1].update(change)
    with pytest.raises(MarketDataError, match="/api/v1/trades"):
        await account.records.fills_since(NOON)


@given(st.lists(st.sampled_from(range(6)), min_size=1, max_size=20))
def test_the_state_of_an_order_is_its_newest_in_whatever_order_frames_and_requests_tell_it(told: list[int]) -> None:
    life = [
        ("in-progress", "0", 1), ("pending", "0", 2), ("open", "0", 3), ("open", "0.1", 3), ("open", "0.2", 5),
        ("canceled", "0.2", 5),
    ]  # fmt: skip
    frames = AccountFrames(PlainSigner.__new__(PlainSigner))
    for step in told:
        status, filled, at = life[step]
        frames.learn([OrderRow(2**48 + 1, 11, 1, D(filled), status, updated_at=at)])
    frames.following = 1
    row = frames.order(11)
    assert row is not None
    assert (row.status, str(row.filled_base_amount), row.updated_at) == life[max(told)]
