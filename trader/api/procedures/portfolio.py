"""Procedure of `trading`: the equity history of models."""

from datetime import timedelta
from typing import Final

from trader.api.context import Context
from trader.api.response_cache import histories_token
from trader.api.rpc import procedure
from trader.api.schemas.common import LongOutput, chosen_variant, or_none
from trader.api.schemas.portfolio import GetPortfolioHistoryInput, GetPortfolioHistoryOutput, history_of
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
    end = request.end() or minute_end(context.clock.now())
    start = request.start()
    if start is None:
        start = end - min(DEFAULT_RANGE, end - end.min.replace(tzinfo=end.tzinfo))
    if start > end:
        raise InvalidInput(Issue(("startDate",), "must not be after endDate"))
    history = await context.portfolio.history(
        model_id=or_none(request.model_id),
        variant=chosen_variant(request.variant),
        start=start,
        end=end,
        points_max=request.max_points,
    )
    return history_of(history)
