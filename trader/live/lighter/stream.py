"""Lighter's WebSocket: one connection that is kept alive, and the markets followed on it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from time import monotonic
from typing import Final, TypeVar

import aiohttp
import msgspec

from trader.core.clock import EPOCH, Clock
from trader.core.errors import MarketDataError
from trader.live.lighter.api import LighterApi
from trader.live.lighter.market import LighterMarket

logger = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 15.0
"""Interval of WebSocket pings, which detect a silently dropped connection."""

_KEEP_ALIVE_S: Final = 30.0
"""Interval of application pings: the venue closes a stream on which the client is silent for two minutes."""

_SILENCE_MAX: Final = timedelta(seconds=20)
_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
_MILLISECOND: Final = timedelta(milliseconds=1)


class Envelope(msgspec.Struct):
    """What every message has."""

    type: str = ""
    channel: str = ""
    message: str = ""


class _Message(Envelope):
    """A message of the markets; each body is decoded by its market."""

    timestamp: int = 0
    order_book: msgspec.Raw = msgspec.Raw()
    market_stats: msgspec.Raw = msgspec.Raw()


_MESSAGE: Final = msgspec.json.Decoder(_Message)

T = TypeVar("T", bound=Envelope)


class StreamUnreachable(MarketDataError):
    """The venue's WebSocket cannot be opened."""


class Socket:
    """One connection to the venue. Its methods raise `MarketDataError` when it is no longer usable."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, now_s: Callable[[], float]) -> None:
        self._socket = socket
        self._now_s = now_s
        self._sent_s = now_s()

    async def send(self, **fields: str) -> None:
        self._sent_s = self._now_s()
        try:
            await self._socket.send_json(fields)
        except (aiohttp.ClientError, OSError) as error:
            raise MarketDataError(f"the venue ended the stream: {str(error) or type(error).__name__}") from error

    async def receive(self, seconds: float, decoder: "msgspec.json.Decoder[T]") -> T | None:
        """Return the next message, or None after this long. Keep the connection alive, and log the venue's errors."""
        if self._now_s() - self._sent_s >= _KEEP_ALIVE_S:
            await self.send(type="ping")
        try:
            received = await self._socket.receive(timeout=seconds)
        except TimeoutError:
            return None
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise MarketDataError(f"the venue ended the stream ({received.type.name.lower()} {received.data})")
        try:
            message = decoder.decode(received.data)
        except msgspec.DecodeError as error:
            text = received.data[:200]
            raise MarketDataError(f"a message of the stream cannot be decoded: {error}: {text}") from error
        if message.type == "ping":
            await self.send(type="pong")
        elif message.type == "error":
            where = message.channel or "no channel"
            logger.warning("the venue's stream reports an error (%s): %s", where, message.message)
        return message


@asynccontextmanager
async def connect(api: LighterApi, query: str = "", now_s: Callable[[], float] = monotonic) -> AsyncIterator[Socket]:
    """Open a connection for the duration of the block. Raise `StreamUnreachable` when it cannot be opened."""
    url = f"{api.base_url.replace('http', 'ws', 1)}/stream{query}"
    try:
        socket = await api.session().ws_connect(url, heartbeat=_HEARTBEAT_S, max_msg_size=_MESSAGE_BYTES_MAX)
    except (aiohttp.ClientError, OSError) as error:
        raise StreamUnreachable(f"{api.base_url} cannot be reached: {str(error) or type(error).__name__}") from error
    async with socket:
        yield Socket(socket, now_s)


class LighterStream:
    """The markets followed on one connection."""

    def __init__(self, socket: Socket, markets: Iterable[LighterMarket], clock: Clock) -> None:
        self._socket = socket
        self._clock = clock
        self._markets = {market.market_id: market for market in markets}
        self._subscribed: set[int] = set()
        self._received_at = clock.now()

    async def subscribe(self) -> None:
        """Subscribe to the summaries of all markets; `receive_for` subscribes to the books."""
        for market_id in self._markets:
            await self._socket.send(type="subscribe", channel=f"market_stats/{market_id}")

    async def receive_for(self, seconds: float) -> None:
        """Receive messages for this long. Raise `MarketDataError` when the connection is no longer usable."""
        await self._subscribe_to_books()
        loop = asyncio.get_running_loop()
        due_s = loop.time() + seconds
        while (left_s := due_s - loop.time()) > 0:
            if (message := await self._socket.receive(left_s, _MESSAGE)) is None:
                break
            self._on_message(message)
        if self._clock.now() - self._received_at > _SILENCE_MAX:
            raise MarketDataError(f"the stream was silent for {_SILENCE_MAX.total_seconds():.0f} s")

    async def _subscribe_to_books(self) -> None:
        now = self._clock.now()
        for market_id, market in self._markets.items():
            if market.claim_subscription(now):
                if market_id in self._subscribed:  # otherwise the venue confirms the subscription but sends no snapshot
                    await self._socket.send(type="unsubscribe", channel=f"order_book/{market_id}")
                self._subscribed.add(market_id)
                await self._socket.send(type="subscribe", channel=f"order_book/{market_id}")

    def _on_message(self, message: _Message) -> None:
        now = self._received_at = self._clock.now()
        _, _, number = message.channel.partition(":")
        market = self._markets.get(int(number)) if number.isdecimal() else None
        if market is None:
            return
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


@asynccontextmanager
async def open_stream(api: LighterApi, markets: Sequence[LighterMarket], clock: Clock) -> AsyncIterator[LighterStream]:
    """Open a connection for the duration of the block.

    :raises StreamUnreachable: it cannot be opened
    :raises MarketDataError: it ends during the subscription to the markets
    """
    async with connect(api, "?readonly=true", lambda: clock.now().timestamp()) as socket:
        stream = LighterStream(socket, markets, clock)
        try:
            await stream.subscribe()
            yield stream
        finally:
            for market in markets:
                market.disconnect()


def _time(timestamp_ms: int) -> datetime | None:
    try:
        return EPOCH + timestamp_ms * _MILLISECOND if timestamp_ms else None
    except OverflowError as error:
        raise MarketDataError(f"the time {timestamp_ms} is impossible") from error
