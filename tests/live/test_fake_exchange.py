"""The fake venue is as unkind as the venue may be, and its rows have every field of recorded answers and SDK models."""

from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
import pytest
from support.fake_exchange import CANCEL_ALL, CREATE, GROUP, FakeExchange
from support.fake_ledger import ACCOUNT, EXECUTED, FAILED, KEY_INDEX, hash_of
from support.manual_clock import ManualClock
from support.scripted import START

D = Decimal
BTC = 1
RECORDED: Final = Path(__file__).parents[3] / "shared" / "data" / "venues" / "lighter"


class Client:
    """Sends transactions and asks questions without any caution."""

    def __init__(self, venue: FakeExchange, http: aiohttp.ClientSession) -> None:
        self.venue, self.http = venue, http

    async def send(self, kind: int, **fields: Any) -> tuple[int, dict[str, Any], str]:
        keys = {"AccountIndex": ACCOUNT, "ApiKeyIndex": KEY_INDEX, "Nonce": self.venue.next_nonce}
        text = orjson.dumps({**keys, **fields}).decode()
        url = f"{self.venue.url}/api/v1/sendTx"
        async with self.http.post(url, data={"tx_type": str(kind), "tx_info": text}) as answer:
            return answer.status, await answer.json(), hash_of(text)

    async def ask(self, name: str, **query: Any) -> dict[str, Any]:
        headers = {"Authorization": f"1:{ACCOUNT}:{KEY_INDEX}:token"}
        given = {"account_index": ACCOUNT, **query}
        async with self.http.get(f"{self.venue.url}/api/v1/{name}", params=given, headers=headers) as answer:
            return await answer.json()  # type: ignore[no-any-return]


def order(index: int = 5, lots: int = 1000, price: int = 944_700, **more: Any) -> dict[str, Any]:
    usual = {
        "MarketIndex": BTC, "ClientOrderIndex": index, "BaseAmount": lots, "Price": price, "IsAsk": 0, "Type": 1,
        "TimeInForce": 0, "ReduceOnly": 0, "TriggerPrice": 0, "OrderExpiry": 0,
    }  # fmt: skip
    return {**usual, **more}


STOP: Final = {"IsAsk": 1, "Type": 2, "ReduceOnly": 1, "TriggerPrice": 930_000, "OrderExpiry": 1}


@pytest.fixture
async def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
async def venue(clock: ManualClock) -> AsyncIterator[FakeExchange]:
    venue = FakeExchange(clock.now)
    await venue.start()
    yield venue
    await venue.stop()


@pytest.fixture
async def client(venue: FakeExchange) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as http:
        yield Client(venue, http)


async def test_an_executed_order_is_shown_only_later_though_its_nonce_counts_at_once(
    venue: FakeExchange, client: Client
) -> None:
    venue.lag_s = (5.0, 10.0)
    _, answer, name = await client.send(CREATE, **order())
    assert (answer["code"], answer["tx_hash"]) == (200, name)
    assert (await client.ask("nextNonce", api_key_index=KEY_INDEX))["nonce"] == 41
    assert (await client.ask("accountOrders", client_order_indexes="5"))["orders"] is None
    assert (await client.ask("tx", by="hash", value=name))["code"] == 21500
    reads = 0
    while (await client.ask("accountOrders", client_order_indexes="5"))["orders"] is None:
        reads += 1
        assert reads <= 10
    for _ in range(10):
        transaction = await client.ask("tx", by="hash", value=name)
    assert (transaction["status"], orjson.loads(transaction["event_info"])["to"]["u"]) == (EXECUTED, 5)
    assert len((await client.ask("trades", limit=10))["trades"]) == 2


async def test_the_sequencer_refuses_what_was_accepted_and_uses_the_nonce_up(
    venue: FakeExchange, client: Client
) -> None:
    venue.excuse("lag_s")
    venue.sequencer_refusals = 1
    for given in (order(), order(6, IsAsk=1, ReduceOnly=1, price=930_000)):
        status, _, name = await client.send(CREATE, **given)
        transaction = await client.ask("tx", by="hash", value=name)
        told = orjson.loads(transaction["event_info"])["ae"]
        assert (status, transaction["status"]) == (200, FAILED)
        assert orjson.loads(told)["code"] in (21723, 21732)
    assert (venue.next_nonce, venue.orders) == (42, {})
    assert [row["nonce"] for row in (await client.ask("accountTxs", limit=10))["txs"]] == [41, 40]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"price": 987_100}, 21733),
        ({"price": 987_100, "Type": 0}, 21734),
        ({**STOP, "price": 883_499}, 21735),
        ({"lots": 100_000, "price": 940_000}, 21739),
    ],
)
async def test_bounds_of_prices_and_margin_are_refused(
    venue: FakeExchange, client: Client, wrong: dict[str, Any], code: int
) -> None:
    venue.excuse("lag_s")
    _, answer, name = await client.send(CREATE, **order(**wrong))
    if answer["code"] == 200:  # the sequencer found it
        answer = orjson.loads(orjson.loads((await client.ask("tx", by="hash", value=name))["event_info"])["ae"])
    assert answer["code"] == code
    assert venue.orders == {}


async def test_ids_are_read_by_twenty_found_for_a_day_and_used_again(
    venue: FakeExchange, client: Client, clock: ManualClock
) -> None:
    venue.excuse("lag_s")
    await client.send(CREATE, **order())
    assert (await client.ask("accountOrders", client_order_indexes=",".join(map(str, range(21)))))["code"] == 20001
    clock.set_by(timedelta(hours=25))
    assert (await client.ask("accountOrders", client_order_indexes="5"))["orders"] is None
    assert (await client.send(CREATE, **order()))[0] == 200
    assert venue.positions() == {BTC: D("0.2")}
    await client.send(CREATE, **order(6, **STOP, price=920_000))
    assert (await client.send(CREATE, **order(6)))[1]["code"] == 21728, "it still stands"


async def test_requests_above_the_limit_of_the_tier_are_refused(venue: FakeExchange, client: Client) -> None:
    venue.tier, venue.request_s = "standard", 0.1
    answers = [(await client.ask("nextNonce", api_key_index=KEY_INDEX))["code"] for _ in range(61)]
    assert answers == [200] * 60 + [23000]
    assert (await client.send(CREATE, **order()))[0] == 429


async def test_a_group_gives_an_entry_its_stop_and_target_of_the_filled_size(
    venue: FakeExchange, client: Client
) -> None:
    target = {**STOP, "Type": 4, "TriggerPrice": 990_000, "price": 950_000}
    group = [order(5), order(6, 0, 900_000, **STOP), order(7, 0, **target)]
    venue.fill_share = D("0.5")
    await client.send(GROUP, GroupingType=3, Orders=group)
    assert [(each.type, each.quantity) for each in venue.ledger.standing(BTC)] == [
        ("stop-loss", D("0.05")), ("take-profit", D("0.05")),
    ]  # fmt: skip
    venue.fill_share = D(1)
    venue.reach("BTC", "92990.0")
    assert [each.status for each in venue.orders.values()] == ["canceled-too-much-slippage", "filled", "canceled-oco"]
    assert venue.positions() == {}


async def test_a_stop_past_its_worst_price_ends_unfilled_and_a_cancel_all_may_be_scheduled(
    venue: FakeExchange, client: Client, clock: ManualClock
) -> None:
    await client.send(CREATE, **order())
    await client.send(CREATE, **order(6, **STOP, price=920_000))
    await client.send(CREATE, **order(7, **STOP, price=920_000))
    at_ms = int((clock.now() + timedelta(minutes=5)).timestamp() * 1000)
    await client.send(CANCEL_ALL, TimeInForce=1, Time=at_ms)
    clock.set_by(timedelta(minutes=5))
    await client.ask("accountActiveOrders")
    assert {each.status for each in venue.ledger.orders.values() if each.reduce_only} == {"canceled"}
    await client.send(CREATE, **order(8, **STOP, price=920_000))
    venue.reach("BTC", "91000.0")
    assert venue.orders[8].status == "canceled-too-much-slippage"
    assert venue.positions() == {BTC: D("0.1")}


async def test_streams_of_an_account_tell_its_changes_with_faults(venue: FakeExchange, client: Client) -> None:
    venue.frame_faults = ["", "double", "drop", *[""] * 50]
    async with client.http.ws_connect(f"{venue.url}/stream") as socket:
        await socket.receive()
        await socket.send_json({"type": "subscribe", "channel": f"account_all_orders/{ACCOUNT}"})
        assert (await socket.receive_json())["code"] == 30012, "without a token"
        for kind in ("account_all_orders", "account_all_trades", "account_all_positions", "account_tx"):
            channel = {"channel": f"{kind}/{ACCOUNT}", "auth": f"1:{ACCOUNT}:{KEY_INDEX}:token"}
            await socket.send_json({"type": "subscribe", **channel})
            assert (await socket.receive_json())["type"] == f"subscribed/{kind}"
        await client.send(CREATE, **order())
        kinds = [(await socket.receive_json())["type"] for _ in range(4)]
    assert kinds == [
        "update/account_all_orders", "update/account_all_trades", "update/account_all_trades", "update/account_tx",
    ]  # fmt: skip


async def rows_of(venue: FakeExchange, client: Client) -> dict[str, Any]:
    """Return a row of each kind by the name of the SDK's model."""
    venue.excuse("lag_s", "event_lag_s")
    _, answer, name = await client.send(CREATE, **order())
    account = (await client.ask("account", by="index", value=ACCOUNT))["accounts"][0]
    return {
        "RespSendTx": answer,
        "NextNonce": await client.ask("nextNonce", api_key_index=KEY_INDEX),
        "Order": (await client.ask("accountOrders", client_order_indexes="5"))["orders"][0],
        "Trade": (await client.ask("trades", limit=10))["trades"][0],
        "EnrichedTx": await client.ask("tx", by="hash", value=name),
        "Txs": await client.ask("accountTxs", limit=10),
        "DetailedAccount": account,
        "AccountPosition": account["positions"][0],
        "AccountLimits": await client.ask("accountLimits"),
        "AccountApiKeys": await client.ask("apikeys"),
    }


@pytest.mark.sdk
async def test_rows_have_every_field_of_the_models_of_the_sdk(venue: FakeExchange, client: Client) -> None:
    models = pytest.importorskip("lighter.models", reason="the extra `live` is not installed")
    for name, row in (await rows_of(venue, client)).items():
        model = getattr(models, name)
        assert model.from_dict(row) is not None
        optional = {field for field, each in model.model_fields.items() if not each.is_required()}
        assert model.model_fields.keys() - row.keys() <= optional, name


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded answers of the venue are not here")
async def test_rows_have_every_field_of_the_recorded_answers(venue: FakeExchange, client: Client) -> None:
    def recorded(name: str, *path: Any) -> dict[str, Any]:
        found = orjson.loads((RECORDED / name).read_bytes())
        for step in path:
            found = found[step]
        return found  # type: ignore[no-any-return]

    rows = await rows_of(venue, client)
    for name, found in {
        "Order": recorded("http_orders.json", "orders", 0),
        "Trade": recorded("ws_account_all_trades_update.json", "trades", "0", 0),
        "DetailedAccount": recorded("http_account.json", "accounts", 0),
        "AccountPosition": recorded("ws_account_all_positions_update.json", "positions", "0"),
        "NextNonce": recorded("http_next_nonce.json"),
    }.items():
        row = rows[name]
        assert found.keys() - row.keys() <= {"maker_fee", "taker_fee"}, name  # zero fees are left out
        assert {
            field: (type(row[field]), type(found[field]))
            for field in found.keys() & row.keys()
            if type(row[field]) is not type(found[field]) and None not in (row[field], found[field])
        } == {}, name
