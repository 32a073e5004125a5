"""Loss limit monitor: measures the accounts' equity with the ticks, and halts accounts that hit a limit."""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from trader.core.clock import interval_elapsed
from trader.core.errors import Unavailable
from trader.core.money import ZERO
from trader.database.pool import Database
from trader.exchange.domain.account import equity
from trader.exchange.domain.halts import LIMITS, Halt, Verb, scope
from trader.exchange.halts import Halts
from trader.exchange.protocol import Exchange
from trader.market.domain.markets import Tick
from trader.operations.domain import loss_limits as rules
from trader.operations.domain.loss_limits import LossBaseline, LossThresholds, RunEquity
from trader.operations.sql import loss_baselines as store
from trader.settings.settings import Settings

log = logging.getLogger("trader.safety")

_CHECK_EVERY: Final = timedelta(seconds=1)
_SAVE_EVERY: Final = timedelta(seconds=10)
"""How often, in the service's time, accounts are measured and their baselines recorded."""


class LossLimits:
    """Watches the daily loss and drawdown of each account and of all together. Without limits it does nothing."""

    def __init__(self, database: Database, exchange: Exchange, halts: Halts, settings: Settings) -> None:
        self._database = database
        self._exchange = exchange
        self._halts = halts
        self._each = LossThresholds(settings.max_daily_loss_percent, settings.max_drawdown_percent)
        self._together = LossThresholds(settings.max_total_daily_loss_percent, settings.max_total_drawdown_percent)
        self._verb = Verb.FLATTEN if settings.flatten_on_limit == "on" else Verb.HALT
        self._baselines: dict[str, LossBaseline] = {}
        self._total: LossBaseline | None = None
        self._saved: dict[str | None, LossBaseline] = {}
        self._due: datetime | None = None
        self._save_due: datetime | None = None

    async def load(self, now: datetime) -> None:
        """Load the baselines from their rows and the snapshots since, and start watching.

        :raises Unavailable: the database cannot answer now
        """
        if not (self._each.are_set or self._together.are_set):
            return
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        async with self._database.reading() as conn:
            recorded = await store.select_recorded_equity(conn, midnight)
            total = await store.select_total_baseline(conn)
        baselines = {key: each.baseline for key, each in recorded.items() if each.baseline is not None}
        starts = {key: RunEquity(each.run_id, each.initial_capital, ZERO) for key, each in recorded.items()}
        self._total = None if total is None else rules.shift(total, rules.net_deposits(baselines, starts))
        self._baselines = {key: rules.restore(each, now.date()) for key, each in recorded.items()}
        self._saved = {}
        self._due = self._save_due = now

    def stop(self) -> None:
        self._due = None

    def reset(self, lifted: Iterable[Halt]) -> None:
        """Measure losses from the next equity wherever the halt of a limit was lifted."""
        for halt in lifted:
            if halt.cause not in LIMITS:
                continue
            if halt.account_id is None:
                self._total = None if self._total is None else rules.reset(self._total)
            elif halt.account_id in self._baselines:
                self._baselines[halt.account_id] = rules.reset(self._baselines[halt.account_id])

    async def on_tick(self, tick: Tick) -> None:
        """Check the limits when due, after the tick has been applied to the accounts."""
        is_due = self._due is not None and interval_elapsed(self._due, _CHECK_EVERY, tick.at)
        if is_due and (term := self._exchange.term) is not None:
            self._due = tick.at + _CHECK_EVERY
            await self._check(tick.at, term)

    async def _check(self, now: datetime, term: int) -> None:
        """Measure every account, and halt accounts that have hit a limit, in the term of the measurement."""
        day_before = None if self._total is None else self._total.day
        self._measure(now)
        assert self._total is not None
        for account_id, baseline in list(self._baselines.items()):
            await self._halt_when_hit(account_id, baseline, self._each, term)
        await self._halt_when_hit(None, self._total, self._together, term)
        is_new_day = day_before != self._total.day
        if is_new_day or self._save_due is None or interval_elapsed(self._save_due, _SAVE_EVERY, now):
            self._save_due = now + _SAVE_EVERY
            await self._save(now, term)

    def _measure(self, now: datetime) -> None:
        marks, day = self._exchange.marks(), now.date()
        equities = {
            account.id: RunEquity(account.run.id, account.run.initial_capital, equity(account, marks))
            for account in self._exchange.accounts.values()
            if account.positions.keys() <= marks.keys()  # an account without a price keeps its last equity
        }
        removed = self._baselines.keys() - self._exchange.accounts.keys()
        withdrawn = sum((self._baselines.pop(account_id).last for account_id in removed), ZERO)
        deposits = rules.net_deposits(self._baselines, equities) - withdrawn
        for account_id, current in equities.items():
            self._baselines[account_id] = rules.update(self._baselines.get(account_id), current, day)
        together = sum((baseline.last for baseline in self._baselines.values()), ZERO)
        if self._total is None:
            self._total = self._first_total(together, now)
        else:
            self._total = rules.advance(rules.shift(self._total, deposits), together, day)

    def _first_total(self, together: Decimal, now: datetime) -> LossBaseline:
        """Return the first baseline of all accounts: their earlier peak is unknown, but was at least their capital."""
        capital = sum((account.run.initial_capital for account in self._exchange.accounts.values()), ZERO)
        day_starts = (
            baseline.last if baseline.day_start is None else baseline.day_start for baseline in self._baselines.values()
        )
        return LossBaseline(
            run_id=None,
            day=now.date(),
            day_start=sum(day_starts, ZERO),
            peak=max(capital, together),
            last=together,
        )

    async def _halt_when_hit(
        self, account_id: str | None, baseline: LossBaseline, limits: LossThresholds, term: int
    ) -> None:
        hit = rules.breach(baseline, limits)
        if hit is None or self._halts.is_limited(account_id):
            return
        cause, reason = hit
        log.error("%s: %s limit: %s", scope(account_id), cause, reason)
        await self._halts.halt(account_id, cause, reason, "limit", self._verb, term=term)

    async def _save(self, now: datetime, term: int) -> None:
        """Record the baselines that changed, except where a limit has halted: lifting the halt resets that row."""
        if self._total is None:
            return
        changed = [
            (account_id, baseline)
            for account_id, baseline in ((None, self._total), *self._baselines.items())
            if self._saved.get(account_id) != baseline and not self._halts.is_limited(account_id)
        ]
        if not changed:
            return
        try:
            async with self._database.writing() as conn:
                await store.upsert_baselines(conn, changed, now, term)
        except Unavailable as error:
            log.warning("the baselines of the loss limits have not been recorded yet: %s", error)
            return
        self._saved.update(changed)
