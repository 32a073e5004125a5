"""The streams of accounts at the fake venue: orders, trades, positions, assets and transactions, with faults on demand.

A frame is sent when something changes, before or after the same change is shown on request. By default a fifth of the
frames are dropped, doubled, late or out of order. Without a token of the account there is only a refusal.
"""

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final, Self

import orjson
from aiohttp import web
from support.fake_ledger import Ledger, Standing, account_row, position_rows
from support.fake_venue import FakeVenue

FRAME_FAULTS: Final = ("drop", "double", "late", "swap")
_PRIVATE: Final = (
    "account_orders", "account_all_orders", "account_all_trades", "account_all_positions", "account_all_assets",
    "account_tx", "account_all", "user_stats",
)  # fmt: skip


class AccountStreams(FakeVenue):
    """A fake venue with streams of its accounts. `tell_changes` is called after each change."""

    ledgers: dict[int, Ledger]
    random: Random

    def __init__(self) -> None:
        super().__init__()
        self.frame_faults: list[str] = []
        """The faults of the next frames of accounts, one each; `ok` for none."""

        self.frame_fault_share = 0.2
        """The share of frames with a random fault, once `frame_faults` are used up."""

        self.accounts_subscribed: list[tuple[web.WebSocketResponse, str]] = []
        self._held_back: list[tuple[web.WebSocketResponse, str]] = []
        self._frames: asyncio.Queue[tuple[web.WebSocketResponse, str]] = asyncio.Queue()
        self._pump: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        await super().start()
        self._pump = asyncio.create_task(self._send_frames())
        return self

    async def stop(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
        await super().stop()

    async def cut(self) -> None:
        self.accounts_subscribed = []
        self._held_back = []
        await super().cut()

    def tell_changes(self, ledger: Ledger, orders: Sequence[Standing], trades: Sequence[Mapping[str, Any]]) -> None:
        """Queue the frames of a change for the subscribers of the account."""
        for socket, channel in self.accounts_subscribed:
            kind, *place = channel.split("/")
            if int(place[-1]) != ledger.index:
                continue
            chosen = [order for order in orders if len(place) == 1 or order.market_id == int(place[0])]
            body = self._body(kind, ledger, chosen, trades, is_snapshot=False)
            if body is not None:
                self._queue(socket, self._message(channel, f"update/{kind}", body))

    async def _subscription(self, socket: web.WebSocketResponse, asked: Mapping[str, str]) -> None:
        channel = asked.get("channel", "")
        kind, *place = channel.split("/")
        if kind not in _PRIVATE:
            await super()._subscription(socket, asked)
            return
        ledger = self.ledgers.get(int(place[-1])) if place[-1].isdecimal() else None
        token = asked.get("auth", "").split(":")
        if asked["type"] == "unsubscribe":
            self.accounts_subscribed = [each for each in self.accounts_subscribed if each != (socket, channel)]
        elif ledger is None or (kind != "user_stats" and (len(token) < 4 or token[1] != place[-1])):
            error = {"type": "error", "code": 30012, "channel": channel.replace("/", ":"), "message": "failed"}
            await socket.send_str(orjson.dumps(error).decode())
        else:
            self.accounts_subscribed.append((socket, channel))
            now, markets = [order for order in ledger.orders.values() if order.is_active], place[:-1]
            chosen = [order for order in now if not markets or order.market_id == int(markets[0])]
            body = self._body(kind, ledger, chosen, ledger.trades[-50:], is_snapshot=True)
            await socket.send_str(self._message(channel, f"subscribed/{kind}", body or {}))

    def _body(
        self, kind: str, ledger: Ledger, orders: Sequence[Standing], trades: Sequence[Mapping[str, Any]], *,
        is_snapshot: bool,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Return the body of a frame; None if nothing changed for it."""
        by_market: dict[str, list[Any]] = {}
        if kind in ("account_orders", "account_all_orders"):
            for order in orders:
                by_market.setdefault(str(order.market_id), []).append(order.shown())
            body = {"account": ledger.index, "nonce": ledger.next_nonce, "orders": by_market}
            return body if by_market or is_snapshot else None
        if kind == "account_all_trades":
            for trade in trades:
                by_market.setdefault(str(trade["market_id"]), []).append(trade)
            return {"trades": by_market} if by_market or is_snapshot else None
        if kind == "account_tx":
            last = ledger.transactions[-20:] if is_snapshot else ledger.transactions[-1:]
            return {"txs": [row for each in last if (row := each.seen(each.ends_at)) is not None]}
        return self._state(kind, ledger)

    def _state(self, kind: str, ledger: Ledger) -> dict[str, Any]:
        rows = position_rows(ledger, self.markets.values(), ledger.held)
        positions, row = (
            {str(each["market_id"]): each for each in rows},
            account_row(ledger, rows, ledger.collateral, 0),
        )
        if kind == "account_all_positions":
            return {"positions": positions, "shares": [], "last_funding_round": None, "last_funding_discount": None}
        if kind == "account_all_assets":
            return {"assets": {"3": row["assets"][0]}}
        if kind == "user_stats":
            money = row["collateral"]
            part = {
                "available_balance": money, "buying_power": "0", "collateral": money, "leverage": "0.00",
                "margin_usage": "0.00", "portfolio_value": money,
            }  # fmt: skip
            mode = {"account_trading_mode": ledger.trading_mode}
            return {"stats": {**mode, **part, "cross_stats": part, "total_stats": part}}
        return {"account": ledger.index, "positions": positions}

    def _queue(self, socket: web.WebSocketResponse, text: str) -> None:
        """Queue a frame, with its fault: one that is late or swapped goes after the next one."""
        is_random = not self.frame_faults and self.random.random() < self.frame_fault_share
        fault = self.frame_faults.pop(0) if self.frame_faults else self.random.choice(FRAME_FAULTS) if is_random else ""
        if fault == "drop":
            return
        if fault in ("late", "swap"):
            self._held_back.append((socket, text))
            return
        held, self._held_back = self._held_back, []
        for frame in [(socket, text)] * (2 if fault == "double" else 1) + held:
            self._frames.put_nowait(frame)

    async def _send_frames(self) -> None:
        while True:
            socket, text = await self._frames.get()
            if not socket.closed and not self.is_mute:
                await socket.send_str(text)
