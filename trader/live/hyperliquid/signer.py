"""Signer of actions at Hyperliquid: the hash of an action, signed by an agent wallet.

The hash covers the action as msgpack with its keys in the order given, the nonce, the account for which another signs,
and the time after which the venue no longer executes the action. The libraries for the curve and the hash are loaded
only for live trading.
"""

import importlib
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from trader.core.errors import StartError
from trader.settings.forms import Secret

_DOMAIN: Final = {"name": "Exchange", "version": "1", "chainId": 1337, "verifyingContract": "0x" + "0" * 40}
_TYPES: Final = {"Agent": [{"name": "source", "type": "string"}, {"name": "connectionId", "type": "bytes32"}]}
_MAINNET, _TESTNET = "a", "b"

_KNOWN_KEY: Final = "0x" + "0123456789" * 6 + "0123"
_KNOWN_HASH: Final = "f528daee6a0bd11407b483cfcd9a48c56884180b70ee86f124053e5fc1bf4d57"
_KNOWN_S: Final = 0x755C40BA9BF05223521753995ABB2F73AB3229BE8EC921F350CB447E384D8ED8
"""A vector that the venue publishes, for a key that is public."""


class Signature(NamedTuple):
    r: str
    s: str
    v: int


class AgentSigner(Protocol):
    """Signs with the key of one wallet, whose nonces it counts: milliseconds, each used once."""

    address: str

    def check(self) -> None: ...
    def next_nonce(self, now_ms: int) -> int: ...
    def sign(self, action: dict[str, Any], nonce: int, vault: str | None, expires_ms: int | None) -> Signature: ...
    def hash_of(self, action: dict[str, Any], nonce: int, vault: str | None, expires_ms: int | None) -> bytes: ...


class HyperliquidSigner:
    """Signs with the key of one wallet. Raise `StartError` when the libraries are missing or the key is none."""

    def __init__(self, key: Secret, is_testnet: bool) -> None:
        self._account = _load("eth_account").Account
        self._messages = _load("eth_account.messages")
        self._keccak = _load("eth_utils").keccak
        self._source = _TESTNET if is_testnet else _MAINNET
        self._last_nonce = 0
        try:
            self._wallet = self._account.from_key("0x" + key.reveal().removeprefix("0x"))
        except (ValueError, TypeError) as error:
            why = type(error).__name__  # the text may have the key
            raise StartError(f"The venue's key is not that of a wallet, 64 hexadecimal digits ({why})") from None
        self.address = str(self._wallet.address).lower()

    def check(self) -> None:
        """Verify on a published vector that the libraries sign what they are given. Raise `StartError` otherwise."""
        known = HyperliquidSigner(Secret(_KNOWN_KEY), is_testnet=False)
        action = {"type": "dummy", "num": 100_000_000_000}
        signed = known.sign(action, 0, None, None)
        if known.hash_of(action, 0, None, None).hex() != _KNOWN_HASH or int(signed.s, 16) != _KNOWN_S:
            raise StartError("The libraries sign something other than what they were given: nothing is sent")

    def next_nonce(self, now_ms: int) -> int:
        self._last_nonce = max(self._last_nonce + 1, now_ms)
        return self._last_nonce

    def sign(self, action: dict[str, Any], nonce: int, vault: str | None, expires_ms: int | None) -> Signature:
        """Sign an action, for the account `vault` if that is not the wallet's own master."""
        agent = {"source": self._source, "connectionId": self.hash_of(action, nonce, vault, expires_ms)}
        message = self._messages.encode_typed_data(domain_data=_DOMAIN, message_types=_TYPES, message_data=agent)
        signed = self._wallet.sign_message(message)
        return Signature(hex(signed.r), hex(signed.s), signed.v)

    def hash_of(self, action: dict[str, Any], nonce: int, vault: str | None, expires_ms: int | None) -> bytes:
        whole = msgspec.msgpack.encode(action) + nonce.to_bytes(8)
        whole += b"\0" if vault is None else b"\1" + bytes.fromhex(vault.removeprefix("0x"))
        whole += b"" if expires_ms is None else b"\0" + expires_ms.to_bytes(8)
        return bytes(self._keccak(whole))


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise StartError("TRADING_MODE=live needs more libraries: pip install 'trader-service[live]'") from None
