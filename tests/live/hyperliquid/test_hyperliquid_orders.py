"""Orders and records of an account at Hyperliquid: access, outcomes, expiry, price rules, and the fields of rows."""

import json
from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.fake_hyperliquid import ADDRESS, AGENT, FakeHyperliquid, PlainAgent
from support.live import LATER, live_settings
from support.manual_clock import ManualClock
from support.scripted import START

from trader.core.errors import MarketDataError, StartError
from trader.exchange.domain.orders import Cause, OrderSide
from trader.exchange.domain.venue_orders import VenueOrder, VenueOrderType
from trader.live.budget import Priority, spending_as
from trader.live.domain.orders import Busy, Placed, Refused, SendOutcome, Unknown
from trader.live.emptying import EMPTY_LOOKS, empty
from trader.live.hyperliquid.account import HyperliquidAccount, HyperliquidAccounts
from trader.live.hyperliquid.actions import BUSY, EXPIRES_S, client_index_of_cloid, cloid_of, is_refusal
from trader.live.hyperliquid.closer import HyperliquidCloser
from trader.market.domain.markets import MARKETS
from trader.settings.forms import Secret

D = Decimal
FOLDER = Path(__file__).parents[4] / "shared" / "data" / "venues" / "hyperliquid"
BTC = msgspec.structs.replace(MARKETS["BTC"], tick=D("0.01"), lot=D("0.0001"), figures=5)
SUB = "0x" + "0" * 39 + "8"
OWNER = {"role": "user"}


@pytest.fixture
async def venue() -> AsyncIterator[FakeHyperliquid]:
    venue = FakeHyperliquid(ManualClock(START).now)
    venue.excuse("lag_s", "event_lag_s")
    await venue.start()
    yield venue
    await venue.stop()


def accounts_at(venue: FakeHyperliquid, clock: ManualClock | None = None) -> HyperliquidAccounts:
    settings = live_settings(venue.url, account=ADDRESS, VENUE="hyperliquid")
    return HyperliquidAccounts(settings, agent=PlainAgent, pause_s=0.001, clock=clock or ManualClock(START))


@pytest.fixture
async def accounts(venue: FakeHyperliquid) -> AsyncIterator[HyperliquidAccounts]:
    accounts = accounts_at(venue)
    yield accounts
    await accounts.close()


@pytest.fixture
async def account(accounts: HyperliquidAccounts) -> HyperliquidAccount:
    return await accounts.account(ADDRESS)


def order(index: int, kind: VenueOrderType = VenueOrderType.MARKET, **more: Any) -> VenueOrder:
    fields = {"symbol": "BTC", "side": OrderSide.BUY, "quantity": D("0.2"), "price": D(94900), **more}
    return VenueOrder(client_index=index, type=kind, **fields)


def stop(index: int, trigger: str = "90000", **more: Any) -> VenueOrder:
    closing = {"side": OrderSide.SELL, "trigger": D(trigger), "price": D("85500"), "reduce_only": True}
    return order(index, VenueOrderType.STOP, **{**closing, **more})


async def place(account: HyperliquidAccount, *orders: VenueOrder, attempts: list[str] | None = None) -> SendOutcome:
    async def remember(attempt: str) -> None:
        if attempts is not None:
            attempts.append(attempt)

    return await account.orders.place(orders, BTC, remember)


# Access


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        ({AGENT: OWNER}, "a wallet of its own that may withdraw"),
        ({AGENT: {"role": "subAccount", "data": {"master": ADDRESS}}}, "a wallet of its own that may withdraw"),
        ({AGENT: {"role": "missing"}}, "is no agent of the venue's account"),
        ({AGENT: {"role": "agent", "data": {"user": SUB}}}, "is no agent of the venue's account"),
        ({ADDRESS: {"role": "vault"}}, "its role is vault"),
        ({ADDRESS: {"role": "missing"}}, "its role is missing"),
        ({ADDRESS: {"role": "subAccount", "data": {"master": SUB}}}, f"is no agent of the venue's account {SUB}"),
    ],
)
async def test_only_an_agent_of_the_account_is_accepted(
    venue: FakeHyperliquid, accounts: HyperliquidAccounts, roles: dict[str, dict[str, Any]], reason: str
) -> None:
    venue.roles |= roles
    with pytest.raises(StartError, match=reason):
        await accounts.account(ADDRESS)
    assert venue.sent == []


@pytest.mark.parametrize("mode", ["unifiedAccount", "portfolioMargin"])
async def test_an_account_whose_spot_balances_are_margin_is_refused(
    venue: FakeHyperliquid, accounts: HyperliquidAccounts, mode: str
) -> None:
    venue.mode = mode
    with pytest.raises(StartError, match=f"in the mode {mode}"):
        await accounts.account(ADDRESS)
    with pytest.raises(StartError, match="have an address"):
        await accounts.account("7")


async def test_the_agent_of_the_master_signs_for_a_sub_account(
    venue: FakeHyperliquid, accounts: HyperliquidAccounts, caplog: pytest.LogCaptureFixture
) -> None:
    venue.open(8)
    venue.roles[SUB] = {"role": "subAccount", "data": {"master": ADDRESS}}
    ends_ms = int((START + timedelta(days=3)).timestamp() * 1000)
    venue.agents = [{"name": "trader", "address": AGENT, "validUntil": ends_ms}]
    outcome = await place(await accounts.account(SUB), order(1))
    assert isinstance(outcome, Placed)
    assert (venue.positions(), venue.ledgers[8].positions()) == ({}, {1: D("0.2")})
    assert f"the agent wallet {AGENT} ends at 2025-01-04" in caplog.text


# Orders


async def test_a_group_is_one_action_with_expiry_and_ids_of_ours(
    venue: FakeHyperliquid, account: HyperliquidAccount
) -> None:
    attempts: list[str] = []
    target = order(
        3, VenueOrderType.TARGET, side=OrderSide.SELL, trigger=D("99000"), price=D("94050"), reduce_only=True
    )
    outcome = await place(account, order(1), stop(2), target, attempts=attempts)
    assert isinstance(outcome, Placed)
    assert (outcome.state.filled, outcome.state.is_final) == (D("0.2"), True)
    leverage, group = (body for _, body in venue.sent)
    assert leverage["action"] == {"type": "updateLeverage", "asset": 1, "isCross": True, "leverage": 40}
    now_ms = int(START.timestamp() * 1000)
    assert attempts == [str(group["expiresAfter"])] == [str(now_ms + int(EXPIRES_S * 1000))]
    action = group["action"]
    assert action["grouping"] == "normalTpsl"
    assert [wire["c"] for wire in action["orders"]] == [cloid_of(index) for index in (1, 2, 3)]
    assert [wire["t"] for wire in action["orders"]] == [
        {"limit": {"tif": "Ioc"}},
        {"trigger": {"isMarket": True, "triggerPx": "90000", "tpsl": "sl"}},
        {"trigger": {"isMarket": True, "triggerPx": "99000", "tpsl": "tp"}},
    ]
    assert [(wire["p"], wire["s"], wire["r"]) for wire in action["orders"]] == [
        ("94900", "0.2", False), ("85500", "0.2", True), ("94050", "0.2", True),
    ]  # fmt: skip
    states = await account.orders.find_all([1, 2, 3, 4])
    assert {index: (state.status, state.is_final) for index, state in states.items()} == {
        1: ("filled", True), 2: ("open", False), 3: ("open", False),
    }  # fmt: skip
    report = await account.records.report()
    assert {index: (each.type, each.trigger) for index, each in report.protective_orders.items()} == {
        2: (VenueOrderType.STOP, D(90000)), 3: (VenueOrderType.TARGET, D(99000)),
    }  # fmt: skip
    assert report.balance == D("10000.25") - D("0.2") * 94000 * (1 + D("0.00028"))
    await place(account, order(5))
    assert len(venue.sent) == 3, "the leverage is set once per market"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"price": D("94900.5")}, "94900.5 is not a whole number of 1"),
        ({"price": D("9490.55")}, "not a whole number of 0.1"),
        ({"quantity": D("0.00005")}, "0.00005 is not a whole number of 0.0001"),
        ({"symbol": "XYZ"}, "it does not list XYZ"),
    ],
)
async def test_what_the_venue_cannot_express_is_never_sent(
    venue: FakeHyperliquid, account: HyperliquidAccount, changed: dict[str, Any], reason: str
) -> None:
    outcome = await place(account, order(1, **changed))
    assert isinstance(outcome, Refused)
    assert reason in outcome.reason
    assert venue.sent == []


async def test_rules_that_changed_refuse_what_opens_and_round_what_closes(
    venue: FakeHyperliquid, account: HyperliquidAccount
) -> None:
    await place(account, order(1))
    market = venue.markets["BTC"]
    market.size_decimals, market.price_decimals = 3, 3
    outcome = await place(account, order(2))
    assert isinstance(outcome, Refused)
    assert "its tick 0.001 and lot 0.001 were 0.01 and 0.0001 until now" in outcome.reason
    closing = order(3, side=OrderSide.SELL, quantity=D("0.1999"), price=D("90000"), reduce_only=True)
    assert isinstance(await place(account, closing), Placed)
    assert venue.sent[-1][1]["action"]["orders"][0]["s"] == "0.2"


@pytest.mark.parametrize("fault", ["lose_after", "500_after", "nonsense", "408_after"])
async def test_an_order_with_a_lost_answer_is_found_by_its_id(
    venue: FakeHyperliquid, account: HyperliquidAccount, fault: str
) -> None:
    attempts: list[str] = []
    venue.send_faults = ["ok", fault]
    assert isinstance(await place(account, order(1), attempts=attempts), Unknown)
    outcome = await account.orders.resolve(order(1), attempts[0], LATER)
    assert isinstance(outcome, Placed)
    assert outcome.state.filled == D("0.2")


@pytest.mark.parametrize("is_late", [True, False])
async def test_a_lost_order_is_refused_only_after_its_expiry_by_the_venues_clock(
    venue: FakeHyperliquid, is_late: bool
) -> None:
    clock = ManualClock(START)
    venue.ahead = timedelta(seconds=-90)  # ours is ahead, so the order lives longer
    accounts, attempts = accounts_at(venue, clock), list[str]()
    account = await accounts.account(ADDRESS)
    venue.send_faults = ["ok", "late" if is_late else "lose_before"]
    assert isinstance(await place(account, order(1), attempts=attempts), Unknown)
    for ahead_s in (-60, 0, 8):
        venue.ahead = timedelta(seconds=ahead_s)
        assert isinstance(await account.orders.resolve(order(1), attempts[0], START), Unknown)
    if is_late:
        venue.deliver()
        assert isinstance(await account.orders.resolve(order(1), attempts[0], START), Placed)
        venue.orders.clear()
    venue.ahead = timedelta(seconds=60)
    await account.orders.find_all([9])  # tells the venue's time
    outcome = await account.orders.resolve(order(1), attempts[0], START)
    assert isinstance(outcome, Placed if is_late else Refused), "its trades prove it even if nothing shows it"
    venue.late = [(0, venue.sent[-1][1])]
    before = venue.positions()
    venue.deliver()
    assert venue.positions() == before, "an expired action is not executed"
    await accounts.close()


async def test_a_clock_behind_the_venues_sends_nothing_that_has_expired(venue: FakeHyperliquid) -> None:
    venue.ahead = timedelta(seconds=120)
    accounts = accounts_at(venue)
    assert isinstance(await place(await accounts.account(ADDRESS), order(1)), Placed)
    await accounts.close()


async def test_a_stop_that_is_refused_alone_is_known_at_once(
    venue: FakeHyperliquid, account: HyperliquidAccount
) -> None:
    venue.refused_types, attempts, outcomes = {2}, list[str](), set[type]()
    for index in range(1, 40, 2):
        outcome = await place(account, order(index, quantity=D("0.01")), stop(index + 1), attempts=attempts)
        outcomes.add(type(outcome))
        if isinstance(outcome, Placed):
            child = await account.orders.resolve(stop(index + 1), attempts[-1], LATER)
            assert isinstance(child, Refused)
            assert "Invalid TP/SL price" in child.reason
    assert outcomes == {Placed, Refused}


async def test_a_stop_waits_until_its_order_is_filled_whole(
    venue: FakeHyperliquid, account: HyperliquidAccount
) -> None:
    resting = order(1, VenueOrderType.LIMIT, price=D(93000))
    assert isinstance(await place(account, resting, stop(2)), Placed)
    venue.fill_share = D("0.5")
    venue.reach("BTC", "93000")
    (state,) = (await account.orders.find_all([1])).values()
    assert (state.filled, state.is_final) == (D("0.1"), False)
    canceled = await account.orders.cancel("BTC", 1)
    assert isinstance(canceled, Placed)
    assert (canceled.state.filled, canceled.state.status) == (D("0.1"), "canceled")
    assert (await account.orders.find_all([2]))[2].status == "canceled", "the stop went with its order"
    again = await account.orders.cancel("BTC", 1)
    assert isinstance(again, Placed)
    assert isinstance(await account.orders.cancel("BTC", 77), Refused)


async def test_an_order_canceled_before_it_is_shown_is_awaited(
    venue: FakeHyperliquid, account: HyperliquidAccount
) -> None:
    venue.lag_s = (8.0, 8.0)
    await place(account, order(1, VenueOrderType.LIMIT, price=D(93000)))
    canceled = await account.orders.cancel("BTC", 1)
    assert isinstance(canceled, Placed)
    assert (canceled.state.status, canceled.state.filled) == ("canceled", D(0))


def published() -> list[str]:
    if not FOLDER.exists():
        return []
    known = json.loads((FOLDER / "exchange_error_messages.json").read_text())["errors"]
    more = json.loads((FOLDER / "order_statuses_and_errors.json").read_text())["undocumented_errors"]
    return [each["message"] for each in known if each["source"] == "Order"] + [each["message"] for each in more]


def test_every_published_refusal_is_one_and_any_other_text_is_none() -> None:
    others = ("spot", "Spot", "TWAP", "withdrawal", "transfer", "scheduled cancel", BUSY)
    for text in published():
        assert is_refusal(text) is not any(other in text for other in others), text
    assert not any(map(is_refusal, ("", "Internal error", "timeout", "order has expired", "Too many requests")))


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ((429, ""), Busy),
        ((200, '{"status":"err","response":"Too many cumulative requests sent (9 > 8) for"}'), Busy),
        ((200, '{"status":"err","response":"User or API Wallet 0x12 does not exist."}'), Refused),
        ((200, '{"status":"err","response":"something new"}'), Unknown),
        ((500, '{"status":"err","response":"something new"}'), Unknown),
        ((200, '{"status":"ok","response":{"type":"order","data":{"statuses":[{"error":"new"}]}}}'), Unknown),
        ((200, '{"status":"ok","response":{"type":"order","data":{"statuses":["waitingForFill"]}}}'), Unknown),
        ((200, '{"status":"ok","response":{"type":"order","data":{"statuses":[]}}}'), Unknown),
        ((200, '{"status":"ok","response":{"type":"order"}}'), Unknown),
        ((422, "Failed to deserialize the JSON body"), Unknown),
        ((200, "null"), Unknown),
    ],
)
async def test_only_a_published_text_refuses(
    venue: FakeHyperliquid, account: HyperliquidAccount, answer: tuple[int, str], outcome: type
) -> None:
    await place(account, order(1))
    venue.odd_answers = [(*answer, False)]
    assert type(await place(account, order(2))) is outcome


async def test_the_rest_of_the_address_allowance_is_kept_for_closing(
    venue: FakeHyperliquid, account: HyperliquidAccount
) -> None:
    assert isinstance(await place(account, order(1)), Placed)
    venue.allowance = 15
    assert await account.records.fee_rates() == (D("0.00028"), D("0.00004"))
    sent = len(venue.sent)
    assert isinstance(await place(account, order(2)), Busy)
    assert len(venue.sent) == sent
    closing = order(3, side=OrderSide.SELL, price=D("90000"), reduce_only=True)
    assert isinstance(await place(account, closing), Placed)


@pytest.mark.parametrize("size", ["NaN", "-1", "0.3", "Infinity"])
async def test_an_order_of_an_impossible_size_is_an_error(
    venue: FakeHyperliquid, account: HyperliquidAccount, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    await place(account, order(1))
    answer = venue.told("orderStatus", {"user": ADDRESS, "oid": cloid_of(1)})
    answer["order"]["order"]["sz"] = size
    monkeypatch.setattr(venue, "told", lambda kind, asked: answer)
    with pytest.raises(MarketDataError, match="is impossible"):
        await account.orders.find_all([1])


def test_an_id_names_one_of_our_orders_in_any_spelling() -> None:
    for index in (1, 2**48 - 1):
        assert client_index_of_cloid(cloid_of(index)) == client_index_of_cloid(cloid_of(index).upper()) == index
        assert len(cloid_of(index)) == 34
    assert [client_index_of_cloid(cloid) for cloid in (None, "0x" + "0" * 32, "0x5bdd")] == [None] * 3


# Records


async def test_trades_have_their_fees_causes_and_one_number(
    venue: FakeHyperliquid, account: HyperliquidAccount
) -> None:
    venue.maker_fee, venue.doubles_trades = -30, True
    await place(account, order(1, VenueOrderType.LIMIT, price=D(93000)))
    venue.reach("BTC", "93000")
    venue.trade_by_hand("BTC", "0.1")
    venue.liquidate("BTC", "-0.3")
    fills = await account.records.fills_since(START - timedelta(hours=1))
    fills.sort(key=lambda fill: (fill.cause, fill.client_index is None))
    assert [(fill.client_index, fill.cause, fill.maker, fill.fee_rate) for fill in fills] == [
        (None, Cause.LIQUIDATION, False, D("0.00028")), (1, Cause.MANUAL, True, D("-0.00003")),
        (1, Cause.MANUAL, True, D("-0.00003")), (None, Cause.MANUAL, False, D("0.00028")),
    ]  # fmt: skip
    (state,) = (await account.orders.find_all([1])).values()
    assert len(await account.records.fills_of(1, state.venue_index, state.filled)) == 2
    assert len(await account.records.fills_of(1, state.venue_index)) == 2


async def test_a_full_page_of_trades_is_read_in_parts(venue: FakeHyperliquid, account: HyperliquidAccount) -> None:
    for number in range(900):
        venue.trade_by_hand("BTC", "0.001")
        venue.ledger.trades[-1]["timestamp"] += number * 1000
    venue.page = 2000
    assert len(await account.records.fills_since(START)) == 900
    assert await account.records.opened_since(START) == set()
    await place(account, order(1), stop(2))
    assert await account.records.opened_since(START - timedelta(minutes=1)) == {1}


async def test_the_account_is_emptied_without_the_service(venue: FakeHyperliquid, account: HyperliquidAccount) -> None:
    venue.trade_by_hand("BTC", "0.5")
    venue.trade_by_hand("ETH", "-2")
    await place(account, order(1, VenueOrderType.LIMIT, price=D(93000)), stop(2))
    venue.send_faults = ["lose_before", "500_after", "ok", "lose_after"]
    closer = HyperliquidCloser(PlainAgent(Secret("ab" * 32), False), venue.url, ADDRESS, pause_s=0.001)
    await closer.prove()
    with spending_as(Priority.CLOSE, 5):
        assert await empty(closer, looks=6 * EMPTY_LOOKS, pause_s=0)
    assert venue.positions() == {}
    assert not any(each.is_active for each in venue.orders.values())
    assert await closer.cancel_all_at(START + timedelta(minutes=6))
    assert venue.ledger.cancels_at == START + timedelta(minutes=6)
    assert await closer.cancel_all_at(None)
    assert venue.ledger.cancels_at is None
    with pytest.raises(StartError, match="no rehearsal for this venue yet"):
        closer.steps("BTC", (), 0)
    await closer.close()


@pytest.mark.skipif(not FOLDER.exists(), reason="the recorded payloads are not on this machine")
async def test_rows_have_every_field_of_the_recorded_answers(
    venue: FakeHyperliquid, account: HyperliquidAccount
) -> None:
    await place(account, order(1), stop(2))
    await place(account, order(3, VenueOrderType.LIMIT, price=D(93000)))

    def recorded(name: str, *path: Any) -> dict[str, Any]:
        found = json.loads((FOLDER / f"{name}.json").read_text())
        for step in path:
            found = found[step]
        return dict(found)

    user = {"user": ADDRESS}
    state, orders = venue.told("clearinghouseState", user), venue.told("frontendOpenOrders", user)
    history = venue.told("historicalOrders", user)
    pairs = {
        "position": (
            state["assetPositions"][0]["position"],
            recorded("http_clearinghouse_state", "assetPositions", 0, "position"),
        ),
        "state": (state, recorded("http_clearinghouse_state")),
        "open order": (orders[0], recorded("sdk_get_frontend_open_orders", "response", 0)),
        "order": (history[0]["order"], recorded("sdk_historical_orders", "response", 0, "order")),
        "fill": (venue.told("userFills", user)[0], recorded("ws_user_fill_liquidation", "data", "fills", 0)),
        "book": (venue.book_row(venue.markets["BTC"]), recorded("ws_book_data")),
        "asset": (venue.told("meta", {})["universe"][0], recorded("http_meta_perp_sample", "universe", 0)),
        "allowance": (venue.told("userRateLimit", user), recorded("sdk_user_rate_limit", "response")),
    }
    optional = {"liquidation"}
    for name, (ours, theirs) in pairs.items():
        assert theirs.keys() - ours.keys() <= optional, name
