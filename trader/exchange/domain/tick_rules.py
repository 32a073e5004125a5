"""Tick rules of the paper exchange: how an update of the markets changes an account.

A tick is applied in this order: funding, targets and resting orders that it trades through, liquidation, exit plans.
Liquidation precedes exit plans because the margin engine takes over an account the moment its equity is gone; resting
orders precede both because the price passed them on its way. Nothing waits for a better price: a liquidation's step and
a trigger that has fired meet the first book there is.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

import msgspec

from trader.core.clock import interval_elapsed
from trader.core.money import ZERO, ceil_to, floor_to
from trader.exchange.domain.account import (
    Account,
    Marks,
    Position,
    RestingOrder,
    free_margin,
    hours_crossed,
    is_liquidable,
    last_boundary,
    opposing,
)
from trader.exchange.domain.account_update import AccountUpdate
from trader.exchange.domain.ledger import ExchangeRules, MarkAt, Posting, RateOfHour
from trader.exchange.domain.matching import Execution, totals
from trader.exchange.domain.orders import CLOSING_SIDE, Cause, ExitPlan, OrderSide
from trader.market.domain.markets import STALE_AFTER, Market, PriceRange, Quote

_SMALL: Final = 10
"""A liquidation closes a position below this multiple of the minimum notional in full."""


class Moment(msgspec.Struct, frozen=True):
    """The markets at one time: the latest quotes, and a mark for every market ever seen.

    `updated` names the markets whose quotes are new with this tick, and `before` has the marks from before it.
    """

    at: datetime
    quotes: Mapping[str, Quote]
    marks: Marks
    updated: frozenset[str] = frozenset()
    before: Marks = {}

    def mark_at(self, symbol: str, boundary: datetime) -> Decimal:
        """Return the last mark at or before an hour boundary, if only this tick can have arrived since."""
        if symbol in self.updated and self.at > boundary and symbol in self.before:
            return self.before[symbol]
        return self.marks[symbol]


def apply_tick(account: Account, moment: Moment, rules: ExchangeRules, rate_of_hour: RateOfHour) -> Posting | None:
    """Apply a tick to an account; None if it changes nothing."""
    if not is_affected(account, moment, rules):
        return None
    update = AccountUpdate(account, rules, moment.marks, moment.at, moment.quotes)
    fund_held(update, rate_of_hour, moment.mark_at, moment.updated)
    _fill_targets(update, moment)
    _fill_resting(update, moment)
    liquidate(update, moment, rate_of_hour, moment.updated)
    for symbol, position in sorted(update.positions.items()):
        if symbol in moment.updated:
            _exit_when_triggered(update, update.replan(position, trailed(position, moment.marks[symbol])), moment)
    _leave_ended_markets(update, moment)
    liquidate(update, moment, rate_of_hour, ())  # an exit may have cost what the other positions need
    update.write_off_when_flat()
    return update.posting() if update.has_changes else None


def fund_held(
    update: AccountUpdate, rate_of_hour: RateOfHour, mark_at: MarkAt, symbols: Container[str] | None = None
) -> None:
    """Post the funding due on every position, or on positions in `symbols`: direction × quantity × mark × rate is paid.

    Sorted by symbol, since the order in which an account holds its positions changes after a restart.
    """
    for symbol in sorted(update.positions):
        if symbols is not None and symbol not in symbols:
            continue
        position, every = update.positions[symbol], update.rules.funding_hours(symbol)
        last = position.funded_until
        for last in hours_crossed(position.funded_until, update.now, every):
            if rate := rate_of_hour(symbol, last) * every:
                mark = mark_at(symbol, last)
                amount = -position.side.direction * position.quantity * mark * rate
                position = update.book_funding(position, last, rate, amount, mark)
        if position.funded_until < last:  # nothing was due at the last hours
            update.positions[symbol] = msgspec.structs.replace(position, funded_until=last)
            update.next_sequence()


def is_affected(account: Account, moment: Moment, rules: ExchangeRules) -> bool:
    """Return whether a tick changes the account at all. Fast, since it runs for every account on every tick."""
    updated, marks, quotes = moment.updated, moment.marks, moment.quotes
    touched = False
    for symbol, position in account.positions.items():
        if symbol not in updated:
            continue
        touched = True
        if _is_last(symbol, moment.at, rules):
            return True
        boundary = last_boundary(moment.at, rules.funding_hours(symbol))
        if position.funded_until < boundary or fired_trigger(position, marks[symbol], moment.at) is not None:
            return True
        plan = position.exit_plan
        if plan.targets and any(_is_reached(order, quotes[symbol], rules) for order in _targets(position)):
            return True
        if plan.trailing_distance is not None and trailed(position, marks[symbol]) is not plan:
            return True
    for order in account.resting:
        symbol = order.symbol
        if symbol in updated and (_is_reached(order, quotes[symbol], rules) or _is_last(symbol, moment.at, rules)):
            return True
    return touched and (account.liquidating or is_liquidable(account, marks, rules.markets, rules.liquidation.until))


def _is_reached(order: RestingOrder, quote: Quote, rules: ExchangeRules) -> bool:
    """Return whether the mark or best opposite price is at or beyond the limit, in a book newer than the order."""
    if order.created_at - STALE_AFTER <= quote.at <= order.created_at:  # an earlier date is of a clock set back
        return False
    if rules.limit_fills == "touch":
        return quote.mark <= order.limit_price if order.side is OrderSide.BUY else quote.mark >= order.limit_price
    return quote.ask <= order.limit_price if order.side is OrderSide.BUY else quote.bid >= order.limit_price


def _met(update: AccountUpdate, order: RestingOrder, quote: Quote, wanted: Decimal) -> tuple[Decimal, Decimal]:
    """Return how much of a resting order a book fills, and the quantity that remains ahead of it."""
    if update.rules.limit_fills == "touch":
        return wanted, ZERO
    shown, _ = totals(update.find(quote, order.side, order.ahead + wanted, order.limit_price))
    passed = min(order.ahead, shown)
    return shown - passed, order.ahead - passed


def _targets(position: Position) -> Iterator[RestingOrder]:
    """Yield the targets of a position, each as a reduce-only order that rests since the position was opened.

    One that is closing has none: its trigger closes all of it.
    """
    for target in position.exit_plan.targets if position.closing is None else ():
        yield RestingOrder(
            id=position.id,
            symbol=position.symbol,
            side=CLOSING_SIDE[position.side],
            quantity=target.quantity,
            remaining=target.quantity,
            limit_price=target.price,
            created_at=position.opened_at,
            ahead=target.ahead,
            reduce_only=True,
        )


def _fill_targets(update: AccountUpdate, moment: Moment) -> None:
    """Fill the targets that the markets reach, nearest first, as far as the rules allow."""
    for symbol in sorted(update.positions.keys() & moment.updated):
        quote = moment.quotes[symbol]
        for order in _targets(update.positions[symbol]):
            if not _is_reached(order, quote, update.rules):
                break
            quantity, ahead = _met(update, order, quote, order.remaining)
            update.reduce_target(symbol, order.limit_price, quantity, ahead)
            if quantity:
                update.note_taken(symbol, order.side, quantity)
                update.execute(symbol, order.side, [Execution(order.limit_price, quantity)], Cause.TARGET, maker=True)


def trailed(position: Position, mark: Decimal) -> ExitPlan:
    """Return the plan of a position after a mark. That of one that is closing stays as it fired."""
    plan = position.exit_plan
    return plan if position.closing is not None else plan.trailed(position.side, mark)


def _fill_resting(update: AccountUpdate, moment: Moment) -> None:
    """Fill the resting orders that the markets reach, best price first, then oldest, as far as the rules allow."""
    for order in sorted(update.resting.values(), key=_priority):
        if order.id not in update.resting or order.symbol not in moment.updated:
            continue
        quote = moment.quotes[order.symbol]
        if not _is_reached(order, quote, update.rules):
            continue
        account = update.account()
        reducible = opposing(account, order.symbol, order.side)
        wanted = min(order.remaining, reducible) if order.reduce_only else order.remaining
        quantity, ahead = _met(update, order, quote, wanted)
        passed = msgspec.structs.replace(order, ahead=ahead)
        if not quantity and passed != order:
            update.rest(passed)
        if not quantity:
            continue
        if quantity > reducible and not _affords(update, order, quantity):
            update.cancel(order, "insufficient margin when the book reached it")
            continue
        update.note_taken(order.symbol, order.side, quantity)
        update.fill_resting(passed, [Execution(order.limit_price, quantity)])


def _priority(order: RestingOrder) -> tuple[Decimal, datetime]:
    return (-order.limit_price if order.side is OrderSide.BUY else order.limit_price), order.created_at


def _affords(update: AccountUpdate, order: RestingOrder, quantity: Decimal) -> bool:
    """Return whether available cash stays at or above zero if the resting order fills; tried on a copy."""
    trial = AccountUpdate(update.account(), update.rules, update.marks, update.now)
    trial.fill_resting(order, [Execution(order.limit_price, quantity)])
    return free_margin(trial.account(), trial.marks) >= 0


def fired_trigger(position: Position, mark: Decimal, at: datetime) -> Cause | None:
    """Return the exit-plan trigger that fires now: stop or invalidation price, then target, then time."""
    if position.closing is not None:
        return Cause(position.closing)
    plan = position.exit_plan
    is_long = position.is_long
    if plan.stop is not None and (mark <= plan.stop if is_long else mark >= plan.stop):
        return Cause.STOP
    price = plan.invalidation_price
    if price is not None and (mark <= price if is_long else mark >= price):
        return Cause.INVALIDATION
    if plan.target is not None and (mark >= plan.target if is_long else mark <= plan.target):
        return Cause.TARGET
    if plan.time_exit is not None and at >= plan.time_exit:
        return Cause.TIME
    return None


def _exit_when_triggered(update: AccountUpdate, position: Position, moment: Moment) -> None:
    """Close the whole position at market when its plan fires; what the book cannot take follows on later ticks.

    The trigger's order meets the first book at or after the latency. What that book cannot take is filled no better
    than at the stop.
    """
    symbol, latency = position.symbol, update.rules.latency
    cause = fired_trigger(position, moment.marks[symbol], moment.at)
    due = position.closing_at
    if cause is None or (due is not None and not interval_elapsed(due, latency, moment.at)):
        return
    has_fired = position.closing is not None
    if has_fired or not latency:
        side = CLOSING_SIDE[position.side]
        executions = update.take(moment.quotes[symbol], side, position.quantity)
        if has_fired and position.closing_at is None:
            executions = _at_best_at_the_stop(position, cause, executions, update.rules.markets[symbol])
        if executions:
            update.execute(symbol, side, executions, cause)
    due = None if has_fired or not latency else moment.at + latency
    rest = update.positions.get(symbol)
    if rest is not None and (rest.closing, rest.closing_at) != (cause.value, due):
        update.positions[symbol] = msgspec.structs.replace(rest, closing=cause.value, closing_at=due)
        update.next_sequence()


def _at_best_at_the_stop(
    position: Position, cause: Cause, executions: list[Execution], market: Market
) -> list[Execution]:
    plan = position.exit_plan
    stop = {Cause.STOP: plan.stop, Cause.INVALIDATION: plan.invalidation_price}.get(cause)
    if stop is None:
        return executions
    is_long, tick = position.is_long, market.tick_at(stop)
    stop = floor_to(stop, tick) if is_long else ceil_to(stop, tick)
    return [each._replace(price=(min if is_long else max)(each.price, stop)) for each in executions]


def _leave_ended_markets(update: AccountUpdate, moment: Moment) -> None:
    """With a market's last tick, cancel its resting orders and close its position at the mark, without fees."""
    ended = {symbol for symbol in moment.updated if _is_last(symbol, moment.at, update.rules)}
    for order in [order for order in update.resting.values() if order.symbol in ended]:
        update.cancel(order, "the market ended")
    for symbol in sorted(ended & update.positions.keys()):
        position = update.positions[symbol]
        executions = [Execution(moment.marks[symbol], position.quantity)]
        update.execute(symbol, CLOSING_SIDE[position.side], executions, Cause.ENDED)
    if ended and update.liquidating:
        update.set_liquidating(update.is_liquidable)


def _is_last(symbol: str, at: datetime, rules: ExchangeRules) -> bool:
    ends_at = rules.markets[symbol].ends_at
    return ends_at is not None and at >= ends_at


def liquidate(update: AccountUpdate, moment: Moment, rate_of_hour: RateOfHour, symbols: Container[str]) -> None:
    """If equity ≤ maintenance, cancel resting orders, then reduce positions, largest loss first, until equity is safe.

    Each of `symbols` gets one step. The next step follows with the market's next update, whether or not equity is above
    maintenance by then, so that depth can return in between. A liquidator takes over all positions at their marks, and
    what is left of equity, if equity is too low, or if no book has anything left for a step: an account that has lost
    everything does not live on for a rebound.
    """
    if not update.positions or not (update.liquidating or update.is_liquidable):
        return
    # A position reduced here may be in a market that has had no tick since the boundary.
    fund_held(update, rate_of_hour, moment.mark_at)
    update.set_liquidating(update.is_liquidable)
    if not update.liquidating:
        return
    for order in list(update.resting.values()):
        update.cancel(order, "liquidation")
    steps = []
    for position in sorted(update.positions.values(), key=lambda p: (p.unrealized(update.marks[p.symbol]), p.symbol)):
        quote = moment.quotes.get(position.symbol)
        if position.symbol not in symbols or quote is None or quote.is_stale(moment.at):
            continue
        if update.is_liquidable and update.equity() >= 0:
            steps.append(_reduce(update, position, quote))
    if (steps and not any(steps)) or update.is_beyond_rescue:
        for symbol in sorted(update.positions):
            update.take_over(symbol)
    update.set_liquidating(update.is_liquidable)


def _reduce(update: AccountUpdate, position: Position, quote: Quote) -> bool:
    """Close a part of a position, or all of it, as far as the book allows; return whether it has anything left."""
    symbol, side, market = position.symbol, CLOSING_SIDE[position.side], update.rules.markets[position.symbol]
    rule, notional = update.rules.liquidation, position.notional(update.marks[symbol])
    is_small = notional < _SMALL * market.min_notional if rule.whole_up_to is None else notional <= rule.whole_up_to
    last = update.before.partly_liquidated_at
    cooldown = timedelta(seconds=rule.cooldown_s)
    cools_down = last is not None and not interval_elapsed(last + cooldown, cooldown, update.now)
    is_whole = is_small or cools_down
    quantity = position.quantity if is_whole else ceil_to(position.quantity * rule.part, market.lot)
    executions = update.take(quote, side, quantity)
    if executions:
        update.execute(symbol, side, executions, Cause.LIQUIDATION)
        if not is_whole:
            update.partly_liquidated_at = update.at
    return bool(executions)


# --- many ticks at once, when catching up ----------------------------------------------------------------------------


class PriceRanges(msgspec.Struct, frozen=True):
    """The price range of each market over successive ticks, the last of which is at `until`."""

    until: datetime
    by_symbol: Mapping[str, PriceRange]


def price_ranges(moments: Sequence[Moment]) -> PriceRanges:
    """Return the ranges of one or more moments. Every mark of a market counts, whether updated or not."""
    ranges = {}
    for symbol in moments[-1].marks:
        seen = [moment for moment in moments if symbol in moment.marks]
        marks = [moment.marks[symbol] for moment in seen]
        quotes = [moment.quotes[symbol] for moment in seen if symbol in moment.quotes]
        ranges[symbol] = PriceRange(
            lowest_mark=min(marks),
            highest_mark=max(marks),
            lowest_ask=min((quote.ask for quote in quotes), default=Decimal("Infinity")),
            highest_bid=max((quote.bid for quote in quotes), default=ZERO),
        )
    return PriceRanges(moments[-1].at, ranges)


def is_unaffected(account: Account, ranges: PriceRanges, rules: ExchangeRules) -> bool:
    """Return whether no tick within the ranges can change the account.

    This is conservative: it combines the worst equity with the highest maintenance, although they may occur at
    different moments. True means that `is_affected` is false at each of these moments; False means nothing.
    """
    if account.liquidating:
        return False
    worst, required = account.cash, ZERO
    for symbol, position in account.positions.items():
        reached, boundary = ranges.by_symbol[symbol], last_boundary(ranges.until, rules.funding_hours(symbol))
        if _is_last(symbol, ranges.until, rules):
            return False
        if position.funded_until < boundary or _may_trigger(position, reached, ranges.until, rules):
            return False
        worst += position.unrealized(reached.lowest_mark if position.is_long else reached.highest_mark)
        required += rules.markets[symbol].maintenance(position.quantity * reached.highest_mark)
    for order in account.resting:
        if order.symbol not in ranges.by_symbol:
            continue
        if _is_last(order.symbol, ranges.until, rules):
            return False
        if _may_reach(order, ranges.by_symbol[order.symbol], rules):
            return False
    return not account.positions or worst > required


def _may_reach(order: RestingOrder, reached: PriceRange, rules: ExchangeRules) -> bool:
    lowest, highest = reached.lowest_ask, reached.highest_bid
    if rules.limit_fills == "touch":
        lowest, highest = reached.lowest_mark, reached.highest_mark
    return lowest <= order.limit_price if order.side is OrderSide.BUY else highest >= order.limit_price


def _may_trigger(position: Position, reached: PriceRange, until: datetime, rules: ExchangeRules) -> bool:
    plan = position.exit_plan
    if any(_may_reach(order, reached, rules) for order in _targets(position)):
        return True
    if position.closing is not None or (plan.time_exit is not None and until >= plan.time_exit):
        return True
    protecting, winning = (plan.stop, plan.invalidation_price), (plan.target,)
    is_long = position.is_long
    if plan.trailed(position.side, reached.highest_mark if is_long else reached.lowest_mark) is not plan:
        return True
    falling_to, rising_to = (protecting, winning) if is_long else (winning, protecting)
    return any(price is not None and reached.lowest_mark <= price for price in falling_to) or any(
        price is not None and reached.highest_mark >= price for price in rising_to
    )
