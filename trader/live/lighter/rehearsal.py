"""Rehearsal at Lighter: the life of a small position step by step, and the venue's answers to open questions."""

import asyncio
import sys
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from secrets import randbelow
from socket import SHUT_RDWR
from time import monotonic
from typing import Any, Final

import msgspec

from trader.core.errors import MarketDataError
from trader.core.money import ZERO
from trader.live.domain.orders import CLIENT_INDEX_MAX
from trader.live.lighter.closer import LighterCloser
from trader.live.lighter.signer import OrderTerms
from trader.live.lighter.transactions import INDEX_EXISTS, SendAnswer
from trader.live.market import Listing
from trader.live.venue import Steps

_RAW: Final = msgspec.json.Decoder(dict[str, Any])
_SHOWN_WITHIN_S: Final = 30.0
_FAR: Final = Decimal("0.10")
_CHANNEL: Final = "account_all_orders"


class LighterRehearsal(LighterCloser):
    """The steps at an empty account; `answers` and `payloads` fill meanwhile."""

    def steps(self, symbol: str, child: Sequence[str], pause_s: float) -> Steps:
        self._symbol, self._child, self._pause_s = symbol, child, pause_s
        stop, target = ({"sells": True, "price": share, "trigger": share} for share in (1 - _FAR, 1 + _FAR))
        return (
            ("prove", self._begin),
            ("open", self._open),
            ("add", lambda: self._add(stop, target)),
            ("part", lambda: self._placed("filled", "market", sells=True)),
            ("stop", lambda: self._placed("pending", "stop", **stop)),
            ("target", lambda: self._placed("pending", "target", **target)),
            ("refused change", self._refused),
            ("cancel", self._cancel),
            ("cut socket", self._cut),
            ("kill -9 and restart", self._kill),
        )

    async def send_and_wait(self, symbol: str, client_index: int) -> None:
        self._symbol = symbol
        await self._begin()
        await self._accepted(self._order("limit", client_index, price=1 - _FAR))
        await asyncio.sleep(_SHOWN_WITHIN_S)

    # Steps

    async def _begin(self) -> str:
        await self.prove()
        self._listing: Listing = (await self._api.listings())[self._symbol]
        market, book = self._listing.market, await self._api.book(self._listing.market_id)
        if not book.asks or not book.bids:
            raise MarketDataError(f"{self._symbol} has no prices on both sides")
        self._mid = (min(level.price for level in book.asks) + max(level.price for level in book.bids)) / 2
        self._lots = int(max(market.lot, market.min_notional / self._mid) * 4 / market.lot) + 1
        self._placed_indexes: dict[str, int] = {}
        return f"key {self._signer.key_index} of account {self._signer.account_index}; {self._symbol} at {self._mid}"

    async def _open(self) -> str:
        nonce, began, order = await self._transactions.next_nonce(), monotonic(), self._order("market")
        await self._accepted(order)
        counted = await self._transactions.next_nonce() > nonce
        state, seen_s = await self._shown(order.client_index, "filled"), monotonic() - began
        more = {"limit": 100, "sort_by": "trade_id", "order_index": state["order_index"]}
        (first, *_) = await self._until("trades", more, "trades")
        self.answers["when a nonce counts"] = "at acceptance" if counted else "after acceptance"
        self.answers["how long until visible"] = f"order {seen_s:.1f} s, trades {monotonic() - began:.1f} s"
        return f"filled at {first['price']}"

    async def _add(self, stop: dict[str, Any], target: dict[str, Any]) -> str:
        """Add by a group, as the service opens: the stop and target come with the fill."""
        entry, *children = self._order("market"), self._order("stop", **stop), self._order("target", **target)
        await self._accepted(entry, *children)
        await self._shown(entry.client_index, "filled")
        rows = await self._until("accountActiveOrders", {"market_id": self._listing.market_id}, "orders")
        keeps = {row["client_order_index"] for row in rows} <= {child.client_index for child in children}
        self.answers["whether groups keep the ids of children"] = "yes" if keeps else "no"
        return f"filled, with {len(rows)} children"

    async def _placed(self, status: str, kind: str, **more: Any) -> str:
        order = self._order(kind, **more)
        await self._accepted(order)
        self._placed_indexes[kind] = order.client_index
        return str((await self._shown(order.client_index, status))["status"])

    async def _refused(self) -> str:
        """Send a stop whose worst price is 6 % past its trigger; the one before must stand."""
        worst = (1 - _FAR) * Decimal("0.94")
        answer = await self._sent_order(self._order("stop", sells=True, price=worst, trigger=1 - _FAR))
        self.answers["price band of triggers"] = f"6 % past the trigger: code {answer.code}"
        if answer.is_taken:
            raise MarketDataError("the venue accepted a stop 6 % past its trigger")
        await self._shown(self._placed_indexes["stop"], "pending")
        return answer.reason[:100]

    async def _cancel(self) -> str:
        for kind in ("stop", "target"):
            await self._canceled(self._placed_indexes[kind])
        answer = await self._sent_order(self._order("limit", self._placed_indexes["stop"], price=1 - _FAR))
        if not answer.is_taken and answer.code != INDEX_EXISTS:
            raise MarketDataError(answer.reason)
        self.answers["whether an id may be used again"] = "yes" if answer.is_taken else "no"
        return "canceled"

    async def _cut(self) -> str:
        """Cut the stream of orders without a farewell, and subscribe again."""
        channel = f"{_CHANNEL}/{self._signer.account_index}"
        wanted = {"type": "subscribe", "channel": channel, "auth": self._signer.authorization()}
        for name in ("before", "after"):
            async with self._api.session().ws_connect(
                f"{self._api.base_url.replace('http', 'ws', 1)}/stream"
            ) as socket:
                await socket.send_json(wanted)
                async with asyncio.timeout(_SHOWN_WITHIN_S):
                    while (frame := await socket.receive_json())["type"] != f"subscribed/{_CHANNEL}":
                        if frame["type"] == "error":
                            raise MarketDataError(f"the stream refuses: {frame}")
                self.payloads[f"ws_{_CHANNEL}_{name}"] = frame
                socket.get_extra_info("socket").shutdown(SHUT_RDWR)
        return "subscribed again"

    async def _kill(self) -> str:
        """Kill a process that has sent an order, and find the order from here."""
        index = 1 + randbelow(CLIENT_INDEX_MAX)
        process = await asyncio.create_subprocess_exec(sys.executable, *self._child, str(index))
        try:
            await self._shown(index, "open")
        finally:
            process.kill()
            await process.wait()
        await self._canceled(index)
        return "the order of the killed process was found and canceled"

    # Within

    def _order(
        self, kind: str, index: int = 0, *, sells: bool = False, price: Decimal | None = None, trigger: Decimal = ZERO
    ) -> OrderTerms:
        """Return an order whose prices are shares of the mid; by default 3 % past it."""
        share = Decimal("0.97" if sells else "1.03") if price is None else price
        unit, name = self._mid / self._listing.market.tick, index or 1 + randbelow(CLIENT_INDEX_MAX)
        prices = int(unit * share), int(unit * trigger)
        return OrderTerms(self._listing.market_id, name, self._lots, prices[0], sells, kind, sells, prices[1])

    async def _sent_order(self, *orders: OrderTerms) -> SendAnswer:
        signed = self._signer.create_orders(orders, nonce=await self._transactions.next_nonce())
        return await self._transactions.send(signed)

    async def _accepted(self, *orders: OrderTerms) -> None:
        if not (answer := await self._sent_order(*orders)).is_taken:
            raise MarketDataError(answer.reason)

    async def _canceled(self, index: int) -> None:
        market_id = self._listing.market_id
        if not await self._sent("canceling", partial(self._signer.cancel_order, market_id, index)):
            raise MarketDataError("the venue does not cancel the order")
        await self._shown(index, "canceled")

    async def _shown(self, client_index: int, status: str) -> dict[str, Any]:
        """Return the order once the venue shows it with a status."""
        rows = await self._until("accountOrders", {"client_order_indexes": client_index}, "orders", status)
        return dict(rows[0])

    async def _until(self, name: str, more: dict[str, Any], rows: str, status: str | None = None) -> list[Any]:
        """Return rows once there are some. Raise `MarketDataError` when the venue shows none in time."""
        ends, parameters = monotonic() + _SHOWN_WITHIN_S, {"account_index": self._signer.account_index, **more}
        while True:
            answer = await self._api.get(f"/api/v1/{name}", _RAW, signer=self._signer, **parameters)
            self.payloads[f"http_{name}_{status or 'rows'}"] = answer
            found: list[Any] = answer[rows] or []
            if found and (status is None or found[0]["status"] == status):
                return found
            if monotonic() > ends:
                raise MarketDataError(f"{name}: {status or rows} is not shown after {_SHOWN_WITHIN_S:.0f} s: {found}")
            await asyncio.sleep(self._pause_s)
