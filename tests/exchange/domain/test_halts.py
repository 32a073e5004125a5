"""Halts: what they cover, and which orders may open or add."""

from datetime import UTC, datetime
from decimal import Decimal

import msgspec
import pytest
from support.books import open_account

from trader.exchange.domain.account import Account, Position
from trader.exchange.domain.halts import Halt, HaltCause, may_open, refusal_to_open
from trader.exchange.domain.orders import Order, OrderSide, OrderType, Side

D = Decimal
AT = datetime(2025, 2, 3, 1, 30, tzinfo=UTC)


def halt(account_id: str | None, cause: HaltCause = HaltCause.OPERATOR) -> Halt:
    return Halt(account_id=account_id, cause=cause, reason="looks wrong", by="someone", at=AT)


def holding(side: Side, quantity: str) -> Account:
    account = open_account()
    position = Position(
        id=account.run.id, symbol="BTC", side=side, quantity=D(quantity), entry_notional=D(1000), margin=D(1000),
        opened_at=AT, funded_until=AT,
    )  # fmt: skip
    return msgspec.structs.replace(account, positions={"BTC": position})


def test_a_halt_of_one_account_does_not_affect_others() -> None:
    halts = [halt("a")]
    assert refusal_to_open(halts, "b") is None
    assert refusal_to_open(halts, "a") == (
        "trading is halted for account a (operator: looks wrong); only reducing is allowed"
    )


def test_a_halt_of_all_accounts_covers_each() -> None:
    halts = [halt(None, HaltCause.DRAWDOWN)]
    for account_id in ("a", "b"):
        assert "halted for all accounts (drawdown: looks wrong)" in (refusal_to_open(halts, account_id) or "")
    assert refusal_to_open([], "a") is None


@pytest.mark.parametrize(
    ("side", "quantity", "more", "opens"),
    [
        (OrderSide.SELL, "1", {}, False),  # closes the long
        (OrderSide.SELL, "0.4", {}, False),
        (OrderSide.SELL, "1.1", {}, True),  # flips it
        (OrderSide.BUY, "0.1", {}, True),  # adds
        (OrderSide.BUY, "0.1", {"symbol": "ETH"}, True),
        (OrderSide.SELL, "5", {"reduce_only": True}, False),
        (OrderSide.SELL, "0.4", {"type": OrderType.LIMIT, "limit_price": D(2000)}, True),  # may outlive the position
        (OrderSide.SELL, "0.4", {"type": OrderType.LIMIT, "limit_price": D(2000), "reduce_only": True}, False),
    ],
)
def test_which_orders_may_open(side: OrderSide, quantity: str, more: dict[str, object], opens: bool) -> None:
    fields = {"account_id": "default", "symbol": "BTC", "side": side, "quantity": D(quantity), **more}
    assert may_open(holding(Side.LONG, "1"), Order(**fields)) is opens  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("orders", "opens"),
    [
        ([(OrderSide.SELL, "0.5"), (OrderSide.SELL, "0.5")], False),
        ([(OrderSide.SELL, "1"), (OrderSide.SELL, "0.1")], True),  # the first closes what the second would reduce
        ([(OrderSide.SELL, "1"), (OrderSide.BUY, "0.1")], True),
    ],
)
def test_whether_a_pair_may_open_depends_on_both_orders(orders: list[tuple[OrderSide, str]], opens: bool) -> None:
    pair = [Order(account_id="default", symbol="BTC", side=side, quantity=D(quantity)) for side, quantity in orders]
    assert may_open(holding(Side.LONG, "1"), *pair) is opens
