"""Accounts of the fake venue: orders, transactions, trades, positions and money, and the rows that it shows of them.

Every row has every field of the models of the venue's SDK and of the recorded answers. What just changed is shown only
later: each change keeps what the venue shows until then.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from hashlib import blake2b
from typing import Any, Final

import orjson
from support.fake_venue import FakeMarket

ACCOUNT: Final = 7
KEY_INDEX: Final = 4
PLAIN_KEY: Final = "ab" * 40
"""The private key that `PlainSigner` pretends to sign with."""

FIRST_INDEX: Final = 2**48
"""The venue's own indexes of orders start here."""

FAILED, PENDING, EXECUTED = 0, 1, 2
"""States of a transaction."""

TYPES: Final = {0: "limit", 1: "market", 2: "stop-loss", 4: "take-profit"}
TIMES_IN_FORCE: Final = {0: "immediate-or-cancel", 1: "good-till-time", 2: "post-only"}
RESTING: Final = ("open", "pending")
L1_ADDRESS: Final = "0x" + "0" * 40


def public_key_of(private: str) -> str:
    """Return the public key that belongs to a private one here, without the venue's curve."""
    return "0x" + blake2b(private.encode(), digest_size=40).hexdigest()


def hash_of(text: str) -> str:
    """Return the hash of a transaction's text, which stands for the venue's hash of its fields."""
    return blake2b(text.encode(), digest_size=40).hexdigest()


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
    symbol: str = "BTC"
    nonce: int = 0
    time_in_force: str = "good-till-time"
    expiry_ms: int = 0
    at_ms: int = 0
    changed_ms: int = 0
    parent: "Standing | None" = None
    children: list["Standing"] = field(default_factory=list)
    earlier: list[tuple[float, dict[str, Any] | None]] = field(default_factory=list)
    """What it shows, and until when; None if nothing is pinned."""

    @property
    def sign(self) -> int:
        return -1 if self.is_ask else 1

    @property
    def is_active(self) -> bool:
        return self.status in RESTING

    @property
    def is_final(self) -> bool:
        return self.status not in (*RESTING, "in-progress")

    def seen(self, at: float) -> dict[str, Any] | None:
        """Return its row as the venue shows it at a time."""
        self.earlier = [entry for entry in self.earlier if entry[0] > at]
        return self.earlier[0][1] if self.earlier else self.shown()

    def shown(self) -> dict[str, Any]:
        group = [str(child.index) for child in self.children] + ["0", "0"]
        other = [child.index for child in (self.parent.children if self.parent else ()) if child is not self]
        status = "na" if self.status != "pending" else "mark-price"
        return {
            "order_index": self.index, "client_order_index": self.client_index, "order_id": str(self.index),
            "client_order_id": str(self.client_index), "market_index": self.market_id, "market_symbol": self.symbol,
            "market_kind": "perps", "owner_account_index": self.account, "is_ask": self.is_ask,
            "side": "sell" if self.is_ask else "buy", "initial_base_amount": str(self.quantity),
            "remaining_base_amount": str(self.quantity - self.filled), "filled_base_amount": str(self.filled),
            "filled_quote_amount": str(self.notional), "price": str(self.price), "base_size": 0, "base_price": 0,
            "nonce": self.nonce, "status": self.status, "type": self.type, "time_in_force": self.time_in_force,
            "reduce_only": self.reduce_only, "trigger_price": str(self.trigger), "order_expiry": self.expiry_ms,
            "trigger_status": "parent-order" if self.status == "in-progress" else status,
            "trigger_time": 0, "parent_order_index": self.parent.index if self.parent else 0,
            "parent_order_id": str(self.parent.index if self.parent else 0),
            "to_trigger_order_id_0": group[0], "to_trigger_order_id_1": group[1],
            "to_cancel_order_id_0": str(other[0] if other else 0), "integrator_fee_collector_index": "0",
            "integrator_taker_fee": "0", "integrator_maker_fee": "0", "block_height": 227535532,
            "order_flags": 0, "order_version": 0, "timestamp": self.at_ms, "created_at": self.at_ms,
            "updated_at": self.changed_ms, "transaction_time": self.changed_ms * 1000,
        }  # fmt: skip


@dataclass
class Transaction:
    """A transaction that the venue accepted. It is shown from `shown_at`, and as executed or failed from `ends_at`."""

    kind: int
    info: dict[str, Any]
    hash: str
    sequence: int
    at_ms: int
    shown_at: float = 0.0
    ends_at: float = 0.0
    error: tuple[int, str] | None = None
    """Why the sequencer refused it, though it had been accepted."""

    event: dict[str, Any] = field(default_factory=dict)

    def seen(self, at: float) -> dict[str, Any] | None:
        if at < self.shown_at:
            return None
        is_over = at >= self.ends_at
        status = (FAILED if self.error else EXECUTED) if is_over else PENDING
        told = orjson.dumps({"code": self.error[0], "message": self.error[1]}).decode() if self.error else ""
        return {
            "hash": self.hash, "type": self.kind, "info": orjson.dumps(self.info).decode(),
            "event_info": orjson.dumps({**self.event, "ae": told}).decode() if is_over else "",
            "status": status, "transaction_index": self.sequence % 500, "l1_address": L1_ADDRESS,
            "account_index": self.info["AccountIndex"], "nonce": self.info["Nonce"],
            "expire_at": self.info.get("ExpiredAt", 0), "block_height": 227535532 if is_over else 0,
            "queued_at": self.at_ms, "executed_at": self.at_ms if is_over else 0, "sequence_index": self.sequence,
            "parent_hash": "", "api_key_index": self.info["ApiKeyIndex"],
            "transaction_time": self.at_ms * 1000 if is_over else 0,
        }  # fmt: skip


@dataclass
class Ledger:
    """The fake venue's ledger of one account. `deposit` is the amount paid in; the rest follows from the trades."""

    index: int
    deposit: Decimal = Decimal("10000.25")
    next_nonce: int = 40
    orders: dict[int, Standing] = field(default_factory=dict)
    """By our index, or by the venue's own if we gave none."""

    trades: list[dict[str, Any]] = field(default_factory=list)
    late_trades: dict[int, float] = field(default_factory=dict)
    fundings: list[dict[str, Any]] = field(default_factory=list)
    transactions: list[Transaction] = field(default_factory=list)
    held: dict[int, tuple[Decimal, Decimal]] = field(default_factory=dict)
    """By market: the signed quantity, and its total cost."""

    gained: Decimal = Decimal(0)
    """Realized gains and funding, less fees."""

    keys: dict[int, str] = field(default_factory=lambda: {KEY_INDEX: public_key_of(PLAIN_KEY)})
    """The registered public keys."""

    trading_mode: int = 0
    """0 classic, 1 unified."""

    quota: int = 1000
    """How many transactions the volume quota allows."""

    cancels_at: datetime | None = None
    """When a scheduled transaction cancels all orders."""

    earlier: list[tuple[float, dict[int, tuple[Decimal, Decimal]], Decimal]] = field(default_factory=list)
    earlier_nonces: list[tuple[float, int]] = field(default_factory=list)

    @property
    def collateral(self) -> Decimal:
        return self.deposit + self.gained

    def positions(self) -> dict[int, Decimal]:
        return {market_id: quantity for market_id, (quantity, _) in self.held.items() if quantity}

    def standing(self, market_id: int) -> list[Standing]:
        return [order for order in self.orders.values() if order.market_id == market_id and order.is_active]

    def is_stopped(self, market_id: int) -> bool:
        """Return whether stops close the whole position of a market."""
        held = self.positions().get(market_id, Decimal(0))
        stops = [order for order in self.standing(market_id) if order.type == "stop-loss" and order.sign * held < 0]
        return sum(order.quantity for order in stops) >= abs(held)

    def take(self, market_id: int, quantity: Decimal, price: Decimal) -> None:
        """Change a position by a signed quantity: closing realizes the difference to the average entry."""
        held, cost = self.held.get(market_id, (Decimal(0), Decimal(0)))
        if held and (held > 0) is not (quantity > 0):
            closed = min(abs(held), abs(quantity)) * (1 if held > 0 else -1)
            released = cost * closed / held
            self.gained += closed * price - released
            held, cost, quantity = held - closed, cost - released, quantity + closed
        self.held[market_id] = (held + quantity, cost + quantity * price)

    def seen(self, at: float) -> tuple[dict[int, tuple[Decimal, Decimal]], Decimal]:
        """Return the positions and the collateral as the venue shows them at a time."""
        self.earlier = [entry for entry in self.earlier if entry[0] > at]
        held, gained = self.earlier[0][1:] if self.earlier else (self.held, self.gained)
        return held, self.deposit + gained

    def seen_nonce(self, at: float) -> int:
        self.earlier_nonces = [entry for entry in self.earlier_nonces if entry[0] > at]
        return self.earlier_nonces[0][1] if self.earlier_nonces else self.next_nonce

    def shows_late(self, at: float) -> bool:
        """Return whether it does not show all of its changes yet."""
        ends = [self.late_trades.get(trade["trade_id"], 0.0) for trade in self.trades[-50:]]
        ends += [transaction.ends_at for transaction in self.transactions[-50:]]
        ends += [until for until, *_ in self.earlier] + [until for until, _ in self.earlier_nonces]
        ends += [until for order in self.orders.values() for until, _ in order.earlier]
        return max(ends, default=0.0) > at


def position_rows(
    ledger: Ledger, markets: Iterable[FakeMarket], held: Mapping[int, tuple[Decimal, Decimal]]
) -> list[dict[str, Any]]:
    """Return the rows of the positions. An average entry has the decimals of the market's prices."""
    rows = []
    for market in markets:
        quantity, cost = held.get(market.market_id, (Decimal(0), Decimal(0)))
        if not quantity:
            continue
        tick, mark = Decimal(1).scaleb(-market.price_decimals), market.mark or market.mid
        standing = ledger.standing(market.market_id)
        rows.append({
            "market_id": market.market_id, "symbol": market.symbol, "initial_margin_fraction": "5.00",
            "open_order_count": len(standing), "pending_order_count": sum(o.status == "pending" for o in standing),
            "position_tied_order_count": sum(o.reduce_only for o in standing), "sign": 1 if quantity > 0 else -1,
            "position": str(abs(quantity)),
            "avg_entry_price": str((cost / quantity).quantize(tick, ROUND_HALF_UP)),
            "position_value": f"{abs(quantity) * mark:.6f}", "unrealized_pnl": f"{quantity * mark - cost:.6f}",
            "realized_pnl": "0.000000", "liquidation_price": "0", "total_funding_paid_out": "0.000000",
            "margin_mode": 0, "allocated_margin": "0.000000", "total_discount": "0.000000", "margin_set_flag": 0,
        })  # fmt: skip
    return rows


def account_row(ledger: Ledger, positions: list[dict[str, Any]], collateral: Decimal, now_ms: int) -> dict[str, Any]:
    """Return the row of an account."""
    money, standing = f"{collateral:.6f}", [order for order in ledger.orders.values() if order.is_active]
    pool = {
        "status": 0, "operator_fee": "", "min_operator_share_rate": "", "total_shares": 0, "operator_shares": 0,
        "annual_percentage_yield": 0, "daily_returns": [], "share_prices": [], "sharpe_ratio": 0, "strategies": [],
    }  # fmt: skip
    asset = {
        "symbol": "USDC", "asset_id": 3, "balance": "0.000000", "locked_balance": "0.000000",
        "margin_mode": "enabled", "margin_balance": money, "multiplier": "1",
    }  # fmt: skip
    return {
        "code": 0, "account_type": 0, "account_trading_mode": ledger.trading_mode, "index": ledger.index,
        "l1_address": L1_ADDRESS, "cancel_all_time": 0, "total_order_count": len(standing),
        "total_isolated_order_count": 0, "pending_order_count": sum(order.status == "pending" for order in standing),
        "available_balance": money, "status": 1, "collateral": money, "transaction_time": now_ms * 1000,
        "account_index": ledger.index, "name": "", "description": "", "can_invite": False,
        "referral_points_percentage": "", "can_rfq": False, "can_rfq_market_ids": [], "created_at": 0,
        "metadata": {"color": ""}, "agent_enabled": False, "positions": positions, "assets": [asset],
        "total_asset_value": money, "cross_asset_value": money, "cross_initial_margin_requirement": "0.000000",
        "cross_maintenance_margin_requirement": "0.000000", "pool_info": pool, "shares": [], "pending_unlocks": [],
        "approved_integrators": [], "bo_positions": [],
    }  # fmt: skip


def trade_row(ledger: Ledger, order: Standing | None, trade: Mapping[str, Any], fee: int) -> dict[str, Any]:
    """Return the row of a trade, whose `trade` has id, kind, market, quantity (signed), price, time and maker."""
    is_ask, maker, quantity = trade["quantity"] < 0, trade["maker"], abs(trade["quantity"])
    side, other = ("ask", "bid") if is_ask else ("bid", "ask")
    ours, number, fees = trade["client_index"], trade["trade_id"], {"maker_fee" if maker else "taker_fee": fee}
    before = {
        f"{role}_{name}_before": value
        for role in ("taker", "maker")
        for name, value in (("position_size", "0.0000"), ("entry_quote", "0.000000"), ("initial_margin_fraction", 500))
    }
    venue_index = 0 if order is None else order.index
    return {
        "trade_id": number, "trade_id_str": str(number), "tx_hash": f"{number:080x}", "type": trade["kind"],
        "market_id": trade["market"].market_id, "market_symbol": trade["market"].symbol, "market_kind": "perps",
        "size": str(quantity), "price": str(trade["price"]), "usd_amount": f"{quantity * trade['price']:.6f}",
        f"{side}_account_id": ledger.index, f"{other}_account_id": 1, f"{side}_client_id": ours,
        f"{other}_client_id": 5, f"{side}_client_id_str": str(ours), f"{other}_client_id_str": "5",
        f"{side}_id": venue_index, f"{other}_id": 6, f"{side}_id_str": str(venue_index), f"{other}_id_str": "6",
        "is_maker_ask": is_ask is maker, "block_height": 227535535, "timestamp": trade["at_ms"],
        "transaction_time": trade["at_ms"] * 1000, **before, "taker_position_sign_changed": False,
        "maker_position_sign_changed": False, "bid_account_pnl": "0", "ask_account_pnl": "0",
        "integrator_maker_fee": 0, "integrator_maker_fee_collector_index": 0, "integrator_taker_fee": 0,
        "integrator_taker_fee_collector_index": 0, "taker_allocated_margin_usdc_before": 0,
        "taker_allocated_margin_usdc_after": 0, "maker_allocated_margin_usdc_before": 0,
        "maker_allocated_margin_usdc_after": 0, "bid_order_version": 0, "ask_order_version": 0,
        **(fees if fee else {}),
    }  # fmt: skip
