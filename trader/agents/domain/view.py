"""The view: the markets and the account as an AI model or rule agent sees them at the start of an invocation.

Amounts, prices and quantities are Decimals with all digits of the books; indicators and ratios are floats. Absent
values are None: an indicator without enough history, a ratio without a value. A market without a quote is not in
`markets`. Models see the field names in this order.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Final, Literal

import msgspec

from trader.exchange.domain.orders import ExitPlan, OrderSide, Side
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import Candle, Interval, Market, Quote

SERIES_SHOWN: Final = 3
"""Number of last closed candles for which an AI model sees the indicators that its prompt names."""


class VariantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that the guard enforces on a variant, regardless of its agent's decisions.

    `leverage_max` is the highest leverage of a position, and of all positions together (Σ notional / equity).
    `position_notional_max` is the highest notional of one position as a multiple of equity. After a loss of
    `day_loss_max_percent` of the day's opening equity, only reducing is allowed until 00:00 UTC. A position may not be
    reversed within `reversal_cycles` cycles of the last trade in its market. A decision made more than
    `decision_age_max_s` seconds after its view is refused, since the market has moved on.
    """

    leverage_max: int
    position_notional_max: int = 5
    day_loss_max_percent: int = 10
    reversal_cycles: int = 3
    decision_age_max_s: int = 120


class ObservedAccount(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The account at the marks of the view. `exposure` is Σ quantity × mark of all positions.

    `day_opening_equity` is the equity at 00:00 UTC (or at the start of the run, if that is later), `peak_equity` the
    highest of the run. `drawdown_percent` is the fall from that peak, and `day_loss_percent` the day's deepest fall
    from its opening equity, by which the day-loss rule judges; both are 0 if equity has not fallen.
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

    symbol: str
    side: OrderSide
    quantity: Decimal
    remaining: Decimal
    limit_price: Decimal
    reduce_only: bool
    created_at: datetime


class PastDecision(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One line about a decision from one of the agent's last cycles; `at` is the time of the cycle."""

    at: datetime
    text: str


class Memory(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An agent's own past: its note, its last decisions, newest first, and why calls of the last cycle failed."""

    note: str | None = None
    decisions: tuple[PastDecision, ...] = ()
    refused: tuple[str, ...] = ()


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
    decision interval. `change_24h_percent` compares the price with the price 24 hours before the last full hour.
    `leverage_max` is the market's own, `funding_rate` the hourly one (longs pay a positive rate). `open_interest` is
    the notional of all open positions in the market, None if the source does not report it. `supplementary` is None
    unless a supplier of indicators is configured and has answered recently.
    """

    symbol: str
    quoted_at: datetime
    stale: bool
    price: Decimal
    bid: Decimal
    ask: Decimal
    spread: Decimal
    change_24h_percent: float | None = msgspec.field(default=None, name="change24hPercent")
    funding_rate: Decimal
    open_interest: Decimal | None = None
    tick: Decimal
    lot: Decimal
    min_notional: Decimal
    leverage_max: int
    candles: Mapping[Interval, tuple[Candle, ...]] = {}
    indicators: Mapping[Interval, Indicators] = {}
    indicator_history: Mapping[Interval, Sequence[Indicators]] = {}
    last_action: LastAction | None = None
    supplementary: Supplementary | None = None

    @classmethod
    def of(cls, market: Market, quote: Quote, now: datetime, funding_rate: Decimal) -> "ObservedMarket":
        """Return a market with only its rules and prices."""
        return cls(
            symbol=market.symbol,
            quoted_at=quote.at,
            stale=quote.is_stale(now),
            price=quote.mark,
            bid=quote.bid,
            ask=quote.ask,
            spread=quote.ask - quote.bid,
            funding_rate=funding_rate,
            tick=market.tick,
            lot=market.lot,
            min_notional=market.min_notional,
            leverage_max=market.leverage_max,
        )


class View(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Everything on which an agent bases its decisions, at one moment.

    `trades` are newest first, `positions` and `orders` oldest first. The agent is asked every
    `every_minutes`. `restriction` says why it may only reduce positions now; None if there is no restriction.
    """

    at: datetime
    account: ObservedAccount
    positions: tuple[ObservedPosition, ...]
    trades: tuple[ObservedTrade, ...]
    stats: ObservedStats
    markets: Mapping[str, ObservedMarket]
    orders: tuple[ObservedOrder, ...] = ()
    memory: Memory = Memory()
    every_minutes: int = 1
    restriction: str | None = None

    def position(self, symbol: str) -> ObservedPosition | None:
        """Return the position in a market, if there is one."""
        return next((held for held in self.positions if held.symbol == symbol), None)
