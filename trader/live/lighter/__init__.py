"""Lighter: public market data, and orders and records of the accounts that trade on it.

Read `api.py` (requests and their units), `stream.py` (prices), then
`account.py` with `orders.py`, `transactions.py`, `signer.py` and `records.py` (live trading),
and `closer.py` with `rehearsal.py`.
"""

from collections.abc import Mapping
from typing import Final

from trader.live.budget import RequestBudget
from trader.live.gateway import credentials
from trader.live.lighter.account import LighterAccounts, index_of, order_signer
from trader.live.lighter.api import ADDRESS as ADDRESS
from trader.live.lighter.api import TESTNET as TESTNET
from trader.live.lighter.api import LighterApi
from trader.live.lighter.rehearsal import LighterRehearsal
from trader.live.lighter.signer import LighterSigner
from trader.live.source import make_venue_source
from trader.live.venue import OrderSigner, VenueAccounts, VenueCloser
from trader.market.domain.markets import SimulatedMarket
from trader.market.sources.source import MarketSource
from trader.settings.forms import Secret
from trader.settings.settings import Settings

_WITHOUT_RESERVE: Final = 100
"""Prices without accounts need no reserve: reading may use all 60 requests a minute."""


def make_source(
    settings: Settings, rows: Mapping[str, SimulatedMarket], budget: RequestBudget | None = None
) -> MarketSource:
    """Return the source of Lighter's prices."""
    budget = budget or RequestBudget(_WITHOUT_RESERVE, per_kind=1)
    return make_venue_source(LighterApi(settings.venue_url or ADDRESS, budget), settings, rows)


def make_accounts(settings: Settings) -> VenueAccounts:
    """Return the accounts at Lighter. Raise `StartError` without VENUE_ACCOUNT_INDEX or VENUE_API_KEY."""
    return LighterAccounts(settings)


def make_order_signer(settings: Settings) -> OrderSigner:
    """Return what signs the orders of shadow. Raise `StartError` without credentials or the venue's SDK."""
    account, key = credentials(settings)
    return order_signer(
        LighterSigner(settings.venue_url or ADDRESS, index_of(account), settings.venue_api_key_index, key)
    )


def make_closer(url: str, account: str, key_index: int, key: Secret) -> VenueCloser:
    """Return what works on an account at Lighter without the service. Raise `StartError` without the venue's SDK."""
    return LighterRehearsal(LighterSigner(url, index_of(account), key_index, key), url)
