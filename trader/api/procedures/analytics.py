"""Procedures of `analytics`: statistics, leaderboard, failures, and totals of the current runs."""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from uuid import UUID

from trader.api.context import Context
from trader.api.registry import procedure
from trader.api.response_cache import evidence_token, rankings_token, trades_token
from trader.api.schemas.analytics import (
    Failure,
    FailureStats,
    GetFailuresInput,
    GetFailuresOutput,
    GetLeaderboardInput,
    GetLeaderboardOutput,
    GetTradeTotalsInput,
    GetTradeTotalsOutput,
    LeaderboardDetails,
    LeaderboardRow,
    TradeTotalsRow,
)
from trader.api.schemas.behaviour import BehaviourView, GetBehaviourInput, GetBehaviourOutput
from trader.api.schemas.common import UNSET, Empty, chosen_variant, iso, or_none
from trader.api.schemas.evidence import (
    GetComparisonInput,
    GetComparisonOutput,
    GetEvidenceInput,
    GetEvidenceOutput,
)
from trader.api.schemas.model_stats import (
    AdvancedStats,
    GetModelStatsInput,
    GetModelStatsOutput,
    GetRunInfoOutput,
    OverallStats,
)
from trader.api.schemas.paging import cut_page, page_of
from trader.api.schemas.seasons import GetSeasonOutput, shown_season
from trader.api.turns import in_slices
from trader.portfolio.domain.seasons import Season, SeasonState
from trader.portfolio.leaderboard import LeaderboardEntry


@procedure("analytics.getModelStats", long=True)
async def get_model_stats(context: Context, request: GetModelStatsInput) -> GetModelStatsOutput:
    """Return statistics of every model and of each of its entrants: the usual figures, or the advanced ones."""
    stats = await context.analytics.model_stats(chosen_variant(request.variant))
    budget_of = context.agents.budgets.of
    if request.mode == "overall":
        return GetModelStatsOutput(
            overall=await in_slices(lambda each: OverallStats.of(each, budget_of(each.model)), stats)
        )
    return GetModelStatsOutput(
        advanced=await in_slices(lambda each: AdvancedStats.of(each, budget_of(each.model)), stats)
    )


@procedure("analytics.getLeaderboard", long=True, token=rankings_token)
async def get_leaderboard(context: Context, request: GetLeaderboardInput) -> GetLeaderboardOutput:
    """Rank the models by the results of their accounts within a window, best first.

    A model that was opened or reconfigured within the window counts from that time.
    """
    entries = await context.analytics.leaderboard(
        request.window, request.sort_by, chosen_variant(request.variant), is_merged=request.replicates == "merged"
    )
    return shown_board(entries, request, await context.analytics.latest_season())


def shown_board(
    entries: Sequence[LeaderboardEntry], request: GetLeaderboardInput, latest: tuple[Season, SeasonState] | None
) -> GetLeaderboardOutput:
    """Return a board, with the latest season if it is still shown."""
    rows = [
        LeaderboardRow.from_attributes(
            entry, details=LeaderboardDetails.of(entry, request.sort_by) if request.details else UNSET
        )
        for entry in entries
    ]
    best = entries[0].best_trade if request.details and entries else None
    return GetLeaderboardOutput(
        entries=rows,
        window=request.window,
        start=iso(min(entry.since for entry in entries)) if entries else None,
        best_trade_id=UNSET if best is None else str(UUID(int=best.id)),
        season=shown_season(latest),
    )


@procedure("analytics.getSeason")
async def get_season(context: Context, _: Empty) -> GetSeasonOutput:
    """Return the latest season: its rules, their digest, and every amendment. An addition to the specification."""
    return GetSeasonOutput.of(await context.analytics.latest_season())


@procedure("analytics.getEvidence", long=True, token=evidence_token)
async def get_evidence(context: Context, request: GetEvidenceInput) -> GetEvidenceOutput:
    """Compare every entrant with its references, with verdicts: an addition to the specification.

    References are the variant's rule agent on the same ticks, holding nothing, buy and hold, and the best other
    entrant.
    """
    report = await context.evidence.report(request.window, chosen_variant(request.variant), or_none(request.model_id))
    return await asyncio.to_thread(GetEvidenceOutput.of, request.window, report)  # a hundred models take 0.1 s


@procedure("analytics.getComparison", long=True, token=evidence_token)
async def get_comparison(context: Context, request: GetComparisonInput) -> GetComparisonOutput:
    """Compare two entrants: their difference over time, the board's verdict, and where they disagreed: an addition to
    the specification.
    """
    pair = await context.evidence.compare(request.window, request.model_id, request.against)
    return await asyncio.to_thread(GetComparisonOutput.of, request.window, pair)  # how long a verdict takes: 0.1 s


@procedure("analytics.getBehaviour", long=True, token=evidence_token)
async def get_behaviour(context: Context, request: GetBehaviourInput) -> GetBehaviourOutput:
    """Describe how the current entrant of a model trades: an addition to the specification."""
    behaviour = await context.evidence.behaviour(request.model_id)
    return GetBehaviourOutput(behaviour=None if behaviour is None else BehaviourView.of(behaviour))


@procedure("analytics.getFailures", long=True)
async def get_failures(context: Context, request: GetFailuresInput) -> GetFailuresOutput:
    """List invocations that failed or in which a tool call failed, newest first, and failure counts by model."""
    page = page_of(request.limit, request)
    failures = await context.analytics.failures(
        page, chosen_variant(request.variant), with_answers=context.settings.public == "off"
    )
    cut = cut_page(failures.invocations, page, attrgetter("started_at"))
    return GetFailuresOutput(
        failures=await in_slices(lambda failed: Failure.of(failed, failures), cut.rows),
        model_stats=[FailureStats.from_attributes(*counts) for counts in failures.counts],
        next_before=cut.next_before,
        next_skip=cut.next_skip,
    )


@procedure("analytics.getTradeTotals", long=True, token=trades_token)
async def get_trade_totals(context: Context, request: GetTradeTotalsInput) -> GetTradeTotalsOutput:
    """Total the completed trades of the current runs by day, week, market, side or exit reason (UTC)."""
    rows = await context.analytics.trade_totals(
        request.by, or_none(request.model_id), chosen_variant(request.variant), request.filter()
    )
    if not rows:
        request.require_market(context.market.markets)
    return GetTradeTotalsOutput(rows=[TradeTotalsRow.from_attributes(row) for row in rows])


@procedure("analytics.getRunInfo")
async def get_run_info(context: Context, _: Empty) -> GetRunInfoOutput:
    """Return the start of the current runs, the trading mode, and the numbers of models, invocations and trades, also
    by entrant."""
    return GetRunInfoOutput.of(await context.analytics.run_info(), context.settings.trading_mode)
