"""Actions of one account at Hyperliquid: signing and sending them, and what the venue's answers say.

Every action has a time after which the venue no longer executes it, so that a lost answer is decided: until then it may
be executed, and after it the order's own state is the outcome.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from trader.core.clock import Clock, SystemClock
from trader.core.errors import MarketDataError
from trader.core.money import format_decimal
from trader.exchange.domain.orders import OrderSide
from trader.exchange.domain.venue_orders import VenueOrder, VenueOrderType
from trader.live.http import TOO_MANY, excerpt
from trader.live.hyperliquid.api import HyperliquidApi, ms_of
from trader.live.hyperliquid.signer import AgentSigner

EXPIRES_S: Final = 8.0
"""How long the venue may execute an action."""

_OK: Final = 200
_ORDERS_PER_WEIGHT: Final = 40
_CLOID_PREFIX: Final = "0x74726164657200000000"
"""The start of our order ids, which tells them from those of other programs."""

REFUSALS: Final = (
    "Price must be divisible by tick size", "Order must have minimum value of", "Insufficient margin to place order",
    "Reduce only order would increase position", "Post only order would have immediately matched",
    "Order could not immediately match against any resting orders", "Invalid TP/SL price",
    "No liquidity available for market order", "Order would increase open interest",
    "Order rejected due to price more aggressive than oracle", "Order price too far from oracle",
    "Order would cause position to exceed margin tier limit", "Order has invalid size", "Order has zero size",
    "Order price cannot be more than", "Only post-only orders allowed immediately after", "Invalid leverage value",
    "User or API Wallet", "Must deposit before performing actions", "User has pending agent removal",
)  # fmt: skip
"""The starts of the venue's published texts for what it does not execute. Any other text proves nothing."""

BUSY: Final = "Too many cumulative requests sent"
INACTIVE: Final = "Order was never placed, already canceled, or filled"
_TYPES: Final = {VenueOrderType.STOP: "sl", VenueOrderType.TARGET: "tp"}


class Filled(msgspec.Struct, rename="camel"):
    total_sz: Decimal
    oid: int


class Resting(msgspec.Struct):
    oid: int


class Status(msgspec.Struct):
    """What became of one order of an action."""

    filled: Filled | None = None
    resting: Resting | None = None
    error: str | None = None


class _Data(msgspec.Struct):
    statuses: list[Status | str] = []


class _Done(msgspec.Struct):
    data: _Data = msgspec.field(default_factory=_Data)


class _Answer(msgspec.Struct):
    status: str
    response: _Done | str


_ANSWER: Final = msgspec.json.Decoder(_Answer)


class ActionAnswer(NamedTuple):
    """The venue's answer. `is_taken` is None after no answer, or one that proves nothing; `is_busy`: nothing happened,
    and it may be sent again. `statuses` has one entry per order, or fewer.
    """

    is_taken: bool | None
    reason: str = ""
    is_busy: bool = False
    statuses: Sequence[Status | str] = ()

    @property
    def error(self) -> str | None:
        """What the venue says against the first of the orders that it did not take; None if it took all."""
        errors = (each.error for each in self.statuses if isinstance(each, Status))
        return next(filter(None, errors), None)


class Actions:
    """Sends the actions of one account. `vault` is the account if its master's agent signs for it."""

    def __init__(
        self, api: HyperliquidApi, signer: AgentSigner, account: str, vault: str | None, clock: Clock | None = None
    ) -> None:
        self.account = account
        self._api = api
        self._signer = signer
        self._vault = vault
        self._clock = clock or SystemClock()
        self._is_halted = False

    def halt(self) -> None:
        """Stop sending: another process may now trade the account."""
        self._is_halted = True

    def now(self) -> datetime:
        """Return the venue's time, or ours if that is later: an action must not be too old on arrival."""
        now = self._clock.now()
        return max(now, self._api.answered_at or now)

    def expiry(self) -> datetime:
        """Return when an action that is sent now expires."""
        return self.now() + timedelta(seconds=EXPIRES_S)

    async def send(self, action: dict[str, Any], expires_at: datetime, *, size: int = 1) -> ActionAnswer:
        """Sign an action and send it once. `size` is the number of its orders."""
        if self._is_halted:
            return ActionAnswer(None, "this process no longer trades")
        try:
            self._api.budget.spend(self.account, size)
            await self._api.budget.take(1 + size // _ORDERS_PER_WEIGHT, kind=0)
        except MarketDataError as error:
            return ActionAnswer(False, str(error), is_busy=True)
        nonce, expires_ms = self._signer.next_nonce(ms_of(self.now())), ms_of(expires_at)
        signature = self._signer.sign(action, nonce, self._vault, expires_ms)
        body = {
            "action": action, "nonce": nonce, "signature": signature._asdict(), "vaultAddress": self._vault,
            "expiresAfter": expires_ms,
        }  # fmt: skip
        try:
            status, _, answer = await self._api.ask("POST", "/exchange", json=body)
        except (MarketDataError, aiohttp.ClientError, OSError) as error:
            return ActionAnswer(None, f"the venue did not answer: {error}")
        return _judge(status, answer)


def _judge(status: int, body: bytes) -> ActionAnswer:
    """Interpret an answer: only a text that the venue published for a refusal is one."""
    if status == TOO_MANY:
        return ActionAnswer(False, f"the venue answered with status {status}", is_busy=True)
    try:
        answer = _ANSWER.decode(body)
    except msgspec.DecodeError:
        return ActionAnswer(None, f"the venue answered with status {status}: {excerpt(body)}")
    if status != _OK or isinstance(answer.response, str):
        text = answer.response if isinstance(answer.response, str) else excerpt(body)
        is_busy = text.startswith(BUSY)
        return ActionAnswer(False if is_busy or is_refusal(text) else None, text, is_busy)
    return ActionAnswer(answer.status == "ok" or None, excerpt(body), statuses=answer.response.data.statuses)


def is_refusal(text: str) -> bool:
    return text.startswith(REFUSALS)


def cloid_of(client_index: int) -> str:
    """Return the order id at the venue for one of ours."""
    return f"{_CLOID_PREFIX}{client_index:012x}"


def client_index_of_cloid(cloid: str | None) -> int | None:
    """Return our order id for one at the venue; None for an order of another program."""
    name = (cloid or "").lower()
    return int(name.removeprefix(_CLOID_PREFIX), 16) if name.startswith(_CLOID_PREFIX) else None


def order_action(orders: Sequence[VenueOrder], asset: int) -> dict[str, Any]:
    """Return the action for an order, alone or with the stop and target of its fills."""
    grouping = "normalTpsl" if len(orders) > 1 else "na"
    return {"type": "order", "orders": [_wire(order, asset) for order in orders], "grouping": grouping}


def _wire(order: VenueOrder, asset: int) -> dict[str, Any]:
    kind: dict[str, Any]
    if order.trigger is not None:
        trigger = format_decimal(order.trigger)
        kind = {"trigger": {"isMarket": True, "triggerPx": trigger, "tpsl": _TYPES[order.type]}}
    else:
        resting = "Alo" if order.post_only else "Gtc"
        kind = {"limit": {"tif": resting if order.type is VenueOrderType.LIMIT else "Ioc"}}
    return {
        "a": asset, "b": order.side is OrderSide.BUY, "p": format_decimal(order.price),
        "s": format_decimal(order.quantity), "r": order.reduce_only, "t": kind, "c": cloid_of(order.client_index),
    }  # fmt: skip
