"""Session of an account in a backtest: what its workflow or strategy sees and does in one decision."""

import types
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from decimal import Decimal
from functools import partial
from itertools import chain
from uuid import UUID

from msgspec.structs import replace

from trader.agents.domain.call_inputs import CallInputs
from trader.agents.domain.guard import Approved, RiskContext
from trader.agents.domain.observation import opened_at
from trader.agents.domain.tools import Change, Decision, HaltTrading, request_of
from trader.agents.domain.view import Memory, ObservedFill, ObservedMarket, Shown, View
from trader.agents.execute import execute_change, resting_order
from trader.agents.observer import LOOK_INTERVAL, SESSION_INTERVAL
from trader.agents.record import InvocationRecord, StartedCall
from trader.backtest.accounts import BacktestAccount, Waiting
from trader.backtest.advance import Advance
from trader.backtest.market import BacktestMarket
from trader.core.clock import epoch_second, iso, moment_of
from trader.core.statistics import change_percent
from trader.exchange.domain import rules as rules_of_exchange
from trader.exchange.domain.account import Account
from trader.exchange.domain.halts import Halt, HaltCause, refusal_to_open
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import ExitPlan, Order, OrderAnswer
from trader.exchange.domain.tick_rules import Moment
from trader.exchange.session import Decide, Once, Place, Session, place_directly, same_contents
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import Book, Candle, Interval, Tick, untimely


class AccountSession:
    """One account in one decision: the `InvocationEnvironment` of its workflow or strategy.

    `record` numbers the orders of its calls.
    """

    def __init__(self, engine: Advance, followed: BacktestAccount, now: datetime) -> None:
        self._engine = engine
        self._now = now
        self.followed, self.limits, self.rules = followed, followed.limits, engine.rules
        self.markets, self.funding_rate = engine.market.markets, engine.market.funding_rate
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

    # --- the agent's view ---------------------------------------------------------------------------------------------

    def moment(self) -> Moment:
        """Return the current markets."""
        return Moment(self._now, *self._engine.prices(epoch_second(self._now)))

    @property
    def peek(self) -> "MarketPeek":
        """The current account and markets, without the cost of a full view."""
        engine, second = self._engine, min(epoch_second(self._now), self._engine.last)
        return MarketPeek(engine.market, self.followed, second, self._now)

    def read_history(self) -> None:
        """Read the history of the account, unless it has been read since the last booking in this hour."""
        if not self.followed.knows_history(self._now):
            self._engine.take_snapshots(self.followed, epoch_second(self._now))
            self.followed.history(self._now)

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
            data=market.own_data.at(now),
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
        return rules_of_exchange.book_met(quote, taken, symbol, self._now, self.rules)

    # --- guard --------------------------------------------------------------------------------------------------------

    def context(self, viewed_at: datetime | None = None) -> RiskContext:
        """Return the account's current risk context for the guard."""
        engine, followed = self._engine, self.followed
        lowest = engine.lowest_equity(followed, self._now)
        return followed.history(self._now).risk_context(
            followed.account,
            lowest,
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
        ticks = (
            Tick(each.at, {name: each.quotes[name] for name in sorted(each.updated)})
            for each in moments
            if each.updated
        )
        quotes = self._engine.prices(first)[0]
        self._inputs = self._inputs.answered(symbols, self._now, quotes, ticks, self.funding_rate)

    # --- exchange -----------------------------------------------------------------------------------------------------

    def marks(self) -> Mapping[str, Decimal]:
        return self._engine.prices(epoch_second(self._now))[1]

    def account(self) -> Account:
        return self.followed.account

    async def open_account(self) -> Account:
        return self.followed.account

    async def set_exit_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        refusal = await self.trading().set_plan(self.followed.account.id, symbol, plan)
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
            await self.trading().cancel(self.followed.account.id, resting.id)
            self._note_answer(symbol)
        return refusal

    async def place_orders(self, approved: Sequence[Approved]) -> Sequence[OrderAnswer]:
        """Place an order or a pair immediately, or on the first books after the latency.

        :raises Conflict: the strategy gave the client order id of another order
        """
        answers, chosen, called = self.followed.answers, approved[0].client_order_id, self.record.call.decision

        async def once(orders: Sequence[Order], place: Place) -> Sequence[OrderAnswer]:
            if (earlier := answers.get(chosen or "")) is not None:
                return [same_contents(orders[0], earlier)]
            made = await place(orders)
            self.followed.tags |= {answer.id: order.tag for order, answer in zip(called.orders, made, strict=True)}
            self._note_answer(*(order.symbol for order in orders))
            if chosen is not None:
                answers[chosen] = made[0]
            return made

        return await self.trading(once).place(self.record.orders(approved))

    def trading(self, once: Once = place_directly, decided_at: datetime | None = None) -> Session:
        """Return a session through which the account trades. Without `decided_at`, an order is decided when placed."""
        return Session(
            rules=self.rules,
            rate_of_hour=self.funding_rate,
            moment=self.moment,
            seen_until=self._seen_until,
            change=self._change,
            wait=partial(self._next_books, decided_at),
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

    async def _next_books(self, decided_at: datetime | None, symbols: Sequence[str]) -> str | None:
        """Wait for the books after the latency, if any. Return None, or why none comes."""
        engine, now, due = self._engine, self._now, (decided_at or self._now) + self._engine.latency
        quoted_at = engine.market.quoted_at(min(epoch_second(now), engine.last))
        missing = [symbol for symbol in symbols if symbol not in quoted_at or quoted_at[symbol] < due]
        if not engine.latency or not missing:
            return None
        last = engine.market.last_tick(min(epoch_second(now), engine.last))
        if due > moment_of(engine.last) or last == engine.last:
            return engine.ended
        if last is not None and (why := untimely(moment_of(last), now)) is not None:
            return f"The last price is of {iso(moment_of(last))}, {why}"
        waiting = self.followed.waiting = Waiting(missing, due)
        if self.followed.running is None:
            engine.advance_to_book(self.followed)
        else:
            await _resumed()
        self._now = max(now, waiting.ended_at)
        return waiting.refusal


@types.coroutine
def _resumed() -> Generator[None, None, None]:
    """Suspend the session until the engine resumes it."""
    yield


class MarketPeek:
    """The `Peek` at one second."""

    __slots__ = ("_fills", "_market", "_second", "account", "markets", "now")

    def __init__(self, market: BacktestMarket, followed: BacktestAccount, second: int, now: datetime) -> None:
        self._market = market
        self._second = second
        self.account = followed.account
        self.markets = market.markets
        self._fills = followed.fills
        self.now = now

    @property
    def symbols(self) -> Collection[str]:
        return self._market.seen(self._second)

    def indicators(self, symbol: str, interval: Interval) -> Indicators:
        return self._market.indicators(symbol, interval, self.now)

    def mark(self, symbol: str) -> Decimal:
        return self._market.marks(self._second)[symbol]

    def fills_since(self, sequence: int) -> Sequence[ObservedFill]:
        return [fill for fill in self._fills if fill.sequence > sequence]
