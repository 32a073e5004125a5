"""The ladder's rules: what a file may say, what an entrant lacks, and that no sequence exceeds a cap."""

from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.exchange.domain.orders import OrderSide
from trader.live.domain.ladder import (
    Caps,
    Commitment,
    LadderFigures,
    LadderRules,
    find_breaches,
    find_contradictions,
    find_lacks,
    refusal_by_caps,
)
from trader.market.domain.markets import MARKETS

D = Decimal
CAPS = Caps(order=D(100), account=D(300), day=D(500), total=D(400), approve_above=D(50))
RULE: dict[str, Any] = {"days": 7, "fills": 20, "drawdown_percent": 10}
SENT: dict[str, Any] = {**RULE, "drift_p95_bps": 15, "caps": {"order": 100, "account": 300, "day": 500, "total": 400}}
LADDER: dict[str, Any] = {"shadow": RULE, "testnet": SENT, "live": SENT}


def contradictions(**steps: object) -> list[str]:
    rules = msgspec.convert({**LADDER, **steps}, LadderRules)
    return [".".join(map(str, path)) + f": {text}" for path, text in find_contradictions(rules, MARKETS.values())]


def test_a_ladder_without_contradictions_has_none() -> None:
    assert contradictions() == []


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        ("live", {"days": 6}, "live.days: expected at least 7, which testnet asks for, got 6"),
        ("live", {"drift_p95_bps": 16}, "live.drift_p95_bps: expected at most 15, which testnet asks for, got 16"),
        ("testnet", {"drawdown_percent": 11}, "testnet.drawdown_percent: expected at most 10, which shadow asks"),
        ("testnet", {"drift_p95_bps": None}, "testnet.drift_p95_bps: expected a value"),
        ("live", {"caps": None}, "live.caps: expected a value, since this step sends orders"),
        ("shadow", {"drift_p95_bps": 5}, "shadow.drift_p95_bps: nothing is sent in shadow"),
        ("live", {"caps": SENT["caps"] | {"order": 301}}, "live.caps.order: expected at most 300, which is account"),
        ("live", {"caps": SENT["caps"] | {"total": 299}}, "live.caps.account: expected at most 299, which is total"),
        ("live", {"caps": SENT["caps"] | {"day": 99}}, "live.caps.order: expected at most 99, which is day"),
        ("live", {"caps": SENT["caps"] | {"approve_above": 101}}, "live.caps.approve_above: expected at most 100"),
        ("live", {"caps": SENT["caps"] | {"day": float("nan")}}, "live.caps.day: expected a number above 0, got NaN"),
        ("live", {"days": 0}, "live.days: expected a number above 0, got 0"),
        ("live", {"caps": SENT["caps"] | {"order": 1}}, "live.caps.order: expected at least 10 USD, the venue's"),
    ],
)
def test_contradictions_are_found_with_their_place(step: str, changes: dict[str, object], said: str) -> None:
    assert any(text.startswith(said) for text in contradictions(**{step: {**LADDER[step], **changes}}))


def test_an_entrant_lacks_what_it_has_not_shown() -> None:
    rule = msgspec.convert(LADDER, LadderRules).live
    assert find_lacks(rule, LadderFigures()) == ["0 of 7 days", "0 of 20 fills", "no drift was measured"]
    assert find_lacks(rule, LadderFigures(7, 20, D(10), D(15))) == []
    broken = LadderFigures(7, 20, D("10.01"), D("15.1"), "the position is another")
    assert find_lacks(rule, broken) == find_breaches(rule, broken)
    assert [text.split()[1] for text in find_breaches(rule, broken)] == ["drawdown", "drift", "unexplained"]
    assert find_breaches(rule, LadderFigures()) == [], "a new entrant has nothing to show yet, and may stay"


def test_a_commitment_counts_at_the_worst_price_of_its_fills() -> None:
    marks = {"BTC": D(100)}
    for side, price, state, usd in (
        (OrderSide.BUY, 90, "open", 180), (OrderSide.SELL, 90, "open", 202), (OrderSide.SELL, 110, "open", 220),
        (OrderSide.BUY, 90, "held", 200), (OrderSide.SELL, 110, "held", 220), (OrderSide.SELL, 90, "traded", 180),
    ):  # fmt: skip
        assert Commitment("a", "BTC", side, D(2), D(price), state).usd(marks) == usd  # type: ignore[arg-type]


@dataclass
class Sent:
    """An order at the simulated venue. `worst` is the price of its fills: a sale above its limit, at what was bid."""

    account: str
    symbol: str
    side: OrderSide
    left: Decimal
    price: Decimal
    worst: Decimal


class Venue:
    """The truth of two accounts at a venue, by which the caps are measured, whatever the service was told."""

    def __init__(self) -> None:
        self.marks = {"BTC": D(100), "ETH": D(10)}
        self.held: dict[tuple[str, str], list[Decimal]] = {}
        self.orders: list[Sent] = []
        self.opened: list[tuple[int, str, Decimal]] = []

    def committed(self, hour: int) -> list[Commitment]:
        sides = {True: OrderSide.BUY, False: OrderSide.SELL}
        held = [
            Commitment(*key, sides[quantity > 0], abs(quantity), cost / abs(quantity), "held")
            for key, (quantity, cost) in self.held.items()
        ]
        waiting = [Commitment(o.account, o.symbol, o.side, o.left, o.price) for o in self.orders]
        traded = [
            Commitment(whose, "BTC", OrderSide.BUY, D(1), usd, "traded")
            for at, whose, usd in self.opened
            if at > hour - 24
        ]
        return [*held, *waiting, *traded]

    def fill(self, order: Sent, share: Decimal, hour: int) -> None:
        if not share:
            return
        quantity, price = order.left * share, order.worst
        order.left -= quantity
        self.opened.append((hour, order.account, quantity * price))
        key, signed = (order.account, order.symbol), order.side.direction * quantity
        before, cost = self.held.pop(key, [D(0), D(0)])
        after = before + signed
        if before * signed >= 0:
            cost += quantity * price
        elif before * after > 0:
            cost = cost * after / before
        else:
            cost = abs(after) * price
        if after:
            self.held[key] = [after, cost]

    def values(self, name: str) -> Decimal:
        return sum((cost for (whose, _), (_, cost) in self.held.items() if whose == name), D(0))


@given(st.integers(0, 2**32))
def test_no_sequence_exceeds_a_cap(seed: int) -> None:
    """Two accounts order, limits rest, answers are lost and fill later, in any order, over days."""
    random, venue, hour = Random(seed), Venue(), 0
    for _ in range(150):
        name, symbol, share = random.choice("ab"), random.choice(["BTC", "ETH"]), D(random.choice(["0", "0.5", "1"]))
        match random.choice(["order"] * 8 + ["fill", "fill", "cancel", "close", "hours", "move"]):
            case "order":
                side, price = random.choice(list(OrderSide)), venue.marks[symbol] * random.randint(90, 105) / 100
                order = Commitment(name, symbol, side, D(random.randint(30, 105)) / price, price)
                if refusal_by_caps(CAPS, name, venue.committed(hour), venue.marks, order.usd(venue.marks)) is None:
                    bid = venue.marks[symbol] * D("1.01")
                    worst = price if side is OrderSide.BUY else max(price, bid)
                    assert worst * order.quantity <= CAPS.order
                    venue.orders.append(Sent(name, symbol, side, order.quantity, price, worst))
                    venue.fill(venue.orders[-1], share, hour)
            case "fill" if venue.orders:
                venue.fill(random.choice(venue.orders), share, hour)
            case "cancel" if venue.orders:
                venue.orders.remove(random.choice(venue.orders))
            case "close":
                venue.held.pop((name, symbol), None)
            case "hours":
                hour += random.randint(1, 20)
            case "move":
                venue.marks[symbol] *= D(random.randint(80, 125)) / 100
        venue.orders = [each for each in venue.orders if each.left > 0]
        for name in "ab":
            assert venue.values(name) <= CAPS.account
            opened = [usd for at, whose, usd in venue.opened if whose == name and at > hour - 24]
            assert sum(opened) <= CAPS.day
        assert venue.values("a") + venue.values("b") <= CAPS.total
