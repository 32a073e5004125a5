"""Procedures of `trading` that are answered from memory: open positions and market prices."""

import asyncio
from decimal import Decimal
from typing import Final

from trader.api.context import Context
from trader.api.registry import procedure
from trader.api.response_cache import positions_token, prices_token
from trader.api.schemas.common import UNSET
from trader.api.schemas.positions import (
    GetCryptoPricesInput,
    GetCryptoPricesOutput,
    GetPositionsInput,
    PositionView,
    positions_of,
    price_of,
)
from trader.domain.exchange.account import Account
from trader.domain.market.markets import canonical_symbol
from trader.errors import MarketUnavailable

CANDLES_WAIT_S: Final = 0.5
"""How long a call may wait for candles, which are read once an hour."""


@procedure("trading.getPositions", token=positions_token)
async def get_positions(context: Context, request: GetPositionsInput) -> list[PositionView]:
    """List open positions with their live figures, the oldest first."""
    exchange, models = context.exchange, context.agents.models

    def is_asked_for(account: Account) -> bool:
        if request.model_id is not UNSET and account.id != request.model_id:
            return False
        model = models.get(account.id)
        return request.variant == "all" or (model is not None and model.variant == request.variant)

    accounts = [account for account in exchange.accounts.values() if account.positions and is_asked_for(account)]
    return positions_of(accounts, exchange.marks(), exchange.markets, models)


@procedure("trading.getCryptoPrices", token=prices_token)
async def get_crypto_prices(context: Context, request: GetCryptoPricesInput) -> GetCryptoPricesOutput:
    """Show mark prices, of all markets or of those that are asked for.

    A market that is not traded here, or has had no price yet, is left out.
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


async def _day_before(context: Context, symbol: str) -> Decimal | None:
    """Return the price 24 hours before the last full hour; None when the source does not say it soon."""
    try:
        async with asyncio.timeout(CANDLES_WAIT_S):
            candles = await context.market.candles(symbol, "1h", 24)
    except (MarketUnavailable, TimeoutError):
        return None
    return Decimal(str(candles[0].open)) if len(candles) == 24 else None
