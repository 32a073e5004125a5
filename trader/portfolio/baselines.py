"""Baselines of a service: advances their accounts with the market, as the exchange does with the models' accounts.

Their orders never leave the process: they meet the books of the market feed by the pure rules of the paper exchange,
even in live trading. Baselines are neither accounts of the service nor models, so nothing that trades, counts or lists
those includes them; their values are portfolio snapshots under ids that no account can have. The accounts of a
backtest follow the market in the same way.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import msgspec

from trader.agents.domain.guard import Approved, RiskContext
from trader.agents.domain.observation import RunHistory
from trader.agents.domain.tools import Change
from trader.agents.domain.view import VariantLimits
from trader.agents.execute import RulesEnvironment, execute_change, run_at_once
from trader.agents.observer import Observer
from trader.agents.sql.agent_view import select_lowest_equity
from trader.agents.variants import VARIANTS
from trader.core.clock import EPOCH, Clock, JumpWatch, interval_elapsed, iso
from trader.core.errors import MarketUnavailable
from trader.core.variant_id import VariantId
from trader.database.leadership import hold_term
from trader.database.pool import Connection, Database
from trader.exchange.domain.account import Account, Marks, has_marks
from trader.exchange.domain.ledger import ExchangeRules, Posting, RateOfHour, unopened_account
from trader.exchange.domain.orders import Order
from trader.exchange.domain.tick_order import DateSpan
from trader.exchange.domain.tick_rules import Moment, apply_tick
from trader.exchange.protocol import Exchange, rules_of
from trader.exchange.session import Session
from trader.exchange.tick_processor import missed_moments, was_caught_up_on
from trader.market.domain.markets import STALE_AFTER, Tick
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

_INSTANT: Final = timedelta(milliseconds=1)


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


def execute_of_rule_agent(
    decisions: Sequence[Change],
    context: Callable[[], RiskContext],
    limits: VariantLimits,
    moment: Moment,
    rules: ExchangeRules,
    rate_of_hour: RateOfHour,
) -> Iterator[Posting]:
    """Execute the decisions of a baseline's rule agent at one moment, and yield each change of its account.

    `context` returns its current risk context, with the changes so far.
    """
    session = partial(Session, rules=rules, rate_of_hour=rate_of_hour, moment=lambda: moment)
    for decision in decisions:
        current = context()

        def orders(approved: Sequence[Approved], account_id: str = current.account.id) -> list[Order]:
            return [Order(account_id=account_id, **msgspec.structs.asdict(each)) for each in approved]

        environment = RulesEnvironment(current, limits, current.account, session, orders)
        run_at_once(execute_change(decision, environment))
        if environment.posting is not None:
            yield environment.posting


class _Follower(FollowedAccount):
    """The account of a baseline. `is_saved`: its row holds the current state."""

    def __init__(self, baseline: Baseline, state: BaselineState) -> None:
        super().__init__(state)
        self.baseline = baseline
        self.waiting: tuple[Sequence[Change], datetime] | None = None
        """Decisions of its rule agent, and the time at or after which the first tick executes them."""

        self.is_saved = False

    def apply(self, posting: Posting | None) -> None:
        if posting is not None:
            super().apply(posting)
            self.is_saved = False


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
        self._seen_until: datetime | None = None
        self._seen_marks: Marks = {}
        self._is_leading = self._is_caught_up = False
        self._jumps = JumpWatch(clock.now, clock.steady_s)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def lead(self, ahead: DateSpan | None = None) -> None:
        """Read the baselines and catch up on missed ticks, those `ahead` of a clock that is behind included."""
        now = self._clock.now()
        self._jumps.jump()
        self._followers, self._seen_until, self._seen_marks = {}, None, dict(self._market.marks)
        async with self._database.reading() as conn:
            for baseline, state, seen_until in await store.select_baseline_states(conn):
                if not state.account.positions.keys() <= self._rules.markets.keys():
                    log.warning("%s starts over: it holds a market that is no longer followed", baseline.id)
                    continue
                follower = self._followers[baseline.id] = _Follower(baseline, state)
                await follower.read_equity(conn, now)
                follower.is_saved = True
                self._seen_until = seen_until  # the same in every row
        if ahead is not None and self._seen_until is not None:
            await self._catch_up(self._seen_until, ahead.until)
            self._seen_until = now
        until = now
        while self._seen_until is not None and self._seen_until < until:
            await self._catch_up(self._seen_until, until)
            self._seen_until = until
            until = self._market.last_update_at or until  # ticks keep arriving meanwhile
        self._is_leading = self._is_caught_up = True

    def resign(self) -> None:
        """Stop following the market; the next leader catches up on unrecorded ticks."""
        self._is_leading = False

    # --- the market ---------------------------------------------------------------------------------------------------

    async def on_tick(self, tick: Tick) -> None:
        """Apply a tick to every baseline, then execute the decisions waiting for it."""
        if (jump := self._jumps.jump(tick.at)) is not None and self._seen_until is not None:
            self._seen_until, self._is_caught_up = self._seen_until + jump, False
        if not self._is_leading or (self._is_caught_up and was_caught_up_on(tick, self._seen_until)):
            return
        self._is_caught_up = False
        self._rules.markets.update(self._market.markets)
        if self._seen_until is not None and tick.at - self._seen_until > STALE_AFTER:
            await self._catch_up(self._seen_until, tick.at - _INSTANT)
        marks = self._market.marks
        moment = Moment(tick.at, self._market.quotes(), marks, frozenset(tick.quotes), self._seen_marks)
        self._apply(moment)
        latency = timedelta(milliseconds=self._settings.latency_ms)
        for follower in self._followers.values():
            if follower.waiting is None or not has_marks(follower.account, marks):
                continue
            if not interval_elapsed(follower.waiting[1], latency, tick.at):
                continue
            (decisions, _), follower.waiting = follower.waiting, None
            assert follower.baseline.variant is not None, "only a rule agent decides"
            limits, context = VARIANTS[follower.baseline.variant].limits, partial(self._context, follower, tick.at)
            parts = context, limits, moment, self._rules, self._market.funding_rate
            for posting in execute_of_rule_agent(decisions, *parts):
                follower.apply(posting)
        self._seen_until = tick.at

    def _apply(self, moment: Moment) -> None:
        """Apply a tick to every baseline."""
        for follower in self._followers.values():
            if has_marks(follower.account, moment.marks):
                follower.apply(apply_tick(follower.account, moment, self._rules, self._market.funding_rate))
        self._seen_marks = dict(moment.marks)

    def _context(self, follower: _Follower, now: datetime) -> RiskContext:
        lowest = follower.equity.lowest_on(now.date())
        return self._observer.context_of(follower.account, follower.history(now), lowest, now)

    async def _catch_up(self, since: datetime, until: datetime) -> None:
        """Apply the ticks of (since, until] to the baselines; if unavailable, they continue from the next tick."""
        try:
            async for moments in missed_moments(self._market, since, until, self._seen_marks):
                if all(follower.account.is_idle for follower in self._followers.values()):
                    break
                for moment in moments:
                    self._apply(moment)
                await asyncio.sleep(0)
        except MarketUnavailable as error:
            log.warning("the baselines miss the market from %s to %s: %s", iso(since), iso(until), error)

    # --- the schedulers' jobs -----------------------------------------------------------------------------------------

    async def decide(self, now: datetime, variants: Collection[VariantId]) -> None:
        """Open missing baselines, and let the rule agents of these variants decide.

        Their orders meet the first book at or after the latency, like the models' orders.
        """
        if not self._is_leading:
            return
        self._open_missing(now, variants)
        due = now + timedelta(milliseconds=self._settings.latency_ms)
        for follower in list(self._followers.values()):
            variant_id = follower.baseline.variant
            if variant_id is None or variant_id not in variants:
                continue
            variant = VARIANTS[variant_id]
            try:
                context = self._context(follower, now)
            except MarketUnavailable as error:
                log.warning("%s does not decide: %s", follower.baseline.id, error)
                continue
            view = await self._observer.view_of(context, follower.history(now), variant.agent().shown)
            decisions = [each for each in variant.agent().decide(view) if isinstance(each, Change)]
            follower.waiting = (decisions, due) if decisions else None

    def _open_missing(self, now: datetime, variants: Collection[VariantId]) -> None:
        """Open each baseline at the first moment at which every listed market has a price."""
        quotes = self._market.quotes()
        listed = [symbol for symbol, market in self._rules.markets.items() if market.is_listed(now)]
        if not listed or any(symbol not in quotes or quotes[symbol].is_stale(now) for symbol in listed):
            return
        moment = Moment(now, quotes, self._market.marks)
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
        """Record the values of the baselines, at every call or, for one without positions, once an hour."""
        term = self._exchange.term
        if not self._is_leading or not self._followers or term is None:
            return
        marks, due, changed, seen_until = self._market.marks, [], [], self._seen_until
        for follower in self._followers.values():
            if not follower.is_saved:
                changed.append(store.SavedBaseline(follower.baseline, follower.state.saved(), seen_until or now))
            snapshot = follower.due_snapshot(marks, now)
            if snapshot is not None:
                due.append((follower, snapshot))
        saved = {each.baseline.id: self._followers[each.baseline.id].state for each in changed}
        async with self._database.transaction() as conn:
            if not await hold_term(conn, term):
                return
            await insert_snapshots(conn, [snapshot for _, snapshot in due])
            await store.upsert_baselines(conn, changed)
            if seen_until is not None:  # as of the states: ticks keep arriving during the write
                await store.update_baselines_seen(conn, seen_until)
        for baseline_id, state in saved.items():
            follower = self._followers[baseline_id]
            follower.is_saved = follower.state is state  # it may have changed during the write
        for follower, snapshot in due:
            follower.note(snapshot)
