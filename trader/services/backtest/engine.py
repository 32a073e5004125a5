"""Engine of a backtest: the rules of the exchange, the guard and the agents in event time.

A replay applies every second to every account. Here an account is only touched by the seconds that can change it: those
between are passed by, by the same conservative test (`is_unaffected`) with which a service catches up. Accounts never
affect each other, so each goes its own way from one decision to the next. The rows are those of a replay in lockstep:

    at a second's tick   funding, resting orders, liquidation, exit plans; then the order that waited for its book
    at a full minute     after the tick of that second the decisions, then the snapshot
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, Protocol

from trader.clock import iso, moment_of
from trader.domain.agents.guard import Approved, LastTrade, Refusal, RiskContext, judge
from trader.domain.agents.observation import (
    observe_account,
    observe_last_action,
    observe_orders,
    observe_positions,
)
from trader.domain.agents.tools import Change
from trader.domain.agents.view import View
from trader.domain.exchange import rules as rules_of_exchange
from trader.domain.exchange.account import Account, Marks, last_boundary
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.exchange.orders import ExitPlan, Order
from trader.domain.exchange.tick_rules import Moment, PriceRanges, apply_tick, is_unaffected
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import STALE_AFTER, Interval, Market, Quote, canonical_symbol, untimely
from trader.domain.models import CYCLE
from trader.domain.portfolio.snapshots import Snapshot, value_account
from trader.errors import InvalidInput
from trader.services.agents.observer import TRADES_SHOWN
from trader.services.backtest.market import BacktestMarket, second_of
from trader.services.backtest.participant import LATE, Invocation, Participant, WaitingOrder, next_minute
from trader.services.exchange.idempotent_orders import checked
from trader.services.portfolio.snapshots import is_due

_FIRST_CYCLE: Final = timedelta(milliseconds=1)
_FIRST_SNAPSHOT: Final = timedelta(milliseconds=2)
"""How long after its start a service decides and values its accounts for the first time."""

_STRETCH_S: Final = 3600
"""Seconds after which the engine reports how far it has come."""


class Journal(Protocol):
    """Takes what happens in a backtest, in order for each account."""

    def open(self, one: Participant) -> None:
        """Take a participant whose account has just opened."""
        ...

    def post(self, posting: Posting) -> None:
        """Take a change of an account."""
        ...

    def snapshot(self, snapshot: Snapshot) -> None:
        """Take what an account is worth at a full minute."""
        ...


class Engine:
    """Takes participants through the market. Without participants that decide it ends at the last tick."""

    def __init__(
        self,
        market: BacktestMarket,
        rules: Rules,
        latency: timedelta,
        participants: Sequence[Participant],
        journal: Journal,
    ) -> None:
        self._market = market
        self._rules = rules
        self._latency = latency
        self._participants = participants
        self._journal = journal
        self._last = market.span.stop - 1
        self._leverage_max = {symbol: one.leverage_max for symbol, one in market.markets.items()}

    def run(self) -> Iterator[int]:
        """Go through the market, and yield the second reached about once an hour of its time."""
        begin = self._market.span.start
        for one in self._participants:
            first = one.source.next_after(begin - int(CYCLE.total_seconds()))
            if first is not None and first <= begin:
                self._decide(one, begin, moment_of(begin) + _FIRST_CYCLE)
            one.decides_at = one.source.next_after(begin)
        end = self._last + int(STALE_AFTER.total_seconds()) + 1  # then the last prices are stale for every reader
        reached = begin
        while reached < end:
            due = [one.decides_at for one in self._participants if one.decides_at is not None]
            reached = min([*due, reached + _STRETCH_S, end])
            for one in self._participants:
                self._advance(one, reached)
                if one.decides_at == reached and reached < end:
                    self._decide(one, reached, moment_of(reached))
                    one.decides_at = one.source.next_after(reached)
                self._take_snapshots(one, min(reached + 1, end))
            yield reached

    # --- ticks --------------------------------------------------------------------------------------------------------

    def _advance(self, one: Participant, until: int) -> None:
        """Take a participant through every tick up to this second that can matter to it."""
        until_tick = min(until, self._last)
        while (second := self._next_event(one, until_tick)) is not None:
            moment = self._market.moment(second)
            self._post(one, apply_tick(one.account, moment, self._rules, self._market.funding_rate), second)
            one.seen = second
            if one.waiting is not None and moment.at >= one.waiting.due:
                self._release(one, moment, second)
        one.seen = max(one.seen, until_tick)

    def _next_event(self, one: Participant, until: int) -> int | None:
        """Return the next second with a tick that may change the account or that its order waits for."""
        waited = None if one.waiting is None else self._market.next_tick(max(one.seen + 1, second_of(one.waiting.due)))
        stop = until if waited is None else min(until, waited)
        touched = None if one.account.is_idle else self._first_touch(one, one.seen + 1, stop)
        return touched if touched is not None or waited is None or waited > until else waited

    def _first_touch(self, one: Participant, start: int, until: int) -> int | None:
        """Return the first second in [start, until] that may change the account."""
        while start <= until:
            if start <= one.clear_until or self._clear_minutes(one, start):
                start = one.clear_until + 1
                continue
            end = min(until, start // 60 * 60 + 59)
            touched = self._first_touch_within(one, start, end)
            if touched is not None:
                return touched
            one.clear_until, start = end, end + 1
        return None

    def _clear_minutes(self, one: Participant, start: int) -> bool:
        """Extend `clear_until` by whole minutes from that of `start` on. Return False when that one is not clear."""
        minute, count = start // 60, 1
        # Beyond the next funding no stretch is clear.
        hours = self._rules.funding_interval_h
        boundary = last_boundary(moment_of(start), hours) + timedelta(hours=hours)
        last = min(int(boundary.timestamp()) // 60 - 1, self._last // 60)
        is_clear = False
        symbols = _concerned(one)
        while minute <= last:
            stop = min(minute + count - 1, last)
            if not self._is_clear(one, self._market.ranges_of_minutes(symbols, minute, stop)):
                break
            is_clear, one.clear_until = True, stop * 60 + 59
            minute, count = stop + 1, 2 * count
        return is_clear

    def _first_touch_within(self, one: Participant, start: int, end: int) -> int | None:
        """Return the first second in [start, end], of one minute, that may change the account."""
        symbols = _concerned(one)
        if start % 60 == 0:  # known without drawing the minute, and where funding is due
            if not self._is_clear(one, self._market.ranges_of_seconds(symbols, start, start)):
                return start if self._market.ticking(start) else self._first_touch_within(one, start + 1, end)
            start += 1
        while start <= end:
            if self._is_clear(one, self._market.ranges_of_seconds(symbols, start, end)):
                return None
            low, high = start, end
            while low < high:  # the first touch lies in [low, high]
                middle = (low + high) // 2
                if self._is_clear(one, self._market.ranges_of_seconds(symbols, low, middle)):
                    low = middle + 1
                else:
                    high = middle
            if self._market.ticking(low):
                return low
            start = low + 1
        return None

    def _is_clear(self, one: Participant, ranges: PriceRanges) -> bool:
        return is_unaffected(one.account, ranges, self._rules)

    def _post(self, one: Participant, posting: Posting | None, second: int) -> None:
        """Take over a change of an account, once its snapshots before this second are taken."""
        if posting is None:
            return
        self._take_snapshots(one, second)
        one.state = one.state.after(posting)
        one.clear_until = second
        self._journal.post(posting)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _decide(self, one: Participant, second: int, now: datetime) -> None:
        """Let a participant decide, unless its last decisions are not executed yet."""
        if one.invocation is not None:
            one.missed += 1
            return
        one.decisions += 1
        glance = _Glance(self._market, one.account, min(second, self._last), now)
        decisions = one.source.decide(glance, lambda: self._view(one, second, now))
        if not decisions:
            return
        one.invocation = Invocation(one.model, now, decisions)
        self._execute(one, Moment(now, *self._prices(second)), second)

    def _prices(self, second: int) -> tuple[Mapping[str, Quote], Marks]:
        moment = self._market.moment(min(second, self._last))
        return moment.quotes, moment.marks

    def _execute(self, one: Participant, moment: Moment, second: int) -> None:
        """Pass the decisions that are left through the guard to the exchange, until an order must wait for its book."""
        invocation = one.invocation
        assert invocation is not None
        while invocation.left:
            number, decision = invocation.left.popleft()
            if not isinstance(decision, Change):
                continue
            symbol = canonical_symbol(decision.symbol)
            if symbol not in self._market.markets:
                continue
            context = self._context(one, moment, second, viewed_at=invocation.started_at)
            verdict = judge(decision, symbol, context, one.variant.limits)
            match verdict:
                case ExitPlan():
                    self._set_plan(one, symbol, verdict, moment, second)
                case Approved():
                    self._order(one, verdict.order(one.account.id, invocation.id, number), moment, second)
                case Refusal():
                    pass
            if one.waiting is not None:
                return
        one.invocation = None

    def _set_plan(self, one: Participant, symbol: str, plan: ExitPlan, moment: Moment, second: int) -> None:
        quote = moment.quotes.get(symbol)
        if quote is None or quote.is_stale(moment.at):
            return
        posting = rules_of_exchange.set_exit_plan(one.account, symbol, plan, moment, self._rules)
        self._post(one, None if isinstance(posting, str) else posting, second)

    def _order(self, one: Participant, order: Order, moment: Moment, second: int) -> None:
        """Place an order, or let it wait for the first book after its latency."""
        try:
            order = checked(order, self._market.markets)
        except InvalidInput:
            return
        refusal = self._refusal_to_wait(order, moment, second)
        if refusal is not None:
            self._post(one, rules_of_exchange.refuse(one.account, order, refusal, moment.at), second)
        elif self._latency:
            one.waiting = WaitingOrder(order, moment.at + self._latency)
        else:
            self._place(one, order, moment, second)

    def _refusal_to_wait(self, order: Order, moment: Moment, second: int) -> str | None:
        """Return why no book can come for an order, or why there is none now where it need not wait; else None."""
        ends_at, last = moment_of(self._last), self._market.last_tick(min(second, self._last))
        if self._latency:
            if moment.at + self._latency > ends_at or last == self._last:
                return f"The replay ended at {iso(ends_at)}; there are no more prices"
            if last is not None and (why := untimely(moment_of(last), moment.at)) is not None:
                return f"The last price is of {iso(moment_of(last))}, {why}"
            return None
        quote = moment.quotes.get(order.symbol)
        if quote is None:
            return f"there is no price for {order.symbol} yet"
        why = untimely(quote.at, moment.at)
        return None if why is None else f"the last {order.symbol} price is of {iso(quote.at)}, {why}"

    def _release(self, one: Participant, moment: Moment, second: int) -> None:
        """Place the order that waited for this tick, or refuse it when it has waited too long; then go on."""
        assert one.waiting is not None
        order, due = one.waiting
        if moment.at - due > LATE:
            refusal = f"No price of {order.symbol} came in time"
        elif order.symbol in moment.updated:
            refusal = None
        elif second == self._last:
            refusal = f"The replay ended at {iso(moment.at)}; there are no more prices"
        else:
            return
        one.waiting = None
        now = Moment(moment.at, moment.quotes, moment.marks)
        if refusal is None:
            self._place(one, order, now, second)
        else:
            self._post(one, rules_of_exchange.refuse(one.account, order, refusal, now.at), second)
        self._execute(one, now, second)

    def _place(self, one: Participant, order: Order, moment: Moment, second: int) -> None:
        funding_rate = self._market.funding_rate
        self._post(one, rules_of_exchange.place(one.account, order, moment, self._rules, funding_rate), second)

    # --- what agents see ----------------------------------------------------------------------------------------------

    def _context(
        self, one: Participant, moment: Moment, second: int, *, viewed_at: datetime | None = None
    ) -> RiskContext:
        self._take_snapshots(one, second)
        past, now = one.past(moment.at), moment.at
        return RiskContext(
            now=now,
            account=one.account,
            marks=moment.marks,
            quoted_at=self._market.quoted_at(second),
            leverage_max=self._leverage_max,
            day_opening_equity=one.account.run.initial_capital if past.day_opening is None else past.day_opening,
            day_lowest_equity=one.curve.lowest_since(past.hour.replace(hour=0)),
            last_trades={symbol: LastTrade(fill.side, fill.at) for symbol, fill in one.state.last_fills.items()},
            viewed_at=viewed_at,
        )

    def _view(self, one: Participant, second: int, now: datetime) -> View:
        context = self._context(one, Moment(now, *self._prices(second)), second)
        past, markets = one.past(now), {}
        for symbol in self._market.markets:
            fill = one.state.last_fills.get(symbol)
            last_action = None if fill is None else observe_last_action(symbol, context, closed=fill.closed)
            observed = self._market.observe(symbol, one.variant.intervals, min(second, self._last), now, last_action)
            if observed is not None:
                markets[symbol] = observed
        return View(
            at=now,
            account=observe_account(context, past.peak, self._rules.taker_rate),
            positions=observe_positions(
                one.account, context.marks, None
            ),  # rule agents do not look at liquidation prices
            trades=one.state.trades[:TRADES_SHOWN],
            stats=one.stats,
            markets=markets,
            orders=observe_orders(one.account),
            every_minutes=one.model.configuration.cadence // CYCLE,
        )

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _take_snapshots(self, one: Participant, before: int) -> None:
        """Take the snapshots of the minutes before this second, with the account as it is: it was the same then."""
        begin = self._market.span.start
        while one.next_snapshot < before:
            second = one.next_snapshot
            now = moment_of(second) + _FIRST_SNAPSHOT if second == begin else moment_of(second)
            if is_due(one.account, one.curve.last, now):
                snapshot = value_account(one.account, self._market.marks(min(second, self._last)), now)
                if snapshot is not None:
                    one.curve.note(snapshot)
                    self._journal.snapshot(snapshot)
            one.next_snapshot = next_minute(second)


class _Glance:
    """What a participant may ask before it has a view made."""

    __slots__ = ("_market", "_second", "account", "now")

    def __init__(self, market: BacktestMarket, account: Account, second: int, now: datetime) -> None:
        self._market = market
        self._second = second
        self.account = account
        self.now = now

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._market.markets

    @property
    def symbols(self) -> Collection[str]:
        return self._market.seen(self._second)

    def indicators(self, symbol: str, interval: Interval) -> Indicators:
        return self._market.indicators(symbol, interval, self.now)

    def mark(self, symbol: str) -> Decimal:
        return self._market.moment(self._second).marks[symbol]


def _concerned(one: Participant) -> list[str]:
    return [*one.account.positions, *(order.symbol for order in one.account.resting)]
