"""The protocol of a venue: what a package like `lighter/` provides so that models can trade there.

`VenuePackage` is the package itself: its market source and its accounts. A `VenueAccount` places and finds orders
(`OrderGateway`) and reads the venue's records (`AccountRecords`). The types are independent of the venue: orders and
fills come from `trader.exchange.domain.venue_orders`, outcomes, order states and funding from
`trader.live.domain.orders`, and reports from `trader.live.domain.reconciliation`. Start a new venue from
`tests/support/venue_template.py`, and register it in `venues.py`.

Every method that reads raises `MarketDataError` when the venue does not answer or its answer is invalid. Nothing is
guessed: an order whose answer was lost is `Unknown` until the venue shows it or can no longer execute it.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple, Protocol

from trader.exchange.domain.venue_orders import VenueFill, VenueOrder
from trader.live.budget import RequestBudget
from trader.live.domain.orders import SendOutcome, VenueFunding, VenueOrderState
from trader.live.domain.reconciliation import VenueReport
from trader.live.market import Listing
from trader.market.domain.markets import Market, SimulatedMarket
from trader.market.sources.source import MarketSource
from trader.settings.forms import Secret
from trader.settings.settings import Settings

Remember = Callable[[str], Awaitable[None]]
"""Records the venue's reference to a transaction."""


class OrderGateway(Protocol):
    """Places, finds and cancels the orders of one account.

    A client index, from 1 to `CLIENT_INDEX_MAX`, permanently names one order. The venue may accept it again: it is
    sent again only after an answer that proves it was not taken.
    """

    async def place(self, orders: Sequence[VenueOrder], market: Market, remember: Remember) -> SendOutcome:
        """Send an order, and in the same transaction the stop and target of its fills. Return the first one's outcome.

        Before anything is sent, `remember` records the venue's reference to the transaction. An order that opens is
        refused if the venue's lot or tick is no longer that of `market`, by which it was decided.

        :raises Unavailable: `remember` failed, and nothing was sent
        """
        ...

    async def resolve(self, order: VenueOrder, attempt: str, expires_at: datetime) -> SendOutcome:
        """Find out the outcome of an order whose answer was lost, without sending it again.

        The venue no longer executes the attempt after `expires_at` by its own clock; that of this machine may be wrong.
        """
        ...

    async def find_all(self, client_indexes: Collection[int]) -> Mapping[int, VenueOrderState]:
        """Return the present states by client index, omitting orders that the venue does not know."""
        ...

    async def opened_since(self, since: datetime) -> Collection[int]:
        """Return the client indexes of the orders that could open which were sent with our key since `since`."""
        ...

    async def cancel(self, symbol: str, client_index: int) -> SendOutcome:
        """Cancel an order, even one that the venue does not show.

        `Placed` has its final state, which may be filled; `Refused`: it does not rest, and its final state is unknown.
        """
        ...

    async def pause(self) -> None:
        """Wait, between two reads of the same state, as long as the venue takes to execute an order."""
        ...


class AccountRecords(Protocol):
    """Reads the venue's records of one account. Quantities are in base units, money in the quote currency."""

    async def report(self) -> VenueReport:
        """Return signed positions, standing orders, and the balance: money − Σ position × entry price."""
        ...

    @property
    def answered_at(self) -> datetime | None:
        """The venue's clock at its latest answer; None before one states it."""
        ...

    async def fee_rates(self) -> tuple[Decimal, Decimal]:
        """Return the account's taker and maker fees as fractions of the notional; negative for rebates."""
        ...

    async def fills_of(self, client_index: int, venue_index: int, filled: Decimal | None = None) -> Sequence[VenueFill]:
        """Return the fills of one order, oldest first, each trade once; the pushed ones if they sum up to `filled`."""
        ...

    async def fills_since(self, since: datetime) -> Sequence[VenueFill]:
        """Return every fill of the account since `since`, oldest first, including liquidations and manual trades."""
        ...

    async def fundings_since(self, since: datetime) -> Sequence[VenueFunding]:
        """Return the funding payments since `since`, one per market and whole hour."""
        ...


class AccountFeed:
    """What the venue pushes about one account: the methods that read return its rows without a request.

    `following` numbers the present subscription; 0 while something may be missing, and where the venue pushes nothing:
    then the account is read every few seconds. `listener` is told of any change.
    """

    following: int = 0
    listener: Callable[[], None] | None = None


class VenueAccount(Protocol):
    """One account at the venue."""

    @property
    def expires_s(self) -> float:
        """Seconds after which the venue certainly no longer executes a sent order."""
        ...

    @property
    def feed(self) -> AccountFeed: ...

    @property
    def orders(self) -> OrderGateway: ...

    @property
    def records(self) -> AccountRecords: ...


class VenueAccounts(Protocol):
    """The accounts at one venue, and the credentials for them."""

    @property
    def url(self) -> str:
        """The address that receives orders. The database records it: its books belong to one venue."""
        ...

    @property
    def budget(self) -> RequestBudget:
        """The budget from which every request is taken."""
        ...

    @property
    def default_account(self) -> str:
        """The default account of models whose rows name none."""
        ...

    @property
    def keys(self) -> dict[str, Secret]:
        """The keys of accounts whose models name their own; the others have VENUE_API_KEY."""
        ...

    def prove(self) -> None:
        """Verify, before anything is sent, that orders can be signed. Raise `StartError` when they cannot."""
        ...

    async def account(self, name: str) -> VenueAccount:
        """Return an account, ready to trade, once the venue has accepted its key.

        :raises MarketDataError: the venue does not answer
        :raises StartError: the venue does not know the key, or the service cannot trade an account of this kind
        """
        ...

    def halt(self) -> None:
        """Stop sending through the accounts returned so far: another process may now trade them."""
        ...

    async def close(self) -> None:
        """Halt, and close the connections."""
        ...


Steps = Sequence[tuple[str, Callable[[], Awaitable[str]]]]
"""The named steps of a rehearsal."""


class OrderSigner(NamedTuple):
    """Signs orders for an account. It has no means of sending them.

    `sign` returns the venue's reference to the transaction that would carry an order.
    """

    sign: Callable[[VenueOrder, Listing], str]
    close: Callable[[], Awaitable[None]]


class VenueCloser(Protocol):
    """Works on one account without the service: empties it, or rehearses with it."""

    answers: dict[str, str]
    payloads: dict[str, Any]

    async def prove(self) -> None:
        """Prove that the venue knows the key. Raise `StartError` if not, `MarketDataError` without an answer."""
        ...

    async def look(self, *, acts: bool = True) -> str | None:
        """Return None if the venue shows neither orders nor positions, else what it shows. Never raise.

        If it acts, it then cancels all orders, and closes each position by a reduce-only market order.
        """
        ...

    async def cancel_all_at(self, at: datetime | None) -> bool:
        """Schedule a cancellation of all orders at the venue, or call it off. Return whether the venue accepted."""
        ...

    def steps(self, symbol: str, child: Sequence[str], pause_s: float) -> Steps:
        """Return the steps of a rehearsal. Each returns what it saw; `answers` and `payloads` fill meanwhile.

        `child` are Python's arguments of a process that calls `send_and_wait` and is killed.
        """
        ...

    async def send_and_wait(self, symbol: str, client_index: int) -> None:
        """Send an order far from the market and wait to be killed."""
        ...

    async def close(self) -> None: ...


class VenuePackage(Protocol):
    """A venue: a package whose `__init__.py` has these functions, which connect to nothing.

    `ADDRESS` and `TESTNET` are the venue's own addresses.
    """

    ADDRESS: str
    TESTNET: str

    def make_source(
        self, settings: Settings, rows: Mapping[str, SimulatedMarket], budget: RequestBudget | None = None
    ) -> MarketSource:
        """Return the source of the venue's prices, which takes its requests from the budget of the accounts.

        `rows` holds the markets with known depth.
        """
        ...

    def make_accounts(self, settings: Settings) -> VenueAccounts:
        """Return the accounts of live trading. Raise `StartError` when credentials or libraries are missing."""
        ...

    def make_order_signer(self, settings: Settings) -> OrderSigner:
        """Return what signs the orders of shadow, proven without the venue. Raise `StartError` when it cannot sign.

        Shadow follows the venues whose source is a `VenueSource`.
        """
        ...

    def make_closer(self, url: str, account: str, key_index: int, key: Secret) -> VenueCloser:
        """Return what works on an account without the service. Raise `StartError`."""
        ...
