"""Signer of one account at Lighter, using the venue's own SDK, which is loaded only for live trading.

The SDK calls a native library whose functions have silently changed their arguments between versions. The version is
therefore pinned, and before anything is sent, the signer verifies that it signs the arguments it was given.
"""

import asyncio
import importlib
import json
from importlib import metadata
from typing import Any, Final, NamedTuple, Protocol

from trader.core.errors import StartError
from trader.settings.forms import Secret

SDK_VERSION: Final = "1.1.8"

_TYPES: Final = {"limit": 0, "market": 1, "stop": 2, "target": 4}
_IMMEDIATE, _GOOD_TILL_TIME = 0, 1
_NO_EXPIRY, _EXPIRY_28_DAYS = 0, -1
_AUTHORIZED_S: Final = 600
TRANSACTION_EXPIRES_S: Final = 600.0
"""The venue accepts a transaction signed by the SDK for ten minutes less a second, and never after."""


class Signed(NamedTuple):
    """A signed transaction: the venue's number for its kind, and its text."""

    kind: int
    text: str


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


class Signer(Protocol):
    """Signs for one account. `sender` and `status_error` are the SDK's own client and error for sending."""

    account_index: int
    key_index: int
    sender: Any
    status_error: type[Exception]

    def check(self) -> None: ...
    async def mismatch(self) -> str | None: ...
    def create_order(self, order: OrderTerms, *, nonce: int) -> Signed: ...
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
        order = OrderTerms(11, 281474976710001, 1234567, 654321, True, "stop", True, 765432)
        signed = self.create_order(order, nonce=987654)
        cancel = self.cancel_order(12, 281474976710002, nonce=987653)
        expected = {
            "AccountIndex": self.account_index, "ApiKeyIndex": self.key_index, "MarketIndex": 11,
            "ClientOrderIndex": 281474976710001, "BaseAmount": 1234567, "Price": 654321, "IsAsk": 1, "Type": 2,
            "TimeInForce": 0, "ReduceOnly": 1, "TriggerPrice": 765432, "Nonce": 987654,
        }  # fmt: skip
        _compare(signed, 14, expected)
        _compare(cancel, 15, {"MarketIndex": 12, "Index": 281474976710002, "Nonce": 987653})
        _compare(self.cancel_all(0, 0, nonce=987652), 16, {"TimeInForce": 0, "Time": 0, "Nonce": 987652})

    async def mismatch(self) -> str | None:
        """Return why this key is not the one registered under its index; None if it is, or if none is registered."""
        error: str | None = await asyncio.to_thread(self._client.check_client)
        return error

    def create_order(self, order: OrderTerms, *, nonce: int) -> Signed:
        """Sign a new order. Raise `StartError` when the SDK does not sign it."""
        rests = order.type == "limit"
        return _signed(
            self._client.sign_create_order(
                order.market_id,
                order.client_index,
                order.lots,
                order.price_ticks,
                order.is_ask,
                _TYPES[order.type],
                _GOOD_TILL_TIME if rests else _IMMEDIATE,
                order.reduce_only,
                order.trigger_ticks,
                _NO_EXPIRY if order.type == "market" else _EXPIRY_28_DAYS,
                nonce=nonce,
                api_key_index=self.key_index,
            )
        )

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


def _load_sdk(name: str) -> Any:
    try:
        version = metadata.version("lighter-sdk")
    except metadata.PackageNotFoundError:
        raise StartError("TRADING_MODE=live needs the venue's SDK: pip install 'trader-service[live]'") from None
    if version != SDK_VERSION:
        raise StartError(f"TRADING_MODE=live needs lighter-sdk {SDK_VERSION}; {version} is installed")
    return importlib.import_module(f"lighter.{name}")


def _signed(result: tuple[int | None, str | None, str | None, str | None]) -> Signed:
    kind, text, _, error = result
    if error is not None or kind is None or text is None:
        raise StartError(f"the venue's SDK does not sign this: {error}")
    return Signed(kind, text)


def _compare(signed: Signed, kind: int, expected: dict[str, int]) -> None:
    fields = json.loads(signed.text)
    wrong = {name: fields.get(name) for name, value in expected.items() if fields.get(name) != value}
    if signed.kind != kind or wrong or not fields.get("Sig"):
        raise StartError(
            f"The venue's SDK signs something other than what it was given (kind {signed.kind}, {wrong}): "
            "nothing is sent"
        )
