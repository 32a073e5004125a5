"""Orders, accounts and positions over HTTP: the real exchange on a real PostgreSQL, in a market that the test moves."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pytest_aiohttp.plugin import AiohttpClient
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource, make_settings, make_tick
from support.served import AppClient, call, make_app
from support.venue import break_ledger_writer, make_exchange

from trader.agents.domain.models import Model
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.exchange.paper import PaperExchange
from trader.market.feed import MarketFeed
from trader.settings.settings import Settings

MIDS = {"BTC": "94000", "ETH": "3300"}
"""SOL has no price yet."""


@dataclass
class Models:
    by_id: dict[str, Model] = field(default_factory=dict)
    version: int = 0

    async def reload(self) -> None:
        """Do nothing: there are no other models."""


@dataclass
class ExchangeContext:
    """The part of the context that the procedures of the exchange use."""

    settings: Settings
    clock: ManualClock
    market: MarketFeed
    exchange: PaperExchange
    models: Models


class PaperBench:
    """A service, its market, and a caller."""

    def __init__(self, context: ExchangeContext, client: AppClient) -> None:
        self.context = context
        self.call = partial(call, client)

    async def order(self, status: int = 200, **fields: object) -> Any:
        answer = await self.call(
            "simulator.placeOrder", {"symbol": "BTC", "side": "buy", "quantity": 0.1, **fields}, status
        )
        return answer["order"] if status == 200 else answer

    async def refused(self, **fields: object) -> list[list[str]]:
        """The paths that a refused order's issues name."""
        answer = await self.order(400, **fields)
        assert answer["code"] == "VALIDATION_ERROR"
        return [issue["path"] for issue in answer["issues"]]

    async def account(self, account_id: str = "default") -> Any:
        return (await self.call("simulator.getAccount", {"accountId": account_id}))["account"]

    async def see(self, mids: Mapping[str, str], after_s: float = 1) -> None:
        await self.context.clock.advance(timedelta(seconds=after_s))
        tick = make_tick(self.context.clock.now(), mids)
        await self.context.market.take(tick, self.context.exchange.on_tick)


@pytest.fixture
async def desk(database: Database, aiohttp_client: AiohttpClient) -> AsyncIterator[PaperBench]:
    clock, source, settings = ManualClock(START), ScriptedSource(), make_settings()
    market = MarketFeed(source, clock)
    exchange = make_exchange(database, market, clock, settings)
    await exchange.lead()
    context = ExchangeContext(settings, clock, market, exchange, Models())
    desk = PaperBench(context, await aiohttp_client(make_app(context=context)))
    await desk.see(MIDS)
    yield desk
    await exchange.resign()


async def test_a_market_order_is_answered_in_full(desk: PaperBench) -> None:
    order = await desk.order(leverage=5, clientOrderId="one", confidence=80)
    assert UUID(order.pop("id"))
    assert order == {
        "clientOrderId": "one",
        "accountId": "default",
        "symbol": "BTC",
        "side": "buy",
        "type": "market",
        "status": "filled",
        "requestedQuantity": 0.1,
        "totalQuantity": 0.1,
        "averagePrice": 94000.1,
        "totalFees": 4.700005,
        "realizedPnl": 0,
        "fills": [
            {
                "quantity": 0.1,
                "price": 94000.1,
                "fee": 4.700005,
                "maker": False,
                "timestamp": "2025-01-01T12:00:31.000Z",
            }
        ],
        "timestamp": "2025-01-01T12:00:31.000Z",
    }


async def test_an_account_shows_its_books(desk: PaperBench) -> None:
    plan = {"stop": 93000, "target": None, "timeExit": "2025-01-02T12:00:00+01:00", "invalidation": "trend breaks"}
    await desk.order(leverage=5, exitPlan=plan)
    resting = await desk.order(type="limit", limitPrice=90000, quantity=0.01)
    await desk.see(MIDS | {"BTC": "95000"})
    account = await desk.account()
    assert UUID(account.pop("runId"))
    (position,), (waiting,) = account.pop("positions"), account.pop("openOrders")
    assert account == {
        "exists": True,
        "accountId": "default",
        "quoteCurrency": "USDT",
        "initialCapital": 10000,
        "cashBalance": 9995.299995,
        "equity": 10095.289995,
        "availableCash": 7315.287995,
        "borrowedBalance": 0,
        "marginBalance": 1880.002,
        "maintenanceMargin": 118.75,
        "totalRealizedPnl": 0,
        "totalUnrealizedPnl": 99.99,
        "totalFees": 4.700005,
        "totalFundingPnl": 0,
        "totalInsurance": 0,
    }
    assert position == {
        "symbol": "BTC",
        "side": "LONG",
        "quantity": 0.1,
        "avgEntryPrice": 94000.1,
        "markPrice": 95000,
        "notional": 9500,
        "margin": 1880.002,
        "leverage": 5,
        "unrealizedPnl": 99.99,
        "realizedPnl": 0,
        "liquidationPrice": None,
        "exitPlan": {
            "stop": 93000,
            "target": None,
            "invalidation": "trend breaks",
            "invalidationPrice": None,
            "timeExit": "2025-01-02T11:00:00.000Z",
        },
    }
    assert waiting == {
        "id": resting["id"],
        "symbol": "BTC",
        "side": "buy",
        "quantity": 0.01,
        "remaining": 0.01,
        "limitPrice": 90000,
        "createdAt": "2025-01-01T12:00:31.000Z",
    }


async def test_an_exit_plan_can_be_read_and_sent_back(desk: PaperBench) -> None:
    plan = {"stop": 93000.5, "timeExit": "2025-01-02T12:00:00Z", "trailingDistance": 900}
    targets = [{"price": 96000, "fraction": 0.25}, {"price": 97000, "fraction": 0.5}]
    await desk.order(leverage=5, exitPlan={**plan, "targets": targets})
    (position,) = (await desk.account())["positions"]
    shown = position["exitPlan"]
    assert (shown["stop"], shown["trailingDistance"]) == (93100, 900), "94000 less the distance"
    assert shown["targets"] == [{**targets[0], "quantity": 0.025}, {**targets[1], "quantity": 0.05}]
    await desk.order(accountId="copy", leverage=5, exitPlan=position["exitPlan"])
    (copied,) = (await desk.account("copy"))["positions"]
    assert copied["exitPlan"] == position["exitPlan"]


async def test_a_post_only_order_is_refused_by_its_book_and_a_market_order_cannot_be_one(desk: PaperBench) -> None:
    taking = await desk.order(type="limit", limitPrice=95000, postOnly=True)
    assert taking["reason"] == "post-only: a buy at 95000 would take from the book, whose best ask is 94000.1"
    rests = await desk.order(type="limit", limitPrice=93000, postOnly=True)
    assert rests["status"] == "resting"
    assert "a market order always takes" in str(await desk.order(400, postOnly=True))


async def test_an_unopened_account_is_shown_but_not_stored(desk: PaperBench) -> None:
    account = await desk.account("nobody")
    assert (account["runId"], account["exists"]) == (None, False)
    assert (account["equity"], account["availableCash"], account["positions"]) == (10000, 10000, [])
    assert "nobody" not in desk.context.exchange.accounts


async def test_a_refused_order_is_an_answer(desk: PaperBench) -> None:
    order = await desk.order(quantity=100)
    assert (order["status"], order["averagePrice"], order["fills"]) == ("rejected", None, [])
    assert order["reason"]
    assert (await desk.order(quantity=5e-324))["status"] == "rejected"
    assert (await desk.order(quantity=10**12))["status"] == "rejected"
    assert (await desk.order(symbol="SOL"))["reason"] == "there is no price for SOL yet"
    assert (await desk.order(reduceOnly=True))["status"] == "rejected"
    assert (await desk.order(leverage=5, exitPlan={"stop": 99000}))["status"] == "rejected"


async def test_every_order_has_its_own_id_even_before_the_account_opens(desk: PaperBench) -> None:
    orders = [await desk.order(quantity=quantity) for quantity in (100, 200, 0.01, 100, 0.01)]
    assert [order["status"] for order in orders] == ["rejected", "rejected", "filled", "rejected", "filled"]
    run = (await desk.account())["runId"]
    assert len({run, *(order["id"] for order in orders)}) == 6


async def test_the_four_names_of_sides_are_two_sides(desk: PaperBench) -> None:
    for side, shown in (("buy", "buy"), ("long", "buy"), ("sell", "sell"), ("short", "sell")):
        assert (await desk.order(side=side, quantity=0.01))["side"] == shown


@pytest.mark.parametrize("symbol", ["btc", "BTCUSDT", "BTC/USDT"])
async def test_any_spelling_of_a_market_is_accepted(desk: PaperBench, symbol: str) -> None:
    assert (await desk.order(symbol=symbol, quantity=0.01))["symbol"] == "BTC"


async def test_invalid_orders(desk: PaperBench) -> None:
    assert await desk.refused(symbol="DOGE") == [["symbol"]]
    assert await desk.refused(leverage=41) == [["leverage"]]
    assert await desk.refused(leverage=0.5) == [["leverage"]]
    assert await desk.refused(type="limit") == [["limitPrice"]]
    assert await desk.refused(limitPrice=1) == [["limitPrice"]]
    assert await desk.refused(quantity=0) == [["quantity"]]
    assert await desk.refused(quantity=-1) == [["quantity"]]
    assert await desk.refused(quantity="1") == [["quantity"]]
    assert await desk.refused(quantity=1e13) == [["quantity"]]
    assert await desk.refused(side="BUY") == [["side"]]
    assert await desk.refused(type="stop") == [["type"]]
    assert await desk.refused(confidence=101) == [["confidence"]]
    assert await desk.refused(reduceOnly=1) == [["reduceOnly"]]
    assert await desk.refused(stopLoss=1) == [["stopLoss"]]
    assert await desk.refused(clientOrderId="") == [["clientOrderId"]]
    assert await desk.refused(clientOrderId="a\n") == [["clientOrderId"]]
    assert await desk.refused(clientOrderId="x" * 129) == [["clientOrderId"]]
    assert await desk.refused(exitPlan={"stop": 0}) == [["exitPlan", "stop"]]
    assert await desk.refused(exitPlan={"stopLoss": 1}) == [["exitPlan", "stopLoss"]]
    for time_exit in (
        "2025-01-01T00:00:00",
        "tomorrow",
        1735689600,
        "9999-12-31T23:59:59-23:59",
        "0001-01-01T00:00:00+23:59",
    ):
        assert await desk.refused(exitPlan={"timeExit": time_exit}) == [["exitPlan", "timeExit"]]
    for account_id in ("", "a b", "a/b", "ä", "a\n", "x" * 65, 1):
        assert await desk.refused(accountId=account_id) == [["accountId"]]
    assert desk.context.exchange.accounts == {}


async def test_the_same_client_order_id_trades_once(desk: PaperBench) -> None:
    first = await desk.order(clientOrderId="once", leverage=5)
    assert await desk.order(clientOrderId="once", leverage=5) == first
    assert (await desk.account())["positions"][0]["quantity"] == 0.1
    refused = await desk.order(409, clientOrderId="once", leverage=6)
    assert refused["code"] == "CONFLICT"


async def test_a_bug_in_the_ledger_writer_is_an_internal_error(
    desk: PaperBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_ledger_writer(patch)
        answer = await desk.order(500, clientOrderId="one")
        assert answer["code"] == "INTERNAL_SERVER_ERROR"
    assert (await desk.order(clientOrderId="one"))["status"] == "filled"


async def test_a_resting_order_is_canceled(desk: PaperBench) -> None:
    resting = await desk.order(type="limit", limitPrice=90000, quantity=0.01)
    assert resting["status"] == "resting"
    answer = await desk.call("simulator.cancelOrder", {"orderId": resting["id"]})
    assert (answer["order"]["id"], answer["order"]["status"]) == (resting["id"], "cancelled")
    assert (await desk.account())["openOrders"] == []


@pytest.mark.parametrize("order_id", ["nothing", "00000000-0000-0000-0000-000000000000", "x" * 64])
async def test_an_unknown_order_is_not_found(desk: PaperBench, order_id: str) -> None:
    answer = await desk.call("simulator.cancelOrder", {"orderId": order_id}, status=404)
    assert answer["code"] == "NOT_FOUND"
    answer = await desk.call("simulator.cancelOrder", {"accountId": "nobody", "orderId": order_id}, status=404)
    assert answer["code"] == "NOT_FOUND"


async def test_a_reset_starts_a_run(desk: PaperBench) -> None:
    await desk.order(leverage=5)
    before = await desk.account()
    after = (await desk.call("simulator.resetAccount"))["account"]
    assert after["runId"] != before["runId"]
    assert (after["equity"], after["positions"], after["totalFees"]) == (10000, [], 0)
    assert await desk.account() == after
    fresh = (await desk.call("simulator.resetAccount", {"accountId": "new"}))["account"]
    assert fresh["runId"] is None, "an account opens with its first accepted order"


def make_model(model_id: str, variant: VariantId) -> Model:
    return Model(
        id=model_id,
        name=f"Model {model_id}",
        variant=variant,
        provider="rules",
        router_model_name="r",
        created_at=START,
    )


async def test_positions_cover_every_account_oldest_first(desk: PaperBench) -> None:
    desk.context.models.by_id["m1"] = make_model("m1", VariantId.APEX)
    desk.context.models.by_id["m2"] = make_model("m2", VariantId.CONTRARIAN)
    await desk.order(accountId="m1", quantity=0.5, leverage=5, confidence=70, exitPlan={"stop": 93000})
    await desk.see(MIDS)
    await desk.order(accountId="zz", side="sell", symbol="ETH", quantity=1)
    await desk.see(MIDS)
    await desk.order(accountId="m2", leverage=2.5, quantity=0.02)
    positions = await desk.call("trading.getPositions")
    assert [position["modelId"] for position in positions] == ["m1", "zz", "m2"]
    first, second, third = positions
    assert UUID(first.pop("id"))
    assert 70_000 < float(first.pop("liquidationPrice")) < 80_000
    assert first == {
        "modelId": "m1",
        "modelName": "Model m1",
        "modelVariant": "Apex",
        "symbol": "BTC",
        "side": "LONG",
        "quantity": "0.5",
        "entryPrice": "94000.1",
        "leverage": "5",
        "exitPlan": {"stop": 93000, "target": None, "invalidation": None, "invalidationPrice": None, "timeExit": None},
        "confidence": 70,
        "openedAt": "2025-01-01T12:00:31.000Z",
        "currentPrice": "94000",
        "notional": "47000",
        "unrealizedPnl": "-0.05",
        "manual": True,
    }
    assert (second["modelName"], second["side"], second["entryPrice"]) == ("zz", "SHORT", "3299.99")
    assert not {"modelVariant", "leverage", "confidence"} & second.keys()
    assert third["leverage"] == "2.5"
    assert "liquidationPrice" not in third

    async def ids(**request: str) -> list[str]:
        return [position["modelId"] for position in await desk.call("trading.getPositions", request)]

    assert await ids(modelId="m1") == ["m1"]
    assert await ids(modelId="zz") == ["zz"]
    assert await ids(modelId="nobody") == []
    assert await ids(variant="Contrarian") == ["m2"]
    assert await ids(variant="all") == ["m1", "zz", "m2"]
    assert await ids(variant="Apex", modelId="m2") == []


async def test_prices_are_never_invented(desk: PaperBench) -> None:
    at = "2025-01-01T12:00:31.000Z"
    btc, eth = {"symbol": "BTC", "price": 94000, "timestamp": at}, {"symbol": "ETH", "price": 3300, "timestamp": at}
    assert await desk.call("trading.getCryptoPrices") == {"prices": [btc, eth]}
    asked = ["eth", "BTC/USDT", "DOGE", "SOL", "ETHUSDT", "", "\U0001f600"]
    assert await desk.call("trading.getCryptoPrices", {"symbols": asked}) == {"prices": [eth, btc]}
    assert await desk.call("trading.getCryptoPrices", {"symbols": []}) == {"prices": []}
    await desk.context.clock.advance(timedelta(seconds=31))
    stale = (await desk.call("trading.getCryptoPrices", {"symbols": ["BTC"]}))["prices"][0]
    assert stale == btc | {"message": "stale: the last update was at 2025-01-01T12:00:31.000Z, 31 s ago"}
    answer = await desk.call("trading.getCryptoPrices", {"symbols": ["BTC"] * 101}, status=400)
    assert answer["issues"][0]["path"] == ["symbols"]


async def test_figures_without_a_price_are_null(desk: PaperBench, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.order(leverage=5)
    monkeypatch.setattr(desk.context.exchange, "marks", dict)
    (position,) = await desk.call("trading.getPositions")
    assert (position["currentPrice"], position["notional"], position["unrealizedPnl"]) == (None, None, None)
    account = await desk.account()
    assert (account["equity"], account["availableCash"], account["maintenanceMargin"]) == (None, None, None)
    assert account["positions"][0]["markPrice"] is None
    assert account["cashBalance"] == 9995.299995


async def test_live_mode_has_no_simulator(desk: PaperBench, aiohttp_client: AiohttpClient) -> None:
    live = msgspec.structs.replace(desk.context.settings, trading_mode="live")
    context = ExchangeContext(live, desk.context.clock, desk.context.market, desk.context.exchange, Models())
    client = await aiohttp_client(make_app(context=context))
    for name in ("placeOrder", "cancelOrder", "getAccount", "resetAccount", "getCompletedTradesFromDB"):
        async with client.post(f"/api/rpc/simulator/{name}", json={"json": {}}) as response:
            assert response.status == 412
            inner = (await response.json())["json"]
            assert inner["code"] == "PRECONDITION_FAILED"
            assert "TRADING_MODE" in inner["message"]
    async with client.post("/api/rpc/trading.getCryptoPrices") as response:
        assert response.status == 200
