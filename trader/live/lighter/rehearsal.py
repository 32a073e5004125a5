"""Rehearsal at Lighter: the life of a small position step by step, and the venue's answers to open questions."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from decimal import ROUND_DOWN, Decimal
from secrets import randbelow
from socket import SHUT_RDWR
from time import monotonic
from typing import Any, Final

import msgspec

from trader.core.errors import MarketDataError
from trader.live.domain.orders import CLIENT_INDEX_MAX
from trader.live.lighter.account import prove_access
from trader.live.lighter.api import LighterApi, Listing
from trader.live.lighter.signer import OrderTerms, Signed, Signer
from trader.live.lighter.transactions import INDEX_EXISTS, SendAnswer, Transactions

_RAW: Final = msgspec.json.Decoder(dict[str, Any])
_SHOWN_WITHIN_S: Final = 30.0
_QUANTITY_OF_MINIMUM: Final = 4
_FAR: Final = Decimal("0.10")


class LighterRehearsal:
    """The steps at one account of the venue, which must be empty; `answers` and `payloads` fill meanwhile."""

    def __init__(self, signer: Signer, url: str, symbol: str, child: Sequence[str], *, pause_s: float = 0.3) -> None:
        self.url = url
        self.answers: dict[str, str] = {
            "whether groups keep the ids of children": "unknown: groups are not rehearsed",
        }
        self.payloads: dict[str, dict[str, Any]] = {}
        self._api = LighterApi(url)
        self._signer, self._symbol, self._child, self._pause_s = signer, symbol, child, pause_s
        self._transactions = Transactions(self._api, signer)
        self._listing: Listing
        self._lots = 0
        self._mark = Decimal(0)
        self._stop = self._target = 0
        self.steps: Sequence[tuple[str, Callable[[], Awaitable[str]]]] = (
            ("prove", self._prove), ("open", self._open), ("add", self._add), ("part", self._part),
            ("stop", self._place_stop), ("target", self._place_target), ("refused change", self._refused),
            ("cancel", self._cancel), ("cut socket", self._cut), ("kill -9 and restart", self._kill),
        )  # fmt: skip

    async def close(self) -> None:
        await self._signer.close()
        await self._api.close()

    async def send_and_wait(self, client_index: int) -> None:
        """Send an order far from the market and wait to be killed: what the child process does."""
        await self._prove()
        await self._send(self._order("limit", client_index, price=self._mark * (1 - _FAR)))
        await asyncio.sleep(_SHOWN_WITHIN_S)

    # Steps

    async def _prove(self) -> str:
        self._signer.check()
        await prove_access(self._api, self._signer)
        self._listing = (await self._api.listings())[self._symbol]
        market, book = self._listing.market, await self._api.book(self._listing.market_id)
        if not book.asks or not book.bids:
            raise MarketDataError(f"{self._symbol} has no prices on both sides")
        self._mark = (min(level.price for level in book.asks) + max(level.price for level in book.bids)) / 2
        least = max(market.lot, market.min_notional / self._mark) * _QUANTITY_OF_MINIMUM
        self._lots = int(least / market.lot) // 2 * 2 + 2
        return f"key {self._signer.key_index} of account {self._signer.account_index}; {self._symbol} at {self._mark}"

    async def _open(self) -> str:
        nonce, began = await self._transactions.next_nonce(), monotonic()
        order = self._order("market")
        await self._send(order, nonce=nonce)
        counted = await self._transactions.next_nonce() > nonce
        state = await self._shown(order.client_index, "filled")
        self.answers["when a nonce counts"] = "at acceptance" if counted else "after acceptance"
        venue_index, seen = state["order_index"], f"{monotonic() - began:.1f} s"
        rows = await self._until("trades", {"limit": 100, "sort_by": "trade_id", "order_index": venue_index}, "trades")
        self.answers["how long until visible"] = f"order {seen}, trades {monotonic() - began:.1f} s"
        return f"{len(rows)} trades at {rows[0]['price']}"

    async def _add(self) -> str:
        order = self._order("market")
        await self._send(order)
        return str((await self._shown(order.client_index, "filled"))["status"])

    async def _part(self) -> str:
        order = self._order("market", sells=True)
        await self._send(order)
        return str((await self._shown(order.client_index, "filled"))["status"])

    async def _place_stop(self) -> str:
        order = self._order("stop", sells=True, trigger=self._mark * (1 - _FAR), price=self._mark * (1 - _FAR))
        await self._send(order)
        self._stop = order.client_index
        return str((await self._shown(order.client_index, "pending"))["trigger_price"])

    async def _place_target(self) -> str:
        order = self._order("target", sells=True, trigger=self._mark * (1 + _FAR), price=self._mark)
        order = order._replace(price_ticks=order.trigger_ticks)
        await self._send(order)
        self._target = order.client_index
        return str((await self._shown(order.client_index, "pending"))["trigger_price"])

    async def _refused(self) -> str:
        trigger = self._mark * (1 - _FAR)
        order = self._order("stop", sells=True, trigger=trigger, price=trigger * Decimal("0.94"))
        answer = await self._sent(order)
        self.answers["price band of triggers"] = f"6 % past the trigger: code {answer.code}"
        if answer.is_accepted:
            raise MarketDataError("the venue accepted a stop 6 % past its trigger")
        standing = await self._shown(self._stop, "pending")
        return f"{answer.reason[:100]}; the old stop is {standing['status']}"

    async def _cancel(self) -> str:
        for index in (self._stop, self._target):
            await self._deliver(
                lambda nonce, index=index: self._signer.cancel_order(  # type: ignore[misc]
                    self._listing.market_id, index, nonce=nonce
                )
            )
            await self._shown(index, "canceled")
        again = self._order("limit", self._stop, price=self._mark * (1 - _FAR))
        answer = await self._sent(again)
        if not answer.is_accepted and answer.code != INDEX_EXISTS:
            raise MarketDataError(answer.reason)
        self.answers["whether an id may be used again"] = "yes" if answer.is_accepted else f"no: code {answer.code}"
        return "canceled"

    async def _cut(self) -> str:
        """Cut the stream of orders without a farewell, and subscribe again."""
        index = self._signer.account_index
        wanted = {"type": "subscribe", "channel": f"account_all_orders/{index}", "auth": self._signer.authorization()}
        for name in ("before", "after"):
            async with self._api.session().ws_connect(f"{self.url.replace('http', 'ws', 1)}/stream") as socket:
                await socket.send_json(wanted)
                async with asyncio.timeout(_SHOWN_WITHIN_S):
                    while (frame := await socket.receive_json())["type"] != "subscribed/account_all_orders":
                        if frame["type"] == "error":
                            raise MarketDataError(f"the stream refuses: {frame}")
                self.payloads[f"ws_account_all_orders_{name}"] = frame
                socket.get_extra_info("socket").shutdown(SHUT_RDWR)
        return "subscribed again"

    async def _kill(self) -> str:
        """Kill a process that has sent an order, and find the order from here."""
        index = 1 + randbelow(CLIENT_INDEX_MAX)
        process = await asyncio.create_subprocess_exec(sys.executable, *self._child, str(index))
        try:
            state = await self._shown(index, "open")
        finally:
            process.kill()
            await process.wait()
        await self._deliver(lambda nonce: self._signer.cancel_order(self._listing.market_id, index, nonce=nonce))
        await self._shown(index, "canceled")
        return f"the order {state['order_index']} of the killed process was found and canceled"

    # Within

    def _order(
        self, kind: str, client_index: int = 0, *, sells: bool = False, price: Decimal | None = None,
        trigger: Decimal | None = None,
    ) -> OrderTerms:  # fmt: skip
        tick = self._listing.market.tick
        worst = self._mark * (Decimal("0.97") if sells else Decimal("1.03")) if price is None else price
        ticks = [int((each / tick).to_integral_value(ROUND_DOWN)) for each in (worst, trigger or Decimal(0))]
        return OrderTerms(
            market_id=self._listing.market_id, client_index=client_index or 1 + randbelow(CLIENT_INDEX_MAX),
            lots=self._lots, price_ticks=ticks[0], is_ask=sells, type=kind, reduce_only=sells, trigger_ticks=ticks[1],
        )  # fmt: skip

    async def _send(self, order: OrderTerms, *, nonce: int | None = None) -> None:
        if not (answer := await self._sent(order, nonce=nonce)).is_accepted:
            raise MarketDataError(answer.reason)

    async def _sent(self, order: OrderTerms, *, nonce: int | None = None) -> SendAnswer:
        number = await self._transactions.next_nonce() if nonce is None else nonce
        return await self._transactions.send(self._signer.create_order(order, nonce=number))

    async def _deliver(self, sign: Callable[[int], Signed]) -> None:
        answer = await self._transactions.send(sign(await self._transactions.next_nonce()))
        if not answer.is_accepted:
            raise MarketDataError(answer.reason)

    async def _shown(self, client_index: int, status: str) -> dict[str, Any]:
        """Return the order once the venue shows it with a status."""
        parameters: dict[str, str | int] = {"client_order_indexes": client_index}
        rows = await self._until("accountOrders", parameters, "orders", status)
        return rows[0]

    async def _until(
        self, name: str, more: dict[str, str | int], rows: str, status: str | None = None
    ) -> list[dict[str, Any]]:
        """Return rows once there are some. Raise `MarketDataError` when the venue shows none in time."""
        ends, token = monotonic() + _SHOWN_WITHIN_S, self._signer.authorization()
        parameters = {"account_index": self._signer.account_index, **more}
        while True:
            answer = await self._api.get(f"/api/v1/{name}", parameters, _RAW, authorization=token)
            self.payloads[f"http_{name}_{status or 'rows'}"] = answer
            found: list[dict[str, Any]] = answer[rows] or []
            if found and (status is None or found[0]["status"] == status):
                return found
            if monotonic() > ends:
                raise MarketDataError(f"{name}: {status or rows} is not shown after {_SHOWN_WITHIN_S:.0f} s: {found}")
            await asyncio.sleep(self._pause_s)
