"""Values of an account at successive times of a backtest, computed when they are read."""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import repeat
from typing import Any, NamedTuple

from trader.core.clock import EPOCH
from trader.exchange.domain.account import Account
from trader.portfolio.domain.histories import AccountValue, Snapshot


def time_of_ms(time_ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=time_ms)


class MarkColumn(NamedTuple):
    """Successive marks of a market: what `price` returns for each of `steps`, in the same order of size."""

    price: Callable[[Any], Decimal]
    steps: Sequence[Any]


class AccountValues(NamedTuple):
    """The values of an account at several times, between which nothing changed but the marks.

    `times_ms` are milliseconds since 1970, ascending; `columns` has the marks of each position, in their order.
    """

    account: Account
    times_ms: Sequence[int]
    columns: Sequence[MarkColumn]

    @property
    def times(self) -> Iterator[datetime]:
        return map(time_of_ms, self.times_ms)

    def values(self) -> Iterator[AccountValue]:
        """Yield the value at each time."""
        positions, cash = self.account.positions.values(), self.account.cash
        prices = [map(*column) for column in self.columns]
        marks = zip(*prices, strict=True) if prices else repeat((), len(self.times_ms))
        return (AccountValue.of(positions, cash, each) for each in marks)

    def snapshots(self) -> Iterator[Snapshot]:
        """Yield the snapshots, ascending."""
        return (value.snapshot(self.account, at) for at, value in zip(self.times, self.values(), strict=True))

    def lowest(self) -> Decimal:
        """Return the lowest worth of the times."""
        if len(self.columns) != 1:
            return min(value.worth for value in self.values())
        [(price, steps)], [position] = self.columns, self.account.positions.values()
        return self.account.cash + position.unrealized(price(min(steps) if position.is_long else max(steps)))

    def summary(self, begin: int, stop: int) -> tuple[Decimal, Decimal, float]:
        """Return the lowest and the last worth and the highest leverage of the times with these indexes."""
        columns = [MarkColumn(price, steps[begin:stop]) for price, steps in self.columns]
        if len(columns) == 1 and stop - begin > 1:  # worth and leverage rise with the mark, or fall with it
            [(price, steps)] = columns
            columns = [MarkColumn(price, [min(steps), max(steps), steps[-1]])]
        values = list(AccountValues(self.account, self.times_ms[begin : begin + 1], columns).values())
        return min(value.worth for value in values), values[-1].worth, max(value.leverage for value in values)
