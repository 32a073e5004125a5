"""Hyperliquid: public market data, and orders and records of the accounts that trade on it.

Read `api.py` (requests) and `stream.py` (prices), then `account.py` with `orders.py`, `actions.py`, `signer.py` and
`records.py` (live trading), and `closer.py`.
"""

from collections.abc import Mapping

from trader.live.budget import RequestBudget
from trader.live.gateway import credentials
from trader.live.hyperliquid.account import HyperliquidAccounts, order_signer
from trader.live.hyperliquid.api import ADDRESS as ADDRESS
from trader.live.hyperliquid.api import TESTNET as TESTNET
from trader.live.hyperliquid.api import HyperliquidApi
from trader.live.hyperliquid.closer import HyperliquidCloser
from trader.live.hyperliquid.signer import HyperliquidSigner
from trader.live.source import make_venue_source
from trader.live.venue import OrderSigner, VenueAccounts, VenueCloser
from trader.market.domain.markets import SimulatedMarket
from trader.market.sources.source import MarketSource
from trader.settings.forms import Secret
from trader.settings.settings import Settings


def make_source(
    settings: Settings, rows: Mapping[str, SimulatedMarket], budget: RequestBudget | None = None
) -> MarketSource:
    """Return the source of Hyperliquid's prices."""
    return make_venue_source(HyperliquidApi(settings.venue_url or ADDRESS, budget), settings, rows)


def make_accounts(settings: Settings) -> VenueAccounts:
    """Return the accounts at Hyperliquid. Raise `StartError` without VENUE_ACCOUNT_INDEX or VENUE_API_KEY."""
    return HyperliquidAccounts(settings)


def make_order_signer(settings: Settings) -> OrderSigner:
    """Return what signs the orders of shadow. Raise `StartError` without credentials or libraries."""
    account, key = credentials(settings)
    return order_signer(HyperliquidSigner(key, settings.venue_url == TESTNET), account)


def make_closer(url: str, account: str, key_index: int, key: Secret) -> VenueCloser:
    """Return what works on an account at Hyperliquid without the service. `key_index` means nothing here."""
    return HyperliquidCloser(HyperliquidSigner(key, url == TESTNET), url, account.lower())
