"""A second account, written from the rules in words: slow, simple, exact, and without any code of the engine.

It keeps one ledger of events, and recomputes every figure from it on demand.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import groupby

from support.reference_ledger import Books, Entry, post, rounded
from support.reference_orders import Answer, Goal, Rest, Terms, Watch, fired, first, halved, plan_is_sound

from trader.exchange.domain.ledger import Liquidation
from trader.exchange.domain.orders import ExitPlan, Order
from trader.exchange.domain.tick_rules import Moment
from trader.market.domain.markets import Book, Market, Quote

STALE = timedelta(seconds=30)
BY_QUARTERS = Liquidation()
NO_TERMS = Terms()

Memory = tuple[list[Entry], list[Rest], dict[str, Watch], list[tuple[str, int, datetime, Fraction]]]
"""The parts that a refused order leaves unchanged."""


class ReferenceAccount:
    """An account by the rules in words."""

    def __init__(
        self,
        capital: Decimal,
        markets: dict[str, Market],
        at: datetime,
        *,
        taker: Decimal,
        maker: Decimal,
        liquidation: Decimal,
        recovery: timedelta,
        every: int = 1,
        fills: str = "through",
        latency: timedelta = timedelta(0),
        rule: Liquidation = BY_QUARTERS,
    ) -> None:
        self.latency = latency
        self.rule = rule
        self.partly_at: datetime | None = None
        self.fills = fills
        self.capital = Fraction(capital)
        self.markets = markets
        self.taker = Fraction(taker)
        self.maker = Fraction(maker)
        self.liquidation = Fraction(liquidation)
        self.recovery = recovery
        self.every = every
        self.liquidating = False
        self.changed_at = at
        self.ledger: list[Entry] = []
        self.resting: list[Rest] = []
        self.watches: dict[str, Watch] = {}
        self.taken: list[tuple[str, int, datetime, Fraction]] = []
        self.now = self.recovering_at = at
        self.marks: dict[str, Fraction] = {}
        self._resting_books: Mapping[str, Quote] = {}
        self.seen: dict[str, list[tuple[datetime, Fraction]]] = {}
        self._acts = 0
        self._arrivals = 0
        self._books: tuple[int, Books] = (0, Books())

    # --- figures of the ledger ----------------------------------------------------------------------------------------

    def books(self) -> Books:
        """Every figure, from the first line of the ledger on."""
        if self._books[0] != len(self.ledger):
            books = Books()
            for _, lines in groupby(self.ledger, key=lambda entry: entry.act):
                post(books, list(lines))
            self._books = (len(self.ledger), books)
        return self._books[1]

    def quantity(self, symbol: str) -> Fraction:
        holding = self.books().holdings.get(symbol)
        return holding.quantity if holding is not None else Fraction(0)

    def cash(self) -> Fraction:
        books = self.books()
        return self.capital + books.realized - books.fees + books.funding + books.insurance

    def unrealized(self, symbol: str) -> Fraction:
        holding = self.books().holdings[symbol]
        return holding.quantity * self.marks[symbol] - (holding.cost if holding.quantity > 0 else -holding.cost)

    def equity(self) -> Fraction:
        return self.cash() + sum(self.unrealized(symbol) for symbol in self.books().holdings)

    def margin(self) -> Fraction:
        return sum((holding.margin for holding in self.books().holdings.values()), Fraction(0))

    def maintenance(self) -> Fraction:
        held = self.books().holdings.items()
        return sum(
            (self._required(symbol, abs(position.quantity) * self.marks[symbol]) for symbol, position in held),
            Fraction(0),
        )

    def _slices(self, symbol: str) -> list[tuple[Fraction, Fraction | None, Fraction]]:
        """The slices of notional with their rates; the last one has no end."""
        market = self.markets[symbol]
        steps = [(Fraction(0), Fraction(market.maintenance_rate))]
        steps += [(Fraction(tier.above), Fraction(tier.maintenance_rate)) for tier in market.tiers]
        ends = [begin for begin, _ in steps[1:]]
        return [(begin, end, rate) for (begin, rate), end in zip(steps, [*ends, None], strict=True)]

    def _required(self, symbol: str, notional: Fraction) -> Fraction:
        """Slice by slice, each at its own rate."""
        return sum(
            (
                (min(notional, end if end is not None else notional) - begin) * rate
                for begin, end, rate in self._slices(symbol)
                if notional > begin
            ),
            Fraction(0),
        )

    def reserved(self) -> Fraction:
        """Quantity × limit / leverage of the opening parts; earlier orders reduce the position first."""
        total = Fraction(0)
        left = {symbol: holding.quantity for symbol, holding in self.books().holdings.items()}
        for rest in self.resting:
            if rest.reduce_only:
                continue
            opens = rest.remaining
            if left.get(rest.symbol, 0) * rest.sign < 0:
                reduces = min(opens, abs(left[rest.symbol]))
                left[rest.symbol] += reduces * rest.sign
                opens -= reduces
            total += rounded(opens * rest.limit / (rest.terms.leverage or 1))
        return total

    def free(self) -> Fraction:
        return self.equity() - self.margin() - self.reserved()

    def liquidation_price(self, symbol: str) -> Fraction | None:
        """Solved for the mark m, slice by slice: fixed + quantity × m = required below + (|q| m − begin) × rate."""
        holding, mark = self.books().holdings[symbol], self.marks[symbol]
        size = abs(holding.quantity)
        fixed = self.equity() - holding.quantity * mark - (self.maintenance() - self._required(symbol, size * mark))
        for begin, end, rate in self._slices(symbol):
            below = self._required(symbol, begin)
            price = (below - begin * rate - fixed) / (holding.quantity - size * rate)
            if begin <= size * price and (end is None or size * price <= end) and price > 0:
                return price
        return None

    # --- actions of a caller ------------------------------------------------------------------------------------------

    def place(self, order: Order, moment: Moment, rate: Callable[[str, datetime], Decimal]) -> Answer:
        self.see(moment)
        at = self._at(moment)
        before, under_way = self._memory(), self.liquidating
        for symbol in sorted(self.books().holdings):
            self._fund(symbol, at, rate)
        answer = self._place(order, moment, at)
        if answer.status == "rejected":
            self._restore(before)
        else:
            self._liquidate(moment, at, rate, set() if under_way else self.books().holdings.keys())
            self._settle_when_flat(at)
            self.changed_at = at
        return answer

    def _place(self, order: Order, moment: Moment, at: datetime) -> Answer:
        market, sign = self.markets[order.symbol], 1 if order.side == "buy" else -1
        book, mark = moment.quotes[order.symbol].book, self.marks[order.symbol]
        held = self.quantity(order.symbol)
        reducible = abs(held) if held * sign < 0 else Fraction(0)
        lot, tick = Fraction(market.lot), Fraction(market.tick)
        wanted = Fraction(order.quantity)
        limit = None
        if order.limit_price is not None:
            ticks = Fraction(order.limit_price) / tick
            limit = (ticks.__floor__() if sign > 0 else ticks.__ceil__()) * tick
        quantity = (wanted / lot).__floor__() * lot
        if order.reduce_only and wanted >= reducible:
            quantity = reducible
        closes_all = order.reduce_only and quantity == reducible > 0
        price = limit if limit is not None else mark
        too_small = quantity < lot or quantity * price < market.min_notional
        if price <= 0 or (order.reduce_only and not reducible) or (too_small and not closes_all):
            return Answer("rejected")
        entry_mark = mark if limit is None else (min(mark, limit) if sign > 0 else max(mark, limit))
        built, plan = held * sign + quantity, order.exit_plan
        if plan is not None and not plan_is_sound(plan, sign, entry_mark, self.now, built, market):
            return Answer("rejected")
        opposite = book.asks if sign > 0 else book.bids
        if order.post_only and limit is not None and sign * (limit - Fraction(opposite[0].price)) >= 0:
            return Answer("rejected")
        realized_before = self.books().realized
        self._resting_books = moment.quotes
        parts = self._shown(book, sign, quantity, limit)
        self._take(order.symbol, sign, parts)
        leverage = None if order.leverage is None else Fraction(order.leverage)
        terms = Terms(leverage, order.exit_plan, order.confidence)
        fees = self._execute(order.symbol, sign, parts, at, self._taker(order.symbol), str(order.cause), terms)
        done = sum((q for _, q in parts), Fraction(0))
        unfilled = quantity - done
        rests = unfilled > 0 and limit is not None
        if not done and not rests:
            return Answer("rejected")
        if rests:
            assert limit is not None
            self._arrivals += 1
            ahead = self._standing(order.symbol, sign, limit)
            self.resting.append(
                Rest(self._arrivals, order.symbol, sign, unfilled, limit, terms, order.reduce_only, at, ahead)
            )
        opens = quantity > reducible
        if rests:
            waiting = [rest for rest in self.resting if rest.symbol == order.symbol and rest.sign == sign]
            promised = sum((rest.remaining for rest in waiting if not rest.reduce_only), Fraction(0))
            opens = opens or promised > abs(self.quantity(order.symbol))
        if opens and not order.reduce_only and (self.free() < 0 or self._is_overleveraged(order, sign)):
            return Answer("rejected")
        return Answer(
            "resting" if rests else "partial" if unfilled else "filled",
            done,
            rounded(sum(p * q for p, q in parts) / done) if done else None,
            fees,
            self.books().realized - realized_before,
        )

    def _standing(self, symbol: str, sign: int, limit: Fraction) -> Fraction:
        """What stands at a limit before an order of this side does, if the rules count it."""
        book = self._resting_books[symbol].book
        own = book.bids if sign > 0 else book.asks
        standing = sum((Fraction(level.quantity) for level in own if Fraction(level.price) == limit), Fraction(0))
        return standing if self.fills == "queue" else Fraction(0)

    def _is_overleveraged(self, order: Order, sign: int) -> bool:
        """Whether the tier of the position, with all resting orders that open it, allows only a lower leverage."""
        held = self.quantity(order.symbol)
        reducible = max(Fraction(0), -sign * held)
        worth = max(Fraction(0), sign * held) * self.marks[order.symbol]
        for rest in self.resting:
            if rest.symbol == order.symbol and rest.sign == sign and not rest.reduce_only:
                reduces = min(rest.remaining, reducible)
                reducible -= reduces
                worth += (rest.remaining - reduces) * rest.limit
        market = self.markets[order.symbol]
        most = min([market.leverage_max, *(tier.leverage_max for tier in market.tiers if worth > tier.above)])
        return (order.leverage or 1) > most

    def cancel(self, number: int, at: datetime) -> None:
        self.resting = [rest for rest in self.resting if rest.number != number]
        self.changed_at = max(at, self.changed_at)

    def set_exit_plan(self, symbol: str, plan: ExitPlan, moment: Moment) -> bool:
        self.see(moment)
        held = self.quantity(symbol)
        at = self._at(moment)
        market, sign = self.markets[symbol], 1 if held > 0 else -1
        if not held or not plan_is_sound(plan, sign, self.marks[symbol], self.now, abs(held), market):
            return False
        self._resting_books = moment.quotes
        self._plan(symbol, plan)
        self.changed_at = at
        return True

    def _plan(self, symbol: str, plan: ExitPlan) -> None:
        """Give the position a plan: its targets get their shares in whole lots, one after the other, nearest first."""
        watch, held, market = self.watches[symbol], self.quantity(symbol), self.markets[symbol]
        watch.plan, watch.stop = plan, None if plan.stop is None else Fraction(plan.stop)
        self._follow(symbol)
        sign, lot, tick = 1 if held > 0 else -1, Fraction(market.lot), Fraction(market.tick)
        goals: list[Goal] = []
        share, given = Fraction(0), Fraction(0)
        for target in sorted(plan.targets, key=lambda each: sign * each.price):
            share += Fraction(target.fraction)
            until = abs(held) if share == 1 else abs(held) * share // lot * lot
            price = -sign * (-sign * Fraction(target.price) // tick) * tick
            if goals and goals[-1].price == price:
                goals[-1].left += until - given
            else:
                goals.append(Goal(price, until - given, self._standing(symbol, -sign, price)))
            given = until
        watch.goals = tuple(goal for goal in goals if goal.left)

    def _follow(self, symbol: str) -> None:
        """Draw the stop after the mark; it never loosens."""
        watch, distance = self.watches[symbol], self.watches[symbol].plan.trailing_distance
        if distance is None:
            return
        sign = 1 if self.quantity(symbol) > 0 else -1
        stop = self.marks[symbol] - sign * Fraction(distance)
        if stop > 0 and (watch.stop is None or sign * stop > sign * watch.stop):
            watch.stop = stop

    def reset(self, capital: Decimal, moment: Moment, rate: Callable[[str, datetime], Decimal]) -> Books:
        """Return the books of the run that ended."""
        self.see(moment)
        at = self._at(moment)
        for symbol in sorted(self.books().holdings):
            self._fund(symbol, at, rate)
        self.resting.clear()
        for symbol, holding in sorted(self.books().holdings.items()):
            part = (self.marks[symbol], abs(holding.quantity))
            self._execute(symbol, -1 if holding.quantity > 0 else 1, [part], at, Fraction(0), "reset")
        self._settle_when_flat(at)
        ended = self.books()
        self.ledger, self.watches, self._books = [], {}, (0, Books())
        self.capital, self.changed_at, self.partly_at = Fraction(capital), at, None
        return ended

    # --- events of the market -----------------------------------------------------------------------------------------

    def update(self, moment: Moment, rate: Callable[[str, datetime], Decimal]) -> None:
        """Apply funding, resting orders, liquidation and exit plans, if the update concerns the account at all."""
        self.see(moment)
        is_reached = any(self._is_reached(rest, moment) for rest in self.resting)
        if not is_reached and not self.books().holdings.keys() & moment.updated:
            return
        at = self._at(moment)
        before = self._visible()
        for symbol in sorted(self.books().holdings):
            if symbol in moment.updated:
                self._fund(symbol, at, rate)
        self._resting_books = moment.quotes
        self._fill_targets(moment, at)
        self._fill_resting(moment, at)
        self._liquidate(moment, at, rate, moment.updated)
        for symbol in sorted(self.books().holdings):
            if symbol in moment.updated:
                if self.watches[symbol].closing is None:
                    self._follow(symbol)
                self._exit(symbol, moment, at)
        self._liquidate(moment, at, rate, frozenset())
        self._settle_when_flat(at)
        if before != self._visible():
            self.changed_at = at

    def _visible(self) -> object:
        """The parts of the account that a relevant update changes."""
        orders = [(rest.number, rest.remaining, rest.ahead) for rest in self.resting]
        closing = {
            symbol: (watch.closing, watch.due, watch.stop, [(goal.left, goal.ahead) for goal in watch.goals])
            for symbol, watch in self.watches.items()
        }
        return len(self.ledger), orders, closing, self.liquidating

    def _fill_targets(self, moment: Moment, at: datetime) -> None:
        """Fill the targets like resting orders that only reduce; a position whose exit has fired has none any more."""
        for symbol in sorted(self.books().holdings.keys() & moment.updated):
            watch, sign = self.watches[symbol], -1 if self.quantity(symbol) > 0 else 1
            opened = self.books().holdings[symbol].opened_at
            for goal in watch.goals if watch.closing is None else ():
                rest = Rest(0, symbol, sign, goal.left, goal.price, NO_TERMS, True, opened, goal.ahead)
                if not self._is_reached(rest, moment):
                    continue
                quantity = self._met(rest, goal.left, moment)
                goal.left, goal.ahead = goal.left - quantity, rest.ahead
                if quantity:
                    self._take(symbol, sign, [(goal.price, quantity)])
                    self._execute(symbol, sign, [(goal.price, quantity)], at, self._maker(symbol), "target")
            watch.goals = tuple(goal for goal in watch.goals if goal.left)

    def _fill_resting(self, moment: Moment, at: datetime) -> None:
        waiting = sorted(self.resting, key=lambda r: (-r.sign * r.limit, r.created_at, r.number))
        for number in [rest.number for rest in waiting]:
            # Looked up again, since a fill that is undone restores copies of all orders.
            rest = next((rest for rest in self.resting if rest.number == number), None)
            if rest is None or not self._is_reached(rest, moment):
                continue
            held = self.quantity(rest.symbol)
            reducible = abs(held) if held * rest.sign < 0 else Fraction(0)
            quantity = min(rest.remaining, reducible) if rest.reduce_only else rest.remaining
            quantity = self._met(rest, quantity, moment)
            if not quantity:
                continue
            before = self._memory()
            self._take(rest.symbol, rest.sign, [(rest.limit, quantity)])
            rest.remaining -= quantity
            if not rest.remaining:
                self.resting.remove(rest)
            rate = self._maker(rest.symbol)
            self._execute(rest.symbol, rest.sign, [(rest.limit, quantity)], at, rate, "limit", rest.terms)
            if quantity > reducible and self.free() < 0:
                self._restore(before)
                self.resting = [other for other in self.resting if other.number != rest.number]

    def _met(self, rest: Rest, quantity: Fraction, moment: Moment) -> Fraction:
        """How much of a reached order the book fills, after what is ahead of it."""
        if self.fills == "touch":
            return quantity
        beyond = self._shown(moment.quotes[rest.symbol].book, rest.sign, rest.ahead + quantity, rest.limit)
        shown = sum((q for _, q in beyond), Fraction(0))
        ahead, rest.ahead = rest.ahead, max(Fraction(0), rest.ahead - shown)
        return max(Fraction(0), shown - ahead)

    def _is_reached(self, rest: Rest, moment: Moment) -> bool:
        """Whether the mark (`touch`) or the best opposite price reached the limit, in a book newer than the order."""
        if rest.symbol not in moment.updated:
            return False
        quote = moment.quotes[rest.symbol]
        if rest.created_at - STALE <= quote.at <= rest.created_at:
            return False
        best = Fraction(quote.ask if rest.sign > 0 else quote.bid)
        if self.fills == "touch":
            best = Fraction(quote.mark)
        return rest.sign * (rest.limit - best) >= 0

    def _liquidate(
        self, moment: Moment, at: datetime, rate: Callable[[str, datetime], Decimal], markets: AbstractSet[str]
    ) -> None:
        """Liquidate from maintenance until above 1.1 times it (or the rule's), with one step per update of a market."""
        if not self.books().holdings or not (self.liquidating or self.equity() <= self.maintenance()):
            return
        for symbol in sorted(self.books().holdings):
            self._fund(symbol, at, rate)
        if not self.liquidating and self.equity() > self.maintenance():
            return
        self.liquidating = not self._is_safe()
        if not self.liquidating:
            return
        self.resting.clear()
        before, filled = self.partly_at, []
        for symbol in sorted(self.books().holdings, key=lambda s: (self.unrealized(s), s)):
            quote = moment.quotes.get(symbol)
            if symbol not in markets or quote is None or abs(moment.at - quote.at) > STALE or self._is_safe():
                continue
            if self.equity() >= 0:
                filled.append(self._reduce(symbol, quote.book, at, before))
        if self.equity() < Fraction(self.rule.backstop) * self.maintenance() or (filled and True not in filled):
            self._take_over(moment, at)
        self.liquidating = not self._is_safe()

    def _is_safe(self) -> bool:
        return self.equity() > Fraction(self.rule.until) * self.maintenance()

    def _reduce(self, symbol: str, book: Book, at: datetime, partly_at: datetime | None) -> bool:
        """Reduce by a quarter (or the rule's part), rounded up to a whole lot, or by all if it is small."""
        market, held = self.markets[symbol], self.quantity(symbol)
        lot, sign = Fraction(market.lot), -1 if held > 0 else 1
        part = (abs(held) * Fraction(self.rule.part) / lot).__ceil__() * lot
        worth, limit = abs(held) * self.marks[symbol], self.rule.whole_up_to
        whole = worth < 10 * Fraction(market.min_notional) if limit is None else worth <= Fraction(limit)
        if partly_at is not None and 0 <= (self.now - partly_at).total_seconds() < self.rule.cooldown_s:
            whole = True
        parts = self._shown(book, sign, abs(held) if whole else part, None)
        if not parts:
            return False
        self._take(symbol, sign, parts)
        self._execute(symbol, sign, parts, at, self._taker(symbol), "liquidation")
        self._charge_more(min(self.liquidation * sum(p * q for p, q in parts), max(Fraction(0), self.equity())))
        if not whole:
            self.partly_at = at
        return True

    def _take_over(self, moment: Moment, at: datetime) -> None:
        """Close everything at the marks for no taker fee; the rest of the equity goes with the last position."""
        for symbol in sorted(self.books().holdings):
            held = self.quantity(symbol)
            sign, parts = (-1 if held > 0 else 1), [(self.marks[symbol], abs(held))]
            self._take(symbol, sign, parts)
            self._execute(symbol, sign, parts, at, Fraction(0), "liquidation")
        self._charge_more(max(Fraction(0), self.equity()))

    def _charge_more(self, fee: Fraction) -> None:
        """Add the liquidation fee to the last fill; it does not matter which fill of a close carries it."""
        self.ledger[-1] = replace(self.ledger[-1], fee=self.ledger[-1].fee + fee)
        self._books = (-1, Books())

    def _exit(self, symbol: str, moment: Moment, at: datetime) -> None:
        watch, held, mark = self.watches[symbol], self.quantity(symbol), self.marks[symbol]
        reason = watch.closing or fired(watch, held, mark, self.now)
        if reason is None or (watch.due is not None and watch.due - self.latency <= moment.at < watch.due):
            return
        if watch.closing is None and self.latency:
            watch.closing, watch.due = reason, moment.at + self.latency
            return
        waited = watch.closing is not None and watch.due is None
        watch.closing, watch.due = reason, None
        sign = -1 if held > 0 else 1
        book = moment.quotes[symbol].book
        parts = self._shown(book, sign, abs(held), None)
        self._take(symbol, sign, parts)
        stop = {"stop": watch.stop, "invalidation": watch.plan.invalidation_price}.get(reason)
        if waited and stop is not None:  # no better than the stop, on the tick beyond it
            tick = Fraction(self.markets[symbol].tick)
            worst = -sign * (-sign * Fraction(stop) // tick) * tick
            parts = [(-sign * min(-sign * price, -sign * worst), quantity) for price, quantity in parts]
        self._execute(symbol, sign, parts, at, self._taker(symbol), reason)

    def _fund(self, symbol: str, at: datetime, rate: Callable[[str, datetime], Decimal]) -> None:
        """Pay funding for every full hour since the last one, at the last mark seen up to that hour."""
        watch, every = self.watches[symbol], self.markets[symbol].funding_interval_h or self.every
        boundary = watch.funded_until.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        while boundary <= self.now:
            if boundary.hour % every == 0:
                self._acts += 1
                seen = [mark for then, mark in self.seen.get(symbol, []) if then <= boundary]
                mark = seen[-1] if seen else self.marks[symbol]
                paid = self.quantity(symbol) * mark * Fraction(rate(symbol, boundary)) * every
                self.ledger.append(Entry(self._acts, at, symbol, amount=-paid, kind="funding"))
                watch.funded_until = boundary
            boundary += timedelta(hours=1)

    def _settle_when_flat(self, at: datetime) -> None:
        if self.books().holdings:
            return
        self.liquidating = False
        if self.cash() < 0:
            self._insure("", -self.cash(), at)

    def _insure(self, symbol: str, amount: Fraction, at: datetime) -> None:
        self._acts += 1
        self.ledger.append(Entry(self._acts, at, symbol, amount=amount, kind="insurance"))

    # --- the book and the ledger --------------------------------------------------------------------------------------

    def _shown(
        self, book: Book, sign: int, quantity: Fraction, limit: Fraction | None
    ) -> list[tuple[Fraction, Fraction]]:
        """The part of the book available to this account, without its recent fills, from the best levels on."""
        lot = Fraction(self.markets[book.symbol].lot)
        missing = round(self._missing(book.symbol, sign) / lot) * lot
        result = []
        for price, size in book.asks if sign > 0 else book.bids:
            left = Fraction(size) - min(missing, Fraction(size))
            missing -= Fraction(size) - left
            if left > 0 and (limit is None or sign * (limit - Fraction(price)) >= 0):
                result.append((Fraction(price), left))
        return first(result, quantity)

    def _at(self, moment: Moment) -> datetime:
        """The date of rows, which never goes back. What is due and how far depth recovered goes by the clock itself,
        but depth by the rows where they are ahead by a second at most.
        """
        at, self.now = max(moment.at, self.changed_at), moment.at
        self.recovering_at = at if at - moment.at <= timedelta(seconds=1) else moment.at
        return at

    def _missing(self, symbol: str, sign: int) -> Fraction:
        """Half of a quantity returns after one half-life; after twenty, or before it was taken, all of it."""
        mine = [(then, quantity) for of, side, then, quantity in self.taken if (of, side) == (symbol, sign)]
        ages = [(self.recovering_at - then, quantity) for then, quantity in mine]
        young = [(age, quantity) for age, quantity in ages if timedelta(0) <= age < 20 * self.recovery]
        return sum((quantity * halved(age, self.recovery) for age, quantity in young), Fraction(0))

    def _take(self, symbol: str, sign: int, parts: list[tuple[Fraction, Fraction]]) -> None:
        at, side = self.recovering_at, (symbol, sign)
        kept = [take for take in self.taken if (take[0], take[1]) != side or take[2] <= at or not parts]
        self.taken = [*kept, *((*side, at, quantity) for _, quantity in parts)]

    def _taker(self, symbol: str) -> Fraction:
        own = self.markets[symbol].taker_rate
        return self.taker if own is None else Fraction(own)

    def _maker(self, symbol: str) -> Fraction:
        own = self.markets[symbol].maker_rate
        return self.maker if own is None else Fraction(own)

    def _execute(
        self,
        symbol: str,
        sign: int,
        parts: list[tuple[Fraction, Fraction]],
        at: datetime,
        rate: Fraction,
        reason: str,
        terms: Terms = NO_TERMS,
    ) -> Fraction:
        """Write the fills of one act, and handle the consequences for the position. Return the fees."""
        if not parts:
            return Fraction(0)
        before = self.quantity(symbol)
        leverage = terms.leverage or Fraction(1)
        self._acts += 1
        for price, quantity in parts:
            self.ledger.append(
                Entry(self._acts, at, symbol, sign * quantity, price, price * quantity * rate, leverage, reason=reason)
            )
        after = self.quantity(symbol)
        if not after or before * after <= 0:
            self.watches.pop(symbol, None)
        if after * sign > 0:  # it opened or added
            watch = self.watches.setdefault(symbol, Watch(ExitPlan(), at))
            if terms.plan is not None:
                self._plan(symbol, terms.plan)
            watch.confidence = terms.confidence if terms.confidence is not None else watch.confidence
            watch.leveraged = watch.leveraged or terms.leverage is not None
        room = abs(after)
        for goal in self.watches[symbol].goals if after else ():
            goal.left = min(goal.left, room)
            room -= goal.left
        if after:
            self.watches[symbol].goals = tuple(goal for goal in self.watches[symbol].goals if goal.left)
        self.resting = [
            rest for rest in self.resting if not (rest.symbol == symbol and rest.reduce_only and after * rest.sign >= 0)
        ]
        return sum((price * quantity * rate for price, quantity in parts), Fraction(0))

    def see(self, moment: Moment) -> None:
        self.marks = {symbol: Fraction(mark) for symbol, mark in moment.marks.items()}
        for symbol, mark in self.marks.items():
            self.seen.setdefault(symbol, []).append((moment.at, mark))

    def _memory(self) -> Memory:
        watches = {
            symbol: replace(watch, goals=tuple(map(replace, watch.goals))) for symbol, watch in self.watches.items()
        }
        return list(self.ledger), [replace(rest) for rest in self.resting], watches, self.taken

    def _restore(self, memory: Memory) -> None:
        self.ledger, self.resting, self.watches, self.taken = memory
        self._books = (-1, Books())
