"""Advances the accounts of a backtest through its ticks, one by one, and forwards their postings and snapshots."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from itertools import chain
from typing import Any, Final

from trader.backtest.accounts import (
    FIRST_SNAPSHOT_MS,
    BacktestAccount,
    ModelAccount,
    TouchFinder,
    Waiting,
    next_minute,
)
from trader.backtest.market import BacktestMarket
from trader.backtest.values import AccountValues, time_of_ms
from trader.core.clock import ceil_second, epoch_second, iso, moment_of
from trader.exchange.domain.account import Marks
from trader.exchange.domain.ledger import ExchangeRules, Posting
from trader.exchange.domain.tick_rules import apply_tick
from trader.market.domain.markets import Quote
from trader.portfolio.snapshots import is_due
from trader.portfolio.sql.snapshots import LastSnapshot

LATE: Final = timedelta(seconds=5)
"""How much longer than its latency an order waits for a book."""


class Journal:
    """Receives the accounts of models, and the postings and snapshots in order per account; ignores what is not kept.

    The postings of the baselines belong to no ledger: of them it receives only the snapshots.
    """

    def open(self, followed: ModelAccount) -> None:
        """Receive the newly opened account of a model."""

    def post(self, posting: Posting) -> None:
        """Receive a posting."""

    def snapshots(self, values: AccountValues) -> None:
        """Receive the snapshots of full minutes."""


class OrderedJournals:
    """Buffers what concurrent sessions write, and forwards it to the journals in a fixed order of accounts."""

    def __init__(self, journals: Sequence[Journal]) -> None:
        self._posts, self._snapshots = [each.post for each in journals], [each.snapshots for each in journals]
        self._held: dict[str, list[Callable[[], None]]] = {}

    def hold(self, account_ids: Sequence[str]) -> None:
        """Buffer the postings and snapshots of these accounts from now on."""
        self._held = {account_id: [] for account_id in account_ids}

    def release(self) -> None:
        """Forward what is buffered, in the order of the held accounts."""
        held, self._held = self._held, {}
        for write in chain.from_iterable(held.values()):
            write()

    def post(self, posting: Posting) -> None:
        self._write(posting.account.id, self._posts, posting)

    def snapshots(self, values: AccountValues) -> None:
        self._write(values.account.id, self._snapshots, values)

    def _write(self, account_id: str, writes: Sequence[Callable[[Any], None]], written: Any) -> None:
        held = self._held.get(account_id)
        for write in writes:
            if held is None:
                write(written)
            else:
                held.append(partial(write, written))


class Advance:
    """Advances each account, applying only the ticks that can change it or that its session waits for."""

    def __init__(self, market: BacktestMarket, rules: ExchangeRules, journals: Sequence[Journal]) -> None:
        self.market = market
        self.rules = rules
        self.latency = rules.latency
        self._journals = OrderedJournals(journals)
        self._touches = TouchFinder(market, rules)
        self.last = market.span.stop - 1
        """The second of the last tick."""

        self.leverage_max = {symbol: each.leverage_max for symbol, each in market.markets.items()}

    def _advance(self, followed: BacktestAccount, until: int) -> None:
        """Apply every tick up to this second that may change the account."""
        until_tick = min(until, self.last)
        while (second := self._next_event(followed, until_tick)) is not None:
            self._apply(followed, second)
        followed.seen = max(followed.seen, until_tick)

    def advance_to(self, followed: BacktestAccount, moment: datetime) -> None:
        """Advance only this account to a moment: apply the ticks up to it, and take the snapshots before it."""
        self._advance(followed, epoch_second(moment))
        self.take_snapshots(followed, ceil_second(moment))

    def advance_to_book(self, followed: BacktestAccount) -> None:
        """Advance only this account to the tick that ends its wait for a book."""
        while (waiting := followed.waiting) is not None:
            second = self._next_event(followed, self.last)
            if second is None:
                self._end_wait(followed, waiting, moment_of(self.last), self.ended)
            else:
                self._apply(followed, second)

    def _apply(self, followed: BacktestAccount, second: int) -> None:
        """Apply the tick of a second to an account, then resume the session that waited for it."""
        moment = self.market.moment(second)
        posting = apply_tick(followed.account, moment, self.rules, self.market.funding_rate)
        if posting is not None:
            self.post(followed, posting, second)
        followed.seen = second
        waiting = followed.waiting
        if waiting is None or moment.at < waiting.due:
            return
        is_late = moment.at - waiting.due > LATE
        if not is_late:
            waiting.missing = [symbol for symbol in waiting.missing if symbol not in moment.updated]
        if not waiting.missing:
            self._end_wait(followed, waiting, moment.at, None)
        elif is_late:
            self._end_wait(followed, waiting, moment.at, f"No price of {waiting.missing[0]} came in time")
        elif second == self.last:
            self._end_wait(followed, waiting, moment.at, self.ended)

    def _end_wait(self, followed: BacktestAccount, waiting: Waiting, at: datetime, refusal: str | None) -> None:
        waiting.ended_at, waiting.refusal, followed.waiting = at, refusal, None
        if followed.running is not None:
            self._resume(followed)

    def _next_event(self, followed: BacktestAccount, until: int) -> int | None:
        """Return the second of the next tick that may change the account or that its session waits for."""
        waiting = followed.waiting
        waited = None if waiting is None else self.market.next_tick(max(followed.seen + 1, ceil_second(waiting.due)))
        stop = until if waited is None else min(until, waited)
        touched = self._touches.first(followed, followed.seen + 1, stop)
        return touched if touched is not None or waited is None or waited > until else waited

    def post(self, followed: BacktestAccount, posting: Posting, second: int) -> None:
        """Apply a posting to an account, after taking the snapshots that precede this second."""
        self.take_snapshots(followed, second)
        followed.apply(posting)
        followed.clear_until = second
        if followed.is_booked:
            self._journals.post(posting)

    def prices(self, second: int) -> tuple[Mapping[str, Quote], Marks]:
        """Return the quotes and marks at a second; after the end, those of the last tick."""
        moment = self.market.moment(min(second, self.last))
        return moment.quotes, moment.marks

    @property
    def ended(self) -> str:
        """Why no order can meet a book any more."""
        return f"The replay ended at {iso(moment_of(self.last))}; there are no more prices"

    def take_snapshots(self, followed: BacktestAccount, before: int) -> None:
        """Take the snapshots of the minutes before this second; the account has not changed since.

        In the minute of a due session, the snapshot follows the view, as in a service.
        """
        values = self._not_taken(followed, before)
        if not values.times_ms:
            return
        followed.next_snapshot = next_minute(values.times_ms[-1] // 1000)
        account, last = followed.account, followed.last_snapshot
        if account.is_idle:
            due_ms = [
                each
                for each in values.times_ms
                if is_due(account, last, at := time_of_ms(each)) and (last := LastSnapshot(account.run.id, at))
            ]
            values = AccountValues(account, due_ms, ())
        self.note(followed, values)

    def note(self, followed: BacktestAccount, values: AccountValues) -> None:
        """Record the values, if any, as snapshots."""
        if values.times_ms:
            followed.note_values(values)
            self._journals.snapshots(values)

    def lowest_equity(self, followed: BacktestAccount, now: datetime) -> Decimal | None:
        """Return the lowest equity of the day until now, as if all snapshots were taken; None without any.

        They are taken if minutes of an earlier hour may be among them.
        """
        if followed.account.is_idle or not followed.knows_history(now):
            self.take_snapshots(followed, epoch_second(now))
        lowest, values = followed.equity.lowest_on(now.date()), self._not_taken(followed, epoch_second(now))
        if not values.times_ms:
            return lowest
        return values.lowest() if lowest is None else min(lowest, values.lowest())

    def _not_taken(self, followed: BacktestAccount, before: int) -> AccountValues:
        """Return the values at the minutes before this second whose snapshots have not been taken."""
        first, account = followed.next_snapshot, followed.account
        if first < before:
            before = min([before, *self.due_seconds(followed)])
        if first >= before:
            return AccountValues(account, (), ())
        seconds: Sequence[int] = range(first, before, 60)
        times_ms: Sequence[int] = range(1000 * first, 1000 * before, 60_000)
        if first == self.market.span.start:  # perhaps within a minute
            seconds = [first, *range(next_minute(first), before, 60)]
            times_ms = [1000 * first + FIRST_SNAPSHOT_MS, *(1000 * second for second in seconds[1:])]
        columns = [self.market.marks_of(symbol, seconds) for symbol in account.positions]
        return AccountValues(account, times_ms, columns)

    def due_seconds(self, followed: BacktestAccount) -> Collection[int]:
        """Return the seconds of the sessions of an account that are due."""
        return ()

    def _resume(self, followed: BacktestAccount) -> None:
        """Run a session until it waits for a book or ends."""
        assert followed.running is not None
        try:
            followed.running.send(None)
        except StopIteration:
            followed.running = None
