"""The traded accounts at Lighter: one API key and one connection shared by all, and one signer per account."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec

from trader.core import tasks
from trader.core.errors import StartError
from trader.live.budget import RequestBudget
from trader.live.gateway import credentials
from trader.live.lighter.api import ADDRESS, LighterApi, VenueRefusal
from trader.live.lighter.frames import LAG_S, AccountFrames, AccountStream
from trader.live.lighter.orders import LighterOrders, order_terms
from trader.live.lighter.records import LighterRecords
from trader.live.lighter.signer import TRANSACTION_EXPIRES_S, LighterSigner, Signer
from trader.live.lighter.transactions import Transactions
from trader.live.venue import OrderSigner
from trader.settings.forms import Secret
from trader.settings.settings import Settings

MakeSigner = Callable[[str, int, int, Secret], Signer]
"""Make a signer from the venue's address, the account's index, the key's index and the key."""

log = logging.getLogger("trader.live")

_PAUSE_S: Final = 0.35
_ALL_KEYS: Final = 255
_PROOFS_MAX: Final = 3
_CLASSIC: Final = 0
_NO_ACCOUNT: Final = 21100
_POWERS: Final = (
    "An API key can do more than trade: withdraw to the owner's address, and transfer to the owner's other accounts. "
    "Keep in these accounts only what is traded."
)


class _Key(msgspec.Struct):
    api_key_index: int


class _Keys(msgspec.Struct):
    api_keys: list[_Key]


_KEYS: Final = msgspec.json.Decoder(_Keys)


@dataclass(frozen=True)
class LighterAccount:
    """One account at the venue: its orders and its records."""

    expires_s: ClassVar[float] = TRANSACTION_EXPIRES_S

    transactions: Transactions
    orders: LighterOrders
    records: LighterRecords
    feed: AccountFrames


def open_account(api: LighterApi, signer: Signer, *, pause_s: float) -> LighterAccount:
    """Return the signer's account. `pause_s` scales all waiting."""
    frames = AccountFrames(signer, lag_s=LAG_S * pause_s / _PAUSE_S)
    transactions, records = Transactions(api, frames), LighterRecords(api, frames)
    orders = LighterOrders(api, frames, transactions, records, pause_s=pause_s)
    return LighterAccount(transactions, orders, records, frames)


def order_signer(signer: Signer) -> OrderSigner:
    """Return what signs for shadow, once it is proven. Raise `StartError` otherwise."""
    signer.check()
    create = signer.create_orders
    return OrderSigner(lambda order, listing: create([order_terms(order, listing)], nonce=0).hash, signer.close)


class LighterAccounts:
    """Opens accounts. The first one loads the venue's SDK."""

    def __init__(
        self, settings: Settings, budget: RequestBudget | None = None, *,
        make_signer: MakeSigner = LighterSigner, pause_s: float = _PAUSE_S,
    ) -> None:  # fmt: skip
        self.default_account, self._key = credentials(settings)
        self.url = settings.venue_url or ADDRESS
        self.keys: dict[str, Secret] = {}
        self._key_index = settings.venue_api_key_index
        self._make_signer = make_signer
        self._pause_s = pause_s
        self._api = LighterApi(self.url, budget, pause_s=min(1.0, pause_s * 3))
        self.budget = self._api.budget
        self._signers: dict[str, Signer] = {}
        self._accounts: dict[str, LighterAccount] = {}
        self._stream = AccountStream(self._api)
        self._following: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._proven: set[str] = set()

    def prove(self) -> None:
        """Verify that the SDK is installed, accepts the key and signs correctly. Raise `StartError` otherwise."""
        self._signer(self.default_account).check()
        log.warning("LIVE: %s", _POWERS)

    async def account(self, name: str) -> LighterAccount:
        """Return the account, once its key is proven.

        :raises MarketDataError: the venue does not list its markets now, or does not show the account or its keys
        :raises StartError: the key is not registered there, or the account has a mode that the service does not trade
        """
        async with self._opening:
            if name not in self._proven:
                await prove_access(self._api, self._signer(name))
                self._proven.add(name)
            if not self._api.known:
                await self._api.listings()
            if name not in self._accounts:
                account = open_account(self._api, self._signer(name), pause_s=self._pause_s)
                self._accounts[name], self._stream.accounts[index_of(name)] = account, account.feed
            if self._following is None:
                self._following = tasks.keep(self._stream.run, "stream of the accounts")
        return self._accounts[name]

    def halt(self) -> None:
        """Stop all sending for the open accounts; `account` opens them again."""
        for account in self._accounts.values():
            account.transactions.halt()
        self._accounts.clear()
        self._stream.accounts.clear()

    async def close(self) -> None:
        self.halt()
        await tasks.end(self._following)
        self._following = None
        for signer in self._signers.values():
            await signer.close()
        self._signers.clear()
        await self._api.close()

    def _signer(self, name: str) -> Signer:
        if name not in self._signers:
            key = self.keys.get(name, self._key)
            self._signers[name] = self._make_signer(self.url, index_of(name), self._key_index, key)
        return self._signers[name]


def index_of(account: str) -> int:
    """Return the index of an account. Raise `StartError` for an address, which names none here."""
    if not account.isdecimal():
        raise StartError(f"Accounts at Lighter have an index, such as 12345, not {account}.")
    return int(account)


async def prove_access(api: LighterApi, signer: Signer) -> None:
    """Prove that the venue knows the signer's key, and that the account can be traded. Raise as `account` does."""
    index, key_index = signer.account_index, signer.key_index
    try:
        account = await api.account(index)
    except VenueRefusal as error:
        if error.code != _NO_ACCOUNT:
            raise
        raise StartError(f"The venue has no account {index}: correct VENUE_ACCOUNT_INDEX or the model's.") from error
    if account.account_trading_mode != _CLASSIC:
        raise StartError(
            f"The venue's account {index} is in the unified mode, whose spot balances are margin, too. Switch it to "
            "the classic mode there: the books know no other."
        )
    for _ in range(_PROOFS_MAX):  # the SDK asks the venue itself and does not tell a failed request from another key
        await api.take("apikeys")
        if await signer.mismatch() is None:
            return
        answer = await api.get("/api/v1/apikeys", _KEYS, account_index=index, api_key_index=_ALL_KEYS)
        known = [key.api_key_index for key in answer.api_keys]
        if key_index not in known:
            raise StartError(
                f"The venue has no API key with index {key_index} for account {index}; registered are "
                f"{', '.join(map(str, known)) or 'none'}. Register the key there, or set VENUE_API_KEY_INDEX."
            )
    raise StartError(f"The key is not the private part of API key {key_index} of the venue's account {index}.")
