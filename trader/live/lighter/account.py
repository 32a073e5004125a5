"""The traded accounts at Lighter: one API key and one connection shared by all, and one signer per account."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from trader.core.errors import StartError
from trader.live.lighter.api import LighterApi, venue_address
from trader.live.lighter.orders import LighterOrders
from trader.live.lighter.records import LighterRecords
from trader.live.lighter.signer import TRANSACTION_EXPIRES_S, LighterSigner, Signer
from trader.live.lighter.transactions import Transactions
from trader.settings.forms import Secret
from trader.settings.settings import Settings

MakeSigner = Callable[[str, int, int, Secret], Signer]
"""Make a signer from the venue's address, the account's index, the key's index and the key."""

_PAUSE_S: Final = 0.35


@dataclass(frozen=True)
class LighterAccount:
    """One account at the venue: its orders and its records."""

    expires_s: ClassVar[float] = TRANSACTION_EXPIRES_S

    transactions: Transactions
    orders: LighterOrders
    records: LighterRecords


def open_account(api: LighterApi, signer: Signer, *, pause_s: float) -> LighterAccount:
    """Return the signer's account."""
    transactions, records = Transactions(api, signer), LighterRecords(api, signer)
    return LighterAccount(transactions, LighterOrders(api, signer, transactions, records, pause_s=pause_s), records)


class LighterAccounts:
    """Opens accounts. The first one loads the venue's SDK."""

    def __init__(
        self, settings: Settings, *, make_signer: MakeSigner = LighterSigner, pause_s: float = _PAUSE_S
    ) -> None:
        if settings.venue_account_index is None or settings.venue_api_key is None:
            raise StartError("TRADING_MODE=live needs VENUE_ACCOUNT_INDEX and VENUE_API_KEY")
        self.url = venue_address(settings)
        self.default_index = settings.venue_account_index
        self._key = settings.venue_api_key
        self._key_index = settings.venue_api_key_index
        self._make_signer = make_signer
        self._pause_s = pause_s
        self._api = LighterApi(self.url, pause_s=min(1.0, pause_s * 3))
        self._signers: dict[int, Signer] = {}
        self._accounts: dict[int, LighterAccount] = {}
        self._opening = asyncio.Lock()

    def prove(self) -> None:
        """Verify that the SDK is installed, accepts the key and signs correctly. Raise `StartError` otherwise."""
        self._signer(self.default_index).check()

    async def account(self, index: int) -> LighterAccount:
        """Return the account. Raise `MarketDataError` when the venue does not list its markets now."""
        async with self._opening:
            if not self._api.known:
                await self._api.listings()
            if index not in self._accounts:
                self._accounts[index] = open_account(self._api, self._signer(index), pause_s=self._pause_s)
        return self._accounts[index]

    def halt(self) -> None:
        """Stop all sending for the open accounts; `account` opens them again."""
        for account in self._accounts.values():
            account.transactions.halt()
        self._accounts.clear()

    async def close(self) -> None:
        self.halt()
        for signer in self._signers.values():
            await signer.close()
        self._signers.clear()
        await self._api.close()

    def _signer(self, index: int) -> Signer:
        if index not in self._signers:
            self._signers[index] = self._make_signer(self.url, index, self._key_index, self._key)
        return self._signers[index]
