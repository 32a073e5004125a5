"""The trading side of the fake venue: accepts the unmodified SDK's transactions, executes them, and is hostile.

It also keeps the accounts' money: trades with fees, funding, liquidations, manual trades, and triggers and limit orders
that market moves reach. Its knobs are attributes; their defaults are as unfriendly as the venue may be.

Documented: answer 200 means accepted only, and the sequencer may refuse later, which uses the nonce up; a refusal of
the interface does not. States of transactions, codes, the bounds of prices (`has_bands`), at most 20 ids per read,
ended orders found by id for 24 hours, weights and requests a minute and standing orders by tier (`tier`), the quota of
transactions, 40 transactions of a type a minute (`is_limited`), a liquidation that first cancels all orders, groups
of an entry with stop and target, scheduled cancel-alls, nonce 0 for an unknown account, worst prices of stops.

Seen in recordings and SDKs: the fields of every row, average entries with the decimals of prices, fees in millionths,
`ae` in the event of a transaction, an executed order's row in it, the channels of accounts.

Invented, because nothing says otherwise: how long until something is shown (`lag_s`, by kind of row, and
`event_lag_s` for what the venue does itself), when `nextNonce` counts (`nonce_lag_s`), that an id may be used again
once its order has ended (`reuses_ids`), that a reduce-only order with nothing to reduce leaves no order
(`drops_reduce_only`), whether interface or sequencer finds the margin missing (`random`), that groups keep the ids of
children (`keeps_child_ids`), and every fault of the network (`send_faults`, `read_faults`, `frame_faults`).

Visibility and limits follow a time in which each request takes `request_s`, so that no test waits for a lag.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from email.utils import format_datetime
from functools import partial
from random import Random
from typing import Any, Final

import orjson
from aiohttp import hdrs, web
from support.fake_ledger import (
    ACCOUNT,
    FIRST_INDEX,
    KEY_INDEX,
    TIMES_IN_FORCE,
    TYPES,
    Ledger,
    Standing,
    Transaction,
    account_row,
    hash_of,
    position_rows,
    trade_row,
)
from support.fake_streams import AccountStreams
from support.fake_venue import FakeMarket
from support.waiting import turns

CREATE, CANCEL, CANCEL_ALL, GROUP = 14, 15, 16, 28
AT_ONCE: Final = (0.0, 0.0)
"""No lag."""

SEND_FAULTS: Final = ("lose_before", "lose_after", "500_before", "500_after", "late", "nonsense", "busy", "maintenance")
"""Faults of a transaction: its answer is lost before or after it is executed; it is executed late; …"""

GONE_AFTER: Final = "gone_after"
"""The fault of a transaction that is executed and whose answer is lost, with every later read."""

_EXECUTED: Final = ("ok", "lose_after", GONE_AFTER, "500_after", "nonsense", "408_after", "29500_after")
_CUT: Final = ("lose_before", "lose_after", GONE_AFTER, "late")
_ANSWERS: Final = {
    "500_before": (500, "internal"),
    "500_after": (502, "<html>Bad Gateway</html>"),
    "408_after": (408, "request timeout"),
    "29500_after": (400, '{"code":29500,"message":"internal server error"}'),
    "nonsense": (200, '{"surprise":true}'),
    "busy": (429, '{"code":23000,"message":"Too Many Requests!"}'),
    "maintenance": (503, "maintenance"),
}

READ_FAULTS: Final = ("500", "cut", "nonsense", "429")
IDS_MAX: Final = 20
FOUND_FOR: Final = timedelta(hours=24)
_WEIGHTS: Final = {
    "sendTx": 6, "nextNonce": 6, "apikeys": 150, "accountOrders": 100, "accountActiveOrders": 100, "trades": 200,
}  # fmt: skip
_TIERS: Final = {"standard": (250, 30, 50, 10), "premium": (1500, 1000, 500, 16)}
"""Standing orders per account and market, and untriggered ones of them."""

_PER_TYPE: Final = 40
_WEIGHT_MAX: Final = 24_000
_REQUESTS_MAX: Final = 60
_BAND: Final = Decimal("0.05")
_MINUTE_S: Final = 60.0

Refusal = tuple[int, str]


class FakeExchange(AccountStreams):
    """A fake venue that also trades, with one key for all accounts. `orders` and the like belong to `ACCOUNT`."""

    def __init__(self, now: Callable[[], datetime] | None = None) -> None:
        super().__init__()
        self._now = partial(datetime.now, UTC) if now is None else now
        self.ahead = timedelta(0)
        """How far its clock is ahead of the clock of the service."""

        self.random = Random(0)
        self.lag_s = (0.0, 10.0)
        """The least and the longest time until what a transaction did is shown, drawn for each kind of row."""

        self.event_lag_s = (0.0, 10.0)
        """The same for fills of standing orders, liquidations, manual trades and funding."""

        self.nonce_lag_s = (0.0, 0.0)
        """The same for `nextNonce`, which counts an accepted transaction at once by default."""

        self.request_s = 1.0
        """How long a request takes in the time of lags and limits. Requests of a real client take 0.1 s or less."""

        self.is_limited = True
        self.limited = 0
        """How many requests and transactions it refused for a limit."""

        self.tier = "premium"
        self.has_bands = True
        self.needs_margin = True
        self.margin_fraction = Decimal("0.05")
        self.reuses_ids = True
        self.drops_reduce_only = True
        self.keeps_child_ids = True
        self.sequencer_refusals = 0
        """How many of the orders to come are accepted, and then refused by the sequencer."""

        self.sequencer_refuses: set[int] = set()
        """Our indexes of orders that are."""

        self.ledgers: defaultdict[int, Ledger] = defaultdict(lambda: Ledger(-1))
        self.ledgers[ACCOUNT] = Ledger(ACCOUNT)
        self.rejected: set[int] = set()
        self.send_faults: list[str] = []
        """The faults of the next transactions, one each; `ok` for none."""

        self.read_faults: list[str] = []
        self.late: list[tuple[int, dict[str, Any]]] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.hashes: dict[str, str] = {}
        """The hash by text of transactions that the venue's SDK signed, whose hash cannot be computed here."""

        self.failing: set[str] = set()
        """The last parts of the paths of queries that fail."""

        self.odd_answers: list[tuple[int, str, bool]] = []
        """Answers to the next transactions: status, text, and whether they are executed nevertheless."""

        self.fill_share = Decimal(1)
        self.refusal: Refusal | None = None
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

        self.unlisted: set[int] = set()
        """The client indexes of orders that the lists of standing orders lack; by their ids they are found."""

        self.refuses_idle_ends = False
        """Whether it refuses to cancel an order that is not open, instead of using up the nonce for nothing."""

        self.hides_fundings = False
        """Whether payments are made and not shown yet."""

        self.bared: list[Standing] = []
        """The stops whose cancellation left a part of a position without one."""

        self._trade_id = 7000
        self._order_count = 0
        self._sequence = 0
        self._spent_s = 0.0
        self._requests: deque[tuple[float, int]] = deque()
        self._kinds: defaultdict[int, deque[float]] = defaultdict(deque)
        self._is_changing = False

    stops_parts = True
    """Whether a group is accepted or refused as a whole, and its stop covers partial fills of its order."""

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

    def excuse(self, *knobs: str) -> None:
        """Turn knobs off: the lags to nothing, the others to False."""
        for knob in knobs:
            setattr(self, knob, AT_ONCE if knob.endswith("_s") else False)

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            *super().routes(),
            web.post("/api/v1/sendTx", self._send),
            web.get("/api/v1/nextNonce", self._nonce),
            web.get("/api/v1/apikeys", self._keys),
            web.get("/api/v1/tx", self._transaction),
            web.get("/api/v1/accountTxs", self._transactions),
            web.get("/api/v1/accountOrders", self._orders),
            web.get("/api/v1/accountActiveOrders", self._active_orders),
            web.get("/api/v1/accountInactiveOrders", self._inactive_orders),
            web.get("/api/v1/account", self._account),
            web.get("/api/v1/accountLimits", self._limits),
            web.get("/api/v1/trades", self._trades),
            web.get("/api/v1/positionFunding", self._position_fundings),
        )

    def positions(self) -> dict[int, Decimal]:
        """The sum of all trades, by market."""
        return self.ledger.positions()

    def deliver(self) -> None:
        """Execute the pending transactions that are still executable."""
        late, self.late = self.late, []
        for kind, transaction in late:
            self._execute(kind, transaction, orjson.dumps(transaction).decode())

    def use_nonce(self) -> None:
        """Another sender uses the key of `ACCOUNT`."""
        whose = {"AccountIndex": ACCOUNT, "ApiKeyIndex": KEY_INDEX, "Nonce": self.next_nonce}
        self._accept(self.ledger, CANCEL, {**whose, "Index": 0}, f"another's {self.next_nonce}", None)

    def fault_at_random(self, random: Random, share: float) -> None:
        """Plan faults for the next transactions and queries."""
        self.send_faults = [random.choice(SEND_FAULTS) if random.random() < share else "ok" for _ in range(40)]
        self.read_faults = [random.choice(READ_FAULTS) if random.random() < share / 2 else "ok" for _ in range(400)]

    @property
    def seen_s(self) -> float:
        """The time of lags and limits, in seconds since the epoch."""
        return self._now().timestamp() + self._spent_s

    @property
    def shows_late(self) -> bool:
        """Whether its answers do not include everything that has happened yet."""
        return any(ledger.shows_late(self.seen_s) for ledger in self.ledgers.values())

    # Spontaneous events at a venue

    def reach(self, symbol: str, mid: str) -> None:
        """Move a market and execute the orders it reaches: limit orders at their limit, triggers at the new price."""
        market = self.markets[symbol]
        market.place(Decimal(mid))
        for ledger in list(self.ledgers.values()):
            with self._changing(ledger, self.event_lag_s):
                for order in ledger.standing(market.market_id):
                    if order.is_active:
                        self._reach(ledger, order, market)

    def restart(self) -> None:
        """Number trades from a lower number on, as after a restart."""
        self._trade_id = 1

    def give_again(self, client_index: int) -> None:
        """Another program rests an order far away under an id of ours, whose order has ended."""
        ended = self.orders[client_index]
        assert ended.is_final
        self._order_count += 1
        index, price = FIRST_INDEX - 1 + self._order_count, ended.price / 2
        self.ledger.orders[client_index] = replace(
            ended, index=index, price=price, status="open", filled=Decimal(0), children=[], earlier=[]
        )

    def trade_by_hand(self, symbol: str, quantity: str, *, index: int = ACCOUNT) -> None:
        """A person trades the account at the venue."""
        ledger = self.ledgers[index]
        with self._changing(ledger, self.event_lag_s):
            self._trade(ledger, self.markets[symbol], Decimal(quantity), None, client_index=99)

    def liquidate(self, symbol: str, quantity: str, *, index: int = ACCOUNT, kind: str = "liquidation") -> None:
        """The venue cancels all orders, and takes a position or a part of it away."""
        market, ledger = self.markets[symbol], self.ledgers[index]
        with self._changing(ledger, self.event_lag_s):
            self._cancel_all(ledger, "canceled-liquidation")
            self._trade(ledger, market, Decimal(quantity), None, client_index=0, kind=kind)

    def pay_funding(self, symbol: str, hour: datetime, rate: str, *, index: int = ACCOUNT) -> None:
        """Pay funding at the mark; longs pay a positive rate."""
        market, ledger = self.markets[symbol], self.ledgers[index]
        quantity = ledger.positions().get(market.market_id, Decimal(0))
        if not quantity:
            return
        change = -quantity * market.mid * Decimal(rate)
        with self._changing(ledger, self.event_lag_s):
            ledger.gained += change
        ledger.fundings.append({
            "timestamp": int(hour.timestamp()), "market_id": market.market_id, "funding_id": len(ledger.fundings),
            "change": str(change), "discount": "0", "rate": rate, "position_size": str(abs(quantity)),
            "position_side": "long" if quantity > 0 else "short",
        })  # fmt: skip

    @contextmanager
    def _changing(self, ledger: Ledger, lag_s: tuple[float, float]) -> Iterator[None]:
        """Show what the block changes later: orders, trades and the account each after a time of its own."""
        if self._is_changing:
            yield
            return
        before = {id(order): order.shown() for order in ledger.orders.values() if not order.is_final}
        known, trades = {id(order) for order in ledger.orders.values()}, len(ledger.trades)
        account = dict(ledger.held), ledger.gained
        self._is_changing = True
        try:
            yield
        finally:
            self._is_changing = False
        now, now_ms = self.seen_s, self._now_ms()
        until, traded, settled = (now + self.random.uniform(*lag_s) for _ in range(3))
        changed = [
            order
            for order in ledger.orders.values()
            if (id(order) in before or id(order) not in known) and order.shown() != before.get(id(order))
        ]
        for order in changed:
            order.changed_ms = now_ms
            order.earlier.append((max([until, *(end for end, _ in order.earlier)]), before.get(id(order))))
        for trade in ledger.trades[trades:]:
            ledger.late_trades[trade["trade_id"]] = traded
        if (ledger.held, ledger.gained) != account:
            ledger.earlier.append((max([settled, *(end for end, _, _ in ledger.earlier)]), *account))
        self.tell_changes(ledger, changed, ledger.trades[trades:])

    def _reach(self, ledger: Ledger, order: Standing, market: FakeMarket) -> None:
        sign = order.sign
        if order.status == "open":
            if sign * (order.price - market.mid) >= 0:
                self._fill(ledger, order, market, order.price, maker=True)
            return
        is_stop = order.type == "stop-loss"
        fires = sign * (market.mid - order.trigger) >= 0 if is_stop else sign * (order.trigger - market.mid) >= 0
        if not fires:
            return
        if sign * (order.price - market.mid) >= 0:
            self._fill(ledger, order, market, market.mid, maker=False)
        if order.status == "pending":
            order.status = "canceled-too-much-slippage"
        for other in order.parent.children if order.parent is not None else ():
            if other.is_active:
                other.status = "canceled-oco"

    def _fill(self, ledger: Ledger, order: Standing, market: FakeMarket, price: Decimal, *, maker: bool) -> None:
        """Fill a share of the remaining quantity, in two trades if it can be split."""
        step = Decimal(1).scaleb(-market.size_decimals)
        wanted = order.quantity - order.filled
        if order.reduce_only:
            held = ledger.positions().get(market.market_id, Decimal(0))
            wanted = min(wanted, max(Decimal(0), -order.sign * held))
            if not wanted:
                order.status = "canceled-reduce-only"
                return
        amount = (wanted * self.fill_share / step).to_integral_value() * step
        first = (amount / 2 / step).to_integral_value() * step
        for part in filter(None, (first, amount - first)):
            self._trade(ledger, market, order.sign * part, price, order=order, maker=maker)
            order.filled += part
            order.notional += part * price
        for child in order.children if order.filled else ():
            child.quantity = order.filled
            child.status = "pending" if child.status == "in-progress" else child.status
        if order.filled == order.quantity or (order.reduce_only and amount == wanted):
            order.status = "filled"

    def _trade(
        self, ledger: Ledger, market: FakeMarket, quantity: Decimal, price: Decimal | None, *,
        order: Standing | None = None, client_index: int = 0, kind: str = "trade", maker: bool = False,
    ) -> None:  # fmt: skip
        price = market.mid if price is None else price
        fee = self.maker_fee if maker else self.taker_fee
        ledger.take(market.market_id, quantity, price)
        ledger.gained -= abs(quantity) * price * fee / 1_000_000
        ledger.quota += int(abs(quantity) * price / 10)
        self._trade_id += 3
        trade = {
            "trade_id": self._trade_id, "kind": kind, "market": market, "quantity": quantity, "price": price,
            "maker": maker, "at_ms": int(self._time().timestamp() * 1000),
            "client_index": order.client_index if order is not None else client_index,
        }  # fmt: skip
        ledger.trades.append(trade_row(ledger, order, trade, fee))

    def _cancel_all(self, ledger: Ledger, status: str = "canceled") -> None:
        for order in ledger.orders.values():
            order.status = order.status if order.is_final else status

    def _cancel_scheduled(self) -> None:
        for ledger in self.ledgers.values():
            if ledger.cancels_at is not None and ledger.cancels_at <= self._time():
                ledger.cancels_at = None
                with self._changing(ledger, self.event_lag_s):
                    self._cancel_all(ledger)

    # Transactions

    def _time(self) -> datetime:
        return self._now() + self.ahead

    def _now_ms(self) -> int:
        return int(self._now().timestamp() * 1000)

    async def _state_date(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers[hdrs.DATE] = format_datetime(self._time(), usegmt=True)

    def _admit(self, request: web.Request) -> web.Response | None:
        """Count a request. Return the refusal of one above the limits of the tier."""
        self._spent_s += self.request_s
        self._cancel_scheduled()
        now, weight = self.seen_s, _WEIGHTS.get(request.path.rpartition("/")[2], 300)
        while self._requests and self._requests[0][0] <= now - _MINUTE_S:
            self._requests.popleft()
        is_over = len(self._requests) >= _REQUESTS_MAX
        if self.tier != "standard":
            is_over = sum(each for _, each in self._requests) + weight > _WEIGHT_MAX
        if self.is_limited and is_over:
            self.limited += 1
            return web.json_response({"code": 23000, "message": "Too Many Requests!"}, status=429)
        self._requests.append((now, weight))
        return None

    def _answer(self, request: web.Request, body: Mapping[str, Any]) -> web.Response:
        return self._admit(request) or super()._answer(request, body)

    async def _send(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        kind, text = int(str(form["tx_type"])), str(form["tx_info"])
        transaction = orjson.loads(text)
        self.sent.append((kind, transaction))
        if self.odd_answers and not self.is_down:
            status, answer, is_executed = self.odd_answers.pop(0)
            if is_executed:
                self._execute(kind, transaction, text)
            return web.Response(status=status, text=answer, content_type="application/json")
        fault = "maintenance" if self.is_down else self.send_faults.pop(0) if self.send_faults else "ok"
        if fault == "late":
            self.late.append((kind, transaction))
        limited = self._admit(request) or (self._exceeds(kind, transaction) if fault in _EXECUTED else None)
        if limited is not None and fault == "ok":
            return limited
        refusal = self._execute(kind, transaction, text) if fault in _EXECUTED and limited is None else None
        if fault == GONE_AFTER:
            self.read_faults = ["500"] * 100_000
        if (broken := await answer_of_fault(request, fault)) is not None:
            return broken
        if refusal is not None:
            return _refused(*refusal)
        body = {
            "code": 200, "message": '{"ratelimit": "didn\'t use volume quota"}', "tx_hash": self._hash_of(text),
            "predicted_execution_time_ms": 350, "volume_quota_remaining": self.ledgers[_owner(transaction)].quota,
        }  # fmt: skip
        return web.json_response(body)

    def _exceeds(self, kind: int, transaction: dict[str, Any]) -> web.Response | None:
        """Return the refusal of a transaction above the limit of its type, or of the quota by volume."""
        ledger, now, kinds = self.ledgers[_owner(transaction)], self.seen_s, self._kinds[kind]
        while kinds and kinds[0] <= now - _MINUTE_S:
            kinds.popleft()
        is_over = len(kinds) >= _PER_TYPE or (kind != CANCEL and ledger.quota <= 0)
        if self.is_limited and is_over:
            self.limited += 1
            return web.json_response({"code": 23000, "message": "Too Many Requests!"}, status=429)
        kinds.append(now)
        ledger.quota -= kind != CANCEL
        return None

    def _hash_of(self, text: str) -> str:
        return self.hashes.get(text) or hash_of(text)

    def _execute(self, kind: int, transaction: dict[str, Any], text: str) -> Refusal | None:
        """Execute a transaction. Return the refusal of the interface, which does not use the nonce up."""
        ledger, orders = self.ledgers.get(_owner(transaction)), _orders_of(kind, transaction)
        if ledger is None:
            return 21100, "account not found"
        if (refusal := _refusal_of_sender(ledger, transaction) or self._refusal_of(ledger, orders)) is not None:
            return refusal
        standing = [order for order in ledger.orders.values() if order.is_active]
        names = {name for order in standing for name in (order.index, order.client_index)}
        if kind == CANCEL and self.refuses_idle_ends and transaction["Index"] not in names:
            return 21715, "inactive order"
        sequenced = self._refusal_of_sequencer(ledger, orders)
        if sequenced is not None and sequenced[0] == 21739 and self.random.random() < 0.5:
            return sequenced
        self._accept(ledger, kind, transaction, text, sequenced)
        return None

    def _accept(
        self, ledger: Ledger, kind: int, transaction: dict[str, Any], text: str, sequenced: Refusal | None
    ) -> None:
        now = self.seen_s
        if self.nonce_lag_s[1]:
            ledger.earlier_nonces.append((now + self.random.uniform(*self.nonce_lag_s), ledger.next_nonce))
        ledger.next_nonce += 1
        self._sequence += 1
        entry = Transaction(kind, transaction, self._hash_of(text), self._sequence, self._now_ms(), error=sequenced)
        first, last = sorted(now + self.random.uniform(*self.lag_s) for _ in range(2))
        entry.shown_at, entry.ends_at = first, last
        ledger.transactions.append(entry)
        if sequenced is not None:
            return
        with self._changing(ledger, self.lag_s):
            if kind in (CREATE, GROUP):
                entry.event = {"to": self._create(ledger, transaction, _orders_of(kind, transaction))}
            elif kind == CANCEL_ALL:
                self._schedule(ledger, transaction)
            elif kind == CANCEL and (order := _find(ledger, transaction["Index"])) is not None:
                if not order.is_final:
                    order.status = "canceled"
                    if order.type == "stop-loss" and not ledger.is_stopped(order.market_id):
                        self.bared.append(order)
                for child in order.children if not order.filled else ():
                    child.status = "canceled-child"

    def _schedule(self, ledger: Ledger, transaction: dict[str, Any]) -> None:
        """Cancel all orders now or at a time, or call off what is scheduled."""
        match transaction["TimeInForce"]:
            case 0:
                self._cancel_all(ledger)
            case 1:
                ledger.cancels_at = datetime.fromtimestamp(transaction["Time"] / 1000, UTC)
            case _:
                ledger.cancels_at = None

    def _refusal_of(self, ledger: Ledger, orders: list[dict[str, Any]]) -> Refusal | None:
        """Return why the interface refuses orders."""
        for order in orders:
            known = ledger.orders.get(order["ClientOrderIndex"]) if order["ClientOrderIndex"] else None
            if known is not None and (known.is_active or not self.reuses_ids):
                return 21728, "client order index already exists"
            if self.refusal is not None or order["Type"] in self.refused_types:
                return self.refusal or (21735, "invalid trigger price")
            if (refusal := self._refusal_of_price(order)) is not None:
                return refusal
            per_account, per_market, waiting, waiting_per_market = _TIERS[self.tier]
            active = [each for each in ledger.orders.values() if each.is_active]
            here = [each for each in active if each.market_id == order["MarketIndex"]]
            pending = [each for each in here if each.status == "pending"]
            if self.is_limited and (len(active) >= per_account or len(here) >= per_market):
                return 21717, "maximum active limit order count reached"
            is_full = len(pending) >= waiting_per_market or sum(o.status == "pending" for o in active) >= waiting
            if self.is_limited and order["Type"] in (2, 4) and is_full:
                return 21720, "maximum pending order count per market reached"
        return None

    def _refusal_of_price(self, order: dict[str, Any]) -> Refusal | None:
        market = self._market(order)
        unit, is_ask = Decimal(1).scaleb(-market.price_decimals), bool(order["IsAsk"])
        price, tick = order["Price"] * unit, unit
        if not self.has_bands:
            return None
        if order["Type"] in (2, 4):
            reference = order["TriggerPrice"] * unit
        elif is_ask:
            reference = max(market.mark or market.mid, market.mid - tick)
        else:
            reference = min(market.mark or market.mid, market.mid + tick)
        is_far = price < (1 - _BAND) * reference if is_ask else price > (1 + _BAND) * reference
        if not is_far:
            return None
        return {0: (21734, "limit order price is too far from the mark price")}.get(order["Type"]) or (
            (21733, "order price flagged as an accidental price")
            if order["Type"] == 1
            else (21735, "SL/TP order price is too far from the trigger price")
        )

    def _refusal_of_sequencer(self, ledger: Ledger, orders: list[dict[str, Any]]) -> Refusal | None:
        """Return why the sequencer refuses orders that the interface has accepted."""
        if not orders:
            return None
        if self.sequencer_refusals or any(order["ClientOrderIndex"] in self.sequencer_refuses for order in orders):
            self.sequencer_refusals = max(0, self.sequencer_refusals - 1)
            return 21723, "invalid account health"
        order, market = orders[0], self._market(orders[0])
        quantity = Decimal(order["BaseAmount"]).scaleb(-market.size_decimals) * (-1 if order["IsAsk"] else 1)
        held = ledger.positions().get(market.market_id, Decimal(0))
        is_waiting = order["Type"] in (2, 4)
        if order["ReduceOnly"] and not is_waiting and held * quantity >= 0 and self.drops_reduce_only:
            return 21732, "reduce only increases position"
        opens = abs(held + quantity) - abs(held)
        if self.needs_margin and not order["ReduceOnly"] and opens > 0:
            marks = {each.market_id: each.mark or each.mid for each in self.markets.values()}
            equity = ledger.collateral + sum(q * marks[m] - cost for m, (q, cost) in ledger.held.items())
            used = sum(abs(q) * marks[m] for m, q in ledger.positions().items())
            if (used + opens * marks[market.market_id]) * self.margin_fraction > equity:
                return 21739, "not enough margin to create the order"
        return None

    def _market(self, order: Mapping[str, Any]) -> FakeMarket:
        return next(known for known in self.markets.values() if known.market_id == order["MarketIndex"])

    def _create(self, ledger: Ledger, transaction: dict[str, Any], given: list[dict[str, Any]]) -> dict[str, Any]:
        """Create an order, or an entry with its children. Return the row of the first one in the event."""
        parent, *children = [self._made(ledger, transaction, entry) for entry in given]
        for child in children:
            child.parent, child.quantity, child.status = parent, Decimal(0), "in-progress"
            if not self.keeps_child_ids:
                ledger.orders.pop(child.client_index, None)
                child.client_index = 0
                ledger.orders[child.index] = child
        parent.children = children
        market = self._market(given[0])
        if parent.client_index in self.rejected:
            parent.status = "canceled-margin-not-allowed"
        elif parent.status == "pending":
            self._reach(ledger, parent, market)
        elif parent.time_in_force == "post-only" and parent.sign * (parent.price - market.mid) >= 0:
            parent.status = "canceled-post-only"
        elif parent.type == "market" or parent.sign * (parent.price - market.mid) >= 0:
            if parent.sign * (parent.price - market.mid) >= 0:
                self._fill(ledger, parent, market, market.mid, maker=False)
            if parent.type == "market" and parent.status == "open":
                parent.status = "canceled-too-much-slippage"
        for child in children:
            if not parent.is_active and not parent.filled:
                child.status = "canceled-child"
        return {
            "i": parent.index, "u": parent.client_index, "a": ledger.index, "is": int(given[0]["BaseAmount"]),
            "rs": int((parent.quantity - parent.filled).scaleb(market.size_decimals)), "st": parent.status,
        }  # fmt: skip

    def _made(self, ledger: Ledger, transaction: dict[str, Any], given: dict[str, Any]) -> Standing:
        market = self._market(given)
        self._order_count += 1
        order = Standing(
            FIRST_INDEX - 1 + self._order_count, given["ClientOrderIndex"], market.market_id, bool(given["IsAsk"]),
            Decimal(given["BaseAmount"]).scaleb(-market.size_decimals),
        )  # fmt: skip
        order.account, order.reduce_only, order.symbol = ledger.index, bool(given["ReduceOnly"]), market.symbol
        order.price = Decimal(given["Price"]).scaleb(-market.price_decimals)
        order.trigger = Decimal(given["TriggerPrice"]).scaleb(-market.price_decimals)
        order.type = TYPES[given["Type"]]
        order.status = "pending" if given["Type"] in (2, 4) else "open"
        order.nonce, order.expiry_ms = transaction["Nonce"], given.get("OrderExpiry", 0)
        order.time_in_force = TIMES_IN_FORCE[given.get("TimeInForce", 1)]
        order.at_ms = order.changed_ms = self._now_ms()
        ledger.orders[order.client_index or order.index] = order
        return order

    # Queries

    def _asked_of(self, request: web.Request, *, private: bool = True) -> Ledger:
        index = request.query.get("account_index") or request.query["value"]
        if private:
            owner, key = request.headers["Authorization"].split(":")[1:3]
            if owner != index or int(key) not in self.ledgers[int(index)].keys:
                raise web.HTTPUnauthorized(text='{"code":20013,"message":"invalid auth"}')
        return self.ledgers[int(index)]

    async def _nonce(self, request: web.Request) -> web.StreamResponse:
        ledger = self.ledgers.get(int(request.query["account_index"]))
        nonce = 0 if ledger is None else ledger.seen_nonce(self.seen_s)
        if self.stale_nonces:
            self.stale_nonces -= 1
            nonce -= 1
        return await self._tell_of(request, {"nonce": nonce})

    async def _keys(self, request: web.Request) -> web.StreamResponse:
        ledger = self.ledgers.get(int(request.query["account_index"]))
        chosen = int(request.query.get("api_key_index", "255"))
        rows = [
            {
                "account_index": int(request.query["account_index"]), "api_key_index": index,
                "nonce": ledger.next_nonce, "public_key": key.removeprefix("0x"), "transaction_time": 0,
            }
            for index, key in (ledger.keys.items() if ledger is not None else ())
            if ledger is not None and chosen in (255, index)
        ]  # fmt: skip
        if not rows and chosen != 255:
            return _refused(21109, "api key not found")
        return await self._tell_of(request, {"api_keys": rows})

    async def _transaction(self, request: web.Request) -> web.StreamResponse:
        """Tell a transaction by its hash or its sequence index."""
        name = request.query["value"]
        known = (each for ledger in self.ledgers.values() for each in ledger.transactions)
        found = next((each for each in known if name in (each.hash, str(each.sequence))), None)
        row = found.seen(self.seen_s) if found is not None else None
        if row is None:
            self._admit(request)
            return _refused(21500, "transaction not found")
        return await self._tell_of(request, {**row, "committed_at": 0, "verified_at": 0})

    async def _transactions(self, request: web.Request) -> web.StreamResponse:
        """The transactions of an account, newest first, by the offset `index`."""
        ledger, start = self._asked_of(request), int(request.query.get("index", "0"))
        seen = [row for each in reversed(ledger.transactions) if (row := each.seen(self.seen_s)) is not None]
        return await self._tell_of(request, {"txs": seen[start : start + int(request.query["limit"])]})

    async def _orders(self, request: web.Request) -> web.StreamResponse:
        """Active orders, and those that ended within 24 hours, by at most 20 of our indexes."""
        ledger, asked = self._asked_of(request), request.query["client_order_indexes"].split(",")
        if len(asked) > IDS_MAX:
            return _refused(20001, "invalid param: at most 20 client order indexes")
        oldest = self._now_ms() - FOUND_FOR // timedelta(milliseconds=1)
        rows = [
            row
            for row in self._seen_orders(ledger)
            if str(row["client_order_index"]) in asked
            and (row["status"] in ("open", "pending") or row["updated_at"] >= oldest)
        ]
        return await self._tell_of(request, {"orders": rows or None})

    async def _active_orders(self, request: web.Request) -> web.StreamResponse:
        """The active orders of a market, or of all."""
        market_id = request.query.get("market_id", "255")
        rows = [
            row
            for row in self._seen_orders(self._asked_of(request))
            if row["status"] in ("open", "pending")
            and market_id in ("255", str(row["market_index"]))
            and row["client_order_index"] not in self.unlisted
        ]
        return await self._tell_of(request, {"orders": rows or None})

    async def _inactive_orders(self, request: web.Request) -> web.StreamResponse:
        rows = [row for row in self._seen_orders(self._asked_of(request)) if row["status"] not in ("open", "pending")]
        return await self._tell_of(request, _page(request, "orders", rows[::-1]))

    def _seen_orders(self, ledger: Ledger) -> list[dict[str, Any]]:
        now = self.seen_s
        shown = [order for order in ledger.orders.values() if order.client_index not in self.hidden]
        return [row for order in shown if (row := order.seen(now)) is not None]

    async def _account(self, request: web.Request) -> web.StreamResponse:
        if int(request.query["value"]) not in self.ledgers:
            return _refused(21100, "account not found")
        ledger = self.ledgers[int(request.query["value"])]
        held, collateral = ledger.seen(self.seen_s)
        shown = self.positions_shown
        if shown is None:
            shown = position_rows(ledger, self.markets.values(), held)
        row = account_row(ledger, shown, collateral, self._now_ms())
        return await self._tell_of(request, {"total": 1, "accounts": [row]})

    async def _limits(self, request: web.Request) -> web.StreamResponse:
        self._asked_of(request)
        body = {
            "max_llp_percentage": 25, "user_tier": self.tier, "can_create_public_pool": True, "max_llp_amount": "0",
            "current_maker_fee_tick": self.maker_fee, "current_taker_fee_tick": self.taker_fee,
            "effective_lit_stakes": "0", "leased_lit": "0", "user_tier_name": self.tier, "user_tier_last_update": 0,
            "bo_user_tier_name": "", "bo_fee_rate": 1,
        }  # fmt: skip
        return await self._tell_of(request, body)

    async def _trades(self, request: web.Request) -> web.StreamResponse:
        """Newest first, `limit` at a time."""
        trades = self._seen_trades(self._asked_of(request))
        if (index := request.query.get("order_index")) is not None:
            trades = [trade for trade in trades if int(index) in (trade["ask_id"], trade["bid_id"])]
        return await self._tell_of(request, _page(request, "trades", trades[::-1]))

    def _seen_trades(self, ledger: Ledger) -> list[dict[str, Any]]:
        """Return the trades of an account that it shows, oldest first."""
        trades = [trade for trade in ledger.trades if ledger.late_trades.get(trade["trade_id"], 0.0) <= self.seen_s]
        trades = [trade for trade in trades if self.hides_trades_of.isdisjoint((trade["ask_id"], trade["bid_id"]))]
        if self.hides_trades:
            self.hides_trades -= 1
            trades = trades[:-1]
        trades = sorted(trades, key=lambda entry: entry["trade_id"])
        return [copy for trade in trades for copy in (trade, trade)] if self.doubles_trades else trades

    async def _position_fundings(self, request: web.Request) -> web.StreamResponse:
        ledger, since = self._asked_of(request), int(request.query["start_timestamp"])
        newest = [
            funding
            for funding in reversed(ledger.fundings)
            if funding["timestamp"] >= since and not self.hides_fundings
        ]
        return await self._tell_of(request, _page(request, "position_fundings", newest))

    async def _tell_of(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.is_down or request.path.rpartition("/")[2] in self.failing:
            return web.Response(status=503, text="maintenance")
        self.asked.append((request.path, dict(request.query)))
        if (limited := self._admit(request)) is not None:
            return limited
        return await self._faulty(request) or web.json_response({"code": 200, **body})

    async def _faulty(self, request: web.Request) -> web.StreamResponse | None:
        match self.read_faults.pop(0) if self.read_faults else "ok":
            case "500":
                return web.Response(status=500, text="internal")
            case "429":
                return web.Response(status=429)
            case "cut":
                return await _cut(request)
            case "nonsense":
                return web.Response(text="<html>", content_type="application/json")
        return None


def is_executed(fault: str) -> bool:
    """Return whether a transaction with this fault is executed."""
    return fault in _EXECUTED


async def answer_of_fault(request: web.Request, fault: str) -> web.StreamResponse | None:
    """Return the answer to a transaction with a fault; None without one."""
    if fault in _CUT:
        return await _cut(request)
    if fault in _ANSWERS:
        status, answer = _ANSWERS[fault]
        return web.Response(status=status, text=answer, content_type="application/json")
    return None


def _owner(transaction: Mapping[str, Any]) -> int:
    return int(transaction["AccountIndex"])


def _refusal_of_sender(ledger: Ledger, transaction: Mapping[str, Any]) -> Refusal | None:
    if transaction["ApiKeyIndex"] not in ledger.keys:
        return 21109, "api key not found"
    return (21104, "invalid nonce") if transaction["Nonce"] != ledger.next_nonce else None


def _orders_of(kind: int, transaction: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the orders that a transaction creates."""
    return list(transaction["Orders"]) if kind == GROUP else [transaction] if kind == CREATE else []


def _find(ledger: Ledger, index: int) -> Standing | None:
    """Return an order by our index or the venue's."""
    by_index = (order for order in ledger.orders.values() if order.index == index)
    return ledger.orders.get(index) or next(by_index, None)


def _refused(code: int, message: str) -> web.Response:
    return web.json_response({"code": code, "message": message}, status=400)


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
