"""Tick processor: applies every tick to every account as it happens, and catches up on missed ticks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Final

from trader.core import tasks
from trader.core.clock import Clock, ScaledClock, interval_elapsed, iso
from trader.core.errors import InternalError, LedgerViolated, MarketUnavailable, Unavailable
from trader.exchange.accounts import Accounts, LastSeen
from trader.exchange.domain.account import Account, AppliedTick
from trader.exchange.domain.ledger import ExchangeRules, Posting
from trader.exchange.domain.tick_rules import Moment, apply_tick, is_affected, is_unaffected, price_ranges
from trader.exchange.sql.accounts import DatabaseIdentity
from trader.market.domain.markets import STALE_AFTER, Quote, Tick
from trader.market.feed import MarketFeed

log = logging.getLogger("trader.exchange")

_ACCOUNTS_PER_TURN: Final = 64
"""How many accounts are checked before yielding to the event loop."""

_CATCH_UP_EVERY: Final = timedelta(seconds=10)
_CATCH_UP_FOR: Final = timedelta(minutes=2)
"""How often, and for how long, to request missed ticks from the source before the accounts continue without them."""

CHECKPOINT_EVERY: Final = timedelta(minutes=1)

_TICKS_AT_ONCE: Final = 60
"""How many missed ticks are checked together when catching up."""

_KEPT_MAX: Final = 600
"""How many ticks are kept for an account that was in doubt while the source's history is read for it."""

_INSTANT: Final = timedelta(milliseconds=1)


class TickProcessor:
    """Applies ticks to the accounts: funding, resting orders, liquidation, exit plans."""

    def __init__(self, accounts: Accounts, market: MarketFeed, clock: Clock, rules: ExchangeRules) -> None:
        self._accounts = accounts
        self._market = market
        self._clock = clock
        self._is_paced = isinstance(clock, ScaledClock)
        self._rules = rules
        self._seen_until: datetime | None = None
        self._processed_quotes: Mapping[str, Quote] = {}
        self._arrived: datetime | None = None
        """The time of the tick that is about to be applied, or is being applied."""

        self._is_applying = False
        self._deciding = 0
        self._turn = asyncio.Event()
        self._checkpoint_due: datetime | None = None
        self._is_live = False
        self._is_caught_up = False
        """Whether the last processed tick comes from the source's history, and not yet from the feed."""

        self._recovering: dict[str, asyncio.Task[None]] = {}
        self._kept: dict[str, list[Moment]] = {}
        """The ticks that were applied to all other accounts since the recovery of an account began."""

        self._ask_again_at: datetime | None = None
        self._give_up_at: datetime | None = None

    async def lead(self, identity: DatabaseIdentity, symbols: Collection[str]) -> None:
        """Start a term: rebuild the accounts, and catch up on the ticks missed while no process led.

        :raises StartError: the database belongs to another market or trading mode, its books do not balance, or an
            account holds a market that is not among the followed `symbols`
        """
        await self._accounts.lead(identity, symbols, self._clock.now(), self._caught_up)
        self._market.restore_marks(self._accounts.marks)
        self._ask_again_at = self._give_up_at = None
        since = self._accounts.processed_until
        await self._catch_up_until(self._clock.now())
        if since is not None:
            await self._record_gap(since)
        await self._market.prime()
        await self._catch_up_until(self._seen_until)
        # Nothing awaits from here on: the next tick is applied as it happens.
        self._note_processed()
        self._is_live = self._is_caught_up = True

    async def _catch_up_until(self, until: datetime | None) -> None:
        """Catch up, including on ticks that arrive in the meantime. If the market is away, leave a gap for later."""
        since = self._accounts.processed_until
        while since is not None and not self._is_in_gap:
            until = max(filter(None, (until, self._seen_until)), default=since)
            if until <= since:
                return
            try:
                await self._catch_up_all(since, until)
            except MarketUnavailable as error:
                log.warning("catching up is waiting for the market to return: %s", error)
                self._give_up_at, self._ask_again_at = until + _CATCH_UP_FOR, until
            since = until

    def stop(self) -> None:
        """Stop applying ticks at once."""
        self._is_live = False
        for recovery in self._recovering.values():
            recovery.cancel()

    @property
    def is_live(self) -> bool:
        """Whether ticks are applied as they happen, after catching up on everything missed."""
        return self._is_live

    @property
    def gap_since(self) -> datetime | None:
        """The start of a gap that ended with new prices but has not been caught up on; otherwise None."""
        since, seen = self._accounts.processed_until, self._seen_until
        if since is None or seen is None:
            return None
        return since if self._is_in_gap or seen - since > STALE_AFTER else None

    @property
    def _is_in_gap(self) -> bool:
        """Whether the feed's gap has ended but has not been caught up on to its last tick."""
        return self._give_up_at is not None

    def seen_until(self) -> datetime:
        """Return the time up to which the accounts have seen the market: now, or the start of a gap."""
        now, until = self._now(), self._accounts.processed_until
        return until if until is not None and (self._is_in_gap or now - until > STALE_AFTER) else now

    def _now(self) -> datetime:
        """Return the date of a decision: before the next tick and, in a paced replay, after every tick before it."""
        now, processed = self._clock.now(), self._accounts.processed_until
        if self._arrived is not None:
            return min(now, self._arrived - _INSTANT)
        return max(now, processed) if self._is_paced and processed is not None else now

    def moment(self) -> Moment:
        """Return the markets as of the last applied tick, for a decision now."""
        return Moment(self._now(), self._processed_quotes, self._accounts.marks)

    def _note_processed(self) -> None:
        self._processed_quotes, self._accounts.marks = dict(self._market.quotes()), dict(self._market.marks)

    @asynccontextmanager
    async def between_ticks(self) -> AsyncIterator[None]:
        """Decide between two ticks: wait until the current one is applied to every account, and hold off the next."""
        while self._is_applying:
            await self._turn.wait()
        self._deciding += 1
        try:
            yield
        finally:
            self._deciding -= 1
            self._next_turn()

    def _next_turn(self) -> None:
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    async def on_tick(self, tick: Tick) -> None:
        """Apply a tick to every account: funding, resting orders, liquidation, exit plans."""
        self._seen_until = tick.at
        if not self._is_live or self._was_processed(tick):
            return
        since = self._accounts.processed_until
        if since is not None and since > tick.at:
            self._accounts.set_back(tick.at)
        self._arrived = tick.at
        try:
            if not await self._close_gap(tick):
                return
            await self._apply(tick)
        finally:
            self._arrived = None
        self._recover_all()
        if self._checkpoint_due is None or interval_elapsed(self._checkpoint_due, CHECKPOINT_EVERY, tick.at):
            self._checkpoint_due = tick.at.replace(second=0, microsecond=0) + CHECKPOINT_EVERY
            await self.checkpoint()

    async def _apply(self, tick: Tick) -> None:
        self._is_applying, self._is_caught_up = True, False
        try:
            while self._deciding:
                await self._turn.wait()
            applied = self._accounts.next_tick(tick.at)
            quotes, marks = dict(self._market.quotes()), dict(self._market.marks)
            moment = Moment(tick.at, quotes, marks, frozenset(tick.quotes), self._accounts.marks)
            await self._apply_to_all(moment, applied, list(self._accounts.by_id))
            self._accounts.processed = applied
        finally:
            self._is_applying = False
            self._note_processed()
            self._next_turn()

    def _was_processed(self, tick: Tick) -> bool:
        """Return whether the feed is behind the accounts, as in a replay after a failover: no second happens twice."""
        until = self._accounts.processed_until
        if self._is_paced:
            return until is not None and tick.at <= until
        return self._is_caught_up and was_caught_up_on(tick, until)

    async def _close_gap(self, tick: Tick) -> bool:
        """Catch up on everything missed before a tick. Return False while the source may still deliver it later."""
        since = self._accounts.processed_until
        if since is None or (not self._is_in_gap and tick.at - since <= STALE_AFTER):
            return True
        if self._give_up_at is None or self._ask_again_at is None:
            self._give_up_at, self._ask_again_at = tick.at + _CATCH_UP_FOR, tick.at
        if not interval_elapsed(self._ask_again_at, _CATCH_UP_EVERY, tick.at):
            return False
        self._ask_again_at = tick.at + _CATCH_UP_EVERY
        try:
            await self._catch_up_all(since, tick.at - _INSTANT)
        except MarketUnavailable as error:
            if tick.at < self._give_up_at:
                log.warning(
                    "accounts are waiting at %s for missed ticks: %s",
                    iso(self._accounts.processed_until or since),
                    error,
                )
                return False
            log.error("the ticks from %s to %s are lost and were not applied: %s", iso(since), iso(tick.at), error)
        self._give_up_at = self._ask_again_at = None
        # Before anything is dated by a clock that may be ahead: a later start must be able to tell.
        self._accounts.processed = self._accounts.next_tick(tick.at - _INSTANT)
        await self._record_gap(since)
        return True

    async def _record_gap(self, since: datetime) -> None:
        """Record that the last processed tick ends a gap, if it does."""
        until = self._accounts.processed_until
        if until is not None and until - since > STALE_AFTER:
            await self.checkpoint(jumped_from=since)

    async def checkpoint(self, *, jumped_from: datetime | None = None) -> None:
        """Record the last processed tick; if the database is unavailable, the next checkpoint covers this one.

        `jumped_from`: the tick ends a gap that began at this time.
        """
        try:
            await self._accounts.checkpoint(jumped_from=jumped_from)
        except Unavailable as error:
            log.warning("the last processed tick was not recorded: %s", error)

    async def _apply_to_all(
        self, moment: Moment, tick: AppliedTick, account_ids: Iterable[str], *, since: AppliedTick | None = None
    ) -> None:
        """Apply a tick to these accounts, those in doubt excepted; `since` the one from which missed ticks are read."""
        for kept in self._kept.values():
            if len(kept) <= _KEPT_MAX:
                kept.append(moment)
        due = []
        for turn, account_id in enumerate(account_ids, start=1):
            account = self._accounts.by_id.get(account_id)
            if account is None or account_id in self._accounts.in_doubt:  # removed, or about to catch up
                continue
            if self._accounts.is_changing(account_id) or is_affected(account, moment, self._rules):
                due.append(account_id)
            if turn % _ACCOUNTS_PER_TURN == 0:
                await asyncio.sleep(0)
        due.sort()  # if accounts share the depth of the books, a restart must not change their order
        for start in range(0, len(due), _ACCOUNTS_PER_TURN):
            some = due[start : start + _ACCOUNTS_PER_TURN]
            await asyncio.gather(*(self._apply_to(account_id, moment, tick, since) for account_id in some))

    async def _apply_to(self, account_id: str, moment: Moment, tick: AppliedTick, since: AppliedTick | None) -> None:
        try:
            await self._accounts.apply(account_id, partial(self._decide, moment=moment, since=since), tick)
        except (Unavailable, LedgerViolated, InternalError) as error:
            # One account must not keep the others from following the market; it is reread after this tick.
            self._accounts.mark_missed(account_id)
            log.error("account %s missed a tick and will catch up later: %s", account_id, error)

    def _decide(self, account: Account, moment: Moment, *, since: AppliedTick | None) -> Posting | None:
        """Apply a tick to an account. After `since`, the account may already have had some of the missed ticks."""
        if since is not None and moment.at <= account.seen_to(since):
            return None
        try:
            return apply_tick(account, moment, self._rules, self._market.funding_rate)
        except Exception as error:
            # A bug on one account must not end the process, which would meet the same tick again after a restart.
            log.exception("a bug in applying the tick of %s to account %s", iso(moment.at), account.id)
            raise InternalError(f"The account {account.id} cannot follow the market: an internal error.") from error

    async def _catch_up_all(self, since: datetime, until: datetime) -> None:
        """Apply the ticks in (since, until] to every account, as if the service had never stopped."""
        if until <= since:
            return
        log.info("catching up on the market from %s to %s", iso(since), iso(until))
        begin = self._accounts.processed
        assert begin is not None, "`since` is its time"
        before = sum(account.sequence for account in self._accounts.by_id.values())
        async for moments in missed_moments(self._market, since, until, self._accounts.marks, applied=True):
            if all(account.is_idle for account in self._accounts.by_id.values()):
                break
            await self._catch_up_on(moments, begin)
        self._accounts.processed = self._accounts.next_tick(until)
        changes = sum(account.sequence for account in self._accounts.by_id.values()) - before
        log.info("caught up on %s of the market: %d rows posted", until - since, changes)

    async def _catch_up_on(self, moments: Sequence[Moment], since: AppliedTick) -> None:
        """Apply successive ticks to every account, skipping accounts that their price ranges cannot affect."""
        ranges = price_ranges(moments)
        affected = [
            account_id
            for account_id, account in self._accounts.by_id.items()
            if self._accounts.is_changing(account_id) or not is_unaffected(account, ranges, self._rules)
        ]
        await asyncio.sleep(0)
        for moment in moments:
            self._market.restore_marks(moment.marks)
            applied = self._accounts.next_tick(moment.at)
            await self._apply_to_all(moment, applied, affected, since=since)
            self._accounts.processed, self._accounts.marks = applied, moment.marks

    def _recover_all(self) -> None:
        """Let every account in doubt be reread and catch up on its own, while the market continues."""
        for account_id in self._accounts.in_doubt:
            if account_id not in self._recovering and not self._accounts.under_way(account_id):
                recovery = tasks.start(self._recover(account_id), f"recovery of {account_id}")
                self._recovering[account_id] = recovery

    async def _recover(self, account_id: str) -> None:
        try:
            await self._accounts.settle(account_id)
        except (Unavailable, LedgerViolated, InternalError) as error:
            log.warning("account %s cannot be recovered yet: %s", account_id, error)
        finally:
            del self._recovering[account_id]

    @asynccontextmanager
    async def _caught_up(self, account_id: str) -> AsyncIterator[None]:
        """Catch up one account that was in doubt, and hold off the next tick; used under the account's lock.

        Only its reading of the source's history takes long. The ticks that the other accounts get meanwhile are kept
        for it.
        """
        try:
            async with self.between_ticks():
                since, until = self._accounts.in_doubt.get(account_id), self._accounts.processed
                kept = self._kept[account_id] = []
            if since is not None and until is not None and not self._accounts.by_id[account_id].is_idle:
                await self._catch_up(account_id, since, until)
            async with self.between_ticks():
                if len(kept) > _KEPT_MAX:
                    raise Unavailable(f"The account {account_id} took too long to catch up on the market.")
                await self._apply_missed(account_id, kept)
                yield
        finally:
            self._kept.pop(account_id, None)

    async def _catch_up(self, account_id: str, since: LastSeen, until: AppliedTick) -> None:
        try:
            async for moments in missed_moments(self._market, since.tick.at, until.at, since.marks):
                await self._apply_missed(account_id, moments, since.tick)
        except MarketUnavailable as error:
            raise Unavailable(f"The account {account_id} cannot catch up on the market now: {error}") from error

    async def _apply_missed(self, account_id: str, moments: Iterable[Moment], since: AppliedTick | None = None) -> None:
        """Apply missed ticks to one account. `since`: the last tick before them, if it may have seen some of them."""
        processed = self._accounts.processed
        for moment in moments:
            if processed is None or self._accounts.by_id[account_id].is_idle:
                return
            seen = AppliedTick(processed.number, moment.at)
            posting = self._accounts.decide(account_id, partial(self._decide, moment=moment, since=since), seen)
            if posting is not None:
                await self._accounts.commit(posting)


def was_caught_up_on(tick: Tick, until: datetime | None) -> bool:
    """Return whether a start has already read this late tick from the source's history, which it read up to `until`.

    A much earlier one is new: the clock was set back.
    """
    return until is not None and timedelta(0) <= until - tick.at <= STALE_AFTER


async def missed_moments(
    market: MarketFeed, since: datetime, until: datetime, marks: Mapping[str, Decimal], *, applied: bool = False
) -> AsyncIterator[Sequence[Moment]]:
    """Yield the moments of the ticks in (since, until] that follow these `marks`, a minute at a time.

    With `applied`, they are recorded as applied to the accounts of the service.

    :raises MarketUnavailable: the source failed; the moments before the failure are still yielded
    """
    # Until a market's first tick in the gap, its mark is the one from before the gap, not from the tick after it.
    before = {**market.marks, **marks}
    moments: list[Moment] = []
    try:
        async for tick in market.history(since, until, applied=applied):
            present = {**before, **{symbol: quote.mark for symbol, quote in tick.quotes.items()}}
            moments.append(Moment(tick.at, tick.quotes, present, frozenset(tick.quotes), before))
            before = present
            if len(moments) == _TICKS_AT_ONCE:
                yield moments
                moments = []
    except MarketUnavailable:
        if moments:
            yield moments
        raise
    if moments:
        yield moments
