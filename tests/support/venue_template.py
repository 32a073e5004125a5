"""Template of a venue: copy this module to `live/<venue>/__init__.py` and replace every `NotImplementedError`.

`trader/live/venue.py` says what each method returns and when it raises; the docstrings here say what to decide for your
venue. Then:

1. add a row to `VENUES` in `live/venues.py`, and the name to the field `venue` in `settings/settings.py`;
2. add a field there for each credential that `VENUE_API_KEY`, `VENUE_API_KEY_INDEX` and `VENUE_ACCOUNT_INDEX` do not
   cover; add its figures to `market/presets.toml`, in a table with the venue's name: `MARKET_SOURCE=venue` uses the
   table's first preset;
3. protect the package in `pyproject.toml` as `trader.live.lighter` is: only `live/venues.py` imports it;
4. test it against a server that speaks its protocol and loses answers, as `tests/live/lighter` does.

Outbox, ledger, exits, protective orders, reconciliation and drift come with the protocol.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from decimal import Decimal

from trader.exchange.domain.venue_orders import VenueFill, VenueOrder
from trader.live.budget import RequestBudget
from trader.live.domain.orders import SendOutcome, VenueFunding, VenueOrderState
from trader.live.domain.reconciliation import VenueReport
from trader.live.gateway import credentials
from trader.live.venue import AccountFeed, OrderSigner, Remember, VenueAccounts, VenueCloser
from trader.market.domain.markets import Market, SimulatedMarket
from trader.market.sources.source import MarketSource
from trader.settings.forms import Secret
from trader.settings.settings import Settings

ADDRESS, TESTNET = "https://venue.example", "https://test.venue.example"


class TemplateOrders:
    """Convert prices and quantities to the venue's units here; refuse values that are not whole ticks or lots."""

    async def place(self, orders: Sequence[VenueOrder], market: Market, remember: Remember) -> SendOutcome:
        """Choose the order types: `limit` rests, `market` has a worst price, `stop` and `target` wait for a trigger.

        Send the stop and target as one group with their order, so that a fill is never without them.
        """
        raise NotImplementedError

    async def resolve(self, order: VenueOrder, attempt: str, expires_at: datetime) -> SendOutcome:
        """Decide by what the venue says about the attempt: a transaction's hash, or the venue's client order id.

        After its expiry by the venue's clock, look it up more than once where reads lag behind the matching engine.
        """
        raise NotImplementedError

    async def find_all(self, client_indexes: Collection[int]) -> Mapping[int, VenueOrderState]:
        """Use one request for all of them where the venue has one.

        Map its statuses to `is_final`; an unknown one is final only if the order can fill no more.
        """
        raise NotImplementedError

    async def opened_since(self, since: datetime) -> Collection[int]:
        """Name them all, or none where the venue does not say which key sent an order."""
        raise NotImplementedError

    async def cancel(self, symbol: str, client_index: int) -> SendOutcome:
        """Read the order after its cancellation: it may have filled first."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Sleep for the venue's usual delay, a few hundred milliseconds."""
        raise NotImplementedError


class TemplateRecords:
    """Check that every number is finite and, if required, positive. Raise `MarketDataError` otherwise."""

    answered_at: datetime | None = None
    """Take it from the header `Date`, or from what the venue writes into its answers."""

    async def report(self) -> VenueReport:
        """Take positions, orders and balance from the same moment, or read again: a difference stops the account."""
        raise NotImplementedError

    async def fee_rates(self) -> tuple[Decimal, Decimal]:
        """Convert basis points or millionths to fractions."""
        raise NotImplementedError

    async def fills_of(self, client_index: int, venue_index: int, filled: Decimal | None = None) -> Sequence[VenueFill]:
        """Read all pages, and drop trades that two pages repeat."""
        raise NotImplementedError

    async def fills_since(self, since: datetime) -> Sequence[VenueFill]:
        """Say the `cause` of those that none of our orders made, such as liquidations."""
        raise NotImplementedError

    async def fundings_since(self, since: datetime) -> Sequence[VenueFunding]:
        """Date each payment at the whole hour it covers, not at the time of its booking."""
        raise NotImplementedError


class TemplateAccount:
    """One account: its gateway and its records share a connection and a signer."""

    expires_s: float = 600.0

    def __init__(self) -> None:
        self.orders = TemplateOrders()
        self.records = TemplateRecords()
        self.feed = AccountFeed()  # pushes nothing


class TemplateAccounts:
    """Load the venue's SDK with the first account, so that paper trading needs none."""

    def __init__(self, settings: Settings) -> None:
        self.default_account, self.key = credentials(settings)
        self.url = settings.venue_url or ADDRESS
        self.keys: dict[str, Secret] = {}
        self.budget = RequestBudget(60, per_kind=40)

    def prove(self) -> None:
        """Sign a sample order, and compare every signed field with its input."""
        raise NotImplementedError

    async def account(self, name: str) -> TemplateAccount:
        """Keep one account per name: two would draw the same nonces."""
        raise NotImplementedError

    def halt(self) -> None:
        """Set a flag that every sending method reads, and forget the accounts."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close sessions and signers, even after a failed `prove`."""
        raise NotImplementedError


def make_source(
    settings: Settings, rows: Mapping[str, SimulatedMarket], budget: RequestBudget | None = None
) -> MarketSource:
    """Return a class with the members of `MarketSource`; its `identity` is `venue:<name>`."""
    raise NotImplementedError


def make_accounts(settings: Settings) -> VenueAccounts:
    """Return the accounts; nothing connects yet."""
    return TemplateAccounts(settings)


def make_order_signer(settings: Settings) -> OrderSigner:
    """Keep no means of sending, and ask the venue nothing: shadow gives it the listings of a `VenueSource`."""
    raise NotImplementedError


def make_closer(url: str, account: str, key_index: int, key: Secret) -> VenueCloser:
    """Use nothing that the service uses to decide: this must work when the service is what is broken."""
    raise NotImplementedError
