"""Framework shared by the rule agents: the cycle over the markets, general entry bans, and their reasons.

A rule agent is a stateless strategy. Its entry rule returns a `Signal` or the reason for none; its review rule decides
about the position it holds in a market. A cycle sizes entries (`sizing`) so that the guard accepts them, and ends with
`holding` and the reasons per market.
"""

from abc import ABC, abstractmethod
from datetime import datetime
from decimal import Decimal
from typing import Final, NamedTuple

from trader.agents.domain.rules.sizing import Entry, Room, Signal, entry_price, room_of, sized
from trader.agents.domain.strategy import Peek, Strategy
from trader.agents.domain.tools import ClosePosition, CreatePosition, Decision, Holding, UpdateExitPlan
from trader.agents.domain.view import ObservedMarket, ObservedPosition, VariantLimits, View
from trader.core.money import divide, format_decimal, from_number
from trader.exchange.domain.account import Position
from trader.exchange.domain.orders import Side
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import INTERVALS, Interval

COOLDOWN_CANDLES: Final = 3
"""Candles that must close after an exit before reentering the market, so that one signal is not traded twice."""


class Held(NamedTuple):
    """A position with the current indicators and mark of its market, and its price tick."""

    position: Position
    indicators: Indicators
    mark: Decimal
    tick: Decimal
    now: datetime


class Review(NamedTuple):
    """The decision about a held position (None for no action) and its reason."""

    decision: ClosePosition | UpdateExitPlan | None
    why: str


class RuleAgent(Strategy, ABC):
    """Base class of the rule agents, which decide on the first of their intervals."""

    @abstractmethod
    def stake(self, view: View, market: ObservedMarket, indicators: Indicators, side: Side) -> Signal | None:
        """Return stop, target and risk of an entry on a side, whatever speaks for it; None: too little history."""

    @abstractmethod
    def enter(self, view: View, market: ObservedMarket, indicators: Indicators) -> Signal | str:
        """Return the entry into a market without an open position, or why there is none."""

    @abstractmethod
    def may_enter(self, indicators: Indicators, price: float) -> bool:
        """Return whether indicators and price allow entering a market."""

    def review(self, view: View, market: ObservedMarket, held: ObservedPosition) -> Review:
        """Return the decision about an open position. By default there is none: the exit plan ends the position."""
        return Review(None, f"{describe_position(held)}, {describe_plan(held)}")

    def may_review(self, held: Held) -> bool:
        """Return whether the review may act on a position; False only when it certainly does nothing."""
        return False

    def may_act(self, peek: Peek) -> bool:
        """Return False when indicators and marks alone rule out any decision, as they usually do."""
        interval, positions = self.intervals[0], peek.account.positions
        for symbol in peek.symbols:
            position, indicators, mark = positions.get(symbol), peek.indicators(symbol, interval), peek.mark(symbol)
            if position is not None:
                if self.may_review(Held(position, indicators, mark, peek.markets[symbol].tick, peek.now)):
                    return True
            elif self.may_enter(indicators, float(mark)):
                return True
        return False

    def decide(self, view: View) -> list[Decision]:
        """Return the decisions of one cycle: reviews of positions, entries, then `holding` with the reasons."""
        decisions: list[Decision] = []
        reasons = [f"{held.symbol}: no price" for held in view.positions if held.symbol not in view.markets]
        room = room_of(view, self.limits)
        for symbol, market in view.markets.items():
            held = view.position(symbol)
            if held is not None:
                decision, why = Review(None, _stale(market)) if market.stale else self.review(view, market, held)
                if decision is not None:
                    decisions.append(decision)
            else:
                order, why, room = self._entry(view, market, room)
                if order is not None:
                    decisions.append(order)
            reasons.append(f"{symbol}: {why}")
        return [*decisions, Holding(reason=("; ".join(reasons) or "no market has a price")[:4000])]

    def entries(self, view: View) -> list[Entry]:
        """Return the order that would open each market without a position, on either side, where one is possible."""
        room, found = room_of(view, self.limits), []
        for symbol, market in view.markets.items():
            indicators = market.indicators.get(self.intervals[0])
            if indicators is None or market.stale or view.position(symbol) is not None:
                continue
            for stake in filter(None, (self.stake(view, market, indicators, side) for side in Side)):
                order = sized(view, self.limits, market, stake, room)
                if not isinstance(order, str):
                    entry = float(entry_price(market, stake.side))
                    way = abs(entry - (stake.stop if stake.target is None else stake.target))
                    cost = round(costs(view, market) / way, 3)
                    found.append(Entry(symbol, stake.side, order.stop, order.quantity, order.leverage, cost))
        return found

    def _entry(self, view: View, market: ObservedMarket, room: Room) -> tuple[CreatePosition | None, str, Room]:
        """Return the opening order (None for no entry), the reason, and the room left for the other markets."""
        interval, limits = self.intervals[0], self.limits
        left = room._replace(shares=room.shares - 1)
        ban = _entry_ban(view, limits, market, interval)
        if ban is not None:
            return None, ban, left
        indicators = market.indicators.get(interval)
        signal = f"no {interval} indicators" if indicators is None else self.enter(view, market, indicators)
        if isinstance(signal, str):
            return None, signal, left
        order = _reversal_ban(market, limits, signal) or sized(view, limits, market, signal, room)
        if isinstance(order, str):
            return None, f"{signal.why}, but {order}", left
        quantity, leverage = from_number(order.quantity), from_number(order.leverage)
        stop = format_decimal(from_number(order.stop))
        why = f"{signal.why}: {order.side} {format_decimal(quantity)} at {order.leverage:g}x, stop {stop}"
        notional = quantity * market.price
        spent = divide(notional, leverage) + notional * view.account.taker_fee_rate
        return order, why, Room(room.cash - spent, room.notional - notional, left.shares)


def describe_position(held: ObservedPosition) -> str:
    """Describe a position and its unrealized result."""
    size = format_decimal(held.quantity)
    return f"{held.side} {size} from {held.entry_price:.6g} at {held.mark:.6g} ({held.unrealized:+.2f})"


def describe_plan(held: ObservedPosition) -> str:
    """Describe the exit plan of a position."""
    plan = held.exit_plan
    words = [f"stop {'none' if plan.stop is None else format_decimal(plan.stop)}"]
    if plan.target is not None:
        words.append(f"target {format_decimal(plan.target)}")
    if plan.time_exit is not None:
        words.append(f"until {plan.time_exit:%H:%M} UTC")
    return ", ".join(words)


def close_position(held: ObservedPosition, why: str) -> Review:
    """Return the decision to close the whole position at market."""
    return Review(ClosePosition(symbol=held.symbol), f"{describe_position(held)} closed: {why}")


def _entry_ban(view: View, limits: VariantLimits, market: ObservedMarket, interval: Interval) -> str | None:
    """Return why the market may not be entered now, regardless of its indicators."""
    account = view.account
    if market.stale:
        return _stale(market)
    if account.equity <= 0:
        return "no equity left"
    if account.day_loss_percent >= limits.day_loss_max_percent:
        return f"a day's loss of {account.day_loss_percent:.1f} % allows no new position before 00:00 UTC"
    last = next((trade for trade in view.trades if trade.symbol == market.symbol), None)
    if last is not None and 0 <= _candles_since(last.closed_at, view.at, interval) < COOLDOWN_CANDLES:
        return f"out by {last.close_reason} at {last.closed_at:%H:%M} UTC, waiting for {COOLDOWN_CANDLES} new candles"
    return None


def _stale(market: ObservedMarket) -> str:
    return f"the price is of {market.quoted_at:%H:%M:%S} UTC, too old to act on"


def _candles_since(moment: datetime, now: datetime, interval: Interval) -> int:
    """Return how many candles closed in (moment, now]."""
    span = INTERVALS[interval]
    epoch = datetime.min.replace(tzinfo=moment.tzinfo)
    return (now - epoch) // span - (moment - epoch) // span


def _reversal_ban(market: ObservedMarket, limits: VariantLimits, signal: Signal) -> str | None:
    """Return why the guard would refuse the entry as a reversal."""
    last = market.last_action
    if last is None or last.side is signal.side or last.cycles_ago > limits.reversal_cycles:
        return None
    return f"{last.side} was traded {last.cycles_ago} cycle(s) ago"


def cost_refusal(view: View, market: ObservedMarket, distance: float, share: float) -> str | None:
    """Return why a move of `distance` is not worth its costs: both taker fees plus the spread exceed `share` of it."""
    cost = costs(view, market)
    if cost <= share * distance:
        return None
    return f"the move of {distance:.6g} is too small for costs of {cost:.6g} a unit"


def costs(view: View, market: ObservedMarket) -> float:
    """Return what it costs to open and close a unit at market: both taker fees plus the spread."""
    return float(2 * view.account.taker_fee_rate * market.price + market.spread)


def missing_history(**figures: float | bool | None) -> str:
    """Return a text naming the figures that are missing for lack of history."""
    return f"too little history for {', '.join(name for name, figure in figures.items() if figure is None)}"
