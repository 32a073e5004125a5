"""The trading side of the fake venue: accepts the unmodified SDK's transactions, executes them, and fails on demand.

It also keeps the accounts' money: trades with fees, funding, liquidations, manual trades, and triggers and limit orders
that market moves reach.

A transaction is executed once, if its nonce is the account's next one; a client order id identifies one order. This
much the venue guarantees; everything else may go wrong: answers are lost before or after execution, delayed, or
nonsensical.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from email.utils import format_datetime
from functools import partial
from hashlib import sha256
from random import Random
from typing import Any, Final

import orjson
from aiohttp import hdrs, web
from support.fake_venue import FakeMarket, FakeVenue
from support.waiting import turns

ACCOUNT: Final = 7
KEY_INDEX: Final = 2
CREATE, CANCEL, GROUP = 14, 15, 28
FAILED, PENDING, EXECUTED = range(3)

SEND_FAULTS: Final = ("lose_before", "lose_after", "500_before", "500_after", "late", "nonsense", "busy", "maintenance")
"""Faults of a transaction: its answer is lost before or after it is executed; it is executed late; …"""

GONE_AFTER: Final = "gone_after"
"""The fault of a transaction that is executed and whose answer is lost, with every later read."""

_EXECUTED: Final = ("ok", "lose_after", GONE_AFTER, "500_after", "nonsense")
_CUT: Final = ("lose_before", "lose_after", GONE_AFTER, "late")
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
    """An order at the fake venue, with amounts in base and quote units."""

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
    price: Decimal = Decimal(0)
    reduce_only: bool = False
    account: int = ACCOUNT
    parent: int = 0
    """The venue's index of the order whose fills activate this one; until then its quantity is 0."""

    def shown(self) -> dict[str, Any]:
        return {
            "order_index": self.index, "client_order_index": self.client_index, "order_id": str(self.index),
            "market_index": self.market_id, "owner_account_index": self.account, "is_ask": self.is_ask,
            "initial_base_amount": str(self.quantity), "remaining_base_amount": str(self.quantity - self.filled),
            "filled_base_amount": str(self.filled), "filled_quote_amount": str(self.notional), "status": self.status,
            "type": self.type, "trigger_price": str(self.trigger), "parent_order_index": self.parent,
        }  # fmt: skip


@dataclass
class Ledger:
    """The fake venue's ledger of one account. `deposit` is the amount paid in; the rest follows from the trades."""

    index: int
    deposit: Decimal = Decimal("10000.25")
    next_nonce: int = 40
    orders: dict[int, Standing] = field(default_factory=dict)
    trades: list[dict[str, Any]] = field(default_factory=list)
    fundings: list[dict[str, Any]] = field(default_factory=list)
    transactions: list[dict[str, Any]] = field(default_factory=list)
    """The transactions that the sequencer has taken, executed or refused."""

    held: dict[int, tuple[Decimal, Decimal]] = field(default_factory=dict)
    """By market: the signed quantity, and its total cost."""

    gained: Decimal = Decimal(0)
    """Realized gains and funding, less fees."""

    @property
    def collateral(self) -> Decimal:
        return self.deposit + self.gained

    def positions(self) -> dict[int, Decimal]:
        return {market_id: quantity for market_id, (quantity, _) in self.held.items() if quantity}

    def standing(self, market_id: int) -> list[Standing]:
        return [
            order
            for order in self.orders.values()
            if order.market_id == market_id and order.status in ("open", "pending")
        ]

    def take(self, market_id: int, quantity: Decimal, price: Decimal) -> None:
        """Change a position by a signed quantity: closing realizes the difference to the average entry."""
        held, cost = self.held.get(market_id, (Decimal(0), Decimal(0)))
        if held and (held > 0) is not (quantity > 0):
            closed = min(abs(held), abs(quantity)) * (1 if held > 0 else -1)
            released = cost * closed / held
            self.gained += closed * price - released
            held, cost, quantity = held - closed, cost - released, quantity + closed
        self.held[market_id] = (held + quantity, cost + quantity * price)


class FakeExchange(FakeVenue):
    """A fake venue that also trades, with one key for all accounts. `orders` and the like belong to `ACCOUNT`."""

    def __init__(self, now: Callable[[], datetime] | None = None) -> None:
        super().__init__()
        self._now = partial(datetime.now, UTC) if now is None else now
        self.ahead = timedelta(0)
        """How far its clock is ahead of the clock of the service."""

        self.ledgers: defaultdict[int, Ledger] = defaultdict(lambda: Ledger(-1))
        self.ledgers[ACCOUNT] = Ledger(ACCOUNT)
        self.rejected: set[int] = set()
        self.send_faults: list[str] = []
        """The faults of the next transactions, one each; `ok` for none."""

        self.read_faults: list[str] = []
        self.late: list[tuple[int, dict[str, Any]]] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.fill_share = Decimal(1)
        self.refusal: tuple[int, str] | None = None
        self.refused_types: set[int] = set()
        """Kinds of orders that are refused; 2 and 4 are triggers."""

        self.positions_shown: list[dict[str, Any]] | None = None
        self.is_down = False
        self.taker_fee, self.maker_fee = 280, 40
        self.hides_trades = 0
        """How many of the questions for trades to come are answered without the latest trade: it shows late."""

        self.hides_trades_of: set[int] = set()
        """The venue's indexes of orders whose trades are not shown."""

        self.doubles_trades = False
        self.stale_nonces = 0
        """How many of the questions for the next nonce to come are answered with one that is used up."""

        self.hidden: set[int] = set()
        """The client indexes of hidden orders, which are open and get filled nevertheless."""

        self.refuses_idle_ends = False
        """Whether it refuses to cancel an order that is not open, instead of using up the nonce for nothing."""

        self.hides_fundings = False
        """Whether payments are made and not shown yet."""

        self.hashes: dict[str, str] = {}
        """The hashes of signed texts, where they are not `hash_of` the text."""

        self.failing: set[str] = set()
        """The last parts of the paths of queries that fail."""

        self.average_places = 6
        self.trading_mode = 0
        self.odd_answers: list[tuple[int, str, bool]] = []
        """Answers to the next transactions: status, text, and whether they are executed nevertheless."""

        self.sequencer_refuses: set[int] = set()
        """The client indexes of orders that the venue accepts and the sequencer then refuses."""

        self._trade_id = 7000

    @property
    def ledger(self) -> Ledger:
        return self.ledgers[ACCOUNT]

    @property
    def orders(self) -> dict[int, Standing]:
        return self.ledger.orders

    @property
    def next_nonce(self) -> int:
        return self.ledger.next_nonce

    def open(self, index: int, deposit: str = "10000.25") -> Ledger:
        """Open another account."""
        self.ledgers[index] = Ledger(index, Decimal(deposit))
        return self.ledgers[index]

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            *super().routes(),
            web.post("/api/v1/sendTx", self._send),
            web.get("/api/v1/nextNonce", self._nonce),
            web.get("/api/v1/accountOrders", self._orders),
            web.get("/api/v1/accountActiveOrders", self._active_orders),
            web.get("/api/v1/account", self._account),
            web.get("/api/v1/accountLimits", self._limits),
            web.get("/api/v1/trades", self._trades),
            web.get("/api/v1/tx", self._transaction),
            web.get("/api/v1/accountTxs", self._transactions),
            web.get("/api/v1/positionFunding", self._position_fundings),
        )

    def positions(self) -> dict[int, Decimal]:
        """The sum of all trades, by market."""
        return self.ledger.positions()

    def deliver(self) -> None:
        """Execute the pending transactions that are still executable."""
        late, self.late = self.late, []
        for kind, transaction in late:
            self._execute(kind, transaction)

    def use_nonce(self) -> None:
        """Another sender uses the key of `ACCOUNT`."""
        self._take(self.ledger, CANCEL, {"Nonce": self.next_nonce, "hash": f"another's {self.next_nonce}"}, EXECUTED)

    def fault_at_random(self, random: Random, share: float) -> None:
        """Plan faults for the next transactions and queries."""
        self.send_faults = [random.choice(SEND_FAULTS) if random.random() < share else "ok" for _ in range(40)]
        self.read_faults = [random.choice(READ_FAULTS) if random.random() < share / 2 else "ok" for _ in range(400)]

    # Spontaneous events at a venue

    def reach(self, symbol: str, mid: str) -> None:
        """Move a market and execute the orders it reaches: limit orders at their limit, triggers at the new price."""
        market = self.markets[symbol]
        market.place(Decimal(mid))
        for ledger in self.ledgers.values():
            for order in ledger.standing(market.market_id):
                self._reach(ledger, order, market)

    def trade_by_hand(self, symbol: str, quantity: str, *, index: int = ACCOUNT) -> None:
        """A person trades the account at the venue."""
        self._trade(self.ledgers[index], self.markets[symbol], Decimal(quantity), None, client_index=99)

    def liquidate(self, symbol: str, quantity: str, *, index: int = ACCOUNT, kind: str = "liquidation") -> None:
        """The venue takes a position away."""
        market, ledger = self.markets[symbol], self.ledgers[index]
        self._trade(ledger, market, Decimal(quantity), None, client_index=0, kind=kind)

    def pay_funding(self, symbol: str, hour: datetime, rate: str, *, index: int = ACCOUNT) -> None:
        """Pay funding at the mark; longs pay a positive rate."""
        market, ledger = self.markets[symbol], self.ledgers[index]
        quantity = ledger.positions().get(market.market_id, Decimal(0))
        if not quantity:
            return
        change = -quantity * market.mid * Decimal(rate)
        ledger.gained += change
        ledger.fundings.append({
            "timestamp": int(hour.timestamp()), "market_id": market.market_id, "funding_id": len(ledger.fundings),
            "change": str(change), "discount": "0", "rate": rate, "position_size": str(abs(quantity)),
            "position_side": "long" if quantity > 0 else "short",
        })  # fmt: skip

    def _reach(self, ledger: Ledger, order: Standing, market: FakeMarket) -> None:
        """Fill an order that the market has reached."""
        sign = -1 if order.is_ask else 1
        if order.status == "open":
            if sign * (order.price - market.mid) >= 0:
                self._fill(ledger, order, market, order.price, maker=True)
            return
        is_stop = order.type == "stop-loss"
        fires = sign * (market.mid - order.trigger) >= 0 if is_stop else sign * (order.trigger - market.mid) >= 0
        if fires:
            self._fill(ledger, order, market, market.mid, maker=False)
            if order.status == "pending":
                order.status = "canceled-too-much-slippage"

    def _fill(self, ledger: Ledger, order: Standing, market: FakeMarket, price: Decimal, *, maker: bool) -> None:
        """Fill a share of the remaining quantity, in two trades if it can be split."""
        sign, step = (-1 if order.is_ask else 1), Decimal(1).scaleb(-market.size_decimals)
        wanted = order.quantity - order.filled
        if order.reduce_only:
            held = ledger.positions().get(market.market_id, Decimal(0))
            wanted = min(wanted, max(Decimal(0), -sign * held))
            if not wanted:
                order.status = "canceled-reduce-only"
                return
        amount = (wanted * self.fill_share / step).to_integral_value() * step
        first = (amount / 2 / step).to_integral_value() * step
        for part in filter(None, (first, amount - first)):
            self._trade(ledger, market, sign * part, price, order=order, maker=maker)
            order.filled += part
            order.notional += part * price
        if order.filled == order.quantity or (order.reduce_only and amount == wanted):
            order.status = "filled"
        for child in [child for child in ledger.orders.values() if child.parent == order.index and order.filled]:
            child.quantity = order.filled
            child.status = "pending" if child.status == "in-progress" else child.status
        for sibling in ledger.orders.values():
            if order.parent and sibling.parent == order.parent and sibling.status == "pending" and order.filled:
                sibling.status = "canceled-oco"

    def _trade(
        self, ledger: Ledger, market: FakeMarket, quantity: Decimal, price: Decimal | None, *,
        order: Standing | None = None, client_index: int = 0, kind: str = "trade", maker: bool = False,
    ) -> None:  # fmt: skip
        price = market.mid if price is None else price
        fee = self.maker_fee if maker else self.taker_fee
        ledger.take(market.market_id, quantity, price)
        ledger.gained -= abs(quantity) * price * fee / 1_000_000
        self._trade_id += 3
        is_ask, ours = quantity < 0, order.client_index if order is not None else client_index
        side, other = ("ask", "bid") if is_ask else ("bid", "ask")
        ledger.trades.append({
            "trade_id": self._trade_id, "type": kind, "market_id": market.market_id, "size": str(abs(quantity)),
            "price": str(price), f"{side}_account_id": ledger.index, f"{other}_account_id": 1,
            f"{side}_client_id": ours, f"{other}_client_id": 5, "is_maker_ask": is_ask is maker,
            "timestamp": int(self._time().timestamp() * 1000), f"{side}_id": 0 if order is None else order.index,
            f"{other}_id": 6, **({"maker_fee" if maker else "taker_fee": fee} if fee else {}),
        })  # fmt: skip

    # Transactions

    def _time(self) -> datetime:
        return self._now() + self.ahead

    async def _state_date(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers[hdrs.DATE] = format_datetime(self._time(), usegmt=True)

    async def _send(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        kind, text = int(str(form["tx_type"])), str(form["tx_info"])
        transaction = orjson.loads(text)
        transaction["hash"] = self.hashes.get(text) or hash_of(text)
        self.sent.append((kind, transaction))
        if self.is_down:
            return web.Response(status=503, text="maintenance")
        if self.odd_answers:
            status, text, is_executed = self.odd_answers.pop(0)
            if is_executed:
                self._execute(kind, transaction)
            return web.Response(status=status, text=text, content_type="application/json")
        fault = self.send_faults.pop(0) if self.send_faults else "ok"
        if fault == "late":
            self.late.append((kind, transaction))
        refusal = self._execute(kind, transaction) if fault in _EXECUTED else None
        if fault == GONE_AFTER:
            self.read_faults = ["500"] * 100_000
        if fault in _CUT:
            return await _cut(request)
        if fault in _ANSWERS:
            status, text = _ANSWERS[fault]
            return web.Response(status=status, text=text, content_type="application/json")
        if refusal is not None:
            code, message = refusal
            return web.json_response({"code": code, "message": message}, status=400)
        body = {
            "code": 200, "message": '{"ratelimit": "didn\'t use volume quota"}', "tx_hash": transaction["hash"],
            "predicted_execution_time_ms": 350, "volume_quota_remaining": 10,
        }  # fmt: skip
        return web.json_response(body)

    def _execute(self, kind: int, transaction: dict[str, Any]) -> tuple[int, str] | None:
        """Execute a transaction. Return the venue's code and message if it is refused, which does not use its nonce."""
        assert transaction["AccountIndex"] in self.ledgers
        assert transaction["ApiKeyIndex"] == KEY_INDEX
        ledger = self.ledgers[transaction["AccountIndex"]]
        if transaction["Nonce"] != ledger.next_nonce:
            return 21104, "invalid nonce"
        created = {CREATE: [transaction], GROUP: transaction.get("Orders", [])}.get(kind, [])
        if any(order["ClientOrderIndex"] in ledger.orders for order in created):
            return 21728, "client order index already exists"
        if created and (self.refusal is not None or any(order["Type"] in self.refused_types for order in created)):
            return self.refusal or (21735, "invalid trigger price")
        standing = [order for order in ledger.orders.values() if order.status in ("open", "pending")]
        names = {name for order in standing for name in (order.index, order.client_index)}
        if kind == CANCEL and self.refuses_idle_ends and transaction["Index"] not in names:
            return 21715, "inactive order"
        is_refused = any(order["ClientOrderIndex"] in self.sequencer_refuses for order in created)
        self._take(ledger, kind, transaction, FAILED if is_refused else EXECUTED)
        if created and not is_refused:
            parent, *children = [self._create(ledger, order) for order in created]
            for child in children:
                child.parent, child.quantity, child.status = parent.index, parent.filled, "in-progress"
                if parent.status != "open":
                    child.status = "pending" if parent.filled else "canceled-child"
        elif kind == CANCEL:
            order = ledger.orders.get(transaction["Index"]) or _by_index(ledger, transaction["Index"])
            if order is not None and order.status in ("open", "pending", "in-progress"):
                order.status = "canceled"
                for child in ledger.orders.values():
                    if child.parent == order.index and child.status == "in-progress":
                        child.status = "canceled-child"
        return None

    def _take(self, ledger: Ledger, kind: int, transaction: dict[str, Any], status: int) -> None:
        ledger.next_nonce += 1
        ledger.transactions.append({
            "code": 200, "hash": transaction["hash"], "type": kind, "status": status, "nonce": transaction["Nonce"],
            "account_index": ledger.index, "api_key_index": KEY_INDEX, "event_info": "{}",
            "executed_at": int(self._time().timestamp() * 1000), "info": orjson.dumps(transaction).decode(),
        })  # fmt: skip

    def _create(self, ledger: Ledger, transaction: dict[str, Any]) -> Standing:
        market = next(known for known in self.markets.values() if known.market_id == transaction["MarketIndex"])
        quantity = Decimal(transaction["BaseAmount"]).scaleb(-market.size_decimals)
        client_index = transaction["ClientOrderIndex"]
        index = 281474976710656 + len(ledger.orders)
        order = Standing(index, client_index, market.market_id, bool(transaction["IsAsk"]), quantity)
        order.account, order.reduce_only = ledger.index, bool(transaction["ReduceOnly"])
        order.price = Decimal(transaction["Price"]).scaleb(-market.price_decimals)
        ledger.orders[client_index] = order
        if client_index in self.rejected:
            order.status = "canceled-margin-not-allowed"
        elif transaction["Type"] == 0:
            if (-1 if order.is_ask else 1) * (order.price - market.mid) >= 0:
                self._fill(ledger, order, market, market.mid, maker=False)
        elif transaction["Type"] == 1:
            self._fill(ledger, order, market, market.mid, maker=False)
            if order.status == "open":
                order.status = "canceled-too-much-slippage"
        elif transaction["Type"] in (2, 4):
            order.status, order.type = "pending", {2: "stop-loss", 4: "take-profit"}[transaction["Type"]]
            order.trigger = Decimal(transaction["TriggerPrice"]).scaleb(-market.price_decimals)
            if quantity:
                self._reach(ledger, order, market)
        return order

    # Queries

    def _asked_of(self, request: web.Request, *, private: bool = True) -> Ledger:
        index = request.query["account_index"]
        if private:
            assert request.headers["Authorization"].split(":")[1:3] == [index, str(KEY_INDEX)]
        return self.ledgers[int(index)]

    async def _nonce(self, request: web.Request) -> web.StreamResponse:
        nonce = self._asked_of(request, private=False).next_nonce
        if self.stale_nonces:
            self.stale_nonces -= 1
            nonce -= 1
        return await self._tell_of(request, {"nonce": nonce})

    async def _orders(self, request: web.Request) -> web.StreamResponse:
        orders = self._asked_of(request).orders
        asked = [int(text) for text in request.query["client_order_indexes"].split(",")]
        assert len(asked) <= 20
        shown = [orders[index].shown() for index in asked if index in orders and index not in self.hidden]
        return await self._tell_of(request, {"orders": shown or None})

    async def _active_orders(self, request: web.Request) -> web.StreamResponse:
        market_ids = [int(text) for text in request.query.getall("market_id", [])] or [
            market.market_id for market in self.markets.values()
        ]
        ledger = self._asked_of(request)
        standing = [order for market_id in market_ids for order in ledger.standing(market_id)]
        shown = [order.shown() for order in standing if order.client_index not in self.hidden]
        return await self._tell_of(request, {"orders": shown or None})

    async def _transaction(self, request: web.Request) -> web.StreamResponse:
        assert request.query["by"] == "hash"
        wanted = [
            row for each in self.ledgers.values() for row in each.transactions if row["hash"] == request.query["value"]
        ]
        if not wanted:
            return await self._tell_of(request, {"code": 21500, "message": "transaction not found"}, status=400)
        return await self._tell_of(request, wanted[0])

    async def _transactions(self, request: web.Request) -> web.StreamResponse:
        assert request.query["by"] == "account_index"
        newest = self.ledgers[int(request.query["value"])].transactions[::-1]
        return await self._tell_of(request, {"txs": newest[: int(request.query["limit"])]})

    async def _account(self, request: web.Request) -> web.StreamResponse:
        ledger = self.ledgers[int(request.query["value"])]
        shown = self.positions_shown
        if shown is None:
            shown = [
                {
                    "market_id": market_id,
                    "sign": 1 if quantity > 0 else -1,
                    "position": str(abs(quantity)),
                    "avg_entry_price": f"{cost / quantity:.{self.average_places}f}",
                }
                for market_id, (quantity, cost) in ledger.held.items()
                if quantity
            ]
        collateral = f"{ledger.collateral:.6f}"
        account = {
            "index": ledger.index, "account_trading_mode": self.trading_mode, "collateral": collateral,
            "positions": shown,
        }  # fmt: skip
        return await self._tell_of(request, {"accounts": [account]})

    async def _limits(self, request: web.Request) -> web.StreamResponse:
        self._asked_of(request)
        fees = {"current_maker_fee_tick": self.maker_fee, "current_taker_fee_tick": self.taker_fee}
        return await self._tell_of(request, {"user_tier": "premium", **fees})

    async def _trades(self, request: web.Request) -> web.StreamResponse:
        """Newest first, `limit` at a time."""
        trades = self._asked_of(request).trades
        if (index := request.query.get("order_index")) is not None:
            trades = [trade for trade in trades if int(index) in (trade["ask_id"], trade["bid_id"])]
        trades = [trade for trade in trades if self.hides_trades_of.isdisjoint((trade["ask_id"], trade["bid_id"]))]
        if self.hides_trades:
            self.hides_trades -= 1
            trades = trades[:-1]
        newest = sorted(trades, key=lambda entry: entry["trade_id"], reverse=True)
        if self.doubles_trades:
            newest = [copy for trade in newest for copy in (trade, trade)]
        return await self._tell_of(request, _page(request, "trades", newest))

    async def _position_fundings(self, request: web.Request) -> web.StreamResponse:
        ledger, since = self._asked_of(request), int(request.query["start_timestamp"])
        newest = [
            funding
            for funding in reversed(ledger.fundings)
            if funding["timestamp"] >= since and not self.hides_fundings
        ]
        return await self._tell_of(request, _page(request, "position_fundings", newest))

    async def _tell_of(self, request: web.Request, body: dict[str, Any], *, status: int = 200) -> web.StreamResponse:
        if self.is_down or request.path.rpartition("/")[2] in self.failing:
            return web.Response(status=503, text="maintenance")
        match self.read_faults.pop(0) if self.read_faults else "ok":
            case "500":
                return web.Response(status=500, text="internal")
            case "429":
                return web.Response(status=429)
            case "cut":
                return await _cut(request)
            case "nonsense":
                return web.Response(text="<html>", content_type="application/json")
        return web.json_response({"code": 200, **body}, status=status)


def hash_of(text: str) -> str:
    """Return the hash by which the fake venue knows a transaction that `PlainSigner` signs."""
    return sha256(text.encode()).hexdigest()


def _by_index(ledger: Ledger, index: int) -> Standing | None:
    return next((order for order in ledger.orders.values() if order.index == index), None)


def _page(request: web.Request, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    start, limit = int(request.query.get("cursor", "0")), int(request.query["limit"])
    assert 1 <= limit <= 100
    more = {"next_cursor": str(start + limit)} if start + limit < len(rows) else {}
    return {name: rows[start : start + limit] or None, **more}


async def _cut(request: web.Request) -> web.StreamResponse:
    """Cut the connection instead of answering."""
    assert request.transport is not None
    request.transport.abort()
    await turns(1)  # closes the connection
    return web.Response()
