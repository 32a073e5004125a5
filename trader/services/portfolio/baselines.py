"""Baselines of a service: advances their accounts with the market, as the exchange does with those of the models.

They place nothing anywhere: their orders meet the books of the market feed by the pure rules of the paper exchange, in
live trading too. Their accounts are no accounts of the service and no models, so nothing that trades, counts or lists
those knows them; their values are stored among the portfolio snapshots under ids that no account can have.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from trader.clock import Clock, iso
from trader.domain.agents.guard import RiskContext
from trader.domain.agents.tools import Change
from trader.domain.exchange.account import Marks, has_marks
from trader.domain.exchange.ledger import Posting, unopened_account
from trader.domain.exchange.orders import OrderStatus
from trader.domain.exchange.tick_rules import Moment, apply_tick, is_unaffected, price_ranges
from trader.domain.market.markets import STALE_AFTER, Tick
from trader.domain.models import VariantId
from trader.domain.portfolio.baselines import (
    BUY_AND_HOLD,
    Baseline,
    BaselineState,
    baselines_beside,
    buy_every_market,
    carry_out,
)
from trader.errors import MarketUnavailable
from trader.services.agents.observer import Observer
from trader.services.exchange.protocol import Exchange, rules_of
from trader.services.exchange.tick_processor import missed_moments
from trader.services.market.feed import MarketFeed
from trader.services.portfolio.followed_account import FollowedAccount, WaitingDecisions
from trader.settings import Settings
from trader.store.agents.agent_view import select_equity_curve, select_lowest_equity
from trader.store.database.pool import Database
from trader.store.portfolio import baselines as store
from trader.store.portfolio.snapshots import insert_snapshots
from trader.variants import VARIANTS

log = logging.getLogger("trader.baselines")

_INSTANT: Final = timedelta(milliseconds=1)


class _Follower(FollowedAccount):
    """The account of a baseline. `is_saved`: its state is that of its row."""

    waiting: WaitingDecisions | None

    def __init__(self, baseline: Baseline, state: BaselineState) -> None:
        super().__init__(state)
        self.baseline = baseline
        self.is_saved = False

    def apply(self, posting: Posting) -> None:
        super().apply(posting)
        self.is_saved = False
        if posting.answer is not None and posting.answer.status is OrderStatus.REJECTED:
            log.debug("%s: an order was rejected: %s", self.baseline.id, posting.answer.reason)


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
        self._is_leading = False

    # --- life ---------------------------------------------------------------------------------------------------------

    async def lead(self) -> None:
        """Read the baselines and catch up on what they missed."""
        now = self._clock.now()
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        self._followers, since = {}, None
        async with self._database.reading() as conn:
            for baseline, state, seen_until in await store.select_baseline_states(conn):
                if not state.account.positions.keys() <= self._rules.markets.keys():
                    log.warning("%s begins again: it holds a market that is not followed now", baseline.id)
                    continue
                follower = self._followers[baseline.id] = _Follower(baseline, state)
                run_id = state.account.run.id
                for mark in await select_equity_curve(conn, baseline.id, run_id):
                    follower.equity = follower.equity.noted(mark.hour, mark.equity)
                lowest = await select_lowest_equity(conn, baseline.id, run_id, midnight)
                follower.equity = msgspec.structs.replace(follower.equity, lowest=lowest)
                follower.is_saved = True
                since = seen_until if since is None else min(since, seen_until)
        self._seen_until, self._seen_marks = since, dict(self._market.marks)
        until = now
        while self._seen_until is not None and self._seen_until < until:
            await self._catch_up(self._seen_until, until)
            self._seen_until = until
            until = self._market.last_update_at or until  # ticks go on arriving meanwhile
        self._is_leading = True

    def resign(self) -> None:
        """Stop following the market; what was not recorded is caught up on by the next leader."""
        self._is_leading = False

    # --- the market ---------------------------------------------------------------------------------------------------

    async def on_tick(self, tick: Tick) -> None:
        """Apply a tick to every baseline, then execute the decisions that waited for it."""
        if not self._is_leading:
            return
        self._rules.markets.update(self._market.markets)
        if self._seen_until is not None and tick.at - self._seen_until > STALE_AFTER:
            await self._catch_up(self._seen_until, tick.at - _INSTANT)
        marks = self._market.marks
        moment = Moment(tick.at, self._market.quotes(), marks, frozenset(tick.quotes), self._seen_marks)
        for follower in self._followers.values():
            self._apply_tick(follower, moment)
            waiting = follower.waiting
            if waiting is not None and moment.at >= waiting.due and has_marks(follower.account, moment.marks):
                follower.waiting = None
                self._execute(follower, waiting.decisions, moment)
        self._seen_until, self._seen_marks = tick.at, dict(marks)

    def _apply_tick(self, follower: _Follower, moment: Moment) -> None:
        account = follower.account
        if not account.is_idle and has_marks(account, moment.marks):
            posting = apply_tick(account, moment, self._rules, self._market.funding_rate)
            if posting is not None:
                follower.apply(posting)

    def _execute(self, follower: _Follower, decisions: Sequence[Change], moment: Moment) -> None:
        """Pass decisions through the guard of the variant to the rules of the exchange, one after the other."""
        baseline, rate = follower.baseline, self._market.funding_rate
        assert baseline.variant is not None, "only a rule agent decides"
        limits = VARIANTS[baseline.variant].limits
        for decision in decisions:
            outcome = carry_out(decision, self._context(follower, moment.at), limits, moment, self._rules, rate)
            if isinstance(outcome, str):
                log.debug("%s: %s", baseline.id, outcome)
            else:
                follower.apply(outcome)

    def _context(self, follower: _Follower, now: datetime) -> RiskContext:
        lowest = follower.equity.lowest_on(now.date())
        return self._observer.context_of(follower.account, follower.history(now), lowest, now)

    async def _catch_up(self, since: datetime, until: datetime) -> None:
        """Apply the ticks of (since, until] to the baselines; without them they go on from the next one."""
        try:
            async for moments in missed_moments(self._market, since, until, self._seen_marks):
                if all(follower.account.is_idle for follower in self._followers.values()):
                    break
                await self._apply_missed(moments)
        except MarketUnavailable as error:
            log.warning("the baselines miss the market from %s to %s: %s", iso(since), iso(until), error)

    async def _apply_missed(self, moments: Sequence[Moment]) -> None:
        """Apply successive ticks to every baseline that their price ranges may affect."""
        ranges = price_ranges(moments)
        for follower in self._followers.values():
            account = follower.account
            if not account.is_idle and not is_unaffected(account, ranges, self._rules):
                for moment in moments:
                    if moment.at > follower.account.changed_at:
                        self._apply_tick(follower, moment)
            await asyncio.sleep(0)
        self._seen_marks = moments[-1].marks

    # --- the schedulers' jobs -----------------------------------------------------------------------------------------

    async def decide(self, now: datetime, variants: Collection[VariantId]) -> None:
        """Open the baselines that are missing, and let the rule agents of these variants decide.

        Their orders meet the first book at or after the latency, as those of the models do.
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
            view = await self._observer.view_of(context, follower.history(now), variant.agent.intervals)
            decisions = [each for each in variant.agent().decide(view) if isinstance(each, Change)]
            follower.waiting = WaitingDecisions(decisions, due) if decisions else None

    def _open_missing(self, now: datetime, variants: Collection[VariantId]) -> None:
        """Open each baseline at the first moment at which every market has a price."""
        quotes = self._market.quotes()
        if any(symbol not in quotes or quotes[symbol].is_stale(now) for symbol in self._rules.markets):
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
        """Record what the baselines are worth, at every call or, of one without positions, once an hour."""
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
            await insert_snapshots(conn, [snapshot for _, snapshot in due], term)
            await store.upsert_baselines(conn, changed, term)
            if seen_until is not None:  # as of the states: ticks go on arriving while they are written
                await store.update_baselines_seen(conn, seen_until, term)
        for baseline_id, state in saved.items():
            follower = self._followers[baseline_id]
            follower.is_saved = follower.state is state  # it may have changed while it was written
        for follower, snapshot in due:
            follower.note(snapshot)
