"""Invocations in a backtest: the service's workflow, or recorded decisions, in event time.

An invocation is carried out as a whole before other accounts go on: accounts never affect each other. Waiting for a
model's thinking or for a book takes no real time; it takes the account alone through the ticks until then. Its next
decision is due when the others have come as far.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from decimal import Decimal

from msgspec.structs import replace

from trader.clock import ceil_second, epoch_second, iso, moment_of
from trader.domain.agents.guard import Approved, Refusal, RiskContext, judge
from trader.domain.agents.observation import RunHistory, change_24h_percent, observe_positions
from trader.domain.agents.strategy import Peek
from trader.domain.agents.tools import Change, Decision
from trader.domain.agents.view import Memory, ObservedStats, VariantLimits, View
from trader.domain.exchange import rules as rules_of_exchange
from trader.domain.exchange.account import Account, Taken
from trader.domain.exchange.ledger import Posting, Rules
from trader.domain.exchange.matching import remaining
from trader.domain.exchange.orders import ExitPlan, Order, OrderAnswer
from trader.domain.exchange.tick_rules import Moment
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import Book, Candle, Interval, Market, refusal_to_trade
from trader.domain.models import Model
from trader.domain.portfolio.histories import Snapshot
from trader.domain.portfolio.statistics import daily_closes, max_drawdown, sharpe_ratio
from trader.services.agents.observer import SESSION_INTERVAL
from trader.services.backtest.accounts import ModelAccount
from trader.services.backtest.engine import Engine
from trader.services.backtest.market import BacktestMarket
from trader.services.backtest.runner import Journal
from trader.services.exchange.idempotent_orders import checked
from trader.store.portfolio.snapshots import hourly_points


class InvokedSource(ABC):
    """Base class of decision sources whose decisions take market time: the engine awaits `invoke` at each due time.

    `is_asking`: it waits for others in real time, and other invocations go on meanwhile.
    """

    is_asking = False

    @abstractmethod
    def next_after(self, second: int) -> int | None:
        """Return the second of the first invocation after this one; None when there is no more."""

    def decide(self, _peek: Peek, _look: Callable[[], View]) -> Sequence[Decision]:
        """Return no immediate decisions."""
        return ()

    @abstractmethod
    async def invoke(self, session: "AccountSession") -> None:
        """Run the invocation of this moment."""


class OrderedJournal:
    """Journal that buffers the postings of concurrent invocations and forwards them in a fixed order of accounts."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._held: dict[str, list[Posting]] = {}

    def hold(self, account_ids: Sequence[str]) -> None:
        """Buffer the postings of these accounts from now on."""
        self._held = {account_id: [] for account_id in account_ids}

    def release(self) -> None:
        """Forward the buffered postings, in the order in which the accounts were named."""
        held, self._held = self._held, {}
        for postings in held.values():
            for posting in postings:
                self._journal.post(posting)

    def post(self, posting: Posting) -> None:
        """Forward or buffer a posting."""
        held = self._held.get(posting.account.id)
        if held is None:
            self._journal.post(posting)
        else:
            held.append(posting)

    def snapshot(self, snapshot: Snapshot) -> None:
        self._journal.snapshot(snapshot)


class InvokingEngine(Engine):
    """An engine whose accounts may decide by invocations: `invoke` carries out those that are due."""

    def __init__(
        self,
        market: BacktestMarket,
        rules: Rules,
        latency: timedelta,
        accounts: Sequence[ModelAccount],
        journal: Journal,
    ) -> None:
        self._ordered = OrderedJournal(journal)
        super().__init__(market, rules, latency, accounts, self._ordered)
        self._due: list[tuple[ModelAccount, datetime]] = []
        self._answers: dict[str, OrderAnswer] = {}
        self._stats: dict[str, tuple[RunHistory, ObservedStats]] = {}

    @property
    def is_due(self) -> bool:
        return bool(self._due)

    def is_ahead(self, second: int) -> bool:
        """Whether an account has gone further than this second, in an invocation."""
        return any(followed.seen > second for followed in self.accounts)

    async def invoke(self) -> None:
        """Run the due invocations concurrently, and raise the error of the first that failed."""
        due, self._due = self._due, []
        invocations, asking = [], []
        for followed, now in due:
            assert isinstance(followed.source, InvokedSource), "only those are due"
            invocations.append(followed.source.invoke(AccountSession(self, followed, now)))
            asking += [followed.account.id] if followed.source.is_asking else []
        self._ordered.hold(asking)
        try:
            results = await asyncio.gather(*invocations, return_exceptions=True)
        finally:
            self._ordered.release()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def skip(self) -> None:
        """Skip the due invocations."""
        due, self._due = self._due, []
        for followed, now in due:
            self._take_snapshots(followed, epoch_second(now) + 1)

    def _take_snapshots(self, followed: ModelAccount, before: int) -> None:
        """Take snapshots; that of the minute of a decision which is due comes after its view, as in a service."""
        due = [epoch_second(now) for each, now in self._due if each is followed]
        super()._take_snapshots(followed, min([before, *due]))

    def decide(self, followed: ModelAccount, second: int, now: datetime) -> None:
        if isinstance(followed.source, InvokedSource):
            self._due.append((followed, now))
        else:
            super().decide(followed, second, now)

    def _execute(self, followed: ModelAccount, moment: Moment, second: int) -> None:
        if not isinstance(followed.source, InvokedSource):
            super()._execute(followed, moment, second)

    def post(self, followed: ModelAccount, posting: Posting | None, second: int) -> None:
        super().post(followed, posting, second)
        if posting is not None and posting.answer is not None:
            self._answers[followed.account.id] = posting.answer

    # --- what an invocation does --------------------------------------------------------------------------------------

    @property
    def markets(self) -> Mapping[str, Market]:
        return self.market.markets

    def marks_at(self, moment: datetime) -> Mapping[str, Decimal]:
        return self.prices(epoch_second(moment))[1]

    def advance(self, followed: ModelAccount, moment: datetime) -> None:
        """Advance an account to a moment: its ticks up to it, and its snapshots before it."""
        self._advance(followed, epoch_second(moment))
        self._take_snapshots(followed, ceil_second(moment))

    def context_of(self, followed: ModelAccount, now: datetime) -> RiskContext:
        """Return the guard's risk context of an account."""
        second = epoch_second(now)
        context = self.context(followed, Moment(now, *self.prices(second)), second)
        self._stats_of(followed, now)
        return context

    def _stats_of(self, followed: ModelAccount, now: datetime) -> ObservedStats:
        """Return the statistics of an account as of its last read history, with risk-adjusted figures."""
        history, known = followed.history(now), self._stats.get(followed.account.id)
        if known is not None and known[0] is history:
            return known[1]
        capital = float(followed.account.run.initial_capital)
        series = hourly_points(followed.hours)
        drawdown = max_drawdown([capital, *(point.value for point in series)]) if series else None
        stats = replace(
            history.stats,
            sharpe_ratio=sharpe_ratio(daily_closes(series, capital)),
            max_drawdown_percent=None if drawdown is None else drawdown.percent,
        )
        self._stats[followed.account.id] = history, stats
        return stats

    def view_of(self, followed: ModelAccount, now: datetime, memory: Memory) -> View:
        """Return an AI model's view, with liquidation prices and its own statistics."""
        view, stats = self._view(followed, epoch_second(now), now), self._stats_of(followed, now)
        positions = observe_positions(followed.account, self.marks_at(now), self.markets)
        markets = {  # rule agents look at few of them, an AI model is shown all
            symbol: replace(
                market,
                candles=dict(market.candles),
                indicators=dict(market.indicators),
                indicator_history={
                    interval: self.market.indicator_history(symbol, interval, now) for interval in market.indicators
                },
                change_24h_percent=change_24h_percent(
                    market.price, self.market.closed_candles(symbol, SESSION_INTERVAL, now), now
                ),
            )
            for symbol, market in view.markets.items()
        }
        return replace(view, positions=positions, markets=markets, stats=stats, memory=memory)

    def candles_of(self, symbol: str, interval: Interval, now: datetime) -> tuple[list[Candle], Indicators]:
        """Return the latest closed candles of a market, ascending, and their indicators. Both may be empty."""
        candles = list(self.market.closed_candles(symbol, interval, now))
        return candles, self.market.indicators(symbol, interval, now)

    def order_book(self, followed: ModelAccount, symbol: str, now: datetime) -> Book | None:
        """Return the order book that an order of the account would meet now; None without a price."""
        quote = self.prices(epoch_second(now))[0].get(symbol)
        taken = followed.account.taken.get(symbol, Taken())
        if quote is None:
            return None
        return remaining(quote.book, taken, now, self.rules.book_recovery, self.markets[symbol].lot)

    def place(self, followed: ModelAccount, order: Order, now: datetime) -> OrderAnswer:
        """Place an order and advance its account to the tick that answers it. Raises `InvalidInput`."""
        order, second = checked(order, self.markets), epoch_second(now)
        self._order(followed, order, Moment(now, *self.prices(second)), second)
        while followed.waiting is not None:
            following = self._next_event(followed, self.last)
            if following is None:
                self._give_up(followed, order)
            else:
                self._apply(followed, following)
        return self._answers[followed.account.id]

    def _give_up(self, followed: ModelAccount, order: Order) -> None:
        followed.waiting = None
        refusal = f"The replay ended at {iso(moment_of(self.last))}; there are no more prices"
        self.post(followed, rules_of_exchange.refuse(followed.account, order, refusal, moment_of(self.last)), self.last)

    def set_plan(self, followed: ModelAccount, symbol: str, plan: ExitPlan, now: datetime) -> str | None:
        """Replace the exit plan of a position. Return why it is refused, or None."""
        second = epoch_second(now)
        moment = Moment(now, *self.prices(second))
        refusal = refusal_to_trade(moment.quotes.get(symbol), symbol, now)
        if symbol in followed.account.positions and refusal is not None:
            return refusal
        result = rules_of_exchange.set_exit_plan(followed.account, symbol, plan, moment, self.rules)
        if isinstance(result, str):
            return result
        self.post(followed, result, second)
        return None


class AccountSession:
    """One account during an invocation: clock, observer and exchange of its workflow."""

    def __init__(self, engine: InvokingEngine, followed: ModelAccount, now: datetime) -> None:
        self._engine = engine
        self._now = now
        self.followed = followed
        self.memory = Memory()
        """What the model knows of its last invocations."""

    # --- clock --------------------------------------------------------------------------------------------------------

    def now(self) -> datetime:
        return self._now

    async def sleep_until(self, moment: datetime) -> None:
        self.advance_to(moment)

    def advance_to(self, moment: datetime) -> None:
        if moment > self._now:
            self._engine.advance(self.followed, moment)
            self._now = moment

    def thinking(self) -> AbstractContextManager[None]:
        return nullcontext()

    # --- observer -----------------------------------------------------------------------------------------------------

    async def view(self, _model: Model, _intervals: Sequence[Interval], now: datetime, _series: int) -> View:
        return self._engine.view_of(self.followed, now, self.memory)

    async def wait_for_price(self, now: datetime) -> None:
        """Return at once: every period of a backtest begins with a price."""

    async def risk_context(self, _account_id: str, now: datetime) -> RiskContext:
        return self._engine.context_of(self.followed, now)

    async def indicators(self, symbol: str, interval: Interval) -> tuple[list[Candle], Indicators]:
        return self._engine.candles_of(symbol, interval, self._now)

    def order_book(self, _account_id: str, symbol: str, now: datetime) -> Book | None:
        return self._engine.order_book(self.followed, symbol, now)

    def verdict(self, decision: Change, symbol: str, viewed_at: datetime) -> Approved | ExitPlan | Refusal:
        """Return the guard's verdict on a decision made from the view of `viewed_at`."""
        context = replace(self._engine.context_of(self.followed, self._now), viewed_at=viewed_at)
        return judge(decision, symbol, context, self.followed.limits)

    def call_recorder(self, _number: int, _limits: VariantLimits, _context: RiskContext) -> "NoInputs":
        return NoInputs()

    # --- exchange -----------------------------------------------------------------------------------------------------

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._engine.markets

    def marks(self) -> Mapping[str, Decimal]:
        return self._engine.marks_at(self._now)

    def account(self, _account_id: str) -> Account:
        return self.followed.account

    async def open_account(self, _account_id: str) -> Account:
        return self.followed.account

    async def place_order(self, order: Order) -> OrderAnswer:
        return self.place(order)

    def place(self, order: Order) -> OrderAnswer:
        """Place an order and advance the account until it is answered."""
        answer = self._engine.place(self.followed, order, self._now)
        self._now = max(self._now, answer.at)
        return answer

    async def set_exit_plan(self, _account_id: str, symbol: str, plan: ExitPlan) -> str | None:
        return self.set_plan(symbol, plan)

    def set_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the exit plan of a position. Return why it is refused, or None."""
        return self._engine.set_plan(self.followed, symbol, plan, self._now)


class NoInputs:
    """Call recorder that records nothing: `trader backtest` itself reproduces every call."""

    def refused(self) -> None:
        return None

    def answered(self, _symbol: str, _at: datetime) -> None:
        return None
