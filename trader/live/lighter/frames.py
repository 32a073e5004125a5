"""Account data that Lighter pushes: the orders, trades and transactions of each account, and hints of any change.

A frame proves what it says, whenever it arrives: a trade has its id, a transaction its hash, an order that ended stays
so. It proves nothing by its absence: frames may be lost, so what is missing here is read on request.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any, Final

import aiohttp
import msgspec

from trader.core.errors import MarketDataError
from trader.live.lighter.api import LighterApi
from trader.live.lighter.rows import OrderRow, TradeRow, Transaction, key_of
from trader.live.lighter.signer import Signer
from trader.live.lighter.stream import PATH, PING, Envelope, receive
from trader.live.socket import Socket, connect
from trader.live.venue import AccountFeed

log = logging.getLogger("trader.live")

CHANNELS: Final = ("account_all_orders", "account_all_trades", "account_all_positions", "account_tx")
RENEW_S: Final = 480.0
"""Subscribe again with a new token this often: a token lasts ten minutes."""

LAG_S: Final = 12.0
"""How old what a request returns may be."""

_CHECKED_LAGS: Final = 25
"""For how many lags, five minutes, pushed orders are trusted without requesting the active ones."""

_NEVER_S: Final = float("-inf")
_RETRY_S: Final = 30.0
_PULSE_S: Final = 1.0
_BACKOFF_S_MAX: Final = 30.0
_ROWS_MAX: Final = 1000


class _Frame(Envelope):
    orders: dict[str, list[OrderRow]] | None = None
    trades: dict[str, list[TradeRow]] | None = None
    txs: list[Transaction] | None = None


_FRAME: Final = msgspec.json.Decoder(_Frame)


class AccountFrames(AccountFeed):
    """What is known of one account from frames, and from requests for its orders.

    `following` numbers the present subscription, of which nothing is missing yet; 0 while there is none.
    """

    def __init__(self, signer: Signer, *, lag_s: float = LAG_S) -> None:
        self.signer = signer
        self._lag_s = lag_s
        self.trades: dict[int, TradeRow] = {}
        self.transactions: dict[str, Transaction] = {}
        self.renew_s = 0.0
        self._orders: dict[int, OrderRow] = {}
        self._checked_s = self._distrusted_s = _NEVER_S
        self._changed = asyncio.Event()
        self._awaited: set[str] = set()

    def order(self, client_index: int) -> OrderRow | None:
        """Return an order that needs no request: one that ended, or one that is followed and was shown lately."""
        row = next((each for each in self._orders.values() if each.client_order_index == client_index), None)
        if row is None or row.is_final or self._is_current() or (self.following and row.seen_s > self._distrusted_s):
            return row
        return None

    def transaction(self, attempt: str) -> Transaction | None:
        """Return a transaction that was executed or refused, by its hash."""
        return self.transactions.get(key_of(attempt.partition(":")[2]))

    def standing(self) -> list[OrderRow] | None:
        """Return the standing orders, or None when they must be requested."""
        return [row for row in self._orders.values() if row.is_standing] if self._is_current() else None

    def learn(self, rows: Iterable[OrderRow]) -> list[OrderRow]:
        """Remember orders, unless newer states of them are known. Return the newest states."""
        newest = []
        for row in rows:
            known = self._orders.pop(row.order_index, None)
            if known is None or known.age <= row.age:
                row.seen_s = known.seen_s if known is not None and known.age == row.age else monotonic()
                known = row
            self._orders[row.order_index] = known
            newest.append(known)
        _shorten(self._orders, [index for index, row in self._orders.items() if row.is_final])
        return newest

    def check(self, active: Iterable[OrderRow]) -> list[OrderRow]:
        """Remember all active orders as requested, and forget those that the venue shows no more."""
        rows, now_s = self.learn(active), monotonic()
        shown = {row.order_index for row in rows}
        self._orders = {
            index: row
            for index, row in self._orders.items()
            if index in shown or row.is_final or now_s - row.seen_s < self._lag_s
        }
        self._checked_s = now_s
        return rows

    async def change(self, seconds: float) -> None:
        """Wait for a frame, at most this long."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def subscribe(self, awaited: Iterable[str]) -> None:
        """Begin a subscription: it is complete when each channel has answered with its snapshot.

        Until the active orders are requested again, only those are trusted that are pushed from now on.
        """
        self._awaited, self.following = set(awaited), 0
        self._checked_s, self._distrusted_s = _NEVER_S, monotonic()

    def lose(self, renew_s: float = 0.0) -> None:
        """Note that frames may be missing until the subscription that is due at `renew_s`."""
        self.subscribe(())
        self.renew_s = renew_s

    def receive(self, frame: _Frame, number: int) -> None:
        """Take a frame in. `number` names the subscription if this one completes it."""
        self.learn(row for rows in (frame.orders or {}).values() for row in rows)
        self.trades |= {row.trade_id: row for rows in (frame.trades or {}).values() for row in rows}
        ended = [each for each in frame.txs or () if each.is_failed or each.is_executed]
        self.transactions |= {each.key: each for each in ended}
        _shorten(self.trades, self.trades)
        _shorten(self.transactions, self.transactions)
        kind, _, channel = frame.type.partition("/")
        if kind == "subscribed" and channel in self._awaited:
            self._awaited.remove(channel)
            self.following = 0 if self._awaited else number
        self._changed.set()
        if self.listener is not None:
            self.listener()

    def _is_current(self) -> bool:
        return bool(self.following) and monotonic() - self._checked_s < _CHECKED_LAGS * self._lag_s


def _shorten(rows: dict[Any, Any], ended: Collection[Any]) -> None:
    """Forget the oldest of the rows that ended."""
    for key in list(ended)[: max(0, len(ended) - _ROWS_MAX)]:
        del rows[key]


class AccountStream:
    """One connection for all accounts. It subscribes, renews the tokens, and connects again after an error."""

    def __init__(self, api: LighterApi, *, renew_s: float = RENEW_S) -> None:
        self.accounts: dict[int, AccountFrames] = {}
        self._api = api
        self._renew_s = renew_s
        self._numbers = count(1)
        self._subscribed: set[str] = set()

    async def run(self) -> None:
        """Follow the accounts, until canceled."""
        backoff_s = 1.0
        while True:
            began_s = monotonic()
            try:
                async with connect(self._api, PATH, PING) as socket:
                    await self._follow(socket)
            except (aiohttp.ClientError, OSError, MarketDataError) as error:
                log.warning("the stream of the accounts ended; they are read on request: %s", error)
            finally:
                self._subscribed.clear()
                for frames in self.accounts.values():
                    frames.lose()
            backoff_s = 1.0 if monotonic() - began_s > _BACKOFF_S_MAX else min(2 * backoff_s, _BACKOFF_S_MAX)
            await asyncio.sleep(backoff_s)

    async def _follow(self, socket: Socket) -> None:
        while True:
            for index, frames in list(self.accounts.items()):
                if monotonic() >= frames.renew_s:
                    await self._subscribe(socket, index, frames)
            if (frame := await receive(socket, _PULSE_S, _FRAME)) is not None:
                self._receive(frame)

    async def _subscribe(self, socket: Socket, index: int, frames: AccountFrames) -> None:
        frames.subscribe(CHANNELS)
        frames.renew_s = monotonic() + self._renew_s
        token = frames.signer.authorization()
        for channel in (f"{name}/{index}" for name in CHANNELS):
            if channel in self._subscribed:
                await socket.send(type="unsubscribe", channel=channel)
            self._subscribed.add(channel)
            await socket.send(type="subscribe", channel=channel, auth=token)

    def _receive(self, frame: _Frame) -> None:
        owner = frame.channel.replace("/", ":").rpartition(":")[2]
        frames = self.accounts.get(int(owner)) if owner.isdecimal() else None
        if frames is None:
            return
        if frame.type == "error":
            frames.lose(monotonic() + _RETRY_S)
        else:
            frames.receive(frame, next(self._numbers))
