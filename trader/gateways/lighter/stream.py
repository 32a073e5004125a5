"""Lighter's WebSocket: subscribes, answers pings, and hands each market what is told of it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Final

import aiohttp
import msgspec

from trader.clock import EPOCH, Clock
from trader.errors import MarketDataError
from trader.gateways.lighter.market import LighterMarket

logger = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 15.0
"""A ping of the protocol: a connection that is cut without a word is found out."""

_KEEP_ALIVE: Final = timedelta(seconds=30)
"""The venue closes a stream from which it hears nothing for two minutes."""

_SILENCE_MAX: Final = timedelta(seconds=20)
_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
_MILLISECOND: Final = timedelta(milliseconds=1)


class _Message(msgspec.Struct):
    """The envelope of every message; the bodies are decoded by the market they belong to."""

    type: str = ""
    channel: str = ""
    timestamp: int = 0
    order_book: msgspec.Raw = msgspec.Raw()
    market_stats: msgspec.Raw = msgspec.Raw()
    message: str = ""


_MESSAGE: Final = msgspec.json.Decoder(_Message)


class LighterStream:
    """One connection, and the markets that are followed on it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, markets: Iterable[LighterMarket], clock: Clock) -> None:
        self._socket = socket
        self._clock = clock
        self._markets = {market.market_id: market for market in markets}
        self._asked: set[int] = set()
        self._heard_at = self._spoke_at = clock.now()

    async def subscribe(self) -> None:
        """Ask for the summaries of all markets; `listen` asks for the books."""
        for market_id in self._markets:
            await self._send("subscribe", f"market_stats/{market_id}")

    async def listen(self, seconds: float) -> None:
        """Hear what the venue says for so long. Raises `MarketDataError` when the connection is of no use any more."""
        await self._ask_for_books()
        loop = asyncio.get_running_loop()
        due_s = loop.time() + seconds
        while (left_s := due_s - loop.time()) > 0:
            try:
                message = await self._socket.receive(timeout=left_s)
            except TimeoutError:
                break
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise MarketDataError(f"the venue ended the stream ({message.type.name.lower()} {message.data})")
            await self._hear(message.data)
        if self._clock.now() - self._heard_at > _SILENCE_MAX:
            raise MarketDataError(f"the stream was silent for {_SILENCE_MAX.total_seconds():.0f} s")

    async def _ask_for_books(self) -> None:
        now = self._clock.now()
        for market_id, market in self._markets.items():
            if market.is_to_be_asked_for(now):
                if market_id in self._asked:  # or the venue says that the subscription stands, and tells nothing new
                    await self._send("unsubscribe", f"order_book/{market_id}")
                self._asked.add(market_id)
                await self._send("subscribe", f"order_book/{market_id}")
        if now - self._spoke_at >= _KEEP_ALIVE:
            await self._send("ping")

    async def _hear(self, text: str) -> None:
        now = self._heard_at = self._clock.now()
        try:
            message = _MESSAGE.decode(text)
        except msgspec.DecodeError as error:
            raise MarketDataError(f"the stream is not understood: {error}: {text[:200]}") from error
        market = self._market_of(message.channel)
        if message.type == "ping":
            await self._send("pong")
        elif message.type == "error":
            logger.warning("the venue's stream says of %s: %s", message.channel or "us", message.message)
        elif market is not None:
            try:
                self._tell(market, message, now)
            except MarketDataError as error:
                logger.warning("%s: %s", market.symbol, error)

    def _tell(self, market: LighterMarket, message: _Message, now: datetime) -> None:
        match message.type.partition("/"):
            case "subscribed" | "update" as kind, _, "order_book":
                sent_at = _moment(message.timestamp)
                market.hear_book(bytes(message.order_book), now, sent_at, is_snapshot=kind == "subscribed")
            case "subscribed" | "update", _, "market_stats":
                market.hear_stats(bytes(message.market_stats), now)

    def _market_of(self, channel: str) -> LighterMarket | None:
        _, _, number = channel.partition(":")
        return self._markets.get(int(number)) if number.isdecimal() else None

    async def _send(self, kind: str, channel: str | None = None) -> None:
        self._spoke_at = self._clock.now()
        try:
            await self._socket.send_json({"type": kind} if channel is None else {"type": kind, "channel": channel})
        except (aiohttp.ClientError, OSError) as error:
            raise MarketDataError(f"the venue ended the stream: {str(error) or type(error).__name__}") from error


@asynccontextmanager
async def open_stream(
    session: aiohttp.ClientSession, base_url: str, markets: Iterable[LighterMarket], clock: Clock
) -> AsyncIterator[LighterStream]:
    """A connection for as long as the block runs. Raises `MarketDataError` when there is none to be had."""
    followed = list(markets)
    url = f"{base_url.replace('http', 'ws', 1)}/stream?readonly=true"
    try:
        socket = await session.ws_connect(url, heartbeat=_HEARTBEAT_S, max_msg_size=_MESSAGE_BYTES_MAX)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise MarketDataError(f"{base_url} cannot be reached: {str(error) or type(error).__name__}") from error
    try:
        stream = LighterStream(socket, followed, clock)
        await stream.subscribe()
        yield stream
    finally:
        for market in followed:
            market.cut()
        await socket.close()


def _moment(timestamp_ms: int) -> datetime | None:
    try:
        return EPOCH + timestamp_ms * _MILLISECOND if timestamp_ms else None
    except OverflowError as error:
        raise MarketDataError(f"the time {timestamp_ms} cannot be") from error
