"""Tick processor: applies every tick to every account as it happens, and catches up on missed ticks."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Final

from trader.core import tasks
from trader.core.clock import Clock, JumpWatch, ScaledClock, dated_origin, interval_elapsed, iso
from trader.core.errors import InternalError, LedgerViolated, MarketUnavailable, Unavailable
from trader.exchange.accounts import Accounts, CatchUp, LastSeen
from trader.exchange.domain.account import Account, AppliedTick, has_marks
from trader.exchange.domain.ledger import ExchangeRules, Posting
from trader.exchange.domain.tick_order import DateSpan
from trader.exchange.domain.tick_rules import Moment, apply_tick, is_affected, is_unaffected, price_ranges
from trader.market.domain.markets import STALE_AFTER, Quote, Tick
from trader.market.feed import MarketFeed

_ACCOUNTS_PER_TURN: Final = 64
"""How many accounts are checked before yielding to the event loop."""

_CATCH_UP_EVERY: Final = timedelta(seconds=10)
_CATCH_UP_FOR: Final = timedelta(minutes=2)
"""How often, and for how long, to request missed ticks from the source before the accounts continue without them."""

CHECKPOINT_EVERY: Final = timedelta(minutes=1)

_TICKS_AT_ONCE: Final = 60
"""How many missed ticks are checked together when catching up."""

KEPT_MAX: Final = 600
"""How many ticks are kept for accounts in doubt; what was missed before them is read from the source's history."""

_INSTANT: Final = timedelta(milliseconds=1)


class TickProcessor:
    """Applies ticks to the accounts: funding, resting orders, liquidation, exit plans."""

    def __init__(self, accounts: Accounts, market: MarketFeed, clock: Clock, rules: ExchangeRules) -> None:
        self._accounts, self._log = accounts, accounts.log
        self._market = market
        self._clock = clock
        self._is_paced = isinstance(clock, ScaledClock)
        self._jumps = JumpWatch(clock.now, clock.steady_s)
        self._rules = rules
        self._seen_until: datetime | None = None
        self._processed_quotes: Mapping[str, Quote] = {}
        self._arrived: datetime | None = None
        """The time of the tick that is about to be applied, or is being applied."""

        self._is_applying = False
        self._deciding = 0
        self._turn = asyncio.Event()
        self._checkpoint_due: datetime | None = None
        self.is_live = self._is_jump_unsaved = False
        """`is_live`: ticks are applied as they happen, after catching up on everything missed."""

        self._is_caught_up = False
        """Whether the last processed tick comes from the source's history, and not yet from the feed."""

        self._recovering: dict[str, asyncio.Task[None]] = {}
        self._kept: deque[tuple[int, Moment]] = deque(maxlen=KEPT_MAX)
        """The numbered ticks that were applied since the first of the accounts in doubt missed one."""

        self._dropped = 0
        """The number of the last tick that is kept no longer."""

        self._reading = asyncio.Lock()
        self._behind: dict[str, LastSeen] = {}
        """The accounts that wait for the next reading of the source's history."""

        self._read_to: dict[str, AppliedTick] = {}
        self._read_again_s = -math.inf

        self._ask_again_at: datetime | None = None
        self._give_up_at: datetime | None = None

    async def lead(self, begin: Callable[[datetime, CatchUp, tuple[str, datetime]], Awaitable[None]]) -> None:
        """Start a term: `begin` rebuilds the accounts, which catch up on the ticks missed while no process led."""
        now, self._seen_until, self._checkpoint_due = self._clock.now(), None, None
        self._jumps.jump()
        self._is_jump_unsaved = False
        self._kept.clear()
        self._dropped = 0  # ticks that no checkpoint has are numbered anew
        self._behind.clear()
        self._read_to.clear()
        await begin(now, self._caught_up, dated_origin(self._clock))
        self._market.restore_marks(self._accounts.marks)
        self._ask_again_at = self._give_up_at = None
        if self._accounts.ahead is not None:
            await self._catch_up_ahead(self._accounts.ahead, now)
        await self._catch_up_until(now)
        await self.checkpoint()
        if self._accounts.is_listed:
            await self._market.prime()
        await self._catch_up_until(self._seen_until)
        # Nothing awaits from here on: the next tick is applied as it happens.
        self._note_processed()
        self.is_live = self._is_caught_up = True

    async def _catch_up_ahead(self, missed: DateSpan, now: datetime) -> None:
        """Catch up on ticks that the clock of an earlier leader dated later than the present clock does."""
        try:
            await self._catch_up_all(*missed)
        except MarketUnavailable as error:
            self._log.error("the ticks from %s to %s are lost and were not applied: %s", *map(iso, missed), error)
        self._accounts.processed = self._accounts.next_tick(now)

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
                self._log.warning("catching up is waiting for the market to return: %s", error)
                self._give_up_at, self._ask_again_at = until + _CATCH_UP_FOR, until
            since = until

    def stop(self) -> None:
        """Stop applying ticks at once."""
        self.is_live = False
        for recovery in self._recovering.values():
            recovery.cancel()

    @property
    def gap_since(self) -> datetime | None:
        """The start of a gap that ended with new prices but has not been caught up on; otherwise None."""
        since = self._accounts.processed_until
        if since is None:
            return None
        return since if self._is_in_gap or (self._seen_until or since) - since > STALE_AFTER else None

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
        """Apply a tick to every account: funding, resting orders, liquidation, exit plans.

        A clock that was set is no gap: the ticks before it are dated anew.
        """
        if (jump := self._jumps.jump(tick.at)) is not None:
            self._follow_jump(jump)
        self._seen_until = tick.at
        if self._is_jump_unsaved:
            await self._save_jump()
        if not self.is_live or self._was_processed(tick):
            return
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

    async def _save_jump(self) -> None:
        try:
            await self._accounts.record_jump(self._clock)
            await self._accounts.checkpoint(self._clock)
            self._is_jump_unsaved = False
        except Unavailable as error:
            self._log.warning("that the clock was set is not recorded yet: %s", error)

    def _follow_jump(self, jump: timedelta) -> None:
        self._log.warning("the clock was set by %+.1f s; the ticks applied so far are dated anew", jump.total_seconds())
        self._is_caught_up, self._ask_again_at = False, None
        self._give_up_at = None if self._give_up_at is None else self._give_up_at + jump
        self._accounts.follow_jump(jump)
        self._is_jump_unsaved = self.is_live and self._accounts.is_listed

    async def _apply(self, tick: Tick) -> None:
        self._is_applying, self._is_caught_up = True, False
        try:
            while self._deciding:
                await self._turn.wait()
            applied = self._accounts.next_tick(tick.at)
            quotes, marks = dict(self._market.quotes()), dict(self._market.marks)
            moment = Moment(tick.at, quotes, marks, frozenset(tick.quotes), self._accounts.marks)
            await self._apply_to_all(moment, applied, list(self._accounts.by_id))
            if (last := self._accounts.processed) is None or last.number < applied.number:
                self._accounts.note_processed(applied)
        finally:
            self._is_applying = False
            self._note_processed()
            self._next_turn()

    def _was_processed(self, tick: Tick) -> bool:
        """Return whether the feed is behind the accounts, as in a replay after a failover: no second happens twice.

        A start has read a late tick from the source's history, but a much earlier one is new: the clock was set back.
        """
        until = self._accounts.processed_until
        if until is None or tick.at > until:
            return False
        return self._is_paced or (self._is_caught_up and until - tick.at <= STALE_AFTER)

    async def _close_gap(self, tick: Tick) -> bool:
        """Catch up on everything missed before a tick. Return False while the source may still deliver it later."""
        since = self._accounts.processed_until
        if since is None or (not self._is_in_gap and tick.at - since <= STALE_AFTER):
            return True
        if self._give_up_at is None:
            self._give_up_at = tick.at + _CATCH_UP_FOR
        if self._ask_again_at is not None and tick.at < self._ask_again_at:
            return False
        self._ask_again_at = tick.at + _CATCH_UP_EVERY
        try:
            await self._catch_up_all(since, tick.at - _INSTANT)
        except MarketUnavailable as error:
            if tick.at < self._give_up_at:
                self._log.warning(
                    "accounts are waiting at %s for missed ticks: %s",
                    iso(self._accounts.processed_until or since),
                    error,
                )
                return False
            self._log.error(
                "the ticks from %s to %s are lost and were not applied: %s", iso(since), iso(tick.at), error
            )
        self._give_up_at = self._ask_again_at = None
        self._accounts.note_processed(self._accounts.next_tick(tick.at - _INSTANT))
        return True

    async def checkpoint(self) -> None:
        """Record the last processed tick; if the database is unavailable, the next checkpoint covers this one."""
        try:
            await self._accounts.checkpoint(self._clock)
        except Unavailable as error:
            self._log.warning("the last processed tick was not recorded: %s", error)

    async def _apply_to_all(
        self, moment: Moment, tick: AppliedTick, account_ids: Iterable[str], *, since: AppliedTick | None = None
    ) -> None:
        """Apply a tick to these accounts, those in doubt excepted; `since` the one from which missed ticks are read."""
        self._keep(tick.number, moment)
        due = []
        for turn, account_id in enumerate(account_ids, start=1):
            account = self._accounts.by_id.get(account_id)
            if account is None or account_id in self._accounts.in_doubt or not has_marks(account, moment.marks):
                continue  # removed, about to catch up, or in a market that comes later than another
            if self._accounts.is_changing(account_id) or is_affected(account, moment, self._rules):
                due.append(account_id)
            if turn % _ACCOUNTS_PER_TURN == 0:
                await asyncio.sleep(0)
        due.sort()  # if accounts share the depth of the books, a restart must not change their order
        for start in range(0, len(due), _ACCOUNTS_PER_TURN):
            some = due[start : start + _ACCOUNTS_PER_TURN]
            await asyncio.gather(*(self._apply_to(account_id, moment, tick, since) for account_id in some))

    def _keep(self, number: int, moment: Moment) -> None:
        """Keep a tick for the accounts that miss it."""
        if not self._accounts.in_doubt:
            self._kept.clear()
        if len(self._kept) == KEPT_MAX:
            self._dropped = self._kept[0][0]
        self._kept.append((number, moment))

    async def _apply_to(self, account_id: str, moment: Moment, tick: AppliedTick, since: AppliedTick | None) -> None:
        try:
            await self._accounts.apply(
                account_id, partial(self._decide, moment=moment, since=since, number=tick.number), tick
            )
        except (Unavailable, LedgerViolated, InternalError) as error:
            # One account must not keep the others from following the market; it is reread after this tick.
            self._accounts.mark_missed(account_id)
            self._log.error("account %s missed a tick and will catch up later: %s", account_id, error)

    def _decide(
        self, account: Account, moment: Moment, *, since: AppliedTick | None = None, number: int | None = None
    ) -> Posting | None:
        """Apply a tick to an account. After `since`, the account may already have had some of the missed ticks."""
        if since is not None and moment.at <= account.seen_to(since):
            return None
        if number is not None and number <= account.seen_tick:  # it has just caught up on this one
            return None
        try:
            return apply_tick(account, moment, self._rules, self._market.funding_rate)
        except Exception as error:
            # A bug on one account must not end the process, which would meet the same tick again after a restart.
            self._log.exception("a bug in applying the tick of %s to account %s", iso(moment.at), account.id)
            raise InternalError(f"The account {account.id} cannot follow the market: an internal error.") from error

    async def _catch_up_all(self, since: datetime, until: datetime) -> None:
        """Apply the ticks in (since, until] to every account, as if the service had never stopped."""
        if until <= since:
            return
        self._log.info("catching up on the market from %s to %s", iso(since), iso(until))
        begin = self._accounts.processed
        assert begin is not None, "`since` is its time"
        before = sum(account.sequence for account in self._accounts.by_id.values())
        applied = self._accounts.is_listed
        async for moments in missed_moments(self._market, since, until, self._accounts.marks, applied=applied):
            if not self._accounts.in_doubt and all(account.is_idle for account in self._accounts.by_id.values()):
                break
            await self._catch_up_on(moments, begin)
        self._accounts.note_processed(self._accounts.next_tick(until))
        changes = sum(account.sequence for account in self._accounts.by_id.values()) - before
        self._log.info("caught up on %s of the market: %d rows posted", until - since, changes)

    async def _catch_up_on(self, moments: Sequence[Moment], since: AppliedTick) -> None:
        """Apply successive ticks to every account, skipping accounts that their price ranges cannot affect."""
        ranges = price_ranges(moments)
        affected = [
            account_id
            for account_id, account in self._accounts.by_id.items()
            if has_marks(account, moments[-1].marks)
            and (self._accounts.is_changing(account_id) or not is_unaffected(account, ranges, self._rules))
        ]
        await asyncio.sleep(0)
        for moment in moments:
            if self._accounts.is_listed:
                self._market.restore_marks(moment.marks)
            applied = self._accounts.next_tick(moment.at)
            await self._apply_to_all(moment, applied, affected, since=since)
            self._accounts.note_processed(applied)
            self._accounts.marks = moment.marks

    def _recover_all(self) -> None:
        """Let every account in doubt be reread and catch up on its own, while the market continues."""
        if self._clock.steady_s() < self._read_again_s:
            return
        for account_id in self._accounts.in_doubt:
            if account_id not in self._recovering and not self._accounts.under_way(account_id):
                recovery = tasks.start(self._recover(account_id), f"recovery of {account_id}")
                self._recovering[account_id] = recovery

    async def _recover(self, account_id: str) -> None:
        try:
            await self._accounts.settle(account_id)
        except (Unavailable, LedgerViolated, InternalError) as error:
            self._log.warning("account %s cannot be recovered yet: %s", account_id, error)
        finally:
            del self._recovering[account_id]

    @asynccontextmanager
    async def _caught_up(self, account_id: str) -> AsyncIterator[None]:
        """Catch up one account that was in doubt, and hold off the next tick; used under the account's lock.

        Ticks that are no longer kept are read from the source's history, which alone takes long.
        """
        async with self.between_ticks():
            since = self._accounts.in_doubt.get(account_id)
        number = 0 if since is None else since.tick.number
        if since is not None and self._dropped > number and not self._accounts.by_id[account_id].is_idle:
            number = (await self._read_missed(account_id, since)).number
        async with self.between_ticks():
            if self._dropped > number and not self._accounts.by_id[account_id].is_idle:
                raise Unavailable(f"The account {account_id} took too long to catch up on the market.")
            while kept := [each for each in self._kept if each[0] > number]:
                for number, moment in kept:
                    if number > self._accounts.by_id[account_id].seen_tick:
                        await self._apply_missed(account_id, AppliedTick(number, moment.at), moment)
            yield

    async def _read_missed(self, account_id: str, since: LastSeen) -> AppliedTick:
        """Apply the source's history to an account, up to the returned tick; those that wait for it share one reading.

        :raises Unavailable: the source has failed, or did so in the last seconds
        """
        self._behind[account_id] = since
        async with self._reading:
            if account_id in self._behind:
                behind, self._behind = self._behind, {}
                await self._read_for(behind)
        if (read_to := self._read_to.pop(account_id, None)) is None:
            raise Unavailable(f"The account {account_id} cannot catch up on the market now.")
        return read_to

    async def _read_for(self, behind: Mapping[str, LastSeen]) -> None:
        if self._clock.steady_s() < self._read_again_s:
            raise Unavailable("The accounts cannot catch up on the market: its source failed a moment ago.", 10)
        until, first = self._accounts.processed, min(behind.values(), key=lambda each: each.tick)
        assert until is not None, "the accounts have missed ticks"
        try:
            async for moments in missed_moments(self._market, first.tick.at, until.at, first.marks):
                for account_id, since in behind.items():
                    for moment in moments:
                        if moment.at > self._accounts.by_id[account_id].seen_to(since.tick):
                            await self._apply_missed(account_id, until._replace(at=moment.at), moment)
        except MarketUnavailable as error:
            self._read_again_s = self._clock.steady_s() + _CATCH_UP_EVERY.total_seconds()
            raise Unavailable(f"The accounts in doubt cannot catch up on the market now: {error}") from error
        self._read_to |= dict.fromkeys(behind, until)

    async def _apply_missed(self, account_id: str, seen: AppliedTick, moment: Moment) -> None:
        if not self._accounts.by_id[account_id].is_idle:
            posting = self._accounts.decide(account_id, partial(self._decide, moment=moment), seen)
            if posting is not None:
                await self._accounts.commit(posting)


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
