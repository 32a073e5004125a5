"""Idempotency and current answers of orders, shared by the paper and live exchanges."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from trader.core.errors import NotFound
from trader.database.pool import Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.orders import Order, OrderAnswer
from trader.exchange.session import Place, same_contents
from trader.exchange.sql import accounts as store
from trader.market.domain.markets import refusal_to_trade
from trader.market.feed import MarketFeed


class IdempotentOrders:
    """Places each client order id once, however often and concurrently it is requested."""

    def __init__(self, database: Database, accounts: Accounts) -> None:
        self._database = database
        self._accounts = accounts
        self._placing: dict[tuple[str, str], asyncio.Future[None]] = {}

    async def once(self, orders: Sequence[Order], place: Place) -> Sequence[OrderAnswer]:
        """Return the first answer for the order's client order id; if there is none, place the order. A pair likewise.

        :raises Conflict: the first order with this client order id had different contents
        """
        order = orders[0]
        if order.client_order_id is None:
            return await place(orders)
        key = (order.account_id, order.client_order_id)
        while (earlier := self._placing.get(key)) is not None:
            await asyncio.wait([earlier])
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._placing[key] = finished
        try:
            return [*filter(None, [await self._first_answer(each) for each in orders])] or await place(orders)
        finally:
            # A change continues after its caller is canceled: a retry waits for it and gets its answer.
            left = asyncio.gather(*self._accounts.under_way(order.account_id), return_exceptions=True)
            left.add_done_callback(lambda _: self._placing.pop(key).set_result(None))

    async def _first_answer(self, order: Order) -> OrderAnswer | None:
        answer = await first_answer(self._database, order.account_id, order.client_order_id or "")
        return None if answer is None else same_contents(order, answer)


async def first_answer(database: Database, account_id: str, client_order_id: str) -> OrderAnswer | None:
    """Return the answer for this client order id; None as long as there is none."""
    async with database.connection() as conn:
        return await store.select_answer_of_client(conn, account_id, client_order_id)


def refusal_of_price(market: MarketFeed, symbol: str, now: datetime) -> str | None:
    """Return why there is no price to trade on now, or None."""
    if market.quote(symbol) is not None and (trouble := market.trouble(symbol)) is not None:
        return f"{symbol} cannot be traded now: {trouble}"
    return refusal_to_trade(market.quote(symbol), symbol, now)


def order_id_of(account_id: str, text: str) -> UUID:
    """Parse an order ID. Raise `NotFound` for a text that is not an ID."""
    try:
        return UUID(text)
    except ValueError:
        raise no_such_order(account_id, text) from None


async def present_answer(database: Database, account_id: str, order_id: UUID) -> OrderAnswer:
    """Return an order's answer with its fills so far. Raise `NotFound` if the account has no such order."""
    async with database.reading() as conn:
        answer = await store.select_answer(conn, account_id, order_id)
        if answer is None:
            raise no_such_order(account_id, str(order_id))
        rested = await store.select_rested(conn, account_id, order_id)
        fills = await store.select_fills_of_request(conn, order_id)
    return answer if rested is None else answer.so_far(**rested, fills=fills)


def no_such_order(account_id: str, order_id: str) -> NotFound:
    return NotFound(f"the account {account_id} has no order {order_id}")
