"""Observation of an account: its agent's view and the guard's context, from the account, its history and the marks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import lru_cache, reduce
from itertools import takewhile
from operator import attrgetter
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from trader.agents.domain.guard import LastTrade, RiskContext
from trader.agents.domain.view import (
    LastAction,
    Memory,
    ObservedAccount,
    ObservedFill,
    ObservedMarket,
    ObservedOrder,
    ObservedPosition,
    ObservedStats,
    ObservedTrade,
    View,
)
from trader.core.clock import floor_time
from trader.core.money import ZERO, divide
from trader.core.statistics import EquityPoint, sharpe_ratio
from trader.exchange.domain.account import Account, Marks, Trade, equity, exposure, liquidation_price, reserved
from trader.exchange.domain.ledger import ExchangeRules
from trader.exchange.domain.orders import Fill, Side
from trader.market.domain.markets import Candle, Market

FUNDING_HOURS_SHOWN: Final = 8
"""Number of past hours whose funding rates an agent sees."""

_HOUR: Final = timedelta(hours=1)
_MINUTE: Final = timedelta(minutes=1)

_sharpe_ratio = lru_cache(maxsize=64)(sharpe_ratio)  # closes change once a day, and views show it all day


def observe_account(context: RiskContext, recorded_peak: Decimal | None, taker_rate: Decimal) -> ObservedAccount:
    """Return the context's account as its agent sees it. `recorded_peak` is the highest equity recorded so far."""
    account, marks = context.account, context.marks
    worth = equity(account, marks)
    peak = max(worth, account.run.initial_capital)
    if recorded_peak is not None:
        peak = max(peak, recorded_peak)
    lowest = worth if context.day_lowest_equity is None else min(worth, context.day_lowest_equity)
    return ObservedAccount(
        initial_capital=account.run.initial_capital,
        equity=worth,
        cash=account.cash,
        available_cash=max(ZERO, worth - account.margin - reserved(account)),
        margin=account.margin,
        exposure=exposure(account, marks),
        day_opening_equity=context.day_opening_equity,
        peak_equity=peak,
        drawdown_percent=_fall_percent(peak, worth),
        day_loss_percent=_fall_percent(context.day_opening_equity, lowest),
        taker_fee_rate=taker_rate,
    )


def observe_positions(account: Account, marks: Marks, markets: Mapping[str, Market]) -> tuple[ObservedPosition, ...]:
    """Return the open positions, oldest first."""
    shown = []
    for position in sorted(account.positions.values(), key=lambda held: (held.opened_at, held.symbol)):
        mark = marks[position.symbol]
        own: dict[str, Any] = {
            "mark": mark,
            "notional": position.notional(mark),
            "unrealized": position.unrealized(mark),
            "liquidation_price": liquidation_price(account, position.symbol, marks, markets),
        }
        same = {name: getattr(position, name) for name in ObservedPosition.__struct_fields__ if name not in own}
        shown.append(ObservedPosition(**same, **own))
    return tuple(shown)


def observe_orders(account: Account) -> tuple[ObservedOrder, ...]:
    """Return the resting orders, oldest first."""
    return tuple(
        msgspec.convert(order, ObservedOrder, from_attributes=True)
        for order in sorted(account.resting, key=lambda order: (order.created_at, order.id))
    )


def observe_trade(trade: Trade) -> ObservedTrade:
    """Return a completed trade as its agent sees it."""
    return msgspec.convert(trade, ObservedTrade, from_attributes=True)


def latest_first(trades: Iterable[ObservedTrade]) -> tuple[ObservedTrade, ...]:
    """Return trades, the last closed first.

    Trades that closed at the same moment are sorted by what the agent sees of them, since services and backtests
    receive them in different orders.
    """
    of_one_moment = attrgetter("symbol", "opened_at", "quantity", "net_pnl")
    return tuple(sorted(sorted(trades, key=of_one_moment), key=attrgetter("closed_at"), reverse=True))


def observe_fill(fill: Fill) -> ObservedFill:
    """Return a fill as its agent sees it."""
    return ObservedFill(
        sequence=fill.sequence,
        at=fill.at,
        symbol=fill.symbol,
        side=fill.side,
        quantity=fill.quantity,
        price=fill.price,
        fee=fill.fee + fill.liquidation_fee,
        maker=fill.maker,
        cause=fill.cause,
        order_id=fill.request_id,
    )


class LastFill(NamedTuple):
    """The last fill in a market, whatever its cause: the side of the position, and whether the fill reduced it."""

    side: Side
    closed: bool
    at: datetime


class TradingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's own trading record in a run. `trades` are the latest, newest first.

    `won` and `lost` are sums of net pnl, both positive. `last_fills` has the last fill in each market, including exits
    by the exchange; a market not traded in the run is absent.
    """

    trades: tuple[ObservedTrade, ...] = ()
    trade_count: int = 0
    wins: int = 0
    losses: int = 0
    won: Decimal = ZERO
    lost: Decimal = ZERO
    last_fills: Mapping[str, LastFill] = {}

    @property
    def stats(self) -> ObservedStats:
        """The statistics that the agent sees, without the ratios that need the equity curve."""
        count, wins, losses, won, lost = self.trade_count, self.wins, self.losses, self.won, self.lost
        if not count:
            return ObservedStats()
        return ObservedStats(
            trade_count=count,
            win_rate_percent=100 * wins / count,
            average_win=divide(won, Decimal(wins)) if wins else None,
            average_loss=divide(lost, Decimal(losses)) if losses else None,
            expectancy=divide(won - lost, Decimal(count)),
            net_pnl=won - lost,
        )


class RiskFigures(msgspec.Struct, frozen=True):
    """The largest drawdown and the daily closes of a run after successive hours, of which `last` is the latest."""

    peak: float
    closes: tuple[float, ...]
    fall: float = 0.0
    last: EquityPoint | None = None

    @classmethod
    def of(cls, capital: Decimal, hours: Iterable[EquityPoint] = ()) -> "RiskFigures":
        """Return the figures of a run with this initial capital after its hours, ascending."""
        return reduce(cls.after, hours, cls(max(0.0, float(capital)), (float(capital),)))

    def after(self, hour: EquityPoint) -> "RiskFigures":
        """Return the figures after the next hour; a midnight since the last one closes its day."""
        days = 0 if self.last is None else hour.hour.toordinal() - self.last.hour.toordinal()
        closes = self.closes if self.last is None or not days else (*self.closes, *[self.last.value] * days)
        equity = max(0.0, hour.value)
        peak = max(self.peak, equity)
        return RiskFigures(peak, closes, max(self.fall, (peak - equity) / peak if peak else 0.0), hour)

    def beside(self, stats: ObservedStats) -> ObservedStats:
        """Return statistics with the Sharpe ratio and the largest drawdown."""
        drawdown = None if self.last is None else 100 * self.fall
        return msgspec.structs.replace(stats, sharpe_ratio=_sharpe_ratio(self.closes), max_drawdown_percent=drawdown)


def _fall_percent(start: Decimal, end: Decimal) -> Decimal:
    return max(ZERO, divide(100 * (start - max(ZERO, end)), start)) if start > 0 else ZERO


def opened_a_day_ago(session: Sequence[Candle], now: datetime) -> float | None:
    """Return the price 24 hours before the last full hour; None if it is unknown.

    `session` has the last closed candles of a short interval.
    """
    return opened_at(session, floor_time(now, _HOUR) - 24 * _HOUR)


def opened_at(candles: Iterable[Candle], since: datetime) -> float | None:
    """Return the price at which the minute of `since` opened; None if no candle opened then."""
    minute = floor_time(since, _MINUTE)
    return next((candle.open for candle in candles if candle.open_time == minute), None)


def known_funding(rate_of: Callable[[datetime], Decimal | None], now: datetime) -> tuple[Decimal, ...]:
    """Return the known funding rates of the last full hours, oldest first, without a gap up to the latest known one."""
    hour = floor_time(now, _HOUR)
    rates = [rate_of(hour - number * _HOUR) for number in range(FUNDING_HOURS_SHOWN)]
    if rates[0] is None:  # a venue publishes the rate of an hour a moment after it
        del rates[0]
    return tuple(rate for rate in takewhile(lambda rate: rate is not None, rates) if rate is not None)[::-1]


class RunHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a run up to one booking and hour, as known to its agent.

    `peak` is its highest hourly equity, and `day_opening` the last one before the current day; None if there is none.
    The hours themselves are not kept: a season's hours would dominate the memory of the service.
    """

    run_id: UUID
    sequence: int
    hour: datetime
    trades: tuple[ObservedTrade, ...]
    stats: ObservedStats
    actions: Mapping[str, LastFill]
    peak: Decimal | None
    day_opening: Decimal | None

    def risk_context(
        self,
        account: Account,
        day_lowest_equity: Decimal | None,
        now: datetime,
        *,
        marks: Marks,
        quoted_at: Mapping[str, datetime],
        leverage_max: Mapping[str, int],
        viewed_at: datetime | None = None,
    ) -> RiskContext:
        """Return the guard's risk context of the account at these marks."""
        return RiskContext(
            now=now,
            account=account,
            marks=marks,
            quoted_at=quoted_at,
            leverage_max=leverage_max,
            day_opening_equity=account.run.initial_capital if self.day_opening is None else self.day_opening,
            day_lowest_equity=day_lowest_equity,
            last_trades={symbol: LastTrade(action.side, action.at) for symbol, action in self.actions.items()},
            viewed_at=viewed_at,
        )

    def view(
        self,
        context: RiskContext,
        markets: Mapping[str, ObservedMarket],
        rules: ExchangeRules,
        *,
        stats: ObservedStats,
        memory: Memory,
        cadence: timedelta,
        restriction: str | None,
        fills: tuple[ObservedFill, ...] = (),
        data: Mapping[str, float | str] = {},  # never changed here
    ) -> View:
        """Return the view of the context's account in these markets. Services and backtests assemble views only here,
        and every field has its value from here or from `ObservedMarket.of`, so no view lacks a field of the other."""
        return View(
            at=context.now,
            account=observe_account(context, self.peak, rules.taker_rate),
            positions=observe_positions(context.account, context.marks, rules.markets),
            trades=self.trades,
            stats=stats,
            markets={symbol: self._with_last_action(market, context) for symbol, market in markets.items()},
            orders=observe_orders(context.account),
            fills=fills,
            memory=memory,
            cadence=cadence,
            restriction=restriction,
            data=data,
        )

    def _with_last_action(self, market: ObservedMarket, context: RiskContext) -> ObservedMarket:
        fill, cycles = self.actions.get(market.symbol), context.cycles_ago(market.symbol)
        if fill is None or cycles is None:
            return market
        action = LastAction(
            action="closePosition" if fill.closed else "createPosition",
            side=context.last_trades[market.symbol].side,
            cycles_ago=cycles,
        )
        return msgspec.structs.replace(market, last_action=action)
