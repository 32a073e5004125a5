"""The view: the markets and the account as an AI model or rule agent sees them at the start of an invocation.

Amounts, prices and quantities are Decimals with all digits of the books; indicators and ratios are floats. Absent
values are None: an indicator without enough history, a ratio without a value. A market without a quote is not in
`markets`. Models see the field names in this order.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from operator import itemgetter
from typing import Final, Literal, NamedTuple
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt

from trader.core.statistics import change_percent
from trader.exchange.domain.orders import Cause, ExitPlan, OrderSide, Side
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import Candle, Interval, Market, Quote

HISTORY_CANDLES: Final = 300
"""Number of closed candles from which each set of indicators is computed: at 5 minutes they cover a whole day."""

CANDLES_SHOWN: Final = 32
"""Number of last closed candles of each interval that models see: the prompt's rows, and the history of its volumes."""

SERIES_SHOWN: Final = 5
"""Number of last closed candles for which an AI model sees the indicators that its prompt names."""


Column = npt.NDArray[np.float64]
"""One figure of successive candles, as numpy, pandas and TA-Lib take it; read-only."""


class RecordedCandles(tuple[Candle, ...]):
    """Successive candles of a recording, with arrays of their figures, so that no view builds them again."""

    columns: Column | None = None
    """A row for each of opens, highs, lows, closes and volumes; a masked copy has None."""


class Shown(NamedTuple):
    """What a view shows of each market: for each of the intervals the last closed candles, as many as `candles`, and
    the indicators at the last `series` of them. Of the account's last fills it shows as many as `fills`. The prompt and
    its answer must fit into `context_tokens` (None: not known)."""

    intervals: tuple[Interval, ...]
    candles: int = CANDLES_SHOWN
    series: int = SERIES_SHOWN
    fills: int = 0
    context_tokens: int | None = None


class VariantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that the guard enforces on a variant, regardless of its agent's decisions.

    `leverage_max` is the highest leverage of a position, and of all positions together (Σ notional / equity).
    `position_notional_max` is the highest notional of one position as a multiple of equity. After a loss of
    `day_loss_max_percent` of the day's opening equity, only reducing is allowed until 00:00 UTC. A position may not be
    reversed within `reversal_cycles` cycles of the last trade in its market. A decision made more than
    `decision_age_max_s` seconds after its view is refused, since the market has moved on. `stop_required`: a position
    needs a stop.
    """

    leverage_max: int
    position_notional_max: int = 5
    day_loss_max_percent: int = 10
    reversal_cycles: int = 3
    decision_age_max_s: int = 120
    stop_required: bool = True


class ObservedAccount(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The account at the marks of the view. `exposure` is Σ quantity × mark of all positions.

    `day_opening_equity` is the equity at 00:00 UTC (or at the start of the run, if that is later), `peak_equity` the
    highest of the run. `drawdown_percent` is the fall from that peak, and `day_loss_percent` the day's deepest fall
    from its opening equity, by which the day-loss rule judges: it stays when equity recovers. Both are 0 if equity has
    not fallen.
    """

    initial_capital: Decimal
    equity: Decimal
    cash: Decimal
    available_cash: Decimal
    margin: Decimal
    exposure: Decimal
    day_opening_equity: Decimal
    peak_equity: Decimal
    drawdown_percent: Decimal
    day_loss_percent: Decimal
    taker_fee_rate: Decimal


class ObservedPosition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An open position. `unrealized` is gross; `fees` (positive) and `funding` (negative: paid) are totals so far.

    `risk` is the loss before costs when the stop is hit: quantity × |entry − stop|. It is None without a stop, and once
    the stop has passed the entry, when nothing is at risk any more.
    """

    symbol: str
    side: Side
    quantity: Decimal
    entry_price: Decimal
    mark: Decimal
    notional: Decimal
    margin: Decimal
    leverage: Decimal
    unrealized: Decimal
    fees: Decimal
    funding: Decimal
    risk: Decimal | None
    liquidation_price: Decimal | None
    exit_plan: ExitPlan
    confidence: Decimal | None
    opened_at: datetime


class ObservedTrade(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One of the last completed trades. `net_pnl` is after fees and funding."""

    symbol: str
    side: Side
    quantity: Decimal
    entry_price: Decimal
    exit_price: Decimal
    net_pnl: Decimal
    fees: Decimal
    funding: Decimal
    close_reason: str
    confidence: Decimal | None
    opened_at: datetime
    closed_at: datetime


class ObservedStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The agent's own record over the closed trades of this run. `average_loss` is positive.

    A win has a net pnl above zero. Averages are None without a win (or a loss), and `win_rate_percent` and `expectancy`
    without a trade.
    """

    trade_count: int = 0
    win_rate_percent: float | None = None
    average_win: Decimal | None = None
    average_loss: Decimal | None = None
    expectancy: Decimal | None = None
    net_pnl: Decimal = Decimal(0)
    sharpe_ratio: float | None = None
    max_drawdown_percent: float | None = None


class LastAction(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The last trade in a market: the side of the position, and how many cycles ago (1: the last cycle).

    Every close counts, whether by the agent, the exit plan, a liquidation or an operator.
    """

    action: Literal["createPosition", "closePosition"]
    side: Side
    cycles_ago: int


class ObservedOrder(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A limit order that waits for its price; `remaining` of its `quantity` is not filled yet."""

    id: UUID
    client_order_id: str | None
    symbol: str
    side: OrderSide
    quantity: Decimal
    remaining: Decimal
    limit_price: Decimal
    reduce_only: bool
    created_at: datetime


class ObservedFill(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A fill of the account. `sequence` ascends; `order_id` is the order's in `View.orders`, None if the exchange acted
    on its own, as for a stop. `fee` is never negative, and includes the liquidation fee."""

    sequence: int
    at: datetime
    symbol: str
    side: OrderSide
    quantity: Decimal
    price: Decimal
    fee: Decimal
    maker: bool
    cause: Cause
    order_id: UUID | None


class PastDecision(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One line about a decision from one of the agent's last cycles; `at` is the time of the cycle."""

    at: datetime
    text: str


class Memory(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An agent's own past: its note, its last decisions, newest first, and why calls of the last cycle failed.

    `looked_at` is the time of the last cycle that it answered; None before the first.
    """

    note: str | None = None
    decisions: tuple[PastDecision, ...] = ()
    refused: tuple[str, ...] = ()
    looked_at: datetime | None = None


class Supplementary(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Indicators from a supplier for the same coin on another venue: a second opinion for models.

    No code uses them to decide. Absent values are None.
    """

    source: str
    venue: str
    interval: Interval
    fetched_at: datetime
    macd: float | None = None
    macd_signal: float | None = None
    macd_histogram: float | None = None
    stoch_rsi_k: float | None = None
    stoch_rsi_d: float | None = None
    supertrend: float | None = None
    money_flow_index: float | None = None
    chaikin_money_flow: float | None = None


class ObservedMarket(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One market. `price` is the mark; `quoted_at` the time of the quote, `stale` whether it is too old to trade on.

    `candles` and `indicators` are of closed candles only, per interval, candles ascending; `indicator_history` has the
    indicators at the last few closed candles, ascending, the latest included. The first interval is the variant's
    decision interval. `change_24h_percent` compares the price with the price 24 hours before the last full hour, and
    `change_since_look_percent` with the price of the minute in which the agent last looked. `leverage_max` is the
    market's own, `funding_rate` the hourly one (longs pay a positive rate), and `funding_history` has the rates of the
    last hours, oldest first, as far as the source knows them. `open_interest` is the notional of all open positions in
    the market, None if the source does not report it. `book_imbalance` is that of the best levels of the order book,
    from -1 (only asks) to 1 (only bids). `supplementary` is None unless a supplier of indicators is configured and has
    answered recently.
    """

    symbol: str
    quoted_at: datetime
    stale: bool
    price: Decimal
    bid: Decimal
    ask: Decimal
    spread: Decimal
    change_24h_percent: float | None = msgspec.field(default=None, name="change24hPercent")
    change_since_look_percent: float | None = None
    book_imbalance: float | None = None
    funding_rate: Decimal
    funding_history: tuple[Decimal, ...] = ()
    open_interest: Decimal | None = None
    tick: Decimal
    lot: Decimal
    min_notional: Decimal
    leverage_max: int
    candles: Mapping[Interval, tuple[Candle, ...]] = {}
    indicators: Mapping[Interval, Indicators] = {}
    indicator_history: Mapping[Interval, tuple[Indicators, ...]] = {}
    last_action: LastAction | None = None
    supplementary: Supplementary | None = None

    def opens(self, interval: Interval) -> Column:
        """Return the opens of the shown candles of an interval, ascending."""
        return self._column(interval, 1)

    def highs(self, interval: Interval) -> Column:
        """Return the highs of the shown candles of an interval, ascending."""
        return self._column(interval, 2)

    def lows(self, interval: Interval) -> Column:
        """Return the lows of the shown candles of an interval, ascending."""
        return self._column(interval, 3)

    def closes(self, interval: Interval) -> Column:
        """Return the closes of the shown candles of an interval, ascending."""
        return self._column(interval, 4)

    def volumes(self, interval: Interval) -> Column:
        """Return the volumes of the shown candles of an interval, ascending."""
        return self._column(interval, 5)

    def _column(self, interval: Interval, place: int) -> Column:
        candles = self.candles[interval]
        if isinstance(candles, RecordedCandles) and candles.columns is not None:
            row: Column = candles.columns[place - 1]
            return row
        column = np.fromiter(map(itemgetter(place), candles), np.float64, len(candles))
        column.flags.writeable = False  # as in a backtest, where strategies are written
        return column

    @classmethod
    def of(
        cls,
        market: Market,
        quote: Quote,
        now: datetime,
        *,
        opened_a_day_ago: float | None,
        opened_at_look: float | None = None,
        book_imbalance: float | None = None,
        funding_rate: Decimal,
        funding_history: tuple[Decimal, ...] = (),
        open_interest: Decimal | None,
        candles: Mapping[Interval, tuple[Candle, ...]],
        indicators: Mapping[Interval, Indicators],
        indicator_history: Mapping[Interval, tuple[Indicators, ...]],
        supplementary: Supplementary | None,
    ) -> "ObservedMarket":
        """Return a market as of a quote, before anybody's last action in it.

        `opened_a_day_ago` is the price 24 hours before the last full hour, and `opened_at_look` that of the minute in
        which the agent last looked; None: unknown.
        """
        return cls(
            symbol=market.symbol,
            quoted_at=quote.at,
            stale=quote.is_stale(now),
            price=quote.mark,
            bid=quote.bid,
            ask=quote.ask,
            spread=quote.ask - quote.bid,
            change_24h_percent=change_percent(quote.mark, opened_a_day_ago),
            change_since_look_percent=change_percent(quote.mark, opened_at_look),
            book_imbalance=book_imbalance,
            funding_rate=funding_rate,
            funding_history=funding_history,
            open_interest=open_interest,
            tick=market.tick_at(quote.mark),
            lot=market.lot,
            min_notional=market.min_notional,
            leverage_max=market.leverage_max,
            candles=candles,
            indicators=indicators,
            indicator_history=indicator_history,
            supplementary=supplementary,
        )


class View(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Everything on which an agent bases its decisions, at one moment.

    `trades` are newest first, `positions`, `orders` and `fills` oldest first; only strategies with `on_fill` see
    `fills`. The agent is asked once per `cadence`. `restriction` says why it may only reduce positions now; None if
    there is no restriction. `data` has the latest value of each own column of a backtest.
    """

    at: datetime
    account: ObservedAccount
    positions: tuple[ObservedPosition, ...]
    trades: tuple[ObservedTrade, ...]
    stats: ObservedStats
    markets: Mapping[str, ObservedMarket]
    orders: tuple[ObservedOrder, ...] = ()
    fills: tuple[ObservedFill, ...] = ()
    memory: Memory = Memory()
    cadence: timedelta = timedelta(minutes=1)
    restriction: str | None = None
    data: Mapping[str, float | str] = {}

    def position(self, symbol: str) -> ObservedPosition | None:
        """Return the position in a market, if there is one."""
        return next((held for held in self.positions if held.symbol == symbol), None)
