"""Orders of one account at Lighter: sent once, and never taken for failed because nobody answered.

A transaction carries a nonce that the venue uses up once, in order. That makes a lost answer decidable: when the venue
shows no such order, the nonce is used up with a harmless transaction; after that the lost one can never be executed.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any, Final

import aiohttp
import msgspec

from trader.domain.exchange.orders import OrderSide
from trader.domain.exchange.venue_orders import VenueOrder, VenueOrderType
from trader.domain.live.orders import (
    Outcome,
    Placed,
    Refused,
    Unknown,
    VenueOrderState,
    VenuePosition,
    signed_quantity,
)
from trader.domain.live.reconciliation import Leg, VenueReport
from trader.domain.money import ZERO
from trader.errors import MarketDataError
from trader.gateways.lighter.api import LighterApi, Listing
from trader.gateways.lighter.signer import OrderTerms, Signed, Signer

logger = logging.getLogger("trader.exchange")

_SEND_LIMIT_S: Final = 10.0
_PAUSE_S: Final = 0.35
"""The venue executes within about 350 ms of taking a transaction."""

_TRIES_MAX: Final = 10
_RESENDS_MAX: Final = 3
_INVALID_NONCE: Final = 21104
_INDEX_EXISTS: Final = 21728
_INACTIVE: Final = frozenset({21600, 21709, 21715})
"""The venue does not end what does not stand."""

_TRIGGERS: Final = {"stop-loss": VenueOrderType.STOP, "take-profit": VenueOrderType.TARGET}
_UNDECIDED: Final = ("in-progress", "pending", "open")


class _Order(msgspec.Struct):
    order_index: int
    client_order_index: int
    market_index: int
    is_ask: bool
    filled_base_amount: Decimal
    filled_quote_amount: Decimal
    status: str
    type: str = ""
    trigger_price: Decimal = ZERO


class _Orders(msgspec.Struct):
    orders: list[_Order] | None = None
    code: int = 200


class _NextNonce(msgspec.Struct):
    nonce: int
    code: int = 200


class _Position(msgspec.Struct):
    market_id: int
    sign: int
    position: Decimal
    avg_entry_price: Decimal


class _Account(msgspec.Struct):
    positions: list[_Position]
    collateral: Decimal


class _Accounts(msgspec.Struct):
    accounts: list[_Account]
    code: int = 200


_ORDERS: Final = msgspec.json.Decoder(_Orders)
_NEXT_NONCE: Final = msgspec.json.Decoder(_NextNonce)
_ACCOUNTS: Final = msgspec.json.Decoder(_Accounts)


class _Answer(msgspec.Struct, frozen=True):
    """What came of sending: taken, not taken (with the venue's code), or nobody knows."""

    is_known: bool
    is_taken: bool = False
    code: int = 0
    reason: str = ""


class LighterOrders:
    """The orders of the signer's account. One transaction is under way at a time, so that nonces arrive in order."""

    def __init__(
        self,
        api: LighterApi,
        signer: Signer,
        listings: Mapping[str, Listing],
        *,
        pause_s: float = _PAUSE_S,
        send_limit_s: float = _SEND_LIMIT_S,
    ) -> None:
        self._api = api
        self._signer = signer
        self._listings = listings
        self._symbols = {listing.market_id: symbol for symbol, listing in listings.items()}
        self._pause_s = pause_s
        self._send_limit_s = send_limit_s
        self._sending = asyncio.Lock()
        self._is_halted = False

    def halt(self) -> None:
        """Send nothing more, from this moment on: another process may trade the account."""
        self._is_halted = True

    async def pause(self) -> None:
        """Give the venue the time that it takes to execute something."""
        await asyncio.sleep(self._pause_s)

    async def place(self, order: VenueOrder) -> Outcome:
        """Send an order and find out what became of it. The same client index is never executed twice.

        `Unknown` comes only when the venue could not be asked either; `resolve` finds out later, also for an order
        that an earlier process may have sent.
        """
        try:
            terms = self._terms(order)
        except ValueError as error:
            return Refused(f"the venue does not take such an order: {error}")
        async with self._sending:
            try:
                # It may have been sent before, by a process that did not live to see the answer.
                if (state := await self.find(order.client_index)) is not None:
                    return Placed(state)
                return await self._place(order, terms)
            except MarketDataError as error:
                return Refused(str(error))  # nothing was sent

    async def resolve(self, order: VenueOrder, nonce: int | None) -> Outcome:
        """Find out what became of an order whose answer was lost, without sending it again.

        `nonce` is that of `Unknown`; with None one is used up first: whatever was sent before has none that is later.
        """
        async with self._sending:
            try:
                if (state := await self.find(order.client_index)) is not None:
                    return Placed(state)
                last = await self._use_up_nonce(order) if nonce is None else nonce
            except MarketDataError as error:
                return Unknown(str(error), nonce)
            if last is None:
                return Unknown("the venue takes no transaction by which its own would be made impossible")
            return await self._settle(order, last, "its answer was lost, and the venue never took it", is_lost=True)

    async def end_unshown(self, order: VenueOrder) -> Outcome:
        """End an order that stood and is shown no more. `Refused`: it stands no more, and nothing is known of it."""
        market_id = self._listings[order.symbol].market_id
        async with self._sending:
            try:
                if (state := await self.find(order.client_index)) is not None:
                    return Placed(state)
                for _ in range(_RESENDS_MAX):
                    nonce = await self._next_nonce()
                    answer = await self._send(self._signer.cancel_order(market_id, order.client_index, nonce=nonce))
                    if answer.is_taken:
                        return await self._settle(order, nonce, "it is not shown any more", is_lost=True)
                    if answer.code in _INACTIVE:
                        return await self.look_for_expired(order)
            except MarketDataError as error:
                return Unknown(str(error))
        return Unknown(f"the venue does not end it: {answer.reason}")

    async def look_for_expired(self, order: VenueOrder) -> Outcome:
        """Look twice for an order that the venue takes no more: it stands there, or never will."""
        try:
            for _ in range(2):
                if (state := await self.find(order.client_index)) is not None:
                    return Placed(state)
                await self.pause()
        except MarketDataError as error:
            return Unknown(str(error))
        return Refused("its answer was lost, and the venue did not take it before it expired")

    async def cancel(self, order: VenueOrderState) -> Outcome:
        """End an order that rests or waits for its trigger. `Placed` tells how it ended, which may be filled."""
        market_id = self._listings[order.symbol].market_id
        async with self._sending:
            try:
                for _ in range(_RESENDS_MAX):
                    nonce = await self._next_nonce()
                    await self._send(self._signer.cancel_order(market_id, order.venue_index, nonce=nonce))
                    for _ in range(_TRIES_MAX):
                        state = await self.find(order.client_index)
                        if state is None or state.is_final:
                            return Refused("the venue knows no such order") if state is None else Placed(state)
                        await asyncio.sleep(self._pause_s)
            except MarketDataError as error:
                return Unknown(str(error))
        return Unknown("the venue did not end the order")

    async def find(self, client_index: int) -> VenueOrderState | None:
        """What the venue says of an order of ours; None when it knows none. Raises `MarketDataError`."""
        return (await self.find_all([client_index])).get(client_index)

    async def find_all(self, client_indexes: Collection[int]) -> dict[int, VenueOrderState]:
        """What the venue says of these orders, as far as it knows them. Raises `MarketDataError`."""
        parameters: dict[str, str | int] = {
            "account_index": self._signer.account_index,
            "client_order_indexes": ",".join(map(str, client_indexes)),
        }
        token = self._signer.authorization()
        answer = await self._api.get("/api/v1/accountOrders", parameters, _ORDERS, authorization=token)
        return {
            order.client_order_index: self._state(order)
            for order in answer.orders or ()
            if order.client_order_index in client_indexes
        }

    async def statement(self) -> VenueReport:
        """All that the venue holds for the account. Raises `MarketDataError`, also for a position that cannot be."""
        account = await self._account()
        legs: dict[int, Leg] = {}
        others: set[int] = set()
        for listing in self._listings.values():
            for order in await self._standing(listing.market_id):
                symbol = self._symbols[listing.market_id]
                if (kind := _TRIGGERS.get(order.type)) is None:
                    others.add(order.client_order_index)
                else:
                    legs[order.client_order_index] = Leg(symbol, kind, order.trigger_price)
        held = self._positions(account)
        positions = {one.symbol: one.quantity for one in held}
        balance = account.collateral - sum((one.quantity * one.entry_price for one in held), ZERO)
        return VenueReport(positions=positions, legs=legs, others=frozenset(others), balance=balance)

    async def positions(self) -> list[VenuePosition]:
        """The account's positions. Raises `MarketDataError`, also for one that cannot be."""
        return self._positions(await self._account())

    async def _account(self) -> _Account:
        parameters: dict[str, str | int] = {"by": "index", "value": self._signer.account_index}
        answer = await self._api.get("/api/v1/account", parameters, _ACCOUNTS)
        if len(answer.accounts) != 1:
            raise MarketDataError(f"the venue shows {len(answer.accounts)} accounts instead of one")
        return answer.accounts[0]

    async def _standing(self, market_id: int) -> list[_Order]:
        parameters: dict[str, str | int] = {"account_index": self._signer.account_index, "market_id": market_id}
        token = self._signer.authorization()
        answer = await self._api.get("/api/v1/accountActiveOrders", parameters, _ORDERS, authorization=token)
        return answer.orders or []

    def _positions(self, account: _Account) -> list[VenuePosition]:
        held = []
        for position in account.positions:
            symbol = self._symbols.get(position.market_id, f"market {position.market_id}")
            try:
                quantity = signed_quantity(position.sign, position.position)
            except ValueError as error:
                raise MarketDataError(f"{symbol}: {error}") from error
            if quantity:
                held.append(VenuePosition(symbol, quantity, position.avg_entry_price))
        return held

    # One transaction

    async def _place(self, order: VenueOrder, terms: OrderTerms) -> Outcome:
        """Raises `MarketDataError` when the venue could not even be asked for a nonce."""
        for _ in range(_RESENDS_MAX):
            nonce = await self._next_nonce()
            answer = await self._send(self._signer.create_order(terms, nonce=nonce))
            if answer.is_known and not answer.is_taken:
                if answer.code == _INVALID_NONCE:
                    continue  # somebody else used this nonce up; our order was not looked at
                if answer.code != _INDEX_EXISTS:
                    return Refused(answer.reason)
            reason = "" if answer.is_taken else answer.reason
            return await self._settle(order, nonce, reason, is_lost=not answer.is_known)
        return Refused("the venue took none of the nonces that it gave")

    async def _settle(self, order: VenueOrder, nonce: int, reason: str, *, is_lost: bool) -> Outcome:
        """Ask for the order until the venue shows it or can no longer execute it, which is seen to if it is lost."""
        market_id = self._listings[order.symbol].market_id
        was_gone = False
        for _ in range(_TRIES_MAX):
            try:
                is_gone = await self._next_nonce() > nonce
                if (state := await self.find(order.client_index)) is not None:
                    return Placed(state)
                if is_gone and was_gone:  # looked for twice after it could last appear: reading may lag behind
                    return Refused(reason or "the venue executed the transaction, and no order came of it")
                was_gone = is_gone
                if is_lost and not is_gone:
                    await self._send(self._signer.cancel_order(market_id, order.client_index, nonce=nonce))
            except MarketDataError as error:
                logger.warning("order %d is looked for again: %s", order.client_index, error)
            await asyncio.sleep(self._pause_s)
        return Unknown(reason or "the venue took the order and does not show it", nonce)

    async def _use_up_nonce(self, order: VenueOrder) -> int | None:
        """Use up the venue's next nonce, for sure: what it tells of the next one may be old. None if it fails."""
        for _ in range(_RESENDS_MAX):
            nonce = await self._next_nonce()
            market_id = self._listings[order.symbol].market_id
            answer = await self._send(self._signer.cancel_order(market_id, order.client_index, nonce=nonce))
            if answer.is_taken:
                return nonce
            if answer.code != _INVALID_NONCE:
                break
        return None

    async def _send(self, signed: Signed) -> _Answer:
        """Send with the venue's own client. What is not understood is not known."""
        if self._is_halted:
            return _Answer(is_known=False, reason="this process does not trade any more")
        try:
            async with asyncio.timeout(self._send_limit_s):
                answer: Any = await self._signer.sender.send_tx(tx_type=signed.kind, tx_info=signed.text)
        except self._signer.status_error as error:
            return _answer_of(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _Answer(is_known=False, reason=f"the venue did not answer: {str(error) or type(error).__name__}")
        except (ValueError, LookupError, TypeError) as error:  # an answer that is none of the venue's
            return _Answer(is_known=False, reason=f"the venue's answer is not understood: {error}")
        code = getattr(answer, "code", None)  # the SDK does not check that an answer is whole
        if not isinstance(code, int):
            return _Answer(is_known=False, reason=f"the venue's answer is not understood: {answer}")
        return _Answer(is_known=True, is_taken=code == 200, code=code, reason=str(answer.message or f"code {code}"))

    async def _next_nonce(self) -> int:
        parameters: dict[str, str | int] = {
            "account_index": self._signer.account_index,
            "api_key_index": self._signer.key_index,
        }
        return (await self._api.get("/api/v1/nextNonce", parameters, _NEXT_NONCE)).nonce

    # The venue's units

    def _terms(self, order: VenueOrder) -> OrderTerms:
        listing = self._listings.get(order.symbol)
        if listing is None:
            raise ValueError(f"it does not list {order.symbol}")
        market = listing.market
        return OrderTerms(
            market_id=listing.market_id,
            client_index=order.client_index,
            lots=_whole(order.quantity, market.lot),
            price_ticks=_whole(order.price, market.tick),
            is_ask=order.side is OrderSide.SELL,
            type=order.type.value,
            reduce_only=order.reduce_only,
            trigger_ticks=0 if order.trigger is None else _whole(order.trigger, market.tick),
        )

    def _state(self, order: _Order) -> VenueOrderState:
        return VenueOrderState(
            client_index=order.client_order_index,
            venue_index=order.order_index,
            symbol=self._symbols.get(order.market_index, f"market {order.market_index}"),
            side=OrderSide.SELL if order.is_ask else OrderSide.BUY,
            filled=order.filled_base_amount,
            filled_notional=order.filled_quote_amount,
            is_final=order.status not in _UNDECIDED,
            status=order.status,
        )


def _answer_of(error: Exception) -> _Answer:
    """An error of the SDK: a status of 400 to 499 is the venue's refusal, anything else leaves the question open."""
    status, body = getattr(error, "status", None), getattr(error, "body", None)
    reason = f"the venue answered with status {status}: {str(body)[:200]}"
    if not isinstance(status, int) or not 400 <= status < 500:
        return _Answer(is_known=False, reason=reason)
    try:
        told = msgspec.json.decode(body or "{}")
    except msgspec.DecodeError:
        told = {}
    code = told.get("code", 0) if isinstance(told, dict) else 0
    return _Answer(is_known=True, code=code if isinstance(code, int) else 0, reason=reason)


def _whole(amount: Decimal, unit: Decimal) -> int:
    """An amount as a number of units. Raises `ValueError` when it is none."""
    count = amount / unit
    if count != int(count) or count <= 0:
        raise ValueError(f"{amount} is no whole number of {unit}")
    return int(count)
