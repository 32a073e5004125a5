"""Strategies: the class that decides for an account, of a user's file and of our own rule agents alike."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol

from trader.domain.agents.tools import Decision
from trader.domain.agents.view import VariantLimits, View
from trader.domain.exchange.account import Account
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import Interval, Market
from trader.domain.models import VariantId


class Peek(Protocol):
    """The account, the marks and the indicators of a moment in a backtest, without the cost of a whole view."""

    @property
    def now(self) -> datetime: ...

    @property
    def account(self) -> Account: ...

    @property
    def markets(self) -> Mapping[str, Market]: ...

    @property
    def symbols(self) -> Collection[str]:
        """The markets that have a price."""
        ...

    def indicators(self, symbol: str, interval: Interval) -> Indicators: ...

    def mark(self, symbol: str) -> Decimal: ...


class Strategy:
    """Base class of strategies. A class of a file needs `decide` alone; the rest has these defaults.

    Its constructor takes the parameters of `--param` and of `params` in the models file, by name.
    """

    name: str = ""
    """The id of its account in a backtest; empty: the name of the class in lower case."""

    variant: VariantId = VariantId.APEX
    """The variant that it trades in a backtest: whose guard judges it, and whose rule agent it is compared with."""

    intervals: Sequence[Interval] = ("15m",)
    """The intervals of the candles and indicators that its view has."""

    deadline_s: float = 10.0
    """Seconds of real time that a decision may take. One that takes longer fails."""

    limits: VariantLimits = VariantLimits(leverage_max=10)
    """The limits of the guard, set before the first decision."""

    def decide(self, view: View) -> Iterable[Decision] | None:
        """Return the decisions of one cycle, which are executed in this order; None or nothing: do nothing."""
        raise NotImplementedError

    def may_act(self, peek: Peek) -> bool:
        """Return False when nothing can be decided now. A backtest then saves itself the view and the decision."""
        return True

    def save(self) -> Any:
        """Return the state to keep over a restart of the service, as JSON values; None: there is none."""
        return None

    def load(self, state: Any) -> None:
        """Take over a state that `save` has returned, before the first decision."""
