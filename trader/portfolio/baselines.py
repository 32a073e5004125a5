"""Baselines of a service: accounts of the paper exchange that are in no list.

They follow the market and trade as the models' accounts do on paper, even in live trading, but their orders never leave
the process. They are neither accounts of the service nor models, so nothing that trades, counts or lists those includes
them; their values are portfolio snapshots under ids that no account can have.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from trader.agents.domain.guard import Approved, RiskContext
from trader.agents.domain.observation import RunHistory
from trader.agents.domain.tools import Change
from trader.agents.domain.view import VariantLimits
from trader.agents.execute import RulesEnvironment, execute_change
from trader.agents.observer import Observer
from trader.agents.sql.agent_view import select_lowest_equity
from trader.agents.variants import VARIANTS, Variant
from trader.core import tasks
from trader.core.clock import EPOCH, Clock
from trader.core.events import EventBus
from trader.core.variant_id import VariantId
from trader.database.leadership import hold_term
from trader.database.pool import Connection, Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.account import Account, AppliedTick, Marks
from trader.exchange.domain.ledger import Posting, unopened_account
from trader.exchange.domain.orders import Order
from trader.exchange.domain.tick_order import DateSpan
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.protocol import Exchange, rules_of
from trader.exchange.session import Decide, Session
from trader.exchange.tick_processor import TickProcessor
from trader.market.domain.markets import Tick
from trader.market.feed import MarketFeed
from trader.portfolio.domain.baselines import (
    BUY_AND_HOLD,
    TRADES_KEPT,
    Baseline,
    BaselineState,
    EquityMarks,
    baselines_beside,
    buy_every_market,
)
from trader.portfolio.domain.histories import Snapshot, value_account
from trader.portfolio.snapshots import is_due
from trader.portfolio.sql import snapshots as store
from trader.portfolio.sql.snapshots import LastSnapshot, insert_snapshots, select_run_hours
from trader.settings.settings import Settings

log = logging.getLogger("trader.baselines")


class FollowedAccount:
    """An account with the history visible to its agent."""

    trades_shown = TRADES_KEPT
    """How many of its latest completed trades its agent sees."""

    def __init__(self, state: BaselineState) -> None:
        self.state = state
        self.equity = EquityMarks()
        self.last_snapshot: LastSnapshot | None = None

    @property
    def account(self) -> Account:
        return self.state.account

    def apply(self, posting: Posting) -> None:
        self.state = self.state.after(posting)

    def due_snapshot(self, marks: Marks, now: datetime) -> Snapshot | None:
        """Return the snapshot of this minute; None if none is due or a position has no price yet."""
        return value_account(self.account, marks, now) if is_due(self.account, self.last_snapshot, now) else None

    def note(self, snapshot: Snapshot) -> None:
        """Record a snapshot, which must be later than all earlier ones."""
        self.equity = self.equity.noted(snapshot.created_at, snapshot.net_portfolio)
        self.last_snapshot = LastSnapshot(snapshot.run_id, snapshot.created_at)

    async def read_equity(self, conn: Connection, now: datetime) -> None:
        """Read the recorded equity of the account's run."""
        run_id, midnight = self.account.run.id, now.replace(hour=0, minute=0, second=0, microsecond=0)
        for value in await select_run_hours(conn, [(self.account.id, run_id, EPOCH)]):
            self.equity = self.equity.noted(value.hour, value.last)
        lowest = await select_lowest_equity(conn, self.account.id, run_id, midnight)
        self.equity = msgspec.structs.replace(self.equity, lowest=lowest)

    def history(self, now: datetime) -> RunHistory:
        """Return the run history that the agent sees."""
        state, account = self.state, self.account
        return RunHistory(
            run_id=account.run.id,
            sequence=account.sequence,
            hour=now.replace(minute=0, second=0, microsecond=0),
            trades=state.trades[: self.trades_shown],
            stats=state.stats,
            actions=state.last_fills,
            peak=self.equity.peak,
            day_opening=self.equity.before(now.date()),
        )


async def execute_together(
    decisions: Sequence[Change], context: Callable[[], RiskContext], limits: VariantLimits, session: Session
) -> None:
    """Execute the decisions of a baseline's rule agent through a session of its account.

    `context` returns its current risk context, with the changes so far.
    """
    for decision in decisions:
        current = context()

        def orders(approved: Sequence[Approved], account_id: str = current.account.id) -> list[Order]:
            return [Order(account_id=account_id, **msgspec.structs.asdict(each)) for each in approved]

        await execute_change(decision, RulesEnvironment(current, limits, current.account, session, orders))


class _Follower(FollowedAccount):
    """The account of a baseline. `saved` is its state in its row, and `trading` executes its agent's last decisions."""

    def __init__(self, baseline: Baseline, state: BaselineState, saved: BaselineState | None = None) -> None:
        super().__init__(state)
        self.baseline = baseline
        self.saved = saved
        self.trading: asyncio.Task[None] | None = None


class _UnlistedAccounts(Accounts):
    """Accounts without a ledger, so that a change is certain as soon as it is in memory."""

    log = log
    is_listed = False

    def __init__(self, database: Database, followers: Mapping[str, _Follower]) -> None:
        super().__init__(database, LedgerWriter(database), EventBus())
        self._followers = followers

    @property
    def by_id(self) -> Mapping[str, Account]:
        return {baseline_id: follower.account for baseline_id, follower in self._followers.items()}

    async def apply(self, account_id: str, decide: Decide, tick: AppliedTick | None = None) -> Posting | None:
        follower = self._followers[account_id]
        if (posting := decide(follower.account)) is not None:
            follower.apply(posting)
        return posting

    def mark_missed(self, account_id: str) -> None:
        """Let the account go on with the next tick."""


class Baselines:
    """Advances the baselines while this process leads."""

    def __init__(
        self, database: Database, exchange: Exchange, market: MarketFeed, clock: Clock, settings: Settings
    ) -> None:
        self._database = database
        self._exchange = exchange
        self._market = market
        self._clock = clock
        self._settings = settings
        self._observer = Observer(database, exchange, market, settings)
        self._rules = rules_of(settings, market.markets)
        self._followers: dict[str, _Follower] = {}
        self._accounts = _UnlistedAccounts(database, self._followers)
        self._ticks = TickProcessor(self._accounts, market, clock, self._rules)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def lead(self, ahead: DateSpan | None = None) -> None:
        """Read the baselines and catch up on missed ticks, those `ahead` of a clock that is behind included."""
        await self._ticks.lead(partial(self._read, ahead))

    async def _read(self, ahead: DateSpan | None, now: datetime, *_: Any) -> None:
        self._followers.clear()
        accounts = self._accounts
        accounts.processed, accounts.marks, accounts.ahead = None, dict(self._market.marks), None
        async with self._database.reading() as conn:
            for baseline, state, seen_until in await store.select_baseline_states(conn):
                if not state.account.positions.keys() <= self._rules.markets.keys():
                    log.warning("%s starts over: it holds a market that is no longer followed", baseline.id)
                    continue
                follower = self._followers[baseline.id] = _Follower(baseline, state, saved=state)
                await follower.read_equity(conn, now)
                accounts.processed = accounts.next_tick(seen_until)  # the same in every row
                accounts.ahead = None if ahead is None else DateSpan(seen_until, ahead.until)

    async def resign(self) -> None:
        """Stop following the market; the next leader catches up on unrecorded ticks."""
        self._ticks.stop()
        await tasks.end(*(follower.trading for follower in self._followers.values()))

    # --- the market ---------------------------------------------------------------------------------------------------

    async def on_tick(self, tick: Tick) -> None:
        """Apply a tick to every baseline by the source's current market rules."""
        self._rules.markets.update(self._market.markets)
        await self._ticks.on_tick(tick)

    async def _change(self, account_id: str, decide: Decide) -> Posting | None:
        async with self._ticks.between_ticks():
            return await self._accounts.apply(account_id, decide)

    # --- the schedulers' jobs -----------------------------------------------------------------------------------------

    async def decide(self, now: datetime, variants: Collection[VariantId]) -> None:
        """Open missing baselines, and let the rule agents of these variants decide.

        Their orders meet the first book at or after the latency, like the models' orders.
        """
        async with self._ticks.between_ticks():
            if not self._ticks.is_live or self._ticks.gap_since is not None:
                return
            self._open_missing(now, variants)
        for follower in self._followers.values():
            variant_id, last = follower.baseline.variant, follower.trading
            if variant_id is not None and variant_id in variants and (last is None or last.done()):
                trading = self._trade(follower, VARIANTS[variant_id], now)
                follower.trading = tasks.start(trading, f"decisions of {follower.baseline.id}")
        await asyncio.sleep(0)  # let the decisions begin, so that the clock waits for them

    async def _trade(self, follower: _Follower, variant: Variant, now: datetime) -> None:
        agent, context = variant.agent(), partial(self._context, follower)
        async with self._clock.busy():
            view = await self._observer.view_of(context(), follower.history(now), agent.shown)
            decisions = [each for each in agent.decide(view) if isinstance(each, Change)]
            session = Session(
                rules=self._rules,
                rate_of_hour=self._market.funding_rate,
                moment=self._ticks.moment,
                seen_until=self._ticks.seen_until,
                change=self._change,
                wait=partial(self._market.books_after, self._clock.now(), self._settings.latency_ms),
            )
            await execute_together(decisions, context, variant.limits, session)

    def _context(self, follower: _Follower) -> RiskContext:
        now = self._clock.now()
        lowest = follower.equity.lowest_on(now.date())
        return self._observer.context_of(follower.account, follower.history(now), lowest, now)

    def _open_missing(self, now: datetime, variants: Collection[VariantId]) -> None:
        """Open each baseline at the first moment at which every listed market has a price."""
        moment = self._ticks.moment()
        listed = [symbol for symbol, market in self._rules.markets.items() if market.is_listed(now)]
        if not listed or any(symbol not in moment.quotes or moment.quotes[symbol].is_stale(now) for symbol in listed):
            return
        for baseline in baselines_beside(variants):
            if baseline.id in self._followers:
                continue
            settings = self._settings
            account = unopened_account(baseline.id, settings.initial_capital, settings.quote_currency, now)
            follower = self._followers[baseline.id] = _Follower(baseline, BaselineState(account=account))
            if baseline is BUY_AND_HOLD:
                for posting in buy_every_market(account, moment, self._rules, self._market.funding_rate):
                    follower.apply(posting)

    async def record(self, now: datetime) -> None:
        """Record the values of the baselines, at every call or, if idle, once an hour; none amid a gap of the feed."""
        term = self._exchange.term
        if not self._ticks.is_live or not self._followers or term is None or self._ticks.gap_since is not None:
            return
        async with self._ticks.between_ticks():
            marks, followers = self._market.marks, self._followers.values()
            seen_until = self._accounts.processed_until or now  # as of the states: ticks arrive during the write
            changed = [(each, each.state) for each in followers if each.state is not each.saved]
            due = [(each, snapshot) for each in followers if (snapshot := each.due_snapshot(marks, now)) is not None]
        states = [store.SavedBaseline(each.baseline, state.saved(), seen_until) for each, state in changed]
        async with self._database.transaction() as conn:
            if not await hold_term(conn, term):
                return
            await insert_snapshots(conn, [snapshot for _, snapshot in due])
            await store.upsert_baselines(conn, states)
            await store.update_baselines_seen(conn, seen_until)
        for follower, state in changed:
            follower.saved = state
        for follower, snapshot in due:
            follower.note(snapshot)
