"""Procedures of `trading`: the equity of models over time."""

from datetime import datetime, timedelta
from typing import Final

from trader.api.context import Context
from trader.api.registry import procedure
from trader.api.response_cache import histories_token
from trader.api.schemas.common import LongOutput, chosen_variant, or_none
from trader.api.schemas.portfolio import (
    GetEquityCurvesInput,
    GetEquityCurvesOutput,
    GetPortfolioHistoryInput,
    GetPortfolioHistoryOutput,
    RangeInput,
    curves_of,
    history_of,
)
from trader.domain.portfolio.histories import minute_end
from trader.errors import InvalidInput, Issue

DEFAULT_RANGE: Final = timedelta(days=7)


@procedure("trading.getPortfolioHistory", token=histories_token)
async def get_portfolio_history(
    context: Context, request: GetPortfolioHistoryInput
) -> LongOutput[GetPortfolioHistoryOutput]:
    """Show the equity of models over time, at the finest resolution that stays within `maxPoints` per model.

    The range ends now unless it says otherwise, and begins 7 days before its end.
    """
    start, end = _range(context, request)
    history = await context.portfolio.history(
        model_id=or_none(request.model_id),
        variant=chosen_variant(request.variant),
        start=start,
        end=end,
        points_max=request.max_points,
    )
    return history_of(history)


@procedure("trading.getEquityCurves", token=histories_token)
async def get_equity_curves(context: Context, request: GetEquityCurvesInput) -> LongOutput[GetEquityCurvesOutput]:
    """Show the equity of models for a chart: one list of times, and one of values for each model.

    The range is that of `getPortfolioHistory`, and so are the resolutions. A value stands for at most 65 minutes when
    no newer one was recorded. With `baselines`, the curves of the baselines follow those of the models.
    """
    start, end = _range(context, request)
    curves = await context.portfolio.equity_curves(
        model_id=or_none(request.model_id),
        variant=chosen_variant(request.variant),
        start=start,
        end=end,
        points_max=request.points,
        baselines=request.baselines,
    )
    return curves_of(curves)


def _range(context: Context, request: RangeInput) -> tuple[datetime, datetime]:
    end = request.end() or minute_end(context.clock.now())
    start = request.start()
    if start is None:
        start = end - min(DEFAULT_RANGE, end - end.min.replace(tzinfo=end.tzinfo))
    if start > end:
        raise InvalidInput(Issue(("startDate",), "must not be after endDate"))
    return start, end
