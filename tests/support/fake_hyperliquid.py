"""Fake of Hyperliquid: its interface over the matching, the money and the faults of the other fake venue.

Documented: an answer states each order's outcome, and for a group that fails its check one for all; texts of refusals;
prices of five significant figures, sizes in lots, 10 USDC at least; actions expire by the venue's clock; nonces of a
signer are used once; a group's stop and target are placed once its order is filled whole, and end with it; 1,200
weights a minute; reads of trades return 2,000 rows at most. Seen in recordings: the fields of every row.

Invented: how long until something is shown (`lag_s`, `event_lag_s`), the text of an expired action, that a child of a
group may be refused alone, and every fault of the network. Signatures are `PlainAgent`'s.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Final

import msgspec
import orjson
from aiohttp import web
from support.fake_exchange import (
    GONE_AFTER,
    FakeExchange,
    answer_of_fault,
    is_executed,
)
from support.fake_ledger import ACCOUNT, Ledger, Standing
from support.fake_venue import IDS, FakeMarket

from trader.live.hyperliquid.actions import cloid_of
from trader.live.hyperliquid.signer import Signature
from trader.settings.forms import Secret

AGENT: Final = "0x" + "a1" * 20
ADDRESS: Final = f"0x{ACCOUNT:040x}"
_WEIGHTS: Final = {"l2Book": 2, "clearinghouseState": 2, "orderStatus": 2, "userRole": 60}
_LIMIT: Final = 1200
_STATUSES: Final = {
    "pending": "open", "in-progress": "open", "canceled-too-much-slippage": "marketOrderNoLiquidityRejected",
    "canceled-oco": "siblingFilledCanceled", "canceled-reduce-only": "reduceOnlyCanceled", "canceled-child": "canceled",
    "canceled-margin-not-allowed": "perpMarginRejected", "canceled-liquidation": "liquidatedCanceled",
}  # fmt: skip
_ERRORS: Final = {
    21739: "Insufficient margin to place order.", 21723: "Insufficient margin to place order.",
    21732: "Reduce only order would increase position.", 21735: "Invalid TP/SL price.",
}  # fmt: skip


def digest_of(action: Any, nonce: int, vault: str | None, expires_ms: int | None) -> str:
    return "0x" + blake2b(msgspec.msgpack.encode([action, nonce, vault, expires_ms]), digest_size=32).hexdigest()


class PlainAgent:
    """Signs without a curve: the digest of what is signed, and the wallet."""

    address = AGENT

    def __init__(self, key: Secret, is_testnet: bool) -> None:
        self._last = 0

    def check(self) -> None:
        pass

    def next_nonce(self, now_ms: int) -> int:
        self._last = max(self._last + 1, now_ms)
        return self._last

    def sign(self, action: dict[str, Any], nonce: int, vault: str | None, expires_ms: int | None) -> Signature:
        return Signature(digest_of(action, nonce, vault, expires_ms), self.address, 27)

    def hash_of(self, action: dict[str, Any], nonce: int, vault: str | None, expires_ms: int | None) -> bytes:
        return bytes.fromhex(digest_of(action, nonce, vault, expires_ms)[2:])


class FakeHyperliquid(FakeExchange):
    """The venue. Accounts have the address of their index, and one agent signs for all."""

    def __init__(self, now: Callable[[], datetime] | None = None) -> None:
        super().__init__(now)
        for market in self.markets.values():
            market.price_decimals, market.mid = 6 - market.size_decimals, market.mid.normalize()
        self.roles: dict[str, dict[str, Any]] = {AGENT: {"role": "agent", "data": {"user": ADDRESS}}}
        self.agents: list[dict[str, Any]] = []
        self.mode = "default"
        self.leverages: dict[tuple[int, int], dict[str, Any]] = {}
        self.allowance = 100_000
        self.page = 2000
        self._nonces: list[int] = []
        self._weight = 20

    stops_parts = False

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            web.post("/info", self._info),
            web.post("/exchange", self._exchange),
            web.get("/ws", self._follow),
        )

    # Actions

    async def _exchange(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.sent.append((0, body))
        if self.odd_answers:
            status, text, _ = self.odd_answers.pop(0)
            return web.Response(status=status, text=text, content_type="application/json")
        fault = "maintenance" if self.is_down else self.send_faults.pop(0) if self.send_faults else "ok"
        if fault == "late":
            self.late.append((0, body))
        self._weight = 1
        limited = self._admit(request)
        answer = self._act(body) if is_executed(fault) and limited is None else None
        if fault == GONE_AFTER:
            self.read_faults = ["500"] * 100_000
        return await answer_of_fault(request, fault) or limited or web.json_response(answer)

    def _execute(self, kind: int, transaction: dict[str, Any], text: str) -> None:
        """Execute an action that arrives late."""
        self._act(transaction)

    def _act(self, body: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0911 - one answer per kind
        action, nonce, vault, expires = body["action"], body["nonce"], body["vaultAddress"], body["expiresAfter"]
        signature, now_ms = body["signature"], int(self._time().timestamp() * 1000)
        ledger = self.ledgers.get(
            int(vault or self.roles.get(signature["s"], {}).get("data", {}).get("user", "0x0"), 16)
        )
        if ledger is None or signature["r"] != digest_of(action, nonce, vault, expires):
            return _failed(f"User or API Wallet {signature['s']} does not exist.")
        if nonce in self._nonces or (len(self._nonces) >= 100 and nonce <= min(self._nonces)):
            return _failed("Invalid nonce: duplicate nonce")
        self._nonces = sorted([*self._nonces, nonce])[-100:]
        if expires < now_ms:
            return _failed("The action has expired.")
        if self.allowance <= 0:
            return _failed("Too many cumulative requests sent (1 > 0) for cumulative volume traded $0.")
        self.allowance -= max(len(action.get("orders", ())), 1)
        match action["type"]:
            case "order":
                return self._ordered(ledger, action)
            case "cancel" | "cancelByCloid":
                statuses = [self._ended(ledger, each) for each in action["cancels"]]
                return _done("cancel", {"statuses": statuses})
            case "updateLeverage":
                kind = "cross" if action["isCross"] else "isolated"
                self.leverages[ledger.index, action["asset"]] = {"type": kind, "value": action["leverage"]}
                return _done("default")
            case "scheduleCancel":
                ledger.cancels_at = (
                    datetime.fromtimestamp(action["time"] / 1000, self._time().tzinfo) if ("time" in action) else None
                )
                return _done("default")
        raise AssertionError(action)

    def _ordered(self, ledger: Ledger, action: dict[str, Any]) -> dict[str, Any]:
        wires = action["orders"]
        assert (action["grouping"] == "normalTpsl") is (len(wires) > 1)
        assert self.leverages.get((ledger.index, wires[0]["a"]), {}).get("type") == "cross" or wires[0]["r"]
        given = [self._given(wire) for wire in wires]
        errors = [self._error(ledger, wire, each) for wire, each in zip(wires, given, strict=True)]
        if errors[0] is not None or (any(errors) and self.random.random() < 0.5):
            return _done("order", {"statuses": [{"error": next(filter(None, errors))}]})
        taken = [each for each, error in zip(given, errors, strict=True) if error is None]
        with self._changing(ledger, self.lag_s):
            self._create(ledger, {"Nonce": 0}, taken)
        orders = [ledger.orders[each["ClientOrderIndex"]] for each in taken]
        parent = orders[0]
        if parent.is_final and not parent.filled and parent.type in ("market", "limit"):
            why = "Reduce only order would increase position."
            if parent.type == "market":
                why = "Order could not immediately match against any resting orders."
            return _done("order", {"statuses": [{"error": why}]})
        statuses: list[Any] = [{"resting": {"oid": parent.index, "cloid": wires[0]["c"]}}]
        if parent.is_final and parent.type in ("market", "limit"):
            total = {"totalSz": str(parent.filled), "avgPx": str(parent.notional / parent.filled), "oid": parent.index}
            statuses = [{"filled": {**total, "cloid": wires[0]["c"]}}]
        for error in errors[1:]:
            statuses.append({"error": error} if error else "waitingForTrigger")
        return _done("order", {"statuses": statuses})

    def _given(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Return an order in the form of the matching."""
        market = next(each for each in self.markets.values() if each.market_id == wire["a"])
        trigger, kind = wire["t"].get("trigger"), 0
        if trigger is not None:
            kind = {"sl": 2, "tp": 4}[trigger["tpsl"]]
        elif wire["t"]["limit"]["tif"] == "Ioc":
            kind = 1
        for text in (wire["p"], wire["s"], *([trigger["triggerPx"]] if trigger else [])):
            assert text == f"{Decimal(text).normalize():f}", "no trailing zeros"
        return {
            "MarketIndex": wire["a"], "ClientOrderIndex": int(wire["c"][-12:], 16), "IsAsk": int(not wire["b"]),
            "BaseAmount": int(Decimal(wire["s"]).scaleb(market.size_decimals)), "Type": kind,
            "Price": int(Decimal(wire["p"]).scaleb(market.price_decimals)), "ReduceOnly": int(wire["r"]),
            "TriggerPrice": int(Decimal(trigger["triggerPx"]).scaleb(market.price_decimals)) if trigger else 0,
        }  # fmt: skip

    def _error(self, ledger: Ledger, wire: dict[str, Any], given: dict[str, Any]) -> str | None:
        market, price, size = self._market(given), Decimal(wire["p"]), Decimal(wire["s"])
        for text in (wire["p"], wire["t"].get("trigger", {}).get("triggerPx", "1")):
            figures = len(text.replace(".", "").strip("0")) if "." in text else 0
            if figures > 5 or -Decimal(text).as_tuple().exponent > market.price_decimals:  # type: ignore[operator]
                return "Price must be divisible by tick size."
        if -size.as_tuple().exponent > market.size_decimals:  # type: ignore[operator]
            return "Order has invalid size."
        if price * size < 10 and not wire["r"]:
            return "Order must have minimum value of $10."
        if self.refusal is not None or given["Type"] in self.refused_types:
            return _ERRORS.get(self.refusal[0] if self.refusal else 21735, "Insufficient margin to place order.")
        if given["Type"] in (2, 4) and wire["r"]:
            return None
        refusal = self._refusal_of_sequencer(ledger, [given])
        return None if refusal is None else _ERRORS[refusal[0]]

    def _ended(self, ledger: Ledger, named: dict[str, Any]) -> Any:
        cloid = named.get("cloid")
        found = [
            order for order in ledger.orders.values()
            if order.index == named.get("o") or (cloid and cloid_of(order.client_index) == cloid)
        ]  # fmt: skip
        if not found or found[0].is_final:
            return {"error": "Order was never placed, already canceled, or filled."}
        with self._changing(ledger, self.lag_s):
            for each in (found[0], *found[0].children):
                if each is found[0] or each.status == "in-progress":
                    each.status = "canceled"
        return "success"

    def _fill(self, ledger: Ledger, order: Standing, market: FakeMarket, price: Decimal, *, maker: bool) -> None:
        super()._fill(ledger, order, market, price, maker=maker)
        for child in order.children if order.filled < order.quantity else ():
            child.status = "in-progress" if order.type == "limit" and not order.is_final else "canceled-child"

    # Reads

    def _admit(self, request: web.Request) -> web.Response | None:
        self._spent_s += self.request_s
        self._cancel_scheduled()
        now = self.seen_s
        while self._requests and self._requests[0][0] <= now - 60:
            self._requests.popleft()
        if self.is_limited and sum(each for _, each in self._requests) + self._weight > _LIMIT:
            self.limited += 1
            return web.Response(status=429)
        self._requests.append((now, self._weight))
        return None

    async def _info(self, request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        kind = asked["type"]
        if self.is_down or kind in self.failing:
            return web.Response(status=503, text="maintenance")
        self.asked.append((kind, asked))
        body = self.told(kind, asked)
        self._weight = _WEIGHTS.get(kind, 20) + (len(body) // 20 if isinstance(body, list) else 0)
        return self._admit(request) or await self._faulty(request) or web.json_response(body)

    def told(self, kind: str, asked: dict[str, Any]) -> Any:
        """Return the answer to a read."""
        if "user" in asked and kind != "userRole":
            return self._told_of(kind, asked, self.ledgers.get(int(asked["user"], 16)) or Ledger(-1))
        coin = asked.get("coin") or asked.get("req", {}).get("coin")
        market = self.markets.get(coin or "BTC")
        assert market is not None
        match kind:
            case "userRole":
                index = int(asked["user"], 16)
                return self.roles.get(asked["user"], {"role": "user" if index in self.ledgers else "missing"})
            case "meta":
                ordered = sorted(self.markets.values(), key=lambda each: each.market_id)
                tiers = [{"lowerBound": "0.0", "maxLeverage": 40}, {"lowerBound": "150000000.0", "maxLeverage": 20}]
                return {
                    "universe": [
                        {
                            "szDecimals": each.size_decimals, "name": each.symbol, "maxLeverage": 40,
                            "marginTableId": 56,
                            "isDelisted": None if each.status == "active" else True, "onlyIsolated": None,
                        }
                        for each in ordered
                    ],
                    "marginTables": [[56, {"description": "tiered 40x", "marginTiers": tiers}]],
                }  # fmt: skip
            case "l2Book":
                return self.book_row(market)
            case "candleSnapshot":
                start, end = asked["req"]["startTime"], asked["req"]["endTime"]
                return [
                    {"t": row["t"], "T": row["t"] + 59_999, "s": coin, "i": asked["req"]["interval"], "n": 1}
                    | {name: str(row.get(name, 0.0)) for name in "ohlcv"}
                    for row in self.candle_rows.get(market.market_id, []) if start <= row["t"] <= end
                ]  # fmt: skip
            case "fundingHistory":
                return [
                    {"coin": coin, "fundingRate": str(Decimal(row["rate"]) / 100), "premium": "0.0", "time": ms}
                    for row in self.funding_rows.get(market.market_id, [])
                    if asked["startTime"] <= (ms := row["timestamp"] * 1000) <= asked["endTime"]
                ]
        raise AssertionError(asked)

    def _told_of(self, kind: str, asked: dict[str, Any], ledger: Ledger) -> Any:  # noqa: PLR0911 - one per kind
        match kind:
            case "clearinghouseState":
                return self._account_state(ledger)
            case "frontendOpenOrders":
                rows = self._seen_orders(ledger)
                standing = [row for row in rows if row["status"] in ("open", "pending")]
                return [_detail(row) for row in standing if row["client_order_index"] not in self.unlisted]
            case "orderStatus":
                name = asked["oid"]
                rows = [row for row in self._seen_orders(ledger) if name in (row["order_index"], _cloid(row))]
                return {"status": "order", "order": _status(rows[-1])} if rows else {"status": "unknownOid"}
            case "historicalOrders":
                return [_status(row) for row in self._seen_orders(ledger)][-2000:]
            case "userFills" | "userFillsByTime":
                rows = [self._fill_row(ledger, trade) for trade in self._seen_trades(ledger)]
                start, end = asked.get("startTime", 0), asked.get("endTime", 1 << 60)
                return [row for row in rows if start <= row["time"] <= end][-self.page :]
            case "userFunding":
                return [
                    {
                        "time": row["timestamp"] * 1000, "hash": "0x" + "0" * 64,
                        "delta": {
                            "type": "funding", "coin": self._coin(row["market_id"]), "usdc": row["change"],
                            "fundingRate": row["rate"], "nSamples": None,
                            "szi": ("-" if row["position_side"] == "short" else "") + row["position_size"],
                        },
                    }
                    for row in ledger.fundings
                    if row["timestamp"] * 1000 >= asked["startTime"] and not self.hides_fundings
                ]  # fmt: skip
            case "userFees":
                taker, maker = (str(Decimal(fee) / 1_000_000) for fee in (self.taker_fee, self.maker_fee))
                return {"userCrossRate": taker, "userAddRate": maker}
            case "userRateLimit":
                return {"cumVlm": "0.0", "nRequestsUsed": 0, "nRequestsCap": self.allowance}
            case "extraAgents":
                return self.agents
            case "userAbstraction":
                return self.mode
            case "activeAssetData":
                leverage = self.leverages.get((ledger.index, IDS[asked["coin"]]), {"type": "cross", "value": 20})
                return {"user": asked["user"], "coin": asked["coin"], "leverage": leverage, "maxTradeSzs": ["1", "1"]}
        raise AssertionError(asked)

    def book_row(self, market: FakeMarket) -> dict[str, Any]:
        levels = [
            [{"px": price, "sz": size, "n": 1} for price, size in side.items()] for side in (market.bids, market.asks)
        ]
        return {"coin": market.symbol, "levels": levels, "time": int(self._time().timestamp() * 1000)}

    def _coin(self, market_id: int) -> str:
        return next(each.symbol for each in self.markets.values() if each.market_id == market_id)

    def _account_state(self, ledger: Ledger) -> dict[str, Any]:
        held, collateral = ledger.seen(self.seen_s)
        cost = sum((cost for _, cost in held.values()), Decimal(0))
        money = {
            "accountValue": str(collateral),
            "totalNtlPos": "0.0",
            "totalRawUsd": str(collateral - cost),
            "totalMarginUsed": "0.0",
        }
        rows = [
            {
                "type": "oneWay",
                "position": {
                    "coin": self._coin(market_id), "szi": str(quantity), "entryPx": str(round(cost / quantity, 2)),
                    "leverage": {"type": "cross", "value": 40}, "liquidationPx": None, "marginUsed": "0.0",
                    "maxLeverage": 40, "positionValue": "0.0", "returnOnEquity": "0.0", "unrealizedPnl": "0.0",
                    "cumFunding": {"allTime": "0.0", "sinceOpen": "0.0", "sinceChange": "0.0"},
                },
            }
            for market_id, (quantity, cost) in held.items() if quantity
        ]  # fmt: skip
        if self.positions_shown is not None:
            rows = self.positions_shown
        return {
            "assetPositions": rows, "marginSummary": money, "crossMarginSummary": money,
            "crossMaintenanceMarginUsed": "0.0", "withdrawable": "0.0", "time": int(self._time().timestamp() * 1000),
        }  # fmt: skip

    def _fill_row(self, ledger: Ledger, trade: dict[str, Any]) -> dict[str, Any]:
        is_ask = trade["ask_account_id"] == ledger.index
        maker, ours = is_ask is trade["is_maker_ask"], "ask" if is_ask else "bid"
        fee = Decimal(trade.get("maker_fee" if maker else "taker_fee") or 0) / 1_000_000
        notional = Decimal(trade["size"]) * Decimal(trade["price"])
        kind, client_index = trade["type"], trade[f"{ours}_client_id"]
        row = {
            "coin": self._coin(trade["market_id"]), "px": trade["price"], "sz": trade["size"], "side": "AB"[not is_ask],
            "time": trade["timestamp"], "startPosition": "0.0", "dir": "Open Long", "closedPnl": "0.0",
            "hash": "0x" + "0" * 64, "oid": trade[f"{ours}_id"], "crossed": not maker,
            "fee": str(round(notional * fee, 6)), "tid": trade["trade_id"], "feeToken": "USDC", "twapId": None,
            "cloid": cloid_of(client_index) if trade[f"{ours}_id"] else None,
        }  # fmt: skip
        if kind == "liquidation":
            whose = f"0x{ledger.index:040x}"
            row["liquidation"] = {"liquidatedUser": whose, "markPx": trade["price"], "method": "market"}
        return row | ({"dir": "Settlement"} if kind == "market-settlement" else {})

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        if self.refuses_streams:
            raise web.HTTPForbidden
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets.append(socket)
        async for message in socket:
            self.heard.append(heard := orjson.loads(message.data))
            if heard["method"] == "ping":
                await socket.send_json({"channel": "pong"})
                continue
            await socket.send_json({"channel": "subscriptionResponse", "data": heard})
            wanted = heard["subscription"]
            if heard["method"] == "subscribe" and not self.is_mute:
                await self._tell_market(socket, wanted["type"], self.markets.get(wanted.get("coin", "")))
        return socket

    async def _tell_market(self, socket: web.WebSocketResponse, kind: str, market: FakeMarket | None) -> None:
        if market is not None and kind == "l2Book":
            await socket.send_json({"channel": kind, "data": self.book_row(market)})
        elif market is not None:
            context = {
                "funding": str(Decimal(market.current_rate) / 100), "openInterest": "27353.17", "prevDayPx": "1.0",
                "dayNtlVlm": "1.0", "premium": "0.0", "oraclePx": str(market.index or market.mid), "dayBaseVlm": "1.0",
                "markPx": str(market.mark or market.mid), "midPx": str(market.mid), "impactPxs": ["1.0", "1.0"],
            }  # fmt: skip
            await socket.send_json({"channel": kind, "data": {"coin": market.symbol, "ctx": context}})

    async def move(self, symbol: str, mid: str, *, is_lost: bool = False) -> None:
        """Move a market and tell everybody."""
        market = self.markets[symbol]
        market.place(Decimal(mid))
        for socket in self.sockets if not is_lost else ():
            for kind in ("l2Book", "activeAssetCtx"):
                await self._tell_market(socket, kind, market)


def _cloid(row: dict[str, Any]) -> str | None:
    return cloid_of(row["client_order_index"]) if row["client_order_index"] else None


def _detail(row: dict[str, Any]) -> dict[str, Any]:
    """Return an order's row from that of the other fake."""
    is_trigger = row["type"] in ("stop-loss", "take-profit")
    kinds = {"stop-loss": "Stop Market", "take-profit": "Take Profit Market", "market": "Market"}
    return {
        "coin": row["market_symbol"], "side": "A" if row["is_ask"] else "B", "limitPx": row["price"],
        "sz": row["remaining_base_amount"], "oid": row["order_index"], "timestamp": row["created_at"],
        "triggerCondition": "N/A", "isTrigger": is_trigger, "triggerPx": row["trigger_price"], "children": [],
        "isPositionTpsl": False, "reduceOnly": row["reduce_only"], "orderType": kinds.get(row["type"], "Limit"),
        "origSz": row["initial_base_amount"], "tif": None if is_trigger else "Gtc", "cloid": _cloid(row),
    }  # fmt: skip


def _status(row: dict[str, Any]) -> dict[str, Any]:
    status = _STATUSES.get(row["status"], row["status"])
    return {"order": _detail(row), "status": status, "statusTimestamp": row["updated_at"]}


def _done(kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"status": "ok", "response": {"type": kind, **({"data": data} if data else {})}}


def _failed(text: str) -> dict[str, Any]:
    return {"status": "err", "response": text}
