"""Hyperliquid's WebSocket: whole books and summaries of the followed markets, at least twice a second."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Final

import msgspec

from trader.core.clock import Clock
from trader.core.errors import MarketDataError
from trader.live.book import BookChange, LevelChange
from trader.live.http import VenueHttp
from trader.live.market import MarketSummary, VenueMarket
from trader.live.socket import MarketStream, Socket, connect, time_of

logger = logging.getLogger(__name__)

PATH: Final = "/ws"
PING: Final = {"method": "ping"}


class _Level(msgspec.Struct):
    px: Decimal
    sz: Decimal


class BookRow(msgspec.Struct):
    """A book: bids, then asks."""

    coin: str
    levels: tuple[list[_Level], list[_Level]]
    time: int


class _Context(msgspec.Struct, rename="camel"):
    funding: Decimal
    open_interest: Decimal
    oracle_px: Decimal
    mark_px: Decimal


class _ContextRow(msgspec.Struct):
    coin: str
    ctx: _Context


class ChannelMessage(msgspec.Struct):
    """What every message has; the body is decoded by its channel."""

    channel: str
    data: msgspec.Raw = msgspec.Raw(b"null")


MESSAGE: Final = msgspec.json.Decoder(ChannelMessage)
_BOOK: Final = msgspec.json.Decoder(BookRow)
_CONTEXT: Final = msgspec.json.Decoder(_ContextRow)


def book_of(row: BookRow) -> BookChange:
    bids, asks = ([LevelChange(level.px, level.sz) for level in side] for side in row.levels)
    return BookChange(nonce=0, bids=bids, asks=asks)


class HyperliquidStream(MarketStream):
    """The markets followed on one connection; `coins` has the venue's names by number."""

    def __init__(self, socket: Socket, markets: Sequence[VenueMarket], clock: Clock, coins: Mapping[int, str]) -> None:
        super().__init__(socket, markets, clock)
        self._coins = coins
        self._by_coin = {coins[market.market_id]: market for market in markets}

    async def subscribe(self, market_id: int, *, to_book: bool, again: bool = False) -> None:
        wanted = {"type": "l2Book" if to_book else "activeAssetCtx", "coin": self._coins[market_id]}
        if again:
            await self._socket.send(method="unsubscribe", subscription=wanted)
        await self._socket.send(method="subscribe", subscription=wanted)

    async def receive(self, seconds: float) -> bool:
        if (message := await self._socket.receive(seconds, MESSAGE)) is None:
            return False
        now = self._received_at = self._clock.now()
        try:
            match message.channel:
                case "l2Book":
                    row = _BOOK.decode(message.data)
                    if (market := self._by_coin.get(row.coin)) is not None:
                        market.on_book(book_of(row), now, time_of(row.time), is_snapshot=True)
                case "activeAssetCtx":
                    context = _CONTEXT.decode(message.data)
                    if (market := self._by_coin.get(context.coin)) is not None:
                        market.on_summary(_summary(context.ctx), now)
                case "error":
                    logger.warning("the venue's stream reports an error: %s", bytes(message.data)[:200])
        except (MarketDataError, msgspec.DecodeError) as error:
            logger.warning("a message of the stream was dropped: %s", error)
        return True


def _summary(row: _Context) -> MarketSummary:
    return MarketSummary(row.mark_px, row.oracle_px, row.funding, row.open_interest * row.mark_px)


@asynccontextmanager
async def open_stream(
    http: VenueHttp, markets: Sequence[VenueMarket], clock: Clock, coins: Mapping[int, str]
) -> AsyncIterator[HyperliquidStream]:
    """Open a connection for the duration of the block.

    :raises StreamUnreachable: it cannot be opened
    :raises MarketDataError: it ends during the subscription to the markets
    """
    async with (
        connect(http, PATH, PING, lambda: clock.now().timestamp()) as socket,
        HyperliquidStream(socket, markets, clock, coins).opened() as stream,
    ):
        yield stream
