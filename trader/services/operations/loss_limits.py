"""The watch over losses: what accounts are worth is measured with the markets, and whoever hits a limit is halted."""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from trader.clock import interval_elapsed
from trader.domain.exchange.account import equity
from trader.domain.exchange.halts import LIMITS, Halt, Verb, scope
from trader.domain.market.markets import Tick
from trader.domain.money import ZERO
from trader.domain.operations import loss_limits as rules
from trader.domain.operations.loss_limits import LossBaseline, LossThresholds, Worth
from trader.errors import Unavailable
from trader.services.exchange.halts import Halts
from trader.services.exchange.protocol import Exchange
from trader.settings import Settings
from trader.store.database.pool import Database
from trader.store.operations import safety as store

log = logging.getLogger("trader.safety")

_CHECK_EVERY: Final = timedelta(seconds=1)
_SAVE_EVERY: Final = timedelta(seconds=10)
"""Of the service's time: between two looks at the accounts, and between two recordings of what they are measured by."""


class LossLimits:
    """Daily loss and drawdown, of each account and of all together. Without a limit set it does nothing."""

    def __init__(self, database: Database, exchange: Exchange, halts: Halts, settings: Settings) -> None:
        self._database = database
        self._exchange = exchange
        self._halts = halts
        self._each = LossThresholds(settings.max_daily_loss_percent, settings.max_drawdown_percent)
        self._together = LossThresholds(settings.max_total_daily_loss_percent, settings.max_total_drawdown_percent)
        self._verb = Verb.FLATTEN if settings.flatten_on_limit == "on" else Verb.HALT
        self._marks: dict[str, LossBaseline] = {}
        self._total: LossBaseline | None = None
        self._saved: dict[str | None, LossBaseline] = {}
        self._due: datetime | None = None
        self._save_due: datetime | None = None

    async def load(self, now: datetime) -> None:
        """Take what losses are measured against from the rows, and from the snapshots since; then the watch begins.

        :raises Unavailable: the database cannot answer now
        """
        if not (self._each.are_set or self._together.are_set):
            return
        day = now.date()
        async with self._database.connection() as conn:
            recalled = await store.select_recalled(conn, now.replace(hour=0, minute=0, second=0, microsecond=0))
            total = await store.select_total_mark(conn)
        noted = {one.account_id: one.mark for one in recalled if one.mark is not None}
        begun = {one.account_id: Worth(one.run_id, one.initial_capital, ZERO) for one in recalled}
        self._total = None if total is None else rules.shift(total, rules.flow(noted, begun))
        self._marks = {}
        for one in recalled:
            mark = rules.recall(
                one.mark,
                one.run_id,
                one.initial_capital,
                day,
                peak_since=one.peak_since,
                first_today=one.first_today,
            )
            if mark is None or mark.run_id != one.run_id:
                mark = rules.begin(one.run_id, one.initial_capital, one.initial_capital, day)
            self._marks[one.account_id] = mark
        self._saved = {}
        self._due = self._save_due = now

    def stop(self) -> None:
        """Watch no more."""
        self._due = None

    def renew(self, lifted: Iterable[Halt]) -> None:
        """After a limit's halt was lifted its losses are measured from the next equity on."""
        for halt in lifted:
            if halt.cause not in LIMITS:
                continue
            if halt.account_id is None:
                self._total = None if self._total is None else rules.renew(self._total)
            elif halt.account_id in self._marks:
                self._marks[halt.account_id] = rules.renew(self._marks[halt.account_id])

    async def on_tick(self, tick: Tick) -> None:
        """Look at the accounts when it is time to, after the tick has been applied to them."""
        is_due = self._due is not None and interval_elapsed(self._due, _CHECK_EVERY, tick.at)
        if is_due and self._exchange.term is not None:
            self._due = tick.at + _CHECK_EVERY
            await self.check(tick.at)

    async def check(self, now: datetime) -> None:
        """Measure every account, and halt whoever has hit a limit."""
        day_before = None if self._total is None else self._total.day
        self._measure(now)
        assert self._total is not None
        for account_id, mark in list(self._marks.items()):
            await self._halt_when_hit(account_id, mark, self._each)
        await self._halt_when_hit(None, self._total, self._together)
        if (
            self._save_due is None
            or interval_elapsed(self._save_due, _SAVE_EVERY, now)
            or day_before != self._total.day
        ):
            self._save_due = now + _SAVE_EVERY
            await self._save(now)

    def _measure(self, now: datetime) -> None:
        marks, day = self._exchange.marks(), now.date()
        worths = {
            account.id: Worth(account.run.id, account.run.initial_capital, equity(account, marks))
            for account in self._exchange.accounts.values()
            if account.positions.keys() <= marks.keys()  # what has no price yet is not measured, and counts as it was
        }
        came = rules.flow(self._marks, worths)
        for account_id, worth in worths.items():
            self._marks[account_id] = rules.follow(self._marks.get(account_id), worth, day)
        together = sum((mark.last for mark in self._marks.values()), ZERO)
        if self._total is None:
            self._total = self._first_total(together, now)
        else:
            self._total = rules.advance(rules.shift(self._total, came), together, day)

    def _first_total(self, together: Decimal, now: datetime) -> LossBaseline:
        """All accounts together, from now on: their peak before is not known, but was no less than their capital."""
        accounts = self._exchange.accounts.values()
        capital = sum((account.run.initial_capital for account in accounts), ZERO)
        begun = sum((mark.last if mark.day_start is None else mark.day_start for mark in self._marks.values()), ZERO)
        return LossBaseline(run_id=None, day=now.date(), day_start=begun, peak=max(capital, together), last=together)

    async def _halt_when_hit(self, account_id: str | None, mark: LossBaseline, limits: LossThresholds) -> None:
        hit = rules.breach(mark, limits)
        if hit is None or self._halts.is_limited(account_id):
            return
        log.error("%s: %s limit: %s", scope(account_id), hit.cause, hit.reason)
        await self._halts.halt(account_id, hit.cause, hit.reason, "limit", self._verb)

    async def _save(self, now: datetime) -> None:
        """Record what has changed; of who is halted by a limit nothing, since lifting the halt renews that row."""
        assert self._total is not None
        changed = [
            (account_id, mark)
            for account_id, mark in ((None, self._total), *self._marks.items())
            if self._saved.get(account_id) != mark and not self._halts.is_limited(account_id)
        ]
        if not changed:
            return
        try:
            async with self._database.connection() as conn:
                await store.upsert_marks(conn, changed, now)
        except Unavailable as error:
            log.warning("what losses are measured against is not recorded yet: %s", error)
            return
        self._saved.update(changed)
