"""The result of a backtest: its figures as in `result.json`, and the evidence for its entrants."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from trader.agents.domain.entrants import EntrantRecord
from trader.agents.domain.models import contamination
from trader.agents.entrants import first_entrant
from trader.agents.providers.cassette import Cassette
from trader.agents.strategy_files import LoadedStrategy
from trader.backtest.accounts import ModelAccount
from trader.backtest.baselines import BaselineAccount
from trader.backtest.chosen import MASKED, Chosen
from trader.backtest.run import Backtest
from trader.backtest.sources import AiSource, RecordingStrategySource
from trader.core.clock import floor_time, iso
from trader.exchange.domain.account import equity, unrealized
from trader.exchange.sql.trades import RunTrade
from trader.market.domain.markets import Market, SimulatedMarket
from trader.portfolio.domain.histories import RunWindow
from trader.portfolio.leaderboard import LeaderboardEntry, RankedEntrant, SortKey, make_board, make_entries
from trader.portfolio.run_statistics import RunStatistics
from trader.portfolio.sql.analytics import CurrentRun, InvocationTotals, RunEntrant
from trader.seasons.sql.report import AccountReport
from trader.seasons.standings import RankedModel, make_standings
from trader.settings.settings import Settings


def account_value(standing: RankedModel, followed: ModelAccount, starts_at: datetime) -> dict[str, Any]:
    """Return the figures of an account; its drawdown is of the last equity of each hour. Code has no contamination."""
    model, cutoff = followed.model, followed.model.configuration.training_cutoff
    refused = [{"rule": rule, "count": count, "reason": reason} for rule, count, reason in followed.refusals()]
    return {
        "id": standing.account.model_id,
        "variant": standing.account.variant,
        "provider": model.provider,
        "model": model.router_model_name,
        "trainingCutoff": None if cutoff is None else cutoff.isoformat(),
        "contamination": contamination(cutoff, starts_at) if model.is_ai else None,
        "equity": standing.account.equity,
        "returnPercent": standing.return_percent,
        "maxDrawdownPercent": standing.drawdown,
        "maxLeverage": max((each.leverage or 0.0 for each in followed.hours), default=0.0),
        "trades": standing.account.trades,
        "tradesWithinMinute": standing.account.within_minute,
        "decisions": standing.account.invocations,
        "refused": refused,
        "ended": dict(followed.ends),
        "gross": standing.account.gross,
        "fees": standing.account.fees + standing.account.liquidation_fees,
        "funding": standing.account.funding,
        "modelCostUsd": standing.account.model_cost,
    }


def strategy_value(chosen: Chosen) -> dict[str, Any] | None:
    """Return the file, class, parameters and digest of the strategy; None without one."""
    for model, source in chosen.models:
        if isinstance(source, RecordingStrategySource) and isinstance(source.strategy, LoadedStrategy):
            strategy = source.strategy
            named = {"file": str(strategy.file), "class": strategy.class_name}
            return named | {"params": dict(model.configuration.params), "sha256": strategy.digest}
    return None


def baselines_value(run: Backtest, statistics: Mapping[str, RunStatistics]) -> list[dict[str, Any]]:
    """Return equity, return and maximal drawdown of each baseline account."""
    values, marks = [], run.marks()
    for followed in run.baselines:
        capital, worth = followed.account.run.initial_capital, equity(followed.account, marks)
        fall = statistics[followed.baseline.id].equity_figures.drawdown
        values.append(
            {
                "id": followed.baseline.id,
                "name": followed.baseline.name,
                "equity": worth,
                "returnPercent": float(100 * (worth - capital) / capital),
                "maxDrawdownPercent": 0.0 if fall is None else fall.percent,
            }
        )
    return values


def capacity_value(rows: Mapping[str, SimulatedMarket], run: Backtest) -> dict[str, Any]:
    """Return each simulated market's depth in a calm book and its largest execution, both in quote currency.

    `surchargeBps` is what a round trip pays in wider spreads for what drawn paths give away, in basis points.
    """
    largest = run.largest_executions()
    return {
        symbol: {
            "calmDepth": row.calm.depth,
            "largestExecution": largest[symbol],
            "surchargeBps": 2 * row.calm.surcharge_bp,
        }
        for symbol, row in rows.items()
    }


def masked_value(hidden: Collection[str] | None, accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the hidden parts and, per model, its figures in the masked market minus those in the real one."""
    if not hidden:
        return None
    by_id = {account["id"]: account for account in accounts}
    pairs = [(by_id[account_id], by_id.get(f"{account_id}{MASKED}")) for account_id in by_id]
    return {
        "hidden": sorted(hidden),
        "maskedMinusPlain": [
            {"id": plain["id"], **{name: masked[name] - plain[name] for name in ("equity", "returnPercent", "trades")}}
            for plain, masked in pairs
            if masked is not None
        ],
    }


def labelled(standings: Sequence[RankedModel], run: Backtest) -> list[RankedModel]:
    """Return the standings with each AI model's name followed by its contamination label."""
    models = {followed.model.id: followed.model for followed in run.accounts}
    labeled = []
    for standing in standings:
        account, model = standing.account, models[standing.account.model_id]
        if model.is_ai:
            label = contamination_text(contamination(model.configuration.training_cutoff, run.starts_at))
            account = msgspec.structs.replace(account, name=f"{account.name} ({label})")
        labeled.append(standing._replace(account=account))
    return labeled


def answers_value(chosen: Chosen, cassette: Cassette) -> dict[str, Any]:
    """Return the location of the answers, the number of requests, and their cost."""
    return {
        "cassette": str(cassette.folder.absolute()),
        "asked": chosen.spending.asked,
        "costUsd": chosen.spending.spent_usd,
        "budgetUsd": chosen.spending.budget_usd,
    }


def listings_value(markets: Mapping[str, Market]) -> dict[str, dict[str, str | None]]:
    """Return when the markets begin and end that do so within the run."""
    return {
        symbol: {
            "beginsAt": None if market.begins_at is None else iso(market.begins_at),
            "endsAt": None if market.ends_at is None else iso(market.ends_at),
        }
        for symbol, market in markets.items()
        if market.begins_at is not None or market.ends_at is not None
    }


def listing_lines(listings: Mapping[str, Mapping[str, str | None]]) -> Iterator[str]:
    """Yield a sentence for each market that begins or ends within the run."""
    for symbol, listing in listings.items():
        if listing["beginsAt"] is not None:
            yield f"{symbol} begins at {listing['beginsAt']}, within the run."
        if listing["endsAt"] is not None:
            yield f"{symbol} ends at {listing['endsAt']}, within the run; positions in it were closed at its last mark."


def contamination_text(label: str) -> str:
    """Return the words for a model's contamination label."""
    return "training cutoff unknown" if label == "unknown" else label


def rank(run: Backtest, runs: Mapping[str, RunStatistics]) -> list[RankedModel]:
    """Return the accounts by rank at the time reached, valued at the current marks."""
    marks = run.marks()
    accounts = [
        AccountReport.of(
            each.model,
            runs[each.model.id],
            (run.reached, equity(each.account, marks)),
            unrealized=unrealized(each.account, marks),
            gross=each.account.realized,
            fees=each.fees,
            liquidation_fees=each.liquidation_fees,
            funding=each.account.funding,
            insurance=each.account.insurance,
        )
        for each in run.accounts
    ]
    return make_standings(accounts, runs)


def board(run: Backtest, settings: Settings, window: RunWindow, sort_by: SortKey) -> list[LeaderboardEntry]:
    """Return the board of the entrants as of the last whole hour, by the rules of a service without a season.

    Until then every account is the same for every agent, whoever of those who decide at the same time answers first.
    The costs of the models are absent.
    """
    now = floor_time(run.reached, timedelta(hours=1))
    runs = [(followed.model, statistics_of(run, followed, settings, now)) for followed in run.accounts]
    entrants = [RankedEntrant(model, statistics, statistics.worth_at(now)) for model, statistics in runs]
    return make_board(make_entries(entrants, window, now), window, sort_by, now, len(entrants))


def statistics_of(
    run: Backtest, followed: ModelAccount, settings: Settings, until: datetime | None = None
) -> RunStatistics:
    """Return the run statistics of a model's account, without what was `until` a time or later."""
    model, source, account_run = followed.model, followed.source, followed.account.run
    answered_by = (
        source.answered_by if isinstance(source, AiSource | RecordingStrategySource) else model.router_model_name
    )
    entrant = first_entrant(model, settings, answered_by, run.starts_at)
    due = followed.decisions + followed.missed
    record = EntrantRecord(entrant.number, entrant.fingerprint, entrant.began_at, followed.decisions, due)
    cost_usd = source.cost_usd if isinstance(source, AiSource) else None
    totals = InvocationTotals(finished=followed.decisions, cost_usd=cost_usd)
    current = CurrentRun(
        model.id, account_run.id, account_run.initial_capital, account_run.started_at, totals, record, until=until
    )
    statistics = RunStatistics(current)
    statistics.set_entrants([RunEntrant(model.id, record, None, None, totals)])
    statistics.set_hours(followed.hours)
    trades = [RunTrade.of(trade) for trade in followed.trades]
    statistics.add_trades(sorted(trades, key=lambda trade: (trade.closed_at, trade.id)))
    statistics.open = [(held.entry_notional, held.opened_at) for held in followed.account.positions.values()]
    return statistics


def statistics_of_baseline(followed: BaselineAccount) -> RunStatistics:
    account, run = followed.account, followed.account.run
    statistics = RunStatistics(CurrentRun(account.id, run.id, run.initial_capital, run.started_at))
    statistics.set_hours(followed.hours)
    return statistics
