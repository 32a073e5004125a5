"""Hourly bounds: within an hour, no entrant of a season loses or gains more than its rules allow.

The verdicts of a season rest on these bounds (`domain/bets.py`). Once an account has moved by three quarters of one, it
is halted and its positions are closed; the last quarter is for the prices at which they close. The halt ends with the
hour. A price that jumps over that quarter breaks the bound, and the hour then withdraws the verdict.
"""

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final
from uuid import UUID

from trader.agents.sql.models import select_models
from trader.core.clock import JumpWatch, floor_time, interval_elapsed
from trader.core.errors import Unavailable
from trader.core.money import divide, format_decimal, from_number
from trader.database.pool import Database
from trader.exchange.domain.account import Account, equity
from trader.exchange.domain.halts import HaltCause, Verb
from trader.exchange.halts import Halts
from trader.exchange.protocol import Exchange
from trader.market.domain.markets import Tick
from trader.portfolio.domain.seasons import Season
from trader.portfolio.sql.seasons import select_latest_season
from trader.portfolio.sql.snapshots import select_hour_values

log = logging.getLogger("trader.safety")

CLOSED_AT: Final = Decimal("0.75")
"""The share of a bound at which the positions are closed."""

_CHECK_EVERY: Final = timedelta(seconds=1)
_READ_EVERY: Final = timedelta(minutes=1)
_LAST_SNAPSHOT: Final = timedelta(minutes=1)
"""An hour's equity is its last snapshot, a minute before its end; moves after it belong to the next hour."""

_HOUR: Final = timedelta(hours=1)
_BY: Final = "season"


class HourBounds:
    """Watches the hourly moves of a season's entrants, in the service's time. Without a season it does nothing."""

    def __init__(self, database: Database, exchange: Exchange, halts: Halts) -> None:
        self._database = database
        self._exchange = exchange
        self._halts = halts
        self._jumps = JumpWatch(halts.clock.now, halts.clock.steady_s)
        self._season: Season | None = None
        self._entrants: frozenset[str] = frozenset()
        self._hour: datetime | None = None
        self._starts: dict[str, tuple[UUID, Decimal]] = {}
        """The equity of each account, in a run, at the start of the hour."""

        self._due: datetime | None = None
        self._read_due: datetime | None = None

    async def load(self, now: datetime) -> None:
        """Load the season, and the equity at the start of the hour, and start watching.

        :raises Unavailable: the database cannot answer now
        """
        self._hour = _hour_of(now)
        self._jumps.jump()
        await self._read(now)
        async with self._database.reading() as conn:
            self._starts = {
                account_id: (run_id, last)
                for account_id, run_id, last in await select_hour_values(conn, self._hour - _HOUR)
            }
        self._due = now

    def stop(self) -> None:
        self._due = None

    async def _read(self, now: datetime) -> None:
        async with self._database.reading() as conn:
            season = await select_latest_season(conn)
            models = () if season is None else await select_models(conn)
        self._season = season
        self._entrants = frozenset(model.id for model in models if season is not None and season.rules.has(model))
        self._read_due = now + _READ_EVERY

    async def on_tick(self, tick: Tick) -> None:
        """Check the bounds when due, after the tick has been applied to the accounts.

        A clock that was set does not end an hour: what was lost or gained since its start counts on.
        """
        if self._hour is not None and self._jumps.jump(tick.at) is not None:
            self._hour, self._due = _hour_of(tick.at), None if self._due is None else tick.at
        term = self._exchange.term
        if self._due is None or term is None or not interval_elapsed(self._due, _CHECK_EVERY, tick.at):
            return
        self._due = tick.at + _CHECK_EVERY
        try:
            if self._hour != (hour := _hour_of(tick.at)):
                if any(halt.cause is HaltCause.HOURLY_BOUND for halt in self._halts.in_force):
                    await self._halts.lift(HaltCause.HOURLY_BOUND, _BY, term=term)
                self._hour, self._starts = hour, {}
            if self._read_due is None or interval_elapsed(self._read_due, _READ_EVERY, tick.at):
                await self._read(tick.at)
        except Unavailable as error:
            log.warning("the hourly bounds are those known so far: %s", error)
        if self._season is not None and self._season.state(tick.at + _LAST_SNAPSHOT) == "running":
            await self._check(self._season, term)

    async def _check(self, season: Season, term: int) -> None:
        marks = self._exchange.marks()
        for account_id in self._entrants & self._exchange.accounts.keys():
            account = self._exchange.accounts[account_id]
            if account.positions.keys() <= marks.keys():
                why = self._breach(season, account, marks)
                if why is not None and not self._halts.is_limited(account_id):
                    log.error("%s: hourly bound: %s", account_id, why)
                    await self._halts.halt(account_id, HaltCause.HOURLY_BOUND, why, _BY, Verb.FLATTEN, term=term)

    def _breach(self, season: Season, account: Account, marks: Mapping[str, Decimal]) -> str | None:
        """Return why the positions of an account must be closed now; None if they need not be."""
        run, now = account.run, equity(account, marks)
        run_id, start = self._starts.get(account.id, (None, now))
        if run_id != run.id:
            assert self._hour is not None, "it is set when the watch starts"
            start = run.initial_capital if run.started_at >= self._hour - _LAST_SNAPSHOT else now
            self._starts[account.id] = run.id, start
        if start <= 0:
            return None
        moved, rules = divide(100 * (now - start), start), season.rules
        most = from_number(rules.hour_loss_max_percent if moved < 0 else rules.hour_gain_max_percent)
        if abs(moved) < CLOSED_AT * most:
            return None
        direction, kind = ("below", "loss") if moved < 0 else ("above", "gain")
        return (
            f"equity {now:.2f} is {abs(moved):.2f} % {direction} {start:.2f} at the start of the hour; the bound "
            f"of {season.title} on an hour's {kind} is {format_decimal(most)} %, and its positions are closed from "
            f"{format_decimal(CLOSED_AT * most)} % on"
        )


def _hour_of(moment: datetime) -> datetime:
    """Return the hour to whose move a moment belongs."""
    return floor_time(moment + _LAST_SNAPSHOT, _HOUR)
