"""One WebSocket connection to a venue, which is kept alive, and the markets followed on it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, Final, Self, TypeVar

import aiohttp
import msgspec

from trader.core.clock import EPOCH, Clock
from trader.core.errors import MarketDataError
from trader.live.http import VenueHttp
from trader.live.market import VenueMarket

_HEARTBEAT_S: Final = 15.0
"""Interval of WebSocket pings, which detect a silently dropped connection."""

_KEEP_ALIVE_S: Final = 30.0
"""Interval of application pings: venues close a stream on which the client is silent for a minute or two."""

_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
_SILENCE_MAX: Final = timedelta(seconds=20)
_MILLISECOND: Final = timedelta(milliseconds=1)

T = TypeVar("T")


class StreamUnreachable(MarketDataError):
    """The venue's WebSocket cannot be opened."""


class Socket:
    """One connection to the venue. Its methods raise `MarketDataError` when it is no longer usable."""

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, ping: dict[str, str], now_s: Callable[[], float]
    ) -> None:
        self._socket = socket
        self._ping = ping
        self._now_s = now_s
        self._sent_s = now_s()

    async def send(self, **fields: Any) -> None:
        self._sent_s = self._now_s()
        try:
            await self._socket.send_json(fields)
        except (aiohttp.ClientError, OSError) as error:
            raise MarketDataError(f"the venue ended the stream: {str(error) or type(error).__name__}") from error

    async def receive(self, seconds: float, decoder: "msgspec.json.Decoder[T]") -> T | None:
        """Return the next message, or None after this long. Keep the connection alive."""
        if self._now_s() - self._sent_s >= _KEEP_ALIVE_S:
            await self.send(**self._ping)
        try:
            received = await self._socket.receive(timeout=seconds)
        except TimeoutError:
            return None
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise MarketDataError(f"the venue ended the stream ({received.type.name.lower()} {received.data})")
        try:
            return decoder.decode(received.data)
        except msgspec.DecodeError as error:
            text = received.data[:200]
            raise MarketDataError(f"a message of the stream cannot be decoded: {error}: {text}") from error


@asynccontextmanager
async def connect(
    http: VenueHttp, path: str, ping: dict[str, str], now_s: Callable[[], float] = monotonic
) -> AsyncIterator[Socket]:
    """Open a connection for the duration of the block. Raise `StreamUnreachable` when it cannot be opened."""
    url = f"{http.base_url.replace('http', 'ws', 1)}{path}"
    try:
        socket = await http.session().ws_connect(url, heartbeat=_HEARTBEAT_S, max_msg_size=_MESSAGE_BYTES_MAX)
    except (aiohttp.ClientError, OSError) as error:
        raise StreamUnreachable(f"{http.base_url} cannot be reached: {str(error) or type(error).__name__}") from error
    async with socket:
        yield Socket(socket, ping, now_s)


class MarketStream(ABC):
    """The markets followed on one connection."""

    def __init__(self, socket: Socket, markets: Iterable[VenueMarket], clock: Clock) -> None:
        self._socket = socket
        self._clock = clock
        self._markets = {market.market_id: market for market in markets}
        self._subscribed: set[int] = set()
        self._received_at = clock.now()

    @abstractmethod
    async def subscribe(self, market_id: int, *, to_book: bool, again: bool = False) -> None:
        """Subscribe to the summary of a market or to its book, which `again` ends the subscription before."""

    @abstractmethod
    async def receive(self, seconds: float) -> bool:
        """Receive a message and apply it. Return False if none has come."""

    async def receive_for(self, seconds: float) -> None:
        """Receive messages for this long. Raise `MarketDataError` when the connection is no longer usable."""
        for market_id, market in self._markets.items():
            if market.claim_subscription(self._clock.now()):
                await self.subscribe(market_id, to_book=True, again=market_id in self._subscribed)
                self._subscribed.add(market_id)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + seconds
        while (left_s := due_s - loop.time()) > 0 and await self.receive(left_s):
            pass
        if self._clock.now() - self._received_at > _SILENCE_MAX:
            raise MarketDataError(f"the stream was silent for {_SILENCE_MAX.total_seconds():.0f} s")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Self]:
        """Follow the summaries; `receive_for` subscribes to the books. The books end with the block."""
        try:
            for market_id in self._markets:
                await self.subscribe(market_id, to_book=False)
            yield self
        finally:
            for market in self._markets.values():
                market.disconnect()


def time_of(time_ms: int) -> datetime:
    """Return a time of a message. Raise `MarketDataError` for an impossible one."""
    try:
        return EPOCH + time_ms * _MILLISECOND
    except OverflowError as error:
        raise MarketDataError(f"the time {time_ms} is impossible") from error
