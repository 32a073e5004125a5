"""The accounts at Lighter that the service trades: one key for all of them, one connection, one signer each."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from trader.errors import StartError
from trader.gateways.lighter.api import MAINNET_URL, LighterApi, Listing
from trader.gateways.lighter.history import LighterHistory
from trader.gateways.lighter.orders import LighterOrders
from trader.gateways.lighter.signer import TRANSACTION_EXPIRES_S, LighterSigner, Signer
from trader.setting_forms import Secret
from trader.settings import Settings

MakeSigner = Callable[[str, int, int, Secret], Signer]
"""Of the venue's address, the account's index, the key's index, and the key."""

_PAUSE_S: Final = 0.35


class LighterAccount:
    """One account: its orders, and what the venue has on record of it."""

    expires_s: Final = TRANSACTION_EXPIRES_S

    def __init__(self, index: int, orders: LighterOrders, history: LighterHistory) -> None:
        self.index = index
        self.orders = orders
        self.history = history


class LighterAccounts:
    """Opens accounts. The venue's SDK is loaded with the first."""

    def __init__(
        self, settings: Settings, *, make_signer: MakeSigner = LighterSigner, pause_s: float = _PAUSE_S
    ) -> None:
        if settings.venue_account_index is None or settings.venue_api_key is None:
            raise StartError("TRADING_MODE=live needs VENUE_ACCOUNT_INDEX and VENUE_API_KEY")
        self.url = settings.venue_url or MAINNET_URL
        self.default_index = settings.venue_account_index
        self._key = settings.venue_api_key
        self._key_index = settings.venue_api_key_index
        self._symbols = settings.market_symbols
        self._make_signer = make_signer
        self._pause_s = pause_s
        self._api = LighterApi(self.url, pause_s=min(1.0, pause_s * 3))
        self._listings: Mapping[str, Listing] = {}
        self._signers: dict[int, Signer] = {}
        self._accounts: dict[int, LighterAccount] = {}
        self._opening = asyncio.Lock()

    def prove(self) -> None:
        """Prove that the SDK is there, takes the key, and signs what it is given. Raises `StartError` if not."""
        self._signer(self.default_index).check()

    async def account(self, index: int) -> LighterAccount:
        """The account. Raises `MarketDataError` when the venue does not tell its markets now."""
        async with self._opening:
            if not self._listings:
                listed = await self._api.listings()
                self._listings = {symbol: listing for symbol, listing in listed.items() if symbol in self._symbols}
            if index not in self._accounts:
                signer = self._signer(index)
                orders = LighterOrders(self._api, signer, self._listings, pause_s=self._pause_s)
                history = LighterHistory(self._api, signer, self._listings)
                self._accounts[index] = LighterAccount(index, orders, history)
        return self._accounts[index]

    def halt(self) -> None:
        """Send nothing more for the accounts that are open; `account` opens them anew."""
        for account in self._accounts.values():
            account.orders.halt()
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
