"""Engine of a backtest: advances accounts through market time, and executes their decisions.

A replay applies every second to every account; the engine applies only the seconds that can change an account. Accounts
never affect each other, so each advances on its own from one decision to the next. The rows equal those of a replay in
lockstep:

    at a second's tick   funding, resting orders, liquidation, exit plans; then the orders that waited for its book
    at a full minute     after the tick of that second the decisions, then the snapshot

Each decision is a session of its account. A strategy's session is suspended while its order waits for a book, and
resumed by the tick of that book. The session of a source that runs ahead, such as an AI model, advances only its own
account until the session ends; the next decision is due once the other accounts have caught up.
"""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Final

from trader.agents.domain.models import CYCLE
from trader.backtest.accounts import FIRST_CYCLE, BacktestAccount
from trader.backtest.advance import Advance, Journal
from trader.backtest.market import BacktestMarket
from trader.backtest.session import AccountSession
from trader.backtest.values import AccountValues
from trader.core.clock import epoch_second, moment_of
from trader.exchange.domain.ledger import ExchangeRules
from trader.market.domain.markets import STALE_AFTER

_STRETCH_S: Final = 3600
"""Seconds of market time between progress reports of the engines."""


class Engine(Advance):
    """Advances accounts through market time. `invoke` runs the due sessions of sources that run ahead."""

    def __init__(
        self,
        market: BacktestMarket,
        rules: ExchangeRules,
        accounts: Sequence[BacktestAccount],
        journals: Sequence[Journal],
    ) -> None:
        super().__init__(market, rules, journals)
        self.accounts = accounts
        self._due: list[AccountSession] = []
        self._reached = market.span.start
        self._is_watched = any(each.source.runs_ahead for each in accounts)
        """Whether a session may read the equity of other accounts between full hours."""

    def run(self) -> Iterator[int]:
        """Advance through the market, and yield the second reached about once per hour of market time.

        Accounts without decisions end at the last tick.
        """
        self._begin()
        yield self._reached
        end = self.market.span.stop + int(STALE_AFTER.total_seconds())  # by then prices are stale for every reader
        while self._reached < end:
            due = (followed.decides_at for followed in self.accounts if followed.is_booked)
            self._reached = min([*(second for second in due if second is not None), self._reached + _STRETCH_S, end])
            self._go(self._reached, is_end=self._reached == end)
            yield self._reached

    def _begin(self) -> None:
        """Run the first decision cycle of the accounts that start with the market."""
        begin = self.market.span.start
        for followed in self.accounts:
            first = followed.source.next_after(begin - int(CYCLE.total_seconds()))
            if first is not None and first <= begin:
                self._decide(followed, moment_of(begin) + FIRST_CYCLE)
            followed.decides_at = followed.source.next_after(begin)

    def _go(self, until: int, *, is_end: bool) -> None:
        """Advance every account to a second not after the next decision of a model. At the end, none is made."""
        for followed in self.accounts:
            while (due := followed.decides_at) is not None and due <= until and not (is_end and due == until):
                self._advance(followed, due)
                self._decide(followed, moment_of(due))
                followed.decides_at = followed.source.next_after(due)
            self._advance(followed, until)
            if is_end or self._is_watched or until % _STRETCH_S == 0:
                self.take_snapshots(followed, until if is_end else until + 1)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _decide(self, followed: BacktestAccount, now: datetime) -> None:
        """Begin the session of an account, unless its previous decisions are still being executed."""
        session, source = AccountSession(self, followed, now), followed.source
        if source.runs_ahead:
            self._due.append(session)
            return
        if followed.running is not None:
            followed.missed += 1
            return
        followed.running = source.run(session)
        self._resume(followed)

    @property
    def is_due(self) -> bool:
        return bool(self._due)

    def is_ahead(self, second: int) -> bool:
        """Whether the session of an account has advanced it beyond this second."""
        return any(followed.seen > second for followed in self.accounts)

    async def invoke(self) -> None:
        """Run the due sessions concurrently, and raise the error of the first that fails."""
        due, self._due = self._due, []
        self._journals.hold([session.followed.account.id for session in due if session.followed.source.is_asking])
        try:
            sessions = [session.followed.source.run(session) for session in due]
            results = await asyncio.gather(*sessions, return_exceptions=True)
        finally:
            self._journals.release()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def skip(self) -> None:
        """Skip the due sessions."""
        self._due.clear()

    def complete(self) -> None:
        """Take the snapshots until now, which otherwise are taken once an hour."""
        for followed in self.accounts:
            self.take_snapshots(followed, min(self._reached, self.last) + 1)

    def close(self) -> None:
        """Take the last snapshots, and a further one of each account that has closed its positions since: an idle one
        has none before the next hour, so curve and drawdown would end before what they cost."""
        self.complete()
        end = min(self._reached, self.last)
        for followed in self.accounts:
            if followed.account.is_idle and followed.hours and followed.hours[-1].last != followed.account.cash:
                self.note(followed, AccountValues(followed.account, [1000 * end], ()))

    def due_seconds(self, followed: BacktestAccount) -> Collection[int]:
        return [epoch_second(session.now()) for session in self._due if session.followed is followed]
