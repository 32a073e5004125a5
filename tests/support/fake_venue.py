"""Fake of Lighter's public interface: a real server on loopback that follows a test's script, faults included.

The messages follow the venue's documents and recordings of it: snapshots and changes of a book with their nonces,
summaries, pings, errors, and REST answers in the venue's units.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from time import time
from typing import Any, Final, Self

import orjson
from aiohttp import WSCloseCode, web

IDS: Final = {"ETH": 0, "BTC": 1, "SOL": 2}
PRICES: Final = {"ETH": "3300.00", "BTC": "94000.0", "SOL": "200.000"}


@dataclass
class FakeMarket:
    """A market of the fake venue, with prices and sizes by level in the venue's format."""

    symbol: str
    market_id: int
    price_decimals: int
    size_decimals: int
    mid: Decimal
    nonce: int = 1000
    offset: int = 1
    bids: dict[str, str] = field(default_factory=dict)
    asks: dict[str, str] = field(default_factory=dict)
    index: Decimal | None = None
    mark: Decimal | None = None
    current_rate: str = "0.0012"
    settled_rate: str = "-0.0005"
    settled_at_ms: int = 1_780_545_600_001
    status: str = "active"
    changes: dict[str, Any] = field(default_factory=dict)

    def detail(self) -> dict[str, Any]:
        return {
            "symbol": self.symbol, "market_id": self.market_id, "market_type": "perp", "status": self.status,
            "base_asset_id": 0, "quote_asset_id": 0, "taker_fee": "0.0000", "maker_fee": "0.0000",
            "is_taker_fee_enabled": True, "is_maker_fee_enabled": True, "liquidation_fee": "1.0000",
            "min_base_amount": "0.0050", "min_quote_amount": "10.000000", "order_quote_limit": "281474976.710655",
            "supported_size_decimals": self.size_decimals, "supported_price_decimals": self.price_decimals,
            "supported_quote_decimals": 6, "quote_multiplier": 1,
            "size_decimals": self.size_decimals, "price_decimals": self.price_decimals,
            "default_initial_margin_fraction": 500, "min_initial_margin_fraction": 200,
            "maintenance_margin_fraction": 120, "closeout_margin_fraction": 80,
            "last_trade_price": float(self.mid), "daily_trades_count": 428074, "daily_base_token_volume": 195399.1521,
            "daily_quote_token_volume": 460664167.955905, "daily_price_low": 1, "daily_price_high": 2,
            "daily_price_change": -0.52, "open_interest": 27350.8981, "daily_chart": {},
            "market_config": {
                "market_margin_mode": 0, "insurance_fund_account_index": 281474976710655, "liquidation_mode": 0,
                "force_reduce_only": False, "trading_hours": "", "funding_fee_discounts_enabled": False,
                "hidden": False, "rfq_enabled": True,
            },
            "strategy_index": 2, "mark_price": str(self.mark or self.mid), "index_price": str(self.index or self.mid),
            **self.changes,
        }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        return {
            "symbol": self.symbol, "market_id": self.market_id,
            "index_price": str(self.index or self.mid), "mark_price": str(self.mark or self.mid),
            "mid_price": str(self.mid), "open_interest": "102123609.308856", "last_trade_price": str(self.mid),
            "current_funding_rate": self.current_rate, "funding_rate": self.settled_rate,
            "funding_timestamp": self.settled_at_ms, "daily_price_change": -4.366136694955931,
        }  # fmt: skip

    def place(self, mid: Decimal) -> dict[str, list[dict[str, str]]]:
        """Move the book to a mid, with five levels a side, and return the changed levels."""
        tick = Decimal(1).scaleb(-self.price_decimals)
        self.mid = mid
        changes: dict[str, list[dict[str, str]]] = {}
        for name, side, sign in (("bids", self.bids, -1), ("asks", self.asks, 1)):
            wanted = {f"{mid + sign * tick * n}": f"{Decimal(n).scaleb(-1):.4f}" for n in range(1, 6)}
            gone = {price: "0.0000" for price in side if price not in wanted}
            new = {price: size for price, size in wanted.items() if side.get(price) != size}
            side.clear()
            side.update(wanted)
            changes[name] = [{"price": price, "size": size} for price, size in (gone | new).items()]
        return changes


class FakeVenue:
    """The server. It can be stopped and started again on its port."""

    def __init__(self) -> None:
        self.markets = {
            symbol: FakeMarket(symbol, market_id, len(PRICES[symbol].partition(".")[2]), 4, Decimal(PRICES[symbol]))
            for symbol, market_id in IDS.items()
        }
        for market in self.markets.values():
            market.place(market.mid)
        self.sockets: list[web.WebSocketResponse] = []
        self.subscriptions: list[tuple[web.WebSocketResponse, str]] = []
        self.heard: list[dict[str, Any]] = []
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.answers: list[web.Response] = []
        """Answers of REST to give instead, one for each request to come."""

        self.candle_rows: dict[int, list[dict[str, Any]]] = {}
        self.funding_rows: dict[int, list[dict[str, Any]]] = {}
        self.lag_ms = 0
        self.is_mute = False
        self.refuses_streams = False
        """Whether it answers requests but opens no WebSocket, as a proxy in between that knows none."""

        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> Self:
        app = web.Application()
        app.router.add_routes(self.routes())
        app.on_response_prepare.append(self._state_date)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        await self.cut()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def routes(self) -> Iterable[web.RouteDef]:
        """The routes that it answers."""
        return (
            web.get("/stream", self._stream),
            web.get("/api/v1/orderBookDetails", self._details),
            web.get("/api/v1/orderBookOrders", self._book_orders),
            web.get("/api/v1/candles", self._candles),
            web.get("/api/v1/fundings", self._fundings),
        )

    # Actions of the test

    async def move(self, symbol: str, mid: str, *, is_lost: bool = False) -> None:
        """Move a market's book and, unless the change is lost, send it."""
        market = self.markets[symbol]
        before = market.nonce
        market.nonce += 17
        market.offset += 1
        changes = market.place(Decimal(mid))
        if not is_lost:
            await self.tell_book("update", market, {**changes, "begin_nonce": before})

    async def summarize(self, symbol: str) -> None:
        """Send a market's summary."""
        market = self.markets[symbol]
        await self._tell(f"market_stats/{market.market_id}", "update/market_stats", {"market_stats": market.summary()})

    async def tell_book(self, kind: str, market: FakeMarket, body: Mapping[str, Any]) -> None:
        whole = {"code": 0, "nonce": market.nonce, "offset": market.offset, **body}
        await self._tell(f"order_book/{market.market_id}", f"{kind}/order_book", {"order_book": whole})

    async def say(self, text: str) -> None:
        """Send any text to all subscribers."""
        for socket in list(self.sockets):
            await _send(socket, text)

    async def cut(self) -> None:
        """Cut every connection of the stream."""
        sockets, self.sockets, self.subscriptions = self.sockets, [], []
        for socket in sockets:
            await socket.close(code=WSCloseCode.GOING_AWAY)

    # Its own behavior

    async def _tell(self, channel: str, kind: str, body: Mapping[str, Any]) -> None:
        if self.is_mute:
            return
        for socket, subscribed in list(self.subscriptions):
            if subscribed == channel and not socket.closed:
                await _send(socket, self._message(channel, kind, body))

    def _message(self, channel: str, kind: str, body: Mapping[str, Any]) -> str:
        now_ms = int(time() * 1000) - self.lag_ms
        return orjson.dumps({"channel": channel.replace("/", ":"), "type": kind, "timestamp": now_ms, **body}).decode()

    async def _stream(self, request: web.Request) -> web.WebSocketResponse:
        if self.refuses_streams:
            raise web.HTTPForbidden
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets.append(socket)
        await _send(socket, '{"type":"connected","session_id":"3f1c"}')
        async for message in socket:
            asked = orjson.loads(message.data)
            self.heard.append(asked)
            if asked["type"] == "ping":
                await _send(socket, '{"type":"pong"}')
            elif not self.is_mute:
                await self._subscription(socket, asked)
        return socket

    async def _subscription(self, socket: web.WebSocketResponse, asked: Mapping[str, str]) -> None:
        channel = asked.get("channel", "")
        kind, _, number = channel.partition("/")
        market = next((entry for entry in self.markets.values() if str(entry.market_id) == number), None)
        is_standing = (socket, channel) in self.subscriptions
        if asked["type"] == "unsubscribe" and is_standing:
            self.subscriptions.remove((socket, channel))
            await _send(socket, orjson.dumps({"type": "unsubscribed", "channel": f"{kind}:{number}"}).decode())
        elif asked["type"] == "subscribe" and (market is None or is_standing):
            error = {"type": "error", "code": 30012, "channel": f"{kind}:{number}", "message": "failed to subscribe"}
            await _send(socket, orjson.dumps(error).decode())
        elif asked["type"] == "subscribe" and market is not None:
            self.subscriptions.append((socket, channel))
            await _send(socket, self._message(channel, f"subscribed/{kind}", _first_words(kind, market)))

    async def _details(self, request: web.Request) -> web.Response:
        details = [market.detail() for market in self.markets.values()]
        return self._answer(request, {"order_book_details": details, "spot_order_book_details": []})

    async def _book_orders(self, request: web.Request) -> web.Response:
        """Return two orders at each level, the best first."""
        market = next(entry for entry in self.markets.values() if str(entry.market_id) == request.query["market_id"])
        sides = {
            name: [
                {"price": price, "remaining_base_amount": f"{Decimal(size) / 2}", "initial_base_amount": size}
                for price, size in side.items()
                for _ in range(2)
            ][: int(request.query["limit"])]
            for name, side in (("bids", market.bids), ("asks", market.asks))
        }
        return self._answer(request, {"total_asks": 5, "total_bids": 5, **sides})

    async def _candles(self, request: web.Request) -> web.Response:
        """At most 500, the newest of the window, in milliseconds; both ends belong to it."""
        start, end = int(request.query["start_timestamp"]), int(request.query["end_timestamp"])
        rows = self.candle_rows.get(int(request.query["market_id"]), [])
        candles = [row for row in rows if start <= row["t"] <= end][-min(500, int(request.query["count_back"])) :]
        return self._answer(request, {"r": request.query["resolution"], "c": candles or None})

    async def _fundings(self, request: web.Request) -> web.Response:
        """In seconds, where candles are in milliseconds."""
        start, end = int(request.query["start_timestamp"]), int(request.query["end_timestamp"])
        rows = self.funding_rows.get(int(request.query["market_id"]), [])
        return self._answer(request, {"fundings": [row for row in rows if start <= row["timestamp"] <= end]})

    async def _state_date(self, _: web.Request, response: web.StreamResponse) -> None:
        """Set the header `Date` of an answer, where it is not the machine's time."""

    def _answer(self, request: web.Request, body: Mapping[str, Any]) -> web.Response:
        self.asked.append((request.path, dict(request.query)))
        if self.answers:
            return self.answers.pop(0)
        return web.Response(body=orjson.dumps({"code": 200, **body}), content_type="application/json")


async def _send(socket: web.WebSocketResponse, text: str) -> None:
    with suppress(ConnectionError):  # clients that have left receive nothing
        await socket.send_str(text)


def _first_words(kind: str, market: FakeMarket) -> dict[str, Any]:
    if kind == "market_stats":
        return {"market_stats": market.summary()}
    levels = {
        name: [{"price": price, "size": size} for price, size in side.items()]
        for name, side in (("bids", market.bids), ("asks", market.asks))
    }
    return {"order_book": {"code": 0, "nonce": market.nonce, "begin_nonce": 0, "offset": market.offset, **levels}}


@asynccontextmanager
async def fake_venue() -> AsyncIterator[FakeVenue]:
    venue = await FakeVenue().start()
    try:
        yield venue
    finally:
        await venue.stop()
