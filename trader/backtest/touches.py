"""Touches: the seconds at which a tick may change an account; all others are skipped.

The test is the conservative one (`is_unaffected`) that a service uses to catch up.
"""

from collections.abc import Sequence
from datetime import timedelta

from trader.backtest.accounts import BacktestAccount
from trader.backtest.market import BacktestMarket
from trader.core.clock import moment_of
from trader.exchange.domain.account import last_boundary
from trader.exchange.domain.ledger import ExchangeRules
from trader.exchange.domain.tick_rules import PriceRanges, is_unaffected


class TouchFinder:
    """Finds the next touch of an account in a market."""

    def __init__(self, market: BacktestMarket, rules: ExchangeRules) -> None:
        self._market = market
        self._rules = rules
        self._last = market.span.stop - 1

    def first(self, followed: BacktestAccount, start: int, until: int) -> int | None:
        """Return the first second in [start, until] with a tick that may change the account; None if there is none."""
        if followed.account.is_idle:
            return None
        while start <= until:
            if start <= followed.clear_until or self._clear_minutes(followed, start):
                start = followed.clear_until + 1
                continue
            end = min(until, start // 60 * 60 + 59)
            touched = self._first_within(followed, start, end)
            if touched is not None:
                return touched
            followed.clear_until, start = end, end + 1
        return None

    def _clear_minutes(self, followed: BacktestAccount, start: int) -> bool:
        """Extend `clear_until` by whole minutes from the minute of `start` on.

        Return False if that minute is not clear.
        """
        minute, count = start // 60, 1
        is_clear, symbols = False, _concerned(followed)
        # Nothing beyond the next funding is clear.
        hours = min(self._rules.funding_hours(symbol) for symbol in symbols)
        boundary = last_boundary(moment_of(start), hours) + timedelta(hours=hours)
        last = min(int(boundary.timestamp()) // 60 - 1, self._last // 60)
        while minute <= last:
            stop = min(minute + count - 1, last)
            if not self._is_clear(followed, self._market.ranges(symbols, minute * 60, stop * 60 + 59)):
                break
            is_clear, followed.clear_until = True, stop * 60 + 59
            minute, count = stop + 1, 2 * count
        return is_clear

    def _first_within(self, followed: BacktestAccount, start: int, end: int) -> int | None:
        """Return the first second in [start, end], of one minute, that may change the account."""
        market, symbols = self._market, _concerned(followed)
        if start % 60 == 0:  # known without computing the minute's path, and due for funding
            if not self._is_clear(followed, market.ranges(symbols, start, start)):
                return start if market.ticking(start) else self._first_within(followed, start + 1, end)
            start += 1
        while start <= end:
            if self._is_clear(followed, market.ranges(symbols, start, end)):
                return None
            low, high = start, end
            while low < high:  # the first touch lies in [low, high]
                middle = (low + high) // 2
                if self._is_clear(followed, market.ranges(symbols, low, middle)):
                    low = middle + 1
                else:
                    high = middle
            if market.ticking(low):
                return low
            start = low + 1
        return None

    def _is_clear(self, followed: BacktestAccount, ranges: PriceRanges) -> bool:
        return is_unaffected(followed.account, ranges, self._rules)


def _concerned(followed: BacktestAccount) -> Sequence[str]:
    return [*followed.account.positions, *(order.symbol for order in followed.account.resting)]
