"""Empties one account at Hyperliquid without the service: by the venue's own rows, its listings and its books."""

import logging
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from secrets import randbelow
from typing import Any

from trader.core.errors import MarketDataError, StartError
from trader.exchange.domain.orders import OrderSide
from trader.exchange.domain.venue_orders import VenueOrder, VenueOrderType
from trader.live.domain.orders import CLIENT_INDEX_MAX
from trader.live.domain.protective_orders import CLOSING_SLIPPAGE, worst_price
from trader.live.hyperliquid.account import prove_access
from trader.live.hyperliquid.actions import Actions, order_action
from trader.live.hyperliquid.api import HyperliquidApi, ms_of
from trader.live.hyperliquid.records import AccountHoldings, HyperliquidRecords
from trader.live.hyperliquid.signer import AgentSigner
from trader.live.venue import Steps

log = logging.getLogger("trader.live")


class HyperliquidCloser:
    """Empties an account. Each action can only reduce or cancel, so that all may be repeated."""

    def __init__(self, signer: AgentSigner, url: str, account: str, *, pause_s: float = 1.0) -> None:
        self.answers: dict[str, str] = {}
        self.payloads: dict[str, Any] = {}
        self._api = HyperliquidApi(url, pause_s=pause_s)
        self._signer = signer
        self._actions = Actions(self._api, signer, account, None)
        self._records = HyperliquidRecords(self._api, account)

    async def prove(self) -> None:
        self._signer.check()
        account = self._actions.account
        vault = await prove_access(self._api, self._signer, account)
        self._actions = Actions(self._api, self._signer, account, vault)

    async def look(self, *, acts: bool = True) -> str | None:
        try:
            await self._api.listings()
            held = (await self._api.info("clearinghouseState", AccountHoldings, user=self._actions.account)).held
            orders = await self._records.open_orders()
        except MarketDataError as error:
            return f"unknown: {error}"
        if not held and not orders:
            return None
        if acts:
            numbers = {coin: number for number, coin in self._api.coins.items()}
            cancels = [{"a": numbers[order.coin], "o": order.oid} for order in orders]
            if cancels:
                await self._sent("canceling all", {"type": "cancel", "cancels": cancels}, len(cancels))
            for coin, quantity in held.items():
                await self._reduce(coin, quantity)
        return ", ".join([*(f"{quantity} {coin}" for coin, quantity in held.items()), f"{len(orders)} orders"])

    async def cancel_all_at(self, at: datetime | None) -> bool:
        return await self._sent("scheduling", {"type": "scheduleCancel", **({"time": ms_of(at)} if at else {})})

    def steps(self, symbol: str, child: Sequence[str], pause_s: float) -> Steps:
        raise StartError("There is no rehearsal for this venue yet. Set LIVE_REHEARSAL=override:NAME to start without.")

    async def send_and_wait(self, symbol: str, client_index: int) -> None:
        self.steps(symbol, (), 0.0)

    async def close(self) -> None:
        await self._api.close()

    async def _reduce(self, coin: str, quantity: Decimal) -> None:
        side = OrderSide.SELL if quantity > 0 else OrderSide.BUY
        try:
            listing = self._api.listing(self._api.symbol_of(coin) or coin)
            book = await self._api.book(listing.market_id)
            levels, nearest = (book.bids, max) if quantity > 0 else (book.asks, min)
            best = nearest(level.price for level in levels or ())
        except (MarketDataError, ValueError) as error:  # nobody to trade with
            log.warning("%s: its rules or its book cannot be used: %s", coin, error)
            return
        order = VenueOrder(
            client_index=1 + randbelow(CLIENT_INDEX_MAX), symbol=listing.market.symbol, side=side,
            type=VenueOrderType.MARKET, quantity=abs(quantity), reduce_only=True,
            price=worst_price(side, best, CLOSING_SLIPPAGE, listing.market),
        )  # fmt: skip
        await self._sent(coin, order_action([order], listing.market_id))

    async def _sent(self, what: str, action: dict[str, Any], size: int = 1) -> bool:
        answer = await self._actions.send(action, self._actions.expiry(), size=size)
        if not answer.is_taken or answer.error:
            log.warning("%s failed and will be tried again: %s", what, answer.error or answer.reason)
        return answer.is_taken is True and not answer.error
