"""The traded accounts at Hyperliquid: one connection shared by all, and an agent wallet that signs for each.

An agent can trade and can neither withdraw nor transfer. The owner's own key could, so it is refused.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final

import msgspec

from trader.core.clock import Clock
from trader.core.errors import StartError
from trader.exchange.domain.venue_orders import VenueOrder
from trader.live.budget import RequestBudget
from trader.live.gateway import credentials
from trader.live.hyperliquid.actions import EXPIRES_S, Actions, order_action
from trader.live.hyperliquid.api import ADDRESS, TESTNET, HyperliquidApi
from trader.live.hyperliquid.orders import HyperliquidOrders
from trader.live.hyperliquid.records import HyperliquidRecords
from trader.live.hyperliquid.signer import AgentSigner, HyperliquidSigner
from trader.live.market import Listing
from trader.live.socket import time_of
from trader.live.venue import AccountFeed, OrderSigner
from trader.settings.forms import Secret
from trader.settings.settings import Settings

MakeAgent = Callable[[Secret, bool], AgentSigner]
"""Make a signer from a key, and whether it signs for the test network."""

log = logging.getLogger("trader.live")

_PAUSE_S: Final = 0.5
_ENDS_SOON: Final = timedelta(days=14)
_SPOT_MODES: Final = ("unifiedAccount", "portfolioMargin")


class _RoleData(msgspec.Struct):
    user: str = ""
    master: str = ""


class _Role(msgspec.Struct):
    role: str
    data: _RoleData = msgspec.field(default_factory=_RoleData)


class _Agent(msgspec.Struct, rename="camel"):
    address: str
    valid_until: int


@dataclass(frozen=True)
class HyperliquidAccount:
    """One account at the venue: its orders and its records."""

    expires_s: ClassVar[float] = EXPIRES_S

    actions: Actions
    orders: HyperliquidOrders
    records: HyperliquidRecords
    feed: AccountFeed


def open_account(api: HyperliquidApi, actions: Actions, *, pause_s: float) -> HyperliquidAccount:
    """Return the account of the actions. `pause_s` scales all waiting."""
    records = HyperliquidRecords(api, actions.account)
    return HyperliquidAccount(
        actions, HyperliquidOrders(api, actions, records, pause_s=pause_s), records, AccountFeed()
    )


def order_signer(agent: AgentSigner, account: str) -> OrderSigner:
    """Return what signs for shadow, once it is proven. Raise `StartError` otherwise, and for the owner's own key."""
    agent.check()
    if agent.address == account:
        raise StartError(f"The key is that of {account} itself, which may withdraw. Use the key of an agent wallet.")

    def sign(order: VenueOrder, listing: Listing) -> str:
        action = order_action([order], listing.market_id), 0, None, None
        agent.sign(*action)
        return agent.hash_of(*action).hex()

    async def close() -> None:
        """The agent holds no connection."""

    return OrderSigner(sign, close)


class HyperliquidAccounts:
    """Opens accounts. The first one loads the libraries that sign."""

    def __init__(
        self, settings: Settings, budget: RequestBudget | None = None, *,
        agent: MakeAgent = HyperliquidSigner, pause_s: float = _PAUSE_S, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.default_account, self._key = credentials(settings)
        self.url = settings.venue_url or ADDRESS
        self.keys: dict[str, Secret] = {}
        self._make_agent = agent
        self._pause_s = pause_s
        self._clock = clock
        self._api = HyperliquidApi(self.url, budget, pause_s=min(1.0, pause_s * 2))
        self.budget = self._api.budget
        self._agents: dict[Secret, AgentSigner] = {}
        self._accounts: dict[str, HyperliquidAccount] = {}
        self._proven: dict[str, str | None] = {}
        self._opening = asyncio.Lock()

    def prove(self) -> None:
        """Verify that the libraries are installed, accept the key and sign correctly. Raise `StartError` otherwise."""
        self._agent(self.default_account).check()

    async def account(self, name: str) -> HyperliquidAccount:
        """Return the account, once its agent is proven.

        :raises MarketDataError: the venue does not list its markets now, or does not show the account
        :raises StartError: the key is not an agent's of this account, or the account has a mode that is not traded
        """
        async with self._opening:
            if name not in self._proven:
                self._proven[name] = await prove_access(self._api, self._agent(name), name)
            if not self._api.known:
                await self._api.listings()
            if name not in self._accounts:
                actions = Actions(self._api, self._agent(name), name, self._proven[name], self._clock)
                self._accounts[name] = open_account(self._api, actions, pause_s=self._pause_s)
        return self._accounts[name]

    def halt(self) -> None:
        """Stop all sending for the open accounts; `account` opens them again."""
        for account in self._accounts.values():
            account.actions.halt()
        self._accounts.clear()

    async def close(self) -> None:
        self.halt()
        await self._api.close()

    def _agent(self, name: str) -> AgentSigner:
        key = self.keys.get(name, self._key)
        if key not in self._agents:  # one per key: accounts of one agent share its nonces
            self._agents[key] = self._make_agent(key, self.url == TESTNET)
        return self._agents[key]


async def prove_access(api: HyperliquidApi, agent: AgentSigner, account: str) -> str | None:
    """Prove that a wallet is an agent for the account, which can be traded. Raise as `account` does.

    Return the account if it belongs to a master, for which its actions are then signed.
    """
    if not account.startswith("0x"):
        raise StartError(f"Accounts at Hyperliquid have an address of 0x and 40 hexadecimal digits, not {account}.")
    theirs = await api.info("userRole", _Role, user=account)
    if theirs.role not in ("user", "subAccount"):
        raise StartError(f"The venue's account {account} is not one that can be traded: its role is {theirs.role}.")
    master = theirs.data.master.lower() if theirs.role == "subAccount" else account
    ours = await api.info("userRole", _Role, user=agent.address)
    if agent.address == account or ours.role not in ("agent", "missing"):
        raise StartError(
            f"The key belongs to {agent.address}, a wallet of its own that may withdraw (its role is {ours.role}). "
            f"Make an agent wallet for {master} at the venue, and use its key."
        )
    if ours.role == "missing" or ours.data.user.lower() != master:
        raise StartError(f"The wallet {agent.address} of the key is no agent of the venue's account {master}.")
    mode = await api.info("userAbstraction", str, user=account)
    if mode in _SPOT_MODES:
        raise StartError(
            f"The venue's account {account} is in the mode {mode}, whose spot balances are margin, too. Switch it to "
            "the standard mode there: the books know no other."
        )
    for row in await api.info("extraAgents", list[_Agent], user=master):
        ends_at = time_of(row.valid_until)
        if row.address.lower() == agent.address and api.answered_at and ends_at - api.answered_at < _ENDS_SOON:
            log.warning("LIVE: the agent wallet %s ends at %s: make another one", agent.address, ends_at.isoformat())
    return account if master != account else None
