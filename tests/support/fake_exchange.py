"""The trading side of the fake venue: takes the transactions of the unmodified SDK, executes them, and fails on demand.

A transaction is executed when its nonce is the account's next one, once; a client order id stands for one order. That
is what the venue promises; everything else may go wrong: answers are lost before or after, delayed, or nonsense.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from random import Random
from typing import Any, Final

import orjson
from aiohttp import web
from support.fake_venue import FakeVenue

ACCOUNT: Final = 7
KEY_INDEX: Final = 2
CREATE, CANCEL = 14, 15

SEND_FAULTS: Final = ("lose_before", "lose_after", "500_before", "500_after", "late", "nonsense", "busy", "maintenance")
"""What may become of a transaction: its answer is lost before or after it is executed; it is executed late; …"""

_EXECUTED: Final = ("ok", "lose_after", "500_after", "nonsense")
_CUT: Final = ("lose_before", "lose_after", "late")
_ANSWERS: Final = {
    "500_before": (500, "internal"),
    "500_after": (502, "<html>Bad Gateway</html>"),
    "nonsense": (200, '{"surprise":true}'),
    "busy": (429, '{"code":23000,"message":"Too Many Requests!"}'),
    "maintenance": (503, "maintenance"),
}

READ_FAULTS: Final = ("500", "cut", "nonsense", "429")


@dataclass
class Standing:
    """An order as the fake venue keeps it; amounts in base and quote units."""

    index: int
    client_index: int
    market_id: int
    is_ask: bool
    quantity: Decimal
    filled: Decimal = Decimal(0)
    notional: Decimal = Decimal(0)
    status: str = "open"
    type: str = "limit"
    trigger: Decimal = Decimal(0)

    def shown(self) -> dict[str, Any]:
        return {
            "order_index": self.index, "client_order_index": self.client_index, "order_id": str(self.index),
            "market_index": self.market_id, "owner_account_index": ACCOUNT, "is_ask": self.is_ask,
            "initial_base_amount": str(self.quantity), "remaining_base_amount": str(self.quantity - self.filled),
            "filled_base_amount": str(self.filled), "filled_quote_amount": str(self.notional), "status": self.status,
            "type": self.type, "trigger_price": str(self.trigger),
        }  # fmt: skip


@dataclass
class FakeExchange(FakeVenue):
    """A fake venue that also trades, for one account with one key."""

    next_nonce: int = 40
    orders: dict[int, Standing] = field(default_factory=dict)
    rejected: set[int] = field(default_factory=set)
    send_faults: list[str] = field(default_factory=list)
    """What happens to the transactions to come, one each; `ok` for nothing."""

    read_faults: list[str] = field(default_factory=list)
    late: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    sent: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    fill_share: Decimal = Decimal(1)
    refusal: tuple[int, str] | None = None
    positions_shown: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            *super().routes(),
            web.post("/api/v1/sendTx", self._send),
            web.get("/api/v1/nextNonce", self._nonce),
            web.get("/api/v1/accountOrders", self._orders),
            web.get("/api/v1/accountActiveOrders", self._active_orders),
            web.get("/api/v1/account", self._account),
        )

    def positions(self) -> dict[int, Decimal]:
        """What all fills come to, by market."""
        held: dict[int, Decimal] = {}
        for order in self.orders.values():
            held[order.market_id] = held.get(order.market_id, Decimal(0)) + (-1 if order.is_ask else 1) * order.filled
        return {market_id: quantity for market_id, quantity in held.items() if quantity}

    def deliver(self) -> None:
        """Execute, if they still can be, the transactions that are under way."""
        late, self.late = self.late, []
        for kind, transaction in late:
            self._execute(kind, transaction)

    def fault_at_random(self, random: Random, share: float) -> None:
        """Plan faults for the next transactions and questions."""
        self.send_faults = [random.choice(SEND_FAULTS) if random.random() < share else "ok" for _ in range(40)]
        self.read_faults = [random.choice(READ_FAULTS) if random.random() < share / 2 else "ok" for _ in range(400)]

    # Transactions

    async def _send(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        kind, transaction = int(str(form["tx_type"])), orjson.loads(str(form["tx_info"]))
        self.sent.append((kind, transaction))
        fault = self.send_faults.pop(0) if self.send_faults else "ok"
        if fault == "late":
            self.late.append((kind, transaction))
        refusal = self._execute(kind, transaction) if fault in _EXECUTED else None
        if fault in _CUT:
            return await _cut(request)
        if fault in _ANSWERS:
            status, text = _ANSWERS[fault]
            return web.Response(status=status, text=text, content_type="application/json")
        if refusal is not None:
            code, message = refusal
            return web.json_response({"code": code, "message": message}, status=400)
        body = {
            "code": 200, "message": '{"ratelimit": "didn\'t use volume quota"}', "tx_hash": "ab12",
            "predicted_execution_time_ms": 350, "volume_quota_remaining": 10,
        }  # fmt: skip
        return web.json_response(body)

    def _execute(self, kind: int, transaction: dict[str, Any]) -> tuple[int, str] | None:
        """Execute a transaction; the venue's code and words when it is refused and its nonce stays."""
        assert transaction["AccountIndex"] == ACCOUNT
        assert transaction["ApiKeyIndex"] == KEY_INDEX
        if transaction["Nonce"] != self.next_nonce:
            return 21104, "invalid nonce"
        if kind == CREATE and transaction["ClientOrderIndex"] in self.orders:
            return 21728, "client order index already exists"
        if kind == CREATE and self.refusal is not None:
            return self.refusal
        self.next_nonce += 1
        if kind == CREATE:
            self._create(transaction)
        elif (order := self.orders.get(transaction["Index"]) or self._by_index(transaction["Index"])) is not None:
            order.status = "canceled" if order.status in ("open", "pending") else order.status
        return None

    def _create(self, transaction: dict[str, Any]) -> None:
        market = next(one for one in self.markets.values() if one.market_id == transaction["MarketIndex"])
        quantity = Decimal(transaction["BaseAmount"]).scaleb(-market.size_decimals)
        client_index = transaction["ClientOrderIndex"]
        index = 281474976710656 + len(self.orders)
        order = Standing(index, client_index, market.market_id, bool(transaction["IsAsk"]), quantity)
        self.orders[client_index] = order
        if client_index in self.rejected:
            order.status = "canceled-margin-not-allowed"
        elif transaction["Type"] == 1:
            step = Decimal(1).scaleb(-market.size_decimals)
            order.filled = (quantity * self.fill_share / step).to_integral_value() * step
            order.notional = order.filled * market.mid
            order.status = "filled" if order.filled == quantity else "canceled-too-much-slippage"
        elif transaction["Type"] in (2, 4):
            order.status, order.type = "pending", {2: "stop-loss", 4: "take-profit"}[transaction["Type"]]
            order.trigger = Decimal(transaction["TriggerPrice"]).scaleb(-market.price_decimals)

    def _by_index(self, index: int) -> Standing | None:
        return next((order for order in self.orders.values() if order.index == index), None)

    # Questions

    async def _nonce(self, request: web.Request) -> web.StreamResponse:
        return await self._tell_of(request, {"nonce": self.next_nonce})

    async def _orders(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"].split(":")[1:3] == [str(ACCOUNT), str(KEY_INDEX)]
        asked = [int(text) for text in request.query["client_order_indexes"].split(",")]
        found = [self.orders[index].shown() for index in asked if index in self.orders]
        return await self._tell_of(request, {"orders": found or None})

    async def _active_orders(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"].split(":")[1:3] == [str(ACCOUNT), str(KEY_INDEX)]
        market_id = int(request.query["market_id"])
        standing = [
            order.shown()
            for order in self.orders.values()
            if order.market_id == market_id and order.status in ("open", "pending")
        ]
        return await self._tell_of(request, {"orders": standing or None})

    async def _account(self, request: web.Request) -> web.StreamResponse:
        shown = self.positions_shown
        if shown is None:
            shown = [
                {
                    "market_id": market_id,
                    "sign": 1 if quantity > 0 else -1,
                    "position": str(abs(quantity)),
                    "avg_entry_price": "94000.000000",
                }
                for market_id, quantity in self.positions().items()
            ]
        return await self._tell_of(
            request, {"accounts": [{"index": ACCOUNT, "collateral": "10000.25", "positions": shown}]}
        )

    async def _tell_of(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        match self.read_faults.pop(0) if self.read_faults else "ok":
            case "500":
                return web.Response(status=500, text="internal")
            case "429":
                return web.Response(status=429)
            case "cut":
                return await _cut(request)
            case "nonsense":
                return web.Response(text="<html>", content_type="application/json")
        return web.json_response({"code": 200, **body})


async def _cut(request: web.Request) -> web.StreamResponse:
    """Cut the connection instead of an answer."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(0)
    return web.Response()
