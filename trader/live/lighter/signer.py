"""Signer of one account at Lighter, using the venue's own SDK, which is loaded only for live trading.

The SDK calls a native library whose functions have silently changed their arguments between versions. The version is
therefore pinned, and before anything is sent, the signer verifies that it signs the arguments it was given.
"""

import asyncio
import importlib
import json
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Final, NamedTuple, Protocol

from trader.core.errors import StartError
from trader.settings.forms import Secret

SDK_VERSION: Final = "1.1.8"

_TYPES: Final = {"limit": 0, "market": 1, "stop": 2, "target": 4}
_IMMEDIATE, _GOOD_TILL_TIME, _POST_ONLY = 0, 1, 2
_NO_EXPIRY, _EXPIRY_28_DAYS = 0, -1
_EXPIRES_AFTER_MS: Final = 28 * 86_400_000
_GROUPINGS: Final = {2: 1, 3: 3}
"""One order triggers another; one order triggers two, of which one cancels the other."""

_AUTHORIZED_S: Final = 600
TRANSACTION_EXPIRES_S: Final = 600.0
"""The venue accepts a transaction signed by the SDK for ten minutes less a second, and never after."""


class Signed(NamedTuple):
    """A signed transaction: the venue's number for its kind, its text, and the hash by which the venue knows it."""

    kind: int
    text: str
    hash: str


class OrderTerms(NamedTuple):
    """An order in the venue's units: whole numbers of lots and ticks."""

    market_id: int
    client_index: int
    lots: int
    price_ticks: int
    is_ask: bool
    type: str
    reduce_only: bool
    trigger_ticks: int
    post_only: bool = False


class Signer(Protocol):
    """Signs for one account. `sender` and `status_error` are the SDK's own client and error for sending."""

    account_index: int
    key_index: int
    sender: Any
    status_error: type[Exception]

    def check(self) -> None: ...
    async def mismatch(self) -> str | None: ...
    def create_orders(self, orders: Sequence[OrderTerms], *, nonce: int) -> Signed: ...
    def cancel_order(self, market_id: int, index: int, *, nonce: int) -> Signed: ...
    def cancel_all(self, kind: int, at_ms: int, *, nonce: int) -> Signed: ...
    def authorization(self) -> str: ...
    async def close(self) -> None: ...


class LighterSigner:
    """Signs for one account with one of its API keys. Needs a running loop; `close` closes its connections."""

    def __init__(self, base_url: str, account_index: int, key_index: int, key: Secret) -> None:
        """Raise `StartError` when the SDK is missing or has the wrong version."""
        self.account_index = account_index
        self.key_index = key_index
        self._client: Any = _load_sdk("signer_client").SignerClient(
            url=base_url, account_index=account_index, api_private_keys={key_index: key.reveal()}
        )
        self.sender: Any = self._client.tx_api
        """The SDK's own client for sending transactions."""

        self.status_error: type[Exception] = _load_sdk("exceptions").ApiException
        """The SDK's exception for a non-200 answer, with `status` and `body`."""

    async def close(self) -> None:
        await self._client.close()

    def check(self) -> None:
        """Verify on sample orders that every argument is signed in its field. Raise `StartError` otherwise."""
        stop = OrderTerms(11, 281474976710001, 1234567, 654321, True, "stop", True, 765432)
        entry = stop._replace(client_index=5, type="market", is_ask=False, reduce_only=False, trigger_ticks=0)
        target = stop._replace(client_index=6, type="target")
        whose = {"AccountIndex": self.account_index, "ApiKeyIndex": self.key_index, "Nonce": 987654}
        alone = self.create_orders([stop], nonce=987654)
        _compare(alone, 14, {**whose, **_named(stop)}, json.loads(alone.text))
        passive = stop._replace(type="limit", reduce_only=False, trigger_ticks=0, post_only=True)
        rests = self.create_orders([passive], nonce=987654)
        _compare(rests, 14, {**whose, **_named(passive)}, json.loads(rests.text))
        group = self.create_orders([entry, stop, target], nonce=987654)
        fields = json.loads(group.text)
        _compare(group, 28, {**whose, "GroupingType": 3}, fields)
        for place, order in enumerate((entry, stop, target)):
            _compare(group, 28, _named(order, is_child=place > 0), fields["Orders"][place])
        cancel = self.cancel_order(12, 281474976710002, nonce=987654)
        _compare(cancel, 15, {**whose, "MarketIndex": 12, "Index": 281474976710002}, json.loads(cancel.text))
        every = self.cancel_all(0, 0, nonce=987654)
        _compare(every, 16, {**whose, "TimeInForce": 0, "Time": 0}, json.loads(every.text))

    async def mismatch(self) -> str | None:
        """Return why this key is not the one registered under its index; None if it is, or if none is registered."""
        error: str | None = await asyncio.to_thread(self._client.check_client)
        return error

    def create_orders(self, orders: Sequence[OrderTerms], *, nonce: int) -> Signed:
        """Sign a new order, alone or with the stop and target of its fills. Raise `StartError` when that fails."""
        if len(orders) > 1:
            make = _load_sdk("signer_client").CreateOrderTxReq
            # The SDK would date each order at another millisecond, and signs no group with different expiries.
            expiry = int(1000 * time.time()) + _EXPIRES_AFTER_MS
            parts = [make(*_fields(order, is_child=place > 0, expiry=expiry)) for place, order in enumerate(orders)]
            grouping = _GROUPINGS[len(orders)]
            return _signed(
                self._client.sign_create_grouped_orders(grouping, parts, nonce=nonce, api_key_index=self.key_index)
            )
        return _signed(self._client.sign_create_order(*_fields(orders[0]), nonce=nonce, api_key_index=self.key_index))

    def cancel_order(self, market_id: int, index: int, *, nonce: int) -> Signed:
        """Sign the cancellation of an order, identified by the venue's index or ours."""
        return _signed(self._client.sign_cancel_order(market_id, index, nonce=nonce, api_key_index=self.key_index))

    def cancel_all(self, kind: int, at_ms: int, *, nonce: int) -> Signed:
        """Sign the cancellation of all orders: now (0), at a time (1), or no longer at that time (2)."""
        return _signed(self._client.sign_cancel_all_orders(kind, at_ms, nonce=nonce, api_key_index=self.key_index))

    def authorization(self) -> str:
        """Return a token for private reads, valid for ten minutes."""
        token, error = self._client.create_auth_token_with_expiry(_AUTHORIZED_S, api_key_index=self.key_index)
        if error is not None:
            raise StartError(f"the venue's SDK created no token: {error}")
        return str(token)


def _fields(order: OrderTerms, *, is_child: bool = False, expiry: int = _EXPIRY_28_DAYS) -> tuple[int, ...]:
    """Return an order's fields as the SDK takes them. The size of a child follows from the fills of its parent."""
    return (
        order.market_id,
        order.client_index,
        0 if is_child else order.lots,
        order.price_ticks,
        order.is_ask,
        _TYPES[order.type],
        _POST_ONLY if order.post_only else _GOOD_TILL_TIME if order.type == "limit" else _IMMEDIATE,
        order.reduce_only,
        order.trigger_ticks,
        _NO_EXPIRY if order.type == "market" else expiry,
    )


def _load_sdk(name: str) -> Any:
    try:
        version = metadata.version("lighter-sdk")
    except metadata.PackageNotFoundError:
        raise StartError("TRADING_MODE=live needs the venue's SDK: pip install 'trader-service[live]'") from None
    if version != SDK_VERSION:
        raise StartError(f"TRADING_MODE=live needs lighter-sdk {SDK_VERSION}; {version} is installed")
    return importlib.import_module(f"lighter.{name}")


def _signed(result: tuple[int | None, str | None, str | None, str | None]) -> Signed:
    kind, text, digest, error = result
    if error is not None or kind is None or text is None or not digest:
        raise StartError(f"the venue's SDK does not sign this: {error}")
    return Signed(kind, text, digest)


def _named(order: OrderTerms, *, is_child: bool = False) -> dict[str, int]:
    """Return the fields of an order by their names in a signed text, without its expiry, which the SDK dates."""
    names = (
        "MarketIndex", "ClientOrderIndex", "BaseAmount", "Price", "IsAsk", "Type", "TimeInForce", "ReduceOnly",
        "TriggerPrice",
    )  # fmt: skip
    return dict(zip(names, map(int, _fields(order, is_child=is_child)), strict=False))


def _compare(signed: Signed, kind: int, expected: dict[str, int], fields: dict[str, Any]) -> None:
    wrong = {name: fields.get(name) for name, value in expected.items() if fields.get(name) != value}
    if signed.kind != kind or wrong or '"Sig":"' not in signed.text:
        raise StartError(
            f"The venue's SDK signs something other than what it was given (kind {signed.kind}, {wrong}): "
            "nothing is sent"
        )
