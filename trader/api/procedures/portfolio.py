"""The equity of models over time."""

from datetime import timedelta

from trader.api.context import Context
from trader.api.rpc import procedure
from trader.api.schemas.common import chosen_variant, optional
from trader.api.schemas.portfolio import GetPortfolioHistoryInput, GetPortfolioHistoryOutput, history_of, records_of
from trader.errors import InvalidInput, Issue

DEFAULT_RANGE = timedelta(days=7)


@procedure("trading.getPortfolioHistory")
async def get_portfolio_history(context: Context, request: GetPortfolioHistoryInput) -> GetPortfolioHistoryOutput:
    """Show the equity of models over time, at the finest resolution that stays within `maxPoints` per model.

    The range ends now unless it says otherwise, and begins 7 days before its end.
    """
    end = request.end() or context.clock.now()
    start = request.start()
    if start is None:
        start = end - min(DEFAULT_RANGE, end - end.min.replace(tzinfo=end.tzinfo))
    if start > end:
        raise InvalidInput(Issue(("startDate",), "must not be after endDate"))
    history = await context.portfolio.encoded_history(
        records_of,
        model_id=optional(request.model_id),
        variant=chosen_variant(request.variant),
        start=start,
        end=end,
        points_max=request.max_points,
    )
    return history_of(history)
