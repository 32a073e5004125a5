"""One model's season: a trader of moderate wits on the real rules of the exchange, minute by minute.

Orders, fills, funding, triggers and liquidations follow `domain.exchange.rules`, so the books balance by themselves.
What is made up is the deciding: a signal of the variant's kind, the model's own noise, and a little luck.
"""

import math
from array import array
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Final, NamedTuple

import msgspec
from season_market import SeasonMarket
from season_records import RunNotes, SeasonRows

from trader.domain.agents.tools import ClosePosition, CreatePosition, FetchIndicators, Holding, UpdateExitPlan
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import ClosedTrade, Posting, Rules
from trader.domain.exchange.orders import CLOSING_SIDE, ExitPlan, Order, OrderAnswer, OrderSide, OrderType, Side
from trader.domain.exchange.rules import place, review, set_exit_plan
from trader.domain.market.markets import PLAIN_FUNDING_RATE
from trader.domain.models import Model, VariantId
from trader.domain.money import ZERO, floor_to, round_to
from trader.store.exchange.bulk import copy_line
from trader.store.exchange.ledger_rows import (
    closed_row,
    fill_row,
    funding_row,
    insurance_row,
    limit_order_row,
    open_row,
    request_row,
)

ACTIVE_MINUTES: Final = 10
"""As `services.portfolio.ACTIVE_AFTER_ORDER`."""


ALL_IN_RATE: Final = 0.002
"""How often an Apex model stakes nearly all it has, with a stop too far away to help: some of these are liquidated."""

ALL_IN_PATIENCE: Final = 20
"""How much longer it holds on to that, and does not touch its exit plan."""


class Temper(NamedTuple):
    """How a variant trades: the minutes it looks back, whether it follows (1) or fades (-1) what it sees, its usual
    leverage, the part of its equity in a position's notional, its stop and target, and how long it holds."""

    lookback: int
    sense: int
    leverage: int
    size: float
    stop: float
    target: float
    hold_minutes: int


TEMPERS: Final = {
    VariantId.APEX: Temper(45, 1, 10, 0.55, 0.006, 0.011, 55),
    VariantId.TRENDSURFER: Temper(240, 1, 5, 0.35, 0.010, 0.024, 110),
    VariantId.CONTRARIAN: Temper(90, -1, 3, 0.30, 0.008, 0.009, 75),
    VariantId.SOVEREIGN: Temper(180, 0, 4, 0.30, 0.009, 0.015, 90),
}


class Trader:
    """An account and the model that trades it, from the first minute of the market to the last."""

    def __init__(
        self, model: Model, account: Account, market: SeasonMarket, rules: Rules, cycle: int, payload_from: int
    ) -> None:
        self.account = account
        self.rows = SeasonRows(model, account.run, payload_from)
        self._model = model
        self._market = market
        self._rules = rules
        self._cycle = cycle
        self._rng = rng = Random(f"season:{model.id}")
        self._temper = TEMPERS[model.variant]
        self._skill = rng.gauss(0.27, 0.10)
        self._noise = rng.uniform(0.5, 1.4)
        self._boldness = rng.uniform(0.5, 1.4)
        self._patience = rng.uniform(1.8, 3.7)
        self._failure_rate = rng.choice((0.003, 0.01, 0.02, 0.05)) * rng.uniform(0.5, 1.5)
        self._symbols = sorted(market.markets, key=lambda _: rng.random())[: rng.choice((2, 3, 3))]
        self._decides_at = 1 + rng.randrange(cycle)
        self._active_until = -1
        self._leave_at: dict[str, int] = {}
        self._stubborn: frozenset[str] = frozenset()
        self._refresh()

    @property
    def times(self) -> Sequence[datetime]:
        return self._market.times

    # -- time

    def follow(self, first: int, last: int, lines: list[list[str]]) -> None:
        """Live through the minutes [first, last); snapshots go to `lines`, one list per minute."""
        market = self._market
        times, rows = market.written_times, self.rows
        for minute in range(first, last):
            is_hour = not (market.first + minute) % 60
            if self._watched and (is_hour or self._is_touched(minute)):
                self._book(review(self.account, market.moment(minute), self._rules, _rate), minute)
            if minute == self._decides_at:
                self._decide(minute)
            if self._valued or minute <= self._active_until or is_hour or minute == 0:
                gain = ZERO
                for marks, quantity, entry in self._valued:
                    gain += quantity * marks[minute] - entry
                net = self._cash + gain
                if net <= self._alarm:
                    self._book(review(self.account, market.moment(minute), self._rules, _rate), minute)
                    net, gain = self._value(minute)
                lines[minute - first].append(f"{rows.prefix}{net}\t{self._cash}\t{gain}\t{times[minute]}\n")
                rows.note_value(net, times[minute], is_new_hour=is_hour)

    def _value(self, minute: int) -> tuple[Decimal, Decimal]:
        gain = sum((quantity * marks[minute] - entry for marks, quantity, entry in self._valued), ZERO)
        return self._cash + gain, gain

    def _is_touched(self, minute: int) -> bool:
        """Whether a review may find something: never False when it would."""
        for halves, low, high, until in self._watched:
            if halves[minute] <= low or halves[minute] >= high or minute >= until:
                return True
        return False

    def _refresh(self) -> None:
        """What `follow` needs of the account, made again after each of its changes."""
        account, market = self.account, self._market
        self._cash = account.cash
        self._valued = [
            (market.marks[p.symbol], p.side.direction * p.quantity, p.side.direction * p.entry_notional)
            for p in account.positions.values()
        ]
        self._watched = [self._watch(p.symbol, p.side, p.exit_plan) for p in account.positions.values()]
        for order in account.resting:
            price = market.half_ticks(order.symbol, order.limit_price)
            below, above = (price + 20, float("inf")) if order.side is OrderSide.BUY else (0.0, price - 20)
            self._watched.append((market.halves[order.symbol], below, above, market.minutes))
        rates = self._rules.markets
        needed = (p.entry_notional * rates[p.symbol].maintenance_rate for p in account.positions.values())
        self._alarm = 2 * sum(needed, ZERO) if account.positions else Decimal(-1)

    def _watch(self, symbol: str, side: Side, plan: ExitPlan) -> tuple["array[int]", float, float, int]:
        market = self._market
        stop = 0.0 if plan.stop is None else market.half_ticks(symbol, plan.stop)
        target = float("inf") if plan.target is None else market.half_ticks(symbol, plan.target)
        if side is Side.SHORT:
            stop = float("inf") if plan.stop is None else stop
            target = 0.0 if plan.target is None else target
        until = market.minutes
        if plan.time_exit is not None:
            until = (plan.time_exit - market.times[0]) // timedelta(minutes=1)
        return market.halves[symbol], min(stop, target), max(stop, target), until

    # -- the books

    def _book(self, posting: Posting | None, minute: int) -> OrderAnswer | None:
        """Take a booking over into the rows."""
        if posting is None:
            return None
        rows = self.rows
        self.account = posting.account
        rows.closed += [copy_line(msgspec.structs.astuple(closed_row(posting, trade))) for trade in posting.trades]
        rows.fills += [copy_line(msgspec.structs.astuple(fill_row(posting, fill))) for fill in posting.fills]
        rows.funding += [copy_line(msgspec.structs.astuple(funding_row(posting, each))) for each in posting.funding]
        rows.insurance += [
            copy_line(msgspec.structs.astuple(insurance_row(posting, each))) for each in posting.insurance
        ]
        for change in posting.resting:
            rows.limits[change.order.id] = copy_line(msgspec.structs.astuple(limit_order_row(posting, change)))
        for position in posting.positions:
            rows.open[position.id] = copy_line(msgspec.structs.astuple(open_row(posting, position)))
        for trade in posting.trades:
            self._forget(trade, minute)
        if posting.answer is not None:
            rows.requests.append(copy_line(msgspec.structs.astuple(request_row(posting, posting.answer))))
            self._active_until = minute + ACTIVE_MINUTES
        self._refresh()
        return posting.answer

    def _forget(self, trade: ClosedTrade, minute: int) -> None:
        if trade.parent_id is None:
            self.rows.open.pop(trade.part.id, None)
            self._leave_at.pop(trade.part.symbol, None)

    # -- decisions

    def _decide(self, minute: int) -> None:
        rng = self._rng
        self._decides_at = minute + self._cycle
        notes = RunNotes(self._model, self._market.times[minute], rng)
        if rng.random() < self._failure_rate:
            self.rows.add_run(notes.failed())
            return
        if rng.random() < 0.22:
            symbol = rng.choice(self._symbols)
            result = {"candles": 200} if rng.random() > 0.03 else None
            notes.add(FetchIndicators(symbol=symbol, interval=rng.choice(("5m", "15m", "1h", "4h"))), result)
        before = len(self.rows.requests)
        for symbol in self._symbols:
            if symbol in self.account.positions:
                self._look_after(symbol, minute, notes)
            elif rng.random() < 0.40:
                self._look_for_entry(symbol, minute, notes)
        did = len(self.rows.requests) > before
        reason = "Orders placed; the exit plans guard them." if did else rng.choice(_REASONS)
        notes.add(Holding(reason=reason), {"held": not did})
        self.rows.add_run(notes.completed(reason))

    def _signal(self, symbol: str, minute: int) -> float:
        """What the model expects of the market, in usual moves of the time it would hold."""
        market, temper, rng = self._market, self._temper, self._rng
        move = market.move(symbol, minute - temper.lookback, minute)
        scale = 0.00055 * math.sqrt(temper.lookback)
        sense = temper.sense or (1 if abs(move) > 1.2 * scale else -1)
        luck = market.move(symbol, minute, minute + temper.hold_minutes) / (0.00055 * math.sqrt(temper.hold_minutes))
        return 0.5 * sense * move / scale + self._skill * luck + self._noise * rng.gauss()

    def _look_for_entry(self, symbol: str, minute: int, notes: RunNotes) -> None:
        rng, temper, market = self._rng, self._temper, self._market
        signal = self._signal(symbol, minute)
        if abs(signal) < 0.35:
            return
        side = OrderSide.BUY if signal > 0 else OrderSide.SELL
        mark = market.marks[symbol][minute]
        equity = float(self._value(minute)[0])
        confidence = round(min(95.0, 45 + 18 * abs(signal) + rng.gauss(0, 6)))
        notional = equity * temper.size * self._boldness * (0.5 + confidence / 100) * rng.uniform(0.6, 1.2)
        if rng.random() < 0.004:
            notional *= 40  # now and then a model forgets what it has
        leverage = max(1, round(temper.leverage * rng.uniform(0.6, 1.4)))
        is_all_in = self._model.variant is VariantId.APEX and rng.random() < ALL_IN_RATE
        if is_all_in:
            leverage = market.markets[symbol].leverage_max
            notional = equity * leverage * 0.8
        quantity = floor_to(Decimal(repr(notional)) / mark, market.markets[symbol].lot)
        plan = self._plan(symbol, side, mark, minute, distance=30 if is_all_in else 1)
        decision = CreatePosition(
            symbol=symbol, side=side.opens, quantity=float(quantity), leverage=float(leverage),
            stop=float(plan.stop or 0),
            target=None if plan.target is None else float(plan.target), invalidation=plan.invalidation or "",
            time_exit=plan.time_exit, confidence=float(confidence),
        )  # fmt: skip
        if quantity <= 0:
            return
        is_limit = rng.random() < 0.06
        tick = market.markets[symbol].tick
        limit = round_to(mark * (1 - side.direction * Decimal("0.0006")), tick) if is_limit else None
        order = Order(
            account_id=self.account.id, symbol=symbol, side=side, quantity=quantity, leverage=Decimal(leverage),
            type=OrderType.LIMIT if is_limit else OrderType.MARKET, limit_price=limit, exit_plan=plan,
            confidence=Decimal(confidence), client_order_id=notes.client_order_id, invocation_id=notes.id,
        )  # fmt: skip
        if is_limit and self.account.resting:
            return
        notes.add_order(decision, self._place(order, minute))
        held = temper.hold_minutes * self._patience * rng.expovariate(1)
        self._leave_at[symbol] = minute + int(held * (ALL_IN_PATIENCE if is_all_in else 1)) + 5
        self._stubborn = self._stubborn | {symbol} if is_all_in else self._stubborn - {symbol}

    def _place(self, order: Order, minute: int) -> OrderAnswer:
        answer = self._book(place(self.account, order, self._market.moment(minute), self._rules, _rate), minute)
        assert answer is not None, "an order always has an answer"
        return answer

    def _plan(self, symbol: str, side: OrderSide, mark: Decimal, minute: int, distance: int = 1) -> ExitPlan:
        rng, temper = self._rng, self._temper
        tick = self._market.markets[symbol].tick
        away = Decimal(repr(round(temper.stop * rng.uniform(0.6, 1.6), 6))) * distance
        gain = Decimal(repr(round(temper.target * rng.uniform(0.6, 1.6), 6)))
        until = minute + int(temper.hold_minutes * rng.uniform(4, 9))
        return ExitPlan(
            stop=round_to(mark * (1 - side.direction * away), tick),
            target=round_to(mark * (1 + side.direction * gain), tick) if rng.random() < 0.9 else None,
            invalidation=rng.choice(_INVALIDATIONS),
            time_exit=self._market.times[0] + timedelta(minutes=until) if rng.random() < 0.5 else None,
        )

    def _look_after(self, symbol: str, minute: int, notes: RunNotes) -> None:
        rng, position = self._rng, self.account.positions[symbol]
        if minute >= self._leave_at.get(symbol, 0):
            part = rng.choice((0.25, 0.5)) if rng.random() < 0.08 else 1.0
            lot = self._market.markets[symbol].lot
            quantity = position.quantity if part == 1.0 else floor_to(position.quantity * Decimal(repr(part)), lot)
            order = Order(
                account_id=self.account.id, symbol=symbol, side=CLOSING_SIDE[position.side], reduce_only=True,
                quantity=quantity or position.quantity, client_order_id=notes.client_order_id, invocation_id=notes.id,
            )  # fmt: skip
            notes.add_order(
                ClosePosition(symbol=symbol, fraction=None if part == 1.0 else part), self._place(order, minute)
            )
        elif symbol not in self._stubborn and rng.random() < 0.05:
            mark = self._market.marks[symbol][minute]
            plan = self._plan(symbol, OrderSide.BUY if position.side is Side.LONG else OrderSide.SELL, mark, minute)
            tried = set_exit_plan(self.account, symbol, plan, self._market.moment(minute), self._rules)
            done = isinstance(tried, Posting)
            if isinstance(tried, Posting):
                self._book(tried, minute)
            notes.add(UpdateExitPlan(symbol=symbol, stop=float(plan.stop or 0)), {"set": done}, rejected=not done)


def _rate(_: str, __: datetime) -> Decimal:
    return PLAIN_FUNDING_RATE


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
