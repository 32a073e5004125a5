"""Shadow: the orders of paper, signed as for the venue and never sent, against the books that follow."""

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Final

from trader.core import tasks
from trader.core.clock import Clock
from trader.core.errors import MarketUnavailable
from trader.database.pool import Database
from trader.exchange.domain.orders import Order, OrderAnswer, OrderStatus, OrderType
from trader.exchange.domain.venue_orders import VenueOrder, VenueOrderType
from trader.live.domain.drift import ShadowDrift, book_price, error_bps
from trader.live.domain.orders import client_index_of
from trader.live.domain.protective_orders import reachable_price
from trader.live.ladder import LadderFile
from trader.live.source import VenueSource
from trader.live.sql.drift import insert_shadow_drift
from trader.live.venue import OrderSigner
from trader.market.domain.markets import Quote
from trader.market.feed import MarketFeed

log = logging.getLogger("trader.drift")

LATER: Final = (timedelta(milliseconds=300), timedelta(seconds=1))
"""When the venue's book is looked at, after the order would have been sent."""

_FOLLOWED_MAX: Final = 256


class Shadow:
    """Follows the paper orders of the entrants whose step is shadow. Its signer has no means of sending."""

    def __init__(
        self, database: Database, market: MarketFeed, clock: Clock, source: VenueSource, signer: OrderSigner,
        file: LadderFile,
    ) -> None:  # fmt: skip
        self._database = database
        self._market = market
        self._clock = clock
        self._source = source
        self._signer = signer
        self._file = file
        self._following: set[asyncio.Task[None]] = set()

    def take(self, orders: Sequence[Order], answers: Sequence[OrderAnswer]) -> None:
        """Follow orders that paper has just answered. Never delays or fails them."""
        for order, answer in zip(orders, answers, strict=True):
            quote = self._market.quote(answer.symbol)
            if quote is None or answer.status is OrderStatus.REJECTED or len(self._following) >= _FOLLOWED_MAX:
                continue
            task = tasks.start(self._follow(order, answer, quote), f"shadow of {answer.id}")
            self._following.add(task)
            task.add_done_callback(self._following.discard)

    async def _follow(self, order: Order, answer: OrderAnswer, quote: Quote) -> None:
        listing, since = self._source.listing(answer.symbol), self._file.shadowed_since
        if listing is None or await asyncio.to_thread(since, order.account_id) is None:
            return
        sent_at, market, side = self._clock.now(), self._market.markets[answer.symbol], answer.side
        is_limit = order.type is OrderType.LIMIT and order.limit_price is not None
        price = order.limit_price if is_limit else reachable_price(side, quote, closes=order.reduce_only, market=market)
        quantity = answer.total_quantity or answer.requested_quantity
        sending = VenueOrder(
            client_index=client_index_of(order.account_id, str(answer.id)), symbol=answer.symbol, side=side,
            type=VenueOrderType.LIMIT if is_limit else VenueOrderType.MARKET, quantity=quantity,
            price=price or quote.mark, reduce_only=order.reduce_only,
        )  # fmt: skip
        signed = self._signer.sign(sending, listing)
        errors: list[Decimal | None] = []
        for after in LATER:
            try:
                book = (await self._market.quote_after(answer.symbol, sent_at + after)).book
            except MarketUnavailable:
                errors.append(None)
                continue
            met = book_price(book, side, quantity, limit=sending.price)
            paper = answer.average_price
            errors.append(None if met is None or paper is None else error_bps(side, met, paper))
        drift = ShadowDrift(
            account_id=order.account_id, symbol=answer.symbol, side=side, quantity=quantity,
            paper_price=answer.average_price, drift_bps=errors[0], later_bps=errors[1], signed=signed, sent_at=sent_at,
        )  # fmt: skip
        async with self._database.writing() as conn:
            await insert_shadow_drift(conn, drift)

    async def close(self) -> None:
        """Stop following."""
        await tasks.end(*self._following)
