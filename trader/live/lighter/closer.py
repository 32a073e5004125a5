"""Empties one account at Lighter without the service: by the venue's own rows, its listings and its books."""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from secrets import randbelow
from typing import Any

from trader.core.clock import EPOCH
from trader.core.errors import MarketDataError
from trader.exchange.domain.orders import OrderSide
from trader.live.domain.orders import CLIENT_INDEX_MAX
from trader.live.domain.protective_orders import CLOSING_SLIPPAGE, worst_price
from trader.live.lighter.account import prove_access
from trader.live.lighter.api import LighterApi
from trader.live.lighter.frames import AccountFrames
from trader.live.lighter.rows import PositionRow
from trader.live.lighter.signer import OrderTerms, Signed, Signer
from trader.live.lighter.transactions import Transactions
from trader.live.market import Listing

log = logging.getLogger("trader.live")

_NOW, _LATER, _NEVER = range(3)


class LighterCloser:
    """Empties the signer's account. Each transaction can only reduce or cancel, so that all may be repeated."""

    def __init__(self, signer: Signer, url: str, *, pause_s: float = 1.0) -> None:
        self.answers: dict[str, str] = {}
        self.payloads: dict[str, Any] = {}
        self._api = LighterApi(url, pause_s=pause_s)
        self._signer = signer
        self._transactions = Transactions(self._api, AccountFrames(signer))

    async def prove(self) -> None:
        self._signer.check()
        await prove_access(self._api, self._signer)

    async def look(self, *, acts: bool = True) -> str | None:
        try:
            account = await self._api.account(self._signer.account_index)
            held = [each for each in account.positions if each.quantity]
        except MarketDataError as error:
            return f"unknown: {error}"
        if not held and not account.total_order_count:
            return None
        if acts:
            await self._sent("canceling all", partial(self._signer.cancel_all, _NOW, 0))
            await self._reduce(held)
        return ", ".join([*(f"{each.quantity} {each.symbol}" for each in held), f"{account.total_order_count} orders"])

    async def cancel_all_at(self, at: datetime | None) -> bool:
        kind, at_ms = (_NEVER, 0) if at is None else (_LATER, int((at - EPOCH).total_seconds() * 1000))
        return await self._sent("scheduling", partial(self._signer.cancel_all, kind, at_ms))

    async def close(self) -> None:
        await self._signer.close()
        await self._api.close()

    async def _reduce(self, held: Sequence[PositionRow]) -> None:
        try:
            if held:
                await self._api.listings()
        except MarketDataError as error:
            log.warning("the venue's rules cannot be read: %s", error)
        listed = {listing.market_id: listing for listing in self._api.known.values()}
        for each in held:
            try:
                order = await self._closing_order(each, listed[each.market_id])
            except (MarketDataError, KeyError) as error:
                log.warning("%s: its rules or its book cannot be read: %s", each.symbol, error)
                continue
            await self._sent(each.symbol, partial(self._signer.create_orders, [order]))

    async def _closing_order(self, held: PositionRow, listing: Listing) -> OrderTerms:
        market, book = listing.market, await self._api.book(held.market_id)
        side, levels, nearest = (OrderSide.SELL, book.bids, max) if held.sign > 0 else (OrderSide.BUY, book.asks, min)
        best = nearest([held.position_value / held.position, *(level.price for level in levels or ())])
        return OrderTerms(
            market_id=held.market_id, client_index=1 + randbelow(CLIENT_INDEX_MAX),
            lots=int(held.position / market.lot), is_ask=held.sign > 0, type="market", reduce_only=True,
            price_ticks=int(worst_price(side, best, CLOSING_SLIPPAGE, market) / market.tick), trigger_ticks=0,
        )  # fmt: skip

    async def _sent(self, what: str, sign: Callable[..., Signed]) -> bool:
        try:
            answer = await self._transactions.send(sign(nonce=await self._transactions.next_nonce()))
        except MarketDataError as error:
            log.warning("%s failed and will be tried again: %s", what, error)
            return False
        if not answer.is_taken:
            log.warning("%s failed and will be tried again: %s", what, answer.reason)
        return answer.is_taken is True
