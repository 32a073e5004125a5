"""Procedures of `trading`: positions, prices, candles, completed trades, and the models' equity over time."""

import asyncio
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Final

from trader.api.context import Context
from trader.api.registry import procedure
from trader.api.response_cache import histories_token, positions_token, prices_token, trades_token
from trader.api.schemas.common import UNSET, LongOutput, chosen_variant, iso, or_none
from trader.api.schemas.paging import cut_page, moment_of, page_of
from trader.api.schemas.portfolio import (
    GetEquityCurvesInput,
    GetEquityCurvesOutput,
    GetPortfolioHistoryInput,
    GetPortfolioHistoryOutput,
    RangeInput,
    curves_of,
    history_of,
)
from trader.api.schemas.positions import (
    GetCandlesInput,
    GetCandlesOutput,
    GetCryptoPricesInput,
    GetCryptoPricesOutput,
    GetPositionsInput,
    PositionView,
    positions_of,
    price_of,
)
from trader.api.schemas.trades import (
    GetTradeInput,
    GetTradeOutput,
    GetTradesInput,
    GetTradesOutput,
    TradeView,
    trade_details_of,
)
from trader.api.turns import in_slices
from trader.core.errors import InvalidInput, Issue, MarketUnavailable
from trader.exchange.domain.account import Account, Trade
from trader.market.candles import CANDLES_MAX
from trader.market.domain.markets import canonical_symbol, traded_symbol
from trader.portfolio.domain.histories import RESOLUTIONS, minute_end

DEFAULT_RANGE: Final = timedelta(days=7)
CANDLES_WAIT_S: Final = 0.5
"""How long a call may wait for candles, which are read once an hour."""


@procedure("trading.getPositions", token=positions_token)
async def get_positions(context: Context, request: GetPositionsInput) -> list[PositionView]:
    """List open positions with their live figures, oldest first."""
    exchange, models = context.exchange, context.models.by_id

    def is_asked_for(account: Account) -> bool:
        if request.model_id is not UNSET and account.id != request.model_id:
            return False
        model = models.get(account.id)
        return request.variant == "all" or (model is not None and model.variant == request.variant)

    accounts = [account for account in exchange.accounts.values() if account.positions and is_asked_for(account)]
    return positions_of(accounts, exchange.marks(), exchange.markets, models)


@procedure("trading.getCryptoPrices", token=prices_token)
async def get_crypto_prices(context: Context, request: GetCryptoPricesInput) -> GetCryptoPricesOutput:
    """Show mark prices of all markets or of the requested ones.

    Markets that are not traded here, or have had no price yet, are omitted.
    """
    traded = context.market.markets
    asked = traded if request.symbols is UNSET else dict.fromkeys(map(canonical_symbol, request.symbols))
    quotes = [context.market.quote(symbol) for symbol in asked if symbol in traded]
    now = context.clock.now()
    known = [quote for quote in quotes if quote is not None]
    before = await asyncio.gather(*(_day_before(context, quote.symbol) for quote in known))
    return GetCryptoPricesOutput(
        prices=[
            price_of(quote, now, context.market.trouble(quote.symbol), day_before)
            for quote, day_before in zip(known, before, strict=True)
        ]
    )


async def _day_before(context: Context, symbol: str) -> float | None:
    """Return the price 24 hours before the last full hour; None if the source does not respond soon."""
    try:
        async with asyncio.timeout(CANDLES_WAIT_S):
            candles = await context.market.candles(symbol, "1h", 24)
    except (MarketUnavailable, TimeoutError):
        return None
    return candles[0].open if len(candles) == 24 else None


@procedure("trading.getTrades", long=True, token=trades_token)
async def get_trades(context: Context, request: GetTradesInput) -> GetTradesOutput:
    """List completed trades, newest first."""
    page = page_of(request.limit, request)
    rows = await context.portfolio.trades(
        account_id=or_none(request.model_id),
        variant=chosen_variant(request.variant),
        chosen=request.filter(),
        page=page,
    )
    if not rows:
        request.require_market(context.market.markets)
    cut = cut_page(rows, page, attrgetter("closed_at"))
    trades = await in_slices(TradeView.of, cut.rows)
    return GetTradesOutput(trades=trades, next_before=cut.next_before, next_skip=cut.next_skip)


@procedure("trading.getTrade")
async def get_trade(context: Context, request: GetTradeInput) -> GetTradeOutput:
    """Show one trade or position in full: its plan, fills, costs, and its favorable and adverse excursions.

    :raises NotFound: There is no such trade.
    """
    whole = await context.portfolio.trade(request.id)
    trade, model = whole.trade, context.models.by_id.get(whole.account_id)
    end = trade.closed_at if isinstance(trade, Trade) else context.clock.now()
    extremes = await context.candles.extremes(trade.symbol, trade.opened_at, end)
    return GetTradeOutput(trade=trade_details_of(whole, model, extremes))


@procedure("trading.getPortfolioHistory", long=True, token=histories_token)
async def get_portfolio_history(
    context: Context, request: GetPortfolioHistoryInput
) -> LongOutput[GetPortfolioHistoryOutput]:
    """Show the equity of models over time, at the finest resolution that stays within `maxPoints` per model.

    By default the range ends now and begins 7 days before its end.
    """
    start, end = _range(context, request)
    history = await context.portfolio.history(
        model_id=or_none(request.model_id),
        variant=chosen_variant(request.variant),
        start=start,
        end=end,
        points_max=request.max_points,
    )
    return history_of(*history)


@procedure("trading.getEquityCurves", long=True, token=histories_token)
async def get_equity_curves(context: Context, request: GetEquityCurvesInput) -> LongOutput[GetEquityCurvesOutput]:
    """Show the equity of models for a chart: one list of times, and one list of values per model.

    Range and resolutions are the same as in `getPortfolioHistory`. A value stays valid for at most 65 minutes if there
    is no newer one. With `baselines`, the baselines' curves follow the models'.
    """
    if request.window is UNSET:
        start, end = _range(context, request)
        _, _, starts = await context.analytics.window(start)
    else:
        start, end, starts = await context.analytics.window(request.window)
    curves = await context.portfolio.equity_curves(
        model_id=or_none(request.model_id),
        variant=chosen_variant(request.variant),
        start=start,
        end=end,
        points_max=request.points,
        baselines=request.baselines,
    )
    asked = starts if request.model_id is UNSET else {key: starts[key] for key in {request.model_id} & starts.keys()}
    return curves_of(curves, start, asked)


def _range(context: Context, request: RangeInput) -> tuple[datetime, datetime]:
    end = request.end() or minute_end(context.clock.now())
    start = request.start() or end - DEFAULT_RANGE
    if start > end:
        raise InvalidInput(Issue(("startDate",), "must not be after endDate"))
    return start, end


@procedure("trading.getCandles", long=True)
async def get_candles(context: Context, request: GetCandlesInput) -> GetCandlesOutput:
    """List candles of a market for a chart, from the prices that models see.

    By default the range ends now. The stream `candles` has the candle of the current minute.
    """
    symbol = traded_symbol(request.symbol, context.market.markets)
    written = {"to": request.to, "before": request.before}
    ends = [moment_of(text, field) for field, text in written.items() if text is not UNSET]
    end = min([*ends, context.clock.now()])
    start = None if request.start is UNSET else moment_of(request.start, "from")
    if start is not None and ends and start > min(ends):
        raise InvalidInput(Issue(("from",), "must not be after the end of the range"))
    candles = await context.candles.read(symbol, RESOLUTIONS[request.interval], start, end)
    shown = candles[-CANDLES_MAX:]
    return GetCandlesOutput(
        symbol=symbol,
        interval=request.interval,
        times=await in_slices(lambda candle: iso(candle.open_time), shown),
        open=[candle.open for candle in shown],
        high=[candle.high for candle in shown],
        low=[candle.low for candle in shown],
        close=[candle.close for candle in shown],
        volume=[candle.volume or None for candle in shown],
        next_before=iso(shown[0].open_time) if len(candles) > CANDLES_MAX else UNSET,
    )
