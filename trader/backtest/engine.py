"""Engine of a backtest: advances accounts through market time, and executes their decisions.

A replay applies every second to every account; the engine applies only the seconds that can change an account. Accounts
never affect each other, so each advances on its own from one decision to the next. The rows equal those of a replay in
lockstep:

    at a second's tick   funding, resting orders, liquidation, exit plans; then the orders that waited for its book
    at a full minute     after the tick of that second the decisions, then the snapshot

Each decision is a session of its account. A strategy's session is suspended while its order waits for a book, and
resumed by the tick of that book. The session of a source that runs ahead, such as an AI model, advances only its own
account until the session ends; the next decision is due once the other accounts have caught up.
"""

import asyncio
import types
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol
from uuid import UUID

from msgspec.structs import replace

from trader.agents.domain.call_inputs import CallInputs
from trader.agents.domain.guard import Approved, RiskContext
from trader.agents.domain.models import CYCLE
from trader.agents.domain.observation import RunHistory, opened_at
from trader.agents.domain.tools import Change, Decision, HaltTrading, request_of
from trader.agents.domain.view import Memory, ObservedFill, ObservedMarket, Shown, VariantLimits, View
from trader.agents.execute import execute_change, resting_order
from trader.agents.observer import LOOK_INTERVAL, SESSION_INTERVAL
from trader.agents.record import InvocationRecord, StartedCall
from trader.backtest.accounts import FIRST_CYCLE, FIRST_SNAPSHOT, BacktestAccount, TouchFinder, Waiting, next_minute
from trader.backtest.market import BacktestMarket
from trader.core.clock import ceil_second, epoch_second, iso, moment_of
from trader.core.statistics import change_percent
from trader.exchange.domain import rules as rules_of_exchange
from trader.exchange.domain.account import Account, Marks
from trader.exchange.domain.halts import Halt, HaltCause, refusal_to_open
from trader.exchange.domain.ledger import ExchangeRules, Posting
from trader.exchange.domain.orders import ExitPlan, Order, OrderAnswer
from trader.exchange.domain.tick_rules import Moment, apply_tick
from trader.exchange.session import Decide, Once, Place, Session, place_directly, same_contents
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import (
    STALE_AFTER,
    Book,
    Candle,
    Interval,
    Market,
    Quote,
    Tick,
    untimely,
)
from trader.portfolio.domain.histories import Snapshot

_STRETCH_S: Final = 3600
"""Seconds of market time between progress reports of the engines."""

LATE: Final = timedelta(seconds=5)
"""How much longer than its latency an order waits for a book."""


class Journal(Protocol):
    """Receives the postings and snapshots of a backtest, in order per account."""

    def post(self, posting: Posting) -> None:
        """Receive a posting."""
        ...

    def snapshot(self, snapshot: Snapshot) -> None:
        """Receive the snapshot of a full minute."""
        ...


class OrderedJournal:
    """Journal that buffers what concurrent sessions write and forwards it in a fixed order of accounts."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._held: dict[str, list[Callable[[], None]]] = {}

    def hold(self, account_ids: Sequence[str]) -> None:
        """Buffer the postings and snapshots of these accounts from now on."""
        self._held = {account_id: [] for account_id in account_ids}

    def release(self) -> None:
        """Forward what is buffered, in the order of the held accounts."""
        held, self._held = self._held, {}
        for write in chain.from_iterable(held.values()):
            write()

    def post(self, posting: Posting) -> None:
        """Forward or buffer a posting."""
        self._write(posting.account.id, self._journal.post, posting)

    def snapshot(self, snapshot: Snapshot) -> None:
        """Forward or buffer a snapshot."""
        self._write(snapshot.account_id, self._journal.snapshot, snapshot)

    def _write(self, account_id: str, write: Callable[[Any], None], written: Posting | Snapshot) -> None:
        held = self._held.get(account_id)
        if held is None:
            write(written)
        else:
            held.append(partial(write, written))


class Engine:
    """Advances accounts through market time. `invoke` runs the due sessions of sources that run ahead."""

    def __init__(
        self,
        market: BacktestMarket,
        rules: ExchangeRules,
        accounts: Sequence[BacktestAccount],
        journal: Journal,
    ) -> None:
        self.market = market
        self.rules = rules
        self.latency = rules.latency
        self.accounts = accounts
        self._journal = OrderedJournal(journal)
        self._touches = TouchFinder(market, rules)
        self._due: list[AccountSession] = []
        self.last = market.span.stop - 1
        """The second of the last tick."""

        self.leverage_max = {symbol: each.leverage_max for symbol, each in market.markets.items()}

    def begin(self) -> None:
        """Run the first decision cycle of the accounts that start with the market."""
        begin = self.market.span.start
        for followed in self.accounts:
            first = followed.source.next_after(begin - int(CYCLE.total_seconds()))
            if first is not None and first <= begin:
                self._decide(followed, moment_of(begin) + FIRST_CYCLE)
            followed.decides_at = followed.source.next_after(begin)

    @property
    def next_decision(self) -> int | None:
        """The second of the next decision; None if there is none."""
        return min((followed.decides_at for followed in self.accounts if followed.decides_at is not None), default=None)

    def go(self, until: int, *, is_end: bool) -> None:
        """Advance every account to a second not after the next decision. At the end, no decisions are made."""
        for followed in self.accounts:
            self._advance(followed, until)
            if followed.decides_at == until and not is_end:
                self._decide(followed, moment_of(until))
                followed.decides_at = followed.source.next_after(until)
            self.take_snapshots(followed, until if is_end else until + 1)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _decide(self, followed: BacktestAccount, now: datetime) -> None:
        """Begin the session of an account, unless its previous decisions are still being executed."""
        session, source = AccountSession(self, followed, now), followed.source
        if source.runs_ahead:
            self._due.append(session)
            return
        if followed.running is not None:
            if not source.replaces:
                followed.missed += 1
                return
            followed.running.close()
            followed.waiting = None
        followed.running = source.run(session)
        self._resume(followed)

    def _resume(self, followed: BacktestAccount) -> None:
        """Run a session until it waits for a book or ends."""
        assert followed.running is not None
        try:
            followed.running.send(None)
        except StopIteration:
            followed.running = None

    @property
    def is_due(self) -> bool:
        return bool(self._due)

    def is_ahead(self, second: int) -> bool:
        """Whether the session of an account has advanced it beyond this second."""
        return any(followed.seen > second for followed in self.accounts)

    async def invoke(self) -> None:
        """Run the due sessions concurrently, and raise the error of the first that fails."""
        due, self._due = self._due, []
        self._journal.hold([session.followed.account.id for session in due if session.followed.source.is_asking])
        try:
            sessions = [session.followed.source.run(session) for session in due]
            results = await asyncio.gather(*sessions, return_exceptions=True)
        finally:
            self._journal.release()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def skip(self) -> None:
        """Skip the due sessions."""
        due, self._due = self._due, []
        for session in due:
            self.take_snapshots(session.followed, epoch_second(session.now()) + 1)

    # --- ticks --------------------------------------------------------------------------------------------------------

    def _advance(self, followed: BacktestAccount, until: int) -> None:
        """Apply every tick up to this second that may change the account."""
        until_tick = min(until, self.last)
        while (second := self._next_event(followed, until_tick)) is not None:
            self._apply(followed, second)
        followed.seen = max(followed.seen, until_tick)

    def advance_to(self, followed: BacktestAccount, moment: datetime) -> None:
        """Advance only this account to a moment: apply the ticks up to it, and take the snapshots before it."""
        self._advance(followed, epoch_second(moment))
        self.take_snapshots(followed, ceil_second(moment))

    def advance_to_book(self, followed: BacktestAccount) -> None:
        """Advance only this account to the tick that ends its wait for a book."""
        while (waiting := followed.waiting) is not None:
            second = self._next_event(followed, self.last)
            if second is None:
                self._end_wait(followed, waiting, moment_of(self.last), self.ended)
            else:
                self._apply(followed, second)

    def _apply(self, followed: BacktestAccount, second: int) -> None:
        """Apply the tick of a second to an account, then resume the session that waited for it."""
        moment = self.market.moment(second)
        posting = apply_tick(followed.account, moment, self.rules, self.market.funding_rate)
        if posting is not None:
            self.post(followed, posting, second)
        followed.seen = second
        waiting = followed.waiting
        if waiting is None or moment.at < waiting.due:
            return
        is_late = moment.at - waiting.due > LATE
        if not is_late:
            waiting.missing = [symbol for symbol in waiting.missing if symbol not in moment.updated]
        if not waiting.missing:
            self._end_wait(followed, waiting, moment.at, None)
        elif is_late:
            self._end_wait(followed, waiting, moment.at, f"No price of {waiting.missing[0]} came in time")
        elif second == self.last:
            self._end_wait(followed, waiting, moment.at, self.ended)

    def _end_wait(self, followed: BacktestAccount, waiting: Waiting, at: datetime, refusal: str | None) -> None:
        waiting.ended_at, waiting.refusal, followed.waiting = at, refusal, None
        if followed.running is not None:
            self._resume(followed)

    def _next_event(self, followed: BacktestAccount, until: int) -> int | None:
        """Return the second of the next tick that may change the account or that its session waits for."""
        waiting = followed.waiting
        waited = None if waiting is None else self.market.next_tick(max(followed.seen + 1, ceil_second(waiting.due)))
        stop = until if waited is None else min(until, waited)
        touched = self._touches.first(followed, followed.seen + 1, stop)
        return touched if touched is not None or waited is None or waited > until else waited

    def post(self, followed: BacktestAccount, posting: Posting, second: int) -> None:
        """Apply a posting to an account, after taking the snapshots that precede this second."""
        self.take_snapshots(followed, second)
        followed.apply(posting)
        followed.clear_until = second
        self._journal.post(posting)

    def prices(self, second: int) -> tuple[Mapping[str, Quote], Marks]:
        """Return the quotes and marks at a second; after the end, those of the last tick."""
        moment = self.market.moment(min(second, self.last))
        return moment.quotes, moment.marks

    @property
    def ended(self) -> str:
        """Why no order can meet a book any more."""
        return f"The replay ended at {iso(moment_of(self.last))}; there are no more prices"

    def take_snapshots(self, followed: BacktestAccount, before: int) -> None:
        """Take the snapshots of the minutes before this second; the account has not changed since.

        In the minute of a due session, the snapshot follows the view, as in a service.
        """
        if self._due:
            due = [epoch_second(session.now()) for session in self._due if session.followed is followed]
            before = min([before, *due])
        begin = self.market.span.start
        while followed.next_snapshot < before:
            second = followed.next_snapshot
            now = moment_of(second) + FIRST_SNAPSHOT if second == begin else moment_of(second)
            snapshot = followed.due_snapshot(self.market.marks(min(second, self.last)), now)
            if snapshot is not None:
                followed.note(snapshot)
                self._journal.snapshot(snapshot)
            followed.next_snapshot = next_minute(second)


class AccountSession:
    """One account in one decision: the `InvocationEnvironment` of its workflow or strategy.

    `record` numbers the orders of its calls.
    """

    def __init__(self, engine: Engine, followed: BacktestAccount, now: datetime) -> None:
        self._engine = engine
        self._now = now
        self.followed = followed
        self.record: InvocationRecord
        self.viewed_at = now
        self._inputs: CallInputs | None = None
        self.remember: Callable[[], Memory] = Memory
        """Returns the agent's memory of its last invocations, with times as the agent sees them, for a full view."""

        self.looked_at: datetime | None = None
        """The time of the last invocation that an AI model or an external agent answered."""

    async def execute(self, number: int, decision: Decision) -> None:
        """Execute a decision made by code, if it may change the books, and report its outcome."""
        if isinstance(decision, HaltTrading):
            await self.halt(decision.reason)
        elif isinstance(decision, Change):
            self.record.call = StartedCall(number, request_of(number, decision), decision, self._now)
            outcome = await execute_change(decision, self)
            self.followed.report(self._now, number, decision, outcome)

    def post(self, posting: Posting) -> None:
        """Apply a posting to the account now."""
        self._engine.post(self.followed, posting, epoch_second(self._now))

    # --- clock --------------------------------------------------------------------------------------------------------

    def now(self) -> datetime:
        return self._now

    async def sleep_until(self, moment: datetime) -> None:
        self.advance_to(moment)

    def advance_to(self, moment: datetime) -> None:
        """Advance only this account to a moment; a past moment counts as now."""
        if moment > self._now:
            self._engine.advance_to(self.followed, moment)
            self._now = moment

    def thinking(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def wait_for_price(self) -> None:
        """Return immediately: every period of a backtest begins with a price."""

    async def wait_for_books(self, symbols: Sequence[str]) -> str | None:
        """Wait for a tick of each market (none: of any) after the latency. Return None, or why no tick comes."""
        followed, engine = self.followed, self._engine
        waiting = followed.waiting = Waiting(symbols, self._now + engine.latency)
        if followed.running is None:
            engine.advance_to_book(followed)
        else:
            await _resumed()
        self._now = max(self._now, waiting.ended_at)
        return waiting.refusal

    # --- the agent's view ---------------------------------------------------------------------------------------------

    def moment(self) -> Moment:
        """Return the current markets."""
        return Moment(self._now, *self._engine.prices(epoch_second(self._now)))

    @property
    def peek(self) -> "MarketPeek":
        """The current account and markets, without the cost of a full view."""
        engine, second = self._engine, min(epoch_second(self._now), self._engine.last)
        return MarketPeek(engine.market, self.followed, second, self._now)

    def read_history(self) -> RunHistory:
        """Return the history of the account, read now unless it has been since the last booking in this hour."""
        self._engine.take_snapshots(self.followed, epoch_second(self._now))
        return self.followed.history(self._now)

    def look(self) -> View:
        """Return the view of the account's agent."""
        followed, market, now = self.followed, self._engine.market, self._now
        context, second = self.context(), min(epoch_second(now), self._engine.last)
        observed = ((symbol, market.observe(symbol, followed.shown, second, now)) for symbol in market.markets)
        history = followed.history(now)
        return history.view(
            context,
            {symbol: self._since_look(each) for symbol, each in observed if each is not None},
            self.rules,
            stats=followed.stats(history),
            memory=self.remember(),
            cadence=followed.cadence,
            restriction=None,
            fills=followed.fills,
        )

    async def view(self, _shown: Shown) -> View:
        """Return the view of an AI model, on which its next decisions are based."""
        self.viewed_at = self._now
        return self.look()

    def _since_look(self, market: ObservedMarket) -> ObservedMarket:
        """Return a market with its change since the agent last looked."""
        if self.looked_at is None:
            return market
        candles = (
            self._engine.market.closed_candles(market.symbol, each, self._now)
            for each in (LOOK_INTERVAL, SESSION_INTERVAL)
        )
        changed = change_percent(market.price, opened_at(chain.from_iterable(candles), self.looked_at))
        return replace(market, change_since_look_percent=changed)

    async def indicators(self, symbol: str, interval: Interval) -> tuple[list[Candle], Indicators]:
        market = self._engine.market
        return list(market.closed_candles(symbol, interval, self._now)), market.indicators(symbol, interval, self._now)

    def order_book(self, symbol: str) -> Book | None:
        quote, taken = self.moment().quotes.get(symbol), self.followed.account.taken
        return rules_of_exchange.book_met(quote, taken, symbol, self._now, self._engine.rules)

    # --- guard --------------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> VariantLimits:
        return self.followed.limits

    def context(self, viewed_at: datetime | None = None) -> RiskContext:
        """Return the account's current risk context for the guard."""
        engine, followed, history = self._engine, self.followed, self.read_history()
        return history.risk_context(
            followed.account,
            followed.equity.lowest_on(history.hour.date()),
            self._now,
            marks=self.marks(),
            quoted_at=engine.market.quoted_at(epoch_second(self._now)),
            leverage_max=engine.leverage_max,
            viewed_at=viewed_at,
        )

    async def risk_context(self) -> RiskContext:
        context = self.context(self.viewed_at)
        if self.followed.source.records_inputs:
            number, latency = self.record.call.number, self._engine.latency
            self._inputs = CallInputs.of(number, self.limits, self.rules, latency, context)
        return context

    def take_inputs(self) -> CallInputs | None:
        inputs, self._inputs = self._inputs, None
        return inputs

    def _note_answer(self, *symbols: str) -> None:
        """Add the market since the decision to the inputs of the call, which has been answered now."""
        if self._inputs is None:
            return
        market, first, last = self._engine.market, epoch_second(self._inputs.context.now), epoch_second(self._now)
        moments = map(market.moment, range(first + 1, min(last, self._engine.last) + 1))
        ticks = (Tick(each.at, {name: each.quotes[name] for name in each.updated}) for each in moments if each.updated)
        quotes = self._engine.prices(first)[0]
        self._inputs = self._inputs.answered(symbols, self._now, quotes, ticks, self.funding_rate)

    # --- exchange -----------------------------------------------------------------------------------------------------

    @property
    def rules(self) -> ExchangeRules:
        return self._engine.rules

    def funding_rate(self, symbol: str, hour: datetime) -> Decimal:
        return self._engine.market.funding_rate(symbol, hour)

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._engine.market.markets

    def marks(self) -> Mapping[str, Decimal]:
        return self._engine.prices(epoch_second(self._now))[1]

    def account(self) -> Account:
        return self.followed.account

    async def open_account(self) -> Account:
        return self.followed.account

    async def set_exit_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        refusal = await self._trading().set_plan(self.followed.account.id, symbol, plan)
        if refusal is None:
            self._note_answer(symbol)
        return refusal

    async def halt(self, reason: str) -> None:
        account_id = self.followed.account.id
        by = f"the agent {account_id}"
        halt = Halt(account_id=account_id, cause=HaltCause.OPERATOR, reason=reason, by=by, at=self._now)
        self.followed.halts[:] = [halt]

    def order(self, order_id: UUID) -> OrderAnswer | None:
        """Return the current answer of an order of the account; None if there is no such order."""
        return (self.followed.orders or {}).get(order_id)

    async def cancel_order(self, symbol: str, order_id: str) -> str | None:
        refusal, resting = resting_order(self.followed.account, symbol, order_id)
        if resting is not None:
            await self._trading().cancel(self.followed.account.id, resting.id)
            self._note_answer(symbol)
        return refusal

    async def place_orders(self, approved: Sequence[Approved]) -> Sequence[OrderAnswer]:
        """Place an order or a pair immediately, or on the first books after the latency.

        :raises Conflict: the strategy gave the client order id of another order
        """
        answers, chosen = self.followed.answers, approved[0].client_order_id

        async def once(orders: Sequence[Order], place: Place) -> Sequence[OrderAnswer]:
            if (earlier := answers.get(chosen or "")) is not None:
                return [same_contents(orders[0], earlier)]
            made = await place(orders)
            self._note_answer(*(order.symbol for order in orders))
            if chosen is not None:
                answers[chosen] = made[0]
            return made

        return await self._trading(once).place(self.record.orders(approved))

    def _trading(self, once: Once = place_directly) -> Session:
        return Session(
            rules=self.rules,
            rate_of_hour=self._engine.market.funding_rate,
            moment=self.moment,
            seen_until=self._seen_until,
            change=self._change,
            wait=self._next_books,
            halted=partial(refusal_to_open, self.followed.halts),
            once=once,
        )

    async def _change(self, _account_id: str, decide: Decide) -> Posting | None:
        posting = decide(self.followed.account)
        if posting is not None:
            self.post(posting)
        return posting

    def _seen_until(self) -> datetime:
        seen = moment_of(self._engine.market.last_tick(epoch_second(self._now)) or 0)
        return self._now if untimely(seen, self._now) is None else seen

    async def _next_books(self, symbols: Sequence[str]) -> str | None:
        """Wait for the books after the latency, if any. Return None, or why none can come."""
        engine, now = self._engine, self._now
        if not engine.latency:
            return None
        last = engine.market.last_tick(min(epoch_second(now), engine.last))
        if now + engine.latency > moment_of(engine.last) or last == engine.last:
            return engine.ended
        if last is not None and (why := untimely(moment_of(last), now)) is not None:
            return f"The last price is of {iso(moment_of(last))}, {why}"
        return await self.wait_for_books(symbols)


@types.coroutine
def _resumed() -> Generator[None, None, None]:
    """Suspend the session until the engine resumes it."""
    yield


class MarketPeek:
    """The `Peek` at one second."""

    __slots__ = ("_fills", "_market", "_second", "account", "now")

    def __init__(self, market: BacktestMarket, followed: BacktestAccount, second: int, now: datetime) -> None:
        self._market = market
        self._second = second
        self.account = followed.account
        self._fills = followed.fills
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

    def fills_since(self, sequence: int) -> Sequence[ObservedFill]:
        return [fill for fill in self._fills if fill.sequence > sequence]


def run_together(market: BacktestMarket, engines: Sequence[Engine]) -> Iterator[int]:
    """Advance all engines through the market, and yield the second reached about once per hour of market time.

    Accounts without decisions end at the last tick.
    """
    for engine in engines:
        engine.begin()
    reached = market.span.start
    yield reached
    end = market.span.stop + int(STALE_AFTER.total_seconds())  # by then the last prices are stale for every reader
    while reached < end:
        due = [second for engine in engines if (second := engine.next_decision) is not None]
        reached = min([*due, reached + _STRETCH_S, end])
        for engine in engines:
            engine.go(reached, is_end=reached == end)
        yield reached
