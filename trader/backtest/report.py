"""Report of a backtest: the season report with the figures and months of each account, and its trades on candles."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np

from trader.api.schemas.model_stats import figure
from trader.backtest.accounts import ModelAccount
from trader.backtest.result import listing_lines, listings_value
from trader.backtest.run import Backtest
from trader.backtest.spec import BacktestSource
from trader.exchange.domain.account import Trade
from trader.market.domain.markets import INTERVALS, Interval
from trader.portfolio.domain.baselines import BUY_AND_HOLD, HOLD_NOTHING
from trader.portfolio.domain.behaviour import covered
from trader.portfolio.domain.histories import HourlyValue
from trader.portfolio.evidence import EvidenceReport
from trader.portfolio.run_statistics import RunStatistics
from trader.portfolio.tables import Table
from trader.seasons.page import page
from trader.seasons.standings import RankedModel, SeasonReport, percent_curve

CANDLES_MAX: Final = 4000
"""The most candles of a market in a report: 15 minutes for a month, an hour for half a year."""

TRADES_MAX: Final = 2000
"""The most trades of a market in a report; earlier ones are only in the tables."""


async def make_page(
    run: Backtest,
    source: BacktestSource,
    name: str,
    standings: Sequence[RankedModel],
    runs: Mapping[str, RunStatistics],
    references: Mapping[str, RunStatistics],
    evidence: EvidenceReport,
    value: Mapping[str, Any],
) -> str:
    """Return the page of a backtest, whose result is `value`. `references` are the statistics of the baselines."""
    by_id = {each.account.id: each for each in run.accounts}
    ranked = [(standing, by_id[standing.account.model_id]) for standing in standings]
    baselines = {each.baseline: references[each.baseline.id] for each in run.baselines if each.hours}
    held = {baseline.name: each for baseline, each in baselines.items() if baseline == BUY_AND_HOLD}
    figures = [
        {"name": standing.account.name, **_of_equity(standing.run), **_of_trades(standing.run, run.reached)}
        | {
            "fees": -(standing.account.fees + standing.account.liquidation_fees),
            "refused": sum(count for _, count, _ in followed.refusals()),
        }
        for standing, followed in ranked
    ] + [{"name": each.name} | _of_equity(of) for each, of in baselines.items() if each != HOLD_NOTHING]
    content = SeasonReport(
        name,
        standings,
        {model_id: followed.model for model_id, followed in by_id.items()},
        runs,
        evidence,
        references={name: percent_curve(each) for name, each in held.items()},
        backtest={
            "conditions": {name: value[name] for name in _CONDITIONS},
            "figures": figures,
            **_months([*((standing.account.name, standing.run) for standing in standings), *held.items()]),
            "listings": list(listing_lines(listings_value(run.market.markets))),
            "markets": [await _market(run, source, symbol, ranked) for symbol in run.market.markets],
        },
    )
    return page(content)


_CONDITIONS: Final = (
    "seed", "preset", "capital", "takerFeeBps", "makerFeeBps", "latencyMs", "cadence", "strategy", "capacity",
    "files", "ledgerSha256",
)  # fmt: skip

_Ranked = Sequence[tuple[RankedModel, ModelAccount]]


def _of_equity(statistics: RunStatistics) -> dict[str, Any]:
    figures, capital = statistics.equity_figures, float(statistics.run.initial_capital)
    end = statistics.values[-1] if statistics.values else capital
    ratios = {"sharpe": figures.sharpe, "sortino": figures.sortino, "calmar": figures.calmar}
    return {
        "returnPercent": 100 * (end / capital - 1),
        "drawdown": 0.0 if figures.drawdown is None else figures.drawdown.percent,
        **{name: figure(ratio) for name, ratio in ratios.items()},
    }


def _of_trades(statistics: RunStatistics, reached: datetime) -> dict[str, Any]:
    figures = statistics.trade_figures
    spans = [(trade.opened_at, trade.closed_at) for trade in statistics.trades]
    spans += [(opened_at, reached) for _, opened_at in statistics.open]
    whole = reached - statistics.run.started_at
    return {
        "inMarket": 100 * (covered(spans) / whole) if whole else None,
        "trades": figures.trades,
        "won": figures.win_rate,
        "profitFactor": figure(figures.profit_factor),
        "meanTrade": figures.expectancy,
    }


def _months(named: Sequence[tuple[str, RunStatistics]]) -> dict[str, Any]:
    found = [(name, monthly_returns(each.hours, float(each.run.initial_capital))) for name, each in named]
    return {
        "months": [f"{month:%b %Y}" for month in sorted({month for _, returns in found for month in returns})],
        "monthly": [
            {"name": name} | {f"{month:%b %Y}": gain for month, gain in returns.items()} for name, returns in found
        ],
    }


def monthly_returns(hours: Sequence[HourlyValue], capital: float) -> dict[datetime, float]:
    """Return the gain of each calendar month with a value, in percent, keyed by its start; none after ruin.

    A value at the very start of a month closes the month before it.
    """
    ends: dict[datetime, float] = {}
    for value in hours:
        within = value.last_at - datetime.resolution
        ends[within.replace(day=1, hour=0, minute=0, second=0, microsecond=0)] = float(value.last)
    returns: dict[datetime, float] = {}
    for month, end in ends.items():
        if capital > 0:
            returns[month] = 100 * (end / capital - 1)
        capital = end
    return returns


async def _market(run: Backtest, source: BacktestSource, symbol: str, ranked: _Ranked) -> dict[str, Any]:
    """Return the candles of a market, of the finest interval that fits, and the trades in it, in order of opening."""
    start, end = run.starts_at, run.reached
    interval: Interval = next((each for each, step in INTERVALS.items() if (end - start) / step <= CANDLES_MAX), "4h")
    candles = await source.candles(symbol, interval, start, end)
    trades = [(each, trade) for each in ranked for trade in each[1].trades if trade.symbol == symbol]
    trades.sort(key=lambda item: item[1].opened_at)
    times = [int(candle.open_time.timestamp()) for candle in candles]
    return {
        "symbol": symbol,
        "interval": interval,
        "times": times,
        **{name: [getattr(candle, name) for candle in candles] for name in ("open", "high", "low", "close", "volume")},
        "trades": [_trade(*each, trade) for each, trade in trades[-TRADES_MAX:]],
        "omitted": max(0, len(trades) - TRADES_MAX),
        "series": lines_of(run.series, symbol, times),
    }


def lines_of(series: Table, symbol: str, times: Sequence[int]) -> list[dict[str, Any]]:
    """Return the series of a market with their last value in each candle that begins at one of these Unix times.

    A candle without a value has None.
    """
    if not times:
        return []
    at = series["at"].astype("datetime64[s]").astype(np.int64)
    places = np.searchsorted(times, at, side="right") - 1
    lines: dict[tuple[str, bool], list[float | None]] = {}
    rows = zip(
        places.tolist(), *(series[column].tolist() for column in ("symbol", "name", "value", "panel")), strict=True
    )
    for place, market, name, value, panel in rows:
        if market == symbol and place >= 0:
            lines.setdefault((name, panel), [None] * len(times))[place] = float(f"{value:.8g}")
    return [{"name": name, "panel": panel, "values": values} for (name, panel), values in lines.items()]


def _trade(standing: RankedModel, followed: ModelAccount, trade: Trade) -> dict[str, Any]:
    """Return a trade with the fields of one in `trading.getTrades` that a chart reads, and its tags."""
    entry_tag, exit_tag = followed.tags_of(trade)
    return {
        "entryTag": entry_tag,
        "exitTag": exit_tag,
        "id": trade.id,
        "modelId": standing.account.model_id,
        "modelName": standing.account.name,
        "modelVariant": standing.account.variant,
        "side": "LONG" if trade.is_long else "SHORT",
        "openedAt": trade.opened_at,
        "closedAt": trade.closed_at,
        "entryPrice": trade.entry_price,
        "exitPrice": trade.exit_price,
        "closeReason": trade.close_reason,
        "netPnl": float(trade.net_pnl),
    }
