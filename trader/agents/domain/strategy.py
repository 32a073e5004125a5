"""Strategies: the class that decides for an account, whether from a user's file or one of the built-in rule agents."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple, Protocol

from trader.agents.domain.tools import Decision
from trader.agents.domain.view import HISTORY_CANDLES, ObservedFill, Shown, VariantLimits, View
from trader.core.variant_id import VariantId
from trader.exchange.domain.account import Account
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import Interval, Market

HISTORY_MAX: Final = 1000
"""The most closed candles of an interval in a view of a service: as many as it keeps. A backtest has all of them."""


FILLS_MAX: Final = 200
"""Maximum number of fills that are reported to a strategy in one cycle."""


class StrategyState(NamedTuple):
    """The stored state of a model's strategy. Its time is also its version: it advances with each save."""

    state: Any
    decided_at: datetime


class Peek(Protocol):
    """The account, marks and indicators at one moment of a backtest, without the cost of a full view."""

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

    def fills_since(self, sequence: int) -> Sequence[ObservedFill]:
        """Return the last fills of the account after this one, oldest first; none for a strategy without `on_fill`."""
        ...

    def indicators(self, symbol: str, interval: Interval) -> Indicators: ...

    def mark(self, symbol: str) -> Decimal: ...


class SeriesValue(NamedTuple):
    """A value of a series that a strategy draws for a market at the time of its view; NaN draws nothing.

    A series is a line over the candles, in the quote currency; with `panel`, in a panel of its own below them.
    """

    symbol: str
    name: str
    value: float
    panel: bool = False


class Strategy:
    """Base class of strategies. A class in a file needs only `decide`; everything else has these defaults.

    Its constructor takes the parameters given by `--param`, or by `params` in the models file, by name.
    """

    name: str = ""
    """The id of its account in a backtest; empty: the class name in lowercase."""

    variant: VariantId = VariantId.APEX
    """The variant that it trades in a backtest, which determines its guard and the rule agent it is compared with."""

    intervals: Sequence[Interval] = ("15m",)
    """The intervals of the candles and indicators in its view."""

    history: int = HISTORY_CANDLES
    """The number of last closed candles of each interval in its view; in a service at most `HISTORY_MAX`."""

    warm_up: int = 0
    """It is asked for decisions only once every market in its view has this many closed candles of each interval."""

    deadline_s: float = 10.0
    """Real time in seconds that a decision may take; a longer one fails."""

    digest: str = ""
    """The SHA-256 of its file, in hexadecimal; empty for a built-in agent."""

    limits: VariantLimits = VariantLimits(leverage_max=10)
    """The limits of the guard, set before the first decision."""

    @property
    def shown(self) -> Shown:
        """What its view shows of each market: for a built-in agent, little."""
        return Shown(tuple(self.intervals), series=1)

    def decide(self, view: View) -> Iterable[Decision] | None:
        """Return the decisions of one cycle, to be executed in this order; None or an empty iterable: do nothing."""
        raise NotImplementedError

    def on_fill(self, fill: ObservedFill) -> None:
        """Take note of a fill of the account, of any cause. Each since the last cycle is reported, oldest first, before
        `may_act` and `decide`; of more than `FILLS_MAX`, the last ones."""

    def series(self, view: View) -> Iterable[SeriesValue] | None:
        """Return values to draw beside the trades in the report of a backtest, which asks after each decision."""
        return None

    def may_act(self, peek: Peek) -> bool:
        """Return False if `decide` would return nothing now. A backtest then skips the view and the decision."""
        return True

    def save(self) -> Any:
        """Return the state to preserve across restarts of the service, as JSON values; None: there is none."""
        return None

    def load(self, state: Any) -> None:
        """Restore a state returned by `save`, before the first decision."""
