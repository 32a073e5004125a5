"""Accounts followed by frames: what they say is booked at once, and the limits of the venue hold."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from time import monotonic

import pytest
from support.fake_ledger import ACCOUNT, KEY_INDEX, PLAIN_KEY
from support.fake_venue import IDS
from support.live import Bench, PlainSigner, add_model, prepared
from support.waiting import until

from trader.core.events import MarketChecked
from trader.core.tasks import end, start
from trader.database.pool import Database
from trader.exchange.domain.orders import ExitPlan, OrderStatus
from trader.live.budget import RequestBudget
from trader.live.lighter.api import LighterApi
from trader.live.lighter.frames import CHANNELS, RENEW_S, AccountFrames, AccountStream
from trader.settings.forms import Secret

D = Decimal
PLAN = ExitPlan(stop=D(93000), target=D(96000))
EIGHT = tuple(range(ACCOUNT, ACCOUNT + 8))
CYCLES = 10


@pytest.fixture
async def bench(database: Database) -> AsyncIterator[Bench]:
    async with prepared(database) as bench:
        bench.venue.refuses_streams = False
        await add_model(database, "m0", ACCOUNT)
        try:
            yield bench
        finally:
            if hasattr(bench, "exchange"):
                await bench.stop()


async def test_a_fill_at_the_venue_is_booked_within_a_second_though_requests_show_it_late(bench: Bench) -> None:
    bench.venue.frame_fault_share = 0.0
    await bench.start()
    await bench.follow()
    bench.venue.event_lag_s = bench.venue.lag_s = (1e6, 1e6)
    took = []
    for _ in range(10):
        await bench.see({"BTC": "94000"})
        assert (await bench.buy("0.01", account_id="m0", exit_plan=PLAN)).status is OrderStatus.FILLED
        began = monotonic()
        bench.venue.reach("BTC", "92900")
        await until(lambda: not bench.account("m0").positions, "the stop is booked")
        took.append(monotonic() - began)
    assert max(took) < 1


@pytest.mark.parametrize("fault", ["double", "late", "swap", "drop"])
async def test_frames_are_booked_once_in_any_order_and_a_lost_one_is_made_up_for(bench: Bench, fault: str) -> None:
    bench.venue.frame_faults = [fault, "ok", fault, fault, "ok"] * 100
    await bench.start()
    await bench.follow()
    for mid in ("94000", "92900", "94000", "96100"):
        await bench.see({"BTC": mid})
        if mid == "94000":
            assert (await bench.buy("0.01", account_id="m0", exit_plan=PLAN)).status is OrderStatus.FILLED
        for _ in range(8):
            await bench.cycle(10)
    assert not bench.account("m0").positions
    await bench.agree("m0")


async def test_a_gap_of_the_stream_is_followed_by_reading_everything(bench: Bench) -> None:
    await bench.start()
    await bench.follow()
    await bench.tell()
    await bench.buy("0.01", account_id="m0", exit_plan=PLAN)
    await bench.venue.cut()
    bench.venue.reach("BTC", "92900")
    await bench.follow()
    await bench.cycle(10)
    await bench.cycle(10)
    await bench.agree("m0")


@asynccontextmanager
async def followed(bench: Bench, *, renew_s: float = RENEW_S) -> AsyncIterator[AccountFrames]:
    """Follow the account by a stream of its own."""
    api, signer = LighterApi(bench.venue.url, pause_s=0.001), PlainSigner("", ACCOUNT, KEY_INDEX, Secret(PLAIN_KEY))
    stream, frames = AccountStream(api, renew_s=renew_s), AccountFrames(signer)
    stream.accounts[ACCOUNT] = frames
    following = start(stream.run(), "stream")
    try:
        await until(lambda: frames.following > 0)
        yield frames
    finally:
        await end(following)
        await signer.close()
        await api.close()


async def test_no_subscription_outlasts_its_stream(bench: Bench) -> None:
    async with followed(bench) as frames:
        frames.check([])
        assert frames.standing() == []
        bench.venue.refuses_streams = True
        await bench.venue.cut()
        await until(lambda: not frames.following, within_s=5)
        assert frames.standing() is None, "orders are requested while nothing is pushed"


async def test_tokens_are_renewed_before_they_end_and_nothing_is_missed_meanwhile(bench: Bench) -> None:
    async with followed(bench, renew_s=0.05) as frames:
        first = frames.following
        await until(lambda: frames.following > first + len(CHANNELS))
        asked = [(each["type"], each["channel"].partition("/")[0]) for each in bench.venue.heard if "channel" in each]
        assert asked[:4] == [("subscribe", channel) for channel in CHANNELS]
        assert asked[4:12] == [(kind, channel) for channel in CHANNELS for kind in ("unsubscribe", "subscribe")]
        bench.venue.frame_fault_share = 0.0
        bench.venue.trade_by_hand("BTC", "0.01")
        await until(lambda: frames.trades)


@pytest.mark.slow
async def test_eight_accounts_trade_within_the_limits_of_a_standard_account(bench: Bench) -> None:
    for number, index in enumerate(EIGHT):
        await add_model(bench.database, f"m{number}", index)
        bench.venue.open(index, "100000")
    bench.venue.tier, bench.venue.request_s = "standard", 0.0
    bench.venue.excuse("lag_s", "event_lag_s")
    bench.budget = RequestBudget(60, per_kind=40, now_s=lambda: bench.clock.now().timestamp())
    passing = start(pass_time(bench), "time")
    try:
        await bench.start()
        await bench.follow()
        await bench.tell()
        for cycle in range(CYCLES):
            next_cycle = bench.clock.now() + timedelta(seconds=10)
            await bench.tell()
            bench.bus.publish(MarketChecked(bench.clock.now()))
            due = [n for n in range(cycle % 4, 8, 4) if not bench.account(f"m{n}").positions]
            orders = [bench.buy("0.01", account_id=f"m{n}", exit_plan=PLAN) for n in due]
            await asyncio.gather(*orders, return_exceptions=True)  # one that the limits leave no room for is repeated
            while bench.clock.now() < next_cycle:
                await asyncio.sleep(0.01)
        assert bench.venue.limited == 0
        held = {index: ledger.positions() for index, ledger in bench.venue.ledgers.items()}
        assert held == {index: {IDS["BTC"]: D("0.01")} for index in EIGHT}
        assert {bench.account(f"m{n}").positions["BTC"].quantity for n in range(8)} == {D("0.01")}
        assert dict(bench.exchange.troubles) == {}
    finally:
        await end(passing)


async def pass_time(bench: Bench) -> None:
    while True:
        await bench.clock.advance(timedelta(seconds=1))
        await asyncio.sleep(0.01)
