"""The rows of the fake venue have every field of recorded answers and of the models of the SDK."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
import pytest
from support.fake_exchange import CREATE, FakeExchange
from support.fake_ledger import ACCOUNT, KEY_INDEX, hash_of
from support.manual_clock import ManualClock
from support.scripted import START

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


ORDER: Final = {
    "MarketIndex": 1, "ClientOrderIndex": 5, "BaseAmount": 1000, "Price": 944_700, "IsAsk": 0, "Type": 1,
    "TimeInForce": 0, "ReduceOnly": 0, "TriggerPrice": 0, "OrderExpiry": 0,
}  # fmt: skip


@pytest.fixture
async def venue() -> AsyncIterator[FakeExchange]:
    venue = FakeExchange(ManualClock(START).now)
    await venue.start()
    yield venue
    await venue.stop()


@pytest.fixture
async def client(venue: FakeExchange) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as http:
        yield Client(venue, http)


async def rows_of(venue: FakeExchange, client: Client) -> dict[str, Any]:
    """Return a row of each kind by the name of the SDK's model."""
    venue.excuse("lag_s", "event_lag_s")
    _, answer, name = await client.send(CREATE, **ORDER)
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
