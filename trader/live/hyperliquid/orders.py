"""Orders of one account at Hyperliquid: each is sent once, and a lost answer never counts as a failure.

The venue no longer executes an order after its expiry, by the venue's clock. Until then, a lost order may still come;
afterwards, an order that the venue does not know never will.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from trader.core.errors import MarketDataError
from trader.core.money import ZERO
from trader.exchange.domain.venue_orders import VenueOrder
from trader.live.budget import Priority, priority_of, spending_as
from trader.live.domain.orders import Busy, Placed, Refused, SendOutcome, Unknown, VenueOrderState
from trader.live.gateway import by_present_rules, present_listing, state_by_trades
from trader.live.hyperliquid.actions import (
    INACTIVE,
    Actions,
    Status,
    cloid_of,
    is_refusal,
    order_action,
)
from trader.live.hyperliquid.api import HyperliquidApi, ms_of
from trader.live.hyperliquid.records import HyperliquidRecords
from trader.live.market import Listing
from trader.live.socket import time_of
from trader.live.venue import Remember
from trader.market.domain.markets import Market

logger = logging.getLogger("trader.exchange")

_TRIES_MAX: Final = 20
_SEARCHED: Final = timedelta(hours=1)
_SHOWN_WITHIN: Final = timedelta(seconds=12)
"""How long after its execution the venue may not show an order."""


class _Leverage(msgspec.Struct):
    type: str
    value: int


class _AssetData(msgspec.Struct):
    leverage: _Leverage


class HyperliquidOrders:
    """The orders of one account. One action is sent at a time."""

    def __init__(self, api: HyperliquidApi, actions: Actions, records: HyperliquidRecords, *, pause_s: float) -> None:
        self._api = api
        self._actions = actions
        self._records = records
        self._pause_s = pause_s
        self._sending = asyncio.Lock()
        self._set_up: dict[str, int] = {}
        self._refused: dict[int, str] = {}
        """Why the venue refused the stop or target of an order that it took."""

    async def pause(self) -> None:
        await asyncio.sleep(self._pause_s)

    async def place(self, orders: Sequence[VenueOrder], market: Market, remember: Remember) -> SendOutcome:
        """Send an order and find out its outcome. The same client index is never sent twice after a lost answer.

        :raises Unavailable: `remember` failed, and nothing was sent
        """
        order = orders[0]
        async with self._sending:
            with spending_as(priority_of(order)):
                try:
                    listing = await present_listing(self._api, order)
                    orders = [by_present_rules(each, listing, market) for each in orders]
                    if not order.reduce_only:
                        await self._set_leverage(order.symbol, listing)
                except ValueError as error:
                    return Refused(f"the venue does not accept this order: {error}")
                except MarketDataError as error:
                    return Busy(str(error))  # nothing was sent
                expires_at = self._actions.expiry()
                await remember(str(ms_of(expires_at)))
                answer = await self._actions.send(order_action(orders, listing.market_id), expires_at, size=len(orders))
        if answer.is_busy:
            return Busy(answer.reason)
        if answer.is_taken is False:
            return Refused(answer.reason)
        if answer.is_taken is None or not answer.statuses:
            return Unknown(answer.reason)
        outcome = self._outcome(orders, answer.statuses)
        if isinstance(outcome, Placed):
            await self._until_shown([child.client_index for child in orders[1:]])
        return outcome

    async def _until_shown(self, client_indexes: Collection[int]) -> None:
        """Wait for the stop and target that the venue took: the answer does not tell their numbers."""
        try:
            for _ in range(_TRIES_MAX):
                shown = await self.find_all(client_indexes)
                if shown.keys() | self._refused.keys() >= set(client_indexes):
                    return
                await self.pause()
        except MarketDataError as error:
            logger.warning("a stop will be looked up again: %s", error)

    async def resolve(self, order: VenueOrder, attempt: str, expires_at: datetime) -> SendOutcome:
        """Find out the outcome of an order whose answer was lost, without sending it again."""
        if (reason := self._refused.get(order.client_index)) is not None:
            return Refused(reason)
        is_over = self._is_over(attempt)  # before the order is read
        if (state := await self._find(order.client_index)) is not None:
            return Placed(state)
        if is_over:
            state = await state_by_trades(self._records, order, time_of(int(attempt)) - _SEARCHED)
        if state is None:
            reason = "its answer was lost, and the venue did not take it before it expired"
            return Refused(reason) if is_over else Unknown("its answer was lost, and the venue may still execute it")
        return Placed(state)

    async def find_all(self, client_indexes: Collection[int]) -> dict[int, VenueOrderState]:
        """Return the venue's states of the orders that it knows. Raise `MarketDataError`."""
        found = {index: await self._find(index) for index in client_indexes}
        return {index: state for index, state in found.items() if state is not None}

    async def opened_since(self, since: datetime) -> Collection[int]:
        return await self._records.opened_since(since)

    async def cancel(self, symbol: str, client_index: int) -> SendOutcome:
        """Cancel an order. `Placed` has its final state, which may be filled; `Refused`: it rests no more, unshown."""
        async with self._sending:
            try:
                with spending_as(Priority.CANCEL):
                    return await self._cancel(symbol, client_index)
            except MarketDataError as error:
                return Unknown(str(error))

    async def _cancel(self, symbol: str, client_index: int) -> SendOutcome:
        asset = self._api.listing(symbol).market_id
        action: dict[str, Any] = {
            "type": "cancelByCloid", "cancels": [{"asset": asset, "cloid": cloid_of(client_index)}]
        }  # fmt: skip
        if client_index < 0:  # of another program, by the venue's own number
            action = {"type": "cancel", "cancels": [{"a": asset, "o": -client_index}]}
        answer = await self._actions.send(action, self._actions.expiry())
        first = next(iter(answer.statuses), answer.reason)
        error = first.error if isinstance(first, Status) else None
        if not (answer.is_taken and (error is None or error.startswith(INACTIVE))):
            return Unknown(f"the venue does not cancel it: {error or answer.reason}")
        missed = 0
        for _ in range(_TRIES_MAX):
            state = await self._find(client_index)
            if state is not None and state.is_final:
                return Placed(state)
            missed += state is None
            if missed > 1 and error is not None:  # one that was just canceled is merely not shown yet
                return Refused("it is no longer shown")
            await self.pause()
        return Unknown("the venue does not show yet that it is canceled")

    async def _find(self, client_index: int) -> VenueOrderState | None:
        row = await self._records.find(cloid_of(client_index) if client_index > 0 else -client_index)
        return None if row is None else self._records.state_of(row.order, row.status, client_index)

    def _is_over(self, attempt: str) -> bool:
        """Return whether the venue can no longer execute an attempt, and has had the time to show it."""
        now = self._api.answered_at
        return now is not None and now > time_of(int(attempt)) + _SHOWN_WITHIN

    def _outcome(self, orders: Sequence[VenueOrder], statuses: Sequence[Status | str]) -> SendOutcome:
        """Return the outcome of the first order, and remember which of its children the venue refused."""
        for child, status in zip(orders[1:], statuses[1:], strict=False):
            if isinstance(status, Status) and status.error is not None and is_refusal(status.error):
                self._refused[child.client_index] = status.error
        order, first = orders[0], statuses[0]
        if not isinstance(first, Status):
            return Unknown("the venue took the order and does not show it yet")
        if first.error is not None:
            if not is_refusal(first.error):
                return Unknown(first.error)
            return Refused(first.error)
        if (row := first.filled or first.resting) is None:
            return Unknown("the venue took the order and does not show it yet")
        filled = first.filled.total_sz if first.filled is not None else ZERO
        return Placed(
            VenueOrderState(
                client_index=order.client_index,
                venue_index=row.oid,
                symbol=order.symbol,
                filled=filled,
                is_final=first.filled is not None,
                status="open" if first.filled is None else "filled",
            )
        )

    # Before an order

    async def _set_leverage(self, symbol: str, listing: Listing) -> None:
        """Make sure, before the first order of a market, that it has cross margin and the greatest leverage.

        How much an account may lend is decided in the books; the venue must not refuse what they allow.
        """
        wanted = listing.market.leverage_max
        if self._set_up.get(symbol) == wanted:
            return
        coin, action = self._api.coins[listing.market_id], {
            "type": "updateLeverage", "asset": listing.market_id, "isCross": True, "leverage": wanted
        }  # fmt: skip
        for tried in range(_TRIES_MAX):
            data = await self._api.info("activeAssetData", _AssetData, user=self._actions.account, coin=coin)
            if (data.leverage.type, data.leverage.value) == ("cross", wanted):
                self._set_up[symbol] = wanted
                return
            if not tried:
                answer = await self._actions.send(action, self._actions.expiry())
                if answer.is_taken is False and not answer.is_busy:
                    raise ValueError(f"{symbol} cannot have cross margin and leverage {wanted}: {answer.reason}")
            await self.pause()
        raise MarketDataError(f"the venue does not show cross margin and leverage {wanted} of {symbol} yet")
