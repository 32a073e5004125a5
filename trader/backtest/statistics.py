"""Statistics of a backtest: its runs as a service would read them from its rows, and the evidence for its entrants."""

from datetime import datetime, timedelta

from trader.agents.domain.entrants import EntrantRecord
from trader.agents.entrants import first_entrant
from trader.backtest.accounts import ModelAccount
from trader.backtest.baselines import BaselineAccount
from trader.backtest.run import Backtest
from trader.backtest.sources import AiSource, RecordingStrategySource
from trader.core.clock import floor_time
from trader.exchange.sql.trades import RunTrade
from trader.portfolio.domain.histories import RunWindow
from trader.portfolio.evidence import EvidenceReport, last_whole_hour, make_report
from trader.portfolio.leaderboard import LeaderboardEntry, RankedEntrant, SortKey, make_board, make_entries
from trader.portfolio.run_statistics import RunStatistics
from trader.portfolio.sql.analytics import CurrentRun, InvocationTotals, RunEntrant
from trader.settings.settings import Settings


async def judge(run: Backtest, settings: Settings, reached: datetime) -> EvidenceReport:
    """Return the evidence for all entrants up to the time reached, as a service would show it."""
    models = {followed.model.id: followed.model for followed in run.accounts}
    runs = {followed.model.id: statistics_of(run, followed, settings) for followed in run.accounts}
    baselines = {followed.baseline.id: statistics_of_baseline(followed) for followed in run.baselines}
    return await make_report(models, runs, baselines, last_whole_hour(reached))


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
    totals = InvocationTotals(finished=followed.decisions)
    current = CurrentRun(
        model.id, account_run.id, account_run.initial_capital, account_run.started_at, totals, record, until=until
    )
    statistics = RunStatistics(current)
    statistics.set_entrants([RunEntrant(model.id, record, None, None, totals)])
    statistics.set_hours(followed.hours)
    trades = [RunTrade.of(trade) for trade in run.trades(followed)]
    statistics.add_trades(sorted(trades, key=lambda trade: (trade.closed_at, trade.id)))
    statistics.open = [(held.entry_notional, held.opened_at) for held in followed.account.positions.values()]
    return statistics


def statistics_of_baseline(followed: BaselineAccount) -> RunStatistics:
    account, run = followed.account, followed.account.run
    statistics = RunStatistics(CurrentRun(account.id, run.id, run.initial_capital, run.started_at))
    statistics.set_hours(followed.hours)
    return statistics
