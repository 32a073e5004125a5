"""The decision kernel: each path from a decision to its outcome, under the pure rules of the exchange."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace
from support.scripted import make_settings, make_tick

from trader.agents.domain.guard import Approved, RiskContext, orders_of_call
from trader.agents.domain.tools import (
    Change,
    ClosePosition,
    CreatePosition,
    PlaceOrder,
    PlacePair,
    PlannedExit,
    UpdateExitPlan,
)
from trader.agents.domain.view import VariantLimits
from trader.agents.execute import RulesEnvironment, execute_change, run_at_once
from trader.exchange.domain.account import Account
from trader.exchange.domain.ledger import Posting, unopened_account
from trader.exchange.domain.orders import Order, Side
from trader.exchange.domain.tick_rules import Moment
from trader.exchange.protocol import rules_of
from trader.exchange.session import Decide, Session
from trader.market.domain.markets import MARKETS

NOW = datetime(2025, 1, 2, 12, tzinfo=UTC)
OPENING = CreatePosition(
    symbol="btc-perp", side=Side.LONG, quantity=0.1, leverage=5, stop=99_000, invalidation="below 99 000", confidence=60
)


class Recorded(RulesEnvironment, frozen=True):
    postings: list[Posting | None]

    @property
    def posting(self) -> Posting | None:
        return next(iter(self.postings), None)


def environment(account: Account | None = None, *, quoted_at: datetime = NOW) -> Recorded:
    account = account or unopened_account("a", Decimal(10_000), "USDT", NOW)
    quotes = make_tick(quoted_at, {"BTC": "100000"}).quotes
    marks = {"BTC": quotes["BTC"].mark}
    context = RiskContext(
        now=NOW, account=account, marks=marks, quoted_at={"BTC": quoted_at}, leverage_max={"BTC": 50},
        day_opening_equity=Decimal(10_000), day_lowest_equity=None, last_trades={},
    )  # fmt: skip

    def orders(approved: Sequence[Approved]) -> list[Order]:
        return orders_of_call(approved, "a", UUID(int=1), 1)

    async def change(_account_id: str, decide: Decide) -> Posting | None:
        postings.append(decide(account))
        return postings[-1]

    postings: list[Posting | None] = []
    rules = rules_of(make_settings(), {"BTC": MARKETS["BTC"]})
    session = Session(rules=rules, rate_of_hour=rate, moment=lambda: Moment(NOW, quotes, marks), change=change)
    return Recorded(context, VariantLimits(leverage_max=5), account, session, orders, postings)


def rate(_symbol: str, _hour: datetime) -> Decimal:
    return Decimal(0)


def outcome(decision: Change, where: RulesEnvironment) -> tuple[str, dict[str, Any]]:
    return run_at_once(execute_change(decision, where))


def after(decision: Change, account: Account | None = None) -> Account:
    """Execute a decision, and return the account after it."""
    where = environment(account)
    assert outcome(decision, where)[0] == "ok"
    assert where.posting is not None
    return where.posting.account


def test_a_position_lives_through_the_kernel() -> None:
    opened = after(OPENING)
    assert opened.positions["BTC"].quantity == Decimal("0.1")
    assert opened.positions["BTC"].exit_plan.stop == 99_000
    moved = after(UpdateExitPlan(symbol="BTC", stop=99_500), opened)
    assert moved.positions["BTC"].exit_plan.stop == 99_500
    assert not after(ClosePosition(symbol="BTC", fraction=None), moved).positions


def test_decisions_refused_by_the_guard_never_reach_the_exchange() -> None:
    where = environment()
    status, result = outcome(ClosePosition(symbol="BTC"), where)
    assert (status, result["rule"], where.posting) == ("rejected", "no position", None)


def test_an_unknown_market_is_reported_with_the_known_ones() -> None:
    where = environment()
    assert outcome(ClosePosition(symbol="doge"), where) == (
        "failed", {"error": "There is no market 'doge'; the markets are BTC."},
    )  # fmt: skip
    assert where.posting is None


@pytest.mark.parametrize("decision", [ClosePosition(symbol="BTC"), UpdateExitPlan(symbol="BTC", stop=99_500)])
def test_an_old_book_refuses_a_decision_and_keeps_the_position(decision: Change) -> None:
    opened = after(OPENING)
    late = environment(opened, quoted_at=NOW - timedelta(minutes=1))
    status, result = outcome(decision, late)
    assert status == "rejected"
    assert result["reason"] == "the last BTC price is of 2025-01-02T11:59:00.000Z, too old to trade on"
    assert late.posting is None or late.posting.account.positions == opened.positions


def test_a_waiting_coroutine_cannot_run_at_once() -> None:
    with pytest.raises(RuntimeError, match="needs an event loop"):
        run_at_once(asyncio.sleep(0))


PAIR = PlacePair(
    first=PlaceOrder(symbol="BTC", side="buy", quantity=0.05, exit_plan=PlannedExit(stop=99_000)),
    second=PlaceOrder(symbol="btcusdt", side="sell", quantity=0.02, reduce_only=True),
)


def test_a_pair_is_one_call_with_two_answers() -> None:
    where = environment()
    status, result = outcome(PAIR, where)
    assert where.posting is not None
    assert (status, result["reason"]) == ("ok", None)
    assert [(each["status"], each["filledQuantity"]) for each in result["orders"]] == [
        ("filled", "0.05"), ("filled", "0.02"),
    ]  # fmt: skip
    assert [answer.client_order_id for answer in where.posting.answers] == [f"{UUID(int=1)}:1", f"{UUID(int=1)}:1:2"]
    assert where.posting.account.positions["BTC"].quantity == Decimal("0.03")
    refused = environment(quoted_at=NOW - timedelta(seconds=20))
    far = replace(PAIR, second=replace(PAIR.second, quantity=40, reduce_only=False, side="buy", exit_plan=None))
    status, result = outcome(far, refused)
    assert (status, refused.posting) == ("rejected", None)
    assert result["reason"] == (
        "The second order of the pair: A stop is mandatory for an order that may open a position: give exitPlan.stop."
    )


def test_an_unknown_market_of_either_order_of_a_pair_is_reported() -> None:
    for pair in (replace(PAIR, second=replace(PAIR.second, symbol="doge")), replace(PAIR, first=PAIR.second)):
        where = environment()
        status, result = outcome(pair, where)
        assert (status, where.posting) == ("failed" if pair.first is PAIR.first else "rejected", None), result
    unknown = outcome(replace(PAIR, second=replace(PAIR.second, symbol="doge")), environment())[1]
    assert unknown == {"error": "There is no market 'doge'; the markets are BTC."}
