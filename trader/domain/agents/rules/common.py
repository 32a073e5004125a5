"""What the rule agents share: going through the markets, who may enter, and saying why.

An agent is a pure function of view and limits. Per market it has an entry rule, which gives a `Signal` or the reason
why there is none, and a care rule for the position it holds. The desk sizes entries (`sizing`) so that the guard has
nothing to refuse, and ends every run with `holding` and the reasons, market by market.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Final, NamedTuple

from trader.domain.agents.rules.sizing import Room, Signal, room_of, sized
from trader.domain.agents.tools import ClosePosition, CreatePosition, Decision, Holding, UpdateExitPlan
from trader.domain.agents.view import ObservedMarket, ObservedPosition, VariantLimits, View
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import INTERVALS, Interval
from trader.domain.money import divide, format_decimal, from_number

COOLDOWN_CANDLES: Final = 3
"""Candles that must close after an exit before the market is entered again, so that one signal is not traded twice."""

RuleAgent = Callable[[View, VariantLimits], list[Decision]]
Entry = Callable[[View, ObservedMarket, Indicators], Signal | str]


class Cared(NamedTuple):
    """What is done about a position (None: nothing), and why."""

    decision: ClosePosition | UpdateExitPlan | None
    why: str


Care = Callable[[View, ObservedMarket, ObservedPosition], Cared]


def decide(view: View, limits: VariantLimits, interval: Interval, enter: Entry, care: Care) -> list[Decision]:
    """One cycle: care for what is held, enter where a rule says so, then `holding` with the reasons."""
    decisions: list[Decision] = []
    reasons = [f"{held.symbol}: no price" for held in view.positions if held.symbol not in view.markets]
    room = room_of(view, limits)
    for symbol, market in view.markets.items():
        held = view.position(symbol)
        if held is not None:
            decision, why = care(view, market, held) if not market.stale else Cared(None, _stale(market))
            if decision is not None:
                decisions.append(decision)
        else:
            order, why, room = _entry(view, limits, market, interval, enter, room)
            if order is not None:
                decisions.append(order)
        reasons.append(f"{symbol}: {why}")
    return [*decisions, Holding(reason=("; ".join(reasons) or "no market has a price")[:4000])]


def keep(_view: View, _market: ObservedMarket, held: ObservedPosition) -> Cared:
    """Care of a position that only its exit plan ends."""
    return Cared(None, f"{standing(held)}, {planned(held)}")


def standing(held: ObservedPosition) -> str:
    """How a position stands, in words."""
    size = format_decimal(held.quantity)
    return f"{held.side} {size} from {held.entry_price:.6g} at {held.mark:.6g} ({held.unrealized:+.2f})"


def planned(held: ObservedPosition) -> str:
    """Its exit plan, in words."""
    plan = held.exit_plan
    words = [f"stop {'none' if plan.stop is None else format_decimal(plan.stop)}"]
    if plan.target is not None:
        words.append(f"target {format_decimal(plan.target)}")
    if plan.time_exit is not None:
        words.append(f"until {plan.time_exit:%H:%M} UTC")
    return ", ".join(words)


def close(held: ObservedPosition, why: str) -> Cared:
    """The whole position closed at market."""
    return Cared(ClosePosition(symbol=held.symbol), f"{standing(held)} closed: {why}")


def _entry(
    view: View, limits: VariantLimits, market: ObservedMarket, interval: Interval, enter: Entry, room: Room
) -> tuple[CreatePosition | None, str, Room]:
    """The order that opens (None: there is none), why, and the room that is left for the other markets."""
    left = room._replace(shares=room.shares - 1)
    barred = _barred(view, limits, market, interval)
    if barred is not None:
        return None, barred, left
    indicators = market.indicators.get(interval)
    signal = f"no {interval} indicators" if indicators is None else enter(view, market, indicators)
    if isinstance(signal, str):
        return None, signal, left
    order = _not_yet(market, limits, signal) or sized(view, limits, market, signal, room)
    if isinstance(order, str):
        return None, f"{signal.why}, but {order}", left
    quantity, leverage = from_number(order.quantity), from_number(order.leverage)
    stop = format_decimal(from_number(order.stop))
    why = f"{signal.why}: {order.side} {format_decimal(quantity)} at {order.leverage:g}x, stop {stop}"
    notional = quantity * market.price
    spent = divide(notional, leverage) + notional * view.account.taker_fee_rate
    return order, why, Room(room.cash - spent, room.notional - notional, left.shares)


def _barred(view: View, limits: VariantLimits, market: ObservedMarket, interval: Interval) -> str | None:
    """Why the market may not be entered now, whatever its indicators say."""
    account = view.account
    if market.stale:
        return _stale(market)
    if account.equity <= 0:
        return "no equity left"
    if account.day_loss_percent >= limits.day_loss_max_percent:
        return f"a day's loss of {account.day_loss_percent:.1f} % allows no new position before 00:00 UTC"
    last = next((trade for trade in view.trades if trade.symbol == market.symbol), None)
    if last is not None and _candles_since(last.closed_at, view.at, interval) < COOLDOWN_CANDLES:
        return f"out by {last.close_reason} at {last.closed_at:%H:%M} UTC, waiting for {COOLDOWN_CANDLES} new candles"
    return None


def _stale(market: ObservedMarket) -> str:
    return f"the price is of {market.quoted_at:%H:%M:%S} UTC, too old to act on"


def _candles_since(moment: datetime, now: datetime, interval: Interval) -> int:
    """Candles that closed in (moment, now]."""
    span = INTERVALS[interval]
    epoch = datetime.min.replace(tzinfo=moment.tzinfo)
    return (now - epoch) // span - (moment - epoch) // span


def _not_yet(market: ObservedMarket, limits: VariantLimits, signal: Signal) -> str | None:
    """Why the guard would call the entry a reversal."""
    last = market.last_action
    if last is None or last.side is signal.side or last.cycles_ago > limits.reversal_cycles:
        return None
    return f"{last.side} was traded {last.cycles_ago} cycle(s) ago"


def dear(view: View, market: ObservedMarket, distance: float, share: float) -> str | None:
    """Why a move of `distance` is not worth its costs: both taker fees and the spread above that share of it."""
    costs = float(2 * view.account.taker_fee_rate * market.price + market.spread)
    if costs <= share * distance:
        return None
    return f"the move of {distance:.6g} is too small for costs of {costs:.6g} a unit"


def absent(**figures: float | bool | None) -> str:
    """Which of the figures are absent for want of history, in words."""
    return f"too little history for {', '.join(name for name, figure in figures.items() if figure is None)}"
