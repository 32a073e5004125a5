"""Live orders through the venue's unmodified SDK, against a server on loopback: none lost, none duplicated."""

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from support.fake_exchange import CREATE, GROUP, FakeExchange
from support.fake_ledger import ACCOUNT, KEY_INDEX
from support.live import MARKETS, Sender
from support.run_profile import is_nightly

from trader.core.errors import MarketDataError, StartError
from trader.exchange.domain.orders import OrderSide
from trader.exchange.domain.venue_orders import VenueOrder, VenueOrderType
from trader.live.domain.orders import (
    CLIENT_INDEX_MAX,
    Busy,
    Placed,
    Refused,
    SendOutcome,
    Unknown,
    client_index_of,
)
from trader.live.domain.reconciliation import LedgerReport, ProtectiveOrder, VenueReport, reconcile
from trader.live.lighter.account import LighterAccount, open_account, prove_access
from trader.live.lighter.api import LighterApi
from trader.live.lighter.rows import PositionRow
from trader.live.lighter.signer import TRANSACTION_EXPIRES_S, LighterSigner, OrderTerms, Signed
from trader.live.lighter.transactions import REFUSALS
from trader.settings.forms import Secret

pytestmark = pytest.mark.sdk
sdk = pytest.importorskip("lighter.signer_client", reason="the extra `live` is not installed")

D = Decimal
BTC = 1
VENUES = Path(__file__).parents[4] / "shared" / "data" / "venues"
SCHEDULES = int(os.environ.get("FAULT_SCHEDULES", "500" if is_nightly() else "100"))


@pytest.fixture(scope="module")
def key() -> Secret:
    private, _, error = sdk.create_api_key()
    assert error is None
    return Secret(private)


def test_the_sdk_runs_with_the_locked_urllib3_instead_of_the_one_that_it_pins() -> None:
    lock = Path(__file__).parents[3] / "scripts" / "packaging" / "requirements-live.lock"
    assert f"\nurllib3=={metadata.version('urllib3')} " in lock.read_text(encoding="utf-8")
    configuration = sdk.Configuration(username="name", password="word")
    assert configuration.get_basic_auth_token() == "Basic bmFtZTp3b3Jk"  # all that the SDK uses it for


class RecordingSigner(LighterSigner):
    """The real signer, which tells the fake venue the hashes that the real one computes."""

    venue: FakeExchange

    def create_orders(self, orders: Sequence[OrderTerms], *, nonce: int) -> Signed:
        return self._told(super().create_orders(orders, nonce=nonce))

    def cancel_order(self, market_id: int, index: int, *, nonce: int) -> Signed:
        return self._told(super().cancel_order(market_id, index, nonce=nonce))

    def _told(self, signed: Signed) -> Signed:
        self.venue.hashes[signed.text] = signed.hash
        return signed


@asynccontextmanager
async def trading(key: Secret) -> AsyncIterator[tuple[FakeExchange, LighterAccount, LighterSigner]]:
    venue = FakeExchange()
    venue.excuse("lag_s", "event_lag_s")
    await venue.start()
    api = LighterApi(venue.url, pause_s=0.001)
    signer = RecordingSigner(venue.url, ACCOUNT, KEY_INDEX, key)
    signer.venue = venue
    await api.listings()
    try:
        yield venue, open_account(api, signer, pause_s=0.001), signer
    finally:
        await signer.close()
        await api.close()
        await venue.stop()


@pytest.fixture
async def venue_and_account(key: Secret) -> AsyncIterator[tuple[FakeExchange, LighterAccount]]:
    async with trading(key) as (venue, account, _):
        yield venue, account


@pytest.fixture
def venue_and_orders(venue_and_account: tuple[FakeExchange, LighterAccount]) -> tuple[FakeExchange, Sender]:
    return venue_and_account[0], Sender(venue_and_account[1], MARKETS)


def order(number: int = 1, **more: Any) -> VenueOrder:
    fields: dict[str, Any] = {
        "client_index": client_index_of("apex", str(number)),
        "symbol": "BTC",
        "side": OrderSide.BUY,
        "type": VenueOrderType.MARKET,
        "quantity": D("0.25"),
        "price": D("94470.0"),
        **more,
    }
    return VenueOrder(**fields)


# Signing


async def test_the_signer_verifies_the_place_of_every_argument(key: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    async with trading(key) as (_, _, signer):
        signer.check()
        honest = sdk.SignerClient.sign_create_order

        def swapped(client: Any, *given: Any, **more: Any) -> Any:
            return honest(client, *given[:2], given[3], given[2], *given[4:], **more)

        def without_reduce_only(client: Any, *given: Any, **more: Any) -> Any:
            return honest(client, *given[:7], False, *given[8:], **more)

        monkeypatch.setattr(sdk.SignerClient, "sign_create_order", swapped)
        with pytest.raises(StartError, match="signs something other than what it was given"):
            signer.check()
        monkeypatch.setattr(sdk.SignerClient, "sign_create_order", without_reduce_only)
        with pytest.raises(StartError, match="ReduceOnly"):
            signer.check()


async def test_the_key_is_proven_against_the_one_that_the_venue_has() -> None:
    private, public, _ = sdk.create_api_key()
    async with trading(Secret(private)) as (venue, _, signer):
        api = LighterApi(venue.url)
        with pytest.raises(StartError, match="not the private part of API key 4"):
            await prove_access(api, signer)
        venue.ledger.keys[KEY_INDEX] = public
        await prove_access(api, signer)
        await api.close()


def test_another_version_of_the_sdk_is_refused(key: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.live.lighter.signer.metadata.version", lambda _: "1.1.9")
    with pytest.raises(StartError, match=r"needs lighter-sdk 1\.1\.8; 1\.1\.9 is installed"):
        LighterSigner("http://127.0.0.1:1", ACCOUNT, KEY_INDEX, key)


async def test_a_transaction_expires_when_the_service_expects_it_to(key: Secret) -> None:
    async with trading(key) as (venue, account, _):
        await Sender(account, MARKETS).place(order())
        lasts_s = venue.sent[0][1]["ExpiredAt"] / 1000 - time.time()
        assert TRANSACTION_EXPIRES_S - 30 < lasts_s < TRANSACTION_EXPIRES_S


async def test_the_orders_of_a_group_expire_together(key: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK signs no others, and would date each at another millisecond."""
    honest = sdk.SignerClient.sign_create_grouped_orders
    expiries: set[int] = set()

    def noting(client: Any, grouping: int, orders: Any, **more: Any) -> Any:
        expiries.update(each.OrderExpiry for each in orders)
        return honest(client, grouping, orders, **more)

    monkeypatch.setattr(sdk.SignerClient, "sign_create_grouped_orders", noting)
    entry = OrderTerms(BTC, 5, 2500, 944700, False, "market", False, 0)
    stop = OrderTerms(BTC, 6, 0, 900000, True, "stop", True, 910000)
    target = OrderTerms(BTC, 7, 0, 980000, True, "target", True, 990000)
    async with trading(key) as (_, _, signer):
        signer.create_orders([entry, stop, target], nonce=1)
    (expiry,) = expiries - {0}
    assert timedelta(days=27, hours=23) < timedelta(seconds=expiry / 1000 - time.time()) <= timedelta(days=28)


async def test_a_halted_account_sends_nothing_more(venue_and_account: tuple[FakeExchange, LighterAccount]) -> None:
    venue, account = venue_and_account
    account.transactions.halt()
    assert isinstance(await Sender(account, MARKETS).place(order()), Unknown)
    assert venue.sent == []


async def test_an_order_that_the_venue_cannot_express_is_refused_before_it_is_sent(
    venue_and_orders: tuple[FakeExchange, Sender],
) -> None:
    venue, orders = venue_and_orders
    for wrong, reason in (
        ({"quantity": D("0.00001")}, "not a whole number of"),
        ({"symbol": "DOGE"}, "does not list DOGE"),
    ):
        outcome = await orders.place(order(**wrong))
        assert isinstance(outcome, Refused)
        assert reason in outcome.reason
    assert venue.sent == []


# Orders


async def test_a_market_order_reports_the_fills_of_the_venue(
    venue_and_account: tuple[FakeExchange, LighterAccount],
) -> None:
    venue, account = venue_and_account
    venue.fill_share = D("0.4")
    outcome = await Sender(account, MARKETS).place(order())
    assert isinstance(outcome, Placed)
    state = outcome.state
    assert (state.filled, state.is_final) == (D("0.1000"), True)
    assert (state.status, state.symbol) == ("canceled-too-much-slippage", "BTC")
    kind, sent = venue.sent[0]
    assert (kind, sent["BaseAmount"], sent["Price"], sent["IsAsk"]) == (CREATE, 2500, 944700, 0)
    assert (sent["Type"], sent["TimeInForce"], sent["OrderExpiry"], sent["Nonce"]) == (1, 0, 0, 40)
    assert (await account.records.report()).positions.get("BTC", D(0)) == D("0.1000")


async def test_stops_and_targets_only_reduce_and_wait_for_their_trigger(
    venue_and_orders: tuple[FakeExchange, Sender],
) -> None:
    venue, orders = venue_and_orders
    kinds = ((VenueOrderType.STOP, 2, "93000.5"), (VenueOrderType.TARGET, 4, "95000.5"))
    for number, (kind, code, trigger) in enumerate(kinds):
        protective = order(
            number, type=kind, side=OrderSide.SELL, trigger=D(trigger), reduce_only=True, price=D("92000.0")
        )
        outcome = await orders.place(protective)
        assert isinstance(outcome, Placed)
        assert (outcome.state.status, outcome.state.is_final) == ("pending", False)
        _, sent = venue.sent[-1]
        assert (sent["Type"], sent["ReduceOnly"], sent["TriggerPrice"], sent["IsAsk"]) == (
            code,
            1,
            int(D(trigger) * 10),
            1,
        )
        assert sent["OrderExpiry"] > 0
        ended = await orders.cancel(outcome.state)
        assert isinstance(ended, Placed)
        assert (ended.state.status, ended.state.is_final) == ("canceled", True)


async def test_a_limit_order_rests_until_it_is_canceled(venue_and_orders: tuple[FakeExchange, Sender]) -> None:
    venue, orders = venue_and_orders
    outcome = await orders.place(order(type=VenueOrderType.LIMIT, price=D("90000.0")))
    assert isinstance(outcome, Placed)
    assert (outcome.state.status, outcome.state.is_final, outcome.state.filled) == ("open", False, D(0))
    assert venue.sent[-1][1]["TimeInForce"] == 1
    venue.send_faults = ["lose_before", "lose_after"]
    ended = await orders.cancel(outcome.state)
    assert isinstance(ended, Placed)
    assert ended.state.status == "canceled"


async def test_a_refusal_states_the_venues_reason_and_uses_no_nonce(
    venue_and_orders: tuple[FakeExchange, Sender],
) -> None:
    venue, orders = venue_and_orders
    venue.refusal = (21739, "not enough margin to create the order")
    outcome = await orders.place(order())
    assert isinstance(outcome, Refused)
    assert "not enough margin" in outcome.reason
    venue.refusal = None
    assert isinstance(await orders.place(order(2)), Placed)
    assert venue.next_nonce == 41


async def test_an_order_that_the_venue_ends_without_a_fill_is_final(
    venue_and_orders: tuple[FakeExchange, Sender],
) -> None:
    venue, orders = venue_and_orders
    venue.rejected.add(order().client_index)
    outcome = await orders.place(order())
    assert isinstance(outcome, Placed)
    assert (outcome.state.filled, outcome.state.is_final) == (D(0), True)
    assert outcome.state.status == "canceled-margin-not-allowed"


async def test_an_order_that_the_venue_has_already_is_found_and_not_executed_again(
    venue_and_orders: tuple[FakeExchange, Sender],
) -> None:
    venue, orders = venue_and_orders
    venue.reuses_ids = False
    assert await orders.place(order()) == await orders.place(order())
    assert venue.positions() == {BTC: D("0.2500")}


async def test_a_nonce_used_by_another_sender_is_drawn_again(
    venue_and_account: tuple[FakeExchange, LighterAccount], monkeypatch: pytest.MonkeyPatch
) -> None:
    venue, account = venue_and_account
    honest, stale = account.transactions.next_nonce, [39]

    async def next_nonce() -> int:
        return stale.pop() if stale else await honest()

    monkeypatch.setattr(account.transactions, "next_nonce", next_nonce)
    assert isinstance(await Sender(account, MARKETS).place(order()), Placed)
    assert [sent["Nonce"] for _, sent in venue.sent] == [39, 40]


# Lost answers


@pytest.mark.parametrize("fault", ["lose_after", "500_after", "nonsense"])
async def test_an_order_whose_answer_was_lost_is_found(
    venue_and_orders: tuple[FakeExchange, Sender], fault: str
) -> None:
    venue, orders = venue_and_orders
    venue.send_faults = [fault]
    outcome = await orders.place(order())
    assert isinstance(outcome, Placed)
    assert outcome.state.filled == D("0.25")
    assert len(venue.sent) == 1


@pytest.mark.parametrize("fault", ["lose_before", "500_before", "maintenance", "late"])
async def test_an_order_that_never_arrived_can_no_longer_arrive(
    venue_and_orders: tuple[FakeExchange, Sender], fault: str
) -> None:
    venue, orders = venue_and_orders
    venue.send_faults = [fault]
    assert isinstance(await orders.place(order()), Refused)
    venue.deliver()
    assert venue.orders == {}
    assert isinstance(await orders.place(order(2)), Placed)


async def test_an_unreachable_venue_leaves_the_order_unknown_until_it_answers(
    venue_and_orders: tuple[FakeExchange, Sender],
) -> None:
    venue, orders = venue_and_orders
    venue.send_faults = ["lose_after"]
    venue.read_faults = ["ok", *["500"] * 20]
    outcome = await orders.place(order())
    assert isinstance(outcome, Unknown)
    assert isinstance(await orders.resolve(order()), Unknown)
    venue.read_faults.clear()
    resolved = await orders.resolve(order())
    assert isinstance(resolved, Placed)
    assert resolved.state.filled == D("0.25")


async def test_an_entry_and_its_stop_and_target_are_one_transaction(
    venue_and_orders: tuple[FakeExchange, Sender],
) -> None:
    venue, orders = venue_and_orders
    closing: dict[str, Any] = {"side": OrderSide.SELL, "reduce_only": True}
    stop = order(2, type=VenueOrderType.STOP, trigger=D(93000), price=D(90000), **closing)
    target = order(3, type=VenueOrderType.TARGET, trigger=D(99000), price=D(98000), **closing)
    assert isinstance(await orders.place(order(1), stop, target), Placed)
    ((kind, sent),) = venue.sent
    assert (kind, sent["GroupingType"], [part["Type"] for part in sent["Orders"]]) == (GROUP, 3, [1, 2, 4])
    shown = await orders.account.orders.find_all([stop.client_index, target.client_index])
    assert [state.status for state in shown.values()] == ["pending", "pending"]


@pytest.mark.parametrize("delay_reads", [1, 12])
async def test_an_executed_order_that_is_shown_late_is_never_refused(
    venue_and_orders: tuple[FakeExchange, Sender], delay_reads: int
) -> None:
    """Its nonce is used up at once, and it is shown after some seconds."""
    venue, orders = venue_and_orders
    venue.hidden.add(order().client_index)
    outcome = await orders.place(order())
    for _ in range(delay_reads):
        assert isinstance(outcome, Unknown), outcome
        outcome = await orders.resolve(order())
    venue.hidden.clear()
    assert isinstance(await orders.resolve(order()), Placed)


async def test_an_order_that_the_sequencer_refuses_ends_by_its_transaction(
    venue_and_orders: tuple[FakeExchange, Sender],
) -> None:
    venue, orders = venue_and_orders
    venue.sequencer_refuses.add(order().client_index)
    outcome = await orders.place(order())
    assert isinstance(outcome, Refused)
    assert "did not execute it" in outcome.reason


async def test_a_closing_order_that_the_venue_drops_ends_by_its_transaction(
    venue_and_orders: tuple[FakeExchange, Sender],
) -> None:
    venue, orders = venue_and_orders
    venue.drops_reduce_only = False
    closing = order(side=OrderSide.SELL, reduce_only=True, price=D(90000))
    venue.hidden.add(closing.client_index)
    assert isinstance(await orders.place(closing), Unknown)
    venue.ahead += timedelta(seconds=31)
    assert isinstance(await orders.resolve(closing), Refused)


async def test_an_old_order_is_found_by_its_trades(venue_and_orders: tuple[FakeExchange, Sender]) -> None:
    venue, orders = venue_and_orders
    venue.hidden.add(order().client_index)
    assert isinstance(await orders.place(order()), Unknown)
    venue.ahead += timedelta(hours=30)
    outcome = await orders.resolve(order())
    assert isinstance(outcome, Placed)
    assert (outcome.state.filled, outcome.state.is_final) == (D("0.25"), True)


async def test_more_orders_than_one_read_may_name_are_found(venue_and_orders: tuple[FakeExchange, Sender]) -> None:
    _, orders = venue_and_orders
    resting = [order(number, type=VenueOrderType.LIMIT, price=D(80000)) for number in range(45)]
    for each in resting:
        await orders.place(each)
    assert len(await orders.account.orders.find_all([each.client_index for each in resting])) == 45


@pytest.mark.parametrize(
    ("status", "code", "is_refusal"),
    [
        (400, 21739, True), (400, 21149, True), (400, 29500, False), (400, 29501, False), (400, 0, False),
        (400, 21502, False), (400, 99999, False), (408, 0, False), (499, 0, False), (500, 21739, False),
        (503, 0, False), (404, 0, False),
    ],
)  # fmt: skip
async def test_only_a_known_code_refuses(
    venue_and_orders: tuple[FakeExchange, Sender], status: int, code: int, is_refusal: bool
) -> None:
    venue, orders = venue_and_orders
    venue.odd_answers = [(status, f'{{"code":{code},"message":"internal, timeout"}}', not is_refusal)]
    assert isinstance(await orders.place(order()), Refused if is_refusal else Placed)


def test_the_codes_of_refusals_are_published() -> None:
    file = VENUES / "lighter" / "error_codes.json"
    if not file.exists():
        pytest.skip(f"{file} is not here")
    published = {code: message for code, _, message, *_ in msgspec.json.decode(file.read_bytes())["codes"]}
    assert REFUSALS - published.keys() == {21149}
    assert not [code for code in REFUSALS & published.keys() if "internal" in published[code]]


async def test_a_changed_lot_is_refused_before_signing(venue_and_orders: tuple[FakeExchange, Sender]) -> None:
    venue, orders = venue_and_orders
    venue.markets["BTC"].size_decimals = 3
    outcome = await orders.place(order())
    assert isinstance(outcome, Refused)
    assert "lot 0.001 were 0.1 and 0.0001 until now" in outcome.reason
    assert venue.sent == []
    await orders.place(order(2, side=OrderSide.SELL, reduce_only=True, quantity=D("0.2505"), price=D(90000)))
    assert venue.sent[-1][1]["BaseAmount"] == 251, "what closes is sent in the new unit, rounded up"


async def test_nothing_is_sent_to_an_unreachable_venue(venue_and_orders: tuple[FakeExchange, Sender]) -> None:
    venue, orders = venue_and_orders
    await venue.stop()
    outcome = await orders.place(order())
    assert isinstance(outcome, Busy)
    assert "cannot be reached" in outcome.reason


@pytest.mark.parametrize("block", range(10))
async def test_under_random_faults_our_fills_equal_the_venues(key: Secret, block: int) -> None:
    async with trading(key) as (venue, account, _):
        for seed in range(block, SCHEDULES, 10):
            await one_schedule(Random(seed), venue, account, seed)


async def one_schedule(random: Random, venue: FakeExchange, account: LighterAccount, seed: int) -> None:
    """Place a few orders under random faults, and compare their outcomes with the venue's orders."""
    venue.orders.clear()
    venue.ledger.held.clear()
    venue.late.clear()
    sender = Sender(account, MARKETS)
    ours: dict[int, SendOutcome] = {}
    asked: dict[int, VenueOrder] = {}
    for number in range(4):
        venue.fault_at_random(random, share=random.choice((0.1, 0.4, 0.8)))
        venue.fill_share = random.choice((D(0), D("0.3"), D(1)))
        side, quantity = random.choice(list(OrderSide)), D(random.randint(1, 50)).scaleb(-2)
        placing = order(number * 1000 + seed, side=side, quantity=quantity)
        outcome = await sender.place(placing)
        if random.random() < 0.5:
            venue.deliver()
        while isinstance(outcome, Unknown):
            if random.random() < 0.5:
                venue.deliver()
            venue.fault_at_random(random, share=random.choice((0.0, 0.3)))
            outcome = await sender.resolve(placing)
        ours[placing.client_index], asked[placing.client_index] = outcome, placing
    venue.send_faults.clear()
    venue.read_faults.clear()
    venue.deliver()
    booked = D(0)
    for client_index, outcome in ours.items():
        theirs = venue.orders.get(client_index)
        assert isinstance(outcome, Placed) == (theirs is not None), (seed, outcome)
        if isinstance(outcome, Placed) and theirs is not None:
            assert outcome.state.filled == theirs.filled
            booked += asked[client_index].side.direction * outcome.state.filled
    assert {BTC: booked} if booked else venue.positions() == {}
    assert (await account.records.report()).positions.get("BTC", D(0)) == booked


# State of the venue


async def test_the_report_has_positions_protective_orders_resting_orders_and_the_balance(
    venue_and_account: tuple[FakeExchange, LighterAccount],
) -> None:
    venue, account = venue_and_account
    orders = Sender(account, MARKETS)
    venue.taker_fee = 0
    closing: dict[str, Any] = {
        "side": OrderSide.SELL,
        "reduce_only": True,
        "price": D("92000.0"),
        "trigger": D("93000.5"),
    }
    await orders.place(order(1))
    await orders.place(order(2, type=VenueOrderType.STOP, **closing))
    await orders.place(order(3, type=VenueOrderType.TARGET, **{**closing, "trigger": D(99000), "price": D(98000)}))
    await orders.place(order(4, symbol="ETH", type=VenueOrderType.LIMIT, price=D("3000.00")))
    protective_orders = {
        order(2).client_index: ProtectiveOrder("BTC", VenueOrderType.STOP, D("93000.5"), D("0.25")),
        order(3).client_index: ProtectiveOrder("BTC", VenueOrderType.TARGET, D(99000), D("0.25")),
    }
    report = await account.records.report()
    assert report == VenueReport(
        positions={"BTC": D("0.25")},
        protective_orders=protective_orders,
        others=frozenset({order(4).client_index}),
        balance=D("10000.25") - D("0.25") * 94000,
        rounding=D("0.25") * D("0.1"),
    )
    ledger = LedgerReport(
        positions={"BTC": D("0.25")},
        protective_orders=protective_orders,
        resting=frozenset({order(4).client_index}),
        unsettled=frozenset(),
        balance=D("10000.25") - D("0.25") * 94000,
    )
    assert reconcile(ledger, report, balance_tolerance=D(0)) == []


@pytest.mark.parametrize(
    ("sign", "size"), [(2, D(1)), (-2, D(1)), (0, D(1)), (1, D(-1)), (1, D("NaN")), (-1, D("Infinity"))]
)
async def test_an_impossible_position_is_an_error(
    venue_and_account: tuple[FakeExchange, LighterAccount], sign: int, size: Decimal
) -> None:
    venue, account = venue_and_account
    with pytest.raises(MarketDataError, match="is impossible"):
        assert PositionRow(BTC, sign, size, D(1)).quantity
    if size.is_finite():
        shown = {"market_id": BTC, "sign": sign, "position": str(size), "avg_entry_price": "1", "symbol": "BTC"}
        venue.positions_shown = [shown]
        with pytest.raises(MarketDataError, match="BTC: a position of sign"):
            (await account.records.report()).positions.get("BTC", D(0))


def test_a_signed_quantity_needs_sign_plus_minus_or_zero() -> None:
    assert [PositionRow(BTC, sign, D("0.5"), D(1)).quantity for sign in (1, -1)] == [D("0.5"), D("-0.5")]
    assert [PositionRow(BTC, sign, D("0.0000"), D(1)).quantity for sign in (1, -1, 0)] == [0, 0, 0]


def test_client_indexes_are_stable_and_in_the_venues_range() -> None:
    numbers = [client_index_of("apex", str(number)) for number in range(2000)]
    assert len(set(numbers)) == 2000
    assert all(1 <= index <= CLIENT_INDEX_MAX for index in numbers)
    assert client_index_of("apex", "1") == client_index_of("apex", "1") != client_index_of("ape", "x1")
