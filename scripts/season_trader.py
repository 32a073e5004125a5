"""Simulated traders of a season: random decisions on the real rules of the exchange, minute by minute.

Orders, fills, funding, triggers and liquidations follow `domain.exchange.rules`, so the books balance by themselves.
Only the decisions are simulated: a signal of the variant's kind, noise, and a little foresight.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from random import Random
from typing import Final, NamedTuple

from season_records import Rows, SimulatedInvocation

from trader.domain.agents.tools import ClosePosition, CreatePosition, FetchIndicators, Holding, UpdateExitPlan
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.exchange.orders import CLOSING_SIDE, ExitPlan, Order, OrderAnswer, OrderSide, OrderType, Side
from trader.domain.exchange.rules import place, set_exit_plan
from trader.domain.exchange.tick_rules import Moment, apply_tick
from trader.domain.market.markets import PLAIN_FUNDING_RATE, SIMULATED_MARKETS, Market
from trader.domain.models import Model, VariantId
from trader.domain.money import ZERO, floor_to, round_to
from trader.domain.portfolio.histories import Snapshot
from trader.gateways.market.synthetic import SyntheticSource

MINUTE: Final = timedelta(minutes=1)

SPAN_MINUTES: Final = 24 * 60
"""Traders follow the market one after the other, each for a day, so that what they see of it is made once for all."""

ACTIVE_MINUTES: Final = 10
"""As `services.portfolio.snapshots.ACTIVE_AFTER_ORDER`."""

ALL_IN_RATE: Final = 0.002
"""How often an Apex model stakes nearly all it has, with a stop too far away to help: some of these are liquidated."""

ALL_IN_PATIENCE: Final = 20
"""How much longer it holds such a position, whose exit plan it does not change."""

MINUTE_VOLATILITY: Final = 0.00055

_REASONS: Final = (
    "No setup: momentum and volume disagree.",
    "The range holds; entries only at its edges.",
    "Spread and funding eat the edge of this move.",
    "Waiting for the hourly close before the next step.",
    "The exit plans in place are still right.",
)
_INVALIDATIONS: Final = (
    "a close beyond the stop's side of the range",
    "momentum turns on the 15m candles",
    "volume dries up before the target",
)


class SeasonMarket:
    """The synthetic market at every full minute in [start, end]; minutes are counted from `start`."""

    def __init__(self, seed: int, markets: Mapping[str, Market], start: datetime, end: datetime) -> None:
        rows = {symbol: SIMULATED_MARKETS[symbol]._replace(rules=rules) for symbol, rules in markets.items()}
        self._source = SyntheticSource(seed, tuple(rows), rows)
        self.markets = self._source.markets
        self.times = [start + number * MINUTE for number in range((end - start) // MINUTE + 1)]
        self._span = lru_cache(maxsize=2)(self._make_span)
        self.marks: dict[str, list[Decimal]] = {symbol: [] for symbol in markets}
        for minute in range(len(self.times)):
            for symbol, mark in self.moment(minute).marks.items():
                self.marks[symbol].append(mark)
        self.prices = {symbol: array("d", map(float, marks)) for symbol, marks in self.marks.items()}

    def moment(self, minute: int) -> Moment:
        """Return the markets at a minute, all quotes new."""
        span, place = divmod(minute, SPAN_MINUTES)
        return self._span(span)[place]

    def _make_span(self, span: int) -> list[Moment]:
        """Return the moments of a span, ascending, since the source caches only the latest ones."""
        moments = []
        for at in self.times[span * SPAN_MINUTES : (span + 1) * SPAN_MINUTES]:
            tick = self._source.tick(int(at.timestamp()))
            marks = {symbol: quote.mark for symbol, quote in tick.quotes.items()}
            moments.append(Moment(tick.at, tick.quotes, marks, frozenset(marks)))
        return moments

    def move(self, symbol: str, since: int, minute: int) -> float:
        """Return the relative change of the mark between two minutes, cut to those of the season."""
        prices = self.prices[symbol]
        return prices[min(minute, len(prices) - 1)] / prices[max(since, 0)] - 1


class Style(NamedTuple):
    """How a variant trades: the minutes it looks back, whether it follows (1) or fades (-1) a move, its usual leverage,
    the share of its equity in a position's notional, its stop and target, and how long it holds."""

    lookback: int
    sense: int
    leverage: int
    size: float
    stop: float
    target: float
    hold_minutes: int


STYLES: Final = {
    VariantId.APEX: Style(45, 1, 10, 0.55, 0.006, 0.011, 55),
    VariantId.TRENDSURFER: Style(240, 1, 5, 0.35, 0.010, 0.024, 110),
    VariantId.CONTRARIAN: Style(90, -1, 3, 0.30, 0.008, 0.009, 75),
    VariantId.SOVEREIGN: Style(180, 0, 4, 0.30, 0.009, 0.015, 90),
}


class Watch(NamedTuple):
    """A position or a resting order: within (low, high) and before `until` the exchange has nothing to do for it."""

    prices: "array[float]"
    low: float
    high: float
    until: int


class Trader:
    """An account and its simulated model. Its public lists hold the records since they were last emptied."""

    def __init__(
        self, model: Model, account: Account, market: SeasonMarket, rules: Rules, cycle: int, payloads_from: datetime
    ) -> None:
        self.account = account
        self.postings: list[Posting] = []
        self.snapshots: list[Snapshot] = []
        self.rows: Rows = defaultdict(list)
        """Of its invocations."""
        self._model = model
        self._market = market
        self._rules = rules
        self._cycle = cycle
        self._payloads_from = payloads_from
        self._rng = rng = Random(f"season:{model.id}")
        self._style = STYLES[model.variant]
        self._skill = rng.gauss(0.27, 0.10)
        self._noise = rng.uniform(0.5, 1.4)
        self._boldness = rng.uniform(0.5, 1.4)
        self._patience = rng.uniform(1.8, 3.7)
        self._failure_rate = rng.choice((0.003, 0.01, 0.02, 0.05)) * rng.uniform(0.5, 1.5)
        self._symbols = rng.sample(sorted(market.markets), min(len(market.markets), rng.choice((2, 3, 3))))
        self._decides_at = 1 + rng.randrange(cycle)
        self._active_until = -1
        self._leave_at: dict[str, int] = {}
        self._stubborn: set[str] = set()
        self._refresh()

    def follow(self, first: int, last: int) -> None:
        """Trade through the minutes [first, last)."""
        for minute in range(first, last):
            at = self._market.times[minute]
            is_hour = not at.minute
            if self._watches and (is_hour or self._is_touched(minute)):
                self._review(minute)
            if minute == self._decides_at:
                self._decide(minute)
            if self._valued or minute <= self._active_until or is_hour or minute == 0:
                gain = self._gain(minute)
                if self._valued and self._cash + gain <= self._alarm:
                    self._review(minute)
                    gain = self._gain(minute)
                account, worth = self.account, self._cash + gain
                notional = sum((abs(quantity) * marks[minute] for marks, quantity, _ in self._valued), ZERO)
                self.snapshots.append(
                    Snapshot(
                        account_id=account.id, run_id=account.run.id, net_portfolio=worth, cash=self._cash,
                        unrealized_pnl=gain, created_at=at, leverage=float(notional / worth) if worth > 0 else 0.0,
                    )
                )  # fmt: skip

    # -- the account

    def _review(self, minute: int) -> None:
        posting = apply_tick(self.account, self._market.moment(minute), self._rules, _rate)
        if posting is not None:
            self._apply(posting)

    def _apply(self, posting: Posting) -> None:
        self.account = posting.account
        self.postings.append(posting)
        self._refresh()

    def _refresh(self) -> None:
        """Cache the values of the account that `follow` reads every minute."""
        account, market = self.account, self._market
        self._cash = account.cash
        self._valued = [
            (market.marks[p.symbol], p.side.direction * p.quantity, p.side.direction * p.entry_notional)
            for p in account.positions.values()
        ]
        self._watches = [self._watch(p.symbol, p.side, p.exit_plan) for p in account.positions.values()]
        for order in account.resting:
            price, slack = float(order.limit_price), 10 * float(market.markets[order.symbol].tick)
            low, high = (price + slack, math.inf) if order.side is OrderSide.BUY else (0.0, price - slack)
            self._watches.append(Watch(market.prices[order.symbol], low, high, len(market.times)))
        markets = self._rules.markets
        needed = (markets[p.symbol].maintenance(p.entry_notional) for p in account.positions.values())
        self._alarm = 2 * sum(needed, ZERO)

    def _watch(self, symbol: str, side: Side, plan: ExitPlan) -> Watch:
        stop = None if plan.stop is None else float(plan.stop)
        target = None if plan.target is None else float(plan.target)
        low, high = (stop, target) if side is Side.LONG else (target, stop)
        until = len(self._market.times)
        if plan.time_exit is not None:
            until = (plan.time_exit - self._market.times[0]) // MINUTE
        return Watch(self._market.prices[symbol], low or 0.0, high or math.inf, until)

    def _gain(self, minute: int) -> Decimal:
        """Return the unrealized profit in quote currency."""
        return sum((quantity * marks[minute] - entry for marks, quantity, entry in self._valued), ZERO)

    def _is_touched(self, minute: int) -> bool:
        """Return whether a review may have work; never a false negative."""
        return any(not low < prices[minute] < high or minute >= until for prices, low, high, until in self._watches)

    # -- decisions

    def _decide(self, minute: int) -> None:
        rng = self._rng
        self._decides_at = minute + self._cycle
        at = self._market.times[minute]
        invocation = SimulatedInvocation(self._model, at, rng)
        response = None
        if rng.random() >= self._failure_rate:
            response = self._trade(minute, invocation)
        for table, rows in invocation.rows(response, has_payload=at >= self._payloads_from).items():
            self.rows[table] += rows

    def _trade(self, minute: int, invocation: SimulatedInvocation) -> str:
        """Make the decisions of an invocation. Return the model's response."""
        rng = self._rng
        if rng.random() < 0.22:
            result = {"candles": 200} if rng.random() > 0.03 else None
            symbol = rng.choice(self._symbols)
            decision = FetchIndicators(symbol=symbol, interval=rng.choice(("5m", "15m", "1h", "4h")))
            invocation.add(decision, result)
        has_ordered = False
        for symbol in self._symbols:
            if symbol in self.account.positions:
                has_ordered |= self._look_after(symbol, minute, invocation)
            elif rng.random() < 0.40:
                has_ordered |= self._look_for_entry(symbol, minute, invocation)
        reason = "Orders placed; the exit plans guard them." if has_ordered else rng.choice(_REASONS)
        invocation.add(Holding(reason=reason), {"held": not has_ordered})
        return reason

    def _signal(self, symbol: str, minute: int) -> float:
        """Return the model's expected move of the market, in typical moves over its holding time."""
        market, style, rng = self._market, self._style, self._rng
        move = market.move(symbol, minute - style.lookback, minute) / (MINUTE_VOLATILITY * math.sqrt(style.lookback))
        sense = style.sense or (1 if abs(move) > 1.2 else -1)
        later = market.move(symbol, minute, minute + style.hold_minutes)
        foresight = self._skill * later / (MINUTE_VOLATILITY * math.sqrt(style.hold_minutes))
        return 0.5 * sense * move + foresight + self._noise * rng.gauss()

    def _look_for_entry(self, symbol: str, minute: int, invocation: SimulatedInvocation) -> bool:
        """Open a position when there is a signal. Return whether an order was placed."""
        rng, style, market = self._rng, self._style, self._market.markets[symbol]
        signal = self._signal(symbol, minute)
        is_limit = rng.random() < 0.06
        if abs(signal) < 0.35 or (is_limit and self.account.resting):
            return False
        side = OrderSide.BUY if signal > 0 else OrderSide.SELL
        mark = self._market.marks[symbol][minute]
        equity = float(self._cash + self._gain(minute))
        confidence = round(min(95.0, 45 + 18 * abs(signal) + rng.gauss(0, 6)))
        notional = equity * style.size * self._boldness * (0.5 + confidence / 100) * rng.uniform(0.6, 1.2)
        if rng.random() < 0.004:
            notional *= 40  # now and then a model forgets what it has
        leverage = max(1, round(style.leverage * rng.uniform(0.6, 1.4)))
        is_all_in = self._model.variant is VariantId.APEX and rng.random() < ALL_IN_RATE
        if is_all_in:
            leverage = market.leverage_max
            notional = equity * leverage * 0.8
        quantity = floor_to(Decimal(repr(notional)) / mark, market.lot)
        if quantity <= 0:
            return False
        plan = self._plan(symbol, side, minute, distance=30 if is_all_in else 1)
        limit = round_to(mark * (1 - side.direction * Decimal("0.0006")), market.tick) if is_limit else None
        order = Order(
            account_id=self.account.id, symbol=symbol, side=side, quantity=quantity, leverage=Decimal(leverage),
            type=OrderType.LIMIT if is_limit else OrderType.MARKET, limit_price=limit, exit_plan=plan,
            confidence=Decimal(confidence), client_order_id=invocation.client_order_id, invocation_id=invocation.id,
        )  # fmt: skip
        decision = CreatePosition(
            symbol=symbol, side=side.opens, quantity=float(quantity), leverage=float(leverage),
            stop=float(plan.stop or 0), target=None if plan.target is None else float(plan.target),
            invalidation=plan.invalidation or "", time_exit=plan.time_exit, confidence=float(confidence),
        )  # fmt: skip
        invocation.add_order(decision, self._place(order, minute))
        held = style.hold_minutes * self._patience * rng.expovariate(1)
        self._leave_at[symbol] = minute + int(held * (ALL_IN_PATIENCE if is_all_in else 1)) + 5
        (self._stubborn.add if is_all_in else self._stubborn.discard)(symbol)
        return True

    def _place(self, order: Order, minute: int) -> OrderAnswer:
        posting = place(self.account, order, self._market.moment(minute), self._rules, _rate)
        self._apply(posting)
        self._active_until = minute + ACTIVE_MINUTES
        assert posting.answer is not None, "an order always has an answer"
        return posting.answer

    def _plan(self, symbol: str, side: OrderSide, minute: int, distance: int = 1) -> ExitPlan:
        rng, style = self._rng, self._style
        mark, tick = self._market.marks[symbol][minute], self._market.markets[symbol].tick
        away = Decimal(repr(round(style.stop * rng.uniform(0.6, 1.6), 6))) * distance
        gain = Decimal(repr(round(style.target * rng.uniform(0.6, 1.6), 6)))
        until = minute + int(style.hold_minutes * rng.uniform(4, 9))
        return ExitPlan(
            stop=round_to(mark * (1 - side.direction * away), tick),
            target=round_to(mark * (1 + side.direction * gain), tick) if rng.random() < 0.9 else None,
            invalidation=rng.choice(_INVALIDATIONS),
            time_exit=self._market.times[0] + until * MINUTE if rng.random() < 0.5 else None,
        )

    def _look_after(self, symbol: str, minute: int, invocation: SimulatedInvocation) -> bool:
        """Close a position, change its exit plan, or leave it. Return whether an order was placed."""
        rng, position = self._rng, self.account.positions[symbol]
        if minute >= self._leave_at.get(symbol, 0):
            part = rng.choice((0.25, 0.5)) if rng.random() < 0.08 else None
            quantity = position.quantity
            if part is not None:
                lot = self._market.markets[symbol].lot
                quantity = floor_to(position.quantity * Decimal(repr(part)), lot) or position.quantity
            order = Order(
                account_id=self.account.id, symbol=symbol, side=CLOSING_SIDE[position.side], reduce_only=True,
                quantity=quantity, client_order_id=invocation.client_order_id, invocation_id=invocation.id,
            )  # fmt: skip
            invocation.add_order(ClosePosition(symbol=symbol, fraction=part), self._place(order, minute))
            return True
        if symbol not in self._stubborn and rng.random() < 0.05:
            plan = self._plan(symbol, OrderSide.BUY if position.side is Side.LONG else OrderSide.SELL, minute)
            outcome = set_exit_plan(self.account, symbol, plan, self._market.moment(minute), self._rules)
            is_set = isinstance(outcome, Posting)
            if isinstance(outcome, Posting):
                self._apply(outcome)
            decision = UpdateExitPlan(symbol=symbol, stop=float(plan.stop or 0))
            invocation.add(decision, {"set": is_set}, rejected=not is_set)
        return False


def _rate(_: str, __: datetime) -> Decimal:
    return PLAIN_FUNDING_RATE
