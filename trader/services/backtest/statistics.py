"""Statistics of a backtest: its runs as a service would read them from their rows, and the evidence of its entrants."""

from collections.abc import Sequence
from datetime import datetime

from trader.clock import LockstepClock
from trader.domain.agents.entrants import EntrantRecord
from trader.domain.portfolio.luck import Luck, missing_trades
from trader.gateways.market.replay import ReplaySource
from trader.services.agents.entrants import first_entrant
from trader.services.backtest.participant import Follower, Participant
from trader.services.backtest.run import Backtest
from trader.services.backtest.sources import AiSource
from trader.services.market.feed import MarketFeed
from trader.services.portfolio.evidence import EvidenceReport, last_whole_hour, make_report
from trader.services.portfolio.luck import LuckRequest, RandomTraders
from trader.services.portfolio.run_statistics import RunStatistics
from trader.settings import Settings
from trader.store.exchange.trades import RunTrade
from trader.store.portfolio.analytics import CurrentRun, InvocationTotals, RunEntrant


async def judge(run: Backtest, source: ReplaySource, settings: Settings, reached: datetime) -> EvidenceReport:
    """Return the evidence of all entrants until the time reached, luck included, as a service would show it."""
    models = {one.model.id: one.model for one in run.participants}
    runs = {one.model.id: _statistics(run, one, settings) for one in run.participants}
    baselines = {one.baseline.id: _statistics_of_baseline(one) for one in run.baselines}
    luck = _Luck(RandomTraders(MarketFeed(source, LockstepClock(reached)), settings))
    return await make_report(models, runs, baselines, luck, last_whole_hour(reached))


class _Luck:
    """Compares every entrant at once, which a service does little by little."""

    def __init__(self, traders: RandomTraders) -> None:
        self._traders = traders

    async def results(self, requests: Sequence[LuckRequest]) -> list[Luck | str]:
        return [missing_trades(len(one.trades)) or await self._traders.compare(one) for one in requests]


def _statistics(run: Backtest, one: Participant, settings: Settings) -> RunStatistics:
    """Return the statistics of the run of a model."""
    answered_by = one.source.answered_by if isinstance(one.source, AiSource) else one.model.router_model_name
    entrant = first_entrant(one.model, settings, answered_by, run.starts_at)
    due = one.decisions + one.missed
    record = EntrantRecord(entrant.number, entrant.fingerprint, entrant.began_at, one.decisions, due)
    totals = InvocationTotals(finished=one.decisions)
    account_run = one.account.run
    found = RunStatistics(
        CurrentRun(one.model.id, account_run.id, account_run.initial_capital, account_run.started_at, totals, record)
    )
    found.set_entrants([RunEntrant(one.model.id, record, None, None, totals)])
    found.set_hours(one.curve.hours)
    trades = [
        RunTrade(
            id=trade.part.id.int,
            net_pnl=trade.net_pnl,
            entry_notional=trade.part.entry_notional,
            is_long=trade.part.side.direction > 0,
            confidence=trade.part.confidence,
            opened_at=trade.part.opened_at,
            closed_at=trade.closed_at,
            symbol=trade.part.symbol,
        )
        for trade in run.trades(one)
    ]
    found.add_trades(sorted(trades, key=lambda trade: (trade.closed_at, trade.id)))
    return found


def _statistics_of_baseline(one: Follower) -> RunStatistics:
    account, run = one.account, one.account.run
    found = RunStatistics(CurrentRun(account.id, run.id, run.initial_capital, run.started_at))
    found.set_hours(one.curve.hours)
    return found
