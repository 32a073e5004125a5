"""Lighter's WebSocket: subscribes, answers pings, and hands each message to its market."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Final

import aiohttp
import msgspec

from trader.core.clock import EPOCH, Clock
from trader.core.errors import MarketDataError
from trader.live.lighter.market import LighterMarket

logger = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 15.0
"""Interval of WebSocket pings, which detect a silently dropped connection."""

_KEEP_ALIVE: Final = timedelta(seconds=30)
"""Interval of application pings: the venue closes a stream on which the client is silent for two minutes."""

_SILENCE_MAX: Final = timedelta(seconds=20)
_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
_MILLISECOND: Final = timedelta(milliseconds=1)


class _Message(msgspec.Struct):
    """The envelope of every message; each body is decoded by its market."""

    type: str = ""
    channel: str = ""
    timestamp: int = 0
    order_book: msgspec.Raw = msgspec.Raw()
    market_stats: msgspec.Raw = msgspec.Raw()
    message: str = ""


_MESSAGE: Final = msgspec.json.Decoder(_Message)


class StreamUnreachable(MarketDataError):
    """The venue's WebSocket cannot be opened."""


class LighterStream:
    """One connection and the markets followed on it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, markets: Iterable[LighterMarket], clock: Clock) -> None:
        self._socket = socket
        self._clock = clock
        self._markets = {market.market_id: market for market in markets}
        self._subscribed: set[int] = set()
        self._received_at = self._sent_at = clock.now()

    async def subscribe(self) -> None:
        """Subscribe to the summaries of all markets; `receive_for` subscribes to the books."""
        for market_id in self._markets:
            await self._send("subscribe", f"market_stats/{market_id}")

    async def receive_for(self, seconds: float) -> None:
        """Receive messages for this long. Raise `MarketDataError` when the connection is no longer usable."""
        await self._subscribe_to_books()
        loop = asyncio.get_running_loop()
        due_s = loop.time() + seconds
        while (left_s := due_s - loop.time()) > 0:
            try:
                message = await self._socket.receive(timeout=left_s)
            except TimeoutError:
                break
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise MarketDataError(f"the venue ended the stream ({message.type.name.lower()} {message.data})")
            await self._on_message(message.data)
        if self._clock.now() - self._received_at > _SILENCE_MAX:
            raise MarketDataError(f"the stream was silent for {_SILENCE_MAX.total_seconds():.0f} s")

    async def _subscribe_to_books(self) -> None:
        now = self._clock.now()
        for market_id, market in self._markets.items():
            if market.claim_subscription(now):
                if market_id in self._subscribed:  # otherwise the venue confirms the subscription but sends no snapshot
                    await self._send("unsubscribe", f"order_book/{market_id}")
                self._subscribed.add(market_id)
                await self._send("subscribe", f"order_book/{market_id}")
        if now - self._sent_at >= _KEEP_ALIVE:
            await self._send("ping")

    async def _on_message(self, text: str) -> None:
        now = self._received_at = self._clock.now()
        try:
            message = _MESSAGE.decode(text)
        except msgspec.DecodeError as error:
            raise MarketDataError(f"a message of the stream cannot be decoded: {error}: {text[:200]}") from error
        market = self._market_of(message.channel)
        if message.type == "ping":
            await self._send("pong")
        elif message.type == "error":
            logger.warning(
                "the venue's stream reports an error (%s): %s", message.channel or "no channel", message.message
            )
        elif market is not None:
            try:
                self._dispatch(market, message, now)
            except MarketDataError as error:
                logger.warning("%s: %s", market.symbol, error)

    def _dispatch(self, market: LighterMarket, message: _Message, now: datetime) -> None:
        match message.type.partition("/"):
            case "subscribed" | "update" as kind, _, "order_book":
                sent_at = _time(message.timestamp)
                market.on_book(bytes(message.order_book), now, sent_at, is_snapshot=kind == "subscribed")
            case "subscribed" | "update", _, "market_stats":
                market.on_stats(bytes(message.market_stats), now)

    def _market_of(self, channel: str) -> LighterMarket | None:
        _, _, number = channel.partition(":")
        return self._markets.get(int(number)) if number.isdecimal() else None

    async def _send(self, kind: str, channel: str | None = None) -> None:
        self._sent_at = self._clock.now()
        try:
            await self._socket.send_json({"type": kind} if channel is None else {"type": kind, "channel": channel})
        except (aiohttp.ClientError, OSError) as error:
            raise MarketDataError(f"the venue ended the stream: {str(error) or type(error).__name__}") from error


@asynccontextmanager
async def open_stream(
    session: aiohttp.ClientSession, base_url: str, markets: Iterable[LighterMarket], clock: Clock
) -> AsyncIterator[LighterStream]:
    """Open a connection for the duration of the block.

    :raises StreamUnreachable: it cannot be opened
    :raises MarketDataError: it ends during the subscription to the markets
    """
    followed = list(markets)
    url = f"{base_url.replace('http', 'ws', 1)}/stream?readonly=true"
    try:
        socket = await session.ws_connect(url, heartbeat=_HEARTBEAT_S, max_msg_size=_MESSAGE_BYTES_MAX)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StreamUnreachable(f"{base_url} cannot be reached: {str(error) or type(error).__name__}") from error
    try:
        stream = LighterStream(socket, followed, clock)
        await stream.subscribe()
        yield stream
    finally:
        for market in followed:
            market.disconnect()
        await socket.close()


def _time(timestamp_ms: int) -> datetime | None:
    try:
        return EPOCH + timestamp_ms * _MILLISECOND if timestamp_ms else None
    except OverflowError as error:
        raise MarketDataError(f"the time {timestamp_ms} is impossible") from error
