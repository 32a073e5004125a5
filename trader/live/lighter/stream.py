"""Lighter's WebSocket: one connection that is kept alive, and the markets followed on it."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final, TypeVar

import msgspec

from trader.core.clock import EPOCH, Clock
from trader.core.errors import MarketDataError
from trader.live.book import BookChange
from trader.live.http import VenueHttp
from trader.live.market import MarketSummary, VenueMarket
from trader.live.socket import MarketStream, Socket, connect, time_of

logger = logging.getLogger(__name__)

PATH: Final = "/stream"
PING: Final = {"type": "ping"}
_MILLISECOND: Final = timedelta(milliseconds=1)


class Envelope(msgspec.Struct):
    """What every message has."""

    type: str = ""
    channel: str = ""
    message: str = ""


class MarketStats(msgspec.Struct):
    """The venue's summary of a market. Funding rates are percent of the notional per hour; longs pay a positive one.

    `open_interest` is in quote currency (the REST interface gives base units).
    """

    mark_price: Decimal
    index_price: Decimal
    current_funding_rate: Decimal | None = None
    funding_rate: Decimal | None = None
    funding_timestamp: int = 0
    open_interest: Decimal | None = None


class _Message(Envelope):
    """A message of the markets; each body is decoded by its market."""

    timestamp: int = 0
    order_book: msgspec.Raw = msgspec.Raw()
    market_stats: msgspec.Raw = msgspec.Raw()


_MESSAGE: Final = msgspec.json.Decoder(_Message)
_BOOK: Final = msgspec.json.Decoder(BookChange)
_STATS: Final = msgspec.json.Decoder(MarketStats)

B = TypeVar("B")
T = TypeVar("T", bound=Envelope)


async def receive(socket: Socket, seconds: float, decoder: "msgspec.json.Decoder[T]") -> T | None:
    """Return the next message, or None after this long. Answer the venue's pings, and log its errors."""
    message = await socket.receive(seconds, decoder)
    if message is not None and message.type == "ping":
        await socket.send(type="pong")
    elif message is not None and message.type == "error":
        where = message.channel or "no channel"
        logger.warning("the venue's stream reports an error (%s): %s", where, message.message)
    return message


class LighterStream(MarketStream):
    """The markets followed on one connection."""

    async def subscribe(self, market_id: int, *, to_book: bool, again: bool = False) -> None:
        channel = f"order_book/{market_id}" if to_book else f"market_stats/{market_id}"
        if again:  # otherwise the venue confirms the subscription but sends no snapshot
            await self._socket.send(type="unsubscribe", channel=channel)
        await self._socket.send(type="subscribe", channel=channel)

    async def receive(self, seconds: float) -> bool:
        if (message := await receive(self._socket, seconds, _MESSAGE)) is None:
            return False
        now = self._received_at = self._clock.now()
        _, _, number = message.channel.partition(":")
        market = self._markets.get(int(number)) if number.isdecimal() else None
        if market is not None:
            try:
                self._dispatch(market, message, now)
            except MarketDataError as error:
                logger.warning("%s: %s", market.symbol, error)
        return True

    def _dispatch(self, market: VenueMarket, message: _Message, now: datetime) -> None:
        match message.type.partition("/"):
            case "subscribed" | "update" as kind, _, "order_book":
                sent_at = time_of(message.timestamp) if message.timestamp else None
                try:
                    change = _decode(message.order_book, _BOOK)
                except MarketDataError as error:
                    market.lose_book(error)
                    raise
                market.on_book(change, now, sent_at, is_snapshot=kind == "subscribed")
            case "subscribed" | "update", _, "market_stats":
                _apply_stats(market, _decode(message.market_stats, _STATS), now)


@asynccontextmanager
async def open_stream(http: VenueHttp, markets: Sequence[VenueMarket], clock: Clock) -> AsyncIterator[LighterStream]:
    """Open a connection for the duration of the block.

    :raises StreamUnreachable: it cannot be opened
    :raises MarketDataError: it ends during the subscription to the markets
    """
    async with (
        connect(http, f"{PATH}?readonly=true", PING, lambda: clock.now().timestamp()) as socket,
        LighterStream(socket, markets, clock).opened() as stream,
    ):
        yield stream


def _apply_stats(market: VenueMarket, stats: MarketStats, now: datetime) -> None:
    rate = stats.current_funding_rate
    next_rate = None if rate is None else rate / 100
    market.on_summary(MarketSummary(stats.mark_price, stats.index_price, next_rate, stats.open_interest), now)
    if stats.funding_timestamp and stats.funding_rate is not None and stats.funding_rate.is_finite():
        market.record_rate(EPOCH + stats.funding_timestamp * _MILLISECOND, stats.funding_rate / 100)


def _decode(body: msgspec.Raw, decoder: "msgspec.json.Decoder[B]") -> B:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise MarketDataError(f"cannot be decoded: {error}") from error
