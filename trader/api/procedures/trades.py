"""Procedures of `trading` and `simulator` that list completed trades."""

from operator import attrgetter

from trader.api.context import Context
from trader.api.registry import procedure
from trader.api.response_cache import trades_token
from trader.api.schemas.common import chosen_variant, or_none
from trader.api.schemas.paging import cut_page, page_of
from trader.api.schemas.trades import (
    CompletedStats,
    CompletedTrade,
    GetCompletedTradesInput,
    GetCompletedTradesOutput,
    GetTradesInput,
    GetTradesOutput,
    TradeView,
)


@procedure("trading.getTrades", token=trades_token)
async def get_trades(context: Context, request: GetTradesInput) -> GetTradesOutput:
    """List completed trades, the latest first."""
    page = page_of(request.limit, request.before)
    rows = await context.portfolio.trades(
        account_id=or_none(request.model_id), variant=chosen_variant(request.variant), page=page
    )
    trades, next_before = cut_page(rows, page, attrgetter("closed_at"))
    return GetTradesOutput(trades=[TradeView.of(trade) for trade in trades], next_before=next_before)


@procedure("simulator.getCompletedTradesFromDB", paper_only=True, token=trades_token)
async def get_completed_trades(context: Context, request: GetCompletedTradesInput) -> GetCompletedTradesOutput:
    """List completed trades of simulated accounts, the latest first, and figures over those that are listed."""
    page = page_of(request.limit, request.before)
    rows = await context.portfolio.trades(account_id=or_none(request.model_id), page=page)
    trades, next_before = cut_page(rows, page, attrgetter("closed_at"))
    completed = [CompletedTrade.of(trade) for trade in trades]
    return GetCompletedTradesOutput(trades=completed, stats=CompletedStats.of(completed), next_before=next_before)
